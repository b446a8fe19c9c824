//! Words to bit streams.

use super::super::level::{Level, multiversion};
use super::lengths::{code_lengths, put_lengths};
use super::{MAX_LENGTH, STREAMS, STREAMS_FROM, codes};

/// How often each byte occurs; `data` shorter than 4 Gi.
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
    // Code in the low half, its length in the high half.
    let table: [u32; 256] = std::array::from_fn(|word| u32::from(codes[word]) | u32::from(lengths[word]) << 16);
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

fn put_stream(words: &[u8], table: &[u32; 256], out: &mut Vec<u8>) -> usize {
    let at = out.len();
    let bound = (words.len() * MAX_LENGTH as usize).div_ceil(8) + 8;
    out.resize(at + bound, 0);
    let length = write_stream(Level::detect(), words, table, &mut out[at..]);
    out.truncate(at + length);
    length
}

multiversion! {
    /// Writes the codes of `words`; returns the bytes used. `out` must hold the longest codes and 8 bytes more.
    fn write_stream(words: &[u8], table: &[u32; 256], out: &mut [u8]) -> usize {
        let (mut acc, mut held, mut at) = (0u64, 0u32, 0usize);
        let mut flush = |acc: &mut u64, held: &mut u32| {
            out[at..at + 8].copy_from_slice(&acc.to_le_bytes());
            at += (*held >> 3) as usize;
            *acc >>= *held & !7;
            *held &= 7;
        };
        // 7 bits left over and 5 codes of at most 11 make 62, below 64.
        let (fives, tail) = words.as_chunks::<5>();
        for five in fives {
            for &word in five {
                let entry = table[word as usize];
                acc |= u64::from(entry & 0xffff) << held;
                held += entry >> 16;
            }
            flush(&mut acc, &mut held);
        }
        for &word in tail {
            let entry = table[word as usize];
            acc |= u64::from(entry & 0xffff) << held;
            held += entry >> 16;
        }
        flush(&mut acc, &mut held);
        at + usize::from(held > 0)
    }
}
