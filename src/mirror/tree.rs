//! The names of a store, as its mirror has them: a tree of directories, each with its own bytes on the mirror.
//!
//! A directory's bytes name its files, and the objects that they need with all ancestors. They name the directories in
//! it by the hashes of their bytes. So a save rewrites the bytes of its own directory and of those above it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::Metadata;
use std::ops::Bound;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::manifest::Top;
use super::pieces::{Bytes, Packed};
use super::place::{Error, Place, Result};
use crate::store::{Damage, Id, MAX_CHAIN, Marks, changed_ns, in_parallel, modified_ns, record};

/// Limit on a directory's bytes: a crafted one must not fill the memory. A million names take about 100 MB.
const MAX_DIRECTORY: u64 = 1 << 30;
/// Longer than any path that the kernel takes.
const MAX_PATH: usize = 4096;
/// Directories that are read at once: their bytes are in memory meanwhile.
const AT_ONCE: usize = 256;
const MAGIC: &[u8; 8] = b"stepfsMD";

/// An object on the mirror: an encoding that never changes, of an object that may have others in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Encoding {
    /// The object's id.
    pub id: Id,
    /// The object that it is a difference to.
    pub parent: Option<Id>,
    /// It decodes to other bytes than the file had.
    pub lossy: bool,
    /// The bytes of the object's file.
    pub bytes: Bytes,
}

/// What travels beside the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// Permission bits, without set-user-id and set-group-id: nobody gets programs that run as another machine's user.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time, nanoseconds since 1970.
    pub modified_ns: i64,
    /// Pin and profile.
    pub marks: Marks,
}

impl Attributes {
    /// Those of a file, link or directory.
    pub(super) fn of(metadata: &Metadata, marks: Marks) -> Attributes {
        let (mode, uid, gid) = (metadata.mode() & 0o1777, metadata.uid(), metadata.gid());
        Attributes { mode, uid, gid, modified_ns: modified_ns(metadata), marks }
    }
}

/// The bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// They are there as they are.
    Plain(Bytes),
    /// An object decodes to them, and how many they are.
    Object(Id, u64),
}

impl Content {
    /// How many they are.
    pub(super) fn len(&self) -> u64 {
        match self {
            Content::Plain(Bytes { len, .. }) | Content::Object(_, len) => *len,
        }
    }
}

/// Tells a file's content in the store from any other. No program can set the time of the last change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Witness {
    /// Inode number.
    pub inode: u64,
    /// Time of the last change of the file, nanoseconds since 1970.
    pub changed_ns: i64,
}

impl Witness {
    pub(super) fn of(metadata: &Metadata) -> Witness {
        Witness { inode: metadata.ino(), changed_ns: changed_ns(metadata) }
    }
}

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// Its attributes.
    pub attributes: Attributes,
    /// Its bytes.
    pub content: Content,
    /// The file of the store that has these bytes.
    pub witness: Witness,
}

/// What a name is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Node {
    /// A regular file.
    File(File),
    /// A symbolic link, and its target.
    Link(Attributes, Vec<u8>),
    /// A directory, and its bytes as they were packed last.
    Directory(Attributes, Bytes),
}

/// The names in a directory.
#[derive(Debug, Default)]
struct Directory {
    entries: BTreeMap<Vec<u8>, Node>,
    /// Where its bytes are; `None` if it, or one below it, has changed since.
    stored: Option<Bytes>,
}

/// The names of a store, and the objects that they need.
#[derive(Debug, Default)]
pub struct Tree {
    /// Each directory under its path. The top directory has the empty path.
    directories: BTreeMap<PathBuf, Directory>,
    /// The objects on the mirror.
    pub objects: HashMap<Id, Encoding>,
    /// Directories that cannot be read, each with the reason. They are empty here, and may have more names.
    pub unread: Vec<String>,
    /// Their pieces.
    pub(super) damaged: HashSet<Id>,
}

impl Tree {
    /// What is at a path that is not empty.
    pub fn get(&self, path: &Path) -> Option<&Node> {
        self.directories.get(path.parent()?)?.entries.get(path.file_name()?.as_bytes())
    }

    /// All names, each directory before what is in it.
    pub fn iter(&self) -> impl Iterator<Item = (PathBuf, &Node)> {
        self.below(Path::new(""))
    }

    /// All names below a path.
    pub(super) fn below(&self, path: &Path) -> impl Iterator<Item = (PathBuf, &Node)> {
        let directories = self.directories.range::<Path, _>((Bound::Included(path), Bound::Unbounded));
        let below = directories.take_while(move |(at, _)| at.starts_with(path));
        below.flat_map(|(at, of)| of.entries.iter().map(|(name, node)| (at.join(OsStr::from_bytes(name)), node)))
    }

    /// Where the bytes of the top directory are; `None` if something has changed since.
    pub(super) fn root(&self) -> Option<&Bytes> {
        self.directories.get(Path::new(""))?.stored.as_ref()
    }

    /// The links and directories in the directory at a path. `None` if there is no such directory.
    pub(super) fn others(&self, path: &Path) -> Option<impl Iterator<Item = PathBuf>> {
        let others = self.directories.get(path)?.entries.iter().filter(|(_, node)| !matches!(node, Node::File(_)));
        Some(others.map(move |(name, _)| path.join(OsStr::from_bytes(name))))
    }

    /// An object and its ancestors. `None` if one is missing.
    pub fn chain(&self, id: Id) -> Option<Vec<&Encoding>> {
        let (mut chain, mut next) = (Vec::new(), Some(id));
        while let Some(id) = next {
            let encoding = self.objects.get(&id).filter(|_| chain.len() <= MAX_CHAIN as usize)?;
            chain.push(encoding);
            next = encoding.parent;
        }
        Some(chain)
    }

    /// Whether the bytes of a file are there; `is_there` says it of each blob.
    pub(super) fn has(&self, content: &Content, is_there: &dyn Fn(&Id) -> bool) -> bool {
        match content {
            Content::Plain(bytes) => bytes.are(is_there),
            Content::Object(id, _) => self.chain(*id).is_some(),
        }
    }

    /// Puts something at a path, or takes away what is there. A directory stays what it is, but for its attributes. One that
    /// could not be looked at has no name yet: it waits, and its files do not.
    pub(super) fn set(&mut self, path: &Path, node: Option<Node>) {
        let Some((parent, name)) = path.parent().zip(path.file_name()) else { return };
        let is_same = match (&node, self.get(path)) {
            (Some(Node::Directory(now, _)), Some(Node::Directory(had, _))) => now == had,
            (now, had) => now.as_ref() == had,
        };
        if is_same {
            return;
        }
        if matches!(node, Some(Node::Directory(..))) {
            self.directories.entry(path.into()).or_default();
        } else {
            let below = self.directories.range(path.to_path_buf()..).map(|(at, _)| at.clone());
            let below: Vec<PathBuf> = below.take_while(|at| at.starts_with(path)).collect();
            below.iter().for_each(|at| drop(self.directories.remove(at)));
        }
        let entries = &mut self.directories.entry(parent.into()).or_default().entries;
        entries.remove(name.as_bytes());
        entries.extend(node.map(|node| (name.as_bytes().to_vec(), node)));
        // A directory's name says where its bytes are once it is packed.
        self.has_changed(path);
    }

    /// The bytes of a directory and of those above it are others now.
    fn has_changed(&mut self, path: &Path) {
        for above in path.ancestors() {
            self.directories.entry(above.into()).and_modify(|directory| directory.stored = None);
        }
    }

    /// Takes away what the mirror has lost. Returns the files.
    pub(super) fn lose(&mut self, is_there: &dyn Fn(&Id) -> bool) -> Vec<PathBuf> {
        self.objects.retain(|_, object| object.bytes.are(is_there));
        let is_lost = |node: &Node| matches!(node, Node::File(file) if !self.has(&file.content, is_there));
        let lost: Vec<PathBuf> = self.iter().filter(|(_, node)| is_lost(node)).map(|(path, _)| path).collect();
        lost.iter().for_each(|path| self.set(path, None));
        lost
    }

    /// Packs all directories that the mirror lacks, the deepest first. Returns the bytes of the top one, or none if the mirror
    /// has it, and the pieces, those of the top one last.
    pub(super) fn pack(&mut self, is_there: &dyn Fn(&Id) -> bool) -> Result<(Vec<u8>, Vec<Packed>)> {
        let is_gone = |directory: &Directory| directory.stored.as_ref().is_some_and(|bytes| !bytes.are(is_there));
        let gone = self.directories.iter().filter(|(_, directory)| is_gone(directory));
        gone.map(|(at, _)| at.clone()).collect::<Vec<_>>().iter().for_each(|at| self.has_changed(at));
        // An empty store has a top directory, too.
        self.directories.entry(PathBuf::new()).or_default();
        let changed = self.directories.iter().rev().filter(|(_, directory)| directory.stored.is_none());
        let (mut top, mut all) = (Vec::new(), Vec::new());
        for at in changed.map(|(at, _)| at.clone()).collect::<Vec<_>>() {
            let (entries, mut needed) = (&self.directories[&at].entries, BTreeMap::new());
            for node in entries.values() {
                if let Node::File(File { content: Content::Object(id, _), .. }) = node {
                    let chain = self.chain(*id).ok_or(Damage("an object is not on the mirror"))?;
                    needed.extend(chain.into_iter().map(|encoding| (encoding.id, encoding)));
                }
            }
            let needed: Vec<&Encoding> = needed.into_values().collect();
            top = record::encode(MAGIC, &(entries, needed));
            let (bytes, packed) = Bytes::pack(&top)?;
            all.extend(packed);
            let above = at.parent().and_then(|above| self.directories.get_mut(above)).zip(at.file_name());
            if let Some((above, name)) = above
                && let Some(Node::Directory(_, stored)) = above.entries.get_mut(name.as_bytes())
            {
                stored.clone_from(&bytes);
            }
            self.directories.entry(at).or_default().stored = Some(bytes);
        }
        Ok((top, all))
    }

    /// Reads a directory's bytes, and adds the objects that it names. Returns the directories in it, which are empty yet.
    ///
    /// # Errors
    /// [`Error::Wrong`] for bytes that no stepfs writes.
    pub fn unpack(&mut self, path: &Path, stored: Bytes, bytes: &[u8]) -> Result<Vec<(PathBuf, Bytes)>> {
        let (entries, needed): (BTreeMap<Vec<u8>, Node>, Vec<Encoding>) = record::decode(MAGIC, bytes)?;
        let is_name = |name: &OsStr| matches!(Path::new(name).components().collect::<Vec<_>>()[..], [Component::Normal(only)] if only == name);
        if !entries.keys().all(|name| is_name(OsStr::from_bytes(name)) && !name.contains(&0)) {
            return Err(Damage("a name leads elsewhere").into());
        }
        for encoding in needed {
            self.objects.entry(encoding.id).or_insert(encoding);
        }
        let mut below = Vec::new();
        for (name, node) in &entries {
            if let Node::Directory(_, stored) = node {
                let at = path.join(OsStr::from_bytes(name));
                let unread = Directory { stored: Some(stored.clone()), ..Directory::default() };
                self.directories.insert(at.clone(), unread);
                below.push((at, stored.clone()));
            }
        }
        self.directories.insert(path.into(), Directory { entries, stored: Some(stored) });
        Ok(below)
    }

    /// Reads the directories of a tree that are `wanted`.
    ///
    /// # Errors
    /// Those of the mirror. Damage of a directory is none.
    pub(super) fn load(place: &dyn Place, (root, top): Top, wanted: &dyn Fn(&Path, &Bytes) -> bool) -> Result<Tree> {
        let (mut tree, mut rest) = (Tree::default(), vec![(PathBuf::new(), root.clone())]);
        if !top.is_empty() {
            rest = tree.unpack(Path::new(""), root, &top)?;
        }
        while !rest.is_empty() {
            let mut some = rest.split_off(rest.len().saturating_sub(AT_ONCE));
            some.retain(|(path, stored)| wanted(path, stored));
            let got = in_parallel(&some, |(path, stored)| match stored.len {
                0..=MAX_DIRECTORY if path.as_os_str().len() <= MAX_PATH => stored.get(place),
                _ => Err(Error::Wrong("it is too large, or too deep, for a directory".into())),
            });
            for ((path, stored), got) in some.into_iter().zip(got) {
                match got.and_then(|bytes| tree.unpack(&path, stored.clone(), &bytes)) {
                    Err(error @ (Error::Wrong(_) | Error::Missing(_) | Error::Local(_))) => {
                        tree.unread.push(format!("{}: {error}", path.display()));
                        tree.damaged.extend(stored.pieces);
                    }
                    below => rest.extend(below?),
                }
            }
        }
        Ok(tree)
    }

    /// Adds the blobs that all this needs, as far as they are on the mirror, and the directories that have told so.
    pub(super) fn tell(&self, needed: &mut HashSet<Id>, told: &mut HashSet<Bytes>) {
        for Directory { entries, stored } in self.directories.values() {
            let of_files = entries.values().flat_map(|node| match node {
                Node::File(File { content: Content::Plain(bytes), .. }) => vec![bytes],
                Node::File(File { content: Content::Object(id, _), .. }) => {
                    self.chain(*id).into_iter().flatten().map(|encoding| &encoding.bytes).collect()
                }
                Node::Link(..) | Node::Directory(..) => Vec::new(),
            });
            needed.extend(of_files.chain(stored).flat_map(|bytes| &bytes.pieces));
            told.extend(stored.clone());
        }
    }
}
