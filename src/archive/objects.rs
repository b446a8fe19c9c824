//! Objects that a file can do with instead of one of its own.

use std::io;

use crate::container::{InOrder, describe};
use crate::encode::{StepResult, original};
use crate::recall::{Chain, check_hash_on};
use crate::store::durable::DeviceFile;
use crate::store::object::{Header, Id};
use crate::store::{Profile, Profiles};

use super::Archive;
use super::catalog::Sealed;
use super::scan;

impl Archive {
    /// An existing object for this file, so that a copy is stored once. It decodes to these very bytes (a copy of a
    /// released file), or was made from them and is as faithful as these profiles ask for. It must still decode,
    /// since this file may be the last good copy. The caller names the object from now on.
    pub(super) fn twin(
        &self,
        profiles: &Profiles,
        sealed: &Sealed,
        source: &DeviceFile,
        stale: &(dyn Fn() -> bool + Sync),
    ) -> StepResult<Option<Id>> {
        if let Some(object) = self.decoded_twin(sealed, source)? {
            return Ok(Some(object));
        }
        // An object that is not lossy decodes to its original.
        let mut candidates = self.objects.of_signature(sealed.signature);
        candidates.retain(|h| h.lossy && (h.logical_len, h.source_sample) == (sealed.len, sealed.sample));
        candidates.retain(|header| self.is_faithful(header.id, profiles));
        if candidates.is_empty() {
            return Ok(None);
        }
        let original = original::hash_of(source, sealed.len, stale)?;
        candidates.retain(|header| header.original == original);
        Ok(self.first_that_decodes(candidates))
    }

    /// Names the first of these objects that still decodes.
    fn first_that_decodes(&self, mut candidates: Vec<Header>) -> Option<Id> {
        candidates.sort_by_key(|header| header.id);
        let decodes = |header: &Header| {
            // Before it is read: garbage is collected meanwhile.
            let named = self.objects.try_name(header.id);
            let decodes = named && self.decodes(header);
            if named && !decodes {
                self.objects.unname(header.id);
            }
            decodes
        };
        candidates.into_iter().find(decodes).map(|header| header.id)
    }

    /// Objects that may decode to the bytes of a file, by its length and a sample. Of two states of a lineage hardly
    /// a sample is the same, so that other files are not even hashed.
    pub(super) fn copy_candidates(&self, sealed: &Sealed) -> Vec<Header> {
        let mut candidates = self.objects.of_signature(sealed.signature);
        candidates.retain(|h| (h.logical_len, h.decoded_sample) == (sealed.len, sealed.sample));
        candidates
    }

    /// An object that decodes to the very bytes of a file, and still does. The caller names it from now on.
    pub(super) fn decoded_twin(&self, sealed: &Sealed, source: &DeviceFile) -> io::Result<Option<Id>> {
        let mut candidates = self.copy_candidates(sealed);
        if candidates.is_empty() {
            return Ok(None);
        }
        let hash = scan::hash(&InOrder::new(source, &describe(source)?), sealed.len)?;
        candidates.retain(|header| header.decoded_hash == hash);
        Ok(self.first_that_decodes(candidates))
    }

    /// Whether an object decodes to other bytes than it was made from.
    pub(super) fn is_lossy(&self, id: Id) -> bool {
        self.objects.is_lossy(id)
    }

    /// Whether an object was made with these profiles, or with one that is at least as fine as any of them.
    pub(super) fn is_faithful(&self, id: Id, profiles: &Profiles) -> bool {
        let Ok(object) = self.objects.open(id) else { return false };
        let made = object.index().profile.as_str();
        made == profiles.words() || made.parse().is_ok_and(|made: Profile| profiles.are_at_most_as_fine_as(made))
    }

    /// Whether an object decodes to the archived bytes.
    pub(super) fn decodes(&self, header: &Header) -> bool {
        // From the device, never from memory.
        let decoded = Chain::open(&self.objects, header.id)
            .and_then(|chain| check_hash_on(Some(self.workers.pool()), &chain, header.decoded_hash));
        if let Err(error) = &decoded {
            // No new object may use its states from memory.
            [error.object, header.id].into_iter().for_each(|id| self.recall.memory().forget(id));
            log::error!("{error}; a copy of its file is archived anew");
        }
        decoded.is_ok()
    }
}
