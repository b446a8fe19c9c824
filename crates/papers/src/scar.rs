//! SCAR: a checkpoint holds one part of the parameters exactly; all others keep the values of their last save. (Qiao,
//! Aragam, Zhang and Xing, 2018, "Fault Tolerance in Iterative-Convergent Machine Learning".)
//!
//! - By turns, as LC-Checkpoint's section 4.1 compares it: the sequence of all parameters is cut into equal partitions,
//!   as many as a checkpoint's share fits into the whole. Each checkpoint updates the next partition.
//! - By priority, as the original (section 4): the blocks that changed most since their last save. A block is a row of
//!   a tensor here, and a vector is one block; a tile's edge cuts blocks as it cuts rows. The change of a block is the
//!   root of the sum of its squares; the original leaves the norm to the model.
//!
//! Values are stored exactly: SCAR does not compress. The first state of a chain is whole.
//!
//! Payload: the number of runs, varint; for each a varint, elements since the end of the one before, and a varint, its
//! length; then all values.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::select::{Item, Largest, elements, largest_percent, put_runs, take_runs, update};
use super::{Fit, NO_PREVIOUS, State, System, Tensor, Tile, code};
use codec::Corrupt;

/// SCAR with one of its two selections.
#[derive(Debug)]
pub(super) struct Scar {
    /// Percent of the parameters in each checkpoint, 1 to 100.
    pub(super) percent: u8,
    /// Save the blocks that changed most, not the next partition.
    pub(super) priority: bool,
}

/// The saved part of a tensor.
#[derive(Debug)]
enum Saved {
    Turn(Range<u64>),
    Priority(Largest),
}

impl Scar {
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
fn blocks(width: u64, tile: &Tile, each: &mut dyn FnMut(Item)) {
    let Some(previous) = tile.before() else { return };
    let (mut start, len) = (0, tile.values.len());
    while start < len {
        let left = width.max(1) - (tile.first + start as u64) % width.max(1);
        let end = start + left.min((len - start) as u64) as usize;
        let pairs = tile.values[start..end].iter().zip(&previous[start..end]);
        let square: f64 = pairs.map(|(new, old)| (f64::from(*new) - f64::from(*old)).powi(2)).sum();
        let key = (square as f32).max(if square > 0.0 { f32::MIN_POSITIVE } else { 0.0 }).to_bits();
        each(Item { key, weight: (end - start) as u64, place: tile.first + start as u64 });
        start = end;
    }
}

impl System for Scar {
    fn fit(&self, tensors: &[&dyn Tensor], position: u32) -> io::Result<Vec<Arc<dyn Fit>>> {
        let saved = match self.priority {
            false => self.turn(tensors, position),
            true => largest_percent(tensors, self.percent, blocks)?.into_iter().map(Saved::Priority).collect(),
        };
        Ok(saved.into_iter().map(|saved| Arc::new(saved) as Arc<dyn Fit>).collect())
    }

    fn stands_alone(&self) -> bool {
        false
    }

    fn take(&self, payload: &mut &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let places = take_runs(payload, len)?;
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
            Saved::Priority(largest) => largest.places(tile),
        };
        let saved: Vec<f32> = places.iter().map(|&place| tile.values[place]).collect();
        put_runs(&places, out);
        code::put_exact(&saved, out);
        Some(update(previous, &places, &saved))
    }
}
