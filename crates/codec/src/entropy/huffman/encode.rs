//! Words to bit streams.

use super::super::scratch::Scratch;
use super::super::simd::{Level, multiversion};
use super::lengths::{code_lengths, put_lengths};
use super::{MAX_LENGTH, STREAMS, STREAMS_FROM, codes};

/// The number of occurrences of each byte; `data` is shorter than 4 Gi.
pub(in super::super) fn histogram(data: &[u8]) -> [u32; 256] {
    // Four tables, so that runs of one byte do not wait for their own last increment.
    let mut tables = [[0u32; 256]; 4];
    let (chunks, tail) = data.as_chunks::<8>();
    for chunk in chunks {
        let eight = u64::from_le_bytes(*chunk);
        for i in 0..8 {
            tables[i % 4][(eight >> (8 * i)) as u8 as usize] += 1;
        }
    }
    for &byte in tail {
        tables[0][byte as usize] += 1;
    }
    std::array::from_fn(|byte| tables.iter().map(|table| table[byte]).sum())
}

/// Appends the body for `words` (not empty), whose exact counts are `counts`.
pub(in super::super) fn encode(words: &[u8], counts: &[u32; 256], out: &mut Vec<u8>) {
    let lengths = code_lengths(counts, MAX_LENGTH);
    put_lengths(&lengths, out);
    let codes = codes(&lengths);
    let table = std::array::from_fn(|word| Entry { code: codes[word], length: lengths[word].into() });
    if words.len() < STREAMS_FROM {
        put_stream(words, &table, out);
        return;
    }
    let lengths_at = out.len();
    out.extend_from_slice(&[0; 4 * (STREAMS - 1)]);
    let segment = words.len().div_ceil(STREAMS);
    for (i, segment) in words.chunks(segment).enumerate() {
        let length = put_stream(segment, &table, out) as u32;
        if i < STREAMS - 1 {
            out[lengths_at + 4 * i..][..4].copy_from_slice(&length.to_le_bytes());
        }
    }
}

/// The code of a word.
#[derive(Clone, Copy)]
struct Entry {
    code: u16,
    length: u16,
}

fn put_stream(words: &[u8], table: &[Entry; 256], out: &mut Vec<u8>) -> usize {
    // Never cleared: the longest codes of all words would take several times the written bytes.
    let mut room = Scratch::new((words.len() * MAX_LENGTH as usize).div_ceil(8) + 8);
    let mut bits = Bits { out: &mut room, acc: 0, held: 0, at: 0 };
    write(Level::detect(), words, table, &mut bits);
    let length = bits.at + usize::from(bits.held > 0);
    out.extend_from_slice(&room[..length]);
    length
}

/// The output for codes: room for the longest code of every word, and 8 bytes more.
struct Bits<'a> {
    out: &'a mut [u8],
    acc: u64,
    held: u32,
    at: usize,
}

impl Bits<'_> {
    /// Adds a code: at most 57 bits between two flushes.
    #[inline(always)]
    fn put(&mut self, entry: Entry) {
        self.acc |= u64::from(entry.code) << self.held;
        self.held += u32::from(entry.length);
    }

    /// Writes whole bytes; at most 7 bits remain.
    #[inline(always)]
    fn flush(&mut self) {
        self.out[self.at..self.at + 8].copy_from_slice(&self.acc.to_le_bytes());
        self.at += (self.held >> 3) as usize;
        self.acc >>= self.held & !7;
        self.held &= 7;
    }
}

multiversion! {
    fn write(words: &[u8], table: &[Entry; 256], bits: &mut Bits<'_>) {
        // Codes of at most 11 bits.
        let (fives, tail) = words.as_chunks::<5>();
        for five in fives {
            five.iter().for_each(|word| bits.put(table[usize::from(*word)]));
            bits.flush();
        }
        tail.iter().for_each(|word| bits.put(table[usize::from(*word)]));
        bits.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entropy::huffman::{Expansion, decode};

    /// Words of a given number of kinds, some of them frequent.
    fn words(kinds: u64, length: usize) -> Vec<u8> {
        let mut seed = kinds;
        let mut next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            seed >> 33
        };
        (0..length).map(|_| ((next() % kinds) >> (next() % 4)) as u8).collect()
    }

    #[test]
    fn words_come_back_from_one_stream_or_four() {
        for (kinds, length) in (2..40).flat_map(|kinds| [2047, 2048, 2051, 9001].map(|length| (kinds, length))) {
            let words = words(kinds, length);
            let mut out = Vec::new();
            encode(&words, &histogram(&words), &mut out);
            let mut back = vec![0; length];
            decode(&out, &Expansion::identity(), &mut back).unwrap();
            assert!(back == words, "{kinds} kinds, {length} words");
        }
    }
}
