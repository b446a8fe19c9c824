//! Writes the object of a file: tiles of each planned tensor, in parallel, then the skeleton.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use crate::codec::TILE_BYTES;
use crate::container::{ChangedTensor, Description, Kind, Patch, ReadAt, Tensor};
use crate::recall::Chain;
use crate::recall::tile;
use crate::store::object::{Coding, Index, ObjectWriter, TensorEntry, Tile, gaps};

use super::payload;
use super::plan::{Plan, read_tile};

/// Tiles encoded at once: a tile takes about 3 MB while it is encoded (its bytes, K, A, R and payload), so 16 take 50 MB.
pub(super) const BATCH: usize = 16;
/// zstd level of the skeleton: pickles and headers, or whole files that are not understood.
const SKELETON_LEVEL: i32 = 3;

/// A file to encode.
pub(super) struct Job<'a> {
    pub(super) source: &'a File,
    pub(super) len: u64,
    pub(super) origin: &'a Path,
    pub(super) profile: &'static str,
    pub(super) description: &'a Description,
    pub(super) base: Option<&'a Chain>,
    pub(super) plans: &'a [Plan],
    /// For people, see [`Index::note`].
    pub(super) note: &'a str,
    /// Asked between batches: the file was opened for writing, or the store is being closed.
    pub(super) cancelled: &'a (dyn Fn() -> bool + Sync),
}

/// What was written, and which bytes of the skeleton differ from the file's.
pub(super) struct Encoded {
    pub(super) index: Index,
    pub(super) patches: Vec<Patch>,
}

/// Encodes the file into `writer`. Memory: [`BATCH`] tiles, whatever the size of the file. Runs on the pool it is
/// called in.
///
/// # Errors
/// `Interrupted` when cancelled; what the device reports.
pub(super) fn encode(job: &Job, writer: &mut ObjectWriter) -> io::Result<Encoded> {
    let mut tensors = Vec::with_capacity(job.plans.len());
    let mut changed = Vec::new();
    for plan in job.plans {
        let tensor = &plan.tensor;
        let whole = &job.description.tensors[plan.index].extent;
        let start = writer.position();
        let done = match encode_tensor(job, writer, tensor, whole, plan.coding)? {
            Some(done) => done,
            None => {
                writer.rewind(start);
                encode_tensor(job, writer, tensor, whole, plan.fallback)?.ok_or(io::ErrorKind::InvalidData)?
            }
        };
        if done.crc_before != done.crc_after {
            let (crc_before, crc_after) = (done.crc_before, done.crc_after);
            changed.push(ChangedTensor { index: plan.index, crc_before, crc_after });
        }
        tensors.push(done.entry);
    }
    let mut patches = job.description.patches(job.source, &changed)?;
    patches.sort_by_key(|patch| patch.offset);
    let gaps = gaps(tensors.iter().map(|t| t.extent.clone()), job.len);
    let skeleton = encode_skeleton(job, writer, &gaps, &patches)?;
    let index = Index {
        origin: job.origin.to_string_lossy().into_owned(),
        profile: job.profile.to_string(),
        container: job.description.kind.name().to_string(),
        note: job.note.to_string(),
        tensors,
        skeleton,
    };
    Ok(Encoded { index, patches })
}

struct Done {
    entry: TensorEntry,
    crc_before: u32,
    crc_after: u32,
}

/// `None`: a lattice does not fit this tensor (NaN, infinity); what was written of it is to be taken back.
fn encode_tensor(
    job: &Job,
    writer: &mut ObjectWriter,
    tensor: &Tensor,
    whole: &Range<u64>,
    coding: Coding,
) -> io::Result<Option<Done>> {
    let count = (tensor.extent.end - tensor.extent.start).div_ceil(TILE_BYTES as u64) as usize;
    let with_crc = job.description.kind == Kind::TorchZip && coding.step().is_some();
    // The checksum is of the whole tensor, its edges in the skeleton too.
    let (mut before, mut after) = (crc32fast::Hasher::new(), crc32fast::Hasher::new());
    let edge = |extent: Range<u64>, hashes: [&mut crc32fast::Hasher; 2]| -> io::Result<()> {
        let mut bytes = vec![0; if with_crc { (extent.end - extent.start) as usize } else { 0 }];
        ReadAt::read_exact_at(job.source, &mut bytes, extent.start)?;
        hashes.into_iter().for_each(|hash| hash.update(&bytes));
        Ok(())
    };
    edge(whole.start..tensor.extent.start, [&mut before, &mut after])?;
    let mut tiles = Vec::with_capacity(count);
    let mut max_abs_error = 0f64;
    for first in (0..count).step_by(BATCH) {
        if (job.cancelled)() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let batch: Vec<io::Result<Option<EncodedTile>>> = (first..count.min(first + BATCH))
            .into_par_iter()
            .map(|tile| encode_tile(job, tensor, coding, tile, with_crc))
            .collect();
        for tile in batch {
            let Some(tile) = tile? else { return Ok(None) };
            tiles.push(writer.put(&tile.payload, tile.decoded_hash)?);
            before.combine(&tile.crc_before);
            after.combine(&tile.crc_after);
            max_abs_error = max_abs_error.max(tile.max_abs_error);
        }
    }
    edge(tensor.extent.end..whole.end, [&mut before, &mut after])?;
    let entry = TensorEntry {
        path: tensor.path.clone(),
        dtype: tensor.dtype,
        role: tensor.role,
        shape: tensor.shape.clone(),
        extent: tensor.extent.clone(),
        coding,
        bound: coding.step().map_or(0.0, |step| step / 2.0),
        max_abs_error,
        tiles,
    };
    Ok(Some(Done { entry, crc_before: before.finalize(), crc_after: after.finalize() }))
}

struct EncodedTile {
    payload: Vec<u8>,
    decoded_hash: u64,
    crc_before: crc32fast::Hasher,
    crc_after: crc32fast::Hasher,
    max_abs_error: f64,
}

fn encode_tile(
    job: &Job,
    tensor: &Tensor,
    coding: Coding,
    number: usize,
    with_crc: bool,
) -> io::Result<Option<EncodedTile>> {
    let data = Arc::new(read_tile(job.source, tensor, number)?);
    let parent = match coding.parent() {
        Some(parent) => Some(tile::state(job.base.ok_or(io::ErrorKind::InvalidInput)?, parent as usize, number)?),
        None => None,
    };
    let Some((state, decoded, max_abs_error)) = payload::quantize(tensor.dtype, coding, &data, parent.as_ref()) else {
        return Ok(None);
    };
    let mut payload = Vec::new();
    if !payload::payload(tensor.dtype, coding, &state, parent.as_ref(), &mut payload)? {
        return Ok(None);
    }
    let (mut crc_before, mut crc_after) = (crc32fast::Hasher::new(), crc32fast::Hasher::new());
    if with_crc {
        crc_before.update(&data);
        crc_after.update(&decoded);
    }
    Ok(Some(EncodedTile { decoded_hash: xxh3_64(&decoded), payload, crc_before, crc_after, max_abs_error }))
}

/// The bytes between the tensors, patched, in chunks.
fn encode_skeleton(
    job: &Job,
    writer: &mut ObjectWriter,
    gaps: &[Range<u64>],
    patches: &[Patch],
) -> io::Result<Vec<Tile>> {
    let mut tiles = Vec::new();
    let mut chunks: Vec<Vec<u8>> = Vec::new();
    let mut flush = |chunks: &mut Vec<Vec<u8>>, writer: &mut ObjectWriter| -> io::Result<()> {
        if (job.cancelled)() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let packed: Vec<_> = chunks.par_iter().map(|chunk| zstd::bulk::compress(chunk, SKELETON_LEVEL)).collect();
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
