//! SCAR and TOPN: a state holds the exact values of some parameters; all others keep the values of their last save. The
//! first state of a chain is whole.
//!
//! **SCAR** (Qiao, Aragam, Zhang and Xing, 2018, "Fault Tolerance in Iterative-Convergent Machine Learning"):
//!
//! - By turns, as LC-Checkpoint's section 4.1 compares it: the sequence of all parameters is cut into equal partitions,
//!   as many as a checkpoint's share fits into the whole. Each checkpoint updates the next partition.
//! - By priority, as the original (section 4): the blocks that changed most since their last save. A block is a row of
//!   a tensor here, and a vector is one block; a tile's edge cuts blocks as it cuts rows. The change of a block is the
//!   root of the sum of its squares; the original leaves the norm to the model.
//!
//! Payload: the places as runs ([`super::select`]); then all values. SCAR does not compress them.
//!
//! **TOPN** is LC-Checkpoint's comparison in its section 4.1. The n parameters that differ most from the previous state
//! take their new values. They are stored as compressed sparse rows. n is a share of all parameters of the checkpoint,
//! and the threshold is exact over all of them: of equal differences at the threshold, the first are taken. As for LC,
//! the previous state is the decoded one. Index and value take eight bytes for each element of an fp32 tensor, so that
//! 10% of the elements are 20% of the bytes. That is the paper's statement about the overhead of places.
//!
//! Payload: width of the tensor's rows, varint; column of the tile's first element, varint. For each row with a part in
//! the tile, the number of its elements follows, u32. Then their columns, ascending in each row, u32, and their values.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::select::{Item, Largest, elements, largest_percent, put_runs, ranges, row_lengths, take_runs, update};
use super::{Fit, NO_PREVIOUS, State, System, Tensor, Tile, code};
use codec::Corrupt;
use codec::entropy::varint;

/// SCAR or TOPN.
#[derive(Debug)]
pub(super) struct Partial {
    /// Percent of the parameters in each checkpoint, 1 to 100.
    pub(super) percent: u8,
    pub(super) by: By,
}

/// How parameters are selected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum By {
    /// SCAR: the next partition.
    Turn,
    /// SCAR: the rows that changed most.
    Row,
    /// TOPN: the elements that changed most.
    Element,
}

/// The saved part of a tensor.
#[derive(Debug)]
enum Saved {
    Turn(Range<u64>),
    Rows(Largest),
    Elements(Largest),
}

impl Partial {
    /// The part of each tensor in this partition.
    fn turn(&self, tensors: &[&dyn Tensor], position: u32) -> Vec<Saved> {
        let total: u128 = tensors.iter().map(|tensor| u128::from(elements(*tensor))).sum();
        let partitions = 100u32.div_ceil(self.percent.max(1).into());
        let number = u128::from(position.saturating_sub(1) % partitions);
        let (from, to) = (total * number / u128::from(partitions), total * (number + 1) / u128::from(partitions));
        let mut start = 0;
        let part = |tensor: &&dyn Tensor| {
            let end = start + u128::from(elements(*tensor));
            let place = |at: u128| (at.clamp(start, end) - start) as u64;
            let part = place(from)..place(to);
            start = end;
            Saved::Turn(part)
        };
        tensors.iter().map(part).collect()
    }
}

/// The rows in a tile, keyed by the square of their change.
fn changed_rows(width: u64, tile: &Tile, each: &mut dyn FnMut(Item)) {
    let Some(previous) = tile.before() else { return };
    for row in ranges(&row_lengths(tile.first, width.max(1), tile.values.len())) {
        let pairs = tile.values[row.clone()].iter().zip(&previous[row.clone()]);
        let square: f64 = pairs.map(|(new, old)| (f64::from(*new) - f64::from(*old)).powi(2)).sum();
        let key = (square as f32).max(if square > 0.0 { f32::MIN_POSITIVE } else { 0.0 }).to_bits();
        each(Item { key, weight: row.len() as u64, place: tile.first + row.start as u64 });
    }
}

/// The elements of a tile, keyed by their distance from the previous state.
fn changed_elements(_: u64, tile: &Tile, each: &mut dyn FnMut(Item)) {
    let Some(previous) = tile.before() else { return };
    for (place, (new, old)) in (tile.first..).zip(tile.values.iter().zip(previous)) {
        each(Item { key: (new - old).abs().to_bits(), weight: 1, place });
    }
}

impl System for Partial {
    fn fit(&self, tensors: &[&dyn Tensor], position: u32) -> io::Result<Vec<Arc<dyn Fit>>> {
        let largest = |items| largest_percent(tensors, self.percent, items).map(Vec::into_iter);
        let saved: Vec<Saved> = match self.by {
            By::Turn => self.turn(tensors, position),
            By::Row => largest(changed_rows)?.map(Saved::Rows).collect(),
            By::Element => largest(changed_elements)?.map(Saved::Elements).collect(),
        };
        Ok(saved.into_iter().map(|saved| Arc::new(saved) as Arc<dyn Fit>).collect())
    }

    fn stands_alone(&self) -> bool {
        false
    }

    fn take(&self, payload: &mut &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let places = if self.by == By::Element { take_columns(payload, len)? } else { take_runs(payload, len)? };
        let saved = code::take_exact(payload, places.len())?;
        Ok(update(&previous.ok_or(NO_PREVIOUS)?.values, &places, &saved))
    }
}

impl Fit for Saved {
    fn put(&self, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
        let previous = tile.before()?;
        let place = |at: u64| at.saturating_sub(tile.first).min(tile.values.len() as u64) as usize;
        let places = match self {
            Saved::Turn(part) => (place(part.start)..place(part.end)).collect(),
            Saved::Rows(largest) | Saved::Elements(largest) => largest.places(tile),
        };
        match self {
            Saved::Elements(largest) => put_columns(&places, tile, largest.width.max(1), out)?,
            _ => put_runs(&places, out),
        }
        let saved: Vec<f32> = places.iter().map(|&place| tile.values[place]).collect();
        code::put_exact(&saved, out);
        Some(update(previous, &places, &saved))
    }
}

/// Appends the places in a tile of rows with this width. `None`, and nothing appended, for a row of more than 2^32
/// elements: it has no columns in this format.
fn put_columns(places: &[usize], tile: &Tile, width: u64, out: &mut Vec<u8>) -> Option<()> {
    u32::try_from(width - 1).ok()?;
    let first = tile.first % width;
    let mut counts = vec![0u32; rows(first, width, tile.values.len())];
    let column = |&place: &usize| {
        let at = first + place as u64;
        counts[(at / width) as usize] += 1;
        (at % width) as u32
    };
    let columns: Vec<u32> = places.iter().map(column).collect();
    varint::put(width, out);
    varint::put(first, out);
    counts.iter().chain(&columns).for_each(|number| out.extend(number.to_le_bytes()));
    Some(())
}

/// Takes places below `len` off the front of `payload`.
fn take_columns(payload: &mut &[u8], len: usize) -> Result<Vec<usize>, Corrupt> {
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
    Ok(places)
}

/// Number of rows that `len` elements touch. The first element is in column `first`.
fn rows(first: u64, width: u64, len: usize) -> usize {
    if len == 0 { 0 } else { ((first as u128 + len as u128).div_ceil(width.into())) as usize }
}
