//! A run of the catalog: its files, and the last decision about them.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use crate::archive::decide::{Answer, Checkpoint, File, Now, Others, Work, decide, lets_stand};
use crate::archive::entry::{Entry, State};

/// A decision is renewed once threads took this part of its run's files as many steps. So a step costs 64 files of a pass,
/// and a run of fewer files is decided about after each.
pub(super) const PART: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// In the order of sealing.
    pub(super) files: Vec<Arc<File>>,
    /// How many of them are sealed or archived. Without any there is nothing to archive or to release.
    pub(super) states: usize,
    /// Shared by their files.
    checkpoints: HashSet<Arc<Checkpoint>>,
    /// The last decision about `files`.
    pub(super) answer: Answer,
    /// The files that stay exact by it, because others say so.
    exact: HashSet<Arc<Path>>,
    /// `files` changed since by more than steps.
    pub(super) is_void: bool,
    /// Steps that threads took since. The answer stands for the other files, and they may have more to do by now.
    behind: usize,
}

impl Run {
    /// The place of the file with this sequence.
    pub(super) fn place(&self, sequence: u64) -> usize {
        self.files.partition_point(|file| file.entry.sequence < sequence)
    }

    /// Enters a file that was `old` before.
    pub(super) fn enter(&mut self, file: &Arc<File>, old: Option<&Arc<File>>) {
        let at = self.place(file.entry.sequence);
        let is_step = old.is_some_and(|old| {
            let was_history = self.answer.files.get(at).is_some_and(|decision| decision.is_history);
            !self.is_void && lets_stand(&old.entry, &file.entry, was_history)
        });
        match old {
            Some(old) => {
                debug_assert!(Arc::ptr_eq(&self.files[at], old), "two files have one sequence");
                self.files[at] = Arc::clone(file);
                self.states -= usize::from(old.entry.state.sealed().is_some());
            }
            None => self.files.insert(at, Arc::clone(file)),
        }
        self.states += usize::from(file.entry.state.sealed().is_some());
        if is_step {
            self.behind += 1;
        } else {
            self.is_void = true;
        }
    }

    /// Takes out a file.
    pub(super) fn leave(&mut self, old: &Arc<File>) {
        let left = self.files.remove(self.place(old.entry.sequence));
        debug_assert!(Arc::ptr_eq(&left, old), "two files have one sequence");
        self.states -= usize::from(old.entry.state.sealed().is_some());
        self.is_void = true;
    }

    /// The checkpoint that a file is of by its name and state, shared with its other files.
    pub(super) fn checkpoint(&mut self, file: &File) -> Option<Arc<Checkpoint>> {
        let checkpoint = Checkpoint::of(&file.path, &file.entry.state)?;
        let known = self.checkpoints.get(&checkpoint).cloned();
        Some(known.unwrap_or_else(|| {
            let checkpoint = Arc::new(checkpoint);
            self.checkpoints.insert(Arc::clone(&checkpoint));
            checkpoint
        }))
    }

    /// Decides anew. Returns the files that stay exact because others say so, and did not, or no longer do.
    pub(super) fn decide(&mut self, others: &Others, settle: i64, now: Now) -> Vec<Arc<Path>> {
        (self.is_void, self.behind) = (false, 0);
        self.checkpoints.retain(|checkpoint| Arc::strong_count(checkpoint) > 1);
        self.answer = decide(&self.files, others, settle, now);
        let is_exact = |at: &usize| self.answer.marks.contains_key(at) || self.answer.files[*at].is_unfinished;
        let exact = (0..self.files.len()).filter(is_exact).map(|at| Arc::clone(&self.files[at].path)).collect();
        let former = std::mem::replace(&mut self.exact, exact);
        former.symmetric_difference(&self.exact).cloned().collect()
    }

    /// Whether the decision must be renewed before a thread takes a step by it. `part` is [`PART`], but in tests.
    pub(super) fn is_outdated(&self, part: usize, now: Now) -> bool {
        self.is_void || self.behind * part > self.files.len() || self.answer.is_due(now)
    }

    /// Whether the decision lacks steps that threads took.
    pub(super) fn is_behind(&self, part: usize, now: Now) -> bool {
        self.behind > 0 || self.is_outdated(part, now)
    }

    /// Whether no step is left but those that threads take, and others may be possible since.
    pub(super) fn is_used_up(&self, is_claimed: impl Fn(&File) -> bool, now: Now) -> bool {
        let Answer { archives, releases, .. } = &self.answer;
        let mut left = self.left(releases, now).chain(self.left(archives, now));
        !self.is_void && self.behind > 0 && left.all(|at| is_claimed(&self.files[at]))
    }

    /// Those of these files that still can take the step that was decided.
    pub(super) fn left<'a>(&'a self, places: &'a [usize], now: Now) -> impl Iterator<Item = usize> + 'a {
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
}
