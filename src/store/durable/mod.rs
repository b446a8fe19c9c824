//! Every step that must survive a crash goes through a [`Device`], so that one trait answers "is it on disk?", and a test
//! can be the disk: record what was done and give back what a power failure would leave, or fail at any step.
//!
//! It relies on what every POSIX file system promises and shared ones keep: `O_EXCL`, rename over an existing name, and
//! fsync of files and directories.
//!
//! Not through here: the cache and other files that may be lost at any time ([`scratch`]), and what programs do to their
//! own files in a mount, except when they ask for it to be durable.

mod device;
mod evidence;
mod file;
mod io;
mod point;
pub mod scratch;

use std::fs::File;
use std::path::Path;

pub use device::{Attribute, Device, Disk, Times};
pub use evidence::{Synced, Witness};
pub use file::DeviceFile;
pub use io::Io;
pub use point::CrashPoint;

/// Tells the kernel that the bytes of `file` will not be needed again, so that the next read comes from the device.
/// Only clean pages go: call it after [`DeviceFile::sync`]. A hint; it may be ignored.
pub fn forget_pages(file: &File) {
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
}

/// The directory a path lies in.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
