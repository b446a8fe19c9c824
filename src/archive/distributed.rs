//! Torch's distributed checkpoints: a directory is one only when `.metadata` is in it, and that tells the names of its tensors.
//!
//! What must never happen: that a save which was cut short counts as the newer state for which an older one loses something. So a
//! file of chunks is no state of its lineage before the `.metadata` beside it is durable.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use crate::container::{Description, METADATA, Model};
use crate::sync::Mutex;

use super::catalog::{Catalog, State, modified_ns};
use super::companions::Released;
use super::resident::ResidentReason;
use super::{Archive, FileId, found_at};

/// Models kept in memory. A checkpoint may have a file for each of its tensors, and the state after it is asked for, too.
const KEPT: usize = 4;

/// What the last few `.metadata` files say. Taken by the encoders, and never while another lock is.
#[derive(Debug, Default)]
pub(super) struct Models(Mutex<VecDeque<(Identity, Arc<Model>)>>);

/// A version of a file.
type Identity = (FileId, u64, i64);

impl Models {
    fn get(&self, identity: &Identity) -> Option<Arc<Model>> {
        let models = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        models.iter().find(|(kept, _)| kept == identity).map(|(_, model)| Arc::clone(model))
    }

    fn keep(&self, identity: Identity, model: &Arc<Model>) {
        let mut models = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        models.truncate(KEPT - 1);
        models.push_front((identity, Arc::clone(model)));
    }
}

impl Archive {
    /// Gives the chunks of a distributed checkpoint their names, from the `.metadata` beside the file. Where that tells nothing, they
    /// are kept as they are.
    pub(super) fn name_chunks(&self, path: &Path, description: &mut Description) -> io::Result<()> {
        if !description.is_of_chunks(path) {
            return Ok(());
        }
        match self.model_beside(path) {
            Ok(model) => description.name_chunks(&path.file_name().unwrap_or_default().to_string_lossy(), &model),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) => {
                log::info!("{}: its tensors stay exact, their names are not known: {error}", path.display());
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn model_beside(&self, path: &Path) -> io::Result<Arc<Model>> {
        let path = beside(path);
        let metadata = found_at(&self.store.tree(), &path)?.ok_or(io::ErrorKind::NotFound)?;
        let identity = (FileId::of(&metadata), metadata.size(), modified_ns(&metadata));
        if let Some(model) = self.models.get(&identity) {
            return Ok(model);
        }
        let released = match self.catalog().get(&path).map(|entry| &entry.state) {
            Some(State::Released(object)) => Some(*object),
            _ => None,
        };
        let model = Arc::new(match released {
            Some(object) => Model::read(&Released(self.recall.reader(object)?))?,
            None => Model::read(&self.open_file(&path)?)?,
        });
        self.models.keep(identity, &model);
        Ok(model)
    }
}

/// The `.metadata` in the directory of a file.
fn beside(path: &Path) -> PathBuf {
    path.with_file_name(METADATA)
}

impl Catalog {
    /// What a file of chunks is that was found to be this: no state of its lineage while its checkpoint is not finished.
    pub(super) fn unless_unfinished(&self, path: &Path, state: State) -> State {
        match self.get(&beside(path)).is_some_and(|entry| entry.state.is_durable()) {
            true => state,
            false => State::Resident(ResidentReason::Unfinished),
        }
    }

    /// The file at `path` is durable: if it is a `.metadata`, the files beside it are looked at again.
    pub(super) fn may_finish(&mut self, path: &Path) {
        if path.file_name() != Some(OsStr::new(METADATA)) {
            return;
        }
        self.reconsider(path.parent().unwrap_or(Path::new("")), ResidentReason::Unfinished);
    }
}
