//! Checkpoints of one run, oldest first, with the values that their program wrote.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Error, Result, anyhow, bail};

use crate::archive::model_signature;
use crate::encode::{SeriesFile, SeriesObject, encode_series};
use crate::store::{Profile, natural, open_aside};
use formats::{Description, InOrder, Kind, ReadAt, Role, Tensor, describe_at};

use super::checkpoint::{form, is_alike};
use super::of_file;
use super::values::{Place, Size, sizes};

/// Checkpoints of one run, in the order in which they were written.
pub(super) struct Series {
    pub(super) states: Vec<State>,
    /// Files of named directories that are no checkpoints, each with the reason.
    pub(super) skipped: Vec<(PathBuf, String)>,
    /// The files have a model, and only its parameters count. Without a model all numbers count.
    has_model: bool,
}

/// One checkpoint.
pub(super) struct State {
    pub(super) path: PathBuf,
    pub(super) file: File,
    pub(super) len: u64,
    modified: Option<SystemTime>,
    pub(super) description: Description,
    /// It agrees with its own checksums. A file that does not stays exact.
    intact: bool,
}

/// The units of errors.
pub(super) struct Scale {
    /// The parameters of all files.
    pub(super) weights: Size,
    /// Their updates from each file to the next.
    pub(super) update: Size,
}

impl State {
    fn open(path: &Path) -> Result<State> {
        let file = open_aside(path).map_err(of_file(path))?;
        let metadata = file.metadata().map_err(of_file(path))?;
        let mut description = match metadata.is_file() {
            true => describe_at(path, &file, open_aside).map_err(of_file(path))?,
            false => Description::opaque("neither a file nor a directory"),
        };
        description.hold_unsteady(&file).map_err(of_file(path))?;
        let intact = description.is_intact(&file).map_err(of_file(path))?;
        let (path, len, modified) = (path.to_path_buf(), metadata.len(), metadata.modified().ok());
        Ok(State { path, file, len, modified, description, intact })
    }

    fn as_file(&self) -> SeriesFile<'_> {
        let State { path, file, len, description, intact, .. } = self;
        SeriesFile { path, file, len: *len, description, intact: *intact }
    }

    fn not_understood(&self) -> Option<String> {
        match (self.description.kind, &self.description.note) {
            (Kind::Opaque, note) => Some(note.clone().unwrap_or_default()),
            _ if self.description.tensors.is_empty() => Some("it has no tensors".into()),
            _ => None,
        }
    }

    /// The file as it is archived.
    pub(super) fn in_order(&self) -> InOrder<'_> {
        InOrder::new(&self.file, &self.description)
    }
}

impl Series {
    /// Opens files in the order given; of a directory its checkpoints, in the natural order of their names (2 before
    /// 10).
    ///
    /// # Errors
    /// Files that cannot be read, are no checkpoints or of another model, or are lossy already; and less than two files.
    pub(super) fn open(paths: &[PathBuf]) -> Result<Series> {
        let (mut states, mut skipped) = (Vec::new(), Vec::new());
        for path in paths {
            if !fs::metadata(path).map_err(of_file(path))?.is_dir() {
                let state = State::open(path)?;
                if let Some(why) = state.not_understood() {
                    return Err(not_a_checkpoint(path, &why));
                }
                states.push(state);
                continue;
            }
            let before = states.len();
            for file in files(path)? {
                let state = State::open(&file)?;
                match state.not_understood() {
                    Some(why) => skipped.push((file, why)),
                    None => states.push(state),
                }
            }
            if states.len() == before {
                let why = "a directory without checkpoints in it; name the files themselves";
                return Err(not_a_checkpoint(path, why));
            }
        }
        let [first, rest @ ..] = &states[..] else { bail!("name at least two checkpoints of one run, oldest first") };
        if rest.is_empty() {
            let path = first.path.display();
            bail!("{path}: only one checkpoint; name at least two of one run, oldest first");
        }
        rest.iter().try_for_each(|other| is_of_the_same_model(first, other))?;
        // While the files are open: then a mount releases none of them meanwhile.
        refuse_lossy(&states)?;
        let has_model = states.iter().any(|state| state.description.tensors.iter().any(is_parameter));
        Ok(Series { states, skipped, has_model })
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.states.iter().map(|state| state.len).sum()
    }

    /// Whether errors of this tensor count.
    pub(super) fn counts(&self, tensor: &Tensor) -> bool {
        tensor.dtype.is_lattice_float() && (is_parameter(tensor) || !self.has_model)
    }

    /// Parameters in a file.
    pub(super) fn parameters(&self, state: &State) -> u64 {
        let tensors = state.description.tensors.iter().filter(|tensor| self.counts(tensor));
        tensors.map(|t| t.elements()).sum()
    }

    /// The last file.
    pub(super) fn last(&self) -> &State {
        &self.states[self.states.len() - 1]
    }

    /// The size of the update that led to the last file.
    pub(super) fn last_update(&self) -> Result<Size> {
        let from = self.states.len() - 2;
        Ok(self.scale_of(from..from + 1)?.update)
    }

    /// The size of the parameters and of their updates.
    pub(super) fn scale(&self) -> Result<Scale> {
        self.scale_of(0..self.states.len())
    }

    fn scale_of(&self, files: Range<usize>) -> Result<Scale> {
        let mut scale = Scale { weights: Size::default(), update: Size::default() };
        for (at, state) in self.states.iter().enumerate().take(files.end).skip(files.start) {
            let own = state.in_order();
            // The last file has no later update, only its own size.
            let later = self.states.get(at + 1).unwrap_or(state);
            let (after, of_later) = InOrder::as_later_state(&later.file, &later.description, &state.description);
            let found = by_path(&of_later);
            for tensor in state.description.tensors.iter().filter(|tensor| self.counts(tensor)) {
                let newer = found.get(tensor.path.as_str()).filter(|newer| is_alike(newer, tensor));
                let place = Place { file: &own, extent: tensor.extent.clone() };
                let other = match newer {
                    Some(newer) => Place { file: &after, extent: newer.extent.clone() },
                    None => Place { file: &own, extent: tensor.extent.clone() },
                };
                let (value, update) = sizes(tensor.dtype, &place, &other).map_err(of_file(&state.path))?;
                scale.weights.merge(&value);
                if newer.is_some() && at + 1 < self.states.len() {
                    scale.update.merge(&update);
                }
            }
        }
        Ok(scale)
    }

    /// Encodes the series under a profile, and hands over what became of each state. `dir` holds objects without names.
    ///
    /// # Errors
    /// Those of `take`, a file that changed meanwhile, and device errors.
    pub(super) fn keep(
        &self,
        profile: Profile,
        dir: &Path,
        take: &mut dyn FnMut(usize, Option<SeriesObject>) -> io::Result<()>,
    ) -> io::Result<()> {
        let files: Vec<SeriesFile> = self.states.iter().map(State::as_file).collect();
        encode_series(&files, profile, dir, &mut |at, kept| {
            let (state, now) = (&self.states[at], self.states[at].file.metadata()?);
            match (now.len(), now.modified().ok()) == (state.len, state.modified) {
                true => take(at, kept),
                false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it changed meanwhile")),
            }
        })
    }

    /// The errors of a file's parameters in `decoded`, which has the layout of [`State::in_order`].
    pub(super) fn errors(&self, state: &State, decoded: &dyn ReadAt) -> io::Result<Size> {
        let own = state.in_order();
        let mut errors = Size::default();
        for tensor in state.description.tensors.iter().filter(|tensor| self.counts(tensor)) {
            let place = |file| Place { file, extent: tensor.extent.clone() };
            errors.merge(&sizes(tensor.dtype, &place(&own), &place(decoded))?.1);
        }
        Ok(errors)
    }
}

fn not_a_checkpoint(path: &Path, why: &str) -> Error {
    anyhow!("{}: not a checkpoint that stepfs understands: {why}", path.display())
}

/// True for the tensors that published systems quantize, and that decide a model's quality.
pub(super) fn is_parameter(tensor: &Tensor) -> bool {
    matches!(tensor.role, Role::Weight | Role::Master)
}

/// The regular files right below a directory but hidden ones, in natural order.
fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(of_file(directory))? {
        let path = entry.map_err(of_file(directory))?.path();
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && fs::metadata(&path).map_err(of_file(&path))?.is_file() {
            files.push(path);
        }
    }
    files.sort_by(|a, b| natural::order(a, b));
    Ok(files)
}

/// Refuses files that a mount decodes with loss: a measurement would compare lossy values with themselves.
fn refuse_lossy(states: &[State]) -> Result<()> {
    let mut lossy = states.iter().filter_map(|state| Some((loss(&state.path)?, &state.path)));
    let Some((errors, first)) = lossy.next() else { return Ok(()) };
    let more = match lossy.count() {
        0 => String::new(),
        count => format!(" and {count} more"),
    };
    bail!(
        "{}{more}: stepfs has released this with loss{errors}; a measurement would compare the loss with itself\nName \
         copies from before the release, or exact files: set `stepfs profile --set exact DIR`, save a few checkpoints \
         in DIR, and name those.",
        first.display()
    );
}

/// The errors of a lossy file, in words. `None` for an exact file, and outside of mounts: nobody knows there.
fn loss(path: &Path) -> Option<String> {
    let value = xattr::get(fs::canonicalize(path).ok()?, "user.stepfs.lossy").ok()??;
    let words = String::from_utf8_lossy(&value).into_owned();
    (words != "0").then(|| words.strip_prefix("1 ").map_or(String::new(), |errors| format!(" (errors up to {errors})")))
}

fn by_path(description: &Description) -> HashMap<&str, &Tensor> {
    description.tensors.iter().map(|tensor| (tensor.path.as_str(), tensor)).collect()
}

fn is_of_the_same_model(first: &State, other: &State) -> Result<()> {
    let different =
        |why: String| anyhow!("{} is not of the same model as {}: {why}", other.path.display(), first.path.display());
    let (a, b) = (&first.description, &other.description);
    if a.kind != b.kind {
        return Err(different(format!("one is a {}, the other a {}", a.kind.name(), b.kind.name())));
    }
    if model_signature(a) == model_signature(b) {
        return Ok(());
    }
    let (of_a, of_b) = (by_path(a), by_path(b));
    let words = a.tensors.iter().find_map(|tensor| match of_b.get(tensor.path.as_str()) {
        None => Some(format!("it has no {}", tensor.path)),
        Some(t) if is_alike(t, tensor) => None,
        Some(t) => Some(format!("{} is {} and not {}", t.path, form(t), form(tensor))),
    });
    let added =
        || b.tensors.iter().find(|t| !of_a.contains_key(t.path.as_str())).map(|t| format!("{} is new in it", t.path));
    Err(different(words.or_else(added).unwrap_or_else(|| "its tensors have other roles".into())))
}
