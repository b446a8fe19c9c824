//! A copy of a tensor in another floating-point type, or in the same. Each element is rounded to it, nearest and ties
//! to even. Low-precision trainers derive their compute weights like this from the weights that they update.

use super::float::{Float, for_float};
use super::{Corrupt, Dtype};
use crate::entropy::simd::{Level, multiversion};

/// Elements widened and rounded together, in the first-level cache.
const CHUNK: usize = 512;

const TYPES: Corrupt = Corrupt("types of a tensor and its copy");

/// Fills `out` with the rounded elements of `bytes`, whose type has at least as many bits.
///
/// # Errors
/// The numbers of elements differ, or the types are not the lattice's, or `to` is wider.
pub fn cast(from: Dtype, bytes: &[u8], to: Dtype, out: &mut [u8]) -> Result<(), Corrupt> {
    let same = bytes.len() / from.size() == out.len() / to.size() && bytes.len().is_multiple_of(from.size());
    Corrupt::when(!same || !out.len().is_multiple_of(to.size()), "lengths of a tensor and its copy differ")?;
    if from == to && to.is_lattice_float() {
        out.copy_from_slice(bytes);
        return Ok(());
    }
    if from.size() <= to.size() || !from.is_lattice_float() || !to.is_lattice_float() {
        return Err(TYPES);
    }
    let mut values = [0.0; CHUNK];
    for (bytes, out) in bytes.chunks(CHUNK * from.size()).zip(out.chunks_mut(CHUNK * to.size())) {
        let values = &mut values[..out.len() / to.size()];
        widen(from, bytes, values);
        round(to, values, out);
    }
    Ok(())
}

/// The values of as many elements. Only of the lattice's types.
pub fn widen(dtype: Dtype, bytes: &[u8], values: &mut [f64]) {
    let level = Level::detect();
    for_float!(dtype, F => widen_all::<F>(level, F::elements(bytes), values), else ());
}

/// The elements nearest to as many values. Only of the lattice's types.
pub fn round(dtype: Dtype, values: &[f64], out: &mut [u8]) {
    let level = Level::detect();
    for_float!(dtype, F => round_all::<F>(level, values, F::elements_mut(out)), else ());
}

multiversion! {
    fn widen_all<F: Float>(elements: &[F::Bytes], values: &mut [f64]) {
        values.iter_mut().zip(elements).for_each(|(value, &element)| *value = F::widen(element));
    }
}

multiversion! {
    fn round_all<F: Float>(values: &[f64], elements: &mut [F::Bytes]) {
        elements.iter_mut().zip(values).for_each(|(element, &value)| *element = F::round(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_what_half_makes_of_it() {
        let values: Vec<f32> = (0..5000u32).map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b9))).collect();
        let values: Vec<f32> = values.into_iter().filter(|value| !value.is_nan()).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut out = vec![0; values.len() * 2];
        cast(Dtype::F32, &bytes, Dtype::Bf16, &mut out).unwrap();
        let expected: Vec<u8> = values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect();
        assert_eq!(out, expected);
        cast(Dtype::F32, &bytes, Dtype::F16, &mut out).unwrap();
        let expected: Vec<u8> = values.iter().flat_map(|&value| half::f16::from_f32(value).to_le_bytes()).collect();
        assert_eq!(out, expected);
    }

    #[test]
    fn only_narrower_types_of_as_many_elements_are_copies() {
        for (from, bytes, to, out) in [
            (Dtype::F32, 8, Dtype::F16, 6),
            (Dtype::F32, 7, Dtype::F16, 4),
            (Dtype::F16, 4, Dtype::F32, 8),
            (Dtype::F16, 4, Dtype::Bf16, 4),
            (Dtype::I64, 16, Dtype::F32, 8),
            (Dtype::F64, 16, Dtype::I32, 8),
        ] {
            cast(from, &vec![0; bytes], to, &mut vec![0; out]).unwrap_err();
        }
    }
}
