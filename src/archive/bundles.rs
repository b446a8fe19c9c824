//! Bundles: files with tensors, whose names and places stand in the index beside them. The names of the files show which
//! ones belong together (`formats::siblings`).
//!
//! A file with tensors is a state of its lineage only while its index and all other files of the bundle are durable. The
//! index is written last, and never changes when a file with tensors is released.

use std::io;
use std::path::{Path, PathBuf};

use formats::{Description, ReadAt, Siblings, describe_at, siblings};

use super::catalog::{Catalog, State};
use super::distributed::was_written_over;
use super::resident::ResidentReason;
use super::{Archive, found_at};

/// How far a bundle was written, before its file was examined.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    durable: bool,
    in_order: bool,
}

/// An index, and the files with tensors that it belongs to.
type Bundle = (PathBuf, Vec<PathBuf>);

/// The bundle of a file, if its name shows the others.
fn bundle(path: &Path) -> Option<Bundle> {
    let Siblings { index, files } = siblings(path)?;
    Some((index, files?))
}

impl Archive {
    /// Describes the file at `path` in the tree, by the index beside it if it is of a bundle.
    pub(super) fn describe(&self, path: &Path, file: &dyn ReadAt) -> io::Result<Description> {
        describe_at(path, file, |index| self.source(index))
    }

    /// How far the bundle of a file is written. To be asked before the file is described.
    pub(super) fn progress(&self, path: &Path) -> io::Result<Progress> {
        let Some(bundle) = bundle(path) else { return Ok(Progress { durable: true, in_order: true }) };
        let durable = self.catalog().has_durable_bundle(&bundle, path);
        let tree = self.store.tree();
        let files = found_at(&tree, path)?.zip(found_at(&tree, &bundle.0)?);
        Ok(Progress { durable, in_order: files.is_some_and(|(file, index)| !was_written_over(&file, &index)) })
    }
}

impl Catalog {
    /// Whether the index of a file with tensors, and the other files of its bundle, are durable.
    fn has_durable_bundle(&self, (index, files): &Bundle, path: &Path) -> bool {
        let durable = |path: &Path| self.get(path).is_some_and(|entry| entry.state.is_durable());
        durable(index) && files.iter().all(|other| other == path || durable(other))
    }

    /// The state of an examined file. A file of an unfinished bundle is no state. One whose bundle became durable
    /// meanwhile is examined again.
    pub(super) fn unless_without_index(&self, path: &Path, before: Progress, state: State) -> State {
        let Some(bundle) = bundle(path) else { return state };
        if matches!(state, State::Resident(ResidentReason::Small | ResidentReason::Empty)) {
            return state;
        }
        match (self.has_durable_bundle(&bundle, path), before) {
            (true, Progress { durable: false, .. }) => State::Closed,
            (true, Progress { in_order: true, .. }) => state,
            _ => State::Resident(ResidentReason::Unfinished),
        }
    }
}
