//! What becomes of a file's attributes when the daemon replaces it, or somebody else writes to it.

use std::ffi::OsStr;
use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use super::node::Place;
use super::sys::{self, Time};
use crate::store::{PLAIN, RECALLED};

/// Gives `to` mode, owner and extended attributes of `from`, for a file that takes its place.
pub(super) fn copy_attributes(from: &Place, to: &Path) -> io::Result<()> {
    let metadata = from.metadata()?;
    let names = match sys::listxattr(&from.path, from.follow()) {
        Ok(names) => names,
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Vec::new(),
        Err(error) => return Err(error),
    };
    let own = [RECALLED.as_bytes(), PLAIN.as_bytes()];
    let kept = |name: &&[u8]| !name.is_empty() && !own.contains(name);
    for name in names.split(|&byte| byte == 0).filter(kept) {
        let name = OsStr::from_bytes(name);
        let value = sys::getxattr(&from.path, from.follow(), name)?;
        match sys::setxattr(to, false, name, &value, 0) {
            Ok(()) => {}
            // Labels that the system gives and an unprivileged daemon may not copy.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {}
            Err(error) => return Err(error),
        }
    }
    let made = to.symlink_metadata()?;
    if (made.uid(), made.gid()) != (metadata.uid(), metadata.gid()) {
        std::os::unix::fs::lchown(to, Some(metadata.uid()), Some(metadata.gid()))?;
    }
    std::fs::set_permissions(to, Permissions::from_mode(metadata.mode() & 0o7777))
}

/// Whoever opens a file for writing or truncates it takes its set-user-id and set-group-id bits away, unless it is root,
/// and its capabilities. The kernel leaves that to us (`FUSE_HANDLE_KILLPRIV_V2`), so that it need not ask for the
/// capabilities before each single write; POSIX wants the bits gone at the first write, which is a moment later. Answers
/// whether the mode changed: the kernel may know the old one.
pub(super) fn drop_privileges(place: &Place, uid: u32) -> io::Result<bool> {
    match sys::removexattr(&place.path, place.follow(), OsStr::new("security.capability")) {
        // There are none, there can be none, or we could not have set any.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENODATA | libc::EOPNOTSUPP | libc::EPERM)) => {}
        other => other?,
    }
    let mode = place.metadata()?.mode() & 0o7777;
    let kept = unprivileged(mode, uid);
    if kept != mode {
        std::fs::set_permissions(&place.path, Permissions::from_mode(kept))?;
    }
    Ok(kept != mode)
}

/// Anybody but root.
const SOMEBODY: u32 = 1;

/// The same for a file that is open, and got the bits since: the kernel says so with the write.
pub(super) fn drop_bits(file: &File) -> io::Result<()> {
    let mode = file.metadata()?.mode() & 0o7777;
    match unprivileged(mode, SOMEBODY) {
        kept if kept != mode => file.set_permissions(Permissions::from_mode(kept)),
        _ => Ok(()),
    }
}

/// What is left of a mode when `uid` may write to the file. Without execution by the group the bit is no privilege.
pub(super) fn unprivileged(mode: u32, uid: u32) -> u32 {
    let group = if mode & libc::S_IXGRP != 0 { libc::S_ISGID } else { 0 };
    if uid == 0 { mode } else { mode & !(libc::S_ISUID | group) }
}

/// Whether a mode has bits that anybody but root takes away by writing to the file.
pub(super) fn has_privileges(mode: u32) -> bool {
    unprivileged(mode, SOMEBODY) != mode
}

/// Puts times back to what `metadata` says.
pub(super) fn restore_times(path: &Path, metadata: &Metadata) -> io::Result<()> {
    let at = |seconds, nanoseconds: i64| Time::At(seconds, u32::try_from(nanoseconds).unwrap_or(0));
    let atime = at(metadata.atime(), metadata.atime_nsec());
    let mtime = at(metadata.mtime(), metadata.mtime_nsec());
    sys::utimens(path, false, atime, mtime)
}
