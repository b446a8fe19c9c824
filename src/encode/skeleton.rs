//! The skeleton of a file: what lies between its tensors, or all of it where nothing is understood.

use std::io;
use std::ops::Range;

use crate::store::object::{ObjectWriter, Tile};
use codec::TILE_BYTES;
use codec::hash::xxh3_64;
use formats::Patch;

use super::error::{StepError, StepResult};
use super::plan::Job;
use super::workers::Workers;

/// zstd level: pickles and headers, or whole files that are not understood.
pub(crate) const LEVEL: i32 = 3;
/// zstd level of a short skeleton: a tenth to a third less for a fifth of a second.
const LEVEL_OF_SHORT: i32 = 15;
/// Longest skeleton of that level, in bytes. A rank's file of a distributed checkpoint has 2 KiB for each tensor.
const SHORT: u64 = 1 << 20;

/// Writes the bytes between the tensors, patched, in chunks.
///
/// # Errors
/// [`StepError::Cancelled`].
pub(super) fn encode(
    job: &Job,
    workers: &Workers,
    writer: &mut ObjectWriter,
    gaps: &[Range<u64>],
    patches: &[Patch],
) -> StepResult<Vec<Tile>> {
    let len: u64 = gaps.iter().map(|gap| gap.end - gap.start).sum();
    let level = if len <= SHORT { LEVEL_OF_SHORT } else { LEVEL };
    let pack = |parts: Vec<Range<u64>>| -> io::Result<(Vec<u8>, u64)> {
        let mut chunk = Vec::with_capacity(TILE_BYTES);
        for part in parts {
            let from = chunk.len();
            chunk.resize(from + (part.end - part.start) as usize, 0);
            job.source.read_exact_at(&mut chunk[from..], part.start)?;
            patch(patches, part.start, &mut chunk[from..]);
        }
        Ok((zstd::bulk::compress(&chunk, level)?, xxh3_64(&chunk)))
    };
    let mut tiles = Vec::new();
    workers.in_order(chunks(gaps), pack, |packed| {
        let (payload, hash) = packed?;
        tiles.push(writer.put(&payload, hash)?);
        if (job.cancelled)() { Err(StepError::Cancelled) } else { Ok(()) }
    })?;
    Ok(tiles)
}

/// The pieces of the gaps that make each chunk.
fn chunks(gaps: &[Range<u64>]) -> impl Iterator<Item = Vec<Range<u64>>> {
    let (mut gaps, mut left) = (gaps.iter(), 0..0);
    std::iter::from_fn(move || {
        let (mut parts, mut room) = (Vec::new(), TILE_BYTES as u64);
        while room > 0 {
            if left.is_empty() {
                let Some(next) = gaps.next() else { break };
                left = next.clone();
            }
            let part = left.start..left.end.min(left.start + room);
            (left.start, room) = (part.end, room - (part.end - part.start));
            parts.push(part);
        }
        (!parts.is_empty()).then_some(parts)
    })
}

/// Carries out the patches (by ascending offset, disjoint) that fall into `bytes`, which lie at `offset` of the file.
pub(super) fn patch(patches: &[Patch], offset: u64, bytes: &mut [u8]) {
    let end = offset + bytes.len() as u64;
    let first = patches.partition_point(|patch| patch.offset + patch.bytes.len() as u64 <= offset);
    for patch in patches[first..].iter().take_while(|patch| patch.offset < end) {
        let from = patch.offset.max(offset);
        let to = (patch.offset + patch.bytes.len() as u64).min(end);
        if from < to {
            let new = &patch.bytes[(from - patch.offset) as usize..(to - patch.offset) as usize];
            bytes[(from - offset) as usize..(to - offset) as usize].copy_from_slice(new);
        }
    }
}
