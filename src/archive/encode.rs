//! Writes the object of a file: tiles of each planned tensor, in parallel, then the skeleton.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use crate::codec::log::Factors;
use crate::codec::{Dtype, TILE_BYTES, lattice};
use crate::container::{ChangedTensor, Kind, Patch, ReadAt, Tensor};
use crate::entropy::scratch;
use crate::hash::xxh3_64;
use crate::recall::{State, tile};
use crate::store::object::{Coding, Index, ObjectWriter, TensorEntry, Tile, gaps};

use super::STAGES;
use super::job::{BATCH, Job};
use super::payload::{self, Around, Beside, Place, Quantized};
use super::plan::{self, Plan, read_tile, tiles};
use super::published::Fits;
use super::{factors, skeleton};

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
    let first_moments = first_moments(job);
    let fits = Fits::of(job)?;
    for at in order {
        if done[at].is_some() {
            continue;
        }
        let start = writer.position();
        if let Some(&first) = first_moments.get(&at) {
            if let Some(both) = encode_moments(job, writer, &done, at, first)? {
                for (at, tensor) in [at, first].into_iter().zip(both) {
                    changed.extend(tensor.changed(job, at));
                    done[at] = Some(tensor);
                }
                continue;
            }
            // One of the two does not fit, and what is known of them is known of both: the second stays as it is, and the
            // first is tried beside that.
            writer.rewind(start);
        }
        let plan = &job.plans[at];
        let coding = match first_moments.contains_key(&at) {
            true => plan.lossless(job.source, job.base)?,
            false => plan.coding,
        };
        let tensor = match encode_tensor(job, writer, (&done, &fits), at, coding)? {
            Some(tensor) => tensor,
            None => {
                log::debug!("{}: {} is kept lossless", job.origin.display(), plan.tensor.path);
                writer.rewind(start);
                let fallback = encode_tensor(job, writer, (&done, &fits), at, plan.lossless(job.source, job.base)?)?;
                fallback.ok_or(io::ErrorKind::InvalidData)?
            }
        };
        log::trace!(target: STAGES, "encode {}", plan.tensor.role.name());
        changed.extend(tensor.changed(job, at));
        done[at] = Some(tensor);
    }
    let tensors: Vec<TensorEntry> = done.into_iter().flatten().map(|done| done.entry).collect();
    let mut patches = job.description.patches(job.source, &changed)?;
    patches.sort_by_key(|patch| patch.offset);
    let gaps = gaps(tensors.iter().map(|t| t.extent.clone()), job.len);
    let skeleton = skeleton::encode(job, writer, &gaps, &patches)?;
    log::trace!(target: STAGES, "skeleton");
    let index = Index {
        origin: job.origin.to_string_lossy().into_owned(),
        profile: job.profile.to_string(),
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

impl Done {
    /// For the container, where the tensor's checksum is another one now.
    fn changed(&self, job: &Job, at: usize) -> Option<ChangedTensor> {
        let (crc_before, crc_after) = (self.crc_before, self.crc_after);
        (crc_before != crc_after).then(|| ChangedTensor { index: job.plans[at].index, crc_before, crc_after })
    }
}

/// A tensor that is being encoded: what its tiles have come to.
struct Tiles<'a> {
    job: &'a Job<'a>,
    at: usize,
    coding: Coding,
    factors: Option<Arc<Factors>>,
    stored_factors: Option<Tile>,
    tiles: Vec<Tile>,
    crc_before: crc32fast::Hasher,
    crc_after: crc32fast::Hasher,
    /// Largest error so far in the terms of its codec.
    error: f64,
    max_abs_error: f64,
}

/// Checksums of tensors are needed where the container has them, and quantizing changes them.
fn with_crc(job: &Job, coding: Coding) -> bool {
    job.description.kind == Kind::TorchZip && coding.is_lossy()
}

impl<'a> Tiles<'a> {
    fn begin(job: &'a Job, writer: &mut ObjectWriter, at: usize, coding: Coding) -> io::Result<Tiles<'a>> {
        let tensor = &job.plans[at].tensor;
        let factors = match coding {
            coding if coding.has_factors() => Some(Arc::new(factors::factors(job.source, tensor, coding)?)),
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
        let mut begun = Tiles {
            job,
            at,
            coding,
            factors,
            stored_factors,
            tiles: Vec::with_capacity(tiles(tensor)),
            crc_before: crc32fast::Hasher::new(),
            crc_after: crc32fast::Hasher::new(),
            error: 0.0,
            max_abs_error: 0.0,
        };
        begun.edge(begun.whole().start..tensor.extent.start)?;
        Ok(begun)
    }

    /// The tensor in the file; its plan may leave its edges to the skeleton.
    fn whole(&self) -> Range<u64> {
        self.job.description.tensors[self.job.plans[self.at].index].extent.clone()
    }

    /// The checksum is of the whole tensor, its edges in the skeleton too.
    fn edge(&mut self, extent: Range<u64>) -> io::Result<()> {
        if with_crc(self.job, self.coding) {
            let mut bytes = vec![0; (extent.end - extent.start) as usize];
            ReadAt::read_exact_at(self.job.source, &mut bytes, extent.start)?;
            self.crc_before.update(&bytes);
            self.crc_after.update(&bytes);
        }
        Ok(())
    }

    /// Writes the next tile.
    fn put(&mut self, writer: &mut ObjectWriter, tile: &EncodedTile) -> io::Result<()> {
        self.tiles.push(writer.put(&tile.payload, tile.decoded_hash)?);
        self.crc_before.combine(&tile.crc_before);
        self.crc_after.combine(&tile.crc_after);
        self.error = self.error.max(tile.error);
        self.max_abs_error = self.max_abs_error.max(tile.max_abs_error);
        Ok(())
    }

    fn finish(mut self) -> io::Result<Done> {
        let tensor = &self.job.plans[self.at].tensor;
        self.edge(tensor.extent.end..self.whole().end)?;
        let entry = TensorEntry {
            path: tensor.path.clone(),
            dtype: tensor.dtype,
            role: tensor.role,
            shape: tensor.shape.clone(),
            extent: tensor.extent.clone(),
            coding: self.coding,
            bound: payload::bound(self.coding, self.error),
            max_abs_error: self.max_abs_error,
            factors: self.stored_factors,
            tiles: self.tiles,
        };
        let (crc_before, crc_after) = (self.crc_before.finalize(), self.crc_after.finalize());
        Ok(Done { entry, factors: self.factors, crc_before, crc_after })
    }
}

/// Ranges of a tensor's tiles to encode at once.
fn batches(job: &Job, count: usize) -> impl Iterator<Item = io::Result<Range<usize>>> {
    (0..count).step_by(BATCH).map(move |first| match (job.cancelled)() {
        true => Err(io::ErrorKind::Interrupted.into()),
        false => Ok(first..count.min(first + BATCH)),
    })
}

/// `None`: a codec does not fit this tensor (NaN, infinity); what was written of it is to be taken back.
fn encode_tensor(
    job: &Job,
    writer: &mut ObjectWriter,
    (done, fits): (&[Option<Done>], &Fits),
    at: usize,
    coding: Coding,
) -> io::Result<Option<Done>> {
    let mut tensor = Tiles::begin(job, writer, at, coding)?;
    let encoder = Encoder { job, done };
    for batch in batches(job, tiles(&job.plans[at].tensor)) {
        let batch: Vec<io::Result<Option<EncodedTile>>> = batch?
            .into_par_iter()
            .map(|tile| {
                let encoded = match coding.is_published() {
                    true => encoder.published(fits, at, coding, tile)?,
                    false => encoder.encode(at, coding, tensor.factors.as_ref(), None, tile)?,
                };
                Ok(encoded.map(only_tile))
            })
            .collect();
        for tile in batch {
            let Some(tile) = tile? else { return Ok(None) };
            tensor.put(writer, &tile)?;
        }
    }
    tensor.finish().map(Some)
}

/// The first moments that are planned in units of a second one's root, tile by tile, by that one.
fn first_moments(job: &Job) -> HashMap<usize, usize> {
    let len = |plan: &Plan| plan.tensor.extent.end - plan.tensor.extent.start;
    let second = |first: &Plan| match first.coding {
        Coding::Moment { second, .. } => Some(second as usize).filter(|&second| {
            let plan = &job.plans[second];
            let log = matches!(plan.coding, Coding::Log { .. } | Coding::LogKey { .. });
            log && first.tensor.dtype == plan.tensor.dtype && len(first) == len(plan)
        }),
        _ => None,
    };
    job.plans.iter().enumerate().filter_map(|(at, first)| Some((second(first)?, at))).collect()
}

/// Encodes a second moment and the first one beside it, each of whose tiles needs that of the other as it was and as it
/// decodes. `None`: one of them does not fit; what was written is to be taken back.
fn encode_moments(
    job: &Job,
    writer: &mut ObjectWriter,
    done: &[Option<Done>],
    second: usize,
    first: usize,
) -> io::Result<Option<[Done; 2]>> {
    let codings = [second, first].map(|at| job.plans[at].coding);
    let mut of_second = Tiles::begin(job, writer, second, codings[0])?;
    let mut of_first = Tiles::begin(job, writer, first, codings[1])?;
    let (encoder, dtype) = (Encoder { job, done }, job.plans[second].tensor.dtype);
    for batch in batches(job, tiles(&job.plans[second].tensor)) {
        let batch: Vec<io::Result<Option<[EncodedTile; 2]>>> = batch?
            .into_par_iter()
            .map(|tile| {
                let done = encoder.encode(second, codings[0], of_second.factors.as_ref(), None, tile)?;
                let Some((of_second, written, decoded)) = done else { return Ok(None) };
                let beside = Some((dtype, written.as_slice(), &decoded));
                let done = encoder.encode(first, codings[1], None, beside, tile)?;
                Ok(done.map(|of_first| [only_tile((of_second, written, decoded)), only_tile(of_first)]))
            })
            .collect();
        let batch: io::Result<Option<Vec<[EncodedTile; 2]>>> = batch.into_iter().collect();
        let Some(batch) = batch? else { return Ok(None) };
        // Side by side, so that offsets follow from lengths but where the tensor changes.
        batch.iter().try_for_each(|[tile, _]| of_second.put(writer, tile))?;
        batch.iter().try_for_each(|[_, tile]| of_first.put(writer, tile))?;
    }
    log::trace!(target: STAGES, "encode both moments");
    Ok(Some([of_second.finish()?, of_first.finish()?]))
}

struct EncodedTile {
    payload: Vec<u8>,
    decoded_hash: u64,
    crc_before: crc32fast::Hasher,
    crc_after: crc32fast::Hasher,
    /// In the terms of its codec.
    error: f64,
    /// Largest |R - W|.
    max_abs_error: f64,
}

/// Type of a tensor, and bytes of it as written and as decoded.
type Pieces = (Dtype, Vec<u8>, Arc<Vec<u8>>);

/// Encodes single tiles, in any order and at once.
struct Encoder<'a> {
    job: &'a Job<'a>,
    /// Tensors that are written already.
    done: &'a [Option<Done>],
}

/// A tile with its bytes as written, and as it decodes.
type WithBytes = (EncodedTile, Arc<Vec<u8>>, Arc<Vec<u8>>);

/// A tile whose bytes nobody needs any more.
fn only_tile((tile, written, decoded): WithBytes) -> EncodedTile {
    [written, decoded].into_iter().for_each(scratch::give_bytes);
    tile
}

impl Encoder<'_> {
    /// `beside`: what is known already of the tensor beside this one.
    fn encode(
        &self,
        at: usize,
        coding: Coding,
        factors: Option<&Arc<Factors>>,
        beside: Option<Beside>,
        number: usize,
    ) -> io::Result<Option<WithBytes>> {
        let tensor = &self.job.plans[at].tensor;
        let data = Arc::new(read_tile(self.job.source, tensor, number)?);
        let parent = self.parent(coding, number)?;
        let plan = &self.job.plans[at];
        let around = Around {
            parent: parent.as_ref(),
            factors,
            beside,
            row_step: plan.row_step,
            outward: plan.outward,
            keep: plan.keep(),
        };
        let Some((state, decoded, error)) = self.quantize(at, coding, &data, around, number)? else {
            return Ok(None);
        };
        if plan.one_sign && !payload::is_above_floor(tensor.dtype, coding, &data, &decoded) {
            return Ok(None);
        }
        let place = Place { dtype: tensor.dtype, coding, rows: plan::rows(tensor, number) };
        let mut payload = Vec::new();
        if !payload::payload(place, &state, parent.as_ref(), &mut payload)? {
            return Ok(None);
        }
        [Some(state), parent].into_iter().flatten().for_each(State::give_back);
        let max_abs_error = match coding {
            Coding::Log { .. } | Coding::LogKey { .. } | Coding::Moment { .. } | Coding::Sized { .. } => {
                lattice::largest_error(tensor.dtype, &data, &decoded).unwrap_or(f64::INFINITY)
            }
            _ => error,
        };
        Ok(Some(self.tile(coding, payload, (data, decoded), (error, max_abs_error))))
    }

    /// A published system's tile.
    fn published(&self, fits: &Fits, at: usize, coding: Coding, number: usize) -> io::Result<Option<WithBytes>> {
        let encoded = fits.encode(self.job, at, number)?;
        Ok(encoded.map(|(payload, data, decoded, error)| self.tile(coding, payload, (data, decoded), (error, error))))
    }

    /// A tile with its checksums: bytes as written and as decoded; its error in the terms of its codec, and |R - W|.
    fn tile(
        &self,
        coding: Coding,
        payload: Vec<u8>,
        (data, decoded): (Arc<Vec<u8>>, Arc<Vec<u8>>),
        (error, max_abs_error): (f64, f64),
    ) -> WithBytes {
        let (mut crc_before, mut crc_after) = (crc32fast::Hasher::new(), crc32fast::Hasher::new());
        if with_crc(self.job, coding) {
            crc_before.update(&data);
            crc_after.update(&decoded);
        }
        let decoded_hash = xxh3_64(&decoded);
        (EncodedTile { decoded_hash, payload, crc_before, crc_after, error, max_abs_error }, data, decoded)
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
        around: Around,
        number: usize,
    ) -> io::Result<Option<Quantized>> {
        let tensor = &self.job.plans[at].tensor;
        let place = Place { dtype: tensor.dtype, coding, rows: plan::rows(tensor, number) };
        let Some(other) = coding.beside().filter(|_| around.beside.is_none()) else {
            return Ok(payload::quantize(place, data, around));
        };
        let Some(beside) = self.beside(other as usize, tensor, number)? else { return Ok(None) };
        let beside = Some((beside.0, beside.1.as_slice(), &beside.2));
        Ok(payload::quantize(place, data, Around { beside, ..around }))
    }

    /// The tensor beside another one, for the elements of that one's tile, as written and as it decodes. It is made once
    /// more, which is less work than to keep it.
    fn beside(&self, at: usize, of: &Tensor, number: usize) -> io::Result<Option<Pieces>> {
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
            let (factors, row_step, keep) = (done.factors.as_ref(), plan.row_step, plan.keep());
            let around = Around { parent: parent.as_ref(), factors, beside: None, row_step, keep, ..Around::default() };
            let quantized = self.quantize(at, coding, &data, around, piece)?;
            let Some((_, bytes, _)) = quantized else { return Ok(None) };
            let first = piece * TILE_BYTES;
            let range = start.max(first) - first..end.min(first + data.len()) - first;
            written.extend_from_slice(&data[range.clone()]);
            decoded.extend_from_slice(&bytes[range]);
        }
        Ok(Some((tensor.dtype, written, Arc::new(decoded))))
    }
}
