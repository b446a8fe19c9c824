//! After the last close: find the tensors, choose the base, encode, verify, commit, release.
//!
//! One thread takes one step of one file's life after the other (`seal` here, `archiving`, `release`), and then what
//! frees room (`retention`, `objects`, `merge`); tiles are encoded on a pool of low priority. Everything it needs to know
//! after a crash is in the store: what was not finished is begun again at the next mount.

mod archiving;
mod base;
mod best;
mod catalog;
mod checkpoints;
mod companions;
mod copies;
mod difference;
mod encode;
mod factors;
mod job;
mod lineage;
mod lossy;
mod merge;
mod namespace;
mod notes;
mod objects;
mod original;
mod payload;
mod plan;
mod published;
mod release;
pub mod repair;
mod reparent;
mod restores;
mod retention;
mod samples;
mod settle;
mod skeleton;
mod status;
mod stays;
mod trial;
mod verify;

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::clock::wall_ns;
use crate::recall::{Cache, Recall, usual_memory};
use crate::store::durable::{CrashPoint, DeviceFile, Io, Synced};
use crate::store::object::Id;
use crate::store::{Error, Objects, Store, Stub, beneath, recalled_from};
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, MutexGuard, Pool, thread, wait_timeout};

use catalog::{Catalog, Failed, Sealed, State, Task, modified_ns};

pub use crate::recall::{ReadError, Reader};
pub use checkpoints::{Checkpoint, Condition, policy};
pub(crate) use lineage::signature as model_signature;
pub use lossy::words as lossy_words;
pub use namespace::{AtRest, FileId, Namespace, Outcome};
pub(crate) use namespace::{found_at, unless_occupied};
pub use restores::Restored;
pub use retention::{GcReport, Removed};
pub use status::{Queue, Status};
pub use trial::{Kept, Series};

/// Target of the notes, at level trace, of which stage of archiving a file ended, by the thread that worked on it.
/// `examples/speed.rs` takes the time at each.
pub const STAGES: &str = "stepfs::stages";
/// No file: their numbers begin with 1.
const IDLE: u64 = 0;
/// Until what changed meanwhile is looked up anew.
const SOON: Duration = Duration::from_millis(50);
/// First pause after the device had no room; doubled up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause: room that a user makes is used within this time.
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// The archive of one store: its catalog, queue and workers. Paths are relative to the tree.
pub struct Archive {
    store: Store,
    objects: Arc<Objects>,
    recall: Arc<Recall>,
    /// Taken by notes from the file system, under its lock, and by the archive's thread for single look-ups and
    /// changes; no I/O under it, and no other lock but that of `objects`.
    catalog: Mutex<Catalog>,
    /// With `catalog`: there may be something to do.
    wake: Condvar,
    namespace: OnceLock<Arc<dyn Namespace>>,
    pool: Pool,
    stopping: AtomicBool,
    /// An object may have lost its last name.
    garbage: AtomicBool,
    /// Directories from which names went since they were last synced. Taken for moments, last of all locks.
    unsynced: Mutex<BTreeSet<PathBuf>>,
    /// The number that the file was opened with for which the worker is taking a step, or [`IDLE`]. Set with the catalog locked.
    stepping: AtomicU64,
    /// States that wait for being merged over objects that nobody names.
    merges: AtomicUsize,
    /// Objects that are needed though no file names them: the next state of their lineage will be a difference to them.
    /// Taken by the worker alone, and to read, by nobody for long.
    keep: Mutex<Arc<HashSet<Id>>>,
    /// Objects that nothing needs, which are still there. Taken by the worker alone.
    condemned: Mutex<Vec<Id>>,
    /// What is being merged. Taken by the worker alone.
    merging: Mutex<Option<merge::Merging>>,
    /// Why states cannot be merged at the moment.
    merge_stalled: Mutex<Option<String>>,
    /// Files that wait until they have one name only.
    several_names: Mutex<Vec<PathBuf>>,
    worker: Mutex<Option<thread::JoinHandle<()>>>,
    retention: retention::Retention,
    noticed: restores::Noticed,
}

impl Archive {
    /// [`Archive::open_with`] the memory that is usual on this machine.
    ///
    /// # Errors
    /// [`Error::Io`] when directories cannot be read.
    pub fn open(store: Store) -> Result<Arc<Archive>, Error> {
        Archive::open_with(store, usual_memory())
    }

    /// Reads the tree and the objects of a store; nothing is changed before [`Archive::start`]. Keeps at most `memory`
    /// bytes of decoded states.
    ///
    /// # Errors
    /// [`Error::Io`] when directories cannot be read.
    pub fn open_with(store: Store, memory: u64) -> Result<Arc<Archive>, Error> {
        // At the same time: with nothing cached both wait for the device.
        let (objects, found) = std::thread::scope(|scope| {
            let found = scope.spawn(|| settle::scan(&store));
            let objects = Objects::load_on(store.io().clone(), &store.objects(), |id, error| {
                log::error!("object {id}: {error}; files that need it cannot be read, `stepfs verify` lists them");
            });
            (objects, found.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let objects = Arc::new(objects.map_err(Error::io(store.objects()))?);
        let cache = Cache::new(&store.cache(), store.settings().cache_bytes).map_err(Error::io(store.cache()))?;
        let threads = std::thread::available_parallelism().map_or(2, usize::from);
        let recall = Recall::new(Arc::clone(&objects), cache, memory, threads).map_err(Error::io(store.root()))?;
        let builder = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|n| format!("archive-{n}"))
            .start_handler(|_| yield_to_others())
            .panic_handler(|_| log::error!("a task of the archive panicked; its file stays as it is"));
        let pool = Pool::new(builder).map_err(Error::io(store.root()))?;
        let mut catalog = Catalog::new(store.settings().settle);
        let mut found = found.map_err(Error::io(store.tree()))?;
        repair::find_lost_stubs(&store, &objects, &mut found.files);
        // Released files would be served as what their stubs are on the device, and objects removed that they need.
        let any = |is: fn(&State) -> bool| found.files.iter().any(|(_, state)| state.as_ref().is_ok_and(is));
        if any(|state| matches!(state, State::Resident(stays::OTHER_STORE)))
            && !any(|state| matches!(state, State::Released(_)))
        {
            let why = "`store` is not the id that stubs in tree/ have whose objects are here; take stepfs.toml from a backup, \
                       or let `stepfs verify --repair` put it right";
            return Err(Error::Settings(why.into()));
        }
        settle::enter(found, &objects, &mut catalog);
        Ok(Arc::new(Archive {
            objects,
            recall,
            catalog: Mutex::new(catalog),
            wake: Condvar::new(),
            namespace: OnceLock::new(),
            pool,
            stopping: AtomicBool::new(false),
            garbage: AtomicBool::new(true),
            unsynced: Mutex::default(),
            stepping: AtomicU64::new(IDLE),
            merges: AtomicUsize::new(0),
            keep: Mutex::default(),
            condemned: Mutex::default(),
            merging: Mutex::default(),
            merge_stalled: Mutex::default(),
            several_names: Mutex::new(Vec::new()),
            worker: Mutex::new(None),
            retention: retention::Retention::default(),
            noticed: restores::Noticed::load(&store),
            store,
        }))
    }

    /// Starts the worker. `namespace` is asked before any file is replaced.
    pub fn start(self: &Arc<Self>, namespace: Arc<dyn Namespace>) {
        let _ = self.namespace.set(namespace);
        let me = Arc::clone(self);
        let worker = thread::Builder::new().name("archive".into()).spawn(move || me.run());
        match worker {
            Ok(worker) => *self.worker.lock().unwrap_or_else(PoisonError::into_inner) = Some(worker),
            Err(error) => {
                log::error!("the archive cannot run: {error}; files stay as they are written")
            }
        }
    }

    /// Ends the worker after the step under way; everything else is picked up by the next mount.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.notify();
        let worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner).take();
        if worker.is_some_and(|worker| worker.join().is_err()) {
            log::error!("the archive's worker had panicked");
        }
        self.note_restores();
        self.sweep();
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    fn io(&self) -> &Io {
        self.store.io()
    }

    fn catalog(&self) -> MutexGuard<'_, Catalog> {
        self.catalog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the worker.
    fn notify(&self) {
        // With the lock, so that a worker about to wait does not miss it.
        let _catalog = self.catalog();
        self.wake.notify_all();
    }

    /// What a former process did and had not synced when it was killed looks like all else, and would be lost if the machine
    /// failed: a name in `objects/`, that a name went. It becomes durable before anything is done that counts on it.
    fn begin(&self) {
        while let Err(error) = self.io().device().sync_all(self.store.root(), CrashPoint::Begun) {
            log::warn!("the store cannot be made durable: {error}; next try in {LONGEST_PAUSE:.0?}");
            let until = Instant::now() + LONGEST_PAUSE;
            while Instant::now() < until {
                let left = until.saturating_duration_since(Instant::now());
                // Under the lock with which the worker is woken, or the wish to stop would be missed.
                let catalog = self.catalog();
                if self.stopping.load(Ordering::Relaxed) {
                    return;
                }
                drop(wait_timeout(&self.wake, &self.catalog, catalog, left));
            }
        }
    }

    fn run(&self) {
        self.begin();
        let mut pause = FIRST_PAUSE;
        let mut merge_at = Instant::now();
        let mut sweep_at = None;
        while !self.stopping.load(Ordering::Relaxed) {
            self.note_restores();
            self.look_at_links();
            self.collect();
            self.retain();
            if sweep_at.is_none_or(|at| at <= Instant::now()) {
                sweep_at = if self.sweep() { None } else { Some(Instant::now() + LONGEST_PAUSE) };
            }
            let task = {
                let mut catalog = self.catalog();
                let (task, retry) = catalog.next_task(Instant::now(), wall_ns());
                let now = Instant::now();
                let merges = self.merges.load(Ordering::Relaxed) > 0;
                // What could not be looked at yet, because a closed file may need it, must wait for that file.
                let garbage = self.garbage.load(Ordering::Relaxed);
                let work = task.is_some() || merges && merge_at <= now || garbage && !catalog.has_unsealed();
                // Under the lock with which the worker is woken, or one would be missed.
                let work = work || self.noticed.has_news() || catalog.has_links();
                if !work && !self.stopping.load(Ordering::Relaxed) {
                    // Every note wakes the worker; garbage that could not be collected yet is looked at again.
                    let idle = if garbage { LONGEST_PAUSE } else { Duration::from_secs(3600) };
                    let merge_in = merges.then(|| merge_at.saturating_duration_since(now));
                    let retain_in = Some(self.until_retention(idle));
                    let sweep_in = sweep_at.map(|at| at.saturating_duration_since(now));
                    let wait = [retry, merge_in, retain_in, sweep_in]
                        .into_iter()
                        .flatten()
                        .min()
                        .map_or(idle, |wait| wait.min(idle));
                    drop(wait_timeout(&self.wake, &self.catalog, catalog, wait));
                } else {
                    // While a step is being taken, its file may look as if nothing were to be done for it.
                    let opened = task.as_ref().and_then(|task| catalog.get(task.path())).map(|entry| entry.opened);
                    self.stepping.store(opened.unwrap_or(IDLE), Ordering::Relaxed);
                }
                task
            };
            let Some(task) = task else {
                // Last of all: it frees room, and nobody waits for it.
                if merge_at <= Instant::now() {
                    merge_at = Instant::now() + self.merge();
                }
                continue;
            };
            match self.step(&task) {
                Ok(()) => pause = FIRST_PAUSE,
                Err(error) => self.failed(&task, &error, &mut pause),
            }
            self.stepping.store(IDLE, Ordering::Relaxed);
        }
    }

    /// Seals what was closed while the archive is at something that takes longer.
    fn seal_waiting(&self) {
        loop {
            let (task, _) = self.catalog().next_task(Instant::now(), wall_ns());
            let Some(task @ Task::Seal { .. }) = task else { return };
            if let Err(error) = self.step(&task) {
                self.failed(&task, &error, &mut FIRST_PAUSE.clone());
            }
        }
    }

    /// One step of one file's life:
    ///
    /// *closed* → sealed (durable) → a newer one of its lineage is sealed → archived (its object is durable and was
    /// read back) → all handles are closed → released (a stub in its place).
    fn step(&self, task: &Task) -> io::Result<()> {
        match task {
            Task::Seal { path, version } => self.seal(path, *version),
            Task::Archive { path, version, sealed, newer } => self.encode(path, *version, sealed, newer),
            Task::Release { path, version, sealed, object } => self.release(path, *version, sealed, *object),
        }
    }

    /// Makes a closed file durable, and finds its tensors and its lineage.
    fn seal(&self, path: &Path, version: u64) -> io::Result<()> {
        // Not found: removed meanwhile, or renamed, and the note of it is on its way.
        let file = self.open_file(path)?;
        // A program wrote it, whatever it looks like.
        match Stub::disown(&file, CrashPoint::FileSealed) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                log::warn!(
                    "{}: looks like a stub of stepfs, and is taken for one after the next mount",
                    path.display()
                );
            }
            result => result?,
        }
        if let Err(error) = self.make_durable(&file, path) {
            // A directory that could not even be opened: that says nothing of the file, and passes.
            let passing = [libc::ENOENT, libc::ENOTDIR, libc::EMFILE, libc::ENFILE, libc::ENOMEM];
            if error.raw_os_error().is_some_and(|code| passing.contains(&code)) {
                return Err(error);
            }
            // The kernel reports it once; a second fsync would succeed and prove nothing. What is not durable must
            // not let an older state go. An error for which nothing was lost was told apart, where that can be proven.
            log::error!(
                "{}: could not be made durable: {error}; it may have lost bytes, so save it again",
                path.display()
            );
            self.catalog().advance(path, version, State::Resident(stays::NOT_DURABLE));
            return Ok(());
        }
        let metadata = file.metadata()?;
        let settle::Examined { state, words, says } = settle::examine(&file, &metadata, path)?;
        // Before the file is known to be sealed: nothing is released while one that may speak is not.
        self.note_best(path, says.map(|says| (says, modified_ns(&metadata))));
        if let State::Sealed(_) = &state {
            log::info!("{}: sealed, {words}", path.display());
        }
        // Named before anything is collected: nothing is while a file is not sealed.
        let known = |id: &Id, of: &Sealed| {
            self.objects.get(*id).is_some_and(|(h, _)| (h.logical_len, h.signature) == (of.len, of.signature))
        };
        let keeps = match &state {
            State::Sealed(sealed) => recalled_from(&file).filter(|id| known(id, sealed)),
            _ => None,
        };
        self.catalog().keep(path, version, keeps, &self.objects);
        if let State::Sealed(sealed) = &state
            && self.is_copy(path, version, sealed, &file)?
        {
            return Ok(());
        }
        self.catalog().advance(path, version, state);
        self.retention.news();
        Ok(())
    }

    /// Fsyncs a file and every directory on the way to it: a checkpoint's directory may be as new as the file.
    fn make_durable(&self, file: &DeviceFile, path: &Path) -> io::Result<()> {
        if self.store.sync_written(file, CrashPoint::FileSealed)? == Synced::Proven {
            log::warn!(
                "{}: was written both directly and through the page cache, for which the kernel reported an error; \
                 nothing was lost, and all of it was read back from the device",
                path.display()
            );
        }
        path.ancestors().skip(1).try_for_each(|directory| self.sync_dir(directory, CrashPoint::NamesSealed))
    }

    /// Makes the names in a directory of the tree durable.
    fn sync_dir(&self, directory: &Path, at: CrashPoint) -> io::Result<()> {
        let tree = self.store.tree();
        // Not where a link leads to.
        beneath::open_dir(&tree, directory)?;
        self.io().sync_dir(&beneath::reach(&tree, directory)?, at)
    }

    /// A file with several names stays resident until it has one.
    fn wait_for_one_name(&self, path: &Path, version: u64) {
        self.catalog().set_busy(path, version, true);
        self.several_names.lock().unwrap_or_else(PoisonError::into_inner).push(path.to_path_buf());
    }

    fn failed(&self, task: &Task, error: &io::Error, pause: &mut Duration) {
        let (Task::Seal { path, version } | Task::Archive { path, version, .. } | Task::Release { path, version, .. }) =
            task;
        let is_damage = error.get_ref().is_some_and(|inner| inner.is::<ReadError>());
        let retry = match error.kind() {
            // The file was changed, or the store is being closed: what is to be done is looked up anew.
            io::ErrorKind::Interrupted => Some(SOON),
            // It, or the state after it, was cut short while it was read.
            io::ErrorKind::UnexpectedEof if !is_damage => Some(SOON),
            // It went, and so may have a directory on the way, where a file is now. Or the state after this one did.
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => match self.forget_what_went(path, *version) {
                true => return,
                false => Some(SOON),
            },
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                log::warn!(
                    "{}: no room to archive it ({error}); it stays as it is, next try in {pause:.0?}",
                    path.display()
                );
                let wait = *pause;
                *pause = (*pause * 2).min(LONGEST_PAUSE);
                Some(wait)
            }
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
                log::error!("{}: {error}; it stays as it was written", path.display());
                None
            }
            // Too many open files, no memory, a device that is away for a while.
            _ => {
                log::warn!("{}: {error}; it stays as it is, next try in {LONGEST_PAUSE:.0?}", path.display());
                Some(LONGEST_PAUSE)
            }
        };
        let why = format!("{}: {error}", path.display());
        let failed = Failed { why, retry: retry.map(|r| Instant::now() + r), is_passing: retry == Some(SOON) };
        self.catalog().set_failed(path, *version, failed);
    }

    fn namespace(&self) -> Option<&Arc<dyn Namespace>> {
        self.namespace.get()
    }

    /// Opens a regular file of the tree to read it.
    fn open_file(&self, path: &Path) -> io::Result<DeviceFile> {
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
}

/// Training comes first: the archive's threads run when nobody else wants to.
fn yield_to_others() {
    const WHO_PROCESS: libc::c_int = 1;
    const BEST_EFFORT_LAST: libc::c_int = 2 << 13 | 7;
    // SAFETY: no memory is passed; 0 means the calling thread on Linux.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, 10);
        libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, BEST_EFFORT_LAST);
    }
}
