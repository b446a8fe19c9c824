//! The skeleton of a file: what lies between its tensors, or all of it where nothing is understood.

use std::ops::Range;

use rayon::prelude::*;

use crate::store::object::{ObjectWriter, Tile};
use codec::TILE_BYTES;
use codec::hash::xxh3_64;
use formats::Patch;

use super::error::{StepError, StepResult};
use super::plan::Job;

/// Tiles encoded at once: a tile takes about 3 MB while it is encoded (its bytes, K, A, R and payload), so 16 take 50
/// MB.
pub(crate) const BATCH: usize = 16;

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
    writer: &mut ObjectWriter,
    gaps: &[Range<u64>],
    patches: &[Patch],
) -> StepResult<Vec<Tile>> {
    let len: u64 = gaps.iter().map(|gap| gap.end - gap.start).sum();
    let level = if len <= SHORT { LEVEL_OF_SHORT } else { LEVEL };
    let mut tiles = Vec::new();
    let mut chunks: Vec<Vec<u8>> = Vec::new();
    let mut flush = |chunks: &mut Vec<Vec<u8>>, writer: &mut ObjectWriter| -> StepResult<()> {
        if (job.cancelled)() {
            return Err(StepError::Cancelled);
        }
        let packed: Vec<_> = chunks.par_iter().map(|chunk| zstd::bulk::compress(chunk, level)).collect();
        for (chunk, payload) in chunks.drain(..).zip(packed) {
            tiles.push(writer.put(&payload?, xxh3_64(&chunk))?);
        }
        Ok(())
    };
    for gap in gaps {
        let mut at = gap.start;
        while at < gap.end {
            if chunks.last().is_none_or(|chunk| chunk.len() == TILE_BYTES) {
                if chunks.len() == BATCH {
                    flush(&mut chunks, writer)?;
                }
                chunks.push(Vec::new());
            }
            let Some(chunk) = chunks.last_mut() else {
                break;
            };
            let take = (gap.end - at).min((TILE_BYTES - chunk.len()) as u64) as usize;
            let from = chunk.len();
            chunk.resize(from + take, 0);
            job.source.read_exact_at(&mut chunk[from..], at)?;
            patch(patches, at, &mut chunk[from..]);
            at += take as u64;
        }
    }
    flush(&mut chunks, writer)?;
    Ok(tiles)
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
