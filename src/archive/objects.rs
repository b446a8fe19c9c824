//! Objects that a file can do with instead of one of its own; and those that nothing needs any more.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use crate::container::{InOrder, describe};
use crate::hash::Xxh3Of128;
use crate::recall::{Chain, Layout, stream};
use crate::store::durable::{CrashPoint, DeviceFile};
use crate::store::object::{Header, Id};
use crate::store::{Profile, Profiles};

use super::catalog::{Entry, Sealed, State};
use super::namespace::found_at;
use super::stays::{DAMAGED_STUB, OTHER_STORE, UNREADABLE};
use super::{Archive, ReadError};
use super::{original, settle};

impl Archive {
    /// An object that holds the file already: a copy is stored once. Either it decodes to these very bytes (a copy of
    /// a released file), or it was made from them and is as faithful as these profiles ask for. It must
    /// still decode: this file may be the last good copy of what it holds.
    pub(super) fn twin(
        &self,
        profiles: &Profiles,
        sealed: &Sealed,
        source: &DeviceFile,
        stale: &(dyn Fn() -> bool + Sync),
    ) -> io::Result<Option<Id>> {
        if let Some(object) = self.decoded_twin(sealed, source)? {
            return Ok(Some(object));
        }
        // An object that is not lossy decodes to what it was made from.
        let mut candidates = self.objects.of_signature(sealed.signature);
        candidates.retain(|h| h.lossy && (h.logical_len, h.source_sample) == (sealed.len, sealed.sample));
        candidates.retain(|header| self.is_faithful(header.id, profiles));
        if candidates.is_empty() {
            return Ok(None);
        }
        let original = original::hash_of(source, sealed.len, stale)?;
        candidates.retain(|header| header.original == original);
        candidates.sort_by_key(|header| header.id);
        Ok(candidates.iter().find(|header| self.decodes(header)).map(|header| header.id))
    }

    /// An object that decodes to the very bytes of a file, and still does. Of two states of a lineage hardly a sample is the
    /// same, so that other files are not even hashed.
    pub(super) fn decoded_twin(&self, sealed: &Sealed, source: &DeviceFile) -> io::Result<Option<Id>> {
        let mut candidates = self.objects.of_signature(sealed.signature);
        candidates.retain(|h| (h.logical_len, h.decoded_sample) == (sealed.len, sealed.sample));
        if candidates.is_empty() {
            return Ok(None);
        }
        let hash = settle::hash(&InOrder::new(source, &describe(source)?), sealed.len)?;
        candidates.retain(|header| header.decoded_hash == hash);
        candidates.sort_by_key(|header| header.id);
        Ok(candidates.iter().find(|header| self.decodes(header)).map(|header| header.id))
    }

    /// Whether an object decodes to other bytes than it was made from.
    pub(super) fn is_lossy(&self, id: Id) -> bool {
        self.objects.get(id).is_some_and(|(header, _)| header.lossy)
    }

    /// Whether an object was made with these profiles, or with one that is at least as fine as any of them.
    pub(super) fn is_faithful(&self, id: Id, profiles: &Profiles) -> bool {
        let Ok(object) = self.objects.open(id) else { return false };
        let made = object.index().profile.as_str();
        made == profiles.words() || made.parse().is_ok_and(|made: Profile| profiles.are_at_most_as_fine_as(made))
    }

    /// Whether an object decodes to what was archived.
    pub(super) fn decodes(&self, header: &Header) -> bool {
        let mut hash = Xxh3Of128::new();
        // From the device, whatever is in memory.
        let decoded = Chain::open(&self.objects, header.id).and_then(|chain| {
            let layout = Layout::of(chain.leaf());
            self.pool.install(|| {
                stream(&chain, &layout, |_, _, bytes| {
                    hash.update(bytes);
                    Ok::<(), ReadError>(())
                })
            })
        });
        if let Err(error) = &decoded {
            // Whatever memory has of it, nothing may be built on it.
            [error.object, header.id].into_iter().for_each(|id| self.recall.memory().forget(id));
            log::error!("{error}; a copy of its file is archived anew");
        }
        decoded.is_ok() && hash.digest() == header.decoded_hash
    }

    /// Removes objects that nothing needs. The newest of a lineage that goes on is needed: the next state will be a
    /// difference to it, even when its own file is gone.
    pub(super) fn collect(&self) {
        if !self.garbage.load(Ordering::Relaxed) {
            return;
        }
        self.thaw();
        let mut lineages = HashSet::new();
        {
            let catalog = self.catalog();
            if catalog.has_unsealed() {
                return;
            }
            // Before the flag, so that nobody finds nothing to do while it is being looked at.
            self.merges.store(1, Ordering::Relaxed);
            self.garbage.store(false, Ordering::Relaxed);
            lineages.extend(catalog.lineages());
        }
        let keep: HashSet<Id> = lineages.into_iter().filter_map(|lineage| self.objects.newest(lineage)).collect();
        let garbage = self.objects.take_garbage(&keep);
        // Perhaps there is more.
        self.garbage.fetch_or(!garbage.is_empty(), Ordering::Relaxed);
        garbage.iter().for_each(|id| self.recall.forget(*id));
        if !garbage.is_empty() {
            self.condemned.lock().unwrap_or_else(PoisonError::into_inner).extend(garbage);
            self.sweep();
        }
        self.merges.store(self.objects.next_merge(&keep).1, Ordering::Relaxed);
        *self.keep.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(keep);
    }

    /// Removes what nothing needs, as soon as it is durable that its names are gone, and what could not be removed before.
    /// Answers whether nothing of that is left.
    pub(super) fn sweep(&self) -> bool {
        let condemned = std::mem::take(&mut *self.condemned.lock().unwrap_or_else(PoisonError::into_inner));
        if !condemned.is_empty() {
            match self.sync_removed_names() {
                Ok(()) => self.objects.remove(&condemned),
                Err(error) => {
                    log::warn!("objects that nothing needs cannot be removed now: {error}");
                    self.condemned.lock().unwrap_or_else(PoisonError::into_inner).extend(condemned);
                    return false;
                }
            }
        }
        self.io().sweep()
    }

    /// Once the last stub that could not be read is gone, everything is known again.
    fn thaw(&self) {
        if self.objects.frozen().is_none() {
            return;
        }
        let unreadable =
            |entry: &Entry| matches!(entry.state, State::Resident(DAMAGED_STUB | UNREADABLE | OTHER_STORE));
        if !self.catalog().entries().any(|(_, entry)| unreadable(entry)) {
            self.objects.thaw();
        }
    }

    /// Makes durable that names are gone. A directory that is gone itself is so in the nearest one above that is not.
    fn sync_removed_names(&self) -> io::Result<()> {
        let directories = std::mem::take(&mut *self.unsynced.lock().unwrap_or_else(PoisonError::into_inner));
        let tree = self.store.tree();
        let exists = |directory: &PathBuf| {
            let is_there =
                |above: &&Path| found_at(&tree, above).is_ok_and(|found| found.is_some_and(|found| found.is_dir()));
            directory.ancestors().find(is_there).map(Path::to_path_buf)
        };
        let standing: BTreeSet<PathBuf> = directories.iter().filter_map(exists).collect();
        let result = standing.iter().try_for_each(|directory| {
            match self.sync_dir(directory, CrashPoint::RemovedNamesSynced) {
                // Gone since: its parent is asked at the next time.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(()),
                result => result,
            }
        });
        if result.is_err() {
            self.unsynced.lock().unwrap_or_else(PoisonError::into_inner).extend(directories);
        }
        result
    }
}
