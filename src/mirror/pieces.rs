//! Bytes on a mirror: cut into pieces, each packed, under the hash of its packed bytes.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

use super::place::{Error, Place, Result};
use crate::store::{Id, in_parallel};
use codec::hash::{Sha256, sha256};

/// Bytes of a piece before it is packed. A request costs as much time as some 100 KB, a failed one is repeated whole, and
/// sixteen are under way at once. A piece that does not compress is a little longer when it is packed. radosgw keeps up to
/// 4 MiB in one object of its own, and more in two.
pub(super) const PIECE: u64 = (4 << 20) - (4 << 10);
/// zstd level: objects and floating-point numbers hardly compress, and training needs the processor.
const LEVEL: i32 = 1;
/// Bytes that are unpacked at once: they stay in the processor's cache until they are written.
const UNPACKED: usize = 1 << 19;
/// Where all pieces are.
pub(super) const BLOBS: &str = "blobs/";

/// The packed bytes of a piece, and their hash: the beginning of their SHA-256. Nobody finds two contents of one beginning by
/// chance.
pub(super) type Packed = (Id, Vec<u8>);

/// Packs a piece.
pub(super) fn pack(piece: &[u8]) -> io::Result<Packed> {
    let mut packer = zstd::bulk::Compressor::new(LEVEL)?;
    // Without it a reader needs room for half a megabyte, and not for the whole piece.
    packer.include_contentsize(false)?;
    let packed = packer.compress(piece)?;
    Ok((short(sha256(&packed)), packed))
}

fn short(digest: [u8; 32]) -> Id {
    Id(std::array::from_fn(|at| digest[at]))
}

/// The name of a packed piece.
pub(super) fn name(hash: Id) -> String {
    let hash = hash.to_string();
    format!("{BLOBS}{}/{hash}", &hash[..2])
}

/// Passes the `len` bytes of a piece to `each`, in order. They are verified once this has succeeded, and not before.
fn read(place: &dyn Place, hash: Id, len: u64, each: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let name = name(hash);
    let damaged = || Error::Wrong(format!("{name} is damaged: its bytes are not what its name says"));
    let (mut packed, mut decoder, mut rest, mut unpacked) =
        (Sha256::default(), Decoder::new()?, len, vec![0; UNPACKED]);
    // No piece needs more memory.
    decoder.set_parameter(DParameter::WindowLogMax(PIECE.ilog2()))?;
    // One byte more: a longer name is damaged, too.
    place.read(&name, zstd::zstd_safe::compress_bound(len as usize) as u64 + 1, &mut |bytes| {
        packed.update(bytes);
        let mut from = InBuffer::around(bytes);
        loop {
            let mut to = OutBuffer::around(&mut unpacked[..]);
            decoder.run(&mut from, &mut to).map_err(|_| damaged())?;
            let count = to.pos();
            rest = rest.checked_sub(count as u64).ok_or_else(damaged)?;
            each(&unpacked[..count])?;
            if from.pos() == bytes.len() && count < UNPACKED {
                return Ok(());
            }
        }
    })?;
    if rest == 0 && short(packed.digest()) == hash { Ok(()) } else { Err(damaged()) }
}

/// The bytes of a piece, verified.
pub(super) fn get(place: &dyn Place, hash: Id, len: u64) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    read(place, hash, len, &mut |bytes| Ok(all.write_all(bytes)?))?;
    Ok(all)
}

/// The bytes of a file, an object or a directory, cut into pieces. All pieces but the last have one length.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Bytes {
    /// How many.
    pub len: u64,
    /// The hashes of the pieces.
    pub pieces: Vec<Id>,
}

impl Bytes {
    /// Packs bytes.
    pub(super) fn pack(bytes: &[u8]) -> io::Result<(Bytes, Vec<Packed>)> {
        let packed = bytes.chunks(PIECE as usize).map(pack).collect::<io::Result<Vec<_>>>()?;
        Ok((Bytes { len: bytes.len() as u64, pieces: packed.iter().map(|(hash, _)| *hash).collect() }, packed))
    }

    /// Whether all pieces are there.
    pub(super) fn are(&self, is_there: &dyn Fn(&Id) -> bool) -> bool {
        self.pieces.iter().all(is_there)
    }

    /// Does something with all pieces, side by side: with a hash, and the offset and length of the bytes.
    pub(super) fn each<T: Send>(&self, of: impl Fn(Id, u64, u64) -> Result<T> + Sync) -> Result<Vec<T>> {
        if self.pieces.len() as u64 != self.len.div_ceil(PIECE) {
            return Err(Error::Wrong("it has other pieces than its length says".into()));
        }
        let pieces: Vec<_> = (0..self.len).step_by(PIECE as usize).zip(&self.pieces).collect();
        in_parallel(&pieces, |(at, hash)| of(**hash, *at, PIECE.min(self.len - at))).into_iter().collect()
    }

    /// Passes all bytes to `put`, each with its offset. They are verified once this has succeeded, and not before.
    ///
    /// # Errors
    /// [`Error::Wrong`] for bytes that are not what their name says; those of the mirror and of `put`.
    pub(super) fn read(&self, place: &dyn Place, put: &(dyn Fn(&[u8], u64) -> Result<()> + Sync)) -> Result<()> {
        let put = |hash, mut at, len| {
            read(place, hash, len, &mut |bytes| {
                put(bytes, at)?;
                at += bytes.len() as u64;
                Ok(())
            })
        };
        self.each(put).map(drop)
    }

    /// All bytes, verified.
    ///
    /// # Errors
    /// [`Error::Wrong`] for bytes that are not what their name says; those of the mirror.
    pub(super) fn get(&self, place: &dyn Place) -> Result<Vec<u8>> {
        Ok(self.each(|hash, _, len| get(place, hash, len))?.concat())
    }
}
