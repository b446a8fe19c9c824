//! From a tile's state to its payload: a difference to the same tile of a parent, or alone. The inverse of
//! [`super::decode`].

use crate::codec::log::{Grid, Parent};
use crate::codec::{Corrupt, Dtype, TILE_BYTES, lattice, log, lossless, rows};
use crate::entropy::scratch;
use crate::published;

use super::{Coding, State, TileSpec};

/// Appends the payload of `state` in this coding. `false` if the coding cannot express it: the parent has another
/// keyframe, or is too many steps away. `out` is useless then.
///
/// # Errors
/// The parent's state is damaged.
pub fn encode(spec: TileSpec, state: &State, parent: Option<&State>, out: &mut Vec<u8>) -> Result<bool, Corrupt> {
    let TileSpec { dtype, coding, rows, .. } = spec;
    let fits = match (coding, state) {
        (Coding::Lossless, State::Bytes(bytes)) => {
            lossless::encode(dtype, bytes, None, out);
            true
        }
        (Coding::LosslessDelta { .. }, State::Bytes(bytes)) => {
            let Some(parent) = parent else { return Ok(false) };
            lossless::encode(dtype, bytes, Some(&parent.bytes(dtype)?), out);
            true
        }
        (Coding::Lattice { .. }, State::Lattice { keyframe, accumulators, step, exceptions }) => {
            let (a, rows) = (&accumulators.wide(), Some(rows));
            match parent {
                Some(State::Lattice { keyframe: other, accumulators: before, step: from, .. })
                    if keyframe == other && before.len() == a.len() =>
                {
                    let restated = |start: usize, block: &mut [i32]| {
                        before.fill(start, block);
                        lattice::rescale(block, *from, *step).is_ok()
                    };
                    let narrow = before.narrow().filter(|_| from == step && lattice::is_step(*step));
                    lattice::encode_difference(a, narrow, restated, rows, exceptions, out).is_ok()
                }
                // All of its integers are 0.
                Some(parent) if parent.plain_bytes().is_some() && parent.plain_bytes() == keyframe.as_ref() => {
                    lattice::encode_tile(a, None, rows, exceptions, out).is_ok()
                }
                _ => false,
            }
        }
        (Coding::Rows { .. }, State::Lattice { accumulators, exceptions, .. }) => match restated(state, parent) {
            Some(parent) => {
                let fits = rows::encode_tile(&accumulators.wide(), parent.as_deref(), rows, exceptions, out);
                parent.into_iter().for_each(scratch::give_integers);
                fits.is_ok()
            }
            None => false,
        },
        (Coding::LatticeKey { .. }, State::Lattice { keyframe: None, accumulators, exceptions, .. }) => {
            lattice::encode_tile(&accumulators.wide(), None, Some(rows), exceptions, out).is_ok()
        }
        (Coding::RowsKey { .. }, State::Lattice { keyframe: None, accumulators, exceptions, .. }) => {
            rows::encode_tile(&accumulators.wide(), None, rows, exceptions, out).is_ok()
        }
        (
            Coding::LatticeWithKeyframe { .. },
            State::Lattice { keyframe: Some(keyframe), accumulators, exceptions, .. },
        ) => {
            lattice::put_keyframe(dtype, keyframe, out);
            lattice::encode_tile(&accumulators.wide(), None, Some(rows), exceptions, out).is_ok()
        }
        (Coding::LogKey { .. }, State::Log { factors, first, q, .. }) => {
            log::encode_tile(&q.wide(), Parent::Factors(Grid { factors, first: *first }), out).is_ok()
        }
        (Coding::Log { unit, .. }, State::Log { q, .. }) => match parent {
            Some(State::Log { unit: from, q: before, .. }) if *from == unit => {
                log::encode_tile(&q.wide(), Parent::Integers(before), out).is_ok()
            }
            _ => false,
        },
        (Coding::Moment { .. } | Coding::Sized { .. }, State::Moment { accumulators, exceptions, .. }) => {
            lattice::encode_tile(&accumulators.wide(), None, None, exceptions, out).is_ok()
        }
        (Coding::Cast { .. }, State::Bytes(_)) => true,
        // Store the state as it is: without its former parent, the system cannot encode it any more.
        (Coding::External { .. } | Coding::ExternalKey, State::Bytes(_) | State::External { .. }) => {
            let parent = match parent.filter(|_| coding.parent().is_some()) {
                Some(parent) => Some(parent.bytes(dtype)?),
                None => None,
            };
            let parent = parent.as_ref().map(|parent| parent.as_slice());
            state.before(dtype, |own| published::tile::encode_as_it_is(dtype, own, parent, out))?;
            true
        }
        _ => false,
    };
    Ok(fits)
}

/// Estimated bits of a state in this coding; `None` if the coding cannot express it.
pub fn estimate(spec: TileSpec, state: &State, parent: Option<&State>) -> Result<Option<f64>, Corrupt> {
    let Some(bytes) = state.plain_bytes() else {
        let mut out = Vec::with_capacity(TILE_BYTES / 8);
        return Ok(encode(spec, state, parent, &mut out)?.then_some(8.0 * out.len() as f64));
    };
    let bins = match state {
        State::External { bins, .. } => {
            let bins: Vec<u8> = bins.iter().flat_map(|bin| bin.to_le_bytes()).collect();
            lossless::estimate(Dtype::U16, &bins, None)
        }
        _ => 0.0,
    };
    let parent = match parent {
        Some(parent) => Some(parent.bytes(spec.dtype)?),
        None => None,
    };
    let parent = parent.as_ref().map(|parent| parent.as_slice());
    Ok(Some(bins + lossless::estimate(spec.dtype, bytes, parent)))
}

/// The parent's accumulators in the step of `state`; the inner option is `None` if the parent is the keyframe, so that
/// all are 0. The outer one is `None` if the parent is no lattice, has another keyframe, or does not fit 32 bits in
/// that step.
fn restated(state: &State, parent: Option<&State>) -> Option<Option<Vec<i32>>> {
    let State::Lattice { keyframe, step, .. } = state else { return None };
    let (other, accumulators) = parent?.by_rows(*step).ok()?;
    (keyframe.as_ref() == other).then_some(accumulators)
}
