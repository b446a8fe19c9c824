//! How far training moved each weight from one checkpoint of a run to the next, for `stepfs report`.

use std::cmp::Reverse;
use std::path::PathBuf;

use anyhow::{Error, Result};
use indicatif::ProgressBar;

use crate::terminal::format::causes;
use formats::Role;

use super::Place as Source;
use super::checkpoint::{Checkpoint, Found, is_alike};
use super::diff::changes;
use super::values::Change;

/// Rows that a page shows well. Models with more weights show the largest.
const ROWS: usize = 160;

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
    /// Of each pair.
    pub updates: Vec<Update>,
}

/// How a weight changed from one state to the next, as `stepfs diff` has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Update {
    /// One of both lacks the weight, or has it in another shape.
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

/// Compares the states, given oldest first, each with the one before it, from the newest one on: the weights are that one's.
/// A state that cannot be read is left out. One state has no update, and is not opened.
pub fn updates(source: &dyn Source, states: &[State], bar: &ProgressBar) -> Updates {
    let mut found = Updates::default();
    if states.len() < 2 {
        return found;
    }
    let mut after: Option<(usize, Checkpoint)> = None;
    for (at, state) in states.iter().enumerate().rev() {
        let opened = Checkpoint::of(source, (&state.root, state.name.clone()), true, state.files.clone());
        let now = match opened {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                found.unread.push((at, causes(&error)));
                continue;
            }
        };
        match &after {
            None => {
                (found.rows, found.left_out) = rows(&now);
                bar.set_length(found.rows.iter().map(|row| row.bytes).sum::<u64>() * at as u64);
            }
            Some((later, after)) => {
                if let Err((side, error)) = found.add((at, &now), (*later, after), bar) {
                    found.unread.push(([at, *later][side], causes(&error)));
                    if side == 0 {
                        continue;
                    }
                }
            }
        }
        if found.rows.is_empty() {
            break;
        }
        let losses = now.parts.iter().flat_map(|part| &part.description.progress.losses);
        found.losses.extend(losses.map(|(name, value)| (at, *name, *value)));
        after = Some((at, now));
    }
    found.pairs.reverse();
    found.unread.reverse();
    found.rows.iter_mut().for_each(|row| row.updates.reverse());
    found
}

/// The rows of the largest weights, and the number of the others.
fn rows(checkpoint: &Checkpoint) -> (Vec<Row>, usize) {
    let mut all = checkpoint.tensors();
    all.retain(|(_, found)| found.tensor.dtype.is_lattice_float() && found.tensor.role.group() != Role::Optimizer);
    // Without a model, as in a file of arrays, all floats count.
    if all.iter().any(|(_, found)| found.tensor.role.group() == Role::Weight) {
        all.retain(|(_, found)| found.tensor.role.group() == Role::Weight);
    }
    let left_out = all.len().saturating_sub(ROWS);
    // Of equal ones the first.
    let mut largest: Vec<usize> = (0..all.len()).collect();
    largest.sort_by_key(|at| Reverse(all[*at].1.tensor.bytes()));
    largest.truncate(ROWS);
    largest.sort_unstable();
    let row =
        |(name, found): (&str, Found)| Row { name: name.to_string(), bytes: found.tensor.bytes(), updates: Vec::new() };
    (largest.into_iter().map(|at| row(all[at])).collect(), left_out)
}

impl Updates {
    /// Adds the updates from one state to the next.
    fn add(
        &mut self,
        a: (usize, &Checkpoint),
        b: (usize, &Checkpoint),
        bar: &ProgressBar,
    ) -> Result<(), (usize, Error)> {
        let pair =
            |row: &Row| Some((a.1.get(&row.name)?, b.1.get(&row.name)?)).filter(|(a, b)| is_alike(a.tensor, b.tensor));
        let found: Vec<_> = self.rows.iter().map(pair).collect();
        let both = self.rows.iter().zip(&found).filter_map(|(row, both)| both.map(|(a, b)| (row.name.as_str(), a, b)));
        let mut changes = changes(&both.collect::<Vec<_>>(), bar)?.into_iter();
        for (row, both) in self.rows.iter_mut().zip(&found) {
            let change = both.is_some().then(|| changes.next()).flatten();
            row.updates.push(change.map_or(Update::Missing, |change| Update::of(&change)));
        }
        self.pairs.push((a.0, b.0));
        Ok(())
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

    use super::Update::{FromZero, NotFinite, Same, Share};
    use super::*;

    /// Safetensors files, `step_0` and so on.
    struct Files {
        dir: tempfile::TempDir,
        /// When `step_1` opens, `step_2` loses its last byte.
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
            if self.is_cut && path.ends_with("step_1.safetensors") {
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
            updates(self, &(0..count).map(state).collect::<Vec<_>>(), &ProgressBar::hidden())
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
    fn a_state_that_cannot_be_read_is_left_out() {
        let states = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0].map(|value| [("a.weight", [value; 2]), ("b.weight", [value; 2])]);
        let mut files = Files::of(&states.each_ref().map(|of| &of[..]));
        files.is_cut = true;
        let found = files.updates(6);
        assert_eq!(found.pairs, [(0, 1), (2, 3), (3, 4), (4, 5)]);
        assert!(found.rows.iter().all(|row| row.updates == [Share(1.0); 4]));
        let [(2, why)] = &found.unread[..] else { panic!("{:?}", found.unread) };
        assert!(why.starts_with("step_2.safetensors: b.weight: "), "{why}");
    }

    #[test]
    fn one_state_is_not_opened() {
        let files = Files::of(&[&[("w.weight", [1.0, 2.0])]]);
        assert!(files.updates(1).rows.is_empty());
        assert_eq!(files.opened.get(), 0);
    }
}
