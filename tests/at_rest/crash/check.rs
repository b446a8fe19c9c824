//! Opens a store after a failure, lets it recover and continue, and checks the promises (docs/SEMANTICS.md).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use stepfs::archive::{Archive, AtRest};
use stepfs::recall::Chain;
use stepfs::store::durable::{CrashPoint, Device, Disk, Io, Times};
use stepfs::store::object::Object;
use stepfs::store::{Id, Objects, Store, Stub};
use xxhash_rust::xxh3::xxh3_128;

use super::image::{Changed, Image, Luck};
use super::live::{Run, What, wait};
use super::recorder::{Entry, Node, Op, Recorder};
use super::series::{Random, decode, directory, is_faithful};

/// Steps that recoveries took.
pub(crate) static RECOVERIES: Mutex<BTreeSet<CrashPoint>> = Mutex::new(BTreeSet::new());

/// The disk, with syncs that take no time: its content is thrown away.
#[derive(Debug)]
pub(crate) struct Unsynced {
    changed: Changed,
}

impl Device for Unsynced {
    fn sync_all(&self, _: &Path, _: CrashPoint) -> io::Result<()> {
        Ok(())
    }

    fn changed(&self, file: &File) -> io::Result<(i64, i64)> {
        let metadata = file.metadata()?;
        self.changed.get(&(metadata.dev(), metadata.ino())).map_or_else(|| Disk.changed(file), |time| Ok(*time))
    }

    fn sync_file(&self, _: &File, _: CrashPoint) -> io::Result<()> {
        Ok(())
    }

    fn sync_dir(&self, dir: &Path, _: CrashPoint) -> io::Result<()> {
        File::open(dir).map(|_| ())
    }
}

/// The allowed states of a path after a failure.
#[derive(Clone, Debug, Default)]
pub(crate) struct Allowed {
    /// It may be missing.
    absent: bool,
    /// Nothing was promised of its bytes, but perhaps of those at its beginning.
    anything: bool,
    begins: Option<Arc<Vec<u8>>>,
    /// It may have been written from these bytes, each with the file that has them.
    bytes: Vec<(Node, Arc<Vec<u8>>)>,
}

impl Run {
    /// The time when a change of the directory of `path` was made durable, after the change number `at`, among the
    /// first `done`.
    fn synced_after(&self, path: &str, at: usize, done: usize) -> bool {
        let path = Path::new("store/tree").join(path);
        let directory = self.record.find(path.parent().unwrap());
        let log = &self.record.log[..done];
        let synced = |node: Option<Node>, after: usize| {
            log.iter().skip(after + 1).any(|entry| match entry.op {
                Op::Sync { node: of } => Some(of) == node,
                Op::SyncAll => true,
                _ => false,
            })
        };
        // The same for the directories above it.
        let stands = |above: &Path| {
            let node = self.record.find(above);
            let made = log.iter().position(|entry| matches!(entry.op, Op::Create { node: of, .. } if Some(of) == node));
            made.is_none_or(|made| synced(self.record.find(above.parent().unwrap()), made))
        };
        synced(directory, at) && path.ancestors().skip(1).take_while(|above| above.parent().is_some()).all(stands)
    }

    /// Whether a written file is promised to be there: its last handle was closed and it was sealed, or it was fsynced,
    /// and then all directories above it were.
    fn is_promised(&self, path: &str, node: Node, end: usize, done: usize) -> bool {
        self.promised_at(path, node, end).is_some_and(|at| at < done)
    }

    /// The change that makes durable what was written by `end`.
    pub(crate) fn promised_at(&self, path: &str, node: Node, end: usize) -> Option<usize> {
        let path = Path::new("store/tree").join(path);
        let above = path.ancestors().skip(1).take_while(|above| above.starts_with("store/tree"));
        let mut above: BTreeSet<Node> = above.map(|above| self.record.find(above)).collect::<Option<_>>()?;
        let syncs = self.record.log.iter().enumerate().skip(end);
        let mut syncs = syncs.filter_map(|(at, entry)| match entry.op {
            Op::Sync { node } => Some((at, node, entry.point)),
            _ => None,
        });
        syncs.find(|(_, of, point)| *of == node && matches!(point, Some(CrashPoint::FileSealed) | None))?;
        syncs.find_map(|(at, of, _)| (above.remove(&of) && above.is_empty()).then_some(at))
    }

    /// The allowed states of each path once the first `done` changes were made.
    pub(crate) fn allowed(&self, done: usize) -> BTreeMap<&str, Allowed> {
        let mut paths: BTreeMap<&str, Allowed> = BTreeMap::new();
        let absent = || Allowed { absent: true, ..Allowed::default() };
        for event in self.events.iter().filter(|event| event.at < done) {
            let path = paths.entry(&event.path).or_insert_with(absent);
            match &event.what {
                What::Written(node, bytes) | What::Appended(node, bytes)
                    if self.is_promised(&event.path, *node, event.end, done) =>
                {
                    *path = Allowed { bytes: vec![(*node, Arc::clone(bytes))], ..Allowed::default() };
                }
                What::Written(..) => {
                    let absent = path.absent || path.bytes.is_empty();
                    *path = Allowed { absent, anything: true, ..Allowed::default() };
                }
                What::Appended(..) => {
                    let begins = path.begins.take().or_else(|| Some(Arc::clone(&path.bytes.first()?.1)));
                    let absent = path.absent || begins.is_none();
                    *path = Allowed { absent, anything: true, begins, ..Allowed::default() };
                }
                What::Rewritten(node, bytes) => {
                    let synced = |entry: &Entry| matches!(entry.op, Op::Sync { node: of } if of == *node);
                    let synced = self.record.log[..done].iter().skip(event.end).any(synced);
                    let bytes = if synced { vec![(*node, Arc::clone(bytes))] } else { Vec::new() };
                    *path = Allowed { absent: path.absent, anything: !synced, bytes, ..Allowed::default() };
                }
                What::Replaced(node, bytes) => {
                    if self.synced_after(&event.path, event.at, done) {
                        *path = Allowed::default();
                    }
                    path.bytes.push((*node, Arc::clone(bytes)));
                }
                What::Removed => match self.synced_after(&event.path, event.at, done) {
                    true => *path = absent(),
                    false => path.absent = true,
                },
            }
        }
        paths
    }

    /// Equal for equal promises.
    pub(crate) fn promised(&self, done: usize) -> u64 {
        let mut hash = std::hash::DefaultHasher::new();
        for (path, allowed) in self.allowed(done) {
            let nodes: Vec<Node> = allowed.bytes.iter().map(|(node, _)| *node).collect();
            (path, allowed.absent, allowed.anything, allowed.begins.map(|bytes| bytes.len()), nodes).hash(&mut hash);
        }
        for node in (0..self.record.nodes.len()).filter(|node| self.record.nodes[*node].is_dir) {
            self.times(node, done).iter().for_each(|times| times.modified.hash(&mut hash));
        }
        hash.finish()
    }

    /// The times that programs gave to a directory, and those of them that may be there.
    fn times(&self, directory: Node, done: usize) -> Vec<Times> {
        let start = &self.record.nodes[directory];
        let mut times = vec![start.times];
        // Releases whose directory changed under them, by the name of their note.
        let mut without_note = HashSet::new();
        for entry in &self.record.log[..done] {
            if let (Op::Remove { name }, Some(CrashPoint::NoteRemoved)) = (&entry.op, entry.point) {
                without_note.insert(name.1.clone());
            }
            if matches!(entry.op, Op::Sync { node } if node == directory) || matches!(entry.op, Op::SyncAll) {
                times.drain(..times.len() - 1);
            }
            // A user's command counts like a program's action. A crash at the instant of a recall may show in the
            // directory's times (docs/SEMANTICS.md).
            let theirs = |point| {
                matches!(
                    point,
                    CrashPoint::NameRemoved
                        | CrashPoint::ImportWritten
                        | CrashPoint::ImportInPlace
                        | CrashPoint::RecallInPlace
                )
            };
            if entry.point.is_none_or(theirs) || is_release_without_note(entry, &without_note) {
                times.extend(entry.stamped.iter().filter(|(dir, _)| *dir == directory).map(|(_, times)| *times));
            }
            match &entry.op {
                Op::Times { node, times: put_back } if *node == directory => times.push(*put_back),
                _ => {}
            }
        }
        times
    }
}

/// True if this puts a stub in place whose note was removed before. A crash at this instant shows in the directory's
/// times (`store/release.rs`).
fn is_release_without_note(entry: &Entry, without_note: &HashSet<OsString>) -> bool {
    let (Op::Rename { from, .. }, Some(CrashPoint::StubInPlace)) = (&entry.op, entry.point) else { return false };
    let stub = from.1.to_string_lossy();
    stub.strip_prefix("stub-").is_some_and(|name| without_note.contains(OsStr::new(&format!("times-{name}"))))
}

/// The bytes of a path of the tree.
#[derive(Clone, Debug, PartialEq)]
enum Reads {
    Absent,
    Plain(Vec<u8>),
    Decoded(Id, Vec<u8>),
}

impl Reads {
    fn words(&self) -> String {
        match self {
            Reads::Absent => "absent".into(),
            Reads::Plain(bytes) => format!("{} plain bytes", bytes.len()),
            Reads::Decoded(id, bytes) => format!("{} bytes of object {id}", bytes.len()),
        }
    }

    fn bytes(&self) -> Option<&[u8]> {
        match self {
            Reads::Absent => None,
            Reads::Plain(bytes) | Reads::Decoded(_, bytes) => Some(bytes),
        }
    }
}

/// One failure to be checked.
pub(crate) struct Failure<'a> {
    pub(crate) run: &'a Run,
    /// Changes made before it.
    pub(crate) done: usize,
    pub(crate) luck: Luck,
    /// The store was recovering, and at work, when it happened.
    pub(crate) again: bool,
}

impl Failure<'_> {
    /// Its place, for reports.
    pub(crate) fn words(&self) -> String {
        let entry = |at: Option<usize>| at.and_then(|at| self.run.record.log.get(at));
        let name = |at| {
            entry(at).map_or("the end".to_string(), |entry| {
                let words = format!("{:?}", entry.op);
                let op = words.split([' ', '{']).next().unwrap_or_default().to_string();
                entry.point.map_or(format!("a program's {op}"), |point| format!("{point:?}/{op}"))
            })
        };
        let (before, next) = (name(self.done.checked_sub(1)), name(Some(self.done)));
        format!("{}: after change {} ({before}), before {next}, luck {:?}", self.run.name, self.done, self.luck)
    }

    /// Checks it, and the states after one or both kinds of a second failure during recovery, if there is to be one.
    pub(crate) fn check(&self, image: &Image, second: Option<u64>, is_thorough: bool) {
        let dir = directory();
        let root = fs::canonicalize(dir.path()).unwrap();
        let changed = image.write(&root);
        let Some(seed) = second else {
            self.recover(&root, Io::new(Arc::new(Unsynced { changed })));
            return;
        };
        let mut random = Random(seed);
        // Half of the time the process alone dies first: its unsynced changes are there, and as little durable as
        // before.
        let recorder = Arc::new(match self.luck {
            Luck::All => Recorder::after_a_kill(&root, &self.run.record, self.done, changed),
            _ => Recorder::new(&root, changed),
        });
        let finals = self.recover(&root, Io::new(Arc::clone(&recorder) as _));
        let record = recorder.record().clone();
        RECOVERIES.lock().unwrap().extend(record.log.iter().filter_map(|entry| entry.point));
        let from = if self.luck == Luck::All { self.done } else { 0 };
        let run = self.run.with(finals);
        // One of both in turn; the long run has both.
        let lucks = [Luck::None, Luck::Some(random.next())];
        let turn = random.below(2) as usize;
        for luck in if is_thorough { &lucks[..] } else { &lucks[turn..=turn] } {
            // When all was done, and some time before.
            let done = match luck {
                Luck::None => record.log.len(),
                _ => from + random.below((record.log.len() - from + 1) as u64) as usize,
            };
            let again = Image::after(&record, done, *luck);
            let dir = directory();
            let root = fs::canonicalize(dir.path()).unwrap();
            let changed = again.write(&root);
            let entry = record.log.get(done);
            let context = Context(format!("second failure at {done} ({:?}), {luck:?}", entry.map(|entry| entry.point)));
            Failure { run: &run, done: self.done, luck: self.luck, again: true }
                .recover(&root, Io::new(Arc::new(Unsynced { changed })));
            context.passed();
        }
    }

    /// Returns the decoded bytes of all objects at the end.
    fn recover(&self, root: &Path, io: Io) -> HashMap<Id, Arc<Vec<u8>>> {
        let path = root.join("store");
        let allowed = self.run.allowed(self.done);
        let store = Store::open_on(io, &path).unwrap();
        assert_eq!(fs::read_dir(store.tmp()).unwrap().count(), 0, "tmp/ is not empty");
        self.directories(root, "after recovery");
        let before = self.look(&store, &allowed, "after recovery");
        let archive = Archive::open(store).unwrap();
        archive.start(Arc::new(AtRest::of(archive.store())));
        wait(&archive);
        archive.stop();
        let status = archive.status();
        assert_eq!((status.failed, status.stalled, status.frozen), (Vec::new(), None, None));
        drop(archive);
        let store = Store::look(&path).unwrap();
        assert_eq!(fs::read_dir(store.tmp()).unwrap().count(), 0, "tmp/ is not empty in the end");
        self.directories(root, "in the end");
        let after = self.look(&store, &allowed, "in the end");
        let newest = before.keys().filter(|path| path.starts_with("run/step_")).max_by_key(|path| {
            fs::metadata(store.tree().join(path)).map_or((0, 0), |found| (found.mtime(), found.mtime_nsec()))
        });
        for (path, was) in &before {
            let is = &after[path];
            // The policy may have removed it.
            if *is == Reads::Absent && *was != Reads::Absent {
                assert!(!store.settings().retention().is_empty(), "{path} went");
                continue;
            }
            if matches!(was, Reads::Decoded(..)) || newest == Some(path) {
                assert!(
                    was.bytes() == is.bytes(),
                    "{path}: its bytes have changed: {} then {}",
                    was.words(),
                    is.words()
                );
            }
        }
        let objects = Objects::load(&store.objects(), |id, error| panic!("{id}: {error}")).unwrap();
        objects.all().iter().map(|header| (header.id, Arc::new(decode(&objects, header.id).unwrap()))).collect()
    }

    /// Reads every file that ever existed, and verifies every object.
    fn look(&self, store: &Store, allowed: &BTreeMap<&str, Allowed>, when: &str) -> BTreeMap<String, Reads> {
        let objects = Objects::load(&store.objects(), |id, error| panic!("{when}: object {id}: {error}")).unwrap();
        let mut named = BTreeSet::new();
        let mut found = BTreeMap::new();
        for (path, allowed) in allowed {
            let reads = self.read(store, &objects, path, when);
            if let Reads::Decoded(id, _) = reads {
                named.insert(id);
            }
            self.judge(store, path, &reads, allowed, when);
            found.insert((*path).to_string(), reads);
        }
        for header in objects.all() {
            match Chain::open(&objects, header.id) {
                Ok(_) => {
                    let bytes = decode(&objects, header.id).unwrap_or_else(|error| panic!("{when}: {error}"));
                    assert_eq!(xxh3_128(&bytes), header.decoded_hash, "{when}: an object decodes to something else");
                }
                // Its parent went before it did, and nothing needs it.
                Err(error) => {
                    let gone = error.source.kind() == io::ErrorKind::NotFound && !named.contains(&header.id);
                    assert!(gone && when == "after recovery", "{when}: {error}");
                }
            }
        }
        found
    }

    fn read(&self, store: &Store, objects: &Objects, path: &str, when: &str) -> Reads {
        let Ok(file) = File::open(store.tree().join(path)) else { return Reads::Absent };
        match Stub::read(&file, store.id()).unwrap_or_else(|error| panic!("{when}: {path}: {error}")) {
            None => Reads::Plain(fs::read(store.tree().join(path)).unwrap()),
            Some(stub) => {
                let bytes = decode(objects, stub.object).unwrap_or_else(|error| panic!("{when}: {path}: {error}"));
                assert_eq!(bytes.len() as u64, stub.logical_len);
                Reads::Decoded(stub.object, bytes)
            }
        }
    }

    fn judge(&self, store: &Store, path: &str, reads: &Reads, allowed: &Allowed, when: &str) {
        let by_policy = !store.settings().retention().is_empty() && (self.again || when == "in the end");
        let Some(bytes) = reads.bytes() else {
            assert!(allowed.absent || by_policy, "{when}: {path} is lost; it was promised");
            return;
        };
        if let Reads::Decoded(id, bytes) = reads
            && let Some(expected) = self.run.finals.get(id)
        {
            assert!(bytes == &**expected, "{when}: {path}: its object decodes to something else than before");
        }
        if let Some(begins) = &allowed.begins {
            assert!(bytes.starts_with(begins), "{when}: {path}: lost what was closed before it was opened again");
        }
        if allowed.anything {
            return;
        }
        assert!(!allowed.bytes.is_empty(), "{when}: {path} is there; it was removed, durably");
        let exact = allowed.bytes.iter().any(|(_, written)| bytes == &***written);
        if !exact {
            let Reads::Decoded(id, _) = reads else { panic!("{when}: {path}: plain, and not as written") };
            let object = Object::open(&store.objects(), *id).unwrap();
            let close = |(_, written): &&(Node, Arc<Vec<u8>>)| close_enough(path, &object, written, bytes);
            assert!(allowed.bytes.iter().any(|written| close(&written)), "{when}: {path}: not as written");
        }
        let metadata = fs::metadata(store.tree().join(path)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o640, "{when}: {path}: mode");
        let note = xattr::get(store.tree().join(path), "user.note").unwrap();
        assert_eq!(note.as_deref(), Some(&b"kept"[..]), "{when}: {path}: an extended attribute");
    }

    /// The directories of the tree have times that programs gave them.
    fn directories(&self, root: &Path, when: &str) {
        let mut queue = vec![PathBuf::from("store/tree")];
        while let Some(path) = queue.pop() {
            let Some(node) = self.run.record.find(&path) else { continue };
            // The recovery made it anew.
            let is_ours = self.run.events.first().is_none_or(|event| event.at >= self.done);
            if is_ours {
                return;
            }
            let is = Times::of(&fs::metadata(root.join(&path)).unwrap()).modified;
            let may: Vec<(i64, i64)> = self.run.times(node, self.done).iter().map(|times| times.modified).collect();
            let by_policy = self.run.record.log.iter().any(|entry| entry.point == Some(CrashPoint::NameRemoved));
            assert!(may.contains(&is) || by_policy, "{when}: the time of {} is {is:?}, of {may:?}", path.display());
            for entry in fs::read_dir(root.join(&path)).unwrap() {
                let entry = entry.unwrap();
                if entry.file_type().unwrap().is_dir() {
                    queue.push(path.join(entry.file_name()));
                }
            }
        }
    }
}

fn close_enough(path: &str, object: &Object, written: &[u8], bytes: &[u8]) -> bool {
    let index = object.index();
    std::panic::catch_unwind(|| is_faithful(path, index, written, bytes)).is_ok()
}

/// Prints the case under test if it fails.
struct Context(String);

impl Context {
    fn passed(self) {
        std::mem::forget(self);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        eprintln!("{}", self.0);
    }
}
