//! Writes lost tiles anew from equal bytes elsewhere. A tile gets its old state if possible, so that objects which
//! depend on it stay valid. Otherwise the whole tensor becomes lossless.

use std::io;

use crate::encode::skeleton;
use crate::recall::{Chain, check_hash, walk};
use crate::store::object::{Header, Index, Object, ObjectWriter, TensorEntry, Tile, path_of, tiles_of};
use crate::store::{Damage, Objects, Store};
use crate::tile::{self, Around, Bytes, Codec, Coding, TileSpec};
use codec::floor::Keep;
use codec::hash::xxh3_64;
use codec::moment::Rule;
use formats::Description;

use super::remains::Part;
use super::set_aside;

/// An object to be written again.
pub(super) struct Rebuild<'a> {
    /// Its header afterwards.
    pub(super) header: Header,
    pub(super) index: &'a Index,
    /// An object of this index, with its ancestors as far as they are there. It has all parts but the lost ones.
    pub(super) rest: Option<&'a Chain>,
    /// The decoded bytes of a part. `None` if it is not lost.
    pub(super) lost: &'a dyn Fn(Part) -> io::Result<Option<Bytes>>,
}

impl Rebuild<'_> {
    /// Writes the object, reads it back, decodes it, and replaces the damaged one.
    ///
    /// # Errors
    /// The device's errors. [`Damage`] if it would not decode to the archived bytes. Then nothing has changed.
    pub(super) fn carry_out(&self, store: &Store, objects: &Objects) -> io::Result<()> {
        let mut writer = ObjectWriter::repair_on(store.io(), &store.tmp(), self.header.id)?;
        let mut index = self.index.clone();
        for (number, entry) in index.tensors.iter_mut().enumerate() {
            let start = writer.position();
            if !self.as_it_was(&mut writer, number, entry)? {
                writer.rewind(start);
                self.lossless(&mut writer, number, entry)?;
            }
        }
        for (number, chunk) in index.skeleton.iter_mut().enumerate() {
            *chunk = match (self.lost)(Part::Chunk(number))? {
                Some(bytes) => writer.put(&zstd::bulk::compress(&bytes, skeleton::LEVEL)?, xxh3_64(&bytes))?,
                None => self.copy(&mut writer, chunk)?,
            };
        }
        writer.close(&index)?;
        let needs_parent = index.tensors.iter().any(|entry| entry.coding.parent.is_some());
        let header = Header { parent: self.header.parent.filter(|_| needs_parent), ..self.header.clone() };
        let parent = match header.parent {
            Some(_) => Some(self.above().ok_or(Damage("its base is missing"))?),
            None => None,
        };
        let chain = Chain::of_rewritten(writer.reopen(header.clone())?, parent.as_ref());
        check_hash(&chain, header.decoded_hash)?;
        set_aside(store, &path_of(&store.objects(), header.id))?;
        objects.replace(writer, header, chain.leaf().stored())
    }

    /// The chain of its parent.
    fn above(&self) -> Option<Chain> {
        self.rest?.from_ancestor(self.header.parent?)
    }

    fn object(&self) -> io::Result<&Object> {
        Ok(self.rest.ok_or(Damage("it is lost as a whole"))?.leaf())
    }

    /// Writes a payload that is not lost.
    fn copy(&self, writer: &mut ObjectWriter, tile: &Tile) -> io::Result<Tile> {
        let mut payload = Vec::new();
        self.object()?.payload(tile, &mut payload)?;
        writer.put(&payload, tile.decoded_hash)
    }

    /// Writes a tensor with the states that it had. `false`: that cannot be.
    fn as_it_was(&self, writer: &mut ObjectWriter, number: usize, entry: &mut TensorEntry) -> io::Result<bool> {
        let before = entry.clone();
        if let Some(factors) = &mut entry.factors {
            let Ok(copied) = self.copy(writer, factors) else { return Ok(false) };
            *factors = copied;
        }
        for (at, tile) in entry.tiles.iter_mut().enumerate() {
            *tile = match (self.lost)(Part::Tile(number, at))? {
                Some(bytes) => match self.encode(number, &before, at, &bytes)? {
                    Some(own) => writer.put(&own, xxh3_64(&bytes))?,
                    None => return Ok(false),
                },
                None => self.copy(writer, tile)?,
            };
        }
        Ok(true)
    }

    /// The payload of a lost tile, from its decoded bytes. `None` if they do not give its state.
    fn encode(&self, number: usize, entry: &TensorEntry, at: usize, bytes: &Bytes) -> io::Result<Option<Vec<u8>>> {
        let parent = match entry.coding.parent {
            None => None,
            Some(parent) => {
                let Some(above) = self.above() else { return Ok(None) };
                match walk::state(&above, parent as usize, at) {
                    Ok(state) => Some(state),
                    Err(error) if error.is_damage() => return Ok(None),
                    Err(error) => return Err(error.into()),
                }
            }
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
            Codec::Moment { second, .. } => match self.decoded(second as usize, at)? {
                Some(bytes) => Some(bytes),
                None => return Ok(None),
            },
            _ => None,
        };
        let factors = match entry.coding {
            coding if coding.has_factors() => self.object()?.factors(number).ok(),
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
        let spec_of_codec = TileSpec { coding: Coding { codec, ..entry.coding }, ..spec };
        let Some((state, decoded)) = tile::quantize(spec_of_codec, bytes, around, None) else {
            return Ok(None);
        };
        if decoded != *bytes {
            return Ok(None);
        }
        let mut payload = Vec::new();
        Ok(tile::encode(spec, &state, parent.as_deref(), &mut payload)?.then_some(payload))
    }

    /// A tile as it decodes. `None` if it cannot be read.
    fn decoded(&self, tensor: usize, at: usize) -> io::Result<Option<Bytes>> {
        Ok(match (self.lost)(Part::Tile(tensor, at))? {
            Some(bytes) => Some(bytes),
            None => self.rest.and_then(|chain| walk::decode(chain, tensor, at).ok()),
        })
    }

    /// Writes a tensor lossless. Objects that depend on it may lose their base by that.
    fn lossless(&self, writer: &mut ObjectWriter, number: usize, entry: &mut TensorEntry) -> io::Result<()> {
        (entry.coding, entry.factors) = (Coding::LOSSLESS, None);
        for (at, tile) in entry.tiles.iter_mut().enumerate() {
            let lost = Damage("a tensor with a lost part cannot be read at all");
            let bytes = self.decoded(number, at)?.ok_or(lost)?;
            let mut payload = Vec::new();
            codec::lossless::encode(entry.dtype, &bytes, None, &mut payload);
            *tile = writer.put(&payload, xxh3_64(&bytes))?;
        }
        Ok(())
    }
}

/// The index of a lossless object of a described file, which has no payloads yet.
pub(super) fn index_of(description: &Description, logical_len: u64) -> Index {
    let none = Tile { offset: 0, stored: 0, payload_hash: 0, decoded_hash: 0 };
    let tensors = description.tensors.iter().map(|tensor| TensorEntry {
        path: tensor.path.clone(),
        dtype: tensor.dtype,
        role: tensor.role,
        shape: tensor.shape.clone(),
        extent: tensor.extent.clone(),
        coding: Coding::LOSSLESS,
        bound: 0.0,
        max_abs_error: 0.0,
        factors: None,
        tiles: vec![none; tiles_of(tensor.extent.end - tensor.extent.start) as usize],
    });
    let mut index = Index {
        origin: "restored from a file with the same bytes".into(),
        profile: "exact".into(),
        container: description.kind.name().into(),
        tensors: tensors.collect(),
        ..Index::default()
    };
    let rest: u64 = index.gaps(logical_len).iter().map(|gap| gap.end - gap.start).sum();
    index.skeleton = vec![none; tiles_of(rest) as usize];
    index
}
