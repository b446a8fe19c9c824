//! What all parts of the archive share: the store, the catalog, and how threads learn that there is work for them.
//!
//! The file system makes notes of events while it holds its own lock, so their order is the order of events. Programs wait
//! meanwhile. So it does not take the catalog's lock, which a thread of the archive may hold that gets no processor for a
//! while: each note waits in the [`Inbox`]. Whoever takes the catalog's lock reads all notes first, in their order, so nobody
//! sees a catalog that lacks an earlier event. If nobody else does, a thread of its own reads them.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::clock::wall_ns;
use crate::encode::{StepError, StepResult};
use crate::recall::Recall;
use crate::store::durable::{CrashPoint, DeviceFile, Io};
use crate::store::{Id, Objects, Store, beneath};
use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, MutexGuard, wait_timeout};

use super::catalog::{Catalog, Closed, Step, Task};
use super::checkpoints::Condition;
use super::entry::{Failed, State};
use super::namespace::{FileId, Namespace, found_at};

/// Pause until changes are looked up anew.
const SOON: Duration = Duration::from_millis(50);
/// Longest pause: room that a user makes is used within this time.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(8);
/// A thread looks for work at least this often, without being told.
const IDLE: Duration = Duration::from_secs(3600);
/// How long a note waits for others at most: waking the archive's threads for each would cost more than most are worth.
const PATIENCE: Duration = Duration::from_millis(20);

/// A change of the catalog.
type Note = Box<dyn FnOnce(&mut Catalog) + Send>;

#[derive(Default)]
struct Inside {
    notes: Vec<Note>,
    /// The thread that reads notes knows of some.
    announced: bool,
    stopping: bool,
}

/// Notes that no thread of the archive has read yet.
#[derive(Default)]
struct Inbox {
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
    fn take(&self) -> Vec<Note> {
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

    /// Ends [`Shared::read_notes`].
    fn stop(&self) {
        self.state().stopping = true;
        self.arrived.notify_all();
    }
}

/// What threads wait for. All with the catalog's lock.
#[derive(Debug, Default)]
pub(super) struct Wake {
    /// A file was closed, or a link was made.
    sealers: Condvar,
    /// Closed files have waited for each other for long enough.
    together: Condvar,
    /// A file may be archived or released.
    encoders: Condvar,
    /// Something may be garbage, or was asked for.
    pub(super) housekeeper: Condvar,
    /// The archive stops.
    end: Condvar,
}

impl Wake {
    /// Something changed. One thread of each kind looks for work, and wakes the next of its kind when it finds some.
    pub(super) fn all_kinds(&self) {
        self.sealers.notify_one();
        self.together.notify_one();
        self.encoders.notify_one();
        self.housekeeper.notify_one();
    }

    /// The archive stops.
    fn everybody(&self) {
        for condition in [&self.sealers, &self.together, &self.encoders, &self.housekeeper, &self.end] {
            condition.notify_all();
        }
    }
}

/// See the module. Paths are relative to the tree.
pub(super) struct Shared {
    pub(super) store: Arc<Store>,
    pub(super) objects: Arc<Objects>,
    pub(super) recall: Arc<Recall>,
    /// Taken by the archive's threads for single look-ups and changes, and by the file system where it asks for
    /// something. No I/O under it, and no other locks but those of `objects`, of `inbox`, and those said to be last.
    catalog: Mutex<Catalog>,
    /// What the file system has told.
    inbox: Inbox,
    pub(super) wake: Wake,
    namespace: OnceLock<Arc<dyn Namespace>>,
    stopping: AtomicBool,
    /// An object may have lost its last name.
    pub(super) garbage: AtomicBool,
    /// Notes from the file system so far.
    pub(super) notes: AtomicU64,
    /// The disk has less room than the reserve.
    pub(super) is_low: AtomicBool,
    /// An archiving found no room since something was removed last.
    lacked_room: AtomicBool,
    /// Files that changed before this time of the server are settled. All are in a store of one daemon; in a shared store the first
    /// look sets it, before it tells the catalog of any file.
    pub(super) quiet_ns: AtomicI64,
    /// In a shared store: objects that may go. Taken for moments, last of all locks.
    ripe: Mutex<HashSet<Id>>,
}

impl Shared {
    /// Of a store whose files are entered.
    pub(super) fn new(store: Arc<Store>, objects: Arc<Objects>, recall: Arc<Recall>, catalog: Catalog) -> Shared {
        Shared {
            store,
            objects,
            recall,
            catalog: Mutex::new(catalog),
            inbox: Inbox::default(),
            wake: Wake::default(),
            namespace: OnceLock::new(),
            stopping: AtomicBool::new(false),
            garbage: AtomicBool::new(true),
            notes: AtomicU64::new(0),
            is_low: AtomicBool::new(false),
            lacked_room: AtomicBool::new(false),
            quiet_ns: AtomicI64::new(i64::MAX),
            ripe: Mutex::default(),
        }
    }

    pub(super) fn io(&self) -> &Io {
        self.store.io()
    }

    /// The condition of a regular file. One that a program could not read is damaged.
    pub(super) fn condition(&self, path: &Path) -> Condition {
        let mut catalog = self.catalog();
        match catalog.get(path).map(|entry| &entry.state) {
            Some(State::Released(id)) if self.recall.failure(*id).is_some() => Condition::Damaged,
            _ => Condition::of(&mut catalog, &self.objects, path),
        }
    }

    /// The part that serves the files, once the archive has started.
    pub(super) fn namespace(&self) -> Option<&Arc<dyn Namespace>> {
        self.namespace.get()
    }

    pub(super) fn serve(&self, namespace: Arc<dyn Namespace>) {
        let _ = self.namespace.set(namespace);
    }

    /// Opens a regular file of the tree to read it.
    pub(super) fn open_file(&self, path: &Path) -> io::Result<DeviceFile> {
        let tree = self.store.tree();
        // Only the owner may leave the access time alone.
        let open = |flags| self.io().open_beneath(&tree, path, flags);
        // Something else, or a link on the way: removed meanwhile, and the note of it is on its way.
        open(libc::O_NOATIME).or_else(|_| open(0)).map_err(|error| match error.raw_os_error() {
            Some(libc::ELOOP | libc::ENOTDIR) => io::ErrorKind::NotFound.into(),
            _ if error.kind() == io::ErrorKind::InvalidInput => io::ErrorKind::NotFound.into(),
            _ => error,
        })
    }

    /// Makes the names in a directory of the tree durable.
    pub(super) fn sync_dir(&self, directory: &Path, at: CrashPoint) -> io::Result<()> {
        let tree = self.store.tree();
        // Not where a link leads to.
        beneath::open_dir(&tree, directory)?;
        self.io().sync_dir(&beneath::reach(&tree, directory)?, at)
    }

    /// In a shared store: objects that nothing has needed for long.
    pub(super) fn ripe(&self) -> MutexGuard<'_, HashSet<Id>> {
        self.ripe.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note(&self, note: impl FnOnce(&mut Catalog) + Send + 'static) {
        // The keeper looks for itself, and nobody else has a catalog.
        if self.store.is_serving() {
            return;
        }
        self.notes.fetch_add(1, Ordering::Relaxed);
        self.inbox.put(Box::new(note));
    }

    /// Reads notes until the archive stops, if nobody else has.
    pub(super) fn read_notes(&self) {
        while self.inbox.wait() {
            self.notify();
        }
    }

    /// Returns once the notes of all changes are there that the tree showed before. A thread that changes names holds the
    /// file system's lock until the note of it is made, and this takes that lock once.
    pub(super) fn await_notes(&self, path: &Path) {
        let _ = self.namespace().map(|namespace| namespace.idle(path, FileId { dev: 0, ino: 0 }));
    }

    /// Forgets a path at which there is nothing any more, if it failed for that before and no note of it is on its way.
    /// Answers whether it did.
    pub(super) fn forget_what_went(&self, path: &Path, version: u64) -> bool {
        let failed = |catalog: &Catalog| {
            let entry = catalog.get(path).filter(|entry| entry.version == version);
            entry.is_some_and(|entry| entry.failed.as_ref().is_some_and(|failed| failed.is_passing))
        };
        let gone = || matches!(found_at(&self.store.tree(), path), Ok(None));
        if self.namespace().is_none() || !failed(&self.catalog()) || !gone() {
            return false;
        }
        // The note would have changed the version.
        self.await_notes(path);
        let mut catalog = self.catalog();
        let forgotten = failed(&catalog);
        if forgotten {
            catalog.removed(path);
        }
        forgotten
    }

    /// Tells the threads to end after the step under way.
    pub(super) fn end(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        // With the lock, so that a thread about to wait does not miss it.
        let _catalog = self.catalog();
        self.wake.everybody();
        self.inbox.stop();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Wakes one thread of each kind.
    pub(super) fn notify(&self) {
        let _catalog = self.catalog();
        self.wake.all_kinds();
    }

    /// What a former process did and had not synced when it was killed looks like all else, and would be lost if the machine
    /// failed: a name in `objects/`, that a name went. It becomes durable before anything is done that counts on it.
    pub(super) fn begin(&self) {
        while let Err(error) = self.io().device().sync_all(self.store.root(), CrashPoint::Begun) {
            log::warn!("the store cannot be made durable: {error}; next try in {LONGEST_PAUSE:.0?}");
            if !self.rest(LONGEST_PAUSE) {
                return;
            }
        }
    }

    /// Waits so long, or until the archive stops: then the answer is false.
    pub(super) fn rest(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        // Under the lock with which the thread is woken, or the wish to stop would be missed.
        let mut catalog = self.catalog();
        while !self.is_stopping() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            catalog = self.wait(&self.wake.end, catalog, left);
        }
        false
    }

    /// The next link or file for a sealer; `None` once the archive stops.
    pub(super) fn next_to_seal(&self) -> Option<Closed> {
        self.next(&self.wake.sealers, |catalog| catalog.steps().claim_closed(Instant::now()))
    }

    /// The next files to make durable together. Once the archive stops, those that are left, but none that failed.
    pub(super) fn next_together(&self) -> Option<Vec<Task>> {
        let due = self.next(&self.wake.together, |catalog| catalog.steps().claim_together(Instant::now()));
        due.or_else(|| self.catalog().steps().claim_waiting())
    }

    /// The next file for an encoder; `None` once the archive stops.
    pub(super) fn next_to_archive(&self) -> Option<Task> {
        self.next(&self.wake.encoders, |catalog| catalog.steps().claim_step(Instant::now(), wall_ns()))
    }

    /// Waits until `claim` finds something, which also says after which time it may.
    fn next<T>(&self, condition: &Condvar, claim: impl Fn(&mut Catalog) -> (Option<T>, Option<Duration>)) -> Option<T> {
        let mut catalog = self.catalog();
        while !self.is_stopping() {
            let (found, retry) = claim(&mut catalog);
            if found.is_some() {
                // The next one looks for more, and minds the time meanwhile.
                condition.notify_one();
                return found;
            }
            catalog = self.wait(condition, catalog, retry.unwrap_or(IDLE));
        }
        None
    }

    /// Takes the step that was claimed, says how it went, and wakes whoever may go on.
    pub(super) fn take(&self, task: &Task, pause: &mut Pause, step: impl FnOnce() -> StepResult<()>) {
        self.conclude(task, pause, step);
        self.notify();
    }

    /// Something was removed: files that could not be archived for lack of room are tried again.
    pub(super) fn room_came(&self) {
        if self.lacked_room.swap(false, Ordering::Relaxed) {
            self.catalog().retry();
        }
    }

    /// Takes the step that was claimed, and says how it went. What panics is a defect: its file stays as it was written.
    pub(super) fn conclude(&self, task: &Task, pause: &mut Pause, step: impl FnOnce() -> StepResult<()>) {
        match catch_unwind(AssertUnwindSafe(step)) {
            Ok(Ok(())) => {
                pause.end();
                let frees = matches!(task.step, Step::Release { .. });
                if frees {
                    self.room_came();
                }
            }
            Ok(Err(error)) => self.failed(task, &error, pause),
            Err(_) => {
                let why =
                    format!("{}: a defect of stepfs, see the log; it stays as it was written", task.path.display());
                log::error!("{why}");
                let failed = Failed { why, retry: None, is_passing: false };
                self.catalog().edit(&task.path, task.version, |entry| entry.failed = Some(failed));
            }
        }
        self.catalog().steps().done(task);
    }

    /// The catalog, with all that has happened.
    pub(super) fn catalog(&self) -> MutexGuard<'_, Catalog> {
        self.with_notes(self.catalog.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits for a condition or this time, without the lock.
    pub(super) fn wait<'a>(
        &'a self,
        condition: &Condvar,
        catalog: MutexGuard<'a, Catalog>,
        time: Duration,
    ) -> MutexGuard<'a, Catalog> {
        self.with_notes(wait_timeout(condition, &self.catalog, catalog, time))
    }

    fn with_notes<'a>(&'a self, mut catalog: MutexGuard<'a, Catalog>) -> MutexGuard<'a, Catalog> {
        self.inbox.take().into_iter().for_each(|note| note(&mut catalog));
        if catalog.decided().take_freed() | self.objects.take_unnamed() {
            self.garbage.store(true, Ordering::Relaxed);
            // The queue counts it from now on. The thread that let go of an object wakes nobody.
            self.wake.housekeeper.notify_one();
        }
        catalog
    }

    fn failed(&self, task: &Task, error: &StepError, pause: &mut Pause) {
        let path = task.path.display();
        let is_of_file =
            |kinds: &[io::ErrorKind]| matches!(error, StepError::Device(error) if kinds.contains(&error.kind()));
        let retry = match error {
            StepError::Superseded | StepError::Cancelled => {
                log::debug!("{path}: {error}; what to do with it is looked up again");
                Some(SOON)
            }
            // The file, or the state after it, was cut short while it was read.
            _ if is_of_file(&[io::ErrorKind::UnexpectedEof]) => Some(SOON),
            // The file went, and perhaps a directory on the way to it. Or the state after this one went.
            _ if is_of_file(&[io::ErrorKind::NotFound, io::ErrorKind::NotADirectory]) => {
                if self.forget_what_went(&task.path, task.version) {
                    return;
                }
                Some(SOON)
            }
            StepError::NoRoom(error) => {
                self.lacked_room.store(true, Ordering::Relaxed);
                let wait = pause.longer();
                log::warn!("{path}: no room to archive it ({error}); it stays as it is, next try in {wait:.0?}");
                Some(wait)
            }
            _ if error.is_damage() || is_of_file(&[io::ErrorKind::InvalidData]) => {
                log::error!("{path}: {error}; it stays as it was written");
                None
            }
            // Too many open files, no memory, a device that is away for a while.
            StepError::Object(_) | StepError::Device(_) => {
                log::warn!("{path}: {error}; it stays as it is, next try in {LONGEST_PAUSE:.0?}");
                Some(LONGEST_PAUSE)
            }
        };
        let why = format!("{path}: {error}");
        let failed = Failed { why, retry: retry.map(|r| Instant::now() + r), is_passing: retry == Some(SOON) };
        self.catalog().edit(&task.path, task.version, |entry| entry.failed = Some(failed));
    }
}

/// How long a thread waits after the device had no room: twice as long after each time, until something succeeds.
#[derive(Debug)]
pub(super) struct Pause(Duration);

impl Pause {
    const FIRST: Duration = Duration::from_secs(1);

    pub(super) fn none() -> Pause {
        Pause(Pause::FIRST)
    }

    fn end(&mut self) {
        self.0 = Pause::FIRST;
    }

    fn longer(&mut self) -> Duration {
        let wait = self.0;
        self.0 = (wait * 2).min(LONGEST_PAUSE);
        wait
    }
}
