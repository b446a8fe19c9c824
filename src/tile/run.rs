//! A tile's bytes from several payloads at once. The bits equal those of one [`super::decode`] after the other and
//! [`State::bytes`], with half of the work.

use std::sync::Arc;

use codec::entropy::scratch;
use codec::fused_decode::{self, From, LatticeRun, LogRun};
use codec::lattice::Exception;
use codec::log::{Factors, Grid};
use codec::{Corrupt, Integers, lattice};

use super::{Bytes, Codec, Coding, NO_BASE, NO_FACTORS, State, TileSpec};

/// One payload of a run, with its inputs.
#[derive(Clone, Copy, Debug)]
pub struct Link<'a> {
    /// The tile in its object.
    pub spec: TileSpec,
    /// Its payload.
    pub payload: &'a [u8],
    /// The tensor's factors. Only the last link needs them, and the first one if no state comes before it.
    pub factors: Option<&'a Arc<Factors>>,
    /// The companion's bytes.
    pub companion: Option<&'a Bytes>,
}

/// True if payloads of these codings can be decoded at once, from this state on.
pub fn is_run(base: Option<&State>, codings: impl Iterator<Item = Coding> + Clone) -> bool {
    let lattice = |coding: Coding| matches!(coding.codec, Codec::Lattice { .. }) && coding.parent.is_some();
    let log = |coding: Coding| coding.is_log() && coding.parent.is_some();
    let (first, mut rest) = (codings.clone().next(), codings);
    match (base, first) {
        (None, None) | (Some(State::Moment { .. }), _) => false,
        (None, Some(first)) => match first.codec {
            _ if first.parent.is_some() => false,
            Codec::Lattice { .. } => rest.skip(1).all(lattice),
            Codec::Log { .. } => rest.skip(1).all(log),
            Codec::Moment { .. } | Codec::Sized { .. } => rest.count() == 1,
            _ => false,
        },
        (Some(State::Log { .. }), _) => rest.all(log),
        (Some(State::Bytes(_) | State::External { .. } | State::Lattice { .. }), _) => rest.all(lattice),
    }
}

/// The tile at the end of these payloads, starting from `base`; [`is_run`] must have allowed it. With `keep`, also the
/// tile's state in the form for memory.
///
/// # Errors
/// A payload is wrong, or an input is missing.
pub fn decode_run(
    base: Option<&State>,
    last: TileSpec,
    links: &[Link],
    keep: bool,
) -> Result<(Bytes, Option<State>), Corrupt> {
    match (base, links.first()) {
        (None, None) => Err(NO_BASE),
        (Some(state @ (State::Bytes(bytes) | State::External { bytes, .. })), None) => {
            Ok((Arc::clone(bytes), keep.then(|| state.clone())))
        }
        (None, Some(link)) if link.spec.coding.ratio().is_some() => moment(link),
        (None, Some(link)) if link.spec.coding.is_log() => log(base, last, links, keep),
        (Some(State::Log { .. }), _) => log(base, last, links, keep),
        _ => on_lattice(base, last, links, keep),
    }
}

fn moment(link: &Link) -> Result<(Bytes, Option<State>), Corrupt> {
    let spec = link.spec;
    let (step, rule) = spec.coding.ratio().ok_or(NO_BASE)?;
    let second = match spec.coding.companion() {
        Some(_) => Arc::clone(link.companion.ok_or(NO_BASE)?),
        None => spec.sizes(link.factors)?,
    };
    if second.len() != spec.len {
        return Err(NO_BASE);
    }
    let mut out = scratch::bytes(spec.len);
    fused_decode::moment((rule, spec.dtype), &second, step, link.payload, &mut out)?;
    Ok((Arc::new(out), None))
}

fn on_lattice(
    base: Option<&State>,
    last: TileSpec,
    links: &[Link],
    keep: bool,
) -> Result<(Bytes, Option<State>), Corrupt> {
    let step_of = |link: &Link| link.spec.coding.step().ok_or(NO_BASE);
    let deltas: Result<Vec<(&[u8], f64)>, Corrupt> =
        links.iter().map(|link| Ok((link.payload, step_of(link)?))).collect();
    let mut deltas = deltas?;
    let own;
    let first = deltas.first().map_or(0.0, |(_, step)| *step);
    let (keyframe, from, step, before): (_, _, _, &[Exception]) = match base {
        Some(State::Lattice { keyframe, accumulators, step, exceptions }) => {
            (keyframe.as_ref(), From::Integers(accumulators), *step, exceptions)
        }
        Some(state) => (Some(state.plain_bytes().ok_or(NO_BASE)?), From::Zeros, first, &[]),
        None => {
            let first_payload = &mut deltas.first_mut().ok_or(NO_BASE)?.0;
            let (keyframe, payload) = lattice::take_keyframe(last.dtype, first_payload, last.len)?;
            *first_payload = payload;
            own = keyframe.map(Arc::new);
            (own.as_ref(), From::Zeros, first, &[])
        }
    };
    let n = last.elements();
    let (mut out, mut exceptions) = (scratch::bytes(last.len), before.to_vec());
    let mut integers = keep.then(|| Integers::with_capacity(n));
    let k = keyframe.map(|keyframe| keyframe.as_slice());
    let run = LatticeRun { dtype: last.dtype, k, from, step, payloads: &deltas };
    fused_decode::lattice(run, &mut out, &mut exceptions, integers.as_mut())?;
    let step = deltas.last().map_or(step, |(_, step)| *step);
    let kept =
        integers.map(|accumulators| State::Lattice { keyframe: keyframe.cloned(), accumulators, step, exceptions });
    Ok((Arc::new(out), kept))
}

fn log(base: Option<&State>, last: TileSpec, links: &[Link], keep: bool) -> Result<(Bytes, Option<State>), Corrupt> {
    let start = last.rows.first;
    let factors_of = |link: Option<&Link>| link.and_then(|link| link.factors).cloned().ok_or(NO_FACTORS);
    let unit_of = |link: &Link| link.spec.coding.unit();
    let oldest;
    let (from, unit, own) = match base {
        Some(State::Log { factors, unit, q, .. }) => (From::Integers(q), *unit, Some(factors)),
        _ => {
            oldest = factors_of(links.first())?;
            let unit = links.first().and_then(unit_of).ok_or(NO_BASE)?;
            (From::Factors(Grid { factors: &oldest, first: start }), unit, None)
        }
    };
    if links.iter().any(|link| unit_of(link) != Some(unit)) {
        return Err(NO_BASE);
    }
    // Steps are differences, but each state has its own factors for the prediction.
    let factors = match (own, links) {
        (Some(factors), []) => Arc::clone(factors),
        _ => factors_of(links.last())?,
    };
    let deltas: Vec<&[u8]> = links.iter().map(|link| link.payload).collect();
    let n = last.elements();
    let (mut out, mut integers) = (scratch::bytes(last.len), keep.then(|| Integers::with_capacity(n)));
    let grid = Grid { factors: &factors, first: start };
    let run = LogRun { dtype: last.dtype, grid, unit, from, payloads: &deltas };
    fused_decode::log(run, &mut out, integers.as_mut())?;
    let kept = integers.map(|q| State::Log { factors, first: start, unit, q });
    Ok((Arc::new(out), kept))
}
