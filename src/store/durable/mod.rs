//! Every step that must survive a crash goes through a [`Device`]. So one trait answers "is it on disk?". A test can
//! replace the disk: it records all steps and returns the state after a power failure, or fails at any step.
//!
//! This relies on the promises of every POSIX file system, which shared ones keep: `O_EXCL`, rename over an existing
//! name, and fsync of files and directories.
//!
//! Two kinds of I/O do not go through here. One is the cache and other files that may be lost at any time
//! ([`scratch`]). The other is programs' I/O on their own files in a mount, except when they ask for durability.

mod device;
mod file;
mod io;
mod point;
pub mod scratch;

use std::fs::File;
use std::path::Path;

pub use device::{Attribute, Device, Disk, Times};
pub use file::DeviceFile;
pub use io::Io;
pub use point::CrashPoint;

/// Tells the kernel that the bytes of `file` are not needed again, so that the next read comes from the device. Only
/// clean pages are dropped: call it after [`DeviceFile::sync`]. It is a hint that the kernel may ignore.
pub fn forget_pages(file: &File) {
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
}

/// The directory of a path.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
