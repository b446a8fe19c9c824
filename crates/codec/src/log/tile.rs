//! The q of a tile to bytes and back, as differences to the parent's.
//!
//! An element's symbol is q - (q of the parent), and skips [`GONE`], which means "0 now, and was not". If the parent's
//! element was 0, symbol 0 means that it still is; any other symbol is q and skips 0.

use super::factors::Grid;
use super::{MAX_Q, ZERO};
use crate::entropy::ints::{self, LARGE, SMALL};
use crate::entropy::simd::{Level, multiversion};
use crate::{Corrupt, Integers, Unfit};

/// The state before a run of payloads, or before one.
#[derive(Clone, Copy, Debug)]
pub enum From<'a> {
    /// Zeros: a keyframe, or the state that K holds.
    Zeros,
    /// The initial steps of a logarithmic lattice without a parent.
    Factors(Grid<'a>),
    /// The integers of a state.
    Integers(&'a Integers),
}

impl From<'_> {
    /// True if the state has as many integers as the tile has elements.
    pub(crate) fn suits(self, n: usize) -> bool {
        match self {
            From::Zeros => true,
            From::Factors(grid) => grid.holds(n),
            From::Integers(integers) => integers.len() == n,
        }
    }

    pub(crate) fn fill(self, start: usize, out: &mut [i32]) {
        match self {
            From::Zeros => out.fill(0),
            From::Factors(grid) => grid.initial(start, out),
            From::Integers(integers) => integers.fill(start, out),
        }
    }
}

/// The symbol of an element that is 0 and whose parent was not. It is the largest symbol without extra bits, so
/// scattered zeros cost what their frequency implies.
pub(crate) const GONE: i32 = 15;

/// Appends the payload of a tile, as the difference to its parent's q or, with [`From::Factors`], alone.
///
/// # Errors
/// The lengths differ, or [`super::quantize`] never makes one of the q.
pub fn encode_tile(q: &[i32], parent: From<'_>, out: &mut Vec<u8>) -> Result<(), Unfit> {
    Unfit::when(!parent.suits(q.len()), "lengths differ")?;
    let (level, before) = (Level::detect(), out.len());
    let mut sound = true;
    let narrow = match parent {
        From::Integers(parent) => parent.narrow(),
        _ => None,
    };
    let classes = |start: usize, classes: &mut [u8]| {
        let range = start..start + classes.len();
        narrow.is_some_and(|before| small_steps(level, &q[range.clone()], &before[range], classes))
    };
    ints::encode_blocks(q.len(), out, classes, |start, symbols| {
        parent.fill(start, symbols);
        sound &= to_symbols(level, &q[start..][..symbols.len()], symbols);
    });
    if sound {
        return Ok(());
    }
    out.truncate(before);
    Err(Unfit("steps beyond all octaves"))
}

/// Turns the parent's q into the q of these symbols, or of these classes of small symbols.
pub(crate) fn apply_symbols<S: ints::Symbol>(level: Level, symbols: &[S], q: &mut [i32]) -> Result<(), Corrupt> {
    // Zeros come and go in few blocks.
    let sound = match are_steps(level, symbols, q) {
        true => ints::add(level, symbols, q),
        false => from_symbols(level, symbols, q),
    };
    if sound { Ok(()) } else { Err(Corrupt("steps beyond all octaves")) }
}

/// True if an element may have this q.
#[inline(always)]
fn is_q(q: i32) -> bool {
    (q == ZERO) | is_step_of_q(q)
}

/// True if an element that is not 0 may have this q.
#[inline(always)]
fn is_step_of_q(q: i32) -> bool {
    q.wrapping_add(MAX_Q) as u32 <= 2 * MAX_Q as u32
}

multiversion! {
    /// The classes of `q` less `before`, in one pass. False if a difference is not small, or an element is 0 or was.
    fn small_steps(q: &[i32], before: &[i16], classes: &mut [u8]) -> bool {
        let mut other = 0u32;
        for ((class, &q), &before) in classes.iter_mut().zip(q).zip(before) {
            let before = i32::from(before);
            let index = q.wrapping_sub(before).wrapping_add(SMALL) as u32;
            // The last class stands for elements that become 0.
            let plain = (index < u32::from(LARGE) - 1) & is_step_of_q(q) & is_step_of_q(before);
            other |= u32::from(!plain);
            *class = index as u8;
        }
        other == 0
    }
}

multiversion! {
    /// Turns the parent's q into the symbols of `q`; false if a value is invalid.
    fn to_symbols(q: &[i32], symbols: &mut [i32]) -> bool {
        let mut sound = true;
        for (symbol, &q) in symbols.iter_mut().zip(q) {
            let parent = *symbol;
            sound &= is_q(q) & is_q(parent);
            let difference = q.wrapping_sub(parent);
            let moved = difference.wrapping_add(i32::from(difference >= GONE));
            let stays = if q == ZERO { GONE } else { moved };
            let appears = if q == ZERO { 0 } else { q.wrapping_add(i32::from(q >= 0)) };
            *symbol = if parent == ZERO { appears } else { stays };
        }
        sound
    }
}

multiversion! {
    /// True if no element was 0 or becomes 0, and all symbols are valid: they are plain differences.
    fn are_steps<S: ints::Symbol>(symbols: &[S], q: &[i32]) -> bool {
        let mut all = true;
        for (&q, symbol) in q.iter().zip(symbols) {
            let symbol = symbol.value();
            // The sum of two small parts does not wrap.
            all &= is_step_of_q(q) & is_step_of_q(q.wrapping_add(symbol)) & (-4 * MAX_Q..GONE).contains(&symbol);
        }
        all
    }
}

multiversion! {
    /// Turns the parent's q into the q of these symbols; false if a symbol is invalid.
    fn from_symbols<S: ints::Symbol>(symbols: &[S], q: &mut [i32]) -> bool {
        let mut sound = true;
        for (q, symbol) in q.iter_mut().zip(symbols) {
            let (parent, symbol) = (*q, symbol.value());
            let moved = parent.wrapping_add(symbol).wrapping_sub(i32::from(symbol > GONE));
            let stays = if symbol == GONE { ZERO } else { moved };
            let appears = if symbol == 0 { ZERO } else { symbol.wrapping_sub(i32::from(symbol > 0)) };
            let new = if parent == ZERO { appears } else { stays };
            // This only detects a wrapped sum if its parts are small.
            sound &= is_q(parent)
                & is_q(new)
                & (symbol.unsigned_abs() <= 4 * MAX_Q as u32)
                & ((new == ZERO) == (symbol == if parent == ZERO { 0 } else { GONE }));
            *q = new;
        }
        sound
    }
}
