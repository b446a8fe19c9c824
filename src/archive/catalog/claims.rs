//! The next step of a thread: it claims a file, and no other thread takes a step of that file before it is done.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::store::{Id, step_pattern};

use super::index::Next;
use super::lineage::rank;
use super::{Catalog, Sealed, State};

/// A step of a file's life that one thread takes. No other thread takes a step of the file before [`Catalog::done`].
#[derive(Clone, Debug)]
pub(in crate::archive) struct Task {
    /// The file's path inside the tree.
    pub(in crate::archive) path: PathBuf,
    /// Work on another version is void.
    pub(in crate::archive) version: u64,
    pub(super) sequence: u64,
    /// See [`super::turn::Turn`].
    pub(super) file: u64,
    pub(in crate::archive) step: Step,
}

/// The steps of a file's life; `archive/life.rs` takes them.
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

/// What a sealer does next.
#[derive(Debug)]
pub(in crate::archive) enum Closed {
    /// A link may have come or gone here.
    Link(PathBuf),
    /// A program closed this file.
    File(Task),
}

impl Catalog {
    /// Claims the next file of a checkpoint that can be released.
    pub(in crate::archive) fn claim_release(&mut self, group: &step_pattern::Group) -> Option<Task> {
        let next = self.entries.index().next_release(group)?;
        self.claim(Next::Release(next))
    }

    /// Claims the next file to release, to compare or to archive. Also says after which time there may be one.
    pub(in crate::archive) fn claim_step(&mut self, now: Instant, wall_ns: i64) -> (Option<Task>, Option<Duration>) {
        let retry = self.retry_in(now);
        self.entries.expire(wall_ns);
        let index = self.entries.index();
        let settles = index.settles().map(|at| Duration::from_nanos(at.saturating_sub(wall_ns).max(0) as u64));
        let next = index.next_step();
        (next.and_then(|next| self.claim(next)), retry.into_iter().chain(settles).min())
    }

    /// After which time a failed attempt may be repeated; those whose time has come may be now.
    pub(super) fn retry_in(&mut self, now: Instant) -> Option<Duration> {
        while let Some(path) = self.entries.index().due(now).cloned() {
            self.entries.edit(&path, |entry| entry.due = true);
        }
        self.entries.index().retry().map(|at| at.saturating_duration_since(now))
    }

    pub(super) fn claim(&mut self, next: Next) -> Option<Task> {
        let (path, step) = match next {
            Next::Seal(path) => (path, Step::Seal),
            Next::Together(path) => {
                let is_open = matches!(self.get(&path)?.state, State::Staged);
                (path, if is_open { Step::Sync } else { Step::Seal })
            }
            Next::Compare(path) => {
                let State::Durable(sealed) = &self.get(&path)?.state else { return None };
                let step = Step::Compare { sealed: Arc::clone(sealed) };
                (path, step)
            }
            Next::Release(path) => {
                let State::Archived(sealed, object) = &self.get(&path)?.state else { return None };
                let step = Step::Release { sealed: Arc::clone(sealed), object: *object };
                (path, step)
            }
            Next::Archive(path, newer) => {
                let sealed = |path: &Path| match &self.get(path)?.state {
                    State::Sealed(sealed) => Some(Arc::clone(sealed)),
                    _ => None,
                };
                let step = Step::Archive { sealed: sealed(&path)?, newer: (newer.clone(), sealed(&newer)?) };
                (path, step)
            }
        };
        let entry = self.get(&path)?;
        let task = Task { version: entry.version, sequence: entry.sequence, file: entry.turn.file, path, step };
        self.entries.claim(task.sequence);
        Some(task)
    }

    /// Whether a file is being archived, or will be once its turn comes. A file that is open, held or given up is not.
    pub(in crate::archive) fn is_to_be_archived(&self, path: &Path) -> bool {
        self.get(path).is_some_and(|entry| self.entries.index().has_work(entry.sequence))
    }

    /// Whether the state before a file waits to be archived.
    pub(in crate::archive) fn is_behind_another(&self, path: &Path, sealed: &Sealed) -> bool {
        let Some(entry) = self.get(path) else { return false };
        let index = self.entries.index();
        let lineage = index.lineage(sealed.lineage);
        let before = lineage.and_then(|lineage| lineage.before(&rank(entry), (sealed.len, sealed.sample)));
        let before = before.and_then(|rank| self.get(&index.path(rank)?));
        before.is_some_and(|before| before.held.is_none() && before.failed.is_none())
    }

    /// The step is taken, or failed.
    pub(in crate::archive) fn done(&mut self, task: &Task) {
        self.entries.done(task.sequence);
    }

    /// Notes that the file being sealed has been read for the best of its run.
    pub(in crate::archive) fn has_spoken(&mut self, task: &Task) {
        self.entries.has_spoken(task.sequence);
    }

    /// Whether a thread takes a step of some file.
    pub(in crate::archive) fn is_busy(&self) -> bool {
        self.entries.index().is_busy()
    }

    /// Whether no step of any file is under way or possible now.
    pub(in crate::archive) fn is_calm(&self) -> bool {
        let index = self.entries.index();
        !index.is_busy() && index.next_seal().is_none() && index.next_step().is_none()
    }
}
