//! The low bits of integers, the same number from each, packed so that sixteen are read at once. If values spread over
//! a much larger range, their low bits are as good as random. Coding them saves nothing, and reading them one by one
//! would be the slowest part.
//!
//! The layout has units of 512 values; the last one is filled up with zeros. A unit of w-bit values is w rows of
//! sixteen 32-bit words, least significant byte first. Value i is in lane i mod 16, whose w words form one bit string,
//! at bit w * floor(i / 16).

use super::Corrupt;
use super::simd::{Level, multiversion};

/// Values per unit.
pub(super) const UNIT: usize = LANES * ROWS;

/// Maximum bits of a value.
pub(super) const MOST_WIDTH: u32 = 24;

const LANES: usize = 16;
const ROWS: usize = 32;

/// The words of a unit; width w uses the first w rows.
type Words = [[u32; LANES]; MOST_WIDTH as usize];

fn unit_bytes(width: u32) -> usize {
    width as usize * LANES * size_of::<u32>()
}

/// Bytes of `n` values.
pub(super) fn bytes(n: usize, width: u32) -> usize {
    n.div_ceil(UNIT) * unit_bytes(width)
}

/// Moves the low `width` bits (1 to [`MOST_WIDTH`]) of each value to `out`. The value keeps the bits above them, with
/// its sign. Every call for a stream except the last has whole units.
pub(super) fn split(values: &mut [i32], width: u32, out: &mut Vec<u8>) {
    let level = Level::detect();
    for values in values.chunks_mut(UNIT) {
        let mut words = [[0; LANES]; MOST_WIDTH as usize];
        as_unit(values, |unit| split_unit(level, unit, width, &mut words));
        for row in &words[..width as usize] {
            out.extend_from_slice(row.map(u32::to_le_bytes).as_flattened());
        }
    }
}

/// Changes values as a whole unit. Those that are missing are 0.
#[inline(always)]
fn as_unit<T>(values: &mut [i32], change: impl FnOnce(&mut [i32; UNIT]) -> T) -> T {
    if let Ok(unit) = <&mut [i32; UNIT]>::try_from(&mut *values) {
        return change(unit);
    }
    let mut unit = [0; UNIT];
    unit[..values.len()].copy_from_slice(values);
    let answer = change(&mut unit);
    values.copy_from_slice(&unit[..values.len()]);
    answer
}

multiversion! {
    fn split_unit(unit: &mut [i32; UNIT], width: u32, words: &mut Words) {
        let mask = (1u32 << width) - 1;
        for (row, values) in unit.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let bit = row as u32 * width;
            let (at, shift) = ((bit / 32) as usize, bit % 32);
            for (word, value) in words[at].iter_mut().zip(values.iter()) {
                *word |= (*value as u32 & mask) << shift;
            }
            if shift + width > 32 {
                for (word, value) in words[at + 1].iter_mut().zip(values.iter()) {
                    *word |= (*value as u32 & mask) >> (32 - shift);
                }
            }
            values.iter_mut().for_each(|value| *value >>= width);
        }
    }
}

/// The inverse of [`split`]: puts the bits, which begin with the first value's, below each value.
///
/// # Errors
/// There are too few bits, or a result is beyond 32 bits.
pub(super) fn join(values: &mut [i32], width: u32, packed: &[u8]) -> Result<(), Corrupt> {
    let level = Level::detect();
    let mut packed = packed.chunks_exact(unit_bytes(width));
    for values in values.chunks_mut(UNIT) {
        let packed = packed.next().ok_or(Corrupt("truncated low bits"))?;
        let mut words = [[0; LANES]; MOST_WIDTH as usize];
        for (word, bytes) in words.as_flattened_mut().iter_mut().zip(packed.as_chunks().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        Corrupt::when(!as_unit(values, |unit| join_unit(level, unit, width, &words)), "value beyond 32 bits")?;
    }
    Ok(())
}

multiversion! {
    /// False if a value does not fit.
    fn join_unit(unit: &mut [i32; UNIT], width: u32, words: &Words) -> bool {
        let mask = (1u32 << width) - 1;
        let mut lost = 0;
        for (row, values) in unit.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let bit = row as u32 * width;
            let (at, shift) = ((bit / 32) as usize, bit % 32);
            let mut low = words[at].map(|word| word >> shift);
            if shift + width > 32 {
                for (low, word) in low.iter_mut().zip(&words[at + 1]) {
                    *low |= word << (32 - shift);
                }
            }
            for (value, low) in values.iter_mut().zip(low) {
                let above = *value << width;
                lost |= (above >> width) ^ *value;
                *value = above | (low & mask) as i32;
            }
        }
        lost == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_was_split_is_joined(
            values in prop::collection::vec(prop_oneof![any::<i32>(), -1000..1000], 0..3 * UNIT),
            width in 1..=MOST_WIDTH,
            units in 1..3usize,
        ) {
            let (mut high, mut packed) = (values.clone(), Vec::new());
            high.chunks_mut(units * UNIT).for_each(|values| split(values, width, &mut packed));
            prop_assert_eq!(packed.len(), bytes(values.len(), width));
            prop_assert!(high.iter().zip(&values).all(|(high, value)| *high == value >> width));
            let mut joined = high.clone();
            join(&mut joined, width, &packed).unwrap();
            prop_assert_eq!(joined, values);
            if !packed.is_empty() {
                prop_assert!(join(&mut high, width, &packed[1..]).is_err());
            }
        }
    }

    #[test]
    fn a_value_without_room_for_its_low_bits_is_an_error() {
        for (value, fits) in [(1 << 27, false), ((1 << 27) - 1, true), (-1 << 27, true), ((-1 << 27) - 1, false)] {
            let mut values = [0, value];
            assert_eq!(join(&mut values, 4, &[0; 4 * LANES * 4]).is_ok(), fits, "{value}");
        }
    }

    /// Other programs write this layout too, so it is tested against the description, not against this code.
    #[test]
    fn layout() {
        let mut values: Vec<i32> = (0..600).map(|i| i * 37 % 256 - 100).collect();
        let (original, mut packed) = (values.clone(), Vec::new());
        split(&mut values, 5, &mut packed);
        assert_eq!(packed.len(), 2 * 5 * 64);
        for (number, value) in original.iter().enumerate() {
            let (unit, i) = (number / 512, number % 512);
            let bit = |at: usize| {
                let (word, bit) = (at / 32, at % 32);
                packed[unit * 5 * 64 + word * 64 + (i % 16) * 4 + bit / 8] >> (bit % 8) & 1
            };
            let low = (0..5).fold(0, |low, k| low | u32::from(bit(5 * (i / 16) + k)) << k);
            assert_eq!(low, *value as u32 & 31, "{number}");
        }
    }
}
