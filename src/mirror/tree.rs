//! The names of a store, as its mirror has them: a tree of directories, each with its own bytes on the mirror.
//!
//! A directory's bytes name its files, and the objects that they need with all ancestors. They name the directories in
//! it by the hashes of their bytes. So a save rewrites the bytes of its own directory and of those above it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::ops::Bound;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::place::{Error, Place, Result};
use super::whole::short;
use crate::store::{Damage, Id, MAX_CHAIN, in_parallel, record};
use codec::hash::{Sha256, sha256};

/// Bytes of a piece of an object. A request costs as much time as some 100 KB, a failed one is repeated whole, and
/// sixteen are under way at once.
pub(super) const PIECE: u64 = 4 << 20;
/// Limit on a directory's bytes, packed and unpacked: a crafted one must not fill the memory. A million names take
/// about 100 MB.
const MAX_PACKED: u64 = 1 << 28;
const MAX_UNPACKED: u64 = 1 << 30;
/// Longer than any path that the kernel takes.
const MAX_PATH: usize = 4096;
/// zstd level of small files and directories: a directory is packed at each save in it.
const LEVEL: i32 = 1;
const MAGIC: &[u8; 8] = b"stepfsMD";

/// Bytes on the mirror, under the hash of themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// The beginning of the SHA-256 of the bytes.
    pub hash: Id,
    /// How many.
    pub len: u64,
}

impl Blob {
    /// Of a directory that was never packed.
    pub(super) const NONE: Blob = Blob { hash: Id::NONE, len: 0 };

    /// Of these bytes.
    pub(super) fn of(bytes: &[u8]) -> Blob {
        Blob { hash: short(&sha256(bytes)), len: bytes.len() as u64 }
    }

    /// Packs bytes.
    pub(super) fn pack(bytes: &[u8]) -> io::Result<(Blob, Vec<u8>)> {
        let packed = zstd::bulk::compress(bytes, LEVEL)?;
        Ok((Blob::of(&packed), packed))
    }

    /// Its name on the mirror.
    pub(super) fn name(&self) -> String {
        let hash = self.hash.to_string();
        format!("{BLOBS}{}/{hash}", &hash[..2])
    }

    /// Passes its bytes to `each`, in order. They are verified once this has succeeded, and not before.
    pub(super) fn read(&self, place: &dyn Place, each: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let (mut hash, mut len) = (Sha256::default(), 0);
        // One byte more: a longer name is damaged, too.
        place.read(&self.name(), self.len + 1, &mut |bytes| {
            hash.update(bytes);
            len += bytes.len() as u64;
            each(bytes)
        })?;
        match (short(&hash.digest()), len) == (self.hash, self.len) {
            true => Ok(()),
            false => Err(Error::Wrong(format!("{} is damaged: its bytes are not what its name says", self.name()))),
        }
    }

    /// Its bytes, verified.
    pub(super) fn get(&self, place: &dyn Place) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        self.read(place, &mut |bytes| Ok(all.write_all(bytes)?))?;
        Ok(all)
    }
}

/// Where all blobs are.
pub(super) const BLOBS: &str = "blobs/";

/// An object on the mirror: an encoding that never changes, of an object that may have others in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Encoding {
    /// The object's id.
    pub id: Id,
    /// The object that it is a difference to.
    pub parent: Option<Id>,
    /// Bytes of the object's file.
    pub len: u64,
    /// It decodes to other bytes than the file had.
    pub lossy: bool,
    /// The hashes of its pieces.
    pub pieces: Vec<Id>,
}

impl Encoding {
    /// Its pieces, in order.
    pub fn blobs(&self) -> impl Iterator<Item = Blob> {
        let len = |number: usize| self.len.saturating_sub(number as u64 * PIECE).min(PIECE);
        self.pieces.iter().enumerate().map(move |(number, hash)| Blob { hash: *hash, len: len(number) })
    }
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
}

/// The bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// A file below [`crate::store::MIN_RELEASE_BYTES`], packed.
    Small(Blob),
    /// An object decodes to it.
    Object(Id),
}

/// Tells a file's content in the store from any other. No program can set the time of the last change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Witness {
    /// Inode number.
    pub inode: u64,
    /// Time of the last change of the file, nanoseconds since 1970.
    pub changed_ns: i64,
}

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// Its attributes.
    pub attributes: Attributes,
    /// Its length, bytes.
    pub len: u64,
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
    Directory(Attributes, Blob),
}

/// The names in a directory.
#[derive(Debug, Default)]
struct Directory {
    entries: BTreeMap<Vec<u8>, Node>,
    /// Where its bytes are; `None` if it, or one below it, has changed since.
    stored: Option<Blob>,
}

/// The names of a store, and the objects that they need.
#[derive(Debug)]
pub struct Tree {
    /// Each under its path. The top one, whose path is empty, is always there.
    directories: BTreeMap<PathBuf, Directory>,
    /// The objects on the mirror.
    pub objects: HashMap<Id, Arc<Encoding>>,
    /// Directories that cannot be read, each with the reason. They are empty here, and may have more names.
    pub unread: BTreeMap<PathBuf, String>,
    /// Their blobs.
    pub(super) damaged: Vec<Id>,
}

impl Default for Tree {
    fn default() -> Tree {
        let directories = BTreeMap::from([(PathBuf::new(), Directory::default())]);
        Tree { directories, objects: HashMap::new(), unread: BTreeMap::new(), damaged: Vec::new() }
    }
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
    pub(super) fn root(&self) -> Option<Blob> {
        self.directories[Path::new("")].stored
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
            chain.push(encoding.as_ref());
            next = encoding.parent;
        }
        Some(chain)
    }

    /// Whether the bytes of a file are there, of which `is_there` says each blob.
    pub(super) fn has(&self, content: Content, is_there: &dyn Fn(&Id) -> bool) -> bool {
        match content {
            Content::Small(blob) => is_there(&blob.hash),
            Content::Object(id) => self.chain(id).is_some(),
        }
    }

    /// Puts something at a path, or takes away what is there. A directory stays what it is, but for its attributes.
    pub(super) fn set(&mut self, path: &Path, mut node: Option<Node>) {
        let Some((parent, name)) = path.parent().zip(path.file_name()) else { return };
        if node.is_some() && !self.directories.contains_key(parent) {
            // It could not be looked at, and is tried again.
            let unknown = Attributes { mode: 0o755, ..Attributes::default() };
            self.set(parent, Some(Node::Directory(unknown, Blob::NONE)));
        }
        let Some(Directory { entries, .. }) = self.directories.get_mut(parent) else { return };
        let had = entries.remove(name.as_bytes());
        if let (Some(Node::Directory(_, now)), Some(Node::Directory(_, had))) = (&mut node, &had) {
            *now = *had;
        }
        let (is_changed, is_directory) = (had != node, matches!(node, Some(Node::Directory(..))));
        entries.extend(node.map(|node| (name.as_bytes().to_vec(), node)));
        if is_directory {
            self.directories.entry(path.into()).or_default();
        } else if let Some(Node::Directory(..)) = had {
            let below = self.directories.range(path.to_path_buf()..).map(|(at, _)| at.clone());
            let below: Vec<PathBuf> = below.take_while(|at| at.starts_with(path)).collect();
            below.iter().for_each(|at| drop(self.directories.remove(at)));
        }
        if is_changed {
            self.has_changed(parent);
        }
    }

    /// The bytes of a directory and of those above it are others now.
    fn has_changed(&mut self, path: &Path) {
        for above in path.ancestors() {
            self.directories.entry(above.into()).and_modify(|directory| directory.stored = None);
        }
    }

    /// Takes away what the mirror has lost. Directories are packed again. Returns the files.
    pub(super) fn lose(&mut self, is_there: &dyn Fn(&Id) -> bool) -> Vec<PathBuf> {
        self.objects.retain(|_, object| object.pieces.iter().all(is_there));
        let is_lost = |node: &Node| matches!(node, Node::File(file) if !self.has(file.content, is_there));
        let lost: Vec<PathBuf> = self.iter().filter(|(_, node)| is_lost(node)).map(|(path, _)| path).collect();
        lost.iter().for_each(|path| self.set(path, None));
        let stored = self.directories.iter().filter_map(|(path, directory)| Some((path, directory.stored?)));
        let gone = stored.filter(|(_, blob)| !is_there(&blob.hash)).map(|(path, _)| path.clone());
        gone.collect::<Vec<_>>().iter().for_each(|path| self.has_changed(path));
        lost
    }

    /// Packs all directories that have changed, the deepest first, and says where the bytes of the top one are.
    pub(super) fn pack(&mut self, packed: &mut Vec<(Blob, Vec<u8>)>) -> Result<Blob> {
        let changed = self.directories.iter().rev().filter(|(_, directory)| directory.stored.is_none());
        let mut root = self.root().unwrap_or(Blob::NONE);
        for at in changed.map(|(at, _)| at.clone()).collect::<Vec<_>>() {
            let (entries, mut needed) = (&self.directories[&at].entries, BTreeMap::new());
            for node in entries.values() {
                if let Node::File(File { content: Content::Object(id), .. }) = node {
                    let chain = self.chain(*id).ok_or(Damage("an object is not on the mirror"))?;
                    needed.extend(chain.into_iter().map(|encoding| (encoding.id, encoding)));
                }
            }
            let needed: Vec<&Encoding> = needed.into_values().collect();
            let (blob, bytes) = Blob::pack(&record::encode(MAGIC, &(entries, needed)))?;
            packed.push((blob, bytes));
            self.directories.entry(at.clone()).and_modify(|directory| directory.stored = Some(blob));
            let Some((above, name)) = at.parent().zip(at.file_name()) else {
                root = blob;
                continue;
            };
            let above = self.directories.get_mut(above).and_then(|above| above.entries.get_mut(name.as_bytes()));
            if let Some(Node::Directory(_, stored)) = above {
                *stored = blob;
            }
        }
        Ok(root)
    }

    /// Reads a directory's bytes, and adds the objects that it names. Returns the directories in it, which are empty yet.
    ///
    /// # Errors
    /// [`Error::Wrong`] for bytes that no stepfs writes.
    pub fn unpack(&mut self, path: &Path, blob: Blob, packed: &[u8]) -> Result<Vec<(PathBuf, Blob)>> {
        let mut bytes = Vec::new();
        zstd::stream::read::Decoder::new(packed)?.take(MAX_UNPACKED).read_to_end(&mut bytes)?;
        let (entries, needed): (BTreeMap<Vec<u8>, Node>, Vec<Encoding>) = record::decode(MAGIC, &bytes)?;
        let is_name = |name: &OsStr| matches!(Path::new(name).components().collect::<Vec<_>>()[..], [Component::Normal(only)] if only == name);
        if !entries.keys().all(|name| is_name(OsStr::from_bytes(name)) && !name.contains(&0)) {
            return Err(Damage("a name leads elsewhere").into());
        }
        for encoding in needed {
            if encoding.pieces.len() as u64 != encoding.len.div_ceil(PIECE) {
                return Err(Damage("an object has other pieces than its length says").into());
            }
            self.objects.entry(encoding.id).or_insert_with(|| Arc::new(encoding));
        }
        let mut below = Vec::new();
        for (name, node) in &entries {
            if let Node::Directory(_, stored) = node {
                let at = path.join(OsStr::from_bytes(name));
                self.directories.insert(at.clone(), Directory { stored: Some(*stored), ..Directory::default() });
                below.push((at, *stored));
            }
        }
        self.directories.insert(path.into(), Directory { entries, stored: Some(blob) });
        Ok(below)
    }

    /// Reads the directories of a tree that are `wanted`.
    ///
    /// # Errors
    /// Those of the mirror. Damage of a directory is none.
    pub(super) fn load(place: &dyn Place, root: Blob, wanted: &dyn Fn(&Path, Blob) -> bool) -> Result<Tree> {
        let (mut tree, mut level) = (Tree::default(), vec![(PathBuf::new(), root)]);
        while !level.is_empty() {
            level.retain(|(path, blob)| wanted(path, *blob));
            let got = in_parallel(&level, |(path, blob)| match blob.len {
                0..=MAX_PACKED if path.as_os_str().len() <= MAX_PATH => blob.get(place),
                _ => Err(Error::Wrong(format!("{} is too large, or too deep, for a directory", blob.name()))),
            });
            for ((path, blob), got) in std::mem::take(&mut level).into_iter().zip(got) {
                match got.and_then(|bytes| tree.unpack(&path, blob, &bytes)) {
                    Err(error @ (Error::Wrong(_) | Error::Missing(_) | Error::Local(_))) => {
                        tree.unread.insert(path, error.to_string());
                        tree.damaged.push(blob.hash);
                    }
                    below => level.extend(below?),
                }
            }
        }
        Ok(tree)
    }

    /// The blobs that all this needs, as far as they are on the mirror.
    pub(super) fn blobs(&self, needed: &mut HashSet<Id>) {
        for Directory { entries, stored } in self.directories.values() {
            needed.extend(stored.map(|blob| blob.hash));
            for node in entries.values() {
                match node {
                    Node::File(File { content: Content::Small(blob), .. }) => drop(needed.insert(blob.hash)),
                    Node::File(File { content: Content::Object(id), .. }) => {
                        needed.extend(self.chain(*id).into_iter().flatten().flat_map(|encoding| &encoding.pieces));
                    }
                    Node::Link(..) | Node::Directory(..) => {}
                }
            }
        }
    }
}
