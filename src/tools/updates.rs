//! How far training moved each weight from one checkpoint of a run to the next, for `stepfs report`.

use std::path::PathBuf;

use anyhow::Result;
use indicatif::ProgressBar;
use rayon::prelude::*;

use crate::terminal::format::causes;
use formats::{InOrder, Role};

use super::checkpoint::{Checkpoint, Found};
use super::diff::is_alike;
use super::values::{Place, changes};
use super::{Place as Source, of_file};

/// Rows that a page shows well. Models with more weights show the largest.
const ROWS: usize = 160;

/// Tensors of all states that are open at once. The description of a tensor takes half a kilobyte.
const MOST_TENSORS: usize = 50_000;

/// One checkpoint of a run.
pub struct State {
    /// The directory on disk that holds its files.
    pub root: PathBuf,
    /// Its name, for messages.
    pub name: String,
    /// Its files, below that directory.
    pub files: Vec<PathBuf>,
}

/// The updates of a run's weights.
#[derive(Default)]
pub struct Updates {
    /// The states before and after each update, by their places.
    pub pairs: Vec<(usize, usize)>,
    /// The largest weights, in the natural order of their names.
    pub rows: Vec<Row>,
    /// Further weights.
    pub left_out: usize,
    /// States that could not be read, each with the reason.
    pub unread: Vec<(usize, String)>,
    /// Losses that the states hold at their roots: state, name, and value.
    pub losses: Vec<(usize, &'static str, f64)>,
}

/// One weight.
pub struct Row {
    /// Its path in the checkpoint.
    pub name: String,
    /// Its bytes in the newest state.
    pub bytes: u64,
    /// Of each pair: the norm of the update divided by the norm before it, as `stepfs diff` has it. `None` if one of both
    /// lacks the weight or has it in another shape, or if the quotient is not finite.
    pub relative: Vec<Option<f64>>,
}

/// Reads the states, oldest first, with at most `most_open` files open at once, but two states at least. The weights are those
/// of the newest state. Each weight of a state is read once, or twice if the state is the last of those that are open
/// together.
///
/// # Errors
/// Those of the device during the arithmetic.
pub fn updates(source: &dyn Source, states: &[State], most_open: usize, bar: &ProgressBar) -> Result<Updates> {
    let mut found = Updates::default();
    let newest = (0..states.len()).rev().find_map(|at| match open(source, &states[at]) {
        Ok(checkpoint) => Some((at, rows(&checkpoint), at_once(&checkpoint, most_open))),
        Err(error) => {
            found.unread.push((at, causes(&error)));
            None
        }
    });
    let Some((newest, (rows, left_out), at_once)) = newest else { return Ok(found) };
    (found.rows, found.left_out) = (rows, left_out);
    if found.rows.is_empty() {
        return Ok(found);
    }
    let bytes: u64 = found.rows.iter().map(|row| row.bytes).sum();
    bar.set_length(bytes * newest as u64);
    let mut window: Vec<(usize, Checkpoint)> = Vec::new();
    for (at, state) in states.iter().enumerate().take(newest + 1) {
        match open(source, state) {
            Ok(checkpoint) => {
                let losses = checkpoint.parts.iter().flat_map(|part| &part.description.progress.losses);
                found.losses.extend(losses.map(|(name, value)| (at, *name, *value)));
                window.push((at, checkpoint));
            }
            Err(error) => found.unread.push((at, causes(&error))),
        }
        if window.len() == at_once || at == newest {
            found.add(&window, bar)?;
            window.drain(..window.len().saturating_sub(1));
        }
    }
    Ok(found)
}

/// States to open together, if all are like this one.
fn at_once(checkpoint: &Checkpoint, most_open: usize) -> usize {
    let parts = &checkpoint.parts;
    // A table's description has an entry for each of its rows.
    if parts.iter().any(|part| !part.description.tables.is_empty()) {
        return 2;
    }
    let tensors: usize = parts.iter().map(|part| part.description.tensors.len()).sum();
    (most_open / parts.len().max(1)).min(MOST_TENSORS / tensors.max(1)).max(2)
}

fn open(source: &dyn Source, state: &State) -> Result<Checkpoint> {
    Checkpoint::of(source, (&state.root, state.name.clone()), true, state.files.clone())
}

/// The rows of the largest weights, and the number of the others.
fn rows(checkpoint: &Checkpoint) -> (Vec<Row>, usize) {
    let mut all = checkpoint.tensors();
    all.retain(|(_, found)| found.tensor.dtype.is_lattice_float() && found.tensor.role.group() != Role::Optimizer);
    // Without a model, as in a file of arrays, all floats count.
    if all.iter().any(|(_, found)| found.tensor.role.group() == Role::Weight) {
        all.retain(|(_, found)| found.tensor.role.group() == Role::Weight);
    }
    let mut sizes: Vec<u64> = all.iter().map(|(_, found)| found.tensor.bytes()).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let least = sizes.get(ROWS - 1).copied().unwrap_or(0);
    let count = all.len();
    // Of equal ones the first.
    let mut equal = ROWS - sizes.iter().take_while(|size| **size > least).count().min(ROWS);
    all.retain(|(_, found)| match found.tensor.bytes().cmp(&least) {
        std::cmp::Ordering::Equal if equal > 0 => {
            equal -= 1;
            true
        }
        order => order.is_gt(),
    });
    let row = |(name, found): &(&str, Found)| Row {
        name: name.to_string(),
        bytes: found.tensor.bytes(),
        relative: Vec::new(),
    };
    (all.iter().map(row).collect(), count - all.len())
}

impl Updates {
    /// Adds the updates between states that follow each other.
    fn add(&mut self, window: &[(usize, Checkpoint)], bar: &ProgressBar) -> Result<()> {
        self.pairs.extend(window.windows(2).map(|pair| (pair[0].0, pair[1].0)));
        self.rows.par_iter_mut().try_for_each(|row| {
            let found: Vec<Option<Found>> = window.iter().map(|(_, state)| state.get(&row.name)).collect();
            let alike = |a: &Option<Found>, b: &Option<Found>| match (a, b) {
                (Some(a), Some(b)) => is_alike(*a, *b),
                (a, b) => a.is_none() && b.is_none(),
            };
            for (number, run) in found.chunk_by(alike).enumerate() {
                if number > 0 {
                    row.relative.push(None);
                }
                row.relative.extend(relative(run, bar)?);
            }
            Ok(())
        })
    }
}

/// The relative updates of a tensor between states in which it is alike.
fn relative(run: &[Option<Found>], bar: &ProgressBar) -> Result<Vec<Option<f64>>> {
    let found: Vec<Found> = run.iter().copied().flatten().collect();
    let [first, ..] = found[..] else { return Ok(vec![None; run.len().saturating_sub(1)]) };
    let dtype = first.tensor.dtype;
    if !dtype.is_lattice_float() {
        return Ok(vec![None; run.len() - 1]);
    }
    let sources: Vec<_> = found.iter().map(|of| InOrder::new(&of.part.file, &of.part.description)).collect();
    let places: Vec<Place> =
        found.iter().zip(&sources).map(|(of, file)| Place { file, extent: of.tensor.extent.clone() }).collect();
    let changes = changes(dtype, &places.iter().collect::<Vec<_>>(), &|bytes| bar.inc(bytes))
        .map_err(of_file(&first.part.path))?;
    let quotient = |change: &super::values::Change| change.difference.rms() / change.before.rms();
    Ok(changes.iter().map(quotient).map(|share| Some(share).filter(|share| share.is_finite())).collect())
}
