//! Runs: the pieces of a file in which no tensor is known. Each is kept like a tensor, always lossless: floats by byte
//! planes, everything else by what repeats.
//!
//! A run has a name. A run of the state before gives its name and its length to a run here, which becomes a difference
//! to it: at the same place, or all runs of the file moved by one distance. So chains, super-steps, re-parenting and
//! repair treat runs as tensors, and a wrong match costs space only. All other bytes become new runs.

mod kind;

use std::io;
use std::ops::Range;

use rayon::prelude::*;

use crate::recall::{Chain, walk};
use crate::store::object::TensorEntry;
use codec::{TILE_BYTES, lossless};
use formats::{Description, ReadAt, Role, Tensor};

use super::fingerprint;
use super::plan::{Forecast, Plan, Planned};
use kind::{Kind, SAMPLE_BYTES, kind};

/// Bytes are one kind in pieces of this size.
const BLOCK: u64 = 64 << 10;
/// Runs of a file that is not matched, at most about: beyond that they become longer.
const MOST_RUNS: u64 = 4096;
/// Shorter pieces are left to the skeleton, where they are compressed together.
const LEAST_BYTES: u64 = 4096;
/// One in so many neighbours of one type is compared with the state before, for all of them.
const COMPARED: usize = 8;
/// A difference must take less than this share of the same bytes alone: a read needs the parent then.
const SMALLER: f64 = 0.97;
/// Shown where a tensor's role is explained.
const WHY: &str = "a run of a file that stepfs does not understand";

/// A file with runs for tensors, and how each is encoded.
pub(super) struct Runs {
    pub(super) description: Description,
    pub(super) planned: Planned,
}

/// True if a file is kept in runs.
pub(super) fn are_in(description: &Description) -> bool {
    description.tensors.is_empty()
}

/// Finds the runs of a file. `sample` is its fingerprint, for the names of new runs.
pub(super) fn find(
    source: &(dyn ReadAt + Sync),
    description: &Description,
    sample: u64,
    base: Option<&Chain>,
    super_step: bool,
) -> io::Result<Runs> {
    let found = base.map(|base| matches(source, base)).transpose()?;
    // A match is smaller than the bytes alone, so a keyframe never is; without any match there is nothing to tell.
    let forecast = found.as_ref().map(|found| found.forecast).filter(|_| super_step);
    let forecast = forecast.filter(|forecast| !forecast.wants_keyframe());
    let mut tensors: Vec<(Tensor, Option<u32>)> = Vec::new();
    let mut extents: Vec<Range<u64>> = Vec::new();
    for Match { parent, entry, start } in found.into_iter().flat_map(|found| found.matches) {
        let extent = start..start + (entry.extent.end - entry.extent.start);
        extents.push(extent.clone());
        tensors.push((tensor(entry.path.clone(), Kind { dtype: entry.dtype, phase: 0 }, extent), Some(parent)));
    }
    let gaps = crate::store::object::gaps(extents.into_iter(), source.size());
    for (kind, extent) in new_runs(source, &gaps)? {
        let name = kind::name(sample, extent.start);
        tensors.push((tensor(name, kind, extent), None));
    }
    tensors.sort_by_key(|(tensor, _)| tensor.extent.start);
    let plan = |(index, (tensor, parent)): (usize, &(Tensor, Option<u32>))| Plan::of_run(index, tensor, *parent);
    let plans = tensors.iter().enumerate().map(plan).collect();
    let mut description = description.clone();
    description.tensors = tensors.into_iter().map(|(tensor, _)| tensor).collect();
    Ok(Runs { description, planned: Planned { plans, forecast } })
}

/// A run of the state before, and where this file has it.
struct Match<'a> {
    /// Its number in the table of the state before.
    parent: u32,
    entry: &'a TensorEntry,
    start: u64,
}

/// Runs of the state before whose differences are smaller, ascending; what they take with it and alone.
struct Matches<'a> {
    matches: Vec<Match<'a>>,
    forecast: Forecast,
}

/// The runs that the state before and this file have, for the distance that saves most: none, or as far as the length
/// changed. So bytes may come or go at the end, or within the first run.
fn matches<'a>(source: &(dyn ReadAt + Sync), base: &'a Chain) -> io::Result<Matches<'a>> {
    let stayed = matches_at(source, base, 0)?;
    let distance = source.size().wrapping_sub(base.leaf().header().logical_len).cast_signed();
    if distance == 0 {
        return Ok(stayed);
    }
    let moved = matches_at(source, base, distance)?;
    let saved = |found: &Matches| found.forecast.keyframe - found.forecast.super_step;
    Ok(if saved(&moved) > saved(&stayed) { moved } else { stayed })
}

fn matches_at<'a>(source: &(dyn ReadAt + Sync), base: &'a Chain, distance: i64) -> io::Result<Matches<'a>> {
    let place = |(number, entry): (usize, &'a TensorEntry)| {
        let start = entry.extent.start.checked_add_signed(distance)?;
        let end = entry.extent.end.checked_add_signed(distance)?;
        let fits = end <= source.size() && !entry.coding.is_lossy() && !entry.tiles.is_empty();
        fits.then_some(Match { parent: number as u32, entry, start })
    };
    let placed: Vec<Match> = base.leaf().index().tensors.iter().enumerate().filter_map(place).collect();
    // What the tile in the middle takes as difference and alone, in bits per byte; `None`: as in the run before.
    let compare = |at: usize| -> io::Result<Option<(f64, f64)>> {
        let Match { parent, entry, start } = placed[at];
        if !at.is_multiple_of(COMPARED) && placed[at - 1].entry.dtype == entry.dtype {
            return Ok(None);
        }
        let tile = entry.tiles.len() / 2;
        let before = walk::decode(base, parent as usize, tile)?;
        let mut now = vec![0; before.len()];
        source.read_exact_at(&mut now, start + (tile * TILE_BYTES) as u64)?;
        let of = |parent| lossless::estimate(entry.dtype, &now, parent) / now.len().max(1) as f64;
        Ok(Some((of(Some(before.as_slice())), of(None))))
    };
    let compared: io::Result<Vec<_>> = (0..placed.len()).into_par_iter().map(compare).collect();
    let mut found = Matches { matches: Vec::new(), forecast: Forecast { super_step: 0.0, keyframe: 0.0 } };
    let (mut difference, mut alone) = (0.0, 0.0);
    for (placed, compared) in placed.into_iter().zip(compared?) {
        (difference, alone) = compared.unwrap_or((difference, alone));
        if difference < SMALLER * alone {
            let share = (placed.entry.extent.end - placed.entry.extent.start) as f64 / 8.0;
            found.forecast.super_step += difference * share;
            found.forecast.keyframe += alone * share;
            found.matches.push(placed);
        }
    }
    Ok(found)
}

/// The share of itself that a file of runs would take, by its samples.
pub(crate) fn share(file: &dyn ReadAt) -> io::Result<f64> {
    let bytes = fingerprint::read(file)?;
    let shares: f64 = bytes.chunks(SAMPLE_BYTES).map(|sample| kind(sample, 0).1 * sample.len() as f64).sum();
    Ok(shares / bytes.len().max(1) as f64)
}

fn tensor(name: String, kind: Kind, extent: Range<u64>) -> Tensor {
    let shape = vec![(extent.end - extent.start) / kind.dtype.size() as u64];
    Tensor::found(name, (kind.dtype, shape), (Role::Other, WHY), extent)
}

/// Runs of what was not found in the state before, and their kinds.
fn new_runs(source: &(dyn ReadAt + Sync), gaps: &[Range<u64>]) -> io::Result<Vec<(Kind, Range<u64>)>> {
    let blocks: Vec<Range<u64>> = gaps.iter().flat_map(|gap| pieces(gap.clone(), BLOCK)).collect();
    // Not at the beginning of a block: that may be a header.
    let kinds: io::Result<Vec<Kind>> = blocks.par_iter().map(|block| kind_at_middle(source, block)).collect();
    let mut regions: Vec<(Kind, Range<u64>)> = Vec::new();
    for (kind, block) in kinds?.into_iter().zip(blocks) {
        match regions.last_mut() {
            Some((last, region)) if *last == kind && region.end == block.start => region.end = block.end,
            _ => regions.push((kind, block)),
        }
    }
    let longest = (source.size() / MOST_RUNS).next_multiple_of(TILE_BYTES as u64).max(TILE_BYTES as u64);
    let mut runs = Vec::new();
    for (kind, region) in regions {
        // Whole elements; a few bytes before and after go to the skeleton.
        let size = kind.dtype.size() as u64;
        let start = region.start + (kind.phase as u64 + size - region.start % size) % size;
        let end = start.max(region.end - region.end.saturating_sub(start) % size);
        let of = pieces(start..end, longest).filter(|run| run.end - run.start >= LEAST_BYTES);
        runs.extend(of.map(|run| (kind, run)));
    }
    Ok(runs)
}

/// The kind of a sample from the middle of a range.
fn kind_at_middle(source: &dyn ReadAt, range: &Range<u64>) -> io::Result<Kind> {
    let length = range.end - range.start;
    let mut sample = vec![0; length.min(SAMPLE_BYTES as u64) as usize];
    let start = range.start + (length - sample.len() as u64) / 2;
    source.read_exact_at(&mut sample, start)?;
    Ok(kind(&sample, start).0)
}

/// A range in pieces of this length; the last one may be shorter.
fn pieces(range: Range<u64>, length: u64) -> impl Iterator<Item = Range<u64>> {
    range.clone().step_by(length as usize).map(move |start| start..range.end.min(start + length))
}
