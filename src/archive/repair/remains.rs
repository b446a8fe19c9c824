//! A file that should hold an object, as far as it can be read.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::store::Damage;
use crate::store::durable::{DeviceFile, Io};
use crate::store::object::{FOOTER_BYTES, Footer, HEADER_BYTES, Header, Id, Index, Object, Tile};
use formats::ReadAt;

use super::is_damage;

/// An object's end is searched for in so many bytes before the file's end, in case bytes were appended to it.
const MOST_APPENDED: u64 = 1 << 20;

/// A piece of an object that has a payload, and bytes of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// A tile of a tensor.
    Tile(usize, usize),
    /// A chunk of the skeleton.
    Chunk(usize),
}

impl Part {
    /// Its entry in an index.
    pub(super) fn of(self, index: &Index) -> Option<&Tile> {
        match self {
            Part::Tile(tensor, tile) => index.tensors.get(tensor)?.tiles.get(tile),
            Part::Chunk(chunk) => index.skeleton.get(chunk),
        }
    }

    fn of_tensor(index: &Index, tensor: usize) -> impl Iterator<Item = Part> {
        (0..index.tensors[tensor].tiles.len()).map(move |tile| Part::Tile(tensor, tile))
    }

    /// All parts of an object, in the order of its tensors.
    pub(super) fn all(index: &Index) -> impl Iterator<Item = Part> {
        let tiles = (0..index.tensors.len()).flat_map(|tensor| Part::of_tensor(index, tensor));
        tiles.chain((0..index.skeleton.len()).map(Part::Chunk))
    }
}

/// The readable parts of an object.
#[derive(Debug, Default)]
pub(super) struct Remains {
    header: Option<Header>,
    object: Option<Arc<Object>>,
    lost: BTreeSet<Part>,
    is_longer: bool,
}

impl Remains {
    /// Of the file at this path. Nothing is left of a missing one.
    ///
    /// # Errors
    /// The device's errors. A sector that cannot be read is as good as one that was overwritten.
    pub(super) fn at(io: &Io, path: &Path) -> io::Result<Remains> {
        let mut remains = Remains::default();
        match open_plain(io, path).and_then(|file| remains.read(file)) {
            Err(error) if !is_damage(&error) => Err(error),
            _ => Ok(remains),
        }
    }

    fn read(&mut self, file: DeviceFile) -> io::Result<()> {
        let id = self.header.insert(read_header(&file)?).id;
        let end = end_of(&file, id)?;
        self.is_longer = end < file.size();
        let object = Object::of_bytes(Box::new(Start { file, end }), id)?;
        let index = object.index();
        let mut payload = Vec::new();
        let mut is_readable = |tile: &Tile| match object.payload(tile, &mut payload) {
            Err(error) if !is_damage(&error) => Err(error),
            result => Ok(result.is_ok()),
        };
        for part in Part::all(index) {
            if let Some(tile) = part.of(index)
                && !is_readable(tile)?
            {
                self.lost.insert(part);
            }
        }
        for (tensor, entry) in index.tensors.iter().enumerate() {
            // No tile of the tensor can be decoded without its factors.
            if let Some(factors) = &entry.factors
                && !is_readable(factors)?
            {
                self.lost.extend(Part::of_tensor(index, tensor));
            }
        }
        self.object = Some(Arc::new(object));
        Ok(())
    }

    /// The same, if it is this object, and nothing if another one lies there.
    pub(super) fn of_object(self, id: Id) -> Remains {
        if self.header.as_ref().is_some_and(|header| header.id == id) { self } else { Remains::default() }
    }

    /// The hashes of the decoded bytes that are lost.
    pub(super) fn lost_hashes(&self) -> impl Iterator<Item = u64> {
        let index = self.object.as_ref().map(|object| object.index());
        let lost = self.lost.iter().filter_map(move |part| part.of(index?));
        lost.map(|tile| tile.decoded_hash)
    }

    /// Its header, with the hash of the decoded file.
    pub(super) fn header(&self) -> Option<&Header> {
        self.header.as_ref()
    }

    /// The object with this header, if its index can be read.
    pub(super) fn object(&self) -> Option<&Arc<Object>> {
        self.object.as_ref()
    }

    /// The parts of the object that cannot be read.
    pub(super) fn lost(&self) -> &BTreeSet<Part> {
        &self.lost
    }

    /// True if other bytes follow the object.
    pub(super) fn is_longer(&self) -> bool {
        self.is_longer
    }

    /// True if it is the object with this id, and nothing of it is lost.
    pub(super) fn is_whole(&self, id: Id) -> bool {
        let is_it = |object: &Arc<Object>| object.header().id == id;
        self.object.as_ref().is_some_and(is_it) && self.lost.is_empty() && !self.is_longer
    }
}

/// A file up to an end.
struct Start {
    file: DeviceFile,
    end: u64,
}

impl ReadAt for Start {
    fn size(&self) -> u64 {
        self.end
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }
}

/// Opens a regular file that may be anything.
pub(super) fn open_plain(io: &Io, path: &Path) -> io::Result<DeviceFile> {
    let file = io.open_with(path, libc::O_NOFOLLOW | libc::O_NONBLOCK)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(Damage("it is no file").into()) }
}

/// The header of an object, under whatever name.
pub(super) fn read_header(bytes: &dyn ReadAt) -> io::Result<Header> {
    let mut header = [0; HEADER_BYTES];
    bytes.read_exact_at(&mut header, 0)?;
    Ok(Header::decode(&header)?)
}

/// Where the object with this id ends.
fn end_of(bytes: &dyn ReadAt, id: Id) -> io::Result<u64> {
    for reach in [FOOTER_BYTES as u64, MOST_APPENDED] {
        let from = bytes.size().saturating_sub(reach).max(HEADER_BYTES as u64);
        let mut tail = vec![0; bytes.size().saturating_sub(from) as usize];
        bytes.read_exact_at(&mut tail, from)?;
        let is_end = |at: &usize| {
            let footer = tail[*at..].first_chunk().and_then(|bytes| Footer::decode(bytes).ok());
            let ends_at = footer
                .filter(|footer| footer.id == id)
                .map(|footer| footer.index_offset.saturating_add(footer.index_stored));
            ends_at == Some(from + *at as u64)
        };
        if let Some(at) = (0..tail.len()).rev().find(is_end) {
            return Ok(from + (at + FOOTER_BYTES) as u64);
        }
    }
    Err(Damage("its end is missing or damaged").into())
}
