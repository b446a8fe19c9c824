//! The inode table: the nodes that the kernel knows, and their names.
//!
//! One lock guards it, `Tree::table`. Every operation on names and attributes takes it for its duration, since these
//! system calls are short. Opens and releases take it, and so does the archive in `Namespace::exclusively`, while it
//! renames one file over another. Workers take it at the beginning and end of a recall, never during it. No wait for
//! a disk, a decoder or the kernel's answer to an invalidation may happen under it. stepfs is the only writer of its
//! tree, so every check under the lock holds until its release.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fuser::{FileType, Generation};

use super::errno::{Fault, Result};
use super::node::Node;
use super::numbers::{Numbers, ROOT};
use super::place::Place;
use super::sys;
use crate::archive::{Archive, FileId};
use crate::store::MIN_RELEASE_BYTES;
use crate::store::beneath::{self, Reached};

/// Longest name of a file, as in every file system of Linux.
const NAME_MAX: usize = 255;

/// The kernel's name for this kind of file.
pub(super) fn kind(file_type: std::fs::FileType) -> FileType {
    if file_type.is_dir() {
        FileType::Directory
    } else if file_type.is_symlink() {
        FileType::Symlink
    } else if file_type.is_fifo() {
        FileType::NamedPipe
    } else if file_type.is_socket() {
        FileType::Socket
    } else if file_type.is_char_device() {
        FileType::CharDevice
    } else if file_type.is_block_device() {
        FileType::BlockDevice
    } else {
        FileType::RegularFile
    }
}

/// The inode table. See the module for its lock.
pub(super) struct Table {
    root: PathBuf,
    nodes: HashMap<u64, Node>,
    numbers: Numbers,
    /// Nodes that were ever known. A number with this generation names one of them only, so a handle of a removed file
    /// (`open_by_handle_at`) never leads to a later one.
    generations: u64,
}

impl Table {
    /// A table that knows the root of `tree` (absolute).
    pub(super) fn new(tree: &Path) -> io::Result<Self> {
        let file = FileId::of(&tree.metadata()?);
        let mut root = Node::new(FileType::Directory, file, None);
        root.lookups = 1;
        Ok(Self {
            root: tree.to_path_buf(),
            nodes: HashMap::from([(ROOT, root)]),
            numbers: Numbers::new(file),
            // Another at each mount, so that a handle of a former mount leads nowhere.
            generations: getrandom::u32().map_err(io::Error::other)?.into(),
        })
    }

    /// A node that the kernel asks for.
    pub(super) fn node(&self, ino: u64) -> Result<&Node> {
        self.nodes.get(&ino).ok_or(Fault::Code(libc::ESTALE))
    }

    /// A node that the kernel asks for.
    pub(super) fn node_mut(&mut self, ino: u64) -> Result<&mut Node> {
        self.nodes.get_mut(&ino).ok_or(Fault::Code(libc::ESTALE))
    }

    /// A node, if the kernel knows it.
    pub(super) fn get_mut(&mut self, ino: u64) -> Option<&mut Node> {
        self.nodes.get_mut(&ino)
    }

    /// Nodes that are known, the root among them.
    #[cfg(all(test, feature = "shuttle"))]
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The number that a file shows.
    pub(super) fn number(&mut self, file: FileId) -> u64 {
        self.numbers.of(file)
    }

    /// Path relative to the tree; none for a node without a name.
    pub(super) fn path(&self, ino: u64) -> Option<PathBuf> {
        let mut names = Vec::new();
        let mut at = ino;
        while at != ROOT {
            let (parent, name) = self.nodes.get(&at)?.names.first()?;
            names.push(name);
            at = *parent;
        }
        Some(names.into_iter().rev().collect())
    }

    /// The node of a path relative to the tree, as far as the kernel knows it; else 0, which no node has.
    pub(super) fn find(&self, path: &Path) -> u64 {
        let child = |at: u64, name| self.nodes.get(&at)?.children.get(name).copied();
        path.iter().try_fold(ROOT, child).unwrap_or(0)
    }

    /// All paths of a node that are known.
    pub(super) fn paths(&self, ino: u64) -> Vec<PathBuf> {
        let names = self.nodes.get(&ino).map_or(&[][..], |node| &node.names);
        names.iter().filter_map(|(parent, name)| Some(self.path(*parent)?.join(name))).collect()
    }

    /// The tree itself.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The path through which operations reach a file of the tree, however long its own path is.
    pub(super) fn reach(&self, path: &Path) -> io::Result<Reached> {
        beneath::reach(&self.root, path)
    }

    /// How to reach a node's file.
    pub(super) fn place(&self, ino: u64) -> Result<Place> {
        if let Some(path) = self.path(ino) {
            return Ok(Place::named(self.reach(&path)?));
        }
        let held = self.node(ino)?.held.as_ref().ok_or(Fault::Code(libc::ESTALE))?;
        Ok(Place::held(Arc::clone(held)))
    }

    /// Path, relative to the tree, of a name in a directory. Refuses invalid names.
    pub(super) fn child(&self, parent: u64, name: &OsStr) -> Result<PathBuf> {
        if self.node(parent)?.kind != FileType::Directory {
            return Err(libc::ENOTDIR.into());
        }
        let bytes = name.as_bytes();
        if bytes.len() > NAME_MAX {
            return Err(libc::ENAMETOOLONG.into());
        }
        if matches!(bytes, b"" | b"." | b"..") || bytes.contains(&b'/') || bytes.contains(&0) {
            return Err(libc::EINVAL.into());
        }
        // A removed directory has no entries and gets none.
        Ok(self.path(parent).ok_or(Fault::Code(libc::ENOENT))?.join(name))
    }

    /// The node of the file at `parent`/`name`, which `metadata` describes, with that name. The caller counts the
    /// lookup.
    pub(super) fn admit(&mut self, archive: &Archive, parent: u64, name: &OsStr, metadata: &Metadata) -> Result<u64> {
        let file = FileId::of(metadata);
        let ino = self.numbers.of(file);
        if self.nodes.get(&parent).and_then(|dir| dir.children.get(name)) == Some(&ino) {
            return Ok(ino);
        }
        if !self.nodes.contains_key(&ino) {
            let kind = kind(metadata.file_type());
            let path = self.child(parent, name)?;
            let large = kind == FileType::RegularFile && metadata.len() >= MIN_RELEASE_BYTES;
            let (stub, unread) = if large && archive.may_be_stub(&path) {
                let place = Place::named(self.reach(&path)?);
                match place.open(true, false).and_then(|opened| archive.stub(&path, &opened)) {
                    Ok(stub) => (stub, false),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(error.into()),
                    // stepfs may not read it, or the device fails. It is listed all the same, and its open fails the
                    // same way or shows its kind.
                    Err(_) => (None, true),
                }
            } else {
                (None, false)
            };
            let mut node = Node::new(kind, file, stub);
            node.unread = unread;
            self.generations += 1;
            node.generation = Generation(self.generations);
            self.nodes.insert(ino, node);
        }
        self.bind(parent, name, ino);
        Ok(ino)
    }

    /// Gives a node a name. Another node with that name loses it.
    pub(super) fn bind(&mut self, parent: u64, name: &OsStr, ino: u64) {
        self.unbind(parent, name);
        if let Some(dir) = self.nodes.get_mut(&parent) {
            dir.children.insert(name.to_owned(), ino);
        }
        if let Some(node) = self.nodes.get_mut(&ino) {
            if node.kind == FileType::Directory {
                node.names.clear();
            }
            node.names.push((parent, name.to_owned()));
            node.held = None;
        }
    }

    /// Takes a name away, and returns its node. The node stays until [`Table::reap`].
    pub(super) fn unbind(&mut self, parent: u64, name: &OsStr) -> Option<u64> {
        let ino = self.nodes.get_mut(&parent)?.children.remove(name)?;
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.names.retain(|(dir, called)| (*dir, called.as_os_str()) != (parent, name));
        }
        Some(ino)
    }

    /// Before a file loses a name: holds the file if programs that know it can reach it in no other way.
    pub(super) fn before_removal(&mut self, path: &Path, metadata: &Metadata) -> Removal {
        let ino = self.numbers.of(FileId::of(metadata));
        let known = self.nodes.contains_key(&ino);
        let hold = || self.reach(path).and_then(|path| sys::open_path(&path)).ok().map(Arc::new);
        let held = if known { hold() } else { None };
        Removal { ino, file: FileId::of(metadata), last: metadata.is_dir() || metadata.nlink() <= 1, held }
    }

    /// After the name is gone: updates the table.
    pub(super) fn removed(&mut self, parent: u64, name: &OsStr, removal: Removal) {
        self.unbind(parent, name);
        match self.nodes.get_mut(&removal.ino) {
            Some(node) if node.names.is_empty() => {
                node.held = removal.held;
                self.reap(removal.ino);
            }
            Some(_) => {}
            None if removal.last => self.numbers.gone(removal.file),
            None => {}
        }
    }

    /// A node's file was replaced by another with the same name and number.
    pub(super) fn replaced(&mut self, old: FileId, new: FileId) {
        self.numbers.replaced(old, new);
    }

    /// The kernel knows a node once more.
    pub(super) fn count(&mut self, ino: u64) {
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.lookups += 1;
        }
    }

    /// The kernel forgot a node `times` times.
    pub(super) fn forget(&mut self, ino: u64, times: u64) {
        if ino == ROOT {
            return;
        }
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.lookups = node.lookups.saturating_sub(times);
            self.reap(ino);
        }
    }

    /// Drops an unused node, and then its parents if they are only there for it.
    pub(super) fn reap(&mut self, ino: u64) {
        let mut unused = vec![ino];
        while let Some(ino) = unused.pop() {
            if ino == ROOT || !self.nodes.get(&ino).is_some_and(Node::unused) {
                continue;
            }
            let Some(node) = self.nodes.remove(&ino) else {
                continue;
            };
            if node.names.is_empty() {
                // It has no known name. If another exists, its next lookup finds the file's own number again.
                self.numbers.gone(node.file);
            }
            for (parent, name) in node.names {
                if let Some(dir) = self.nodes.get_mut(&parent) {
                    dir.children.remove(&name);
                    unused.push(parent);
                }
            }
        }
    }
}

/// The result of [`Table::before_removal`].
pub(super) struct Removal {
    ino: u64,
    file: FileId,
    last: bool,
    held: Option<Arc<std::fs::File>>,
}

#[cfg(test)]
mod tests;
