//! The logarithmic lattice of fp32, bf16 and fp16 in 32-bit integers alone. The pseudo-logarithm of a normal f32 is its
//! own bits, shifted and with another bias. So nothing here needs an f64, and a vector holds twice as many elements.
//!
//! Only zeros and normal numbers have that form. For any other element a function returns `None`, and the caller takes
//! the general way, which gives the same bits.

use super::factors::{self, Columns, Logarithm, Sum};
use super::{FRACTION_BITS, Steps, ZERO};
use crate::codec::float::{F32, Float};
use crate::entropy::simd::{Level, multiversion};

/// Low bits of an f32 that its pseudo-logarithm drops.
const DROPPED: u32 = 23 - FRACTION_BITS;
/// The pseudo-logarithm counts exponents as f64 does, whose bias is larger by this.
const BIAS: i32 = (1023 - 127) << FRACTION_BITS;
/// Bits of the smallest normal number, and the number of bit patterns from there to infinity.
const NORMAL: u32 = 1 << 23;
const NORMALS: u32 = 254 << 23;

/// Quantizes up to one chunk; returns the largest error.
pub(super) fn quantize<F: Float>(
    level: Level,
    v: &[F::Bytes],
    p: &[i32],
    steps: Steps,
    keep: Option<&[i32]>,
    q: &mut [i32],
    out: &mut [F::Bytes],
) -> Option<i32> {
    let (largest, sound) = quantize_all::<F>(level, v, p, steps, keep, q, out);
    (F::IN_F32 && sound).then_some(largest)
}

/// The largest difference of the pseudo-logarithms of two tiles, with zeros in the same places.
pub(super) fn compare<F: Float>(level: Level, v: &[F::Bytes], decoded: &[F::Bytes]) -> Option<i32> {
    let (largest, sound) = compare_all::<F>(level, v, decoded);
    (F::IN_F32 && sound).then_some(largest)
}

/// The bits of an element in f32.
#[inline(always)]
fn bits_of<F: Float>(element: F::Bytes) -> u32 {
    F::single(element).to_bits()
}

/// Quantizes an element whose prediction is `p` to `q` and `out`. Returns its error, and whether it is a zero or a
/// normal number as its result.
#[inline(always)]
fn quantize_one<F: Float>(
    v: F::Bytes,
    (p, kept): (i32, Option<i32>),
    steps: Steps,
    q: &mut i32,
    out: &mut F::Bytes,
) -> (i32, bool) {
    let (half, quarter) = (1 << steps.shift >> 1, 1 << steps.shift >> 2);
    let bits = bits_of::<F>(v);
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
    *q = if zero { ZERO } else { new };
    *out = F::of_single(f32::from_bits(if zero { 0 } else { (back.wrapping_sub(BIAS) as u32) << DROPPED }));
    // In f32 itself, nothing was rounded.
    let back = if F::IS_F32 { back } else { (bits_of::<F>(*out) >> DROPPED) as i32 + BIAS };
    (if zero { 0 } else { (back - log).abs() }, zero | normal)
}

multiversion! {
    /// The largest error, and whether all elements and results are zeros or normal numbers.
    fn quantize_all<F: Float>(
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
                    let (error, sound) = quantize_one::<F>(v, (p, Some(kept)), steps, q, out);
                    (largest, special) = (largest.max(error), special | u32::from(!sound));
                }
            }
            None => {
                for ((&v, &p), (q, out)) in both {
                    let (error, sound) = quantize_one::<F>(v, (p, None), steps, q, out);
                    (largest, special) = (largest.max(error), special | u32::from(!sound));
                }
            }
        }
        (largest, special == 0)
    }
}

multiversion! {
    /// The largest difference of pseudo-logarithms, and whether all pairs are two zeros or two normal numbers.
    fn compare_all<F: Float>(v: &[F::Bytes], decoded: &[F::Bytes]) -> (i32, bool) {
        let (mut largest, mut special) = (0, 0u32);
        for (&v, &decoded) in v.iter().zip(decoded) {
            let (v, decoded) = (bits_of::<F>(v), bits_of::<F>(decoded));
            let normal = (v.wrapping_sub(NORMAL) < NORMALS) & (decoded.wrapping_sub(NORMAL) < NORMALS);
            special |= u32::from(!(normal | (v | decoded == 0)));
            largest = largest.max(((v >> DROPPED) as i32 - (decoded >> DROPPED) as i32).abs());
        }
        (largest, special == 0)
    }
}

multiversion! {
    /// True if all elements are normal numbers above 0.
    pub(super) fn are_normal(v: &[[u8; 4]]) -> bool {
        let mut special = 0u32;
        for v in v {
            special |= u32::from(u32::from_le_bytes(*v).wrapping_sub(NORMAL) >= NORMALS);
        }
        special == 0
    }
}

/// Values whose sum fits 32 bits: a logarithm without the bias of f64 has 24.
const SUMMED: usize = 256;
/// Sums side by side: with one, each addition would wait for the last.
const LANES: usize = 8;

/// Adds normal elements, which begin at `column` of the first row, to the sums of their rows and columns. All sums are
/// integers, far below the 53 bits of f64, so that their order does not matter.
pub(super) fn sum_rows(level: Level, tile: &[[u8; 4]], column: usize, rows: &mut [Sum], columns: &mut Columns) {
    let width = columns.totals.len();
    let mut sums = vec![0; width];
    let (mut column, mut tile, mut summed) = (column, tile, 0);
    for row in rows {
        let (piece, rest) = tile.split_at(tile.len().min(width - column));
        if piece.len() == width {
            let total = sum_row(level, piece, &mut sums);
            row.add(Sum { total: unbiased(total, width), count: width as f64 });
            summed += 1;
        } else {
            // A cut row has other columns than the rest.
            factors::sum_rows::<F32, Logarithm>(level, piece, column, std::slice::from_mut(row), columns);
        }
        (column, tile) = (0, rest);
        if summed == SUMMED {
            add_to_columns(&mut sums, std::mem::take(&mut summed), columns);
        }
        if tile.is_empty() {
            break;
        }
    }
    add_to_columns(&mut sums, summed, columns);
}

/// Adds the sums of so many rows, and clears them.
fn add_to_columns(sums: &mut [u32], rows: usize, columns: &mut Columns) {
    for ((sum, total), count) in sums.iter_mut().zip(&mut columns.totals).zip(&mut columns.counts) {
        *total += unbiased(u64::from(std::mem::take(sum)), rows);
        *count += rows as u32;
    }
}

/// The sum of so many pseudo-logarithms, from the sum without their bias.
fn unbiased(sum: u64, count: usize) -> f64 {
    (sum + count as u64 * BIAS as u64) as f64
}

multiversion! {
    /// Adds the elements of a row to `sums`, and returns their own sum, both without the bias.
    fn sum_row(row: &[[u8; 4]], sums: &mut [u32]) -> u64 {
        let mut total = 0;
        for (row, sums) in row.chunks(LANES * SUMMED).zip(sums.chunks_mut(LANES * SUMMED)) {
            let mut lanes = [0u32; LANES];
            let add = |lane: &mut u32, v: &[u8; 4], sum: &mut u32| {
                let log = u32::from_le_bytes(*v) >> DROPPED;
                *sum += log;
                *lane += log;
            };
            let (eights, tail) = row.as_chunks::<LANES>();
            let (of_eights, of_tail) = sums.as_chunks_mut::<LANES>();
            for (eight, sums) in eights.iter().zip(of_eights) {
                for at in 0..LANES {
                    add(&mut lanes[at], &eight[at], &mut sums[at]);
                }
            }
            for (at, (v, sum)) in tail.iter().zip(of_tail).enumerate() {
                add(&mut lanes[at], v, sum);
            }
            total += lanes.iter().map(|lane| u64::from(*lane)).sum::<u64>();
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Steps, compare as general_compare, quantize_chunk};
    use super::*;
    use crate::codec::float::{Bf16, F16};
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

    /// Elements with these bits of f32, or near them.
    type Element = (u32, u32, i32, i32);

    fn is_the_general_way<F: Float>(elements: &[Element], shift: u32, kept: bool) -> Result<(), TestCaseError>
    where
        F::Bytes: PartialEq + std::fmt::Debug,
    {
        let n = elements.len();
        let of = |bits: u32| F::of_single(f32::from_bits(bits));
        let v: Vec<F::Bytes> = elements.iter().map(|e| of(e.0)).collect();
        let other: Vec<F::Bytes> = elements.iter().map(|e| of(e.1)).collect();
        let log = |v: F::Bytes| (bits_of::<F>(v) >> DROPPED) as i32;
        // Some predictions are near, others anywhere.
        let near = |e: &Element, v: F::Bytes| if e.3 == 0 { e.2 } else { (log(v) / 2 + BIAS).clamp(0, 1 << 27) };
        let p: Vec<i32> = elements.iter().zip(&v).map(|(e, v)| near(e, *v)).collect();
        let keep: Vec<i32> =
            elements.iter().zip(&v).zip(&p).map(|((e, v), p)| ((log(*v) + BIAS - p) >> shift) + e.3).collect();
        let keep = kept.then_some(keep.as_slice());
        let steps = Steps::new::<F>(1 << shift);
        let (mut q, mut out) = (vec![7; n], vec![of(7 << 23); n]);
        let (error, fits) = quantize_chunk::<F>(Level::PORTABLE, &v, &p, steps, keep, &mut q, &mut out);
        for level in Level::available() {
            let (mut own_q, mut own_out) = (vec![9; n], vec![of(9 << 23); n]);
            if let Some(own) = quantize::<F>(level, &v, &p, steps, keep, &mut own_q, &mut own_out) {
                prop_assert_eq!((own, true, &own_q, &own_out), (error, fits, &q, &out));
            }
            for decoded in [&out, &other, &v] {
                if let Some(own) = super::compare::<F>(level, &v, decoded) {
                    prop_assert_eq!((own, true), general_compare::<F>(level, &v, decoded));
                }
            }
        }
        // Normal values near their predictions need no other way.
        if v.iter().all(|v| (1 << 23..255 << 23).contains(&bits_of::<F>(*v))) {
            prop_assert!(super::compare::<F>(Level::detect(), &v, &v) == Some(0));
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn they_are_those_of_the_general_way(
            elements in prop::collection::vec((element(), element(), 0..1 << 27, -3..4i32), 1..40),
            shift in 14..=20u32,
            kept: bool,
        ) {
            is_the_general_way::<F32>(&elements, shift, kept)?;
            is_the_general_way::<Bf16>(&elements, shift, kept)?;
            is_the_general_way::<F16>(&elements, shift, kept)?;
        }

        #[test]
        fn sums_are_those_of_the_general_way(
            width in 1..70usize,
            rows in 1..600usize,
            column in 0..70usize,
            seed in any::<u64>(),
        ) {
            let column = column % width;
            let mut state = seed;
            let tile: Vec<[u8; 4]> = (0..rows * width - column).map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (NORMAL + (state >> 33) as u32 % NORMALS).to_le_bytes()
            }).collect();
            // The last row may be cut, too.
            let tile = &tile[..tile.len() - state as usize % (width.min(tile.len()))];
            let new = || (vec![Sum::default(); rows], Columns { totals: vec![0.0; width], counts: vec![0; width] });
            let (mut general_rows, mut general) = new();
            factors::sum_rows::<F32, Logarithm>(Level::PORTABLE, tile, column, &mut general_rows, &mut general);
            for level in Level::available() {
                let (mut own_rows, mut own) = new();
                prop_assert!(are_normal(level, tile));
                sum_rows(level, tile, column, &mut own_rows, &mut own);
                prop_assert!(own.totals == general.totals && own.counts == general.counts);
                let same = |(a, b): (&Sum, &Sum)| (a.total, a.count) == (b.total, b.count);
                prop_assert!(own_rows.iter().zip(&general_rows).all(same));
            }
        }
    }
}
