//! The housekeeper frees room; no program waits for it. It notes restores, empties the trash, applies the policy, removes
//! unneeded objects, and rebases states over ones that no file names.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::encode::Workers;
use crate::store::durable::CrashPoint;
use crate::store::object::Id;

use super::merge::{Merger, Merges};
use super::namespace::found_at;
use super::reserve::Reserve;
use super::restores::Restores;
use super::retention::Retention;
use super::shared::{LONGEST_PAUSE, Shared};
use super::trash::Trash;

/// The housekeeper's own data. No other thread sees it.
pub(super) struct Housekeeper {
    shared: Arc<Shared>,
    reserve: Arc<Reserve>,
    retention: Arc<Retention>,
    restores: Arc<Restores>,
    merges: Arc<Merges>,
    /// Objects that nothing needs, which are still there.
    condemned: Vec<Id>,
    merger: Merger,
    trash: Trash,
    /// The times of the next merge, and of the next try to remove condemned objects.
    merge_at: Instant,
    sweep_at: Option<Instant>,
}

impl Housekeeper {
    /// One that has looked at nothing yet.
    pub(super) fn new(
        shared: &Arc<Shared>,
        reserve: &Arc<Reserve>,
        retention: &Arc<Retention>,
        restores: &Arc<Restores>,
        merges: &Arc<Merges>,
        workers: &Arc<Workers>,
    ) -> Housekeeper {
        Housekeeper {
            shared: Arc::clone(shared),
            reserve: Arc::clone(reserve),
            retention: Arc::clone(retention),
            restores: Arc::clone(restores),
            merges: Arc::clone(merges),
            condemned: Vec::new(),
            merger: Merger::new(Arc::clone(shared), Arc::clone(merges), Arc::clone(workers)),
            trash: Trash::of(Arc::clone(shared)),
            merge_at: Instant::now(),
            sweep_at: None,
        }
    }

    /// Works until the archive stops.
    pub(super) fn run(&mut self) {
        while !self.shared.is_stopping() {
            self.restores.note();
            self.reserve.look();
            self.trash.empty();
            self.collect();
            let retention = Arc::clone(&self.retention);
            retention.run(|| self.collect());
            if self.sweep_at.is_none_or(|at| at <= Instant::now()) {
                self.sweep_at = if self.sweep() { None } else { Some(Instant::now() + LONGEST_PAUSE) };
            }
            if self.wait() {
                self.merge_at = Instant::now() + self.merger.step();
            }
        }
        self.restores.note();
        self.sweep();
    }

    /// Waits until there may be something to do; answers whether it is time to merge. That comes last of all: it
    /// frees room, and must not take the encoders' time.
    fn wait(&self) -> bool {
        let shared = &self.shared;
        let mut catalog = shared.catalog();
        let now = Instant::now();
        let merges = self.merges.pending() > 0 && catalog.steps().is_calm();
        // A closed file may need an object, so the collection waits until that file is sealed.
        let garbage = shared.garbage.load(Ordering::Relaxed);
        let work =
            merges && self.merge_at <= now || garbage && !catalog.steps().has_unsealed() || self.restores.has_news();
        if !work && !shared.is_stopping() {
            // Every note wakes it; garbage that could not be collected yet is looked at again.
            let idle = if garbage { LONGEST_PAUSE } else { Duration::from_secs(3600) };
            let merge_in = merges.then(|| self.merge_at.saturating_duration_since(now));
            let retain_in = Some(self.retention.until(idle));
            let sweep_in = self.sweep_at.map(|at| at.saturating_duration_since(now));
            let wait = [merge_in, retain_in, sweep_in, self.trash.until(), self.reserve.until()]
                .into_iter()
                .flatten()
                .fold(idle, Duration::min);
            catalog = shared.wait(&shared.wake.housekeeper, catalog, wait);
        }
        drop(catalog);
        merges && self.merge_at <= Instant::now()
    }

    /// Removes objects that nothing needs. The newest of a lineage that goes on is needed: the next state will be a
    /// difference to it, even when its own file is gone.
    fn collect(&mut self) {
        let shared = &self.shared;
        if !shared.garbage.load(Ordering::Relaxed) {
            return;
        }
        self.thaw();
        let mut lineages = HashSet::new();
        {
            let mut catalog = shared.catalog();
            if catalog.steps().has_unsealed() {
                return;
            }
            // Before the flag, so that `queue` never seems empty during the look.
            self.merges.set_pending(1);
            shared.garbage.store(false, Ordering::Relaxed);
            lineages.extend(catalog.files().lineages());
        }
        let keep = lineages.into_iter().filter_map(|lineage| shared.objects.newest(lineage)).collect();
        let garbage =
            shared.objects.take_garbage(&keep, &|id| !shared.store.is_shared() || shared.ripe().contains(&id));
        // Perhaps there is more.
        shared.garbage.fetch_or(!garbage.is_empty(), Ordering::Relaxed);
        garbage.iter().for_each(|id| shared.recall.forget(*id));
        if !garbage.is_empty() {
            self.condemned.extend(garbage);
            self.sweep();
        }
        self.merger.keep(keep);
    }

    /// Removes condemned objects once the removal of their names is durable. Returns whether none is left.
    fn sweep(&mut self) -> bool {
        if !self.condemned.is_empty() {
            if let Err(error) = self.sync_removed_names() {
                log::warn!("unneeded objects cannot be removed now: {error}");
                return false;
            }
            self.shared.objects.remove(&std::mem::take(&mut self.condemned));
            self.shared.room_came();
        }
        self.shared.io().sweep()
    }

    /// Once the last stub that could not be read is gone, everything is known again.
    fn thaw(&self) {
        if self.shared.objects.frozen().is_none() {
            return;
        }
        if !self.shared.catalog().files().iter().any(|(_, entry)| entry.state.hides_an_object()) {
            self.shared.objects.freeze(false);
        }
    }

    /// Makes durable that names are gone. A directory that is gone itself is so in the nearest one above that is not.
    fn sync_removed_names(&self) -> io::Result<()> {
        let directories = std::mem::take(self.shared.catalog().unsynced());
        let tree = self.shared.store.tree();
        let exists = |directory: &PathBuf| {
            let is_there =
                |above: &&Path| found_at(&tree, above).is_ok_and(|found| found.is_some_and(|found| found.is_dir()));
            directory.ancestors().find(is_there).map(Path::to_path_buf)
        };
        let standing: BTreeSet<PathBuf> = directories.iter().filter_map(exists).collect();
        let result = standing.iter().try_for_each(|directory| {
            match self.shared.sync_dir(directory, CrashPoint::RemovedNamesSynced) {
                // Gone since: its parent is asked at the next time.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(()),
                result => result,
            }
        });
        if result.is_err() {
            self.shared.catalog().unsynced().extend(directories);
        }
        result
    }
}
