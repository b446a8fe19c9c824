//! The state of a tile of an archived file, independent of its object's encoding.

use std::sync::Arc;

use codec::entropy::scratch;
use codec::hash::{Xxh3, xxh3_64};
use codec::lattice::Exception;
use codec::log::{Factors, Grid};
use codec::{Corrupt, Dtype, Integers, lattice, log, rows};
use papers::tile::{Before, Decoded};

use super::Bytes;

/// The parts of a tile: enough to give its bytes, and to encode its successor. It belongs to the state, not to the
/// object: another encoding of the object, as a difference to another parent, decodes to the same.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// The bytes themselves.
    Bytes(Bytes),
    /// R = fl(K + g*A).
    Lattice {
        /// The keyframe's bytes; `None` for K = 0.
        keyframe: Option<Bytes>,
        /// The accumulators A, in units of `step`.
        accumulators: Integers,
        /// The step g.
        step: f64,
        /// Elements that are stored exactly, because rounding to their type would break the bound. A successor is not
        /// encoded from them.
        exceptions: Vec<Exception>,
    },
    /// v = 2^(P + unit*q), P from the factors.
    Log {
        /// The factors of the whole tensor.
        factors: Arc<Factors>,
        /// Index of the tile's first element in the tensor.
        first: u64,
        /// The step, in octaves / 65536.
        unit: u32,
        /// The steps from P, or [`log::ZERO`].
        q: Integers,
    },
    /// The ratios of a first moment to another tile. The encoder makes a payload of them. No decoder makes this state, since
    /// no other state is a difference to it.
    Moment {
        /// In units of the coding's step.
        accumulators: Integers,
        /// Elements that are stored exactly.
        exceptions: Vec<Exception>,
    },
    /// A published system's tile whose next difference needs more than its bytes. Every other codec sees only the
    /// bytes.
    External {
        /// Its bytes.
        bytes: Bytes,
        /// The bin of each element.
        bins: Arc<Vec<u16>>,
    },
}

impl State {
    /// The state of a published system's tile.
    pub(super) fn of_external(decoded: Decoded) -> State {
        let bytes = Arc::new(decoded.bytes);
        match decoded.bins {
            Some(bins) => State::External { bytes, bins: Arc::new(bins) },
            None => State::Bytes(bytes),
        }
    }

    /// Passes the tile to `then`, as a published system's base for its next tile.
    ///
    /// # Errors
    /// The state is invalid; the message gives the reason.
    pub fn before<T>(&self, dtype: Dtype, then: impl FnOnce(Before<'_>) -> T) -> Result<T, Corrupt> {
        let bytes = self.bytes(dtype)?;
        let bins = match self {
            State::External { bins, .. } => Some(bins.as_slice()),
            _ => None,
        };
        Ok(then(Before { bytes: &bytes, bins }))
    }

    /// The bytes that a lattice's next state takes as its keyframe, if this state consists of bytes only.
    pub(super) fn plain_bytes(&self) -> Option<&Bytes> {
        match self {
            State::Bytes(bytes) | State::External { bytes, .. } => Some(bytes),
            _ => None,
        }
    }

    /// This state as the parent of a table by rows: the keyframe, and the accumulators in steps of `step`. `None` for
    /// accumulators that are all 0.
    ///
    /// # Errors
    /// No lattice can be a difference to this state, or the accumulators do not fit 32 bits in that step.
    pub(super) fn by_rows(&self, step: f64) -> Result<(Option<&Bytes>, Option<Vec<i32>>), Corrupt> {
        match self {
            State::Bytes(bytes) | State::External { bytes, .. } => Ok((Some(bytes), None)),
            State::Lattice { keyframe, accumulators, step: from, .. } => {
                let mut accumulators = accumulators.values();
                rows::restate(&mut accumulators, *from, step)?;
                Ok((keyframe.as_ref(), Some(accumulators)))
            }
            _ => Err(super::NO_BASE),
        }
    }

    /// The tile's bytes.
    ///
    /// # Errors
    /// The state is invalid; the message gives the reason.
    pub fn bytes(&self, dtype: Dtype) -> Result<Bytes, Corrupt> {
        let mut out;
        match self {
            State::Bytes(bytes) | State::External { bytes, .. } => return Ok(Arc::clone(bytes)),
            State::Lattice { keyframe, accumulators, step, exceptions } => {
                out = scratch::bytes(accumulators.len() * dtype.size());
                let keyframe = keyframe.as_ref().map(|keyframe| keyframe.as_slice());
                lattice::reconstruct(dtype, keyframe, *step, &accumulators.wide(), &mut out)?;
                lattice::apply_exceptions(dtype, exceptions, &mut out)?;
            }
            State::Log { factors, first, unit, q } => {
                out = scratch::bytes(q.len() * dtype.size());
                log::reconstruct(dtype, Grid { factors, first: *first }, *unit, &q.wide(), &mut out)?;
            }
            State::Moment { .. } => return Err(super::NO_BASE),
        }
        Ok(Arc::new(out))
    }

    fn integers(&self) -> Option<&Integers> {
        match self {
            State::Lattice { accumulators, .. } | State::Moment { accumulators, .. } => Some(accumulators),
            State::Log { q, .. } => Some(q),
            State::Bytes(_) | State::External { .. } => None,
        }
    }

    /// The state in the form for memory.
    pub fn packed(&self) -> State {
        match self {
            State::Lattice { keyframe, accumulators, step, exceptions } => State::Lattice {
                keyframe: keyframe.clone(),
                accumulators: accumulators.packed(),
                step: *step,
                exceptions: exceptions.clone(),
            },
            State::Log { factors, first, unit, q } => {
                State::Log { factors: Arc::clone(factors), first: *first, unit: *unit, q: q.packed() }
            }
            other => other.clone(),
        }
    }

    /// Bytes that other states may share: all states of a chain have one keyframe. (Factors are a thousandth of their
    /// tensor, and their object holds them anyway.)
    pub fn shared_bytes(&self) -> Option<&Bytes> {
        match self {
            State::Lattice { keyframe, .. } => keyframe.as_ref(),
            _ => self.plain_bytes(),
        }
    }

    /// Its size in memory besides [`State::shared_bytes`], bytes.
    pub fn own_bytes(&self) -> usize {
        let more = match self {
            State::Lattice { exceptions, .. } | State::Moment { exceptions, .. } => size_of_val(exceptions.as_slice()),
            State::External { bins, .. } => size_of_val(bins.as_slice()),
            State::Bytes(_) | State::Log { .. } => 0,
        };
        more + self.integers().map_or(0, Integers::bytes)
    }

    /// Gives the buffer of its integers to the next tile, unless memory holds the state too.
    pub(crate) fn give_back(self: Arc<State>) {
        let integers = match Arc::into_inner(self) {
            Some(State::Lattice { accumulators, .. } | State::Moment { accumulators, .. }) => accumulators,
            Some(State::Log { q, .. }) => q,
            _ => return,
        };
        if let Integers::Wide(wide) = integers {
            scratch::give_integers(wide);
        }
    }

    /// xxh3-64 of everything in the state that affects its successors and readers.
    pub fn hash(&self) -> u64 {
        let mut hash = Xxh3::default();
        let integers = |hash: &mut Xxh3, values: &Integers| {
            values.wide().iter().for_each(|value| hash.update(&value.to_le_bytes()));
        };
        let exceptions = |hash: &mut Xxh3, exceptions: &[Exception]| {
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
            // Nobody is a successor of it.
            State::Moment { .. } => {}
            State::External { bytes, bins } => {
                hash.update(&xxh3_64(bytes).to_le_bytes());
                bins.iter().for_each(|bin| hash.update(&bin.to_le_bytes()));
            }
        }
        hash.digest()
    }
}
