//! All files by path and by run, with the last decision about each run.
//!
//! Every change of an entry goes through here. It notes only that the run changed: the run is decided about once somebody
//! asks. A decision costs one pass over the run's files, so what needs none, as sealing, asks for none. A step of a thread
//! takes nothing from the other files ([`lets_stand`]). So threads take many steps by one decision: in a large run with a
//! backlog, too, a step costs no more than a pass over a few files.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::archive::decide::{
    Answer, Checkpoint, Decision, File, Mark, Now, Others, Results, Why, Work, decide, lets_stand, rank, work,
};
use crate::archive::entry::{Entry, Says, Sealed, State};
use crate::store::{Id, step_pattern};

/// Files of a run that are looked at for one that can be archived beside those that are being archived.
const LOOK_AHEAD: usize = 80;

/// A decision is renewed once threads took this part of its run's files as many steps. So a step costs 64 files of a pass,
/// and a run of fewer files is decided about after each.
const PART: usize = 64;

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
    queue: Queue,
    /// Links whose names ask for exact bytes, and their targets inside the tree.
    links: BTreeMap<Arc<Path>, Arc<Path>>,
    /// The last statement of each series whose files are gone.
    orphans: Vec<(Arc<Path>, Arc<Says>)>,
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

#[derive(Debug, Default)]
struct Run {
    /// In the order of sealing.
    files: Vec<Arc<File>>,
    /// How many of them are sealed or archived. Without any there is nothing to archive or to release.
    states: usize,
    /// Shared by their files.
    checkpoints: HashSet<Arc<Checkpoint>>,
    /// The last decision about `files`.
    answer: Answer,
    /// The files that stay exact by it, because others say so.
    exact: HashSet<Arc<Path>>,
    /// `files` changed since by more than steps.
    is_void: bool,
    /// Steps that threads took since. The answer stands for the other files, and they may have more to do by now.
    behind: usize,
}

impl Run {
    /// The place of the file with this sequence.
    fn place(&self, sequence: u64) -> usize {
        self.files.partition_point(|file| file.entry.sequence < sequence)
    }

    /// Those of these files that still can take the step that was decided.
    fn left<'a>(&'a self, places: &'a [usize], now: Now) -> impl Iterator<Item = usize> + 'a {
        places.iter().copied().filter(move |at| {
            let Entry { state, busy, failed, .. } = &self.files[*at].entry;
            let is_able =
                !busy && failed.as_ref().is_none_or(|failed| failed.retry.is_some_and(|at| at <= now.instant));
            is_able
                && match self.answer.files[*at].verdict.work() {
                    Some(Work::Archive(after)) => {
                        matches!(state, State::Sealed(_)) && self.files[after].entry.counts_as_newer()
                    }
                    _ => matches!(state, State::Archived(..)),
                }
        })
    }

    /// Whether no step is left but those that threads take, and others may be possible since.
    fn is_used_up(&self, is_claimed: impl Fn(&File) -> bool, now: Now) -> bool {
        let Answer { archives, releases, .. } = &self.answer;
        let mut left = self.left(releases, now).chain(self.left(archives, now));
        !self.is_void && self.behind > 0 && left.all(|at| is_claimed(&self.files[at]))
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
            links: BTreeMap::new(),
            orphans: Vec::new(),
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

    /// Files that are not durable or examined yet.
    pub(super) fn queue(&self) -> &Queue {
        &self.queue
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
            file.checkpoint = Checkpoint::of(&file.path, &file.entry.state).map(|checkpoint| {
                let known = run.checkpoints.get(&checkpoint).cloned();
                known.unwrap_or_else(|| {
                    let checkpoint = Arc::new(checkpoint);
                    run.checkpoints.insert(Arc::clone(&checkpoint));
                    checkpoint
                })
            });
        }
        let (at, file) = (run.place(file.entry.sequence), Arc::new(file));
        let is_step = old.is_some_and(|old| {
            let was_history = run.answer.files.get(at).is_some_and(|decision| decision.is_history);
            !run.is_void && lets_stand(&old.entry, &file.entry, was_history)
        });
        match old {
            Some(old) => {
                debug_assert!(Arc::ptr_eq(&run.files[at], old), "two files have one sequence");
                run.files[at] = Arc::clone(&file);
                run.states -= usize::from(old.entry.state.sealed().is_some());
                self.queue.leave(old);
            }
            None => run.files.insert(at, Arc::clone(&file)),
        }
        run.states += usize::from(file.entry.state.sealed().is_some());
        self.queue.enter(&file);
        self.touched.add([Arc::clone(&file.path)]);
        self.note_change(&file.run, is_step);
        self.files.insert(Arc::clone(&file.path), Arc::clone(&file));
        file
    }

    fn leave(&mut self, path: &Path) -> Option<Arc<File>> {
        let old = self.files.remove(path)?;
        self.queue.leave(&old);
        self.touched.add([Arc::clone(&old.path)]);
        let run = self.runs.get_mut(&old.run).expect("a file is in its run");
        let left = run.files.remove(run.place(old.entry.sequence));
        debug_assert!(Arc::ptr_eq(&left, &old), "two files have one sequence");
        run.states -= usize::from(old.entry.state.sealed().is_some());
        let is_empty = run.files.is_empty();
        self.note_change(&old.run, false);
        if is_empty {
            self.runs.remove(&old.run);
        }
        Some(old)
    }

    /// A run has changed: by a step of a thread, or by more.
    fn note_change(&mut self, key: &Arc<Path>, is_step: bool) {
        let Some(run) = self.runs.get_mut(key) else { return };
        if is_step {
            run.behind += 1;
        } else {
            run.is_void = true;
        }
        // Without states a run has no steps, and it may be a directory of 100,000 small files that a program just writes.
        if run.states > 0 {
            self.changed.insert(Arc::clone(key));
        } else {
            self.changed.remove(key);
            self.at_work.remove(key);
        }
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
        (run.is_void, run.behind) = (false, 0);
        #[cfg(test)]
        {
            self.decisions += 1;
        }
        run.checkpoints.retain(|checkpoint| Arc::strong_count(checkpoint) > 1);
        // A target is a file of the run, or a directory at, above or below the run's.
        let may_mark = |target: &Path| target.starts_with(key) || key.starts_with(target);
        let links = self.links.iter().filter(|(_, target)| may_mark(target));
        let links = links.map(|(link, target)| (Arc::clone(link), Arc::clone(target))).collect();
        let orphans = self.orphans.iter().filter(|(path, _)| path.starts_with(key)).cloned().collect();
        // Not 0, which would open all checkpoints.
        let settle = if self.is_low { self.settle.min(1) } else { self.settle };
        run.answer = decide(&run.files, &Others { links, orphans }, settle, self.now);
        let is_exact = |at: &usize| run.answer.marks.contains_key(at) || run.answer.files[*at].is_unfinished;
        let exact = (0..run.files.len()).filter(is_exact).map(|at| Arc::clone(&run.files[at].path)).collect();
        let former = std::mem::replace(&mut run.exact, exact);
        // A mirror may have it with a loss.
        if former != run.exact {
            self.touched.add(former.symmetric_difference(&run.exact).cloned());
        }
        if run.answer.queued + run.answer.settling > 0 {
            self.at_work.insert(Arc::clone(key));
        } else {
            self.at_work.remove(key);
        }
    }

    /// Whether the decision about a run must be renewed before a thread takes a step by it.
    fn is_outdated(&self, run: &Run) -> bool {
        run.is_void || run.behind * self.part > run.files.len() || run.answer.is_due(self.now)
    }

    /// Whether the decision about a run lacks steps that threads took.
    fn is_behind(&self, run: &Run) -> bool {
        run.behind > 0 || self.is_outdated(run)
    }

    /// Decides about each run for which `holds` is true. Answers whether there was one.
    fn renew(&mut self, holds: impl Fn(&Files, &Run) -> bool) -> bool {
        let keys = self.at_work.iter().chain(self.changed.difference(&self.at_work));
        let keys: Vec<Arc<Path>> = keys.filter(|key| holds(self, &self.runs[*key])).cloned().collect();
        keys.iter().for_each(|key| self.decide(key));
        !keys.is_empty()
    }

    /// Decides about the runs whose decisions are used up. Answers whether there were some.
    pub(super) fn renew_used_up(&mut self, is_claimed: impl Fn(&File) -> bool) -> bool {
        self.renew(|files, run| run.is_used_up(&is_claimed, files.now))
    }

    /// The run of a file and the file's place in it, once the decision about the run is renewed, if this holds for it.
    fn decided(&mut self, path: &Path, is_outdated: impl Fn(&Files, &Run) -> bool) -> Option<(&Run, usize)> {
        let file = Arc::clone(self.files.get(path)?);
        if is_outdated(self, &self.runs[&file.run]) {
            self.decide(&file.run);
        }
        let run = &self.runs[&file.run];
        Some((run, run.place(file.entry.sequence)))
    }

    /// The disk has less room than the reserve, or no longer has.
    pub(in crate::archive) fn hurry(&mut self, is_low: bool) {
        self.is_low = is_low;
        let keys: Vec<Arc<Path>> = self.at_work.iter().cloned().collect();
        keys.iter().for_each(|key| self.note_change(key, false));
    }

    /// The decision about a file, after all that threads did.
    pub(in crate::archive) fn decision(&mut self, path: &Path) -> Option<Decision> {
        let (run, at) = self.decided(path, Files::is_behind)?;
        Some(run.answer.files[at])
    }

    /// Whether an archived file may become a stub.
    pub(in crate::archive) fn may_go(&mut self, path: &Path) -> bool {
        let decided = self.decided(path, Files::is_outdated);
        let may_go = decided.is_some_and(|(run, at)| run.answer.files[at].may_go);
        may_go || self.decision(path).is_some_and(|decision| decision.may_go)
    }

    /// Who marks a file as the best of its run. No step changes marks.
    pub(in crate::archive) fn mark(&mut self, path: &Path) -> Option<Mark> {
        let (run, at) = self.decided(path, Files::is_outdated)?;
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

    /// Paths of the links that mark something.
    pub(in crate::archive) fn links(&self) -> impl Iterator<Item = &Path> {
        self.links.keys().map(|link| &**link)
    }

    /// The target of a link that marks something.
    pub(in crate::archive) fn link(&self, path: &Path) -> Option<Arc<Path>> {
        self.links.get(path).cloned()
    }

    /// Enters the target of a link, or that it marks nothing.
    pub(super) fn set_link(&mut self, link: &Path, target: Option<PathBuf>) {
        let target: Option<Arc<Path>> = target.map(Into::into);
        let old = match &target {
            Some(target) => self.links.insert(link.into(), Arc::clone(target)),
            None => self.links.remove(link),
        };
        for target in old.into_iter().chain(target) {
            let runs: HashSet<Arc<Path>> = self.range(&target).map(|file| Arc::clone(&file.run)).collect();
            runs.iter().for_each(|key| self.note_change(key, false));
        }
    }

    /// A program removes the file at a path. If it made the last statement of its series, that one still counts.
    pub(super) fn keep_statement(&mut self, path: &Path) {
        let Some((path, says)) = self.files.get(path).and_then(|of| Some((&of.path, of.entry.says.as_ref()?))) else {
            return;
        };
        self.orphans.retain(|(_, orphan)| orphan.series != says.series);
        self.orphans.push((Arc::clone(path), Arc::clone(says)));
    }

    /// Names moved: so did the statements of files that are gone.
    pub(super) fn move_statements(&mut self, moved: impl Fn(&Path) -> PathBuf) {
        for (path, says) in &mut self.orphans {
            let to = moved(path);
            if to != **path {
                (*path, *says) = (to.as_path().into(), Arc::new(says.under(&to)));
            }
        }
    }

    /// The file of the same checkpoint that has no newer state yet, if the file waits for one.
    pub(in crate::archive) fn held_up_by(&mut self, path: &Path) -> Option<Arc<Path>> {
        let (run, at) = self.decided(path, Files::is_behind)?;
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
        self.renew(Files::is_outdated);
        let first = |key: &Arc<Path>| {
            let run = &self.runs[key];
            run.left(&run.answer.releases, self.now).map(|at| &run.files[at]).find(|file| may(file))
        };
        let file = self.at_work.iter().filter_map(first).min_by(|a, b| rank(&a.entry).cmp(&rank(&b.entry)))?;
        Some(Offer { file: Arc::clone(file), work: Work::Release, after: None })
    }

    /// The oldest file to archive of which this holds.
    pub(super) fn archive(&mut self, may: impl Fn(&File) -> bool) -> Option<Offer> {
        self.renew(Files::is_outdated);
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
        self.renew(Files::is_behind);
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

/// The files that are not durable or examined yet, in the order in which they were closed. Those that failed or that a
/// thread works on are here, too.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Closed files that can be sealed at once.
    closed: BTreeMap<u64, Arc<File>>,
    /// Files that wait for each other, until then.
    together: BTreeMap<(Instant, u64), Arc<File>>,
    /// Durable files that may be copies.
    copies: BTreeMap<u64, Arc<File>>,
    /// How many of them have failed.
    failed: usize,
}

impl Queue {
    pub(super) fn enter(&mut self, file: &Arc<File>) {
        let (sequence, own) = (file.entry.sequence, Arc::clone(file));
        let work = work(&file.entry);
        self.failed += usize::from(work.is_some() && file.entry.failed.is_some());
        match work {
            Some(Work::Seal) => drop(self.closed.insert(sequence, own)),
            Some(Work::Compare) => drop(self.copies.insert(sequence, own)),
            Some(Work::Together) => {
                let turn = file.entry.waits_until();
                turn.into_iter().for_each(|at| drop(self.together.insert((at, sequence), Arc::clone(file))));
            }
            Some(Work::Archive(_) | Work::Release) | None => {}
        }
    }

    pub(super) fn leave(&mut self, file: &File) {
        let sequence = file.entry.sequence;
        let work = work(&file.entry);
        self.failed -= usize::from(work.is_some() && file.entry.failed.is_some());
        match work {
            Some(Work::Seal) => drop(self.closed.remove(&sequence)),
            Some(Work::Compare) => drop(self.copies.remove(&sequence)),
            Some(Work::Together) => {
                file.entry.waits_until().into_iter().for_each(|at| drop(self.together.remove(&(at, sequence))));
            }
            Some(Work::Archive(_) | Work::Release) | None => {}
        }
    }

    /// Closed files that can be sealed at once.
    pub(super) fn closed(&self) -> impl Iterator<Item = &Arc<File>> {
        self.closed.values()
    }

    /// Durable files that may be copies.
    pub(super) fn copies(&self) -> impl Iterator<Item = &Arc<File>> {
        self.copies.values()
    }

    /// Files that wait for each other, the one first whose turn comes first.
    pub(super) fn together(&self) -> impl Iterator<Item = &Arc<File>> {
        self.together.values()
    }

    fn all(&self) -> impl Iterator<Item = &Arc<File>> {
        self.closed().chain(self.copies()).chain(self.together())
    }

    pub(super) fn len(&self) -> usize {
        self.closed.len() + self.copies.len() + self.together.len()
    }

    /// Whether some files were not examined yet. Files that wait for each other are no checkpoints.
    pub(super) fn has_unsealed(&self) -> bool {
        !self.closed.is_empty() || !self.copies.is_empty()
    }

    /// The lowest number that a file was opened with.
    pub(super) fn opened(&self) -> Option<u64> {
        self.all().map(|file| file.entry.opened).min()
    }

    /// When the next failed attempt may be repeated.
    pub(super) fn retry(&self, now: Instant) -> Option<Instant> {
        let all = self.all().take(if self.failed > 0 { usize::MAX } else { 0 });
        all.filter_map(|file| file.entry.failed.as_ref()?.retry).filter(|at| *at > now).min()
    }
}
