//! Whole decoded files in `cache/`; the least recently used are dropped first. All of it may be lost at any time.
//!
//! It lies on the store's own device, and no save may fail for its sake. So it takes at most half of the room that would be
//! free without it, and shrinks while programs fill the device.
//!
//! A decoded file belongs to one file of the tree, and becomes that file when a program opens it for writing. So it is
//! either here or in one reader, and never serves two files.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use lru::LruCache;
use rustix::process::{Resource, getrlimit};

use crate::store::Id;
use crate::store::durable::scratch;
use crate::sync::{AtomicU64, Mutex, MutexGuard};

/// A file for decoded bytes. Its name in the cache goes with it.
#[derive(Debug)]
pub struct Decoded {
    file: File,
    path: PathBuf,
}

impl Decoded {
    /// The open file, to read and write.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// False if it was cut short to less than this. Programs that clean up may do that.
    pub(super) fn reaches(&self, end: u64) -> bool {
        self.file.metadata().is_ok_and(|metadata| metadata.len() >= end)
    }

    /// Its name in the cache; gone once it was renamed into the tree.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Decoded {
    fn drop(&mut self) {
        if let Err(error) = scratch::remove(&self.path) {
            log::warn!("{}: cannot be removed: {error}", self.path.display());
        }
    }
}

/// The object whose bytes a file has, and the file of the tree that it serves (0: none).
pub(super) type Key = (Id, u64);

#[derive(Debug)]
struct Inside {
    files: LruCache<Key, (Arc<Decoded>, u64)>,
    bytes: u64,
}

impl Inside {
    fn take(&mut self, key: &Key) -> Option<Arc<Decoded>> {
        let (file, len) = self.files.pop(key)?;
        self.bytes -= len;
        Some(file)
    }

    fn drop_oldest(&mut self) -> Option<u64> {
        let (_, (_, gone)) = self.files.pop_lru()?;
        self.bytes -= gone;
        Some(gone)
    }
}

/// The decoded files that no reader has.
#[derive(Debug)]
pub struct Cache {
    directory: PathBuf,
    limit: u64,
    most_files: usize,
    /// The next file's name.
    next: AtomicU64,
    /// Held to take a file or to add one, never during a read or decoding.
    inside: Mutex<Inside>,
}

impl Cache {
    /// An empty cache in `directory`. Removes the files of a former process.
    pub fn new(directory: &Path, limit: u64) -> io::Result<Cache> {
        for entry in fs::read_dir(directory)? {
            scratch::remove(&entry?.path())?;
        }
        let inside = Mutex::new(Inside { files: LruCache::unbounded(), bytes: 0 });
        let (directory, next) = (directory.to_path_buf(), AtomicU64::new(0));
        Ok(Cache { directory, limit, most_files: most_files(), next, inside })
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a file out. Only the caller has it, and gives it back with [`Cache::keep`].
    pub(super) fn take(&self, key: &Key) -> Option<Arc<Decoded>> {
        self.inside().take(key)
    }

    /// A file to be filled with `len` decoded bytes. `None` if it would not fit, or the device has no room.
    pub(super) fn begin(&self, len: u64) -> Option<Decoded> {
        if len > self.limit || !self.make_room(len) {
            return None;
        }
        let path = self.directory.join(self.next.fetch_add(1, Ordering::Relaxed).to_string());
        let create = || scratch::create_new(&path);
        // Programs that clean up may have removed the directory while it was empty.
        let again = |_| fs::create_dir(&self.directory).and_then(|()| create());
        let decoded = Decoded { file: create().or_else(again).ok()?, path };
        decoded.file.set_len(len).ok()?;
        Some(decoded)
    }

    /// Drops files until what is left, and `len` bytes more, is at most what is free then. False if it cannot be.
    pub fn make_room(&self, len: u64) -> bool {
        // Unknown: a device without an answer takes what it can.
        let Ok(device) = rustix::fs::statvfs(&self.directory) else { return true };
        let mut free = device.f_bavail.saturating_mul(device.f_frsize).saturating_sub(len);
        let mut inside = self.inside();
        while inside.bytes.saturating_add(len) > free {
            let Some(gone) = inside.drop_oldest() else { break };
            free = free.saturating_add(gone);
        }
        inside.bytes.saturating_add(len) <= free
    }

    /// Keeps a filled file, and drops others to stay below the limits.
    pub(super) fn keep(&self, key: Key, file: Arc<Decoded>, len: u64) {
        let mut inside = self.inside();
        inside.take(&key);
        inside.files.put(key, (file, len));
        inside.bytes += len;
        while inside.bytes > self.limit || inside.files.len() > self.most_files {
            if inside.drop_oldest().is_none() {
                break;
            }
        }
    }

    /// Forgets the files of an object that is gone.
    pub(super) fn forget(&self, id: Id) {
        let mut inside = self.inside();
        let gone: Vec<Key> = inside.files.iter().map(|(key, _)| *key).filter(|key| key.0 == id).collect();
        gone.iter().for_each(|key| drop(inside.take(key)));
    }

    /// Bytes of the files in it.
    pub fn bytes(&self) -> u64 {
        self.inside().bytes
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
        cache.keep((Id([2; 16]), 0), file, free / 8 * 3);
        assert!(cache.make_room(0) && cache.bytes() > 0);
        // Another one of this size takes its place.
        assert!(cache.begin(free / 8 * 3).is_some());
        assert!(cache.take(&(Id([2; 16]), 0)).is_none() && cache.bytes() == 0);
    }

    #[test]
    fn small_files_do_not_take_all_descriptors() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache { most_files: 3, ..Cache::new(directory.path(), 1 << 20).unwrap() };
        for id in 1..=5u8 {
            let file = cache.begin(10).unwrap();
            cache.keep((Id([id; 16]), 7), Arc::new(file), 10);
        }
        assert_eq!((cache.bytes(), cache.inside().files.len()), (30, 3));
        assert!(cache.take(&(Id([2; 16]), 7)).is_none(), "the least recently used went");
        let taken = cache.take(&(Id([3; 16]), 7)).unwrap();
        assert!(cache.take(&(Id([3; 16]), 7)).is_none() && cache.take(&(Id([4; 16]), 8)).is_none(), "it is another's");
        assert_eq!((cache.bytes(), fs::read_dir(directory.path()).unwrap().count()), (20, 3));
        drop(taken);
        cache.forget(Id([4; 16]));
        assert_eq!((cache.bytes(), fs::read_dir(directory.path()).unwrap().count()), (10, 1));
    }
}
