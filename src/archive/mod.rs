//! The life of a file after the last close: it is sealed, archived and released. `threads` has the steps.
//!
//! Everything that the archive needs after a crash is in the store. The next mount starts each unfinished step again.

mod ahead;
mod archiving;
mod base;
mod best;
mod catalog;
mod checkpoints;
mod decide;
mod entry;
mod events;
mod housekeeper;
mod lineage;
mod lossy;
mod merge;
mod moves;
mod namespace;
mod release;
mod remote;
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

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use crate::encode::Workers;
use crate::recall::{Cache, Recall, usual_memory};
use crate::remote::Daemon;
use crate::store::durable::{DeviceFile, Io};
use crate::store::{Error, Objects, Store};
use crate::sync::{AtomicBool, AtomicU64, Mutex, thread};

use catalog::Catalog;
use entry::State;
use events::Inbox;
use merge::Merges;
use moves::Moves;
use resident::ResidentReason;
use threads::Wake;
use twins::Twins;

pub use crate::recall::{ReadError, Reader};
pub use checkpoints::{Checkpoint, Condition, facts_at_rest, policy};
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
    merges: Merges,
    /// The housekeeper, which waits for all other threads at the end. Locked to start and to stop it.
    housekeeper: Mutex<Option<thread::JoinHandle<()>>>,
    retention: retention::Retention,
    models: source::Models,
    noticed: restores::Noticed,
    /// The remote, while mounted with one. Taken for moments.
    remote: Mutex<Option<Arc<Daemon>>>,
    before_ahead: ahead::Before,
    /// Notes from the file system so far.
    notes: AtomicU64,
    /// A program looked for a name since the remote's names were read.
    looked: AtomicBool,
    /// Names that move.
    moves: Moves,
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
        let mut catalog = Catalog::new(store.settings().settle, Arc::clone(&objects));
        let mut found = found.map_err(Error::io(store.tree()))?;
        repair::find_lost_stubs(&store, &objects, &mut found.files);
        // Otherwise stubs would be served as plain files, and their objects removed.
        let any = |is: fn(&State) -> bool| found.files.iter().any(|file| is(&file.state));
        if any(|state| matches!(state, State::Resident(ResidentReason::OtherStore)))
            && !any(|state| matches!(state, State::Released(_)))
        {
            let why = "`store` is another id than the stubs in tree/ have; take stepfs.toml from a backup, or move \
                       it away, and `stepfs verify STORE` says the id";
            return Err(Error::Settings(why.into()));
        }
        scan::enter(found, &objects, &mut catalog);
        let before_ahead = ahead::Before::of(&objects);
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
            merges: Merges::default(),
            housekeeper: Mutex::new(None),
            retention: retention::Retention::default(),
            models: source::Models::default(),
            noticed: restores::Noticed::load(&store),
            remote: Mutex::default(),
            before_ahead,
            notes: AtomicU64::new(0),
            looked: AtomicBool::new(false),
            moves: Moves::default(),
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

    /// Whoever gives a name of the tree to something else says so here.
    pub fn moves(&self) -> &Moves {
        &self.moves
    }

    fn io(&self) -> &Io {
        self.store.io()
    }

    /// Objects that a file can do with.
    fn twins(&self) -> Twins<'_> {
        Twins::of(self)
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
