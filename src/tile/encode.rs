//! From a tile's state to its payload: a difference to the same tile of a parent, or alone. The inverse of
//! [`super::decode`].

use codec::entropy::scratch;
use codec::log::{From, Grid};
use codec::{Corrupt, lattice, log, lossless, rows};

use super::{Codec, State, TileSpec};

/// Appends the payload of `state` in this coding. `false` if the coding cannot express it: the parent has another
/// keyframe, or is too many steps away. `out` is useless then.
///
/// # Errors
/// The parent's state is damaged.
pub fn encode(spec: TileSpec, state: &State, parent: Option<&State>, out: &mut Vec<u8>) -> Result<bool, Corrupt> {
    let TileSpec { dtype, coding, rows, .. } = spec;
    let parent = parent.filter(|_| coding.parent.is_some());
    if coding.parent.is_some() && parent.is_none() {
        return Ok(false);
    }
    let fits = match (coding.codec, state) {
        (Codec::Lossless, State::Bytes(bytes)) => {
            let parent = parent.map(|parent| parent.bytes(dtype)).transpose()?;
            lossless::encode(dtype, bytes, parent.as_ref().map(|parent| parent.as_slice()), out);
            true
        }
        (Codec::Lattice { .. }, State::Lattice { keyframe, accumulators, step, exceptions }) => {
            let a = &accumulators.wide();
            match parent {
                None => {
                    lattice::put_keyframe(dtype, keyframe.as_ref().map(|keyframe| keyframe.as_slice()), out);
                    lattice::encode_tile(a, None, exceptions, out).is_ok()
                }
                Some(State::Lattice { keyframe: other, accumulators: before, step: from, .. })
                    if keyframe == other && before.len() == a.len() =>
                {
                    let restated = |start: usize, block: &mut [i32]| {
                        before.fill(start, block);
                        lattice::rescale(block, *from, *step).is_ok()
                    };
                    let narrow = before.narrow().filter(|_| from == step && lattice::is_step(*step));
                    lattice::encode_difference(a, narrow, restated, exceptions, out).is_ok()
                }
                // All of its integers are 0.
                Some(parent) if parent.plain_bytes().is_some() && parent.plain_bytes() == keyframe.as_ref() => {
                    lattice::encode_tile(a, None, exceptions, out).is_ok()
                }
                Some(_) => false,
            }
        }
        (Codec::Rows { .. }, State::Lattice { keyframe, accumulators, step, exceptions }) => {
            let before = match parent.map(|parent| parent.by_rows(*step)) {
                None => {
                    lattice::put_keyframe(dtype, keyframe.as_ref().map(|keyframe| keyframe.as_slice()), out);
                    None
                }
                Some(Ok((other, before))) if other == keyframe.as_ref() => before,
                Some(_) => return Ok(false),
            };
            let fits = rows::encode_tile(&accumulators.wide(), before.as_deref(), rows, exceptions, out);
            before.into_iter().for_each(scratch::give_integers);
            fits.is_ok()
        }
        (Codec::Log { unit }, State::Log { factors, first, q, .. }) => {
            let parent = match parent {
                None => From::Factors(Grid { factors, first: *first }),
                Some(State::Log { unit: from, q: before, .. }) if *from == unit => From::Integers(before),
                Some(_) => return Ok(false),
            };
            log::encode_tile(&q.wide(), parent, out).is_ok()
        }
        (Codec::Moment { .. } | Codec::Sized { .. }, State::Moment { accumulators, exceptions, .. }) => {
            lattice::encode_tile(&accumulators.wide(), None, exceptions, out).is_ok()
        }
        (Codec::Cast { .. }, State::Bytes(_)) => true,
        // Store the state as it is: without its former parent, the system cannot encode it any more.
        (Codec::External, State::Bytes(_) | State::External { .. }) => {
            let parent = parent.map(|parent| parent.bytes(dtype)).transpose()?;
            let parent = parent.as_ref().map(|parent| parent.as_slice());
            state.before(dtype, |own| papers::tile::encode_as_it_is(dtype, own, parent, out))?;
            true
        }
        _ => false,
    };
    Ok(fits)
}
