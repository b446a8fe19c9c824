//! Every step that must survive a crash goes through a [`Device`], so that one trait answers "is it on disk?", and a test
//! can be the disk: record what was done and give back what a power failure would leave, or fail at any step.
//!
//! It relies on what every POSIX file system promises and shared ones keep: `O_EXCL`, rename over an existing name, and
//! fsync of files and directories.
//!
//! Not through here: the cache and other files that may be lost at any time ([`scratch`]), and what programs do to their
//! own files in a mount, except when they ask for it to be durable.

mod file;
mod point;
pub mod scratch;

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::beneath;

pub use file::DeviceFile;
pub use point::CrashPoint;

/// One system call each, as the system's own file systems answer it. What is short or interrupted is for [`DeviceFile`] and
/// [`Io`] to go on with. A call that fails may have been carried out.
pub trait Device: fmt::Debug + Send + Sync {
    /// Creates a new file that only its owner may read.
    ///
    /// # Errors
    /// `AlreadyExists`, or what the device reports.
    fn create(&self, path: &Path, _at: CrashPoint) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(path)
    }

    /// Opens a file or directory to read it.
    ///
    /// # Errors
    /// What the device reports.
    fn open(&self, path: &Path, flags: i32) -> io::Result<File> {
        OpenOptions::new().read(true).custom_flags(flags).open(path)
    }

    /// Reads some bytes; none at the file's end.
    ///
    /// # Errors
    /// What the device reports.
    fn read_at(&self, file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        file.read_at(buf, offset)
    }

    /// When the name, the attributes or the bytes of a file last changed: its ctime.
    ///
    /// # Errors
    /// What the device reports.
    fn changed(&self, file: &File) -> io::Result<(i64, i64)> {
        let metadata = file.metadata()?;
        Ok((metadata.ctime(), metadata.ctime_nsec()))
    }

    /// Writes some of these bytes.
    ///
    /// # Errors
    /// What the device reports.
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64, _at: CrashPoint) -> io::Result<usize> {
        file.write_at(bytes, offset)
    }

    /// Sets a file's length.
    ///
    /// # Errors
    /// What the device reports.
    fn set_len(&self, file: &File, len: u64, _at: CrashPoint) -> io::Result<()> {
        file.set_len(len)
    }

    /// Changes an attribute of an open file or directory.
    ///
    /// # Errors
    /// What the device reports.
    fn set_attribute(&self, file: &File, attribute: &Attribute<'_>, _at: CrashPoint) -> io::Result<()> {
        attribute.set(file)
    }

    /// Makes a file's bytes and attributes durable.
    ///
    /// # Errors
    /// What the device reports.
    fn sync_file(&self, file: &File, _at: CrashPoint) -> io::Result<()> {
        file.sync_all()
    }

    /// Makes a file's bytes and length durable.
    ///
    /// # Errors
    /// What the device reports.
    fn sync_data(&self, file: &File, _at: CrashPoint) -> io::Result<()> {
        file.sync_data()
    }

    /// Makes the names in a directory, and its attributes, durable.
    ///
    /// # Errors
    /// What the device reports.
    fn sync_dir(&self, dir: &Path, _at: CrashPoint) -> io::Result<()> {
        // By now it may be a fifo, which would wait for a writer when it is opened.
        self.open(dir, libc::O_DIRECTORY)?.sync_all()
    }

    /// Makes everything durable that was done so far on the file system that a directory lies on, by whomever.
    ///
    /// # Errors
    /// What the device reports.
    fn sync_all(&self, dir: &Path, _at: CrashPoint) -> io::Result<()> {
        let dir = File::open(dir)?;
        // SAFETY: no memory is passed; the descriptor is open until after the call.
        match unsafe { libc::syncfs(dir.as_raw_fd()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Renames a file or directory over whatever has that name.
    ///
    /// # Errors
    /// What the device reports.
    fn rename(&self, from: &Path, to: &Path, _at: CrashPoint) -> io::Result<()> {
        fs::rename(from, to)
    }

    /// Gives a file another name.
    ///
    /// # Errors
    /// What the device reports.
    fn link(&self, from: &Path, to: &Path, _at: CrashPoint) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    /// Removes a name of anything but a directory.
    ///
    /// # Errors
    /// What the device reports.
    fn remove_file(&self, path: &Path, _at: CrashPoint) -> io::Result<()> {
        fs::remove_file(path)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// What the device reports.
    fn remove_dir(&self, path: &Path, _at: CrashPoint) -> io::Result<()> {
        fs::remove_dir(path)
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// `AlreadyExists`, or what the device reports.
    fn make_dir(&self, path: &Path, mode: u32, _at: CrashPoint) -> io::Result<()> {
        DirBuilder::new().mode(mode).create(path)
    }
}

/// The file system that a path lies on: what [`Device`] does by itself.
#[derive(Clone, Copy, Debug)]
pub struct Disk;

impl Device for Disk {}

/// Something that is said of a file besides its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attribute<'a> {
    /// User and group.
    Owner(u32, u32),
    /// Permission bits.
    Mode(u32),
    /// Access and modification time.
    Times(Times),
    /// Name and value of an extended attribute.
    Extended(&'a std::ffi::OsStr, &'a [u8]),
}

impl Attribute<'_> {
    fn set(&self, file: &File) -> io::Result<()> {
        use xattr::FileExt as _;
        match *self {
            Attribute::Owner(user, group) => std::os::unix::fs::fchown(file, Some(user), Some(group)),
            Attribute::Mode(mode) => file.set_permissions(Permissions::from_mode(mode & 0o7777)),
            Attribute::Times(times) => set_times(file, times),
            Attribute::Extended(name, value) => file.set_xattr(name, value),
        }
    }
}

/// A device, and what is made of its calls. Cheap to clone: all parts of a store have one.
#[derive(Clone, Debug)]
pub struct Io {
    device: Arc<dyn Device>,
    /// Files that nobody needs and that could not be removed yet. Taken for moments, with no other lock taken under it.
    leftovers: Arc<Mutex<Vec<(PathBuf, CrashPoint)>>>,
}

impl Io {
    /// Through this device.
    pub fn new(device: Arc<dyn Device>) -> Io {
        Io { device, leftovers: Arc::default() }
    }

    /// Through the system's own file systems.
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
    /// `AlreadyExists`, or what the device reports.
    pub fn create(&self, path: &Path, at: CrashPoint) -> io::Result<DeviceFile> {
        Ok(DeviceFile::new(self.device.create(path, at)?, self.clone()))
    }

    /// Opens a file to read it.
    ///
    /// # Errors
    /// What the device reports.
    pub fn open(&self, path: &Path) -> io::Result<DeviceFile> {
        self.open_with(path, 0)
    }

    /// Opens a file to read it, with more flags of open(2).
    ///
    /// # Errors
    /// What the device reports.
    pub fn open_with(&self, path: &Path, flags: i32) -> io::Result<DeviceFile> {
        again(|| self.device.open(path, flags)).map(|file| DeviceFile::new(file, self.clone()))
    }

    /// Opens a regular file below `root` to read it, with more flags of open(2). No link is followed ([`beneath`]), and nothing
    /// is waited for that another kind of file may wait for.
    ///
    /// # Errors
    /// As of [`beneath::open`]; `InvalidInput` for what is no regular file.
    pub fn open_beneath(&self, root: &Path, path: &Path, flags: i32) -> io::Result<DeviceFile> {
        let held = beneath::plain(beneath::hold(root, path)?)?;
        self.open_with(&beneath::by_descriptor(&held), flags | libc::O_NONBLOCK)
    }

    /// The bytes of a file, as far as `most`; not those of what a link leads to, or that is no file.
    ///
    /// # Errors
    /// What the device reports.
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
    /// What the device reports. The caller must then treat the file as lost: a second fsync proves nothing.
    pub fn sync_file(&self, file: &File, at: CrashPoint) -> io::Result<()> {
        again(|| self.device.sync_file(file, at))
    }

    /// Makes the names in a directory, and its attributes, durable.
    ///
    /// # Errors
    /// What the device reports.
    pub fn sync_dir(&self, dir: &Path, at: CrashPoint) -> io::Result<()> {
        again(|| self.device.sync_dir(dir, at))
    }

    /// Gives a durable file its final name and makes the name durable.
    ///
    /// # Errors
    /// What the device reports; the file then has either name.
    pub fn publish(&self, from: &Path, to: &Path, at: CrashPoint) -> io::Result<()> {
        self.device.rename(from, to, at)?;
        self.sync_dir(parent(to), at)
    }

    /// Writes a small file as a whole: readers see the old content or the new one. It is prepared at `tmp` in the step
    /// `written`, and takes its place in the step `in_place`.
    ///
    /// # Errors
    /// What the device reports; the old content is then still there, or the new one is.
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

    /// Removes a file that may be gone already.
    ///
    /// # Errors
    /// What the device reports, except that there is no such file.
    pub fn remove(&self, path: &Path, at: CrashPoint) -> io::Result<()> {
        match self.device.remove_file(path, at) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes a file that nobody needs, now or when the device lets us: see [`Io::sweep`].
    pub fn discard(&self, path: &Path, at: CrashPoint) {
        if let Err(error) = self.remove(path, at) {
            log::warn!("{}: cannot be removed now: {error}", path.display());
            self.leftovers().push((path.to_path_buf(), at));
        }
    }

    /// Tries once more to remove what could not be. Answers whether nothing is left.
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
    ///
    /// # Errors
    /// What the device reports.
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

    /// Makes a directory that may be there already.
    ///
    /// # Errors
    /// What the device reports.
    pub fn make_dir(&self, path: &Path, mode: u32, at: CrashPoint) -> io::Result<()> {
        match self.device.make_dir(path, mode, at) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }

    /// Makes a directory and those above it that are missing.
    ///
    /// # Errors
    /// What the device reports.
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
    ///
    /// # Errors
    /// What the device reports.
    pub fn set_times(&self, path: &Path, times: Times, at: CrashPoint) -> io::Result<()> {
        let file = self.device.open(path, libc::O_NOFOLLOW | libc::O_NONBLOCK)?;
        self.device.set_attribute(&file, &Attribute::Times(times), at)
    }
}

/// Calls until a signal does not interrupt it. For calls that can be repeated: not for rename, which may have been done.
fn again<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn set_times(file: &File, times: Times) -> io::Result<()> {
    let spec = [
        libc::timespec { tv_sec: times.accessed.0, tv_nsec: times.accessed.1 },
        libc::timespec { tv_sec: times.modified.0, tv_nsec: times.modified.1 },
    ];
    // SAFETY: `spec` is an array of two timespecs that outlives the call, as futimens requires.
    match unsafe { libc::futimens(file.as_raw_fd(), spec.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Access and modification time, each as seconds and nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Last access.
    pub accessed: (i64, i64),
    /// Last modification of the content.
    pub modified: (i64, i64),
}

impl Times {
    /// The times in `metadata`.
    pub fn of(metadata: &fs::Metadata) -> Times {
        Times {
            accessed: (metadata.atime(), metadata.atime_nsec()),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// Tells the kernel that the bytes of `file` will not be needed again, so that the next read comes from the device.
/// Only clean pages go: call it after [`DeviceFile::sync`]. A hint; it may be ignored.
pub fn forget_pages(file: &File) {
    // SAFETY: no memory is passed; the descriptor is open for as long as `file` is borrowed.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

/// The directory a path lies in.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
