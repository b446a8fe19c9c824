//! Re-parenting: another encoding of an object, as a difference to another parent, or to none. Its tensors' states, and
//! so its bytes, stay what they are; on the lattice the merged difference is a sum of integers.
//!
//! 1. The new encoding lies in `tmp/`, durable but for its header. *A crash here: `tmp/` is emptied, nothing happened.*
//! 2. It is read back from the device and decoded along the new chain: every tile's state must be the one that it has
//!    along the old chain, and its bytes must have the hash that they always had.
//! 3. It gets its header and is renamed over the old encoding: the commit point. *A crash here leaves either, and both
//!    decode to the same.*
//!
//! The old parent is still there after that; it goes once nobody needs it.

use std::io;
use std::sync::Arc;

use rayon::prelude::*;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::codec::{TILE_BYTES, lossless};
use crate::recall::{Chain, ReadError};
use crate::recall::{State, tile};
use crate::store::object::{Coding, Header, OBJECT_VERSION, Object, ObjectWriter, TensorEntry, Tile};
use crate::store::{Damage, Id, Objects};

use super::encode::BATCH;
use super::payload;

/// Bytes of tensors looked at to estimate what an object would take as a difference to another: the largest ones first.
const SAMPLED_TENSORS: usize = 32;

/// What a re-parenting works with.
pub(super) struct Move<'a> {
    /// The object, along the chain that it has now.
    pub(super) old: &'a Chain,
    /// What it is to be a difference to; none for nothing.
    pub(super) parent: Option<&'a Chain>,
    /// Called between batches of tiles: others may have something to do; an error ends it, and nothing has happened.
    pub(super) breathe: &'a (dyn Fn() -> io::Result<()> + Sync),
}

/// How one tensor is to be encoded.
struct Choice {
    coding: Coding,
    /// Bits of the tile that was looked at.
    bits: f64,
}

impl Move<'_> {
    /// Writes the new encoding, reads it back, and puts it in the place of the old one. Memory: a batch of tiles.
    ///
    /// # Errors
    /// What the device reports; what `breathe` returns; a [`ReadError`] when something does not decode. The object then
    /// is what it was.
    pub(super) fn carry_out(&self, objects: &Objects, tmp: &std::path::Path) -> io::Result<()> {
        let leaf = self.old.leaf();
        let mut writer = ObjectWriter::rewrite(tmp, leaf.header().id)?;
        let mut index = leaf.index().clone();
        let mut states = Vec::new();
        for (number, entry) in index.tensors.iter_mut().enumerate() {
            let choice = self.choose(number, entry)?;
            let start = writer.position();
            let done = match self.write(&mut writer, number, entry, choice.coding)? {
                Some(done) => done,
                None => {
                    writer.rewind(start);
                    let alone = alone(&self.state(number, 0)?);
                    self.write(&mut writer, number, entry, alone)?.ok_or(Damage("a tensor cannot stand alone"))?
                }
            };
            (entry.coding, entry.tiles) = (done.0, done.1);
            states.extend(done.2);
        }
        let mut payload = Vec::new();
        for chunk in &mut index.skeleton {
            (self.breathe)()?;
            leaf.payload(chunk, &mut payload)?;
            *chunk = writer.put(&payload, chunk.decoded_hash)?;
        }
        writer.close(&index)?;
        let parent = self.parent.filter(|_| index.tensors.iter().any(|entry| entry.coding.parent().is_some()));
        let header = Header {
            version: OBJECT_VERSION,
            parent: parent.map(|chain| chain.leaf().header().id),
            depth: parent.map_or(0, |chain| chain.objects().len() as u32),
            ..leaf.header().clone()
        };
        let chain = Chain::of_rewritten(writer.reopen(header.clone())?, parent);
        self.compare(&chain, &states)?;
        objects.replace(writer, header, chain.leaf().stored())
    }

    /// Bytes that the object would take, roughly.
    ///
    /// # Errors
    /// A [`ReadError`] when something does not decode.
    pub(super) fn estimate(&self) -> io::Result<f64> {
        let leaf = self.old.leaf();
        let len = |entry: &TensorEntry| (entry.extent.end - entry.extent.start) as f64;
        let mut tensors: Vec<(usize, &TensorEntry)> = leaf.index().tensors.iter().enumerate().collect();
        tensors.sort_by(|a, b| len(b.1).total_cmp(&len(a.1)));
        let total: f64 = tensors.iter().map(|(_, entry)| len(entry)).sum();
        tensors.truncate(SAMPLED_TENSORS);
        let (mut raw, mut bits) = (0.0, 0.0);
        for (number, entry) in tensors {
            let middle = tile::tile_len(entry, entry.tiles.len() / 2) as f64;
            bits += self.choose(number, entry)?.bits * len(entry) / middle.max(1.0);
            raw += len(entry);
        }
        let skeleton: u64 = leaf.index().skeleton.iter().map(|chunk| u64::from(chunk.stored)).sum();
        Ok(bits / 8.0 * total / f64::max(raw, 1.0) + skeleton as f64)
    }

    fn state(&self, tensor: usize, number: usize) -> io::Result<State> {
        Ok(tile::state(self.old, tensor, number)?)
    }

    /// The same tensor of the new parent.
    fn twin(&self, entry: &TensorEntry) -> Option<(u32, &Chain)> {
        let chain = self.parent?;
        let fits = |other: &TensorEntry| {
            other.path == entry.path && other.dtype == entry.dtype && other.tiles.len() == entry.tiles.len() && {
                other.extent.end - other.extent.start == entry.extent.end - entry.extent.start
            }
        };
        let at = chain.leaf().index().tensors.iter().position(fits)?;
        Some((at as u32, chain))
    }

    /// The cheaper of a difference and none, by the tile in the middle.
    fn choose(&self, number: usize, entry: &TensorEntry) -> io::Result<Choice> {
        let middle = entry.tiles.len() / 2;
        if entry.tiles.is_empty() {
            return Ok(Choice { coding: Coding::Lossless, bits: 0.0 });
        }
        let state = self.state(number, middle)?;
        let twin = match self.twin(entry) {
            Some((at, chain)) => Some((at, tile::state(chain, at as usize, middle)?)),
            None => None,
        };
        let alone =
            Choice { coding: alone(&state), bits: bits(entry, alone(&state), &state, None)?.unwrap_or(f64::MAX) };
        let Some((parent, twin)) = twin else {
            return Ok(alone);
        };
        let coding = match &state {
            State::Bytes(_) => Coding::LosslessDelta { parent },
            State::Lattice { step, .. } => Coding::Lattice { parent, step: *step },
        };
        let difference = bits(entry, coding, &state, Some(&twin))?.map(|bits| Choice { coding, bits });
        Ok(difference.filter(|difference| difference.bits < alone.bits).unwrap_or(alone))
    }

    /// Writes the tiles of a tensor. `None`: one of them cannot be said in this coding.
    #[expect(clippy::type_complexity, reason = "used twice, a few lines above")]
    fn write(
        &self,
        writer: &mut ObjectWriter,
        number: usize,
        entry: &TensorEntry,
        coding: Coding,
    ) -> io::Result<Option<(Coding, Vec<Tile>, Vec<u64>)>> {
        let parent = coding.parent().and_then(|parent| Some((parent as usize, self.parent?)));
        let (mut tiles, mut states) = (Vec::new(), Vec::new());
        for first in (0..entry.tiles.len()).step_by(BATCH) {
            (self.breathe)()?;
            let batch: Vec<io::Result<Option<(Vec<u8>, u64)>>> = (first..entry.tiles.len().min(first + BATCH))
                .into_par_iter()
                .map(|at| {
                    let state = self.state(number, at)?;
                    let parent = match parent {
                        Some((parent, chain)) => Some(tile::state(chain, parent, at)?),
                        None => None,
                    };
                    let mut out = Vec::new();
                    let fits = payload::payload(entry.dtype, coding, &state, parent.as_ref(), &mut out)?;
                    Ok(fits.then(|| (out, hash(&state))))
                })
                .collect();
            for (tile, done) in entry.tiles[first..].iter().zip(batch) {
                let Some((payload, state)) = done? else { return Ok(None) };
                tiles.push(writer.put(&payload, tile.decoded_hash)?);
                states.push(state);
            }
        }
        Ok(Some((coding, tiles, states)))
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
            let state = tile::state(chain, *number, *at)?;
            Ok(hash(&state) == *expected && xxh3_64(&state.bytes(entry.dtype)?) == entry.tiles[*at].decoded_hash)
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
            tile::skeleton(leaf, chunk)?;
        }
        Ok(())
    }
}

/// The coding of a state that is a difference to nothing.
fn alone(state: &State) -> Coding {
    match state {
        State::Bytes(_) => Coding::Lossless,
        State::Lattice { keyframe: None, step, .. } => Coding::LatticeKey { step: *step },
        State::Lattice { keyframe: Some(_), step, .. } => Coding::LatticeWithKeyframe { step: *step },
    }
}

/// Bits of a tile in this coding; `None` where it cannot be said so.
fn bits(entry: &TensorEntry, coding: Coding, state: &State, parent: Option<&State>) -> io::Result<Option<f64>> {
    if let State::Bytes(bytes) = state {
        let parent = match parent {
            Some(parent) => Some(parent.bytes(entry.dtype)?),
            None => None,
        };
        return Ok(Some(lossless::estimate(entry.dtype, bytes, parent.as_ref().map(|parent| parent.as_slice()))));
    }
    let mut out = Vec::with_capacity(TILE_BYTES / 8);
    let fits = payload::payload(entry.dtype, coding, state, parent, &mut out)?;
    Ok(fits.then_some(8.0 * out.len() as f64))
}

/// xxh3-64 of everything that a state is to its successors and its readers.
fn hash(state: &State) -> u64 {
    let mut hash = Xxh3::new();
    let mut bytes = |bytes: &Arc<Vec<u8>>| hash.update(&xxh3_64(bytes).to_le_bytes());
    match state {
        State::Bytes(all) => bytes(all),
        State::Lattice { keyframe, accumulators, step, exceptions } => {
            keyframe.iter().for_each(bytes);
            hash.update(&step.to_le_bytes());
            accumulators.iter().for_each(|a| hash.update(&a.to_le_bytes()));
            exceptions.iter().for_each(|e| hash.update(&(u64::from(e.index) ^ e.raw.rotate_left(32)).to_le_bytes()));
        }
    }
    hash.digest()
}

/// A chain with its old parent's id, for messages.
pub(super) fn parent_words(parent: Option<Id>) -> String {
    parent.map_or("nothing".into(), |id| format!("object {id}"))
}
