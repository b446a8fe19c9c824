//! Byte symbols, order 0: the cheapest of five encodings, by an estimate from their histogram.
//!
//! The payload of no symbols is empty; otherwise it is a mode byte and the mode's data. `docs/FORMAT.md` has every
//! byte.

use super::cost::{block_bits, entropy_bits, flag_bits, header_bits, huffman_bits, literal_bits};
use super::scratch::Scratch;
use super::simd::{Level, multiversion};
use super::{Corrupt, blocks, huffman, sparse};

const RAW: u8 = 0;
const CONSTANT: u8 = 1;
const HUFFMAN: u8 = 2;
const BLOCKS: u8 = 3;
const SPARSE: u8 = 4;

/// With a smaller saving, symbols stay raw: copying is several times as fast as decoding.
const WORTH_CODING: f64 = 0.98;

/// Appends the payload of `symbols`.
pub fn encode(symbols: &[u8], out: &mut Vec<u8>) {
    encode_within(symbols, SPARSE, out);
}

/// Appends the payload of `symbols` in a Huffman code over single symbols, or raw if that is shorter: the published
/// systems have only that. [`decode`] reads it.
pub fn encode_huffman(symbols: &[u8], out: &mut Vec<u8>) {
    encode_within(symbols, HUFFMAN, out);
}

/// Fills `out` from the payload of exactly that many symbols.
pub fn decode(payload: &[u8], out: &mut [u8]) -> Result<(), Corrupt> {
    decode_within(payload, SPARSE, out)
}

/// The number of occurrences of each byte, for [`super::cost::entropy_bits`]; `symbols` is shorter than 4 Gi.
pub fn histogram(symbols: &[u8]) -> [u32; 256] {
    huffman::histogram(symbols)
}

/// Like [`decode`] of `length` symbols, but borrows raw symbols from the payload instead of copying them.
pub(crate) fn decode_borrowed<'a>(
    payload: &'a [u8],
    length: usize,
    buffer: &'a mut Scratch,
) -> Result<&'a [u8], Corrupt> {
    match payload.split_first() {
        Some((&RAW, symbols)) if symbols.len() == length => Ok(symbols),
        _ => {
            *buffer = Scratch::new(length);
            decode(payload, buffer)?;
            Ok(buffer)
        }
    }
}

/// With modes up to `most`. Nested payloads may use fewer, which ends the recursion.
fn encode_within(symbols: &[u8], most: u8, out: &mut Vec<u8>) {
    let Some(&first) = symbols.first() else {
        return;
    };
    // Counts and stream lengths are 32 bits.
    if symbols.len() > i32::MAX as usize {
        return put_raw(symbols, out);
    }
    let start = out.len();
    let range = range(Level::detect(), symbols);
    let sampled = sample(symbols);
    match cheapest(symbols.len(), &sampled, range, most) {
        Plan::Raw => put_raw(symbols, out),
        Plan::Constant => out.extend_from_slice(&[CONSTANT, first]),
        Plan::Huffman => {
            out.push(HUFFMAN);
            huffman::encode(symbols, &histogram(symbols), out);
        }
        Plan::Blocks(shape) => {
            out.push(BLOCKS);
            let literals = blocks::encode(symbols, shape, out);
            encode_within(&literals, HUFFMAN, out);
        }
        Plan::Sparse(common) => {
            out.push(SPARSE);
            sparse::encode(symbols, common, out, |nested, out| encode_within(nested, BLOCKS, out));
        }
    }
    // Estimates err on short input.
    if out.len() - start > symbols.len() + 1 {
        out.truncate(start);
        put_raw(symbols, out);
    }
}

fn decode_within(payload: &[u8], most: u8, out: &mut [u8]) -> Result<(), Corrupt> {
    if out.is_empty() {
        return if payload.is_empty() { Ok(()) } else { Err(Corrupt("unexpected symbols")) };
    }
    let (&mode, body) = payload.split_first().ok_or(Corrupt("no symbols"))?;
    match mode {
        RAW if body.len() == out.len() => out.copy_from_slice(body),
        CONSTANT if body.len() == 1 => out.fill(body[0]),
        HUFFMAN => huffman::decode(body, &huffman::Expansion::identity(), out)?,
        BLOCKS if most >= BLOCKS => blocks::decode(body, out, |nested, out| decode_within(nested, HUFFMAN, out))?,
        SPARSE if most >= SPARSE => sparse::decode(body, out, |nested, out| decode_within(nested, BLOCKS, out))?,
        _ => return Err(Corrupt("mode of a symbol payload")),
    }
    Ok(())
}

fn put_raw(symbols: &[u8], out: &mut Vec<u8>) {
    out.push(RAW);
    out.extend_from_slice(symbols);
}

#[derive(Debug)]
enum Plan {
    Raw,
    Constant,
    Huffman,
    Blocks(blocks::Shape),
    Sparse(u8),
}

multiversion! {
    /// Lowest and highest symbol.
    fn range(symbols: &[u8]) -> (u8, u8) {
        symbols.iter().fold((u8::MAX, 0), |(low, high), &symbol| (low.min(symbol), high.max(symbol)))
    }
}

/// Number of symbols to sample for a decision, and the length of each run. 16 Ki keep the cost of a tile within .5%.
const SAMPLE: usize = 16 * 1024;
const SAMPLE_RUN: usize = 128;

/// Counts of all symbols if they are few, else of a sample spread over them.
fn sample(symbols: &[u8]) -> [u32; 256] {
    let stride = symbols.len() / (SAMPLE / SAMPLE_RUN);
    if stride < 2 * SAMPLE_RUN {
        return histogram(symbols);
    }
    let mut runs = Scratch::new(symbols.len() / stride * SAMPLE_RUN);
    for (run, chunk) in runs.chunks_exact_mut(SAMPLE_RUN).zip(symbols.chunks_exact(stride)) {
        run.copy_from_slice(&chunk[..SAMPLE_RUN]);
    }
    let (n, sampled) = (symbols.len() as u64, runs.len() as u64);
    histogram(&runs).map(|count| (u64::from(count) * n / sampled) as u32)
}

/// The plan with the fewest bits for `n` symbols of this range, judged by the counts of a sample.
fn cheapest(n: usize, counts: &[u32; 256], range: (u8, u8), most: u8) -> Plan {
    if range.0 == range.1 {
        return Plan::Constant;
    }
    let (common, &occurs) = counts.iter().enumerate().max_by_key(|&(_, &count)| count).unwrap_or((0, &0));
    let total = n as f64;
    let mut best = (total * 8.0 * WORTH_CODING, Plan::Raw);
    let mut consider = |bits: f64, plan: Plan| {
        if bits < best.0 {
            best = (bits, plan);
        }
    };
    let one_by_one = huffman_bits(counts);
    consider(one_by_one, Plan::Huffman);
    let entropy = entropy_bits(counts) / total;

    // Blocks help if whole bits are too coarse.
    if most >= BLOCKS {
        for (k, digits) in blocks::SHAPES {
            if !BLOCK_BITS.contains(&(f64::from(k) * entropy)) {
                continue;
            }
            let shape = blocks::Shape::fit(counts, range, k, digits);
            let mut bits = block_bits(&shape.digit_counts(counts), k.into(), total) + 48.0;
            if shape.escapes {
                bits += literal_bits(&shape.literal_counts(counts));
            }
            consider(bits, Plan::Blocks(shape));
        }
    }
    if most >= SPARSE {
        let p = f64::from(occurs) / total;
        if p > 0.5 {
            let others = total - f64::from(occurs);
            let mut literals = *counts;
            literals[common] = 0;
            // Gaps beyond one byte, including skips, take about a bit more each.
            let long_gaps = if others * 240.0 < total { others } else { 0.0 };
            let gaps = total * flag_bits(p) + others * 0.04 + long_gaps + header_bits(64);
            consider(gaps + literal_bits(&literals), Plan::Sparse(common as u8));
        }
    }
    best.1
}

/// Entropy of a block for which its shape is worth a try. Below this range, the minimum of one bit per word hurts as it
/// does without blocks. Above it, most words are rarer than the longest code.
const BLOCK_BITS: std::ops::Range<f64> = 2.0..5.8;
