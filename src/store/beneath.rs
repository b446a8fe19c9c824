//! Opens paths below a directory of the store, and nothing outside it.
//!
//! A user of a mount can replace a directory with a symlink between two steps of the archive, and another user may have
//! made the store. So nothing is opened by its whole path: each name is opened in the directory before it, and symlinks
//! are never followed. A path through a symlink fails like a path through a file (`ENOTDIR`). An absolute path, or one
//! with `..`, is refused (`EXDEV`).

use std::ffi::OsStr;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::Error;

/// Flags of a handle that only opens the next name: it needs no read permission and never blocks.
const STEP: libc::c_int = libc::O_PATH | libc::O_DIRECTORY;

/// Longest path that is used directly. The kernel takes 4,095 bytes, and a step may need another name in the same
/// directory.
const LONGEST: usize = 4095 - 256;

/// Opens a name in a directory, without following a symlink.
fn open_in(directory: &File, name: &OsStr, flags: libc::c_int) -> io::Result<File> {
    let flags = OFlags::from_bits_retain(flags.cast_unsigned()) | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(directory, name, flags, Mode::empty())?.into())
}

/// The components of a path; refuses those that lead upwards.
fn names(path: &Path) -> io::Result<Vec<&OsStr>> {
    let name = |component| match component {
        Component::Normal(name) => Ok(name),
        _ => Err(Errno::XDEV.into()),
    };
    path.components().map(name).collect()
}

/// Opens the directory at `names` below `root`, which must not be a symlink itself.
fn walk(root: &Path, names: &[&OsStr]) -> io::Result<File> {
    let root = OpenOptions::new().read(true).custom_flags(STEP | libc::O_NOFOLLOW).open(root)?;
    names.iter().try_fold(root, |directory, name| open_in(&directory, name, STEP))
}

/// Opens `path` below `root` with these flags of open(2), which neither create nor truncate. A symlink as last name is
/// not followed either.
///
/// # Errors
/// Device errors; `ENOTDIR`, `ELOOP` or `EXDEV` for a path that leads outside.
pub fn open(root: &Path, path: &Path, flags: libc::c_int) -> io::Result<File> {
    let names = names(path)?;
    match names.split_last() {
        Some((last, above)) => open_in(&walk(root, above)?, last, flags),
        None => open_in(&walk(root, &[])?, OsStr::new("."), flags),
    }
}

/// Opens an `O_PATH` handle for `path` below `root`, for any kind of file. It needs no permission, and gives only
/// metadata and [`by_descriptor`].
pub fn hold(root: &Path, path: &Path) -> io::Result<File> {
    open(root, path, libc::O_PATH)
}

/// Opens a regular file to read it. Never blocks on other kinds of files.
///
/// # Errors
/// As of [`open`]; `InvalidInput` if it is no regular file.
pub fn open_file(root: &Path, path: &Path) -> io::Result<File> {
    plain(open(root, path, libc::O_RDONLY | libc::O_NONBLOCK)?)
}

/// Opens a directory to list it or to make it durable.
pub fn open_dir(root: &Path, path: &Path) -> io::Result<File> {
    open(root, path, libc::O_RDONLY | libc::O_DIRECTORY)
}

/// The metadata of `path` below `root`.
pub fn metadata(root: &Path, path: &Path) -> io::Result<Metadata> {
    hold(root, path)?.metadata()
}

/// A path for calls that need one, and the handle that keeps it valid.
#[derive(Debug)]
pub struct Reached {
    path: PathBuf,
    /// The descriptor that the path begins with.
    _from: Option<Arc<File>>,
}

impl Reached {
    /// A name in a directory that is held.
    pub fn in_directory(directory: &Arc<File>, name: &OsStr) -> Reached {
        Reached { path: by_descriptor(directory).join(name), _from: Some(Arc::clone(directory)) }
    }
}

impl Deref for Reached {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

impl AsRef<Path> for Reached {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

impl From<PathBuf> for Reached {
    fn from(path: PathBuf) -> Reached {
        Reached { path, _from: None }
    }
}

/// The path of `path` below `root`, for calls that need a name. The caller must know that no symlink is on the way.
///
/// A path may be longer than the kernel takes in one call. The result then begins with the descriptor of the directory
/// two levels above: it is short, and its parent is an ordinary name.
///
/// # Errors
/// As of [`open`], for long paths only.
pub fn reach(root: &Path, path: &Path) -> io::Result<Reached> {
    // `join("")` would end in a slash.
    let whole = if path.as_os_str().is_empty() { root.to_path_buf() } else { root.join(path) };
    if whole.as_os_str().len() <= LONGEST {
        return Ok(whole.into());
    }
    let names = names(path)?;
    let Some((above, last)) = names.split_last_chunk::<2>() else { return Ok(whole.into()) };
    let from = walk(root, above)?;
    Ok(Reached { path: by_descriptor(&from).join(last[0]).join(last[1]), _from: Some(Arc::new(from)) })
}

/// A path to an open file or directory; it stays valid if the file's name changes.
pub fn by_descriptor(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Opens a regular file to read it, by a path whose directory is trusted.
///
/// # Errors
/// Device errors; `ELOOP` for a symlink; `InvalidInput` if it is no regular file.
pub fn open_plain(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    plain(OpenOptions::new().read(true).custom_flags(flags).open(path)?)
}

/// Checks that the file is a regular one.
///
/// # Errors
/// `InvalidInput` if it is not; device errors.
pub fn plain(file: File) -> io::Result<File> {
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")),
    }
}

/// Checks that no symlink or file is in the place of a store's directory. The next open creates a missing directory.
pub(super) fn real_directory(path: &Path) -> Result<(), Error> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.is_dir() => Err(Error::NotReal(path.to_path_buf(), "directory")),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io(path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_path_of_any_length_is_reached() {
        let dir = tempfile::tempdir().unwrap();
        let name = "n".repeat(200);
        let mut path = PathBuf::new();
        for level in 0..50 {
            fs::create_dir(reach(dir.path(), &path.join(&name)).unwrap()).unwrap();
            path.push(&name);
            let (file, other) = (path.join("f"), path.join("g"));
            let reached = reach(dir.path(), &file).unwrap();
            assert!(reached.as_os_str().len() <= LONGEST);
            fs::write(&reached, format!("{level}")).unwrap();
            // Its directory is no symlink, although the path begins with one.
            assert!(fs::symlink_metadata(reached.parent().unwrap()).unwrap().is_dir());
            fs::rename(reached, reach(dir.path(), &other).unwrap()).unwrap();
            assert!(!reach(dir.path(), &file).unwrap().exists());
            assert_eq!(
                open_file(dir.path(), &other).unwrap().metadata().unwrap().len(),
                format!("{level}").len() as u64
            );
        }
        assert!(reach(dir.path(), &path.join("none").join("f")).unwrap().symlink_metadata().is_err());
        assert_eq!(reach(dir.path(), Path::new("")).unwrap().as_os_str(), dir.path());
    }

    #[test]
    fn nothing_outside_is_reached() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/b/f"), "inside").unwrap();
        fs::write(dir.path().join("f"), "outside").unwrap();
        symlink(dir.path(), root.join("up")).unwrap();
        symlink("b", root.join("a/link")).unwrap();
        symlink("f", root.join("a/b/g")).unwrap();
        let code = |path: &str| open_file(&root, Path::new(path)).map(drop).map_err(|error| error.raw_os_error());
        assert_eq!(code("a/b/f"), Ok(()));
        assert_eq!(code("a/./b//f"), Ok(()));
        assert_eq!(code("up/f"), Err(Some(libc::ENOTDIR)));
        // Not even if the symlink leads to something inside.
        assert_eq!(code("a/link/f"), Err(Some(libc::ENOTDIR)));
        assert_eq!(code("a/b/g"), Err(Some(libc::ELOOP)));
        assert_eq!(code("../f"), Err(Some(libc::EXDEV)));
        assert_eq!(code("a/../../f"), Err(Some(libc::EXDEV)));
        assert_eq!(code(dir.path().join("f").to_str().unwrap()), Err(Some(libc::EXDEV)));
        assert_eq!(code("a/b"), Err(None));
        assert_eq!(code("none"), Err(Some(libc::ENOENT)));
        assert!(metadata(&root, Path::new("")).unwrap().is_dir());
        assert!(metadata(&root, Path::new("up")).unwrap().file_type().is_symlink());
        // The root itself must be no symlink.
        assert!(open_file(&root.join("up/root"), Path::new("a/b/f")).is_ok());
        assert!(open_file(&root.join("up"), Path::new("f")).is_err());
    }
}
