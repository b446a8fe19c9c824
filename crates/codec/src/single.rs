//! Single precision where it gives the bits of double precision, and a vector has twice as many numbers.
//!
//! A short step times an integer of 16 bits is exact in f32. A sum or product of two f32 has the same bits if f64
//! computes it, and f32 then rounds it. For f64 has more than twice as many bits and two to spare, so rounding twice does
//! no harm. (Figueroa, "When is double rounding innocuous?", 1995)
//!
//! For bf16, the f32 is rounded once more. That gives other bits only if the f32 lies in the middle of two bf16 and was
//! rounded itself. Such a chunk is computed in f64.

use super::Dtype;
use super::float::{Float, Real};
use super::narrow::LARGEST as LARGEST_SUMMAND;
use crate::entropy::ints::Symbol;
use crate::entropy::simd::multiversion;

/// Significant bits of a step whose product with 15 bits is exact in f32, which has 24.
const BITS: u32 = 9;

/// No product of such a step leaves f32, or the range where it is exact.
const LARGEST: f64 = (1u128 << 64) as f64;

/// The step of a tile in f32, if its elements are f32 or bf16 and its product with every integer of 16 bits is exact in
/// f32.
pub(super) fn in_single(dtype: Dtype, g: f64) -> Option<f32> {
    let fraction = g.to_bits() & ((1 << 52) - 1);
    let is_short = fraction.trailing_zeros() > 52 - BITS && (1.0 / LARGEST..=LARGEST).contains(&g);
    (matches!(dtype, Dtype::F32 | Dtype::Bf16) && is_short).then_some(g as f32)
}

multiversion! {
    /// R = K + g * (A + symbol) of a block in one pass, with a step of [`in_single`]. False if an A is so large that its
    /// sum may be beyond 16 bits, or a result may be wrong; `out` is useless then.
    pub(super) fn add_and_reconstruct<F: Float>(
        k: Option<&[F::Bytes]>,
        g: f32,
        a: &[i16],
        classes: &[u8],
        out: &mut [F::Bytes],
    ) -> bool {
        let mut sound = true;
        let mut one = |k: f32, a: i16, class: u8, out: &mut F::Bytes| {
            let in_doubt;
            (*out, in_doubt) = k.sum::<F>(g * (i32::from(a) + class.value()) as f32);
            sound &= (-LARGEST_SUMMAND..=LARGEST_SUMMAND).contains(&a) & !in_doubt;
        };
        let both = out.iter_mut().zip(a).zip(classes);
        match k {
            Some(k) => both.zip(k).for_each(|(((out, &a), &class), &k)| one(F::single(k), a, class, out)),
            None => both.for_each(|((out, &a), &class)| one(0.0, a, class, out)),
        }
        sound
    }
}
