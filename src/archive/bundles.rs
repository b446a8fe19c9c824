//! Bundles of TensorFlow: files with tensors, whose names and places stand in the index beside them.
//!
//! A file with tensors is a state of its lineage only while its index and all other files of the bundle are durable.
//! TensorFlow writes the index last. The index never changes when a file with tensors is released: see
//! `container/bundle`.

use std::io;
use std::path::Path;

use crate::container::{Description, ReadAt, Shard, describe_at};

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

impl Archive {
    /// Describes the file at `path` in the tree, by the index beside it if it is of a bundle.
    pub(super) fn describe(&self, path: &Path, file: &dyn ReadAt) -> io::Result<Description> {
        describe_at(path, file, |index| self.source(index))
    }

    /// How far the bundle of a file is written. To be asked before the file is described.
    pub(super) fn progress(&self, path: &Path) -> io::Result<Progress> {
        let Some(shard) = Shard::of(path) else { return Ok(Progress { durable: true, in_order: true }) };
        let durable = self.catalog().has_durable_bundle(&shard, path);
        let tree = self.store.tree();
        let files = found_at(&tree, path)?.zip(found_at(&tree, &shard.index)?);
        Ok(Progress { durable, in_order: files.is_some_and(|(file, index)| !was_written_over(&file, &index)) })
    }
}

impl Catalog {
    /// Whether the index of a file with tensors, and the other files of its bundle, are durable.
    fn has_durable_bundle(&self, shard: &Shard, path: &Path) -> bool {
        let durable = |path: &Path| self.get(path).is_some_and(|entry| entry.state.is_durable());
        durable(&shard.index) && shard.files().all(|other| other == path || durable(&other))
    }

    /// The state of an examined file. A file of an unfinished bundle is no state. One whose bundle became durable
    /// meanwhile is examined again.
    pub(super) fn unless_without_index(&self, path: &Path, before: Progress, state: State) -> State {
        let Some(shard) = Shard::of(path) else { return state };
        if matches!(state, State::Resident(ResidentReason::Small | ResidentReason::Empty)) {
            return state;
        }
        match (self.has_durable_bundle(&shard, path), before) {
            (true, Progress { durable: false, .. }) => State::Closed,
            (true, Progress { in_order: true, .. }) => state,
            _ => State::Resident(ResidentReason::Unfinished),
        }
    }
}
