//! The store: tree, objects, stubs, recovery, lock; all durable I/O.

use std::path::{Path, PathBuf};

/// One store, locked for this process.
pub struct Store {
    root: PathBuf,
}

impl Store {
    #[doc(hidden)]
    pub(crate) fn sketch(root: &Path) -> Self {
        Self {
            root: root.to_path_buf(),
        }
    }
    /// Absolute path of the directory that the mount shows.
    pub fn tree(&self) -> PathBuf {
        self.root.join("tree")
    }
    /// Absolute path of the store.
    pub fn root(&self) -> &Path {
        &self.root
    }
}

/// Stands in the tree for a released file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stub {
    /// Length of the file that readers see.
    pub logical_len: u64,
}
