//! Lists the files of a tree.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::beneath;

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
            for entry in fs::read_dir(beneath::by_descriptor(&beneath::open_dir(tree, &directory)?))? {
                let entry = entry?;
                let (kind, found) = (entry.file_type()?, directory.join(entry.file_name()));
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
