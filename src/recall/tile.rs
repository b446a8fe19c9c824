//! One tile of one tensor: from payloads to bytes.

use xxhash_rust::xxh3::xxh3_64;

use crate::codec::{Corrupt, TILE_BYTES, lattice, lossless};
use crate::store::Damage;
use crate::store::object::{Coding, Object, TensorEntry};

use super::{Chain, ReadError};

/// What a tile is made of: enough to give its bytes, and to encode its successor.
#[derive(Clone, Debug)]
pub enum State {
    /// The bytes themselves.
    Bytes(Vec<u8>),
    /// R = fl(K + g*A).
    Lattice {
        /// The keyframe's bytes; none for K = 0.
        keyframe: Option<Vec<u8>>,
        /// The accumulators A, in units of `step`.
        accumulators: Vec<i32>,
        /// The step g.
        step: f64,
        /// Elements that are stored as they are, because rounding to their type would break the bound.
        exceptions: Vec<lattice::Exception>,
    },
}

impl State {
    /// The tile's bytes.
    ///
    /// # Errors
    /// What is wrong with the state, as words.
    pub fn into_bytes(self, entry: &TensorEntry) -> Result<Vec<u8>, Corrupt> {
        match self {
            State::Bytes(bytes) => Ok(bytes),
            State::Lattice { keyframe, accumulators, step, exceptions } => {
                let mut out = vec![0; accumulators.len() * entry.dtype.size()];
                lattice::reconstruct(entry.dtype, keyframe.as_deref(), step, &accumulators, &mut out)?;
                lattice::apply_exceptions(entry.dtype, &exceptions, &mut out)?;
                Ok(out)
            }
        }
    }
}

/// Bytes of tile number `tile` of a tensor: all have [`TILE_BYTES`] but the last.
pub fn tile_len(entry: &TensorEntry, tile: usize) -> usize {
    let len = entry.extent.end - entry.extent.start;
    (len - tile as u64 * TILE_BYTES as u64).min(TILE_BYTES as u64) as usize
}

/// Decodes tile number `tile` of the leaf's tensor number `tensor` as far as [`State`].
///
/// # Errors
/// [`ReadError`] names the object and tensor that cannot be read or decoded.
pub fn state(chain: &Chain, tensor: usize, tile: usize) -> Result<State, ReadError> {
    let mut payload = Vec::new();
    let mut state = None;
    for (object, entry) in chain.path(tensor)? {
        let fail = |error: std::io::Error| ReadError::tensor(object.header().id, &entry.path, error);
        object.payload(&entry.tiles[tile], &mut payload).map_err(fail)?;
        state = Some(apply(state, entry, tile, &payload).map_err(fail)?);
    }
    state.ok_or_else(|| ReadError::object(chain.leaf().header().id, Damage("a tensor has no base")))
}

/// Decodes tile number `tile` of the leaf's tensor number `tensor` and checks what it decodes to.
///
/// # Errors
/// [`ReadError`] names the object and tensor that cannot be read or decoded.
pub fn decode(chain: &Chain, tensor: usize, tile: usize) -> Result<Vec<u8>, ReadError> {
    let leaf = chain.leaf();
    let entry = &leaf.index().tensors[tensor];
    let fail = |error: std::io::Error| ReadError::tensor(leaf.header().id, &entry.path, error);
    let bytes = state(chain, tensor, tile)?.into_bytes(entry).map_err(|corrupt| fail(corrupt.into()))?;
    match xxh3_64(&bytes) == entry.tiles[tile].decoded_hash {
        true => Ok(bytes),
        false => Err(fail(Damage("a tile does not decode to what was archived").into())),
    }
}

/// One step of the chain: the parent's state and this object's payload give this object's state.
fn apply(parent: Option<State>, entry: &TensorEntry, tile: usize, payload: &[u8]) -> std::io::Result<State> {
    let len = tile_len(entry, tile);
    match entry.coding {
        Coding::Lossless => {
            let mut bytes = vec![0; len];
            lossless::decode(entry.dtype, payload, None, &mut bytes)?;
            Ok(State::Bytes(bytes))
        }
        Coding::LosslessDelta { .. } => {
            let parent = parent.ok_or(Damage("a difference has no base"))?.into_bytes(entry)?;
            let mut bytes = vec![0; len];
            lossless::decode(entry.dtype, payload, Some(&parent), &mut bytes)?;
            Ok(State::Bytes(bytes))
        }
        Coding::Lattice { step, .. } => {
            let (keyframe, mut accumulators) = match parent {
                None => return Err(Damage("a difference has no base").into()),
                Some(State::Bytes(bytes)) => (Some(bytes), vec![0; len / entry.dtype.size()]),
                Some(State::Lattice { keyframe, mut accumulators, step: from, .. }) => {
                    lattice::rescale(&mut accumulators, from, step)?;
                    (keyframe, accumulators)
                }
            };
            let mut exceptions = Vec::new();
            lattice::decode_tile_add(payload, &mut accumulators, &mut exceptions)?;
            Ok(State::Lattice { keyframe, accumulators, step, exceptions })
        }
        Coding::LatticeKey { step } => {
            let mut accumulators = vec![0; len / entry.dtype.size()];
            let mut exceptions = Vec::new();
            lattice::decode_tile_add(payload, &mut accumulators, &mut exceptions)?;
            Ok(State::Lattice { keyframe: None, accumulators, step, exceptions })
        }
    }
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
