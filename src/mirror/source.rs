//! What a mirror asks of the store that it follows: the archive, and the names of the tree.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::pieces::Bytes;
use super::tree::{Attributes, Node, Witness};
use crate::store::{Hold, Id, Marks, Objects, Store, beneath, found_at};

/// How a regular file is to travel, by what the archive knows of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Not yet: it may still change, or is not durable, or the settings say so.
    Unsettled,
    /// As [`Source::ahead`] says: it is the newest of its lineage, and need not stay exact.
    Newest,
    /// All of its bytes, which are in the tree, and durable.
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

/// A name, and how a regular file there is to travel; `None` if the archive knows of none. Device errors.
pub type Told = (PathBuf, io::Result<Option<Shape>>);

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
    fn changed(&self, all: bool, also: Vec<PathBuf>) -> Vec<Told>;

    /// Encodes the newest file of a lineage, which stays as it is.
    ///
    /// # Errors
    /// Device errors.
    fn ahead(&self, path: &Path) -> io::Result<Ahead>;
}

/// A file of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) shape: Shape,
    pub(super) attributes: Attributes,
    pub(super) len: u64,
    /// Names that it has.
    pub(super) names: u64,
    pub(super) witness: Witness,
}

/// A name of the tree, as it was seen.
#[derive(Debug, PartialEq)]
pub(super) enum Seen {
    Nothing,
    File(Found),
    /// A link or directory.
    Other(Node),
}

/// Looks at a name of the tree. `None` for a file that the archive has not told of yet.
pub(super) fn see(tree: &Path, path: &Path, shape: Option<Shape>) -> io::Result<Option<Seen>> {
    let Some(metadata) = found_at(tree, path)? else { return Ok(Some(Seen::Nothing)) };
    let (kind, attributes) = (metadata.file_type(), Attributes::of(&metadata, Marks::of(tree, path)?));
    Ok(Some(if kind.is_dir() {
        Seen::Other(Node::Directory(attributes, Bytes::default()))
    } else if kind.is_symlink() {
        let target = fs::read_link(beneath::reach(tree, path)?)?;
        Seen::Other(Node::Link(attributes, target.as_os_str().as_bytes().to_vec()))
    } else if kind.is_file() {
        let Some(shape) = shape else { return Ok(None) };
        let (len, names, witness) = (metadata.len(), metadata.nlink(), Witness::of(&metadata));
        Seen::File(Found { shape, attributes, len, names, witness })
    } else {
        Seen::Nothing
    }))
}
