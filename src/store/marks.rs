//! stepfs's marks on files of its tree, as extended attributes. They survive renames, copies of the store, releases and
//! recalls. The mount does not list them.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use xattr::FileExt as _;

use super::durable::{Attribute, CrashPoint, DeviceFile};
use super::object::Id;
use super::{Profile, beneath};

/// A user wants to keep this file, or all files below this directory.
pub const PIN: &str = "user.stepfs.pin";
/// The profile that a user set for this file, or for all files below this directory. It overrides the rules.
pub const PROFILE: &str = "user.stepfs.profile";
/// The file's bytes look like a stub, but a program wrote them.
pub const PLAIN: &str = "user.stepfs.plain";
/// The object that a recalled file was decoded from. If nobody writes to the file, a release uses the object again.
pub const RECALLED: &str = "user.stepfs.recalled";

/// True if the file or directory at `path` inside the tree, or a directory above it, is pinned.
///
/// # Errors
/// Device errors. File systems without xattrs count as unpinned.
pub fn is_pinned(tree: &Path, path: &Path) -> io::Result<bool> {
    for above in path.ancestors() {
        if read_at(tree, above, PIN)?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// True if the file or directory at an absolute path is pinned itself.
///
/// # Errors
/// Device errors. Missing files, and file systems without xattrs, count as unpinned.
pub fn has_pin(path: &Path) -> io::Result<bool> {
    Ok(read(path, PIN)?.is_some())
}

/// The profile that a user set for the file or directory at `path` inside the tree: its own, or that of the nearest
/// directory above.
///
/// # Errors
/// Device errors. File systems without xattrs count as unset.
pub fn profile_mark(tree: &Path, path: &Path) -> io::Result<Option<Profile>> {
    for above in path.ancestors() {
        let Some(value) = read_at(tree, above, PROFILE)? else { continue };
        let name = String::from_utf8_lossy(&value);
        match name.parse() {
            Ok(profile) => return Ok(Some(profile)),
            // The mount refuses invalid values.
            Err(why) => log::warn!("{}: {PROFILE} is ignored: {why}", above.display()),
        }
    }
    Ok(None)
}

/// What a user wants of a file, or of all files below a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marks {
    /// It is pinned.
    pub pinned: bool,
    /// Its profile.
    pub profile: Option<Profile>,
}

impl Marks {
    /// Those of the file or directory itself, at a path inside the tree.
    ///
    /// # Errors
    /// Device errors. Missing files, and file systems without xattrs, have none.
    pub fn of(tree: &Path, path: &Path) -> io::Result<Marks> {
        let profile = read_at(tree, path, PROFILE)?.and_then(|name| String::from_utf8(name).ok()?.parse().ok());
        Ok(Marks { pinned: read_at(tree, path, PIN)?.is_some(), profile })
    }

    /// Gives them to a file or directory that has none. On a file system without xattrs it stays without.
    ///
    /// # Errors
    /// Device errors.
    pub fn set(&self, file: &DeviceFile, at: CrashPoint) -> io::Result<()> {
        let pin = self.pinned.then(|| (PIN, "1".into()));
        for (name, value) in pin.into_iter().chain(self.profile.as_ref().map(|profile| (PROFILE, profile.name()))) {
            match file.set(&Attribute::Extended(OsStr::new(name), value.as_bytes()), at) {
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    log::warn!("{name} of a file is lost: {error}");
                }
                set => set?,
            }
        }
        Ok(())
    }
}

/// Reads a mark of `path` inside the tree.
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

/// Marks a file with the object that it was recalled from. Best effort: on a file system without xattrs the object may
/// be removed before the file is archived again.
pub fn mark_recalled(file: &DeviceFile, object: Id) {
    let words = object.to_string();
    let mark = Attribute::Extended(OsStr::new(RECALLED), words.as_bytes());
    if let Err(error) = file.set(&mark, CrashPoint::RecallWritten) {
        log::debug!("cannot note the object of a recalled file: {error}");
    }
}

/// True if the file was recalled.
pub fn is_recalled(file: &File) -> bool {
    file.get_xattr(RECALLED).is_ok_and(|value| value.is_some())
}

/// The object that a file was recalled from.
pub fn recalled_from(file: &DeviceFile) -> Option<Id> {
    let value = file.as_file().get_xattr(RECALLED).ok().flatten()?;
    std::str::from_utf8(&value).ok()?.parse().ok()
}

/// True if a program wrote the bytes that look like a stub.
pub(super) fn is_plain(file: &File) -> bool {
    file.get_xattr(PLAIN).is_ok_and(|value| value.is_some())
}

/// Marks a file as no stub, whatever its bytes look like.
pub(super) fn mark_plain(file: &DeviceFile, at: CrashPoint) -> io::Result<()> {
    let mark = || file.set(&Attribute::Extended(OsStr::new(PLAIN), b"1"), at);
    match mark() {
        // Read-only, even for its owner.
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => {
            let mode = file.metadata()?.permissions();
            file.set(&Attribute::Mode(mode.mode() | libc::S_IWUSR), at)?;
            mark().and(file.set(&Attribute::Mode(mode.mode()), at))
        }
        result => result,
    }
}
