//! The condition of one file of a checkpoint, as retention sees it.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::store::object::Object;
use crate::store::{Store, Stub, beneath};
use formats::{cut_short, describe_at};

use super::Archive;
use super::catalog::State;
use super::lineage::has_tensors;
use super::resident::ResidentReason;

/// The condition of a regular file's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Condition {
    /// It is durable, and can be read.
    Whole {
        /// stepfs finds tensors in it. Of a checkpoint that was cut short it finds none.
        has_tensors: bool,
    },
    /// It is open for writing, not durable yet, or not known.
    BeingWritten,
    /// It ends before its format says: its writer died.
    CutShort,
    /// It is an unreadable stub, or belongs to a save that is not finished.
    Damaged,
}

impl Archive {
    /// The condition of a file's content.
    pub(super) fn condition(&self, path: &Path) -> Condition {
        let (version, known) = {
            let catalog = self.catalog();
            let Some(entry) = catalog.get(path) else { return Condition::BeingWritten };
            let known = match &entry.state {
                State::Staged | State::Closed | State::Resident(ResidentReason::NotDurable) => {
                    return Condition::BeingWritten;
                }
                State::Resident(ResidentReason::Unfinished) => return Condition::Damaged,
                State::Resident(ResidentReason::CutShort(_)) => return Condition::CutShort,
                State::Resident(why) if why.hides_an_object() => return Condition::Damaged,
                State::Released(id) => match self.objects.get(*id) {
                    Some((header, _)) if self.recall.failure(*id).is_none() => Some(has_tensors(header.signature)),
                    _ => return Condition::Damaged,
                },
                State::Durable(_) | State::Sealed(_) | State::Archived(..) | State::Resident(_) => entry.has_tensors,
            };
            (entry.version, known)
        };
        if let Some(has_tensors) = known {
            return Condition::Whole { has_tensors };
        }
        let condition = condition_on_disk(&self.store, path);
        if let Condition::Whole { has_tensors } = condition {
            self.catalog().examined(path, version, Some(has_tensors));
        }
        condition
    }
}

/// The condition of a file in a store's tree that nobody writes.
pub fn condition_on_disk(store: &Store, path: &Path) -> Condition {
    let tree = store.tree();
    let look = || {
        let file = store.io().open_beneath(&tree, path, 0)?;
        if let Some(stub) = Stub::read_on(&file, store.id())? {
            let header = Object::header_of(store.io(), &store.objects(), stub.object)?.0;
            return Ok(Condition::Whole { has_tensors: has_tensors(header.signature) });
        }
        let description = describe_at(path, &file, |beside| beneath::open_file(&tree, beside))?;
        Ok::<_, std::io::Error>(match cut_short(path, &file, &description)? {
            Some(_) => Condition::CutShort,
            None => Condition::Whole { has_tensors: !description.tensors.is_empty() },
        })
    };
    look().unwrap_or(Condition::Damaged)
}
