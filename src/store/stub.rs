//! The stub that replaces a released file in the tree (docs/FORMAT.md, "Stub"). It has one block that names the object
//! with the bytes, then a hole up to the logical size.

use std::fs::File;
use std::io;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::durable::{CrashPoint, DeviceFile};
use super::marks;
use super::object::Id;
use super::{Damage, record};
use formats::ReadAt;

/// Length of the block: one page, so that the rest of the file can be a hole.
pub const STUB_BYTES: usize = 4096;
/// Smaller files stay resident: a stub and an object would save nothing. One block of 4 KiB is 6% of it.
pub const MIN_RELEASE_BYTES: u64 = 64 * 1024;

const MAGIC: &[u8; 8] = b"stepfsST";
/// The object's id in a block, behind the store's.
const OBJECT: Range<usize> = record::FIELDS + 16..record::FIELDS + 32;
/// For people who look into the store without stepfs.
const WORDS: &str = "\nThis file was released by stepfs: its bytes are in the store's objects/.\n\
    Read it through `stepfs mount`, or get it back with `stepfs export`.\n";

/// The content of a stub.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
        record::encode_in(MAGIC, &(self, WORDS))
    }

    /// Parses a stub's block; `None` for any other block.
    ///
    /// # Errors
    /// [`Damage`] if the block has only parts of a stub.
    pub fn decode(block: &[u8; STUB_BYTES]) -> Result<Option<Stub>, Damage> {
        // Behind the fields, which end here at the latest.
        let has_words =
            || block[OBJECT.end..OBJECT.end + 12 + WORDS.len()].windows(WORDS.len()).any(|at| at == WORDS.as_bytes());
        if !block.starts_with(MAGIC) && !has_words() {
            return Ok(None);
        }
        match record::decode_in::<(Stub, String), STUB_BYTES>(MAGIC, block) {
            Ok((stub, _)) => Ok(Some(stub)),
            Err(record::OTHER_FORMAT) => Err(record::OTHER_FORMAT),
            Err(_) => Err(Damage("it is a damaged stub")),
        }
    }

    /// Whether a damaged block has the object's id or the checksum of this stub.
    pub fn resembles(&self, damaged: &[u8; STUB_BYTES]) -> bool {
        let block = self.encode();
        [OBJECT, STUB_BYTES - 8..STUB_BYTES].into_iter().any(|part| block[part.clone()] == damaged[part])
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

    /// The same, on a file system that has such marks.
    ///
    /// # Errors
    /// Device errors.
    pub fn disown_if_possible(file: &DeviceFile, at: CrashPoint) -> io::Result<()> {
        Stub::disown(file, at).or_else(|error| match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) => Ok(()),
            _ => Err(error),
        })
    }
}

#[cfg(test)]
mod tests;
