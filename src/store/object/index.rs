//! The index of an object: its tensors, where their tiles are, and what each decodes to (docs/FORMAT.md, "Index").

use std::ops::Range;

use crate::codec::{Dtype, TILE_BYTES, lattice};
use crate::container::Role;
use crate::store::Damage;
use crate::store::bytes::{Fields, put_text};

/// How a tensor's tiles are encoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Coding {
    /// Lossless, alone.
    Lossless,
    /// Lossless, as ordered-integer difference to the parent object's tensor with this index.
    LosslessDelta {
        /// Index in the parent object's tensor table.
        parent: u32,
    },
    /// R = fl(K + g*A), A as difference to the parent tensor's accumulators (0 when that one is lossless, and then K).
    Lattice {
        /// Index in the parent object's tensor table.
        parent: u32,
        /// Step of the lattice; the parent's may be another.
        step: f64,
    },
    /// R = fl(g*A): a lattice keyframe, decodes without any other object.
    LatticeKey {
        /// Step of the lattice.
        step: f64,
    },
    /// R = fl(K + g*A) with K in the same tiles: what a state becomes when the object that held its K goes.
    LatticeWithKeyframe {
        /// Step of the lattice.
        step: f64,
    },
}

impl Coding {
    /// The tensor of the parent object that is needed to decode this one.
    pub fn parent(self) -> Option<u32> {
        match self {
            Coding::Lossless | Coding::LatticeKey { .. } | Coding::LatticeWithKeyframe { .. } => None,
            Coding::LosslessDelta { parent } | Coding::Lattice { parent, .. } => Some(parent),
        }
    }

    /// The lattice's step, when there is one.
    pub fn step(self) -> Option<f64> {
        match self {
            Coding::Lossless | Coding::LosslessDelta { .. } => None,
            Coding::Lattice { step, .. } | Coding::LatticeKey { step } | Coding::LatticeWithKeyframe { step } => {
                Some(step)
            }
        }
    }

    /// The codec's name, as people are shown it.
    pub fn codec(self) -> &'static str {
        if self.step().is_some() { "lattice" } else { "lossless" }
    }
}

/// One tile: a run of at most [`TILE_BYTES`] decoded bytes that decodes alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// First byte of the payload in the object.
    pub offset: u64,
    /// Bytes of the payload.
    pub stored: u32,
    /// xxh3-64 of the payload.
    pub payload_hash: u64,
    /// xxh3-64 of the decoded bytes.
    pub decoded_hash: u64,
}

/// A tensor in an object.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorEntry {
    /// Path inside the checkpoint.
    pub path: String,
    /// Element type.
    pub dtype: Dtype,
    /// Role in training.
    pub role: Role,
    /// Shape.
    pub shape: Vec<u64>,
    /// Bytes of the decoded file.
    pub extent: Range<u64>,
    /// How the tiles are encoded.
    pub coding: Coding,
    /// Largest |R - W| that may occur: half a step for a lattice, 0 for lossless.
    pub bound: f64,
    /// Largest |R - W| that was found when it was encoded.
    pub max_abs_error: f64,
    /// The tiles, in order.
    pub tiles: Vec<Tile>,
}

impl TensorEntry {
    /// Bytes of all payloads.
    pub fn stored(&self) -> u64 {
        self.tiles.iter().map(|tile| u64::from(tile.stored)).sum()
    }
}

/// The index: every tensor by ascending extent; what lies between them is the skeleton.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Index {
    /// The file's path in the tree when it was archived; for people.
    pub origin: String,
    /// Name of the profile it was encoded with.
    pub profile: String,
    /// Format of the container; for people.
    pub container: String,
    /// Why it is a keyframe, or a super-step and not a keyframe: what was predicted; for people. Empty for all others.
    pub note: String,
    /// Tensors by ascending, disjoint extents.
    pub tensors: Vec<TensorEntry>,
    /// All other bytes of the file, concatenated, in chunks of [`TILE_BYTES`].
    pub skeleton: Vec<Tile>,
}

/// Bytes of one tile in the index.
const TILE_ENTRY: usize = 28;
/// No payload is longer: what does not compress is stored as it is, with a few bytes for modes and lengths; exceptions
/// of a lattice take at most 14 bytes for each element of two, and a keyframe in the same tile once more its bytes.
const MAX_TILE_STORED: u32 = 10 * TILE_BYTES as u32;
/// A tensor may have this many dimensions at most; torch stops at 64.
const MAX_DIMS: usize = 64;

/// Number of tiles that hold `bytes`.
pub fn tiles_of(bytes: u64) -> u64 {
    bytes.div_ceil(TILE_BYTES as u64)
}

impl Index {
    /// The gaps between tensors in a file of `logical_len` bytes: the skeleton's extents.
    pub fn gaps(&self, logical_len: u64) -> Vec<Range<u64>> {
        gaps(self.tensors.iter().map(|t| t.extent.clone()), logical_len)
    }

    /// The index's bytes, of [`super::OBJECT_VERSION`].
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_text(&mut out, &self.origin);
        put_text(&mut out, &self.profile);
        put_text(&mut out, &self.container);
        put_text(&mut out, &self.note);
        out.extend_from_slice(&(self.tensors.len() as u32).to_le_bytes());
        for tensor in &self.tensors {
            put_text(&mut out, &tensor.path);
            let (coding, parent, step) = match tensor.coding {
                Coding::Lossless => (0u8, 0, 0.0),
                Coding::LosslessDelta { parent } => (1, parent, 0.0),
                Coding::Lattice { parent, step } => (2, parent, step),
                Coding::LatticeKey { step } => (3, 0, step),
                Coding::LatticeWithKeyframe { step } => (4, 0, step),
            };
            out.extend_from_slice(&[tensor.dtype as u8, tensor.role as u8, coding, tensor.shape.len() as u8]);
            tensor.shape.iter().for_each(|dim| out.extend_from_slice(&dim.to_le_bytes()));
            out.extend_from_slice(&tensor.extent.start.to_le_bytes());
            out.extend_from_slice(&(tensor.extent.end - tensor.extent.start).to_le_bytes());
            out.extend_from_slice(&parent.to_le_bytes());
            out.extend_from_slice(&step.to_le_bytes());
            out.extend_from_slice(&tensor.bound.to_le_bytes());
            out.extend_from_slice(&tensor.max_abs_error.to_le_bytes());
            put_tiles(&mut out, &tensor.tiles);
        }
        put_tiles(&mut out, &self.skeleton);
        out
    }

    /// Reads an index of an object of this version, whose payloads end at `payload_end` and whose file has
    /// `logical_len` bytes. What it returns is sound: extents ascend within the file, tiles lie within the payloads
    /// and cover their tensors.
    ///
    /// # Errors
    /// [`Damage`] says which rule was broken.
    pub fn decode(bytes: &[u8], version: u32, logical_len: u64, payload_end: u64) -> Result<Index, Damage> {
        let mut fields = Fields::new(bytes);
        let origin = fields.text()?;
        let profile = fields.text()?;
        let container = fields.text()?;
        let note = if version == 1 { String::new() } else { fields.text()? };
        let count = fields.count(50)?;
        let mut tensors = Vec::with_capacity(count);
        let mut end = 0;
        for _ in 0..count {
            let tensor = decode_tensor(&mut fields, payload_end)?;
            if tensor.extent.start < end || tensor.extent.end > logical_len {
                return Err(Damage("its tensors overlap or reach beyond the file"));
            }
            end = tensor.extent.end;
            tensors.push(tensor);
        }
        let skeleton_len = logical_len - tensors.iter().map(|t| t.extent.end - t.extent.start).sum::<u64>();
        let skeleton = decode_tiles(&mut fields, skeleton_len, payload_end)?;
        match fields.remaining() {
            0 => Ok(Index { origin, profile, container, note, tensors, skeleton }),
            _ => Err(Damage("its index has bytes left over")),
        }
    }
}

/// What lies between ascending `extents` in a file of `len` bytes; empty gaps are left out.
pub fn gaps(extents: impl Iterator<Item = Range<u64>>, len: u64) -> Vec<Range<u64>> {
    let mut gaps = Vec::new();
    let mut at = 0;
    for extent in extents.chain(std::iter::once(len..len)) {
        if extent.start > at {
            gaps.push(at..extent.start);
        }
        at = extent.end;
    }
    gaps
}

fn decode_tensor(fields: &mut Fields, payload_end: u64) -> Result<TensorEntry, Damage> {
    let path = fields.text()?;
    let dtype = Dtype::from_code(fields.u8()?).ok_or(Damage("a tensor's type is unknown"))?;
    let role = *Role::ALL.get(usize::from(fields.u8()?)).ok_or(Damage("a tensor's role is unknown"))?;
    let coding = fields.u8()?;
    let dims = fields.u8()? as usize;
    if dims > MAX_DIMS {
        return Err(Damage("a tensor has too many dimensions"));
    }
    let shape = (0..dims).map(|_| fields.u64()).collect::<Result<Vec<_>, _>>()?;
    let start = fields.u64()?;
    let len = fields.u64()?;
    let parent = fields.u32()?;
    let step = fields.f64()?;
    let bound = fields.f64()?;
    let max_abs_error = fields.f64()?;
    let coding = match coding {
        0 => Coding::Lossless,
        1 => Coding::LosslessDelta { parent },
        2 => Coding::Lattice { parent, step },
        3 => Coding::LatticeKey { step },
        4 => Coding::LatticeWithKeyframe { step },
        _ => return Err(Damage("a tensor's coding is unknown")),
    };
    if let Some(step) = coding.step()
        && !(lattice::is_step(step) && dtype.is_lattice_float())
    {
        return Err(Damage("a lattice's step is not a positive number"));
    }
    let end = start.checked_add(len).ok_or(Damage("a tensor's extent is too long"))?;
    let tiles = decode_tiles(fields, len, payload_end)?;
    Ok(TensorEntry { path, dtype, role, shape, extent: start..end, coding, bound, max_abs_error, tiles })
}

fn put_tiles(out: &mut Vec<u8>, tiles: &[Tile]) {
    out.extend_from_slice(&(tiles.len() as u32).to_le_bytes());
    for tile in tiles {
        out.extend_from_slice(&tile.offset.to_le_bytes());
        out.extend_from_slice(&tile.stored.to_le_bytes());
        out.extend_from_slice(&tile.payload_hash.to_le_bytes());
        out.extend_from_slice(&tile.decoded_hash.to_le_bytes());
    }
}

fn decode_tiles(fields: &mut Fields, decoded: u64, payload_end: u64) -> Result<Vec<Tile>, Damage> {
    let count = fields.count(TILE_ENTRY)?;
    if count as u64 != tiles_of(decoded) {
        return Err(Damage("the number of tiles is not what the bytes need"));
    }
    (0..count)
        .map(|_| {
            let tile = Tile {
                offset: fields.u64()?,
                stored: fields.u32()?,
                payload_hash: fields.u64()?,
                decoded_hash: fields.u64()?,
            };
            if tile.stored > MAX_TILE_STORED {
                return Err(Damage("a tile's payload is longer than any can be"));
            }
            match tile.offset.checked_add(u64::from(tile.stored)) {
                Some(end) if end <= payload_end => Ok(tile),
                _ => Err(Damage("a tile reaches beyond the payloads")),
            }
        })
        .collect()
}
