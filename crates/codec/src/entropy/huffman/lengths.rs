//! Code lengths: finds good ones, and writes them in a few tens of bytes.

use super::super::Corrupt;
use super::super::bits::{BitReader, BitWriter};
use super::codes;

/// Longest code of the code for the lengths: its own lengths are three bits each.
const META_MAX: u32 = 7;

/// Number of lengths that a word can have, 0 (absent) to [`super::MAX_LENGTH`].
const META_SYMBOLS: usize = super::MAX_LENGTH as usize + 1;

/// Up to this many lengths are plain nibbles: a code for the lengths would not pay for itself.
const NIBBLES_UP_TO: usize = 16;

/// Huffman code lengths for these counts, none above `max`, always a complete code: a lone word gets a companion. At
/// least one count must be positive, and at most 2^`max` of them.
pub(in super::super) fn code_lengths(counts: &[u32; 256], max: u32) -> [u8; 256] {
    let mut lengths = [0u8; 256];
    // Ascending by count; count and word in one integer, so that sorting moves eight bytes.
    let mut sorted = [0u64; 256];
    let mut n = 0;
    for (word, &count) in counts.iter().enumerate() {
        if count > 0 {
            sorted[n] = u64::from(count) << 8 | word as u64;
            n += 1;
        }
    }
    let sorted = &mut sorted[..n];
    if n <= 1 {
        let word = sorted.first().map_or(0, |entry| (entry & 0xff) as usize);
        lengths[word] = 1;
        lengths[word ^ 1] = 1;
        return lengths;
    }
    sorted.sort_unstable();

    // Two queues: leaves in order, and inner nodes in the order of their creation. Node i < n is a leaf.
    let mut weight = [0u64; 512];
    let mut parent = [0u16; 512];
    for (w, entry) in weight.iter_mut().zip(sorted.iter()) {
        *w = entry >> 8;
    }
    let (mut leaf, mut inner) = (0, n);
    for node in n..2 * n - 1 {
        let mut lighter = || {
            let pick_leaf = leaf < n && (inner >= node || weight[leaf] <= weight[inner]);
            let from = if pick_leaf { &mut leaf } else { &mut inner };
            *from += 1;
            *from - 1
        };
        let (a, b) = (lighter(), lighter());
        weight[node] = weight[a] + weight[b];
        parent[a] = node as u16;
        parent[b] = node as u16;
    }
    let mut depth = [0u8; 512];
    let mut of_depth = [0u32; 256];
    for node in (0..2 * n - 2).rev() {
        depth[node] = depth[parent[node] as usize] + 1;
        if node < n {
            of_depth[depth[node] as usize] += 1;
        }
    }

    // Leaves that are too deep move up to `max`. Then leaves above move down, deepest first, until all fit.
    let limit = max as usize;
    let lifted: u32 = of_depth[limit + 1..].iter().sum();
    of_depth[limit] += lifted;
    let mut space: u64 = (1..=limit).map(|d| u64::from(of_depth[d]) << (limit - d)).sum();
    while space > 1 << limit {
        let from = (1..limit).rev().find(|&d| of_depth[d] > 0).unwrap_or(1);
        of_depth[limit] -= 1;
        of_depth[from] -= 1;
        of_depth[from + 1] += 2;
        space -= 1;
    }
    // Rarest words get the longest codes.
    let mut rarest_first = sorted.iter();
    for d in (1..=limit).rev() {
        for entry in rarest_first.by_ref().take(of_depth[d] as usize) {
            lengths[(entry & 0xff) as usize] = d as u8;
        }
    }
    lengths
}

/// Appends the lengths: the first and last word present. Then a nibble for each length between, or a code of their own.
pub(super) fn put_lengths(lengths: &[u8; 256], out: &mut Vec<u8>) {
    let first = lengths.iter().position(|&l| l > 0).unwrap_or(0);
    let last = lengths.iter().rposition(|&l| l > 0).unwrap_or(0);
    out.extend_from_slice(&[first as u8, last as u8]);
    let lengths = &lengths[first..=last];
    let mut bits = BitWriter::new(out);
    if lengths.len() <= NIBBLES_UP_TO {
        lengths.iter().for_each(|&length| bits.put(length.into(), 4));
    } else {
        let mut counts = [0u32; 256];
        lengths.iter().for_each(|&length| counts[length as usize] += 1);
        let meta = code_lengths(&counts, META_MAX);
        let meta_codes = codes(&meta);
        meta[..META_SYMBOLS].iter().for_each(|&length| bits.put(length.into(), 3));
        for &length in lengths {
            bits.put(meta_codes[length as usize].into(), meta[length as usize].into());
        }
    }
    bits.finish();
}

/// Takes the lengths off the front of `payload`. An incomplete code is an error.
pub(super) fn take_lengths(payload: &mut &[u8]) -> Result<[u8; 256], Corrupt> {
    let (&[first, last], rest) = payload.split_first_chunk().ok_or(Corrupt("truncated code lengths"))?;
    Corrupt::when(first >= last, "empty range of words")?;
    let mut lengths = [0u8; 256];
    let present = &mut lengths[first as usize..=last as usize];
    let mut bits = BitReader::new(rest);
    if present.len() <= NIBBLES_UP_TO {
        for length in present.iter_mut() {
            *length = (bits.peek() & 15) as u8;
            bits.skip(4)?;
        }
    } else {
        let mut meta = [0u8; 256];
        for length in &mut meta[..META_SYMBOLS] {
            *length = (bits.peek() & 7) as u8;
            bits.skip(3)?;
        }
        check_complete(&meta)?;
        let meta_codes = codes(&meta);
        // By the next bits: a length, and the bits of its code.
        let mut by_bits = [(0, 0); 1 << META_MAX];
        for (length, (&width, &code)) in meta.iter().zip(&meta_codes).enumerate().filter(|(_, (width, _))| **width > 0)
        {
            (code.into()..by_bits.len()).step_by(1 << width).for_each(|at| by_bits[at] = (length as u8, width));
        }
        for length in present.iter_mut() {
            let width;
            (*length, width) = by_bits[bits.peek() as usize % by_bits.len()];
            bits.skip(width.into())?;
        }
    }
    *payload = bits.rest();
    check_complete(&lengths)?;
    Ok(lengths)
}

/// Checks that every sequence of bits decodes, so that no decoder can meet an undefined code.
fn check_complete(lengths: &[u8; 256]) -> Result<(), Corrupt> {
    let mut space = 0u32;
    for &length in lengths.iter().filter(|&&l| l > 0) {
        Corrupt::when(u32::from(length) > super::MAX_LENGTH, "code too long")?;
        space += 1 << (super::MAX_LENGTH - u32::from(length));
    }
    if space == 1 << super::MAX_LENGTH { Ok(()) } else { Err(Corrupt("incomplete code")) }
}
