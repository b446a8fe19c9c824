//! The archive, as a mirror sees it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use crate::encode::StepError;
use crate::mirror::{Ahead, Daemon, Place, Progress, Settings, Shape, Source, Told};
use crate::store::{Newest, Objects, Profile, Store, is_pinned};
use crate::sync::Mutex;

use super::ahead::encode_ahead;
use super::archiving::Encoder;
use super::catalog::Catalog;
use super::decide::Decision;
use super::entry::{Entry, Held, State};
use super::resident::ResidentReason;
use super::shared::Shared;

/// The archive, as a mirror sees it, and the thread that keeps the mirror behind it.
pub struct Mirrored {
    shared: Arc<Shared>,
    encoder: Arc<Encoder>,
    /// While mounted with a mirror. Taken for moments.
    daemon: Mutex<Option<Arc<Daemon>>>,
}

impl Mirrored {
    /// Of an archive with these parts.
    pub(super) fn of(shared: &Arc<Shared>, encoder: &Arc<Encoder>) -> Arc<Mirrored> {
        let (shared, encoder) = (Arc::clone(shared), Arc::clone(encoder));
        Arc::new(Mirrored { shared, encoder, daemon: Mutex::default() })
    }

    /// Starts the thread that keeps a mirror behind this store, until the archive stops. Once for each mount, after
    /// [`super::Archive::start`].
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn connect(self: &Arc<Self>, place: Arc<dyn Place>, settings: Settings) -> io::Result<()> {
        let daemon = Daemon::start(Arc::clone(self) as Arc<dyn Source>, place, settings)?;
        *self.daemon.lock().unwrap_or_else(PoisonError::into_inner) = Some(daemon);
        Ok(())
    }

    /// Ends the thread.
    pub(super) fn disconnect(&self) {
        let daemon = self.daemon.lock().unwrap_or_else(PoisonError::into_inner).take();
        daemon.into_iter().for_each(|daemon| daemon.stop());
    }

    /// How far the mirror has come; `None` without one.
    pub fn progress(&self) -> Option<Progress> {
        self.daemon().map(|daemon| daemon.progress(self))
    }

    /// Lets the thread go on without a pause, because somebody waits.
    pub(super) fn hasten(&self) {
        self.daemon().into_iter().for_each(|daemon| daemon.hasten());
    }

    fn daemon(&self) -> Option<Arc<Daemon>> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How the newest file of a lineage is to travel, by the settings.
    fn newest(&self, path: &Path) -> io::Result<Shape> {
        let newest = self.shared.store.settings().mirror.as_ref().map_or(Newest::Exact, |mirror| mirror.newest);
        Ok(match newest {
            // An object that was made ahead, and may be on its way, is not shown.
            Newest::Quantized if !self.stays_exact(path)? => Shape::Newest,
            Newest::None if !self.stays_exact(path)? => Shape::Unsettled,
            _ => Shape::Whole,
        })
    }

    /// Whether a file that is the newest of its lineage is to stay exact.
    fn stays_exact(&self, path: &Path) -> io::Result<bool> {
        let is_best = {
            let mut catalog = self.shared.catalog();
            let is_unfinished = |decision: Decision| decision.is_unfinished;
            catalog.decided().mark(path).is_some() || catalog.decided().decision(path).is_some_and(is_unfinished)
        };
        // A released file loses nothing under this profile.
        let is_quantized =
            self.shared.store.settings().mirror.as_ref().is_some_and(|of| of.newest == Newest::Quantized);
        let is_exact = || Ok::<_, io::Error>(self.shared.store.profiles(path)?.coarsest() == Profile::Exact);
        Ok(is_best || is_pinned(&self.shared.store.tree(), path)? || is_quantized && is_exact()?)
    }
}

/// Lets the mirror look at what is at and below a path.
pub(super) fn touch(catalog: &mut Catalog, path: &Path) {
    let below: Vec<Arc<Path>> = catalog.files().below(path).map(|(path, _)| path.into()).collect();
    catalog.decided().touched().add(below.into_iter().chain([path.into()]));
}

fn shape(entry: &Entry) -> Shape {
    use ResidentReason::{CutShort, Empty, Incompressible, NotUnderstood, Small, Trash};
    match (&entry.state, entry.held) {
        (State::Closed | State::Durable(_), _) if entry.is_given_up() => Shape::Stuck,
        (State::Staged | State::Closed | State::Durable(_), _) => Shape::Unsettled,
        (State::Sealed(_), Some(Held::Pinned | Held::Best)) => Shape::Whole,
        (State::Sealed(_), _) => Shape::Newest,
        (State::Archived(_, id) | State::Released(id), _) => Shape::Object(*id),
        (State::Resident(Small | Empty | CutShort(_) | Incompressible | NotUnderstood(_) | Trash), _) => Shape::Whole,
        // Its bytes are not known, or not known to be durable.
        (State::Resident(_), _) => Shape::Stuck,
    }
}

impl Source for Mirrored {
    fn store(&self) -> &Store {
        &self.shared.store
    }

    fn objects(&self) -> &Arc<Objects> {
        &self.shared.objects
    }

    fn changes(&self) -> u64 {
        // Called again and again.
        self.encoder.before_ahead.let_go_old();
        self.shared.catalog().decided().touched().changes() + self.shared.notes.load(Ordering::Relaxed)
    }

    fn changed(&self, all: bool, also: Vec<PathBuf>) -> Vec<Told> {
        self.shared.await_notes(Path::new(""));
        let shapes: Vec<(Arc<Path>, Option<Shape>)> = {
            let mut catalog = self.shared.catalog();
            let mut touched = catalog.decided().touched().take();
            if all {
                touched = catalog.files().iter().map(|(path, _)| path.into()).collect();
            }
            touched.extend(also.into_iter().map(Arc::from));
            touched.into_iter().map(|path| (Arc::clone(&path), catalog.get(&path).map(shape))).collect()
        };
        let told = |(path, shape): (Arc<Path>, Option<Shape>)| match shape {
            Some(Shape::Newest) => (path.to_path_buf(), self.newest(&path).map(Some)),
            shape => (path.to_path_buf(), Ok(shape)),
        };
        shapes.into_iter().map(told).collect()
    }

    fn ahead(&self, path: &Path) -> io::Result<Ahead> {
        match encode_ahead(&self.encoder, path) {
            Err(StepError::Superseded | StepError::Cancelled) => Ok(Ahead::Later),
            // The archive finds and reports the damage.
            Err(StepError::Object(error)) => {
                log::warn!("{}: travels whole: {error}", path.display());
                Ok(Ahead::Whole)
            }
            made => Ok(made?),
        }
    }
}
