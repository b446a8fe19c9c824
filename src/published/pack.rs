//! Codes of a fixed width, packed, for the systems without an entropy code.
//!
//! Eight codes of w bits fill w bytes, the first code in the lowest bits.

use super::Corrupt;

/// Bytes of this many codes of `width` bits.
pub(super) fn size(codes: usize, width: u32) -> usize {
    (codes / 8) * width as usize + (codes % 8 * width as usize).div_ceil(8)
}

/// Appends the codes, each below 2^`width`; `width` is 1 to 8.
pub(super) fn put(codes: &[u8], width: u32, out: &mut Vec<u8>) {
    let bytes = width as usize;
    out.reserve(size(codes.len(), width));
    if width == 8 {
        return out.extend_from_slice(codes);
    }
    let (eights, tail) = codes.as_chunks::<8>();
    for eight in eights {
        out.extend_from_slice(&gather(eight, width).to_le_bytes()[..bytes]);
    }
    let mut last = [0; 8];
    last[..tail.len()].copy_from_slice(tail);
    out.extend_from_slice(&gather(&last, width).to_le_bytes()[..size(tail.len(), width)]);
}

#[inline(always)]
fn gather(codes: &[u8; 8], width: u32) -> u64 {
    codes.iter().rev().fold(0, |word, &code| word << width | u64::from(code))
}

/// Takes codes off the front of `payload`, as many as `codes` has room for.
pub(super) fn take(payload: &mut &[u8], width: u32, codes: &mut [u8]) -> Result<(), Corrupt> {
    let (packed, rest) = payload.split_at_checked(size(codes.len(), width)).ok_or(Corrupt("truncated codes"))?;
    *payload = rest;
    if width == 8 {
        codes.copy_from_slice(packed);
        return Ok(());
    }
    let mask = (1u64 << width) - 1;
    for (codes, packed) in codes.chunks_mut(8).zip(packed.chunks(width as usize)) {
        let mut word = [0; 8];
        word[..packed.len()].copy_from_slice(packed);
        let word = u64::from_le_bytes(word);
        for (i, code) in codes.iter_mut().enumerate() {
            *code = (word >> (i as u32 * width) & mask) as u8;
        }
    }
    Ok(())
}

/// Appends the values' bits.
pub(super) fn put_floats(values: &[f32], out: &mut Vec<u8>) {
    out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

/// Takes `count` values off the front of `payload`; none may be NaN or infinite.
pub(super) fn take_floats(payload: &mut &[u8], count: usize) -> Result<Vec<f32>, Corrupt> {
    let bytes = count.checked_mul(4).ok_or(Corrupt("truncated values"))?;
    let (floats, rest) = payload.split_at_checked(bytes).ok_or(Corrupt("truncated values"))?;
    *payload = rest;
    let values: Vec<f32> = floats.as_chunks::<4>().0.iter().map(|&word| f32::from_le_bytes(word)).collect();
    if values.iter().all(|value| value.is_finite()) { Ok(values) } else { Err(Corrupt("value that is not finite")) }
}

/// Takes one byte off the front of `payload`.
pub(super) fn take_byte(payload: &mut &[u8]) -> Result<u8, Corrupt> {
    let (&byte, rest) = payload.split_first().ok_or(Corrupt("truncated payload"))?;
    *payload = rest;
    Ok(byte)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn codes_come_back(mut codes in prop::collection::vec(any::<u8>(), 0..70), width in 1u32..=8) {
            codes.iter_mut().for_each(|code| *code &= ((1u16 << width) - 1) as u8);
            let mut packed = Vec::new();
            put(&codes, width, &mut packed);
            prop_assert_eq!(packed.len(), (codes.len() * width as usize).div_ceil(8));
            let mut again = vec![0; codes.len()];
            let mut rest = packed.as_slice();
            take(&mut rest, width, &mut again).unwrap();
            prop_assert_eq!(&again, &codes);
            prop_assert!(rest.is_empty());
            if !packed.is_empty() {
                prop_assert!(take(&mut &packed[1..], width, &mut again).is_err());
            }
        }
    }
}
