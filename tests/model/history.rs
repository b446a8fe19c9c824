//! One history: the same operations on the mount, on a plain directory and in the model, and all three compared.
//!
//! Answers and errnos are compared after each operation. The whole tree is compared as often as the history says, and
//! at its end.

use std::path::{Path, PathBuf};
use std::sync::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stepfs::store::Stub;
use stepfs::store::object::Object;

use super::expect::{Expected, expected};
use super::judge::{Run, may_be_released, not_released_from};
use super::model::{Handle, Kind, Model, Node, Span};
use super::op::{ALL_SLOTS, Data, Op, PATHS, Slot, XATTRS};
use super::support::Mounted;
use super::sys;
use super::tree;
use super::world::{Answer, Said, World};

/// Longest time of the archive for one history's files; it takes milliseconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Among other threads, which always give it more work.
const A_WHILE: Duration = Duration::from_secs(1);

/// A mount that many histories share, each in a directory of its own.
pub(crate) struct Ground {
    mounted: RwLock<Option<Mounted>>,
    passthrough: bool,
    /// Nobody else gives the archive work, so that it comes to an end.
    alone: bool,
    pub(crate) dir: PathBuf,
    next: AtomicU64,
    pub(crate) counts: Counts,
}

/// Events of a run, so that a run without any is noticed.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) histories: AtomicU64,
    pub(crate) operations: AtomicU64,
    pub(crate) failing: AtomicU64,
    /// Files seen released, and those of them that had lost something.
    pub(crate) released: AtomicU64,
    pub(crate) quantized: AtomicU64,
    pub(crate) remounts: AtomicU64,
}

impl Ground {
    pub(crate) fn new(passthrough: bool) -> Ground {
        Ground { alone: true, ..Self::shared(passthrough) }
    }

    /// A mount for several threads at once.
    pub(crate) fn shared(passthrough: bool) -> Ground {
        let mounted = Mounted::new(passthrough);
        let dir = mounted.dir.path().to_path_buf();
        // SAFETY: no arguments that could be wrong. All tests of this program want the same.
        unsafe { libc::umask(0o022) };
        Ground {
            mounted: RwLock::new(Some(mounted)),
            passthrough,
            alone: false,
            dir,
            next: 0.into(),
            counts: Counts::default(),
        }
    }

    pub(crate) fn with<T>(&self, run: impl FnOnce(&Mounted) -> T) -> T {
        run(self.mounted.read().unwrap_or_else(std::sync::PoisonError::into_inner).as_ref().expect("mounted"))
    }

    /// Waits until the archive has nothing left to do.
    ///
    /// # Errors
    /// When it still has after `patience`, if it `must` come to an end.
    pub(crate) fn wait_for_archive(&self, patience: Duration, must: bool) -> Result<(), String> {
        let began = Instant::now();
        while self.with(|mounted| mounted.archive.queue().queued) > 0 {
            if began.elapsed() > patience {
                let queue = self.with(|mounted| mounted.archive.queue());
                return if must { Err(format!("the archive does not come to an end: {queue:?}")) } else { Ok(()) };
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn remount(&self) {
        let mut mounted = self.mounted.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        let dir = mounted.take().expect("mounted").unmount_keeping();
        *mounted = Some(Mounted::on(dir, self.passthrough));
        self.counts.remounts.fetch_add(1, Ordering::Relaxed);
    }

    /// Runs a history in a new directory, which goes afterwards, also if the history fails.
    ///
    /// # Errors
    /// The difference, with the last operations.
    pub(crate) fn history(&self, cadence: usize, operations: &[Op]) -> Result<(), String> {
        let name = format!("h{}", self.next.fetch_add(1, Ordering::Relaxed));
        let (on_mount, beside) = (self.dir.join("mnt").join(&name), self.dir.join("plain").join(&name));
        let mut history = History::new(self, &on_mount, &beside);
        let result = history.run(cadence, operations);
        history.close_all();
        drop(history);
        for top in [&on_mount, &beside] {
            std::fs::remove_dir_all(top).map_err(|error| format!("rm -r: {error}"))?;
        }
        self.counts.histories.fetch_add(1, Ordering::Relaxed);
        self.counts.operations.fetch_add(operations.len() as u64, Ordering::Relaxed);
        result
    }
}

pub(crate) struct History<'a> {
    pub(crate) ground: &'a Ground,
    /// The mount, and the plain directory beside it.
    pub(crate) worlds: [World; 2],
    pub(crate) model: Model,
    run: Run,
    log: Vec<String>,
    /// Inode numbers that the mount has shown.
    pub(crate) numbers: std::collections::HashMap<Node, u64>,
    /// Files that were ever released: their number may change.
    pub(crate) renumbered: std::collections::HashSet<Node>,
}

impl<'a> History<'a> {
    fn new(ground: &'a Ground, on_mount: &Path, beside: &Path) -> History<'a> {
        let begin = sys::stamp();
        let worlds = [World::new(on_mount), World::new(beside)];
        // Each history trains a model of its own.
        let salt = ground.next.load(Ordering::Relaxed);
        History {
            ground,
            worlds,
            model: Model::new((begin, sys::now())),
            run: Run::new(salt),
            log: Vec::new(),
            numbers: Default::default(),
            renumbered: Default::default(),
        }
    }

    fn run(&mut self, cadence: usize, operations: &[Op]) -> Result<(), String> {
        let mut steps = [0; 2];
        let result = (|| {
            for (number, op) in operations.iter().enumerate() {
                for call in op.calls(&mut steps) {
                    self.step(&call)?;
                }
                if (number + 1) % cadence == 0 {
                    tree::compare(self)?;
                }
            }
            tree::compare(self)?;
            tree::compare_handles(self)?;
            self.close_all();
            if self.any_large() {
                self.settle_archive()?;
                tree::compare(self)?;
            }
            Ok(())
        })();
        result.map_err(|error: String| {
            let last = self.log.len().saturating_sub(40);
            format!("{error}\nthe last operations, on the mount and beside it:\n{}", self.log[last..].join("\n"))
        })
    }

    fn close_all(&mut self) {
        self.worlds.iter_mut().for_each(World::close_all);
        self.model.handles = std::array::from_fn(|_| None);
        for map in 0..self.model.maps.len() {
            self.forget_map(map, sys::now());
        }
    }

    fn any_large(&self) -> bool {
        self.model.nodes.iter().any(|inode| inode.names > 0 && may_be_released(&inode.data))
    }

    /// A held mapping is gone: stores through it are written back by now.
    fn forget_map(&mut self, map: usize, now: i128) {
        if let Some(held) = self.model.maps[map].take()
            && let Some(since) = held.stored
            && self.model.stored(held.node).is_none()
        {
            let times = &mut self.model.nodes[held.node].mtime;
            times.iter_mut().for_each(|spans| spans.push((since, now)));
        }
    }

    fn step(&mut self, op: &Op) -> Result<(), String> {
        let Some((op, bytes)) = self.prepared(op) else {
            return Ok(());
        };
        match op {
            Op::Sync | Op::Release(_) | Op::Recall(_) | Op::Pin(_) | Op::Unpin(_) | Op::Gc => return self.own(&op),
            Op::Remount => {
                self.log.push("Remount".into());
                self.close_all();
                self.ground.remount();
                self.numbers.clear();
                return Ok(());
            }
            _ => {}
        }
        let begin = sys::stamp();
        if let Op::MapHold(map, _) = op {
            // The old one goes, also if there will be no other.
            for world in &mut self.worlds {
                let _ = world.apply(&Op::MapDrop(map), &[]);
            }
            self.forget_map(usize::from(map), sys::now());
        }
        let said = [self.worlds[0].apply(&op, &bytes), self.worlds[1].apply(&op, &bytes)];
        let span = (begin, sys::now());
        self.log.push(format!("{op:?} -> {:?} | {:?}", said[0], said[1]));
        let expected = expected(&mut self.model, &op, &bytes, span);
        if let Op::MapDrop(map) = op {
            self.forget_map(usize::from(map), span.1);
        }
        if said[0].is_err() {
            self.ground.counts.failing.fetch_add(1, Ordering::Relaxed);
        }
        self.judge_answers(&op, said, expected)?;
        self.afterwards(&op, &bytes, span)
    }

    /// The operation with its dependent values: bytes to write, and offsets of mappings cut to the present length. None
    /// if it would hang, kill the process, or have an unknowable result.
    fn prepared(&mut self, op: &Op) -> Option<(Op, Vec<u8>)> {
        let model = &self.model;
        let len_of = |node: Node| model.nodes[node].data.len() as u32;
        let node_of = |slot: u8| model.handle(slot).ok().map(|handle| handle.node);
        let cut = |len: u32, at: u32, most: u32| (at.min(len), most.min(len - at.min(len)));
        let slots = match op {
            Op::Read(a, _) | Op::Fstat(a) | Op::Seek(a, ..) | Op::MapRead(a, ..) | Op::MapWrite(a, ..) => vec![*a],
            Op::CopyRange(a, _, b, ..) => vec![*a, *b],
            _ => vec![],
        };
        if slots.into_iter().any(|slot| model.uncertain(slot)) {
            return None;
        }
        let mut bytes = Vec::new();
        let op = match *op {
            Op::Open(_, at, flags, _) => {
                // Would wait for somebody at the other end.
                let follow = flags & libc::O_NOFOLLOW == 0;
                let found = model.existing(at, follow).ok().map(|node| model.nodes[node].kind);
                return (found != Some(Kind::Fifo)).then(|| (op.clone(), bytes));
            }
            // Positions in directories are each file system's own.
            Op::Seek(slot, ..) if node_of(slot).is_none_or(|node| model.nodes[node].kind != Kind::File) => return None,
            Op::Flock(slot, _) => {
                let node = node_of(slot);
                let kept = |handle: &Handle| Some(handle.node) == node && handle.kept.is_some();
                return (!model.handles.iter().flatten().any(kept)).then(|| (op.clone(), bytes));
            }
            Op::MapRead(slot, at, len) => {
                let (at, len) = cut(node_of(slot).map_or(0, len_of), at, len);
                Op::MapRead(slot, at, len)
            }
            Op::MapWrite(slot, at, data) => {
                bytes = self.run.bytes(data);
                let (at, len) = cut(
                    node_of(slot).map_or(0, |node| self.model.nodes[node].data.len() as u32),
                    at,
                    bytes.len() as u32,
                );
                bytes.truncate(len as usize);
                Op::MapWrite(slot, at, data)
            }
            Op::MapHold(_, slot) => {
                let handle = model.handle(slot).ok()?;
                if handle.kept.is_some() || model.nodes[handle.node].data.is_empty() {
                    return None;
                }
                op.clone()
            }
            Op::MapStore(map, at, data) => {
                bytes = self.run.bytes(data);
                let held = self.model.maps[usize::from(map)].as_ref().filter(|held| held.write)?;
                let end = self.model.nodes[held.node].data.len().min(held.len) as u32;
                let (at, len) = cut(end, at, bytes.len() as u32);
                bytes.truncate(len as usize);
                Op::MapStore(map, at, data)
            }
            Op::MapLoad(map, at, len) => {
                let held = self.model.maps[usize::from(map)].as_ref()?;
                let end = self.model.nodes[held.node].data.len().min(held.len) as u32;
                let (at, len) = cut(end, at, len);
                Op::MapLoad(map, at, len)
            }
            Op::Write(_, data) | Op::Pwrite(_, _, data) => {
                bytes = self.run.bytes(data);
                op.clone()
            }
            Op::SetXattr(_, name, len, _) => {
                bytes = self.run.bytes(Data::Pattern(len.into(), name));
                op.clone()
            }
            _ => op.clone(),
        };
        Some((op, bytes))
    }

    fn judge_answers(&self, op: &Op, said: [Said; 2], expected: Expected) -> Result<(), String> {
        let wrong = |who: &str, said: &Said, expected: &dyn std::fmt::Debug| {
            Err(format!("{op:?}: {who} says {said:?}, expected is {expected:?}"))
        };
        for (which, said) in said.into_iter().enumerate() {
            let who = ["the mount", "the plain directory"][which];
            match &expected {
                Expected::Is(answer) if said != *answer => return wrong(who, &said, answer),
                Expected::Is(_) => {}
                // Only the mount may differ from the first answer.
                Expected::OneOf(answers) => {
                    if !answers[..if which == 0 { answers.len() } else { 1 }].contains(&said) {
                        return wrong(who, &said, answers);
                    }
                }
                Expected::Stat(node) => match &said {
                    Ok(Answer::Stat(stat)) => tree::check_stat(self, *node, stat, which)?,
                    _ => return wrong(who, &said, &"attributes"),
                },
                Expected::Edge { node, from, data } => {
                    let bytes = &self.model.nodes[*node].data;
                    let zeros = |range: std::ops::Range<usize>| bytes[range].iter().all(|byte| *byte == 0);
                    let from = *from as usize;
                    let right = match said {
                        Ok(Answer::Number(at)) if *data => {
                            let at = at as usize;
                            (from..bytes.len()).contains(&at) && zeros(from..at)
                        }
                        // At the start of a hole there are zeros, or it is the end.
                        Ok(Answer::Number(at)) => (from..=bytes.len()).contains(&(at as usize)),
                        Err(libc::ENXIO) => from >= bytes.len() || (*data && zeros(from..bytes.len())),
                        _ => false,
                    };
                    if !right {
                        return wrong(
                            who,
                            &said,
                            &format!("the next {} from {from}", if *data { "data" } else { "hole" }),
                        );
                    }
                }
            }
        }
        Ok(())
    }

    /// The releases that a call has shown, and the files that may be released from now on.
    fn afterwards(&mut self, op: &Op, bytes: &[u8], span: Span) -> Result<(), String> {
        if let Op::Open(slot, at, ..) = *op
            && let Ok(handle) = self.model.handle(slot).cloned()
            && self.model.nodes[handle.node].kind == Kind::File
            && may_be_released(&self.model.nodes[handle.node].data)
        {
            // From here on it cannot be released, and keeps its state.
            self.settle(handle.node, &self.worlds[0].path(at), Some(slot))?;
            let fd = self.worlds[0].handles[usize::from(slot)].as_ref().expect("it was opened");
            if tree::state(fd).as_deref() == Some("released") {
                let bytes = self.model.nodes[handle.node].data.clone();
                self.model.handles[usize::from(slot)].as_mut().expect("just seen").kept = Some(bytes);
            }
        }
        if let Op::Truncate(at, _) = *op
            && let Ok(node) = self.model.existing(at, true)
            && self.model.nodes[node].fate.cut.is_some()
        {
            self.settle(node, &self.worlds[0].path(at), None)?;
        }
        if let Op::MapStore(map, ..) = *op
            && let (Some(held), false) = (&mut self.model.maps[usize::from(map)], bytes.is_empty())
        {
            held.stored.get_or_insert(span.0);
        }
        tree::note_superseded(self);
        Ok(())
    }

    /// Reads a file of the mount and judges the bytes; the model and the plain directory take them over. `opened` is
    /// the handle that was just opened, if nobody had looked before.
    pub(crate) fn settle(&mut self, node: Node, path: &Path, opened: Option<Slot>) -> Result<(), String> {
        // Asked first: it may be released while it is read.
        let large = may_be_released(&self.model.nodes[node].data);
        let released = large && super::support::state(path) == "released";
        let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let inode = &self.model.nodes[node];
        let differs = bytes != inode.data;
        let say = |why: String| Err(format!("{}: {why}; {:?}, released: {released}", path.display(), inode.fate));
        if differs {
            if inode.fate.last {
                return say("its bytes changed a second time".into());
            }
            if !inode.fate.superseded {
                return say(format!(
                    "differs from its write, although it is the newest; {}",
                    difference(&inode.data, &bytes)
                ));
            }
            let mut handles = self.model.handles.iter().enumerate();
            let open = |(slot, handle): (usize, &Option<Handle>)| {
                // With passthrough such a reader keeps the old inode (SEMANTICS, "Deviations from POSIX"). Without, it
                // continues with the new bytes, and they must stay.
                let is_left_behind = self.ground.passthrough && self.model.uncertain(slot as Slot);
                let here = handle.as_ref().is_some_and(|handle| handle.node == node) && !is_left_behind;
                here && opened.map(usize::from) != Some(slot)
            };
            if inode.fate.cut.is_none() && handles.any(open) {
                return say("released while it is open".into());
            }
            let bounds = self.bounds(path);
            if let Some(why) = not_released_from(&inode.data, &bytes, inode.fate.cut, bounds.as_deref()) {
                return say(why);
            }
        }
        if (released || differs) && inode.fate.stays {
            return say("released although it is pinned".into());
        }
        if released && !inode.fate.last {
            self.ground.counts.released.fetch_add(1, Ordering::Relaxed);
        }
        self.model.nodes[node].fate.cut = None;
        if released || differs {
            self.model.nodes[node].fate.last = true;
            self.renumbered.insert(node);
        }
        if differs {
            self.ground.counts.quantized.fetch_add(1, Ordering::Relaxed);
            self.adopt(node, path, bytes)?;
        }
        Ok(())
    }

    /// From now on these are the bytes: in the model, in read-only mappings, and beside the mount.
    fn adopt(&mut self, node: Node, path: &Path, bytes: Vec<u8>) -> Result<(), String> {
        let inside = path.strip_prefix(&self.worlds[0].top).expect("of this history");
        let twin = self.worlds[1].top.join(inside);
        let code = |code: i32| format!("{}: errno {code}", twin.display());
        let file = sys::open(&twin, libc::O_WRONLY, 0).map_err(code)?;
        let times = sys::fstat(&file).map_err(code)?;
        sys::pwrite(&file, &bytes, 0).map_err(code)?;
        let stamp =
            |time: i128| sys::Stamp::At(time.div_euclid(1_000_000_000) as i64, time.rem_euclid(1_000_000_000) as u32);
        sys::utimens(&twin, stamp(times.atime), stamp(times.mtime), 0).map_err(code)?;
        let before = std::mem::replace(&mut self.model.nodes[node].data, bytes);
        for held in self.model.maps.iter_mut().flatten().filter(|held| held.node == node) {
            held.kept.push(before.clone());
        }
        Ok(())
    }

    /// Bounds of the tensors of a released file.
    fn bounds(&self, path: &Path) -> Option<Vec<(String, f64)>> {
        self.ground.with(|mounted| {
            let inside = path.canonicalize().ok()?.strip_prefix(mounted.mnt().canonicalize().ok()?).ok()?.to_path_buf();
            let store = mounted.archive.store();
            let stub = Stub::read(&std::fs::File::open(store.tree().join(inside)).ok()?, store.id()).ok()??;
            let object = Object::open(&store.objects(), stub.object).ok()?;
            Some(object.index().tensors.iter().map(|tensor| (tensor.path.clone(), tensor.bound)).collect())
        })
    }

    // --- calls that only the mount has

    fn settle_archive(&self) -> Result<(), String> {
        let code = sys::setxattr(&self.worlds[0].top, "user.stepfs.sync", b"1", 0);
        if code.is_err() {
            return Err(format!("sync: {code:?}"));
        }
        self.ground.wait_for_archive(if self.ground.alone { PATIENCE } else { A_WHILE }, self.ground.alone)
    }

    fn own(&mut self, op: &Op) -> Result<(), String> {
        let set = |at: u8, name: &str| sys::setxattr(&self.worlds[0].path(at), name, b"1", 0);
        let on = |at: u8| self.model.existing(at, false).map(|node| (node, self.model.nodes[node].kind));
        let (said, wanted) = match *op {
            Op::Sync => {
                self.log.push("Sync".into());
                return self.settle_archive();
            }
            Op::Gc => (sys::setxattr(&self.worlds[0].top, "user.stepfs.gc", b"1", 0), Ok(())),
            Op::Release(at) => (set(at, "user.stepfs.release"), on(at).and_then(|(_, kind)| marks(kind))),
            Op::Recall(at) => {
                let wanted = on(at).and_then(|(_, kind)| match kind {
                    Kind::Directory => Err(libc::EISDIR),
                    kind => marks(kind),
                });
                (set(at, "user.stepfs.recall"), wanted)
            }
            Op::Pin(at) => (set(at, "user.stepfs.pin"), on(at).and_then(|(_, kind)| marks(kind))),
            Op::Unpin(at) => {
                let wanted = on(at).and_then(|(node, kind)| {
                    marks(kind)?;
                    if self.model.nodes[node].pinned { Ok(()) } else { Err(libc::ENODATA) }
                });
                (sys::removexattr(&self.worlds[0].path(at), "user.stepfs.pin"), wanted)
            }
            _ => unreachable!("both worlds have it"),
        };
        self.log.push(format!("{op:?} -> {said:?}"));
        if said != wanted {
            return Err(format!("{op:?}: the mount says {said:?}, expected is {wanted:?}"));
        }
        if let (Op::Pin(at) | Op::Unpin(at), Ok(())) = (op, said) {
            let node = self.model.existing(*at, false).map_err(|code| format!("errno {code}"))?;
            let pinned = matches!(op, Op::Pin(_));
            let path = self.worlds[0].path(*at);
            let resident = super::support::state(&path) != "released";
            if pinned && resident && may_be_released(&self.model.nodes[node].data) {
                // It may have been released before, and recalled, without a look at it since.
                self.settle(node, &path, None)?;
            }
            let inode = &mut self.model.nodes[node];
            inode.pinned = pinned;
            inode.fate.stays = pinned && (inode.fate.stays || resident) && inode.kind == Kind::File;
        }
        Ok(())
    }
}

/// The inodes that take attributes of `user.`
fn marks(kind: Kind) -> Result<(), i32> {
    if matches!(kind, Kind::File | Kind::Directory) { Ok(()) } else { Err(libc::EPERM) }
}

pub(crate) fn difference(expected: &[u8], found: &[u8]) -> String {
    let at = expected.iter().zip(found).position(|(a, b)| a != b).unwrap_or(expected.len().min(found.len()));
    format!("{} bytes, expected {}, the first difference at {at}", found.len(), expected.len())
}

// The worlds and the model index the tables of names.
const _: () = assert!(PATHS.len() < 256 && XATTRS.len() < 256 && ALL_SLOTS < 256);
