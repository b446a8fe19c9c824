//! Copies of released files: the same bytes once more, under another name.

use std::io;
use std::sync::Arc;

use crate::encode::StepResult;
use crate::store::durable::DeviceFile;
use crate::store::object::Id;
use crate::store::{is_pinned, mark_recalled};

use super::Archive;
use super::catalog::{Sealed, State, Task};

impl Archive {
    /// Whether a file that was just closed may be a copy of a decoded object. Reads no byte. Files that were there at
    /// the mount do not count.
    pub(super) fn may_be_copy(&self, path: &std::path::Path, version: u64, sealed: &Sealed) -> bool {
        let is_new = {
            let catalog = self.catalog();
            let entry = catalog.get(path).filter(|entry| entry.version == version);
            entry.is_some_and(|entry| entry.held.is_none() && (!entry.found || entry.keeps.is_some()))
        };
        is_new && !self.copy_candidates(sealed).is_empty()
    }

    /// Compares a file with the decoded object that it may be a copy of. A copy is archived by that object: it may
    /// become a stub without a newer state, since nothing is lost. Any other file is sealed.
    pub(super) fn compare_with_objects(&self, task: &Task, sealed: &Arc<Sealed>) -> StepResult<()> {
        let (path, version) = (task.path.as_path(), task.version);
        let source = self.open_file(path)?;
        if !sealed.describes(&source.metadata()?) {
            self.catalog().advance(path, version, State::Closed);
            return Ok(());
        }
        let state = match self.copy_of(task, sealed, &source)? {
            Some(object) => {
                log::info!("{}: a copy of object {object}", path.display());
                self.note_lossy_copy(path, object);
                State::Archived(Arc::new(Sealed { copy: true, ..Sealed::clone(sealed) }), object)
            }
            None => {
                let model = self.finished(path)?;
                let mut catalog = self.catalog();
                let state = catalog.unless_unfinished(path, model.as_deref(), State::Sealed(Arc::clone(sealed)));
                // Under the same lock, so that no file of its checkpoint that becomes durable meanwhile is missed.
                catalog.advance(path, version, state);
                return Ok(());
            }
        };
        self.advance_named(path, version, state);
        Ok(())
    }

    /// The object that decodes to the very bytes of a file, which its caller names from now on.
    fn copy_of(&self, task: &Task, sealed: &Sealed, source: &DeviceFile) -> io::Result<Option<Id>> {
        let path = task.path.as_path();
        let Some(object) = self.decoded_twin(sealed, source)? else { return Ok(None) };
        // It stays as it is, with a note of its object.
        if is_pinned(&self.store.tree(), path)? {
            self.note_lossy_copy(path, object);
            mark_recalled(source, object);
            self.catalog().keep(path, task.version, Some(object), &self.objects);
            self.objects.unname(object);
            return Ok(None);
        }
        Ok(Some(object))
    }

    /// Changes a file's state to one whose object the caller has named. Takes the name back if the file has changed
    /// meanwhile.
    pub(super) fn advance_named(&self, path: &std::path::Path, version: u64, state: State) -> bool {
        let object = if let State::Archived(_, object) = &state { Some(*object) } else { None };
        let advanced = self.catalog().advance(path, version, state);
        object.filter(|_| !advanced).into_iter().for_each(|object| self.objects.unname(object));
        advanced
    }
}
