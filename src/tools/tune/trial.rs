//! One profile on trial: the bytes that a store takes for a series under it, and the error of the series' last file.
//!
//! A trial takes the archive's own way from a file to its object ([`crate::encode`]), without a store. Objects have no
//! names, so a trial that is interrupted leaves nothing behind.

use std::fs::File;
use std::io;
use std::path::Path;

use anyhow::{Result, anyhow};

use crate::archive::model_signature;
use crate::encode::{SeriesFile, encode_series};
use crate::recall::{self, Chain, Layout, stream};
use crate::store::durable::scratch;
use crate::store::object::rows_and_width;
use crate::store::{MIN_RELEASE_BYTES, Profile};
use crate::tools::series::{Series, State, is_parameter};
use crate::tools::{Watch, of_file};
use formats::{Role, Tensor};
use papers::inshrinkerator::Layer;
use papers::tile::is_for;

/// A series whose last file profiles are tried on.
pub(super) struct Trial<'a> {
    series: &'a Series,
    /// Whether each file agrees with its own checksums. A file that does not stays exact.
    intact: Vec<bool>,
    /// Root mean square of the parameters' updates.
    update: f64,
}

/// A series as a profile keeps it.
pub(super) struct Kept {
    /// Bytes of each state's object; of the whole file if no object is smaller.
    pub(super) bytes: Vec<u64>,
    /// The error of the last state's parameters, in updates: both are root mean squares.
    pub(super) error: f64,
    /// The chain of the last state; none if it stays whole.
    last: Option<Chain>,
}

impl<'a> Trial<'a> {
    /// Measures the series' updates.
    ///
    /// # Errors
    /// A store keeps the file as it is, or nothing was trained between the files.
    pub(super) fn of(series: &'a Series, watch: &Watch) -> Result<Trial<'a>> {
        let unfit = |state: &State, why: String| anyhow!("{}: {why}", state.path.display());
        for state in &series.states {
            if state.len < MIN_RELEASE_BYTES {
                let why = format!("it is below {MIN_RELEASE_BYTES} bytes, and stepfs keeps such files as they are");
                return Err(unfit(state, why));
            }
            if !state.description.tensors.iter().any(is_parameter) {
                return Err(unfit(state, "it has no weights; `stepfs inspect` shows its tensors".into()));
            }
        }
        let update = series.last_update(watch)?.rms();
        if !(update > 0.0 && update.is_finite()) {
            let why =
                "its weights are the same as in the file before; name checkpoints between which the model was trained";
            return Err(unfit(series.last(), why.into()));
        }
        let intact = |state: &State| state.description.is_intact(&state.file).map_err(of_file(&state.path));
        Ok(Trial { series, intact: series.states.iter().map(intact).collect::<Result<_, _>>()?, update })
    }

    /// The last file.
    pub(super) fn last(&self) -> &Path {
        &self.series.last().path
    }

    /// Bytes of the last file.
    pub(super) fn last_bytes(&self) -> u64 {
        self.series.last().len
    }

    /// The share of the parameters that embeddings have, 0 to 1.
    pub(super) fn embedding_share(&self) -> f64 {
        let (mut embeddings, mut all) = (0, 0);
        for tensor in self.tensors().iter().filter(|tensor| is_parameter(tensor)) {
            let elements = tensor.elements();
            all += elements;
            if Layer::of_shape(&tensor.path, rows_and_width(&tensor.shape)) == Layer::Embedding {
                embeddings += elements;
            }
        }
        embeddings as f64 / all.max(1) as f64
    }

    /// True if the file has running means of gradients, from which sensitivity is computed.
    pub(super) fn has_gradients(&self) -> bool {
        let tensors = self.tensors();
        let of_model = |of: usize| tensors.get(of).is_some_and(is_parameter);
        let mut first = tensors.iter().filter(|tensor| tensor.role == Role::FirstMoment && is_for(tensor.dtype));
        first.any(|tensor| tensor.of.is_some_and(of_model))
    }

    fn tensors(&self) -> &[Tensor] {
        &self.series.last().description.tensors
    }

    /// Encodes the series under a profile, each state as a difference to those before it, and measures the last state's
    /// error. `dir` holds the objects while they are written.
    ///
    /// # Errors
    /// `Interrupted` if cancelled; `InvalidInput` for a file that changed meanwhile; device errors.
    pub(super) fn keep(&self, profile: Profile, dir: &Path, cancelled: &(dyn Fn() -> bool + Sync)) -> io::Result<Kept> {
        let states = &self.series.states;
        let files = states.iter().zip(&self.intact).map(|(state, intact)| SeriesFile {
            path: &state.path,
            file: &state.file,
            len: state.len,
            description: &state.description,
            signature: model_signature(&state.description),
            intact: *intact,
        });
        let is_unchanged = |number: usize| match states[number].is_unchanged()? {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it changed meanwhile")),
        };
        let (bytes, last) = encode_series(&files.collect::<Vec<_>>(), profile, dir, &is_unchanged, cancelled)?;
        let error = match &last {
            Some(chain) => self.error(chain, dir, cancelled)?,
            None => 0.0,
        };
        Ok(Kept { bytes, error, last })
    }

    /// The error of the last state's parameters, in updates.
    fn error(&self, chain: &Chain, dir: &Path, cancelled: &(dyn Fn() -> bool + Sync)) -> io::Result<f64> {
        let decoded = tempfile::tempfile_in(dir)?;
        stream(chain, &Layout::of(chain.leaf()), |offset, _, bytes| match cancelled() {
            true => Err(io::ErrorKind::Interrupted.into()),
            false => scratch::write_all_at(&decoded, bytes, offset),
        })?;
        let errors = self.series.errors(self.series.last(), &decoded).map_err(io::Error::other)?;
        Ok(errors.rms() / self.update)
    }

    /// Writes the last file as it decodes, with the checksums of its container.
    pub(super) fn write(&self, kept: &Kept, to: &File) -> io::Result<()> {
        match &kept.last {
            Some(chain) => Ok(recall::copy(chain, &|bytes, at| scratch::write_all_at(to, bytes, at))?),
            None => io::copy(&mut File::open(self.last())?, &mut &*to).map(|_| ()),
        }
    }
}
