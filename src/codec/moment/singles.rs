//! First moments of fp32, bf16 and fp16, in two passes over a chunk: one in f32 for roots and quotients, one in f64 for the rest. A loop
//! with both types has vectors of the wider one, and roots and divisions take as long for four elements as for eight.
//! The results are those of the general loops.

use super::super::float::Float;
use super::super::lattice::{MAX_A, ROUNDER};
use super::roundings;
use super::rule::Divide;
use crate::entropy::simd::multiversion;

// Loops count instead of zipping many slices: a compiler that optimizes units apart leaves the zip's `next` as a call.

/// Elements of a pass, whose intermediate values stay in the first-level cache.
const PASS: usize = 256;

multiversion! {
    /// Quantizes up to one chunk, as [`super::quantize_chunk`] does.
    pub(super) fn quantize<F: Float, R: Divide>(m: &[F::Bytes], v: &[F::Bytes], step: (f64, f64), a: &mut [i32]) -> (bool, bool) {
        let (inverse, outward) = (1.0 / step.0, step.1);
        let (mut fits, mut without) = (true, false);
        let shrink = 1.0 - 4.0 * roundings::<F>();
        // Outside of the loop, which would clear them each time.
        let (mut quotients, mut moments) = ([0f32; PASS], [0f32; PASS]);
        for ((m, v), a) in m.chunks(PASS).zip(v.chunks(PASS)).zip(a.chunks_mut(PASS)) {
            let n = m.len().min(v.len()).min(a.len()).min(PASS);
            let (m_bytes, v_bytes, a) = (&m[..n], &v[..n], &mut a[..n]);
            #[allow(clippy::needless_range_loop)]
            for at in 0..n {
                let (m, v) = (F::single(m_bytes[at]), F::single(v_bytes[at]));
                let none = v == 0.0;
                let some = |value: f32| f32::from_bits(value.to_bits() & u32::from(none).wrapping_sub(1));
                quotients[at] = some(R::quotient::<F>(m.into(), (if none { 1.0 } else { v }).into()) as f32);
                moments[at] = some(m);
                let finite = (m.abs() <= f32::MAX) & (v <= f32::MAX);
                fits &= finite & (v >= 0.0);
                without |= none & (m != 0.0);
            }
            for at in 0..n {
                let steps = f64::from(quotients[at]) * inverse;
                // False for NaN as well, which is the root of a negative v.
                fits &= steps.abs() <= f64::from(MAX_A - 1);
                a[at] = (R::rounded(steps, moments[at].into(), outward, shrink) + ROUNDER).to_bits() as i32;
            }
        }
        (fits, without)
    }
}

multiversion! {
    /// True if no quotient is off by more than `most`, all elements are finite, no sign flips, and no v is 0. With
    /// products instead of quotients, this takes half as long as [`compare`].
    pub(super) fn are_within<F: Float, R: Divide>(
        m: &[F::Bytes],
        v: &[F::Bytes],
        m_q: &[F::Bytes],
        v_q: &[F::Bytes],
        most: f64,
    ) -> bool {
        let mut sound = true;
        let chunks = m.chunks(PASS).zip(v.chunks(PASS)).zip(m_q.chunks(PASS).zip(v_q.chunks(PASS)));
        // Outside of the loop, which would clear them each time.
        let (mut before, mut after) = ([0f32; PASS], [0f32; PASS]);
        for ((m, v), (m_q, v_q)) in chunks {
            let n = m.len().min(v.len()).min(m_q.len()).min(v_q.len()).min(PASS);
            let (m, v, m_q, v_q) = (&m[..n], &v[..n], &m_q[..n], &v_q[..n]);
            #[allow(clippy::needless_range_loop)]
            for at in 0..n {
                let (v, v_q) = (F::single(v[at]), F::single(v_q[at]));
                sound &= (v > 0.0) & (v <= f32::MAX) & (v_q > 0.0) & (v_q <= f32::MAX);
                before[at] = R::divisor::<F>(v.into()) as f32;
                after[at] = R::divisor::<F>(v_q.into()) as f32;
                let (m, m_q) = (F::single(m[at]), F::single(m_q[at]));
                let flipped = (m_q != 0.0) & ((m > 0.0) != (m_q > 0.0));
                sound &= (m.abs() <= f32::MAX) & (m_q.abs() <= f32::MAX) & !flipped;
            }
            for at in 0..n {
                // The products of two f32 are exact.
                let (d, d_q) = (f64::from(before[at]), f64::from(after[at]));
                let (m, m_q) = (f64::from(F::single(m[at])), f64::from(F::single(m_q[at])));
                sound &= (m_q * d - m * d_q).abs() <= most * (d * d_q);
            }
        }
        sound
    }
}

multiversion! {
    /// The largest error of a tile and whether it is sound, as [`super::compare`] finds them.
    pub(super) fn compare<F: Float, R: Divide>(
        m: &[F::Bytes],
        v: &[F::Bytes],
        m_q: &[F::Bytes],
        v_q: &[F::Bytes],
        g: f64,
    ) -> (f64, bool) {
        let (mut largest, mut sound) = (0i64, true);
        let more = 1.0 + roundings::<F>();
        let chunks = m.chunks(PASS).zip(v.chunks(PASS)).zip(m_q.chunks(PASS).zip(v_q.chunks(PASS)));
        let (mut before, mut after) = ([0f32; PASS], [0f32; PASS]);
        let (mut sizes, mut divisors) = ([0f32; PASS], [0f32; PASS]);
        for ((m, v), (m_q, v_q)) in chunks {
            let n = m.len().min(v.len()).min(m_q.len()).min(v_q.len()).min(PASS);
            let (m_bytes, v_bytes, m_q_bytes, v_q_bytes) = (&m[..n], &v[..n], &m_q[..n], &v_q[..n]);
            #[allow(clippy::needless_range_loop)]
            for at in 0..n {
                let (m, v) = (F::single(m_bytes[at]), F::single(v_bytes[at]));
                let (m_q, v_q) = (F::single(m_q_bytes[at]), F::single(v_q_bytes[at]));
                let finite = |x: f32| x.abs() <= f32::MAX;
                sound &= finite(m) & finite(v) & finite(m_q) & finite(v_q) & (v >= 0.0) & (v_q >= 0.0);
                let none = v == 0.0;
                sound &= none == (v_q == 0.0);
                let (v, v_q) = (if none { 1.0 } else { v }, if none { 1.0 } else { v_q });
                let u = R::quotient::<F>(m.into(), v.into()) as f32;
                let u_q = R::quotient::<F>(m_q.into(), v_q.into()) as f32;
                let grown = R::INWARD & (u_q.abs() > u.abs());
                let flipped = (m_q != 0.0) & ((m > 0.0) != (m_q > 0.0));
                let lost = R::SIGNS & ((m_q == 0.0) != (m == 0.0));
                sound &= if none { m == m_q } else { !grown & !flipped & !lost };
                (before[at], after[at]) = (u, u_q);
                divisors[at] = R::divisor::<F>(v_q.into()) as f32;
                // Without a divisor the quotient has no limit.
                sizes[at] = if none { 0.0 } else { m_q.abs() };
            }
            for at in 0..n {
                let (u, u_q) = (f64::from(before[at]), f64::from(after[at]));
                let (size, divisor) = (f64::from(sizes[at]), f64::from(divisors[at]));
                let most = (u.abs() + g * R::GROWS) * more * divisor + F::LEAST * R::LEAST;
                let inflated = size > most;
                sound &= !inflated;
                largest = largest.max((u_q - u).abs().to_bits() as i64);
            }
        }
        (f64::from_bits(largest as u64), sound)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::float::{Bf16, F16, F32};
    use super::super::rule::for_rule;
    use super::super::{Rule, compare as general, quantize_chunk};
    use super::*;
    use crate::entropy::simd::Level;
    use proptest::prelude::*;

    /// A second moment, a first one, and two factors.
    type Element = (f32, f32, f32, f32);

    /// Mostly usual values, and all kinds of others.
    fn element() -> impl Strategy<Value = f32> {
        prop_oneof![
            40 => (1f32..2.0, -20..2i32).prop_map(|(x, e)| x * (e as f32).exp2()),
            2 => Just(0f32),
            1 => any::<u32>().prop_map(f32::from_bits),
            1 => prop::sample::select([-0.0, 1e-45, f32::MIN_POSITIVE, f32::MAX, f32::INFINITY, f32::NAN].as_slice()),
        ]
    }

    fn is_the_general_way<F: Float>(
        elements: &[Element],
        usual: bool,
        step: (f64, f64),
        rule: Rule,
    ) -> Result<(), TestCaseError> {
        let sound = |x: f32| if usual && !(x > 1e-9 && x < 9.0) { 1.0 } else { x };
        let of =
            |of: &dyn Fn(&Element) -> f32| -> Vec<F::Bytes> { elements.iter().map(|e| F::of_single(of(e))).collect() };
        let v = of(&|e| sound(e.0));
        let m = of(&|e| if usual || e.1 > 1e-5 { e.2 * sound(e.0).sqrt() } else { e.1 });
        let v_q = of(&|e| sound(e.0) * e.3);
        let m_q = of(&|e| if usual { e.2 * e.3 * sound(e.0).sqrt() } else { e.1 });
        let n = elements.len();
        for level in Level::available() {
            let (mut a, mut own_a) = (vec![7; n], vec![9; n]);
            for_rule!(rule, R => {
                let fits = quantize_chunk::<F, R>(level, &m, &v, step, &mut a);
                prop_assert_eq!(quantize::<F, R>(level, &m, &v, step, &mut own_a), fits);
                prop_assert!(a == own_a || !fits.0);
                for m_q in [&m_q, &m] {
                    let (error, sound) = general::<F, R>(level, &m, &v, m_q, &v_q, step.0);
                    let (own, is) = compare::<F, R>(level, &m, &v, m_q, &v_q, step.0);
                    prop_assert_eq!(is, sound);
                    prop_assert!(own.to_bits() == error.to_bits() || !sound);
                    let most = step.0 * R::GROWS;
                    if !R::INWARD && !R::SIGNS && are_within::<F, R>(level, &m, &v, m_q, &v_q, most) {
                        let quotient = |(m, v): (&F::Bytes, &F::Bytes)| R::exact(F::widen(*m), F::widen(*v)).abs();
                        let largest = m.iter().zip(&v).map(quotient).fold(most, f64::max);
                        prop_assert!(sound, "within, but not sound");
                        prop_assert!(error <= most + largest * roundings::<F32>() || !error.is_finite());
                    }
                }
            });
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn they_are_those_of_the_general_way(
            usual: bool,
            elements in prop::collection::vec((element(), element(), -1.5..1.5f32, 0.8..1.25f32), 1..600),
            step in prop::sample::select([(0.5, 0.0), (0.25, 1.0 / 16.0), (3.0, 0.0)].as_slice()),
            rule in prop::sample::select(Rule::ALL.as_slice()),
        ) {
            is_the_general_way::<F32>(&elements, usual, step, rule)?;
            is_the_general_way::<Bf16>(&elements, usual, step, rule)?;
            is_the_general_way::<F16>(&elements, usual, step, rule)?;
        }
    }
}
