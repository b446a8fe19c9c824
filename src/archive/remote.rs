//! The archive, as a remote sees it: what there is to push, and how names of other nodes appear.

use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use crate::encode::StepError;
use crate::remote::{Ahead, Daemon, Local, Place, Progress, Settings, Shape, Then};
use crate::store::{Hold, Id, Newest, Objects, Profile, Store, beneath, is_pinned};

use super::decide::Decision;
use super::entry::{Held, Stamp, State};
use super::resident::ResidentReason;
use super::{Archive, FileId, Outcome, found_at};

impl Archive {
    /// Starts the threads that keep this store and a remote in step, until [`Archive::stop`]. Once for each mount,
    /// after [`Archive::start`].
    ///
    /// # Errors
    /// Threads cannot be started.
    pub fn connect(self: &Arc<Self>, place: Arc<dyn Place>, settings: Settings) -> io::Result<()> {
        let daemon = Daemon::start(Arc::clone(self) as Arc<dyn Local>, place, settings)?;
        *self.remote.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(daemon));
        Ok(())
    }

    /// Ends the remote's threads.
    pub(super) fn disconnect(&self) {
        let daemon = self.remote.lock().unwrap_or_else(PoisonError::into_inner).take();
        daemon.into_iter().for_each(|daemon| daemon.stop());
    }

    /// A program looks for a name: names of other nodes are read again soon.
    pub fn looked(&self) {
        self.looked.store(true, Ordering::Relaxed);
    }

    /// The mode, owner or times of a file changed: the remote gets them.
    pub fn attributes_changed(&self) {
        self.shared.notes.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether programs wait for the remote.
    pub fn is_remote_waited_for(&self) -> bool {
        self.daemon().is_some_and(|daemon| daemon.is_waited_for())
    }

    /// Calls `then` once the remote has what is at and below a path; drops it if that fails.
    pub fn when_pushed(&self, path: PathBuf, then: Then) {
        match self.daemon() {
            Some(daemon) => daemon.when_pushed(path, then),
            None => then(),
        }
    }

    /// Calls `then` once the names of other nodes are read.
    pub fn when_read(&self, then: Then) {
        match self.daemon() {
            Some(daemon) => daemon.when_read(then),
            None => then(),
        }
    }

    /// Calls `then` once the names of other nodes that are known now are in the tree.
    pub fn when_shown(&self, then: Then) {
        match self.daemon() {
            Some(daemon) => daemon.when_shown(then),
            None => then(),
        }
    }

    /// Calls `then` once the tree shows what the remote had after the mount, or once the remote does not answer.
    pub fn when_current(&self, then: Then) {
        match self.daemon() {
            Some(daemon) => daemon.when_current(then),
            None => then(),
        }
    }

    /// Waits until the tree shows what the remote has. Says why that does not go on.
    pub fn wait_for_remote(&self) -> Option<String> {
        self.daemon()?.wait_until_begun()
    }

    /// How far pushing has come; `None` without a remote.
    pub fn remote_progress(&self) -> Option<Progress> {
        self.daemon().map(|daemon| daemon.progress(self))
    }

    /// Lets the remote's threads go on without a pause, because somebody waits.
    pub(super) fn hasten_remote(&self) {
        self.daemon().into_iter().for_each(|daemon| daemon.hasten());
    }

    fn daemon(&self) -> Option<Arc<Daemon>> {
        self.remote.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Enters a file that a remote's name appeared in.
    fn enter_shown(&self, path: PathBuf, object: Option<Id>) {
        let stamp =
            beneath::metadata(&self.shared.store.tree(), &path).map(|found| Stamp::of(&found)).unwrap_or_default();
        let objects = Arc::clone(&self.shared.objects);
        self.shared.note(move |catalog| {
            catalog.removed(&path);
            object.into_iter().for_each(|id| objects.name(id));
            catalog.found(&path, object.map_or(State::Closed, State::Released), (stamp, None), None);
        });
    }
}

impl Local for Archive {
    fn store(&self) -> &Store {
        self.store()
    }

    fn objects(&self) -> &Arc<Objects> {
        &self.shared.objects
    }

    fn shape(&self, path: &Path) -> Shape {
        use ResidentReason::{CutShort, Empty, Incompressible, NotUnderstood, Small};
        let catalog = self.shared.catalog();
        let entry = catalog.get(path);
        let is_given_up = entry.and_then(|entry| entry.failed.as_ref()).is_some_and(|failed| failed.retry.is_none());
        match entry.map(|entry| (&entry.state, entry.held)) {
            Some((State::Closed | State::Durable(_), _)) if is_given_up => return Shape::Stuck,
            None | Some((State::Staged | State::Closed | State::Durable(_), _)) => return Shape::Unsettled,
            Some((State::Sealed(_), Some(Held::Pinned | Held::Best))) => return Shape::Whole,
            Some((State::Sealed(_), _)) => {}
            Some((State::Archived(_, id) | State::Released(id), _)) => return Shape::Object(*id),
            Some((State::Resident(Small | Empty | CutShort(_) | Incompressible | NotUnderstood(_)), _)) => {
                return Shape::Whole;
            }
            // Its bytes are not known, or not known to be durable.
            Some((State::Resident(_), _)) => return Shape::Stuck,
        }
        // Not under the catalog's lock: marks are read from the device.
        drop(catalog);
        let stays_exact = || -> io::Result<bool> {
            let is_quantized =
                self.shared.store.settings().remote.as_ref().is_some_and(|of| of.newest == Newest::Quantized);
            let is_best = {
                let mut catalog = self.shared.catalog();
                let is_unfinished = |decision: Decision| decision.is_unfinished;
                catalog.decided().mark(path).is_some() || catalog.decided().decision(path).is_some_and(is_unfinished)
            };
            Ok(is_best
                || is_pinned(&self.shared.store.tree(), path)?
                || is_quantized && self.shared.store.profiles(path)?.coarsest() == Profile::Exact)
        };
        match stays_exact() {
            Ok(false) => Shape::Newest,
            // A mark that cannot be read may be one.
            Ok(true) | Err(_) => Shape::Whole,
        }
    }

    fn ahead(&self, path: &Path) -> io::Result<Ahead> {
        match self.encoder.encode_ahead(path) {
            Err(StepError::Superseded | StepError::Cancelled) => Ok(Ahead::Later),
            // The archive finds and reports the damage.
            Err(StepError::Object(error)) => {
                log::warn!("{}: travels whole: {error}", path.display());
                Ok(Ahead::Whole)
            }
            made => Ok(made?),
        }
    }

    fn let_go(&self, made: Hold) {
        drop(made);
        self.shared.notify();
    }

    fn tidy(&self) {
        self.encoder.before_ahead.let_go_old();
    }

    fn changes(&self) -> u64 {
        self.shared.catalog().files().changes() + self.shared.notes.load(Ordering::Relaxed)
    }

    fn moves(&self) -> u64 {
        self.moves.ended()
    }

    fn moved_since(&self, moves: u64) -> Option<Vec<PathBuf>> {
        self.moves.since(moves)
    }

    fn was_looked_at(&self) -> bool {
        self.looked.swap(false, Ordering::Relaxed)
    }

    fn appear(&self, path: &Path, object: Option<Id>, make: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<bool> {
        let Some(namespace) = self.shared.namespace() else { return Ok(false) };
        namespace.appear(&mut || {
            let made = make()?;
            if made {
                let shown = path.to_path_buf();
                self.enter_shown(shown, object);
            }
            Ok(made)
        })
    }

    fn replace(
        &self,
        path: &Path,
        expect: &Metadata,
        object: Option<Id>,
        commit: &mut dyn FnMut(&Path) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let Some(namespace) = self.shared.namespace() else { return Ok(false) };
        let outcome = namespace.exclusively(path, FileId::of(expect), &mut |reached| {
            let replaced = commit(reached)?;
            if replaced {
                let shown = path.to_path_buf();
                self.enter_shown(shown, object);
            }
            Ok(replaced)
        })?;
        Ok(outcome == Outcome::Done)
    }

    fn remove(&self, path: &Path, expect: &Metadata, still: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<bool> {
        let Some(namespace) = self.shared.namespace() else { return Ok(false) };
        Ok(namespace.remove(path, FileId::of(expect), still)? == Outcome::Done)
    }

    fn remove_directory(&self, path: &Path) -> io::Result<bool> {
        let Some(namespace) = self.shared.namespace() else { return Ok(false) };
        let Some(metadata) = found_at(&self.shared.store.tree(), path)? else { return Ok(false) };
        Ok(namespace.remove_directory(path, FileId::of(&metadata))? == Outcome::Done)
    }
}
