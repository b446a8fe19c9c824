//! Random access for byte slices and files.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::ReadAt;

impl ReadAt for [u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).ok();
        let range = start.and_then(|s| Some(s..s.checked_add(buf.len())?));
        match range.and_then(|r| self.get(r)) {
            Some(bytes) => {
                buf.copy_from_slice(bytes);
                Ok(())
            }
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl ReadAt for Vec<u8> {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.as_slice().read_exact_at(buf, offset)
    }
}

impl<T: ReadAt + ?Sized> ReadAt for &T {
    fn size(&self) -> u64 {
        (**self).size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        (**self).read_exact_at(buf, offset)
    }
}

/// `pread`; the file's own position is neither used nor moved. The size is asked of the kernel at each call, and is
/// 0 if it cannot say.
impl ReadAt for File {
    fn size(&self) -> u64 {
        self.metadata().map_or(0, |m| m.len())
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buf, offset)
    }
}

/// Why a container could not be described.
#[derive(Debug)]
pub(super) enum Fail {
    /// The source failed: the caller's business.
    Io(io::Error),
    /// The bytes violate the format: the file is opaque, for this reason.
    Bad(String),
    /// The bytes end before the format says: the same, and the writer may have died.
    CutShort(String),
}

impl From<&str> for Fail {
    fn from(why: &str) -> Self {
        Fail::Bad(why.into())
    }
}

impl From<io::Error> for Fail {
    fn from(e: io::Error) -> Self {
        Fail::Io(e)
    }
}

impl From<Fail> for io::Error {
    fn from(fail: Fail) -> Self {
        match fail {
            Fail::Io(error) => error,
            Fail::Bad(why) | Fail::CutShort(why) => io::Error::new(io::ErrorKind::InvalidData, why),
        }
    }
}

/// A refusal with its reason in plain words.
pub(super) fn bad<T>(why: impl Into<String>) -> Result<T, Fail> {
    Err(Fail::Bad(why.into()))
}

/// Refuses a file for which this holds.
pub(super) fn refuse_if(is: bool, why: &str) -> Result<(), Fail> {
    if is { bad(why) } else { Ok(()) }
}

/// The refusal of a file that ends too early, with its reason in plain words.
pub(super) fn cut_short<T>(why: impl Into<String>) -> Result<T, Fail> {
    Err(Fail::CutShort(why.into()))
}

/// What a reader has found; `None` where the bytes violate the format.
pub(super) fn unless_bad<T>(found: Result<T, Fail>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(Fail::Bad(_) | Fail::CutShort(_)) => Ok(None),
        Err(Fail::Io(error)) => Err(error),
    }
}

/// A note on what was left out, in words for each number that is not 0.
pub(super) fn left_out(format: &str, odd: &[(u64, &str)]) -> Option<String> {
    let odd: Vec<String> = odd.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
    (!odd.is_empty()).then(|| format!("{format}: {}", odd.join(", ")))
}

/// The first bytes of a file of this size; `None` if it has fewer.
pub(super) fn start<const N: usize>(src: &dyn ReadAt, size: u64) -> io::Result<Option<[u8; N]>> {
    if size < N as u64 {
        return Ok(None);
    }
    let mut start = [0; N];
    src.read_exact_at(&mut start, 0)?;
    Ok(Some(start))
}

/// Whether the file of this size begins with these bytes.
pub(super) fn begins_with<const N: usize>(src: &dyn ReadAt, size: u64, magic: &[u8; N]) -> io::Result<bool> {
    Ok(start(src, size)? == Some(*magic))
}

/// Bytes of elements of `unit` bytes in this shape, if a u64 can count them.
pub(super) fn bytes(shape: &[u64], unit: u64) -> Option<u64> {
    shape.iter().try_fold(unit, |n, &dim| n.checked_mul(dim))
}

/// The little-endian number in at most 8 bytes.
pub(super) fn uint(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte))
}

/// The little-endian u16 at `at`. Callers have checked the length.
pub(super) fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

/// The little-endian u32 at `at`. Callers have checked the length.
pub(super) fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// The little-endian u64 at `at`. Callers have checked the length.
pub(super) fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from(u32_at(b, at)) | u64::from(u32_at(b, at + 4)) << 32
}
