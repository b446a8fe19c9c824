//! What stepfs notes on files of its tree, as extended attributes: they go with renames, copies of the store, releases
//! and recalls. The mount does not list them.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use xattr::FileExt as _;

use super::durable::{Attribute, CrashPoint, DeviceFile};
use super::object::Id;
use super::{Profile, beneath};

/// A user wants this file, or all files below this directory, to stay.
pub const PIN: &str = "user.stepfs.pin";
/// The profile that a user wants for this file, or for all files below this directory, whatever the rules say.
pub const PROFILE: &str = "user.stepfs.profile";
/// A file whose bytes look like a stub, and are what a program wrote.
pub const PLAIN: &str = "user.stepfs.plain";
/// The object that a recalled file was decoded from: as long as nobody writes to the file it can have it back.
pub const RECALLED: &str = "user.stepfs.recalled";

/// Whether the file or directory at `path` inside the tree, or a directory above it, is pinned.
///
/// # Errors
/// What the device reports; a file system without such attributes has no pins.
pub fn is_pinned(tree: &Path, path: &Path) -> io::Result<bool> {
    for above in path.ancestors() {
        if read_at(tree, above, PIN)?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the file or directory at an absolute path is pinned itself.
///
/// # Errors
/// What the device reports; what is gone has no pin, and nothing has on a file system without such attributes.
pub fn has_pin(path: &Path) -> io::Result<bool> {
    Ok(read(path, PIN)?.is_some())
}

/// The profile that a user set for the file or directory at `path` inside the tree: its own, or that of the nearest
/// directory above that has one.
///
/// # Errors
/// What the device reports; nothing is set on a file system without such attributes.
pub fn profile_mark(tree: &Path, path: &Path) -> io::Result<Option<Profile>> {
    for above in path.ancestors() {
        let Some(value) = read_at(tree, above, PROFILE)? else { continue };
        let name = String::from_utf8_lossy(&value);
        match name.parse() {
            Ok(profile) => return Ok(Some(profile)),
            // Nobody can set one in the mount.
            Err(why) => log::warn!("{}: {PROFILE} is not looked at: {why}", above.display()),
        }
    }
    Ok(None)
}

/// A mark on what is at `path` inside the tree.
fn read_at(tree: &Path, path: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
    unless_gone(beneath::reach(tree, path).and_then(|path| xattr::get(&path, name)))
}

fn read(path: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
    unless_gone(xattr::get(path, name))
}

fn unless_gone(value: io::Result<Option<Vec<u8>>>) -> io::Result<Option<Vec<u8>>> {
    match value {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::EOPNOTSUPP)) => Ok(None),
        value => value,
    }
}

/// Notes on a file what it was recalled from. Best effort: without it the object may go before the file is archived
/// again, where the file system has no such attributes.
pub fn mark_recalled(file: &DeviceFile, object: Id) {
    let words = object.to_string();
    let mark = Attribute::Extended(OsStr::new(RECALLED), words.as_bytes());
    if let Err(error) = file.set(&mark, CrashPoint::RecallWritten) {
        log::debug!("cannot note what a file was recalled from: {error}");
    }
}

/// Whether a file is one that was brought back.
pub fn is_recalled(file: &File) -> bool {
    file.get_xattr(RECALLED).is_ok_and(|value| value.is_some())
}

/// What a file says it was recalled from.
pub fn recalled_from(file: &DeviceFile) -> Option<Id> {
    let value = file.as_file().get_xattr(RECALLED).ok().flatten()?;
    std::str::from_utf8(&value).ok()?.parse().ok()
}

/// Whether a file that looks like a stub is what a program wrote.
pub(super) fn is_plain(file: &File) -> bool {
    file.get_xattr(PLAIN).is_ok_and(|value| value.is_some())
}

/// Notes on a file that it is no stub, whatever it looks like.
pub(super) fn mark_plain(file: &DeviceFile, at: CrashPoint) -> io::Result<()> {
    let mark = || file.set(&Attribute::Extended(OsStr::new(PLAIN), b"1"), at);
    match mark() {
        // Read-only, for its owner too.
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => {
            let mode = file.metadata()?.permissions();
            file.set(&Attribute::Mode(mode.mode() | libc::S_IWUSR), at)?;
            mark().and(file.set(&Attribute::Mode(mode.mode()), at))
        }
        result => result,
    }
}
