//! A store at work on a recorder, a program that writes into its tree, and the promises to that program with their
//! times.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use stepfs::archive::{Archive, AtRest, Commit, FileId, Namespace, Outcome};
use stepfs::store::durable::{Attribute, CrashPoint, Device, DeviceFile, Disk, Io, Times};
use stepfs::store::{Id, Objects, Store, Stub, export_file, import_file, replace_stub, sync_replaced};

use super::recorder::{Node, Op, Record, Recorder};
use super::series::{Dtype, Random, Tensor, decode, directory, safetensors, train};

/// A program's action on a path of the tree, and its time.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    /// Changes recorded before it was done; an action of one change counts before that change.
    pub(crate) at: usize,
    /// Changes recorded when the last byte was written.
    pub(crate) end: usize,
    pub(crate) path: String,
    pub(crate) what: What,
}

#[derive(Clone, Debug)]
pub(crate) enum What {
    /// Written in place as this node, from these bytes.
    Written(Node, Arc<Vec<u8>>),
    /// The same, but only the end is new.
    Appended(Node, Arc<Vec<u8>>),
    /// The same, of a file that has been there: its own fsync is enough.
    Rewritten(Node, Arc<Vec<u8>>),
    /// This node, whole, was renamed over it: the old file or the new one is there.
    Replaced(Node, Arc<Vec<u8>>),
    /// Removed, by a program or by the policy.
    Removed,
}

/// The run of a history: everything that a check needs.
pub(crate) struct Run {
    pub(crate) name: &'static str,
    pub(crate) record: Record,
    pub(crate) events: Vec<Event>,
    /// The decoded bytes of each object.
    pub(crate) finals: HashMap<Id, Arc<Vec<u8>>>,
}

/// The time span that counts as one rename's (`store/release.rs`).
const ONE_RENAME: Duration = Duration::from_millis(10);

/// A test that waits longer has failed.
pub(crate) const LONGEST: Duration = Duration::from_secs(180);

/// A program's next action gets a time that is later than the work for it, by more than one rename's span. Otherwise
/// the two look the same, and a restored note gives the directory the time that it had before either.
fn let_the_clock_tick() {
    let now = SystemTime::now() + ONE_RENAME;
    while tempfile::tempfile().and_then(|file| file.metadata()?.modified()).unwrap() <= now {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Nobody serves the tree, but a program works in it: no name changes while the archive relies on that.
struct Beside {
    rest: AtRest,
    names: Arc<Mutex<()>>,
}

impl Namespace for Beside {
    fn idle(&self, path: &Path, expect: FileId) -> Outcome {
        self.rest.idle(path, expect)
    }

    fn exclusively(&self, path: &Path, expect: FileId, commit: &mut Commit<'_>) -> io::Result<Outcome> {
        let _held = self.names.lock();
        let done = self.rest.exclusively(path, expect, commit);
        let_the_clock_tick();
        done
    }

    fn remove(&self, path: &Path, expect: FileId, still: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<Outcome> {
        let _held = self.names.lock();
        self.rest.remove(path, expect, still)
    }

    fn remove_directory(&self, path: &Path, expect: FileId) -> io::Result<Outcome> {
        let _held = self.names.lock();
        self.rest.remove_directory(path, expect)
    }
}

pub(crate) struct Live {
    dir: tempfile::TempDir,
    root: PathBuf,
    recorder: Arc<Recorder>,
    archive: Option<Arc<Archive>>,
    /// Held while a name is changed.
    names: Arc<Mutex<()>>,
    settings: Box<dyn Fn(String) -> String>,
    events: Vec<Event>,
    finals: HashMap<Id, Arc<Vec<u8>>>,
    clock: i64,
    random: Random,
    model: Vec<Tensor>,
}

impl Live {
    /// A new store with these settings, recorded from its creation.
    pub(crate) fn new(settings: impl Fn(String) -> String + 'static) -> Live {
        let dir = directory();
        let root = fs::canonicalize(dir.path()).unwrap();
        let recorder = Arc::new(Recorder::new(&root, HashMap::new()));
        let mut random = Random(7);
        let model = vec![
            Tensor::new("a.weight", Dtype::F32, &[128, 128], &mut random),
            Tensor::new("ids", Dtype::I64, &[64], &mut random),
        ];
        let mut live = Live {
            dir,
            root,
            recorder,
            archive: None,
            names: Arc::default(),
            settings: Box::new(settings),
            events: Vec::new(),
            finals: HashMap::new(),
            clock: 1_700_000_000,
            random,
            model,
        };
        live.open();
        live
    }

    pub(crate) fn io(&self) -> Io {
        Io::new(Arc::clone(&self.recorder) as _)
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.root.join("store")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.store().join("tree").join(name)
    }

    pub(crate) fn outside(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    pub(crate) fn archive(&self) -> &Arc<Archive> {
        self.archive.as_ref().unwrap()
    }

    pub(crate) fn open(&mut self) {
        let fresh = !self.store().exists();
        let mut store = Store::open_on(self.io(), &self.store()).unwrap();
        if fresh {
            // As a user does with an editor.
            drop(store);
            let path = self.store().join("stepfs.toml");
            let text = (self.settings)(fs::read_to_string(&path).unwrap());
            let new = self.store().join("stepfs.toml.new");
            let steps = (CrashPoint::SettingsWritten, CrashPoint::SettingsInPlace);
            self.io().replace(&new, &path, text.as_bytes(), steps).unwrap();
            store = Store::open_on(self.io(), &self.store()).unwrap();
        }
        let archive = Archive::open(store).unwrap();
        archive.start(Arc::new(Beside { rest: AtRest::of(archive.store()), names: Arc::clone(&self.names) }));
        self.archive = Some(archive);
    }

    /// Ends the daemon.
    pub(crate) fn close(&mut self) {
        let archive = self.archive.take().unwrap();
        archive.stop();
    }

    /// The next checkpoint of a training.
    pub(crate) fn next(&mut self) -> Vec<u8> {
        train(&mut self.model, 1e-3, &mut self.random);
        safetensors(&self.model)
    }

    fn event(&mut self, path: &str, what: What) {
        self.events.push(Event { at: self.recorder.now(), end: usize::MAX, path: path.to_string(), what });
    }

    fn node(&self, path: &Path) -> Node {
        self.recorder.find(path).unwrap()
    }

    /// Writes a file as most programs do: truncate, then in order, close.
    pub(crate) fn write(&mut self, name: &str, bytes: &[u8]) {
        self.write_and(name, bytes, |_, _| {});
    }

    /// As [`Live::write`], but fsyncs it and the directories above it before its close.
    pub(crate) fn write_durably(&mut self, name: &str, bytes: &[u8]) {
        self.write_and(name, bytes, Live::fsync);
    }

    fn write_and(&mut self, name: &str, bytes: &[u8], then: impl Fn(&Live, &Path)) {
        let path = self.path(name);
        self.archive().opened_for_writing(Path::new(name));
        let at = self.recorder.now();
        let what = What::Written(self.put(&path, bytes), Arc::new(bytes.to_vec()));
        self.events.push(Event { at, end: self.recorder.now(), path: name.to_string(), what });
        then(self, &path);
        self.archive().written(Path::new(name), bytes.len() as u64);
    }

    /// Opens a file, writes a line at its end, closes it.
    pub(crate) fn append(&mut self, name: &str, line: &[u8]) {
        self.archive().opened_for_writing(Path::new(name));
        let (path, at) = (self.path(name), self.recorder.now());
        let file = File::options().write(true).open(&path).unwrap();
        self.recorder.program().write(&file, line, file.metadata().unwrap().len());
        let bytes = fs::read(&path).unwrap();
        let (len, what) = (bytes.len() as u64, What::Appended(self.node(&path), Arc::new(bytes)));
        self.events.push(Event { at, end: self.recorder.now(), path: name.to_string(), what });
        self.archive().written(Path::new(name), len);
    }

    fn put(&mut self, path: &Path, bytes: &[u8]) -> Node {
        let program = self.recorder.program();
        let held = self.names.lock();
        program.make_dirs(path.parent().unwrap());
        let file = match path.exists() {
            true => {
                let file = File::options().read(true).write(true).open(path).unwrap();
                program.set_len(&file, 0);
                file
            }
            false => program.create(path),
        };
        drop(held);
        for (number, piece) in bytes.chunks(24_000).enumerate() {
            program.write(&file, piece, 24_000 * number as u64);
        }
        self.clock += 60;
        program.set(&file, Attribute::Mode(0o640));
        program.set(&file, Attribute::Extended("user.note".as_ref(), b"kept"));
        program.set(&file, Attribute::Times(Times { accessed: (self.clock, 0), modified: (self.clock, 0) }));
        self.node(path)
    }

    fn fsync(&self, path: &Path) {
        let program = self.recorder.program();
        program.sync(path);
        path.ancestors().skip(1).take_while(|above| above.starts_with(self.store())).for_each(|dir| program.sync(dir));
    }

    /// Writes beside it, fsyncs, renames over.
    pub(crate) fn replace(&mut self, name: &str, bytes: &[u8]) {
        let (path, beside) = (self.path(name), self.path(&format!("{name}.tmp")));
        self.archive().opened_for_writing(Path::new(&format!("{name}.tmp")));
        let node = self.put(&beside, bytes);
        self.recorder.program().sync(&beside);
        self.archive().written(Path::new(&format!("{name}.tmp")), bytes.len() as u64);
        self.event(name, What::Replaced(node, Arc::new(bytes.to_vec())));
        let held = self.names.lock();
        self.recorder.program().rename(&beside, &path);
        drop(held);
        self.archive().renamed(Path::new(&format!("{name}.tmp")), Path::new(name));
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.event(name, What::Removed);
        let held = self.names.lock();
        self.recorder.program().remove(&self.path(name));
        drop(held);
        self.archive().removed(Path::new(name));
    }

    /// The same as [`Live::remove`], while nobody serves the store.
    pub(crate) fn remove_at_rest(&mut self, name: &str) {
        self.event(name, What::Removed);
        self.recorder.program().remove(&self.path(name));
    }

    /// Opens a released file for writing: it is recalled as in `fs`.
    pub(crate) fn recall(&mut self, name: &str) -> Vec<u8> {
        let (archive, path) = (Arc::clone(self.archive()), self.path(name));
        let stub = Stub::read(&File::open(&path).unwrap(), archive.store().id()).unwrap().unwrap();
        let bytes = Arc::clone(&self.finals[&stub.object]);
        let (new, _) = archive.recall(&stub, &File::open(&path).unwrap(), None).unwrap();
        let node = self.node(&new);
        self.event(name, What::Replaced(node, Arc::clone(&bytes)));
        let held = self.names.lock();
        let directories = replace_stub(&self.io(), &new, &[path], &mut || unreachable!()).unwrap();
        drop(held);
        sync_replaced(&self.io(), &directories).unwrap();
        bytes.to_vec()
    }

    /// The bytes of a file.
    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        let (file, id) = (File::open(self.path(name)).unwrap(), self.archive().store().id());
        match Stub::read(&file, id).unwrap() {
            Some(stub) => self.finals[&stub.object].to_vec(),
            None => fs::read(self.path(name)).unwrap(),
        }
    }

    /// Copies a file into the store while nobody serves it.
    pub(crate) fn import(&mut self, name: &str, bytes: &[u8]) {
        self.close();
        let source = self.outside("source");
        fs::write(&source, bytes).unwrap();
        self.clock += 60;
        let file = File::open(&source).unwrap();
        let times = Times { accessed: (self.clock, 0), modified: (self.clock, 0) };
        for attribute in
            [Attribute::Mode(0o640), Attribute::Extended("user.note".as_ref(), b"kept"), Attribute::Times(times)]
        {
            Disk.set_attribute(&file, &attribute, CrashPoint::Fsync).unwrap();
        }
        let store = Store::open_on(self.io(), &self.store()).unwrap();
        import_file(&store, &source, Path::new(name), |_| {}).unwrap();
        drop(store);
        let is_it = |entry: &super::recorder::Entry| {
            entry.point == Some(CrashPoint::ImportInPlace) && matches!(entry.op, Op::Rename { .. })
        };
        let at = self.recorder.record().log.iter().rposition(is_it).unwrap();
        let node = self.node(&self.path(name));
        let what = What::Replaced(node, Arc::new(bytes.to_vec()));
        self.events.push(Event { at, end: at, path: name.into(), what });
        self.open();
    }

    /// Copies a file out of the store, and compares the copy.
    pub(crate) fn export(&self, name: &str, to: &str) {
        let bytes = self.bytes(name);
        let target = self.outside(to);
        let write = |file: &DeviceFile| file.write_all_at(&bytes, 0, CrashPoint::ExportWritten);
        export_file(self.archive().store(), Path::new(name), &target, write).unwrap();
        assert_eq!(fs::read(target).unwrap(), bytes);
    }

    pub(crate) fn set_default_profile(&self, name: &str) {
        let mut store = Store::open_on(self.io(), &self.store()).unwrap();
        store.set_default_profile(name.parse().unwrap()).unwrap();
    }

    /// Recalls a file, changes a part of it and fsyncs that: only the file, since its name is an old one.
    pub(crate) fn rewrite(&mut self, name: &str) {
        let mut bytes = self.recall(name);
        self.archive().opened_for_writing(Path::new(name));
        let path = self.path(name);
        let at = bytes.len() - 5000;
        bytes[at..at + 4].copy_from_slice(&0.0123f32.to_le_bytes());
        let file = File::options().write(true).open(&path).unwrap();
        let (node, began) = (self.node(&path), self.recorder.now());
        self.recorder.program().write(&file, &bytes[at..at + 4], at as u64);
        let what = What::Rewritten(node, Arc::new(bytes.clone()));
        self.events.push(Event { at: began, end: self.recorder.now(), path: name.into(), what });
        self.recorder.program().sync(&path);
        self.archive().written(Path::new(name), bytes.len() as u64);
    }

    /// Somebody resumed training from a file.
    pub(crate) fn restored(&self, name: &str) {
        let stub = Stub::read(&File::open(self.path(name)).unwrap(), self.archive().store().id()).unwrap().unwrap();
        self.archive().restores().restored(stub.object);
    }

    /// Waits until everything is done, and reads the released files.
    pub(crate) fn settle(&mut self) {
        wait(self.archive());
        self.look();
        let_the_clock_tick();
    }

    /// Waits until the policy has removed a file. It rests for many times as long as its last turn took.
    pub(crate) fn await_removal(&self, name: &str) {
        let began = Instant::now();
        while self.path(name).exists() {
            assert!(began.elapsed() < LONGEST, "{name} stays: {:?}", self.archive().status());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn look(&mut self) {
        let store = Store::look(&self.store()).unwrap();
        let objects = Objects::load(&store.objects(), |id, error| panic!("{id}: {error}")).unwrap();
        for header in objects.all() {
            let bytes = || Arc::new(decode(&objects, header.id).unwrap());
            let known = self.finals.entry(header.id).or_insert_with(bytes);
            assert!(**known == decode(&objects, header.id).unwrap(), "an object decodes to something else");
        }
    }

    pub(crate) fn end(mut self, name: &'static str) -> Run {
        self.settle();
        self.close();
        let record = self.recorder.record().clone();
        let mut events = std::mem::take(&mut self.events);
        // The time when a program's single action was done.
        for event in events.iter_mut().filter(|event| event.end == usize::MAX) {
            let is_it = |entry: &super::recorder::Entry| {
                let step = matches!(entry.point, None | Some(CrashPoint::RecallInPlace));
                step && matches!(entry.op, Op::Rename { .. } | Op::Remove { .. })
            };
            event.at += record.log[event.at..].iter().position(is_it).unwrap();
            event.end = event.at;
        }
        // The policy's removals.
        for (at, entry) in record.log.iter().enumerate() {
            if let (Op::Remove { name, .. }, Some(CrashPoint::NameRemoved)) = (&entry.op, entry.point) {
                let directory = record.path(name.0).unwrap_or_default();
                let Ok(inside) = directory.strip_prefix("store/tree") else { continue };
                let path = inside.join(&name.1).to_string_lossy().into_owned();
                events.push(Event { at, end: at, path, what: What::Removed });
            }
        }
        events.sort_by_key(|event| event.at);
        drop(self.dir);
        Run { name, record, events, finals: self.finals }
    }
}

/// Waits until the archive has nothing to do.
pub(crate) fn wait(archive: &Arc<Archive>) {
    let started = Instant::now();
    while archive.queue().queued > 0 {
        assert!(started.elapsed() < LONGEST, "takes too long: {:?}", archive.status());
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Run {
    /// A run whose objects are known to decode to these, too.
    pub(crate) fn with(&self, finals: HashMap<Id, Arc<Vec<u8>>>) -> Run {
        let mut all = self.finals.clone();
        all.extend(finals);
        Run { name: self.name, record: self.record.clone(), events: self.events.clone(), finals: all }
    }
}
