//! The order of a lineage's states, and which of them are history.
//!
//! Two orders count. By time: training goes on from the newest state. By the steps in the names: a run that was
//! resumed from step 60 writes 64 after 140, and `resume_from_checkpoint=True` still picks 140. The last state of
//! either order stays exact.

use std::collections::BTreeMap;
use std::ops::Bound;

use super::{Entry, State};

/// The age of a state within its lineage: by modification time, then by the steps in its name (an unpacked archive
/// has whole seconds), then by the order of closing.
pub(super) type Rank = (i64, Vec<u64>, u64);

/// The height of a state within its lineage: by the steps in its name, then by modification time, then by the order
/// of closing.
type Height = (Vec<u64>, i64, u64);

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

fn height(rank: &Rank) -> Height {
    (rank.1.clone(), rank.0, rank.2)
}

/// The states of a lineage in one order. A key's last part is the entry's sequence.
#[derive(Debug)]
struct Order<A, B> {
    sealed: BTreeMap<(A, B, u64), Print>,
    archived: BTreeMap<(A, B, u64), Print>,
    /// The last sealed state, and the last one with other bytes than it.
    last: Option<((A, B, u64), Print)>,
    other: Option<(A, B, u64)>,
}

impl<A, B> Default for Order<A, B> {
    fn default() -> Order<A, B> {
        Order { sealed: BTreeMap::new(), archived: BTreeMap::new(), last: None, other: None }
    }
}

impl<A: Ord + Clone, B: Ord + Clone> Order<A, B> {
    fn states(&mut self, sealed: bool) -> &mut BTreeMap<(A, B, u64), Print> {
        if sealed { &mut self.sealed } else { &mut self.archived }
    }

    /// Whether a sealed state with other bytes comes later.
    fn is_history(&self, key: &(A, B, u64), print: Print) -> bool {
        self.other.as_ref().is_some_and(|other| key < other)
            || self.last.as_ref().is_some_and(|(last, of_last)| key < last && print != *of_last)
    }

    /// Whether a later state is sealed, and one with other bytes is sealed or archived. A file that was
    /// history when it was archived needs no more: the states between may be under way, and the last may repeat its bytes.
    fn stays_history(&self, key: &(A, B, u64), print: Print) -> bool {
        let later = (Bound::Excluded(key), Bound::Unbounded);
        let mut sealed = self.sealed.range::<(A, B, u64), _>(later).peekable();
        let archived = self.archived.range::<(A, B, u64), _>(later);
        sealed.peek().is_some() && sealed.chain(archived).any(|(_, other)| *other != print)
    }

    /// The first later sealed state with other bytes. A twin is not a later state: it has the same samples, and is
    /// compared whole before it is believed.
    fn after(&self, key: &(A, B, u64), print: Print) -> Option<&(A, B, u64)> {
        let later = (Bound::Excluded(key), Bound::Unbounded);
        self.sealed.range::<(A, B, u64), _>(later).find(|(_, other)| **other != print).map(|(key, _)| key)
    }

    /// Finds the last states again. Returns the sequences of all states that may have become history, or ceased to
    /// be.
    fn advance(&mut self) -> Vec<u64> {
        let last = self.sealed.last_key_value().map(|(key, print)| (key.clone(), *print));
        let other = last.as_ref().and_then(|(_, last)| {
            self.sealed.iter().rev().find(|(_, print)| *print != last).map(|(key, _)| key.clone())
        });
        if (&last, &other) == (&self.last, &self.other) {
            return Vec::new();
        }
        // Everything before both stays history.
        let from = std::mem::replace(&mut self.other, other.clone()).min(other);
        self.last = last;
        let from = from.map_or(Bound::Unbounded, Bound::Included);
        let range = (from, Bound::Unbounded);
        self.sealed.range(range.clone()).chain(self.archived.range(range)).map(|(key, _)| key.2).collect()
    }
}

/// The sealed and the archived files of a lineage.
#[derive(Debug, Default)]
pub(super) struct Lineage {
    by_time: Order<i64, Vec<u64>>,
    by_steps: Order<Vec<u64>, i64>,
}

impl Lineage {
    pub(super) fn insert(&mut self, rank: Rank, print: Print, sealed: bool) {
        self.by_steps.states(sealed).insert(height(&rank), print);
        self.by_time.states(sealed).insert(rank, print);
    }

    pub(super) fn remove(&mut self, rank: &Rank, sealed: bool) {
        self.by_steps.states(sealed).remove(&height(rank));
        self.by_time.states(sealed).remove(rank);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_time.sealed.is_empty() && self.by_time.archived.is_empty()
    }

    /// Whether a sealed state with other bytes is newer, and one has higher steps, or the same and is newer.
    pub(super) fn is_history(&self, rank: &Rank, print: Print) -> bool {
        self.by_time.is_history(rank, print) && self.by_steps.is_history(&height(rank), print)
    }

    /// Whether an archived state is history still, in both orders.
    pub(super) fn stays_history(&self, rank: &Rank, print: Print) -> bool {
        self.by_time.stays_history(rank, print) && self.by_steps.stays_history(&height(rank), print)
    }

    /// Whether a sealed state with other bytes is newer.
    pub(super) fn has_newer(&self, rank: &Rank, print: Print) -> bool {
        self.by_time.is_history(rank, print)
    }

    /// The first newer sealed state with other bytes.
    pub(super) fn after(&self, rank: &Rank, print: Print) -> Option<&Rank> {
        self.by_time.after(rank, print)
    }

    /// The last older sealed state with other bytes.
    pub(super) fn before(&self, rank: &Rank, print: Print) -> Option<&Rank> {
        let older = self.by_time.sealed.range::<Rank, _>(..rank);
        older.rev().find(|(_, other)| **other != print).map(|(key, _)| key)
    }

    /// Sequences of the states that make this one history.
    pub(super) fn successors(&self, rank: &Rank, print: Print) -> impl Iterator<Item = u64> {
        let (newer, higher) = (self.by_time.after(rank, print), self.by_steps.after(&height(rank), print));
        newer.map(|key| key.2).into_iter().chain(higher.map(|key| key.2))
    }

    /// A sealed or archived state came or went. Returns the sequences of all states that may have become history, or
    /// ceased to be.
    pub(super) fn advance(&mut self) -> Vec<u64> {
        let mut changed = self.by_time.advance();
        changed.extend(self.by_steps.advance());
        changed.sort_unstable();
        changed.dedup();
        changed
    }
}
