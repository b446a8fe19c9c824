//! The lattice by rows, for embedding tables: few rows change between states, each by a different amount.
//!
//! The state is the lattice's: R = fl(K + g*A) with one step g for the tensor, here a fine one. In addition, A is a
//! multiple of 2^e in each row. A new e is chosen whenever the row changes, so that its step follows the size of *its*
//! changes. A change is stored from P, the parent's A rounded to a multiple of 2^e: **A = P + a * 2^e**. A row that is
//! still within its stored bound is left alone and costs a flag.
//!
//! Weight decay multiplies every row by one factor, used or not. Then the child's g is the parent's times that factor,
//! and A means the same in both: without K, an unused row still costs a flag. So [`restate`] follows only the power of
//! two between two steps. [`factor`] finds the rest.
//!
//! Rows belong to a tile: a row that a tile's border cuts counts as two rows.
//!
//! Encoding a tile: [`quantize`], then [`encode_tile`], which takes any A and parent, so that changes of several states
//! can be merged. Decoding: [`decode_tile_add`] along the chain, then the lattice's [`super::lattice::reconstruct`] and
//! [`super::lattice::apply_exceptions`]. [`base_step`] picks g.

mod tile;

pub use tile::{decode_tile_add, encode_tile};

use super::float::{Float, for_float};
use super::lattice::{Exception, is_step, keep_missed, predict, to_multiples};
use super::{Dtype, Unfit};
use crate::entropy::Corrupt;
use crate::entropy::simd::{Level, multiversion};

/// Largest e: a row may move 2^24 times as much as the step of its table.
pub const MAX_E: u32 = 24;

/// How far a row at rest may be from its points, in its steps. Half a step is what rounding leaves. The rest is for the
/// roundings of a decay: a row at its bound would else be chosen anew for each of them, in ever finer steps.
const AT_REST: f64 = 9.0 / 16.0;

/// From this many elements on, a row's A show its e. In a shorter row all may by chance be multiples of more.
const TELLING: usize = 8;

/// The position of a tile's elements in the rows of their tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Elements of one row.
    pub width: u64,
    /// Index of the tile's first element in the tensor.
    pub first: u64,
}

impl Rows {
    /// Lengths of the rows in a tile of this many elements, including cut rows at its ends. Width 0 has none.
    fn lengths(self, elements: usize) -> impl Iterator<Item = usize> {
        let width = usize::try_from(self.width).unwrap_or(usize::MAX);
        let mut length = self.width.saturating_sub(self.first.checked_rem(self.width).unwrap_or(0));
        let mut left = if width == 0 { 0 } else { elements };
        std::iter::from_fn(move || {
            let now = left.min(usize::try_from(length).unwrap_or(usize::MAX));
            (left, length) = (left - now, self.width);
            (now > 0).then_some(now)
        })
    }
}

/// The base that a tile is quantized against.
#[derive(Clone, Copy, Debug)]
pub struct Base<'a> {
    /// The tile's rows.
    pub rows: Rows,
    /// The keyframe tile, or `None` for zeros.
    pub k: Option<&'a [u8]>,
    /// Step of the tensor.
    pub g: f64,
    /// A of the parent, or `None` for zeros.
    pub a: Option<&'a [i32]>,
}

/// Quantizes the tile `w`. The step of a changed row is `c` times the root mean square of W - R_parent in it, rounded
/// to g * 2^e; its bound is half of that. Let p be the largest power of two (at most 2^[`MAX_E`]) that divides the
/// row's parent A. If the A are all 0 or the row has fewer than 8 elements, p is 1. A row whose elements are all within
/// 9/16 of g * p stays as it is. Appends the elements that would miss the bound to `exceptions`; `r_out` has their
/// exact bits. Returns the largest |R - W|.
///
/// # Errors
/// A value is not finite, A leaves its range, or the lengths differ.
pub fn quantize(
    dtype: Dtype,
    w: &[u8],
    base: Base<'_>,
    c: f64,
    a_out: &mut [i32],
    r_out: &mut [u8],
    exceptions: &mut Vec<Exception>,
) -> Result<f64, Unfit> {
    let steps = [base.g, base.g * f64::from(1 << MAX_E)];
    Unfit::when(!steps.into_iter().all(is_step) || !c.is_finite() || c <= 0.0, "no step")?;
    let bytes = a_out.len() * dtype.size();
    let alike = w.len() == bytes && r_out.len() == bytes && base.k.is_none_or(|k| k.len() == bytes);
    Unfit::when(!alike || base.a.is_some_and(|a| a.len() != a_out.len()) || base.rows.width == 0, "lengths differ")?;
    for_float!(dtype, F => {
        let (w, k, r) = (F::elements(w), base.k.map(F::elements), F::elements_mut(r_out));
        quantize_rows::<F>(Level::detect(), w, k, base, c, a_out, r, exceptions)
    }, else None)
    .ok_or(Unfit("not finite, or too many steps from the keyframe"))
}

/// Measurements of a row.
struct Row {
    /// Largest and mean square of |W - R_parent|, the latter in steps.
    largest: f64,
    mean: f64,
    /// All bits that occur in the parent's A.
    bits: i32,
}

/// Elements measured together: their differences stay in the first-level cache.
const LOOK: usize = 256;

/// Measures one row, and fills `r` with the parent's.
#[inline(always)]
fn look<F: Float>(w: &[F::Bytes], k: Option<&[F::Bytes]>, a: Option<&[i32]>, g: f64, r: &mut [F::Bytes]) -> Row {
    let inverse = 1.0 / g;
    let (mut largest, mut bits) = (0i64, 0i32);
    // Eight sums side by side: with one, each addition would wait for the last.
    let mut sums = [0f64; 8];
    let mut differences = [0f64; LOOK];
    let mut one = |w: F::Bytes, k: f64, a: i32, r: &mut F::Bytes, steps: &mut f64| {
        *r = F::round(k + g * f64::from(a));
        let difference = F::widen(w) - F::widen(*r);
        // Magnitudes order like their bits, NaN above all of them.
        largest = largest.max(difference.abs().to_bits() as i64);
        *steps = difference * inverse;
        bits |= a;
    };
    for (number, (w, r)) in w.chunks(LOOK).zip(r.chunks_mut(LOOK)).enumerate() {
        let range = number * LOOK..number * LOOK + w.len();
        let differences = &mut differences[..w.len()];
        let both = w.iter().zip(r).zip(differences.iter_mut());
        match (k.map(|k| &k[range.clone()]), a.map(|a| &a[range])) {
            (Some(k), Some(a)) => both.zip(k).zip(a).for_each(|((((&w, r), d), &k), &a)| one(w, F::widen(k), a, r, d)),
            (None, Some(a)) => both.zip(a).for_each(|(((&w, r), d), &a)| one(w, 0.0, a, r, d)),
            (Some(k), None) => both.zip(k).for_each(|(((&w, r), d), &k)| one(w, F::widen(k), 0, r, d)),
            (None, None) => both.for_each(|((&w, r), d)| one(w, 0.0, 0, r, d)),
        }
        let (eights, tail) = differences.as_chunks::<8>();
        for eight in eights {
            sums.iter_mut().zip(eight).for_each(|(sum, d)| *sum += d * d);
        }
        sums.iter_mut().zip(tail).for_each(|(sum, d)| *sum += d * d);
    }
    Row { largest: f64::from_bits(largest as u64), mean: sums.iter().sum::<f64>() / w.len() as f64, bits }
}

/// The e whose step is nearest, as a ratio, to this many steps of the table.
#[inline(always)]
fn nearest_e(steps: f64) -> u32 {
    let exponent = (nearest_power(steps).to_bits() >> 52) as i32 - 1023;
    exponent.clamp(0, MAX_E as i32) as u32
}

/// The power of two that is nearest to a positive number, as a ratio.
#[inline(always)]
pub fn nearest_power(number: f64) -> f64 {
    f64::from_bits((number * std::f64::consts::SQRT_2).to_bits() & !((1 << 52) - 1))
}

/// Restates the parent's accumulators for a child with step `to`: A becomes A times the power of two that is nearest to
/// `from / to`, rounded, ties to even.
///
/// # Errors
/// A value leaves the range of A.
pub fn restate(a: &mut [i32], from: f64, to: f64) -> Result<(), Corrupt> {
    Corrupt::when(!is_step(from) || !is_step(to), "step of the lattice")?;
    let power = nearest_power(from / to);
    if power == 1.0 { Ok(()) } else { predict(a, power) }
}

multiversion! {
    /// Quantizes row by row; returns the largest error, or `None` if an element cannot be quantized.
    #[allow(clippy::too_many_arguments)]
    fn quantize_rows<F: Float>(
        w: &[F::Bytes],
        k: Option<&[F::Bytes]>,
        base: Base<'_>,
        c: f64,
        a_out: &mut [i32],
        r_out: &mut [F::Bytes],
        exceptions: &mut Vec<Exception>,
    ) -> Option<f64> {
        let (mut largest, mut start) = (0f64, 0);
        for length in base.rows.lengths(w.len()) {
            let range = start..start + length;
            let (w, k) = (&w[range.clone()], k.map(|k| &k[range.clone()]));
            let parent = base.a.map(|a| &a[range.clone()]);
            let (a, r) = (&mut a_out[range.clone()], &mut r_out[range]);
            let row = look::<F>(w, k, parent, base.g, r);
            if !row.largest.is_finite() {
                return None;
            }
            let told = if row.bits == 0 || length < TELLING { 0 } else { row.bits.trailing_zeros().min(MAX_E) };
            if row.largest <= base.g * AT_REST * f64::from(1 << told) {
                match parent {
                    Some(parent) => a.copy_from_slice(parent),
                    None => a.fill(0),
                }
                largest = largest.max(row.largest);
            } else {
                let e = nearest_e(c * row.mean.sqrt());
                let step = base.g * f64::from(1 << e);
                let (error, in_range) = to_multiples::<F>(w, k, step, e, a, r);
                if !in_range {
                    return None;
                }
                largest = largest.max(keep_missed::<F>(error, w, step, start, r, exceptions));
            }
            start += length;
        }
        Some(largest)
    }
}

/// Steps of the table in the smallest typical step of a row. A row then has a choice of at least 8 powers of two above
/// g, and A stay small.
const FINENESS: f64 = 8.0;

/// Largest row's root mean square in steps: with weights up to 2^10 times a row's change, A stay below 2^30.
const RANGE: f64 = 1_048_576.0;

/// A step for a table whose rows move by these root mean squares (of any number of rows and states; 0 for a row that
/// does not move). It is a power of two, 8 to 16 times below the value that nineteen in twenty moving rows exceed,
/// unless rows differ by more than 2^20. `None` if nothing moves, or a value is not finite.
pub fn base_step(row_rms: &[f64]) -> Option<f64> {
    let mut moving: Vec<f64> = row_rms.iter().copied().filter(|rms| *rms != 0.0).collect();
    moving.sort_by(f64::total_cmp);
    let (&least, &largest) = (moving.first()?, moving.last()?);
    if !(least > 0.0 && largest.is_finite()) {
        return None;
    }
    let wish = (moving[moving.len() / 20] / FINENESS).max(largest / RANGE);
    // The power of two at or below.
    let g = f64::from_bits(wish.to_bits() & !((1 << 52) - 1));
    is_step(g).then_some(g)
}

/// The factor by which rows moved from `from` to `to`, if all that count moved by one: else 1. `from` may be known with
/// a random error. Rows have `width` elements.
pub fn factor(from: &[f64], to: &[f64], width: usize, counts: impl Fn(usize) -> bool) -> f64 {
    /// Standard errors that a factor must differ from 1.
    const SURE: f64 = 5.0;
    /// Least error of an element, as a share of it, squared: the roundings of f32 in some steps of a training.
    const LEAST: f64 = 1e-13;
    if width < TELLING {
        return 1.0;
    }
    let (mut sum, mut weights, mut variance) = (0.0, 0.0, 0.0);
    let rows = from.chunks(width).zip(to.chunks(width)).enumerate();
    for (_, (from, to)) in rows.filter(|(number, _)| counts(*number)) {
        let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (before, both, after) = (product(from, from), product(from, to), product(to, to));
        // The errors are in `from`, so they do not correlate with `to`.
        let factor = after / both;
        // No child's step can follow more.
        if !(0.75..1.33).contains(&factor) {
            continue;
        }
        // What the factor leaves of the row. It counts twice, for rows that moved by themselves leave more than others.
        let rest = (1.0 - both / before * (both / after)).max(LEAST);
        let weight = 1.0 / (rest * rest);
        sum += weight * (factor - 1.0);
        weights += weight;
        variance += weight / rest;
    }
    let (off, error) = (sum / weights, (variance / width as f64).sqrt() / weights);
    if off.abs() > SURE * error { 1.0 + off } else { 1.0 }
}

/// Root mean squares by which rows move from `now` to `then`, besides the factor that all rows share: 0 for a row that
/// moves by nothing else. Also returns that factor.
pub fn moves(now: &[f64], then: &[f64], width: usize) -> (Vec<f64>, f64) {
    /// A row's own move is at least this share of the whole, as squares. In a small rest the factor has its roundings.
    const LEAST: f64 = 0.25;
    let factor = factor(now, then, width, |_| true);
    let of_row = |(now, then): (&[f64], &[f64])| {
        let square = |factor: f64| now.iter().zip(then).map(|(a, b)| (b - factor * a).powi(2)).sum::<f64>();
        let own = square(factor);
        if own <= LEAST * square(1.0) { 0.0 } else { (own / width as f64).sqrt() }
    };
    (now.chunks(width).zip(then.chunks(width)).map(of_row).collect(), factor)
}

#[cfg(test)]
mod tests;
