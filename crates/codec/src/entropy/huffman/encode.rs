//! Words to bit streams.

use super::super::scratch::Scratch;
use super::super::simd::{Level, multiversion};
use super::lengths::{code_lengths, put_lengths};
use super::{MAX_LENGTH, STREAMS, STREAMS_FROM, codes};

/// Bytes with fewer different values than this are counted by comparisons, others by tables.
const COMPARED: usize = 12;
/// Bytes compared with each value before the next bytes: they stay in the first-level cache.
const COMPARED_AT_ONCE: usize = 64 * COMPARED_IN_BYTES;
/// Bytes whose count fits into one byte: whole vectors of any level.
const COMPARED_IN_BYTES: usize = 192;

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

/// The same for bytes that are known to be within this range.
pub(in super::super) fn histogram_between(data: &[u8], (lowest, highest): (u8, u8)) -> [u32; 256] {
    if usize::from(highest - lowest) >= COMPARED {
        return histogram(data);
    }
    let mut counts = [0; 256];
    let level = Level::detect();
    for part in data.chunks(COMPARED_AT_ONCE) {
        let mut left = part.len() as u32;
        for byte in lowest..highest {
            let found = count(level, part, byte);
            counts[usize::from(byte)] += found;
            left -= found;
        }
        counts[usize::from(highest)] += left;
    }
    counts
}

multiversion! {
    /// The number of occurrences of `byte`.
    fn count(data: &[u8], byte: u8) -> u32 {
        let (blocks, tail) = data.as_chunks::<COMPARED_IN_BYTES>();
        let of_block = |block: &[u8; COMPARED_IN_BYTES]| block.iter().map(|found| u8::from(*found == byte)).sum::<u8>();
        let blocks = blocks.iter().map(|block| u32::from(of_block(block))).sum::<u32>();
        blocks + tail.iter().map(|found| u32::from(*found == byte)).sum::<u32>()
    }
}

/// Appends the body for `words` (not empty), whose exact counts are `counts`.
pub(in super::super) fn encode(words: &[u8], counts: &[u32; 256], out: &mut Vec<u8>) {
    let lengths = code_lengths(counts, MAX_LENGTH);
    put_lengths(&lengths, out);
    let codes = codes(&lengths);
    let ones = std::array::from_fn(|word| Entry::new(codes[word].into(), lengths[word].into()));
    if words.len() < STREAMS_FROM {
        put_stream(words, &Tables { ones, groups: None }, out);
        return;
    }
    let used = lengths.iter().rposition(|length| *length > 0).map_or(0, |last| last + 1);
    let groups = GROUPS.iter().find(|(words, _)| used <= 1 << (8 / words));
    let tables = Tables { ones, groups: groups.map(|(words, write)| (grouped(&ones, *words), *write)) };
    let lengths_at = out.len();
    out.extend_from_slice(&[0; 4 * (STREAMS - 1)]);
    let segment = words.len().div_ceil(STREAMS);
    for (i, segment) in words.chunks(segment).enumerate() {
        let length = put_stream(segment, &tables, out) as u32;
        if i < STREAMS - 1 {
            out[lengths_at + 4 * i..][..4].copy_from_slice(&length.to_le_bytes());
        }
    }
}

/// The code of one word, or of several in sequence: at most 24 bits, with their number in the highest byte.
#[derive(Clone, Copy)]
struct Entry(u32);

impl Entry {
    fn new(code: u32, length: u32) -> Entry {
        Entry(code | length << 24)
    }

    #[inline(always)]
    fn code(self) -> u64 {
        u64::from(self.0 & 0x00ff_ffff)
    }

    #[inline(always)]
    fn length(self) -> u32 {
        self.0 >> 24
    }
}

/// Codes of words. If all words are small, also codes of groups of them: one look-up then covers a group.
struct Tables {
    ones: [Entry; 256],
    groups: Option<([Entry; 256], WriteGroups)>,
}

type WriteGroups = fn(Level, &[[u8; 8]], &[Entry; 256], &mut Bits<'_>);

/// Words in a group, which share the eight bits of its number, and the function that writes them.
const GROUPS: [(usize, WriteGroups); 2] = [(4, write_fours), (2, write_twos)];

/// The code of each group of this many words.
fn grouped(ones: &[Entry; 256], words: usize) -> [Entry; 256] {
    let bits = 8 / words;
    std::array::from_fn(|number| {
        (0..words).rev().fold(Entry(0), |behind, at| {
            let first = ones[number >> (bits * at) & ((1 << bits) - 1)];
            Entry::new((behind.code() << first.length() | first.code()) as u32, first.length() + behind.length())
        })
    })
}

fn put_stream(words: &[u8], tables: &Tables, out: &mut Vec<u8>) -> usize {
    // Never cleared: the longest codes of all words would take several times the written bytes.
    let mut room = Scratch::new((words.len() * MAX_LENGTH as usize).div_ceil(8) + 8);
    let mut bits = Bits { out: &mut room, acc: 0, held: 0, at: 0 };
    let mut rest = words;
    if let Some((groups, write)) = &tables.groups {
        let (eights, tail) = words.as_chunks::<8>();
        write(Level::detect(), eights, groups, &mut bits);
        rest = tail;
    }
    write_ones(Level::detect(), rest, &tables.ones, &mut bits);
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
        self.acc |= entry.code() << self.held;
        self.held += entry.length();
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
    fn write_ones(words: &[u8], table: &[Entry; 256], bits: &mut Bits<'_>) {
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

multiversion! {
    fn write_twos(words: &[[u8; 8]], table: &[Entry; 256], bits: &mut Bits<'_>) {
        for eight in words {
            let eight = u64::from_le_bytes(*eight);
            // Two bytes of four bits each become one.
            let packed = eight | eight >> 4;
            // Groups of at most 22 bits.
            bits.put(table[packed as u8 as usize]);
            bits.put(table[(packed >> 16) as u8 as usize]);
            bits.flush();
            bits.put(table[(packed >> 32) as u8 as usize]);
            bits.put(table[(packed >> 48) as u8 as usize]);
            bits.flush();
        }
    }
}

multiversion! {
    fn write_fours(words: &[[u8; 8]], table: &[Entry; 256], bits: &mut Bits<'_>) {
        for eight in words {
            let eight = u64::from_le_bytes(*eight);
            // Four bytes of two bits each become one.
            let packed = eight | eight >> 6;
            let packed = packed | packed >> 12;
            // Groups of at most 12 bits: of four words the longest code has three.
            bits.put(table[packed as u8 as usize]);
            bits.put(table[(packed >> 32) as u8 as usize]);
            bits.flush();
        }
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
    fn groups_have_the_codes_of_their_words() {
        for (kinds, length) in (2..40).flat_map(|kinds| [2048, 2051, 9001, 70_000].map(|length| (kinds, length))) {
            let words = words(kinds, length);
            let counts = histogram(&words);
            let highest = *words.iter().max().unwrap();
            assert_eq!(histogram_between(&words, (0, highest)), counts, "{kinds}");
            let mut out = Vec::new();
            encode(&words, &counts, &mut out);
            let mut back = vec![0; length];
            decode(&out, &Expansion::identity(), &mut back).unwrap();
            assert!(back == words, "{kinds} kinds, {length} words");
            // And no other words.
            let lengths = code_lengths(&counts, MAX_LENGTH);
            let codes = codes(&lengths);
            let ones = std::array::from_fn(|word| Entry::new(codes[word].into(), lengths[word].into()));
            let mut alone = Vec::new();
            put_stream(&words, &Tables { ones, groups: None }, &mut alone);
            for (group, write) in GROUPS.iter().filter(|(group, _)| usize::from(highest) < 1 << (8 / group)) {
                let tables = Tables { ones, groups: Some((grouped(&ones, *group), *write)) };
                let mut together = Vec::new();
                put_stream(&words, &tables, &mut together);
                assert!(together == alone, "{kinds} kinds, {length} words in groups of {group}");
            }
        }
    }
}
