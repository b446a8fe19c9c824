//! From a tile's bytes to its state.

use std::sync::Arc;

use crate::codec::floor::{self, Keep};
use crate::codec::lattice::Exception;
use crate::codec::log::{Factors, Grid};
use crate::codec::moment::Rule;
use crate::codec::{Dtype, Integers, cast, lattice, log, moment, rows};
use crate::entropy::scratch;

use super::{Bytes, Coding, State, TileSpec};

/// The tile of the companion for the same elements: type, bytes as written and as decoded.
pub type Companion<'a> = (Dtype, &'a [u8], &'a Bytes);

/// The inputs to quantize a tile.
#[derive(Clone, Copy, Default)]
pub struct Around<'a> {
    /// The parent's state.
    pub parent: Option<&'a State>,
    /// The tensor's factors, if its coding has any.
    pub factors: Option<&'a Arc<Factors>>,
    /// The companion's tile.
    pub companion: Option<Companion<'a>>,
    /// For the lattice by rows: a row's step in root mean squares of its difference.
    pub row_step: f64,
    /// For first moments: the share of a step that is added before rounding.
    pub outward: f64,
    /// The elements of a lattice that are kept exactly.
    pub keep: Keep,
}

/// A tile's state, its decoded bytes, and the largest error in the units of its codec.
pub type Quantized = (State, Bytes, f64);

/// A tile's state in this coding. `None` if the tile does not fit: NaN, infinity, a moment without its second, a copy
/// whose bytes are not the cast ones. Also `None` if the coding needs all tiles of the tensor at once, as published
/// systems do.
pub fn quantize(spec: TileSpec, data: &Bytes, around: Around) -> Option<Quantized> {
    let TileSpec { dtype, coding, .. } = spec;
    let elements = spec.elements();
    match coding {
        Coding::External { .. } | Coding::ExternalKey => None,
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
            keep_exactly(spec, around.keep, data, &mut decoded, &mut exceptions)?;
            let accumulators = Integers::Wide(accumulators);
            Some((State::Lattice { keyframe, accumulators, step, exceptions }, Arc::new(decoded), error))
        }
        Coding::Rows { step, .. } | Coding::RowsKey { step } => {
            let keyframe = keyframe(coding, around.parent);
            let before = match around.parent {
                Some(parent @ State::Lattice { .. }) => parent.on_lattice(step).ok()?.1,
                _ => None,
            };
            let (mut accumulators, mut decoded, mut exceptions) = (vec![0; elements], vec![0; data.len()], Vec::new());
            let k = keyframe.as_ref().map(|keyframe| keyframe.as_slice());
            let base = rows::Base { rows: spec.rows, k, g: step, a: before.as_deref() };
            let (a, r, kept) = (&mut accumulators, &mut decoded, &mut exceptions);
            let error = rows::quantize(dtype, data, base, around.row_step, a, r, kept).ok()?;
            keep_exactly(spec, around.keep, data, &mut decoded, &mut exceptions)?;
            let accumulators = Integers::Wide(accumulators);
            Some((State::Lattice { keyframe, accumulators, step, exceptions }, Arc::new(decoded), error))
        }
        Coding::Log { unit, .. } | Coding::LogKey { unit } => {
            let keep = match (coding, around.parent) {
                (Coding::Log { .. }, Some(State::Log { q, unit: from, .. })) if *from == unit => Some(q.wide()),
                (Coding::LogKey { .. }, _) => None,
                _ => return None,
            };
            let (factors, first) = (around.factors?, spec.rows.first);
            let (mut q, mut decoded) = (scratch::integers(elements), scratch::bytes(data.len()));
            let grid = Grid { factors, first };
            let error = log::quantize(dtype, data, grid, unit, keep.as_deref(), &mut q, &mut decoded).ok()?;
            let state = State::Log { factors: Arc::clone(factors), first, unit, q: Integers::Wide(q) };
            Some((state, Arc::new(decoded), error))
        }
        Coding::Moment { step, rule, .. } => {
            let (second_type, written, second) = around.companion?;
            (second_type == dtype).then_some(())?;
            ratios((rule, dtype), data, (written, second), (step, around.outward))
        }
        Coding::Sized { step, rule } => {
            let sizes = spec.sizes(around.factors).ok()?;
            ratios((rule, dtype), data, (&sizes, &sizes), (step, 0.0))
        }
        Coding::Cast { .. } => {
            let (from, written, decoded) = around.companion?;
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

/// A tile in steps of its ratio to a size. `written` gave the size when it was written, and `second` gives it when it
/// is read.
fn ratios(
    (rule, dtype): (Rule, Dtype),
    data: &Bytes,
    (written, second): (&[u8], &Bytes),
    (step, outward): (f64, f64),
) -> Option<Quantized> {
    let (mut accumulators, mut exceptions) = (scratch::integers(data.len() / dtype.size()), Vec::new());
    moment::quantize((rule, dtype), data, written, (step, outward), &mut accumulators, &mut exceptions).ok()?;
    let accumulators = Integers::Wide(accumulators);
    let state = State::Moment { rule, second: Arc::clone(second), accumulators, step, exceptions };
    let decoded = state.bytes(dtype).ok()?;
    let error = moment::largest_error((rule, dtype), data, written, &decoded, second, step)?;
    Some((state, decoded, error))
}

/// Keeps exactly the elements that a lattice would bring below the floor. `None` if they are so many that the tensor
/// must stay lossless.
fn keep_exactly(
    spec: TileSpec,
    keep: Keep,
    data: &[u8],
    decoded: &mut [u8],
    exceptions: &mut Vec<Exception>,
) -> Option<()> {
    /// An exception takes some 6 bytes, a lossless element of fp32 about 3.
    const MOST: usize = 8;
    floor::keep(spec.dtype, keep, data, decoded, exceptions);
    (keep != Keep::Floor || exceptions.len() <= data.len() / spec.dtype.size() / MOST).then_some(())
}

/// K of a state that becomes a difference to `parent`.
fn keyframe(coding: Coding, parent: Option<&State>) -> Option<Bytes> {
    coding.parent()?;
    parent?.shared_bytes().cloned()
}
