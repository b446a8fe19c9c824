//! A tile's bytes, where nobody needs its state: from the nearest state in memory, or from its keyframe, in one pass over
//! the payloads between. What [`super::tile::state`] and [`State::bytes`] give, with half of the work.

use std::io;
use std::sync::Arc;

use crate::codec::along::{self, From};
use crate::codec::lattice::Exception;
use crate::codec::log::{Factors, Grid};
use crate::codec::{Dtype, Integers};
use crate::entropy::scratch;
use crate::store::Damage;
use crate::store::object::Coding;

use super::chain::Step;
use super::memory::{Claim, Kept};
use super::tile::{NO_BASE, apply, beside, sizes, state_from, tile_len};
use super::{Chain, ReadError, State};

/// Whether somebody will ask for a tile that lies beside another once more.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// For the first or the second time: it is kept after the first.
    Next,
    /// In between.
    Again,
}

/// The bytes of tile number `tile` of tensor number `tensor` of the object at this place of the chain.
pub(super) fn bytes(
    chain: &Chain,
    place: usize,
    tensor: usize,
    tile: usize,
    then: Then,
) -> Result<Arc<Vec<u8>>, ReadError> {
    let kept = (place == 0).then(|| chain.beside());
    if let Some(bytes) = kept.and_then(|kept| kept.take(tensor, tile)) {
        if let (Some(kept), Then::Again) = (kept, then) {
            kept.put(tensor, tile, &bytes);
        }
        return Ok(bytes);
    }
    let bytes = decode(chain, place, tensor, tile)?;
    if let Some(kept) = kept {
        kept.put(tensor, tile, &bytes);
    }
    Ok(bytes)
}

fn decode(chain: &Chain, place: usize, tensor: usize, tile: usize) -> Result<Arc<Vec<u8>>, ReadError> {
    let path = chain.path_from(place, tensor)?;
    let (mut base, mut first) = (Base::None, 0);
    let mut claim: Option<Claim> = None;
    if let Some(memory) = chain.memory() {
        let mut read = None;
        // From the leaf down, as in `state_from`.
        for (at, step) in path.iter().enumerate().rev().filter(|(_, step)| chain.may_ask_for(step.object)) {
            let is_last = at + 1 == path.len();
            let keep = step.object.is_super_step() || is_last && chain.remembers(step.object.header().id);
            let known = match keep && is_last && step.entry.coding.beside().is_none() {
                true => match memory.claim(step.object, step.tensor, tile) {
                    Ok(known) => Some(known),
                    Err(right) => {
                        claim = Some(right);
                        None
                    }
                },
                false => memory.get(step.object, step.tensor, tile),
            };
            if let Some(known) = known {
                (base, first) = (Base::Kept(known), at + 1);
                break;
            }
            if keep && !is_last {
                (base, first) = (Base::State(state_from(chain, step.place, step.tensor, tile)?), at + 1);
                read = Some(path.len() - first);
                break;
            }
        }
        match read {
            Some(read) => memory.count_read(read),
            None => memory.count(first > 0, path.len() - first),
        }
    }
    let last =
        path.last().ok_or_else(|| ReadError::object(chain.leaf().header().id, Damage("a tensor has no base")))?;
    let (dtype, len) = (last.entry.dtype, tile_len(last.entry, tile));
    let mut steps = &path[first..];
    let mut payload = Vec::new();
    while let Some((step, rest)) = steps.split_first().filter(|_| !is_run(&base, steps)) {
        step.object.payload(&step.entry.tiles[tile], &mut payload).map_err(|error| fail(step, error))?;
        let beside = beside(chain, step, tile)?;
        let state = apply(base.into_state(), step, tile, &payload, beside).map_err(|error| fail(step, error))?;
        (base, steps) = (Base::State(state), rest);
    }
    let (bytes, kept) = match (&base, steps) {
        (Base::State(state), []) => {
            let bytes = state.bytes(dtype).map_err(|corrupt| fail(last, corrupt.into()))?;
            (bytes, claim.as_ref().and_then(|_| Kept::of(state)))
        }
        _ => run(chain, &base, steps, tile, (dtype, len), claim.is_some(), last)?,
    };
    if let (Some(claim), Some(kept)) = (claim, kept) {
        claim.fulfil(chain, kept);
    }
    Ok(bytes)
}

fn fail(step: &Step, error: io::Error) -> ReadError {
    ReadError::tensor(step.object.header().id, &step.entry.path, error)
}

/// What a run of steps begins with.
enum Base {
    None,
    Kept(Arc<Kept>),
    State(State),
}

impl Base {
    fn into_state(self) -> Option<State> {
        match self {
            Base::None => None,
            Base::Kept(kept) => Some(kept.state()),
            Base::State(state) => Some(state),
        }
    }

    fn view(&self) -> View<'_> {
        match self {
            Base::None => View::None,
            Base::Kept(kept) => kept.view(),
            Base::State(State::Bytes(bytes) | State::Published { bytes, .. }) => View::Bytes(bytes),
            Base::State(State::Lattice { keyframe, accumulators, step, exceptions }) => {
                View::Lattice { keyframe: keyframe.as_ref(), from: From::Wide(accumulators), step: *step, exceptions }
            }
            Base::State(State::Log { factors, unit, q, .. }) => View::Log { factors, unit: *unit, from: From::Wide(q) },
            Base::State(State::Moment { .. }) => View::Other,
        }
    }
}

/// A state, wherever it is.
pub(super) enum View<'a> {
    None,
    Bytes(&'a Arc<Vec<u8>>),
    Lattice { keyframe: Option<&'a Arc<Vec<u8>>>, from: From<'a>, step: f64, exceptions: &'a [Exception] },
    Log { factors: &'a Arc<Factors>, unit: u32, from: From<'a> },
    Other,
}

/// Whether these steps can be taken together from there.
fn is_run(base: &Base, steps: &[Step]) -> bool {
    let all = |steps: &[Step], is: fn(Coding) -> bool| steps.iter().all(|step| is(step.entry.coding));
    let lattice = |coding| matches!(coding, Coding::Lattice { .. });
    let log = |coding| matches!(coding, Coding::Log { .. });
    match (base.view(), steps) {
        (View::None, [first, rest @ ..]) => match first.entry.coding {
            Coding::LatticeKey { .. } => all(rest, lattice),
            Coding::LogKey { .. } => all(rest, log),
            Coding::Moment { .. } | Coding::Sized { .. } => rest.is_empty(),
            _ => false,
        },
        (View::Bytes(_) | View::Lattice { .. }, steps) => all(steps, lattice),
        (View::Log { .. }, steps) => all(steps, log),
        _ => false,
    }
}

type Decoded = (Arc<Vec<u8>>, Option<Kept>);

/// Takes these steps together: a tile's bytes, and what is kept of its state if it is to be.
fn run(
    chain: &Chain,
    base: &Base,
    steps: &[Step],
    tile: usize,
    (dtype, len): (Dtype, usize),
    keep: bool,
    last: &Step,
) -> Result<Decoded, ReadError> {
    let mut payloads: Vec<Vec<u8>> = Vec::with_capacity(steps.len());
    for step in steps {
        let mut payload = Vec::new();
        step.object.payload(&step.entry.tiles[tile], &mut payload).map_err(|error| fail(step, error))?;
        payloads.push(payload);
    }
    let corrupt = |corrupt: crate::codec::Corrupt| fail(last, corrupt.into());
    let n = len / dtype.size();
    let mut integers = keep.then(|| Integers::with_capacity(n));
    let first = steps.first();
    let (view, coding) = (base.view(), first.map(|step| step.entry.coding));
    match (view, coding) {
        (View::None, None) => Err(fail(last, NO_BASE.into())),
        (View::Bytes(bytes), None) => Ok((Arc::clone(bytes), keep.then(|| Kept::Bytes(Arc::clone(bytes))))),
        (View::None, Some(coding @ (Coding::Moment { .. } | Coding::Sized { .. }))) => {
            let step_of = first.unwrap_or(last);
            let (step, rule) = coding.ratio().ok_or_else(|| fail(step_of, NO_BASE.into()))?;
            let second = match coding {
                Coding::Sized { .. } => sizes(step_of, tile, n).map_err(|error| fail(step_of, error))?,
                _ => beside(chain, step_of, tile)?.ok_or_else(|| fail(step_of, NO_BASE.into()))?.1,
            };
            let mut out = scratch::room(len);
            if second.len() != len {
                return Err(fail(step_of, NO_BASE.into()));
            }
            along::moment((rule, dtype), &second, step, &payloads[0], &mut out).map_err(corrupt)?;
            Ok((Arc::new(out), None))
        }
        (
            view @ (View::None | View::Bytes(_) | View::Lattice { .. }),
            Some(Coding::Lattice { .. } | Coding::LatticeKey { .. }) | None,
        ) => {
            let step_of = |step: &Step| step.entry.coding.step().unwrap_or_default();
            let (keyframe, from, step, before): (_, _, _, &[Exception]) = match view {
                View::Lattice { keyframe, from, step, exceptions } => (keyframe, from, step, exceptions),
                View::Bytes(bytes) => (Some(bytes), From::Zeros, first.map(step_of).unwrap_or_default(), &[]),
                _ => (None, From::Zeros, first.map(step_of).unwrap_or_default(), &[]),
            };
            let deltas: Vec<(&[u8], f64)> =
                payloads.iter().zip(steps).map(|(p, s)| (p.as_slice(), step_of(s))).collect();
            let (mut out, mut exceptions) = (scratch::room(len), before.to_vec());
            let k = keyframe.map(|keyframe| keyframe.as_slice());
            along::lattice((dtype, k), (from, step), &deltas, n, &mut out, &mut exceptions, integers.as_mut())
                .map_err(corrupt)?;
            let step = deltas.last().map_or(step, |(_, step)| *step);
            let kept = integers.map(|accumulators| Kept::Lattice {
                keyframe: keyframe.cloned(),
                accumulators,
                step,
                exceptions,
            });
            Ok((Arc::new(out), kept))
        }
        (view @ (View::None | View::Log { .. }), Some(Coding::Log { .. } | Coding::LogKey { .. }) | None) => {
            let factors_of = |step: &Step| step.object.factors(step.tensor).map_err(|error| fail(step, error));
            let start = last.entry.first_element(tile);
            let unit_of = |step: &Step| match step.entry.coding {
                Coding::Log { unit, .. } | Coding::LogKey { unit } => Some(unit),
                _ => None,
            };
            // Steps are differences, but each state is predicted by its own factors.
            let factors = match (&view, steps.last()) {
                (View::Log { factors, .. }, None) => Arc::clone(factors),
                (_, newest) => factors_of(newest.unwrap_or(last))?,
            };
            let oldest;
            let (from, unit) = match view {
                View::Log { unit, from, .. } => (from, Some(unit)),
                _ => {
                    let step = first.unwrap_or(last);
                    oldest = factors_of(step)?;
                    (From::Factors(Grid { factors: &oldest, first: start }), unit_of(step))
                }
            };
            let unit = unit.unwrap_or_default();
            if let Some(step) = steps.iter().find(|step| unit_of(step) != Some(unit)) {
                return Err(fail(step, NO_BASE.into()));
            }
            let deltas: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
            let mut out = scratch::room(len);
            let grid = Grid { factors: &factors, first: start };
            along::log(dtype, (grid, unit), from, &deltas, n, &mut out, integers.as_mut()).map_err(corrupt)?;
            let kept = integers.map(|q| Kept::Log { factors, first: start, unit, q });
            Ok((Arc::new(out), kept))
        }
        _ => Err(fail(last, NO_BASE.into())),
    }
}
