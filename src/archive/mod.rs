//! The life of a file after the last close: it is sealed, archived and released. `threads` has the steps.
//!
//! Everything that the archive needs after a crash is in the store. The next mount starts each unfinished step again.

mod ahead;
mod archiving;
mod base;
mod best;
mod bundles;
mod catalog;
mod checkpoints;
mod companions;
mod condition;
mod decide;
mod distributed;
mod events;
mod housekeeper;
mod lineage;
mod lossy;
mod merge;
mod mirror;
mod namespace;
mod release;
pub mod repair;
mod reparent;
mod resident;
mod restores;
mod retention;
mod scan;
mod sealer;
mod source;
mod status;
mod threads;
mod together;
mod twins;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use crate::encode::Workers;
use crate::mirror::Daemon;
use crate::recall::{Cache, Recall, usual_memory};
use crate::store::durable::{DeviceFile, Io};
use crate::store::{Error, Id, Objects, Store};
use crate::sync::{AtomicBool, AtomicU64, Mutex, thread};

use catalog::{Catalog, State};
use events::Inbox;
use merge::Merges;
use resident::ResidentReason;
use threads::Wake;
use twins::Twins;

pub use crate::recall::{ReadError, Reader};
pub use best::best_at_rest;
pub use checkpoints::{Checkpoint, policy};
pub use condition::{Condition, condition_on_disk};
pub use lineage::signature as model_signature;
pub use lossy::{rounded_up, words as lossy_words};
pub use namespace::{AtRest, FileId, Namespace, Outcome};
pub(crate) use namespace::{found_at, unless_occupied};
pub use restores::Restored;
pub use retention::{GcReport, Removed};
pub use status::{Queue, Status};

/// Pause until changes are looked up anew.
const SOON: Duration = Duration::from_millis(50);
/// Longest pause: room that a user makes is used within this time.
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// The archive of one store: its catalog, queue and workers. Paths are relative to the tree.
pub struct Archive {
    store: Store,
    objects: Arc<Objects>,
    recall: Arc<Recall>,
    /// Taken by the archive's threads for single look-ups and changes, and by the file system where it asks for
    /// something; no I/O under it, and no other locks but those of `objects`, `inbox` and those said to be last.
    catalog: Mutex<Catalog>,
    /// What the file system has told.
    inbox: Inbox,
    wake: Wake,
    namespace: OnceLock<Arc<dyn Namespace>>,
    workers: Workers,
    stopping: AtomicBool,
    /// A user says that all files are states of one run.
    one_run: AtomicBool,
    /// An object may have lost its last name.
    garbage: AtomicBool,
    /// Directories from which names went since they were last synced. Taken for moments, last of all locks.
    unsynced: Mutex<BTreeSet<PathBuf>>,
    merges: Merges,
    /// Files that wait until they have one name only.
    several_names: Mutex<Vec<PathBuf>>,
    /// The housekeeper, which waits for all other threads at the end. Locked to start and to stop it.
    housekeeper: Mutex<Option<thread::JoinHandle<()>>>,
    retention: retention::Retention,
    models: distributed::Models,
    noticed: restores::Noticed,
    /// The file that proved an archived one to be an earlier state of its run, by the object. Taken for moments, also
    /// under the file system's lock; no other lock under it.
    provers: Mutex<HashMap<Id, (PathBuf, FileId)>>,
    /// The mirror, while mounted with one. Taken for moments.
    mirror: Mutex<Option<Arc<Daemon>>>,
    before_ahead: ahead::Before,
    /// Notes from the file system so far.
    notes: AtomicU64,
}

impl Archive {
    /// [`Archive::open_with`] the memory that is usual on this machine.
    pub fn open(store: Store) -> Result<Arc<Archive>, Error> {
        Archive::open_with(store, usual_memory())
    }

    /// All files are states of one run, as a user says who compares ways to keep them: nothing has to prove it.
    pub fn trust_in_one_run(&self) {
        self.one_run.store(true, Ordering::Relaxed);
    }

    /// Reads the tree and the objects of a store; nothing is changed before [`Archive::start`]. Keeps at most `memory`
    /// bytes of decoded states.
    pub fn open_with(store: Store, memory: u64) -> Result<Arc<Archive>, Error> {
        // At the same time: with nothing cached both wait for the device.
        let (objects, found) = std::thread::scope(|scope| {
            let found = scope.spawn(|| scan::scan(&store));
            let objects = Objects::load_on(store.io().clone(), &store.objects(), |id, error| {
                log::error!("object {id}: {error}; files that need it cannot be read, `stepfs verify` lists them");
            });
            (objects, found.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let objects = Arc::new(objects.map_err(Error::io(store.objects()))?);
        let cache = Cache::new(&store.cache(), store.settings().cache_bytes).map_err(Error::io(store.cache()))?;
        let threads = std::thread::available_parallelism().map_or(2, usize::from);
        let recall = Recall::new(Arc::clone(&objects), cache, memory, threads).map_err(Error::io(store.root()))?;
        let workers = Workers::new(threads).map_err(Error::io(store.root()))?;
        let mut catalog = Catalog::new(store.settings().settle);
        let mut found = found.map_err(Error::io(store.tree()))?;
        repair::find_lost_stubs(&store, &objects, &mut found.files);
        // Otherwise stubs would be served as plain files, and their objects removed.
        let any = |is: fn(&State) -> bool| found.files.iter().any(|(_, state)| state.as_ref().is_ok_and(is));
        if any(|state| matches!(state, State::Resident(ResidentReason::OtherStore)))
            && !any(|state| matches!(state, State::Released(_)))
        {
            let why = "`store` is another id than the stubs in tree/ have; take stepfs.toml from a backup, or move \
                       it away, and `stepfs verify STORE` says the id";
            return Err(Error::Settings(why.into()));
        }
        scan::enter(found, &objects, &mut catalog);
        Ok(Arc::new(Archive {
            objects,
            recall,
            catalog: Mutex::new(catalog),
            inbox: Inbox::default(),
            wake: Wake::default(),
            namespace: OnceLock::new(),
            workers,
            stopping: AtomicBool::new(false),
            one_run: AtomicBool::new(false),
            garbage: AtomicBool::new(true),
            unsynced: Mutex::default(),
            merges: Merges::default(),
            several_names: Mutex::new(Vec::new()),
            housekeeper: Mutex::new(None),
            retention: retention::Retention::default(),
            models: distributed::Models::default(),
            noticed: restores::Noticed::load(&store),
            provers: Mutex::default(),
            mirror: Mutex::default(),
            before_ahead: ahead::Before::default(),
            notes: AtomicU64::new(0),
            store,
        }))
    }

    /// Starts the threads. `namespace` is asked before any file is replaced.
    pub fn start(self: &Arc<Self>, namespace: Arc<dyn Namespace>) {
        let _ = self.namespace.set(namespace);
        let me = Arc::clone(self);
        match thread::Builder::new().name("housekeeper".into()).spawn(move || me.run()) {
            Ok(started) => *self.housekeeper.lock().unwrap_or_else(PoisonError::into_inner) = Some(started),
            Err(error) => log::error!("the archive cannot run: {error}; files stay as they are written"),
        }
    }

    /// Ends the threads after the steps under way; everything else is picked up by the next mount.
    pub fn stop(&self) {
        self.disconnect();
        self.end();
        let housekeeper = self.housekeeper.lock().unwrap_or_else(PoisonError::into_inner).take();
        if housekeeper.is_some_and(|thread| thread.join().is_err()) {
            log::error!("the archive's housekeeper had panicked");
        }
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    fn io(&self) -> &Io {
        self.store.io()
    }

    /// Objects that a file can do with.
    fn twins(&self) -> Twins<'_> {
        Twins::of(self)
    }

    /// Changes a file's state to one whose object the caller has named. Takes the name back if the file has changed
    /// meanwhile.
    fn advance_named(&self, path: &Path, version: u64, state: State) -> bool {
        let object = if let State::Archived(_, object) = &state { Some(*object) } else { None };
        let advanced = self.catalog().advance(path, version, state);
        object.filter(|_| !advanced).into_iter().for_each(|object| self.objects.unname(object));
        advanced
    }

    /// A file with several names stays resident until it has one.
    fn wait_for_one_name(&self, path: &Path, version: u64) {
        self.catalog().set_busy(path, version, true);
        self.several_names.lock().unwrap_or_else(PoisonError::into_inner).push(path.to_path_buf());
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
