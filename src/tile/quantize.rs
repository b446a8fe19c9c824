//! From a tile's bytes to its state.

use std::sync::Arc;

use codec::entropy::scratch;
use codec::floor::{self, Keep};
use codec::lattice::Exception;
use codec::log::{Factors, Grid};
use codec::moment::Rule;
use codec::{Dtype, Integers, cast, lattice, log, moment, rows};

use super::{BLOCK, Bytes, Check, Codec, Coding, State, TileSpec};

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

/// A tile's state, and its decoded bytes.
pub type Quantized = (State, Bytes);

/// A tile's state in this coding; `check` sees all of its bytes. `None` if the tile does not fit: NaN, infinity, a
/// moment without its second, a copy whose bytes are not the cast ones. Also `None` if the coding needs all tiles of
/// the tensor at once, as published systems do.
pub fn quantize(spec: TileSpec, data: &Bytes, around: Around, mut check: Option<&mut Check>) -> Option<Quantized> {
    let TileSpec { dtype, coding, .. } = spec;
    let elements = spec.elements();
    let (state, decoded) = match coding.codec {
        Codec::External => return None,
        Codec::Lossless => (State::Bytes(Arc::clone(data)), Arc::clone(data)),
        Codec::Lattice { step } => {
            let keyframe = keyframe(coding, around.parent);
            let k = keyframe.as_ref().map(|keyframe| keyframe.as_slice());
            if k.is_some_and(|k| k.len() != data.len()) {
                return None;
            }
            let (accumulators, decoded, exceptions) = in_blocks(spec, data, check, |start, a, w, r, exceptions| {
                let k = k.map(|k| &k[start * dtype.size()..][..w.len()]);
                lattice::quantize(dtype, w, k, step, a, r, exceptions).ok()?;
                floor::keep(dtype, around.keep, w, r, exceptions);
                Some(())
            })?;
            are_few(around.keep, &exceptions, elements).then_some(())?;
            return Some((State::Lattice { keyframe, accumulators, step, exceptions }, decoded));
        }
        Codec::Rows { step } => {
            let keyframe = keyframe(coding, around.parent);
            let before = match around.parent {
                Some(parent @ State::Lattice { .. }) => parent.by_rows(step).ok()?.1,
                _ => None,
            };
            let (mut accumulators, mut decoded, mut exceptions) = (vec![0; elements], vec![0; data.len()], Vec::new());
            let k = keyframe.as_ref().map(|keyframe| keyframe.as_slice());
            let base = rows::Base { rows: spec.rows, k, g: step, a: before.as_deref() };
            let (a, r, kept) = (&mut accumulators, &mut decoded, &mut exceptions);
            let error = rows::quantize(dtype, data, base, around.row_step, a, r, kept).ok()?;
            if let Some(check) = &mut check {
                check.states(error);
            }
            floor::keep(dtype, around.keep, data, &mut decoded, &mut exceptions);
            are_few(around.keep, &exceptions, elements).then_some(())?;
            let accumulators = Integers::Wide(accumulators);
            (State::Lattice { keyframe, accumulators, step, exceptions }, Arc::new(decoded))
        }
        Codec::Log { unit } => {
            let keep = match (coding.parent, around.parent) {
                (Some(_), Some(State::Log { q, unit: from, .. })) if *from == unit => Some(q),
                (None, _) => None,
                _ => return None,
            };
            if keep.is_some_and(|keep| keep.len() != elements) {
                return None;
            }
            let (factors, first) = (around.factors?, spec.rows.first);
            let mut before = [0; BLOCK];
            let (q, decoded, _) = in_blocks(spec, data, check, |start, q, v, out, _| {
                let before = &mut before[..q.len()];
                let keep = keep.map(|keep| {
                    keep.fill(start, before);
                    &*before
                });
                let grid = Grid { factors, first: first + start as u64 };
                log::quantize(dtype, v, grid, unit, keep, q, out).ok().map(drop)
            })?;
            return Some((State::Log { factors: Arc::clone(factors), first, unit, q }, decoded));
        }
        Codec::Moment { step, rule, .. } => {
            let (second_type, written, second) = around.companion?;
            (second_type == dtype).then_some(())?;
            return ratios(spec, rule, data, (written, second), (step, around.outward), check);
        }
        Codec::Sized { step, rule } => {
            let sizes = spec.sizes(around.factors).ok()?;
            return ratios(spec, rule, data, (&sizes, &sizes), (step, 0.0), check);
        }
        Codec::Cast { .. } => {
            let (from, written, decoded) = around.companion?;
            let mut out = vec![0; data.len()];
            cast::cast(from, written, dtype, &mut out).ok()?;
            (out == **data).then_some(())?;
            cast::cast(from, decoded, dtype, &mut out).ok()?;
            let out = Arc::new(out);
            (State::Bytes(Arc::clone(&out)), out)
        }
    };
    if let Some(check) = check {
        check.add_all(data, &decoded).ok()?;
    }
    Some((state, decoded))
}

/// Quantizes a tile block by block. `quantize` gets the index of a block's first element, room for the block's
/// integers, the block, room for its decoded bytes, and for its exceptions. Returns all of these.
fn in_blocks(
    spec: TileSpec,
    data: &[u8],
    mut check: Option<&mut Check>,
    mut quantize: impl FnMut(usize, &mut [i32], &[u8], &mut [u8], &mut Vec<Exception>) -> Option<()>,
) -> Option<(Integers, Bytes, Vec<Exception>)> {
    (data.len() == spec.elements() * spec.dtype.size()).then_some(())?;
    let bytes = BLOCK * spec.dtype.size();
    let (mut integers, mut decoded) = (scratch::integers(spec.elements()), scratch::bytes(data.len()));
    let blocks = integers.chunks_mut(BLOCK).zip(data.chunks(bytes)).zip(decoded.chunks_mut(bytes));
    let (mut found, mut exceptions) = (Vec::new(), Vec::new());
    for (number, ((integers, written), decoded)) in blocks.enumerate() {
        quantize(number * BLOCK, integers, written, decoded, &mut found)?;
        let of_tile = |e: Exception| Exception { index: e.index + (number * BLOCK) as u32, ..e };
        exceptions.extend(found.drain(..).map(of_tile));
        if let Some(check) = &mut check {
            check.add(number * bytes, written, decoded).ok()?;
        }
    }
    Some((Integers::Wide(integers), Arc::new(decoded), exceptions))
}

/// A tile in steps of its ratio to a size. `written` gave the size when it was written, and `second` gives it when it
/// is read.
fn ratios(
    spec: TileSpec,
    rule: Rule,
    data: &Bytes,
    (written, second): (&[u8], &Bytes),
    (step, outward): (f64, f64),
    check: Option<&mut Check>,
) -> Option<Quantized> {
    let dtype = spec.dtype;
    if written.len() != data.len() || second.len() != data.len() {
        return None;
    }
    let (accumulators, decoded, exceptions) = in_blocks(spec, data, check, |start, a, m, out, exceptions| {
        let range = start * dtype.size()..start * dtype.size() + m.len();
        moment::quantize((rule, dtype), m, &written[range.clone()], (step, outward), a, exceptions).ok()?;
        moment::reconstruct((rule, dtype), &second[range], step, a, out).ok()?;
        lattice::apply_exceptions(dtype, exceptions, out).ok()
    })?;
    Some((State::Moment { accumulators, exceptions }, decoded))
}

/// False if so many elements are kept exactly that the tensor must stay lossless.
fn are_few(keep: Keep, exceptions: &[Exception], elements: usize) -> bool {
    /// An exception takes some 6 bytes, a lossless element of fp32 about 3.
    const MOST: usize = 8;
    let any = match keep {
        Keep::Nothing => true,
        Keep::Within(limits) => !limits.have_one_sign(),
        Keep::Bits => false,
    };
    any || exceptions.len() <= elements / MOST
}

/// K of a state that becomes a difference to `parent`.
fn keyframe(coding: Coding, parent: Option<&State>) -> Option<Bytes> {
    coding.parent?;
    parent?.shared_bytes().cloned()
}
