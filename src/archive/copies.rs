//! Copies of released files: the same bytes once more, under another name.

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::container::{InOrder, describe};
use crate::store::durable::DeviceFile;
use crate::store::object::{Header, Id};
use crate::store::{is_pinned, mark_recalled};

use super::catalog::{Sealed, State};
use super::{Archive, samples, settle};

impl Archive {
    /// Whether a file that was just closed is a copy of what an object decodes to: then it is archived by that.
    pub(super) fn is_copy(&self, path: &Path, version: u64, sealed: &Sealed, source: &DeviceFile) -> io::Result<bool> {
        let Some(object) = self.copy_of(path, version, sealed, source)? else { return Ok(false) };
        log::info!("{}: a copy of object {object}", path.display());
        self.note_lossy_copy(path, object);
        let sealed = Arc::new(Sealed { copy: true, ..Sealed::clone(sealed) });
        self.objects.name(object);
        if !self.catalog().advance(path, version, State::Archived(sealed, object)) {
            self.objects.unname(object);
        }
        Ok(true)
    }

    /// The object that decodes to the very bytes of a file that was just closed: a copy of a released file, or one that
    /// was recalled. It may become a stub at once, without a newer state: nothing is lost by that. Hashes the file only
    /// if there is an object of its length with the same tensors, and not what lay there when the store was mounted.
    fn copy_of(&self, path: &Path, version: u64, sealed: &Sealed, source: &DeviceFile) -> io::Result<Option<Id>> {
        let looked_at = {
            let catalog = self.catalog();
            let entry = catalog.get(path).filter(|entry| entry.version == version);
            entry.is_none_or(|entry| entry.held.is_some() || (entry.found && entry.keeps.is_none()))
        };
        let candidates = self.objects.of_signature(sealed.signature);
        // Of two states of a lineage hardly a sample is the same: other files are not even hashed.
        let sample = samples::short(sealed.sample);
        let like = |h: &Header| h.logical_len == sealed.len && (h.sample == 0 || h.sample == sample);
        if looked_at || !candidates.iter().any(like) {
            return Ok(None);
        }
        let hash = settle::hash(&InOrder::new(source, &describe(source)?), sealed.len)?;
        let mut twins = candidates.into_iter().filter(|header| like(header) && header.decoded_hash == hash);
        let twin = twins.find(|header| self.decodes(header)).map(|header| header.id);
        // It stays as it is, and it is remembered what it is.
        if let Some(object) = twin
            && is_pinned(&self.store.tree(), path)?
        {
            self.note_lossy_copy(path, object);
            mark_recalled(source, object);
            self.catalog().keep(path, version, Some(object), &self.objects);
            return Ok(None);
        }
        Ok(twin)
    }
}
