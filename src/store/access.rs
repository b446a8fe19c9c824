//! Keeps everyone but the owner out of a store, except through a mount.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::beneath;

/// The default ACL, which new files in a directory inherit. The mount only knows modes: an ACL that lets in one user
/// would look like a mode that lets in a whole group.
const INHERITED: &str = "system.posix_acl_default";

/// Restricts a directory of the store to its owner, whatever its mode was. The tree's own mode belongs to the
/// applications.
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
        // Another user's directory: `exposed` reports the consequence.
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Ok(()),
        result => result,
    }
}

/// The first directory at or above `root` (absolute, without links) where a user other than root and this process's
/// user can replace the store. `None` if there is none.
pub fn exposed(root: &Path) -> io::Result<Option<PathBuf>> {
    let own = rustix::process::geteuid().as_raw();
    for directory in root.ancestors() {
        let metadata = fs::symlink_metadata(directory)?;
        let mode = metadata.mode();
        let strangers = mode & 0o022 != 0 && mode & libc::S_ISVTX == 0;
        if ![0, own].contains(&metadata.uid()) || strangers {
            return Ok(Some(directory.to_path_buf()));
        }
    }
    Ok(None)
}
