//! The last stage: codes of a fixed width and numbers, as bytes. Huffman codes are those of [`codec::entropy`]; those
//! of bins are in [`super::levels`].

use codec::float::{Bf16, F16, Float};
use codec::{Corrupt, Dtype};

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
    out.extend(narrowed(Dtype::F32, values));
}

/// Takes `count` values off the front of `payload`; none may be NaN or infinite.
pub(super) fn take_floats(payload: &mut &[u8], count: usize) -> Result<Vec<f32>, Corrupt> {
    take_values(payload, Dtype::F32, count)
}

fn take_values(payload: &mut &[u8], dtype: Dtype, count: usize) -> Result<Vec<f32>, Corrupt> {
    let values = widened(dtype, take_bytes(payload, count.saturating_mul(dtype.size()))?);
    if are_finite(&values) { Ok(values) } else { Err(Corrupt("value that is not finite")) }
}

/// The values of whole elements of a type that f32 holds, exactly.
pub(super) fn widened(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::F16 => F16::elements(bytes).iter().map(|&element| F16::single(element)).collect(),
        Dtype::Bf16 => Bf16::elements(bytes).iter().map(|&element| Bf16::single(element)).collect(),
        _ => bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect(),
    }
}

/// The elements of such a type that are nearest to the values, ties to even.
pub(super) fn narrowed(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F16 => values.iter().map(|&value| F16::of_single(value)).collect::<Vec<_>>().into_flattened(),
        Dtype::Bf16 => values.iter().map(|&value| Bf16::of_single(value)).collect::<Vec<_>>().into_flattened(),
        _ => values.iter().map(|value| value.to_le_bytes()).collect::<Vec<_>>().into_flattened(),
    }
}

/// A value rounded to such a type.
pub(super) fn rounded(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::F16 => F16::single(F16::of_single(value)),
        Dtype::Bf16 => Bf16::single(Bf16::of_single(value)),
        _ => value,
    }
}

/// The types that f32 holds. In a payload each has its place as its number.
pub(super) const TYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// The narrowest type that holds all values exactly, with its number: those of a narrower type were widened before.
pub(super) fn narrowest(values: &[f32]) -> (u8, Dtype) {
    let holds = |dtype: Dtype| values.iter().all(|&value| rounded(dtype, value) == value);
    let found = (0..).zip(TYPES).skip(1).find(|(_, dtype)| holds(*dtype));
    found.unwrap_or((0, Dtype::F32))
}

/// Appends a byte for the narrowest type that holds all values, then these in that type.
pub(super) fn put_exact(values: &[f32], out: &mut Vec<u8>) {
    let (number, dtype) = narrowest(values);
    out.push(number);
    out.extend(narrowed(dtype, values));
}

/// Takes `count` values of [`put_exact`] off the front of `payload`.
pub(super) fn take_exact(payload: &mut &[u8], count: usize) -> Result<Vec<f32>, Corrupt> {
    let dtype = *TYPES.get(usize::from(take_byte(payload)?)).ok_or(Corrupt("type of exact values"))?;
    take_values(payload, dtype, count)
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
