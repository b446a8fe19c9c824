//! The logarithmic lattice of fp32 in 32-bit integers alone. The pseudo-logarithm of a normal f32 is its own bits,
//! shifted and with another bias. So nothing here needs an f64, and a vector holds twice as many elements.
//!
//! Only zeros and normal numbers have that form. For any other element a function returns `None`, and the caller takes
//! the general way, which gives the same bits.

use super::{FRACTION_BITS, Steps, ZERO};
use crate::entropy::simd::{Level, multiversion};

/// Low bits of an f32 that its pseudo-logarithm drops.
const DROPPED: u32 = 23 - FRACTION_BITS;
/// The pseudo-logarithm counts exponents as f64 does, whose bias is larger by this.
const BIAS: i32 = (1023 - 127) << FRACTION_BITS;
/// Bits of the smallest normal number, and the number of bit patterns from there to infinity.
const NORMAL: u32 = 1 << 23;
const NORMALS: u32 = 254 << 23;

/// Quantizes up to one chunk; returns the largest error.
pub(super) fn quantize(
    level: Level,
    v: &[[u8; 4]],
    p: &[i32],
    steps: Steps,
    keep: Option<&[i32]>,
    q: &mut [i32],
    out: &mut [[u8; 4]],
) -> Option<i32> {
    let (largest, sound) = quantize_all(level, v, p, steps, keep, q, out);
    sound.then_some(largest)
}

/// The largest difference of the pseudo-logarithms of two tiles, with zeros in the same places.
pub(super) fn compare(level: Level, v: &[[u8; 4]], decoded: &[[u8; 4]]) -> Option<i32> {
    let (largest, sound) = compare_all(level, v, decoded);
    sound.then_some(largest)
}

multiversion! {
    /// The largest error, and whether all elements and results are zeros or normal numbers.
    fn quantize_all(
        v: &[[u8; 4]],
        p: &[i32],
        steps: Steps,
        keep: Option<&[i32]>,
        q: &mut [i32],
        out: &mut [[u8; 4]],
    ) -> (i32, bool) {
        let (mut largest, mut sound) = (0, true);
        let (half, quarter) = (1 << steps.shift >> 1, 1 << steps.shift >> 2);
        let mut one = |v: [u8; 4], p: i32, kept: Option<i32>, q: &mut i32, out: &mut [u8; 4]| {
            let bits = u32::from_le_bytes(v);
            let zero = bits == 0;
            let log = (bits >> DROPPED) as i32 + BIAS;
            let mut new = (log - p + half) >> steps.shift;
            if let Some(kept) = kept {
                // A distance of 3/4 of a unit from a neighbouring q is 1/4 from this one's middle.
                let (beside, off) = (kept.wrapping_sub(new), log - p - (new << steps.shift));
                new += i32::from((beside == 1) & (off >= quarter)) - i32::from((beside == -1) & (off <= -quarter));
            }
            let back = steps.log(p, new);
            let normal = (bits.wrapping_sub(NORMAL) < NORMALS) & (back >= BIAS + (1 << FRACTION_BITS));
            sound &= zero | normal;
            largest = largest.max(if zero { 0 } else { (back - log).abs() });
            *q = if zero { ZERO } else { new };
            *out = (if zero { 0 } else { (back.wrapping_sub(BIAS) as u32) << DROPPED }).to_le_bytes();
        };
        match keep {
            Some(keep) => {
                for ((((&v, &p), &kept), q), out) in v.iter().zip(p).zip(keep).zip(q.iter_mut()).zip(out.iter_mut()) {
                    one(v, p, Some(kept), q, out);
                }
            }
            None => {
                for (((&v, &p), q), out) in v.iter().zip(p).zip(q.iter_mut()).zip(out.iter_mut()) {
                    one(v, p, None, q, out);
                }
            }
        }
        (largest, sound)
    }
}

multiversion! {
    /// The largest difference of pseudo-logarithms, and whether all pairs are two zeros or two normal numbers.
    fn compare_all(v: &[[u8; 4]], decoded: &[[u8; 4]]) -> (i32, bool) {
        let (mut largest, mut sound) = (0, true);
        for (&v, &decoded) in v.iter().zip(decoded) {
            let (v, decoded) = (u32::from_le_bytes(v), u32::from_le_bytes(decoded));
            let normal = (v.wrapping_sub(NORMAL) < NORMALS) & (decoded.wrapping_sub(NORMAL) < NORMALS);
            sound &= normal | (v | decoded == 0);
            largest = largest.max(((v >> DROPPED) as i32 - (decoded >> DROPPED) as i32).abs());
        }
        (largest, sound)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Steps, compare, quantize_chunk};
    use super::*;
    use crate::codec::float::F32;
    use proptest::prelude::*;

    /// Mostly normal values, and all kinds of others.
    fn element() -> impl Strategy<Value = u32> {
        prop_oneof![
            40 => 1u32 << 23..254 << 23,
            4 => Just(0u32),
            1 => any::<u32>(),
            1 => prop::sample::select([1, 0x007f_ffff, 0x0080_0000, 0x7f7f_ffff, 0x7f80_0000, 0x8000_0000].as_slice()),
        ]
    }

    proptest! {
        #[test]
        fn they_are_those_of_the_general_way(
            elements in prop::collection::vec((element(), element(), 0..1 << 27, -3..4i32), 1..40),
            shift in 14..=20u32,
            kept: bool,
        ) {
            let n = elements.len();
            let v: Vec<[u8; 4]> = elements.iter().map(|e| e.0.to_le_bytes()).collect();
            let other: Vec<[u8; 4]> = elements.iter().map(|e| e.1.to_le_bytes()).collect();
            // Some predictions are near, others anywhere.
            let near = |e: &(u32, u32, i32, i32)| (e.0 >> DROPPED) as i32 / 2 + BIAS;
            let p: Vec<i32> = elements.iter().map(|e| if e.3 == 0 { e.2 } else { near(e).clamp(0, 1 << 27) }).collect();
            let keep: Vec<i32> = elements.iter().zip(&v).zip(&p).map(|((e, v), p)| {
                (((u32::from_le_bytes(*v) >> DROPPED) as i32 + BIAS - p) >> shift) + e.3
            }).collect();
            let keep = kept.then_some(keep.as_slice());
            let steps = Steps::new::<F32>(1 << shift);
            let (mut q, mut out) = (vec![7; n], vec![[7; 4]; n]);
            let (error, fits) = quantize_chunk::<F32>(Level::PORTABLE, &v, &p, steps, keep, &mut q, &mut out);
            for level in Level::available() {
                let (mut own_q, mut own_out) = (vec![9; n], vec![[9; 4]; n]);
                if let Some(own) = quantize(level, &v, &p, steps, keep, &mut own_q, &mut own_out) {
                    prop_assert_eq!((own, true, &own_q, &own_out), (error, fits, &q, &out));
                }
                for decoded in [&out, &other, &v] {
                    if let Some(own) = super::compare(level, &v, decoded) {
                        prop_assert_eq!((own, true), compare::<F32>(level, &v, decoded));
                    }
                }
            }
            // Normal values near their predictions need no other way.
            if v.iter().all(|v| (1 << 23..254 << 23).contains(&u32::from_le_bytes(*v))) {
                prop_assert!(super::compare(Level::detect(), &v, &v) == Some(0));
            }
        }
    }
}
