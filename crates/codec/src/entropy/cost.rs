//! The cost of symbols, estimated from their counts, to compare encodings.

use super::huffman;

/// Order-0 entropy of these counts, in bits for all symbols together.
pub(crate) fn entropy_bits(counts: &[u32]) -> f64 {
    let total: f64 = counts.iter().map(|&c| f64::from(c)).sum();
    counts.iter().filter(|&&c| c > 0).map(|&c| f64::from(c) * (total / f64::from(c)).log2()).sum()
}

/// Bits of blocks of `k` independent digits with these frequencies, in their block code.
pub(super) fn block_bits(digits: &[u32], k: u32, total: f64) -> f64 {
    // Expected count of each word, built digit by digit.
    let mut words = vec![total / f64::from(k)];
    for _ in 0..k {
        words =
            digits.iter().flat_map(|&count| words.iter().map(move |word| word * f64::from(count) / total)).collect();
    }
    let mut counts = [0; 256];
    counts.iter_mut().zip(words).for_each(|(count, word)| *count = word.round() as u32);
    huffman_bits(&counts)
}

/// Bits of the symbols with these counts in a Huffman code.
pub(super) fn huffman_bits(counts: &[u32; 256]) -> f64 {
    let lengths = huffman::code_lengths(counts, huffman::MAX_LENGTH);
    let used = counts.iter().filter(|&&count| count > 0).count();
    let body: f64 = counts.iter().zip(lengths).map(|(&count, l)| f64::from(count) * f64::from(l)).sum();
    body + header_bits(used)
}

/// Estimated bits of a nested payload with these counts.
pub(super) fn literal_bits(counts: &[u32; 256]) -> f64 {
    let total: u32 = counts.iter().sum();
    let most = counts.iter().copied().max().unwrap_or(0);
    let used = counts.iter().filter(|&&count| count > 0).count();
    match used {
        0 => 0.0,
        1 => 16.0,
        _ => {
            let total = f64::from(total);
            entropy_bits(counts) + total * redundancy(f64::from(most) / total) + header_bits(used)
        }
    }
}

/// Estimated bits of a table of code lengths for this many words.
pub(super) fn header_bits(words: usize) -> f64 {
    60.0 + 2.3 * words as f64
}

/// Bits per word that Huffman codes lose on top of the entropy, given the probability of the most frequent word. A
/// frequent word pays a whole bit; the rest pay about .03, measured on Gaussian and Laplacian symbols.
fn redundancy(p: f64) -> f64 {
    if p > 0.5 { 1.0 - flag_bits(p) + (1.0 - p) * 0.03 } else { 0.03 }
}

/// Entropy of a flag that is set with probability `p`.
pub(super) fn flag_bits(p: f64) -> f64 {
    if p <= 0.0 || p >= 1.0 { 0.0 } else { -p * p.log2() - (1.0 - p) * (1.0 - p).log2() }
}
