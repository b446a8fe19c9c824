//! The stub that replaces a released file in the tree (docs/FORMAT.md, "Stub"). It has one block that names the object
//! with the bytes, then a hole up to the logical size.

use std::fs::File;
use std::io;

use super::Damage;
use super::bytes::Fields;
use super::durable::{CrashPoint, DeviceFile};
use super::marks;
use super::object::Id;
use crate::container::ReadAt;
use crate::hash::xxh3_64;

/// Length of the block: one page, so that the rest of the file can be a hole.
pub const STUB_BYTES: usize = 4096;
/// Smaller files stay resident: a stub and an object would save nothing. One block of 4 KiB is 6% of it.
pub const MIN_RELEASE_BYTES: u64 = 64 * 1024;

const MAGIC: [u8; 8] = *b"stepfsST";
const VERSION: u32 = 1;
/// For people who look into the store without stepfs.
const WORDS: &[u8] = b"\nThis file was released by stepfs: its bytes are in the store's objects/.\n\
    Read it through `stepfs mount`, or get it back with `stepfs export`.\n";

/// The content of a stub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stub {
    /// The store it belongs to: a stub of another store is an ordinary file.
    pub store: Id,
    /// The object that holds the file's bytes.
    pub object: Id,
    /// Length of the file that readers see, bytes.
    pub logical_len: u64,
}

impl Stub {
    /// The stub's block.
    pub fn encode(&self) -> [u8; STUB_BYTES] {
        let mut block = [0; STUB_BYTES];
        block[..8].copy_from_slice(&MAGIC);
        block[8..12].copy_from_slice(&VERSION.to_le_bytes());
        block[16..32].copy_from_slice(&self.store.0);
        block[32..48].copy_from_slice(&self.object.0);
        block[48..56].copy_from_slice(&self.logical_len.to_le_bytes());
        block[56..56 + WORDS.len()].copy_from_slice(WORDS);
        let sum = xxh3_64(&block[..STUB_BYTES - 8]);
        block[STUB_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
        block
    }

    /// Parses a stub's block; `None` for any other block.
    ///
    /// # Errors
    /// [`Damage`] if the block has only parts of a stub.
    pub fn decode(block: &[u8; STUB_BYTES]) -> Result<Option<Stub>, Damage> {
        let (body, sum) = block.split_at(STUB_BYTES - 8);
        let magic = body[..8] == MAGIC;
        let words = body[56..56 + WORDS.len()] == *WORDS;
        if !magic && !words {
            return Ok(None);
        }
        if !magic || Fields::new(sum).u64()? != xxh3_64(body) {
            return Err(Damage("it is a damaged stub"));
        }
        let mut fields = Fields::new(&body[8..]);
        if fields.u32()? != VERSION {
            return Err(Damage("it is a stub of a newer version of stepfs"));
        }
        fields.u32()?;
        Ok(Some(Stub {
            store: Id(fields.u128()?.to_le_bytes()),
            object: Id(fields.u128()?.to_le_bytes()),
            logical_len: fields.u64()?,
        }))
    }

    /// Writes the stub and its hole into an empty file. Not durable before the file is synced.
    pub fn write(&self, file: &DeviceFile) -> io::Result<()> {
        file.write_all_at(&self.encode(), 0, CrashPoint::StubWritten)?;
        file.set_len(self.logical_len, CrashPoint::StubWritten)
    }

    /// The stub in a regular file of the store with this id, or `None`. Reads one block, and only from files that are
    /// large enough.
    ///
    /// # Errors
    /// `InvalidData` with a [`Damage`]: serving the block as a checkpoint would be worse.
    pub fn read(file: &File, store: Id) -> io::Result<Option<Stub>> {
        Stub::read_of(file, file, store)
    }

    /// [`Stub::read`] of a file that was opened through its device.
    pub fn read_on(file: &DeviceFile, store: Id) -> io::Result<Option<Stub>> {
        Stub::read_of(file, file.as_file(), store)
    }

    /// The stub of another store in a regular file. It is an ordinary file, unless this store's settings have a wrong
    /// id.
    pub fn foreign(file: &DeviceFile, store: Id) -> io::Result<Option<Stub>> {
        let len = file.metadata()?.len();
        let stub = Stub::decoded(file, file.as_file(), len)?;
        Ok(stub.filter(|stub| stub.store != store && stub.logical_len == len))
    }

    fn read_of(file: &dyn ReadAt, known: &File, store: Id) -> io::Result<Option<Stub>> {
        let len = known.metadata()?.len();
        match Stub::decoded(file, known, len)?.filter(|stub| stub.store == store) {
            Some(stub) if stub.logical_len != len => Err(Damage("it is a stub of another length").into()),
            stub => Ok(stub),
        }
    }

    /// The stub of any store.
    pub(super) fn of_any(file: &File) -> io::Result<Option<Stub>> {
        Stub::decoded(file, file, file.metadata()?.len())
    }

    fn decoded(file: &dyn ReadAt, known: &File, len: u64) -> io::Result<Option<Stub>> {
        if len < MIN_RELEASE_BYTES {
            return Ok(None);
        }
        let mut block = [0; STUB_BYTES];
        file.read_exact_at(&mut block, 0)?;
        let decoded = Stub::decode(&block);
        if decoded != Ok(None) && marks::is_plain(known) {
            return Ok(None);
        }
        Ok(decoded?)
    }

    /// Whether a file has a stub's bytes, of any store, without the mark of a program's bytes.
    ///
    /// # Errors
    /// Device errors.
    pub fn looks_like_one(file: &DeviceFile) -> io::Result<bool> {
        match Stub::decoded(file, file.as_file(), file.metadata()?.len()) {
            Err(error) if error.kind() != io::ErrorKind::InvalidData => Err(error),
            stub => Ok(!matches!(stub, Ok(None))),
        }
    }

    /// Marks a program's bytes so that they are never taken for a stub of any store. Otherwise the next mount could
    /// only judge by the bytes. Call it before the file is made durable.
    ///
    /// # Errors
    /// `EOPNOTSUPP` on a file system without xattrs; device errors.
    pub fn disown(file: &DeviceFile, at: CrashPoint) -> io::Result<()> {
        if Stub::looks_like_one(file)? { marks::mark_plain(file, at) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;
