//! Reads an object.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::{FOOTER_BYTES, Footer, HEADER_BYTES, Header, Id, Index, Tile};
use crate::store::Damage;
use crate::store::durable::{DeviceFile, Io};
use codec::hash::xxh3_64;
use codec::log::Factors;
use formats::ReadAt;

/// Limit on an index. It is read as a whole, and a crafted one can be compressed to a thousandth. 10,000 tensors of 100
/// tiles take 14 MB; the header of a safetensors file has at most 100 MB.
const MAX_INDEX_BYTES: u64 = 1 << 28;

/// Path of an object in the directory `objects`.
pub fn path_of(objects: &Path, id: Id) -> PathBuf {
    let name = id.to_string();
    objects.join(&name[..2]).join(name)
}

/// Bytes of an object: a file of the store, or one without a name.
struct Bytes(Box<dyn ReadAt + Send + Sync>);

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.size())
    }
}

/// An open object. It stays readable when its name is removed.
#[derive(Debug)]
pub struct Object {
    bytes: Bytes,
    header: Header,
    index: Index,
    /// Bytes that the file occupies on its device.
    stored: u64,
    /// Device and inode number.
    place: (u64, u64),
    /// Factors of tensors that were requested so far. The lock is held only to look up or add one; decoding happens
    /// without it.
    factors: Mutex<HashMap<usize, Arc<Factors>>>,
}

impl Object {
    /// Reads only the header of an object, and the space it occupies.
    pub fn header_of(io: &Io, objects: &Path, id: Id) -> io::Result<(Header, u64)> {
        let file = open_by_id(io, objects, id)?;
        let header = read_header(&file, id)?;
        Ok((header, file.metadata()?.blocks() * 512))
    }

    /// Opens the object with this id.
    pub fn open(objects: &Path, id: Id) -> io::Result<Object> {
        Object::open_on(&Io::disk(), objects, id)
    }

    /// [`Object::open`] from another device than the disk.
    pub fn open_on(io: &Io, objects: &Path, id: Id) -> io::Result<Object> {
        let file = open_by_id(io, objects, id)?;
        let header = read_header(&file, id)?;
        Object::with_header(file, header)
    }

    pub(super) fn with_header(file: DeviceFile, header: Header) -> io::Result<Object> {
        let metadata = file.metadata()?;
        let place = (metadata.dev(), metadata.ino());
        Object::parse(Box::new(file), header, metadata.blocks() * 512, place)
    }

    /// Opens the object with this id that is not a file of a store. It has no name there.
    ///
    /// # Errors
    /// As of [`Object::open`], and those of `bytes`.
    pub fn of_bytes(bytes: Box<dyn ReadAt + Send + Sync>, id: Id) -> io::Result<Object> {
        let (header, stored) = (read_header(bytes.as_ref(), id)?, bytes.size());
        Object::parse(bytes, header, stored, (0, 0))
    }

    fn parse(
        file: Box<dyn ReadAt + Send + Sync>,
        header: Header,
        stored: u64,
        place: (u64, u64),
    ) -> io::Result<Object> {
        let Some(footer_at) = file.size().checked_sub(FOOTER_BYTES as u64) else {
            return Err(Damage("it is cut short").into());
        };
        let mut bytes = [0; FOOTER_BYTES];
        file.read_exact_at(&mut bytes, footer_at)?;
        let footer = Footer::decode(&bytes)?;
        if footer.id != header.id {
            return Err(Damage("its end belongs to another object").into());
        }
        if footer.index_offset.checked_add(footer.index_stored) != Some(footer_at)
            || footer.index_offset < HEADER_BYTES as u64
            || footer.index_len.max(footer.index_stored) > MAX_INDEX_BYTES
        {
            return Err(Damage("its index is in the wrong place").into());
        }
        let mut packed = vec![0; footer.index_stored as usize];
        file.read_exact_at(&mut packed, footer.index_offset)?;
        if xxh3_64(&packed) != footer.index_hash {
            return Err(Damage("its index's checksum does not match").into());
        }
        let bytes = zstd::bulk::decompress(&packed, footer.index_len as usize)
            .ok()
            .filter(|bytes| bytes.len() as u64 == footer.index_len)
            .ok_or(Damage("its index does not decompress"))?;
        let index = Index::decode(&bytes, header.logical_len, footer.index_offset)?;
        Ok(Object { bytes: Bytes(file), header, index, stored, place, factors: Mutex::default() })
    }

    /// True if `objects` has this file under the object's name. False if the object was removed or replaced since.
    pub fn has_its_name(&self, objects: &Path) -> bool {
        let metadata = std::fs::symlink_metadata(path_of(objects, self.header.id));
        metadata.is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.place)
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// True if later states may be differences to it: a keyframe, and every eighth state after it.
    pub fn is_super_step(&self) -> bool {
        self.header.is_super_step()
    }

    /// The object's file, for a copy of all its bytes.
    pub fn file(&self) -> &(dyn ReadAt + Send + Sync) {
        self.bytes.0.as_ref()
    }

    /// The index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Bytes that the object occupies on its device.
    pub fn stored(&self) -> u64 {
        self.stored
    }

    /// The factors of tensor `tensor`, a logarithmic lattice with its own factors. They take a few bytes per row and
    /// column.
    ///
    /// # Errors
    /// `InvalidData` with a [`Damage`] if they are missing or damaged.
    pub fn factors(&self, tensor: usize) -> io::Result<Arc<Factors>> {
        let known = || self.factors.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(factors) = known().get(&tensor) {
            return Ok(Arc::clone(factors));
        }
        let entry = self.index.tensors.get(tensor).ok_or(Damage("it has no such tensor"))?;
        let mut payload = Vec::new();
        self.payload(entry.factors.as_ref().ok_or(Damage("a tensor's factors are missing"))?, &mut payload)?;
        let (rows, width) = entry.rows_and_width();
        let factors = Arc::new(Factors::decode(&payload, rows, width)?);
        Ok(Arc::clone(known().entry(tensor).or_insert(factors)))
    }

    /// Reads a tile's payload into `buf` and checks it.
    ///
    /// # Errors
    /// `InvalidData` with a [`Damage`] if a byte was changed.
    pub fn payload(&self, tile: &Tile, buf: &mut Vec<u8>) -> io::Result<()> {
        buf.resize(tile.stored as usize, 0);
        self.bytes.0.read_exact_at(buf, tile.offset)?;
        match xxh3_64(buf) as u32 == tile.payload_hash {
            true => Ok(()),
            false => Err(Damage("a tile's checksum does not match").into()),
        }
    }
}

/// Never follows symlinks; never blocks on a FIFO.
fn open_by_id(io: &Io, objects: &Path, id: Id) -> io::Result<DeviceFile> {
    let name = id.to_string();
    io.open_beneath(objects, &Path::new(&name[..2]).join(&name), 0).map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP | libc::ENOTDIR) => Damage("a symlink is in its place").into(),
        _ if error.kind() == io::ErrorKind::InvalidInput => Damage("it is no regular file").into(),
        _ => error,
    })
}

fn read_header(file: &dyn ReadAt, id: Id) -> io::Result<Header> {
    let mut bytes = [0; HEADER_BYTES];
    file.read_exact_at(&mut bytes, 0).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => Damage("it is cut short").into(),
        _ => error,
    })?;
    let header = Header::decode(&bytes)?;
    match header.id == id {
        true => Ok(header),
        false => Err(Damage("it is another object under this name").into()),
    }
}
