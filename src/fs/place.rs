//! How to reach a node's file, and its extended attributes.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io;
use std::path::Path;
use std::sync::Arc;

use rustix::buffer::spare_capacity;
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use super::sys;
use crate::store::beneath::{self, Reached};

/// Longest value that an extended attribute may have (`XATTR_SIZE_MAX`), and longest list of names.
const XATTR_MAX: usize = 64 * 1024;

/// How to reach a node's file: by its path, or, without a path, by a held descriptor.
pub(super) struct Place {
    /// Its path. A held file has a name in `/proc/self/fd`.
    pub(super) path: Reached,
    held: Option<Arc<File>>,
}

impl Place {
    pub(super) fn named(path: Reached) -> Self {
        Self { path, held: None }
    }

    pub(super) fn held(file: Arc<File>) -> Self {
        Self { path: beneath::by_descriptor(&file).into(), held: Some(file) }
    }

    /// Whether the last component of `path` is a link of `/proc` that must be followed; others never are.
    pub(super) fn follow(&self) -> bool {
        self.held.is_some()
    }

    pub(super) fn metadata(&self) -> io::Result<Metadata> {
        match &self.held {
            Some(file) => file.metadata(),
            None => self.path.symlink_metadata(),
        }
    }

    /// Refers to the file even if its name changes.
    pub(super) fn hold(&self) -> io::Result<Arc<File>> {
        match &self.held {
            Some(file) => Ok(Arc::clone(file)),
            None => sys::open_path(&self.path).map(Arc::new),
        }
    }

    /// Opens a regular file.
    pub(super) fn open(&self, read: bool, write: bool) -> io::Result<File> {
        self.open_with(read, write, 0)
    }

    /// Opens a regular file so that reads do not move its access time, if the file system lets us.
    pub(super) fn open_aside(&self, read: bool, write: bool) -> io::Result<File> {
        match self.open_with(read, write, libc::O_NOATIME) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => self.open(read, write),
            other => other,
        }
    }

    fn open_with(&self, read: bool, write: bool, flags: libc::c_int) -> io::Result<File> {
        use std::os::unix::fs::OpenOptionsExt;
        // A fifo that replaced the file behind our back must not block the open.
        let mut flags = flags | libc::O_NONBLOCK;
        if !self.follow() {
            flags |= libc::O_NOFOLLOW;
        }
        File::options().read(read).write(write).custom_flags(flags).open(&self.path)
    }

    /// Reads an extended attribute.
    pub(super) fn getxattr(&self, name: &OsStr) -> io::Result<Vec<u8>> {
        let (path, mut value): (&Path, _) = (&self.path, Vec::with_capacity(XATTR_MAX));
        match self.follow() {
            true => rustix::fs::getxattr(path, name, spare_capacity(&mut value))?,
            false => rustix::fs::lgetxattr(path, name, spare_capacity(&mut value))?,
        };
        Ok(value)
    }

    /// Whether there is an extended attribute of this name, or may be.
    pub(super) fn has_xattr(&self, name: &OsStr) -> bool {
        let path: &Path = &self.path;
        // Without room for the value its length is answered.
        let mut none: [u8; 0] = [];
        let len = match self.follow() {
            true => rustix::fs::getxattr(path, name, &mut none),
            false => rustix::fs::lgetxattr(path, name, &mut none),
        };
        !matches!(len, Err(Errno::NODATA | Errno::OPNOTSUPP))
    }

    /// Names of the extended attributes, each ended by NUL.
    pub(super) fn listxattr(&self) -> io::Result<Vec<u8>> {
        let (path, mut names): (&Path, _) = (&self.path, Vec::with_capacity(XATTR_MAX));
        match self.follow() {
            true => rustix::fs::listxattr(path, spare_capacity(&mut names))?,
            false => rustix::fs::llistxattr(path, spare_capacity(&mut names))?,
        };
        Ok(names)
    }

    /// Writes an extended attribute; `flags` are `XATTR_CREATE` and `XATTR_REPLACE`.
    pub(super) fn setxattr(&self, name: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        let (path, flags): (&Path, _) = (&self.path, XattrFlags::from_bits_retain(flags.cast_unsigned()));
        match self.follow() {
            true => Ok(rustix::fs::setxattr(path, name, value, flags)?),
            false => Ok(rustix::fs::lsetxattr(path, name, value, flags)?),
        }
    }

    /// Removes an extended attribute.
    pub(super) fn removexattr(&self, name: &OsStr) -> io::Result<()> {
        let path: &Path = &self.path;
        match self.follow() {
            true => Ok(rustix::fs::removexattr(path, name)?),
            false => Ok(rustix::fs::lremovexattr(path, name)?),
        }
    }
}
