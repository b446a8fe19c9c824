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
use std::sync::Arc;

use super::select::{Item, Largest, largest_percent, update};
use super::{Fit, NO_PREVIOUS, State, System, Tensor, Tile, code};
use codec::Corrupt;
use codec::entropy::varint;

/// TOPN.
#[derive(Debug)]
pub(super) struct TopN {
    /// Percent of the parameters that take their new values, 1 to 100.
    pub(super) percent: u8,
}

/// The elements of a tile, keyed by their distance from the previous state.
fn elements(_: u64, tile: &Tile, each: &mut dyn FnMut(Item)) {
    let Some(previous) = tile.before() else { return };
    for (place, (new, old)) in (tile.first..).zip(tile.values.iter().zip(previous)) {
        each(Item { key: (new - old).abs().to_bits(), weight: 1, place });
    }
}

impl System for TopN {
    fn fit(&self, tensors: &[&dyn Tensor], _: u32) -> io::Result<Vec<Arc<dyn Fit>>> {
        let selected = largest_percent(tensors, self.percent, elements)?;
        Ok(selected.into_iter().map(|largest| Arc::new(Rows(largest)) as Arc<dyn Fit>).collect())
    }

    fn stands_alone(&self) -> bool {
        false
    }

    fn take(&self, payload: &mut &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let previous = previous.ok_or(NO_PREVIOUS)?;
        let (width, first) = (varint::take(payload)?, varint::take(payload)?);
        Corrupt::when(first >= width, "width of a row")?;
        let counts = code::take_words(payload, rows(first, width, len))?;
        let total = counts.iter().map(|count| u64::from(u32::from_le_bytes(*count))).sum::<u64>();
        let mut columns = code::take_words(payload, total.min(len as u64 + 1) as usize)?.iter();
        let mut places = Vec::with_capacity(columns.len());
        for (row, count) in counts.iter().enumerate() {
            let mut least = 0;
            for column in columns.by_ref().take(u32::from_le_bytes(*count) as usize) {
                let column = u64::from(u32::from_le_bytes(*column));
                let at = (row as u64).checked_mul(width).and_then(|start| (start + column).checked_sub(first));
                let at = at.filter(|at| (least..width).contains(&column) && *at < len as u64);
                places.push(at.ok_or(Corrupt("a place beyond the tile"))? as usize);
                least = column + 1;
            }
        }
        Ok(update(&previous.values, &places, &code::take_exact(payload, places.len())?))
    }
}

#[derive(Debug)]
struct Rows(Largest);

impl Fit for Rows {
    fn put(&self, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
        let previous = tile.before()?;
        let width = self.0.width.max(1);
        // A row of more than 2^32 elements has no columns in this format.
        u32::try_from(width - 1).ok()?;
        let first = tile.first % width;
        let places = self.0.places(tile);
        let mut counts = vec![0u32; rows(first, width, tile.values.len())];
        let column = |&place: &usize| {
            let at = first + place as u64;
            counts[(at / width) as usize] += 1;
            (at % width) as u32
        };
        let columns: Vec<u32> = places.iter().map(column).collect();
        let taken: Vec<f32> = places.iter().map(|&place| tile.values[place]).collect();
        varint::put(width, out);
        varint::put(first, out);
        counts.iter().chain(&columns).for_each(|number| out.extend(number.to_le_bytes()));
        code::put_exact(&taken, out);
        Some(update(previous, &places, &taken))
    }
}

/// Number of rows that these elements touch, the first of which is in this column.
fn rows(first: u64, width: u64, len: usize) -> usize {
    if len == 0 { 0 } else { ((first as u128 + len as u128).div_ceil(width.into())) as usize }
}
