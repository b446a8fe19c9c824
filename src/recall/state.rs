//! What a tile of an archived state is, however its object stores it.

use std::sync::Arc;

use crate::codec::log::{Factors, Grid};
use crate::codec::moment::Rule;
use crate::codec::published::tile::{Before, Decoded};
use crate::codec::{Corrupt, Dtype, lattice, log, moment};
use crate::entropy::scratch;
use crate::hash::{Xxh3, xxh3_64};

/// What a tile is made of: enough to give its bytes, and to encode its successor. It belongs to the state, not to the
/// object: however the object is encoded, and whatever it is a difference to, this is the same.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// The bytes themselves.
    Bytes(Arc<Vec<u8>>),
    /// R = fl(K + g*A).
    Lattice {
        /// The keyframe's bytes; none for K = 0.
        keyframe: Option<Arc<Vec<u8>>>,
        /// The accumulators A, in units of `step`.
        accumulators: Vec<i32>,
        /// The step g.
        step: f64,
        /// Elements that are stored as they are, because rounding to their type would break the bound. Not part of
        /// what a successor is encoded from.
        exceptions: Vec<lattice::Exception>,
    },
    /// v = 2^(P + unit*q), P from the factors.
    Log {
        /// Those of the whole tensor.
        factors: Arc<Factors>,
        /// Number of the tile's first element in the tensor.
        first: u64,
        /// The step, in octaves / 65536.
        unit: u32,
        /// The steps from P, or [`log::ZERO`].
        q: Vec<i32>,
    },
    /// m = fl(g*A*d).
    Moment {
        /// What d is to the tensor.
        rule: Rule,
        /// The bytes that tell d: of the second moment's tile, v, or of what the tensor's factors predict.
        second: Arc<Vec<u8>>,
        /// The ratios A, in units of `step`.
        accumulators: Vec<i32>,
        /// The step g.
        step: f64,
        /// Elements that are stored as they are.
        exceptions: Vec<lattice::Exception>,
    },
    /// What a published system's tile decodes to, where its next difference needs more than the bytes. To every other codec it
    /// is the bytes.
    Published {
        /// The bytes.
        bytes: Arc<Vec<u8>>,
        /// The bin of each element.
        bins: Arc<Vec<u16>>,
    },
}

impl State {
    /// Of what a published system's tile decodes to.
    pub fn of_published(decoded: Decoded) -> State {
        let bytes = Arc::new(decoded.bytes);
        match decoded.bins {
            Some(bins) => State::Published { bytes, bins: Arc::new(bins) },
            None => State::Bytes(bytes),
        }
    }

    /// The state, as other codecs than the one that made it take it: without a published system's bins.
    #[must_use]
    pub fn plain(self) -> State {
        match self {
            State::Published { bytes, .. } => State::Bytes(bytes),
            state => state,
        }
    }

    /// Gives `then` what a published system's next tile is a difference to.
    ///
    /// # Errors
    /// What is wrong with the state, as words.
    pub fn before<T>(&self, dtype: Dtype, then: impl FnOnce(Before<'_>) -> T) -> Result<T, Corrupt> {
        let bytes = self.bytes(dtype)?;
        let bins = match self {
            State::Published { bins, .. } => Some(bins.as_slice()),
            _ => None,
        };
        Ok(then(Before { bytes: &bytes, bins }))
    }

    /// The tile's bytes.
    ///
    /// # Errors
    /// What is wrong with the state, as words.
    pub fn bytes(&self, dtype: Dtype) -> Result<Arc<Vec<u8>>, Corrupt> {
        let mut out;
        match self {
            State::Bytes(bytes) | State::Published { bytes, .. } => return Ok(Arc::clone(bytes)),
            State::Lattice { keyframe, accumulators, step, exceptions } => {
                out = scratch::bytes(accumulators.len() * dtype.size());
                let keyframe = keyframe.as_ref().map(|keyframe| keyframe.as_slice());
                lattice::reconstruct(dtype, keyframe, *step, accumulators, &mut out)?;
                lattice::apply_exceptions(dtype, exceptions, &mut out)?;
            }
            State::Log { factors, first, unit, q } => {
                out = scratch::bytes(q.len() * dtype.size());
                log::reconstruct(dtype, Grid { factors, first: *first }, *unit, q, &mut out)?;
            }
            State::Moment { rule, second, accumulators, step, exceptions } => {
                out = scratch::bytes(accumulators.len() * dtype.size());
                moment::reconstruct((*rule, dtype), second, *step, accumulators, &mut out)?;
                lattice::apply_exceptions(dtype, exceptions, &mut out)?;
            }
        }
        Ok(Arc::new(out))
    }

    /// Gives back its integers, for the next tile.
    pub(crate) fn give_back(self) {
        match self {
            State::Lattice { accumulators: integers, .. }
            | State::Log { q: integers, .. }
            | State::Moment { accumulators: integers, .. } => scratch::give_integers(integers),
            State::Bytes(_) | State::Published { .. } => {}
        }
    }

    /// xxh3-64 of everything that the state is to its successors and its readers.
    pub fn hash(&self) -> u64 {
        let mut hash = Xxh3::new();
        let integers = |hash: &mut Xxh3, values: &[i32]| {
            values.iter().for_each(|value| hash.update(&value.to_le_bytes()));
        };
        let exceptions = |hash: &mut Xxh3, exceptions: &[lattice::Exception]| {
            exceptions.iter().for_each(|e| hash.update(&(u64::from(e.index) ^ e.raw.rotate_left(32)).to_le_bytes()));
        };
        match self {
            State::Bytes(bytes) => hash.update(&xxh3_64(bytes).to_le_bytes()),
            State::Lattice { keyframe, accumulators, step, exceptions: kept } => {
                keyframe.iter().for_each(|keyframe| hash.update(&xxh3_64(keyframe).to_le_bytes()));
                hash.update(&step.to_le_bytes());
                integers(&mut hash, accumulators);
                exceptions(&mut hash, kept);
            }
            State::Log { factors, first, unit, q } => {
                let mut text = Vec::new();
                factors.encode(&mut text);
                hash.update(&text);
                hash.update(&first.to_le_bytes());
                hash.update(&unit.to_le_bytes());
                integers(&mut hash, q);
            }
            State::Moment { second, accumulators, step, exceptions: kept, .. } => {
                hash.update(&xxh3_64(second).to_le_bytes());
                hash.update(&step.to_le_bytes());
                integers(&mut hash, accumulators);
                exceptions(&mut hash, kept);
            }
            State::Published { bytes, bins } => {
                hash.update(&xxh3_64(bytes).to_le_bytes());
                bins.iter().for_each(|bin| hash.update(&bin.to_le_bytes()));
            }
        }
        hash.digest()
    }
}
