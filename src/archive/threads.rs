//! The archive's threads, and how each learns that there is work for it.
//!
//! *Sealers* make closed files durable, at once, whatever else goes on. *Encoders* archive and release files, several side by
//! side. The *housekeeper* removes what nothing needs. None reaches into another's data: what they share is the catalog, in
//! which a thread claims a file before it takes a step of it:
//!
//! ```text
//! staged ─last close─▶ closed ─seal─▶ sealed ─archive─▶ archived ─release─▶ released
//!   ▲                    └──compare: a copy──────────▶ archived               │
//!   └──────────────────────── opened for writing: recall ─────────────────────┘
//! ```
//!
//! The catalog (`catalog.rs`) offers a step when its condition holds, and one thread claims it (`threads.rs`). A step
//! that fails leaves the file as it was (`error.rs`). A crash between two steps loses nothing: the next mount finds the
//! file as it is.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::clock::wall_ns;
use crate::encode::{StepError, StepResult};
use crate::store::durable::CrashPoint;
use crate::sync::{Condvar, MutexGuard, thread, wait_timeout};

use super::catalog::{Catalog, Closed, Step, Task};
use super::entry::Failed;
use super::housekeeper::Housekeeper;
use super::{Archive, LONGEST_PAUSE, SOON};

/// Threads that wait for fsync at once: a device takes several at hardly more time than one, and the ranks of a job
/// close their files together. A test's scheduler tries orders of few threads better than of many.
const SEALERS: usize = if cfg!(feature = "shuttle") { 1 } else { 4 };
/// Files that are archived side by side, at most. The tiles in flight (`encode/workers.rs`) bound memory, not this
/// number. Each file adds its index and one tile.
const ENCODERS: usize = if cfg!(feature = "shuttle") { 1 } else { 8 };
/// A thread looks for work at least this often, without being told.
const IDLE: Duration = Duration::from_secs(3600);

/// What the archive's threads wait for. All with the catalog's lock.
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
        for condition in [&self.sealers, &self.together, &self.encoders, &self.housekeeper] {
            condition.notify_all();
        }
    }
}

impl Archive {
    /// Starts the threads, once what a former process left is durable.
    pub(super) fn run(self: &Arc<Self>) {
        self.begin();
        let start = |name: &str, work: fn(&Archive)| {
            let me = Arc::clone(self);
            let started = thread::Builder::new().name(name.into()).spawn(move || work(&me));
            started.inspect_err(|error| log::error!("no thread {name}: {error}; files stay as they are written")).ok()
        };
        let sealers = (0..SEALERS).filter_map(|_| start("seal", Archive::seal_files));
        let encoders = (0..ENCODERS).filter_map(|_| start("encode", Archive::archive_files));
        let together = start("seal-together", Archive::seal_together);
        let notes = start("notes", Archive::read_notes);
        let threads: Vec<_> = sealers.chain(encoders).chain(together).chain(notes).collect();
        Housekeeper::new(self).run();
        for thread in threads {
            if thread.join().is_err() {
                log::error!("a thread of the archive had panicked");
            }
        }
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
    fn begin(&self) {
        while let Err(error) = self.io().device().sync_all(self.store.root(), CrashPoint::Begun) {
            log::warn!("the store cannot be made durable: {error}; next try in {LONGEST_PAUSE:.0?}");
            let until = Instant::now() + LONGEST_PAUSE;
            while Instant::now() < until {
                // Under the lock with which the thread is woken, or the wish to stop would be missed.
                let catalog = self.catalog();
                if self.is_stopping() {
                    return;
                }
                let left = until.saturating_duration_since(Instant::now());
                drop(self.wait(&self.wake.housekeeper, catalog, left));
            }
        }
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

    /// Takes the step that a thread has claimed.
    ///
    /// # Errors
    /// The reason for its end; [`Archive::take`] decides how to go on.
    pub(super) fn step(&self, task: &Task) -> StepResult<()> {
        match &task.step {
            // The last handle is gone. The file becomes durable; its tensors and its lineage are found.
            Step::Seal => self.seal(task),
            // A program has opened the file again before its turn came. What it had closed before becomes durable.
            Step::Sync => self.seal(task),
            // An object may decode to the file's bytes. Then the file is archived by that object, without a newer state.
            Step::Compare { sealed } => self.twins().compare(task, sealed),
            // A newer state with other bytes is sealed. The file is encoded as a difference to an older state, made
            // durable, read back from the device, and compared with its bounds. Its bytes are still in the tree.
            Step::Archive { sealed, newer } => self.archive_file(task, sealed, newer),
            // All files of the checkpoint are archived, and none is open. A durable stub takes its place.
            Step::Release { .. } => self.release(task),
        }
    }

    /// Takes the step that was claimed, says how it went, and wakes whoever may go on.
    pub(super) fn take(&self, task: &Task, pause: &mut Pause, step: impl FnOnce() -> StepResult<()>) {
        self.conclude(task, pause, step);
        self.notify();
    }

    /// Takes the step that was claimed, and says how it went. What panics is a defect: its file stays as it was written.
    pub(super) fn conclude(&self, task: &Task, pause: &mut Pause, step: impl FnOnce() -> StepResult<()>) {
        match catch_unwind(AssertUnwindSafe(step)) {
            Ok(Ok(())) => pause.end(),
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
