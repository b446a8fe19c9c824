//! Every step that must survive a crash goes through these functions, so that one file answers "is it on disk?".
//!
//! They rely on what every POSIX file system promises and shared ones keep: `O_EXCL`, rename over an existing name,
//! and fsync of files and directories.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Creates a new file that only its owner may read. It is not durable until [`sync_file`].
///
/// # Errors
/// `AlreadyExists`, or what the device reports.
pub fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(path)
}

/// Makes a file's bytes and attributes durable.
///
/// # Errors
/// What the device reports. The caller must then treat the file as lost: a second fsync proves nothing.
pub fn sync_file(file: &File) -> io::Result<()> {
    file.sync_all()
}

/// Makes the names in a directory durable.
///
/// # Errors
/// What the device reports.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    // By now it may be a fifo, which would wait for a writer when it is opened.
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(dir)?.sync_all()
}

/// Gives a durable file its final name and makes the name durable.
///
/// # Errors
/// What the device reports; the file then has either name.
pub fn publish(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    sync_dir(parent(to))
}

/// Writes a small file as a whole: readers see the old content or the new one.
///
/// # Errors
/// What the device reports; the old content is then still there.
pub fn replace(tmp: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let _ = fs::remove_file(tmp);
    let file = create_new(tmp)?;
    write_all_at(&file, bytes, 0)?;
    sync_file(&file)?;
    publish(tmp, path)
}

/// Writes all of `bytes` at `offset`.
///
/// # Errors
/// What the device reports, `StorageFull` among it.
pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

/// Removes a file that may be gone already.
///
/// # Errors
/// What the device reports, except that there is no such file.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Sets access and modification time of a file or directory.
///
/// # Errors
/// What the device reports.
pub fn set_times(path: &Path, times: Times) -> io::Result<()> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    set_times_of(&file, times)
}

/// Sets access and modification time of an open file or directory.
///
/// # Errors
/// What the device reports.
pub fn set_times_of(file: &File, times: Times) -> io::Result<()> {
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
/// Only clean pages go: call it after [`sync_file`]. A hint; it may be ignored.
pub fn forget_pages(file: &File) {
    // SAFETY: no memory is passed; the descriptor is open for as long as `file` is borrowed.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

/// The directory a path lies in.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
