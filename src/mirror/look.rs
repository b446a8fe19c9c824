//! A look at a name of the tree.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::pieces::Bytes;
use super::source::Shape;
use super::tree::{Attributes, Node, Witness};
use crate::store::{Marks, beneath, found_at};

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
