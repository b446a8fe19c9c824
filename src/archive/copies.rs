//! Copies of released files: the same bytes once more, under another name.

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::store::durable::DeviceFile;
use crate::store::object::Id;
use crate::store::{is_pinned, mark_recalled};

use super::Archive;
use super::catalog::{Sealed, State};

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
    /// was recalled. It may become a stub at once, without a newer state: nothing is lost by that. What lay there when the
    /// store was mounted is not looked at.
    fn copy_of(&self, path: &Path, version: u64, sealed: &Sealed, source: &DeviceFile) -> io::Result<Option<Id>> {
        let looked_at = {
            let catalog = self.catalog();
            let entry = catalog.get(path).filter(|entry| entry.version == version);
            entry.is_none_or(|entry| entry.held.is_some() || (entry.found && entry.keeps.is_none()))
        };
        if looked_at {
            return Ok(None);
        }
        let twin = self.decoded_twin(sealed, source)?;
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
