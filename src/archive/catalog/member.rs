//! The index's facts of one file.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::archive::lineage;
use crate::hash::xxh3_64;
use crate::store::step_pattern;

use super::entry::Part;
use super::lineage::{Print, Rank, rank};
use super::{Entry, State};

/// The next step for a file, if it is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Seal,
    /// Seal it, or sync it, together with others.
    Together,
    Compare,
    Archive,
    Release,
}

/// Finds files of other lineages that may be the same state saved once more: those with the same tensors. A job's
/// ranks have the same tensors too, but other states; their names differ in numbers only. Files without tensors have
/// no kin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kin {
    signature: Option<u64>,
    /// Hash of the file's name without its digits.
    name: u64,
}

impl Kin {
    pub(super) fn of(path: &Path, entry: &Entry) -> Kin {
        let signature = match &entry.state {
            State::Sealed(sealed) => Some(sealed.signature).filter(|signature| lineage::has_tensors(*signature)),
            _ => None,
        };
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        let name: Vec<u8> = name.iter().copied().filter(|byte| !byte.is_ascii_digit()).collect();
        Kin { signature, name: xxh3_64(&name) }
    }

    pub(super) fn may_be_the_same(self, other: Kin) -> bool {
        self.signature.is_some() && self.signature == other.signature && self.name != other.name
    }
}

/// One entry in the index. All fields but `history` and `since` follow from the entry alone.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) path: PathBuf,
    pub(super) group: Option<Arc<step_pattern::Group>>,
    pub(super) rank: Rank,
    /// See [`Entry`].
    pub(super) opened: u64,
    pub(super) version: u64,
    /// Of a sealed or archived file.
    pub(super) lineage: Option<(u64, Print)>,
    pub(super) kin: Kin,
    /// It counts as a newer state of others.
    pub(super) sealed: bool,
    /// The step that is due. `Archive` only once the file is history.
    pub(super) work: Option<Work>,
    /// It waits until then for others.
    pub(super) turn: Option<Instant>,
    /// An attempt failed, and it is not yet time for another.
    pub(super) waits: Option<Instant>,
    /// Its group is complete only once it is history.
    pub(super) counts: bool,
    /// Its group waits for that without a limit. True also while nobody has examined it.
    pub(super) essential: bool,
    /// When it was last modified or written; nanoseconds since 1970.
    pub(super) touched: i64,
    /// A newer state of its lineage is sealed, and one with higher steps.
    pub(super) history: bool,
    /// If so: when the later of the two was last modified.
    pub(super) since: i64,
}

impl Member {
    pub(super) fn new(path: &Path, entry: &Entry, has_group: bool) -> Member {
        let part = entry.state.part();
        let group = has_group.then(|| step_pattern::Group::of(path, part == Some(Part::Whole))).flatten();
        let given_up = entry.failed.as_ref().is_some_and(|failed| failed.retry.is_none());
        let able = !entry.busy && !given_up && entry.held.is_none();
        let (lineage, touched) = match &entry.state {
            State::Sealed(sealed) | State::Archived(sealed, _) => {
                (Some((sealed.lineage, (sealed.len, sealed.sample))), sealed.modified_ns.min(entry.seen_ns))
            }
            _ => (None, entry.seen_ns),
        };
        let turn = entry.waits_until();
        let unfinished = matches!(
            entry.state,
            State::Staged | State::Closed | State::Durable(_) | State::Sealed(_) | State::Archived(..)
        );
        Member {
            path: path.to_path_buf(),
            group: group.map(Arc::new),
            rank: rank(entry),
            opened: entry.opened,
            version: entry.version,
            lineage,
            kin: Kin::of(path, entry),
            sealed: matches!(entry.state, State::Sealed(_)) && !entry.unsound,
            work: match &entry.state {
                State::Staged | State::Closed if turn.is_some() && !given_up => Some(Work::Together),
                State::Closed if !given_up => Some(Work::Seal),
                State::Durable(_) if !given_up => Some(Work::Compare),
                State::Sealed(_) if able => Some(Work::Archive),
                State::Archived(..) if able => Some(Work::Release),
                _ => None,
            },
            turn,
            waits: entry.failed.as_ref().and_then(|failed| failed.retry).filter(|_| !entry.due),
            // An archived file that became the newest again must be released in vain first: then it is sealed again.
            essential: part != Some(Part::Other) && !matches!(entry.state, State::Archived(..)),
            counts: unfinished && !given_up && entry.held.is_none(),
            touched,
            history: false,
            since: i64::MIN,
        }
    }

    /// The next step.
    pub(super) fn queued(&self) -> Option<Work> {
        self.work.filter(|work| *work != Work::Archive || self.history)
    }
}

/// A thread takes a step of a file.
#[derive(Debug)]
pub(super) struct Claim {
    /// See [`super::Entry`]; both as they were when it was taken.
    pub(super) opened: u64,
    pub(super) version: u64,
    /// Of a file that is being archived.
    pub(super) lineage: Option<(u64, Print)>,
    pub(super) kin: Kin,
    pub(super) work: Option<Work>,
    /// The file is being sealed, and nobody knows yet what it names as the best of a run.
    pub(super) may_speak: bool,
}
