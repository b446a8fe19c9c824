//! A single bit, or byte, that flipped: with a checksum of 64 bits there is one way only to put it right, and it can
//! be tried.

use std::ops::Range;

use rayon::prelude::*;

/// Bytes that may be hashed to find it: a few seconds of one core.
const MOST_HASHED: u64 = 30_000_000_000;

/// Puts one flipped bit right, or one wrong byte where `bytes` are short enough to try, in `range`; everything is to
/// be as `is_right` says. Memory: one copy for each thread.
pub(super) fn mend(bytes: &[u8], range: Range<usize>, is_right: &(dyn Fn(&[u8]) -> bool + Sync)) -> Option<Vec<u8>> {
    let cost = |ways: u64| ways.saturating_mul(range.len() as u64).saturating_mul(bytes.len() as u64);
    let bits = || (0..8).map(|bit| 1u8 << bit);
    if cost(8) > MOST_HASHED {
        return None;
    }
    if let Some(mended) = one_of(bytes, range.clone(), &bits, is_right) {
        return Some(mended);
    }
    let others = || (1..=u8::MAX).filter(|change| !change.is_power_of_two());
    if cost(255) > MOST_HASHED { None } else { one_of(bytes, range, &others, is_right) }
}

fn one_of<I: Iterator<Item = u8>>(
    bytes: &[u8],
    range: Range<usize>,
    changes: &(dyn Fn() -> I + Sync),
    is_right: &(dyn Fn(&[u8]) -> bool + Sync),
) -> Option<Vec<u8>> {
    range
        .into_par_iter()
        .with_min_len(64)
        .map_with(bytes.to_vec(), |copy, at| {
            let found = changes().find(|change| {
                copy[at] = bytes[at] ^ change;
                is_right(copy)
            });
            let mended = found.map(|_| copy.clone());
            copy[at] = bytes[at];
            mended
        })
        .find_map_any(|mended| mended)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::xxh3_64;

    #[test]
    fn one_bit_or_byte_is_put_right_and_two_are_not() {
        let right: Vec<u8> = (0..400u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let hash = xxh3_64(&right);
        let is_right = |bytes: &[u8]| xxh3_64(bytes) == hash;
        for at in [0, 1, 199, 399] {
            for change in [1, 0x80, 0xff, 0x11] {
                let mut wrong = right.clone();
                wrong[at] ^= change;
                assert_eq!(mend(&wrong, 0..wrong.len(), &is_right).as_ref(), Some(&right));
                assert_eq!(mend(&wrong, at + 1..wrong.len(), &is_right), None);
                wrong[(at + 7) % 400] ^= 4;
                assert_eq!(mend(&wrong, 0..wrong.len(), &is_right), None);
            }
        }
    }
}
