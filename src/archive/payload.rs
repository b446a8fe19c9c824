//! From a tile's bytes to its state, and from that to its payload: a difference to the same tile of a parent, or alone.
//! The inverse of what `recall::tile` does.

use std::io;
use std::sync::Arc;

use crate::codec::{Dtype, lattice, lossless};
use crate::recall::State;
use crate::store::object::Coding;

/// A tile's state in this coding, what it decodes to, and the largest error. `None`: not for the lattice.
pub(super) fn quantize(
    dtype: Dtype,
    coding: Coding,
    data: &Arc<Vec<u8>>,
    parent: Option<&State>,
) -> Option<(State, Arc<Vec<u8>>, f64)> {
    let Some(step) = coding.step() else {
        return Some((State::Bytes(Arc::clone(data)), Arc::clone(data), 0.0));
    };
    let keyframe = match (coding, parent) {
        (Coding::Lattice { .. }, Some(State::Bytes(bytes))) => Some(Arc::clone(bytes)),
        (Coding::Lattice { .. }, Some(State::Lattice { keyframe, .. })) => keyframe.clone(),
        _ => None,
    };
    let mut accumulators = vec![0; data.len() / dtype.size()];
    let mut decoded = vec![0; data.len()];
    let mut exceptions = Vec::new();
    let k = keyframe.as_ref().map(|keyframe| keyframe.as_slice());
    let error = lattice::quantize(dtype, data, k, step, &mut accumulators, &mut decoded, &mut exceptions).ok()?;
    Some((State::Lattice { keyframe, accumulators, step, exceptions }, Arc::new(decoded), error))
}

/// Appends the payload of `state` in this coding. `false`: it cannot be said so (another keyframe than the parent's, too
/// many steps from it); `out` then holds nothing of use.
///
/// # Errors
/// When the parent's state is damaged.
pub(super) fn payload(
    dtype: Dtype,
    coding: Coding,
    state: &State,
    parent: Option<&State>,
    out: &mut Vec<u8>,
) -> io::Result<bool> {
    match (coding, state) {
        (Coding::Lossless, State::Bytes(bytes)) => lossless::encode(dtype, bytes, None, out),
        (Coding::LosslessDelta { .. }, State::Bytes(bytes)) => {
            let Some(parent) = parent else { return Ok(false) };
            lossless::encode(dtype, bytes, Some(&parent.bytes(dtype)?), out);
        }
        (_, State::Lattice { keyframe, accumulators, step, exceptions }) => {
            let parent = match (coding, keyframe) {
                (Coding::Lattice { .. }, _) => match restated(state, parent) {
                    Some(parent) => parent,
                    None => return Ok(false),
                },
                (Coding::LatticeKey { .. }, None) => None,
                (Coding::LatticeWithKeyframe { .. }, Some(keyframe)) => {
                    lattice::put_keyframe(dtype, keyframe, out);
                    None
                }
                _ => return Ok(false),
            };
            debug_assert_eq!(coding.step(), Some(*step));
            return Ok(lattice::encode_tile(accumulators, parent.as_deref(), exceptions, out).is_ok());
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// The parent's accumulators in the step of `state`; inside, `None` where they are all 0, because the parent is the
/// keyframe. `None`: it has another keyframe.
pub(super) fn restated(state: &State, parent: Option<&State>) -> Option<Option<Vec<i32>>> {
    let State::Lattice { keyframe, step, .. } = state else {
        return None;
    };
    match parent? {
        State::Bytes(bytes) => (keyframe.as_ref() == Some(bytes)).then_some(None),
        State::Lattice { keyframe: other, accumulators, step: from, .. } => {
            let mut accumulators = accumulators.clone();
            let fits = keyframe == other && lattice::rescale(&mut accumulators, *from, *step).is_ok();
            fits.then_some(Some(accumulators))
        }
    }
}
