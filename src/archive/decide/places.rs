//! Where files stand in their lineages, by time and by step.

use std::cmp::Ordering;
use std::sync::Arc;

use super::{File, touched};

/// Where a file stands in its lineage.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    pub(super) has_newer: bool,
    pub(super) is_history: bool,
    /// An archived file was history when it was archived. It needs no more than a later sealed state, and one with other
    /// bytes: the states between may be under way, and the last may repeat its bytes.
    pub(super) stays_history: bool,
    /// The first newer sealed state with other bytes. A twin is not a later state: it has the same samples, and is
    /// compared whole before it is believed.
    pub(super) after: Option<usize>,
    /// If it is history: when the later of the two states was last modified that make it so.
    pub(super) since: i64,
}

/// What orders the states of a lineage, beside each other in memory: a decision goes through all of a run several times.
#[derive(Clone, Copy)]
struct Fact<'a> {
    lineage: u64,
    modified_ns: i64,
    /// The first of the steps decides most often.
    step: Option<u64>,
    steps: &'a [u64],
    sequence: u64,
    print: (u64, u64),
    /// It counts as a newer state of others.
    is_newer: bool,
    touched: i64,
    at: usize,
}

impl<'a> Fact<'a> {
    fn of(at: usize, file: &'a File) -> Option<Fact<'a>> {
        let entry = &file.entry;
        let sealed = entry.state.sealed()?;
        Some(Fact {
            lineage: sealed.lineage,
            modified_ns: sealed.modified_ns,
            step: sealed.steps.first().copied(),
            steps: &sealed.steps,
            sequence: entry.sequence,
            print: sealed.print(),
            is_newer: false,
            touched: touched(entry),
            at,
        })
    }

    fn steps(&self, other: &Fact<'_>) -> Ordering {
        self.step.cmp(&other.step).then_with(|| self.steps.cmp(other.steps))
    }

    fn by_time(&self, other: &Fact<'_>) -> Ordering {
        let modified = self.lineage.cmp(&other.lineage).then(self.modified_ns.cmp(&other.modified_ns));
        modified.then_with(|| self.steps(other)).then(self.sequence.cmp(&other.sequence))
    }

    fn by_steps(&self, other: &Fact<'_>) -> Ordering {
        self.steps(other).then(self.modified_ns.cmp(&other.modified_ns)).then(self.sequence.cmp(&other.sequence))
    }
}

/// The places of files. `counts`: whether the one at a place may be a newer state of others.
pub(super) fn places<'a>(files: &'a [Arc<File>], counts: impl Fn(usize) -> bool) -> Vec<Place> {
    let mut places = vec![Place { since: i64::MIN, ..Place::default() }; files.len()];
    let fact = |(at, file): (usize, &'a Arc<File>)| {
        Some(Fact { is_newer: file.entry.counts_as_newer() && counts(at), ..Fact::of(at, file)? })
    };
    let mut states: Vec<Fact<'_>> = files.iter().enumerate().filter_map(fact).collect();
    states.sort_by(Fact::by_time);
    for lineage in states.chunk_by_mut(|a, b| a.lineage == b.lineage) {
        later(lineage, |at, after, stays| {
            let place = &mut places[at];
            (place.has_newer, place.stays_history) = (after.is_some(), stays);
            (place.after, place.since) = (after.map(|after| after.at), after.map_or(i64::MIN, |after| after.touched));
        });
        lineage.sort_by(Fact::by_steps);
        later(lineage, |at, after, stays| {
            let place = &mut places[at];
            place.stays_history &= stays;
            place.is_history = place.has_newer && after.is_some();
            let higher = after.filter(|_| place.is_history).map(|after| after.touched);
            place.since = higher.map_or(i64::MIN, |higher| place.since.max(higher));
        });
    }
    places
}

/// Tells of each state of a lineage, given in one order: its place, the first later sealed state with other bytes, and
/// whether a later state is sealed, and one with other bytes sealed or archived.
fn later<'a>(order: &[Fact<'a>], mut tell: impl FnMut(usize, Option<&Fact<'a>>, bool)) {
    // The next sealed state, and the first after it with other bytes; the bytes of the next, and whether any differ.
    let (mut next, mut other): (Option<&Fact<'_>>, Option<&Fact<'_>>) = (None, None);
    let (mut last, mut differ) = (None, false);
    for own in order.iter().rev() {
        let after = next.and_then(|next| if next.print == own.print { other } else { Some(next) });
        tell(own.at, after, next.is_some() && last.is_some_and(|last| differ || last != own.print));
        differ |= last.is_some_and(|last| last != own.print);
        last = Some(own.print);
        if own.is_newer {
            (next, other) = (Some(own), after);
        }
    }
}
