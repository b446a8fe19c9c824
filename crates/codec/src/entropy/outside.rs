//! The symbols outside a window of consecutive byte values, as one bit for each symbol.

use super::simd::{Level, multiversion};

/// Symbols of a mask.
const CHUNK: usize = 64;

/// For each [`CHUNK`] of symbols a mask, with the first symbol's bit lowest.
pub(super) struct Outside(Vec<u64>);

impl Outside {
    /// The window begins at `first` and has `window` values.
    pub(super) fn new(level: Level, symbols: &[u8], first: u8, window: u8) -> Outside {
        Outside(masks(level, symbols, first, window))
    }

    pub(super) fn count(&self) -> usize {
        self.0.iter().map(|mask| mask.count_ones() as usize).sum()
    }

    /// Calls `each` with their places, ascending.
    pub(super) fn each(&self, mut each: impl FnMut(usize)) {
        let mut places = [0; BATCH * CHUNK];
        for (batch, masks) in self.0.chunks(BATCH).enumerate() {
            let found = list_places(Level::detect(), masks, &mut places);
            places[..found].iter().for_each(|&place| each(batch * BATCH * CHUNK + place as usize));
        }
    }
}

/// Masks whose places are listed together, in the first-level cache.
const BATCH: usize = 16;

/// Places of a mask that are found even if they are none: the processor would often guess wrong how many there are.
const USUAL: usize = 4;

multiversion! {
    /// Lists the places in these masks, and returns how many there are.
    fn list_places(masks: &[u64], places: &mut [u32; BATCH * CHUNK]) -> usize {
        let mut found = 0;
        for (number, &mask) in masks.iter().enumerate() {
            let (mut left, count) = (mask, mask.count_ones() as usize);
            for place in places[found..].iter_mut().take(count.max(USUAL)) {
                *place = (number * CHUNK) as u32 + left.trailing_zeros();
                left &= left.wrapping_sub(1);
            }
            found += count;
        }
        found
    }
}

multiversion! {
    fn masks(symbols: &[u8], first: u8, window: u8) -> Vec<u64> {
        let (chunks, tail) = symbols.as_chunks::<CHUNK>();
        let mut masks = Vec::with_capacity(chunks.len() + 1);
        masks.extend(chunks.iter().map(|chunk| mask(chunk, first, window)));
        let mut last = [first; CHUNK];
        last[..tail.len()].copy_from_slice(tail);
        masks.push(mask(&last, first, window));
        masks
    }
}

/// The mask of a chunk; the window is not empty.
#[inline(always)]
fn mask(chunk: &[u8; CHUNK], first: u8, window: u8) -> u64 {
    let sixteens = chunk.as_chunks::<16>().0.iter().rev();
    sixteens.fold(0, |mask, sixteen| mask << 16 | u64::from(mask_of_16(sixteen, first, window)))
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn mask_of_16(symbols: &[u8; 16], first: u8, window: u8) -> u16 {
    use std::arch::x86_64::{
        _mm_cmpeq_epi8, _mm_max_epu8, _mm_movemask_epi8, _mm_set_epi64x, _mm_set1_epi8, _mm_sub_epi8,
    };
    let all = u128::from_le_bytes(*symbols);
    // SAFETY: every x86-64 has these instructions, and they use no memory.
    unsafe {
        let digits = _mm_sub_epi8(_mm_set_epi64x((all >> 64) as i64, all as i64), _mm_set1_epi8(first as i8));
        _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(digits, _mm_set1_epi8(window as i8)), digits)) as u16
    }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn mask_of_16(symbols: &[u8; 16], first: u8, window: u8) -> u16 {
    symbols.iter().rev().fold(0, |mask, symbol| mask << 1 | u16::from(symbol.wrapping_sub(first) >= window))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn places_are_as_one_by_one(
            symbols in prop::collection::vec(prop_oneof![9 => 0..5u8, 1 => any::<u8>()], 0..3000),
            first in 0..5u8,
            window in 1..200u8,
        ) {
            let is_outside = |at: &usize| symbols[*at].wrapping_sub(first) >= window;
            let wanted: Vec<usize> = (0..symbols.len()).filter(is_outside).collect();
            for level in Level::available() {
                let outside = Outside::new(level, &symbols, first, window);
                prop_assert_eq!(outside.count(), wanted.len());
                let mut places = Vec::new();
                outside.each(|place| places.push(place));
                prop_assert_eq!(&places, &wanted);
            }
        }
    }
}
