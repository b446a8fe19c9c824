//! A damaged object, as far as it can still be understood.

use std::io;
use std::path::Path;

use crate::hash::xxh3_64;
use crate::store::durable::{DeviceFile, Io};
use crate::store::object::{FOOTER_BYTES, Footer, HEADER_BYTES, Header, Index, ObjectWriter, Tile, path_of};
use crate::store::{Damage, Id, Store};

use super::bit_flip::mend;

/// An object's end is searched for in so many bytes before the file's end, in case bytes were appended to it.
const MOST_APPENDED: u64 = 1 << 20;
/// An index larger than this is not put right by trying.
const MOST_INDEX: u64 = 1 << 30;

/// The readable part of an object.
pub(super) enum Found {
    /// Its header and index, and some of its payloads.
    Object(Box<DamagedObject>),
    /// Only the header, with the hash of the decoded file.
    Header(Box<Header>),
    /// Nothing.
    Nothing,
}

/// An object with a sound header and index; its payloads may be damaged.
pub(super) struct DamagedObject {
    pub(super) header: Header,
    pub(super) index: Index,
    file: DeviceFile,
    /// Header, footer or index were put right, or it is longer than it should be: it must be written again.
    pub(super) rewrite: bool,
}

/// A piece of an object that has a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Part {
    /// The factors of a tensor.
    Factors(usize),
    /// A tile of a tensor.
    Tile(usize, usize),
    /// A chunk of the skeleton.
    Chunk(usize),
}

impl Part {
    /// Its entry in an index.
    pub(super) fn of(self, index: &Index) -> Option<&Tile> {
        match self {
            Part::Factors(tensor) => index.tensors.get(tensor)?.factors.as_ref(),
            Part::Tile(tensor, tile) => index.tensors.get(tensor)?.tiles.get(tile),
            Part::Chunk(chunk) => index.skeleton.get(chunk),
        }
    }
}

/// All parts of an object, in the order of its tensors.
pub(super) fn parts(index: &Index) -> Vec<Part> {
    let mut parts = Vec::new();
    for (number, tensor) in index.tensors.iter().enumerate() {
        parts.extend(tensor.factors.iter().map(|_| Part::Factors(number)));
        parts.extend((0..tensor.tiles.len()).map(|tile| Part::Tile(number, tile)));
    }
    parts.extend((0..index.skeleton.len()).map(Part::Chunk));
    parts
}

/// Opens a regular file that may be anything.
pub(super) fn open_plain(io: &Io, path: &Path) -> io::Result<DeviceFile> {
    let file = io.open_with(path, libc::O_NOFOLLOW | libc::O_NONBLOCK)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(Damage("it is no file").into()) }
}

/// Looks at the object with this name.
///
/// # Errors
/// The device's errors. A missing object is no error.
pub(super) fn find(store: &Store, id: Id) -> io::Result<Found> {
    let file = match open_plain(store.io(), &path_of(&store.objects(), id)) {
        Ok(file) => file,
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP)) => {
            return Ok(Found::Nothing);
        }
        Err(error) if error.kind() == io::ErrorKind::InvalidData => return Ok(Found::Nothing),
        Err(error) => return Err(error),
    };
    let len = file.metadata()?.len();
    let mut bytes = [0; HEADER_BYTES];
    if len < (HEADER_BYTES + FOOTER_BYTES) as u64 {
        return Ok(Found::Nothing);
    }
    file.read_exact_at(&mut bytes, 0)?;
    let header = |bytes: &[u8]| {
        let bytes: &[u8; HEADER_BYTES] = bytes.try_into().ok()?;
        Header::decode(bytes).ok().filter(|header| header.id == id)
    };
    let (mut rewrite, mut known) = (false, header(&bytes));
    if known.is_none() {
        known = mend(&bytes, 0..bytes.len(), &|bytes| header(bytes).is_some()).and_then(|bytes| header(&bytes));
        rewrite = true;
    }
    let Some(header) = known else { return Ok(Found::Nothing) };
    let Some((footer, at, mended)) = footer(&file, len, id)? else { return Ok(Found::Header(Box::new(header))) };
    rewrite |= mended;
    match index(&file, &header, &footer, at)? {
        Some((index, mended)) => {
            rewrite |= mended;
            Ok(Found::Object(Box::new(DamagedObject { header, index, file, rewrite })))
        }
        None => Ok(Found::Header(Box::new(header))),
    }
}

/// The footer, where it is, and whether it was put right or is not at the end.
fn footer(file: &DeviceFile, len: u64, id: Id) -> io::Result<Option<(Footer, u64, bool)>> {
    let decode = |bytes: &[u8]| {
        let bytes: &[u8; FOOTER_BYTES] = bytes.try_into().ok()?;
        Footer::decode(bytes).ok().filter(|footer| footer.id == id)
    };
    let end = len - FOOTER_BYTES as u64;
    let mut bytes = [0; FOOTER_BYTES];
    file.read_exact_at(&mut bytes, end)?;
    if let Some(footer) = decode(&bytes) {
        return Ok(Some((footer, end, false)));
    }
    let mended = mend(&bytes, 0..bytes.len(), &|bytes| decode(bytes).is_some());
    if let Some(footer) = mended.and_then(|bytes| decode(&bytes)) {
        return Ok(Some((footer, end, true)));
    }
    // Something was appended.
    let from = len.saturating_sub(MOST_APPENDED).max(HEADER_BYTES as u64);
    let mut tail = vec![0; (len - from) as usize];
    file.read_exact_at(&mut tail, from)?;
    let mut windows = tail.windows(FOOTER_BYTES).enumerate().rev();
    Ok(windows.find_map(|(at, bytes)| decode(bytes).map(|footer| (footer, from + at as u64, true))))
}

fn index(file: &DeviceFile, header: &Header, footer: &Footer, at: u64) -> io::Result<Option<(Index, bool)>> {
    let sound = footer.index_offset.checked_add(footer.index_stored) == Some(at)
        && footer.index_offset >= HEADER_BYTES as u64
        && footer.index_len.max(footer.index_stored) <= MOST_INDEX;
    if !sound {
        return Ok(None);
    }
    let mut stored = vec![0; footer.index_stored as usize];
    file.read_exact_at(&mut stored, footer.index_offset)?;
    let is_right = |bytes: &[u8]| xxh3_64(bytes) == footer.index_hash;
    let mut mended = false;
    if !is_right(&stored) {
        let Some(right) = mend(&stored, 0..stored.len(), &is_right) else { return Ok(None) };
        (stored, mended) = (right, true);
    }
    let Ok(bytes) = zstd::bulk::decompress(&stored, footer.index_len as usize) else { return Ok(None) };
    let index = Index::decode(&bytes, header.logical_len, footer.index_offset);
    Ok(index.ok().map(|index| (index, mended)))
}

impl DamagedObject {
    /// The payload of a part as the device returns it, and whether its checksum is right.
    pub(super) fn payload(&self, part: Part) -> io::Result<(Vec<u8>, bool)> {
        let tile = part.of(&self.index).ok_or(Damage("it has no such part"))?;
        let mut bytes = vec![0; tile.stored as usize];
        match self.file.read_exact_at(&mut bytes, tile.offset) {
            // A sector that cannot be read is as good as one that was overwritten.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => return Ok((bytes, false)),
            result => result?,
        }
        let is_right = xxh3_64(&bytes) as u32 == tile.payload_hash;
        Ok((bytes, is_right))
    }

    /// The parts whose payloads have wrong checksums.
    pub(super) fn damaged(&self) -> io::Result<Vec<Part>> {
        let all = parts(&self.index).into_iter().map(|part| Ok((part, self.payload(part)?.1)));
        let bad = all.filter(|found: &io::Result<_>| !matches!(found, Ok((_, true))));
        bad.map(|found| found.map(|(part, _)| part)).collect()
    }

    /// A payload with its one flipped bit put right.
    pub(super) fn mended(&self, part: Part) -> io::Result<Option<Vec<u8>>> {
        let (bytes, _) = self.payload(part)?;
        let Some(tile) = part.of(&self.index) else { return Ok(None) };
        // A checksum of 32 bits confirms one wrong bit only in a short payload. The 64-bit hash of the
        // decoded bytes decides.
        let is_right = |bytes: &[u8]| xxh3_64(bytes) as u32 == tile.payload_hash;
        let found = mend(&bytes, 0..bytes.len(), &is_right);
        Ok(found.filter(|payload| match part {
            Part::Chunk(_) => zstd::bulk::decompress(payload, crate::codec::TILE_BYTES)
                .is_ok_and(|bytes| xxh3_64(&bytes) == tile.decoded_hash),
            Part::Factors(_) => xxh3_64(payload) == tile.decoded_hash,
            Part::Tile(..) => true,
        }))
    }

    /// Writes the object again, with a correct header, footer and index, and with these payloads in place of the
    /// damaged ones.
    pub(super) fn write_again(
        &self,
        store: &Store,
        replaced: &std::collections::HashMap<Part, Vec<u8>>,
    ) -> io::Result<()> {
        let id = self.header.id;
        let objects = store.objects();
        let mut writer = ObjectWriter::repair_on(store.io(), &store.tmp(), id)?;
        let mut index = self.index.clone();
        for part in parts(&self.index) {
            let tile = *part.of(&self.index).ok_or(Damage("it has no such part"))?;
            let own = match replaced.get(&part) {
                Some(payload) => payload.clone(),
                None => self.payload(part)?.0,
            };
            let mut written = writer.put(&own, tile.decoded_hash)?;
            // A part that is still damaged must still look damaged.
            written.payload_hash = tile.payload_hash;
            match part {
                Part::Factors(tensor) => index.tensors[tensor].factors = Some(written),
                Part::Tile(tensor, number) => index.tensors[tensor].tiles[number] = written,
                Part::Chunk(chunk) => index.skeleton[chunk] = written,
            }
        }
        writer.close(&index)?;
        let header = self.header.clone();
        // Read back from the device: only an object that can be opened replaces another file.
        drop(writer.reopen(header.clone())?);
        super::set_aside(store, &path_of(&objects, id))?;
        writer.finish(&header, &objects)
    }
}

/// The id in the header of the file at `path`, if it is an object without any damage.
pub(super) fn id_of(io: &Io, path: &Path) -> Option<Id> {
    let file = open_plain(io, path).ok()?;
    let mut bytes = [0; HEADER_BYTES];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let header = Header::decode(&bytes).ok()?;
    let (footer, at, false) = footer(&file, file.metadata().ok()?.len(), header.id).ok()?? else { return None };
    let (index, false) = index(&file, &header, &footer, at).ok()?? else { return None };
    let id = header.id;
    let object = DamagedObject { header, index, file, rewrite: false };
    object.damaged().ok()?.is_empty().then_some(id)
}
