//! One tile of a planned tensor: read, quantized, and made a payload. Any tile, in any order, on any thread.

use std::io;
use std::sync::{Arc, OnceLock};

use crate::recall::walk;
use crate::tile::{self, Around, Check, Checked, Coding, Companion, State};
use codec::entropy::scratch;
use codec::log::Factors;
use codec::{Dtype, TILE_BYTES};
use formats::Tensor;

use super::plan::{self, Job, read_tile};
use super::published::Fits;
use super::tensor_writer::{Done, EncodedTile, with_crc};

/// Type of a tensor, and bytes of it as written and as decoded.
type Pieces = (Dtype, Vec<u8>, Arc<Vec<u8>>);

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
    pub(super) fn tile_of(
        &self,
        at: usize,
        coding: Coding,
        factors: Option<&Arc<Factors>>,
        number: usize,
    ) -> io::Result<Option<EncodedTile>> {
        let encoded = match coding.is_external() {
            true => self.published(at, coding, number)?,
            false => self.encode(at, coding, factors, None, number)?,
        };
        Ok(encoded.map(only_tile))
    }

    /// A tile of a second moment, and that of its first: each needs the other, original and decoded. `None`: one of
    /// them does not fit.
    pub(super) fn tiles_of_moments(
        &self,
        (second, coding): (usize, Coding),
        factors: Option<&Arc<Factors>>,
        (first, of_first): (usize, Coding),
        number: usize,
    ) -> io::Result<Option<[EncodedTile; 2]>> {
        let dtype = self.job.plans[second].tensor.dtype;
        let Some(done) = self.encode(second, coding, factors, None, number)? else { return Ok(None) };
        let (tile, written, decoded) = done;
        let companion = Some((dtype, written.as_slice(), &decoded));
        let first = self.encode(first, of_first, None, companion, number)?;
        Ok(first.map(|first| [only_tile((tile, written, decoded)), only_tile(first)]))
    }

    /// `companion`: its tile, where that is known already.
    fn encode(
        &self,
        at: usize,
        coding: Coding,
        factors: Option<&Arc<Factors>>,
        companion: Option<Companion>,
        number: usize,
    ) -> io::Result<Option<WithBytes>> {
        let tensor = &self.job.plans[at].tensor;
        let data = Arc::new(read_tile(self.job.source, tensor, number)?);
        let parent = self.parent(coding, number)?;
        let plan = &self.job.plans[at];
        let around = Around {
            parent: parent.as_deref(),
            factors,
            companion,
            row_step: plan.row_step,
            outward: plan.outward,
            keep: plan.keep(),
        };
        let Some((state, decoded, checked)) = self.quantize(at, coding, &data, around, number)? else {
            return Ok(None);
        };
        let mut payload = Vec::new();
        if !tile::encode(plan::spec(tensor, coding, number), &state, parent.as_deref(), &mut payload)? {
            return Ok(None);
        }
        [Some(Arc::new(state)), parent].into_iter().flatten().for_each(State::give_back);
        Ok(Some((EncodedTile { payload, checked }, data, decoded)))
    }

    /// A published system's tile.
    fn published(&self, at: usize, coding: Coding, number: usize) -> io::Result<Option<WithBytes>> {
        let Some((payload, data, decoded)) = self.fits.encode(self.job, at, number)? else { return Ok(None) };
        let mut check = self.check(at, coding, number, Around::default());
        check.add_all(&data, &decoded)?;
        // Beyond the largest finite value, the error cannot be stated.
        Ok(check.finish().map(|checked| (EncodedTile { payload, checked }, data, decoded)))
    }

    /// The proof for a tile.
    fn check<'b>(&self, at: usize, coding: Coding, number: usize, around: Around<'b>) -> Check<'b> {
        let plan = &self.job.plans[at];
        let divisors = around.companion.map(|(_, written, decoded)| (written, decoded.as_slice()));
        Check::new(plan::spec(&plan.tensor, coding, number), around.factors, divisors)
            .within(plan.limits)
            .with_crc(with_crc(self.job, coding).then(|| self.job.description.checksum()))
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
        at: usize,
        coding: Coding,
        data: &Arc<Vec<u8>>,
        around: Around,
        number: usize,
    ) -> io::Result<Option<Quantized>> {
        let tensor = &self.job.plans[at].tensor;
        let found;
        let companion = match coding.companion().filter(|_| around.companion.is_none()) {
            Some(other) => {
                found = self.companion(other as usize, tensor, number)?;
                let Some((dtype, written, decoded)) = &found else { return Ok(None) };
                Some((*dtype, written.as_slice(), decoded))
            }
            None => around.companion,
        };
        let around = Around { companion, ..around };
        let mut check = self.check(at, coding, number, around);
        let quantized = tile::quantize(plan::spec(tensor, coding, number), data, around, Some(&mut check));
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
        let end = ((number + 1) * TILE_BYTES).min((of.extent.end - of.extent.start) as usize) / to * from;
        let start = number * TILE_BYTES / to * from;
        let (mut written, mut decoded) = (Vec::with_capacity(end - start), Vec::with_capacity(end - start));
        for piece in start / TILE_BYTES..end.div_ceil(TILE_BYTES) {
            let data = Arc::new(read_tile(self.job.source, tensor, piece)?);
            let coding = done.entry.coding;
            let parent = self.parent(coding, piece)?;
            let (factors, row_step, keep) = (done.factors.as_ref(), plan.row_step, plan.keep());
            let around = Around { parent: parent.as_deref(), factors, row_step, keep, ..Around::default() };
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
