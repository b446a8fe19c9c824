//! A daemon's part in a shared store: it shows that it lives, and becomes the keeper when there is none.
//!
//! The keeper's archive is one of its own, beside the one that serves the mount. The two share nothing but the store on its file
//! system: the keeper treats its own mount like one on another machine.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::store::fence::{Taken, is_gone};
use crate::store::shared::{BEAT, keeper_of};
use crate::store::{Store, beneath, locks};

use super::namespace::{Commit, FileId, Namespace, Outcome, found_at, remove_directory};
use super::{Archive, Status, keeping};

/// After an election that failed: no object could be loaded, say. Another daemon may do better meanwhile.
const NEXT_ELECTION: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Default)]
pub struct Keeper {
    /// The keeper's archive, while this daemon is that. Taken for moments only.
    keeping: Mutex<Option<Arc<Archive>>>,
}

impl Keeper {
    fn state(&self) -> MutexGuard<'_, Option<Arc<Archive>>> {
        self.keeping.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The keeper's archive, if it is this daemon's.
    pub(super) fn keeping(&self) -> Option<Arc<Archive>> {
        self.state().clone()
    }

    /// Takes part until the archive that serves stops. Another daemon becomes the keeper then.
    pub(super) fn run(&self, serving: &Archive) {
        // An election takes down the fences of all daemons, so one that fails is not tried again at once.
        let mut next = Instant::now();
        loop {
            if let Err(error) = serving.store().beat() {
                log::warn!("cannot show the other daemons that this one lives: {error}");
            }
            match self.keeping() {
                Some(archive) if archive.shared.is_stopping() || !archive.store().is_keepers() => {
                    log::warn!("this daemon is not the keeper any more; it only serves from now on");
                    self.end();
                }
                None if Instant::now() >= next => match elect(serving) {
                    Ok(elected) => *self.state() = elected,
                    Err(error) => {
                        log::error!("cannot become the keeper: {error}; next try in {NEXT_ELECTION:.0?}");
                        next = Instant::now() + NEXT_ELECTION;
                    }
                },
                _ => {}
            }
            if !serving.shared.rest(BEAT) {
                return self.end();
            }
        }
    }

    /// Ends the keeper's archive, after the steps under way.
    fn end(&self) {
        let archive = self.state().take();
        archive.into_iter().for_each(|archive| archive.stop());
    }

    /// What this daemon is.
    fn role(&self, store: &Store) -> String {
        // It may have slept until now, and not know yet that another one was elected.
        if self.keeping().is_some_and(|archive| archive.store().is_keepers()) {
            return "keeper".into();
        }
        match keeper_of(store.root()) {
            Some(keeper) => format!("serving, keeper on {keeper}"),
            None => "serving, and no daemon is the keeper yet".into(),
        }
    }

    /// The value of an attribute ([`Archive::attribute`]).
    pub(super) fn attribute(&self, store: &Store, path: &Path, name: &str) -> Option<Vec<u8>> {
        match name {
            "role" => Some(self.role(store).into_bytes()),
            _ => self.keeping()?.attribute(path, name),
        }
    }

    /// The status of the store, as far as this daemon knows it.
    pub(super) fn status(&self, store: &Store) -> Status {
        let known = self.keeping().map(|archive| archive.status()).unwrap_or_default();
        let (daemon, version) = (Some(std::process::id()), crate::version().into());
        Status { shared: Some(self.role(store)), daemon, version, ..known }
    }
}

/// Becomes the keeper, if there is none.
fn elect(serving: &Archive) -> io::Result<Option<Arc<Archive>>> {
    let Some(store) = serving.store().elect()? else { return Ok(None) };
    log::info!("this daemon is the keeper now: {}", store.tmp().display());
    let memory = serving.shared.recall.memory().status().limit;
    let archive = keeping(store, memory).map_err(io::Error::other)?;
    archive.start(Arc::new(OverLocks(Arc::clone(&archive.shared.store))));
    Ok(Some(archive))
}

/// The keeper's way to replace files: by the protocol of the store, like every daemon.
struct OverLocks(Arc<Store>);

impl OverLocks {
    /// Takes the file at a path, if it is the expected one, and replaces or removes it by `then`, which says whether it did.
    fn take(&self, path: &Path, expect: FileId, then: impl FnOnce(&Taken) -> io::Result<bool>) -> io::Result<Outcome> {
        let (above, name) = (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or_default());
        match beneath::open_dir(&self.0.tree(), above)
            .and_then(|directory| Taken::of(self.0.engine(), &directory, name, self.0.second_name()?))
        {
            Ok(taken) if FileId::of(taken.metadata()) == expect => then(&taken).map(Outcome::of_commit),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Outcome::Busy),
            Err(error) if !is_gone(&error) => Err(error),
            Ok(_) | Err(_) => Ok(Outcome::Changed),
        }
    }
}

impl Namespace for OverLocks {
    fn idle(&self, path: &Path, expect: FileId) -> Outcome {
        let file = beneath::open_file(&self.0.tree(), path);
        match file.and_then(|file| Ok((FileId::of(&file.metadata()?) == expect, locks::is_open(&file, false)?))) {
            Ok((true, true)) => Outcome::Busy,
            Ok((true, false)) => Outcome::Done,
            // An error of the path shows when the file is opened.
            Ok((false, _)) | Err(_) => Outcome::Changed,
        }
    }

    fn exclusively(&self, path: &Path, expect: FileId, commit: &mut Commit<'_>) -> io::Result<Outcome> {
        self.take(path, expect, |taken| commit(&taken.path()))
    }

    fn remove(&self, path: &Path, expect: FileId, still: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<Outcome> {
        if !found_at(&self.0.tree(), path)?.is_some_and(|found| FileId::of(&found) == expect && !found.is_dir()) {
            return Ok(Outcome::Changed);
        }
        let fence = self.0.fence(expect.ino)?;
        self.take(path, expect, |taken| {
            let removed = fence.stand_alone().and_then(|()| Ok(still()? && taken.remove(&fence)?));
            removed.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(false) } else { Err(error) })
        })
    }

    fn remove_directory(&self, path: &Path, expect: FileId) -> io::Result<Outcome> {
        remove_directory(&self.0.tree(), self.0.io(), path, expect)
    }
}
