//! Writes the object of a file: tiles of each planned tensor, in parallel, then the skeleton.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use crate::codec::log::{Factors, FactorsBuilder};
use crate::codec::{Dtype, TILE_BYTES};
use crate::container::{ChangedTensor, Description, Kind, Patch, ReadAt, Tensor};
use crate::recall::{Chain, State, tile};
use crate::store::object::{Coding, Index, ObjectWriter, TensorEntry, Tile, gaps};

use super::STAGES;
use super::payload::{self, Around, Place, Quantized};
use super::plan::{self, Plan, has_factors, read_tile, tiles};

/// Tiles encoded at once: a tile takes about 3 MB while it is encoded (its bytes, K, A, R and payload), so 16 take 50 MB.
pub(super) const BATCH: usize = 16;
/// zstd level of the skeleton: pickles and headers, or whole files that are not understood.
const SKELETON_LEVEL: i32 = 3;

/// A file to encode.
pub(super) struct Job<'a> {
    pub(super) source: &'a File,
    pub(super) len: u64,
    pub(super) origin: &'a Path,
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
    let mut done: Vec<Option<Done>> = (0..job.plans.len()).map(|_| None).collect();
    let mut changed = Vec::new();
    // What lies beside a tensor comes before it: whether it fits its codec must be known.
    let mut order: Vec<usize> = (0..job.plans.len()).collect();
    order.sort_by_key(|&at| job.plans[at].coding.rank());
    for at in order {
        let plan = &job.plans[at];
        let whole = &job.description.tensors[plan.index].extent;
        let start = writer.position();
        let tensor = match encode_tensor(job, writer, &done, at, plan.coding, whole)? {
            Some(tensor) => tensor,
            None => {
                log::debug!("{}: {} is kept lossless", job.origin.display(), plan.tensor.path);
                writer.rewind(start);
                let fallback = encode_tensor(job, writer, &done, at, plan.fallback, whole)?;
                fallback.ok_or(io::ErrorKind::InvalidData)?
            }
        };
        log::trace!(target: STAGES, "encode {}", plan.tensor.role.name());
        if tensor.crc_before != tensor.crc_after {
            let (crc_before, crc_after) = (tensor.crc_before, tensor.crc_after);
            changed.push(ChangedTensor { index: plan.index, crc_before, crc_after });
        }
        done[at] = Some(tensor);
    }
    let tensors: Vec<TensorEntry> = done.into_iter().flatten().map(|done| done.entry).collect();
    let mut patches = job.description.patches(job.source, &changed)?;
    patches.sort_by_key(|patch| patch.offset);
    let gaps = gaps(tensors.iter().map(|t| t.extent.clone()), job.len);
    let skeleton = encode_skeleton(job, writer, &gaps, &patches)?;
    log::trace!(target: STAGES, "skeleton");
    let index = Index {
        origin: job.origin.to_string_lossy().into_owned(),
        // Whoever calls says what follows from more than the file.
        profile: String::new(),
        container: job.description.kind.name().to_string(),
        note: job.note.to_string(),
        generations: 0,
        tensors,
        skeleton,
    };
    Ok(Encoded { index, patches })
}

struct Done {
    entry: TensorEntry,
    /// Of a logarithmic lattice with its own.
    factors: Option<Arc<Factors>>,
    crc_before: u32,
    crc_after: u32,
}

/// `None`: a codec does not fit this tensor (NaN, infinity); what was written of it is to be taken back.
fn encode_tensor(
    job: &Job,
    writer: &mut ObjectWriter,
    done: &[Option<Done>],
    at: usize,
    coding: Coding,
    whole: &Range<u64>,
) -> io::Result<Option<Done>> {
    let tensor = &job.plans[at].tensor;
    let count = tiles(tensor);
    let with_crc = job.description.kind == Kind::TorchZip && coding.is_lossy();
    // The checksum is of the whole tensor, its edges in the skeleton too.
    let (mut before, mut after) = (crc32fast::Hasher::new(), crc32fast::Hasher::new());
    let edge = |extent: Range<u64>, hashes: [&mut crc32fast::Hasher; 2]| -> io::Result<()> {
        let mut bytes = vec![0; if with_crc { (extent.end - extent.start) as usize } else { 0 }];
        ReadAt::read_exact_at(job.source, &mut bytes, extent.start)?;
        hashes.into_iter().for_each(|hash| hash.update(&bytes));
        Ok(())
    };
    edge(whole.start..tensor.extent.start, [&mut before, &mut after])?;
    let factors = match coding {
        Coding::LogKey { .. } => Some(Arc::new(factors(job, tensor)?)),
        _ => None,
    };
    let stored_factors = match &factors {
        Some(factors) => {
            let mut payload = Vec::new();
            factors.encode(&mut payload);
            Some(writer.put(&payload, xxh3_64(&payload))?)
        }
        None => None,
    };
    let encoder = Encoder { job, done, with_crc };
    let mut tiles = Vec::with_capacity(count);
    let mut max_abs_error = 0f64;
    for first in (0..count).step_by(BATCH) {
        if (job.cancelled)() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let batch: Vec<io::Result<Option<EncodedTile>>> = (first..count.min(first + BATCH))
            .into_par_iter()
            .map(|tile| encoder.encode(at, coding, factors.as_ref(), tile))
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
        bound: payload::bound(coding, max_abs_error),
        max_abs_error,
        factors: stored_factors,
        tiles,
    };
    Ok(Some(Done { entry, factors, crc_before: before.finalize(), crc_after: after.finalize() }))
}

/// The rank-1 prediction of a tensor, from all of it.
fn factors(job: &Job, tensor: &Tensor) -> io::Result<Factors> {
    let Some((rows, width)) = has_factors(&tensor.shape) else {
        return Ok(Factors::flat_of(tensor.dtype, &read_tile(job.source, tensor, tiles(tensor) / 2)?));
    };
    let mut builder = FactorsBuilder::new(rows, width);
    for number in 0..tiles(tensor) {
        let data = read_tile(job.source, tensor, number)?;
        builder.add(tensor.dtype, plan::rows(tensor, number).first, &data);
    }
    Ok(builder.finish())
}

struct EncodedTile {
    payload: Vec<u8>,
    decoded_hash: u64,
    crc_before: crc32fast::Hasher,
    crc_after: crc32fast::Hasher,
    max_abs_error: f64,
}

/// Encodes single tiles, in any order and at once.
struct Encoder<'a> {
    job: &'a Job<'a>,
    /// Tensors that are written already.
    done: &'a [Option<Done>],
    with_crc: bool,
}

impl Encoder<'_> {
    fn encode(
        &self,
        at: usize,
        coding: Coding,
        factors: Option<&Arc<Factors>>,
        number: usize,
    ) -> io::Result<Option<EncodedTile>> {
        let tensor = &self.job.plans[at].tensor;
        let data = Arc::new(read_tile(self.job.source, tensor, number)?);
        let parent = self.parent(coding, number)?;
        let Some((state, decoded, max_abs_error)) =
            self.quantize(at, coding, &data, factors, parent.as_ref(), number)?
        else {
            return Ok(None);
        };
        let place = Place { dtype: tensor.dtype, coding, rows: plan::rows(tensor, number) };
        let mut payload = Vec::new();
        if !payload::payload(place, &state, parent.as_ref(), &mut payload)? {
            return Ok(None);
        }
        let (mut crc_before, mut crc_after) = (crc32fast::Hasher::new(), crc32fast::Hasher::new());
        if self.with_crc {
            crc_before.update(&data);
            crc_after.update(&decoded);
        }
        Ok(Some(EncodedTile { decoded_hash: xxh3_64(&decoded), payload, crc_before, crc_after, max_abs_error }))
    }

    fn parent(&self, coding: Coding, number: usize) -> io::Result<Option<State>> {
        let Some(parent) = coding.parent() else { return Ok(None) };
        let base = self.job.base.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Some(tile::state(base, parent as usize, number)?))
    }

    fn quantize(
        &self,
        at: usize,
        coding: Coding,
        data: &Arc<Vec<u8>>,
        factors: Option<&Arc<Factors>>,
        parent: Option<&State>,
        number: usize,
    ) -> io::Result<Option<Quantized>> {
        let plan = &self.job.plans[at];
        let tensor = &plan.tensor;
        let place = Place { dtype: tensor.dtype, coding, rows: plan::rows(tensor, number) };
        let mut around = Around { parent, factors, beside: None, row_step: plan.row_step };
        let Some(other) = coding.beside() else { return Ok(payload::quantize(place, data, around)) };
        let Some(beside) = self.beside(other as usize, tensor, number)? else { return Ok(None) };
        around.beside = Some((beside.0, &beside.1, &beside.2));
        Ok(payload::quantize(place, data, around))
    }

    /// The tensor beside another one, for the elements of that one's tile, as written and as it decodes. It is made once
    /// more, which is less work than to keep it.
    fn beside(&self, at: usize, of: &Tensor, number: usize) -> io::Result<Option<(Dtype, Vec<u8>, Arc<Vec<u8>>)>> {
        let (Some(plan), Some(Some(done))) = (self.job.plans.get(at), self.done.get(at)) else {
            return Ok(None);
        };
        let tensor = &plan.tensor;
        let (from, to) = (tensor.dtype.size(), of.dtype.size());
        let end = ((number + 1) * TILE_BYTES).min((of.extent.end - of.extent.start) as usize) / to * from;
        let start = number * TILE_BYTES / to * from;
        let (mut written, mut decoded) = (Vec::with_capacity(end - start), Vec::with_capacity(end - start));
        for piece in start / TILE_BYTES..end.div_ceil(TILE_BYTES) {
            let data = Arc::new(read_tile(self.job.source, tensor, piece)?);
            let coding = done.entry.coding;
            let parent = self.parent(coding, piece)?;
            let quantized = self.quantize(at, coding, &data, done.factors.as_ref(), parent.as_ref(), piece)?;
            let Some((_, bytes, _)) = quantized else { return Ok(None) };
            let first = piece * TILE_BYTES;
            let range = start.max(first) - first..end.min(first + data.len()) - first;
            written.extend_from_slice(&data[range.clone()]);
            decoded.extend_from_slice(&bytes[range]);
        }
        Ok(Some((tensor.dtype, written, Arc::new(decoded))))
    }
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
