//! Exact values in the fewest whole bytes that hold them all: those of a narrower type were widened before.

use crate::codec::Corrupt;
use crate::codec::float::{Bf16, F16, Float};

const WIDE: u8 = 0;
const AS_BF16: u8 = 1;
const AS_F16: u8 = 2;

/// Appends a byte for the format, then the values.
pub(super) fn put(values: &[f32], out: &mut Vec<u8>) {
    let is_f16 = |value: &f32| F16::widen(F16::round((*value).into())) as f32 == *value;
    if values.iter().all(|value| value.to_bits() << 16 == 0) {
        out.push(AS_BF16);
        values.iter().for_each(|value| out.extend_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes()));
    } else if values.iter().all(is_f16) {
        out.push(AS_F16);
        values.iter().for_each(|value| out.extend_from_slice(&F16::round((*value).into())));
    } else {
        out.push(WIDE);
        values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
    }
}

/// Takes the rest of the payload, exactly `count` values.
pub(super) fn take(payload: &[u8], count: usize) -> Result<Vec<f32>, Corrupt> {
    let (&how, bytes) = payload.split_first().ok_or(Corrupt("no values"))?;
    let width = if how == WIDE { 4 } else { 2 };
    if count.checked_mul(width) != Some(bytes.len()) {
        return Err(Corrupt("number of values"));
    }
    Ok(match how {
        WIDE => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        AS_BF16 => bytes.as_chunks().0.iter().map(|bytes| Bf16::widen(*bytes) as f32).collect(),
        AS_F16 => bytes.as_chunks().0.iter().map(|bytes| F16::widen(*bytes) as f32).collect(),
        _ => return Err(Corrupt("kind of values")),
    })
}
