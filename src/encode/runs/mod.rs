//! Runs: the pieces of a file in which no tensor is known. Each is kept like a tensor, always lossless: floats by byte
//! planes, everything else by what repeats.
//!
//! A run has a name. A run of the state before that is found in this file, at its place or moved, gives its name and
//! its length to a run here, which becomes a difference to it. So chains, super-steps, re-parenting and repair treat
//! runs as tensors, and a wrong match costs space only. All other bytes become new runs.

mod anchors;
mod kind;
mod moved;

use std::io;
use std::ops::Range;

use rayon::prelude::*;

use crate::codec::TILE_BYTES;
use crate::container::{Description, ReadAt, Role, Tensor};
use crate::recall::Chain;

use super::fingerprint;
use super::plan::{Plan, Planned};
use kind::{Kind, SAMPLE_BYTES, kind};
use moved::{Match, Matches};

/// Bytes are one kind in pieces of this size.
const BLOCK: u64 = 64 << 10;
/// Runs of a file that is not matched, at most about: beyond that they become longer.
const MOST_RUNS: u64 = 4096;
/// Shorter pieces are left to the skeleton, where they are compressed together.
const LEAST_BYTES: u64 = 4096;
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
    let found = base.map(|base| moved::find(source, base)).transpose()?;
    // A match is smaller than the bytes alone, so a keyframe never is; without any match there is nothing to tell.
    let forecast = found.as_ref().map(|found| found.forecast).filter(|_| super_step);
    let forecast = forecast.filter(|forecast| !forecast.wants_keyframe());
    let matches = found.map(|Matches { matches, .. }| matches).unwrap_or_default();
    let entries = base.map(|base| base.leaf().index().tensors.as_slice()).unwrap_or_default();
    let mut tensors: Vec<(Tensor, Option<u32>)> = Vec::new();
    let mut extents: Vec<Range<u64>> = Vec::new();
    for Match { parent, start } in matches {
        let entry = &entries[parent as usize];
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
    let kinds: io::Result<Vec<Kind>> = blocks.par_iter().map(|block| kind_at(source, middle(block), block)).collect();
    let mut kinds: Vec<(Kind, Range<u64>)> = kinds?.into_iter().zip(blocks).collect();
    let borders: io::Result<Vec<u64>> = kinds.par_windows(2).map(|pair| border(source, &pair[0], &pair[1])).collect();
    for (at, border) in (1..).zip(borders?) {
        if kinds[at - 1].1.end == kinds[at].1.start {
            (kinds[at - 1].1.end, kinds[at].1.start) = (border, border);
        }
    }
    let mut regions: Vec<(Kind, Range<u64>)> = Vec::new();
    for (kind, block) in kinds {
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

fn middle(range: &Range<u64>) -> u64 {
    range.start + (range.end - range.start) / 2
}

/// The kind of the bytes around a place, by a sample that stays within a range.
fn kind_at(source: &dyn ReadAt, place: u64, within: &Range<u64>) -> io::Result<Kind> {
    let len = (within.end - within.start).min(SAMPLE_BYTES as u64);
    let start = place.saturating_sub(len / 2).clamp(within.start, within.end - len);
    let mut sample = vec![0; len as usize];
    source.read_exact_at(&mut sample, start)?;
    Ok(kind(&sample, start).0)
}

/// Where one kind ends and the other begins, between the middles of two blocks; to about a sample.
fn border(source: &dyn ReadAt, one: &(Kind, Range<u64>), other: &(Kind, Range<u64>)) -> io::Result<u64> {
    let within = one.1.start..other.1.end;
    if one.0 == other.0 || one.1.end != other.1.start {
        return Ok(one.1.end);
    }
    let (mut left, mut right) = (middle(&one.1), middle(&other.1));
    while right - left > SAMPLE_BYTES as u64 {
        let place = left + (right - left) / 2;
        match kind_at(source, place, &within)? == one.0 {
            true => left = place,
            false => right = place,
        }
    }
    Ok(left + (right - left) / 2)
}

/// A range in pieces of this length; the last one may be shorter.
fn pieces(range: Range<u64>, length: u64) -> impl Iterator<Item = Range<u64>> {
    range.clone().step_by(length as usize).map(move |start| start..range.end.min(start + length))
}
