//! The values of a tile: a buffer of numbers, or a view of a tile's bytes as numbers. Most checkpoints are f32, and
//! copying a tile three times takes as long as LC-Checkpoint does.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::code::{narrowed, widened};
use codec::Dtype;

/// A sequence of numbers.
#[derive(Clone, Debug)]
pub struct Floats(Kept);

#[derive(Clone, Debug)]
enum Kept {
    Own(Vec<f32>),
    /// Whole numbers in this machine's order, at an aligned address.
    Bytes(Arc<Vec<u8>>),
}

impl Floats {
    /// The numbers in these bytes, which must be whole ones.
    pub fn of(bytes: Arc<Vec<u8>>) -> Floats {
        if cfg!(target_endian = "little") && bytemuck::try_cast_slice::<u8, f32>(&bytes).is_ok() {
            return Floats(Kept::Bytes(bytes));
        }
        widened(Dtype::F32, &bytes).into()
    }

    /// `length` zeros, which become bytes without a copy.
    pub fn zeros(length: usize) -> Floats {
        Floats::of(Arc::new(vec![0; 4 * length]))
    }

    /// Their bytes, little-endian.
    pub fn into_bytes(self) -> Vec<u8> {
        match self.0 {
            Kept::Bytes(bytes) => Arc::unwrap_or_clone(bytes),
            Kept::Own(values) => narrowed(Dtype::F32, &values),
        }
    }
}

impl Default for Floats {
    fn default() -> Floats {
        Vec::new().into()
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &self.0 {
            Kept::Own(values) => values,
            Kept::Bytes(bytes) => bytemuck::cast_slice(bytes),
        }
    }
}

impl DerefMut for Floats {
    /// Bytes with another owner are copied first, as numbers: their copy may be unaligned.
    fn deref_mut(&mut self) -> &mut [f32] {
        if let Kept::Bytes(bytes) = &mut self.0
            && Arc::get_mut(bytes).is_none()
        {
            *self = self.to_vec().into();
        }
        match &mut self.0 {
            Kept::Own(values) => values,
            Kept::Bytes(bytes) => Arc::get_mut(bytes).map_or(&mut [], |bytes| bytemuck::cast_slice_mut(bytes)),
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
        let shared = Floats::of(Arc::clone(&bytes));
        let mut new = Floats::zeros(4);
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
