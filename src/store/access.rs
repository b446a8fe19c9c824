//! Who may get at a store without going through a mount: its owner alone.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use super::beneath;

/// The list that what is made in a directory inherits. The mount knows of modes only: a list that lets somebody in would
/// look like a mode that lets a whole group in.
const INHERITED: &str = "system.posix_acl_default";

/// Makes a directory of the store its owner's alone, whatever it was before. The tree's own mode is the applications'.
pub(super) fn close(directory: &Path, is_tree: bool) -> io::Result<()> {
    let held = beneath::hold(directory, Path::new(""))?;
    let path = beneath::by_descriptor(&held);
    match xattr::remove_deref(&path, INHERITED) {
        Err(error) if !matches!(error.raw_os_error(), Some(libc::ENODATA | libc::EOPNOTSUPP | libc::EPERM)) => {
            return Err(error);
        }
        _ => {}
    }
    let mode = held.metadata()?.mode() & 0o7777;
    if is_tree || mode & 0o077 == 0 {
        return Ok(());
    }
    match fs::set_permissions(&path, Permissions::from_mode(mode & 0o700)) {
        // Somebody else's.
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Ok(()),
        result => result,
    }
}
