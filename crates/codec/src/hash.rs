//! xxh3, the checksum of everything on the device: it detects damage, not malice. And SHA-256, by which other programs
//! identify a file's bytes. They are in one place so that the implementation can be replaced. It picks the processor's
//! best instructions at run time. `checksum` has the CRCs that containers keep.

mod checksum;

use std::hash::Hasher as _;

use sha2::Digest as _;
use twox_hash::{XxHash3_64, XxHash3_128};

pub use checksum::Checksum;
pub use checksum::{castagnoli, castagnoli_behind, crc32_behind};

/// xxh3-64 of some bytes.
pub fn xxh3_64(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// xxh3-64 of consecutive pieces.
#[derive(Default)]
pub struct Xxh3(XxHash3_64);

impl Xxh3 {
    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The hash of all bytes so far.
    pub fn digest(&self) -> u64 {
        self.0.finish()
    }
}

/// xxh3-128 of consecutive pieces, for whole files.
#[derive(Default)]
pub struct Xxh3Of128(XxHash3_128);

impl Xxh3Of128 {
    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The hash of all bytes so far.
    pub fn digest(&self) -> u128 {
        self.0.finish_128()
    }
}

/// SHA-256 of consecutive pieces.
#[derive(Default)]
pub struct Sha256(sha2::Sha256);

impl Sha256 {
    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The hash of all bytes.
    pub fn digest(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

/// SHA-256 of some bytes.
pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::default();
    hash.update(bytes);
    hash.digest()
}

/// A digest in lower-case hexadecimal, as programs print it.
pub fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sha256_is_as_the_standard_has_it() {
        let of = |message: &[u8]| hex(&sha256(message));
        assert_eq!(of(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!(of(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        let two_blocks = b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
        assert_eq!(of(two_blocks), "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
        let million = vec![b'a'; 1_000_000];
        assert_eq!(of(&million), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    }

    proptest! {
        /// Other programs hashed the bytes on the device, and others will read them.
        #[test]
        fn hashes_are_those_of_another_implementation(
            bytes in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..300),
                prop::collection::vec(any::<u8>(), 0..9000),
            ],
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        ) {
            prop_assert_eq!(xxh3_64(&bytes), xxhash_rust::xxh3::xxh3_64(&bytes));
            let mut cuts: Vec<usize> =
                cuts.iter().map(|cut| cut.index(bytes.len() + 1)).chain([0, bytes.len()]).collect();
            cuts.sort_unstable();
            let (mut narrow, mut wide) = (Xxh3::default(), Xxh3Of128::default());
            for ends in cuts.windows(2) {
                narrow.update(&bytes[ends[0]..ends[1]]);
                wide.update(&bytes[ends[0]..ends[1]]);
            }
            prop_assert_eq!(narrow.digest(), xxhash_rust::xxh3::xxh3_64(&bytes));
            prop_assert_eq!(wide.digest(), xxhash_rust::xxh3::xxh3_128(&bytes));
        }
    }
}
