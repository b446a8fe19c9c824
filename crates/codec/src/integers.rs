//! The integers of a tile. They hardly ever need 32 bits, so they are kept in 16 if all fit.

use std::borrow::Cow;

use crate::entropy::scratch;
use crate::entropy::simd::{Level, multiversion};

/// Integers of a tile; `i16::MIN` stands for `i32::MIN`.
#[derive(Clone, Debug)]
pub enum Integers {
    /// All of them fit.
    Narrow(Vec<i16>),
    /// Some do not fit.
    Wide(Vec<i32>),
}

impl Integers {
    /// Empty, with room for `n`.
    pub fn with_capacity(n: usize) -> Integers {
        Integers::Narrow(Vec::with_capacity(n))
    }

    /// These integers.
    pub fn of(values: &[i32]) -> Integers {
        let mut all = Integers::with_capacity(values.len());
        all.push(values);
        all
    }

    /// Appends some.
    pub fn push(&mut self, values: &[i32]) {
        let level = Level::detect();
        if let Integers::Narrow(narrow) = self {
            let at = narrow.len();
            narrow.resize(at + values.len(), 0);
            if to_narrow(level, values, &mut narrow[at..]) {
                return;
            }
            let mut wide = vec![0; at];
            to_wide(level, &narrow[..at], &mut wide);
            *self = Integers::Wide(wide);
        }
        if let Integers::Wide(wide) = self {
            wide.extend_from_slice(values);
        }
    }

    /// Appends some that fit 16 bits; none is `i16::MIN`.
    pub(super) fn push_narrow(&mut self, values: &[i16]) {
        match self {
            Integers::Narrow(narrow) => narrow.extend_from_slice(values),
            Integers::Wide(wide) => wide.extend(values.iter().map(|&value| i32::from(value))),
        }
    }

    /// All integers, if they are kept in 16 bits.
    pub fn narrow(&self) -> Option<&[i16]> {
        match self {
            Integers::Narrow(narrow) => Some(narrow),
            Integers::Wide(_) => None,
        }
    }

    /// Fills `out` with the integers from `start` on, which must exist.
    pub fn fill(&self, start: usize, out: &mut [i32]) {
        match self {
            Integers::Narrow(narrow) => to_wide(Level::detect(), &narrow[start..][..out.len()], out),
            Integers::Wide(wide) => out.copy_from_slice(&wide[start..][..out.len()]),
        }
    }

    /// All integers, in 32 bits each.
    pub fn wide(&self) -> Cow<'_, [i32]> {
        match self {
            Integers::Narrow(_) => Cow::Owned(self.values()),
            Integers::Wide(wide) => Cow::Borrowed(wide),
        }
    }

    /// A copy in as few bits as possible.
    #[must_use]
    pub fn packed(&self) -> Integers {
        match self {
            Integers::Narrow(_) => self.clone(),
            Integers::Wide(wide) => Integers::of(wide),
        }
    }

    /// A copy of all of them.
    pub fn values(&self) -> Vec<i32> {
        let mut values = scratch::integers(self.len());
        self.fill(0, &mut values);
        values
    }

    /// Their number.
    pub fn len(&self) -> usize {
        match self {
            Integers::Narrow(narrow) => narrow.len(),
            Integers::Wide(wide) => wide.len(),
        }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their size in memory, bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Integers::Narrow(narrow) => size_of_val(narrow.as_slice()),
            Integers::Wide(wide) => size_of_val(wide.as_slice()),
        }
    }
}

impl PartialEq for Integers {
    fn eq(&self, other: &Integers) -> bool {
        self.wide() == other.wide()
    }
}

multiversion! {
    /// Writes the values in 16 bits; returns whether all fit.
    fn to_narrow(values: &[i32], out: &mut [i16]) -> bool {
        let mut fits = true;
        for (out, &value) in out.iter_mut().zip(values) {
            let small = value.wrapping_add(i32::from(i16::MAX)) as u32 <= 2 * i16::MAX as u32;
            fits &= small | (value == i32::MIN);
            *out = if value == i32::MIN { i16::MIN } else { value as i16 };
        }
        fits
    }
}

multiversion! {
    pub(super) fn to_wide(values: &[i16], out: &mut [i32]) {
        for (out, &value) in out.iter_mut().zip(values) {
            *out = if value == i16::MIN { i32::MIN } else { value.into() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_was_pushed_in_pieces_comes_back(
            pieces in prop::collection::vec(prop::collection::vec(prop_oneof![
                20 => -40i32..40,
                1 => Just(i32::MIN),
                1 => prop::sample::select([-32767, 32767, -32768, 32768, i32::MAX].as_slice()),
            ], 0..200), 0..5),
        ) {
            let all = pieces.concat();
            let mut integers = Integers::with_capacity(all.len());
            pieces.iter().for_each(|piece| integers.push(piece));
            prop_assert_eq!(&integers, &Integers::of(&all));
            let narrow = all.iter().all(|v| *v == i32::MIN || v.abs() <= 32767);
            prop_assert_eq!(integers.bytes(), all.len() * if narrow { 2 } else { 4 });
            let from = all.len() / 3;
            let mut some = vec![1; all.len() - from];
            integers.fill(from, &mut some);
            prop_assert_eq!(&some, &all[from..]);
            prop_assert_eq!(integers.values(), all);
        }
    }
}
