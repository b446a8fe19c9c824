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
use std::ops::{ControlFlow, Range};

use super::select::{Item, largest_percent, width_and_selected};
use super::{Fit, State, System, Tensor, Tile, values};
use crate::codec::Corrupt;
use crate::entropy::varint;

/// SCAR with one of its two selections.
#[derive(Clone, Copy, Debug)]
pub struct Scar {
    /// Percent of the parameters in each checkpoint, 1 to 100.
    pub percent: u8,
    /// Save the blocks that changed most, not the next partition.
    pub priority: bool,
}

impl Scar {
    /// The part of each tensor in this partition: a range of its elements, as bytes.
    fn turn(self, tensors: &[&dyn Tensor], position: u32) -> Vec<Fit> {
        let elements = |tensor: &dyn Tensor| tensor.rows().0.saturating_mul(tensor.rows().1);
        let total: u128 = tensors.iter().map(|tensor| u128::from(elements(*tensor))).sum();
        let partitions = 100u32.div_ceil(self.percent.max(1).into());
        let number = u128::from(position.saturating_sub(1) % partitions);
        let (from, to) = (total * number / u128::from(partitions), total * (number + 1) / u128::from(partitions));
        let mut start = 0;
        let each = tensors.iter().map(|tensor| {
            let len = u128::from(elements(*tensor));
            let place = |at: u128| (at.clamp(start, start + len) - start) as u64;
            let range = [place(from), place(to)];
            start += len;
            range.map(u64::to_le_bytes).concat()
        });
        each.collect()
    }

    /// The saved elements of a tile: ascending, disjoint runs.
    fn runs(self, fit: &[u8], tile: &Tile) -> Option<Vec<Range<usize>>> {
        let len = tile.values.len();
        let mut runs: Vec<Range<usize>> = Vec::new();
        if self.priority {
            let (width, selected) = width_and_selected(fit)?;
            blocks((0, width), tile, &mut |item| {
                if selected.has(&item) {
                    let start = (item.place - tile.first) as usize;
                    let end = start + item.weight as usize;
                    match runs.last_mut().filter(|run| run.end == start) {
                        Some(run) => run.end = end,
                        None => runs.push(start..end),
                    }
                }
                ControlFlow::Continue(())
            });
            return Some(runs);
        }
        let (from, to) = fit.split_first_chunk()?;
        let place = |at: u64| at.saturating_sub(tile.first).min(len as u64) as usize;
        let run = place(u64::from_le_bytes(*from))..place(u64::from_le_bytes(to.try_into().ok()?));
        runs.extend(Some(run).filter(|run| !run.is_empty()));
        Some(runs)
    }
}

/// The rows in a tile, keyed by the square of their change.
fn blocks((_, width): (u64, u64), tile: &Tile, each: &mut dyn FnMut(Item) -> ControlFlow<()>) {
    let Some(previous) = tile.before() else { return };
    let (mut start, len) = (0, tile.values.len());
    while start < len {
        let left = width.max(1) - (tile.first + start as u64) % width.max(1);
        let end = start + left.min((len - start) as u64) as usize;
        let pairs = tile.values[start..end].iter().zip(&previous.values[start..end]);
        let square: f64 = pairs.map(|(new, old)| (f64::from(*new) - f64::from(*old)).powi(2)).sum();
        let key = (square as f32).max(if square > 0.0 { f32::MIN_POSITIVE } else { 0.0 }).to_bits();
        let item = Item { key, weight: (end - start) as u64, place: tile.first + start as u64 };
        if each(item).is_break() {
            return;
        }
        start = end;
    }
}

impl System for Scar {
    fn fit(&self, tensors: &[&dyn Tensor], position: u32) -> io::Result<Vec<Fit>> {
        if !self.priority {
            return Ok(self.turn(tensors, position));
        }
        largest_percent(tensors, self.percent, blocks)
    }

    fn stands_alone(&self) -> bool {
        false
    }

    fn encode(&self, fit: &Fit, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
        let previous = tile.before()?;
        if tile.values.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let runs = self.runs(fit, tile)?;
        let mut state = State { values: previous.values.clone(), bins: None };
        let mut saved = Vec::new();
        varint::put(runs.len() as u64, out);
        let mut end = 0;
        for run in runs {
            varint::put((run.start - end) as u64, out);
            varint::put(run.len() as u64, out);
            state.values[run.clone()].copy_from_slice(&tile.values[run.clone()]);
            saved.extend_from_slice(&tile.values[run.clone()]);
            end = run.end;
        }
        values::put(&saved, out);
        Some(state)
    }

    fn decode(&self, mut payload: &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let previous = previous.filter(|previous| previous.values.len() == len).ok_or(Corrupt("no previous state"))?;
        let mut left = varint::take(&mut payload)?;
        let (mut runs, mut at) = (Vec::new(), 0usize);
        while left > 0 {
            left -= 1;
            let (gap, run) = (varint::take(&mut payload)?, varint::take(&mut payload)?);
            let start = usize::try_from(gap).ok().and_then(|gap| at.checked_add(gap));
            let end = start.and_then(|start| start.checked_add(usize::try_from(run).ok()?));
            // Runs that are not empty, so never more of them than elements.
            match start.zip(end).filter(|(start, end)| start < end && *end <= len) {
                Some((start, end)) => runs.push(start..end),
                None => return Err(Corrupt("a run beyond the tile")),
            }
            at = end.unwrap_or(len);
        }
        let saved = values::take(payload, runs.iter().map(Range::len).sum())?;
        let mut state = State { values: previous.values.clone(), bins: None };
        let mut saved = saved.as_slice();
        for run in runs {
            let (own, rest) = saved.split_at(run.len());
            state.values[run].copy_from_slice(own);
            saved = rest;
        }
        Ok(state)
    }
}
