//! Makes files of a mirror's state in a store that nobody has mounted.
//!
//! First come all objects, then the names: a file has its object from its first moment on. Killed anywhere, the next
//! pull goes on: objects and files that are here do not come again.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::place::{Error, Result};
use super::reader::Reader;
use super::tree::{Attributes, Blob, Content, Encoding, File, Node, PIECE};
use super::whole;
use crate::store::durable::{Attribute, CrashPoint, DeviceFile, Times};
use crate::store::object::Header;
use crate::store::{Id, MIN_RELEASE_BYTES, Objects, Store, Stub, beneath, found_at, in_parallel, modified_ns};
use formats::ReadAt;

const WRITTEN: CrashPoint = CrashPoint::ImportWritten;
const IN_PLACE: CrashPoint = CrashPoint::ImportInPlace;

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
    let mut missing = Missing { found: names.len() as u64, ..Missing::default() };
    missing.unread = from.tree.unread.iter().map(|(path, why)| format!("{}: {why}", path.display())).collect();
    let failed = pull.bring(&names)?;
    let made = pull.make_directories(&directories)?;
    let done = in_parallel(&names, |(path, node)| pull.make(path, node, &failed));
    for ((path, _), done) in names.into_iter().zip(done) {
        missing.names.extend(fault(done)?.map(|why| (path, why)));
    }
    // Names in a directory change its time.
    for path in made.iter().rev() {
        let opened = store.io().device().open(&beneath::reach(&store.tree(), path)?, libc::O_DIRECTORY)?;
        let set = &mut |attribute: &Attribute| store.io().device().set_attribute(&opened, attribute, WRITTEN);
        directories[*path].set(set)?;
    }
    let all = directories.keys().map(PathBuf::as_path).chain([Path::new("")]);
    let all: Vec<&Path> = all.filter(|path| is_directory(store, path)).collect();
    let synced = in_parallel(&all, |path| store.io().sync_dir(&beneath::reach(&store.tree(), path)?, IN_PLACE));
    synced.into_iter().collect::<io::Result<()>>()?;
    Ok(missing)
}

/// Why one thing does not come, if it does not.
///
/// # Errors
/// Those that concern all others, too.
fn fault(done: Result<()>) -> Result<Option<String>> {
    match done {
        Ok(()) => Ok(None),
        Err(error @ (Error::Wrong(_) | Error::Missing(_))) => Ok(Some(error.to_string())),
        Err(Error::Local(error)) if error.kind() == io::ErrorKind::InvalidData => Ok(Some(error.to_string())),
        Err(error) => Err(error),
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
            let Node::File(File { content: Content::Object(id), .. }) = node else { continue };
            let chain = self.from.tree.chain(*id).unwrap_or_default();
            for (depth, encoding) in chain.into_iter().rev().enumerate() {
                if self.objects.get(encoding.id).is_none() {
                    levels.entry(depth).or_default().insert(encoding.id, encoding);
                }
            }
        }
        self.tell(Step::Total(levels.values().flat_map(BTreeMap::values).map(|encoding| encoding.len).sum()))?;
        let mut failed = BTreeMap::new();
        for level in levels.into_values() {
            // Small ones side by side; a large one's pieces are.
            let (small, large): (Vec<_>, Vec<_>) = level.into_values().partition(|encoding| encoding.len <= PIECE);
            let mut brought = in_parallel(&small, |encoding| self.bring_one(encoding));
            brought.extend(large.iter().map(|encoding| self.bring_one(encoding)));
            for (encoding, brought) in small.into_iter().chain(large).zip(brought) {
                failed.extend(fault(brought)?.map(|why| (encoding.id, why)));
            }
        }
        Ok(failed)
    }

    fn bring_one(&self, encoding: &Encoding) -> Result<()> {
        let received = self.objects.receive(&self.store.tmp(), encoding.id, |file| {
            let put = |bytes: &[u8], at| {
                file.write_all_at(bytes, at, CrashPoint::ObjectWritten)?;
                if (at + bytes.len() as u64).is_multiple_of(PIECE) {
                    // The device writes while the next pieces come, so the fsync has little left.
                    file.begin_sync()?;
                }
                self.tell(Step::Came(bytes.len() as u64))
            };
            self.from.fetch(encoding, &put).map_err(io::Error::other)
        });
        // Nothing is collected in a store that nobody has mounted.
        received.map(drop).map_err(|error| error.downcast().unwrap_or_else(Error::Local))
    }

    fn tell(&self, step: Step) -> Result<()> {
        if (self.watch)(step) { Ok(()) } else { Err(io::Error::from(io::ErrorKind::Interrupted).into()) }
    }

    /// Makes the directories that are missing. Returns those, each after the one that it is in.
    fn make_directories<'a>(&self, directories: &'a BTreeMap<PathBuf, Attributes>) -> Result<Vec<&'a PathBuf>> {
        let (tree, mut made) = (self.store.tree(), Vec::new());
        for path in directories.keys() {
            let is_reached = path.parent().is_none_or(|above| is_directory(self.store, above));
            if is_reached && found_at(&tree, path)?.is_none() {
                self.store.io().make_dir(&beneath::reach(&tree, path)?, 0o700, WRITTEN)?;
                made.push(path);
            }
        }
        Ok(made)
    }

    /// Makes a file or link, unless it is there.
    fn make(&self, path: &Path, node: &Node, failed: &BTreeMap<Id, String>) -> Result<()> {
        let tree = self.store.tree();
        if !path.parent().is_none_or(|above| is_directory(self.store, above)) {
            return Err(Error::Wrong("something else has the place of its directory".into()));
        }
        // An interrupted pull has made it, or a program the same one.
        let is_there = match (node, found_at(&tree, path)?) {
            (Node::Directory(..), _) => true,
            (Node::Link(_, target), None) => {
                symlink(OsStr::from_bytes(target), beneath::reach(&tree, path)?)?;
                true
            }
            (Node::File(file), None) => {
                self.make_file(path, file, failed)?;
                true
            }
            (Node::Link(_, target), Some(there)) => {
                there.is_symlink() && fs::read_link(beneath::reach(&tree, path)?)?.as_os_str().as_bytes() == target
            }
            (Node::File(file), Some(there)) => {
                let is_like = (there.len(), modified_ns(&there)) == (file.len, file.attributes.modified_ns);
                there.is_file() && is_like && self.has(path, file, failed)?
            }
        };
        is_there.then_some(()).ok_or_else(|| Error::Wrong("another file of this store has its place".into()))
    }

    /// Whether a file of the store, as long as this one, has its bytes, or those that a lossy object was made from. Reads
    /// only files that no object decodes to, and the mirror only if this program packs a small file in another way.
    fn has(&self, path: &Path, file: &File, failed: &BTreeMap<Id, String>) -> Result<bool> {
        let own = self.store.io().open_beneath(&self.store.tree(), path, 0)?;
        let object = match file.content {
            Content::Small(blob) => {
                let mut bytes = vec![0; own.size() as usize];
                own.read_exact_at(&mut bytes, 0)?;
                return Ok(Blob::pack(&bytes)?.0 == blob || self.small(file, blob)? == bytes);
            }
            Content::Object(object) => self.object(file, object, failed)?,
        };
        Ok(match Stub::read_on(&own, self.store.id())? {
            Some(stub) => {
                let of = self.objects.get(stub.object);
                stub.object == object.id || of.is_some_and(|(of, _)| of.decoded_hash == object.decoded_hash)
            }
            None => whole::hash(&own, &|| (self.watch)(Step::Came(0)))? == object.original,
        })
    }

    /// The bytes of a small file.
    fn small(&self, file: &File, blob: Blob) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let packed = blob.get(self.from.place.as_ref())?;
        zstd::stream::read::Decoder::new(&packed[..])?.take(file.len + 1).read_to_end(&mut bytes)?;
        match bytes.len() as u64 == file.len {
            true => Ok(bytes),
            false => Err(Error::Wrong(format!("{} has another length", blob.name()))),
        }
    }

    /// The object that decodes to a file.
    fn object(&self, file: &File, id: Id, failed: &BTreeMap<Id, String>) -> Result<Header> {
        let ids = self.from.tree.chain(id);
        match self.objects.get(id).filter(|_| ids.is_some()) {
            Some((header, _)) if header.logical_len == file.len => Ok(header),
            Some(_) => Err(Error::Wrong(format!("object {id} has another length"))),
            None => {
                let why = ids.into_iter().flatten().find_map(|encoding| failed.get(&encoding.id));
                Err(Error::Wrong(why.map_or("an object of it is missing".into(), String::clone)))
            }
        }
    }

    fn make_file(&self, path: &Path, file: &File, failed: &BTreeMap<Id, String>) -> Result<()> {
        let store = self.store;
        let bytes = match file.content {
            Content::Small(blob) if file.len < MIN_RELEASE_BYTES => self.small(file, blob)?,
            Content::Object(object) if file.len >= MIN_RELEASE_BYTES => {
                self.object(file, object, failed)?;
                Stub { store: store.id(), object, logical_len: file.len }.encode().to_vec()
            }
            _ => return Err(Error::Wrong("its bytes are of another kind than its length says".into())),
        };
        let part = store.tmp().join(format!("pulled-{}", Id::random()?));
        let write = || -> io::Result<()> {
            let made: DeviceFile = store.io().create(&part, WRITTEN)?;
            made.write_all_at(&bytes, 0, WRITTEN)?;
            made.set_len(file.len, WRITTEN)?;
            file.attributes.set(&mut |attribute| made.set(attribute, WRITTEN))?;
            made.sync(WRITTEN)?;
            store.io().device().rename(&part, &beneath::reach(&store.tree(), path)?, IN_PLACE)
        };
        Ok(write().inspect_err(|_| store.io().discard(&part, WRITTEN))?)
    }
}

impl Attributes {
    /// Gives them to a file or directory; the owner only if this process may.
    fn set(&self, give: &mut dyn FnMut(&Attribute) -> io::Result<()>) -> io::Result<()> {
        if rustix::process::geteuid().is_root() {
            give(&Attribute::Owner(self.uid, self.gid))?;
        }
        give(&Attribute::Mode(self.mode & 0o1777))?;
        let time = (self.modified_ns.div_euclid(1_000_000_000), self.modified_ns.rem_euclid(1_000_000_000));
        give(&Attribute::Times(Times { accessed: time, modified: time }))
    }
}
