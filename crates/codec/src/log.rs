//! The logarithmic lattice, for means and sums of squares: second moments (Adam) and Adagrad's sums.
//!
//! The *pseudo-logarithm* of x > 0 is its f64 bit pattern without the low 36 bits: 11 bits of exponent and 16 of the
//! fraction. That is log2 with straight lines between the powers of two. It is at most .0861 octaves off, but all
//! bounds here are stated in it and do not depend on that. It needs only integers, so it is the same on every machine.
//! One octave is 2^16.
//!
//! An element v comes back as **v_q = inverse(P + unit*q)**, rounded to its type and kept between the type's smallest
//! positive and its largest finite value. [`Factors`] predict P from its row and column. `unit` is the step of the
//! tensor, from a quarter of an octave to 16 octaves. With 4 octaves nearly all q are 0, and almost only the factors
//! are stored.
//!
//! This must never happen: a decoded v is 0 although v was not (its Adam update would divide by it), negative, or not
//! finite. It cannot: v_q is 0 if and only if q is [`ZERO`], which an encoder writes only for 0.
//!
//! Encoding a tensor: [`FactorsBuilder`]; each tile: [`quantize`], then [`encode_tile`]. Decoding:
//! [`super::fused_decode::log`] along the chain, whose states all have one unit. Each state has its own factors.
//! Factors kept over a chain would lag behind a growing second moment, and decoded values would be too small.

mod centre;
mod factors;
mod tile;

pub use centre::{Piece, centred};
pub use factors::{ALL_ZERO, Factors, FactorsBuilder, Grid, LONG};
pub use tile::{From, encode_tile};
pub(super) use tile::{GONE, apply_symbols};

use super::float::{Float, Real, for_float};
use super::{Corrupt, Dtype, Unfit};
use crate::entropy::ints::Symbol;
use crate::entropy::simd::{Level, multiversion};

/// q of an element that is exactly 0.
pub const ZERO: i32 = i32::MIN;

/// Largest |q| of any other element: the 2047 octaves of f64 in quarters, in both directions.
pub const MAX_Q: i32 = 1 << 14;

/// Bits of the fraction of a pseudo-logarithm: one octave is `1 << FRACTION_BITS`.
pub const FRACTION_BITS: u32 = 16;

/// Low bits of an f64 that its pseudo-logarithm drops.
const DROPPED: u32 = 52 - FRACTION_BITS;

/// Elements quantized between two checks for failure.
const CHUNK: usize = 512;

/// The pseudo-logarithm of a positive value.
#[inline(always)]
pub fn pseudo_log(value: f64) -> i32 {
    (value.to_bits() >> DROPPED) as i32
}

/// True if `unit` can be a step: a power of two from a quarter of an octave to 16 octaves.
pub fn is_unit(unit: u32) -> bool {
    unit.is_power_of_two() && (1 << 14..=1 << 20).contains(&unit)
}

/// Maximum error of a decoded element in octaves of pseudo-logarithm. It is half a unit, or three quarters with
/// `hysteresis`, plus an allowance for the rounding to the type. The allowance is a sixteenth of a unit, at least 1/64
/// octave; bf16 needs 1/256. (Only among the smallest subnormals of the type can rounding take more; an element that
/// then misses the bound is unfit.)
pub fn bound(unit: u32, hysteresis: bool) -> f64 {
    f64::from(bound_log(unit, hysteresis)) / f64::from(1 << FRACTION_BITS)
}

fn bound_log(unit: u32, hysteresis: bool) -> i32 {
    let sixteenth = unit as i32 / 16;
    sixteenth * (if hysteresis { 12 } else { 8 } + 1)
}

/// The constants for the elements of one tile.
#[derive(Clone, Copy)]
struct Steps {
    /// log2 of the unit.
    shift: u32,
    /// Pseudo-logarithms of the type's least and largest value.
    least: i32,
    largest: i32,
}

impl Steps {
    fn new<F: Float>(unit: u32) -> Steps {
        Steps { shift: unit.trailing_zeros(), least: pseudo_log(F::LEAST), largest: pseudo_log(F::LARGEST) }
    }

    /// Pseudo-logarithm of the v_q of an element that is not 0. A q beyond all octaves is clamped to the type's range
    /// like any other.
    #[inline(always)]
    fn log(self, p: i32, q: i32) -> i32 {
        let reach = (1 << 28) >> self.shift;
        (p + (q.clamp(-reach, reach) << self.shift)).clamp(self.least, self.largest)
    }
}

/// Quantizes the tile `v`: q from its pseudo-logarithm, and v_q from q. `grid` locates it among the factors; `keep` is
/// the parent's q. An element keeps it while within 3/4 of a unit, so that values near the middle of two q do not
/// oscillate. Slices have the same number of elements (`q_out`, `keep`) or their bytes. Returns the largest error in
/// octaves of the pseudo-logarithm, at most [`bound`].
///
/// # Errors
/// An element is negative (-0 is), not finite, or a subnormal of f64; an element misses the bound; or the lengths
/// differ.
pub fn quantize(
    dtype: Dtype,
    v: &[u8],
    grid: Grid<'_>,
    unit: u32,
    keep: Option<&[i32]>,
    q_out: &mut [i32],
    out: &mut [u8],
) -> Result<f64, Unfit> {
    Unfit::when(!is_unit(unit), "no unit of octaves")?;
    let bytes = q_out.len() * dtype.size();
    if v.len() != bytes || out.len() != bytes || keep.is_some_and(|keep| keep.len() != q_out.len()) {
        return Err(Unfit("lengths differ"));
    }
    Unfit::when(!grid.holds(q_out.len()), "elements beyond the factors")?;
    for_float!(dtype, F => quantize_tile::<F>(v, grid, unit, keep, q_out, out), else Err(Unfit("element type")))
}

fn quantize_tile<F: Float>(
    v: &[u8],
    grid: Grid<'_>,
    unit: u32,
    keep: Option<&[i32]>,
    q_out: &mut [i32],
    out: &mut [u8],
) -> Result<f64, Unfit> {
    let (level, steps) = (Level::detect(), Steps::new::<F>(unit));
    let (v, out) = (F::elements(v), F::elements_mut(out));
    let bound = bound_log(unit, keep.is_some());
    let mut predictions = [0; CHUNK];
    let mut largest = 0;
    for (number, (q, out)) in q_out.chunks_mut(CHUNK).zip(out.chunks_mut(CHUNK)).enumerate() {
        let start = number * CHUNK;
        let (p, v) = (&mut predictions[..q.len()], &v[start..][..q.len()]);
        let keep = keep.map(|keep| &keep[start..][..q.len()]);
        grid.predict(level, start, p);
        let (mut error, mut fits) = match F::IN_F32 {
            true => quantize_chunk::<F, f32>(level, v, p, steps, keep, q, out),
            false => (0, false),
        };
        if !fits {
            (error, fits) = quantize_chunk::<F, f64>(level, v, p, steps, keep, q, out);
        }
        Unfit::when(!fits, "negative, not finite, or too small")?;
        if error > bound {
            // Rounding missed the bound; a neighbouring q may hold it.
            error = 0;
            for (((q, out), &v), &p) in q.iter_mut().zip(out).zip(v).zip(p.iter()) {
                error = error.max(mend::<F>(v, p, steps, bound, q, out).ok_or(Unfit("rounding misses the bound"))?);
            }
        }
        largest = largest.max(error);
    }
    Ok(f64::from(largest) / f64::from(1 << FRACTION_BITS))
}

/// Moves q to the nearest one that holds the bound; returns the error, or `None` if no q does.
fn mend<F: Float>(v: F::Bytes, p: i32, steps: Steps, bound: i32, q: &mut i32, out: &mut F::Bytes) -> Option<i32> {
    if *q == ZERO {
        return Some(0);
    }
    let log = pseudo_log(F::widen(v));
    let nearest = (log - p + (1 << steps.shift >> 1)) >> steps.shift;
    for candidate in [*q, nearest, nearest - 1, nearest + 1] {
        let rounded = F::round(f64::from_bits((steps.log(p, candidate) as u64) << DROPPED));
        let error = (pseudo_log(F::widen(rounded)) - log).abs();
        if error <= bound {
            (*q, *out) = (candidate, rounded);
            return Some(error);
        }
    }
    None
}

/// The exponent of f64 less that of a precision, as a pseudo-logarithm.
const fn bias<P: Real>() -> i32 {
    P::BELOW << FRACTION_BITS
}

/// True for a positive normal number, by its high bits.
#[inline(always)]
fn is_normal<P: Real>(bits: i32) -> bool {
    (bits.wrapping_sub(1 << FRACTION_BITS) as u32) < P::EXPONENTS << FRACTION_BITS
}

/// Quantizes an element whose prediction is `p` to `q` and `out`. Returns its error, and whether it is a zero or a
/// normal number as its result.
#[inline(always)]
fn quantize_one<F: Float, P: Real>(
    v: F::Bytes,
    (p, kept): (i32, Option<i32>),
    steps: Steps,
    q: &mut i32,
    out: &mut F::Bytes,
) -> (i32, bool) {
    let (half, quarter) = (1 << steps.shift >> 1, 1 << steps.shift >> 2);
    let v = P::of::<F>(v);
    let (bits, zero) = (v.high_bits(FRACTION_BITS), v.is_plain_zero());
    let log = bits + bias::<P>();
    let mut new = (log - p + half) >> steps.shift;
    if let Some(kept) = kept {
        // A distance of 3/4 of a unit from a neighbouring q is 1/4 from this one's middle.
        let (beside, off) = (kept.wrapping_sub(new), log - p - (new << steps.shift));
        new += i32::from((beside == 1) & (off >= quarter)) - i32::from((beside == -1) & (off <= -quarter));
    }
    let back = steps.log(p, new);
    let normal = is_normal::<P>(bits) & (back >= bias::<P>() + (1 << FRACTION_BITS));
    *q = if zero { ZERO } else { new };
    *out = P::of_high_bits(if zero { 0 } else { back - bias::<P>() }, FRACTION_BITS).element::<F>();
    // In its own type, nothing was rounded.
    let is_own = size_of::<P>() == size_of::<F::Bytes>();
    let back = if is_own { back } else { P::of::<F>(*out).high_bits(FRACTION_BITS) + bias::<P>() };
    (if zero { 0 } else { (back - log).abs() }, zero | normal)
}

multiversion! {
    /// Quantizes up to one chunk. Returns the largest error, and whether all elements and results are zeros or normal
    /// numbers of this precision.
    fn quantize_chunk<F: Float, P: Real>(
        v: &[F::Bytes],
        p: &[i32],
        steps: Steps,
        keep: Option<&[i32]>,
        q: &mut [i32],
        out: &mut [F::Bytes],
    ) -> (i32, bool) {
        // Not a truth value: those of a vector would be packed into bytes.
        let (mut largest, mut special) = (0, 0u32);
        let both = v.iter().zip(p).zip(q.iter_mut().zip(out.iter_mut()));
        match keep {
            Some(keep) => {
                for (((&v, &p), (q, out)), &kept) in both.zip(keep) {
                    let (error, sound) = quantize_one::<F, P>(v, (p, Some(kept)), steps, q, out);
                    (largest, special) = (largest.max(error), special | u32::from(!sound));
                }
            }
            None => {
                for ((&v, &p), (q, out)) in both {
                    let (error, sound) = quantize_one::<F, P>(v, (p, None), steps, q, out);
                    (largest, special) = (largest.max(error), special | u32::from(!sound));
                }
            }
        }
        (largest, special == 0)
    }
}

/// Computes v_q of a tile from its q.
pub fn reconstruct(dtype: Dtype, grid: Grid<'_>, unit: u32, q: &[i32], out: &mut [u8]) -> Result<(), Corrupt> {
    reconstruct_symbols(dtype, grid, unit, q, out)
}

/// The same from integers of any width; only those of 32 bits can be [`ZERO`].
pub(super) fn reconstruct_symbols<S: Symbol>(
    dtype: Dtype,
    grid: Grid<'_>,
    unit: u32,
    q: &[S],
    out: &mut [u8],
) -> Result<(), Corrupt> {
    fn all<F: Float, S: Symbol>(grid: Grid<'_>, unit: u32, q: &[S], out: &mut [u8]) {
        let (level, steps) = (Level::detect(), Steps::new::<F>(unit));
        let mut predictions = [0; CHUNK];
        let size = size_of::<F::Bytes>();
        for (number, (q, out)) in q.chunks(CHUNK).zip(out.chunks_mut(CHUNK * size)).enumerate() {
            let p = &mut predictions[..q.len()];
            grid.predict(level, number * CHUNK, p);
            if !F::IN_F32 || !reconstruct_chunk::<F, S, f32>(level, p, steps, q, F::elements_mut(out)) {
                reconstruct_chunk::<F, S, f64>(level, p, steps, q, F::elements_mut(out));
            }
        }
    }
    Corrupt::when(!is_unit(unit), "unit of octaves")?;
    if out.len() != q.len() * dtype.size() || !grid.holds(q.len()) {
        return Err(Corrupt("lengths of the tile and its factors differ"));
    }
    for_float!(dtype, F => {
        all::<F, S>(grid, unit, q, out);
        Ok(())
    }, else Err(Corrupt("element type of the logarithmic lattice")))
}

/// The prediction of the factors alone: `n` elements, none of them 0.
///
/// # Errors
/// The elements are beyond the factors, or the type is not the lattice's.
pub fn prediction(dtype: Dtype, grid: Grid<'_>, n: usize) -> Result<Vec<u8>, Corrupt> {
    let mut out = vec![0; n * dtype.size()];
    reconstruct(dtype, grid, 1 << FRACTION_BITS, &vec![0; n], &mut out)?;
    Ok(out)
}

multiversion! {
    /// False if an element is no normal number of this precision. The fraction of either holds that of a
    /// pseudo-logarithm, so only the exponent's bias differs.
    fn reconstruct_chunk<F: Float, S: Symbol, P: Real>(
        p: &[i32],
        steps: Steps,
        q: &[S],
        out: &mut [F::Bytes],
    ) -> bool {
        let mut normal = true;
        for ((&p, q), out) in p.iter().zip(q).zip(out) {
            let (log, is_zero) = (steps.log(p, q.value()) - bias::<P>(), q.value() == ZERO);
            normal &= is_zero | (log >= 1 << FRACTION_BITS);
            *out = P::of_high_bits(if is_zero { 0 } else { log }, FRACTION_BITS).element::<F>();
        }
        normal
    }
}

/// [`reconstruct_symbols`] of a block whose q are the parent's and these classes of small symbols. False if symbols are
/// no plain differences, a q is beyond its range, an element is a subnormal of f32, or the type is beyond f32; `out` is
/// useless then.
pub(super) fn add_and_reconstruct(
    dtype: Dtype,
    grid: Grid<'_>,
    unit: u32,
    q: &[i16],
    classes: &[u8],
    out: &mut [u8],
) -> bool {
    fn all<F: Float>(grid: Grid<'_>, unit: u32, q: &[i16], classes: &[u8], out: &mut [F::Bytes]) -> bool {
        let (level, steps) = (Level::detect(), Steps::new::<F>(unit));
        let mut predictions = [0; CHUNK];
        let chunks = q.chunks(CHUNK).zip(classes.chunks(CHUNK)).zip(out.chunks_mut(CHUNK));
        chunks.enumerate().all(|(number, ((q, classes), out))| {
            let p = &mut predictions[..q.len()];
            grid.predict(level, number * CHUNK, p);
            add_and_reconstruct_chunk::<F>(level, p, steps, q, classes, out)
        })
    }
    for_float!(dtype, F => F::IN_F32 && all::<F>(grid, unit, q, classes, F::elements_mut(out)), else false)
}

multiversion! {
    fn add_and_reconstruct_chunk<F: Float>(
        p: &[i32],
        steps: Steps,
        q: &[i16],
        classes: &[u8],
        out: &mut [F::Bytes],
    ) -> bool {
        let mut sound = true;
        for (((&p, &q), class), out) in p.iter().zip(q).zip(classes).zip(out) {
            let (parent, symbol) = (i32::from(q), class.value());
            let q = parent + symbol;
            let log = steps.log(p, q) - bias::<f32>();
            // A parent of 0 is below the range.
            sound &= (parent.abs() <= MAX_Q) & (q.abs() <= MAX_Q) & (symbol < GONE) & (log >= 1 << FRACTION_BITS);
            *out = f32::of_high_bits(log, FRACTION_BITS).element::<F>();
        }
        sound
    }
}

/// The largest error of a decoded tile in octaves of the pseudo-logarithm. `None` for any forbidden result: an element
/// is negative (-0 is) or not finite; only one of an element and its decoded value is 0; or the lengths differ.
pub fn largest_error(dtype: Dtype, v: &[u8], decoded: &[u8]) -> Option<f64> {
    (v.len() == decoded.len()).then_some(())?;
    let level = Level::detect();
    let (largest, sound) = for_float!(dtype, F => {
        let (v, decoded) = (F::elements(v), F::elements(decoded));
        match F::IN_F32.then(|| compare::<F, f32>(level, v, decoded)) {
            Some((largest, true)) => (largest, true),
            _ => compare::<F, f64>(level, v, decoded),
        }
    }, else (0, false));
    sound.then(|| f64::from(largest) / f64::from(1 << FRACTION_BITS))
}

multiversion! {
    /// The largest difference of pseudo-logarithms, and whether all pairs are two zeros or two positive normal numbers of
    /// this precision.
    fn compare<F: Float, P: Real>(v: &[F::Bytes], decoded: &[F::Bytes]) -> (i32, bool) {
        let (mut largest, mut special) = (0, 0u32);
        for (&v, &decoded) in v.iter().zip(decoded) {
            let (v, decoded) = (P::of::<F>(v), P::of::<F>(decoded));
            let zeros = v.is_plain_zero() & decoded.is_plain_zero();
            let [v, decoded] = [v, decoded].map(|value| value.high_bits(FRACTION_BITS));
            special |= u32::from(!(zeros | (is_normal::<P>(v) & is_normal::<P>(decoded))));
            largest = largest.max((v - decoded).abs());
        }
        (largest, special == 0)
    }
}

#[cfg(test)]
mod tests;
