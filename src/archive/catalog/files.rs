//! All files by path and by run, with the last decision about each run.
//!
//! Every change of an entry goes through here. It notes only that the run changed: the run is decided about once somebody
//! asks. A decision costs one pass over the run's files, so what needs none, as sealing, asks for none. A step of a thread
//! takes nothing from the other files ([`crate::archive::decide::lets_stand`]). So threads take many steps by one decision:
//! in a large run with a backlog, too, a step costs no more than a pass over a few files.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::archive::decide::{Decision, File, Mark, Now, Others, Results, Why, Work, rank};
use crate::archive::entry::{Entry, Sealed, State};
use crate::store::{Id, step_pattern};

use super::queue::Queue;
use super::run::{PART, Run};

/// Files of a run that are looked at for one that can be archived beside those that are being archived.
const LOOK_AHEAD: usize = 80;

/// A clock that goes back by more was set. Threads that look at it at once differ by less.
const BACK_NS: i64 = 60_000_000_000;

/// See the module.
#[derive(Debug)]
pub(in crate::archive) struct Files {
    /// How long a directory waits for the rest of its checkpoint, in nanoseconds. 0: there are no checkpoints.
    settle: i64,
    /// The disk has less room than the reserve: no time passes before a checkpoint is waited for no longer.
    is_low: bool,
    files: BTreeMap<Arc<Path>, Arc<File>>,
    runs: HashMap<Arc<Path>, Run>,
    /// Runs with states whose files changed since the last decision about them.
    changed: HashSet<Arc<Path>>,
    /// [`PART`], but in tests.
    pub(super) part: usize,
    /// Runs with steps to take, now or later, when they were decided about.
    at_work: HashSet<Arc<Path>>,
    /// Files that are not durable or examined yet.
    pub(super) queue: Queue,
    /// About all runs.
    pub(in crate::archive) others: Others,
    /// The latest time that a thread looked for work at.
    pub(super) now: Now,
    /// A lineage lost its last state, or an entry went that kept objects from being removed without naming one.
    freed: bool,
    touched: Touched,
    #[cfg(test)]
    pub(super) decisions: usize,
}

/// Names that changed since the mirror looked.
#[derive(Debug, Default)]
pub(in crate::archive) struct Touched {
    /// Grows with every change of an entry.
    changes: u64,
    /// `None` until a mirror looks: without one they would only grow.
    names: Option<BTreeSet<Arc<Path>>>,
}

impl Touched {
    pub(in crate::archive) fn add(&mut self, names: impl IntoIterator<Item = Arc<Path>>) {
        self.changes += 1;
        if let Some(touched) = &mut self.names {
            touched.extend(names);
        }
    }

    pub(in crate::archive) fn changes(&self) -> u64 {
        self.changes
    }

    /// The names since the last call.
    pub(in crate::archive) fn take(&mut self) -> BTreeSet<Arc<Path>> {
        self.names.replace(BTreeSet::new()).unwrap_or_default()
    }
}

/// A step that a thread may take now.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) file: Arc<File>,
    pub(super) work: Work,
    /// The state after a file to archive.
    pub(super) after: Option<Arc<File>>,
}

/// Steps to take, now or after a failure has passed.
pub(super) struct Queued {
    pub(super) count: usize,
    /// Files that wait for the rest of their checkpoint.
    pub(super) settling: usize,
    /// The lowest number that a file with a step was opened with.
    pub(super) oldest: Option<u64>,
    /// When the first step became possible; nanoseconds since 1970.
    pub(super) since: Option<i64>,
}

impl Files {
    pub(super) fn new(settle: i64) -> Files {
        Files {
            settle,
            is_low: false,
            files: BTreeMap::new(),
            runs: HashMap::new(),
            changed: HashSet::new(),
            part: PART,
            at_work: HashSet::new(),
            queue: Queue::default(),
            others: Others::default(),
            now: Now { instant: Instant::now(), wall_ns: i64::MIN },
            freed: false,
            touched: Touched::default(),
            #[cfg(test)]
            decisions: 0,
        }
    }

    pub(super) fn get(&self, path: &Path) -> Option<&Entry> {
        self.files.get(path).map(|file| &file.entry)
    }

    /// All, by path.
    pub(in crate::archive) fn iter(&self) -> impl Iterator<Item = (&Path, &Entry)> {
        self.files.values().map(|file| (&*file.path, &file.entry))
    }

    /// Those at and below a path.
    pub(in crate::archive) fn below<'a>(&'a self, path: &'a Path) -> impl Iterator<Item = (&'a Path, &'a Entry)> {
        self.range(path).map(|file| (&*file.path, &file.entry))
    }

    fn range<'a>(&'a self, path: &'a Path) -> impl Iterator<Item = &'a Arc<File>> {
        let range = self.files.range::<Path, _>((Bound::Included(path), Bound::Unbounded));
        range.map(|(_, file)| file).take_while(move |file| file.path.starts_with(path))
    }

    /// For the mirror.
    pub(in crate::archive) fn touched(&mut self) -> &mut Touched {
        &mut self.touched
    }

    /// The lineages of sealed and archived files.
    pub(in crate::archive) fn lineages(&self) -> BTreeSet<u64> {
        self.files.values().filter_map(|file| Some(file.entry.state.sealed()?.lineage)).collect()
    }

    /// Whether objects may have become garbage since this was asked last, though none lost a name.
    pub(in crate::archive) fn take_freed(&mut self) -> bool {
        std::mem::take(&mut self.freed)
    }

    /// Enters a file in place of another one.
    pub(super) fn insert(&mut self, path: &Path, entry: Entry) {
        self.remove(path);
        let run = step_pattern::run(path);
        let run = self.runs.get_key_value(&*run).map_or_else(|| run.into(), |(run, _)| Arc::clone(run));
        let results = Results::of(path).map(Arc::new);
        self.enter(File { path: path.into(), run, checkpoint: None, results, entry }, None);
    }

    pub(super) fn remove(&mut self, path: &Path) -> Option<Entry> {
        let old = self.leave(path)?;
        self.freed |= old.entry.state.hides_an_object();
        self.let_go(&old, None);
        Some(old.entry.clone())
    }

    /// Takes out a path and everything below it.
    pub(super) fn take(&mut self, path: &Path) -> Vec<(Arc<Path>, Entry)> {
        let paths: Vec<Arc<Path>> = self.below(path).map(|(path, _)| path.into()).collect();
        paths.into_iter().filter_map(|path| self.remove(&path).map(|entry| (path, entry))).collect()
    }

    /// Changes one, if it is there.
    pub(super) fn edit(&mut self, path: &Path, change: impl FnOnce(&mut Entry)) {
        let Some(old) = self.files.get(path).cloned() else { return };
        let mut file = File::clone(&old);
        change(&mut file.entry);
        let file = self.enter(file, Some(&old));
        self.let_go(&old, Some(&file.entry));
    }

    /// Changes the entries at and below a path for which `holds` is true.
    pub(super) fn edit_below(
        &mut self,
        path: &Path,
        holds: impl Fn(&Path, &Entry) -> bool,
        mut change: impl FnMut(&mut Entry),
    ) {
        let held = self.below(path).filter(|(path, entry)| holds(path, entry));
        let held: Vec<Arc<Path>> = held.map(|(path, _)| path.into()).collect();
        held.iter().for_each(|path| self.edit(path, &mut change));
    }

    /// Enters a file that was `old` before. Its checkpoint follows from its name and state.
    fn enter(&mut self, mut file: File, old: Option<&Arc<File>>) -> Arc<File> {
        let run = self.runs.entry(Arc::clone(&file.run)).or_default();
        if self.settle > 0 && old.is_none_or(|old| old.entry.state.part() != file.entry.state.part()) {
            file.checkpoint = run.checkpoint(&file);
        }
        let file = Arc::new(file);
        run.enter(&file, old);
        old.into_iter().for_each(|old| self.queue.leave(old));
        self.queue.enter(&file);
        self.touched.add([Arc::clone(&file.path)]);
        self.note_change(&file.run);
        self.files.insert(Arc::clone(&file.path), Arc::clone(&file));
        file
    }

    fn leave(&mut self, path: &Path) -> Option<Arc<File>> {
        let old = self.files.remove(path)?;
        self.queue.leave(&old);
        self.touched.add([Arc::clone(&old.path)]);
        let run = self.runs.get_mut(&old.run).expect("a file is in its run");
        run.leave(&old);
        let is_empty = run.files.is_empty();
        self.note_change(&old.run);
        if is_empty {
            self.runs.remove(&old.run);
        }
        Some(old)
    }

    /// A run has changed.
    fn note_change(&mut self, key: &Arc<Path>) {
        let Some(run) = self.runs.get(key) else { return };
        // Without states a run has no steps, and it may be a directory of 100,000 small files that a program just writes.
        if run.states > 0 {
            self.changed.insert(Arc::clone(key));
        } else {
            self.changed.remove(key);
            self.at_work.remove(key);
        }
    }

    /// The decision about a run holds no longer.
    fn void(&mut self, key: &Arc<Path>) {
        self.runs.get_mut(key).into_iter().for_each(|run| run.is_void = true);
        self.note_change(key);
    }

    /// A file has left. Notes whether its lineage has no state any more.
    fn let_go(&mut self, old: &File, new: Option<&Entry>) {
        let lineage = |entry: &Entry| entry.state.sealed().map(|sealed| sealed.lineage);
        let Some(own) = lineage(&old.entry).filter(|own| new.and_then(lineage) != Some(*own)) else { return };
        let others = self.runs.get(&old.run);
        self.freed |= others.is_none_or(|run| run.files.iter().rev().all(|other| lineage(&other.entry) != Some(own)));
    }

    /// A thread looks for work at this time.
    pub(super) fn pass(&mut self, now: Instant, wall_ns: Option<i64>) {
        self.now.instant = self.now.instant.max(now);
        let Some(wall_ns) = wall_ns else { return };
        // It may go back: a clock that was a day ahead must not open the checkpoints of that day. Nor do they wait for the
        // day to pass again.
        if wall_ns < self.now.wall_ns.saturating_sub(BACK_NS) {
            let is_later = |_: &Path, entry: &Entry| entry.seen_ns.max(entry.asked_ns) > wall_ns;
            self.edit_below(Path::new(""), is_later, |entry| {
                entry.seen_ns = entry.seen_ns.min(wall_ns);
                entry.asked_ns = entry.asked_ns.min(wall_ns);
            });
        }
        self.now.wall_ns = wall_ns;
    }

    fn decide(&mut self, key: &Arc<Path>) {
        self.changed.remove(key);
        let Some(run) = self.runs.get_mut(key) else { return };
        #[cfg(test)]
        {
            self.decisions += 1;
        }
        // Not 0, which would open all checkpoints.
        let settle = if self.is_low { self.settle.min(1) } else { self.settle };
        let changed = run.decide(&self.others.about(key), settle, self.now);
        // A mirror may have them with a loss.
        if !changed.is_empty() {
            self.touched.add(changed);
        }
        if run.answer.queued + run.answer.settling > 0 {
            self.at_work.insert(Arc::clone(key));
        } else {
            self.at_work.remove(key);
        }
    }

    /// Decides about each run for which `holds` is true. Answers whether there was one.
    fn renew(&mut self, holds: impl Fn(&Run, usize, Now) -> bool) -> bool {
        let keys = self.at_work.iter().chain(self.changed.difference(&self.at_work));
        let keys: Vec<Arc<Path>> = keys.filter(|key| holds(&self.runs[*key], self.part, self.now)).cloned().collect();
        keys.iter().for_each(|key| self.decide(key));
        !keys.is_empty()
    }

    /// Decides about the runs whose decisions are used up. Answers whether there were some.
    pub(super) fn renew_used_up(&mut self, is_claimed: impl Fn(&File) -> bool) -> bool {
        self.renew(|run, _, now| run.is_used_up(&is_claimed, now))
    }

    /// The run of a file and the file's place in it, once the decision about the run is renewed, if this holds for it.
    fn decided(&mut self, path: &Path, is_outdated: impl Fn(&Run, usize, Now) -> bool) -> Option<(&Run, usize)> {
        let file = Arc::clone(self.files.get(path)?);
        if is_outdated(&self.runs[&file.run], self.part, self.now) {
            self.decide(&file.run);
        }
        let run = &self.runs[&file.run];
        Some((run, run.place(file.entry.sequence)))
    }

    /// The disk has less room than the reserve, or no longer has.
    pub(in crate::archive) fn hurry(&mut self, is_low: bool) {
        self.is_low = is_low;
        let keys: Vec<Arc<Path>> = self.at_work.iter().cloned().collect();
        keys.iter().for_each(|key| self.void(key));
    }

    /// The decision about a file, after all that threads did.
    pub(in crate::archive) fn decision(&mut self, path: &Path) -> Option<Decision> {
        let (run, at) = self.decided(path, Run::is_behind)?;
        Some(run.answer.files[at])
    }

    /// Whether an archived file may become a stub.
    pub(in crate::archive) fn may_go(&mut self, path: &Path) -> bool {
        let decided = self.decided(path, Run::is_outdated);
        let may_go = decided.is_some_and(|(run, at)| run.answer.files[at].may_go);
        may_go || self.decision(path).is_some_and(|decision| decision.may_go)
    }

    /// Who marks a file as the best of its run. No step changes marks.
    pub(in crate::archive) fn mark(&mut self, path: &Path) -> Option<Mark> {
        let (run, at) = self.decided(path, Run::is_outdated)?;
        run.answer.marks.get(&at).cloned()
    }

    /// The file or link that names the file at `path`, or a directory above it, as the best of its run.
    pub(in crate::archive) fn named_by(&mut self, path: &Path) -> Option<Arc<Path>> {
        match self.mark(path)? {
            Mark::Named(by) => Some(by),
            Mark::Result => None,
        }
    }

    /// The released files at and below these paths that are named as the best of their run, with their objects.
    pub(super) fn named_released(&mut self, targets: &[PathBuf]) -> BTreeMap<Arc<Path>, Id> {
        let released = |(path, entry): (&Path, &Entry)| match entry.state {
            State::Released(id) => Some((path.into(), id)),
            _ => None,
        };
        let mut found: BTreeMap<Arc<Path>, Id> =
            targets.iter().flat_map(|target| self.below(target).filter_map(released)).collect();
        found.retain(|path, _| self.named_by(path).is_some());
        found
    }

    /// Enters the target of a link, or that it marks nothing.
    pub(super) fn set_link(&mut self, link: &Path, target: Option<PathBuf>) {
        let target: Option<Arc<Path>> = target.map(Into::into);
        let old = match &target {
            Some(target) => self.others.links.insert(link.into(), Arc::clone(target)),
            None => self.others.links.remove(link),
        };
        for target in old.into_iter().chain(target) {
            let runs: HashSet<Arc<Path>> = self.range(&target).map(|file| Arc::clone(&file.run)).collect();
            runs.iter().for_each(|key| self.void(key));
        }
    }

    /// A program removes the file at a path. If it made the last statement of its series, that one still counts.
    pub(super) fn keep_statement(&mut self, path: &Path) {
        self.others.keep_of(self.files.get(path));
    }

    /// The file of the same checkpoint that has no newer state yet, if the file waits for one.
    pub(in crate::archive) fn held_up_by(&mut self, path: &Path) -> Option<Arc<Path>> {
        let (run, at) = self.decided(path, Run::is_behind)?;
        match run.answer.files[at].why {
            Why::HeldUpBy(other) => Some(Arc::clone(&run.files[other].path)),
            _ => None,
        }
    }

    /// Whether the file that proved an archived one is still there. Another newer state may be of another run, or unsound.
    pub(in crate::archive) fn is_still_proven(&self, path: &Path) -> bool {
        // A former process's files are archived anew.
        let Some((prover, file)) = self.get(path).and_then(|entry| entry.prover.as_deref()) else { return true };
        self.get(prover).is_some_and(|entry| match &entry.state {
            State::Released(_) => true,
            state => state.sealed().is_some_and(|sealed| sealed.file == *file && !entry.unsound),
        })
    }

    /// A file, with its run and its checkpoint.
    pub(in crate::archive) fn file(&self, path: &Path) -> Option<&Arc<File>> {
        self.files.get(path)
    }

    /// The state before a file in its lineage, with other bytes.
    pub(in crate::archive) fn before(&self, path: &Path) -> Option<&Entry> {
        let own = self.files.get(path)?;
        let sealed = own.entry.state.sealed()?;
        let is_before = |other: &&Entry| {
            let is_other = |of: &Sealed| of.lineage == sealed.lineage && of.print() != sealed.print();
            other.counts_as_newer() && other.state.sealed().is_some_and(is_other) && rank(other) < rank(&own.entry)
        };
        let others = self.runs[&own.run].files.iter().map(|file| &file.entry);
        others.filter(is_before).max_by(|a, b| rank(a).cmp(&rank(b)))
    }

    /// The checkpoints of the files at and below a path are not waited for any longer.
    pub(super) fn hasten(&mut self, path: &Path) {
        let paths: Vec<Arc<Path>> = self.below(path).map(|(path, _)| path.into()).collect();
        // All decisions before the first change.
        let newest = |path: Arc<Path>| Some((self.decision(&path)?.newest?, path));
        let newest: Vec<(i64, Arc<Path>)> = paths.into_iter().filter_map(newest).collect();
        newest.iter().for_each(|(newest, path)| self.edit(path, |entry| entry.asked_ns = *newest));
    }

    /// The oldest file to release of which this holds.
    pub(super) fn release(&mut self, may: impl Fn(&File) -> bool) -> Option<Offer> {
        self.renew(Run::is_outdated);
        let first = |key: &Arc<Path>| {
            let run = &self.runs[key];
            run.left(&run.answer.releases, self.now).map(|at| &run.files[at]).find(|file| may(file))
        };
        let file = self.at_work.iter().filter_map(first).min_by(|a, b| rank(&a.entry).cmp(&rank(&b.entry)))?;
        Some(Offer { file: Arc::clone(file), work: Work::Release, after: None })
    }

    /// The oldest file to archive of which this holds.
    pub(super) fn archive(&mut self, may: impl Fn(&File) -> bool) -> Option<Offer> {
        self.renew(Run::is_outdated);
        let first = |key: &Arc<Path>| {
            let run = &self.runs[key];
            let at = run.left(&run.answer.archives, self.now).take(LOOK_AHEAD).find(|at| may(&run.files[*at]))?;
            Some((run, at))
        };
        let found = self.at_work.iter().filter_map(first);
        let (run, at) = found.min_by(|(a, at), (b, bt)| rank(&a.files[*at].entry).cmp(&rank(&b.files[*bt].entry)))?;
        let work = run.answer.files[at].verdict.work()?;
        let after = if let Work::Archive(after) = work { Some(Arc::clone(&run.files[after])) } else { None };
        Some(Offer { file: Arc::clone(&run.files[at]), work, after })
    }

    /// When a failed attempt to archive or release may be repeated, and when a checkpoint is waited for no longer.
    pub(super) fn due(&self) -> (Option<Instant>, Option<i64>) {
        let answers = || self.at_work.iter().map(|key| &self.runs[key].answer);
        // Those whose time has come wait for something else, and whoever ends that wakes the threads.
        let retry = answers().filter_map(|answer| answer.retry).filter(|at| *at > self.now.instant);
        let settles = answers().filter_map(|answer| answer.settles).filter(|at| *at > self.now.wall_ns);
        (retry.min(), settles.min())
    }

    /// The steps to take.
    pub(super) fn queued(&mut self) -> Queued {
        self.renew(Run::is_behind);
        let answers = || self.at_work.iter().map(|key| &self.runs[key].answer);
        let closed = self.queue.all().map(|file| file.entry.seen_ns);
        Queued {
            count: answers().map(|answer| answer.queued).sum::<usize>() + self.queue.len(),
            settling: answers().map(|answer| answer.settling).sum(),
            oldest: answers().filter_map(|answer| answer.oldest).chain(self.queue.opened()).min(),
            since: answers().filter_map(|answer| answer.since).chain(closed).min(),
        }
    }
}

/// Number of runs without a decision that holds.
#[cfg(test)]
pub(super) fn void(files: &Files) -> usize {
    files.runs.values().filter(|run| run.is_void).count()
}
