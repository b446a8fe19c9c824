//! What a tile of an archived state is, however its object stores it.

use std::sync::Arc;

use crate::codec::{Corrupt, Dtype, lattice};

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
}

impl State {
    /// The tile's bytes.
    ///
    /// # Errors
    /// What is wrong with the state, as words.
    pub fn bytes(&self, dtype: Dtype) -> Result<Arc<Vec<u8>>, Corrupt> {
        match self {
            State::Bytes(bytes) => Ok(Arc::clone(bytes)),
            State::Lattice { keyframe, accumulators, step, exceptions } => {
                let mut out = vec![0; accumulators.len() * dtype.size()];
                let keyframe = keyframe.as_ref().map(|keyframe| keyframe.as_slice());
                lattice::reconstruct(dtype, keyframe, *step, accumulators, &mut out)?;
                lattice::apply_exceptions(dtype, exceptions, &mut out)?;
                Ok(Arc::new(out))
            }
        }
    }
}
