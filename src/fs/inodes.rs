//! The inode table: the nodes that the kernel knows, and their names.
//!
//! One lock guards it, `Tree::table`. Every operation on names and attributes takes it for its duration, since these
//! system calls are short. Opens and releases take it, and so does the archive in `Namespace::exclusively`, while it
//! renames one file over another. Workers take it at the beginning and end of a recall, never during it. No wait for
//! a disk, a decoder or the kernel's answer to an invalidation may happen under it. stepfs is the only writer of its
//! tree, so every check under the lock holds until its release.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fuser::{FileType, Generation};

use super::errno::{Fault, Result};
use super::node::{Node, Source};
use super::numbers::{Numbers, ROOT};
use super::place::Place;
use super::sys;
use crate::archive::{Archive, FileId};
use crate::store::MIN_RELEASE_BYTES;
use crate::store::beneath::{self, Reached};
use crate::store::engine::{Engine, identity};

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

/// What is at a name.
pub(super) struct Found {
    pub(super) metadata: Metadata,
    /// In a shared store: the directory itself. Other daemons change names, so no name says which one is meant. A file is looked up
    /// for each call: a descriptor would keep the file's room on the disk, even if another daemon has removed or released it.
    held: Option<Arc<File>>,
    /// See [`identity`]. Empty in a store of one daemon.
    identity: Vec<u32>,
}

impl Found {
    /// A file of a store that no other daemon serves.
    pub(super) fn of(metadata: Metadata) -> Found {
        Found { metadata, held: None, identity: Vec::new() }
    }
}

/// The inode table. See the module for its lock.
pub(super) struct Table {
    /// Other daemons change the tree, too.
    shared: bool,
    engine: Engine,
    root: PathBuf,
    nodes: HashMap<u64, Node>,
    numbers: Numbers,
    /// Nodes that were ever known. A number with this generation names one of them only, so a handle of a removed file
    /// (`open_by_handle_at`) never leads to a later one.
    generations: u64,
}

impl Table {
    /// A table that knows the root of `tree` (absolute).
    pub(super) fn new(tree: &Path, shared: bool) -> io::Result<Self> {
        let file = FileId::of(&tree.metadata()?);
        let mut root = Node::new(FileType::Directory, file, None);
        root.lookups = 1;
        root.held = Some(Arc::new(sys::open_path(tree)?));
        let engine = if shared { Engine::of(tree)? } else { Engine::Coherent };
        Ok(Self {
            shared,
            engine,
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
        // The root by its descriptor: commands ask there where a store went that was moved.
        if let Some(path) = self.path(ino).filter(|_| !self.shared && ino != ROOT) {
            return Ok(Place::named(self.reach(&path)?));
        }
        let node = self.node(ino)?;
        if let Some(held) = node.held.as_ref() {
            return Ok(Place::held(Arc::clone(held)));
        }
        // The kernel looks a name up anew after ESTALE.
        if let Some(Source::File(file)) = node.opened.as_ref().map(|opened| &opened.source) {
            self.engine.refresh(file, "")?;
            return Ok(Place::held(Arc::clone(file)));
        }
        let (parent, name) = node.names.first().ok_or(Fault::Code(libc::ESTALE))?;
        let opened = self.open_name(*parent, name);
        let held = opened.map_err(|fault| if fault.is_absence() { libc::ESTALE.into() } else { fault })?;
        // From here on this very file: another daemon may give the name to a symlink, which leads out of the tree.
        self.require(ino, &held)?;
        Ok(Place::held(Arc::new(held)))
    }

    /// How to reach a node's file to open it. In a shared store the caller locks it then, and looks at its name again, so the server
    /// is not asked before.
    pub(super) fn place_to_lock(&self, ino: u64) -> Result<Place> {
        let node = self.node(ino)?;
        match node.names.first() {
            Some((parent, name)) if self.shared && node.held.is_none() && node.opened.is_none() => {
                Ok(Place::named(self.at(*parent, name)?))
            }
            _ => self.place(ino),
        }
    }

    /// Attributes of a node's file. Maybe nothing refers to a stub any more that another daemon has replaced. Programs that read it
    /// go on, with the attributes that it had when it was looked up.
    pub(super) fn metadata(&self, ino: u64) -> Result<Metadata> {
        let found = self.place(ino).and_then(|place| Ok(place.metadata()?));
        found.or_else(|fault| {
            let node = self.node(ino)?;
            let seen = node.seen.as_deref().filter(|_| node.opened.is_some() && fault.is_loss());
            seen.cloned().ok_or(fault)
        })
    }

    /// Refuses a file that was opened by a node's name, and is another one: it took the name after [`Table::place`] looked. It may be
    /// a stub, so nobody may read or write it as the node's file. The kernel looks the name up anew.
    pub(super) fn require(&self, ino: u64, file: &File) -> Result<()> {
        let node = self.node(ino)?;
        let is_it =
            FileId::of_open(file)? == node.file && (node.identity.is_empty() || identity(file)? == node.identity);
        if is_it { Ok(()) } else { Err(libc::ESTALE.into()) }
    }

    /// In a shared store: holds a stub while programs read its object, so that they reach it by any name, or none. A stub takes
    /// no room. On NFS the client would keep a second name for it ([`Engine::Nfs`]). One that was just replaced is read all the same:
    /// the kernel looks a name up anew only once.
    pub(super) fn hold_while_open(&mut self, ino: u64) -> Result<()> {
        if self.shared && self.engine == Engine::Coherent {
            let held = self.place(ino).and_then(|place| Ok(place.hold()?));
            self.node_mut(ino)?.held =
                held.map(Some).or_else(|fault| if fault.is_loss() { Ok(None) } else { Err(fault) })?;
        }
        Ok(())
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
        Ok(self.path(parent).or(self.shared.then(PathBuf::new)).ok_or(Fault::Code(libc::ENOENT))?.join(name))
    }

    /// Other daemons change the tree, too.
    pub(super) fn engine(&self) -> Engine {
        self.engine
    }

    pub(super) fn is_shared(&self) -> bool {
        self.shared
    }

    /// How to reach a name in a directory.
    pub(super) fn at(&self, parent: u64, name: &OsStr) -> Result<Reached> {
        let path = self.child(parent, name)?;
        match self.node(parent)?.held.as_ref().filter(|_| self.shared) {
            Some(directory) => Ok(Reached::in_directory(directory, name)),
            None => Ok(self.reach(&path)?),
        }
    }

    /// The directory of a name.
    pub(super) fn directory(&self, parent: u64) -> Result<Arc<File>> {
        self.place(parent)?.hold().map_err(Fault::from)
    }

    /// Looks at a name.
    pub(super) fn look(&self, parent: u64, name: &OsStr) -> Result<Found> {
        if !self.shared {
            return Ok(Found::of(self.at(parent, name)?.symlink_metadata()?));
        }
        let held = self.open_name(parent, name)?;
        let (metadata, identity) = (held.metadata()?, identity(&held)?);
        let held = metadata.is_dir().then(|| Arc::new(held));
        Ok(Found { metadata, held, identity })
    }

    /// In a shared store: opens the file at a name now, only to refer to it.
    fn open_name(&self, parent: u64, name: &OsStr) -> Result<File> {
        let at = self.at(parent, name)?;
        self.engine.refresh(&*self.directory(parent)?, "")?;
        let held = sys::open_path(&at)?;
        self.engine.refresh(&held, "")?;
        Ok(held)
    }

    /// The node of the file that was found at `parent`/`name`, with that name. The caller counts the lookup.
    pub(super) fn admit(&mut self, archive: &Archive, parent: u64, name: &OsStr, found: &Found) -> Result<u64> {
        let metadata = &found.metadata;
        let file = FileId::of(metadata);
        let mut ino = self.numbers.of(file);
        if self.nodes.get(&ino).is_some_and(|node| node.identity != found.identity) {
            ino = self.numbers.renew(file);
        }
        let is_bound = self.nodes.get(&parent).and_then(|dir| dir.children.get(name)) == Some(&ino);
        if !self.nodes.contains_key(&ino) {
            let kind = kind(metadata.file_type());
            let path = self.child(parent, name)?;
            let large = kind == FileType::RegularFile && metadata.len() >= MIN_RELEASE_BYTES;
            let (stub, unread) = if large && archive.may_be_stub(&path) {
                let place = Place::named(self.at(parent, name)?);
                let opened = place.open(true, false);
                if let (true, Ok(opened)) = (self.shared, &opened)
                    && (FileId::of(&opened.metadata()?) != file || identity(opened)? != found.identity)
                {
                    // Another daemon gave the name to another file, which may be a stub. This one is none.
                    return Err(libc::ESTALE.into());
                }
                match opened.and_then(|opened| archive.stub(&path, &opened)) {
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
            node.held = found.held.clone();
            node.identity = found.identity.clone();
            self.generations += 1;
            node.generation = Generation(self.generations);
            self.nodes.insert(ino, node);
        }
        if let Some(node) = self.nodes.get_mut(&ino).filter(|node| self.shared && node.stub.is_some()) {
            node.seen = Some(Box::new(metadata.clone()));
        }
        if !is_bound {
            self.bind(parent, name, ino);
        }
        Ok(ino)
    }

    /// Gives a node a name. Another node with that name loses it.
    pub(super) fn bind(&mut self, parent: u64, name: &OsStr, ino: u64) {
        self.unbind(parent, name);
        if let Some(dir) = self.nodes.get_mut(&parent) {
            dir.children.insert(name.to_owned(), ino);
        }
        let mut left = Vec::new();
        if let Some(node) = self.nodes.get_mut(&ino) {
            if self.shared || node.kind == FileType::Directory {
                // Another daemon may have taken the others away. One is enough: the kernel looks a name up before it uses that.
                left = std::mem::take(&mut node.names);
            }
            if !self.shared {
                node.held = None;
            }
            node.names.push((parent, name.to_owned()));
        }
        for (parent, name) in left {
            if let Some(dir) = self.nodes.get_mut(&parent) {
                dir.children.remove(&name);
                self.reap(parent);
            }
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
        let hold = || self.reach(path).and_then(|path| sys::open_path(&path)).ok().map(Arc::new);
        let held = self.nodes.get(&ino).and_then(|node| if self.shared { node.held.clone() } else { hold() });
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

    /// A node's stub was replaced by this file, which is open.
    pub(super) fn recalled(&mut self, ino: u64, file: &Arc<File>) -> Result<()> {
        let node = self.node(ino)?;
        let (identity, held) = match self.shared {
            true => (identity(file)?, None),
            false => (Vec::new(), node.names.is_empty().then(|| Arc::clone(file))),
        };
        let (old, new) = (node.file, FileId::of(&file.metadata()?));
        self.numbers.replaced(old, new);
        let node = self.node_mut(ino)?;
        (node.file, node.stub, node.seen, node.identity, node.held) = (new, None, None, identity, held);
        if let Some(opened) = &mut node.opened {
            // Readers go on with the same file as the writer.
            opened.source = Source::File(Arc::clone(file));
            opened.handles.values().for_each(|handle| handle.switch(file));
        }
        Ok(())
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
            if node.names.is_empty() && self.numbers.of(node.file) == ino {
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
    held: Option<Arc<File>>,
}

#[cfg(test)]
mod tests;
