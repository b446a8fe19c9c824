//! From a tile's bytes to its state, and from that to its payload: a difference to the same tile of a parent, or alone.
//! The inverse of what `recall::tile` does.

use std::io;
use std::sync::Arc;

use crate::codec::floor::{self, Floor, Keep};
use crate::codec::lattice::Exception;
use crate::codec::log::{Factors, Grid, Parent};
use crate::codec::moment::Rule;
use crate::codec::rows::Rows;
use crate::codec::{Dtype, cast, lattice, log, lossless, moment, published, rows};
use crate::entropy::scratch;
use crate::recall::State;
use crate::store::object::Coding;

/// A tile, and how it is encoded.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) dtype: Dtype,
    pub(super) coding: Coding,
    /// Where its elements lie in the rows of the tensor.
    pub(super) rows: Rows,
}

/// The tensor beside another one, for the elements of one of its tiles: type, bytes as written and as decoded.
pub(super) type Beside<'a> = (Dtype, &'a [u8], &'a Arc<Vec<u8>>);

/// What a tile is quantized with.
#[derive(Clone, Copy, Default)]
pub(super) struct Around<'a> {
    /// The state that it becomes a difference to.
    pub(super) parent: Option<&'a State>,
    /// For what has some of its own: its tensor's.
    pub(super) factors: Option<&'a Arc<Factors>>,
    /// The tensor beside it, as written and as decoded.
    pub(super) beside: Option<Beside<'a>>,
    /// For the lattice by rows: a row's step in root mean squares of its difference.
    pub(super) row_step: f64,
    /// For first moments: the share of a step that is added before rounding.
    pub(super) outward: f64,
    /// Which elements of a lattice are kept exactly.
    pub(super) keep: Keep,
}

/// A tile's state, what it decodes to, and the largest error in the terms of its codec.
pub(super) type Quantized = (State, Arc<Vec<u8>>, f64);

/// A tile's state in this coding. `None`: it does not fit (NaN, infinity, a moment without its second, another's copy that
/// is none).
pub(super) fn quantize(place: Place, data: &Arc<Vec<u8>>, around: Around) -> Option<Quantized> {
    let Place { dtype, coding, .. } = place;
    let elements = data.len() / dtype.size();
    match coding {
        // Those need all of their tensor's tiles, see `published.rs`.
        Coding::Published { .. } | Coding::PublishedKey => None,
        Coding::Lossless | Coding::LosslessDelta { .. } => {
            Some((State::Bytes(Arc::clone(data)), Arc::clone(data), 0.0))
        }
        Coding::Lattice { step, .. } | Coding::LatticeKey { step } | Coding::LatticeWithKeyframe { step } => {
            let keyframe = keyframe(coding, around.parent);
            let (mut accumulators, mut decoded) = (scratch::integers(elements), scratch::bytes(data.len()));
            let mut exceptions = Vec::new();
            let k = keyframe.as_ref().map(|keyframe| keyframe.as_slice());
            let error =
                lattice::quantize(dtype, data, k, step, &mut accumulators, &mut decoded, &mut exceptions).ok()?;
            kept(place, around.keep, data, &mut decoded, &mut exceptions)?;
            Some((State::Lattice { keyframe, accumulators, step, exceptions }, Arc::new(decoded), error))
        }
        Coding::Rows { step, .. } | Coding::RowsKey { step } => {
            let keyframe = keyframe(coding, around.parent);
            let before = match around.parent {
                Some(State::Lattice { accumulators, step: from, .. }) => {
                    let mut accumulators = accumulators.clone();
                    lattice::rescale(&mut accumulators, *from, step).ok()?;
                    Some(accumulators)
                }
                _ => None,
            };
            let (mut accumulators, mut decoded, mut exceptions) = (vec![0; elements], vec![0; data.len()], Vec::new());
            let k = keyframe.as_ref().map(|keyframe| keyframe.as_slice());
            let base = rows::Base { rows: place.rows, k, g: step, a: before.as_deref() };
            let (a, r, kept) = (&mut accumulators, &mut decoded, &mut exceptions);
            let error = rows::quantize(dtype, data, base, around.row_step, a, r, kept).ok()?;
            self::kept(place, around.keep, data, &mut decoded, &mut exceptions)?;
            Some((State::Lattice { keyframe, accumulators, step, exceptions }, Arc::new(decoded), error))
        }
        Coding::Log { unit, .. } | Coding::LogKey { unit } => {
            let keep = match (coding, around.parent) {
                (Coding::Log { .. }, Some(State::Log { q, unit: from, .. })) if *from == unit => Some(q.as_slice()),
                (Coding::LogKey { .. }, _) => None,
                _ => return None,
            };
            let (factors, first) = (around.factors?, place.rows.first);
            let (mut q, mut decoded) = (scratch::integers(elements), scratch::bytes(data.len()));
            let grid = Grid { factors, first };
            let error = log::quantize(dtype, data, grid, unit, keep, &mut q, &mut decoded).ok()?;
            Some((State::Log { factors: Arc::clone(factors), first, unit, q }, Arc::new(decoded), error))
        }
        Coding::Moment { step, rule, .. } => {
            let (second_type, written, second) = around.beside?;
            (second_type == dtype).then_some(())?;
            ratios((rule, dtype), data, (written, second), (step, around.outward))
        }
        Coding::Sized { step, rule } => {
            let grid = Grid { factors: around.factors?, first: place.rows.first };
            let sizes = Arc::new(log::prediction(dtype, grid, elements).ok()?);
            ratios((rule, dtype), data, (&sizes, &sizes), (step, 0.0))
        }
        Coding::Cast { .. } => {
            let (from, written, decoded) = around.beside?;
            let mut out = vec![0; data.len()];
            cast::cast(from, written, dtype, &mut out).ok()?;
            (out == **data).then_some(())?;
            cast::cast(from, decoded, dtype, &mut out).ok()?;
            let error = lattice::largest_error(dtype, data, &out)?;
            let out = Arc::new(out);
            Some((State::Bytes(Arc::clone(&out)), out, error))
        }
    }
}

/// A tile in steps of its ratio to what `written` told when it was written and `second` tells when it is read.
fn ratios(
    (rule, dtype): (Rule, Dtype),
    data: &Arc<Vec<u8>>,
    (written, second): (&[u8], &Arc<Vec<u8>>),
    (step, outward): (f64, f64),
) -> Option<Quantized> {
    let (mut accumulators, mut exceptions) = (scratch::integers(data.len() / dtype.size()), Vec::new());
    moment::quantize((rule, dtype), data, written, (step, outward), &mut accumulators, &mut exceptions).ok()?;
    let state = State::Moment { rule, second: Arc::clone(second), accumulators, step, exceptions };
    let decoded = state.bytes(dtype).ok()?;
    let error = moment::largest_error((rule, dtype), data, written, &decoded, second, step)?;
    Some((state, decoded, error))
}

/// Keeps exactly the elements that a lattice would bring below the floor. `None`: so many that the tensor is to be lossless.
fn kept(place: Place, keep: Keep, data: &[u8], decoded: &mut [u8], exceptions: &mut Vec<Exception>) -> Option<()> {
    /// An exception takes some 6 bytes, a lossless element of fp32 about 3.
    const MOST: usize = 8;
    floor::keep(place.dtype, keep, data, decoded, exceptions);
    (keep != Keep::Floor || exceptions.len() <= data.len() / place.dtype.size() / MOST).then_some(())
}

/// Whether a tile of a tensor of one sign keeps to the floor (`codec::floor`).
pub(super) fn is_above_floor(dtype: Dtype, coding: Coding, written: &[u8], decoded: &[u8]) -> bool {
    let floor = match coding {
        Coding::Moment { .. } | Coding::Sized { .. } => Floor::Sign,
        Coding::Cast { .. } => Floor::Quarter,
        _ => Floor::Eighth,
    };
    !coding.is_lossy() || floor::holds(dtype, floor, written, decoded)
}

/// The largest error that a tensor may have in this coding, of which `found` was found: what it is checked against once it
/// was read back.
pub(super) fn bound(coding: Coding, found: f64) -> f64 {
    match coding {
        Coding::Lossless | Coding::LosslessDelta { .. } => 0.0,
        Coding::Lattice { step, .. } | Coding::LatticeKey { step } | Coding::LatticeWithKeyframe { step } => step / 2.0,
        // Room for roundings is the codec's to give.
        Coding::Moment { step, rule, .. } | Coding::Sized { step, rule } => found.max(step * rule.steps()),
        Coding::Log { unit, .. } => log::bound(unit, true),
        Coding::LogKey { unit } => log::bound(unit, false),
        // Each row has a bound of its own, which was checked when it was quantized; a copy that of what it is made from.
        Coding::Rows { .. } | Coding::RowsKey { .. } | Coding::Cast { .. } => found,
        // They promise nothing.
        Coding::Published { .. } | Coding::PublishedKey => found,
    }
}

/// K of a state that becomes a difference to `parent`.
fn keyframe(coding: Coding, parent: Option<&State>) -> Option<Arc<Vec<u8>>> {
    coding.parent()?;
    match parent? {
        State::Bytes(bytes) | State::Published { bytes, .. } => Some(Arc::clone(bytes)),
        State::Lattice { keyframe, .. } => keyframe.clone(),
        _ => None,
    }
}

/// Appends the payload of `state` in this coding. `false`: it cannot be said so (another keyframe than the parent's, too
/// many steps from it); `out` then holds nothing of use.
///
/// # Errors
/// When the parent's state is damaged.
pub(super) fn payload(place: Place, state: &State, parent: Option<&State>, out: &mut Vec<u8>) -> io::Result<bool> {
    let Place { dtype, coding, .. } = place;
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
        (Coding::Lattice { .. }, State::Lattice { accumulators, exceptions, .. }) => match restated(state, parent) {
            Some(parent) => {
                lattice::encode_tile(accumulators, parent.as_deref(), Some(place.rows), exceptions, out).is_ok()
            }
            None => false,
        },
        (Coding::Rows { .. }, State::Lattice { accumulators, exceptions, .. }) => match restated(state, parent) {
            Some(parent) => rows::encode_tile(accumulators, parent.as_deref(), place.rows, exceptions, out).is_ok(),
            None => false,
        },
        (Coding::LatticeKey { .. }, State::Lattice { keyframe: None, accumulators, exceptions, .. }) => {
            lattice::encode_tile(accumulators, None, Some(place.rows), exceptions, out).is_ok()
        }
        (Coding::RowsKey { .. }, State::Lattice { keyframe: None, accumulators, exceptions, .. }) => {
            rows::encode_tile(accumulators, None, place.rows, exceptions, out).is_ok()
        }
        (
            Coding::LatticeWithKeyframe { .. },
            State::Lattice { keyframe: Some(keyframe), accumulators, exceptions, .. },
        ) => {
            lattice::put_keyframe(dtype, keyframe, out);
            lattice::encode_tile(accumulators, None, Some(place.rows), exceptions, out).is_ok()
        }
        (Coding::LogKey { .. }, State::Log { factors, first, q, .. }) => {
            log::encode_tile(q, Parent::Factors(Grid { factors, first: *first }), out).is_ok()
        }
        (Coding::Log { unit, .. }, State::Log { q, .. }) => match parent {
            Some(State::Log { unit: from, q: before, .. }) if *from == unit => {
                log::encode_tile(q, Parent::State(before), out).is_ok()
            }
            _ => false,
        },
        (Coding::Moment { .. } | Coding::Sized { .. }, State::Moment { accumulators, exceptions, .. }) => {
            lattice::encode_tile(accumulators, None, None, exceptions, out).is_ok()
        }
        (Coding::Cast { .. }, State::Bytes(_)) => true,
        // As it is: what a state becomes that loses what it was a difference to.
        (Coding::Published { .. } | Coding::PublishedKey, State::Bytes(_) | State::Published { .. }) => {
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

/// The parent's accumulators in the step of `state`; inside, `None` where they are all 0, because the parent is the
/// keyframe. `None`: it has another keyframe.
pub(super) fn restated(state: &State, parent: Option<&State>) -> Option<Option<Vec<i32>>> {
    let State::Lattice { keyframe, step, .. } = state else {
        return None;
    };
    match parent? {
        State::Bytes(bytes) | State::Published { bytes, .. } => (keyframe.as_ref() == Some(bytes)).then_some(None),
        State::Lattice { keyframe: other, accumulators, step: from, .. } => {
            let mut accumulators = accumulators.clone();
            let fits = keyframe == other && lattice::rescale(&mut accumulators, *from, *step).is_ok();
            fits.then_some(Some(accumulators))
        }
        _ => None,
    }
}
