//! A state of a mirror, for whoever reads it.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use super::manifest::{self, MANIFESTS, Number};
use super::place::{Error, Place, Result};
use super::tree::{Encoding, Tree};
use crate::store::Id;
use crate::store::durable::scratch;

/// A state.
pub struct Reader {
    pub(super) place: Arc<dyn Place>,
    /// The names that were wanted, in all directories above them, with their objects.
    pub tree: Tree,
}

impl Reader {
    /// The store that a mirror belongs to, and the states that it has, the oldest first, each with its time in milliseconds
    /// since 1970. The number has the time of the store's clock, and the mirror knows when it was put. A clock that was ahead
    /// does not make a state younger, nor does a copy of the mirror.
    ///
    /// # Errors
    /// It is no mirror; those of the mirror.
    pub fn states(place: &dyn Place) -> Result<(Id, Vec<(Number, u64)>)> {
        // One request beside the other: each may take as long as a megabyte.
        let (owner, listed) = rayon::join(|| manifest::owner(place), || place.list(MANIFESTS));
        let owner = owner?.ok_or_else(|| {
            Error::Denied("it is no mirror of stepfs, or has no state of a store; is the URL right?".into())
        })?;
        let time = |(number, put_ns): (Number, i64)| {
            let put_ms = u64::try_from(put_ns / 1_000_000).unwrap_or_default();
            (number, number.at_ms.min(put_ms))
        };
        Ok((owner, manifest::of_owner(&listed?, owner).into_iter().map(time).collect()))
    }

    /// Opens the state that was true at a time, in milliseconds since 1970, or else the last one. Reads the names at and
    /// below `wanted`.
    ///
    /// # Errors
    /// There is none; those of the mirror.
    pub fn open(place: &Arc<dyn Place>, at_ms: Option<u64>, wanted: &Path) -> Result<Reader> {
        let (_, states) = Reader::states(place.as_ref())?;
        let is_old = |state: &&(Number, u64)| at_ms.is_none_or(|at_ms| state.1 <= at_ms);
        let (state, _) = states.iter().rev().find(is_old).ok_or_else(|| {
            Error::Denied(format!(
                "it has no state of that time, but {} later ones; `stepfs status` of this URL lists them",
                states.len()
            ))
        })?;
        let is_wanted = |path: &Path, _: &_| path.starts_with(wanted) || wanted.starts_with(path);
        let tree = Tree::load(place.as_ref(), manifest::get(place.as_ref(), *state)?, &is_wanted)?;
        Ok(Reader { place: Arc::clone(place), tree })
    }

    /// An object in a file without a name.
    ///
    /// # Errors
    /// [`Error::Wrong`] for bytes that are not what their name says; those of the mirror.
    pub fn fetch_aside(&self, encoding: &Encoding) -> Result<File> {
        let file = tempfile::tempfile()?;
        encoding.bytes.read(self.place.as_ref(), &|bytes, at| Ok(scratch::write_all_at(&file, bytes, at)?))?;
        Ok(file)
    }
}
