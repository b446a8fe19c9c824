//! One tile of one tensor: from payloads to bytes.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::codec::{Corrupt, TILE_BYTES, lattice, lossless};
use crate::store::Damage;
use crate::store::object::{Coding, Object, TensorEntry};

use super::memory::Claim;
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
    let path = chain.path(tensor)?;
    let (mut state, mut first) = (None, 0);
    let mut claims: Vec<(usize, Claim)> = Vec::new();
    if let Some(memory) = chain.memory() {
        // From the leaf down: whoever waits for a claim holds none that lies below it, so nobody waits in a circle.
        for (at, step) in path.iter().enumerate().rev().filter(|(_, step)| chain.may_ask_for(step.object)) {
            let worth_keeping = step.object.is_super_step() || at + 1 == path.len() && chain.remembers_leaf();
            let known = match worth_keeping {
                true => match memory.claim(step.object, step.tensor, tile) {
                    Ok(known) => Some(known),
                    Err(claim) => {
                        claims.push((at, claim));
                        None
                    }
                },
                false => memory.get(step.object, step.tensor, tile),
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
        let next = apply(state, step.entry, tile, &payload).map_err(fail)?;
        if claims.last().is_some_and(|(place, _)| *place == at)
            && let Some((_, claim)) = claims.pop()
        {
            claim.fulfil(chain, &next);
        }
        state = Some(next);
    }
    state.ok_or_else(|| ReadError::object(chain.leaf().header().id, Damage("a tensor has no base")))
}

/// Decodes tile number `tile` of the leaf's tensor number `tensor` and checks what it decodes to.
///
/// # Errors
/// [`ReadError`] names the object and tensor that cannot be read or decoded.
pub fn decode(chain: &Chain, tensor: usize, tile: usize) -> Result<Arc<Vec<u8>>, ReadError> {
    let leaf = chain.leaf();
    let entry = &leaf.index().tensors[tensor];
    let fail = |error: std::io::Error| ReadError::tensor(leaf.header().id, &entry.path, error);
    let bytes = state(chain, tensor, tile)?.bytes(entry.dtype).map_err(|corrupt| fail(corrupt.into()))?;
    match xxh3_64(&bytes) == entry.tiles[tile].decoded_hash {
        true => Ok(bytes),
        false => Err(fail(Damage("a tile does not decode to what was archived").into())),
    }
}

/// One step of the chain: the parent's state and this object's payload give this object's state.
fn apply(parent: Option<State>, entry: &TensorEntry, tile: usize, payload: &[u8]) -> std::io::Result<State> {
    let len = tile_len(entry, tile);
    let elements = len / entry.dtype.size();
    let (keyframe, mut accumulators, step, payload) = match entry.coding {
        Coding::Lossless => return Ok(lossless(entry, len, payload, None)?),
        Coding::LosslessDelta { .. } => {
            let parent = parent.ok_or(Damage("a difference has no base"))?.bytes(entry.dtype)?;
            return Ok(lossless(entry, len, payload, Some(&parent))?);
        }
        Coding::Lattice { step, .. } => match parent {
            None => return Err(Damage("a difference has no base").into()),
            Some(State::Bytes(bytes)) => (Some(bytes), vec![0; elements], step, payload),
            Some(State::Lattice { keyframe, mut accumulators, step: from, .. }) => {
                lattice::rescale(&mut accumulators, from, step)?;
                (keyframe, accumulators, step, payload)
            }
        },
        Coding::LatticeKey { step } => (None, vec![0; elements], step, payload),
        Coding::LatticeWithKeyframe { step } => {
            let mut keyframe = vec![0; len];
            let rest = lattice::take_keyframe(entry.dtype, payload, &mut keyframe)?;
            (Some(Arc::new(keyframe)), vec![0; elements], step, rest)
        }
    };
    let mut exceptions = Vec::new();
    lattice::decode_tile_add(payload, &mut accumulators, &mut exceptions)?;
    Ok(State::Lattice { keyframe, accumulators, step, exceptions })
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
