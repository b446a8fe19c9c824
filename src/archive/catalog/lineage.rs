//! The order of a lineage's states, and which of them are history.

use std::collections::BTreeMap;
use std::ops::Bound;

use super::{Entry, State};

/// Which state of a lineage is the older one: by modification time, then by the steps in their names (an archive is
/// unpacked with whole seconds), then by the order of closing.
pub(super) type Rank = (i64, Vec<u64>, u64);

/// Length and samples of a file: equal for byte-identical files.
pub(super) type Print = (u64, u64);

/// Where an entry stands in [`Rank`]'s order.
pub(super) fn rank(entry: &Entry) -> Rank {
    match &entry.state {
        State::Sealed(sealed) | State::Archived(sealed, _) => {
            (sealed.modified_ns, sealed.steps.clone(), entry.sequence)
        }
        _ => (0, Vec::new(), entry.sequence),
    }
}

/// The sealed and the archived files of a lineage.
#[derive(Debug, Default)]
pub(super) struct Lineage {
    pub(super) sealed: BTreeMap<Rank, Print>,
    pub(super) archived: BTreeMap<Rank, Print>,
    /// The newest sealed one, and the newest that has other bytes than that.
    pub(super) newest: Option<(Rank, Print)>,
    pub(super) other: Option<Rank>,
}

impl Lineage {
    pub(super) fn states(&mut self, sealed: bool) -> &mut BTreeMap<Rank, Print> {
        if sealed { &mut self.sealed } else { &mut self.archived }
    }

    /// Whether a sealed state with other bytes is newer.
    pub(super) fn is_history(&self, rank: &Rank, print: Print) -> bool {
        self.other.as_ref().is_some_and(|other| rank < other)
            || self.newest.as_ref().is_some_and(|(newest, of_newest)| rank < newest && print != *of_newest)
    }

    /// The first newer sealed state with other bytes. A twin is not a newer state: it has the same samples, and is
    /// compared whole before it is believed.
    pub(super) fn after(&self, rank: &Rank, print: Print) -> Option<&Rank> {
        let newer = (Bound::Excluded(rank), Bound::Unbounded);
        self.sealed.range::<Rank, _>(newer).find(|(_, other)| **other != print).map(|(rank, _)| rank)
    }
}
