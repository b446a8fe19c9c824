//! Check-N-Run (Eisenman et al., NSDI 2022): stores the modified rows, each quantized uniformly with a range of its
//! own.
//!
//! - Differential checkpoints by rows (section 5.1): [`Policy`] chooses full baselines and the base of each
//!   differential checkpoint. A tile is encoded against any given state, and an unmodified row costs a flag. A modified
//!   row stores its quantized values themselves, not their difference.
//! - Quantization by rows (section 5.2): [`Method`]. As in the paper, 2, 3 and 4 bits are adaptive asymmetric, and 8
//!   bits plain asymmetric; the other methods are for comparison.
//! - Bits by the expected restores (section 6.2.1): [`bits_for`], [`bits_after`].
//!
//! The paper tracks on the GPU which rows a step touches. Here a row counts as modified if its quantization differs
//! from its base state. The same values always quantize to the same bits, so an untouched row is recognized. For that,
//! a chain keeps its search parameters as long as some rows do not change (see `profile`). If the tensor's type is
//! narrower than f32, so is the comparison. A weight matrix is treated by rows as well, and a row that a tile's border
//! cuts counts as two.
//!
//! Payload: bits, +16 for symmetric, +128 for differential; varint width of a row; varint elements of the first row,
//! which may be cut. If differential: length and payload of the flags ([`bytes`]), 1 for each row that follows. Then the
//! zero points of those rows (for symmetric their x_max) as f32, their scales as f32 (not for symmetric), and their
//! codes, packed. The paper does not compress its metadata either.

mod profile;
mod quantizer;
#[cfg(test)]
mod tests;

pub use quantizer::{Method, Search, l2_distance, quantized};

use std::io;
use std::sync::Arc;

use super::quantize::{self, Grid};
use super::select::{first_row, ranges, row_lengths};
use super::{Fit, NO_PREVIOUS, Policy, State, System, Tensor, Tile, code};
use codec::entropy::{symbols, varint};
use codec::{Corrupt, Dtype};
use quantizer::levels;

const SYMMETRIC: u8 = 16;
const DIFFERENTIAL: u8 = 128;

/// The system at one bit width.
#[derive(Debug)]
pub(super) struct CheckNRun {
    /// 2, 3, 4 or 8.
    pub(super) bits: u32,
    /// `None`: the paper's for these bits, with parameters from a profile of each checkpoint.
    pub(super) method: Option<Method>,
    pub(super) policy: Policy,
}

impl System for CheckNRun {
    fn policy(&self) -> Policy {
        self.policy
    }

    fn fit(&self, tensors: &[&dyn Tensor], _position: u32) -> io::Result<Vec<Arc<dyn Fit>>> {
        let method = match self.method {
            Some(method) => method,
            None if self.bits == 8 => Method::Asymmetric,
            None => Method::Adaptive(profile::choose(self.bits, &profile::sample(tensors)?)),
        };
        let one = |tensor: &&dyn Tensor| Arc::new(Rows { bits: self.bits, method, width: tensor.rows().1 });
        Ok(tensors.iter().map(|tensor| one(tensor) as Arc<dyn Fit>).collect())
    }

    fn take(&self, payload: &mut &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let kind = code::take_byte(payload)?;
        let bits = u32::from(kind & 15);
        Corrupt::when(!matches!(bits, 2 | 3 | 4 | 8) || kind & 0x60 != 0, "bit width")?;
        let (width, first) = (varint::take(payload)?, varint::take(payload)?);
        Corrupt::when(first > width || first == 0 && len > 0, "width of a row")?;
        // The first row begins inside one.
        let lengths = row_lengths(width - first, width, len);
        let mut flags = vec![1; lengths.len()];
        let mut values = vec![0.0; len];
        if kind & DIFFERENTIAL != 0 {
            symbols::decode(varint::take_bytes(payload)?, &mut flags)?;
            values.copy_from_slice(&previous.ok_or(NO_PREVIOUS)?.values);
        }
        let rows: Vec<_> = ranges(&lengths).zip(flags).filter(|&(_, flag)| flag != 0).map(|(row, _)| row).collect();
        let zeros = code::take_floats(payload, rows.len())?;
        let grids: Vec<Grid> = if kind & SYMMETRIC != 0 {
            zeros.into_iter().map(|max| quantizer::symmetric(max, bits)).collect()
        } else {
            let scales = code::take_floats(payload, rows.len())?;
            zeros.into_iter().zip(scales).map(|(zero, scale)| Grid { zero, scale }).collect()
        };
        let mut codes = vec![0; rows.iter().map(ExactSizeIterator::len).sum()];
        code::take_codes(payload, bits, &mut codes)?;
        let mut codes = codes.as_slice();
        for (row, grid) in rows.into_iter().zip(grids) {
            let (own, rest) = codes.split_at(row.len());
            quantize::dequantize(grid, own, &mut values[row]);
            codes = rest;
        }
        Ok(State::of(values))
    }
}

/// The rows of a tensor.
#[derive(Debug, PartialEq)]
struct Rows {
    bits: u32,
    method: Method,
    width: u64,
}

impl Fit for Rows {
    fn put(&self, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
        let x = &tile.values;
        if self.width == 0 && !x.is_empty() {
            return None;
        }
        let previous = tile.before();
        let dtype = if previous.is_some() { code::narrowest(x).1 } else { Dtype::F32 };
        let (mut values, mut codes) = (vec![0.0; x.len()], vec![0; x.len()]);
        let lengths = row_lengths(tile.first, self.width, x.len());
        let all = quantizer::grids(self.method, self.bits, x, &lengths);
        let (mut flags, mut grids, mut stored) = (Vec::new(), Vec::new(), 0);
        for (row, grid) in ranges(&lengths).zip(all) {
            let (now, end) = (&mut values[row.clone()], stored + row.len());
            quantize::quantize(grid, levels(self.bits), &x[row.clone()], &mut codes[stored..end], now);
            let same = previous.map(|previous| &previous[row]).filter(|then| is_same(dtype, now, then));
            match same {
                Some(then) => now.copy_from_slice(then),
                None => {
                    grids.push(grid);
                    stored = end;
                }
            }
            flags.push(u8::from(same.is_none()));
        }
        let is_symmetric = self.method == Method::Symmetric;
        let flag = |set: bool, flag: u8| if set { flag } else { 0 };
        out.push(self.bits as u8 | flag(is_symmetric, SYMMETRIC) | flag(previous.is_some(), DIFFERENTIAL));
        varint::put(self.width, out);
        varint::put(first_row(tile.first, self.width), out);
        if previous.is_some() {
            varint::put_bytes(out, |out| symbols::encode(&flags, out));
        }
        let sign = if is_symmetric { -1.0 } else { 1.0 };
        code::put_floats(&grids.iter().map(|grid| sign * grid.zero).collect::<Vec<f32>>(), out);
        if !is_symmetric {
            code::put_floats(&grids.iter().map(|grid| grid.scale).collect::<Vec<f32>>(), out);
        }
        code::put_codes(&codes[..stored], self.bits, out);
        Some(State::of(values))
    }
}

/// True if two rows are equal, bit for bit or in the type that all values of the tile fit into: the previous state was
/// rounded to it.
fn is_same(dtype: Dtype, now: &[f32], then: &[f32]) -> bool {
    let bits = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
    let rounded = |(a, b): (&f32, &f32)| code::rounded(dtype, *a) == *b;
    now.iter().zip(then).all(bits) || dtype != Dtype::F32 && now.iter().zip(then).all(rounded)
}

/// The predictor of the intermittent policy (section 5.1). It takes the sizes S_1 to S_i of the differences to the
/// baseline so far, in baselines. With a new baseline the next i + 1 intervals cost as much as the past ones did, F_c =
/// 1 + S_1 + ... + S_i. Without one, each costs at least S_i, I_c = (i + 1) S_i. It makes a baseline if F_c <= I_c.
/// Right after a baseline (i = 0) there is no history, and a difference follows.
pub fn wants_baseline(sizes: &[f64]) -> bool {
    let intervals = sizes.len() as f64 + 1.0;
    sizes.last().is_some_and(|last| 1.0 + sizes.iter().sum::<f64>() <= intervals * last)
}

/// Restores that a bit width can bear within the paper's limit of .01% of accuracy: 2 bits one, 3 bits three, 4 bits
/// twenty.
const STANDS: [(u32, u32); 3] = [(1, 2), (3, 3), (20, 4)];

/// Bit width for this many expected restores of a training.
pub fn bits_for(restores: u32) -> u32 {
    STANDS.iter().find(|&&(most, _)| restores <= most).map_or(8, |&(_, bits)| bits)
}

/// Bit width from now on: the width for `expected` restores, or 8 after more than those.
pub fn bits_after(expected: u32, restores: u32) -> u32 {
    if restores > expected { 8 } else { bits_for(expected) }
}
