//! Copies of released files: the same bytes once more, under another name.

use std::io;
use std::path::Path;

use crate::container::{InOrder, describe};
use crate::store::durable::DeviceFile;
use crate::store::is_pinned;
use crate::store::object::{Header, Id};

use super::catalog::Sealed;
use super::{Archive, samples, settle};

impl Archive {
    /// The object that decodes to the very bytes of a file that was just closed: a copy of a released file, or one that
    /// was recalled. It may become a stub at once, without a newer state: nothing is lost by that. Hashes the file only
    /// if there is an object of its length with the same tensors, and not what lay there when the store was mounted.
    pub(super) fn copy_of(
        &self,
        path: &Path,
        version: u64,
        sealed: &Sealed,
        source: &DeviceFile,
    ) -> io::Result<Option<Id>> {
        let looked_at = {
            let catalog = self.catalog();
            let entry = catalog.get(path).filter(|entry| entry.version == version);
            entry.is_none_or(|entry| entry.held.is_some() || (entry.found && entry.keeps.is_none()))
        };
        let candidates = self.objects.of_signature(sealed.signature);
        // Of two states of a lineage hardly a sample is the same: other files are not even hashed.
        let sample = samples::short(sealed.sample);
        let like = |h: &Header| h.logical_len == sealed.len && (h.sample == 0 || h.sample == sample);
        if looked_at || !candidates.iter().any(like) || is_pinned(&self.store.tree(), path)? {
            return Ok(None);
        }
        let hash = settle::hash(&InOrder::new(source, &describe(source)?), sealed.len)?;
        let mut twins = candidates.into_iter().filter(|header| like(header) && header.decoded_hash == hash);
        Ok(twins.find(|header| self.decodes(header)).map(|header| header.id))
    }
}
