//! Blocks of `k` symbols as one Huffman word, for streams with less than a few bits per symbol.
//!
//! The frequent symbols are a window of consecutive byte values; symbol `first + i` is digit `i`. If the window does
//! not hold all symbols, the last digit is the *escape*. The decoder first writes the byte value before the window
//! there, then replaces it by the next literal. A word is the number formed by its `k` digits in base `digits`; the
//! first symbol is the lowest digit.
//!
//! Layout: `first`, `digits` | 0x80 if there is an escape, `k`; the length of the Huffman body, the body; the literals
//! as a payload of [`super::bytes`].

use super::scratch::Scratch;
use super::simd::{Level, multiversion, places_outside};
use super::{Corrupt, huffman, varint};

/// Maximum words of a block code: a word is a byte.
const WORDS: usize = 256;

/// Symbols examined together when searching for escapes: one bit each in a `u64`.
const CHUNK: usize = 64;

const ESCAPES: u8 = 0x80;

/// Parameters of a block code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Lowest symbol of the window.
    pub(super) first: u8,
    /// Base of the words, including the escape.
    pub(super) digits: u8,
    /// True if the last digit is the escape.
    pub(super) escapes: bool,
    /// Symbols per word, 2 to 8.
    pub(super) k: u8,
}

/// Candidate shapes `(k, digits)`: with as many words as fit, and with fewer, whose rare words waste less code space.
pub(super) const SHAPES: [(u8, u8); 9] = [(2, 16), (2, 12), (2, 9), (3, 6), (3, 5), (3, 4), (4, 4), (4, 3), (5, 3)];

impl Shape {
    /// Number of symbols in the window.
    fn window(self) -> u8 {
        self.digits - u8::from(self.escapes)
    }

    /// The byte that marks an escape until its literal is known; never in the window.
    fn escape(self) -> u8 {
        self.first.wrapping_sub(1)
    }

    /// The shape of `digits` digits whose window holds the most of `counts`; symbols range from `low` to `high`.
    pub(super) fn fit(counts: &[u32; 256], (low, high): (u8, u8), k: u8, digits: u8) -> Shape {
        if high - low < digits {
            return Shape { first: low, digits: high - low + 1, escapes: false, k };
        }
        let width = digits as usize - 1;
        let mut inside: u64 = counts[..width].iter().map(|&c| u64::from(c)).sum();
        let (mut best, mut first) = (inside, 0);
        for low in 1..=256 - width {
            inside += u64::from(counts[low + width - 1]);
            inside -= u64::from(counts[low - 1]);
            if inside > best {
                (best, first) = (inside, low);
            }
        }
        Shape { first: first as u8, digits, escapes: true, k }
    }

    /// How often each digit occurs.
    pub(super) fn digit_counts(self, counts: &[u32; 256]) -> Vec<u32> {
        let mut digits = vec![0; self.digits as usize];
        for (symbol, &count) in counts.iter().enumerate() {
            digits[(symbol as u8).wrapping_sub(self.first).min(self.digits - 1) as usize] += count;
        }
        digits
    }

    /// The counts of the literals: all symbols outside the window.
    pub(super) fn literal_counts(self, counts: &[u32; 256]) -> [u32; 256] {
        let mut literals = *counts;
        for i in 0..self.window() {
            literals[self.first.wrapping_add(i) as usize] = 0;
        }
        literals
    }

    fn put(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&[self.first, self.digits | if self.escapes { ESCAPES } else { 0 }, self.k]);
    }

    fn take(payload: &mut &[u8]) -> Result<Shape, Corrupt> {
        let (&[first, digits, k], rest) = payload.split_first_chunk().ok_or(Corrupt("truncated block shape"))?;
        *payload = rest;
        let shape = Shape { first, digits: digits & !ESCAPES, escapes: digits & ESCAPES != 0, k };
        let words = usize::from(shape.digits).checked_pow(k.into());
        let sound = (2..=8).contains(&k) && shape.digits >= 2 && words.is_some_and(|words| words <= WORDS);
        if sound { Ok(shape) } else { Err(Corrupt("block shape")) }
    }

    fn expansion(self) -> huffman::Expansion {
        let mut symbols = [0; 256];
        let mut digits = [0; 8];
        let digits = &mut digits[..self.k.into()];
        let last = self.digits - 1;
        let symbol = |digit| match self.escapes && digit == last {
            true => self.escape(),
            false => self.first.wrapping_add(digit),
        };
        for symbols in symbols.iter_mut().take(usize::from(self.digits).pow(self.k.into())) {
            *symbols = digits.iter().rev().fold(0, |word, &digit| word << 8 | u64::from(symbol(digit)));
            // Increment the number, lowest digit first: divisions would take longer than everything else.
            for digit in digits.iter_mut() {
                *digit = if *digit == last { 0 } else { *digit + 1 };
                if *digit != 0 {
                    break;
                }
            }
        }
        huffman::Expansion { symbols, k: self.k.into() }
    }
}

/// Appends `symbols` (not empty) as blocks of this shape, which must fit them. Returns the literals of the escapes,
/// whose payload comes next.
pub(super) fn encode(symbols: &[u8], shape: Shape, out: &mut Vec<u8>) -> Vec<u8> {
    shape.put(out);
    let words = match shape.k {
        2 => to_words::<2>(symbols, shape),
        3 => to_words::<3>(symbols, shape),
        4 => to_words::<4>(symbols, shape),
        _ => to_words::<5>(symbols, shape),
    };
    varint::put_bytes(out, |out| huffman::encode(&words, &huffman::histogram(&words), out));
    if !shape.escapes {
        return Vec::new();
    }
    let places = places_outside(Level::detect(), symbols, shape.first, shape.window());
    places.into_iter().map(|place| symbols[place as usize]).collect()
}

fn to_words<const K: usize>(symbols: &[u8], shape: Shape) -> Scratch {
    let mut words = Scratch::new(symbols.len().div_ceil(K));
    let (blocks, tail) = symbols.as_chunks::<K>();
    combine(Level::detect(), &Blocks(blocks), shape.first, shape.digits, &mut words);
    if let (false, Some(word)) = (tail.is_empty(), words.last_mut()) {
        let mut block = [shape.first; K];
        block[..tail.len()].copy_from_slice(tail);
        *word = block_word(&block, shape.first, shape.digits);
    }
    words
}

/// One name for blocks of any size, so that the loop over them can be compiled for each.
trait ToWords {
    fn write(&self, first: u8, digits: u8, words: &mut [u8]);
}

struct Blocks<'a, const K: usize>(&'a [[u8; K]]);

impl<const K: usize> ToWords for Blocks<'_, K> {
    #[inline(always)]
    fn write(&self, first: u8, digits: u8, words: &mut [u8]) {
        for (word, block) in words.iter_mut().zip(self.0) {
            *word = block_word(block, first, digits);
        }
    }
}

#[inline(always)]
fn block_word<const K: usize>(block: &[u8; K], first: u8, digits: u8) -> u8 {
    // A plain loop: the compiler may leave an iterator's fold outside of the vector code.
    let mut word = 0u8;
    for at in (0..K).rev() {
        word = word.wrapping_mul(digits).wrapping_add(block[at].wrapping_sub(first).min(digits - 1));
    }
    word
}

multiversion! {
    fn combine<B: ToWords>(blocks: &B, first: u8, digits: u8, words: &mut [u8]) {
        blocks.write(first, digits, words);
    }
}

/// Fills `out` (not empty) from a payload of [`encode`]; `nested` decodes the literals.
pub(super) fn decode(
    mut payload: &[u8],
    out: &mut [u8],
    nested: impl FnOnce(&[u8], &mut [u8]) -> Result<(), Corrupt>,
) -> Result<(), Corrupt> {
    let shape = Shape::take(&mut payload)?;
    let body = varint::take_bytes(&mut payload)?;
    huffman::decode(body, &shape.expansion(), out)?;
    if !shape.escapes {
        return Ok(());
    }
    let level = Level::detect();
    let masks = masks_outside(level, out, shape.first, shape.window());
    let mut literals = Scratch::new(masks.iter().map(|mask| mask.count_ones() as usize).sum());
    nested(payload, &mut literals)?;
    put_literals(level, &masks, &literals, out);
    Ok(())
}

multiversion! {
    /// For each chunk: one bit for each symbol, set if it is outside the window.
    fn masks_outside(symbols: &[u8], first: u8, window: u8) -> Vec<u64> {
        let (chunks, tail) = symbols.as_chunks::<CHUNK>();
        let mut masks = Vec::with_capacity(chunks.len() + 1);
        masks.extend(chunks.iter().map(|chunk| mask_outside(chunk, first, window)));
        let mut last = [first; CHUNK];
        last[..tail.len()].copy_from_slice(tail);
        masks.push(mask_outside(&last, first, window));
        masks
    }
}

/// Places found together before literals go there.
const PLACES: usize = 1024;
/// Places of a chunk that are found without a branch, which the processor would often guess wrong.
const USUAL: u32 = 4;

multiversion! {
    /// Writes the literals to the symbols whose bit is set, one to each.
    fn put_literals(masks: &[u64], literals: &[u8], symbols: &mut [u8]) {
        let (mut places, mut found) = ([0u32; PLACES], 0);
        let mut literals = literals.iter();
        let mut put = |places: &[u32]| {
            for (&place, &literal) in places.iter().zip(literals.by_ref()) {
                if let Some(symbol) = symbols.get_mut(place as usize) {
                    *symbol = literal;
                }
            }
        };
        for (number, &mask) in masks.iter().enumerate() {
            let Some(room) = places.get_mut(found..found + CHUNK) else { break };
            let (mut left, start) = (mask, (number * CHUNK) as u32);
            let next = |left: &mut u64| {
                let place = start + left.trailing_zeros();
                *left &= left.wrapping_sub(1);
                place
            };
            room[..USUAL as usize].iter_mut().for_each(|place| *place = next(&mut left));
            let count = mask.count_ones();
            if count > USUAL {
                room[USUAL as usize..count as usize].iter_mut().for_each(|place| *place = next(&mut left));
            }
            found += count as usize;
            if found > PLACES - CHUNK {
                put(&places[..found]);
                found = 0;
            }
        }
        put(&places[..found]);
    }
}

/// One bit for each symbol of a chunk, set if it is outside the window, which is not empty.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn mask_outside(chunk: &[u8; CHUNK], first: u8, window: u8) -> u64 {
    use std::arch::x86_64::{
        __m128i, _mm_cmpeq_epi8, _mm_loadu_si128, _mm_max_epu8, _mm_movemask_epi8, _mm_set1_epi8, _mm_sub_epi8,
    };
    let mut mask = 0;
    for (at, sixteen) in chunk.as_chunks::<16>().0.iter().enumerate() {
        // SAFETY: every x86-64 has these instructions. The pointer is to sixteen bytes, and the load needs no alignment.
        let bits = unsafe {
            let symbols = _mm_loadu_si128(sixteen.as_ptr().cast::<__m128i>());
            let digits = _mm_sub_epi8(symbols, _mm_set1_epi8(first as i8));
            _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(digits, _mm_set1_epi8(window as i8)), digits))
        };
        mask |= u64::from(bits as u32) << (16 * at);
    }
    mask
}

/// One bit for each symbol of a chunk, set if it is outside the window.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn mask_outside(chunk: &[u8; CHUNK], first: u8, window: u8) -> u64 {
    mask_one_by_one(chunk, first, window)
}

/// The same on any machine.
#[cfg(any(test, not(target_arch = "x86_64")))]
fn mask_one_by_one(chunk: &[u8; CHUNK], first: u8, window: u8) -> u64 {
    let bits = chunk.iter().enumerate().map(|(at, s)| u64::from(s.wrapping_sub(first) >= window) << at);
    bits.fold(0, |mask, bit| mask | bit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn masks_and_literals_are_as_one_by_one(
            symbols in prop::collection::vec(prop_oneof![9 => 0..5u8, 1 => any::<u8>()], 0..3000),
            first in 0..5u8,
            window in 1..200u8,
        ) {
            let masks = masks_outside(Level::PORTABLE, &symbols, first, window);
            let is_outside = |s: u8| s.wrapping_sub(first) >= window;
            let mut literals = symbols.iter().enumerate().filter(|(_, s)| is_outside(**s)).map(|(at, _)| at as u8);
            let wanted: Vec<u8> =
                symbols.iter().map(|&s| if is_outside(s) { literals.next().unwrap() } else { s }).collect();
            let literals: Vec<u8> =
                (0..symbols.len()).filter(|&at| is_outside(symbols[at])).map(|at| at as u8).collect();
            prop_assert_eq!(masks.iter().map(|mask| mask.count_ones() as usize).sum::<usize>(), literals.len());
            for (chunk, &mask) in symbols.as_chunks().0.iter().zip(&masks) {
                prop_assert_eq!(mask_one_by_one(chunk, first, window), mask);
            }
            for level in Level::available() {
                prop_assert_eq!(&masks_outside(level, &symbols, first, window), &masks);
                let mut out = symbols.clone();
                put_literals(level, &masks, &literals, &mut out);
                prop_assert_eq!(&out, &wanted);
            }
        }
    }
}
