//! The first stage: which elements a state stores.
//!
//! [`largest_percent`] selects the largest items exactly, in bounded memory. Two passes count them by their float bits.
//! A third pass splits the items at the threshold, over the one tensor where only some of them are taken. [`put_runs`]
//! stores which elements were selected, and [`update`] gives them their values.

use std::io;
use std::iter::repeat_n;
use std::ops::Range;

use rayon::prelude::*;

use super::{Floats, State, Tensor, Tile};
use codec::Corrupt;
use codec::entropy::varint;

/// Half of a key: 65,536 counters each, half a megabyte on each thread.
const HALF: u32 = 16;

/// A candidate: key (bits of a float that is not negative), weight in elements, and index of its first element in the
/// tensor. Items of key 0 are never selected.
pub(super) struct Item {
    pub(super) key: u32,
    pub(super) weight: u64,
    pub(super) place: u64,
}

/// Passes on the items of a tile, in order; the number is the width of the tensor's rows.
pub(super) type Items = fn(u64, &Tile, &mut dyn FnMut(Item));

/// The selected items of a tensor.
#[derive(Debug)]
pub(super) struct Largest {
    items: Items,
    /// Width of the tensor's rows.
    pub(super) width: u64,
    /// All items above this key.
    key: u32,
    /// Items with this key before this place.
    before: u64,
}

impl Largest {
    /// The selected elements of a tile, ascending.
    pub(super) fn places(&self, tile: &Tile) -> Vec<usize> {
        let mut places = Vec::new();
        (self.items)(self.width, tile, &mut |item| {
            if item.key > self.key || item.key == self.key && item.key > 0 && item.place < self.before {
                let start = (item.place - tile.first) as usize;
                places.extend(start..start + item.weight as usize);
            }
        });
        places
    }
}

/// Selects the items with the largest keys, this percentage of all elements; of equal ones the first.
pub(super) fn largest_percent(tensors: &[&dyn Tensor], percent: u8, items: Items) -> io::Result<Vec<Largest>> {
    let total: u64 = tensors.iter().map(|tensor| elements(*tensor)).sum();
    let elements = (u128::from(total) * u128::from(percent)).div_ceil(100) as u64;
    let (high, above) = find(&count(tensors, items, |key| Some(key >> HALF))?, elements);
    let within = count(tensors, items, |key| (key >> HALF == high).then_some(key & ((1 << HALF) - 1)))?;
    let (low, at_most) = find(&within, elements - above);
    let key = high << HALF | low;
    let mut left = elements - above - at_most;
    let mut open = key > 0 && left > 0;
    let select = |tensor: &&dyn Tensor| {
        let (width, mut before) = (tensor.rows().1, 0);
        for number in 0..tensor.tiles() {
            if !open {
                break;
            }
            items(width, &tensor.tile(number)?, &mut |item| {
                if open && item.key == key {
                    match left.checked_sub(item.weight) {
                        Some(rest) => (left, before) = (rest, item.place + 1),
                        None => open = false,
                    }
                }
            });
        }
        Ok(Largest { items, width, key, before })
    };
    tensors.iter().map(select).collect()
}

/// Number of a tensor's elements.
pub(super) fn elements(tensor: &dyn Tensor) -> u64 {
    tensor.rows().0.saturating_mul(tensor.rows().1)
}

/// The digit where this many elements are reached, counted from the largest, and the number above it. 0 if there are
/// not enough.
fn find(counts: &[u64], elements: u64) -> (u32, u64) {
    let mut above = 0;
    for (digit, count) in counts.iter().enumerate().rev() {
        if above + count > elements {
            return (digit as u32, above);
        }
        above += count;
    }
    (0, above - counts.first().copied().unwrap_or(0))
}

/// All tiles by number and tensor, in order.
pub(super) fn tiles<'a>(tensors: &[&'a dyn Tensor]) -> Vec<(usize, &'a dyn Tensor)> {
    tensors.iter().flat_map(|tensor| repeat_n(*tensor, tensor.tiles()).enumerate()).collect()
}

/// Elements by a digit of their keys.
fn count(tensors: &[&dyn Tensor], items: Items, digit: impl Fn(u32) -> Option<u32> + Sync) -> io::Result<Vec<u64>> {
    let none = || vec![0u64; 1 << HALF];
    let each = tiles(tensors).into_par_iter().try_fold(none, |mut counts, (number, tensor)| {
        items(tensor.rows().1, &tensor.tile(number)?, &mut |item| {
            if let Some(digit) = digit(item.key).filter(|_| item.key > 0) {
                counts[digit as usize] += item.weight;
            }
        });
        Ok::<_, io::Error>(counts)
    });
    each.try_reduce(none, |mut a, b| {
        a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
        Ok(a)
    })
}

/// Elements of the tile's first row from its first element on; 0 for rows of no width.
pub(super) fn first_row(first: u64, width: u64) -> u64 {
    width - first.checked_rem(width).unwrap_or(width)
}

/// Lengths of the rows of a tile that begins with this element of the tensor, including cut ones.
pub(super) fn row_lengths(first: u64, width: u64, elements: usize) -> Vec<usize> {
    let (mut length, mut left) = (first_row(first, width), if width == 0 { 0 } else { elements as u64 });
    let mut lengths = Vec::new();
    while left > 0 && length > 0 {
        lengths.push(length.min(left) as usize);
        (left, length) = (left.saturating_sub(length), width);
    }
    lengths
}

/// The places of rows with these lengths, one after the other.
pub(super) fn ranges(lengths: &[usize]) -> impl Iterator<Item = Range<usize>> {
    lengths.iter().scan(0, |end, length| {
        let start = *end;
        *end += length;
        Some(start..*end)
    })
}

/// Appends ascending places as runs: their number; for each the elements since the end of the one before, and its
/// length.
pub(super) fn put_runs(places: &[usize], out: &mut Vec<u8>) {
    let runs: Vec<&[usize]> = places.chunk_by(|a, b| a + 1 == *b).collect();
    varint::put(runs.len() as u64, out);
    let mut end = 0;
    for run in runs {
        varint::put((run[0] - end) as u64, out);
        varint::put(run.len() as u64, out);
        end = run[0] + run.len();
    }
}

/// Takes places below `len` off the front of `payload`.
pub(super) fn take_runs(payload: &mut &[u8], len: usize) -> Result<Vec<usize>, Corrupt> {
    let (mut places, mut end) = (Vec::new(), 0);
    for _ in 0..varint::take(payload)? {
        let start = varint::take(payload)?.saturating_add(end);
        end = varint::take(payload)?.saturating_add(start);
        // Runs that are not empty, so never more of them than elements.
        Corrupt::when(start >= end || end > len as u64, "a run beyond the tile")?;
        places.extend(start as usize..end as usize);
    }
    Ok(places)
}

/// The previous values, with these values at these places.
pub(super) fn update(previous: &Floats, places: &[usize], values: &[f32]) -> State {
    let mut state = Floats::zeros(previous.len());
    let slots: &mut [f32] = &mut state;
    slots.copy_from_slice(previous);
    places.iter().zip(values).for_each(|(&place, &value)| slots[place] = value);
    State::of(state)
}
