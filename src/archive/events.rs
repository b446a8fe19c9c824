//! Notes from the file system. It makes them while it holds its own lock, so their order is the order of events. Each
//! waits in the [`Inbox`] until somebody looks at the catalog.
//!
//! Programs wait while the file system makes a note. So it does not take the catalog's lock, which a thread of the
//! archive may hold that gets no processor for a while. Whoever takes that lock reads all notes first, in their order:
//! nobody sees a catalog that lacks an earlier event. If nobody else does, a thread of its own reads them.

use std::fmt;
use std::path::Path;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::store::Objects;
use crate::sync::{Condvar, Mutex, MutexGuard, wait_timeout};

use super::catalog::Catalog;
use super::{Archive, FileId, found_at};

/// How long a note waits for others at most: waking the archive's threads for each would cost more than most are worth.
const PATIENCE: Duration = Duration::from_millis(20);

/// A change of the catalog.
type Note = Box<dyn FnOnce(&Archive, &mut Catalog) + Send>;

#[derive(Default)]
struct Inside {
    notes: Vec<Note>,
    /// The thread that reads notes knows of some.
    announced: bool,
    stopping: bool,
}

/// Notes that no thread of the archive has read yet.
#[derive(Default)]
pub(super) struct Inbox {
    /// Taken for moments, also under the file system's lock or the catalog's. No other lock is taken under it.
    state: Mutex<Inside>,
    arrived: Condvar,
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("notes", &self.state().notes.len()).finish()
    }
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, Inside> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a note.
    fn put(&self, note: Note) {
        let mut state = self.state();
        state.notes.push(note);
        if !std::mem::replace(&mut state.announced, true) {
            self.arrived.notify_one();
        }
    }

    /// All notes, the first first. The caller holds the catalog's lock until it has carried them out.
    pub(super) fn take(&self) -> Vec<Note> {
        std::mem::take(&mut self.state().notes)
    }

    /// Waits for notes, and then a little for more. False once the archive stops.
    fn wait(&self) -> bool {
        let mut state = self.state();
        while !state.announced && !state.stopping {
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if !state.stopping {
            state = wait_timeout(&self.arrived, &self.state, state, PATIENCE);
        }
        state.announced = false;
        !state.stopping
    }

    /// Ends [`Archive::read_notes`].
    pub(super) fn stop(&self) {
        self.state().stopping = true;
        self.arrived.notify_all();
    }
}

impl Archive {
    /// A handle that can write was opened (or the file was created or truncated): queued steps for the file are void.
    pub fn opened_for_writing(&self, path: &Path) {
        self.tell(path, Catalog::opened_for_writing);
    }

    /// A released file is resident again, with its bytes, because a user wants that.
    pub fn recalled(&self, path: &Path) {
        self.tell(path, Catalog::recalled);
    }

    /// The pin of a file or directory is gone.
    pub fn unpinned(&self, path: &Path) {
        self.tell(path, |catalog, path, _| catalog.unpinned(path));
    }

    /// Whether a file's bytes are known to be durable, as they are or as a stub.
    pub fn is_durable(&self, path: &Path) -> bool {
        self.catalog().get(path).is_some_and(|entry| entry.state.is_durable())
    }

    /// The profile of a file or a directory was set or removed: steps under way are void.
    pub fn profile_changed(&self, path: &Path) {
        self.tell(path, Catalog::profile_changed);
    }

    /// A user wants everything at and below a path to be released now that may be, without waiting for the rest of a
    /// checkpoint.
    pub(super) fn asked_to_release(&self, path: &Path) {
        self.tell(path, |catalog, path, _| catalog.asked_to_release(path));
    }

    /// The last handle of a file that was written is gone. It waits for no others.
    pub fn sealed(&self, path: &Path) {
        self.written(path, u64::MAX);
    }

    /// The last handle of a file that was written is gone, and the file has so many bytes.
    pub fn written(&self, path: &Path, len: u64) {
        let written = Some((len, Instant::now()));
        self.tell(path, move |catalog, path, objects| catalog.closed(path, written, objects));
    }

    /// The last handle of a file that was only read is gone: a release that found it busy may go on.
    pub fn closed(&self, path: &Path) {
        self.tell(path, |catalog, path, objects| catalog.closed(path, None, objects));
    }

    /// A program set the modification time of a file, as `cp -p` and `rsync` do after the last close.
    pub fn time_set(&self, path: &Path) {
        self.tell(path, Catalog::time_set);
    }

    /// A file or directory has a new name. The file that had that name is gone.
    pub fn renamed(&self, from: &Path, to: &Path) {
        let (from, to) = (from.to_path_buf(), to.to_path_buf());
        self.note(move |archive, catalog| {
            [&from, &to].iter().for_each(|path| archive.not_durable_in(path));
            catalog.renamed(&from, &to, &archive.objects);
            [&from, &to].iter().for_each(|path| catalog.touch(path));
            archive.a_name_went(catalog);
        });
    }

    /// Two names were exchanged (files or directories).
    pub fn exchanged(&self, a: &Path, b: &Path) {
        let (a, b) = (a.to_path_buf(), b.to_path_buf());
        self.note(move |archive, catalog| {
            catalog.exchanged(&a, &b, &archive.objects);
            [&a, &b].iter().for_each(|path| catalog.touch(path));
        });
    }

    /// A name of a file is gone (rmdir needs no note).
    pub fn removed(&self, path: &Path) {
        let path = path.to_path_buf();
        self.note(move |archive, catalog| {
            archive.not_durable_in(&path);
            catalog.removed(&path, &archive.objects);
            archive.a_name_went(catalog);
        });
    }

    /// Forgets a path at which there is nothing any more, if it failed for that before and no note of it is on its way.
    /// Answers whether it did.
    pub(super) fn forget_what_went(&self, path: &Path, version: u64) -> bool {
        let failed = |catalog: &Catalog| {
            let entry = catalog.get(path).filter(|entry| entry.version == version);
            entry.is_some_and(|entry| entry.failed.as_ref().is_some_and(|failed| failed.is_passing))
        };
        let gone = || matches!(found_at(&self.store.tree(), path), Ok(None));
        let Some(namespace) = self.namespace().filter(|_| failed(&self.catalog()) && gone()) else {
            return false;
        };
        // A thread that takes a name away holds the file system's lock until the note of it is made. This call takes
        // that lock once: every such note is there now, and has changed the version.
        namespace.idle(path, FileId { dev: 0, ino: 0 });
        let mut catalog = self.catalog();
        let forgotten = failed(&catalog);
        if forgotten {
            self.not_durable_in(path);
            catalog.removed(path, &self.objects);
        }
        forgotten
    }

    /// A link was made or removed.
    pub fn link_changed(&self, path: &Path) {
        self.tell(path, |catalog, path, _| {
            catalog.link_changed(path);
            catalog.touch(path);
        });
    }

    /// A file got a second name.
    pub fn linked(&self, from: &Path, to: &Path) {
        let (from, to) = (from.to_path_buf(), to.to_path_buf());
        self.note(move |archive, catalog| catalog.linked(&from, &to, &archive.objects));
    }

    /// A user asks for everything to be done that can be: forgets what failed, and lets no file wait for others.
    pub(super) fn retry(&self) {
        self.note(|_, catalog| {
            catalog.retry();
            catalog.end_waiting();
        });
    }

    /// A change of a name is not durable before its directory is synced. Called before the object loses the name: no
    /// object goes while a crash of the machine could bring one of its names back.
    fn not_durable_in(&self, path: &Path) {
        let directory = path.parent().unwrap_or(Path::new("")).to_path_buf();
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner).insert(directory);
    }

    /// A file that waits for having one name only may have got there.
    fn a_name_went(&self, catalog: &mut Catalog) {
        let waiting = std::mem::take(&mut *self.several_names.lock().unwrap_or_else(PoisonError::into_inner));
        waiting.iter().for_each(|path| catalog.closed(path, None, &self.objects));
    }

    /// Notes an event of one path.
    fn tell(&self, path: &Path, event: impl FnOnce(&mut Catalog, &Path, &Objects) + Send + 'static) {
        let path = path.to_path_buf();
        self.note(move |archive, catalog| event(catalog, &path, &archive.objects));
    }

    pub(super) fn note(&self, note: impl FnOnce(&Archive, &mut Catalog) + Send + 'static) {
        self.notes.fetch_add(1, Ordering::Relaxed);
        self.inbox.put(Box::new(note));
    }

    /// Reads notes until the archive stops, if nobody else has.
    pub(super) fn read_notes(&self) {
        while self.inbox.wait() {
            self.notify();
        }
    }
}
