//! Single precision where it gives the bits of double precision, and a vector has twice as many numbers.
//!
//! A short step times an integer of 16 bits is exact in f32. A sum or product of two f32 has the same bits if f64
//! computes it, and f32 then rounds it. For f64 has more than twice as many bits and two to spare, so rounding twice does
//! no harm. (Figueroa, "When is double rounding innocuous?", 1995)

use super::Dtype;
use super::narrow::LARGEST as LARGEST_SUMMAND;
use crate::entropy::ints::Symbol;
use crate::entropy::simd::multiversion;

/// Significant bits of a step whose product with 15 bits is exact in f32, which has 24.
const BITS: u32 = 9;

/// No product of such a step leaves f32, or the range where it is exact.
const LARGEST: f64 = (1u128 << 64) as f64;

/// The step of a tile in f32, if its elements are f32 and its product with every integer of 16 bits is exact there.
pub(super) fn in_single(dtype: Dtype, g: f64) -> Option<f32> {
    let fraction = g.to_bits() & ((1 << 52) - 1);
    let is_short = fraction.trailing_zeros() > 52 - BITS && (1.0 / LARGEST..=LARGEST).contains(&g);
    (dtype == Dtype::F32 && is_short).then_some(g as f32)
}

multiversion! {
    /// R = K + g * (A + symbol) of a block in one pass, with a step of [`in_single`]. False if an A is so large that its
    /// sum may be beyond 16 bits; `out` is useless then.
    pub(super) fn add_and_reconstruct(
        k: Option<&[[u8; 4]]>,
        g: f32,
        a: &[i16],
        classes: &[u8],
        out: &mut [[u8; 4]],
    ) -> bool {
        let mut small = true;
        let mut one = |k: f32, a: i16, class: u8, out: &mut [u8; 4]| {
            small &= (-LARGEST_SUMMAND..=LARGEST_SUMMAND).contains(&a);
            *out = (k + g * (i32::from(a) + class.value()) as f32).to_le_bytes();
        };
        let both = out.iter_mut().zip(a).zip(classes);
        match k {
            Some(k) => both.zip(k).for_each(|(((out, &a), &class), &k)| one(f32::from_le_bytes(k), a, class, out)),
            None => both.for_each(|((out, &a), &class)| one(0.0, a, class, out)),
        }
        small
    }
}
