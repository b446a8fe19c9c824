//! The last stage: codes of a fixed width and numbers, as bytes. Huffman codes are those of [`codec::entropy`]; those
//! of bins are in [`super::levels`].

use codec::Corrupt;
use codec::float::{Bf16, F16, Float};

/// True if all are finite. Without a branch per value, which would take as long as encoding.
pub(super) fn are_finite(values: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    values.iter().fold(0, |largest, value| (value.to_bits() & EXPONENT).max(largest)) < EXPONENT
}

/// Bytes of this many codes of `width` bits. Eight of them fill `width` bytes, the first in the lowest bits.
pub(super) fn size(codes: usize, width: u32) -> usize {
    (codes / 8) * width as usize + (codes % 8 * width as usize).div_ceil(8)
}

/// Appends the codes, each below 2^`width`; `width` is 1 to 8.
pub(super) fn put_codes(codes: &[u8], width: u32, out: &mut Vec<u8>) {
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
pub(super) fn take_codes(payload: &mut &[u8], width: u32, codes: &mut [u8]) -> Result<(), Corrupt> {
    let packed = take_bytes(payload, size(codes.len(), width))?;
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

/// Takes `count` bytes off the front of `payload`.
fn take_bytes<'a>(payload: &mut &'a [u8], count: usize) -> Result<&'a [u8], Corrupt> {
    payload.split_off(..count).ok_or(Corrupt("truncated payload"))
}

/// Takes one byte off the front of `payload`.
pub(super) fn take_byte(payload: &mut &[u8]) -> Result<u8, Corrupt> {
    Ok(take_bytes(payload, 1)?[0])
}

/// Takes `count` words of `N` bytes off the front of `payload`.
pub(super) fn take_words<'a, const N: usize>(payload: &mut &'a [u8], count: usize) -> Result<&'a [[u8; N]], Corrupt> {
    Ok(take_bytes(payload, count.saturating_mul(N))?.as_chunks().0)
}

/// Appends the values' bits.
pub(super) fn put_floats(values: &[f32], out: &mut Vec<u8>) {
    out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

/// Takes `count` values off the front of `payload`; none may be NaN or infinite.
pub(super) fn take_floats(payload: &mut &[u8], count: usize) -> Result<Vec<f32>, Corrupt> {
    finite(take_words(payload, count)?.iter().map(|&word| f32::from_le_bytes(word)).collect())
}

fn finite(values: Vec<f32>) -> Result<Vec<f32>, Corrupt> {
    if are_finite(&values) { Ok(values) } else { Err(Corrupt("value that is not finite")) }
}

/// The narrowest type that holds some values exactly: those of a narrower type were widened before.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Narrow {
    Not,
    Bf16,
    F16,
}

impl Narrow {
    pub(super) fn of(values: &[f32]) -> Narrow {
        let holds = |narrow: Narrow| values.iter().all(|&value| narrow.round(value) == value);
        [Narrow::Bf16, Narrow::F16].into_iter().find(|narrow| holds(*narrow)).unwrap_or(Narrow::Not)
    }

    /// The nearest value of the type.
    pub(super) fn round(self, value: f32) -> f32 {
        match self {
            Narrow::Not => value,
            Narrow::Bf16 => Bf16::widen(Bf16::round(value.into())) as f32,
            Narrow::F16 => F16::widen(F16::round(value.into())) as f32,
        }
    }
}

/// Appends a byte for the narrowest type that holds all values, then these in that type.
pub(super) fn put_exact(values: &[f32], out: &mut Vec<u8>) {
    let narrow = Narrow::of(values);
    out.push(narrow as u8);
    match narrow {
        Narrow::Not => put_floats(values, out),
        Narrow::Bf16 => values.iter().for_each(|&value| out.extend(Bf16::round(value.into()))),
        Narrow::F16 => values.iter().for_each(|&value| out.extend(F16::round(value.into()))),
    }
}

/// Takes `count` values of [`put_exact`] off the front of `payload`.
pub(super) fn take_exact(payload: &mut &[u8], count: usize) -> Result<Vec<f32>, Corrupt> {
    match take_byte(payload)? {
        0 => take_floats(payload, count),
        1 => finite(take_words(payload, count)?.iter().map(|&word| Bf16::widen(word) as f32).collect()),
        2 => finite(take_words(payload, count)?.iter().map(|&word| F16::widen(word) as f32).collect()),
        _ => Err(Corrupt("type of exact values")),
    }
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
            put_codes(&codes, width, &mut packed);
            prop_assert_eq!(packed.len(), (codes.len() * width as usize).div_ceil(8));
            let mut again = vec![0; codes.len()];
            let mut rest = packed.as_slice();
            take_codes(&mut rest, width, &mut again).unwrap();
            prop_assert_eq!(&again, &codes);
            prop_assert!(rest.is_empty());
            if !packed.is_empty() {
                prop_assert!(take_codes(&mut &packed[1..], width, &mut again).is_err());
            }
        }
    }
}
