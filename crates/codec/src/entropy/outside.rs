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

    /// Their places, ascending.
    pub(super) fn places(&self) -> impl Iterator<Item = usize> {
        self.0.iter().enumerate().filter(|(_, mask)| **mask != 0).flat_map(|(number, mask)| {
            let mut left = *mask;
            std::iter::from_fn(move || {
                let place = (left != 0).then(|| number * CHUNK + left.trailing_zeros() as usize);
                left &= left.wrapping_sub(1);
                place
            })
        })
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

/// The mask of a chunk. The compiler compares symbols side by side; then one multiplication gathers eight bits.
#[inline(always)]
fn mask(chunk: &[u8; CHUNK], first: u8, window: u8) -> u64 {
    /// Moves the lowest bit of byte i to bit 56 + i.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    let outside = chunk.map(|symbol| u8::from(symbol.wrapping_sub(first) >= window));
    let gathered = |eight: &[u8; 8]| u64::from_le_bytes(*eight).wrapping_mul(GATHER) >> 56;
    outside.as_chunks().0.iter().rev().fold(0, |mask, eight| mask << 8 | gathered(eight))
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
                prop_assert_eq!(outside.places().collect::<Vec<_>>(), wanted.clone());
            }
        }
    }
}
