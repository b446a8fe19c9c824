//! How far training moved each weight from one checkpoint of a run to the next, for `stepfs report`.

use std::path::PathBuf;

use anyhow::{Error, Result};
use indicatif::ProgressBar;
use rayon::prelude::*;

use crate::terminal::format::causes;
use formats::{InOrder, Role};

use super::checkpoint::{Checkpoint, Found};
use super::diff::is_alike;
use super::values::{Change, Place, changes};
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
    /// States that could not be read, or not as a whole, each with the first reason.
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
    /// Of each pair.
    pub updates: Vec<Update>,
}

/// How a weight changed from one state to the next, as `stepfs diff` has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Update {
    /// One of both lacks the weight, has it in another shape, or could not be read.
    Missing,
    /// So many values before and after are not finite.
    NotFinite([u64; 2]),
    /// All bits are the same.
    Same,
    /// All values were 0, and some changed.
    FromZero,
    /// The norm of the change divided by the norm before it: finite.
    Share(f64),
}

/// Reads the states, oldest first, with at most `most_open` files open at once, but two states at least. The weights are those
/// of the newest state. Each weight of a state is read once, or twice if the state is the last of those that are open
/// together. One state has no update, and is not opened.
pub fn updates(source: &dyn Source, states: &[State], most_open: usize, bar: &ProgressBar) -> Updates {
    let mut found = Updates::default();
    if states.len() < 2 {
        return found;
    }
    let newest = (0..states.len()).rev().find_map(|at| match open(source, &states[at]) {
        Ok(checkpoint) => Some((at, rows(&checkpoint), at_once(&checkpoint, most_open))),
        Err(error) => {
            found.unread.push((at, causes(&error)));
            None
        }
    });
    let Some((newest, (rows, left_out), at_once)) = newest else { return found };
    (found.rows, found.left_out) = (rows, left_out);
    if found.rows.is_empty() {
        return found;
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
            found.add(&window, bar);
            window.drain(..window.len().saturating_sub(1));
        }
    }
    found
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
        updates: Vec::new(),
    };
    (all.iter().map(row).collect(), count - all.len())
}

impl Updates {
    /// Adds the updates between states that follow each other.
    fn add(&mut self, window: &[(usize, Checkpoint)], bar: &ProgressBar) {
        self.pairs.extend(window.windows(2).map(|pair| (pair[0].0, pair[1].0)));
        let failed = self.rows.par_iter_mut().map(|row| {
            let found: Vec<_> = window.iter().map(|(at, state)| (*at, state.get(&row.name))).collect();
            let alike = |(_, a): &(usize, Option<Found>), (_, b): &(usize, Option<Found>)| match (a, b) {
                (Some(a), Some(b)) => is_alike(*a, *b),
                (a, b) => a.is_none() && b.is_none(),
            };
            let mut failed = Vec::new();
            for (number, run) in found.chunk_by(alike).enumerate() {
                row.updates.extend((number > 0).then_some(Update::Missing));
                row.updates.extend(between(run, bar, &mut failed));
            }
            failed.into_iter().map(|(at, error)| (at, causes(&error.context(row.name.clone())))).collect()
        });
        for (at, why) in failed.collect::<Vec<Vec<_>>>().concat() {
            if self.unread.iter().all(|(known, _)| *known != at) {
                self.unread.push((at, why));
            }
        }
    }
}

/// The updates of a tensor between states in which it is alike. Those to and from a state in which it cannot be read are
/// missing.
fn between(run: &[(usize, Option<Found>)], bar: &ProgressBar, failed: &mut Vec<(usize, Error)>) -> Vec<Update> {
    let missing = || vec![Update::Missing; run.len().saturating_sub(1)];
    let found: Vec<Found> = run.iter().filter_map(|(_, found)| *found).collect();
    let [first, _, ..] = found[..] else { return missing() };
    let dtype = first.tensor.dtype;
    if !dtype.is_lattice_float() {
        return missing();
    }
    let sources: Vec<_> = found.iter().map(|of| InOrder::new(&of.part.file, &of.part.description)).collect();
    let places: Vec<Place> =
        found.iter().zip(&sources).map(|(of, file)| Place { file, extent: of.tensor.extent.clone() }).collect();
    match changes(dtype, &places.iter().collect::<Vec<_>>(), &|bytes| bar.inc(bytes)) {
        Ok(changes) => changes.iter().map(Update::of).collect(),
        Err((number, error)) => {
            failed.push((run[number].0, of_file(&found[number].part.path)(error)));
            let mut out = between(&run[..number], bar, failed);
            out.extend((number > 0).then_some(Update::Missing));
            out.extend((number + 1 < run.len()).then_some(Update::Missing));
            out.extend(between(&run[number + 1..], bar, failed));
            out
        }
    }
}

impl Update {
    fn of(change: &Change) -> Update {
        let share = change.difference.rms() / change.before.rms();
        match change.changed {
            _ if change.not_finite != [0, 0] => Update::NotFinite(change.not_finite),
            0 => Update::Same,
            _ if change.before.max == 0.0 => Update::FromZero,
            // Squares of numbers above 1e154 overflow.
            _ if share.is_finite() => Update::Share(share),
            _ => Update::NotFinite([0, 0]),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs::{self, File, Permissions};
    use std::io;
    use std::path::Path;

    use super::Update::{FromZero, Missing, NotFinite, Same, Share};
    use super::*;

    /// Safetensors files, `step_0` and so on.
    struct Files {
        dir: tempfile::TempDir,
        /// When `step_3` opens again, `step_2` loses its last byte.
        is_cut: bool,
        opened: Cell<usize>,
    }

    impl Source for Files {
        fn name(&self) -> &str {
            "run"
        }

        fn at(&self) -> &Path {
            self.dir.path()
        }

        fn open(&self, path: &Path) -> io::Result<(File, Permissions)> {
            self.opened.set(self.opened.get() + 1);
            let before = path.with_file_name("step_2.safetensors");
            if self.is_cut && path.ends_with("step_3.safetensors") && before.exists() {
                let file = File::options().write(true).open(&before)?;
                file.set_len(file.metadata()?.len() - 1)?;
            }
            let file = File::open(path)?;
            let permissions = file.metadata()?.permissions();
            Ok((file, permissions))
        }
    }

    impl Files {
        /// Each state has these weights of two values.
        fn of(states: &[&[(&str, [f32; 2])]]) -> Files {
            let dir = tempfile::tempdir().unwrap();
            for (at, weights) in states.iter().enumerate() {
                let entry = |(at, (name, _)): (usize, &(&str, [f32; 2]))| {
                    format!(
                        "\"{name}\":{{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[{},{}]}}",
                        8 * at,
                        8 * at + 8
                    )
                };
                let head = format!("{{{}}}", weights.iter().enumerate().map(entry).collect::<Vec<_>>().join(","));
                let mut bytes = (head.len() as u64).to_le_bytes().to_vec();
                bytes.extend(head.bytes());
                bytes.extend(weights.iter().flat_map(|(_, values)| values).flat_map(|value| value.to_le_bytes()));
                fs::write(dir.path().join(format!("step_{at}.safetensors")), bytes).unwrap();
            }
            Files { dir, is_cut: false, opened: Cell::new(0) }
        }

        fn updates(&self, count: usize) -> Updates {
            let state = |at: usize| State {
                root: self.dir.path().to_path_buf(),
                name: format!("step_{at}"),
                files: vec![format!("step_{at}.safetensors").into()],
            };
            updates(self, &(0..count).map(state).collect::<Vec<_>>(), 64, &ProgressBar::hidden())
        }
    }

    #[test]
    fn a_change_is_told_by_its_kind() {
        const NAN: f32 = f32::NAN;
        let states = [[0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [3.0, 9.0], [3.0, NAN], [NAN, NAN], [NAN, NAN], [1.0, 1.0]];
        let weights = states.map(|values| [("w.weight", values)]);
        let found = Files::of(&weights.each_ref().map(|of| &of[..])).updates(8);
        let nan = |before, after| NotFinite([before, after]);
        let told = [Same, FromZero, Share(1.0), nan(0, 1), nan(1, 2), nan(2, 2), nan(2, 0)];
        assert_eq!(found.rows[0].updates, told);
        assert!(found.unread.is_empty());
    }

    #[test]
    fn a_tensor_that_cannot_be_read_costs_its_own_cells_alone() {
        let states = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0].map(|value| [("a.weight", [value; 2]), ("b.weight", [value; 2])]);
        let mut files = Files::of(&states.each_ref().map(|of| &of[..]));
        files.is_cut = true;
        let found = files.updates(6);
        let shares: Vec<_> = found.rows.iter().map(|row| (row.name.as_str(), row.updates.as_slice())).collect();
        let one = Share(1.0);
        assert_eq!(shares, [("a.weight", &[one; 5][..]), ("b.weight", &[one, Missing, Missing, one, one])]);
        let [(2, why)] = &found.unread[..] else { panic!("{:?}", found.unread) };
        assert!(why.starts_with("b.weight: step_2.safetensors: "), "{why}");
    }

    #[test]
    fn one_state_is_not_opened() {
        let files = Files::of(&[&[("w.weight", [1.0, 2.0])]]);
        assert!(files.updates(1).rows.is_empty());
        assert_eq!(files.opened.get(), 0);
    }
}
