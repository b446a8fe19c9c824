//! The lattice: a tensor as **R = fl(K + g*A)**.
//!
//! K is the keyframe tensor (zeros if there is none). g is the step, one positive number for the whole tensor. A has
//! one `i32` per element, and fl is the rounding to the element type. W, the written tensor, comes back as R with |R -
//! W| <= g/2 in every element. This is checked when it is quantized. A few elements miss the bound by the rounding to
//! the type; they are kept exactly, as *exceptions*.
//!
//! A state is stored as the difference of its A to its parent's. A is a sum of integers, so **merging any run of deltas
//! is integer addition**, and R never depends on how the chain to it is stored. If the step changes along a chain, the
//! parent's A are first restated in the new step ([`rescale`]). That is only a prediction: A itself is exact.
//!
//! This must never happen: two machines, or two versions of this code, compute a different R. So the computation is two
//! IEEE operations in f64 (multiply, then add: never fused), then one rounding, and nothing else.
//!
//! Encoding a tile: [`quantize`], then [`encode_tile`]. Decoding: [`super::fused_decode::lattice`]. [`choose_g`] picks the step.

use super::exception::put_exceptions;
use super::float::{Float, Real, for_float};
use super::{Dtype, Unfit, lossless};
use crate::entropy::ints::{LARGE, SMALL, Symbol};
use crate::entropy::simd::{Level, multiversion};
use crate::entropy::{Corrupt, ints, varint};

pub use super::exception::{Exception, apply_exceptions};

/// Largest |A|: the difference of two such values still fits an `i32`.
pub const MAX_A: i32 = 1 << 30;

/// Maximum significant bits of g: with |A| below 2^29 the product g*A is exact in f64.
pub const STEP_BITS: u32 = 24;

/// Adding 1.5 * 2^52 leaves the nearest integer, ties to even, in the low bits: the f64 unit itself rounds.
pub(super) const ROUNDER: f64 = 6_755_399_441_055_744.0;

/// Elements quantized between two checks for failure.
const CHUNK: usize = 512;

/// True if `g` can be a step: positive, at most [`STEP_BITS`] significant bits, and neither it nor its inverse near the
/// ends of f64.
pub fn is_step(g: f64) -> bool {
    let fraction = g.to_bits() & ((1 << 52) - 1);
    g.is_normal() && g > 0.0 && (1.0 / g).is_normal() && fraction.trailing_zeros() >= 53 - STEP_BITS
}

/// Significant bits of a step whose product with 15 bits is exact in f32, which has 24.
const SINGLE_BITS: u32 = 9;

/// No product of such a step leaves f32, or the range where it is exact.
const LARGEST_SINGLE: f64 = (1u128 << 64) as f64;

/// The step of a tile in f32, if loops in f32 give the bits of f64: vectors then have twice as many numbers. The elements
/// must be f32 or bf16, and the step's product with every integer of 16 bits exact in f32.
///
/// A sum or product of two f32 has the same bits if f64 computes it, and f32 then rounds it. f64 has more than twice as
/// many bits and two to spare, so rounding twice does no harm. (Figueroa, "When is double rounding innocuous?", 1995)
/// For bf16 the f32 is rounded once more. That gives other bits only if the f32 lies in the middle of two bf16 and was
/// rounded itself. Such a chunk is computed in f64.
pub(super) fn in_single(dtype: Dtype, g: f64) -> Option<f32> {
    let fraction = g.to_bits() & ((1 << 52) - 1);
    let is_short = fraction.trailing_zeros() > 52 - SINGLE_BITS && (1.0 / LARGEST_SINGLE..=LARGEST_SINGLE).contains(&g);
    (matches!(dtype, Dtype::F32 | Dtype::Bf16) && is_short).then_some(g as f32)
}

/// Quantizes the tile `w`: A = round((W - K) * (1/g)), ties to even, and R from it. All slices have the same number of
/// elements (`a_out`) or their bytes. Appends the elements that would miss the bound to `exceptions`; `r_out` has their
/// exact bits. Returns the largest |R - W|, at most g/2.
pub fn quantize(
    dtype: Dtype,
    w: &[u8],
    k: Option<&[u8]>,
    g: f64,
    a_out: &mut [i32],
    r_out: &mut [u8],
    exceptions: &mut Vec<Exception>,
) -> Result<f64, Unfit> {
    Unfit::when(!is_step(g), "no step")?;
    let bytes = a_out.len() * dtype.size();
    Unfit::when(w.len() != bytes || r_out.len() != bytes || k.is_some_and(|k| k.len() != bytes), "lengths differ")?;
    for_float!(dtype, F => {
        let (w, k, r) = (F::elements(w), k.map(F::elements), F::elements_mut(r_out));
        quantize_tile::<F>(w, k, g, a_out, r, exceptions)
    }, else Err(Unfit("element type")))
}

fn quantize_tile<F: Float>(
    w: &[F::Bytes],
    k: Option<&[F::Bytes]>,
    g: f64,
    a_out: &mut [i32],
    r_out: &mut [F::Bytes],
    exceptions: &mut Vec<Exception>,
) -> Result<f64, Unfit> {
    let (level, mut largest) = (Level::detect(), 0f64);
    let chunks = a_out.chunks_mut(CHUNK).zip(w.chunks(CHUNK)).zip(r_out.chunks_mut(CHUNK));
    for (number, ((a, w), r)) in chunks.enumerate() {
        let k = k.map(|k| &k[number * CHUNK..][..a.len()]);
        let (error, in_range) = quantize_chunk::<F>(level, w, k, g, a, r);
        Unfit::when(!in_range, "not finite, or too many steps from the keyframe")?;
        largest = largest.max(keep_missed::<F>(error, w, g, number * CHUNK, r, exceptions));
    }
    Ok(largest)
}

/// Keeps the elements exactly that miss the bound of half a step, if the largest `error` is beyond it. `first` is the
/// index of the first element. Returns the largest error that stays.
#[inline(always)]
pub(super) fn keep_missed<F: Float>(
    error: f64,
    w: &[F::Bytes],
    step: f64,
    first: usize,
    r: &mut [F::Bytes],
    exceptions: &mut Vec<Exception>,
) -> f64 {
    // False for NaN.
    let within = |error: f64| error <= step * 0.5;
    if within(error) {
        return error;
    }
    let mut largest = 0f64;
    for (i, (r, &w)) in r.iter_mut().zip(w).enumerate() {
        let missed = (F::widen(*r) - F::widen(w)).abs();
        if within(missed) {
            largest = largest.max(missed);
        } else {
            *r = w;
            exceptions.push(Exception { index: (first + i) as u32, raw: F::to_raw(w) });
        }
    }
    largest
}

multiversion! {
    /// Quantizes up to one chunk, see [`to_multiples`].
    fn quantize_chunk<F: Float>(
        w: &[F::Bytes],
        k: Option<&[F::Bytes]>,
        g: f64,
        a: &mut [i32],
        r: &mut [F::Bytes],
    ) -> (f64, bool) {
        to_multiples::<F>(w, k, g, 0, a, r)
    }
}

/// Quantizes to A that are multiples of 2^e, in units of g; `step` is g * 2^e, whose product with A / 2^e equals that of
/// g with A exactly. Returns the largest |R - W|, and whether all A are in range and all inputs finite.
#[inline(always)]
pub(super) fn to_multiples<F: Float>(
    w: &[F::Bytes],
    k: Option<&[F::Bytes]>,
    step: f64,
    e: u32,
    a: &mut [i32],
    r: &mut [F::Bytes],
) -> (f64, bool) {
    let inverse = 1.0 / step;
    let most = f64::from(MAX_A >> e);
    // Magnitudes order like their bits, and integers have a vector maximum that ignores nothing.
    let (mut largest, mut in_range) = (0i64, true);
    let mut one = |w: F::Bytes, k: f64, a: &mut i32, r: &mut F::Bytes| {
        let exact = F::widen(w);
        let steps = (exact - k) * inverse;
        in_range &= steps.abs() <= most;
        let rounded = steps + ROUNDER;
        *a = (rounded.to_bits() as i32) << e;
        *r = F::round(k + step * (rounded - ROUNDER));
        largest = largest.max((F::widen(*r) - exact).abs().to_bits() as i64);
    };
    let both = w.iter().zip(a).zip(r);
    match k {
        Some(k) => both.zip(k).for_each(|(((&w, a), r), &k)| one(w, F::widen(k), a, r)),
        None => both.for_each(|((&w, a), r)| one(w, 0.0, a, r)),
    }
    (f64::from_bits(largest as u64), in_range)
}

/// Computes R of a tile from its A. `k` and `out` are the bytes of as many elements as `a`. Other lengths, or a type
/// that is not the lattice's, are an error.
pub fn reconstruct(dtype: Dtype, k: Option<&[u8]>, g: f64, a: &[i32], out: &mut [u8]) -> Result<(), Corrupt> {
    reconstruct_symbols(dtype, k, g, a, out)
}

/// The same from integers of any width.
pub(super) fn reconstruct_symbols<S: Symbol>(
    dtype: Dtype,
    k: Option<&[u8]>,
    g: f64,
    a: &[S],
    out: &mut [u8],
) -> Result<(), Corrupt> {
    let bytes = a.len() * dtype.size();
    if out.len() != bytes || k.is_some_and(|k| k.len() != bytes) {
        return Err(Corrupt("lengths of the tile and its keyframe differ"));
    }
    Corrupt::when(!is_step(g), "step of the lattice")?;
    let level = Level::detect();
    let single = in_single(dtype, g).filter(|_| S::IS_NARROW);
    for_float!(dtype, F => {
        let (k, out) = (k.map(F::elements), F::elements_mut(out));
        for (number, (a, out)) in a.chunks(CHUNK).zip(out.chunks_mut(CHUNK)).enumerate() {
            let k = k.map(|k| &k[number * CHUNK..][..a.len()]);
            if single.is_none_or(|g| !reconstruct_chunk::<F, S, f32>(level, k, g, a, out)) {
                reconstruct_chunk::<F, S, f64>(level, k, g, a, out);
            }
        }
        Ok(())
    }, else Err(Corrupt("element type of the lattice")))
}

multiversion! {
    /// In f32 only with a step of [`in_single`]. False if a result may be wrong.
    fn reconstruct_chunk<F: Float, S: Symbol, P: Real>(
        k: Option<&[F::Bytes]>,
        g: P,
        a: &[S],
        out: &mut [F::Bytes],
    ) -> bool {
        let mut sound = true;
        let mut one = |k: P, a: i32, out: &mut F::Bytes| {
            let in_doubt;
            (*out, in_doubt) = k.sum::<F>(g * P::of_integer(a));
            sound &= !in_doubt;
        };
        match k {
            Some(k) => out.iter_mut().zip(a).zip(k).for_each(|((out, a), &k)| one(P::of::<F>(k), a.value(), out)),
            None => out.iter_mut().zip(a).for_each(|(out, a)| one(P::default(), a.value(), out)),
        }
        sound
    }
}

/// Restates accumulators in another step, for children with step `to`: A becomes round(A * (from / to)), ties to even.
/// One IEEE division and one multiplication: the same on every machine.
///
/// # Errors
/// A value leaves the range of A.
pub fn rescale(a: &mut [i32], from: f64, to: f64) -> Result<(), Corrupt> {
    Corrupt::when(!is_step(from) || !is_step(to), "step of the lattice")?;
    if from == to { Ok(()) } else { predict(a, from / to) }
}

/// Restates accumulators as a multiple of themselves: A becomes round(A * gain), ties to even. It suits states that
/// decay from one to the next, where it makes a child's differences smallest.
///
/// # Errors
/// The gain is not finite, or a value leaves the range of A.
pub fn predict(a: &mut [i32], gain: f64) -> Result<(), Corrupt> {
    if multiply_all(Level::detect(), a, gain) { Ok(()) } else { Err(Corrupt("A beyond its range once restated")) }
}

multiversion! {
    fn multiply_all(a: &mut [i32], ratio: f64) -> bool {
        let mut in_range = true;
        for a in a {
            let steps = f64::from(*a) * ratio;
            in_range &= steps.abs() <= f64::from(MAX_A);
            *a = (steps + ROUNDER).to_bits() as i32;
        }
        in_range
    }
}

/// Appends the payload of a tile: the symbols A - (A of the parent, in this tile's step), then the exceptions, whose
/// indices ascend. `parent_a` has the length of `a`, or is `None` for a keyframe.
pub fn encode_tile(
    a: &[i32],
    parent_a: Option<&[i32]>,
    exceptions: &[Exception],
    out: &mut Vec<u8>,
) -> Result<(), Unfit> {
    if let Some(parent) = parent_a {
        Unfit::when(parent.len() != a.len(), "lengths differ")?;
        let fill = |start: usize, block: &mut [i32]| {
            block.copy_from_slice(&parent[start..][..block.len()]);
            true
        };
        return encode_difference(a, None, fill, exceptions, out);
    }
    let fill = |start: usize, block: &mut [i32]| block.copy_from_slice(&a[start..][..block.len()]);
    varint::put_bytes(out, |out| ints::encode_blocks(a.len(), out, |_, _| false, fill));
    put_exceptions(exceptions, out);
    Ok(())
}

/// [`encode_tile`] for a parent whose A `parent` makes block by block, in this tile's step. It gets the index of a
/// block's first element and the block, and returns false if these A do not fit. `narrow` has the same A in 16 bits, if
/// they are at hand and all of them fit.
///
/// # Errors
/// `parent` returned false, or a difference does not fit 32 bits. `out` is unchanged then.
pub fn encode_difference(
    a: &[i32],
    narrow: Option<&[i16]>,
    mut parent: impl FnMut(usize, &mut [i32]) -> bool,
    exceptions: &[Exception],
    out: &mut Vec<u8>,
) -> Result<(), Unfit> {
    let (level, before) = (Level::detect(), out.len());
    let mut fits = true;
    varint::put_bytes(out, |out| {
        let classes = |start: usize, classes: &mut [u8]| {
            let range = start..start + classes.len();
            narrow.is_some_and(|before| small_differences(level, &a[range.clone()], &before[range], classes))
        };
        ints::encode_blocks(a.len(), out, classes, |start, symbols| {
            fits &= parent(start, symbols) && subtract_from(level, &a[start..][..symbols.len()], symbols);
        });
    });
    if !fits {
        out.truncate(before);
        return Err(Unfit("too many steps from the parent"));
    }
    put_exceptions(exceptions, out);
    Ok(())
}

/// Appends the keyframe tile K of a state without a parent, or that it is 0, before the state's [`encode_tile`].
pub fn put_keyframe(dtype: Dtype, keyframe: Option<&[u8]>, out: &mut Vec<u8>) {
    varint::put_bytes(out, |out| {
        if let Some(keyframe) = keyframe {
            lossless::encode(dtype, keyframe, None, out);
        }
    });
}

/// Decodes the output of [`put_keyframe`] for a tile of `len` bytes; returns K, and the payload that follows.
pub fn take_keyframe(dtype: Dtype, mut payload: &[u8], len: usize) -> Result<(Option<Vec<u8>>, &[u8]), Corrupt> {
    let keyframe = varint::take_bytes(&mut payload)?;
    if keyframe.is_empty() {
        return Ok((None, payload));
    }
    let mut k = vec![0; len];
    lossless::decode(dtype, keyframe, None, &mut k)?;
    Ok((Some(k), payload))
}

multiversion! {
    /// The classes of `a` less `before`, in one pass: no block of either is widened first. False if a difference is not
    /// small, or an element of `before` stands for another value ([`super::Integers`]).
    fn small_differences(a: &[i32], before: &[i16], classes: &mut [u8]) -> bool {
        let mut other = 0u32;
        for ((class, &a), &before) in classes.iter_mut().zip(a).zip(before) {
            let index = a.wrapping_sub(before.into()).wrapping_add(SMALL) as u32;
            other |= u32::from((index >= u32::from(LARGE)) | (before == i16::MIN));
            *class = index as u8;
        }
        other == 0
    }
}

multiversion! {
    /// symbols = a - symbols; false if one does not fit.
    fn subtract_from(a: &[i32], symbols: &mut [i32]) -> bool {
        let mut overflow = 0;
        for (symbol, &a) in symbols.iter_mut().zip(a) {
            let difference = a.wrapping_sub(*symbol);
            overflow |= (a ^ *symbol) & (a ^ difference);
            *symbol = difference;
        }
        overflow >= 0
    }
}

/// The updates W_new - W_old of two tiles (or samples) of the same type, for [`choose_g`].
pub fn updates(dtype: Dtype, new: &[u8], old: &[u8]) -> Vec<f64> {
    fn all<F: Float>(new: &[u8], old: &[u8]) -> Vec<f64> {
        F::elements(new).iter().zip(F::elements(old)).map(|(&new, &old)| F::widen(new) - F::widen(old)).collect()
    }
    for_float!(dtype, F => all::<F>(new, old), else Vec::new())
}

/// The values of a tile (or samples).
pub fn values(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    fn all<F: Float>(bytes: &[u8]) -> Vec<f64> {
        F::elements(bytes).iter().map(|&value| F::widen(value)).collect()
    }
    for_float!(dtype, F => all::<F>(bytes), else Vec::new())
}

/// The largest |R - W| of two tiles of the same type; `None` if an element is not finite, or the lengths differ.
pub fn largest_error(dtype: Dtype, w: &[u8], r: &[u8]) -> Option<f64> {
    (w.len() == r.len()).then_some(())?;
    let level = Level::detect();
    let largest = for_float!(dtype, F => largest_difference::<F>(level, F::elements(w), F::elements(r)), else f64::NAN);
    largest.is_finite().then_some(largest)
}

multiversion! {
    /// The largest |R - W|; not finite if an element is not.
    fn largest_difference<F: Float>(w: &[F::Bytes], r: &[F::Bytes]) -> f64 {
        // Magnitudes order like their bits, infinity and then NaN above all of them.
        let mut largest = 0i64;
        for (&w, &r) in w.iter().zip(r) {
            largest = largest.max((F::widen(w) - F::widen(r)).abs().to_bits() as i64);
        }
        f64::from_bits(largest as u64)
    }
}

/// A step for a tensor with these *raw* updates W_t - W_(t-1): `c` times their root mean square, shortened to a few
/// bits. Never use the error-fed W_t - R_(t-1): with a large `c` that spirals. `None` if nothing moves, or an update is
/// not finite.
///
/// A short g keeps K + g*A on the element type's own grid, where rounding moves nothing and exceptions are rare. For
/// the 16-bit types, whose grid is about as coarse as g itself, that takes a power of two.
pub fn choose_g(dtype: Dtype, updates: &[f64], c: f64) -> Option<f64> {
    let largest = updates.iter().fold(0f64, |largest, &u| if u.abs() <= largest { largest } else { u.abs() });
    if !(largest > 0.0 && largest.is_finite()) {
        return None;
    }
    // Scaled, since squares leave the range of f64 long before their root does.
    let mean = updates.iter().map(|&u| (u / largest) * (u / largest)).sum::<f64>() / updates.len() as f64;
    short_step(dtype, c * largest * mean.sqrt())
}

/// The nearest step to `g` that is short enough for this type; `None` if there is none.
pub fn short_step(dtype: Dtype, g: f64) -> Option<f64> {
    let bits = match dtype {
        Dtype::F16 | Dtype::Bf16 => 1,
        _ => SHORT_STEP_BITS,
    };
    let g = round_bits(g, bits);
    is_step(g).then_some(g)
}

/// The step nearest to `g`; `None` if there is none.
pub fn nearest_step(g: f64) -> Option<f64> {
    let g = round_bits(g, STEP_BITS);
    is_step(g).then_some(g)
}

/// Significant bits of a chosen step. It is within 6% of the requested one, which shifts the balance of rate and error
/// only as a slightly different `c` would.
const SHORT_STEP_BITS: u32 = 4;

/// `value` (finite, positive) rounded to `bits` significant bits; the carry goes into the exponent.
fn round_bits(value: f64, bits: u32) -> f64 {
    let drop = 53 - bits;
    let half = 1u64 << (drop - 1);
    f64::from_bits(value.to_bits().wrapping_add(half) & !((1 << drop) - 1))
}

#[cfg(test)]
mod tests;
