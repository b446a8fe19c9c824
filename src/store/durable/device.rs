//! The device for durable steps: one method per system call.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{Timespec, Timestamps};
use serde::{Deserialize, Serialize};

use super::CrashPoint;

/// One system call per method, with the semantics of the system's file systems. [`super::DeviceFile`] and [`super::Io`]
/// continue short or interrupted calls. A failed call may still have had its effect.
pub trait Device: fmt::Debug + Send + Sync {
    /// Creates a new file that only its owner may read.
    ///
    /// # Errors
    /// `AlreadyExists`; device errors.
    fn create(&self, path: &Path, _at: CrashPoint) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(path)
    }

    /// Opens a file or directory to read it.
    fn open(&self, path: &Path, flags: i32) -> io::Result<File> {
        OpenOptions::new().read(true).custom_flags(flags).open(path)
    }

    /// Reads some bytes; none at the file's end.
    fn read_at(&self, file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        file.read_at(buf, offset)
    }

    /// The ctime of a file: the last change of its name, attributes or bytes.
    fn changed(&self, file: &File) -> io::Result<(i64, i64)> {
        let metadata = file.metadata()?;
        Ok((metadata.ctime(), metadata.ctime_nsec()))
    }

    /// Writes some of these bytes.
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64, _at: CrashPoint) -> io::Result<usize> {
        file.write_at(bytes, offset)
    }

    /// Sets a file's length.
    fn set_len(&self, file: &File, len: u64, _at: CrashPoint) -> io::Result<()> {
        file.set_len(len)
    }

    /// Changes an attribute of an open file or directory.
    fn set_attribute(&self, file: &File, attribute: &Attribute<'_>, _at: CrashPoint) -> io::Result<()> {
        attribute.set(file)
    }

    /// Begins to send a file's bytes to the device, and does not wait for them. Makes nothing durable.
    ///
    /// # Errors
    /// Bytes could not be sent, and a later fsync may not report that again.
    fn begin_sync(&self, file: &File) -> io::Result<()> {
        // SAFETY: no memory is passed; the descriptor is open for as long as `file` is borrowed.
        match unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Makes a file's bytes and attributes durable.
    fn sync_file(&self, file: &File, _at: CrashPoint) -> io::Result<()> {
        file.sync_all()
    }

    /// Makes a file's bytes and length durable.
    fn sync_data(&self, file: &File, _at: CrashPoint) -> io::Result<()> {
        file.sync_data()
    }

    /// Makes the names in a directory, and its attributes, durable.
    fn sync_dir(&self, dir: &Path, _at: CrashPoint) -> io::Result<()> {
        // The path may be a FIFO by now, which would block the open.
        self.open(dir, libc::O_DIRECTORY)?.sync_all()
    }

    /// Makes all earlier changes on a directory's file system durable, by any process.
    fn sync_all(&self, dir: &Path, _at: CrashPoint) -> io::Result<()> {
        Ok(rustix::fs::syncfs(File::open(dir)?)?)
    }

    /// Renames a file or directory over an existing one.
    fn rename(&self, from: &Path, to: &Path, _at: CrashPoint) -> io::Result<()> {
        fs::rename(from, to)
    }

    /// Gives a file another name.
    fn link(&self, from: &Path, to: &Path, _at: CrashPoint) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    /// Removes a name of anything but a directory.
    fn remove_file(&self, path: &Path, _at: CrashPoint) -> io::Result<()> {
        fs::remove_file(path)
    }

    /// Removes an empty directory.
    fn remove_dir(&self, path: &Path, _at: CrashPoint) -> io::Result<()> {
        fs::remove_dir(path)
    }

    /// Creates a directory.
    ///
    /// # Errors
    /// `AlreadyExists`; device errors.
    fn make_dir(&self, path: &Path, mode: u32, _at: CrashPoint) -> io::Result<()> {
        DirBuilder::new().mode(mode).create(path)
    }
}

/// The system's file systems: the default methods of [`Device`].
#[derive(Clone, Copy, Debug)]
pub struct Disk;

impl Device for Disk {}

/// An attribute of a file.
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
    /// Removes the extended attribute of this name.
    Without(&'a std::ffi::OsStr),
}

impl Attribute<'_> {
    fn set(&self, file: &File) -> io::Result<()> {
        use xattr::FileExt as _;
        match *self {
            Attribute::Owner(user, group) => std::os::unix::fs::fchown(file, Some(user), Some(group)),
            Attribute::Mode(mode) => file.set_permissions(Permissions::from_mode(mode & 0o7777)),
            Attribute::Times(times) => set_times(file, times),
            Attribute::Extended(name, value) => file.set_xattr(name, value),
            Attribute::Without(name) => match file.remove_xattr(name) {
                Err(error) if error.raw_os_error() == Some(libc::ENODATA) => Ok(()),
                result => result,
            },
        }
    }
}

fn set_times(file: &File, times: Times) -> io::Result<()> {
    let time = |(tv_sec, tv_nsec)| Timespec { tv_sec, tv_nsec };
    let times = Timestamps { last_access: time(times.accessed), last_modification: time(times.modified) };
    Ok(rustix::fs::futimens(file, &times)?)
}

/// Access and modification time, each as seconds and nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
