//! A device that works on a real directory and records every change, so that `image.rs` can build the device after a
//! power failure at any point.
//!
//! It knows files by device and inode number, as the kernel does, and paths by its own model of the directory.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use super::image::Changed;
use stepfs::store::durable::{Attribute, CrashPoint, Device, Disk, Times};

/// A file or directory, by its number in the record.
pub(crate) type Node = usize;
/// A name in a directory.
pub(crate) type Name = (Node, OsString);

/// A recorded change.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Create {
        name: Name,
        node: Node,
    },
    Write {
        node: Node,
        offset: u64,
        bytes: Vec<u8>,
    },
    SetLen {
        node: Node,
        len: u64,
    },
    Owner {
        node: Node,
        user: u32,
        group: u32,
    },
    Mode {
        node: Node,
        mode: u32,
    },
    Times {
        node: Node,
        times: Times,
    },
    Extended {
        node: Node,
        name: OsString,
        /// None: it was taken away.
        value: Option<Vec<u8>>,
    },
    Sync {
        node: Node,
    },
    SyncAll,
    /// An omitted sync, to see whether a test notices.
    Omitted,
    Rename {
        from: Name,
        to: Name,
        node: Node,
    },
    Link {
        to: Name,
        node: Node,
    },
    Remove {
        name: Name,
    },
}

/// One change, its author, and its effect on the times of the directories whose names it changed.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) op: Op,
    /// The step of the store that it belongs to; none if a program did it.
    pub(crate) point: Option<CrashPoint>,
    pub(crate) stamped: Vec<(Node, Times)>,
    /// When it was done.
    pub(crate) when: Instant,
}

/// A file or directory at the start of the record, or at its creation.
#[derive(Clone, Debug)]
pub(crate) struct Start {
    pub(crate) is_dir: bool,
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) times: Times,
    pub(crate) bytes: Vec<u8>,
    pub(crate) extended: BTreeMap<OsString, Vec<u8>>,
    /// The names in a directory that existed already.
    pub(crate) names: BTreeMap<OsString, Node>,
    /// The time of its rename, if before the record.
    pub(crate) changed: Option<(i64, i64)>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Record {
    pub(crate) nodes: Vec<Start>,
    pub(crate) log: Vec<Entry>,
    /// The directory as it is now.
    names: BTreeMap<Name, Node>,
    known: HashMap<(u64, u64), Node>,
}

#[derive(Debug)]
pub(crate) struct Recorder {
    root: PathBuf,
    record: Mutex<Record>,
    /// Rename times of files that were not renamed since the record began.
    changed: Mutex<Changed>,
}

impl Recorder {
    /// Records everything done below `root` from now on. The present content is durable, and was renamed at these
    /// times.
    pub(crate) fn new(root: &Path, changed: Changed) -> Recorder {
        let mut record = Record::default();
        let root = fs::canonicalize(root).unwrap();
        record.take_in(&root);
        for (place, time) in &changed {
            let node = record.known[place];
            record.nodes[node].changed = Some(*time);
        }
        Recorder { root, record: Mutex::new(record), changed: Mutex::new(changed) }
    }

    /// Continues another record after its first `done` changes. `root` is a copy of its directory with all changes by
    /// then, durable or not: as if the process had been killed, and the machine had not.
    pub(crate) fn after_a_kill(root: &Path, record: &Record, done: usize, changed: Changed) -> Recorder {
        let root = fs::canonicalize(root).unwrap();
        let mut record = record.clone();
        record.log.truncate(done);
        record.known.clear();
        let names = record.live();
        record.names = names;
        record.know(0, &root);
        Recorder { root, record: Mutex::new(record), changed: Mutex::new(changed) }
    }

    pub(crate) fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The number of changes so far.
    pub(crate) fn now(&self) -> usize {
        self.record().log.len()
    }

    /// The node of a path below the root, and its name there.
    pub(crate) fn find(&self, path: &Path) -> Option<Node> {
        let record = self.record();
        record.find(self.relative(path)?)
    }

    fn relative<'a>(&self, path: &'a Path) -> Option<&'a Path> {
        path.strip_prefix(&self.root).ok()
    }

    /// Does something with the disk and records it, as one change.
    fn done<T>(
        &self,
        point: Option<CrashPoint>,
        run: impl FnOnce() -> io::Result<T>,
        op: impl FnOnce(&mut Record, &T) -> Option<Op>,
    ) -> io::Result<T> {
        let mut record = self.record();
        let result = run()?;
        if let Some(op) = op(&mut record, &result) {
            record.enter(&self.root, op, point);
        }
        Ok(result)
    }

    fn name(&self, record: &Record, path: &Path) -> Option<Name> {
        record.name(self.relative(path)?)
    }

    // A program's actions, by the same means.

    pub(crate) fn program(&self) -> Program<'_> {
        Program(self)
    }

    fn create_as(&self, path: &Path, at: Option<CrashPoint>) -> io::Result<File> {
        self.done(
            at,
            || Disk.create(path, CrashPoint::Fsync),
            |record, file| {
                let name = self.name(record, path)?;
                let node = record.admit(&file.metadata().unwrap(), false);
                Some(Op::Create { name, node })
            },
        )
    }

    fn make_dir_as(&self, path: &Path, mode: u32, at: Option<CrashPoint>) -> io::Result<()> {
        self.done(
            at,
            || Disk.make_dir(path, mode, CrashPoint::Fsync),
            |record, ()| {
                let name = self.name(record, path)?;
                let node = record.admit(&fs::symlink_metadata(path).unwrap(), true);
                Some(Op::Create { name, node })
            },
        )
    }

    fn write_as(&self, file: &File, bytes: &[u8], offset: u64, at: Option<CrashPoint>) -> io::Result<usize> {
        self.done(
            at,
            || Disk.write_at(file, bytes, offset, CrashPoint::Fsync),
            |record, count| Some(Op::Write { node: record.of(file)?, offset, bytes: bytes[..*count].to_vec() }),
        )
    }

    fn set_len_as(&self, file: &File, len: u64, at: Option<CrashPoint>) -> io::Result<()> {
        let run = || Disk.set_len(file, len, CrashPoint::Fsync);
        self.done(at, run, |record, ()| Some(Op::SetLen { node: record.of(file)?, len }))
    }

    fn set_as(&self, file: &File, attribute: &Attribute<'_>, at: Option<CrashPoint>) -> io::Result<()> {
        self.done(
            at,
            || Disk.set_attribute(file, attribute, CrashPoint::Fsync),
            |record, ()| {
                let node = record.of(file)?;
                Some(match *attribute {
                    Attribute::Owner(user, group) => Op::Owner { node, user, group },
                    Attribute::Mode(mode) => Op::Mode { node, mode },
                    Attribute::Times(times) => Op::Times { node, times },
                    Attribute::Extended(name, value) => {
                        Op::Extended { node, name: name.to_os_string(), value: Some(value.to_vec()) }
                    }
                    Attribute::Without(name) => Op::Extended { node, name: name.to_os_string(), value: None },
                })
            },
        )
    }

    fn rename_as(&self, from: &Path, to: &Path, at: Option<CrashPoint>) -> io::Result<()> {
        let mut record = self.record();
        let names = self.name(&record, from).zip(self.name(&record, to));
        let metadata = fs::symlink_metadata(from)?;
        Disk.rename(from, to, CrashPoint::Fsync)?;
        self.changed.lock().unwrap().remove(&(metadata.dev(), metadata.ino()));
        if let Some((from, to)) = names {
            let node = record.names[&from];
            record.enter(&self.root, Op::Rename { from, to, node }, at);
        }
        Ok(())
    }

    fn remove_as(&self, path: &Path, is_dir: bool, at: Option<CrashPoint>) -> io::Result<()> {
        self.done(
            at,
            || {
                if is_dir {
                    Disk.remove_dir(path, CrashPoint::Fsync)
                } else {
                    Disk.remove_file(path, CrashPoint::Fsync)
                }
            },
            |record, ()| {
                let name = self.name(record, path)?;
                // A file of the cache, or the lock: files that may be lost are not recorded.
                record.names.contains_key(&name).then_some(Op::Remove { name })
            },
        )
    }

    fn sync_as(&self, node: impl FnOnce(&Record) -> Option<Node>, at: Option<CrashPoint>) -> io::Result<()> {
        // The directory itself never sees a power failure.
        self.done(at, || Ok(()), |record, ()| Some(Op::Sync { node: node(record)? }))
    }
}

impl Record {
    fn start(metadata: &fs::Metadata, is_dir: bool) -> Start {
        Start {
            is_dir,
            mode: metadata.mode() & 0o7777,
            owner: (metadata.uid(), metadata.gid()),
            times: Times::of(metadata),
            bytes: Vec::new(),
            extended: BTreeMap::new(),
            names: BTreeMap::new(),
            changed: None,
        }
    }

    /// A new node for a newly made file or directory.
    fn admit(&mut self, metadata: &fs::Metadata, is_dir: bool) -> Node {
        self.nodes.push(Record::start(metadata, is_dir));
        let node = self.nodes.len() - 1;
        self.known.insert((metadata.dev(), metadata.ino()), node);
        node
    }

    /// Everything at and below `path`.
    fn take_in(&mut self, path: &Path) -> Node {
        let metadata = fs::symlink_metadata(path).unwrap();
        if let Some(node) = self.known.get(&(metadata.dev(), metadata.ino())).filter(|_| !metadata.is_dir()) {
            return *node;
        }
        let node = self.admit(&metadata, metadata.is_dir());
        for name in xattr::list(path).into_iter().flatten() {
            let value = xattr::get(path, &name).unwrap().unwrap();
            self.nodes[node].extended.insert(name, value);
        }
        if !metadata.is_dir() {
            self.nodes[node].bytes = fs::read(path).unwrap();
            return node;
        }
        for entry in fs::read_dir(path).unwrap() {
            let entry = entry.unwrap();
            let child = self.take_in(&entry.path());
            self.nodes[node].names.insert(entry.file_name(), child);
            self.names.insert((node, entry.file_name()), child);
        }
        node
    }

    /// Maps the inodes of `path`, a copy, to nodes.
    fn know(&mut self, node: Node, path: &Path) {
        let metadata = fs::symlink_metadata(path).unwrap();
        self.known.insert((metadata.dev(), metadata.ino()), node);
        if metadata.is_dir() {
            let below: Vec<(OsString, Node)> =
                self.names.iter().filter(|((dir, _), _)| *dir == node).map(|((_, n), c)| (n.clone(), *c)).collect();
            for (name, child) in below {
                self.know(child, &path.join(name));
            }
        }
    }

    /// The names after all changes.
    fn live(&self) -> BTreeMap<Name, Node> {
        let mut names = BTreeMap::new();
        for (dir, start) in self.nodes.iter().enumerate() {
            names.extend(start.names.iter().map(|(name, node)| ((dir, name.clone()), *node)));
        }
        self.log.iter().for_each(|entry| apply(&mut names, &entry.op));
        names
    }

    fn enter(&mut self, root: &Path, op: Op, point: Option<CrashPoint>) {
        apply(&mut self.names, &op);
        let touched: Vec<Node> = match &op {
            Op::Create { name, .. } | Op::Link { to: name, .. } | Op::Remove { name, .. } => vec![name.0],
            Op::Rename { from, to, .. } => vec![from.0, to.0],
            _ => Vec::new(),
        };
        let stamped = touched
            .into_iter()
            .filter_map(|dir| Some((dir, Times::of(&fs::symlink_metadata(root.join(self.path(dir)?)).ok()?))))
            .collect();
        self.log.push(Entry { op, point, stamped, when: Instant::now() });
    }

    /// The same, as if the syncs of one step had not been made.
    pub(crate) fn without_syncs(&self, point: CrashPoint) -> Record {
        let mut record = self.clone();
        for entry in record.log.iter_mut().filter(|entry| entry.point == Some(point)) {
            if matches!(entry.op, Op::Sync { .. } | Op::SyncAll) {
                entry.op = Op::Omitted;
            }
        }
        record
    }

    /// Path of a node below the root.
    pub(crate) fn path(&self, node: Node) -> Option<PathBuf> {
        if node == 0 {
            return Some(PathBuf::new());
        }
        let ((dir, name), _) = self.names.iter().find(|(_, child)| **child == node)?;
        Some(self.path(*dir)?.join(name))
    }

    fn of(&self, file: &File) -> Option<Node> {
        let metadata = file.metadata().unwrap();
        self.known.get(&(metadata.dev(), metadata.ino())).copied()
    }

    pub(crate) fn find(&self, relative: &Path) -> Option<Node> {
        relative.components().try_fold(0, |dir, part| match part {
            Component::Normal(name) => self.names.get(&(dir, name.to_os_string())).copied(),
            _ => None,
        })
    }

    fn name(&self, relative: &Path) -> Option<Name> {
        let dir = self.find(relative.parent()?)?;
        Some((dir, relative.file_name().map(OsStr::to_os_string)?))
    }
}

fn apply(names: &mut BTreeMap<Name, Node>, op: &Op) {
    match op {
        Op::Create { name, node } | Op::Link { to: name, node } => {
            names.insert(name.clone(), *node);
        }
        Op::Rename { from, to, node } => {
            names.remove(from);
            names.insert(to.clone(), *node);
        }
        Op::Remove { name } => {
            names.remove(name);
        }
        _ => {}
    }
}

impl Device for Recorder {
    fn changed(&self, file: &File) -> io::Result<(i64, i64)> {
        let metadata = file.metadata()?;
        match self.changed.lock().unwrap().get(&(metadata.dev(), metadata.ino())) {
            Some(time) => Ok(*time),
            None => Disk.changed(file),
        }
    }

    fn create(&self, path: &Path, at: CrashPoint) -> io::Result<File> {
        self.create_as(path, Some(at))
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64, at: CrashPoint) -> io::Result<usize> {
        self.write_as(file, bytes, offset, Some(at))
    }

    fn set_len(&self, file: &File, len: u64, at: CrashPoint) -> io::Result<()> {
        self.set_len_as(file, len, Some(at))
    }

    fn set_attribute(&self, file: &File, attribute: &Attribute<'_>, at: CrashPoint) -> io::Result<()> {
        self.set_as(file, attribute, Some(at))
    }

    fn sync_file(&self, file: &File, at: CrashPoint) -> io::Result<()> {
        self.sync_as(|record| record.of(file), Some(at))
    }

    fn sync_dir(&self, dir: &Path, at: CrashPoint) -> io::Result<()> {
        File::open(dir)?;
        self.sync_as(|record| record.find(self.relative(dir)?), Some(at))
    }

    fn sync_all(&self, _: &Path, at: CrashPoint) -> io::Result<()> {
        self.done(Some(at), || Ok(()), |_, ()| Some(Op::SyncAll))
    }

    fn rename(&self, from: &Path, to: &Path, at: CrashPoint) -> io::Result<()> {
        self.rename_as(from, to, Some(at))
    }

    fn link(&self, from: &Path, to: &Path, at: CrashPoint) -> io::Result<()> {
        self.done(
            Some(at),
            || Disk.link(from, to, at),
            |record, ()| {
                let node = record.find(self.relative(from)?)?;
                Some(Op::Link { to: self.name(record, to)?, node })
            },
        )
    }

    fn remove_file(&self, path: &Path, at: CrashPoint) -> io::Result<()> {
        self.remove_as(path, false, Some(at))
    }

    fn remove_dir(&self, path: &Path, at: CrashPoint) -> io::Result<()> {
        self.remove_as(path, true, Some(at))
    }

    fn make_dir(&self, path: &Path, mode: u32, at: CrashPoint) -> io::Result<()> {
        self.make_dir_as(path, mode, Some(at))
    }
}

/// A program's actions in the tree.
pub(crate) struct Program<'a>(&'a Recorder);

impl Program<'_> {
    pub(crate) fn make_dirs(&self, path: &Path) {
        if !path.exists() {
            self.make_dirs(path.parent().unwrap());
            self.0.make_dir_as(path, 0o755, None).unwrap();
        }
    }

    pub(crate) fn create(&self, path: &Path) -> File {
        self.0.create_as(path, None).unwrap()
    }

    pub(crate) fn write(&self, file: &File, bytes: &[u8], offset: u64) {
        assert_eq!(self.0.write_as(file, bytes, offset, None).unwrap(), bytes.len());
    }

    pub(crate) fn set_len(&self, file: &File, len: u64) {
        self.0.set_len_as(file, len, None).unwrap();
    }

    pub(crate) fn set(&self, file: &File, attribute: Attribute<'_>) {
        self.0.set_as(file, &attribute, None).unwrap();
    }

    pub(crate) fn sync(&self, path: &Path) {
        self.0.sync_as(|record| record.find(self.0.relative(path)?), None).unwrap();
    }

    pub(crate) fn rename(&self, from: &Path, to: &Path) {
        self.0.rename_as(from, to, None).unwrap();
    }

    pub(crate) fn remove(&self, path: &Path) {
        self.0.remove_as(path, path.is_dir(), None).unwrap();
    }
}
