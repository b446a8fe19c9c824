//! From a payload to a tile's state. The inverse of [`super::encode`].

use std::sync::Arc;

use codec::entropy::scratch;
use codec::log::{Factors, Grid};
use codec::{Corrupt, Dtype, Integers, cast, lattice, log, lossless, rows};

use super::{Bytes, Codec, NO_BASE, NO_FACTORS, State, TileSpec};

/// The inputs to decode a payload, as its coding needs them.
#[derive(Clone, Debug, Default)]
pub struct Inputs {
    /// The parent's state of the tile.
    pub parent: Option<Arc<State>>,
    /// Type and bytes of the companion, for the same elements.
    pub companion: Option<(Dtype, Bytes)>,
    /// The tensor's factors.
    pub factors: Option<Arc<Factors>>,
}

/// Decodes the state of a tile.
///
/// # Errors
/// The payload is wrong, or an input is missing.
pub fn decode(spec: TileSpec, payload: &[u8], inputs: Inputs) -> Result<State, Corrupt> {
    let TileSpec { dtype, coding, len, rows } = spec;
    let elements = spec.elements();
    let mut exceptions = Vec::new();
    match coding.codec {
        Codec::External => external(spec, payload, inputs.parent.as_deref()),
        Codec::Lossless => {
            let parent = match coding.parent {
                Some(_) => Some(inputs.parent.ok_or(NO_BASE)?.bytes(dtype)?),
                None => None,
            };
            let mut bytes = scratch::bytes(len);
            lossless::decode(dtype, payload, parent.as_ref().map(|parent| parent.as_slice()), &mut bytes)?;
            Ok(State::Bytes(Arc::new(bytes)))
        }
        Codec::Lattice { step } | Codec::Rows { step } => {
            let (keyframe, mut accumulators, payload) = match coding.parent {
                Some(_) => {
                    let restate = |a: &mut [i32], from| match coding.is_by_rows() {
                        true => rows::restate(a, from, step),
                        false => lattice::rescale(a, from, step),
                    };
                    let (keyframe, accumulators) = base(inputs.parent, elements, restate)?;
                    (keyframe, accumulators, payload)
                }
                None => {
                    let (keyframe, payload) = lattice::take_keyframe(dtype, payload, len)?;
                    (keyframe.map(Arc::new), scratch::zeros(elements), payload)
                }
            };
            match coding.is_by_rows() {
                true => rows::decode_tile_add(payload, &mut accumulators, rows, &mut exceptions)?,
                false => lattice::decode_tile_add(payload, &mut accumulators, &mut exceptions)?,
            }
            Ok(State::Lattice { keyframe, accumulators: Integers::Wide(accumulators), step, exceptions })
        }
        Codec::Log { unit } => {
            let (factors, first) = (inputs.factors.ok_or(NO_FACTORS)?, rows.first);
            let (mut q, alone) = match coding.parent {
                None => (scratch::zeros(elements), Some(Grid { factors: &factors, first })),
                Some(_) => match inputs.parent.ok_or(NO_BASE)?.into_owned() {
                    State::Log { unit: from, q, .. } if from == unit => (q.into_wide(), None),
                    _ => return Err(NO_BASE),
                },
            };
            log::decode_tile(payload, alone, &mut q)?;
            Ok(State::Log { factors, first, unit, q: Integers::Wide(q) })
        }
        Codec::Moment { step, rule, .. } | Codec::Sized { step, rule } => {
            let second = match coding.companion() {
                Some(_) => inputs.companion.ok_or(NO_BASE)?.1,
                None => spec.sizes(inputs.factors.as_ref())?,
            };
            let mut accumulators = scratch::zeros(elements);
            lattice::decode_tile_add(payload, &mut accumulators, &mut exceptions)?;
            Ok(State::Moment { rule, second, accumulators: Integers::Wide(accumulators), step, exceptions })
        }
        Codec::Cast { .. } => {
            let (from, bytes) = inputs.companion.ok_or(NO_BASE)?;
            let mut out = vec![0; len];
            cast::cast(from, &bytes, dtype, &mut out)?;
            Ok(State::Bytes(Arc::new(out)))
        }
    }
}

/// K of a difference to `parent`, and the accumulators that the difference is added to. `restate` brings those of a
/// parent's step to this one's.
fn base(
    parent: Option<Arc<State>>,
    elements: usize,
    restate: impl FnOnce(&mut [i32], f64) -> Result<(), Corrupt>,
) -> Result<(Option<Bytes>, Vec<i32>), Corrupt> {
    let parent = parent.ok_or(NO_BASE)?;
    if let Some(bytes) = parent.plain_bytes() {
        return Ok((Some(Arc::clone(bytes)), scratch::zeros(elements)));
    }
    match parent.into_owned() {
        State::Lattice { keyframe, accumulators, step: from, .. } => {
            let mut accumulators = accumulators.into_wide();
            restate(&mut accumulators, from)?;
            Ok((keyframe, accumulators))
        }
        _ => Err(NO_BASE),
    }
}

fn external(spec: TileSpec, payload: &[u8], parent: Option<&State>) -> Result<State, Corrupt> {
    let (dtype, len) = (spec.dtype, spec.len);
    let decoded = match (spec.coding.parent, parent) {
        (None, _) => papers::tile::decode(dtype, payload, None, len)?,
        (Some(_), Some(parent)) => {
            parent.before(dtype, |before| papers::tile::decode(dtype, payload, Some(before), len))??
        }
        (Some(_), None) => return Err(NO_BASE),
    };
    Ok(State::of_external(decoded))
}
