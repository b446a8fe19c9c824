//! When a closed file is made durable: at once, or together with others.
//!
//! A device makes many small files durable in hardly more time than one, and programs that write to the same file
//! system wait while it does. So a file that nothing waits for stays closed for a moment, until others can join it: a
//! small file, or a log that is written again and again. It waits no longer if a program opens it again: bytes that
//! were closed become durable.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::archive::decide::{File, Work, work};
use crate::archive::resident::ResidentReason;
use crate::store::MIN_RELEASE_BYTES;
use formats::may_name_best;

use super::{Catalog, Closed, Entry, State, Task};

/// How long a file waits for others. The rest of the second that docs/SEMANTICS.md states is for a busy device.
pub(in crate::archive) const MOMENT: Duration = Duration::from_millis(250);
/// A log of more bytes waits for nobody: others would wait for it.
const LOG_BYTES: u64 = 16 << 20;
/// Files made durable together, at most. Each takes a descriptor.
const MOST: usize = 256;

/// When a file is made durable.
#[derive(Clone, Copy, Debug)]
pub(in crate::archive) struct Turn {
    /// Tells the file from others, whatever becomes of its name and content.
    pub(super) file: u64,
    /// The file was closed, and waits until then for others. It may have been opened again since.
    pub(super) at: Option<Instant>,
    /// When this file was last made durable, if it was no checkpoint then.
    log: Option<Instant>,
}

impl Turn {
    pub(super) fn new(file: u64) -> Turn {
        Turn { file, at: None, log: None }
    }

    /// The turn of the file's next content. `state` is the state of the content before.
    pub(super) fn next(self, state: &State) -> Turn {
        let is_owed = matches!(state, State::Staged | State::Closed);
        Turn { at: self.at.filter(|_| is_owed), ..self }
    }

    /// The file was closed at this time, with so many bytes.
    pub(super) fn closed(self, path: &Path, len: u64, now: Instant) -> Turn {
        let is_log = len < LOG_BYTES && self.log.is_some_and(|last| now < last + MOMENT);
        let waits = (len < MIN_RELEASE_BYTES || is_log) && !may_name_best(path);
        let latest = now + MOMENT;
        Turn { at: waits.then(|| self.at.map_or(latest, |at| at.min(latest))), ..self }
    }

    /// A closed file got this name. `was_small`: it was durable before, and too small for a checkpoint.
    pub(super) fn renamed(self, path: &Path, was_small: bool) -> Turn {
        let at = if was_small { Some(Instant::now() + MOMENT) } else { self.at };
        Turn { at: at.filter(|_| !may_name_best(path)), ..self }
    }
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
}

impl Queue {
    pub(super) fn enter(&mut self, file: &Arc<File>) {
        let (sequence, own) = (file.entry.sequence, Arc::clone(file));
        match work(&file.entry, None) {
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
        match work(&file.entry, None) {
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
    fn retry(&self, now: Instant) -> Option<Instant> {
        self.all().filter_map(|file| file.entry.failed.as_ref()?.retry).filter(|at| *at > now).min()
    }
}

impl Catalog {
    /// Claims the next link to look at, else the next file to seal at once. Also says after which time there may be one.
    pub(in crate::archive) fn claim_closed(&mut self, now: Instant) -> (Option<Closed>, Option<Duration>) {
        if let Some(link) = self.claim_link() {
            return (Some(Closed::Link(link)), None);
        }
        self.files.pass(now, None);
        let next = self.files.queue().closed().find(|file| self.is_offered(file)).cloned();
        let task = next.map(|file| Closed::File(self.claim(&file, Work::Seal, None)));
        let retry = if task.is_none() { self.retry_of_queue() } else { None };
        (task, retry)
    }

    /// Claims files to make durable together, once the first of them has waited for long enough. Also says after which time
    /// there may be some.
    pub(in crate::archive) fn claim_together(&mut self, now: Instant) -> (Option<Vec<Task>>, Option<Duration>) {
        self.files.pass(now, None);
        let first = self.files.queue().together().find(|file| self.is_offered(file));
        match first.and_then(|file| file.entry.waits_until()) {
            Some(first) if first <= now => (self.claim_waiting(), None),
            first => {
                let wait = first.map(|first| first - now);
                (None, wait.into_iter().chain(self.retry_of_queue()).min())
            }
        }
    }

    /// Claims files that wait for each other; also those that could wait longer.
    pub(in crate::archive) fn claim_waiting(&mut self) -> Option<Vec<Task>> {
        let offered = self.files.queue().together().filter(|file| self.is_offered(file));
        let files: Vec<Arc<File>> = offered.take(MOST).cloned().collect();
        let tasks: Vec<Task> = files.iter().map(|file| self.claim(file, Work::Together, None)).collect();
        Some(tasks).filter(|tasks| !tasks.is_empty())
    }

    /// After which time a failed attempt to seal or compare may be repeated.
    pub(super) fn retry_of_queue(&self) -> Option<Duration> {
        let now = self.files.now();
        self.files.queue().retry(now).map(|at| at - now)
    }

    /// Whether some file was not examined yet. Files that wait for each other are no checkpoints.
    pub(in crate::archive) fn has_unsealed(&self) -> bool {
        self.files.queue().has_unsealed()
    }

    /// Whether a file that was closed before the change of this number is not durable yet.
    pub(in crate::archive) fn has_unsealed_since(&self, number: u64) -> bool {
        self.has_unsealed() || self.files.queue().together().any(|file| file.entry.sequence < number)
    }

    /// Nobody waits for others any longer.
    pub(in crate::archive) fn end_waiting(&mut self) {
        let now = Instant::now();
        let paths: Vec<Arc<Path>> = self.files.queue().together().map(|file| Arc::clone(&file.path)).collect();
        for path in paths {
            self.files.edit(&path, |entry| entry.turn.at = entry.turn.at.map(|at| at.min(now)));
        }
    }

    /// The bytes that a file had when the task began are durable; `is_log`: whether it is no checkpoint, if known. A
    /// program may have opened or closed the file since.
    pub(in crate::archive) fn made_durable(&mut self, task: &Task, began: Instant, is_log: Option<bool>) {
        if self.get(&task.path).is_none_or(|entry| entry.turn.file != task.file) {
            return;
        }
        self.files.edit(&task.path, |entry| {
            let turn = &mut entry.turn;
            let is_log = is_log.unwrap_or(turn.log.is_some());
            turn.log = is_log.then_some(began);
            let is_closed = matches!(entry.state, State::Closed);
            turn.at = turn.at.filter(|_| is_closed).map(|_| began + MOMENT);
        });
    }
}

impl Entry {
    /// The file has this name now: its lineage and profile must be found out again, if it has any. Answers whether that
    /// is so.
    pub(super) fn take_name(&mut self, path: &Path) -> bool {
        let was_small = matches!(self.state, State::Resident(ResidentReason::Small | ResidentReason::Empty));
        let changes = self.state.follows_from_name();
        if changes {
            self.state = State::Closed;
        }
        self.turn = self.turn.renamed(path, was_small);
        // That was of another checkpoint.
        self.asked_ns = i64::MIN;
        changes
    }

    /// Until when the file waits for others.
    pub(in crate::archive) fn waits_until(&self) -> Option<Instant> {
        self.turn.at.filter(|_| matches!(self.state, State::Staged | State::Closed))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::PathBuf;

    use super::super::Step;
    use super::super::tests::{claim_seal, no_objects};
    use super::*;

    /// Files wait for each other, but none for longer than a moment, and none that may be a checkpoint.
    #[track_caller]
    pub(in crate::archive::catalog) fn check_together(catalog: &mut Catalog, claims: &[Task], now: Instant) {
        let waits = |entry: &Entry| entry.failed.as_ref().is_some_and(|f| f.retry.is_none_or(|at| at > now));
        let claimed = |entry: &Entry| claims.iter().any(|claim| claim.sequence == entry.sequence);
        let joins = |entry: &Entry| entry.turn.at.is_some() && matches!(entry.state, State::Staged | State::Closed);
        let offered = |(_, entry): &(&Path, &Entry)| joins(entry) && !waits(entry) && !claimed(entry);
        let mut expected: Vec<PathBuf> =
            catalog.entries().filter(offered).map(|(path, _)| path.to_path_buf()).collect();
        let first = catalog.entries().filter(offered).filter_map(|(_, entry)| entry.turn.at).min();
        if first.is_none_or(|at| at > now) {
            expected.clear();
        }
        let latest = now.max(Instant::now()) + MOMENT;
        assert!(catalog.entries().filter(offered).all(|(_, entry)| entry.turn.at <= Some(latest)));
        let (tasks, again) = catalog.claim_together(now);
        let tasks = tasks.unwrap_or_default();
        tasks.iter().for_each(|task| catalog.done(task));
        assert!(first.is_none() || !tasks.is_empty() || again.is_some(), "nobody would look again");
        let mut found: Vec<PathBuf> = tasks.into_iter().map(|task| task.path).collect();
        found.sort_unstable();
        assert_eq!(found, expected);
    }

    /// A log is closed a thousand times a second: each close takes the turn of the first close that is not durable.
    #[test]
    fn a_file_that_is_written_again_and_again_does_not_wait_longer() {
        let (mut catalog, objects) = (Catalog::new(Duration::ZERO), no_objects());
        let (log, start) = (Path::new("run/log.txt"), Instant::now());
        let at = |millis: u64| start + Duration::from_millis(millis);
        let together =
            |catalog: &mut Catalog, millis: u64| catalog.claim_together(at(millis)).0.map(|mut tasks| tasks.remove(0));
        for millis in 0..250 {
            assert!(together(&mut catalog, millis).is_none());
            catalog.opened_for_writing(log, &objects);
            catalog.closed(log, Some((100, at(millis))), &objects);
            assert!(!catalog.has_unsealed() && !catalog.may_learn() && catalog.has_unsealed_since(u64::MAX));
        }
        // It is open just when its turn comes.
        catalog.opened_for_writing(log, &objects);
        let task = together(&mut catalog, 250).unwrap();
        assert!(matches!(task.step, Step::Sync));
        // It is closed while it is being made durable: that is another turn, from when this one began.
        catalog.closed(log, Some((100, at(251))), &objects);
        catalog.made_durable(&task, at(250), None);
        catalog.done(&task);
        assert!(together(&mut catalog, 499).is_none());
        let task = together(&mut catalog, 500).unwrap();
        assert!(matches!(task.step, Step::Seal));
        catalog.done(&task);
        // A large file waits for nobody, but if it was no checkpoint and is written again at once.
        let mut close = |millis: u64, len: u64| {
            catalog.opened_for_writing(log, &objects);
            catalog.closed(log, Some((len, at(millis))), &objects);
            claim_seal(&mut catalog, at(millis)).inspect(|task| {
                catalog.made_durable(task, at(millis), Some(true));
                catalog.done(task);
            })
        };
        assert!(close(600, 1 << 20).is_some());
        assert!(close(700, 1 << 20).is_none() && close(700, 1 << 30).is_some());
        assert!(close(1000, 1 << 20).is_some());
    }

    /// A file that may name the best of a run is looked at as soon as it is closed.
    #[test]
    fn a_file_that_may_speak_waits_for_nobody() {
        let (mut catalog, objects) = (Catalog::new(Duration::ZERO), no_objects());
        let now = Instant::now();
        for name in ["run/checkpoint-1/trainer_state.json", "run/last.ckpt"] {
            catalog.opened_for_writing(Path::new("new"), &objects);
            catalog.closed(Path::new("new"), Some((10, now)), &objects);
            assert!(claim_seal(&mut catalog, now).is_none() && !catalog.may_learn());
            catalog.renamed(Path::new("new"), Path::new(name), &objects);
            assert!(catalog.may_learn());
            let task = claim_seal(&mut catalog, now).unwrap();
            catalog.done(&task);
            catalog.removed(Path::new(name), &objects);
            catalog.opened_for_writing(Path::new(name), &objects);
            catalog.closed(Path::new(name), Some((10, now)), &objects);
            let task = claim_seal(&mut catalog, now).unwrap();
            catalog.done(&task);
            catalog.removed(Path::new(name), &objects);
        }
    }
}
