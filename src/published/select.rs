//! Selects the largest items exactly, in bounded memory. Two passes count them by their float bits. A third pass splits
//! the items at the threshold, over the one tensor where only some of them are taken.

use std::io;
use std::ops::ControlFlow;

use rayon::prelude::*;

use super::{Fit, Tensor, Tile, give_back};

/// Half of a key: 65,536 counters each, half a megabyte on each thread.
const HALF: u32 = 16;

/// A candidate: key (bits of a float that is not negative), weight in elements, and index of its first element in the
/// tensor. Items of key 0 are never selected.
pub(super) struct Item {
    pub(super) key: u32,
    pub(super) weight: u64,
    pub(super) place: u64,
}

/// The selected items of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Selected {
    /// All items above this key.
    key: u32,
    /// Items with this key before this place.
    before: u64,
}

impl Selected {
    /// Bytes of a fit.
    fn bytes(self) -> Vec<u8> {
        [&self.key.to_le_bytes()[..], &self.before.to_le_bytes()].concat()
    }

    /// From a fit.
    fn of(fit: &[u8]) -> Option<Selected> {
        let (key, before) = fit.split_first_chunk()?;
        Some(Selected { key: u32::from_le_bytes(*key), before: u64::from_le_bytes(before.try_into().ok()?) })
    }

    /// True if this item is selected.
    pub(super) fn has(self, item: &Item) -> bool {
        item.key > self.key || item.key == self.key && item.key > 0 && item.place < self.before
    }
}

/// The items of a tile, in order.
pub(super) type Items = fn((u64, u64), &Tile, &mut dyn FnMut(Item) -> ControlFlow<()>);

/// A fit for each tensor, which tells its tiles how to select the items with the largest keys, this percentage of all
/// elements. It has the width of the rows, which a tile does not know, and the selected items.
pub(super) fn largest_percent(tensors: &[&dyn Tensor], percent: u8, items: Items) -> io::Result<Vec<Fit>> {
    let total: u64 = tensors.iter().map(|tensor| tensor.rows().0.saturating_mul(tensor.rows().1)).sum();
    let elements = (u128::from(total) * u128::from(percent)).div_ceil(100) as u64;
    let selected = largest(tensors, elements, items)?;
    let fit =
        |(selected, tensor): (Selected, &&dyn Tensor)| [&tensor.rows().1.to_le_bytes()[..], &selected.bytes()].concat();
    Ok(selected.into_iter().zip(tensors).map(fit).collect())
}

/// Width of the rows and selection, from a tensor's fit.
pub(super) fn width_and_selected(fit: &[u8]) -> Option<(u64, Selected)> {
    let (width, selected) = fit.split_first_chunk()?;
    Some((u64::from_le_bytes(*width), Selected::of(selected)?))
}

/// Selects the items with the largest keys, up to this many elements in all; of equal ones the first.
fn largest(tensors: &[&dyn Tensor], elements: u64, items: Items) -> io::Result<Vec<Selected>> {
    let (high, above) = find(&count(tensors, items, |key| Some(key >> HALF))?, elements);
    let within = count(tensors, items, |key| (key >> HALF == high).then_some(key & ((1 << HALF) - 1)))?;
    let (low, at_most) = find(&within, elements - above);
    let key = high << HALF | low;
    let mut left = elements - above - at_most;
    let mut selected = Vec::with_capacity(tensors.len());
    let mut all = key > 0 && left > 0;
    for tensor in tensors {
        let mut before = 0;
        for number in 0..if all { tensor.tiles() } else { 0 } {
            let tile = tensor.tile(number)?;
            items(tensor.rows(), &tile, &mut |item| {
                if item.key != key {
                    return ControlFlow::Continue(());
                }
                match left.checked_sub(item.weight) {
                    Some(rest) => {
                        (left, before) = (rest, item.place + 1);
                        ControlFlow::Continue(())
                    }
                    None => {
                        all = false;
                        ControlFlow::Break(())
                    }
                }
            });
            if !all {
                break;
            }
        }
        selected.push(Selected { key, before });
    }
    Ok(selected)
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

/// Elements by a digit of their keys.
fn count(tensors: &[&dyn Tensor], items: Items, digit: impl Fn(u32) -> Option<u32> + Sync) -> io::Result<Vec<u64>> {
    let mut counts = vec![0u64; 1 << HALF];
    for tensor in tensors {
        let each = (0..tensor.tiles()).into_par_iter().try_fold(Vec::new, |mut counts: Vec<u64>, number| {
            counts.resize(1 << HALF, 0);
            let tile = tensor.tile(number)?;
            items(tensor.rows(), &tile, &mut |item| {
                if let Some(digit) = digit(item.key).filter(|_| item.key > 0) {
                    counts[digit as usize] += item.weight;
                }
                ControlFlow::Continue(())
            });
            give_back(tile);
            Ok::<_, io::Error>(counts)
        });
        let of_tensor = each.try_reduce(Vec::new, |a, b| {
            let (mut a, b) = if a.len() < b.len() { (b, a) } else { (a, b) };
            a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
            Ok(a)
        })?;
        counts.iter_mut().zip(of_tensor).for_each(|(sum, count)| *sum += count);
    }
    Ok(counts)
}
