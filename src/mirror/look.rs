//! A look at a name of the tree.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::source::Shape;
use super::tree::{Attributes, Blob, Node, Witness};
use crate::store::{beneath, changed_ns, found_at, modified_ns};

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

impl Found {
    pub(super) fn of(shape: Shape, metadata: &Metadata) -> Found {
        let (attributes, witness) = (attributes_of(metadata), witness_of(metadata));
        Found { shape, attributes, len: metadata.len(), names: metadata.nlink(), witness }
    }
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
    let (kind, attributes) = (metadata.file_type(), attributes_of(&metadata));
    Ok(Some(if kind.is_dir() {
        Seen::Other(Node::Directory(attributes, Blob::NONE))
    } else if kind.is_symlink() {
        let target = fs::read_link(beneath::reach(tree, path)?)?;
        Seen::Other(Node::Link(attributes, target.as_os_str().as_bytes().to_vec()))
    } else if kind.is_file() {
        let Some(shape) = shape else { return Ok(None) };
        Seen::File(Found::of(shape, &metadata))
    } else {
        Seen::Nothing
    }))
}

/// The names in a directory of the tree that are no regular files. Of files the archive tells.
pub(super) fn others(tree: &Path, path: &Path) -> io::Result<Vec<PathBuf>> {
    let opened = beneath::open_dir(tree, path)?;
    let mut others = Vec::new();
    for entry in fs::read_dir(beneath::by_descriptor(&opened))? {
        let entry = entry?;
        if !entry.file_type()?.is_file() {
            others.push(path.join(entry.file_name()));
        }
    }
    Ok(others)
}

/// The attributes of a file, link or directory.
pub(super) fn attributes_of(metadata: &Metadata) -> Attributes {
    let (mode, uid, gid) = (metadata.mode() & 0o1777, metadata.uid(), metadata.gid());
    Attributes { mode, uid, gid, modified_ns: modified_ns(metadata) }
}

pub(super) fn witness_of(metadata: &Metadata) -> Witness {
    Witness { inode: metadata.ino(), changed_ns: changed_ns(metadata) }
}
