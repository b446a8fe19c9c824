//! Lists files, and looks at them.

use std::fs::{self, DirEntry, File, FileType, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::beneath;

/// The directory of the tree that keeps removed files (`trash_for`). Its files are ordinary ones, but no checkpoints of a run.
pub const TRASH: &str = ".stepfs-trash";

/// Whether a path inside the tree is the trash, or lies in it.
pub fn is_trash(path: &Path) -> bool {
    path.starts_with(TRASH)
}

/// Paths inside the tree of the regular files at or below `path`, in no order. Never follows symlinks, and skips
/// directories that disappear meanwhile. A file is listed even if it cannot be opened.
///
/// # Errors
/// They name the directory, or `path`.
pub fn files_below(tree: &Path, path: &Path) -> io::Result<Vec<PathBuf>> {
    let of =
        |error: io::Error, at: &Path| io::Error::new(error.kind(), format!("{}: {error}", tree.join(at).display()));
    if !beneath::metadata(tree, path).map_err(|error| of(error, path))?.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let (mut files, mut rest) = (Vec::new(), vec![path.to_path_buf()]);
    while let Some(directory) = rest.pop() {
        let mut look = || -> io::Result<()> {
            for (found, kind) in entries(tree, &directory)? {
                if kind.is_dir() {
                    rest.push(found);
                } else if kind.is_file() {
                    files.push(found);
                }
            }
            Ok(())
        };
        match look() {
            // It went, or something else took its place.
            Err(error)
                if directory != path
                    && matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
            looked => looked.map_err(|error| of(error, &directory))?,
        }
    }
    Ok(files)
}

/// The names in a directory of the tree, as paths inside the tree, each with its kind. Skips names that went meanwhile.
///
/// # Errors
/// Device errors; `ENOENT` if the directory went, `ENOTDIR` for a link.
pub(crate) fn entries(tree: &Path, directory: &Path) -> io::Result<Vec<(PathBuf, FileType)>> {
    let listed = fs::read_dir(beneath::by_descriptor(&beneath::open_dir(tree, directory)?))?;
    let entry = |entry: io::Result<DirEntry>| {
        let found = entry.and_then(|entry| Ok((directory.join(entry.file_name()), entry.file_type()?)));
        let is_gone = found.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        (!is_gone).then_some(found)
    };
    listed.filter_map(entry).collect()
}

/// The same of a directory that may have gone, or made room for a link: it has no names then.
pub(crate) fn entries_if_any(tree: &Path, directory: &Path) -> io::Result<Vec<(PathBuf, FileType)>> {
    match entries(tree, directory) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(Vec::new()),
        listed => listed,
    }
}

/// Opens any file to look at it, without a trace in its times where that is allowed. A pipe does not wait for a writer.
pub fn open_aside(path: &Path) -> io::Result<File> {
    let open = |flags| File::options().read(true).custom_flags(libc::O_NONBLOCK | flags).open(path);
    // Only the owner of a file may set it.
    open(libc::O_NOATIME).or_else(|_| open(0))
}

/// An absolute path whose last parts may be missing. The others have no links and no `..`.
pub fn real(path: &Path) -> PathBuf {
    let found = path.ancestors().find_map(|above| Some((above, fs::canonicalize(above).ok()?)));
    let joined = |(above, real): (&Path, PathBuf)| match path.strip_prefix(above) {
        Ok(rest) if !rest.as_os_str().is_empty() => real.join(rest),
        _ => real,
    };
    found.map_or(path.to_path_buf(), joined)
}

/// The file or directory at a path inside the tree, if any. A link's target is not inside.
pub(crate) fn found_at(tree: &Path, path: &Path) -> io::Result<Option<Metadata>> {
    match beneath::metadata(tree, path) {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The time of a file's last change, in nanoseconds since 1970. Programs cannot set it.
pub(crate) fn changed_ns(metadata: &Metadata) -> i64 {
    metadata.ctime().saturating_mul(1_000_000_000).saturating_add(metadata.ctime_nsec())
}

/// Modification time in nanoseconds since 1970.
pub(crate) fn modified_ns(metadata: &Metadata) -> i64 {
    metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec())
}
