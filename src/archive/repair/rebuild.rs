//! Writes lost tiles anew from equal bytes elsewhere. A tile gets its old state if possible, so that objects which
//! depend on it stay valid. Otherwise the whole tensor becomes lossless.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;

use crate::codec::floor::Keep;
use crate::codec::moment::Rule;
use crate::container::{InOrder, describe_at};
use crate::encode::skeleton;
use crate::hash::xxh3_64;
use crate::recall::{Chain, check_hash, walk};
use crate::store::object::{Header, Index, Object, ObjectWriter, TensorEntry, Tile, path_of, tiles_of};
use crate::store::{Damage, Objects, Store};
use crate::tile::{self, Around, Codec, Coding, TileSpec};

use super::damaged_object::{Part, open_plain, parts};
use super::set_aside;

/// Bytes of a lost part.
pub(super) type Lost = HashMap<Part, Arc<Vec<u8>>>;

/// An object of which some payloads are lost, with the bytes that they decoded to.
pub(super) struct Rebuild<'a> {
    pub(super) store: &'a Store,
    pub(super) objects: &'a Objects,
    /// The object, and its chain if all of that is there.
    pub(super) object: &'a Object,
    pub(super) chain: Option<Chain>,
    pub(super) lost: &'a Lost,
}

impl Rebuild<'_> {
    /// Writes the object again, reads it back, decodes it, and replaces the damaged one.
    ///
    /// # Errors
    /// The device's errors. [`Damage`] if it would not decode to the archived bytes. Then nothing has changed.
    pub(super) fn carry_out(&self) -> io::Result<()> {
        let header = self.object.header();
        let mut writer = ObjectWriter::repair_on(self.store.io(), &self.store.tmp(), header.id)?;
        let mut index = self.object.index().clone();
        for (number, entry) in index.tensors.iter_mut().enumerate() {
            let start = writer.position();
            let as_it_was = self.tensor(&mut writer, number, entry)?;
            if !as_it_was {
                writer.rewind(start);
                self.as_it_is(&mut writer, number, entry)?;
            }
        }
        let mut payload = Vec::new();
        for (number, chunk) in index.skeleton.iter_mut().enumerate() {
            match self.lost.get(&Part::Chunk(number)) {
                Some(bytes) => payload = zstd::bulk::compress(bytes, skeleton::LEVEL)?,
                None => self.object.payload(chunk, &mut payload)?,
            }
            *chunk = writer.put(&payload, chunk.decoded_hash)?;
        }
        writer.close(&index)?;
        let needs_parent = index.tensors.iter().any(|entry| entry.coding.parent.is_some());
        let header = Header { parent: header.parent.filter(|_| needs_parent), ..header.clone() };
        let parent = match (header.parent, &self.chain) {
            (None, _) => None,
            (Some(id), Some(chain)) => chain.from_ancestor(id),
            (Some(_), None) => return Err(Damage("its base is missing").into()),
        };
        let chain = Chain::of_rewritten(writer.reopen(header.clone())?, parent.as_ref());
        check_hash(&chain, header.decoded_hash)?;
        set_aside(self.store, &path_of(&self.store.objects(), header.id))?;
        self.objects.replace(writer, header, chain.leaf().stored())
    }

    /// Writes a tensor with the states that it had. `false`: that cannot be.
    fn tensor(&self, writer: &mut ObjectWriter, number: usize, entry: &mut TensorEntry) -> io::Result<bool> {
        let mut payload = Vec::new();
        if let Some(factors) = &mut entry.factors {
            if self.object.payload(factors, &mut payload).is_err() {
                return Ok(false);
            }
            *factors = writer.put(&payload, factors.decoded_hash)?;
        }
        let before = entry.clone();
        for (at, tile) in entry.tiles.iter_mut().enumerate() {
            match self.lost.get(&Part::Tile(number, at)) {
                Some(bytes) => match self.encode(number, &before, at, bytes)? {
                    Some(own) => payload = own,
                    None => return Ok(false),
                },
                None => self.object.payload(tile, &mut payload)?,
            }
            *tile = writer.put(&payload, tile.decoded_hash)?;
        }
        Ok(true)
    }

    /// The payload of a lost tile, from its decoded bytes. `None` if they do not give its state.
    fn encode(
        &self,
        number: usize,
        entry: &TensorEntry,
        at: usize,
        bytes: &Arc<Vec<u8>>,
    ) -> io::Result<Option<Vec<u8>>> {
        let chain = self.chain.as_ref();
        let parent = match (entry.coding.parent, chain) {
            (None, _) => None,
            (Some(parent), Some(chain)) => {
                let above = self.object.header().parent.and_then(|id| chain.from_ancestor(id));
                let Some(above) = above else { return Ok(None) };
                match walk::state(&above, parent as usize, at) {
                    Ok(state) => Some(state),
                    Err(error) if error.is_damage() => return Ok(None),
                    Err(error) => return Err(error.into()),
                }
            }
            (Some(_), None) => return Ok(None),
        };
        // The steps of single rows are lost. The tensor's step divides each of them.
        let codec = match entry.coding.codec {
            Codec::Rows { step } => Codec::Lattice { step },
            // Values that were rounded inward lie on the lattice, and must not be rounded inward again.
            Codec::Moment { second, step, rule: Rule::Inward } => Codec::Moment { second, step, rule: Rule::Root },
            Codec::External => return Ok(None),
            codec => codec,
        };
        let second = match entry.coding.codec {
            Codec::Cast { .. } => return Ok(Some(Vec::new())),
            Codec::Moment { second, .. } => match self.decoded(second as usize, at) {
                Some(bytes) => Some(bytes),
                None => return Ok(None),
            },
            _ => None,
        };
        let factors = match entry.coding {
            coding if coding.has_factors() => self.object.factors(number).ok(),
            _ => None,
        };
        let companion = second.as_ref().map(|second| (entry.dtype, second.as_slice(), second));
        let around = Around {
            parent: parent.as_deref(),
            factors: factors.as_ref(),
            companion,
            keep: Keep::Bits,
            ..Around::default()
        };
        let spec = entry.spec(at);
        // Elements of a state with a keyframe of its own are off the lattice: too many to be exceptions.
        let Some((state, decoded)) =
            tile::quantize(TileSpec { coding: Coding { codec, ..entry.coding }, ..spec }, bytes, around, None)
        else {
            return Ok(None);
        };
        if decoded != *bytes {
            return Ok(None);
        }
        let mut payload = Vec::new();
        Ok(tile::encode(spec, &state, parent.as_deref(), &mut payload)?.then_some(payload))
    }

    /// The tile of another tensor of the same object, as it decodes.
    fn decoded(&self, tensor: usize, at: usize) -> Option<Arc<Vec<u8>>> {
        match self.lost.get(&Part::Tile(tensor, at)) {
            Some(bytes) => Some(Arc::clone(bytes)),
            None => walk::decode(self.chain.as_ref()?, tensor, at).ok(),
        }
    }

    /// Writes a tensor lossless. Objects that depend on it may lose their base by that.
    fn as_it_is(&self, writer: &mut ObjectWriter, number: usize, entry: &mut TensorEntry) -> io::Result<()> {
        let lossless = TensorEntry { coding: Coding::LOSSLESS, factors: None, ..entry.clone() };
        let mut tiles = Vec::with_capacity(entry.tiles.len());
        for (at, tile) in entry.tiles.iter().enumerate() {
            let lost = Damage("a tensor with a lost part cannot be read at all");
            let bytes = self.decoded(number, at).ok_or(lost)?;
            let mut payload = Vec::new();
            crate::codec::lossless::encode(entry.dtype, &bytes, None, &mut payload);
            tiles.push(writer.put(&payload, tile.decoded_hash)?);
        }
        *entry = TensorEntry { tiles, ..lossless };
        Ok(())
    }
}

/// Writes an object anew of which only the header is left. A file of the tree has its bytes. The object becomes
/// lossless and depends on no other.
///
/// # Errors
/// The device's errors. [`Damage`] if it would not decode to the archived bytes. Then nothing has changed.
pub(super) fn anew(store: &Store, objects: &Objects, header: &Header, file: &std::path::Path) -> io::Result<()> {
    let path = store.tree().join(file);
    let file = open_plain(store.io(), &path)?;
    let description = describe_at(&path, &file, |index| open_plain(store.io(), index))?;
    let source = InOrder::new(&file, &description);
    let mut writer = ObjectWriter::repair_on(store.io(), &store.tmp(), header.id)?;
    let mut index = Index {
        origin: "restored from a file with the same bytes".into(),
        profile: "exact".into(),
        container: description.kind.name().into(),
        ..Index::default()
    };
    let none = Tile { offset: 0, stored: 0, payload_hash: 0, decoded_hash: 0 };
    for tensor in &description.tensors {
        let count = tiles_of(tensor.extent.end - tensor.extent.start) as usize;
        index.tensors.push(TensorEntry {
            path: tensor.path.clone(),
            dtype: tensor.dtype,
            role: tensor.role,
            shape: tensor.shape.clone(),
            extent: tensor.extent.clone(),
            coding: Coding::LOSSLESS,
            bound: 0.0,
            max_abs_error: 0.0,
            factors: None,
            tiles: vec![none; count],
        });
    }
    let rest: u64 = index.gaps(header.logical_len).iter().map(|gap| gap.end - gap.start).sum();
    index.skeleton = vec![none; tiles_of(rest) as usize];
    for part in parts(&index) {
        let bytes = super::sources::in_source(&source, header, &index, part)?;
        let mut payload = Vec::new();
        match part {
            Part::Tile(tensor, at) => {
                let dtype = index.tensors[tensor].dtype;
                crate::codec::lossless::encode(dtype, &bytes, None, &mut payload);
                index.tensors[tensor].tiles[at] = writer.put(&payload, xxh3_64(&bytes))?;
            }
            Part::Chunk(chunk) => {
                payload = zstd::bulk::compress(&bytes, skeleton::LEVEL)?;
                index.skeleton[chunk] = writer.put(&payload, xxh3_64(&bytes))?;
            }
            Part::Factors(_) => {}
        }
    }
    writer.close(&index)?;
    let header = Header { parent: None, depth: 0, position: 0, ..header.clone() };
    let chain = Chain::of_rewritten(writer.reopen(header.clone())?, None);
    check_hash(&chain, header.decoded_hash)?;
    set_aside(store, &path_of(&store.objects(), header.id))?;
    objects.replace(writer, header, chain.leaf().stored())
}

/// The hashes of the decoded bytes of these parts.
pub(super) fn hashes<'a>(index: &Index, of: impl IntoIterator<Item = &'a Part>) -> HashSet<u64> {
    of.into_iter().filter_map(|part| part.of(index)).map(|tile| tile.decoded_hash).collect()
}
