//! The catalog: a map from path to state, for every file. Notes from the file system and the archive's own threads
//! change it. No I/O happens here.
//!
//! [`Files`] holds the entries, [`run::Run`] those of one run with the last decision about them, and [`queue::Queue`] the files
//! that are not examined yet. [`Steps`] chooses what a thread does next. The catalog itself knows what events mean for
//! entries, and which objects they name.

mod files;
mod queue;
mod run;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::store::{Id, Objects, is_trash};
use formats::{is_index, is_named_elsewhere, siblings};

use super::entry::{Entry, Held, Says, Sealed, Stamp, State};
use super::saves::Saves;

use files::Files;
use steps::{Claims, Steps};
pub(super) use steps::{Closed, Step, Task};

/// All files of the tree.
#[derive(Debug)]
pub(super) struct Catalog {
    files: Files,
    /// Files that threads take steps of.
    claims: Claims,
    objects: Arc<Objects>,
    /// Directories from which names went since they were last synced. Each is entered before an object loses the name: no
    /// object goes while a crash of the machine could bring one of its names back.
    unsynced: BTreeSet<PathBuf>,
    /// Files that wait until they have one name only.
    several_names: Vec<PathBuf>,
    /// The last saves of checkpoints.
    pub(super) saves: Saves,
    next: u64,
    /// The number that a file was last opened for writing with.
    opened: u64,
}

impl Catalog {
    /// An empty catalog. `settle`: how long a directory waits for the rest of its checkpoint; zero for no wait.
    pub(super) fn new(settle: Duration, objects: Arc<Objects>) -> Catalog {
        let settle_ns = i64::try_from(settle.as_nanos()).unwrap_or(i64::MAX);
        Catalog {
            files: Files::new(settle_ns),
            claims: Claims::default(),
            objects,
            unsynced: BTreeSet::new(),
            several_names: Vec::new(),
            saves: Saves::default(),
            next: 0,
            opened: 0,
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn get(&self, path: &Path) -> Option<&Entry> {
        self.files.get(path)
    }

    /// All entries.
    pub(super) fn files(&self) -> &Files {
        &self.files
    }

    /// All entries, to ask for decisions.
    pub(super) fn decided(&mut self) -> &mut Files {
        &mut self.files
    }

    /// What threads do next.
    pub(super) fn steps(&mut self) -> Steps<'_> {
        Steps::of(&mut self.files, &mut self.claims)
    }

    /// Three numbers: of the last change; with which a file was last opened for writing; and the lowest with which a
    /// file in the queue, or at work, was opened. All work queued at change N is finished once the third number
    /// exceeds N.
    pub(super) fn progress(&mut self) -> (u64, u64, Option<u64>) {
        (self.next, self.opened, self.steps().oldest())
    }

    /// Adds a file that was found in the tree: whether it has tensors, and which files it names as the best of its run.
    /// Returns its version.
    pub(super) fn found(
        &mut self,
        path: &Path,
        state: State,
        (stamp, has_tensors): (Stamp, Option<bool>),
        names: Option<Vec<String>>,
    ) -> u64 {
        let says = names.map(|names| Arc::new(Says::new(path, names, stamp.modified_ns)));
        let number = self.number();
        self.files.insert(path, Entry { found: true, stamp, has_tensors, says, ..Entry::new(state, number) });
        number
    }

    /// The file's content may change from now on. A program opened it at `at`.
    pub(super) fn opened_for_writing(&mut self, path: &Path, at: Instant) {
        self.opened = self.number();
        let written = Some((at, at));
        self.succeed(path, Entry { written, ..Entry::new(State::Staged, self.opened) }, None);
    }

    /// A released file was brought back with its bytes. `stays`: until it is written or a user asks otherwise.
    pub(super) fn recalled(&mut self, path: &Path, stays: bool) {
        let (number, held) = (self.number(), stays.then_some(Held::Recalled));
        self.succeed(path, Entry { held, ..Entry::new(State::Closed, number) }, None);
    }

    /// A file's content may have changed. If it was released, the object is kept until it is known whether it has. `closed`:
    /// how many bytes a program left, and when.
    fn succeed(&mut self, path: &Path, mut entry: Entry, closed: Option<(u64, Instant)>) {
        let old = self.files.remove(path);
        if let Some(old) = &old {
            entry.turn = old.turn.next(&old.state);
            // It counts until the file is read again.
            entry.says = old.says.clone();
            if matches!(old.state, State::Staged | State::Closed) {
                entry.written = old.written.or(entry.written);
            }
        }
        if let Some((len, at)) = closed {
            entry.turn = entry.turn.closed(path, len, at);
            entry.written = entry.written.map(|(opened, _)| (opened, at));
        }
        let Some(mut old) = old else {
            self.files.insert(path, entry);
            return;
        };
        if matches!((&old.state, &entry.state), (State::Staged, State::Closed)) {
            (entry.opened, entry.cut) = (old.opened, old.cut);
        }
        if let State::Released(id) = old.state {
            entry.keeps = Some(id);
            old.state = State::Staged;
        } else {
            entry.keeps = old.keeps.take();
        }
        unname(&old, &self.objects);
        self.files.insert(path, entry);
    }

    /// The last handle is gone: everything that waited for it may go on. `written`: the content may have changed; how
    /// many bytes a program left, and when.
    pub(super) fn closed(&mut self, path: &Path, written: Option<(u64, Instant)>) {
        // A program that only reads changes nothing most often.
        if self.get(path).is_some_and(|entry| entry.busy) {
            self.files.edit(path, |entry| entry.busy = false);
        }
        let is_there = self.get(path).is_some_and(|entry| !matches!(entry.state, State::Released(_)));
        if written.is_some() && is_there {
            let number = self.number();
            self.succeed(path, Entry::new(State::Closed, number), written);
        }
    }

    /// A program set a file's modification time. Its place in the lineage follows from that, so it is sealed anew.
    pub(super) fn time_set(&mut self, path: &Path) {
        let (number, mut object) = (self.number(), None);
        let counts = |state: &State| match state {
            State::Closed => true,
            State::Resident(_) => state.follows_from_name() && (is_index(path) || is_named_elsewhere(path)),
            _ => state.follows_from_name(),
        };
        self.files.edit(path, |entry| {
            if counts(&entry.state) {
                entry.version = number;
                entry.forget_failure();
                object = entry.take_name(path);
            }
        });
        object.into_iter().for_each(|id| self.objects.unname(id));
    }

    /// A name of a file is gone.
    pub(super) fn removed(&mut self, path: &Path) {
        self.unsynced.insert(directory(path));
        self.files.keep_statement(path);
        if let Some(old) = self.files.remove(path) {
            let object = if let State::Released(id) | State::Archived(_, id) = old.state { Some(id) } else { None };
            self.saves.freed(object.and_then(|id| self.objects.get(id)).map_or(0, |(_, stored)| stored));
            unname(&old, &self.objects);
        }
        self.a_name_went();
    }

    /// Directories from which names went. The caller syncs them, or puts them back.
    pub(super) fn unsynced(&mut self) -> &mut BTreeSet<PathBuf> {
        &mut self.unsynced
    }

    /// A file with several names stays resident until it has one.
    pub(super) fn wait_for_one_name(&mut self, path: &Path, version: u64) {
        self.edit(path, version, |entry| entry.busy = true);
        self.several_names.push(path.to_path_buf());
    }

    /// A file that waits for having one name only may have got there.
    fn a_name_went(&mut self) {
        std::mem::take(&mut self.several_names).iter().for_each(|path| self.closed(path, None));
    }

    /// Changes the entry of `version`; answers whether it is still that.
    pub(super) fn edit(&mut self, path: &Path, version: u64, change: impl FnOnce(&mut Entry)) -> bool {
        let same = self.files.get(path).is_some_and(|entry| entry.version == version);
        if same {
            self.files.edit(path, change);
        }
        same
    }

    /// Changes a file's state if its content is still that of `version`. If not, takes back the name of the object that the
    /// caller has named.
    pub(super) fn advance(&mut self, path: &Path, version: u64, state: State) -> bool {
        let object = if let State::Archived(_, object) = &state { Some(*object) } else { None };
        let mut comes = is_index(path) && state.is_durable();
        let advanced = self.edit(path, version, |entry| {
            comes &= !entry.state.is_durable();
            (entry.state, entry.turn.at) = (state, None);
            entry.forget_failure();
        });
        if advanced && comes {
            self.index_came(path);
        }
        object.filter(|_| !advanced).into_iter().for_each(|object| self.objects.unname(object));
        advanced
    }

    /// An archived file becomes no stub, and is in this state again. Its object loses the name.
    pub(super) fn reseal(&mut self, path: &Path, version: u64, state: impl FnOnce(&mut Entry) -> State) {
        let mut object = None;
        self.edit(path, version, |entry| {
            let state = state(entry);
            if let State::Archived(_, id) = std::mem::replace(&mut entry.state, state) {
                object = Some(id);
            }
            entry.forget_failure();
        });
        object.into_iter().for_each(|id| self.objects.unname(id));
    }

    /// An index is durable: the files whose tensors it tells are examined anew. Steps under way are void.
    fn index_came(&mut self, index: &Path) {
        let needs = |path: &Path| siblings(path).is_some_and(|of| of.index == index);
        let is_or_becomes_a_state =
            |state: &State| matches!(state, State::Closed | State::Durable(_)) || state.sealed().is_some();
        let beside = self.files.below(index.parent().unwrap_or(Path::new("")));
        let beside = beside.filter(|(path, entry)| is_or_becomes_a_state(&entry.state) && needs(path));
        let paths: Vec<PathBuf> = beside.map(|(path, _)| path.to_path_buf()).collect();
        paths.iter().for_each(|path| self.close_anew(path));
    }

    /// Notes what a sealer found in a durable file: whether it has tensors, and which files it names as the best of its
    /// run. Returns the released files that are named only since, and are lossy.
    pub(super) fn examined(
        &mut self,
        path: &Path,
        version: u64,
        (stamp, has_tensors): (Stamp, Option<bool>),
        names: Option<Vec<String>>,
    ) -> Vec<Arc<Path>> {
        let says = names.map(|names| Arc::new(Says::new(path, names, stamp.modified_ns)));
        let targets = says.as_ref().map(|says| says.targets.clone()).unwrap_or_default();
        self.late(&targets, |catalog| {
            let (mut written, mut closed_ns) = (None, 0);
            catalog.edit(path, version, |entry| {
                (entry.stamp, entry.has_tensors, entry.says) = (stamp, has_tensors, says);
                (written, closed_ns) = (entry.written.take(), entry.seen_ns);
            });
            if let Some(times) = written {
                catalog.saves.add((path, stamp.len), has_tensors, times, closed_ns);
            }
        })
    }

    /// A link was read. Its name asks for exact bytes if it has a target. Returns the released files that are named only
    /// since, and are lossy.
    pub(super) fn link_read(&mut self, path: &Path, target: Option<PathBuf>) -> Vec<Arc<Path>> {
        let targets: Vec<PathBuf> = target.iter().cloned().collect();
        self.late(&targets, |catalog| catalog.files.set_link(path, target))
    }

    fn late(&mut self, targets: &[PathBuf], change: impl FnOnce(&mut Catalog)) -> Vec<Arc<Path>> {
        let before = self.files.named_released(targets);
        change(self);
        let mut late = self.files.named_released(targets);
        late.retain(|path, object| !before.contains_key(path) && self.objects.is_lossy(*object));
        late.into_keys().collect()
    }

    /// Notes that some weights of the file are not finite, if it is still the one that was looked at.
    pub(super) fn is_unsound(&mut self, path: &Path, was: &Sealed) {
        if self.get(path).is_some_and(|entry| is_same(entry, was)) {
            self.files.edit(path, |entry| entry.unsound = true);
        }
    }

    /// Another state changed without a note: it is to be sealed again, unless it has had another fate meanwhile.
    pub(super) fn has_changed(&mut self, path: &Path, was: &Sealed) {
        if self.get(path).is_some_and(|entry| is_same(entry, was)) {
            self.close_anew(path);
        }
    }

    /// Notes which object a plain file was decoded from.
    pub(super) fn keep(&mut self, path: &Path, version: u64, object: Option<Id>) {
        let objects = Arc::clone(&self.objects);
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
    pub(super) fn profile_changed(&mut self, path: &Path) {
        let lossy = |_: &Path, entry: &Entry| match &entry.state {
            State::Sealed(_) => true,
            State::Archived(sealed, _) => !sealed.copy,
            State::Staged | State::Closed | State::Durable(_) | State::Released(_) | State::Resident(_) => false,
        };
        let (next, objects) = (&mut self.next, &self.objects);
        self.files.edit_below(path, lossy, |entry| {
            *next += 1;
            entry.version = *next;
            entry.forget_failure();
            // Under an exact profile it loses nothing when it goes.
            entry.held = entry.held.filter(|held| *held != Held::Best);
            if let State::Archived(sealed, object) = &entry.state {
                objects.unname(*object);
                entry.state = State::Sealed(Arc::clone(sealed));
            }
        });
    }

    /// Lets a file be looked at again, as if it had just been closed. Steps under way are void.
    fn close_anew(&mut self, path: &Path) {
        let (number, objects) = (self.number(), Arc::clone(&self.objects));
        self.files.edit(path, |entry| {
            if let State::Archived(_, object) = entry.state {
                objects.unname(object);
            }
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

    /// Forgets all failures, and that handles were open. Nobody waits for others any longer.
    pub(super) fn retry(&mut self) {
        let stuck = |_: &Path, entry: &Entry| entry.busy || entry.failed.is_some();
        self.files.edit_below(Path::new(""), stuck, |entry| {
            entry.forget_failure();
            entry.busy = false;
        });
        self.end_waiting();
    }

    /// Nobody waits for others any longer.
    pub(super) fn end_waiting(&mut self) {
        let now = Instant::now();
        let waits = |_: &Path, entry: &Entry| entry.waits_until().is_some();
        self.files.edit_below(Path::new(""), waits, |entry| entry.turn.at = entry.turn.at.map(|at| at.min(now)));
    }

    /// The bytes that a file had when the task began are durable; `is_log`: whether it is no checkpoint, if known. A
    /// program may have opened or closed the file since.
    pub(super) fn made_durable(&mut self, task: &Task, began: Instant, is_log: Option<bool>) {
        if self.get(&task.path).is_some_and(|entry| entry.turn.file == task.file) {
            self.files.edit(&task.path, |entry| {
                let is_closed = matches!(entry.state, State::Closed);
                entry.turn = entry.turn.made_durable(began, is_log, is_closed);
            });
        }
    }

    /// A file got a second name.
    pub(super) fn linked(&mut self, from: &Path, to: &Path) {
        if let Some(mut entry) = self.files.get(from).cloned() {
            entry.sequence = self.number();
            let released = if let State::Released(id) = entry.state { Some(id) } else { None };
            released.into_iter().chain(entry.keeps).for_each(|id| self.objects.name(id));
            // Of an archived file the other name has the object.
            self.enter_under(to, entry);
        }
    }

    /// A file, or a directory with its content, has a new name. The file that had that name is gone.
    pub(super) fn renamed(&mut self, from: &Path, to: &Path) {
        self.unsynced.extend([from, to].map(directory));
        // It may be a link, contain links, or be a link's target.
        self.link_changed(to);
        let is_removal = is_trash(to) && !is_trash(from);
        if is_removal {
            self.files.keep_statement(from);
        }
        let taken = self.files.take(from);
        for (_, old) in self.files.take(to) {
            unname(&old, &self.objects);
        }
        if !is_removal {
            self.files.others.follow(|path| moved(path, from, to));
            self.saves.moved(|path| moved(path, from, to));
        }
        self.put(taken, from, to);
        self.a_name_went();
    }

    /// Two names were exchanged (files or directories).
    pub(super) fn exchanged(&mut self, a: &Path, b: &Path) {
        [a, b].iter().for_each(|path| self.link_changed(path));
        let (at_a, at_b) = (self.files.take(a), self.files.take(b));
        self.put(at_a, a, b);
        self.put(at_b, b, a);
    }

    fn put(&mut self, entries: Vec<(Arc<Path>, Entry)>, from: &Path, to: &Path) {
        self.claims.look_at(self.files.others.links.keys().map(|link| moved(link, from, to)));
        for (path, entry) in entries {
            if let State::Archived(_, id) = entry.state {
                self.objects.unname(id);
            }
            self.enter_under(&moved(&path, from, to), entry);
        }
    }

    /// Enters a file under another name. Lineage and profile follow from the name. They must be found again, and steps
    /// under way are void. So is an object made under the old name: the new one may ask for an exact file.
    fn enter_under(&mut self, path: &Path, mut entry: Entry) {
        entry.take_name(path);
        entry.version = self.number();
        // It may have left the directory that was pinned, and another name is the best of its run.
        entry.held = entry.held.filter(|held| *held == Held::Recalled);
        entry.busy = false;
        let comes = is_index(path) && entry.state.is_durable();
        self.files.insert(path, entry);
        if comes {
            self.index_came(path);
        }
    }

    /// A link was made, replaced or removed at a path. Looks for it there, and anew at all known ones, because they may
    /// lead through it.
    pub(super) fn link_changed(&mut self, path: &Path) {
        self.claims.look_at(self.files.others.links.keys().map(|link| link.to_path_buf()).chain([path.to_path_buf()]));
    }
}

/// Whether a file was sealed as this one, and nothing has changed since.
fn is_same(entry: &Entry, was: &Sealed) -> bool {
    matches!(&entry.state, State::Sealed(sealed) if std::ptr::eq(Arc::as_ptr(sealed), was))
}

fn directory(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new("")).to_path_buf()
}

/// A path at or below `from`, below `to`.
fn moved(path: &Path, from: &Path, to: &Path) -> PathBuf {
    match path.strip_prefix(from) {
        Ok(rest) if rest.as_os_str().is_empty() => to.to_path_buf(),
        Ok(rest) => to.join(rest),
        Err(_) => path.to_path_buf(),
    }
}

fn unname(entry: &Entry, objects: &Objects) {
    if let State::Released(id) | State::Archived(_, id) = entry.state {
        objects.unname(id);
    }
    entry.keeps.into_iter().for_each(|id| objects.unname(id));
}
