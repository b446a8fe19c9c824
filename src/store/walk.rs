//! Lists the files of a tree.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::beneath;

/// Paths inside the tree of the regular files at or below `path`, in no order. Never follows symlinks, and skips
/// directories that disappear meanwhile.
///
/// # Errors
/// They name the directory.
pub fn files_below(tree: &Path, path: &Path) -> io::Result<Vec<PathBuf>> {
    let (mut files, mut rest) = (Vec::new(), vec![path.to_path_buf()]);
    while let Some(found) = rest.pop() {
        let mut look = || -> io::Result<()> {
            let metadata = beneath::metadata(tree, &found)?;
            if metadata.is_file() {
                files.push(found.clone());
            } else if metadata.is_dir() {
                for entry in fs::read_dir(beneath::by_descriptor(&beneath::open_dir(tree, &found)?))? {
                    rest.push(found.join(entry?.file_name()));
                }
            }
            Ok(())
        };
        match look() {
            Err(error) if error.kind() == io::ErrorKind::NotFound && found != path => {}
            Err(error) => {
                return Err(io::Error::new(error.kind(), format!("{}: {error}", tree.join(&found).display())));
            }
            Ok(()) => {}
        }
    }
    Ok(files)
}
