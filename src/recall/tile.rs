//! One tile of one tensor: from payloads to bytes.

use std::sync::Arc;

use crate::codec::log::Grid;
use crate::codec::rows::Rows;
use crate::codec::{Corrupt, Dtype, TILE_BYTES, cast, lattice, log, lossless, published, rows};
use crate::hash::xxh3_64;
use crate::store::Damage;
use crate::store::object::{Coding, Object, TensorEntry};

use super::bytes::{self, Then};
use super::chain::Step;
use super::memory::{Claim, Kept};
use super::{Chain, ReadError, State};

/// Bytes of tile number `tile` of a tensor: all have [`TILE_BYTES`] but the last.
pub fn tile_len(entry: &TensorEntry, tile: usize) -> usize {
    let len = entry.extent.end - entry.extent.start;
    (len - tile as u64 * TILE_BYTES as u64).min(TILE_BYTES as u64) as usize
}

/// Decodes tile number `tile` of the leaf's tensor number `tensor` as far as [`State`]. Begins at the nearest ancestor
/// that memory has, and leaves the super-steps it comes by there.
///
/// # Errors
/// [`ReadError`] names the object and tensor that cannot be read or decoded.
pub fn state(chain: &Chain, tensor: usize, tile: usize) -> Result<State, ReadError> {
    state_from(chain, 0, tensor, tile)
}

/// The same for the object at this place of the chain.
pub(super) fn state_from(chain: &Chain, place: usize, tensor: usize, tile: usize) -> Result<State, ReadError> {
    let path = chain.path_from(place, tensor)?;
    let (mut state, mut first) = (None, 0);
    let mut claims: Vec<(usize, Claim)> = Vec::new();
    if let Some(memory) = chain.memory() {
        // From the leaf down: whoever waits for a claim holds none that lies below it, so nobody waits in a circle. What
        // lies beside a tensor counts as below it: it never needs that tensor.
        for (at, step) in path.iter().enumerate().rev().filter(|(_, step)| chain.may_ask_for(step.object)) {
            let worth_keeping =
                step.object.is_super_step() || at + 1 == path.len() && chain.remembers(step.object.header().id);
            let known = match worth_keeping && step.entry.coding.beside().is_none() {
                true => match memory.claim(step.object, step.tensor, tile) {
                    Ok(known) => Some(known.state()),
                    Err(claim) => {
                        claims.push((at, claim));
                        None
                    }
                },
                false => memory.get(step.object, step.tensor, tile).map(|known| known.state()),
            };
            if known.is_some() {
                (state, first) = (known, at + 1);
                break;
            }
        }
        memory.count(first > 0, path.len() - first);
    }
    let mut payload = Vec::new();
    for (at, step) in path.iter().enumerate().skip(first) {
        let fail = |error: std::io::Error| ReadError::tensor(step.object.header().id, &step.entry.path, error);
        step.object.payload(&step.entry.tiles[tile], &mut payload).map_err(fail)?;
        let beside = beside(chain, step, tile)?;
        let next = apply(state, step, tile, &payload, beside).map_err(fail)?;
        if claims.last().is_some_and(|(place, _)| *place == at)
            && let (Some((_, claim)), Some(kept)) = (claims.pop(), Kept::of(&next))
        {
            claim.fulfil(chain, kept);
        }
        state = Some(next);
    }
    state.ok_or_else(|| ReadError::object(chain.leaf().header().id, Damage("a tensor has no base")))
}

/// Type and bytes of what lies beside a tensor, for the elements of one of its tiles.
pub(super) type Other = (Dtype, Arc<Vec<u8>>);

/// What lies beside a tensor, for one of its tiles, if it needs it.
pub(super) fn beside(chain: &Chain, step: &Step, tile: usize) -> Result<Option<Other>, ReadError> {
    let Some(other) = step.entry.coding.beside() else { return Ok(None) };
    let entry = &step.object.index().tensors[other as usize];
    let bytes = whole_tile(chain, step, other as usize, entry, tile)?;
    Ok(Some((entry.dtype, bytes)))
}

/// The bytes of the tensor beside another one for the elements of that one's tile: of another type, they are elsewhere.
fn whole_tile(
    chain: &Chain,
    step: &Step,
    other: usize,
    entry: &TensorEntry,
    tile: usize,
) -> Result<Arc<Vec<u8>>, ReadError> {
    let piece = |tile: usize| bytes::bytes(chain, step.place, other, tile, Then::Next);
    if entry.dtype == step.entry.dtype {
        return piece(tile);
    }
    let (from, to) = (entry.dtype.size(), step.entry.dtype.size());
    let start = tile * TILE_BYTES / to * from;
    let end = start + tile_len(step.entry, tile) / to * from;
    let mut bytes = Vec::with_capacity(end - start);
    for number in start / TILE_BYTES..end.div_ceil(TILE_BYTES) {
        let piece = piece(number)?;
        let at = number * TILE_BYTES;
        bytes.extend_from_slice(&piece[start.max(at) - at..end.min(at + piece.len()) - at]);
    }
    Ok(Arc::new(bytes))
}

/// Decodes tile number `tile` of the leaf's tensor number `tensor` and checks what it decodes to.
///
/// # Errors
/// [`ReadError`] names the object and tensor that cannot be read or decoded.
pub fn decode(chain: &Chain, tensor: usize, tile: usize) -> Result<Arc<Vec<u8>>, ReadError> {
    decode_then(chain, tensor, tile, Then::Next)
}

/// The same for a tile that was needed beside another one, and will be decoded as itself.
///
/// # Errors
/// As [`decode`].
pub fn decode_again(chain: &Chain, tensor: usize, tile: usize) -> Result<Arc<Vec<u8>>, ReadError> {
    decode_then(chain, tensor, tile, Then::Again)
}

fn decode_then(chain: &Chain, tensor: usize, tile: usize, then: Then) -> Result<Arc<Vec<u8>>, ReadError> {
    let leaf = chain.leaf();
    let entry = &leaf.index().tensors[tensor];
    let fail = |error: std::io::Error| ReadError::tensor(leaf.header().id, &entry.path, error);
    let bytes = bytes::bytes(chain, 0, tensor, tile, then)?;
    match xxh3_64(&bytes) == entry.tiles[tile].decoded_hash {
        true => Ok(bytes),
        false => Err(fail(Damage("a tile does not decode to what was archived").into())),
    }
}

pub(super) const NO_BASE: Damage = Damage("a difference has no base");

/// One step of the chain: the parent's state, this object's payload and what lies beside it give this object's state.
pub(super) fn apply(
    parent: Option<State>,
    step: &Step,
    tile: usize,
    payload: &[u8],
    beside: Option<Other>,
) -> std::io::Result<State> {
    let entry = step.entry;
    let len = tile_len(entry, tile);
    let elements = len / entry.dtype.size();
    if entry.coding.is_published() {
        return published(parent, entry, len, payload);
    }
    let parent = parent.map(State::plain);
    let (keyframe, mut accumulators, step, payload) = match entry.coding {
        Coding::Published { .. } | Coding::PublishedKey => return Err(NO_BASE.into()),
        Coding::Lossless => return Ok(lossless(entry, len, payload, None)?),
        Coding::LosslessDelta { .. } => {
            let parent = parent.ok_or(NO_BASE)?.bytes(entry.dtype)?;
            return Ok(lossless(entry, len, payload, Some(&parent))?);
        }
        Coding::Lattice { step, .. } => match parent {
            Some(State::Bytes(bytes)) => (Some(bytes), vec![0; elements], step, payload),
            Some(State::Lattice { keyframe, mut accumulators, step: from, .. }) => {
                lattice::rescale(&mut accumulators, from, step)?;
                (keyframe, accumulators, step, payload)
            }
            _ => return Err(NO_BASE.into()),
        },
        Coding::Rows { step, .. } => return rows(Some(parent.ok_or(NO_BASE)?), entry, tile, step, payload),
        Coding::RowsKey { step } => return rows(None, entry, tile, step, payload),
        Coding::LatticeKey { step } => (None, vec![0; elements], step, payload),
        Coding::LatticeWithKeyframe { step } => {
            let mut keyframe = vec![0; len];
            let rest = lattice::take_keyframe(entry.dtype, payload, &mut keyframe)?;
            (Some(Arc::new(keyframe)), vec![0; elements], step, rest)
        }
        Coding::LogKey { unit } | Coding::Log { unit, .. } => {
            let factors = step.object.factors(step.tensor)?;
            let first = entry.first_element(tile);
            let grid = Grid { factors: &factors, first };
            let (mut q, alone) = match (entry.coding, parent) {
                (Coding::LogKey { .. }, _) => (vec![0; elements], Some(grid)),
                (_, Some(State::Log { unit: from, q, .. })) if from == unit => (q, None),
                _ => return Err(NO_BASE.into()),
            };
            log::decode_tile(payload, alone, &mut q)?;
            return Ok(State::Log { factors, first, unit, q });
        }
        Coding::Moment { rule, step, .. } => {
            let (_, second) = beside.ok_or(NO_BASE)?;
            let (mut accumulators, mut exceptions) = (vec![0; elements], Vec::new());
            lattice::decode_tile_add(payload, &mut accumulators, &mut exceptions)?;
            return Ok(State::Moment { rule, second, accumulators, step, exceptions });
        }
        Coding::Sized { step: g, rule } => {
            let second = sizes(step, tile, elements)?;
            let (mut accumulators, mut exceptions) = (vec![0; elements], Vec::new());
            lattice::decode_tile_add(payload, &mut accumulators, &mut exceptions)?;
            return Ok(State::Moment { rule, second, accumulators, step: g, exceptions });
        }
        Coding::Cast { .. } => {
            let (from, bytes) = beside.ok_or(NO_BASE)?;
            let mut out = vec![0; len];
            cast::cast(from, &bytes, entry.dtype, &mut out)?;
            return Ok(State::Bytes(Arc::new(out)));
        }
    };
    let mut exceptions = Vec::new();
    lattice::decode_tile_add(payload, &mut accumulators, &mut exceptions)?;
    Ok(State::Lattice { keyframe, accumulators, step, exceptions })
}

/// The sizes that a tensor's own factors predict for the elements of a tile.
pub(super) fn sizes(step: &Step, tile: usize, elements: usize) -> std::io::Result<Arc<Vec<u8>>> {
    let factors = step.object.factors(step.tensor)?;
    let grid = Grid { factors: &factors, first: step.entry.first_element(tile) };
    Ok(Arc::new(log::prediction(step.entry.dtype, grid, elements)?))
}

fn published(parent: Option<State>, entry: &TensorEntry, len: usize, payload: &[u8]) -> std::io::Result<State> {
    let dtype = entry.dtype;
    let decoded = match (entry.coding.parent(), parent) {
        (None, _) => published::tile::decode(dtype, payload, None, len)?,
        (Some(_), Some(parent)) => {
            parent.before(dtype, |before| published::tile::decode(dtype, payload, Some(before), len))??
        }
        (Some(_), None) => return Err(NO_BASE.into()),
    };
    Ok(State::of_published(decoded))
}

fn rows(parent: Option<State>, entry: &TensorEntry, tile: usize, step: f64, payload: &[u8]) -> std::io::Result<State> {
    let elements = tile_len(entry, tile) / entry.dtype.size();
    let (keyframe, mut accumulators) = match parent {
        None => (None, vec![0; elements]),
        Some(State::Bytes(bytes)) => (Some(bytes), vec![0; elements]),
        Some(State::Lattice { keyframe, mut accumulators, step: from, .. }) => {
            lattice::rescale(&mut accumulators, from, step)?;
            (keyframe, accumulators)
        }
        Some(_) => return Err(NO_BASE.into()),
    };
    let mut exceptions = Vec::new();
    rows::decode_tile_add(payload, &mut accumulators, places(entry, tile), &mut exceptions)?;
    Ok(State::Lattice { keyframe, accumulators, step, exceptions })
}

/// Where a tile's elements lie in the rows of its tensor.
pub fn places(entry: &TensorEntry, tile: usize) -> Rows {
    Rows { width: entry.rows_and_width().1, first: entry.first_element(tile) }
}

fn lossless(entry: &TensorEntry, len: usize, payload: &[u8], parent: Option<&[u8]>) -> Result<State, Corrupt> {
    let mut bytes = vec![0; len];
    lossless::decode(entry.dtype, payload, parent, &mut bytes)?;
    Ok(State::Bytes(Arc::new(bytes)))
}

/// Decodes chunk number `chunk` of the skeleton.
///
/// # Errors
/// [`ReadError`] names the object.
pub fn skeleton(object: &Object, chunk: usize) -> Result<Vec<u8>, ReadError> {
    let fail = |error: std::io::Error| ReadError::object(object.header().id, error);
    let tile = &object.index().skeleton[chunk];
    let mut payload = Vec::new();
    object.payload(tile, &mut payload).map_err(fail)?;
    let bytes = zstd::bulk::decompress(&payload, TILE_BYTES).map_err(fail)?;
    match xxh3_64(&bytes) == tile.decoded_hash {
        true => Ok(bytes),
        false => Err(fail(Damage("a chunk does not decode to what was archived").into())),
    }
}
