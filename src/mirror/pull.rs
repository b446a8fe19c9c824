//! Makes files of a mirror's state in a store that nobody has mounted.
//!
//! First come all objects, then the names: a file has its object from its first moment on. Killed anywhere, the next
//! pull goes on: objects and files that are here do not come again.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::pieces::{self, Bytes, PIECE};
use super::place::{Error, Result};
use super::reader::Reader;
use super::tree::{Attributes, Content, Encoding, File, Node};
use crate::encode::original::hash_of;
use crate::store::durable::{Attribute, CrashPoint, DeviceFile, Times};
use crate::store::object::Header;
use crate::store::{Id, MIN_RELEASE_BYTES, Objects, Store, Stub, beneath, found_at, in_parallel, modified_ns};
use formats::ReadAt;

const WRITTEN: CrashPoint = CrashPoint::ImportWritten;
const IN_PLACE: CrashPoint = CrashPoint::ImportInPlace;

/// The mode of a directory until all that is in it has come. No program gives a directory the sticky bit for itself alone.
const UNFINISHED: u32 = 0o1700;

/// What a pull tells of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// So many bytes are to come.
    Total(u64),
    /// So many more have come.
    Came(u64),
}

/// Is told each step; false ends the pull.
pub type Watch<'a> = dyn Fn(Step) -> bool + Sync + 'a;

/// What could not be brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    /// Wanted names that were found, whether they came or not.
    pub found: u64,
    /// Names, each with the reason.
    pub names: BTreeMap<PathBuf, String>,
    /// Directories that cannot be read, each with the reason. They may have more names.
    pub unread: Vec<String>,
}

/// Brings the names at and below `wanted`, with their objects.
///
/// # Errors
/// The mirror does not answer, or refuses; device errors; `watch` ended it.
pub fn pull(from: &Reader, store: &Store, wanted: &Path, watch: &Watch) -> Result<Missing> {
    let objects = Arc::new(Objects::load_on(store.io().clone(), &store.objects(), |_, _| {})?);
    let pull = Pull { from, store, objects, watch };
    let (mut names, mut directories) = (Vec::new(), BTreeMap::new());
    for (path, node) in from.tree.iter() {
        match node {
            Node::Directory(attributes, _) if path.starts_with(wanted) || wanted.starts_with(&path) => {
                directories.insert(path, *attributes);
            }
            node if path.starts_with(wanted) => names.push((path, node)),
            _ => {}
        }
    }
    let found = names.len() as u64;
    let (tree, failed) = (store.tree(), pull.bring(&names)?);
    for path in directories.keys() {
        if path.parent().is_none_or(|above| is_directory(store, above)) && found_at(&tree, path)?.is_none() {
            store.io().make_dir(&beneath::reach(&tree, path)?, UNFINISHED, WRITTEN)?;
        }
    }
    let not_made = in_turn(names, |(_, node)| plain_len(node), |(path, node)| pull.make(path, node, &failed))?;
    // Names in a directory change its time. A pull that was killed may have made it.
    for (path, attributes) in directories.iter().rev() {
        if found_at(&tree, path)?.is_some_and(|of| of.is_dir() && of.mode() & 0o1777 == UNFINISHED) {
            attributes.set(&store.io().open_with(&beneath::reach(&tree, path)?, libc::O_DIRECTORY)?)?;
        }
    }
    let all = directories.keys().map(PathBuf::as_path).chain([Path::new("")]);
    let all: Vec<&Path> = all.filter(|path| is_directory(store, path)).collect();
    let synced = in_parallel(&all, |path| store.io().sync_dir(&beneath::reach(&tree, path)?, IN_PLACE));
    synced.into_iter().collect::<io::Result<()>>()?;
    let names = not_made.into_iter().map(|((path, _), why)| (path, why)).collect();
    Ok(Missing { found, names, unread: from.tree.unread.clone() })
}

/// Brings small things side by side, and large ones one after the other: their pieces come side by side. Returns those that
/// do not come, each with the reason.
///
/// # Errors
/// Those that concern all others, too.
fn in_turn<T: Sync>(
    things: Vec<T>,
    len: impl Fn(&T) -> u64,
    bring: impl Fn(&T) -> Result<()> + Sync,
) -> Result<Vec<(T, String)>> {
    let (small, large): (Vec<_>, Vec<_>) = things.into_iter().partition(|thing| len(thing) <= PIECE);
    let mut brought = in_parallel(&small, &bring);
    brought.extend(large.iter().map(&bring));
    let mut failed = Vec::new();
    for (thing, brought) in small.into_iter().chain(large).zip(brought) {
        match brought {
            Ok(()) => {}
            Err(Error::Local(error)) if error.kind() != io::ErrorKind::InvalidData => return Err(error.into()),
            Err(error @ (Error::Busy(_) | Error::Away(_) | Error::Denied(_))) => return Err(error),
            Err(error) => failed.push((thing, error.to_string())),
        }
    }
    Ok(failed)
}

/// Bytes that come with a name itself.
fn plain_len(node: &Node) -> u64 {
    match node {
        Node::File(File { content: Content::Plain(bytes), .. }) => bytes.len,
        _ => 0,
    }
}

/// Whether a path of the tree is a directory, and is reached through no link: a link may lead out of the store.
fn is_directory(store: &Store, path: &Path) -> bool {
    beneath::open_dir(&store.tree(), path).is_ok()
}

struct Pull<'a> {
    from: &'a Reader,
    store: &'a Store,
    objects: Arc<Objects>,
    watch: &'a Watch<'a>,
}

impl Pull<'_> {
    /// Brings all objects that the names need, each after its parent. Returns those that fail, with the reasons.
    fn bring(&self, names: &[(PathBuf, &Node)]) -> Result<BTreeMap<Id, String>> {
        let mut levels: BTreeMap<usize, BTreeMap<Id, &Encoding>> = BTreeMap::new();
        for (_, node) in names {
            let Node::File(File { content: Content::Object(id, _), .. }) = node else { continue };
            let chain = self.from.tree.chain(*id).unwrap_or_default();
            for (depth, encoding) in chain.into_iter().rev().enumerate() {
                if self.objects.get(encoding.id).is_none() {
                    levels.entry(depth).or_default().insert(encoding.id, encoding);
                }
            }
        }
        let objects = levels.values().flat_map(BTreeMap::values).map(|encoding| encoding.bytes.len);
        self.tell(Step::Total(objects.chain(names.iter().map(|(_, node)| plain_len(node))).sum()))?;
        let mut failed = BTreeMap::new();
        let bring = |encoding: &&Encoding| {
            let fetch = |file: &DeviceFile| self.fetch(&encoding.bytes, file).map_err(io::Error::other);
            let received = self.objects.receive(&self.store.tmp(), encoding.id, fetch);
            // Nothing is collected in a store that nobody has mounted.
            received.map(drop).map_err(|error| error.downcast().unwrap_or_else(Error::Local))
        };
        for level in levels.into_values() {
            let not_brought = in_turn(level.into_values().collect(), |encoding| encoding.bytes.len, bring)?;
            failed.extend(not_brought.into_iter().map(|(encoding, why)| (encoding.id, why)));
        }
        Ok(failed)
    }

    /// Brings bytes into a file.
    fn fetch(&self, bytes: &Bytes, file: &DeviceFile) -> Result<()> {
        bytes.read(self.from.place.as_ref(), &|some, at| {
            file.write_all_at(some, at, WRITTEN)?;
            if (at + some.len() as u64).is_multiple_of(PIECE) {
                // The device writes while the next pieces come, so the fsync has little left.
                file.begin_sync()?;
            }
            self.tell(Step::Came(some.len() as u64))
        })
    }

    fn tell(&self, step: Step) -> Result<()> {
        if (self.watch)(step) { Ok(()) } else { Err(io::Error::from(io::ErrorKind::Interrupted).into()) }
    }

    /// Makes a file or link, unless it is there.
    fn make(&self, path: &Path, node: &Node, failed: &BTreeMap<Id, String>) -> Result<()> {
        let tree = self.store.tree();
        if !path.parent().is_none_or(|above| is_directory(self.store, above)) {
            return Err(Error::Wrong("something else has the place of its directory".into()));
        }
        let is_there = match (node, found_at(&tree, path)?) {
            (Node::Directory(..), _) => true,
            (Node::File(file), None) => return self.make_file(path, file, failed),
            (Node::Link(_, target), None) => {
                return Ok(symlink(OsStr::from_bytes(target), beneath::reach(&tree, path)?)?);
            }
            // An interrupted pull has made it, or a program the same one.
            (Node::Link(_, target), Some(there)) => {
                there.is_symlink() && fs::read_link(beneath::reach(&tree, path)?)?.as_os_str().as_bytes() == target
            }
            (Node::File(file), Some(there)) => {
                let is_like = (there.len(), modified_ns(&there)) == (file.content.len(), file.attributes.modified_ns);
                there.is_file() && is_like && self.has(path, file, failed)?
            }
        };
        is_there.then_some(()).ok_or_else(|| Error::Wrong("another file of this store has its place".into()))
    }

    /// Whether a file of the store, as long as this one, has its bytes, or those that a lossy object was made from. Reads
    /// only files that no object decodes to, and the mirror only if this program packs a piece in another way.
    fn has(&self, path: &Path, file: &File, failed: &BTreeMap<Id, String>) -> Result<bool> {
        let own = self.store.io().open_beneath(&self.store.tree(), path, 0)?;
        let object = match &file.content {
            Content::Plain(bytes) => {
                let is_same = |hash, at, len| {
                    let mut piece = vec![0; len as usize];
                    own.read_exact_at(&mut piece, at)?;
                    self.tell(Step::Came(len))?;
                    Ok(pieces::pack(&piece)?.0 == hash || pieces::get(self.from.place.as_ref(), hash, len)? == piece)
                };
                return Ok(bytes.each(is_same)?.into_iter().all(|is_same| is_same));
            }
            Content::Object(id, len) => self.object(*id, *len, failed)?,
        };
        let is_stopped = || !(self.watch)(Step::Came(0));
        Ok(match Stub::read_on(&own, self.store.id())? {
            Some(stub) => {
                let of = self.objects.get(stub.object);
                stub.object == object.id || of.is_some_and(|(of, _)| of.decoded_hash == object.decoded_hash)
            }
            None => hash_of(&own, own.size(), &is_stopped).map_err(io::Error::from)? == object.original,
        })
    }

    /// The object that decodes to a file.
    fn object(&self, id: Id, len: u64, failed: &BTreeMap<Id, String>) -> Result<Header> {
        let ids = self.from.tree.chain(id);
        match self.objects.get(id).filter(|_| ids.is_some()) {
            Some((header, _)) if header.logical_len == len && len >= MIN_RELEASE_BYTES => Ok(header),
            Some(_) => Err(Error::Wrong(format!("object {id} has another length"))),
            None => {
                let why = ids.into_iter().flatten().find_map(|encoding| failed.get(&encoding.id));
                Err(Error::Wrong(why.map_or("an object of it is missing".into(), String::clone)))
            }
        }
    }

    fn make_file(&self, path: &Path, file: &File, failed: &BTreeMap<Id, String>) -> Result<()> {
        let store = self.store;
        let part = store.tmp().join(format!("pulled-{}", Id::random()?));
        let write = || -> Result<()> {
            let made = store.io().create(&part, WRITTEN)?;
            match &file.content {
                Content::Plain(bytes) => {
                    self.fetch(bytes, &made)?;
                    Stub::disown_if_possible(&made, WRITTEN)?;
                }
                Content::Object(id, len) => {
                    let stub =
                        Stub { store: store.id(), object: self.object(*id, *len, failed)?.id, logical_len: *len };
                    made.write_all_at(&stub.encode(), 0, WRITTEN)?;
                    made.set_len(*len, WRITTEN)?;
                }
            }
            file.attributes.set(&made)?;
            made.sync(WRITTEN)?;
            Ok(store.io().device().rename(&part, &beneath::reach(&store.tree(), path)?, IN_PLACE)?)
        };
        write().inspect_err(|_| store.io().discard(&part, WRITTEN))
    }
}

impl Attributes {
    /// Gives them to a file or directory; the owner only if this process may.
    fn set(&self, file: &DeviceFile) -> io::Result<()> {
        // While its owner may write it, which the mode may forbid.
        self.marks.set(file, WRITTEN)?;
        if rustix::process::geteuid().is_root() {
            file.set(&Attribute::Owner(self.uid, self.gid), WRITTEN)?;
        }
        file.set(&Attribute::Mode(self.mode & 0o1777), WRITTEN)?;
        let time = (self.modified_ns.div_euclid(1_000_000_000), self.modified_ns.rem_euclid(1_000_000_000));
        file.set(&Attribute::Times(Times { accessed: time, modified: time }), WRITTEN)
    }
}
