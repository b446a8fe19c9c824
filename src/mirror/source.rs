//! What a mirror asks of the store that it follows.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::store::{Hold, Id, Objects, Store};

/// What the archive knows of a regular file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// It may still change, or is not durable yet.
    Unsettled,
    /// Durable, and the newest of its lineage: its bytes are in the tree.
    Newest,
    /// Durable, and stays as it is: its bytes are in the tree.
    Whole,
    /// An object decodes to it.
    Object(Id),
    /// It cannot be read, or its bytes may not be durable, and nothing changes that by itself: `user.stepfs.why` says why.
    Stuck,
}

/// The newest state of a lineage, encoded before it has a newer one.
#[derive(Debug)]
pub enum Ahead {
    /// As this object, which the file becomes later.
    Object(Hold),
    /// It is to travel whole: it is to stay exact, or nothing says how coarse it may be.
    Whole,
    /// The state before it must be archived first, or the file has changed: ask again.
    Later,
}

/// A store with its archive. All paths are relative to the tree.
pub trait Source: Send + Sync {
    /// The store.
    fn store(&self) -> &Store;

    /// Its objects.
    fn objects(&self) -> &Arc<Objects>;

    /// Grows with every change of a file, its attributes or its name.
    fn changes(&self) -> u64;

    /// The names that changed since the last call, or `all` files, and the names in `also`; each with what the archive knows
    /// of a regular file there. All is of one instant: a file that moves has one name.
    fn changed(&self, all: bool, also: Vec<PathBuf>) -> Vec<(PathBuf, Option<Shape>)>;

    /// Whether a file that is the newest of its lineage is to stay exact.
    ///
    /// # Errors
    /// Device errors.
    fn stays_exact(&self, path: &Path) -> io::Result<bool>;

    /// Encodes the newest file of a lineage, which stays as it is.
    ///
    /// # Errors
    /// Device errors.
    fn ahead(&self, path: &Path) -> io::Result<Ahead>;
}
