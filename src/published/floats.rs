//! The values of a tile: a buffer of numbers, or a view of a tile's bytes as numbers. Most checkpoints are f32, and
//! copying a tile three times takes as long as LC-Checkpoint does.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::pool::VALUES;

/// A sequence of numbers.
#[derive(Debug, Default)]
pub struct Floats(Kept);

/// Bytes are whole numbers at an aligned address.
#[derive(Debug)]
enum Kept {
    Own(Vec<f32>),
    Bytes(Vec<u8>),
    Shared(Arc<Vec<u8>>),
}

impl Default for Kept {
    fn default() -> Kept {
        Kept::Own(Vec::new())
    }
}

/// A view of bytes as numbers, if this machine permits it.
fn look(bytes: &[u8]) -> Option<&[f32]> {
    if cfg!(target_endian = "big") { None } else { bytemuck::try_cast_slice(bytes).ok() }
}

impl Floats {
    /// The numbers in these bytes, which must be whole ones.
    pub(super) fn of(bytes: &Arc<Vec<u8>>) -> Floats {
        if look(bytes).is_some() {
            return Floats(Kept::Shared(Arc::clone(bytes)));
        }
        let mut values = VALUES.take(bytes.len() / 4);
        values.iter_mut().zip(bytes.as_chunks().0).for_each(|(value, &four)| *value = f32::from_le_bytes(four));
        Floats(Kept::Own(values))
    }

    /// `length` numbers, to be written.
    pub(super) fn new(length: usize) -> Floats {
        let bytes = vec![0; 4 * length];
        Floats(if look(&bytes).is_some() { Kept::Bytes(bytes) } else { Kept::Own(vec![0.0; length]) })
    }

    /// Their bytes, little-endian.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        match self.0 {
            Kept::Bytes(bytes) => bytes,
            Kept::Shared(bytes) => Arc::unwrap_or_clone(bytes),
            Kept::Own(values) => {
                let bytes = values.iter().map(|value| value.to_le_bytes()).collect::<Vec<_>>().into_flattened();
                VALUES.give(values);
                bytes
            }
        }
    }

    /// Returns the buffer for reuse; dropping it instead only costs time.
    pub(super) fn give_back(self) {
        if let Kept::Own(values) = self.0 {
            VALUES.give(values);
        }
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &self.0 {
            Kept::Own(values) => values,
            Kept::Bytes(bytes) => bytemuck::cast_slice(bytes),
            Kept::Shared(bytes) => bytemuck::cast_slice(bytes),
        }
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        if let Kept::Shared(_) = self.0 {
            *self = self[..].to_vec().into();
        }
        match &mut self.0 {
            Kept::Own(values) => values,
            Kept::Bytes(bytes) => bytemuck::cast_slice_mut(bytes),
            Kept::Shared(_) => &mut [],
        }
    }
}

impl Clone for Floats {
    fn clone(&self) -> Floats {
        match &self.0 {
            Kept::Shared(bytes) => Floats(Kept::Shared(Arc::clone(bytes))),
            // A copy of bytes may be unaligned.
            Kept::Own(_) | Kept::Bytes(_) => self[..].to_vec().into(),
        }
    }
}

impl PartialEq for Floats {
    fn eq(&self, other: &Floats) -> bool {
        self[..] == other[..]
    }
}

impl From<Vec<f32>> for Floats {
    fn from(values: Vec<f32>) -> Floats {
        Floats(Kept::Own(values))
    }
}

impl<'a> IntoIterator for &'a Floats {
    type Item = &'a f32;
    type IntoIter = std::slice::Iter<'a, f32>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_their_bytes_whoever_keeps_them() {
        let numbers = [1.5f32, -0.0, f32::MIN_POSITIVE / 4.0, 3e38];
        let bytes = Arc::new(numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>());
        let shared = Floats::of(&bytes);
        let mut new = Floats::new(4);
        new.copy_from_slice(&numbers);
        for floats in [shared.clone(), new.clone(), new, Floats::from(numbers.to_vec())] {
            assert_eq!(floats, shared);
            assert_eq!(floats.into_bytes(), *bytes);
        }
        // A writer gets its own numbers.
        let mut written = shared.clone();
        written[1] = 7.0;
        assert_eq!((shared[1].to_bits(), written[1], &written[2..]), ((-0.0f32).to_bits(), 7.0, &shared[2..]));
        assert_eq!(*bytes, shared.into_bytes());
    }
}
