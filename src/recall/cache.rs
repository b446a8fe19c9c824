//! Whole decoded files in `cache/`; the least recently used are dropped first. All of it may be lost at any time.
//!
//! It lies on the store's own device, and no save may fail for its sake. So it takes at most half of the room that would be
//! free without it, and shrinks while programs fill the device.

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
    /// Held to look a file up or to add one, never during a read or decoding.
    inside: Mutex<Inside>,
}

impl Cache {
    /// An empty cache in `directory`. Removes what a former process left where files without a name need one at first.
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

    /// A file to be filled with `len` decoded bytes. It has no name, so it is freed with its last handle, and nobody else
    /// changes it. `None` if it would not fit, or the device has no room.
    pub fn begin(&self, len: u64) -> Option<File> {
        if len > self.limit || !self.make_room(len) {
            return None;
        }
        let file = tempfile::tempfile_in(&self.directory).ok()?;
        file.set_len(len).ok()?;
        Some(file)
    }

    /// Drops files until what is left, and `len` bytes more, is at most what is free then. False if it cannot be.
    pub fn make_room(&self, len: u64) -> bool {
        // Unknown: a device without an answer takes what it can.
        let Ok(device) = rustix::fs::statvfs(&self.directory) else { return true };
        let mut free = device.f_bavail.saturating_mul(device.f_frsize).saturating_sub(len);
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        while inside.bytes.saturating_add(len) > free {
            let Some((_, (_, gone))) = inside.files.pop_lru() else { break };
            inside.bytes -= gone;
            free = free.saturating_add(gone);
        }
        inside.bytes.saturating_add(len) <= free
    }

    /// Keeps a filled file, and drops others to stay below the limits. Open handles stay valid.
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

/// Maximum number of kept files, however small. Each is a descriptor, and a daemon without free descriptors can open
/// nothing. It is a quarter of the process's limit, once the mount has raised that to the hard limit; programs' handles
/// need the rest.
fn most_files() -> usize {
    let most = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    usize::try_from(most / 4).unwrap_or(usize::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_leaves_half_of_the_free_room() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(directory.path(), u64::MAX).unwrap();
        let device = rustix::fs::statvfs(directory.path()).unwrap();
        let free = device.f_bavail * device.f_frsize;
        // Without a byte in it, such a file takes no room.
        assert!(cache.begin(free / 4 * 3).is_none());
        let file = Arc::new(cache.begin(free / 8 * 3).unwrap());
        cache.keep(Id([2; 16]), file, free / 8 * 3);
        assert!(cache.make_room(0) && cache.get(Id([2; 16])).is_some());
        // Another one of this size takes its place.
        assert!(cache.begin(free / 8 * 3).is_some());
        assert!(cache.get(Id([2; 16])).is_none() && cache.bytes() == 0);
    }

    #[test]
    fn small_files_do_not_take_all_descriptors() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache { most_files: 3, ..Cache::new(directory.path(), 1 << 20).unwrap() };
        for id in 1..=5u8 {
            let file = cache.begin(10).unwrap();
            cache.keep(Id([id; 16]), Arc::new(file), 10);
        }
        assert_eq!((cache.bytes(), cache.inside.lock().unwrap().files.len()), (30, 3));
        assert!(cache.get(Id([2; 16])).is_none() && cache.get(Id([3; 16])).is_some(), "the least recently used went");
    }
}
