//! Anchors: short pieces of archived bytes that are looked for at every place of a later file, by a rolling hash.
//!
//! Of floats, an anchor takes the highest byte of each element: sign and exponent stay when a value moves a little. So
//! a tensor is found at its new place although training changed every element.

use std::collections::HashMap;
use std::io;

use rayon::prelude::*;

use crate::codec::Dtype;
use crate::container::ReadAt;

/// Distance of anchors, bytes: 128 of a tile, of which a few survive when a tenth of the highest bytes change.
const EVERY: usize = 4096;
/// Bytes of an anchor: of text, and of floats, each of which has one bit of sign and about two of exponent.
const OF_BYTES: usize = 32;
const OF_ELEMENTS: usize = 24;
/// Different bytes of an anchor at least: zeros and constants are found everywhere.
const DIFFERENT_BYTES: usize = 8;
const DIFFERENT_ELEMENTS: usize = 3;
/// Bytes that a thread searches at once.
const SEGMENT: usize = 1 << 20;
/// Finds in a segment at most; a file that repeats itself has more, and shows nothing.
const MOST_FINDS: usize = 4096;
/// Segments searched before their finds are counted.
const SEGMENTS: usize = 64;
/// Different counts at most, whatever is in the file: 32 MB.
const MOST_COUNTS: usize = 1 << 20;
/// Bits of the filter per anchor, as power of two, and at most: 2 MiB.
const FILTER: u32 = 6;
const LARGEST_FILTER: u32 = 24;
/// Multiplier of the rolling hash; any large odd number does.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// How often a run was found at a distance from its old place.
pub(super) type Counts = HashMap<(usize, i64), u32>;

/// A piece of archived bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Anchor {
    hash: u64,
    /// Place of its first byte in the archived file.
    at: u64,
    /// Distance of its bytes.
    stride: usize,
}

/// Bytes of an anchor with this distance between them.
const fn length(stride: usize) -> usize {
    if stride == 1 { OF_BYTES } else { OF_ELEMENTS }
}

/// The anchors of archived bytes that lie at `offset` of their file.
pub(super) fn anchors(dtype: Dtype, bytes: &[u8], offset: u64) -> Vec<Anchor> {
    let stride = dtype.size();
    let different = if stride == 1 { DIFFERENT_BYTES } else { DIFFERENT_ELEMENTS };
    let first = (0..bytes.len()).step_by(EVERY.next_multiple_of(stride)).map(|at| at + stride - 1);
    let anchor = |at: usize| {
        let end = at + (length(stride) - 1) * stride;
        let piece: Vec<u8> = bytes.get(at..=end)?.iter().copied().step_by(stride).collect();
        let mut seen = piece.clone();
        seen.sort_unstable();
        seen.dedup();
        let hash = piece.iter().fold(0, |hash, &byte| add(hash, byte));
        (seen.len() >= different).then_some(Anchor { hash, at: offset + at as u64, stride })
    };
    first.filter_map(anchor).collect()
}

/// How many of the anchors of `of`, archived bytes at `offset` of their file, are in the same place of `bytes`.
pub(super) fn in_place(anchors: &[Anchor], of: &[u8], bytes: &[u8], offset: u64) -> usize {
    let is_there = |anchor: &&Anchor| {
        let first = (anchor.at - offset) as usize;
        let places = (0..length(anchor.stride)).map(|number| first + number * anchor.stride);
        let mut pairs = places.map(|place| (of.get(place), bytes.get(place)));
        pairs.all(|(one, other)| one.is_some() && one == other)
    };
    anchors.iter().filter(is_there).count()
}

fn add(hash: u64, byte: u8) -> u64 {
    hash.wrapping_mul(MULTIPLIER).wrapping_add(u64::from(byte) + 1)
}

/// Searches a file for the anchors of runs. Takes one pass over the file for each width of elements, on all threads.
pub(super) fn search(source: &(dyn ReadAt + Sync), anchors: &[(usize, Vec<Anchor>)]) -> io::Result<Counts> {
    let mut counts = Counts::new();
    let mut strides: Vec<usize> = anchors.iter().flat_map(|(_, of)| of.iter().map(|anchor| anchor.stride)).collect();
    strides.sort_unstable();
    strides.dedup();
    for stride in strides {
        let table = Table::of(stride, anchors);
        let starts: Vec<u64> = (0..source.size()).step_by(SEGMENT).collect();
        for starts in starts.chunks(SEGMENTS) {
            let found: io::Result<Vec<_>> = starts.par_iter().map(|&start| table.find(source, start)).collect();
            for (run, distance) in found?.into_iter().flatten() {
                if counts.len() < MOST_COUNTS || counts.contains_key(&(run, distance)) {
                    *counts.entry((run, distance)).or_default() += 1;
                }
            }
        }
    }
    Ok(counts)
}

/// The anchors of one width.
struct Table {
    stride: usize,
    /// The run and the place of each; none of one that occurs twice.
    by_hash: HashMap<u64, Option<(usize, u64)>>,
    /// A bit for some bits of each hash: most places need no look into the map.
    filter: Vec<u64>,
    bits: u32,
}

impl Table {
    fn of(stride: usize, anchors: &[(usize, Vec<Anchor>)]) -> Table {
        let mut by_hash = HashMap::new();
        for (run, anchor) in anchors.iter().flat_map(|(run, of)| of.iter().map(move |anchor| (*run, anchor))) {
            if anchor.stride == stride {
                let only = Some((run, anchor.at));
                by_hash.entry(anchor.hash).and_modify(|known| *known = None).or_insert(only);
            }
        }
        let bits = ((by_hash.len() as u64).next_power_of_two().ilog2() + FILTER).min(LARGEST_FILTER);
        let mut table = Table { stride, filter: vec![0; 1usize << (bits - 6)], bits, by_hash };
        for hash in table.by_hash.keys() {
            let bit = place(*hash, bits);
            table.filter[bit / 64] |= 1 << (bit % 64);
        }
        table
    }

    /// The runs whose anchors begin in a segment, each with its distance from its old place.
    fn find(&self, source: &dyn ReadAt, start: u64) -> io::Result<Vec<(usize, i64)>> {
        let (stride, length) = (self.stride, length(self.stride));
        let end = source.size().min(start + (SEGMENT + (length - 1) * stride) as u64);
        let mut bytes = vec![0; end.saturating_sub(start) as usize];
        source.read_exact_at(&mut bytes, start)?;
        // What the oldest byte counts once it leaves.
        let oldest = (0..length).fold(1u64, |power, _| power.wrapping_mul(MULTIPLIER));
        let mut found = Vec::new();
        for first in 0..stride {
            let mut hash = 0u64;
            for (number, at) in (first..bytes.len()).step_by(stride).enumerate() {
                hash = add(hash, bytes[at]);
                if number >= length {
                    let gone = bytes[at - length * stride];
                    hash = hash.wrapping_sub(oldest.wrapping_mul(u64::from(gone) + 1));
                }
                let bit = place(hash, self.bits);
                if self.filter[bit / 64] >> (bit % 64) & 1 == 0 || number + 1 < length {
                    continue;
                }
                if let Some((run, was)) = self.by_hash.get(&hash).copied().flatten() {
                    let is = start + (at - (length - 1) * stride) as u64;
                    found.push((run, is.wrapping_sub(was) as i64));
                    if found.len() == MOST_FINDS {
                        return Ok(found);
                    }
                }
            }
        }
        Ok(found)
    }
}

/// The filter's bit for a hash: the high bits depend on all bytes.
fn place(hash: u64, bits: u32) -> usize {
    (hash.wrapping_mul(MULTIPLIER) >> (64 - bits)) as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::hash::xxh3_64;

    fn noise(bytes: usize, seed: u64) -> Vec<u8> {
        (0..bytes as u64 / 8).flat_map(|at| xxh3_64(&[seed, at].map(u64::to_le_bytes).concat()).to_le_bytes()).collect()
    }

    /// The commonest distance of each run.
    fn distances(counts: &Counts, runs: usize) -> Vec<Option<i64>> {
        let best = |run: usize| counts.iter().filter(|((of, _), _)| *of == run).max_by_key(|(_, count)| **count);
        (0..runs).map(|run| best(run).map(|((_, distance), _)| *distance)).collect()
    }

    #[test]
    fn floats_that_moved_and_changed_are_found() {
        let value = |at: u64| ((xxh3_64(&at.to_le_bytes()) >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.05;
        let old: Vec<u8> = (0..200_000).flat_map(|at| value(at).to_le_bytes()).collect();
        let new = (0..200_000).flat_map(|at| (value(at) + (at % 17) as f32 * 1e-5).to_le_bytes());
        let file: Vec<u8> = std::iter::repeat_n(b'h', 3013).chain(new).collect();
        let of = anchors(Dtype::F32, &old, 1000);
        let counts = search(&file, &[(0, of.clone())]).unwrap();
        assert_eq!(distances(&counts, 1), [Some(2013)]);
        assert!(counts[&(0, 2013)] as usize > of.len() / 4, "{} of {}", counts[&(0, 2013)], of.len());
        assert!(in_place(&of, &old, &file[3013..], 1000) > of.len() / 4);
        assert!(in_place(&of, &old, &file[3017..], 1000) <= 2);
    }

    #[test]
    fn constants_and_what_repeats_are_no_anchors() {
        assert_eq!(anchors(Dtype::U8, &[0; 100_000], 0), []);
        assert_eq!(anchors(Dtype::F32, &1.0f32.to_le_bytes().repeat(10_000), 0), []);
        assert_eq!(anchors(Dtype::F64, &[1, 2, 3], 0), []);
        // The same page over and over: its anchors say nothing of the place.
        let page = noise(4096, 1).repeat(20);
        assert!(search(&page, &[(0, anchors(Dtype::U8, &page, 0))]).unwrap().is_empty());
    }

    proptest! {
        #[test]
        fn every_piece_is_found_at_its_new_place(
            cuts in prop::collection::vec((any::<prop::sample::Index>(), 0..5000usize), 0..5),
            seed: u64,
        ) {
            const RUN: usize = 128 << 10;
            let old = noise(12 * RUN, seed);
            let mut cuts: Vec<(usize, usize)> = cuts.iter().map(|(at, len)| (at.index(old.len()), *len)).collect();
            cuts.sort_unstable();
            let (mut file, mut done) = (Vec::new(), 0);
            for (at, len) in &cuts {
                file.extend_from_slice(&old[done..*at]);
                file.extend(noise(*len, !seed));
                done = *at;
            }
            file.extend_from_slice(&old[done..]);
            let anchors: Vec<(usize, Vec<Anchor>)> = old.chunks(RUN).enumerate()
                .map(|(run, bytes)| (run, anchors(Dtype::U8, bytes, (run * RUN) as u64)))
                .collect();
            let found = distances(&search(&file, &anchors).unwrap(), 12);
            for (run, found) in found.into_iter().enumerate() {
                let (start, end) = (run * RUN, (run + 1) * RUN);
                if cuts.iter().any(|(at, _)| (start..end).contains(at)) {
                    continue;
                }
                let inserted: usize = cuts.iter().filter(|(at, _)| *at <= start).map(|(_, len)| len / 8 * 8).sum();
                prop_assert_eq!(found, Some(inserted as i64), "run {}", run);
            }
        }
    }
}
