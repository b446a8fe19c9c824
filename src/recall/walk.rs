//! The walk along a chain: one tile of one tensor, from payloads to bytes or to its state.

use std::io;
use std::sync::Arc;

use crate::store::Damage;
use crate::store::object::{Object, TensorEntry};
use crate::tile::{self, Bytes, Coding, Decoded, Link, State};
use codec::hash::xxh3_64;
use codec::{Dtype, TILE_BYTES};

use super::chain::Step;
use super::{Chain, ReadError};

/// Decodes tile `tile` of the leaf's tensor `tensor` and checks its bytes.
pub fn decode(chain: &Chain, tensor: usize, tile: usize) -> Result<Bytes, ReadError> {
    let leaf = chain.leaf();
    let entry = &leaf.index().tensors[tensor];
    let bytes = bytes(chain, 0, tensor, tile)?;
    match xxh3_64(&bytes) == entry.tiles[tile].decoded_hash {
        true => Ok(bytes),
        false => {
            let damage = Damage("a tile does not decode to the archived bytes");
            Err(ReadError::tensor(leaf.header().id, &entry.path, damage))
        }
    }
}

/// Decodes tile `tile` of the leaf's tensor `tensor` to its [`State`]. Starts at the nearest ancestor in memory.
pub fn state(chain: &Chain, tensor: usize, tile: usize) -> Result<Arc<State>, ReadError> {
    let (_, state) = walk(chain, 0, tensor, tile, true)?;
    state.ok_or_else(|| ReadError::object(chain.leaf().header().id, NO_BASE))
}

const NO_BASE: Damage = Damage("a tensor has no base");

/// The nearest state that memory has, if any, and the steps to take from there.
fn begin<'a, 'b>(chain: &Chain, path: &'b [Step<'a>], tile: usize) -> (Option<Arc<State>>, &'b [Step<'a>]) {
    let Some(memory) = chain.memory() else { return (None, path) };
    let asked = path.iter().enumerate().rev().filter(|(_, step)| chain.may_ask_for(step.object));
    let known = asked.filter_map(|(at, step)| Some((at + 1, memory.get(step.object, step.tensor, tile)?))).next();
    let (first, state) = known.map_or((0, None), |(first, state)| (first, Some(state)));
    memory.count(state.is_some(), path.len() - first);
    (state, &path[first..])
}

fn failed(step: &Step, error: io::Error) -> ReadError {
    ReadError::tensor(step.object.header().id, &step.entry.path, error)
}

/// Type and bytes of a tensor's companion for the elements of one tile, if it has one.
fn companion(chain: &Chain, step: &Step, tile: usize) -> Result<Option<(Dtype, Bytes)>, ReadError> {
    let Some(other) = step.entry.coding.companion() else { return Ok(None) };
    let entry = &step.object.index().tensors[other as usize];
    let bytes = same_elements(chain, step, other as usize, entry, tile)?;
    Ok(Some((entry.dtype, bytes)))
}

/// The companion's bytes for the elements of a tile. If its type differs, their offsets differ.
fn same_elements(
    chain: &Chain,
    step: &Step,
    other: usize,
    entry: &TensorEntry,
    tile: usize,
) -> Result<Bytes, ReadError> {
    let piece = |tile: usize| bytes(chain, step.place, other, tile);
    if entry.dtype == step.entry.dtype {
        return piece(tile);
    }
    let (from, to) = (entry.dtype.size(), step.entry.dtype.size());
    let start = tile * TILE_BYTES / to * from;
    let end = start + step.entry.tile_len(tile) / to * from;
    let mut bytes = Vec::with_capacity(end - start);
    for number in start / TILE_BYTES..end.div_ceil(TILE_BYTES) {
        let piece = piece(number)?;
        let at = number * TILE_BYTES;
        bytes.extend_from_slice(&piece[start.max(at) - at..end.min(at + piece.len()) - at]);
    }
    Ok(Arc::new(bytes))
}

/// The bytes of tile `tile` of tensor `tensor` of the object at this place of the chain.
fn bytes(chain: &Chain, place: usize, tensor: usize, tile: usize) -> Result<Bytes, ReadError> {
    let kept = (place == 0).then(|| chain.beside());
    if let Some(bytes) = kept.and_then(|kept| kept.take(tensor, tile)) {
        return Ok(bytes);
    }
    let bytes = match walk(chain, place, tensor, tile, false)? {
        (Some(bytes), _) => bytes,
        (None, state) => {
            let entry = &chain.objects()[place].index().tensors[tensor];
            let bytes = state.map_or(Err(NO_BASE.into()), |state| state.bytes(entry.dtype).map_err(io::Error::from));
            bytes.map_err(|error| ReadError::tensor(chain.objects()[place].header().id, &entry.path, error))?
        }
    };
    if let Some(kept) = kept {
        kept.put(tensor, tile, &bytes);
    }
    Ok(bytes)
}

/// A tile's bytes, unless memory has its state, and that state if it `keeps` it. Starts at the nearest state in memory, or
/// at the keyframe, and takes as many steps as possible in one pass over their payloads.
fn walk(
    chain: &Chain,
    place: usize,
    tensor: usize,
    tile: usize,
    keeps: bool,
) -> Result<(Option<Bytes>, Option<Arc<State>>), ReadError> {
    let path = chain.path_from(place, tensor)?;
    let (mut state, mut steps) = begin(chain, &path, tile);
    let memory = chain.keeps(place).filter(|_| path.last().is_some_and(may_be_a_base));
    let mut bytes = None;
    while !steps.is_empty() {
        let (now, rest) = steps.split_at(tile::run_length(steps.iter().map(|step| step.entry.coding)));
        let keeps = keeps || memory.is_some() || !rest.is_empty();
        let (decoded, kept) = run(chain, state.as_deref(), now, tile, keeps)?;
        (bytes, state, steps) = (Some(decoded), kept.map(Arc::new), rest);
        if let (Some(memory), Some(kept), []) = (memory, &state, steps) {
            memory.put(&chain.objects()[place], tensor, tile, kept);
        }
    }
    Ok((bytes, state))
}

/// Whether the next state of a tensor may be a difference to this one. A lossless tensor
/// that is stored alone beside a base found that base no help, so its next state hardly wants it.
fn may_be_a_base(step: &Step) -> bool {
    let has_base = step.object.header().parent.is_some();
    let coding = step.entry.coding;
    coding.codec.has_differences() && !(has_base && coding == Coding::LOSSLESS)
}

/// Takes steps together that make a run.
fn run(chain: &Chain, base: Option<&State>, steps: &[Step], tile: usize, keep: bool) -> Result<Decoded, ReadError> {
    let mut payloads: Vec<Vec<u8>> = Vec::with_capacity(steps.len());
    for step in steps {
        let mut payload = Vec::new();
        step.object.payload(&step.entry.tiles[tile], &mut payload).map_err(|error| failed(step, error))?;
        payloads.push(payload);
    }
    let factors = |step: Option<&Step>| {
        let step = step.filter(|step| step.entry.coding.has_factors());
        step.map(|step| step.object.factors(step.tensor).map_err(|error| failed(step, error))).transpose()
    };
    let (of_first, of_last) = (factors(steps.first().filter(|_| base.is_none()))?, factors(steps.last())?);
    let companion = match steps {
        [step] => companion(chain, step, tile)?,
        _ => None,
    };
    let links = steps.iter().zip(&payloads).enumerate().map(|(at, (step, payload))| Link {
        spec: step.entry.spec(tile),
        payload,
        factors: if at + 1 == steps.len() { of_last.as_ref() } else { of_first.as_ref().filter(|_| at == 0) },
        companion: companion.as_ref(),
    });
    let links: Vec<Link> = links.collect();
    let error = |corrupt: codec::Corrupt| match steps.last() {
        Some(last) => failed(last, corrupt.into()),
        None => ReadError::object(chain.leaf().header().id, NO_BASE),
    };
    tile::decode(base, &links, keep).map_err(error)
}

/// Decodes chunk `chunk` of the skeleton.
pub fn skeleton(object: &Object, chunk: usize) -> Result<Vec<u8>, ReadError> {
    let fail = |error: io::Error| ReadError::object(object.header().id, error);
    let tile = &object.index().skeleton[chunk];
    let mut payload = Vec::new();
    object.payload(tile, &mut payload).map_err(fail)?;
    let bytes = zstd::bulk::decompress(&payload, TILE_BYTES).map_err(fail)?;
    match xxh3_64(&bytes) == tile.decoded_hash {
        true => Ok(bytes),
        false => Err(fail(Damage("a chunk does not decode to the archived bytes").into())),
    }
}
