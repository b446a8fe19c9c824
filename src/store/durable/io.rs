//! Operations built from a device's calls.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device::{Attribute, Device, Disk, Times};
use super::{CrashPoint, DeviceFile, parent};
use crate::store::beneath;

/// A device and the operations on it. Cheap to clone: all parts of a store have one.
#[derive(Clone, Debug)]
pub struct Io {
    device: Arc<dyn Device>,
    /// Unneeded files that could not be removed yet. The lock is held only briefly, and no other lock is taken under
    /// it.
    leftovers: Arc<Mutex<Vec<(PathBuf, CrashPoint)>>>,
}

impl Io {
    /// For this device.
    pub fn new(device: Arc<dyn Device>) -> Io {
        Io { device, leftovers: Arc::default() }
    }

    /// For the system's own file systems.
    pub fn disk() -> Io {
        Io::new(Arc::new(Disk))
    }

    /// The device.
    pub fn device(&self) -> &dyn Device {
        self.device.as_ref()
    }

    /// Creates a new file that only its owner may read. It is not durable before [`DeviceFile::sync`].
    ///
    /// # Errors
    /// `AlreadyExists`; device errors.
    pub fn create(&self, path: &Path, at: CrashPoint) -> io::Result<DeviceFile> {
        Ok(DeviceFile::new(self.device.create(path, at)?, self.clone()))
    }

    /// A file that is open already. Its errors of writing back are those of this descriptor.
    pub fn adopt(&self, file: File) -> DeviceFile {
        DeviceFile::new(file, self.clone())
    }

    /// Opens a file to read it.
    pub fn open(&self, path: &Path) -> io::Result<DeviceFile> {
        self.open_with(path, 0)
    }

    /// Opens a file to read it, with more flags of open(2).
    pub fn open_with(&self, path: &Path, flags: i32) -> io::Result<DeviceFile> {
        again(|| self.device.open(path, flags)).map(|file| DeviceFile::new(file, self.clone()))
    }

    /// Opens a regular file below `root` to read it, with more flags of open(2). Never follows symlinks ([`beneath`]);
    /// never blocks on other kinds of files.
    ///
    /// # Errors
    /// As of [`beneath::open`]; `InvalidInput` if it is no regular file.
    pub fn open_beneath(&self, root: &Path, path: &Path, flags: i32) -> io::Result<DeviceFile> {
        let held = beneath::plain(beneath::hold(root, path)?)?;
        self.open_with(&beneath::by_descriptor(&held), flags | libc::O_NONBLOCK)
    }

    /// The first `most` bytes of a regular file. Never follows symlinks.
    pub fn read(&self, path: &Path, most: u64) -> io::Result<Vec<u8>> {
        let file = self.open_beneath(parent(path), Path::new(path.file_name().unwrap_or_default()), 0)?;
        let mut bytes = vec![0; file.metadata()?.len().min(most) as usize];
        let len = file.read_full(&mut bytes, 0)?;
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Makes a file's bytes and attributes durable.
    ///
    /// # Errors
    /// Device errors. The caller must then treat the file as lost: a second fsync proves nothing.
    pub fn sync_file(&self, file: &File, at: CrashPoint) -> io::Result<()> {
        again(|| self.device.sync_file(file, at))
    }

    /// Makes the names in a directory, and its attributes, durable.
    pub fn sync_dir(&self, dir: &Path, at: CrashPoint) -> io::Result<()> {
        again(|| self.device.sync_dir(dir, at))
    }

    /// Gives a durable file its final name and makes the name durable.
    ///
    /// # Errors
    /// Device errors; the file then has either name.
    pub fn publish(&self, from: &Path, to: &Path, at: CrashPoint) -> io::Result<()> {
        self.device.rename(from, to, at)?;
        self.sync_dir(parent(to), at)
    }

    /// Replaces a small file: readers see the old content or the new one. Step `written` prepares it at `tmp`; step
    /// `in_place` puts it in place.
    ///
    /// # Errors
    /// Device errors; the file then has the old content or the new one.
    pub fn replace(
        &self,
        tmp: &Path,
        path: &Path,
        bytes: &[u8],
        (written, in_place): (CrashPoint, CrashPoint),
    ) -> io::Result<()> {
        self.remove(tmp, written)?;
        let prepare = || -> io::Result<()> {
            let file = self.create(tmp, written)?;
            file.write_all_at(bytes, 0, written)?;
            file.sync(written)
        };
        prepare().and_then(|()| self.publish(tmp, path, in_place)).inspect_err(|_| {
            self.discard(tmp, written);
        })
    }

    /// Removes a file that may already be gone.
    pub fn remove(&self, path: &Path, at: CrashPoint) -> io::Result<()> {
        match self.device.remove_file(path, at) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes an unneeded file, now or when the device permits: see [`Io::sweep`].
    pub fn discard(&self, path: &Path, at: CrashPoint) {
        if let Err(error) = self.remove(path, at) {
            log::warn!("{}: cannot be removed now: {error}", path.display());
            self.leftovers().push((path.to_path_buf(), at));
        }
    }

    /// Tries again to remove the files that could not be removed. True if none is left.
    pub fn sweep(&self) -> bool {
        let leftovers = std::mem::take(&mut *self.leftovers());
        let left: Vec<_> = leftovers.into_iter().filter(|(path, at)| self.remove(path, *at).is_err()).collect();
        let mut leftovers = self.leftovers();
        leftovers.extend(left);
        leftovers.is_empty()
    }

    fn leftovers(&self) -> MutexGuard<'_, Vec<(PathBuf, CrashPoint)>> {
        self.leftovers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes everything in a directory.
    pub fn empty(&self, dir: &Path, at: CrashPoint) -> io::Result<()> {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => {
                    self.empty(&entry.path(), at)?;
                    self.device.remove_dir(&entry.path(), at)?;
                }
                false => self.remove(&entry.path(), at)?,
            }
        }
        Ok(())
    }

    /// Creates a directory that may already exist.
    pub fn make_dir(&self, path: &Path, mode: u32, at: CrashPoint) -> io::Result<()> {
        match self.device.make_dir(path, mode, at) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }

    /// Creates a directory and its missing parents.
    pub fn make_dirs(&self, path: &Path, mode: u32, at: CrashPoint) -> io::Result<()> {
        match self.make_dir(path, mode, at) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && parent(path) != path => {
                self.make_dirs(parent(path), mode, at)?;
                self.make_dir(path, mode, at)
            }
            result => result,
        }
    }

    /// Sets access and modification time of a file or directory.
    pub fn set_times(&self, path: &Path, times: Times, at: CrashPoint) -> io::Result<()> {
        // A directory that is held by a descriptor has a link of the system for its name.
        let follows = path.parent() == Some(Path::new("/proc/self/fd"));
        let file = self.device.open(path, libc::O_NONBLOCK | if follows { 0 } else { libc::O_NOFOLLOW })?;
        self.device.set_attribute(&file, &Attribute::Times(times), at)
    }
}

/// Repeats a call that a signal interrupts. Only for calls that may be repeated: not for rename, which may have
/// succeeded.
fn again<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
