//! Tensors that change and keep their CRC-32C.
//!
//! A CRC is linear: two files of one length have CRCs whose difference depends on the difference of their bytes alone.
//! So some bits of a tensor can make up for the rest. The last 128 bytes of each tensor stay out of all codecs. Once
//! the rest is quantized, the lowest bits of these elements are chosen so that the CRC of the whole is what it was. 32
//! bits that are independent always suffice, and a tail has
//! 64. An element changes by at most 3 units in the last place (f32), 1 (f16, bf16) or 15 (f64).

use std::io;
use std::ops::Range;

use super::super::{ChangedTensor, Description, Kind, Patch, ReadAt, Tensor};
use codec::Dtype;
use codec::hash::{castagnoli, castagnoli_behind};

/// Bytes at the end of a tensor.
pub const TAIL_BYTES: u64 = 128;

/// CRC-32Cs of a file's tensors, each with its tail.
#[derive(Clone, Debug, Default)]
pub(crate) struct Steady {
    pub(super) crcs: Vec<u32>,
}

impl Tensor {
    /// Bytes of its shape behind its extent.
    pub fn tail(&self) -> u64 {
        let whole = self.shape.iter().fold(self.dtype.size() as u64, |size, dim| size.saturating_mul(*dim));
        whole.saturating_sub(self.bytes())
    }
}

impl Steady {
    /// The bytes of each tensor, with its CRC.
    pub(crate) fn parts<'t>(&'t self, tensors: &'t [Tensor]) -> impl Iterator<Item = (Range<u64>, u32)> + 't {
        let whole = |tensor: &Tensor| tensor.extent.start..tensor.extent.end + tensor.tail();
        tensors.iter().map(whole).zip(self.crcs.iter().copied())
    }

    /// The tails with which the changed tensors keep their CRCs.
    pub(crate) fn patches(
        &self,
        tensors: &[Tensor],
        src: &dyn ReadAt,
        changed: &[ChangedTensor],
    ) -> io::Result<Vec<Patch>> {
        changed
            .iter()
            .map(|changed| {
                let tensor = &tensors[changed.index];
                let mut tail = tail(tensor, src)?;
                let difference = castagnoli_behind(changed.crc_before ^ changed.crc_after, tail.len() as u64);
                if !make_up(tensor.dtype, &mut tail, difference) {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        "a tensor cannot change and keep its CRC-32C",
                    ));
                }
                Ok(Patch { offset: tensor.extent.end, bytes: tail })
            })
            .collect()
    }
}

impl Description {
    /// Finds the tensors of a bundle that cannot change, because too few numbers at their end are normal ones. They
    /// become lossless, each with its other moment.
    ///
    /// # Errors
    /// Those of `src`.
    pub fn hold_unsteady(&mut self, src: &dyn ReadAt) -> io::Result<()> {
        if self.kind != Kind::Bundle {
            return Ok(());
        }
        let mut held = Vec::new();
        for (number, tensor) in self.tensors.iter().enumerate().filter(|(_, tensor)| !tensor.lossless) {
            if !Basis::of(tensor.dtype, &tail(tensor, src)?).is_full() {
                held.extend([Some(number), tensor.partner].into_iter().flatten());
            }
        }
        held.into_iter().for_each(|number| self.tensors[number].lossless = true);
        Ok(())
    }
}

fn tail(tensor: &Tensor, src: &dyn ReadAt) -> io::Result<Vec<u8>> {
    let mut tail = vec![0; tensor.tail().min(TAIL_BYTES) as usize];
    src.read_exact_at(&mut tail, tensor.extent.end)?;
    Ok(tail)
}

/// Bits of the fraction, and of the exponent.
fn parts(dtype: Dtype) -> Option<(u32, u32)> {
    match dtype {
        Dtype::F16 => Some((10, 5)),
        Dtype::Bf16 => Some((7, 8)),
        Dtype::F32 => Some((23, 8)),
        Dtype::F64 => Some((52, 11)),
        _ => None,
    }
}

/// Whether elements of the type have bits that may change.
pub(super) fn is_able(dtype: Dtype) -> bool {
    parts(dtype).is_some()
}

/// Changes the lowest bits of numbers so that the CRC of all changes by `difference`. False if that is not possible.
fn make_up(dtype: Dtype, tail: &mut [u8], difference: u32) -> bool {
    let Some(bits) = Basis::of(dtype, tail).sum(difference) else { return false };
    let per_element = dtype.size() / 2;
    for bit in (0..64).filter(|bit| (bits >> bit) & 1 == 1) {
        tail[bit / per_element * dtype.size()] ^= 1 << (bit % per_element);
    }
    true
}

/// What the bits of a tail do to the CRC: independent ones, each by its highest bit, and the bits of the tail that
/// together do this.
struct Basis([(u32, u64); 32]);

impl Basis {
    /// Of the lowest bits of normal numbers. Zeros, infinities and NaN stay what they are.
    fn of(dtype: Dtype, tail: &[u8]) -> Basis {
        let mut basis = Basis([(0, 0); 32]);
        let Some((fraction, exponent)) = parts(dtype) else { return basis };
        let (size, largest) = (dtype.size(), (1u64 << exponent) - 1);
        for (element, bytes) in tail.chunks_exact(size).enumerate() {
            let number = bytes.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
            if ![0, largest].contains(&((number >> fraction) & largest)) {
                let behind = (tail.len() - element * size - 1) as u64;
                for bit in 0..size / 2 {
                    // The CRC's own first and last step are the same for both files.
                    let effect = castagnoli(0, &[1 << bit]) ^ castagnoli(0, &[0]);
                    basis.add(castagnoli_behind(effect, behind), 1 << (element * (size / 2) + bit));
                }
            }
        }
        basis
    }

    fn add(&mut self, effect: u32, bits: u64) {
        let (effect, bits) = self.reduced(effect, bits);
        if effect != 0 {
            self.0[effect.ilog2() as usize] = (effect, bits);
        }
    }

    /// What is left of an effect without those that are known.
    fn reduced(&self, mut effect: u32, mut bits: u64) -> (u32, u64) {
        while effect != 0 {
            let (known, of) = self.0[effect.ilog2() as usize];
            if known == 0 {
                break;
            }
            (effect, bits) = (effect ^ known, bits ^ of);
        }
        (effect, bits)
    }

    fn is_full(&self) -> bool {
        self.0.iter().all(|(effect, _)| *effect != 0)
    }

    /// Bits that together have this effect.
    fn sum(&self, effect: u32) -> Option<u64> {
        let (left, bits) = self.reduced(effect, 0);
        (left == 0).then_some(bits)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_tail_makes_up_for_any_change(
            before in prop::collection::vec(any::<u8>(), 0..300),
            after in prop::collection::vec(any::<u8>(), 300),
            numbers in prop::collection::vec(1e-9f64..1e9, 64),
            kind in 0..4usize,
        ) {
            let dtype = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64][kind];
            let element = |number: &f64| match dtype {
                Dtype::F64 => number.to_le_bytes().to_vec(),
                Dtype::F32 => (*number as f32).to_le_bytes().to_vec(),
                // The upper half of f32, and any normal number.
                Dtype::Bf16 => (*number as f32).to_le_bytes()[2..].to_vec(),
                _ => (0x1234u16 ^ (number.to_bits() as u16 & 0x3ff)).to_le_bytes().to_vec(),
            };
            let tail: Vec<u8> = numbers.iter().flat_map(element).take(128).collect();
            let after = &after[..before.len()];
            let mut changed = tail.clone();
            let crc = |first: &[u8], tail: &[u8]| castagnoli(castagnoli(0, first), tail);
            let of_first = castagnoli(0, &before) ^ castagnoli(0, after);
            prop_assert!(make_up(dtype, &mut changed, castagnoli_behind(of_first, 128)));
            prop_assert_eq!(crc(&before, &tail), crc(after, &changed));
            // No more than the lowest bits.
            for (before, after) in tail.chunks(dtype.size()).zip(changed.chunks(dtype.size())) {
                prop_assert!(before[0] ^ after[0] < 1 << (dtype.size() / 2));
                prop_assert_eq!(&before[1..], &after[1..]);
            }
        }
    }

    #[test]
    fn zeros_and_infinities_never_change() {
        let special = [0.0, -0.0, f32::INFINITY, f32::NAN, 1e-40];
        let tail: Vec<u8> = special.iter().cycle().take(32).flat_map(|number| number.to_le_bytes()).collect();
        let mut same = tail.clone();
        assert!(!Basis::of(Dtype::F32, &tail).is_full() && !make_up(Dtype::F32, &mut same, 1));
        assert_eq!(same, tail);
        // Half of the numbers suffice.
        let half: Vec<u8> = (0..32).flat_map(|i| [0.0, 1.5f32][i % 2].to_le_bytes()).collect();
        assert!(Basis::of(Dtype::F32, &half).is_full());
    }
}
