//! All files by path and by run, with the last decision about each run.
//!
//! Every change of an entry goes through here. It notes only that the run changed: the run is decided about once somebody
//! asks. A decision costs one pass over the run's files, so what needs none, as sealing, asks for none.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::archive::decide::{
    Answer, Checkpoint, Decision, File, Mark, Now, Others, Results, Why, Work, decide, rank, work,
};
use crate::archive::entry::{Entry, Says, Sealed, State};
use crate::store::{Id, step_pattern};

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
    /// `files` changed since.
    is_void: bool,
}

impl Run {
    /// Its files changed, so the decision is void. Answers whether somebody must decide. Without states it has no steps, and it
    /// may be a directory of 100,000 small files that a program just writes.
    fn change(&mut self) -> bool {
        self.is_void = true;
        self.states > 0
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
            at_work: HashSet::new(),
            queue: Queue::default(),
            links: BTreeMap::new(),
            orphans: Vec::new(),
            now: Now { instant: Instant::now(), wall_ns: i64::MIN },
            freed: false,
            touched: Touched::default(),
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
        self.freed |= matches!(&old.entry.state, State::Resident(why) if why.hides_an_object());
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
        let Some(old) = self.leave(path) else { return };
        let mut file = File::clone(&old);
        change(&mut file.entry);
        self.let_go(&old, Some(&file.entry));
        self.enter(file, Some(&old));
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

    /// Enters a file that was `old` before, whose run and checkpoint follow from its name and state.
    fn enter(&mut self, mut file: File, old: Option<&File>) {
        let run = self.runs.entry(Arc::clone(&file.run)).or_default();
        // A lone file's run is made anew with each change of the file, and its checkpoint is not. Others must find that one.
        if run.files.is_empty() {
            run.checkpoints.extend(file.checkpoint.clone());
        }
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
        let file = Arc::new(file);
        let at = run.files.partition_point(|other| other.entry.sequence < file.entry.sequence);
        run.files.insert(at, Arc::clone(&file));
        run.states += usize::from(file.entry.state.sealed().is_some());
        self.queue.enter(&file);
        if run.change() {
            self.changed.insert(Arc::clone(&file.run));
        }
        self.touched.add([Arc::clone(&file.path)]);
        self.files.insert(Arc::clone(&file.path), file);
    }

    fn leave(&mut self, path: &Path) -> Option<Arc<File>> {
        let old = self.files.remove(path)?;
        self.queue.leave(&old);
        self.touched.add([Arc::clone(&old.path)]);
        let run = self.runs.get_mut(&old.run).expect("a file is in its run");
        let at = run.files.partition_point(|other| other.entry.sequence < old.entry.sequence);
        let left = run.files.remove(at);
        debug_assert!(Arc::ptr_eq(&left, &old), "two files have one sequence");
        run.states -= usize::from(old.entry.state.sealed().is_some());
        if run.change() {
            self.changed.insert(Arc::clone(&old.run));
        } else {
            self.changed.remove(&old.run);
            self.at_work.remove(&old.run);
        }
        if run.files.is_empty() {
            self.runs.remove(&old.run);
        }
        Some(old)
    }

    /// A file has left. Notes whether its lineage has no state any more.
    fn let_go(&mut self, old: &File, new: Option<&Entry>) {
        let lineage = |entry: &Entry| entry.state.sealed().map(|sealed| sealed.lineage);
        let Some(own) = lineage(&old.entry).filter(|own| new.and_then(lineage) != Some(*own)) else { return };
        let others = self.runs.get(&old.run);
        self.freed |= others.is_none_or(|run| run.files.iter().all(|other| lineage(&other.entry) != Some(own)));
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
        run.is_void = false;
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

    /// Decides about all runs that changed, and those whose time has come.
    fn refresh(&mut self) {
        let due = self.at_work.iter().filter(|key| self.runs[*key].answer.is_due(self.now));
        let due: Vec<Arc<Path>> = due.chain(&self.changed).cloned().collect();
        due.iter().for_each(|key| self.decide(key));
    }

    /// The run of a file with a decision that holds, and the file's place in it.
    fn decided(&mut self, path: &Path) -> Option<(&Run, usize)> {
        let file = Arc::clone(self.files.get(path)?);
        let run = &self.runs[&file.run];
        if run.is_void || run.answer.is_due(self.now) {
            self.decide(&file.run);
        }
        let run = &self.runs[&file.run];
        let at = run.files.partition_point(|other| other.entry.sequence < file.entry.sequence);
        Some((run, at))
    }

    /// The disk has less room than the reserve, or no longer has.
    pub(in crate::archive) fn hurry(&mut self, is_low: bool) {
        self.is_low = is_low;
        let changed = self.at_work.iter().filter(|key| self.runs.get_mut(*key).is_some_and(Run::change));
        self.changed.extend(changed.cloned());
    }

    /// The decision about a file.
    pub(in crate::archive) fn decision(&mut self, path: &Path) -> Option<Decision> {
        self.decided(path).map(|(run, at)| run.answer.files[at])
    }

    /// Who marks a file as the best of its run.
    pub(in crate::archive) fn mark(&mut self, path: &Path) -> Option<Mark> {
        self.decided(path).and_then(|(run, at)| run.answer.marks.get(&at).cloned())
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
            let runs = self.range(&target).map(|file| Arc::clone(&file.run));
            let runs: Vec<_> = runs.collect();
            for key in runs {
                if self.runs.get_mut(&key).is_some_and(Run::change) {
                    self.changed.insert(key);
                }
            }
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
        let (run, at) = self.decided(path)?;
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
        self.refresh();
        let first = |key: &Arc<Path>| {
            let run = &self.runs[key];
            run.answer.releases.iter().map(|at| &run.files[*at]).find(|file| may(file))
        };
        let file = self.at_work.iter().filter_map(first).min_by(|a, b| rank(&a.entry).cmp(&rank(&b.entry)))?;
        Some(Offer { file: Arc::clone(file), work: Work::Release, after: None })
    }

    /// The oldest file to archive of which this holds.
    pub(super) fn archive(&mut self, may: impl Fn(&File) -> bool) -> Option<Offer> {
        self.refresh();
        let first = |key: &Arc<Path>| {
            let run = &self.runs[key];
            let at = run.answer.archives.iter().take(LOOK_AHEAD).find(|at| may(&run.files[**at]))?;
            Some((run, *at))
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
        self.refresh();
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
