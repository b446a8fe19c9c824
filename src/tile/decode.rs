//! From payloads to a tile's bytes, and to its state where a later one is a difference to it. The inverse of
//! [`super::encode`].
//!
//! Payloads of one lattice after the other are decoded in one pass, without the states between them.

use std::sync::Arc;

use codec::entropy::scratch;
use codec::fused_decode::{self, From, LatticeRun, LogRun};
use codec::lattice::Exception;
use codec::log::{Factors, Grid};
use codec::{Corrupt, Dtype, Integers, cast, lattice, lossless, rows};

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
    /// Type and bytes of the companion, for the same elements. Only a run of one link has one.
    pub companion: Option<&'a (Dtype, Bytes)>,
}

/// A tile's bytes, and its state if that was asked for. No state is a difference to a first moment's, so that one is
/// its bytes.
pub type Decoded = (Bytes, Option<State>);

/// How many of the payloads of these codings, which follow each other, make the next run.
pub fn run_length(mut codings: impl Iterator<Item = Coding>) -> usize {
    let is_next: fn(Codec) -> bool = match codings.next().map(|first| first.codec) {
        Some(Codec::Lattice { .. }) => |codec| matches!(codec, Codec::Lattice { .. }),
        Some(Codec::Log { .. }) => |codec| matches!(codec, Codec::Log { .. }),
        _ => |_| false,
    };
    1 + codings.take_while(|coding| is_next(coding.codec)).count()
}

/// The tile at the end of a run of at least one payload ([`run_length`]), which begins at the state `base`. With
/// `keep`, also the tile's state in the form for memory.
///
/// # Errors
/// A payload is wrong, or an input is missing.
pub fn decode(base: Option<&State>, links: &[Link], keep: bool) -> Result<Decoded, Corrupt> {
    let (first, last) = links.first().zip(links.last()).ok_or(NO_BASE)?;
    let TileSpec { dtype, coding, len, .. } = first.spec;
    let base = coding.parent.map(|_| base.ok_or(NO_BASE)).transpose()?;
    let companion = || first.companion.ok_or(NO_BASE);
    let state = match coding.codec {
        Codec::Lattice { .. } => return on_lattice(base, last.spec, links, keep),
        Codec::Log { unit } => return log(base, unit, last, links, keep),
        Codec::Moment { .. } => return moment(first, &companion()?.1, keep),
        Codec::Sized { .. } => return moment(first, &first.spec.sizes(first.factors)?, keep),
        Codec::Rows { step } => by_rows(base, first, step)?,
        Codec::Lossless => {
            let parent = base.map(|base| base.bytes(dtype)).transpose()?;
            let mut bytes = scratch::bytes(len);
            lossless::decode(dtype, first.payload, parent.as_ref().map(|parent| parent.as_slice()), &mut bytes)?;
            State::Bytes(Arc::new(bytes))
        }
        Codec::Cast { .. } => {
            let (from, bytes) = companion()?;
            let mut out = vec![0; len];
            cast::cast(*from, bytes, dtype, &mut out)?;
            State::Bytes(Arc::new(out))
        }
        Codec::External => State::of_external(match base {
            None => papers::tile::decode(dtype, first.payload, None, len)?,
            Some(base) => base.before(dtype, |base| papers::tile::decode(dtype, first.payload, Some(base), len))??,
        }),
    };
    let bytes = state.bytes(dtype)?;
    Ok((bytes, keep.then(|| state.packed())))
}

fn by_rows(base: Option<&State>, link: &Link, step: f64) -> Result<State, Corrupt> {
    let TileSpec { dtype, len, rows, .. } = link.spec;
    let ((keyframe, accumulators), payload) = match base {
        Some(base) => {
            let (keyframe, accumulators) = base.by_rows(step)?;
            ((keyframe.cloned(), accumulators), link.payload)
        }
        None => {
            let (keyframe, payload) = lattice::take_keyframe(dtype, link.payload, len)?;
            ((keyframe.map(Arc::new), None), payload)
        }
    };
    let mut accumulators = accumulators.unwrap_or_else(|| scratch::zeros(link.spec.elements()));
    let mut exceptions = Vec::new();
    rows::decode_tile_add(payload, &mut accumulators, rows, &mut exceptions)?;
    Ok(State::Lattice { keyframe, accumulators: Integers::Wide(accumulators), step, exceptions })
}

fn moment(link: &Link, second: &Bytes, keep: bool) -> Result<Decoded, Corrupt> {
    let TileSpec { dtype, coding, len, .. } = link.spec;
    let (step, rule) = coding.ratio().ok_or(NO_BASE)?;
    if second.len() != len {
        return Err(NO_BASE);
    }
    let mut out = scratch::bytes(len);
    fused_decode::moment((rule, dtype), second, step, link.payload, &mut out)?;
    let bytes = Arc::new(out);
    Ok((Arc::clone(&bytes), keep.then_some(State::Bytes(bytes))))
}

fn on_lattice(base: Option<&State>, last: TileSpec, links: &[Link], keep: bool) -> Result<Decoded, Corrupt> {
    let step_of = |link: &Link| link.spec.coding.step().ok_or(NO_BASE);
    let deltas: Result<Vec<(&[u8], f64)>, Corrupt> =
        links.iter().map(|link| Ok((link.payload, step_of(link)?))).collect();
    let mut deltas = deltas?;
    let (first, step) = deltas.first().zip(deltas.last()).map_or((0.0, 0.0), |((_, first), (_, last))| (*first, *last));
    let own;
    let (keyframe, from, before): (_, _, f64) = match base {
        Some(State::Lattice { keyframe, accumulators, step, .. }) => {
            (keyframe.as_ref(), From::Integers(accumulators), *step)
        }
        Some(state) => (Some(state.plain_bytes().ok_or(NO_BASE)?), From::Zeros, first),
        None => {
            let first_payload = &mut deltas.first_mut().ok_or(NO_BASE)?.0;
            let (keyframe, payload) = lattice::take_keyframe(last.dtype, first_payload, last.len)?;
            *first_payload = payload;
            own = keyframe.map(Arc::new);
            (own.as_ref(), From::Zeros, first)
        }
    };
    let mut exceptions: Vec<Exception> = Vec::new();
    let (mut out, mut integers) = (scratch::bytes(last.len), keep.then(|| Integers::with_capacity(last.elements())));
    let k = keyframe.map(|keyframe| keyframe.as_slice());
    let run = LatticeRun { dtype: last.dtype, k, from, step: before, payloads: &deltas };
    fused_decode::lattice(run, &mut out, &mut exceptions, integers.as_mut())?;
    let kept =
        integers.map(|accumulators| State::Lattice { keyframe: keyframe.cloned(), accumulators, step, exceptions });
    Ok((Arc::new(out), kept))
}

fn log(base: Option<&State>, unit: u32, last: &Link, links: &[Link], keep: bool) -> Result<Decoded, Corrupt> {
    let TileSpec { dtype, rows, len, .. } = last.spec;
    let first = rows.first;
    let from = match base {
        None => From::Factors(Grid { factors: links.first().and_then(|link| link.factors).ok_or(NO_FACTORS)?, first }),
        Some(State::Log { q, unit: before, .. }) if *before == unit => From::Integers(q),
        Some(_) => return Err(NO_BASE),
    };
    if links.iter().any(|link| link.spec.coding.unit() != Some(unit)) {
        return Err(NO_BASE);
    }
    // Steps are differences, but each state has its own factors for the prediction.
    let factors = last.factors.ok_or(NO_FACTORS)?;
    let payloads: Vec<&[u8]> = links.iter().map(|link| link.payload).collect();
    let (mut out, mut integers) = (scratch::bytes(len), keep.then(|| Integers::with_capacity(last.spec.elements())));
    let run = LogRun { dtype, grid: Grid { factors, first }, unit, from, payloads: &payloads };
    fused_decode::log(run, &mut out, integers.as_mut())?;
    let kept = integers.map(|q| State::Log { factors: Arc::clone(factors), first, unit, q });
    Ok((Arc::new(out), kept))
}
