//! Whole decoded files in `cache/`, least recently used first to go. All of it may be lost at any time.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use lru::LruCache;

use crate::store::Id;
use crate::store::durable::scratch;
use crate::sync::Mutex;

#[derive(Debug)]
struct Inside {
    files: LruCache<Id, (Arc<File>, u64)>,
    bytes: u64,
}

/// The decoded files.
#[derive(Debug)]
pub struct Cache {
    directory: PathBuf,
    limit: u64,
    /// Taken to look a file up and to add one; nothing is read or decoded under it.
    inside: Mutex<Inside>,
}

impl Cache {
    /// An empty cache in `directory`. What a former process left there is removed: it may have been cut short by a
    /// crash, and nothing in it says so.
    ///
    /// # Errors
    /// What the device reports.
    pub fn new(directory: &Path, limit: u64) -> io::Result<Cache> {
        for entry in fs::read_dir(directory)? {
            scratch::remove(&entry?.path())?;
        }
        let inside = Mutex::new(Inside { files: LruCache::unbounded(), bytes: 0 });
        Ok(Cache { directory: directory.to_path_buf(), limit, inside })
    }

    /// The decoded file of an object.
    pub fn get(&self, id: Id) -> Option<Arc<File>> {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        inside.files.get(&id).map(|(file, _)| Arc::clone(file))
    }

    /// A file to be filled with `len` decoded bytes; it has no name, so it goes with the last who holds it. `None`
    /// when it would not fit, or the device has no room.
    pub fn begin(&self, id: Id, len: u64) -> Option<File> {
        if len > self.limit {
            return None;
        }
        let path = self.directory.join(id.to_string());
        let file = scratch::create_new(&path).ok()?;
        scratch::remove(&path).ok()?;
        file.set_len(len).ok()?;
        Some(file)
    }

    /// Keeps a filled file, and lets go of others to stay below the limit. Whoever has those open keeps them.
    pub fn keep(&self, id: Id, file: Arc<File>, len: u64) {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        if inside.files.put(id, (file, len)).is_none() {
            inside.bytes += len;
        }
        while inside.bytes > self.limit {
            let Some((_, (_, gone))) = inside.files.pop_lru() else {
                break;
            };
            inside.bytes -= gone;
        }
    }

    /// Forgets a file whose object is gone.
    pub fn forget(&self, id: Id) {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, len)) = inside.files.pop(&id) {
            inside.bytes -= len;
        }
    }

    /// Bytes of all decoded files.
    pub fn bytes(&self) -> u64 {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }
}
