//! First moments, relative to a divisor: **m_q = fl(g * A * d_q)**, A = u / g rounded, u = m / d.
//!
//! Adam divides m by sqrt(v). Stored like this, the quotient comes back within g * 9/16 for any quantization of v: the
//! encoder divides by the original v, and the decoder multiplies by v_q. One step g suits the whole tensor, since u is
//! of order 1 everywhere while m spans many octaves. The divisor d and the rounding of u depend on the optimizer: a
//! [`Rule`].
//!
//! These must never happen. A decoded |m_q| / d_q is well above |m| / d, which makes a restored run jump
//! ([`largest_error`] defines "well"). A sign flips. A value is not finite. Where v is 0 there is no quotient: m is 0
//! there, or an exception.
//!
//! A, exceptions and payload are the lattice's: [`super::lattice::encode_tile`]. Decoding
//! ([`super::fused_decode::moment`]) is sqrt, which IEEE defines to the last bit, two
//! multiplications in f64, and one rounding.

mod rule;

use rule::{Divide, for_rule};
pub use rule::{OUTWARD, Rule};

use super::float::{Float, Real, for_float};
use super::lattice::{Exception, MAX_A, ROUNDER, in_single, is_step};
use super::{Corrupt, Dtype, Unfit};
use crate::entropy::ints::Symbol;
use crate::entropy::simd::{Level, multiversion};

/// Elements quantized between two checks for failure.
const CHUNK: usize = 512;

/// True if `g` can be a step of quotients: a lattice's step from 2^-64 to 2^64, so that no product here leaves f64.
pub fn is_quotient_step(g: f64) -> bool {
    const LARGEST: f64 = (1u128 << 64) as f64;
    is_step(g) && (1.0 / LARGEST..=LARGEST).contains(&g)
}

/// Relative error of a quotient besides its rule's share of a step. m_q is rounded to its type, and u is computed in
/// f32 (2^-22 for its root, its division and its product).
fn roundings<F: Float>() -> f64 {
    if size_of::<F::Bytes>() == 2 { 1.0 / 256.0 } else { 1.0 / f64::from(1 << 20) }
}

/// Quantizes the tile `m`; `v` gives its divisors *as they were*. Slices have the same number of elements (`a_out`) or
/// their bytes. `step` is g, and the share of it that is added to a quotient before rounding, from 0 to [`OUTWARD`].
/// Appends the elements whose v is 0 and whose m is not to `exceptions`.
///
/// # Errors
/// An element of m is not finite, one of v is not or is negative, or u is more than [`MAX_A`] steps.
pub fn quantize(
    (rule, dtype): (Rule, Dtype),
    m: &[u8],
    v: &[u8],
    step: (f64, f64),
    a_out: &mut [i32],
    exceptions: &mut Vec<Exception>,
) -> Result<(), Unfit> {
    Unfit::when(!is_quotient_step(step.0) || !(0.0..=OUTWARD).contains(&step.1), "no step")?;
    Unfit::when(m.len() != a_out.len() * dtype.size() || v.len() != m.len(), "lengths differ")?;
    for_float!(dtype, F => for_rule!(rule, R =>
        quantize_tile::<F, R>(F::elements(m), F::elements(v), step, a_out, exceptions)),
        else Err(Unfit("element type")))
}

fn quantize_tile<F: Float, R: Divide>(
    m: &[F::Bytes],
    v: &[F::Bytes],
    step: (f64, f64),
    a: &mut [i32],
    exceptions: &mut Vec<Exception>,
) -> Result<(), Unfit> {
    let level = Level::detect();
    for (number, ((a, m), v)) in a.chunks_mut(CHUNK).zip(m.chunks(CHUNK)).zip(v.chunks(CHUNK)).enumerate() {
        let (fits, without) = quantize_chunk::<F, R>(level, m, v, step, a);
        Unfit::when(!fits, "not finite, or too many steps")?;
        if without {
            for (i, (&m, &v)) in m.iter().zip(v).enumerate() {
                if F::widen(v) == 0.0 && F::widen(m) != 0.0 {
                    exceptions.push(Exception { index: (number * CHUNK + i) as u32, raw: F::to_raw(m) });
                }
            }
        }
    }
    Ok(())
}

// These loops take two passes over a chunk: one in the elements' precision for roots and quotients, one in f64 for the
// rest. With both types in one, vectors would be those of the wider type, and roots and divisions would take as long for
// four elements of fp32 as for eight.
//
// Loops count instead of zipping many slices: a compiler that optimizes units apart leaves the zip's `next` as a call.

/// Elements of a pass, whose intermediate values stay in the first-level cache.
const PASS: usize = 256;

multiversion! {
    /// Quantizes up to one chunk; returns whether all elements can be quantized, and whether some m have no v.
    fn quantize_chunk<F: Float, R: Divide>(
        m: &[F::Bytes],
        v: &[F::Bytes],
        step: (f64, f64),
        a: &mut [i32],
    ) -> (bool, bool) {
        let (inverse, outward) = (1.0 / step.0, step.1);
        let (mut fits, mut without) = (true, false);
        let (zero, one) = (F::Work::default(), F::Work::near(1.0));
        // Much more than the roundings of a quotient and of its result take.
        let shrink = 1.0 - 4.0 * roundings::<F>();
        // Outside of the loop, which would clear them each time.
        let (mut quotients, mut moments) = ([F::Work::default(); PASS], [F::Work::default(); PASS]);
        for ((m, v), a) in m.chunks(PASS).zip(v.chunks(PASS)).zip(a.chunks_mut(PASS)) {
            let n = m.len().min(v.len()).min(a.len()).min(PASS);
            let (m_bytes, v_bytes, a) = (&m[..n], &v[..n], &mut a[..n]);
            #[allow(clippy::needless_range_loop)]
            for at in 0..n {
                let (m, v) = (F::Work::of::<F>(m_bytes[at]), F::Work::of::<F>(v_bytes[at]));
                let none = v == zero;
                quotients[at] = R::quotient(m, if none { one } else { v }).only_if(!none);
                moments[at] = m.only_if(!none);
                // An infinite v would make steps 0.
                fits &= (m.abs() <= F::Work::MAX) & (v <= F::Work::MAX) & (v >= zero);
                without |= none & (m != zero);
            }
            for at in 0..n {
                let steps: f64 = quotients[at].into();
                let steps = steps * inverse;
                // False for NaN as well, which is the root of a negative v.
                fits &= steps.abs() <= f64::from(MAX_A - 1);
                a[at] = (R::rounded(steps, moments[at].into(), outward, shrink) + ROUNDER).to_bits() as i32;
            }
        }
        (fits, without)
    }
}

/// Computes m_q of a tile from its A and the decoded divisors in `v_q`; exceptions are still to be applied. A product
/// beyond the type's largest value becomes that value; under [`Rule::Sign`] none becomes 0.
pub fn reconstruct((rule, dtype): (Rule, Dtype), v_q: &[u8], g: f64, a: &[i32], out: &mut [u8]) -> Result<(), Corrupt> {
    reconstruct_symbols((rule, dtype), v_q, g, a, out)
}

/// The same from a decoder's symbols.
pub(super) fn reconstruct_symbols<S: Symbol>(
    (rule, dtype): (Rule, Dtype),
    v_q: &[u8],
    g: f64,
    a: &[S],
    out: &mut [u8],
) -> Result<(), Corrupt> {
    Corrupt::when(!is_quotient_step(g), "step of first moments")?;
    if out.len() != a.len() * dtype.size() || v_q.len() != out.len() {
        return Err(Corrupt("lengths of first and second moments differ"));
    }
    let level = Level::detect();
    let single = in_single(dtype, g).filter(|_| S::IS_NARROW && rule != Rule::Sign);
    let sound = for_float!(dtype, F => {
        let all = a.chunks(CHUNK).zip(F::elements(v_q).chunks(CHUNK)).zip(F::elements_mut(out).chunks_mut(CHUNK));
        for_rule!(rule, R => all.into_iter().all(|((a, v), out)| {
            match single.map(|g| reconstruct_chunk::<F, R, S, f32>(level, v, g, a, out)) {
                Some((sound, false)) => sound,
                _ => reconstruct_chunk::<F, R, S, f64>(level, v, g, a, out).0,
            }
        }))
    }, else return Err(Corrupt("element type of first moments")));
    if sound { Ok(()) } else { Err(Corrupt("invalid second moments")) }
}

multiversion! {
    /// In f32 only with a step of [`in_single`] and a rule that keeps products as they are. Returns whether all second
    /// moments are at least 0 and finite, since only then is no result a NaN; and whether a result may be wrong.
    fn reconstruct_chunk<F: Float, R: Divide, S: Symbol, P: Real>(
        v_q: &[F::Bytes],
        g: P,
        a: &[S],
        out: &mut [F::Bytes],
    ) -> (bool, bool) {
        let (mut sound, mut in_doubt) = (true, false);
        let most = P::near(F::LARGEST);
        for ((out, &v), a) in out.iter_mut().zip(v_q).zip(a) {
            let v = F::Work::of::<F>(v);
            sound &= (v >= F::Work::default()) & (v <= F::Work::near(F::LARGEST));
            let value = (g * P::of_integer(a.value())) * P::near(R::divisor(v).into());
            let value = if value > most { most } else { value };
            let value = if value < -most { -most } else { value };
            let value = if R::SIGNS { P::near(R::kept::<F>(value.into())) } else { value };
            in_doubt |= value.is_in_doubt::<F>();
            *out = value.element::<F>();
        }
        (sound, in_doubt)
    }
}

/// The largest |m_q / d_q - m / d| of a tile whose step is `g`; elements whose v is 0 count as 0. `None` for a
/// forbidden result, with r = 2^-8 for the 16-bit types and 2^-20 for others:
///
/// - something is not finite, or a v negative; or only one of v and v_q is 0;
/// - m_q is not 0 and has another sign than m;
/// - v is 0, and m_q neither has the bits of m nor is 0 like m;
/// - |m_q| / d_q is more than (|m| / d + g * (1/2 + [`OUTWARD`])) * (1 + r), and half of the type's least value / d_q;
/// - under [`Rule::Inward`], |m_q| / d_q is more than |m| / d at all: the rest of v under the root must never shrink
///   relative to v;
/// - under [`Rule::Sign`], m_q is 0 where m is not, or |m_q| / d_q is more than (|m| / d + g) * (1 + r), and the least
///   value.
pub fn largest_error((rule, dtype): (Rule, Dtype), m: &[u8], v: &[u8], m_q: &[u8], v_q: &[u8], g: f64) -> Option<f64> {
    let alike = [v, m_q, v_q].iter().all(|of| of.len() == m.len());
    (alike && is_quotient_step(g)).then_some(())?;
    let level = Level::detect();
    let (largest, sound) = for_float!(dtype, F => {
        let [m, v, m_q, v_q] = [m, v, m_q, v_q].map(F::elements);
        for_rule!(rule, R => compare::<F, R>(level, m, v, m_q, v_q, g))
    }, else (0.0, false));
    sound.then_some(largest)
}

multiversion! {
    /// The largest error of a tile, and whether it is sound.
    fn compare<F: Float, R: Divide>(
        m: &[F::Bytes],
        v: &[F::Bytes],
        m_q: &[F::Bytes],
        v_q: &[F::Bytes],
        g: f64,
    ) -> (f64, bool) {
        // Magnitudes order like their bits, and integers have a vector maximum that ignores nothing.
        let (mut largest, mut sound) = (0i64, true);
        let (zero, one) = (F::Work::default(), F::Work::near(1.0));
        let more = 1.0 + roundings::<F>();
        let chunks = m.chunks(PASS).zip(v.chunks(PASS)).zip(m_q.chunks(PASS).zip(v_q.chunks(PASS)));
        let (mut before, mut after) = ([zero; PASS], [zero; PASS]);
        let (mut sizes, mut divisors) = ([zero; PASS], [zero; PASS]);
        for ((m, v), (m_q, v_q)) in chunks {
            let n = m.len().min(v.len()).min(m_q.len()).min(v_q.len()).min(PASS);
            let (m_bytes, v_bytes, m_q_bytes, v_q_bytes) = (&m[..n], &v[..n], &m_q[..n], &v_q[..n]);
            #[allow(clippy::needless_range_loop)]
            for at in 0..n {
                let (m, v) = (F::Work::of::<F>(m_bytes[at]), F::Work::of::<F>(v_bytes[at]));
                let (m_q, v_q) = (F::Work::of::<F>(m_q_bytes[at]), F::Work::of::<F>(v_q_bytes[at]));
                let finite = |x: F::Work| x.abs() <= F::Work::MAX;
                sound &= finite(m) & finite(v) & finite(m_q) & finite(v_q) & (v >= zero) & (v_q >= zero);
                let none = v == zero;
                sound &= none == (v_q == zero);
                let (v, v_q) = (if none { one } else { v }, if none { one } else { v_q });
                let u = R::quotient(m, v);
                let u_q = R::quotient(m_q, v_q);
                let grown = R::INWARD & (u_q.abs() > u.abs());
                let flipped = (m_q != zero) & ((m > zero) != (m_q > zero));
                let lost = R::SIGNS & ((m_q == zero) != (m == zero));
                sound &= if none { m == m_q } else { !grown & !flipped & !lost };
                (before[at], after[at]) = (u, u_q);
                divisors[at] = R::divisor(v_q);
                // Equal as values: the two zeros are, and other values have equal bits then. Without a divisor the quotient has no limit.
                sizes[at] = if none { zero } else { m_q.abs() };
            }
            for at in 0..n {
                let (u, u_q): (f64, f64) = (before[at].into(), after[at].into());
                let (size, divisor): (f64, f64) = (sizes[at].into(), divisors[at].into());
                let most = (u.abs() + g * R::GROWS) * more * divisor + F::LEAST * R::LEAST;
                let inflated = size > most;
                sound &= !inflated;
                largest = largest.max((u_q - u).abs().to_bits() as i64);
            }
        }
        (f64::from_bits(largest as u64), sound)
    }
}

/// A sample of a first moment: u = m / d, and |m|. Both are 0 where v is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// [`super::lattice::choose_g`] chooses g as a multiple of the root mean square of these.
    pub ratio: f64,
    /// What a move along u gains, to first order: m estimates the gradient.
    pub weight: f64,
}

/// The samples of a tile's elements.
pub fn samples((rule, dtype): (Rule, Dtype), m: &[u8], v: &[u8]) -> Vec<Sample> {
    fn all<F: Float, R: Divide>(m: &[u8], v: &[u8]) -> Vec<Sample> {
        let pairs = F::elements(m).iter().zip(F::elements(v)).map(|(&m, &v)| (F::widen(m), F::widen(v)));
        let sample = |(m, v): (f64, f64)| match v == 0.0 {
            true => Sample { ratio: 0.0, weight: 0.0 },
            false => Sample { ratio: R::quotient(m, v), weight: m.abs() },
        };
        pairs.map(sample).collect()
    }
    for_float!(dtype, F => for_rule!(rule, R => all::<F, R>(m, v)), else Vec::new())
}

/// The share of a momentum that a step keeps: sum of |m u_q| / sum of |m u|. `step` as in [`quantize`]; u is rounded to
/// the nearest step. 1 if there is no momentum.
///
/// The root mean square of u says little where rows differ. In a table of embeddings rare rows have small v and large
/// u. A step in units of these makes the u of frequent rows 0, which have most of the momentum.
pub fn kept(samples: &[Sample], (g, outward): (f64, f64)) -> f64 {
    let (mut kept, mut whole) = (0.0, 0.0);
    for Sample { ratio, weight } in samples {
        kept += weight * (ratio.abs() / g + outward).round() * g;
        whole += weight * ratio.abs();
    }
    if whole > 0.0 { kept / whole } else { 1.0 }
}

#[cfg(test)]
mod tests;
