//! One tile of a planned tensor: read, quantized, and made a payload. Any tile, in any order, on any thread.

use std::io;
use std::sync::{Arc, OnceLock};

use crate::recall::walk;
use crate::tile::{self, Around, Check, Checked, Coding, Companion, State};
use codec::entropy::scratch;
use codec::floor::Keep;
use codec::log::Factors;
use codec::{Dtype, TILE_BYTES};
use formats::Tensor;

use super::plan::{self, Job, read_tile};
use super::published::Fits;
use super::tensor_writer::{Done, EncodedTile, with_crc};

/// Type of a tensor, and bytes of it as written and as decoded.
type Pieces = (Dtype, Vec<u8>, Arc<Vec<u8>>);

/// How a tensor is encoded.
#[derive(Clone, Copy)]
pub(super) struct Way<'f> {
    /// Number of its plan.
    pub(super) at: usize,
    pub(super) coding: Coding,
    pub(super) factors: Option<&'f Arc<Factors>>,
}

/// Encodes single tiles, in any order and at once.
pub(super) struct Encoder<'a> {
    pub(super) job: &'a Job<'a>,
    /// Tensors that are written already.
    pub(super) done: &'a [OnceLock<Done>],
    pub(super) fits: &'a Fits,
}

/// A tile with its bytes as written, and as it decodes.
type WithBytes = (EncodedTile, Arc<Vec<u8>>, Arc<Vec<u8>>);

/// A tile's state, its decoded bytes, and their comparison with the file.
type Quantized = (State, Arc<Vec<u8>>, Checked);

/// A tile whose bytes are not needed any more.
fn only_tile((tile, written, decoded): WithBytes) -> EncodedTile {
    [written, decoded].into_iter().for_each(scratch::give_bytes);
    tile
}

impl Encoder<'_> {
    /// A tile of one tensor. `None`: its codec does not fit (NaN, infinity).
    pub(super) fn tile_of(&self, way: Way, number: usize) -> io::Result<Option<EncodedTile>> {
        let encoded = match way.coding.is_external() {
            true => self.published(way, number)?,
            false => self.encode(way, None, number)?,
        };
        Ok(encoded.map(only_tile))
    }

    /// A tile of a second moment, and that of its first: each needs the other, original and decoded. `None`: one of
    /// them does not fit.
    pub(super) fn tiles_of_moments(
        &self,
        second: Way,
        first: Way,
        number: usize,
    ) -> io::Result<Option<[EncodedTile; 2]>> {
        let Some((tile, written, decoded)) = self.encode(second, None, number)? else { return Ok(None) };
        let companion = (self.job.plans[second.at].tensor.dtype, written.as_slice(), &decoded);
        let first = self.encode(first, Some(companion), number)?;
        Ok(first.map(|first| [only_tile((tile, written, decoded)), only_tile(first)]))
    }

    /// `companion`: its tile, where that is known already.
    fn encode(&self, way: Way, companion: Option<Companion>, number: usize) -> io::Result<Option<WithBytes>> {
        let tensor = &self.job.plans[way.at].tensor;
        let data = Arc::new(read_tile(self.job.source, tensor, number)?);
        let parent = self.parent(way.coding, number)?;
        let quantized = self.quantize(way, &data, parent.as_deref(), companion, number)?;
        let Some((state, decoded, checked)) = quantized else { return Ok(None) };
        let mut payload = Vec::new();
        if !tile::encode(plan::spec(tensor, way.coding, number), &state, parent.as_deref(), &mut payload)? {
            return Ok(None);
        }
        [Some(Arc::new(state)), parent].into_iter().flatten().for_each(State::give_back);
        Ok(Some((EncodedTile { payload, checked }, data, decoded)))
    }

    /// A published system's tile.
    fn published(&self, way: Way, number: usize) -> io::Result<Option<WithBytes>> {
        let Some((payload, data, decoded)) = self.fits.encode(self.job, way.at, number)? else { return Ok(None) };
        let mut check = self.check(way, Around::default(), number);
        check.add_all(&data, &decoded)?;
        // Beyond the largest finite value, the error cannot be stated.
        Ok(check.finish().map(|checked| (EncodedTile { payload, checked }, data, decoded)))
    }

    /// The proof for a tile.
    fn check<'b>(&self, way: Way, around: Around<'b>, number: usize) -> Check<'b> {
        let plan = &self.job.plans[way.at];
        let divisors = around.companion.map(|(_, written, decoded)| (written, decoded.as_slice()));
        Check::new(plan::spec(&plan.tensor, way.coding, number), around.factors, divisors)
            .within(plan.limits)
            .with_crc(with_crc(self.job, way.coding).then(|| self.job.description.checksum()))
    }

    fn parent(&self, coding: Coding, number: usize) -> io::Result<Option<Arc<State>>> {
        let Some(parent) = coding.parent else { return Ok(None) };
        let base = self.job.base.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Some(walk::state(base, parent as usize, number)?))
    }

    /// Quantizes a tile, and compares its decoded bytes with those written. `None`: it does not fit, or breaks a promise
    /// of its codec.
    fn quantize(
        &self,
        way: Way,
        data: &Arc<Vec<u8>>,
        parent: Option<&State>,
        companion: Option<Companion>,
        number: usize,
    ) -> io::Result<Option<Quantized>> {
        let plan = &self.job.plans[way.at];
        let found;
        let companion = match way.coding.companion().filter(|_| companion.is_none()) {
            Some(other) => {
                found = self.companion(other as usize, &plan.tensor, number)?;
                let Some((dtype, written, decoded)) = &found else { return Ok(None) };
                Some((*dtype, written.as_slice(), decoded))
            }
            None => companion,
        };
        let (factors, row_step, outward, keep) =
            (way.factors, plan.row_step, plan.outward, plan.limits.map_or(Keep::Nothing, Keep::Within));
        let around = Around { parent, factors, companion, row_step, outward, keep };
        let mut check = self.check(way, around, number);
        let quantized = tile::quantize(plan::spec(&plan.tensor, way.coding, number), data, around, Some(&mut check));
        Ok(quantized.zip(check.finish()).map(|((state, decoded), checked)| (state, decoded, checked)))
    }

    /// The companion of a tensor, for the elements of one tile, as written and as it decodes. It is encoded once
    /// more, which is less work than to keep it.
    fn companion(&self, at: usize, of: &Tensor, number: usize) -> io::Result<Option<Pieces>> {
        let done = self.done.get(at).and_then(OnceLock::get);
        let (Some(plan), Some(done)) = (self.job.plans.get(at), done) else {
            return Ok(None);
        };
        let tensor = &plan.tensor;
        let (from, to) = (tensor.dtype.size(), of.dtype.size());
        let end = ((number + 1) * TILE_BYTES).min(of.bytes() as usize) / to * from;
        let start = number * TILE_BYTES / to * from;
        let (mut written, mut decoded) = (Vec::with_capacity(end - start), Vec::with_capacity(end - start));
        let way = Way { at, coding: done.entry.coding, factors: done.factors.as_ref() };
        for piece in start / TILE_BYTES..end.div_ceil(TILE_BYTES) {
            let data = Arc::new(read_tile(self.job.source, tensor, piece)?);
            let parent = self.parent(way.coding, piece)?;
            let quantized = self.quantize(way, &data, parent.as_deref(), None, piece)?;
            let Some((_, bytes, _)) = quantized else { return Ok(None) };
            let first = piece * TILE_BYTES;
            let range = start.max(first) - first..end.min(first + data.len()) - first;
            written.extend_from_slice(&data[range.clone()]);
            decoded.extend_from_slice(&bytes[range]);
        }
        Ok(Some((tensor.dtype, written, Arc::new(decoded))))
    }
}
