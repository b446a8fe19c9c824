//! Whole decoded files in `cache/`, least recently used first to go. All of it may be lost at any time.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use lru::LruCache;
use rustix::process::{Resource, getrlimit};

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
    most_files: usize,
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
        Ok(Cache { directory: directory.to_path_buf(), limit, most_files: most_files(), inside })
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

    /// Keeps a filled file, and lets go of others to stay below the limits. Whoever has those open keeps them.
    pub fn keep(&self, id: Id, file: Arc<File>, len: u64) {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        if inside.files.put(id, (file, len)).is_none() {
            inside.bytes += len;
        }
        while inside.bytes > self.limit || inside.files.len() > self.most_files {
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

/// Files that are kept at most, however small: each is a descriptor, and a daemon that has none left can open nothing for anybody.
/// A quarter of what the process may have, once the mount has raised its limit to the hard one; handles of programs need the rest.
fn most_files() -> usize {
    let most = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    usize::try_from(most / 4).unwrap_or(usize::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_files_do_not_take_all_descriptors() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache { most_files: 3, ..Cache::new(directory.path(), 1 << 20).unwrap() };
        for id in 1..=5u8 {
            let file = cache.begin(Id([id; 16]), 10).unwrap();
            cache.keep(Id([id; 16]), Arc::new(file), 10);
        }
        assert_eq!((cache.bytes(), cache.inside.lock().unwrap().files.len()), (30, 3));
        assert!(cache.get(Id([2; 16])).is_none() && cache.get(Id([3; 16])).is_some(), "the least recently used went");
    }
}
