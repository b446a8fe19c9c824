//! Removes set-user-id and set-group-id bits and capabilities when another user writes to a file.

use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::place::Place;

/// Removes a file's set-user-id and set-group-id bits, unless root opens it for writing or truncates it, and its
/// capabilities in any case. The kernel leaves that to us (`FUSE_HANDLE_KILLPRIV_V2`), so that it need not ask for
/// the capabilities before each write. POSIX wants the bits gone at the first write, a moment later. Returns whether
/// the mode changed, since the kernel may have cached the old one.
pub(super) fn drop_privileges(place: &Place, uid: u32) -> io::Result<bool> {
    let capabilities = OsStr::new("security.capability");
    // Most files have none. A removal would wait for the file system's journal to find that out.
    if place.has_xattr(capabilities) {
        match place.removexattr(capabilities) {
            // Gone meanwhile, or we could not have set any.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENODATA | libc::EOPNOTSUPP | libc::EPERM)) => {}
            other => other?,
        }
    }
    let mode = place.metadata()?.mode() & 0o7777;
    let kept = unprivileged(mode, uid);
    if kept != mode {
        std::fs::set_permissions(&place.path, Permissions::from_mode(kept))?;
    }
    Ok(kept != mode)
}

/// Any user but root.
const SOMEBODY: u32 = 1;

/// The same for an open file that got the bits since: the kernel says so with the write.
pub(super) fn drop_bits(file: &File) -> io::Result<()> {
    let mode = file.metadata()?.mode() & 0o7777;
    match unprivileged(mode, SOMEBODY) {
        kept if kept != mode => file.set_permissions(Permissions::from_mode(kept)),
        _ => Ok(()),
    }
}

/// The mode after a write by `uid`. Without execution by the group, the group's bit is no privilege.
pub(super) fn unprivileged(mode: u32, uid: u32) -> u32 {
    let group = if mode & libc::S_IXGRP != 0 { libc::S_ISGID } else { 0 };
    if uid == 0 { mode } else { mode & !(libc::S_ISUID | group) }
}

/// Whether a mode has bits that a write by another user than root takes away.
pub(super) fn has_privileges(mode: u32) -> bool {
    unprivileged(mode, SOMEBODY) != mode
}
