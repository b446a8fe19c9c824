//! The two checksums that containers keep of tensors: CRC-32 in zips, and CRC-32C (Castagnoli) in bundles of TensorFlow.

use crc::{CRC_32_ISCSI, Crc, Table};

static CASTAGNOLI: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISCSI);

/// The CRC-32C of bytes whose first part has `crc`.
pub fn castagnoli(crc: u32, bytes: &[u8]) -> u32 {
    // The algorithm's register before the final inversion, whose bits the crate takes in the usual order.
    let mut digest = CASTAGNOLI.digest_with_initial((!crc).reverse_bits());
    digest.update(bytes);
    digest.finalize()
}

/// A difference of two CRC-32Cs after as many bytes as `tail`, the same behind both.
pub fn castagnoli_behind(difference: u32, tail: u64) -> u32 {
    // x^(8 * tail), by squares of x^8.
    let (mut power, mut left, mut square) = (1 << 31, tail, 1 << 23);
    while left > 0 {
        if left & 1 == 1 {
            power = product(power, square);
        }
        square = product(square, square);
        left >>= 1;
    }
    product(difference, power)
}

/// The product of two remainders, whose highest bit is the coefficient of 1.
fn product(a: u32, mut b: u32) -> u32 {
    const POLYNOMIAL: u32 = CRC_32_ISCSI.poly.reverse_bits();
    let mut product = 0;
    for bit in (0..32).rev() {
        product ^= b * ((a >> bit) & 1);
        b = (b >> 1) ^ (POLYNOMIAL * (b & 1));
    }
    product
}

/// A difference of two CRC-32s after as many bytes as `tail`, the same behind both.
pub fn crc32_behind(difference: u32, tail: u64) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(difference);
    hasher.combine(&crc32fast::Hasher::new_with_initial_len(0, tail));
    hasher.finalize()
}

/// A checksum that is being computed, of the kind that a container keeps.
#[derive(Clone, Debug)]
pub struct Checksum {
    is_castagnoli: bool,
    crc: u32,
    len: u64,
}

impl Checksum {
    /// Of no bytes yet.
    pub fn new(is_castagnoli: bool) -> Checksum {
        Checksum { is_castagnoli, crc: 0, len: 0 }
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.len += bytes.len() as u64;
        self.crc = if self.is_castagnoli {
            castagnoli(self.crc, bytes)
        } else {
            let mut hasher = crc32fast::Hasher::new_with_initial(self.crc);
            hasher.update(bytes);
            hasher.finalize()
        };
    }

    /// Adds the bytes of another checksum of the same kind.
    pub fn combine(&mut self, next: &Checksum) {
        let behind = if self.is_castagnoli { castagnoli_behind } else { crc32_behind };
        self.crc = behind(self.crc, next.len) ^ next.crc;
        self.len += next.len;
    }

    /// The checksum of all bytes.
    pub fn finalize(&self) -> u32 {
        self.crc
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_checksums_come_out() {
        assert_eq!(castagnoli(0, b"123456789"), 0xe306_9283);
        assert_eq!(castagnoli(0, &[0; 32]), 0x8a91_36aa);
        assert_eq!(castagnoli(0, &[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32fast::hash(b"123456789"), 0xcbf4_3926);
    }

    proptest! {
        #[test]
        fn parts_make_a_whole(bytes: Vec<u8>, cut: prop::sample::Index, is_castagnoli: bool) {
            let cut = cut.index(bytes.len() + 1);
            let of = |bytes: &[u8]| {
                let mut checksum = Checksum::new(is_castagnoli);
                checksum.update(bytes);
                checksum
            };
            let (mut first, whole) = (of(&bytes[..cut]), of(&bytes));
            let mut again = first.clone();
            again.update(&bytes[cut..]);
            first.combine(&of(&bytes[cut..]));
            prop_assert_eq!([first.finalize(), again.finalize()], [whole.finalize(); 2]);
        }
    }
}
