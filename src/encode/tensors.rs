//! Writes the object of a file: tiles of all planned tensors, in parallel and without a pause between tensors, then
//! the skeleton.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;

use crate::store::object::{Index, ObjectWriter, TensorEntry, gaps};
use crate::tile::{Codec, Coding};
use codec::TILE_BYTES;
use codec::log::{self as log_codec, Factors};
use formats::{Patch, ReadAt, Tensor};

use super::STAGES;
use super::error::{StepError, StepResult};
use super::plan::{self, Job, Plan, read, short_sample, tiles};
use super::published::Fits;
use super::skeleton;
use super::tensor_writer::{Done, EncodedFactors, EncodedTile, TensorWriter};
use super::tile_encoder::{Encoder, Way};
use super::workers::Workers;

/// So many tiles of a second moment are written, then as many of its first moment. Neighbouring tiles need no
/// offsets, so the index is smaller.
const MOMENTS_AT_ONCE: usize = 16;

/// An encoded file.
pub(super) struct Encoded {
    pub(super) index: Index,
    /// The bytes of the skeleton that differ from the file's.
    pub(super) patches: Vec<Patch>,
    /// True if a tensor decodes to other bytes than the file's.
    pub(super) differs: bool,
}

/// Encodes the file into `writer`. Memory: the tiles that `workers` have in flight, whatever the size of the file.
pub(super) fn encode(job: &Job, workers: &Workers, writer: &mut ObjectWriter) -> StepResult<Encoded> {
    let done: Vec<OnceLock<Done>> = job.plans.iter().map(|_| OnceLock::new()).collect();
    let first_moments = first_moments(job);
    let fits = workers.install(|| Fits::of(job))?;
    let encoder = Encoder { job, done: &done, fits: &fits };
    // A second moment and an original come first: their partners must know whether they fit.
    let mut ranks: Vec<u8> = job.plans.iter().map(|plan| plan.coding.rank()).collect();
    ranks.sort_unstable();
    ranks.dedup();
    for rank in ranks {
        let is_due = |at: &usize| job.plans[*at].coding.rank() == rank && done[*at].get().is_none();
        let mut parts: Vec<Part> =
            (0..job.plans.len()).filter(is_due).map(|at| Part::new(job, at, first_moments.get(&at).copied())).collect();
        workers.install(|| parts.par_iter_mut().try_for_each(|part| part.find_factors(job)))?;
        Output { encoder: &encoder, workers, writer, parts: &parts, current: 0, open: None, start: 0 }.write()?;
    }
    let changed: Vec<_> =
        done.iter().enumerate().filter_map(|(at, done)| done.get().and_then(|done| done.changed(job, at))).collect();
    let differs = done.iter().filter_map(OnceLock::get).any(|done| done.differs);
    // In a table, rows that rest keep an error of their own, however little the others move by now.
    let in_updates = |of_tables: bool| {
        let of_kind = job.plans.iter().zip(&done).filter(move |(plan, _)| plan.coding.is_by_rows() == of_tables);
        let error = |(plan, done): (&Plan, &OnceLock<Done>)| Some(done.get()?.entry.max_abs_error / plan.update);
        of_kind.filter_map(error).filter(|error| error.is_finite() && *error > 0.0).reduce(f64::max)
    };
    let error_updates = in_updates(false).or_else(|| in_updates(true)).unwrap_or(0.0);
    let tensors: Vec<TensorEntry> = done.into_iter().filter_map(OnceLock::into_inner).map(|done| done.entry).collect();
    let mut patches = job.description.patches(job.source, &changed)?;
    patches.sort_by_key(|patch| patch.offset);
    let gaps = gaps(tensors.iter().map(|t| t.extent.clone()), job.len);
    let skeleton = skeleton::encode(job, workers, writer, &gaps, &patches)?;
    log::trace!(target: STAGES, "skeleton");
    let index = Index {
        origin: job.origin.to_string_lossy().into_owned(),
        profile: job.profile.to_string(),
        container: job.description.kind.name().to_string(),
        note: job.note.to_string(),
        generations: 0,
        error_updates,
        tensors,
        skeleton,
    };
    Ok(Encoded { index, patches, differs })
}

/// A unit of encoding, tile by tile: a tensor, or both moments together. Each first-moment tile needs the second
/// moment, original and decoded, and the other way round.
struct Part {
    at: usize,
    coding: Coding,
    first: Option<(usize, Coding)>,
    factors: Option<EncodedFactors>,
    /// A tile does not fit its codec, so the rest is not needed.
    misfits: AtomicBool,
}

impl Part {
    fn new(job: &Job, at: usize, first: Option<usize>) -> Part {
        let coding = |at: usize| job.plans[at].coding;
        let first = first.map(|first| (first, coding(first)));
        Part { at, coding: coding(at), first, factors: None, misfits: AtomicBool::new(false) }
    }

    fn find_factors(&mut self, job: &Job) -> io::Result<()> {
        if self.coding.has_factors() {
            let found = factors(job.source, &job.plans[self.at].tensor, self.coding)?;
            self.factors = Some(EncodedFactors::new(found));
        }
        Ok(())
    }
}

/// Tiles of a part with the same number. `None` if one does not fit.
type Made = io::Result<Option<Vec<EncodedTile>>>;

/// Takes the tiles of all parts in order.
struct Output<'a, 'w> {
    encoder: &'a Encoder<'a>,
    workers: &'a Workers,
    writer: &'w mut ObjectWriter,
    parts: &'a [Part],
    /// The part whose tiles come now.
    current: usize,
    /// The tensor's writer, unless it does not fit.
    open: Option<Open<'a>>,
    /// Position of its first tile.
    start: u64,
}

/// A part that is being written.
struct Open<'a> {
    second: TensorWriter<'a>,
    first: Option<TensorWriter<'a>>,
    /// Tiles of the first moment that come after those of the second.
    waiting: Vec<EncodedTile>,
}

impl Open<'_> {
    fn put(&mut self, writer: &mut ObjectWriter, tiles: Vec<EncodedTile>) -> io::Result<()> {
        let mut tiles = tiles.into_iter();
        tiles.next().iter().try_for_each(|tile| self.second.put(writer, tile))?;
        self.waiting.extend(tiles);
        match self.waiting.len() == MOMENTS_AT_ONCE {
            true => self.put_waiting(writer),
            false => Ok(()),
        }
    }

    fn put_waiting(&mut self, writer: &mut ObjectWriter) -> io::Result<()> {
        let Some(first) = &mut self.first else { return Ok(()) };
        self.waiting.drain(..).try_for_each(|tile| first.put(writer, &tile))
    }
}

impl<'a> Output<'a, '_> {
    fn write(mut self) -> StepResult<()> {
        let (parts, encoder, workers) = (self.parts, self.encoder, self.workers);
        let tiles = |part: &Part| tiles(&encoder.job.plans[part.at].tensor);
        let length = |part: &Part| {
            let extent = &encoder.job.plans[part.at].tensor.extent;
            (extent.end - extent.start).min(TILE_BYTES as u64) as usize
        };
        let numbers = parts.iter().enumerate().flat_map(|(part, of)| {
            let length = length(of);
            (0..tiles(of)).map(move |tile| (length, (part, tile)))
        });
        let make = |(part, tile): (usize, usize)| -> (usize, Made) {
            let Part { at, coding, first, factors, misfits } = &parts[part];
            let way = Way { at: *at, coding: *coding, factors: factors.as_ref().map(|encoded| &encoded.factors) };
            let made = match *first {
                _ if misfits.load(Ordering::Relaxed) => Ok(None),
                None => encoder.tile_of(way, tile).map(|made| made.map(|tile| vec![tile])),
                Some((at, coding)) => {
                    let first = Way { at, coding, factors: None };
                    encoder.tiles_of_moments(way, first, tile).map(|made| made.map(Vec::from))
                }
            };
            (part, made)
        };
        self.begin()?;
        workers.in_order_of_lengths(numbers, make, |(part, made)| self.take(part, made))?;
        self.go_to(parts.len())
    }

    fn take(&mut self, part: usize, made: Made) -> StepResult<()> {
        if (self.encoder.job.cancelled)() {
            return Err(StepError::Cancelled);
        }
        self.go_to(part)?;
        match (made?, &mut self.open) {
            (Some(tiles), Some(open)) => open.put(self.writer, tiles)?,
            (None, _) => {
                self.parts[part].misfits.store(true, Ordering::Relaxed);
                self.open = None;
            }
            (Some(_), None) => {}
        }
        Ok(())
    }

    /// Ends all parts before this one, those without tiles too.
    fn go_to(&mut self, part: usize) -> StepResult<()> {
        while self.current < part {
            self.end()?;
            self.current += 1;
            self.begin()?;
        }
        Ok(())
    }

    fn begin(&mut self) -> io::Result<()> {
        let Some(part) = self.parts.get(self.current) else { return Ok(()) };
        let job = self.encoder.job;
        self.start = self.writer.position();
        let second = TensorWriter::begin(job, self.writer, part.at, part.coding, part.factors.as_ref())?;
        let begin = |(first, coding)| TensorWriter::begin(job, self.writer, first, coding, None);
        let first = part.first.map(begin).transpose()?;
        self.open = Some(Open { second, first, waiting: Vec::new() });
        Ok(())
    }

    fn end(&mut self) -> StepResult<()> {
        let part = &self.parts[self.current];
        let (job, done) = (self.encoder.job, self.encoder.done);
        match self.open.take() {
            Some(mut open) => {
                open.put_waiting(self.writer)?;
                let _ = done[part.at].set(open.second.finish()?);
                if let (Some((first, _)), Some(tensor)) = (part.first, open.first) {
                    let _ = done[first].set(tensor.finish()?);
                }
            }
            None => {
                log::debug!("{}: {} is kept lossless", job.origin.display(), job.plans[part.at].tensor.path);
                self.writer.rewind(self.start);
                // The second moment of a pair that does not fit is lossless. The first is tried again beside it.
                let _ = done[part.at].set(self.lossless(part.at)?);
            }
        }
        log::trace!(target: STAGES, "encode {}", job.plans[part.at].tensor.role.name());
        Ok(())
    }

    /// Writes a tensor that does not fit its codec.
    fn lossless(&mut self, at: usize) -> StepResult<Done> {
        let (encoder, job, writer) = (self.encoder, self.encoder.job, &mut *self.writer);
        let coding = job.plans[at].lossless(job.source, job.base)?;
        let mut tensor = TensorWriter::begin(job, writer, at, coding, None)?;
        let make = |tile: usize| encoder.tile_of(Way { at, coding, factors: None }, tile);
        self.workers.in_order(0..tiles(&job.plans[at].tensor), make, |tile| {
            let tile = tile?.ok_or(io::ErrorKind::InvalidData)?;
            tensor.put(writer, &tile)
        })?;
        Ok(tensor.finish()?)
    }
}

/// The first moments that are encoded with their seconds, tile by tile. The key is the second.
fn first_moments(job: &Job) -> HashMap<usize, usize> {
    let len = |plan: &Plan| plan.tensor.bytes();
    let second = |first: &Plan| match first.coding.codec {
        Codec::Moment { second, .. } => Some(second as usize).filter(|&second| {
            let plan = &job.plans[second];
            plan.coding.is_log() && first.tensor.dtype == plan.tensor.dtype && len(first) == len(plan)
        }),
        _ => None,
    };
    job.plans.iter().enumerate().filter_map(|(at, first)| Some((second(first)?, at))).collect()
}

/// The factors of a tensor.
fn factors(source: &dyn ReadAt, tensor: &Tensor, coding: Coding) -> io::Result<Factors> {
    let unit = coding.unit().unwrap_or(0);
    let found = plan::factors(source, tensor, coding, 0..tiles(tensor))?;
    // Shorter steps leave nothing to correct.
    if unit < log_codec::LONG {
        return Ok(found);
    }
    let (first, size) = (plan::rows(tensor, 0).first, tensor.dtype.size() as u64);
    let piece = |place: Range<u64>| Ok((first + place.start / size, read(source, tensor, &[place])?));
    let pieces: Vec<_> = short_sample(tensor).map(piece).collect::<io::Result<_>>()?;
    Ok(log_codec::centred(found, tensor.dtype, &pieces, unit))
}
