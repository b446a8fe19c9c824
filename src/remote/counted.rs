//! Counts the bytes that come from a remote: they cost time, and some providers' money.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::place::{Listed, Pacer, Place, Result};
use formats::ReadAt;

/// A remote whose bytes are counted.
pub(super) struct Counted {
    place: Arc<dyn Place>,
    came: AtomicU64,
}

impl Counted {
    pub(super) fn new(place: Arc<dyn Place>) -> Counted {
        Counted { place, came: AtomicU64::new(0) }
    }

    /// Bytes that came so far.
    pub(super) fn came(&self) -> u64 {
        self.came.load(Ordering::Relaxed)
    }
}

impl Place for Counted {
    fn put(&self, name: &str, body: &(dyn ReadAt + Sync), len: u64, pace: &Pacer) -> Result<()> {
        self.place.put(name, body, len, pace)
    }

    fn get(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let bytes = self.place.get(name, range)?;
        self.came.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(bytes)
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>> {
        self.place.list(prefix)
    }

    fn folders(&self, prefix: &str) -> Result<Vec<String>> {
        self.place.folders(prefix)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.place.delete(name)
    }

    fn sweep(&self, prefix: &str) -> Result<()> {
        self.place.sweep(prefix)
    }
}
