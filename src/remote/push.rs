//! One round of pushing: what the tree has and the remote has not, the newest first.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::journal::{Content, Record, Shown};
use super::local::{Found, Local, Shape, walk, walk_still};
use super::one::{CHANGED, Outcome, push_one, read_small};
use super::place::{Error, Result};
use super::plan::{Plan, Want, plan};
use super::reader::lock;
use super::shared::{Backlog, FILES, Shared};
use super::tree;
use super::view::Stamp;
use super::waiting::Closers;
use super::writer::Writer;
use crate::store::{MIN_RELEASE_BYTES, found_at};

/// A removed name waits at most this long for files that may have taken its bytes: a rename is one change then.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(60);
/// Changes in one segment.
const AT_ONCE: usize = 5_000;
/// Bytes of small files in one segment.
const INLINE_AT_ONCE: u64 = 32 << 20;
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
    /// Files whose turn came later in the last round.
    later: HashSet<PathBuf>,
    /// How often somebody had asked to hasten when the round began.
    asked: u64,
    /// Names could have been removed, but news was not read.
    is_ready: bool,
    /// Directories that could not be listed, each with the reason.
    unlisted: BTreeMap<PathBuf, String>,
    /// When the next round is due because of these. `None` if there are none, or if something else is left.
    again: Option<Instant>,
}

/// Programs that wait in a round, and the files that are not on the remote yet.
struct Waited {
    closers: Closers,
    left: Vec<PathBuf>,
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
        let (changes, closers) = (local.changes(), shared.waiting.closers());
        let (mut listing, is_whole) = walk_still(local)?;
        for (_, file) in listing.files.iter_mut().filter(|(path, _)| closers.wait_for(path)) {
            if matches!(file.shape, Shape::Unsettled | Shape::Newest) {
                file.shape = Shape::Awaited;
            }
        }
        let me = writer.node().to_string();
        let files = &listing.files;
        let plan_now = || plan(&me, &lock(&shared.view), &listing, &shown, shared.settings.newest);
        let mut plan = plan_now();
        self.asked = shared.asked.load(Ordering::Relaxed);
        // What other nodes did before this counts as earlier, and a removal of theirs that was not seen takes no new file. A
        // machine that slept may know names of objects that their owner has deleted since. While something merely waits, this
        // asks nothing.
        let is_read = self.has_work(&plan, files);
        if is_read {
            writer.look()?;
            plan = plan_now();
        }
        shared.agree(&plan.agrees);
        if plan.takes.iter().chain(&plan.drops).any(|(path, stamp)| shown.get(path) != Some(stamp)) {
            shared.is_unshown.store(true, Ordering::Relaxed);
        }
        let names: HashSet<&PathBuf> = plan.puts.iter().map(|(path, _)| path).collect();
        self.failed.retain(|path, _| names.contains(path));
        plan.puts.retain(|(path, _)| self.is_due(path, files));
        let is_costly = |want: &Want| matches!(want, Want::Object(_) | Want::Ahead | Want::Whole | Want::Stuck);
        let (mut costly, cheap): (Vec<_>, Vec<_>) = plan.puts.into_iter().partition(|(_, want)| is_costly(want));
        // A program waits for these, whatever their times say.
        costly.sort_by_key(|(path, _)| !closers.wait_for(path));
        let left: Vec<PathBuf> = costly.iter().chain(&cheap).map(|(path, _)| path.clone()).collect();
        shared.set_backlog(&backlog(&left, files));
        // A name that is not shown any more was not removed by a program.
        let still = shared.shown();
        plan.removals.retain(|path| still.get(path) == shown.get(path));
        let mut removals = self.removals(local, shared, (plan.removals, &costly), files)?;
        self.is_ready = !is_read && !removals.is_empty();
        if self.is_ready {
            // The next round reads the news before it removes a name.
            removals.clear();
        }
        // A program waits for these names: a crash must not undo them here once the remote has them.
        let awaited = left.iter().filter(|path| closers.wait_for(path));
        tree::sync(local.store(), &awaited.flat_map(|path| path.ancestors().skip(1)).map(Path::to_path_buf).collect())?;
        self.push_cheap(local, writer, shared, (cheap, removals), files)?;
        // Of what a directory hides nobody knows whether it is there.
        let hidden: Vec<PathBuf> = listing.unlisted.keys().chain(closers.hidden_by(&listing)).cloned().collect();
        let waited = Waited {
            // A file that moved while the tree was listed may be in no part of the list.
            closers: if is_whole { closers.clone() } else { Closers::default() },
            left: costly.iter().map(|(path, _)| path).chain(self.failed.keys()).chain(&hidden).cloned().collect(),
        };
        let is_cut_short = !self.push_costly(local, writer, shared, (costly, is_read), (files, changes, waited))?;
        let others = is_cut_short || !is_whole || self.is_ready || !self.missing.is_empty() || !self.later.is_empty();
        let failed: Vec<PathBuf> = self.failed.keys().cloned().collect();
        shared.waiting.give_up(&closers, &[failed.clone(), hidden].concat());
        if !is_cut_short {
            let left: Vec<PathBuf> = self.later.iter().chain(&failed).cloned().collect();
            shared.set_backlog(&Backlog { stuck: failed.len() as u64, ..backlog(&left, files) });
        }
        self.unlisted = listing.unlisted;
        let unlisted = self.unlisted.first_key_value().map(|_| Instant::now() + LONGEST_PAUSE);
        let again = self.failed.values().map(|failed| failed.since + failed.pause).chain(unlisted).min();
        self.again = again.filter(|_| !others);
        shared.fails(FILES, self.failing());
        Ok(!others && !self.has_failed())
    }

    /// Pushes the files that need an object on the remote, one after the other. False if a newer file may have to go first.
    /// `is_read`: this round has read the news.
    fn push_costly(
        &mut self,
        local: &dyn Local,
        writer: &mut Writer,
        shared: &Shared,
        (costly, mut is_read): (Vec<(PathBuf, Want)>, bool),
        (files, changes, mut waited): (&BTreeMap<PathBuf, Found>, u64, Waited),
    ) -> Result<bool> {
        shared.waiting.pushed(&waited.closers, &waited.left);
        self.later.clear();
        let (mut left, mut pushed): (Vec<PathBuf>, _) = (costly.iter().map(|(path, _)| path.clone()).collect(), 0);
        for (path, want) in costly {
            shared.set_backlog(&backlog(&left, files));
            // Each round pushes one.
            if shared.is_stopped() || pushed > 0 && local.changes() != changes {
                return Ok(false);
            }
            left.retain(|other| *other != path);
            let Some(found) = files.get(&path) else { continue };
            match push_one(local, writer, shared, &path, (want, found)) {
                Ok(Outcome::There(..)) if !is_read && is_news(writer, shared, &path)? => drop(self.later.insert(path)),
                Ok(Outcome::There(mut records, content)) => {
                    is_read = true;
                    records.push(put(&path, found, content));
                    append(writer, shared, records)?;
                    self.failed.remove(&path);
                    pushed += 1;
                    waited.left.retain(|other| *other != path);
                    shared.waiting.pushed(&waited.closers, &waited.left);
                }
                Ok(Outcome::Later) => drop(self.later.insert(path)),
                Ok(Outcome::Failed(why)) => self.note_failure(path, found, why),
                Err(Error::Local(error)) => self.note_failure(path, found, error.to_string()),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Whether a file is not left alone because it could not be pushed.
    fn is_due(&self, path: &PathBuf, files: &BTreeMap<PathBuf, Found>) -> bool {
        self.failed.get(path).is_none_or(|failed| {
            let is_another = files.get(path) != Some(&failed.of);
            let pause = if is_another { failed.pause.min(PAUSE_OF_CHANGED) } else { failed.pause };
            failed.asked != self.asked || failed.since.elapsed() >= pause
        })
    }

    /// Whether anything of a plan is about to travel, as far as can be told. What waited in the last round waits again.
    fn has_work(&self, plan: &Plan, files: &BTreeMap<PathBuf, Found>) -> bool {
        let travels = |(path, _): &&(PathBuf, Want)| self.is_due(path, files) && !self.later.contains(path);
        let goes = |path: &&PathBuf| {
            self.is_ready || self.missing.get(*path).is_none_or(|since| since.elapsed() > REMOVAL_PATIENCE)
        };
        plan.puts.iter().any(|put| travels(&put)) || plan.removals.iter().any(|path| goes(&path))
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
    fn note_failure(&mut self, path: PathBuf, found: &Found, why: String) {
        let former = self.failed.get(&path);
        if former.is_none_or(|former| former.why != why) {
            log::warn!("remote: {} cannot be pushed now: {why}", path.display());
        }
        let asked = self.asked;
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

    /// The names whose removal is pushed now. Others wait for files that may have taken their bytes: those that are late, because
    /// they are `costly` or still change.
    fn removals(
        &mut self,
        local: &dyn Local,
        shared: &Shared,
        (missing, costly): (Vec<PathBuf>, &[(PathBuf, Want)]),
        files: &BTreeMap<PathBuf, Found>,
    ) -> Result<Vec<PathBuf>> {
        self.missing.retain(|path, _| missing.contains(path));
        let slow: HashSet<&PathBuf> = costly.iter().map(|(path, _)| path).collect();
        let is_late = |path: &PathBuf, file: &Found| file.shape == Shape::Unsettled || slow.contains(path);
        let late: HashSet<u64> =
            files.iter().filter(|(path, file)| is_late(path, file)).map(|(_, file)| file.identity).collect();
        let identities: HashSet<u64> = files.values().map(|file| file.identity).collect();
        // The file that has another name now, if it is one of this node's.
        let listed_as: Vec<Option<u64>> = {
            let view = lock(&shared.view);
            let identity = |path| Some(view.of_node(path, &shared.settings.node)?.shown.as_ref()?.identity);
            missing.iter().map(|path| identity(path).filter(|of| identities.contains(of))).collect()
        };
        // A directory that moved while the tree was listed may be in no part of the list.
        let is_gone = listed_as.iter().any(Option::is_none);
        let waits =
            !late.is_empty() || is_gone && walk(local)?.files.values().any(|file| !identities.contains(&file.identity));
        let mut removals = Vec::new();
        for (path, of) in missing.into_iter().zip(listed_as) {
            // A name that a program moved while the tree was listed is there, or under another name.
            if found_at(&local.store().tree(), &path)?.is_some_and(|there| !there.is_dir()) {
                continue;
            }
            let since = *self.missing.entry(path.clone()).or_insert_with(Instant::now);
            if !of.map_or(waits, |of| late.contains(&of)) || since.elapsed() > REMOVAL_PATIENCE {
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
                        self.note_failure(path, found, why);
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

/// Reads the news. True if another change of this name came with it.
fn is_news(writer: &Writer, shared: &Shared, path: &Path) -> Result<bool> {
    let winner = || lock(&shared.view).winner(path).map(|(stamp, _)| stamp);
    let before = winner();
    writer.look()?;
    Ok(winner() != before)
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
    let Found { mode, uid, gid, len, modified_ns, identity, .. } = *found;
    let shown = Shown { mode, uid, gid, len, modified_ns, identity, content };
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
