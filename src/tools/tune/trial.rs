//! One profile on trial: the bytes that a store takes for a series under it, and the error of the series' last file.
//!
//! A trial takes the archive's own way from a file to its object ([`crate::encode`]), without a store. Objects have no
//! names, so a trial that is interrupted leaves nothing behind.

use std::fs::File;
use std::io;
use std::path::Path;

use anyhow::{Result, anyhow};

use crate::recall::{self, Chain, Layout, stream};
use crate::store::durable::scratch;
use crate::store::object::rows_and_width;
use crate::store::{MIN_RELEASE_BYTES, Profile};
use crate::tools::series::{Series, State, is_parameter};
use formats::{Role, Tensor};
use papers::inshrinkerator::Layer;
use papers::tile::is_for;

/// A series whose last file profiles are tried on.
pub(super) struct Trial<'a> {
    series: &'a Series,
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
    pub(super) fn of(series: &'a Series) -> Result<Trial<'a>> {
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
        let update = series.last_update()?.rms();
        if !(update > 0.0 && update.is_finite()) {
            let why =
                "its weights are the same as in the file before; name checkpoints between which the model was trained";
            return Err(unfit(series.last(), why.into()));
        }
        Ok(Trial { series, update })
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
    /// A file that changed meanwhile; device errors.
    pub(super) fn keep(&self, profile: Profile, dir: &Path) -> io::Result<Kept> {
        let mut kept = Kept { bytes: Vec::new(), error: 0.0, last: None };
        self.series.keep(profile, dir, &mut |at, object| {
            kept.bytes.push(object.as_ref().map_or(self.series.states[at].len, |(bytes, _)| *bytes));
            kept.last = object.map(|(_, chain)| chain);
            Ok(())
        })?;
        if let Some(chain) = &kept.last {
            let decoded = tempfile::tempfile_in(dir)?;
            stream(chain, &Layout::of(chain.leaf()), |at, _, bytes| scratch::write_all_at(&decoded, bytes, at))?;
            kept.error = self.series.errors(self.series.last(), &decoded)?.rms() / self.update;
        }
        Ok(kept)
    }

    /// Writes the last file as it decodes, with the checksums of its container.
    pub(super) fn write(&self, kept: &Kept, to: &File) -> io::Result<()> {
        match &kept.last {
            Some(chain) => Ok(recall::copy(chain, &|bytes, at| scratch::write_all_at(to, bytes, at))?),
            None => io::copy(&mut File::open(self.last())?, &mut &*to).map(|_| ()),
        }
    }
}
