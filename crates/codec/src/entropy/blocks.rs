//! Blocks of `k` symbols as one Huffman word, for streams with less than a few bits per symbol.
//!
//! The frequent symbols are a window of consecutive byte values; symbol `first + i` is digit `i`. If the window does
//! not hold all symbols, the last digit is the *escape*. The decoder first writes the byte value before the window
//! there, then replaces it by the next literal. A word is the number formed by its `k` digits in base `digits`; the
//! first symbol is the lowest digit.
//!
//! Layout: `first`, `digits` | 0x80 if there is an escape, `k`; the length of the Huffman body, the body; the literals
//! as a payload of [`super::bytes`].

use super::outside::Outside;
use super::scratch::Scratch;
use super::simd::{Level, multiversion};
use super::{Corrupt, huffman, varint};

/// Maximum words of a block code: a word is a byte.
const WORDS: usize = 256;

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

    /// The escapes among encoded or decoded symbols.
    fn outside(self, symbols: &[u8]) -> Outside {
        Outside::new(Level::detect(), symbols, self.first, self.window())
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
    let mut literals = Vec::new();
    shape.outside(symbols).each(|place| literals.push(symbols[place]));
    literals
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
    let outside = shape.outside(out);
    let mut literals = Scratch::new(outside.count());
    nested(payload, &mut literals)?;
    let mut next = literals.iter();
    outside.each(|place| out[place] = next.next().copied().unwrap_or_default());
    Ok(())
}
