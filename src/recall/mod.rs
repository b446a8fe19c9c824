//! Recall: which objects and tiles a read needs; tiles to bytes; the cache of decoded files.

use std::fs::File;
use std::sync::Arc;

use crate::archive::ReadError;

/// An open released file. It keeps what it needs alive, whatever happens to names and objects meanwhile.
pub struct Reader;

#[allow(unused_variables)]
impl Reader {
    /// Logical length in bytes.
    pub fn len(&self) -> u64 {
        0
    }
    /// The whole decoded file in the cache, when it is there: to be served by passthrough.
    pub fn cached_file(&self) -> Option<Arc<File>> {
        None
    }
    /// Reads up to `buf.len()` bytes at `offset`; short only at the end of the file. Decodes what is not decoded yet:
    /// never on a thread that answers the kernel.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, ReadError> {
        Err(ReadError)
    }
}
