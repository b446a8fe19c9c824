//! Which other files make a file whole, by its name.
//!
//! Some formats spread a checkpoint over several files, and only an index tells the tensors of the others. Their writers
//! write the index last. The archive asks here, and names no format.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::bundle::Shard;

/// The files that a file is no state without.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Siblings {
    /// Tells what the tensors of the others are.
    pub index: PathBuf,
    /// All files with tensors of the checkpoint, this one too. `None` if the index lists them: [`super::Model::files`].
    pub files: Option<Vec<PathBuf>>,
}

/// The siblings of a file; `None` if it is whole by itself.
pub fn siblings(path: &Path) -> Option<Siblings> {
    // A file with one chunk looks like any file of torch.save inside, so the name must tell.
    if path.extension() == Some(OsStr::new("distcp")) {
        return Some(Siblings { index: path.with_file_name(METADATA), files: None });
    }
    let shard = Shard::of(path)?;
    Some(Siblings { files: Some(shard.files().collect()), index: shard.index })
}

/// Whether other files say what the tensors in a file are. Equal files may then be of different tensors.
pub fn is_named_elsewhere(path: &Path) -> bool {
    siblings(path).is_some()
}

/// Whether a file has the name of an index.
pub fn is_index(path: &Path) -> bool {
    path.file_name() == Some(OsStr::new(METADATA)) || path.extension() == Some(OsStr::new("index"))
}

/// The index that makes a directory one checkpoint, if the directory has it.
pub fn index_in(directory: &Path) -> PathBuf {
    directory.join(METADATA)
}

/// Whether the numbers in a file's name are those of a rank and its files: `__0_1.distcp`.
pub fn numbers_ranks(name: &str) -> bool {
    name.starts_with("__") && name.ends_with(".distcp")
}

/// Name of the index of torch's distributed checkpoints.
const METADATA: &str = ".metadata";
