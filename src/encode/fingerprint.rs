//! A few bytes of a file that tell it from others: its lineage's states are as long and have the same tensors.

use std::io;
use std::ops::Range;

use codec::hash::Xxh3;
use formats::ReadAt;

/// A file is recognised by this many samples of this size: its first and last bytes, where a torch zip has its
/// checksums, and 62 between. 256 KiB are read in no time, and differ wherever something was trained.
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = 4096;

/// The sampled ranges of a file of this length, ascending and disjoint.
fn ranges(len: u64) -> impl Iterator<Item = Range<u64>> {
    let place = move |at: u64| (u128::from(len) * u128::from(at) / u128::from(SAMPLES)) as u64;
    (0..SAMPLES).map(move |at| match at + 1 == SAMPLES {
        true => place(at).max(len.saturating_sub(SAMPLE_BYTES))..len,
        false => place(at)..place(at + 1).min(place(at) + SAMPLE_BYTES),
    })
}

/// The samples of a file, one after the other.
pub(crate) fn read(file: &dyn ReadAt) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for range in ranges(file.size()) {
        let at = bytes.len();
        bytes.resize(at + (range.end - range.start) as usize, 0);
        file.read_exact_at(&mut bytes[at..], range.start)?;
    }
    Ok(bytes)
}

/// The hash of the samples of a file that comes by in pieces, from its first byte to its last.
pub(crate) struct Sampler {
    /// The remaining ranges, the next one last.
    left: Vec<Range<u64>>,
    hash: Xxh3,
}

impl Sampler {
    pub(crate) fn new(len: u64) -> Sampler {
        let mut left: Vec<Range<u64>> = ranges(len).collect();
        left.reverse();
        Sampler { left, hash: Xxh3::default() }
    }

    /// The next piece, which begins at `offset`.
    pub(crate) fn update(&mut self, offset: u64, bytes: &[u8]) {
        let end = offset + bytes.len() as u64;
        while let Some(range) = self.left.pop_if(|range| range.start < end) {
            let to = range.end.min(end);
            self.hash.update(&bytes[(range.start - offset) as usize..(to - offset) as usize]);
            if to < range.end {
                // The rest of it comes with the next piece.
                self.left.push(to..range.end);
            }
        }
    }

    /// The fingerprint, as it stands in an object's header.
    pub(crate) fn finish(self) -> u64 {
        self.hash.digest()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn samples_in_pieces_are_those_of_the_file() {
        for len in [1u64, 63, 64, 4096, 70_000, 262_144, 262_145, 3_000_001] {
            let bytes: Vec<u8> = (0..len).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 7) as u8).collect();
            let path = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(path.path(), &bytes).unwrap();
            let whole = read(&File::open(path.path()).unwrap()).unwrap();
            assert!(whole.len() as u64 <= len.min(SAMPLES * SAMPLE_BYTES));
            assert!(len > SAMPLES * SAMPLE_BYTES || whole.len() as u64 == len);
            for piece in [1000, 4096, 524_288] {
                let mut sampler = Sampler::new(len);
                bytes.chunks(piece).enumerate().for_each(|(n, run)| sampler.update((n * piece) as u64, run));
                assert_eq!(sampler.finish(), xxhash_rust::xxh3::xxh3_64(&whole), "{len} in {piece}");
            }
        }
    }
}
