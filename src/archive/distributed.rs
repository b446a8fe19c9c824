//! Distributed checkpoints: an index names the tensors and the files, and is written last (`formats::siblings`).
//!
//! An interrupted save must never count as a newer state: an older checkpoint would lose something for it. So a file
//! of chunks is a state of its lineage only while the save is finished. Then the index lists the file, and each listed
//! file is durable, long enough and not written over since.

use std::collections::VecDeque;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use crate::store::Objects;
use crate::sync::Mutex;
use formats::{Description, Model, is_index, is_named_elsewhere, siblings};

use super::catalog::{Catalog, Entry, State, modified_ns};
use super::resident::ResidentReason;
use super::{Archive, FileId, found_at};

/// Models kept in memory: of the checkpoint being sealed, of the one being archived, of the state after that, and one
/// more. Thousands of files may ask for one model.
const KEPT: usize = 4;

/// The content of the last few indexes. Sealers and encoders take this lock, and hold no other then.
#[derive(Debug, Default)]
pub(super) struct Models(Mutex<VecDeque<(Identity, Arc<Model>)>>);

/// A version of a file: the file, its length and the time of its last change, which no program can set.
type Identity = (FileId, u64, (i64, i64));

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
    /// Gives the chunks of a distributed checkpoint their names, from the index beside the file. Chunks without a
    /// name stay exact.
    pub(super) fn name_chunks(&self, path: &Path, description: &mut Description) -> io::Result<()> {
        let Some(index) = listed_by(path) else { return Ok(()) };
        match self.model_of(&index) {
            Ok(model) => description.name_chunks(path, &model),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) => {
                log::info!("{}: its tensors stay exact, because their names are unknown: {error}", path.display());
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn model_of(&self, index: &Path) -> io::Result<Arc<Model>> {
        let metadata = found_at(&self.store.tree(), index)?.ok_or(io::ErrorKind::NotFound)?;
        let identity = (FileId::of(&metadata), metadata.size(), (metadata.ctime(), metadata.ctime_nsec()));
        if let Some(model) = self.models.get(&identity) {
            return Ok(model);
        }
        let model = Arc::new(Model::read(&self.source(index)?)?);
        self.models.keep(identity, &model);
        Ok(model)
    }
}

/// Whether a file was there when the one that names its tensors was written, and was written again since.
pub(super) fn was_written_over(file: &Metadata, metadata: &Metadata) -> bool {
    // Equal times mean one tick of the kernel's clock.
    let is_younger = || file.created().is_ok_and(|born| metadata.modified().is_ok_and(|written| born >= written));
    is_later(file, metadata) && !is_younger()
}

fn is_later(file: &Metadata, metadata: &Metadata) -> bool {
    modified_ns(file) > modified_ns(metadata)
}

/// The index that lists a file and those that it needs.
fn listed_by(path: &Path) -> Option<PathBuf> {
    siblings(path).filter(|siblings| siblings.files.is_none()).map(|siblings| siblings.index)
}

impl Archive {
    /// The model in the index beside a file of chunks, if the checkpoint's files agree with it. `None` for any
    /// other file.
    pub(super) fn finished(&self, path: &Path) -> io::Result<Option<Arc<Model>>> {
        let Some(index) = listed_by(path) else { return Ok(None) };
        let tree = self.store.tree();
        let Some(metadata) = found_at(&tree, &index)? else { return Ok(None) };
        let model = match self.model_of(&index) {
            Ok(model) => model,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let own = path.file_name().unwrap_or_default();
        let mut is_listed = false;
        // If a copy gets the index first, all its chunks are later. A mixture of earlier and later chunks is of two
        // saves.
        let (mut earlier, mut later) = (false, false);
        for (name, least) in model.files() {
            is_listed |= own == name;
            let path = path.with_file_name(name);
            let is_released = matches!(self.catalog().get(&path).map(|entry| &entry.state), Some(State::Released(_)));
            let Some(file) = found_at(&tree, &path)? else { return Ok(None) };
            if was_written_over(&file, &metadata) || (file.len() < least && !is_released) {
                return Ok(None);
            }
            earlier |= is_later(&metadata, &file);
            later |= is_later(&file, &metadata);
        }
        Ok(Some(model).filter(|_| is_listed && !(earlier && later)))
    }
}

impl Catalog {
    /// The state of a durable file whose model is from [`Archive::finished`]. A chunk of an unfinished save is no
    /// state of its lineage. A copy of a decoded object is compared first.
    pub(super) fn unless_unfinished(&mut self, path: &Path, model: Option<&Model>, state: State) -> State {
        let Some(index) = listed_by(path).filter(|_| matches!(state, State::Sealed(_))) else { return state };
        let durable = |path: &Path| self.get(path).is_some_and(|entry| entry.state.is_durable());
        let all = |model: &Model| {
            let mut others = model.files().map(|(name, _)| path.with_file_name(name)).filter(|other| other != path);
            durable(&index) && others.all(|other| durable(&other))
        };
        match model.is_some_and(all) {
            true => {
                // The other files may have waited for this one.
                self.reconsider(directory(path));
                state
            }
            false => State::Resident(ResidentReason::Unfinished),
        }
    }

    /// An index is durable: the files beside it are looked at again.
    pub(super) fn metadata_came(&mut self, path: &Path) {
        if is_index(path) {
            self.reconsider(directory(path));
        }
    }

    /// A file came that no sealer examines, or that is too small to be a state. Files that wait for it are examined
    /// again.
    pub(super) fn may_finish(&mut self, path: &Path) {
        if is_index(path) || is_named_elsewhere(path) {
            self.reconsider(directory(path));
        }
    }

    /// The file at `path` goes, or is being written. If it is an index, its files are no finished save any more.
    pub(super) fn may_unfinish(&mut self, path: &Path, objects: &Objects) {
        let index = path;
        if !is_index(index) {
            return;
        }
        let needs = |path: &PathBuf| siblings(path).is_some_and(|siblings| siblings.index == index);
        let states = self.beside(directory(path), |entry| entry.state.waits_or_is_a_state());
        for path in states.into_iter().filter(needs) {
            let object = match self.get(&path).map(|entry| &entry.state) {
                Some(State::Archived(_, object)) => Some(*object),
                _ => None,
            };
            self.close_anew(&path);
            object.into_iter().for_each(|object| objects.unname(object));
        }
    }

    /// Lets the files in a directory that wait for the rest of their checkpoint be examined again.
    fn reconsider(&mut self, directory: &Path) {
        let waits = |entry: &Entry| matches!(entry.state, State::Resident(ResidentReason::Unfinished));
        for path in self.beside(directory, waits) {
            self.close_anew(&path);
        }
    }
}

fn directory(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new(""))
}
