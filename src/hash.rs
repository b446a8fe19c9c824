//! xxh3, which everything on the device is checked by: against damage, not against malice. In one place, so that what computes it can be
//! exchanged; this one picks the processor's widest instructions when the program runs.

use std::hash::Hasher as _;

use twox_hash::{XxHash3_64, XxHash3_128};

/// xxh3-64 of some bytes.
pub(crate) fn xxh3_64(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// xxh3-64 of bytes that come in pieces.
pub(crate) struct Xxh3(XxHash3_64);

impl Xxh3 {
    /// Of no bytes yet.
    pub(crate) fn new() -> Xxh3 {
        Xxh3(XxHash3_64::new())
    }

    /// The next bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// Of all that came.
    pub(crate) fn digest(&self) -> u64 {
        self.0.finish()
    }
}

/// xxh3-128 of bytes that come in pieces: of whole files.
pub(crate) struct Xxh3Of128(XxHash3_128);

impl Xxh3Of128 {
    /// Of no bytes yet.
    pub(crate) fn new() -> Xxh3Of128 {
        Xxh3Of128(XxHash3_128::new())
    }

    /// The next bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// Of all that came.
    pub(crate) fn digest(&self) -> u128 {
        self.0.finish_128()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// What is on the device was hashed by another program, and will be read by others.
        #[test]
        fn hashes_are_those_of_another_implementation(
            bytes in prop_oneof![prop::collection::vec(any::<u8>(), 0..300), prop::collection::vec(any::<u8>(), 0..9000)],
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        ) {
            prop_assert_eq!(xxh3_64(&bytes), xxhash_rust::xxh3::xxh3_64(&bytes));
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).chain([0, bytes.len()]).collect();
            cuts.sort_unstable();
            let (mut narrow, mut wide) = (Xxh3::new(), Xxh3Of128::new());
            for ends in cuts.windows(2) {
                narrow.update(&bytes[ends[0]..ends[1]]);
                wide.update(&bytes[ends[0]..ends[1]]);
            }
            prop_assert_eq!(narrow.digest(), xxhash_rust::xxh3::xxh3_64(&bytes));
            prop_assert_eq!(wide.digest(), xxhash_rust::xxh3::xxh3_128(&bytes));
        }
    }
}
