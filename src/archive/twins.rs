//! Objects that a file can do with instead of one of its own: copies are stored once.

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::encode::{StepResult, Workers, original};
use crate::recall::{Chain, check_hash_on};
use crate::store::durable::DeviceFile;
use crate::store::object::{Header, Id, Index};
use crate::store::{Objects, Profile, Profiles, is_pinned, mark_recalled};
use formats::{InOrder, describe};

use super::catalog::Task;
use super::entry::{Sealed, State};
use super::scan;
use super::shared::Shared;

/// Looks among an archive's objects for one that a file can do with. It must still decode, since the file may be the last
/// good copy.
pub(super) struct Twins {
    shared: Arc<Shared>,
    workers: Arc<Workers>,
}

impl Twins {
    /// Of an archive with these parts.
    pub(super) fn new(shared: Arc<Shared>, workers: Arc<Workers>) -> Twins {
        Twins { shared, workers }
    }

    /// An object that decodes to the very bytes of a file (a copy of a released file), or was made from them and is as
    /// faithful as these profiles ask for. The caller names the object from now on.
    pub(super) fn find(
        &self,
        profiles: &Profiles,
        sealed: &Sealed,
        source: &DeviceFile,
        stale: &(dyn Fn() -> bool + Sync),
    ) -> StepResult<Option<Id>> {
        if let Some(object) = self.find_decoded(sealed, source)? {
            return Ok(Some(object));
        }
        let mut candidates = self.candidates(sealed, |header| header.source_sample);
        // An object that is not lossy decodes to its original.
        candidates.retain(|header| header.lossy && is_faithful(&self.shared.objects, header.id, profiles));
        if candidates.is_empty() {
            return Ok(None);
        }
        let original = original::hash_of(source, sealed.len, stale)?;
        candidates.retain(|header| header.original == original);
        Ok(self.first_that_decodes(candidates))
    }

    fn find_decoded(&self, sealed: &Sealed, source: &DeviceFile) -> io::Result<Option<Id>> {
        let mut candidates = self.candidates(sealed, |header| header.decoded_sample);
        if candidates.is_empty() {
            return Ok(None);
        }
        let hash = scan::hash(&InOrder::new(source, &describe(source)?), sealed.len)?;
        candidates.retain(|header| header.decoded_hash == hash);
        Ok(self.first_that_decodes(candidates))
    }

    /// Objects with a file's length and this sample of its bytes. Of two states of a lineage hardly a sample is the same,
    /// so that other files are not even hashed.
    fn candidates(&self, sealed: &Sealed, sample: impl Fn(&Header) -> u64) -> Vec<Header> {
        let mut candidates = self.shared.objects.of_sample(sealed.sample);
        let of = |header: &Header| (header.signature, header.logical_len, sample(header));
        candidates.retain(|header| of(header) == (sealed.signature, sealed.len, sealed.sample));
        candidates
    }

    /// Names the first of these objects that still decodes.
    fn first_that_decodes(&self, mut candidates: Vec<Header>) -> Option<Id> {
        let objects = &self.shared.objects;
        candidates.sort_by_key(|header| header.id);
        let decodes = |header: &Header| {
            // Before it is read: garbage is collected meanwhile.
            let named = objects.try_name(header.id);
            let decodes = named && self.decodes(header);
            if named && !decodes {
                objects.unname(header.id);
            }
            decodes
        };
        candidates.into_iter().find(decodes).map(|header| header.id)
    }

    /// Whether an object decodes to the archived bytes.
    fn decodes(&self, header: &Header) -> bool {
        // From the device, never from memory.
        let decoded = Chain::open(&self.shared.objects, header.id)
            .and_then(|chain| check_hash_on(Some(self.workers.pool()), &chain, header.decoded_hash));
        if let Err(error) = &decoded {
            // No new object may use its states from memory.
            [error.object, header.id].into_iter().for_each(|id| self.shared.recall.memory().forget(id));
            log::error!("{error}; a copy of its file is archived anew");
        }
        decoded.is_ok()
    }

    /// Whether a file that was just closed may be a copy of a decoded object. Reads no byte. Files that were there at
    /// the mount do not count.
    pub(super) fn may_be_copy(&self, path: &Path, version: u64, sealed: &Sealed) -> bool {
        let is_new = {
            let catalog = self.shared.catalog();
            let entry = catalog.get(path).filter(|entry| entry.version == version);
            entry.is_some_and(|entry| entry.held.is_none() && (!entry.found || entry.keeps.is_some()))
        };
        is_new && !self.candidates(sealed, |header| header.decoded_sample).is_empty()
    }

    /// Compares a file with the decoded object that it may be a copy of. A copy is archived by that object: it may
    /// become a stub without a newer state, since nothing is lost. Any other file is sealed.
    pub(super) fn compare(&self, task: &Task, sealed: &Arc<Sealed>) -> StepResult<()> {
        let (shared, path, version) = (&self.shared, task.path.as_path(), task.version);
        let source = shared.open_file(path)?;
        if !sealed.describes(&source.metadata()?) {
            shared.catalog().advance(path, version, State::Closed);
            return Ok(());
        }
        if let Some(object) = self.find_decoded(sealed, &source)? {
            self.note_lossy_copy(path, object);
            if !is_pinned(&shared.store.tree(), path)? {
                log::info!("{}: a copy of object {object}", path.display());
                let state = State::Archived(Arc::new(Sealed { copy: true, ..Sealed::clone(sealed) }), object);
                shared.catalog().advance(path, version, state);
                return Ok(());
            }
            // It stays as it is, with a note of its object.
            mark_recalled(&source, object);
            shared.catalog().keep(path, version, Some(object));
            shared.objects.unname(object);
        }
        shared.catalog().advance(path, version, State::Sealed(Arc::clone(sealed)));
        Ok(())
    }

    /// Says so at once if a copy of a lossy file has a name that asks for more than it holds.
    fn note_lossy_copy(&self, path: &Path, object: Id) {
        let Ok(asked) = self.shared.store.profiles(path) else { return };
        let named_by = self.shared.catalog().decided().named_by(path);
        let is_less = self.shared.objects.is_lossy(object)
            && (named_by.is_some() || !is_faithful(&self.shared.objects, object, &asked));
        let Some(copied) = self.shared.objects.open(object).ok().filter(|_| is_less) else { return };
        let Index { origin, profile, .. } = copied.index();
        let wants = match named_by {
            Some(by) => format!("{} names it as the best", by.display()),
            None => format!("{} is asked for", asked.words()),
        };
        log::warn!(
            "{}: is a copy of {origin}, which is lossy ({profile}), but {wants}; save the original again, if you still \
             have it",
            path.display()
        );
    }
}

/// Whether an object was made with these profiles, or with one that is at least as fine as any of them.
pub(super) fn is_faithful(objects: &Objects, id: Id, profiles: &Profiles) -> bool {
    let Ok(object) = objects.open(id) else { return false };
    let made = object.index().profile.as_str();
    made == profiles.words() || made.parse().is_ok_and(|made: Profile| profiles.are_at_most_as_fine_as(made))
}
