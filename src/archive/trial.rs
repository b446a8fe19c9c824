//! Keeps a series of checkpoints under some profile, without a store, and measures sizes and errors. It takes the
//! archive's own path from file to object and back. No object has a name for longer than its writing takes.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::codec::lattice;
use crate::container::{Description, InOrder, Kind, ReadAt, Role, Tensor, describe};
use crate::published::check_n_run;
use crate::published::inshrinkerator::Layer;
use crate::published::tile::is_for;
use crate::recall::layout::Unit;
use crate::recall::{self, Chain, Layout, Memory, stream, usual_memory};
use crate::store::durable::{Io, scratch};
use crate::store::object::{Id, rows_and_width};
use crate::store::{MIN_RELEASE_BYTES, Profile, Profiles};

use super::base::{Base, Place};
use super::catalog::{Sealed, State};
use super::difference::{Difference, Written};
use super::settle;
use super::workers::Workers;

/// Bytes that are compared at once.
const PIECE: u64 = 1 << 20;

/// Checkpoints of one run, the oldest first: at least two.
pub struct Series {
    states: Vec<Checkpoint>,
    /// Sum of squares of the weights' last update.
    update: f64,
}

struct Checkpoint {
    path: PathBuf,
    file: File,
    description: Description,
    sealed: Arc<Sealed>,
    /// See [`Description::is_intact`].
    intact: bool,
}

/// A series as it was kept.
pub struct Kept {
    /// Bytes of each state's object, or of the whole file if no object would be smaller.
    pub bytes: Vec<u64>,
    /// The last state's error: root mean square over its weights, in units of their last update's.
    pub error: f64,
    /// None: whole.
    last: Option<Chain>,
}

/// Whether it is one of those that published systems quantize, and that a model's quality hangs on.
fn is_model(role: Role) -> bool {
    matches!(role, Role::Weight | Role::Master)
}

fn wrong(path: &Path, what: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{}: {what}", path.display()))
}

fn with_path(path: &Path) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

impl Checkpoint {
    fn open(path: &Path) -> io::Result<Checkpoint> {
        // Not even opened: of a pipe that would wait for a writer.
        let metadata = std::fs::metadata(path).map_err(with_path(path))?;
        if !metadata.is_file() {
            return Err(wrong(path, "is no file; a series is of single files"));
        }
        if metadata.len() < MIN_RELEASE_BYTES {
            return Err(wrong(
                path,
                format_args!("is below {MIN_RELEASE_BYTES} bytes, which stepfs keeps as they are"),
            ));
        }
        let file = File::open(path).map_err(with_path(path))?;
        let description = describe(&file).map_err(with_path(path))?;
        if description.kind == Kind::Opaque {
            let why = description.note.unwrap_or_default();
            return Err(wrong(path, format_args!("is no checkpoint that stepfs understands: {why}")));
        }
        let has_weights = description.tensors.iter().any(|t| is_model(t.role) && t.dtype.is_lattice_float());
        let (State::Sealed(sealed), true) =
            (settle::examine(&file, &metadata, path).map_err(with_path(path))?.state, has_weights)
        else {
            return Err(wrong(path, "has no weights; `stepfs inspect` shows its tensors"));
        };
        let intact = description.is_intact(&file).map_err(with_path(path))?;
        Ok(Checkpoint { path: path.to_path_buf(), file, description, sealed, intact })
    }
}

impl Series {
    /// Opens checkpoints of one run, the oldest first.
    ///
    /// # Errors
    /// The device's errors. In words for the user: fewer than two, no checkpoints, of different models, or nothing
    /// moved between the last two.
    pub fn open(paths: &[PathBuf]) -> io::Result<Series> {
        let states = paths.iter().map(|path| Checkpoint::open(path)).collect::<io::Result<Vec<_>>>()?;
        let [.., before, last] = states.as_slice() else {
            let what = "a series has at least two checkpoints: the last is kept as difference to those before it";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        };
        if let Some(other) = states.iter().find(|state| state.sealed.signature != last.sealed.signature) {
            let what = format_args!("has other tensors than {}, so it is of another run", last.path.display());
            return Err(wrong(&other.path, what));
        }
        let update = update(before, last)?;
        if !(update > 0.0 && update.is_finite()) {
            let before = before.path.display();
            let what = format_args!("has the same weights as {before}; give checkpoints with training between them");
            return Err(wrong(&last.path, what));
        }
        Ok(Series { states, update })
    }

    /// The last checkpoint, which all is about.
    pub fn last(&self) -> &Path {
        &self.states[self.states.len() - 1].path
    }

    /// Its bytes.
    pub fn last_bytes(&self) -> u64 {
        self.states[self.states.len() - 1].sealed.len
    }

    fn tensors(&self) -> &[Tensor] {
        &self.states[self.states.len() - 1].description.tensors
    }

    /// Part of the model's parameters that are in embeddings, 0 to 1.
    pub fn embedding_share(&self) -> f64 {
        let (mut embeddings, mut all) = (0, 0);
        for tensor in self.tensors().iter().filter(|tensor| is_model(tensor.role)) {
            let elements = (tensor.extent.end - tensor.extent.start) / tensor.dtype.size() as u64;
            all += elements;
            if Layer::of_shape(&tensor.path, rows_and_width(&tensor.shape)) == Layer::Embedding {
                embeddings += elements;
            }
        }
        embeddings as f64 / all.max(1) as f64
    }

    /// Whether gradients' running means are in the checkpoint, which sensitivity is made from.
    pub fn has_gradients(&self) -> bool {
        let tensors = self.tensors();
        let of_model = |of: usize| tensors.get(of).is_some_and(|parameter| is_model(parameter.role));
        let mut first = tensors.iter().filter(|tensor| tensor.role == Role::FirstMoment && is_for(tensor.dtype));
        first.any(|tensor| tensor.of.is_some_and(of_model))
    }

    /// Keeps the series under a profile, each state as a difference to those before it, and compares the decoded
    /// states with the files. Objects lie in `scratch` while they are written. The last state's next update is
    /// unknown, and counts as large as the one before.
    ///
    /// # Errors
    /// `Interrupted` when cancelled; a file that was changed meanwhile; the device's errors.
    pub fn keep(&self, profile: Profile, scratch: &Path, cancelled: &(dyn Fn() -> bool + Sync)) -> io::Result<Kept> {
        let memory = Arc::new(Memory::new(usual_memory()));
        let workers = Workers::new(std::thread::available_parallelism().map_or(2, usize::from))?;
        let mut bytes = Vec::with_capacity(self.states.len());
        let (mut previous, mut last): (Option<Chain>, Option<Chain>) = (None, None);
        // By the id of their base.
        let mut differences: Vec<(Id, u64)> = Vec::new();
        for (number, state) in self.states.iter().enumerate() {
            if !state.sealed.describes(&state.file.metadata()?) {
                return Err(wrong(&state.path, "was changed meanwhile"));
            }
            let neighbour = if number + 1 < self.states.len() { number + 1 } else { number - 1 };
            let newer = &self.states[neighbour];
            let profiles = Profiles::all(if state.intact { profile } else { Profile::Exact });
            let source = InOrder::new(&state.file, &state.description);
            let (after, of_newer) = InOrder::as_later_state(&newer.file, &newer.description, &state.description);
            let wants_baseline = |root: &Chain| {
                let (id, baseline) = (root.leaf().header().id, root.leaf().stored().max(1));
                let to_it = differences.iter().filter(|(parent, _)| *parent == id);
                check_n_run::wants_baseline(
                    &to_it.map(|(_, stored)| *stored as f64 / baseline as f64).collect::<Vec<_>>(),
                )
            };
            let after_it = |chain: &Chain| {
                let position = chain.leaf().header().position.saturating_add(1);
                let place = Place { position, chain_len: chain.objects().len() as u32, twin: false };
                Base::after(chain.clone(), place, profiles.policy(), wants_baseline)
            };
            let difference = Difference {
                path: &state.path,
                sealed: &state.sealed,
                own: (&source, &state.description),
                newer: (&after, &of_newer),
                written: &state.file,
                base: &previous.as_ref().map_or_else(Base::default, after_it),
                profiles: &profiles,
                generations: &|| 0,
                tmp: (&Io::disk(), scratch),
                memory: &memory,
                workers: &workers,
                cancelled,
            };
            last = None;
            let Some(Written { writer, header, chain }) =
                difference.write().map_err(io::Error::from).map_err(with_path(&state.path))?
            else {
                bytes.push(state.sealed.len);
                continue;
            };
            bytes.push(writer.file_len()?);
            differences.extend(header.parent.map(|parent| (parent, chain.leaf().stored())));
            last = chain.from_ancestor(header.id);
            previous.clone_from(&last);
            if let Some(chain) = &last {
                memory.hold(chain);
            }
        }
        let error = match &last {
            Some(chain) => self.error(chain, cancelled)?,
            None => 0.0,
        };
        Ok(Kept { bytes, error, last })
    }

    fn error(&self, chain: &Chain, cancelled: &(dyn Fn() -> bool + Sync)) -> io::Result<f64> {
        let last = &self.states[self.states.len() - 1];
        let source = InOrder::new(&last.file, &last.description);
        let tensors = &chain.leaf().index().tensors;
        let (mut sum, mut original) = (0.0, Vec::new());
        stream(chain, &Layout::of(chain.leaf()), |offset, unit, decoded| -> io::Result<()> {
            if cancelled() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let Unit::Tile { tensor, .. } = unit else { return Ok(()) };
            let entry = &tensors[tensor as usize];
            if is_model(entry.role) && entry.coding.is_lossy() {
                original.resize(decoded.len(), 0);
                source.read_exact_at(&mut original, offset)?;
                sum += squares(&lattice::updates(entry.dtype, decoded, &original));
            }
            Ok(())
        })?;
        Ok((sum / self.update).sqrt())
    }

    /// Writes the last checkpoint as decoded, checksums of its container included.
    ///
    /// # Errors
    /// The device's errors.
    pub fn write(&self, kept: &Kept, to: &File) -> io::Result<()> {
        match &kept.last {
            Some(chain) => Ok(recall::copy(chain, &|bytes, at| scratch::write_all_at(to, bytes, at))?),
            None => std::io::copy(&mut File::open(self.last())?, &mut &*to).map(|_| ()),
        }
    }
}

/// Sum of squares. Values that are not finite count as 0, and are not quantized either.
fn squares(updates: &[f64]) -> f64 {
    updates.iter().filter(|update| update.is_finite()).map(|update| update * update).sum()
}

/// Sum of squares of the update, over the parameters that both states have.
fn update(before: &Checkpoint, last: &Checkpoint) -> io::Result<f64> {
    let then = InOrder::new(&before.file, &before.description);
    let (now, of_now) = InOrder::as_later_state(&last.file, &last.description, &before.description);
    let mut sum = 0.0;
    for tensor in before.description.tensors.iter().filter(|tensor| is_model(tensor.role)) {
        let same =
            |other: &&Tensor| (&other.path, other.dtype, &other.shape) == (&tensor.path, tensor.dtype, &tensor.shape);
        let Some(other) = of_now.tensors.iter().find(same).filter(|other| other.dtype.is_lattice_float()) else {
            continue;
        };
        let len = tensor.extent.end - tensor.extent.start;
        let mut at = 0;
        while at < len {
            let (mut old, mut new) = (vec![0; (len - at).min(PIECE) as usize], vec![0; (len - at).min(PIECE) as usize]);
            then.read_exact_at(&mut old, tensor.extent.start + at).map_err(with_path(&before.path))?;
            now.read_exact_at(&mut new, other.extent.start + at).map_err(with_path(&last.path))?;
            sum += squares(&lattice::updates(tensor.dtype, &new, &old));
            at += PIECE;
        }
    }
    Ok(sum)
}
