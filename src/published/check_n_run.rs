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
//! Payload: [`ID`]; bits, +16 for symmetric, +128 for differential; varint width of a row; varint elements of the first
//! row, which may be cut. If differential: length and payload of the flags ([`bytes`]), 1 for each row that follows.
//! Then the zero points of those rows (for symmetric their x_max) as f32, their scales as f32 (not for symmetric), and
//! their codes, packed. The paper does not compress its metadata either.

mod policy;
mod profile;
mod quantizer;
#[cfg(test)]
mod tests;

pub use policy::{Predictor, Step, bits_after, bits_for, wants_baseline};
pub use quantizer::{Method, Search, l2_distance, l2_error, quantized};

use std::io;

use super::uniform::{self, Grid};
use super::{Corrupt, Fit, Policy, State, System, Tensor, Tile, pack};
use crate::entropy::{symbols, varint};

/// First byte of a payload.
pub const ID: u8 = 10;

const SYMMETRIC: u8 = 16;
const DIFFERENTIAL: u8 = 128;

/// The system at one bit width.
#[derive(Clone, Copy, Debug)]
pub struct CheckNRun {
    bits: u32,
    /// `None`: adaptive, with parameters from a profile of each checkpoint.
    method: Option<Method>,
    policy: Policy,
}

impl CheckNRun {
    /// The paper's configuration for this bit width (2, 3, 4 or 8); `None` for others.
    pub fn new(bits: u32) -> Option<CheckNRun> {
        let method = if bits == 8 { Some(Method::Asymmetric) } else { None };
        matches!(bits, 2 | 3 | 4 | 8).then_some(CheckNRun { bits, method, policy: Policy::Intermittent })
    }

    /// With another method. An adaptive one then has the given parameters and no profile.
    pub fn with(self, method: Method) -> CheckNRun {
        CheckNRun { method: Some(method), ..self }
    }

    /// With another policy than the paper's own.
    pub fn with_policy(self, policy: Policy) -> CheckNRun {
        CheckNRun { policy, ..self }
    }

    /// Parses a fit into method and width of a row; `None` if [`System::fit`] did not write it.
    fn fitted(&self, mut fit: &[u8]) -> Option<(Method, u64)> {
        let method = pack::take_byte(&mut fit).ok()?;
        let (bins, percent) = (varint::take(&mut fit).ok()?, varint::take(&mut fit).ok()?);
        let width = varint::take(&mut fit).ok()?;
        let search = Search { bins: bins.try_into().ok()?, percent: percent.try_into().ok()? };
        let methods = [Method::Symmetric, Method::Asymmetric, Method::Adaptive(search)];
        Some((*methods.get(usize::from(method))?, width))
    }
}

impl System for CheckNRun {
    fn policy(&self) -> Policy {
        self.policy
    }

    fn fit(&self, tensors: &[&dyn Tensor], _position: u32) -> io::Result<Vec<Fit>> {
        let method = match self.method {
            Some(method) => method,
            None => Method::Adaptive(profile::choose(self.bits, &profile::sample(tensors)?)),
        };
        let (number, search) = match method {
            Method::Symmetric => (0, None),
            Method::Asymmetric => (1, None),
            Method::Adaptive(search) => (2, Some(search)),
        };
        let one = |tensor: &&dyn Tensor| {
            let mut fit = vec![number];
            varint::put(search.map_or(0, |search| search.bins.into()), &mut fit);
            varint::put(search.map_or(0, |search| search.percent.into()), &mut fit);
            varint::put(tensor.rows().1, &mut fit);
            fit
        };
        Ok(tensors.iter().map(one).collect())
    }

    fn encode(&self, fit: &Fit, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
        let (method, width) = self.fitted(fit)?;
        let x = &tile.values;
        if !x.iter().all(|x| x.is_finite()) || width == 0 && !x.is_empty() {
            return None;
        }
        let previous = tile.previous.as_ref().map(|state| &state.values).filter(|values| values.len() == x.len());
        let narrow = if previous.is_some() { Narrow::of(x) } else { Narrow::Not };
        let (mut values, mut codes) = (vec![0.0; x.len()], vec![0; x.len()]);
        let lengths: Vec<usize> = row_lengths(tile.first, width, x.len()).collect();
        let all = quantizer::grids(method, self.bits, x, &lengths);
        let (mut flags, mut grids) = (Vec::new(), Vec::new());
        let (mut start, mut stored) = (0, 0);
        for (length, grid) in lengths.into_iter().zip(all) {
            let row = start..start + length;
            let now = &mut values[row.clone()];
            uniform::quantize(
                grid,
                quantizer::levels(self.bits),
                &x[row.clone()],
                &mut codes[stored..stored + length],
                now,
            );
            let same = previous.map(|previous| &previous[row]).filter(|then| narrow.same(now, then));
            match same {
                Some(then) => now.copy_from_slice(then),
                None => {
                    grids.push(grid);
                    stored += length;
                }
            }
            flags.push(u8::from(same.is_none()));
            start += length;
        }
        let symmetric = method == Method::Symmetric;
        let kind = if symmetric { SYMMETRIC } else { 0 } | if previous.is_some() { DIFFERENTIAL } else { 0 };
        out.extend_from_slice(&[ID, self.bits as u8 | kind]);
        varint::put(width, out);
        varint::put(first_row(tile.first, width), out);
        if previous.is_some() {
            varint::put_bytes(out, |out| symbols::encode(&flags, out));
        }
        let (zeros, scales): (Vec<f32>, Vec<f32>) = grids.iter().map(|grid| (grid.zero, grid.scale)).unzip();
        if symmetric {
            pack::put_floats(&zeros.iter().map(|zero| -zero).collect::<Vec<f32>>(), out);
        } else {
            pack::put_floats(&zeros, out);
            pack::put_floats(&scales, out);
        }
        pack::put(&codes[..stored], self.bits, out);
        Some(State { values: values.into(), bins: None })
    }

    fn decode(&self, mut payload: &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let payload = &mut payload;
        if pack::take_byte(payload)? != ID {
            return Err(Corrupt("not of Check-N-Run"));
        }
        let kind = pack::take_byte(payload)?;
        let bits = u32::from(kind & 15);
        if !matches!(bits, 2 | 3 | 4 | 8) || kind & 0x60 != 0 {
            return Err(Corrupt("bit width"));
        }
        let (width, first) = (varint::take(payload)?, varint::take(payload)?);
        if first > width || first == 0 && len > 0 {
            return Err(Corrupt("width of a row"));
        }
        // The first row begins inside one.
        let lengths = || row_lengths(width - first, width, len);
        let rows = lengths().count();
        let mut flags = vec![1; rows];
        let mut values = vec![0.0; len];
        if kind & DIFFERENTIAL != 0 {
            symbols::decode(varint::take_bytes(payload)?, &mut flags)?;
            let previous = previous.filter(|state| state.values.len() == len).ok_or(Corrupt("no previous state"))?;
            values.copy_from_slice(&previous.values);
        }
        let stored = flags.iter().filter(|&&flag| flag != 0).count();
        let grids: Vec<Grid> = if kind & SYMMETRIC != 0 {
            pack::take_floats(payload, stored)?.into_iter().map(|max| quantizer::symmetric(max, bits)).collect()
        } else {
            let (zeros, scales) = (pack::take_floats(payload, stored)?, pack::take_floats(payload, stored)?);
            zeros.into_iter().zip(scales).map(|(zero, scale)| Grid { zero, scale }).collect()
        };
        let elements = lengths().zip(&flags).filter(|&(_, &flag)| flag != 0).map(|(length, _)| length).sum();
        let mut codes = vec![0; elements];
        pack::take(payload, bits, &mut codes)?;
        if !payload.is_empty() {
            return Err(Corrupt("bytes after the last row"));
        }
        let (mut codes, mut grids, mut start) = (codes.as_slice(), grids.into_iter(), 0);
        for (length, &flag) in lengths().zip(&flags) {
            if flag != 0
                && let Some(grid) = grids.next()
            {
                let (row, rest) = codes.split_at(length);
                uniform::dequantize(grid, row, &mut values[start..start + length]);
                codes = rest;
            }
            start += length;
        }
        Ok(State { values: values.into(), bins: None })
    }
}

/// Elements of the tile's first row from its first element on; 0 for rows of no width.
fn first_row(first: u64, width: u64) -> u64 {
    width - first.checked_rem(width).unwrap_or(width)
}

/// Lengths of the rows of a tile that begins with this element of the tensor, including cut ones.
fn row_lengths(first: u64, width: u64, elements: usize) -> impl Iterator<Item = usize> {
    let mut length = first_row(first, width);
    let mut left = if width == 0 { 0 } else { elements };
    std::iter::from_fn(move || {
        let now = usize::try_from(length).map_or(left, |length| length.min(left));
        (left, length) = (left - now, width);
        (now > 0).then_some(now)
    })
}

/// The type that all values of a tile fit into: the previous state was rounded to it.
#[derive(Clone, Copy, PartialEq)]
enum Narrow {
    Not,
    Bf16,
    F16,
}

impl Narrow {
    fn of(values: &[f32]) -> Narrow {
        if values.iter().all(|x| x.to_bits().trailing_zeros() >= 16) {
            Narrow::Bf16
        } else if values.iter().all(|&x| half::f16::from_f32(x).to_f32() == x) {
            Narrow::F16
        } else {
            Narrow::Not
        }
    }

    /// True if two rows are equal, bit for bit or in this type.
    fn same(self, now: &[f32], then: &[f32]) -> bool {
        let bits = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
        now.iter().zip(then).all(bits)
            || match self {
                Narrow::Not => false,
                Narrow::Bf16 => now.iter().zip(then).all(|(&a, &b)| half::bf16::from_f32(a).to_f32() == b),
                Narrow::F16 => now.iter().zip(then).all(|(&a, &b)| half::f16::from_f32(a).to_f32() == b),
            }
    }
}
