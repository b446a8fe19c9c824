//! The names of a store, as its mirror has them: a tree of directories, each with its own bytes on the mirror.
//!
//! A directory's bytes name its files, and the objects that they need with all ancestors. They name the directories in
//! it by the hashes of their bytes. So a save rewrites the bytes of its own directory and of those above it.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::place::{Error, Place, Result, get_all};
use super::whole::short;
use crate::store::{Damage, Id, MAX_CHAIN, in_parallel, record};
use codec::hash::sha256;

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

    /// Its bytes, verified.
    pub(super) fn get(&self, place: &dyn Place) -> Result<Vec<u8>> {
        let bytes = get_all(place, &self.name(), self.len)?;
        match Blob::of(&bytes) == *self {
            true => Ok(bytes),
            false => Err(Error::Wrong(format!("{} is damaged: its bytes are not what its name says", self.name()))),
        }
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

/// The objects on the mirror.
pub type Encodings = HashMap<Id, Arc<Encoding>>;

/// An object and its ancestors. `None` if one is missing.
pub fn chain(objects: &Encodings, id: Id) -> Option<Vec<&Arc<Encoding>>> {
    let (mut chain, mut next) = (Vec::new(), Some(id));
    while let Some(id) = next {
        let encoding = objects.get(&id).filter(|_| chain.len() <= MAX_CHAIN as usize)?;
        chain.push(encoding);
        next = encoding.parent;
    }
    Some(chain)
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    /// A regular file.
    File(File),
    /// A symbolic link, and its target.
    Link(Attributes, Vec<u8>),
    /// A directory.
    Directory(Attributes, Directory),
}

/// A name in a directory's bytes.
#[derive(Serialize, Deserialize)]
enum Row<'a> {
    File(Cow<'a, File>),
    Link(Attributes, Cow<'a, [u8]>),
    Directory(Attributes, Blob),
}

/// A directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Directory {
    entries: BTreeMap<OsString, Node>,
    /// Where its bytes are; `None` if it has changed since.
    stored: Option<Blob>,
}

impl Directory {
    /// What is at a path that is not empty.
    pub fn get(&self, path: &Path) -> Option<&Node> {
        self.at(path.parent()?)?.entries.get(path.file_name()?)
    }

    /// The directory at a path.
    fn at(&self, path: &Path) -> Option<&Directory> {
        path.iter().try_fold(self, |directory, name| match directory.entries.get(name) {
            Some(Node::Directory(_, below)) => Some(below),
            _ => None,
        })
    }

    /// The links and directories in the directory at a path. `None` if there is no such directory.
    pub(super) fn others(&self, path: &Path) -> Option<impl Iterator<Item = PathBuf>> {
        let others = self.at(path)?.entries.iter().filter(|(_, node)| !matches!(node, Node::File(_)));
        Some(others.map(move |(name, _)| path.join(name)))
    }

    /// Puts something at a path, or takes away what is there. A directory stays what it is, but for its attributes.
    /// `above` gives the attributes of directories on the way.
    pub(super) fn set(&mut self, path: &Path, node: Option<Node>, above: &dyn Fn(&Path) -> Attributes) {
        self.set_below(&path.iter().collect::<Vec<_>>(), &mut PathBuf::new(), node, above);
    }

    fn set_below(
        &mut self,
        names: &[&OsStr],
        at: &mut PathBuf,
        node: Option<Node>,
        above: &dyn Fn(&Path) -> Attributes,
    ) -> bool {
        let Some((name, rest)) = names.split_first() else { return false };
        at.push(name);
        let there = self.entries.get_mut(*name);
        let changed = match (there, node) {
            (Some(Node::Directory(_, directory)), node) if !rest.is_empty() => {
                directory.set_below(rest, at, node, above)
            }
            (_, None) if !rest.is_empty() => false,
            (_, node) if !rest.is_empty() => {
                let (attributes, mut directory) = (above(at), Directory::default());
                directory.set_below(rest, at, node, above);
                self.entries.insert(name.into(), Node::Directory(attributes, directory));
                true
            }
            (Some(Node::Directory(had, _)), Some(Node::Directory(now, _))) => std::mem::replace(had, now) != now,
            (Some(there), Some(node)) => {
                let changed = *there != node;
                *there = node;
                changed
            }
            (None, Some(node)) => self.entries.insert(name.into(), node).is_none(),
            (_, None) => self.entries.remove(*name).is_some(),
        };
        if changed {
            self.stored = None;
        }
        changed
    }

    /// All names, each directory before what is in it.
    pub fn each<'a>(&'a self, act: &mut dyn FnMut(PathBuf, &'a Node)) {
        self.each_below(Path::new(""), act);
    }

    fn each_below<'a>(&'a self, at: &Path, act: &mut dyn FnMut(PathBuf, &'a Node)) {
        for (name, node) in &self.entries {
            let path = at.join(name);
            act(path.clone(), node);
            if let Node::Directory(_, directory) = node {
                directory.each_below(&path, act);
            }
        }
    }

    /// Packs all directories that have changed, the deepest first, and says where the bytes of this one are.
    pub(super) fn pack(&mut self, objects: &Encodings, packed: &mut Vec<(Blob, Vec<u8>)>) -> Result<Blob> {
        if let Some(stored) = self.stored {
            return Ok(stored);
        }
        let (mut rows, mut needed) = (Vec::with_capacity(self.entries.len()), BTreeMap::new());
        for (name, node) in &mut self.entries {
            let row = match node {
                Node::File(file) => {
                    if let Content::Object(id) = file.content {
                        let chain = chain(objects, id).ok_or(Damage("an object is not on the mirror"))?;
                        needed.extend(chain.into_iter().map(|encoding| (encoding.id, encoding)));
                    }
                    Row::File(Cow::Borrowed(file))
                }
                Node::Link(attributes, target) => Row::Link(*attributes, Cow::Borrowed(target)),
                Node::Directory(attributes, directory) => Row::Directory(*attributes, directory.pack(objects, packed)?),
            };
            rows.push((name.as_bytes(), row));
        }
        let needed: Vec<&Encoding> = needed.into_values().map(AsRef::as_ref).collect();
        let (blob, bytes) = Blob::pack(&record::encode(MAGIC, &(rows, needed)))?;
        packed.push((blob, bytes));
        self.stored = Some(blob);
        Ok(blob)
    }

    /// Reads a directory's bytes, and adds the objects that it names. The directories in it are empty.
    ///
    /// # Errors
    /// [`Error::Wrong`] for bytes that no stepfs writes.
    pub fn unpack(blob: Blob, packed: &[u8], objects: &mut Encodings) -> Result<Directory> {
        let mut bytes = Vec::new();
        zstd::stream::read::Decoder::new(packed)?.take(MAX_UNPACKED).read_to_end(&mut bytes)?;
        let (rows, needed): (Vec<(Vec<u8>, Row<'static>)>, Vec<Encoding>) = record::decode(MAGIC, &bytes)?;
        let is_name = |name: &OsStr| matches!(Path::new(name).components().collect::<Vec<_>>()[..], [Component::Normal(only)] if only == name);
        let mut entries = BTreeMap::new();
        for (name, row) in rows {
            let name = OsString::from_vec(name);
            if !is_name(&name) || name.as_bytes().contains(&0) {
                return Err(Damage("a name leads elsewhere").into());
            }
            let node = match row {
                Row::File(file) => Node::File(file.into_owned()),
                Row::Link(attributes, target) => Node::Link(attributes, target.into_owned()),
                Row::Directory(attributes, stored) => {
                    Node::Directory(attributes, Directory { stored: Some(stored), ..Directory::default() })
                }
            };
            entries.insert(name, node);
        }
        for encoding in needed {
            if encoding.pieces.len() as u64 != encoding.len.div_ceil(PIECE) {
                return Err(Damage("an object has other pieces than its length says").into());
            }
            objects.entry(encoding.id).or_insert_with(|| Arc::new(encoding));
        }
        Ok(Directory { entries, stored: Some(blob) })
    }
}

/// A tree that was read from a mirror.
#[derive(Debug, Default)]
pub struct Loaded {
    /// Its names.
    pub tree: Directory,
    /// The objects that they need.
    pub objects: Encodings,
    /// Directories that cannot be read, each with the reason. They are empty in the tree.
    pub unread: BTreeMap<PathBuf, String>,
    /// Their blobs.
    pub damaged: Vec<Id>,
}

/// Reads the directories of a tree that are `wanted`.
///
/// # Errors
/// Those of the mirror. Damage of a directory is none.
pub(super) fn load(place: &dyn Place, root: Blob, wanted: &dyn Fn(&Path, Blob) -> bool) -> Result<Loaded> {
    let mut loaded = Loaded::default();
    let mut level: Vec<(PathBuf, Blob)> =
        [(PathBuf::new(), root)].into_iter().filter(|(_, root)| wanted(Path::new(""), *root)).collect();
    while !level.is_empty() {
        let got = in_parallel(&level, |(path, blob)| match blob.len {
            0..=MAX_PACKED if path.as_os_str().len() <= MAX_PATH => blob.get(place),
            _ => Err(Error::Wrong(format!("{} is too large, or too deep, for a directory", blob.name()))),
        });
        let mut next = Vec::new();
        for ((path, blob), got) in level.into_iter().zip(got) {
            let directory = match got.and_then(|bytes| Directory::unpack(blob, &bytes, &mut loaded.objects)) {
                Err(error @ (Error::Wrong(_) | Error::Missing(_) | Error::Local(_))) => {
                    loaded.unread.insert(path, error.to_string());
                    loaded.damaged.push(blob.hash);
                    continue;
                }
                directory => directory?,
            };
            for (name, node) in &directory.entries {
                let below = path.join(name);
                if let Node::Directory(_, Directory { stored: Some(stored), .. }) = node
                    && wanted(&below, *stored)
                {
                    next.push((below, *stored));
                }
            }
            *loaded.tree.directory(path.iter()) = directory;
        }
        level = next;
    }
    Ok(loaded)
}

impl Directory {
    /// A directory that is there.
    fn directory<'a>(&mut self, mut names: impl Iterator<Item = &'a OsStr>) -> &mut Directory {
        let Some(name) = names.next() else { return self };
        match self.entries.get_mut(name) {
            Some(Node::Directory(_, below)) => below.directory(names),
            _ => unreachable!("a directory is entered after those above it"),
        }
    }

    /// Where its bytes are, if the mirror has it.
    pub(super) fn stored(&self) -> Option<Blob> {
        self.stored
    }

    /// Notes which directories are not on the mirror, so that they are packed again. True if this is one.
    pub(super) fn lose(&mut self, is_there: &dyn Fn(&Id) -> bool) -> bool {
        let mut lost = self.stored.is_none_or(|blob| !is_there(&blob.hash));
        for node in self.entries.values_mut() {
            if let Node::Directory(_, directory) = node {
                lost |= directory.lose(is_there);
            }
        }
        if lost {
            self.stored = None;
        }
        lost
    }

    /// The blobs that it and all below it need, as far as they are on the mirror.
    pub(super) fn blobs(&self, objects: &Encodings, needed: &mut HashSet<Id>) {
        let mut seen = HashSet::new();
        needed.extend(self.stored.map(|blob| blob.hash));
        self.each(&mut |_, node| match node {
            Node::File(File { content: Content::Small(blob), .. }) => drop(needed.insert(blob.hash)),
            Node::File(File { content: Content::Object(id), .. }) => {
                let mut next = Some(*id);
                while let Some(encoding) = next.filter(|id| seen.insert(*id)).and_then(|id| objects.get(&id)) {
                    needed.extend(&encoding.pieces);
                    next = encoding.parent;
                }
            }
            Node::Directory(_, directory) => needed.extend(directory.stored.map(|blob| blob.hash)),
            Node::Link(..) => {}
        });
    }
}
