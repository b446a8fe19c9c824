//! A daemon's part in a shared store: it shows that it lives, and becomes the keeper when there is none.
//!
//! The keeper's archive is one of its own, beside the one that serves the mount. The two share nothing but the store on its file
//! system: the keeper treats its own mount like one on another machine.

use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::store::fence::{Take, Taken};
use crate::store::shared::{BEAT, Seat, keeper_of};
use crate::store::{Store, beneath, locks};

use super::look::{Looks, PATIENCE};
use super::namespace::{Commit, FileId, Namespace, Outcome, found_at, remove_directory};
use super::shared::Shared;
use super::{Archive, Queue, Status, keeping};

/// After an election that failed: no object could be loaded, say. Another daemon may do better meanwhile.
const NEXT_ELECTION: Duration = Duration::from_secs(10);

/// Shows that this daemon lives; answers the server's clock.
fn beat(store: &Store) -> io::Result<i64> {
    store.relock()?;
    store.seat().map_or(Err(io::ErrorKind::Unsupported.into()), Seat::beat)
}

#[derive(Default)]
struct State {
    /// The keeper's archive, and its looks.
    keeping: Option<(Arc<Archive>, Arc<Looks>)>,
    thread: Option<JoinHandle<()>>,
    stopping: bool,
}

/// See the module.
pub struct Keeper {
    serving: Weak<Archive>,
    /// Taken for moments only.
    state: Mutex<State>,
    wake: Condvar,
}

impl Keeper {
    /// Takes part, until [`Keeper::stop`].
    pub(super) fn start(serving: &Arc<Archive>) -> io::Result<Arc<Keeper>> {
        let keeper =
            Arc::new(Keeper { serving: Arc::downgrade(serving), state: Mutex::default(), wake: Condvar::new() });
        let me = Arc::clone(&keeper);
        let thread = std::thread::Builder::new().name("keeper".into()).spawn(move || me.run())?;
        keeper.state().thread = Some(thread);
        Ok(keeper)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the archive, after the steps under way. Another daemon becomes the keeper.
    pub(super) fn stop(&self) {
        self.state().stopping = true;
        self.wake.notify_all();
        let thread = self.state().thread.take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            log::error!("the keeper's thread had panicked");
        }
    }

    fn run(&self) {
        let mut looking: Option<JoinHandle<()>> = None;
        // An election takes down the fences of all daemons, so one that fails is not tried again at once.
        let mut next = Instant::now();
        loop {
            let Some(serving) = self.serving.upgrade() else { break };
            if let Err(error) = beat(serving.store()) {
                log::warn!("cannot show the other daemons that this one lives: {error}");
            }
            let keeping = self.state().keeping.clone();
            let stopping = self.state().stopping;
            match keeping {
                Some((archive, _)) if stopping || !archive.store().is_keepers() => {
                    if !stopping {
                        log::warn!("another daemon is the keeper; this one only serves from now on");
                    }
                    self.state().keeping = None;
                    archive.stop();
                    looking.take().into_iter().for_each(|thread| drop(thread.join()));
                }
                Some(_) => {}
                None if stopping || Instant::now() < next => {}
                None => match self.become_keeper(&serving) {
                    Ok(started) => looking = started,
                    Err(error) => {
                        log::error!("cannot become the keeper: {error}; next try in {NEXT_ELECTION:.0?}");
                        next = Instant::now() + NEXT_ELECTION;
                    }
                },
            }
            drop(serving);
            let state = self.state();
            if state.stopping && state.keeping.is_none() {
                break;
            }
            let wait = self.wake.wait_timeout_while(state, BEAT, |state| !state.stopping);
            drop(wait.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Becomes the keeper, if there is none. Answers the thread that looks.
    fn become_keeper(&self, serving: &Arc<Archive>) -> io::Result<Option<JoinHandle<()>>> {
        let Some(store) = serving.store().elect()? else { return Ok(None) };
        log::info!("this daemon is the keeper now: {}", store.tmp().display());
        let memory = serving.shared.recall.memory().status().limit;
        let archive = keeping(store, memory).map_err(io::Error::other)?;
        let looks = Arc::new(Looks::of(&archive.shared));
        archive.start(Arc::new(OverLocks { shared: Arc::downgrade(&archive.shared) }));
        let (eyes, seat) = (Arc::clone(&looks), self.serving.clone());
        let clock = move || seat.upgrade().map_or(Err(io::ErrorKind::NotConnected.into()), |seat| beat(seat.store()));
        let looking = std::thread::Builder::new().name("look".into()).spawn(move || eyes.run(clock));
        // Without eyes it must not hold the lock that another keeper needs.
        let thread = looking.inspect_err(|_| archive.stop())?;
        self.state().keeping = Some((archive, looks));
        Ok(Some(thread))
    }

    /// The keeper's archive, if it is this daemon's.
    fn keeping(&self) -> Option<(Arc<Archive>, Arc<Looks>)> {
        self.state().keeping.clone()
    }

    /// What this daemon is.
    fn role(&self, store: &Store) -> String {
        match (self.keeping(), keeper_of(store.root())) {
            (Some(_), _) => "keeper".into(),
            (None, Some(keeper)) => format!("serving, keeper on {keeper}"),
            (None, None) => "serving, and no daemon is the keeper yet".into(),
        }
    }

    /// The value of an attribute ([`Archive::attribute`]).
    pub(super) fn attribute(&self, store: &Store, path: &Path, name: &str) -> Option<Vec<u8>> {
        match (name, self.keeping()) {
            ("role", _) => Some(self.role(store).into_bytes()),
            ("status", _) => serde_json::to_vec(&self.status(store)).ok(),
            // Files that a step may be taken of later count, and programs that go on saving do not end the wait.
            ("queue", Some((archive, looks))) => {
                let unsettled = looks.await_look(true, PATIENCE) as u64;
                let queue = archive.queue();
                serde_json::to_vec(&Queue { queued: queue.queued + unsettled, opened: 0, ..queue }).ok()
            }
            (_, keeping) => keeping?.0.attribute(path, name),
        }
    }

    /// The status of the store, as far as this daemon knows it.
    pub(super) fn status(&self, store: &Store) -> Status {
        let known = self.keeping().map(|(archive, _)| archive.status()).unwrap_or_default();
        let (daemon, version) = (Some(std::process::id()), crate::version().into());
        Status { shared: Some(self.role(store)), daemon, version, ..known }
    }

    /// A user sets an attribute ([`Archive::set_attribute`]).
    pub(super) fn set_attribute(&self, path: &Path, name: &str, value: &[u8]) -> Result<(), i32> {
        let Some((archive, looks)) = self.keeping() else { return Err(libc::EOPNOTSUPP) };
        if name == "sync" || name == "gc" {
            looks.await_look(false, PATIENCE);
        }
        archive.set_attribute(path, name, value)
    }
}

/// The keeper's way to replace files: by the protocol of the store, like every daemon.
struct OverLocks {
    /// Weak, since the archive has this.
    shared: Weak<Shared>,
}

impl OverLocks {
    fn shared(&self) -> io::Result<Arc<Shared>> {
        self.shared.upgrade().ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Takes the file at a path, if it is the expected one, and replaces or removes it by `then`, which says whether it did.
    fn take(
        &self,
        path: &Path,
        expect: FileId,
        then: impl FnOnce(&Shared, &Taken) -> io::Result<bool>,
    ) -> io::Result<Outcome> {
        let shared = self.shared()?;
        let above = path.parent().unwrap_or(Path::new(""));
        let directory = match beneath::open_dir(&shared.store.tree(), above) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => {
                return Ok(Outcome::Changed);
            }
            directory => directory?,
        };
        match Take::of(&directory, path.file_name().unwrap_or_default(), shared.store.second_name()?)? {
            Take::Taken(taken) if FileId::of(&taken.metadata()?) == expect => {
                then(&shared, &taken).map(Outcome::of_commit)
            }
            Take::Taken(_) | Take::Gone => Ok(Outcome::Changed),
            Take::Busy => Ok(Outcome::Busy),
        }
    }
}

impl Namespace for OverLocks {
    fn idle(&self, path: &Path, expect: FileId) -> Outcome {
        let is_open = || -> io::Result<Option<bool>> {
            let file = self.shared()?.open_file(path)?;
            let is_it = FileId::of(&file.metadata()?) == expect;
            Ok(if is_it { Some(locks::is_open(file.as_file(), false)?) } else { None })
        };
        match is_open() {
            Ok(Some(true)) => Outcome::Busy,
            Ok(Some(false)) => Outcome::Done,
            // An error of the path shows when the file is opened.
            Ok(None) | Err(_) => Outcome::Changed,
        }
    }

    fn exclusively(&self, path: &Path, expect: FileId, commit: &mut Commit<'_>) -> io::Result<Outcome> {
        self.take(path, expect, |_, taken| commit(&taken.path()))
    }

    fn remove(&self, path: &Path, expect: FileId, still: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<Outcome> {
        let store = &self.shared()?.store;
        if !found_at(&store.tree(), path)?.is_some_and(|found| FileId::of(&found) == expect && !found.is_dir()) {
            return Ok(Outcome::Changed);
        }
        let fence = store.fence(expect.ino)?;
        self.take(path, expect, |shared, taken| {
            shared.store.fences().revoke(expect.ino, Some(&fence))?;
            if !still()? {
                return Ok(false);
            }
            match taken.remove(&fence) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
                removed => removed,
            }
        })
    }

    fn remove_directory(&self, path: &Path, expect: FileId) -> io::Result<Outcome> {
        let shared = self.shared()?;
        remove_directory(&shared.store.tree(), shared.io(), path, expect)
    }
}
