//! Who may get at a store without going through a mount: its owner alone.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

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
        // Somebody else's: `exposed` says what follows from that.
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Ok(()),
        result => result,
    }
}

/// The directory on the way to `root` (absolute, without links), or that itself, in which somebody but this process's user and
/// root may put another store in its place; none if there is no such.
///
/// # Errors
/// What the device reports.
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
