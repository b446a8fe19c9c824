//! Where the runs of an archived state are in a later file: at their place, or elsewhere because bytes came or went.

use std::io;

use rayon::prelude::*;

use crate::codec::{TILE_BYTES, lossless};
use crate::container::ReadAt;
use crate::recall::{Chain, walk};
use crate::store::object::TensorEntry;

use super::anchors::{Anchor, anchors, in_place, search};
use crate::encode::plan::Forecast;

/// Runs that are looked for first, spread over the archived file. Only between two that moved by different distances
/// all others are looked for.
const FIRST: usize = 64;
/// Anchors that must be found at one distance: a hash of few bytes may repeat.
const ANCHORS: u32 = 2;
/// One in so many neighbours that moved alike is compared, and all others only where two differ.
const COMPARED: usize = 8;
/// A difference must take less than this share of the same bytes alone: a read needs the parent then.
const SMALLER: f64 = 0.97;

/// A run of the parent and its place in the file.
pub(super) struct Match {
    /// Number in the parent's table.
    pub(super) parent: u32,
    /// Its first byte in the file.
    pub(super) start: u64,
}

/// Matches by ascending, disjoint places; what the compared runs take as differences and alone, in bytes for all.
pub(super) struct Matches {
    pub(super) matches: Vec<Match>,
    pub(super) forecast: Forecast,
}

/// Finds the runs of a state in a file.
pub(super) fn find(source: &(dyn ReadAt + Sync), base: &Chain) -> io::Result<Matches> {
    let entries = base.leaf().index().tensors.iter().enumerate();
    let runs: Vec<_> = entries.filter(|(_, entry)| !entry.coding.is_lossy() && !entry.tiles.is_empty()).collect();
    let search = Search { source, base, runs };
    let distances = search.distances()?;
    let placed = search.placed(&distances);
    search.compared(placed)
}

struct Search<'a> {
    source: &'a (dyn ReadAt + Sync),
    base: &'a Chain,
    /// The runs of the parent, with their numbers in its table.
    runs: Vec<(usize, &'a TensorEntry)>,
}

/// A run of the parent, by its place in [`Search::runs`], and its place in the file.
#[derive(Clone, Copy)]
struct Placed {
    run: usize,
    start: u64,
    distance: i64,
}

/// What a run takes as difference and alone, in bits.
type Bits = (f64, f64);

impl Search<'_> {
    /// How far each run moved.
    fn distances(&self) -> io::Result<Vec<i64>> {
        let mut found = vec![None; self.runs.len()];
        let every = self.runs.len().div_ceil(FIRST).max(1);
        self.look_for((0..self.runs.len()).step_by(every).collect(), &mut found)?;
        let known: Vec<(usize, i64)> = found.iter().enumerate().filter_map(|(run, at)| Some((run, (*at)?))).collect();
        let mut between: Vec<usize> = Vec::new();
        // Bytes came before the first run that moved.
        if let Some((run, _)) = known.first().filter(|(_, distance)| *distance != 0) {
            between.extend(0..*run);
        }
        for pair in known.windows(2).filter(|pair| pair[0].1 != pair[1].1) {
            between.extend(pair[0].0 + 1..pair[1].0);
        }
        self.look_for(between, &mut found)?;
        Ok(filled(&found))
    }

    /// Looks for some runs, first at their places.
    fn look_for(&self, runs: Vec<usize>, found: &mut [Option<i64>]) -> io::Result<()> {
        let looked: io::Result<Vec<_>> = runs.into_par_iter().map(|run| self.anchors(run)).collect();
        let mut elsewhere = Vec::new();
        let mut stayed = false;
        for (run, anchors, in_place) in looked? {
            if in_place >= ANCHORS as usize {
                (found[run], stayed) = (Some(0), true);
            } else if !anchors.is_empty() {
                elsewhere.push((run, anchors));
            }
        }
        // Where nothing came or went, values may have changed that much, as an optimizer's do.
        let same_length = self.source.size() == self.base.leaf().header().logical_len;
        if elsewhere.is_empty() || stayed && same_length {
            return Ok(());
        }
        let mut best = vec![(0, 0); self.runs.len()];
        for ((run, distance), count) in search(self.source, &elsewhere)? {
            // Of equally frequent ones the nearest, so that the order of a map does not matter.
            let rank = |(count, distance): (u32, i64)| (count, std::cmp::Reverse((distance.unsigned_abs(), distance)));
            if count >= ANCHORS && rank((count, distance)) > rank(best[run]) {
                best[run] = (count, distance);
            }
        }
        for (run, _) in elsewhere {
            found[run] = Some(best[run].1).filter(|_| best[run].0 > 0);
        }
        Ok(())
    }

    /// The anchors of a run's first tile, and how many of them are at the same place of the file.
    fn anchors(&self, run: usize) -> io::Result<(usize, Vec<Anchor>, usize)> {
        let (number, entry) = self.runs[run];
        let before = walk::decode(self.base, number, 0)?;
        let start = entry.extent.start;
        let anchors = anchors(entry.dtype, &before, start);
        let there = self.source.size().saturating_sub(start).min(before.len() as u64);
        let mut now = vec![0; there as usize];
        if there > 0 {
            self.source.read_exact_at(&mut now, start)?;
        }
        let in_place = in_place(&anchors, &before, &now, start);
        Ok((run, anchors, in_place))
    }

    /// The places of all runs that are in the file as a whole and in no other's place.
    fn placed(&self, distances: &[i64]) -> Vec<Placed> {
        let size = self.source.size();
        let place = |(run, (entry, &distance)): (usize, (&(usize, &TensorEntry), &i64))| {
            let start = entry.1.extent.start.checked_add_signed(distance)?;
            let end = entry.1.extent.end.checked_add_signed(distance)?;
            (end <= size).then_some(Placed { run, start, distance })
        };
        let mut placed: Vec<Placed> = self.runs.iter().zip(distances).enumerate().filter_map(place).collect();
        placed.sort_by_key(|placed| placed.start);
        let mut end = 0;
        placed.retain(|placed| {
            let fits = placed.start >= end;
            if fits {
                end = placed.start + self.len(placed.run);
            }
            fits
        });
        placed
    }

    fn len(&self, run: usize) -> u64 {
        let extent = &self.runs[run].1.extent;
        extent.end - extent.start
    }

    /// Those of the placed runs that are smaller as differences.
    fn compared(&self, placed: Vec<Placed>) -> io::Result<Matches> {
        let mut bits: Vec<Option<Bits>> = vec![None; placed.len()];
        let last = placed.len().saturating_sub(1);
        let some = |at: &usize| at.is_multiple_of(COMPARED) || *at == last;
        self.compare((0..placed.len()).filter(some).collect(), &placed, &mut bits)?;
        let helps = |bits: &Option<Bits>| bits.map(|(difference, alone)| difference < SMALLER * alone);
        let mut between = Vec::new();
        for first in (0..placed.len()).step_by(COMPARED) {
            let next = (first + COMPARED).min(last);
            let alike = placed[first].distance == placed[next].distance && helps(&bits[first]) == helps(&bits[next]);
            if !alike {
                between.extend(first + 1..next);
            }
        }
        self.compare(between, &placed, &mut bits)?;
        let (mut matches, mut forecast) = (Vec::new(), Forecast { super_step: 0.0, keyframe: 0.0 });
        let mut of_last = None;
        for (placed, bits) in placed.iter().zip(bits) {
            of_last = bits.or(of_last);
            if let Some((difference, alone)) = of_last
                && difference < SMALLER * alone
            {
                let share = self.len(placed.run) as f64 / 8.0;
                forecast.super_step += difference * share;
                forecast.keyframe += alone * share;
                matches.push(Match { parent: self.runs[placed.run].0 as u32, start: placed.start });
            }
        }
        Ok(Matches { matches, forecast })
    }

    /// Estimates what these runs take, by the tile in their middle, in bits per byte.
    fn compare(&self, which: Vec<usize>, placed: &[Placed], bits: &mut [Option<Bits>]) -> io::Result<()> {
        let compare = |at: usize| -> io::Result<(usize, Bits)> {
            let (number, entry) = self.runs[placed[at].run];
            let tile = entry.tiles.len() / 2;
            let before = walk::decode(self.base, number, tile)?;
            let mut now = vec![0; before.len()];
            self.source.read_exact_at(&mut now, placed[at].start + (tile * TILE_BYTES) as u64)?;
            let of = |parent| lossless::estimate(entry.dtype, &now, parent) / now.len().max(1) as f64;
            Ok((at, (of(Some(before.as_slice())), of(None))))
        };
        let compared: io::Result<Vec<_>> = which.into_par_iter().map(compare).collect();
        for (at, found) in compared? {
            bits[at] = Some(found);
        }
        Ok(())
    }
}

/// The distance of a run that was not found is that of its neighbours: the one before, else the one after.
fn filled(found: &[Option<i64>]) -> Vec<i64> {
    let mut last = found.iter().flatten().next().copied().unwrap_or(0);
    let mut fill = |distance: &Option<i64>| {
        last = distance.unwrap_or(last);
        last
    };
    found.iter().map(&mut fill).collect()
}
