//! The catalog: a map from path to state, for every file. Notes from the file system and the archive's own threads
//! change it. No I/O happens here.

mod claims;
mod entry;
mod files;
mod named;
mod naming;
mod queue;
mod renaming;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::store::{Id, Objects};

pub(super) use crate::store::modified_ns;

use super::decide::{Checkpoint, Decision};

use claims::Claims;
pub(super) use claims::{Closed, Step, Task};
pub(super) use entry::{Entry, Failed, Held, Part, Sealed, State};
use files::Files;
use named::Named;
pub(super) use named::{Says, is_torch, is_trainer_state, may_speak};

/// All files of the tree.
#[derive(Debug)]
pub(super) struct Catalog {
    files: Files,
    /// Files that threads take steps of.
    claims: Claims,
    /// The files that checkpoints and links name as the best of a run.
    named: Named,
    /// Names at which a link may have come or gone: to be looked at before anything is released.
    links: BTreeSet<PathBuf>,
    links_being_read: usize,
    next: u64,
    /// The number that a file was last opened for writing with.
    opened: u64,
}

impl Catalog {
    /// An empty catalog. `settle`: how long a directory waits for the rest of its checkpoint; zero for no wait.
    pub(super) fn new(settle: Duration) -> Catalog {
        let settle_ns = i64::try_from(settle.as_nanos()).unwrap_or(i64::MAX);
        Catalog {
            files: Files::new(settle_ns),
            claims: Claims::default(),
            named: Named::default(),
            links: BTreeSet::new(),
            links_being_read: 0,
            next: 0,
            opened: 0,
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Adds a file that was found in the tree.
    pub(super) fn found(&mut self, path: PathBuf, state: State) {
        let number = self.number();
        self.files.insert(&path, Entry { found: true, ..Entry::new(state, number) });
    }

    pub(super) fn get(&self, path: &Path) -> Option<&Entry> {
        self.files.get(path)
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = (&Path, &Entry)> {
        self.files.iter()
    }

    /// The entries at and below a path.
    pub(super) fn below<'a>(&'a self, path: &'a Path) -> impl Iterator<Item = (&'a Path, &'a Entry)> {
        self.files.below(path)
    }

    /// The file's content may change from now on.
    pub(super) fn opened_for_writing(&mut self, path: &Path, objects: &Objects) {
        self.opened = self.number();
        self.succeed(path, Entry::new(State::Staged, self.opened), None, objects);
        self.may_unfinish(path, objects);
    }

    /// A released file was brought back with its bytes, and stays so until it is written or a user asks otherwise.
    pub(super) fn recalled(&mut self, path: &Path, objects: &Objects) {
        let number = self.number();
        self.succeed(path, Entry { held: Some(Held::Recalled), ..Entry::new(State::Closed, number) }, None, objects);
    }

    /// A file's content may have changed. If it was released, the object is kept until it is known whether it has. `closed`:
    /// how many bytes a program left, and when.
    fn succeed(&mut self, path: &Path, mut entry: Entry, closed: Option<(u64, Instant)>, objects: &Objects) {
        let old = self.files.remove(path);
        if let Some(old) = &old {
            entry.turn = old.turn.next(&old.state);
        }
        if let Some((len, at)) = closed {
            entry.turn = entry.turn.closed(path, len, at);
        }
        let Some(mut old) = old else {
            self.files.insert(path, entry);
            return;
        };
        if matches!((&old.state, &entry.state), (State::Staged, State::Closed)) {
            entry.opened = old.opened;
        }
        if let State::Released(id) = old.state {
            entry.keeps = Some(id);
            old.state = State::Staged;
        } else {
            entry.keeps = old.keeps.take();
        }
        unname(&old, objects);
        self.files.insert(path, entry);
    }

    /// The last handle is gone: everything that waited for it may go on. `written`: the content may have changed; how
    /// many bytes a program left, and when.
    pub(super) fn closed(&mut self, path: &Path, written: Option<(u64, Instant)>, objects: &Objects) {
        let mut changed = false;
        self.files.edit(path, |entry| {
            entry.busy = false;
            changed = written.is_some() && !matches!(entry.state, State::Released(_));
        });
        if changed {
            let number = self.number();
            self.succeed(path, Entry::new(State::Closed, number), written, objects);
        }
    }

    /// A program set a file's modification time. Its place in the lineage follows from that, so it is sealed anew.
    pub(super) fn time_set(&mut self, path: &Path, objects: &Objects) {
        let number = self.number();
        let mut archived = None;
        self.files.edit(path, |entry| {
            if matches!(entry.state, State::Closed | State::Durable(_) | State::Sealed(_) | State::Archived(..)) {
                archived = if let State::Archived(_, id) = entry.state { Some(id) } else { None };
                (entry.state, entry.version) = (State::Closed, number);
                entry.forget_failure();
            }
        });
        archived.into_iter().for_each(|id| objects.unname(id));
        self.may_finish(path);
    }

    pub(super) fn removed(&mut self, path: &Path, objects: &Objects) {
        self.naming(|named| {
            named.removed(path);
            None
        });
        if let Some(old) = self.files.remove(path) {
            unname(&old, objects);
        }
        self.may_unfinish(path, objects);
    }

    /// Changes the entry of `version`; answers whether it is still that.
    fn edit(&mut self, path: &Path, version: u64, change: impl FnOnce(&mut Entry)) -> bool {
        let same = self.files.get(path).is_some_and(|entry| entry.version == version);
        if same {
            self.files.edit(path, change);
        }
        same
    }

    /// Changes a file's state if its content is still that of `version`.
    pub(super) fn advance(&mut self, path: &Path, version: u64, state: State) -> bool {
        self.edit(path, version, |entry| {
            (entry.state, entry.turn.at) = (state, None);
            entry.forget_failure();
        })
    }

    /// Notes that the file has, or may have, an open handle.
    pub(super) fn set_busy(&mut self, path: &Path, version: u64, busy: bool) {
        self.edit(path, version, |entry| entry.busy = busy);
    }

    /// Notes that the file stays as it is, or no longer.
    pub(super) fn hold(&mut self, path: &Path, version: u64, held: Option<Held>) {
        self.edit(path, version, |entry| entry.held = held);
    }

    /// Notes that some weights of the file are not finite, if it is still the one that was looked at.
    pub(super) fn is_unsound(&mut self, path: &Path, was: &Arc<Sealed>) {
        let same = |entry: &Entry| matches!(&entry.state, State::Sealed(sealed) if Arc::ptr_eq(sealed, was));
        if self.get(path).is_some_and(same) {
            self.files.edit(path, |entry| entry.unsound = true);
        }
    }

    /// Notes whether stepfs found tensors in the file.
    pub(super) fn examined(&mut self, path: &Path, version: u64, has_tensors: Option<bool>) {
        // Nothing to enter into the index again for most small files.
        if self.get(path).is_some_and(|entry| entry.has_tensors != has_tensors) {
            self.edit(path, version, |entry| entry.has_tensors = has_tensors);
        }
    }

    /// Notes which object a plain file was decoded from.
    pub(super) fn keep(&mut self, path: &Path, version: u64, object: Option<Id>, objects: &Objects) {
        self.edit(path, version, |entry| {
            // The object may be gone by now.
            let object = object.filter(|id| objects.try_name(*id));
            std::mem::replace(&mut entry.keeps, object).into_iter().for_each(|id| objects.unname(id));
        });
    }

    /// The pin of a file or directory is gone.
    pub(super) fn unpinned(&mut self, path: &Path) {
        let is_pinned = |_: &Path, entry: &Entry| entry.held == Some(Held::Pinned);
        self.files.edit_below(path, is_pinned, |entry| entry.held = None);
    }

    /// The profile at and below a path has changed: objects made for the old one are void, as are steps under
    /// way. Released files stay. So do copies of released objects, because a copy loses nothing under any
    /// profile.
    pub(super) fn profile_changed(&mut self, path: &Path, objects: &Objects) {
        let lossy = |_: &Path, entry: &Entry| match &entry.state {
            State::Sealed(_) => true,
            State::Archived(sealed, _) => !sealed.copy,
            State::Staged | State::Closed | State::Durable(_) | State::Released(_) | State::Resident(_) => false,
        };
        let next = &mut self.next;
        self.files.edit_below(path, lossy, |entry| {
            *next += 1;
            entry.version = *next;
            entry.forget_failure();
            // Under an exact profile it loses nothing when it goes.
            entry.held = entry.held.filter(|held| !matches!(held, Held::Best | Held::Result));
            if let State::Archived(sealed, object) = &entry.state {
                objects.unname(*object);
                entry.state = State::Sealed(Arc::clone(sealed));
            }
        });
    }

    /// The files in a directory, not below it, of which this holds.
    pub(super) fn beside(&self, directory: &Path, holds: impl Fn(&Entry) -> bool) -> Vec<PathBuf> {
        let found =
            self.files.below(directory).filter(|(path, entry)| path.parent() == Some(directory) && holds(entry));
        found.map(|(path, _)| path.to_path_buf()).collect()
    }

    /// Lets a file be looked at again, as if it had just been closed. Steps under way are void.
    pub(super) fn close_anew(&mut self, path: &Path) {
        let number = self.number();
        self.files.edit(path, |entry| {
            (entry.state, entry.version, entry.unsound) = (State::Closed, number, false);
            entry.forget_failure();
        });
    }

    /// A user wants everything at and below a path to be released that may be, now.
    pub(super) fn asked_to_release(&mut self, path: &Path) {
        let stuck =
            |_: &Path, entry: &Entry| entry.busy || entry.failed.is_some() || entry.held == Some(Held::Recalled);
        let next = &mut self.next;
        self.files.edit_below(path, stuck, |entry| {
            entry.forget_failure();
            entry.busy = false;
            if entry.held == Some(Held::Recalled) {
                entry.held = None;
                // It is looked at anew: it may be a copy of an object although it is the newest.
                if matches!(entry.state, State::Sealed(_)) {
                    *next += 1;
                    (entry.state, entry.version) = (State::Closed, *next);
                }
            }
        });
        self.files.hasten(path);
    }

    /// The decision about a file: the step that it may take, and why not another.
    pub(super) fn decision(&mut self, path: &Path) -> Option<Decision> {
        self.files.decision(path)
    }

    /// The checkpoint of a file that waits for others.
    pub(super) fn checkpoint(&self, path: &Path) -> Option<Arc<Checkpoint>> {
        self.files.checkpoint(path)
    }

    /// The file of the same checkpoint that has no newer state yet, if the file waits for one.
    pub(super) fn held_up_by(&mut self, path: &Path) -> Option<Arc<Path>> {
        self.files.held_up_by(path)
    }

    /// Whether a newer state of the same lineage is sealed.
    pub(super) fn has_newer(&mut self, path: &Path) -> bool {
        self.decision(path).is_some_and(|decision| decision.has_newer)
    }

    /// Notes that an attempt failed.
    pub(super) fn set_failed(&mut self, path: &Path, version: u64, failed: Failed) {
        self.edit(path, version, |entry| entry.failed = Some(failed));
    }

    /// Forgets all failures, and that handles were open.
    pub(super) fn retry(&mut self) {
        let stuck = |_: &Path, entry: &Entry| entry.busy || entry.failed.is_some();
        self.files.edit_below(Path::new(""), stuck, |entry| {
            entry.forget_failure();
            entry.busy = false;
        });
    }

    /// Another state changed without a note: it is to be sealed again, unless it has had another fate meanwhile.
    pub(super) fn has_changed(&mut self, path: &Path, was: &Sealed) {
        let same =
            |entry: &Entry| matches!(&entry.state, State::Sealed(sealed) if std::ptr::eq(Arc::as_ptr(sealed), was));
        if self.get(path).is_some_and(same) {
            self.files.edit(path, |entry| {
                (entry.state, entry.unsound) = (State::Closed, false);
                entry.forget_failure();
            });
        }
    }

    /// Number of things that can be done now or after a failure has passed, and why one failed.
    pub(super) fn queued(&mut self) -> (usize, Option<String>) {
        let (queued, ..) = self.files.queued();
        let is_tried_again = |failed: &&Failed| failed.retry.is_some() && !failed.is_passing;
        let failed = self.files.iter().filter_map(|(path, entry)| {
            entry.failed.as_ref().filter(is_tried_again).map(|failed| (path.to_path_buf(), failed.why.clone()))
        });
        let failed: Vec<_> = failed.collect();
        let mut is_queued = |path: &Path| self.decision(path).is_some_and(|decision| decision.verdict.is_queued());
        (queued, failed.into_iter().find(|(path, _)| is_queued(path)).map(|(_, why)| why))
    }

    /// Three numbers: of the last change; with which a file was last opened for writing; and the lowest with which a
    /// file in the queue, or at work, was opened. All work queued at change N is finished once the third number
    /// exceeds N.
    pub(super) fn progress(&mut self) -> (u64, u64, Option<u64>) {
        let (.., oldest) = self.files.queued();
        (self.next, self.opened, oldest.into_iter().chain(self.claims.opened()).min())
    }

    /// Lets the mirror look at what is at and below a path.
    pub(super) fn touch(&mut self, path: &Path) {
        self.files.touch(path);
    }

    /// The names that changed since the last call, or all.
    pub(super) fn take_touched(&mut self, all: bool) -> BTreeSet<Arc<Path>> {
        self.files.take_touched(all)
    }

    /// Grows with every change of an entry.
    pub(super) fn changes(&self) -> u64 {
        self.files.changes()
    }

    /// Number of files that wait for the rest of their checkpoint.
    pub(super) fn settling(&mut self) -> usize {
        self.files.queued().1
    }

    /// Whether objects may have become garbage since this was asked last, though none lost a name.
    pub(super) fn take_freed(&mut self) -> bool {
        self.files.take_freed()
    }

    /// Lineages with files that are not released.
    pub(super) fn lineages(&self) -> BTreeSet<u64> {
        self.files.lineages()
    }
}

fn unname(entry: &Entry, objects: &Objects) {
    if let State::Released(id) | State::Archived(_, id) = entry.state {
        objects.unname(id);
    }
    entry.keeps.into_iter().for_each(|id| objects.unname(id));
}
