//! The next step of a thread: it claims a file, and no other thread takes a step of that file before it is done.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit};

use crate::archive::decide::{Checkpoint, File, Work};
use crate::archive::entry::{Failed, Sealed, State};
use crate::archive::lineage;
use crate::store::Id;

use super::files::{Files, Offer};

/// Files made durable together, at most. Each takes a descriptor, and a program's open fails without one: so a process with a
/// low limit takes few.
fn most_together() -> usize {
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(descriptors / 16).unwrap_or(usize::MAX).clamp(1, 256)
}

/// A step of a file's life that one thread takes. No other thread takes a step of the file before [`Steps::done`].
#[derive(Clone, Debug)]
pub(in crate::archive) struct Task {
    /// The file's path inside the tree.
    pub(in crate::archive) path: PathBuf,
    /// Work on another version is void.
    pub(in crate::archive) version: u64,
    pub(super) sequence: u64,
    /// See [`crate::archive::entry::Turn`].
    pub(super) file: u64,
    pub(in crate::archive) step: Step,
}

/// The steps of a file's life; `archive/threads.rs` takes them.
#[derive(Clone, Debug)]
pub(in crate::archive) enum Step {
    /// Make it durable and find its tensors.
    Seal,
    /// A program has opened the file again: make its closed bytes durable.
    Sync,
    /// Find out whether it is a copy of what an object decodes to.
    Compare { sealed: Arc<Sealed> },
    /// Encode it: `newer` holds the bytes, as written, of the state after it.
    Archive { sealed: Arc<Sealed>, newer: (PathBuf, Arc<Sealed>) },
    /// Put the stub in its place.
    Release { sealed: Arc<Sealed>, object: Id },
}

impl Step {
    /// The step of a file in this state.
    fn of(file: &File, work: Work, after: Option<&File>) -> Step {
        let sealed = |file: &File| match &file.entry.state {
            State::Sealed(sealed) => Some((file.path.to_path_buf(), Arc::clone(sealed))),
            _ => None,
        };
        match (work, &file.entry.state) {
            (Work::Seal, State::Closed) | (Work::Together, State::Closed) => Step::Seal,
            (Work::Together, State::Staged) => Step::Sync,
            (Work::Compare, State::Durable(sealed)) => Step::Compare { sealed: Arc::clone(sealed) },
            (Work::Release, State::Archived(sealed, object)) => {
                Step::Release { sealed: Arc::clone(sealed), object: *object }
            }
            (Work::Archive(_), State::Sealed(own)) => {
                let newer = after.and_then(sealed).expect("the state after a file is sealed");
                Step::Archive { sealed: Arc::clone(own), newer }
            }
            (work, state) => unreachable!("{work:?} of {state:?}"),
        }
    }
}

/// What a sealer does next.
#[derive(Debug)]
pub(in crate::archive) enum Closed {
    /// A link may have come or gone here.
    Link(PathBuf),
    /// A program closed this file.
    File(Task),
}

/// Steps that threads take.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Files that threads take steps of, by sequence, as they were when they were claimed. As many as there are threads.
    files: BTreeMap<u64, (Arc<File>, Work)>,
    /// Names at which a link may have come or gone: to be looked at before anything is released.
    links: BTreeSet<PathBuf>,
    links_being_read: usize,
}

impl Claims {
    /// Links may have come or gone at these names.
    pub(super) fn look_at(&mut self, links: impl Iterator<Item = PathBuf>) {
        self.links.extend(links);
    }

    /// Whether a thread does such work.
    fn is_any(&self, holds: impl Fn(Work) -> bool) -> bool {
        self.files.values().any(|(_, work)| holds(*work))
    }

    fn has(&self, file: &File) -> bool {
        self.files.contains_key(&file.entry.sequence)
    }

    /// Whether a thread works on a former content of a file.
    fn has_former(&self, file: &File) -> bool {
        self.files.get(&file.entry.sequence).is_some_and(|(of, _)| of.entry.version != file.entry.version)
    }

    /// Whether a file is being archived that this one has to wait for. States of one lineage are archived one after the
    /// other, since each becomes a difference to the one before. So are files that may be the same state, saved twice.
    fn is_before(&self, file: &File) -> bool {
        let archived = self.files.values().filter(|(_, work)| matches!(work, Work::Archive(_)));
        let states = archived.filter_map(|(other, _)| Some((other, other.entry.state.sealed()?)));
        let Some(own) = file.entry.state.sealed() else { return false };
        states.into_iter().any(|(other, sealed)| {
            // A job's ranks have the same tensors too, but other states; their names differ in numbers only. Files
            // without tensors are no states that were saved twice.
            let is_kin = || {
                let is_same = sealed.signature == own.signature && lineage::has_tensors(own.signature);
                is_same && without_digits(&other.path) != without_digits(&file.path)
            };
            sealed.lineage == own.lineage || sealed.print() == own.print() || is_kin()
        })
    }

    /// The numbers that the files were opened with which threads work on.
    pub(super) fn opened(&self) -> impl Iterator<Item = u64> {
        self.files.values().map(|(file, _)| file.entry.opened)
    }

    /// Whether a file was claimed that waited for others.
    #[cfg(test)]
    pub(super) fn is_together(&self, sequence: u64) -> bool {
        self.files.get(&sequence).is_some_and(|(_, work)| *work == Work::Together)
    }
}

fn without_digits(path: &Path) -> Vec<u8> {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    name.iter().copied().filter(|byte| !byte.is_ascii_digit()).collect()
}

/// The choice of steps, with the locks of the catalog.
#[derive(Debug)]
pub(in crate::archive) struct Steps<'a> {
    files: &'a mut Files,
    claims: &'a mut Claims,
}

impl Steps<'_> {
    pub(super) fn of<'a>(files: &'a mut Files, claims: &'a mut Claims) -> Steps<'a> {
        Steps { files, claims }
    }

    /// Whether a thread may take a step of a file now, as far as its own attempts go.
    fn is_offered(&self, file: &File) -> bool {
        let waits =
            file.entry.failed.as_ref().and_then(|failed| failed.retry).is_some_and(|at| at > self.files.now.instant);
        !waits && !self.claims.has(file)
    }

    /// Whether a closed file was not read yet: it may be an older state, or name another file as the best of a run.
    /// Those that wait for others are neither.
    fn has_unread(&self) -> bool {
        let is_unread = |file: &Arc<File>| self.is_offered(file) || self.claims.has_former(file);
        self.claims.is_any(|work| work == Work::Seal) || self.files.queue.closed().any(is_unread)
    }

    /// Whether a closed file or a new link was not yet read for the best of a run.
    pub(in crate::archive) fn may_learn(&self) -> bool {
        self.has_links() || self.has_unread()
    }

    /// Whether there are names to look at for links.
    pub(in crate::archive) fn has_links(&self) -> bool {
        !self.claims.links.is_empty() || self.claims.links_being_read > 0
    }

    /// The next step, after a new decision if the steps of the last one are used up.
    fn next_step(&mut self) -> Option<Offer> {
        let next = self.next_decided();
        if next.is_some() || self.has_unread() {
            return next;
        }
        let claims = &*self.claims;
        if self.files.renew_used_up(|file| claims.has(file)) { self.next_decided() } else { None }
    }

    /// The next file to release; if there is none, one that may be a copy; else the oldest one to archive. A release waits
    /// until all that was closed is read, an archiving until it is sealed.
    fn next_decided(&mut self) -> Option<Offer> {
        let (may_learn, has_unread) = (self.may_learn(), self.has_unread());
        let claims = &*self.claims;
        // One at a time: each release must find the directory's times as programs left them.
        if !may_learn
            && !claims.is_any(|work| work == Work::Release)
            && let Some(release) = self.files.release(|file| !claims.has(file))
        {
            return Some(release);
        }
        if let Some(copy) = self.files.queue.copies().find(|file| self.is_offered(file)) {
            return Some(Offer { file: Arc::clone(copy), work: Work::Compare, after: None });
        }
        if has_unread { None } else { self.files.archive(|file| !claims.has(file) && !claims.is_before(file)) }
    }

    /// Claims the next file of a checkpoint that can be released.
    pub(in crate::archive) fn claim_release(&mut self, of: &Arc<Checkpoint>) -> Option<Task> {
        if self.may_learn() {
            return None;
        }
        let claims = &*self.claims;
        let is_of = |file: &File| file.checkpoint.as_ref().is_some_and(|own| own == of) && !claims.has(file);
        let offer = self.files.release(is_of)?;
        Some(self.claim(&offer))
    }

    /// Claims the next file to release, to compare or to archive. Also says after which time there may be one.
    pub(in crate::archive) fn claim_step(&mut self, now: Instant, wall_ns: i64) -> (Option<Task>, Option<Duration>) {
        self.files.pass(now, Some(wall_ns));
        if let Some(offer) = self.next_step() {
            return (Some(self.claim(&offer)), None);
        }
        let (retry, settles) = self.files.due();
        let retry = retry.into_iter().map(|at| at.saturating_duration_since(now)).chain(self.retry_of_queue());
        let settles = settles.map(|at| Duration::from_nanos(at.saturating_sub(wall_ns).max(0) as u64));
        (None, retry.chain(settles).min())
    }

    /// Claims the next link to look at, else the next file to seal at once. Also says after which time there may be one.
    pub(in crate::archive) fn claim_closed(&mut self, now: Instant) -> (Option<Closed>, Option<Duration>) {
        if let Some(path) = self.claims.links.pop_first() {
            self.claims.links_being_read += 1;
            return (Some(Closed::Link(path)), None);
        }
        self.files.pass(now, None);
        let next = self.files.queue.closed().find(|file| self.is_offered(file)).cloned();
        match next {
            Some(file) => (Some(Closed::File(self.claim(&Offer { file, work: Work::Seal, after: None }))), None),
            None => (None, self.retry_of_queue()),
        }
    }

    /// Claims files to make durable together, once the first of them has waited for long enough. Also says after which time
    /// there may be some.
    pub(in crate::archive) fn claim_together(&mut self, now: Instant) -> (Option<Vec<Task>>, Option<Duration>) {
        self.files.pass(now, None);
        let first = self.files.queue.together().find(|file| self.is_offered(file));
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
        let offered = self.files.queue.together().filter(|file| self.is_offered(file));
        let files: Vec<Arc<File>> = offered.take(most_together()).cloned().collect();
        let offers = files.into_iter().map(|file| Offer { file, work: Work::Together, after: None });
        let tasks: Vec<Task> = offers.map(|offer| self.claim(&offer)).collect();
        Some(tasks).filter(|tasks| !tasks.is_empty())
    }

    fn claim(&mut self, Offer { file, work, after }: &Offer) -> Task {
        let entry = &file.entry;
        self.claims.files.insert(entry.sequence, (Arc::clone(file), *work));
        Task {
            path: file.path.to_path_buf(),
            version: entry.version,
            sequence: entry.sequence,
            file: entry.turn.file,
            step: Step::of(file, *work, after.as_deref()),
        }
    }

    /// After which time a failed attempt to seal or compare may be repeated.
    fn retry_of_queue(&self) -> Option<Duration> {
        let now = self.files.now.instant;
        self.files.queue.retry(now).map(|at| at - now)
    }

    /// Whether some file was not examined yet. Files that wait for each other are no checkpoints.
    pub(in crate::archive) fn has_unsealed(&self) -> bool {
        self.files.queue.has_unsealed()
    }

    /// Whether nothing but files whose attempts failed is not durable yet.
    pub(in crate::archive) fn waits_for_failed(&self) -> bool {
        self.has_unsealed() && self.files.queue.closed().all(|file| file.entry.failed.is_some())
    }

    /// Whether a file that was closed before the change of this number is not durable yet.
    pub(in crate::archive) fn has_unsealed_since(&self, number: u64) -> bool {
        self.has_unsealed() || self.files.queue.together().any(|file| file.entry.sequence < number)
    }

    /// Whether a file is being archived, or will be once its turn comes. A file that is open, held or given up is not.
    pub(in crate::archive) fn is_to_be_archived(&mut self, path: &Path) -> bool {
        let has_work = self.files.decision(path).is_some_and(|decision| decision.verdict.work().is_some());
        has_work || self.files.get(path).is_some_and(|entry| self.claims.files.contains_key(&entry.sequence))
    }

    /// Number of steps that can be taken now or after a failure has passed, and why one failed.
    pub(in crate::archive) fn queued(&mut self) -> (usize, Option<String>) {
        let queued = self.files.queued().count;
        let is_tried_again = |failed: &&Failed| failed.retry.is_some() && !failed.is_passing;
        let failed = self.files.iter().filter_map(|(path, entry)| {
            entry.failed.as_ref().filter(is_tried_again).map(|failed| (path.to_path_buf(), failed.why.clone()))
        });
        let failed: Vec<_> = failed.collect();
        let mut is_queued =
            |path: &Path| self.files.decision(path).is_some_and(|decision| decision.verdict.is_queued());
        (queued, failed.into_iter().find(|(path, _)| is_queued(path)).map(|(_, why)| why))
    }

    /// The lowest number that a file with a step was opened with.
    pub(super) fn oldest(&mut self) -> Option<u64> {
        self.files.queued().oldest.into_iter().chain(self.claims.opened()).min()
    }

    /// Number of files that wait for the rest of their checkpoint.
    pub(in crate::archive) fn settling(&mut self) -> usize {
        self.files.queued().settling
    }

    /// When the first step in the queue became possible; nanoseconds since 1970.
    pub(in crate::archive) fn queued_since(&mut self) -> Option<i64> {
        self.files.queued().since
    }

    /// The link at a claimed name was read.
    pub(in crate::archive) fn link_read(&mut self) {
        self.claims.links_being_read -= 1;
    }

    /// The step is taken, or failed.
    pub(in crate::archive) fn done(&mut self, task: &Task) {
        self.claims.files.remove(&task.sequence);
    }

    /// Whether a thread takes a step of some file.
    pub(in crate::archive) fn is_busy(&self) -> bool {
        !self.claims.files.is_empty()
    }

    /// Whether a step is under way, or possible now, after which the disk may have more room. Files that are small or logs
    /// count if they were closed before the change of this number: others may be closed without end.
    pub(in crate::archive) fn may_free(&mut self, closed_by: u64) -> bool {
        let is_owed = |file: &&Arc<File>| file.entry.sequence < closed_by && file.entry.failed.is_none();
        self.claims.is_any(|work| work != Work::Together)
            || self.files.queue.closed().any(|file| self.is_offered(file))
            || self.files.queue.together().any(|file| is_owed(&file))
            || self.next_step().is_some()
    }

    /// Whether no step of any file is under way or possible now.
    pub(in crate::archive) fn is_calm(&mut self) -> bool {
        !self.is_busy() && !self.files.queue.closed().any(|file| self.is_offered(file)) && self.next_step().is_none()
    }
}
