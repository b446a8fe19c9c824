//! The life of a file after the last close: it is sealed, archived and released. `threads` has the steps.
//!
//! Everything that the archive needs after a crash is in the store. The next mount starts each unfinished step again.

mod about;
mod ahead;
mod archiving;
mod base;
mod best;
mod catalog;
mod checkpoints;
mod decide;
mod entry;
mod events;
mod growth;
mod health;
mod housekeeper;
mod keeper;
mod lineage;
mod look;
mod merge;
mod mirror;
mod namespace;
mod release;
pub mod repair;
mod reparent;
mod reserve;
mod resident;
mod restores;
mod retention;
mod saves;
mod scan;
mod sealer;
mod shared;
mod source;
mod status;
mod trash;
mod twins;

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::encode::Workers;
use crate::recall::{Cache, Recall, usual_memory};
use crate::store::{Error, Objects, Store};
use crate::sync::{Mutex, thread};

use archiving::Encoder;
use catalog::Catalog;
use entry::State;
use housekeeper::Housekeeper;
use look::Looks;
use merge::Merges;
use mirror::Mirrored;
use resident::ResidentReason;
use retention::Retention;
use sealer::Sealer;
use shared::Shared;
use source::Contents;
use twins::Twins;

pub use crate::recall::{ReadError, Reader};
pub use about::{lossy_words, rounded_up, why_at_rest};
pub use checkpoints::{
    Checkpoint, Condition, checkpoints, condition_of_plain, condition_on_disk, facts_at_rest, goes_with_directory,
    policy,
};
pub use growth::{Part, Room, Run, room};
pub use health::{FileStatus, Problem};
pub use keeper::Keeper;
pub use lineage::signature as model_signature;
pub use namespace::{AtRest, Commit, FileId, Namespace, Outcome};
pub(crate) use namespace::{found_at, unless_occupied};
pub use reserve::{Reserve, Waits};
pub use restores::{Restored, Restores, process_of};
pub use retention::GcReport;
pub use saves::Save;
pub use status::{Queue, Serving, Status};

/// Threads that wait for fsync at once: a device takes several at hardly more time than one, and the ranks of a job
/// close their files together. A test's scheduler tries orders of few threads better than of many.
const SEALERS: usize = if cfg!(feature = "shuttle") { 1 } else { 4 };
/// Files that are archived side by side, at most. The tiles in flight (`encode/workers.rs`) bound memory, not this
/// number. Each file adds its index and one tile.
const ENCODERS: usize = if cfg!(feature = "shuttle") { 1 } else { 8 };

/// The archive of one store. Paths are relative to the tree.
///
/// *Sealers* make closed files durable, at once, whatever else goes on. *Encoders* archive and release files, several side by
/// side. The *housekeeper* removes what nothing needs. None reaches into another's data: what they share is the catalog, in
/// which a thread claims a file before it takes a step of it:
///
/// ```text
/// staged ─last close─▶ closed ─seal─▶ sealed ─archive─▶ archived ─release─▶ released
///   ▲                    └──compare: a copy──────────▶ archived               │
///   └──────────────────────── opened for writing: recall ─────────────────────┘
/// ```
///
/// The catalog offers a step when its condition holds, and one thread claims it. A step that fails leaves the file as it was
/// (`shared.rs`). A crash between two steps loses nothing: the next mount finds the file as it is.
pub struct Archive {
    shared: Arc<Shared>,
    workers: Arc<Workers>,
    sealer: Arc<Sealer>,
    encoder: Arc<Encoder>,
    retention: Arc<Retention>,
    restores: Arc<Restores>,
    merges: Arc<Merges>,
    /// The housekeeper, which waits for all other threads at the end. Locked to start and to stop it.
    housekeeper: Mutex<Option<thread::JoinHandle<()>>>,
    mirror: Arc<Mirrored>,
    /// Room on the disk of the store.
    pub reserve: Arc<Reserve>,
    /// Of a daemon of a shared store: its part in the election.
    keeper: Option<Keeper>,
    /// Of the keeper of a shared store.
    looks: Option<Arc<Looks>>,
}

impl Archive {
    /// [`Archive::open_with`] the memory that is usual on this machine.
    pub fn open(store: Store) -> Result<Arc<Archive>, Error> {
        Archive::open_with(store, usual_memory())
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
        let mut found = found.map_err(Error::io(store.tree()))?;
        repair::find_lost_stubs(&store, &objects, &mut found.files);
        // Otherwise stubs would be served as plain files, and their objects removed.
        let any = |is: fn(&State) -> bool| found.files.iter().any(|file| is(&file.state));
        if any(|state| matches!(state, State::Resident(ResidentReason::OtherStore)))
            && !any(|state| matches!(state, State::Released(_)))
        {
            let why = "`store` is another id than the stubs in tree/ have; take stepfs.toml from a backup, or move \
                       it away, and `stepfs verify STORE` says the id";
            return Err(Error::Settings(format!("{}: {why}", store.root().join("stepfs.toml").display())));
        }
        let mut catalog = Catalog::new(store.settings().settle, Arc::clone(&objects));
        scan::enter(found, &objects, &mut catalog);
        assemble(store, objects, catalog, memory)
    }

    /// Starts the threads. `namespace` is asked before any file is replaced.
    pub fn start(self: &Arc<Self>, namespace: Arc<dyn Namespace>) {
        self.shared.serve(namespace);
        let me = Arc::clone(self);
        let work = move || me.keeper.as_ref().map_or_else(|| me.run(), |keeper| keeper.run(&me));
        match thread::Builder::new().name("housekeeper".into()).spawn(work) {
            Ok(started) => *self.housekeeper.lock().unwrap_or_else(PoisonError::into_inner) = Some(started),
            Err(error) => log::error!("the archive cannot run: {error}; files stay as they are written"),
        }
    }

    /// Ends the threads after the steps under way; everything else is picked up by the next mount.
    pub fn stop(&self) {
        self.mirror.disconnect();
        self.shared.end();
        let housekeeper = self.housekeeper.lock().unwrap_or_else(PoisonError::into_inner).take();
        if housekeeper.is_some_and(|thread| thread.join().is_err()) {
            log::error!("the archive's housekeeper had panicked");
        }
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.shared.store
    }

    /// In the keeper's: how many files no step can be taken of yet ([`Looks::look`]).
    fn look(&self, age: Duration) -> usize {
        self.looks.as_ref().map_or(0, |looks| looks.look(age, false))
    }

    /// What is known of restores.
    pub fn restores(&self) -> &Restores {
        &self.restores
    }

    /// The side that a mirror follows.
    pub fn mirror(&self) -> &Arc<Mirrored> {
        &self.mirror
    }

    /// Asks for the policy to be applied and for unneeded objects to be removed, soon. Returns the number that
    /// [`GcReport::done`] reaches then.
    pub fn ask_gc(&self) -> u64 {
        self.retention.ask()
    }

    /// The result of the last requested run.
    pub fn gc_report(&self) -> GcReport {
        self.retention.report()
    }

    /// Starts the threads, once what a former process left is durable.
    fn run(&self) {
        self.shared.begin();
        self.reserve.look();
        let start = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let started = thread::Builder::new().name(name.into()).spawn(work);
            started.inspect_err(|error| log::error!("no thread {name}: {error}; files stay as they are written")).ok()
        };
        let (sealer, encoder) = (|| Arc::clone(&self.sealer), || Arc::clone(&self.encoder));
        let sealers = (0..SEALERS).filter_map(|_| {
            let sealer = sealer();
            start("seal", Box::new(move || sealer.seal_files()))
        });
        let encoders = (0..ENCODERS).filter_map(|_| {
            let encoder = encoder();
            start("encode", Box::new(move || encoder.archive_files()))
        });
        let (waiting, shared, looks) = (sealer(), Arc::clone(&self.shared), self.looks.clone());
        let together = start("seal-together", Box::new(move || waiting.seal_together()));
        let notes = start("notes", Box::new(move || looks.map_or_else(|| shared.read_notes(), |looks| looks.run())));
        if notes.is_none() && self.looks.is_some() {
            // Without eyes it must not hold the lock that another keeper needs.
            self.shared.end();
        }
        let threads: Vec<_> = sealers.chain(encoders).chain(together).chain(notes).collect();
        let (reserve, retention, restores) = (&self.reserve, &self.retention, &self.restores);
        Housekeeper::new(&self.shared, reserve, retention, restores, &self.merges, &self.workers).run();
        for thread in threads {
            if thread.join().is_err() {
                log::error!("a thread of the archive had panicked");
            }
        }
    }
}

/// For a daemon of a shared store: it reads objects, and has no catalog. It is not started.
pub fn serving(store: Store, memory: u64) -> Result<Arc<Archive>, Error> {
    let objects = Arc::new(Objects::none(store.io().clone(), &store.objects()));
    let catalog = Catalog::new(store.settings().settle, Arc::clone(&objects));
    assemble(store, objects, catalog, memory)
}

/// For the keeper of a shared store: its catalog is empty, and `look` fills it.
fn keeping(store: Store, memory: u64) -> Result<Arc<Archive>, Error> {
    let objects = Objects::load_on(store.io().clone(), &store.objects(), |id, error| {
        log::error!("object {id}: {error}; files that need it cannot be read, `stepfs verify` lists them");
    });
    let objects = objects.map_err(Error::io(store.objects()))?.removed_through(store.tmp());
    let objects = Arc::new(objects);
    let catalog = Catalog::new(store.settings().settle, Arc::clone(&objects));
    assemble(store, objects, catalog, memory)
}

/// The archive with these parts.
fn assemble(store: Store, objects: Arc<Objects>, catalog: Catalog, memory: u64) -> Result<Arc<Archive>, Error> {
    let cache = Cache::new(&store.cache(), store.settings().cache_bytes).map_err(Error::io(store.cache()))?;
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    let recall = Recall::new(Arc::clone(&objects), cache, memory, threads).map_err(Error::io(store.root()))?;
    let workers = Workers::new(threads).map_err(Error::io(store.root()))?;
    let workers = Arc::new(workers);
    let keeper = store.is_serving().then(Keeper::default);
    let shared = Arc::new(Shared::new(Arc::new(store), objects, recall, catalog));
    let contents = Arc::new(Contents::of(Arc::clone(&shared)));
    let twins = Arc::new(Twins::new(Arc::clone(&shared), Arc::clone(&workers)));
    let retention = Arc::new(Retention::of(Arc::clone(&shared)));
    let restores = Arc::new(Restores::load(Arc::clone(&shared)));
    let sealer = Sealer::new(Arc::clone(&shared), Arc::clone(&contents), Arc::clone(&twins), Arc::clone(&retention));
    let encoder = Encoder::new(&shared, contents, twins, Arc::clone(&restores), Arc::clone(&workers));
    let encoder = Arc::new(encoder);
    Ok(Arc::new(Archive {
        mirror: Mirrored::of(&shared, &encoder),
        reserve: Reserve::of(&shared, &encoder, &retention),
        workers,
        sealer: Arc::new(sealer),
        encoder,
        retention,
        restores,
        merges: Arc::default(),
        housekeeper: Mutex::new(None),
        keeper,
        looks: shared.store.is_keepers().then(|| Arc::new(Looks::of(&shared))),
        shared,
    }))
}
