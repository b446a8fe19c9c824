//! Order-0 canonical Huffman coding of *words* (bytes); a word is one symbol or a block of several.
//!
//! A body begins with the code lengths (`lengths`). With [`STREAMS_FROM`] words or more, the byte lengths of the first
//! [`STREAMS`] - 1 bit streams follow (`u32` each), then the streams. With fewer words, a single stream follows. Each
//! stream codes one contiguous segment of the words, low bits first.

mod decode;
mod encode;
mod lengths;

pub(super) use decode::decode;
pub(super) use encode::{encode, histogram};
pub(super) use lengths::code_lengths;

/// Longest code, in bits. With eleven, the decode table (2048 entries, 20 KiB) and its construction are small against a
/// tile. Longer codes gain below 0.5% on 256 words.
pub(super) const MAX_LENGTH: u32 = 11;

/// Bit streams decoded side by side: each is one chain of table look-ups, and four of them hide its latency.
pub(super) const STREAMS: usize = 4;

/// From this many words on there are [`STREAMS`] streams; below, their lengths would cost over 1%.
pub(super) const STREAMS_FROM: usize = 2048;

/// The symbols of each word: `k` symbols (1 to 8), first symbol in the lowest byte.
pub(super) struct Expansion {
    pub(super) symbols: [u64; 256],
    /// Symbols per word.
    pub(super) k: usize,
}

impl Expansion {
    /// Every word is the symbol itself.
    pub(super) fn identity() -> Self {
        Expansion { symbols: std::array::from_fn(|word| word as u64), k: 1 }
    }
}

/// Canonical codes for these lengths, bits reversed (first bit lowest); 0 if the length is 0.
fn codes(lengths: &[u8; 256]) -> [u16; 256] {
    let mut of_length = [0u16; MAX_LENGTH as usize + 2];
    for &length in lengths {
        of_length[length as usize] += 1;
    }
    of_length[0] = 0;
    // The first code of each length, then the next free one.
    let mut next = [0u16; MAX_LENGTH as usize + 2];
    for length in 1..=MAX_LENGTH as usize {
        next[length + 1] = (next[length] + of_length[length]) << 1;
    }
    let mut codes = [0; 256];
    for (code, &length) in codes.iter_mut().zip(lengths) {
        if length > 0 {
            *code = next[length as usize].reverse_bits() >> (16 - length);
            next[length as usize] += 1;
        }
    }
    codes
}
