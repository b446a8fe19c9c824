//! Re-parenting: another encoding of an object, as a difference to another parent, or to none. Its tensors' states,
//! and so its bytes, do not change. On the lattice the merged difference is a sum of integers.
//!
//! 1. The new encoding lies in `tmp/`, durable but for its header. *A crash here: `tmp/` is emptied, nothing
//!    happened.*
//! 2. It is read back from the device and decoded along the new chain. Every tile must have the same state as along
//!    the old chain, and its bytes the same hash.
//! 3. It gets its header and is renamed over the old encoding: the commit point. *A crash here leaves either, and
//!    both decode to the same.*
//!
//! The old parent is still there after that. It goes once no object needs it.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use crate::encode::StepResult;
use crate::recall::{Chain, ReadError, walk};
use crate::store::durable::Io;
use crate::store::object::{Header, Object, ObjectWriter, TensorEntry, Tile};
use crate::store::{Damage, Objects};
use crate::tile::{self, Codec, Coding, State, TileSpec};
use codec::hash::xxh3_64;

/// Tensors looked at to estimate what an object would take as a difference to another: the largest ones, and of equally
/// large ones some of each part of the file.
const SAMPLED_TENSORS: usize = 32;

/// Tiles encoded at once: a tile takes about 3 MB while it is encoded (its bytes, K, A, R and payload), so 16 take 50
/// MB.
const BATCH: usize = 16;

/// The input of a re-parenting.
pub(super) struct Move<'a> {
    /// The object, along the chain that it has now.
    old: &'a Chain,
    /// The new parent, if any.
    parent: Option<&'a Chain>,
    /// Called between batches of tiles: others may have something to do; an error ends it, and nothing has happened.
    breathe: &'a (dyn Fn() -> StepResult<()> + Sync),
}

/// How one tensor is to be encoded.
struct Choice {
    coding: Coding,
    /// Bits of the tile that was looked at.
    bits: f64,
}

/// A tile's payload, and the hash of its state.
type Payload = (Vec<u8>, u64);

/// A tensor in its new encoding.
struct Written {
    coding: Coding,
    factors: Option<Tile>,
    tiles: Vec<Tile>,
    /// Hashes of its tiles' states.
    states: Vec<u64>,
}

impl<'a> Move<'a> {
    /// A move that has not begun.
    pub(super) fn new(
        old: &'a Chain,
        parent: Option<&'a Chain>,
        breathe: &'a (dyn Fn() -> StepResult<()> + Sync),
    ) -> Move<'a> {
        Move { old, parent, breathe }
    }

    /// Writes the new encoding, reads it back, and replaces the old one. Memory: a batch of tiles.
    ///
    /// # Errors
    /// The device's errors; those of `breathe`; a [`ReadError`] if something does not decode. The object is unchanged
    /// then.
    pub(super) fn carry_out(&self, objects: &Objects, (io, tmp): (&Io, &Path)) -> io::Result<()> {
        let leaf = self.old.leaf();
        let mut writer = ObjectWriter::rewrite(io, tmp, leaf.header().id)?;
        let mut index = leaf.index().clone();
        let mut states = Vec::new();
        let twins = self.twins();
        for (number, entry) in index.tensors.iter_mut().enumerate() {
            let choice = self.choose(number, entry, twins.get(entry.path.as_str()).copied())?;
            let start = writer.position();
            let written = match self.write(&mut writer, number, entry, choice.coding)? {
                Some(written) => written,
                None => {
                    writer.rewind(start);
                    let alone = entry.coding.again(&*self.state(number, 0)?, None);
                    self.write(&mut writer, number, entry, alone)?.ok_or(Damage("a tensor cannot stand alone"))?
                }
            };
            (entry.coding, entry.factors, entry.tiles) = (written.coding, written.factors, written.tiles);
            states.extend(written.states);
        }
        let mut payload = Vec::new();
        for chunk in &mut index.skeleton {
            (self.breathe)()?;
            leaf.payload(chunk, &mut payload)?;
            *chunk = writer.put(&payload, chunk.decoded_hash)?;
        }
        writer.close(&index)?;
        let parent = self.parent.filter(|_| index.tensors.iter().any(|entry| entry.coding.parent.is_some()));
        let header = Header {
            parent: parent.map(|chain| chain.leaf().header().id),
            depth: parent.map_or(0, |chain| chain.objects().len() as u32),
            ..leaf.header().clone()
        };
        let chain = Chain::of_rewritten(writer.reopen(header.clone())?, parent);
        self.compare(&chain, &states)?;
        objects.replace(writer, header, chain.leaf().stored())
    }

    /// Bytes that the object would take, roughly.
    pub(super) fn estimate(&self) -> io::Result<f64> {
        let leaf = self.old.leaf();
        let len = |entry: &TensorEntry| (entry.extent.end - entry.extent.start) as f64;
        let mut tensors: Vec<(usize, &TensorEntry)> = leaf.index().tensors.iter().enumerate().collect();
        tensors.sort_by(|a, b| len(b.1).total_cmp(&len(a.1)));
        let total: f64 = tensors.iter().map(|(_, entry)| len(entry)).sum();
        if let Some(least) = tensors.get(SAMPLED_TENSORS - 1).map(|(_, entry)| len(entry)) {
            tensors.retain(|(_, entry)| len(entry) >= least);
            let every = tensors.len().div_ceil(SAMPLED_TENSORS);
            tensors = tensors.into_iter().step_by(every).collect();
        }
        let (mut raw, mut bits) = (0.0, 0.0);
        let twins = self.twins();
        for (number, entry) in tensors {
            let middle = entry.tile_len(entry.tiles.len() / 2) as f64;
            bits += self.choose(number, entry, twins.get(entry.path.as_str()).copied())?.bits * len(entry)
                / middle.max(1.0);
            raw += len(entry);
        }
        let skeleton: u64 = leaf.index().skeleton.iter().map(|chunk| u64::from(chunk.stored)).sum();
        Ok(bits / 8.0 * total / f64::max(raw, 1.0) + skeleton as f64)
    }

    fn state(&self, tensor: usize, number: usize) -> io::Result<Arc<State>> {
        Ok(walk::state(self.old, tensor, number)?)
    }

    /// The tensors of the new parent by path.
    fn twins(&self) -> HashMap<&str, (u32, &TensorEntry)> {
        let tensors = self.parent.iter().flat_map(|chain| chain.leaf().index().tensors.iter().zip(0..));
        tensors.map(|(entry, at)| (entry.path.as_str(), (at, entry))).collect()
    }

    /// The cheaper of a difference and none, judged by the tile in the middle. A tensor that stands alone keeps its
    /// coding.
    fn choose(&self, number: usize, entry: &TensorEntry, twin: Option<(u32, &TensorEntry)>) -> io::Result<Choice> {
        let middle = entry.tiles.len() / 2;
        let Some(tile) = entry.tiles.get(middle) else {
            return Ok(Choice { coding: Coding::LOSSLESS, bits: 0.0 });
        };
        if entry.coding.stands_alone() {
            return Ok(Choice { coding: entry.coding, bits: 8.0 * f64::from(tile.stored) });
        }
        let len = |entry: &TensorEntry| entry.extent.end - entry.extent.start;
        let twin = twin.filter(|(_, other)| other.dtype == entry.dtype && len(other) == len(entry));
        let state = self.state(number, middle)?;
        let twin = match (twin, self.parent) {
            (Some((at, _)), Some(chain)) => Some((at, walk::state(chain, at as usize, middle)?)),
            _ => None,
        };
        let bits = |coding, twin: Option<&State>| -> io::Result<Option<f64>> {
            let mut out = Vec::new();
            let fits = tile::encode(TileSpec { coding, ..entry.spec(middle) }, &state, twin, &mut out)?;
            Ok(fits.then_some(8.0 * out.len() as f64))
        };
        let coding = entry.coding.again(&state, None);
        let alone = Choice { coding, bits: bits(coding, None)?.unwrap_or(f64::MAX) };
        let Some((parent, twin)) = twin else {
            return Ok(alone);
        };
        let coding = entry.coding.again(&state, Some(parent));
        let difference = bits(coding, Some(&*twin))?.map(|bits| Choice { coding, bits });
        Ok(difference.filter(|difference| difference.bits < alone.bits).unwrap_or(alone))
    }

    /// Writes the tiles of a tensor. `None`: one of them cannot be said in this coding.
    fn write(
        &self,
        writer: &mut ObjectWriter,
        number: usize,
        entry: &TensorEntry,
        coding: Coding,
    ) -> io::Result<Option<Written>> {
        let parent = coding.parent.and_then(|parent| Some((parent as usize, self.parent?)));
        let mut written = Written { coding, factors: None, tiles: Vec::new(), states: Vec::new() };
        if let (Codec::Sized { .. }, Some(factors)) = (coding.codec, &entry.factors) {
            let mut payload = Vec::new();
            self.old.leaf().payload(factors, &mut payload)?;
            written.factors = Some(writer.put(&payload, factors.decoded_hash)?);
        }
        if coding.is_log() && !entry.tiles.is_empty() {
            let State::Log { factors, .. } = &*self.state(number, 0)? else { return Ok(None) };
            let mut payload = Vec::new();
            factors.encode(&mut payload);
            written.factors = Some(writer.put(&payload, xxh3_64(&payload))?);
        }
        for first in (0..entry.tiles.len()).step_by(BATCH) {
            (self.breathe)()?;
            let batch: Vec<io::Result<Option<Payload>>> = (first..entry.tiles.len().min(first + BATCH))
                .into_par_iter()
                .map(|at| {
                    let state = self.state(number, at)?;
                    let mut out = Vec::new();
                    if coding.stands_alone() && coding == entry.coding {
                        // It depends on nothing that moves.
                        self.old.leaf().payload(&entry.tiles[at], &mut out)?;
                        return Ok(Some((out, state.hash())));
                    }
                    let parent = match parent {
                        Some((parent, chain)) => Some(walk::state(chain, parent, at)?),
                        None => None,
                    };
                    let spec = TileSpec { coding, ..entry.spec(at) };
                    let fits = tile::encode(spec, &state, parent.as_deref(), &mut out)?;
                    Ok(fits.then(|| (out, state.hash())))
                })
                .collect();
            for (tile, done) in entry.tiles[first..].iter().zip(batch) {
                let Some((payload, state)) = done? else { return Ok(None) };
                written.tiles.push(writer.put(&payload, tile.decoded_hash)?);
                written.states.push(state);
            }
        }
        Ok(Some(written))
    }

    /// Step 2.
    fn compare(&self, chain: &Chain, states: &[u64]) -> io::Result<()> {
        let leaf: &Object = chain.leaf();
        let wrong = |what| io::Error::from(ReadError::object(leaf.header().id, Damage(what)));
        let places: Vec<(usize, usize)> = (leaf.index().tensors.iter().enumerate())
            .flat_map(|(number, entry)| (0..entry.tiles.len()).map(move |at| (number, at)))
            .collect();
        let same = |((number, at), expected): (&(usize, usize), &u64)| -> io::Result<bool> {
            let entry = &leaf.index().tensors[*number];
            let state = walk::state(chain, *number, *at)?;
            Ok(state.hash() == *expected && xxh3_64(&state.bytes(entry.dtype)?) == entry.tiles[*at].decoded_hash)
        };
        for (places, states) in places.chunks(BATCH).zip(states.chunks(BATCH)) {
            (self.breathe)()?;
            let batch: Vec<io::Result<bool>> = places.par_iter().zip(states).map(same).collect();
            for same in batch {
                if !same? {
                    return Err(wrong("a state would change with its parent"));
                }
            }
        }
        for chunk in 0..leaf.index().skeleton.len() {
            (self.breathe)()?;
            walk::skeleton(leaf, chunk)?;
        }
        Ok(())
    }
}
