//! The integers of a block while payloads are added to them: in 16 bits as long as those are sure to hold them, so that
//! a vector has twice as many. Nearly all blocks stay there.

use super::Integers;
use super::integers::to_wide;
use super::log::From;
use crate::entropy::ints::{BLOCK, Symbol, Symbols, add};
use crate::entropy::simd::{Level, multiversion};

/// Largest magnitude at the start.
pub(super) const LARGEST: i16 = 1 << 14;

/// Payloads that may be added: each adds 15 at most, so the sum stays within 16 bits.
const PAYLOADS: usize = 1024;

/// The integers of a block.
pub(super) struct Sums {
    narrow: [i16; BLOCK],
    wide: [i32; BLOCK],
    length: usize,
    is_narrow: bool,
    /// All are 0, and nothing was added yet.
    is_new: bool,
    level: Level,
}

/// Integers of either width.
pub(super) enum Width<'a> {
    Narrow(&'a [i16]),
    Wide(&'a [i32]),
}

impl Sums {
    pub(super) fn new() -> Sums {
        let level = Level::detect();
        Sums { narrow: [0; BLOCK], wide: [0; BLOCK], length: 0, is_narrow: true, is_new: true, level }
    }

    /// Takes the block of `length` integers that begins at `start` of a state. That many payloads will be added.
    pub(super) fn begin(&mut self, from: From, start: usize, length: usize, payloads: usize) {
        self.length = length;
        self.is_new = matches!(from, From::Zeros);
        let narrow = &mut self.narrow[..length];
        self.is_narrow = payloads <= PAYLOADS
            && match from {
                From::Zeros => {
                    narrow.fill(0);
                    true
                }
                From::Factors(grid) => {
                    narrow.fill(0);
                    !grid.has_zeros()
                }
                From::Integers(Integers::Narrow(all)) => copy_small(self.level, &all[start..][..length], narrow),
                From::Integers(Integers::Wide(_)) => false,
            };
        if !self.is_narrow {
            from.fill(start, &mut self.wide[..length]);
        }
    }

    /// The integers, in 32 bits from here on.
    pub(super) fn widen(&mut self) -> &mut [i32] {
        let wide = &mut self.wide[..self.length];
        if self.is_narrow {
            to_wide(self.level, &self.narrow[..self.length], wide);
        }
        (self.is_narrow, self.is_new) = (false, false);
        wide
    }

    /// True if all are 0, and nothing was added yet.
    pub(super) fn is_new(&self) -> bool {
        self.is_new
    }

    /// Adds symbols; false if a sum is beyond 32 bits.
    pub(super) fn add(&mut self, symbols: Symbols) -> bool {
        let level = self.level;
        match symbols {
            Symbols::Small(classes) if self.is_narrow => {
                add_narrow(level, classes, &mut self.narrow[..self.length]);
                self.is_new = false;
                true
            }
            Symbols::Small(classes) => add(level, classes, self.widen()),
            Symbols::Any(values) if self.is_new => {
                (self.is_narrow, self.is_new) = (false, false);
                self.wide[..self.length].copy_from_slice(values);
                true
            }
            Symbols::Any(values) => add(level, values, self.widen()),
        }
    }

    /// Adds small symbols if all are below `end` and the magnitudes of all sums are at most `largest`. Else, or if the
    /// integers have 32 bits, it changes nothing and returns false.
    pub(super) fn add_within(&mut self, classes: &[u8], end: i16, largest: i16) -> bool {
        let narrow = &mut self.narrow[..self.length];
        if !self.is_narrow {
            return false;
        }
        let sound = add_sound(self.level, classes, end, largest, narrow);
        if !sound {
            subtract_narrow(self.level, classes, narrow);
        }
        sound
    }

    /// The integers as they are.
    pub(super) fn values(&self) -> Width<'_> {
        match self.is_narrow {
            true => Width::Narrow(&self.narrow[..self.length]),
            false => Width::Wide(&self.wide[..self.length]),
        }
    }

    /// Appends the integers.
    pub(super) fn keep(&self, kept: &mut Integers) {
        match self.values() {
            Width::Narrow(narrow) => kept.push_narrow(narrow),
            Width::Wide(wide) => kept.push(wide),
        }
    }
}

multiversion! {
    /// Copies the integers; false if one is larger than [`LARGEST`].
    fn copy_small(from: &[i16], to: &mut [i16]) -> bool {
        let mut small = true;
        for (to, &from) in to.iter_mut().zip(from) {
            small &= (-LARGEST..=LARGEST).contains(&from);
            *to = from;
        }
        small
    }
}

multiversion! {
    fn add_narrow(classes: &[u8], sums: &mut [i16]) {
        for (sum, class) in sums.iter_mut().zip(classes) {
            *sum = sum.wrapping_add(class.value() as i16);
        }
    }
}

multiversion! {
    /// Undoes an addition.
    fn subtract_narrow(classes: &[u8], sums: &mut [i16]) {
        for (sum, class) in sums.iter_mut().zip(classes) {
            *sum = sum.wrapping_sub(class.value() as i16);
        }
    }
}

multiversion! {
    /// Adds; false if a symbol is not below `end`, or the magnitude of a sum is above `largest`.
    fn add_sound(classes: &[u8], end: i16, largest: i16, sums: &mut [i16]) -> bool {
        let mut sound = true;
        for (sum, class) in sums.iter_mut().zip(classes) {
            let symbol = class.value() as i16;
            *sum = sum.wrapping_add(symbol);
            sound &= (symbol < end) & (*sum <= largest) & (*sum >= -largest);
        }
        sound
    }
}
