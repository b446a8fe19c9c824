//! One round of pushing: what the tree has and the remote has not, the newest first.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::journal::{Content, Record, Shown};
use super::local::{Ahead, Found, Local, Shape, modified_ns, walk};
use super::place::{Error, Result};
use super::plan::{Want, plan};
use super::reader::lock;
use super::shared::{Backlog, FILES, Shared};
use super::view::Stamp;
use super::writer::Writer;
use super::{tree, whole};
use crate::clock::stamp_ns;
use crate::container::ReadAt;
use crate::store::durable::{CrashPoint, DeviceFile};
use crate::store::object::Object;
use crate::store::{Id, MAX_CHAIN, MIN_RELEASE_BYTES};

/// A removed name waits at most this long for files that may have taken its bytes: a rename is one change then.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(60);
/// Changes in one segment.
const AT_ONCE: usize = 5_000;
/// Bytes of small files in one segment.
const INLINE_AT_ONCE: u64 = 32 << 20;

/// The kernel's clock for files advances within this time.
const A_TICK: Duration = Duration::from_millis(10);

/// How long a file that cannot be read is left alone, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The same at most for a file that has changed since: one that is written all the time costs an encoding each time.
const PAUSE_OF_CHANGED: Duration = Duration::from_secs(2);

/// The pusher's memory between rounds.
#[derive(Default)]
pub(super) struct Pusher {
    /// Since when a name is missing.
    missing: HashMap<PathBuf, Instant>,
    /// Files that cannot be pushed. All others go on.
    failed: BTreeMap<PathBuf, Failed>,
    /// Directories that could not be listed, each with the reason.
    unlisted: BTreeMap<PathBuf, String>,
    /// When the next round is due because of these. `None` if there are none, or if something else is left.
    again: Option<Instant>,
}

struct Failed {
    /// The file that was tried. Another one does not wait long.
    of: Found,
    why: String,
    since: Instant,
    pause: Duration,
    /// Nobody has asked to hasten since.
    asked: u64,
}

/// What became of one file.
enum Outcome {
    /// Its bytes are there: the objects that are new, and where the bytes are.
    There(Vec<Record>, Content),
    /// Its turn comes later.
    Later,
    /// It cannot be read, or has changed meanwhile; says so.
    Failed(String),
}

impl Pusher {
    /// Pushes once. True if nothing is left.
    ///
    /// # Errors
    /// Those of the remote and the device; the next round begins where this one ended.
    pub(super) fn round(&mut self, local: &dyn Local, writer: &mut Writer, shared: &Shared) -> Result<bool> {
        self.again = None;
        writer.check_owner()?;
        writer.tell()?;
        // Before the tree is listed: a name that appears meanwhile must not be taken for one that was removed.
        let shown = shared.shown();
        let before = local.changes();
        let closers = shared.waiting.closers();
        let mut listing = walk(local)?;
        for (_, file) in listing.files.iter_mut().filter(|(path, _)| closers.wait_for(path)) {
            if matches!(file.shape, Shape::Unsettled | Shape::Newest) {
                file.shape = Shape::Awaited;
            }
        }
        let me = writer.node().to_string();
        let files = &listing.files;
        let plan_now = || plan(&me, &lock(&shared.view), &listing, &shown, shared.settings.newest);
        let mut plan = plan_now();
        // A machine that slept may know names of objects that their owner has deleted since.
        if plan.may_need_others(&me, local.objects()) {
            writer.look()?;
            plan = plan_now();
        }
        shared.agree(&plan.agrees);
        let names: HashSet<&PathBuf> = plan.puts.iter().map(|(path, _)| path).collect();
        self.failed.retain(|path, _| names.contains(path));
        let asked = shared.asked.load(Ordering::Relaxed);
        let is_due = |path: &PathBuf, failed: &Failed| {
            let is_another = files.get(path) != Some(&failed.of);
            let pause = if is_another { failed.pause.min(PAUSE_OF_CHANGED) } else { failed.pause };
            failed.asked != asked || failed.since.elapsed() >= pause
        };
        plan.puts.retain(|(path, _)| self.failed.get(path).is_none_or(|failed| is_due(path, failed)));
        let is_costly = |want: &Want| matches!(want, Want::Object(_) | Want::Ahead | Want::Whole | Want::Stuck);
        let (mut costly, cheap): (Vec<_>, Vec<_>) = plan.puts.into_iter().partition(|(_, want)| is_costly(want));
        // A program waits for these, whatever their times say.
        costly.sort_by_key(|(path, _)| !closers.wait_for(path));
        let mut left: Vec<PathBuf> = costly.iter().chain(&cheap).map(|(path, _)| path.clone()).collect();
        shared.set_backlog(&backlog(&left, files));
        // A file that a missing name may have become, and that cannot be pushed in the same segment.
        let slow: HashSet<&PathBuf> = costly.iter().map(|(path, _)| path).collect();
        let is_late = |path: &PathBuf, file: &Found| file.shape == Shape::Unsettled || slow.contains(path);
        let late: HashSet<u64> =
            files.iter().filter(|(path, file)| is_late(path, file)).map(|(_, file)| file.inode).collect();
        let inodes: HashSet<u64> = files.values().map(|file| file.inode).collect();
        let view = lock(&shared.view);
        let listed_as = |path: &PathBuf| {
            let record = view.of_node(path, writer.node())?.shown.as_ref()?;
            Some(record.inode).filter(|inode| inodes.contains(inode))
        };
        // A name that is not shown any more was not removed by a program.
        let still = shared.shown();
        plan.removals.retain(|path| still.get(path) == shown.get(path));
        let missing: Vec<(Option<u64>, PathBuf)> =
            plan.removals.into_iter().map(|path| (listed_as(&path), path)).collect();
        drop(view);
        // A directory that moved while the tree was listed may be in no part of the list.
        let is_gone = missing.iter().any(|(inode, _)| inode.is_none());
        let waits =
            !late.is_empty() || is_gone && walk(local)?.files.values().any(|file| !inodes.contains(&file.inode));
        let waits = |inode: Option<u64>| inode.map_or(waits, |inode| late.contains(&inode));
        let missing = missing.into_iter().map(|(inode, path)| (waits(inode), path)).collect();
        let removals = self.removals(local, missing)?;
        // A program waits for these names: a crash must not undo them here once the remote has them.
        let awaited = costly.iter().chain(&cheap).map(|(path, _)| path).filter(|path| closers.wait_for(path));
        tree::sync(local.store(), &awaited.flat_map(|path| path.ancestors().skip(1)).map(Path::to_path_buf).collect())?;
        self.push_cheap(local, writer, shared, (cheap, removals), files)?;
        left = costly.iter().map(|(path, _)| path.clone()).collect();
        let mut unpushed: Vec<PathBuf> = left.iter().chain(self.failed.keys()).cloned().collect();
        shared.waiting.pushed(&closers, &unpushed);
        let (mut later, mut pushed, mut is_cut_short) = (Vec::new(), 0, false);
        for (path, want) in costly {
            shared.set_backlog(&backlog(&left, files));
            // Something newer may have to go first; but each round pushes one.
            is_cut_short = shared.is_stopped() || pushed > 0 && local.changes() != before;
            if is_cut_short {
                break;
            }
            left.retain(|other| *other != path);
            let Some(found) = files.get(&path) else { continue };
            match push_one(local, writer, shared, &path, (want, found)) {
                Ok(Outcome::There(mut records, content)) => {
                    records.push(put(&path, found, content));
                    append(writer, shared, records)?;
                    self.failed.remove(&path);
                    pushed += 1;
                    unpushed.retain(|other| *other != path);
                    shared.waiting.pushed(&closers, &unpushed);
                }
                Ok(Outcome::Later) => later.push(path),
                Ok(Outcome::Failed(why)) => self.note_failure(path, found, why, asked),
                Err(Error::Local(error)) => self.note_failure(path, found, error.to_string(), asked),
                Err(error) => return Err(error),
            }
        }
        let others = is_cut_short || !self.missing.is_empty() || !later.is_empty();
        self.unlisted = listing.unlisted;
        let unlisted = self.unlisted.first_key_value().map(|_| Instant::now() + LONGEST_PAUSE);
        let again = self.failed.values().map(|failed| failed.since + failed.pause).chain(unlisted).min();
        self.again = again.filter(|_| !others);
        let failed: Vec<PathBuf> = self.failed.keys().cloned().collect();
        shared.waiting.give_up(&closers, &failed);
        shared.fails(FILES, self.failing());
        if !is_cut_short {
            shared.set_backlog(&Backlog { stuck: failed.len() as u64, ..backlog(&[later, failed].concat(), files) });
        }
        Ok(!others && !self.has_failed())
    }

    /// When a round is due although nothing changes, if the last one left nothing but files that cannot be pushed.
    pub(super) fn again(&self) -> Option<Instant> {
        self.again
    }

    /// Whether some file cannot be pushed.
    pub(super) fn has_failed(&self) -> bool {
        !self.failed.is_empty() || !self.unlisted.is_empty()
    }

    /// One file cannot be pushed. It is tried again after pauses that grow.
    fn note_failure(&mut self, path: PathBuf, found: &Found, why: String, asked: u64) {
        let former = self.failed.get(&path);
        if former.is_none_or(|former| former.why != why) {
            log::warn!("remote: {} cannot be pushed now: {why}", path.display());
        }
        let pause = former.map_or(FIRST_PAUSE, |former| (former.pause * 2).min(LONGEST_PAUSE));
        self.failed.insert(path, Failed { of: found.clone(), why, since: Instant::now(), pause, asked });
    }

    /// The files that cannot be pushed, in words.
    fn failing(&self) -> Option<String> {
        if let Some((path, why)) = self.unlisted.first_key_value() {
            return Some(format!("{}: files in it cannot be pushed: {why}", path.display()));
        }
        let (path, failed) = self.failed.first_key_value()?;
        let others = match self.failed.len() - 1 {
            0 => String::new(),
            count => format!(" (and {count} other files)"),
        };
        Some(format!("{} cannot be pushed: {}{others}", path.display(), failed.why))
    }

    /// The names whose removal is pushed now. Each comes with whether it waits for other files.
    fn removals(&mut self, local: &dyn Local, missing: Vec<(bool, PathBuf)>) -> Result<Vec<PathBuf>> {
        let names: HashSet<&PathBuf> = missing.iter().map(|(_, path)| path).collect();
        self.missing.retain(|path, _| names.contains(path));
        let mut removals = Vec::new();
        for (waits, path) in missing {
            // A name that a program moved while the tree was listed is there, or under another name.
            if tree::present(local.store(), &path)?.is_some_and(|there| !there.is_dir()) {
                continue;
            }
            let since = *self.missing.entry(path.clone()).or_insert_with(Instant::now);
            if !waits || since.elapsed() > REMOVAL_PATIENCE {
                removals.push(path);
            }
        }
        self.missing.retain(|path, _| !removals.contains(path));
        Ok(removals)
    }

    /// Pushes what needs no object, and the removals, in as few segments as possible.
    fn push_cheap(
        &mut self,
        local: &dyn Local,
        writer: &mut Writer,
        shared: &Shared,
        (puts, removals): (Vec<(PathBuf, Want)>, Vec<PathBuf>),
        files: &BTreeMap<PathBuf, Found>,
    ) -> Result<()> {
        let (mut records, mut inline) = (Vec::new(), 0);
        for (path, want) in puts {
            let Some(found) = files.get(&path) else { continue };
            let content = match (want, &found.link) {
                (Want::There(content), _) => content,
                (_, Some(target)) => Content::Link(target.clone()),
                _ => match read_small(local, &path, found) {
                    Ok(Some(bytes)) => Content::Inline(bytes),
                    other => {
                        let why = other.err().map_or(CHANGED.into(), |error| error.to_string());
                        self.note_failure(path, found, why, shared.asked.load(Ordering::Relaxed));
                        continue;
                    }
                },
            };
            inline += found.len.min(MIN_RELEASE_BYTES);
            records.push(put(&path, found, content));
            self.failed.remove(&path);
            if records.len() >= AT_ONCE || inline >= INLINE_AT_ONCE {
                append(writer, shared, std::mem::take(&mut records))?;
                inline = 0;
            }
        }
        records.extend(removals.into_iter().map(|path| Record::Removed { time: 0, path }));
        if !records.is_empty() {
            append(writer, shared, records)?;
        }
        Ok(())
    }
}

/// Counts what is left, without a request: the remote is away.
pub(super) fn count(local: &dyn Local, shared: &Shared) -> Result<()> {
    let (listing, shown) = (walk(local)?, shared.shown());
    let plan = plan(&shared.settings.node, &lock(&shared.view), &listing, &shown, shared.settings.newest);
    let left: Vec<PathBuf> = plan.puts.into_iter().map(|(path, _)| path).collect();
    shared.set_backlog(&backlog(&left, &listing.files));
    Ok(())
}

/// Appends a segment, and notes that the tree shows its names.
fn append(writer: &mut Writer, shared: &Shared, records: Vec<Record>) -> Result<()> {
    let names: Vec<Option<PathBuf>> = records
        .iter()
        .filter_map(|record| match record {
            Record::Put { path, .. } => Some(Some(path.clone())),
            Record::Removed { .. } => Some(None),
            Record::Object(_) => None,
        })
        .collect();
    let first = writer.append(records)?;
    let node = writer.node();
    let stamps = (first..).zip(names).filter_map(|(time, path)| Some((path?, Stamp { time, node: node.to_string() })));
    shared.agree(&stamps.collect());
    Ok(())
}

fn put(path: &Path, found: &Found, content: Content) -> Record {
    let Found { mode, uid, gid, len, modified_ns, inode, .. } = *found;
    let shown = Shown { mode, uid, gid, len, modified_ns, inode, content };
    Record::Put { time: 0, path: path.to_path_buf(), shown }
}

fn backlog(left: &[PathBuf], files: &BTreeMap<PathBuf, Found>) -> Backlog {
    let found = || left.iter().filter_map(|path| files.get(path));
    Backlog {
        stuck: 0,
        files: left.len() as u64,
        bytes: found().map(|file| file.len).sum(),
        oldest_ns: found().map(|file| file.modified_ns).min(),
    }
}

/// Opens a file if it is still the one that was listed.
fn open(local: &dyn Local, path: &Path, found: &Found) -> Result<Option<DeviceFile>> {
    // A write in the same tick of the clock for files would not change the time.
    let age = stamp_ns() - found.modified_ns;
    if (0..A_TICK.as_nanos() as i64).contains(&age) {
        std::thread::sleep(A_TICK);
    }
    let store = local.store();
    let file = match store.io().open_beneath(&store.tree(), path, libc::O_NOATIME) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => store.io().open_beneath(&store.tree(), path, 0),
        file => file,
    };
    match file {
        Ok(file) if is_same(&file, found)? => Ok(Some(file)),
        Ok(_) => Ok(None),
        // Removed, or something else is there: the next round sees it.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn is_same(file: &DeviceFile, found: &Found) -> std::io::Result<bool> {
    let metadata = file.metadata()?;
    Ok((metadata.ino(), metadata.len(), modified_ns(&metadata)) == (found.inode, found.len, found.modified_ns))
}

/// Makes a file durable that may not be so yet: no other machine has what this one may lose.
fn make_durable(file: &DeviceFile, found: &Found) -> Result<()> {
    if found.shape == Shape::Awaited {
        file.sync(CrashPoint::Fsync)?;
    }
    Ok(())
}

/// The bytes of a small file; `None` if it has changed.
fn read_small(local: &dyn Local, path: &Path, found: &Found) -> Result<Option<Vec<u8>>> {
    let Some(file) = open(local, path, found)? else { return Ok(None) };
    make_durable(&file, found)?;
    let mut bytes = vec![0; file.size().min(MIN_RELEASE_BYTES) as usize];
    if bytes.len() as u64 != found.len || file.read_full(&mut bytes, 0)? != bytes.len() {
        return Ok(None);
    }
    Ok(is_same(&file, found)?.then_some(bytes))
}

/// Why a file is left for a later round.
const CHANGED: &str = "it changes while it is read";

/// Pushes the bytes of one file.
fn push_one(
    local: &dyn Local,
    writer: &mut Writer,
    shared: &Shared,
    path: &Path,
    (want, found): (Want, &Found),
) -> Result<Outcome> {
    match want {
        Want::Stuck => Ok(Outcome::Failed("it cannot be read, or is not durable; user.stepfs.why says why".into())),
        Want::Object(id) => push_object(local, writer, shared, id),
        Want::Ahead => match local.ahead(path)? {
            Ahead::Object(hold) => {
                let pushed = match open(local, path, found) {
                    Ok(Some(_)) => push_object(local, writer, shared, hold.id()),
                    Ok(None) => Ok(Outcome::Later),
                    Err(error) => Err(error),
                };
                local.let_go(hold);
                pushed
            }
            Ahead::Whole => push_whole(local, writer, shared, path, found),
            Ahead::Later => Ok(Outcome::Later),
        },
        _ => push_whole(local, writer, shared, path, found),
    }
}

fn push_object(local: &dyn Local, writer: &mut Writer, shared: &Shared, id: Id) -> Result<Outcome> {
    let objects = local.objects();
    let Some(_hold) = objects.hold(id) else {
        // Only the remote has it: a program has changed another node's file, but not its bytes.
        let owner = lock(&shared.view).owner_of(id).map(str::to_string);
        return Ok(match owner {
            Some(owner) => Outcome::There(Vec::new(), Content::Object { owner, id }),
            None => Outcome::Failed(format!("object {id} is missing")),
        });
    };
    let mut chain: Vec<Arc<Object>> = Vec::new();
    let mut next = Some(id);
    while let Some(id) = next {
        if chain.len() > MAX_CHAIN as usize {
            return Ok(Outcome::Failed(format!("object {id}: its chain of parents is too long")));
        }
        match objects.open(id) {
            Ok(object) => {
                next = object.header().parent;
                chain.push(object);
            }
            // Its child was re-parented meanwhile, or it is damaged: a later round sees which.
            Err(error) => return Ok(Outcome::Failed(format!("object {id}: {error}"))),
        }
    }
    let records = writer.push_chain(&chain, &|bytes| shared.pace.take(bytes))?;
    Ok(Outcome::There(records, Content::Object { owner: writer.node().to_string(), id }))
}

fn push_whole(local: &dyn Local, writer: &mut Writer, shared: &Shared, path: &Path, found: &Found) -> Result<Outcome> {
    let changed = || Ok(Outcome::Failed(CHANGED.into()));
    let Some(file) = open(local, path, found)? else { return changed() };
    make_durable(&file, found)?;
    let going = || !shared.is_stopped() && (found.shape == Shape::Awaited || local.shape(path) == found.shape);
    let (header, object) = match whole::encode(local.store(), path, &file, found.modified_ns, &going) {
        // Its shape is another one now: the next round sees which.
        Err(Error::Away(_)) => return Ok(Outcome::Later),
        encoded => encoded?,
    };
    if !is_same(&file, found)? {
        return changed();
    }
    let record = writer.push_object(&header, &object, &|bytes| shared.pace.take(bytes))?;
    let content = Content::Object { owner: writer.node().to_string(), id: header.id };
    Ok(Outcome::There(record.into_iter().collect(), content))
}
