//! TOPN, LC-Checkpoint's comparison in its section 4.1. The n parameters that differ most from the previous state take
//! their new values; all others stay. It is stored as compressed sparse rows.
//!
//! n is a share of all parameters of the checkpoint, and the threshold is exact over all of them ([`super::select`]):
//! of equal differences at the threshold, the first are taken. As for LC, the previous state is the decoded one. Index
//! and value take eight bytes for each element of an fp32 tensor, so that 10% of the elements are 20% of the bytes.
//! That is the paper's statement about the overhead of places.
//!
//! Payload: width of the tensor's rows, varint; column of the tile's first element, varint. For each row with a part in
//! the tile, the number of its elements follows, u32. Then their columns, ascending in each row, u32, and their values.

use std::io;
use std::ops::ControlFlow;

use super::select::{Item, largest_percent, width_and_selected};
use super::{Fit, State, System, Tensor, Tile, values};
use crate::codec::Corrupt;
use crate::entropy::varint;

/// TOPN.
#[derive(Clone, Copy, Debug)]
pub struct TopN {
    /// Percent of the parameters that take their new values, 1 to 100.
    pub percent: u8,
}

/// The elements of a tile, keyed by their distance from the previous state.
fn elements(_: (u64, u64), tile: &Tile, each: &mut dyn FnMut(Item) -> ControlFlow<()>) {
    let Some(previous) = tile.before() else { return };
    for (place, (new, old)) in (tile.first..).zip(tile.values.iter().zip(&previous.values)) {
        if each(Item { key: (new - old).abs().to_bits(), weight: 1, place }).is_break() {
            return;
        }
    }
}

impl System for TopN {
    fn fit(&self, tensors: &[&dyn Tensor], _: u32) -> io::Result<Vec<Fit>> {
        largest_percent(tensors, self.percent, elements)
    }

    fn stands_alone(&self) -> bool {
        false
    }

    fn encode(&self, fit: &Fit, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
        let previous = tile.before()?;
        if tile.values.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let (width, selected) = width_and_selected(fit)?;
        let width = width.max(1);
        let first = tile.first % width;
        let mut counts = vec![0u32; rows(first, width, tile.values.len())];
        let (mut columns, mut taken) = (Vec::new(), Vec::new());
        let mut state = State { values: previous.values.clone(), bins: None };
        // A row of more than 2^32 elements has no columns in this format.
        let mut fits = true;
        elements((0, width), tile, &mut |item| {
            if selected.has(&item) {
                let at = (item.place - tile.first) as usize;
                let (row, column) = place(first, width, at);
                fits &= u32::try_from(column).is_ok();
                counts[row] += 1;
                columns.push(column as u32);
                taken.push(tile.values[at]);
                state.values[at] = tile.values[at];
            }
            ControlFlow::Continue(())
        });
        if !fits {
            return None;
        }
        varint::put(width, out);
        varint::put(first, out);
        counts.iter().chain(&columns).for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
        values::put(&taken, out);
        Some(state)
    }

    fn decode(&self, mut payload: &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let previous = previous.filter(|previous| previous.values.len() == len).ok_or(Corrupt("no previous state"))?;
        let (width, first) = (varint::take(&mut payload)?, varint::take(&mut payload)?);
        if first >= width {
            return Err(Corrupt("width of a row"));
        }
        let (counts, mut rest) = numbers(payload, rows(first, width, len))?;
        let total = counts.iter().map(|count| u64::from(u32::from_le_bytes(*count))).sum::<u64>();
        let total =
            usize::try_from(total).ok().filter(|total| *total <= len).ok_or(Corrupt("more places than elements"))?;
        let (mut columns, after) = numbers(rest, total)?;
        rest = after;
        let taken = values::take(rest, total)?;
        let mut state = State { values: previous.values.clone(), bins: None };
        let mut taken = taken.iter();
        for (row, count) in counts.iter().enumerate() {
            let (own, others) = columns.split_at(u32::from_le_bytes(*count) as usize);
            columns = others;
            let mut least = 0;
            for (column, value) in own.iter().map(|column| u64::from(u32::from_le_bytes(*column))).zip(&mut taken) {
                let at = (row as u64).checked_mul(width).and_then(|start| (start + column).checked_sub(first));
                let at = at.filter(|_| column >= least && column < width).and_then(|at| usize::try_from(at).ok());
                let slot = at.and_then(|at| state.values.get_mut(at)).ok_or(Corrupt("a place beyond the tile"))?;
                *slot = *value;
                least = column + 1;
            }
        }
        Ok(state)
    }
}

/// `count` u32, and the bytes after them.
fn numbers(payload: &[u8], count: usize) -> Result<(&[[u8; 4]], &[u8]), Corrupt> {
    let (numbers, rest) = payload.split_at_checked(count.saturating_mul(4)).ok_or(Corrupt("places"))?;
    Ok((numbers.as_chunks().0, rest))
}

/// Number of rows that these elements touch, the first of which is in this column.
fn rows(first: u64, width: u64, len: usize) -> usize {
    if len == 0 { 0 } else { ((first as u128 + len as u128).div_ceil(width.into())) as usize }
}

/// Row within the tile, and column, of an element.
fn place(first: u64, width: u64, at: usize) -> (usize, u64) {
    let at = first + at as u64;
    ((at / width) as usize, at % width)
}
