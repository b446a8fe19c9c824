//! The index of an object: its tensors, their tiles, and checksums of the decoded bytes (docs/FORMAT.md, "Index").

use std::ops::Range;

use crate::store::Damage;
use crate::tile::{Codec, Coding, TileSpec};
use codec::Rows;
use codec::{Dtype, TILE_BYTES, lattice, log};
use formats::Role;

mod columns;

/// One tile: at most [`TILE_BYTES`] decoded bytes that can be decoded independently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Offset of the payload in the object.
    pub offset: u64,
    /// Bytes of the payload.
    pub stored: u32,
    /// Low 32 bits of xxh3-64 of the payload.
    pub payload_hash: u32,
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
    /// Its byte range in the decoded file.
    pub extent: Range<u64>,
    /// The encoding of the tiles.
    pub coding: Coding,
    /// Upper bound on the error, 0 for lossless. For a lattice: |R - W|. For a logarithmic lattice: octaves. For a
    /// first moment: the change of the ratio to the root of the second moment.
    pub bound: f64,
    /// Largest |R - W| found while encoding, for every kind of bound; as an f32, rounded up.
    pub max_abs_error: f64,
    /// The factors of a logarithmic lattice, if this object has its own.
    pub factors: Option<Tile>,
    /// The tiles, in order.
    pub tiles: Vec<Tile>,
}

impl TensorEntry {
    /// Index within the tensor of the first element of tile `tile`.
    pub fn first_element(&self, tile: usize) -> u64 {
        first_element(&self.shape, self.dtype, self.extent.end - self.extent.start, tile)
    }

    /// Bytes of tile `tile`: all have [`TILE_BYTES`] except the last.
    pub fn tile_len(&self, tile: usize) -> usize {
        let len = self.extent.end - self.extent.start;
        (len - tile as u64 * TILE_BYTES as u64).min(TILE_BYTES as u64) as usize
    }

    /// The description of tile `tile`.
    pub fn spec(&self, tile: usize) -> TileSpec {
        let rows = Rows { width: self.rows_and_width().1, first: self.first_element(tile) };
        TileSpec { dtype: self.dtype, coding: self.coding, len: self.tile_len(tile), rows }
    }

    /// Number of rows (the first dimension) and elements of each row (all other dimensions). A vector is one row.
    pub fn rows_and_width(&self) -> (u64, u64) {
        rows_and_width(&self.shape)
    }

    /// Bytes of all payloads.
    pub fn stored(&self) -> u64 {
        self.tiles.iter().chain(&self.factors).map(|tile| u64::from(tile.stored)).sum()
    }
}

/// The index: every tensor by ascending extent. The bytes between tensors are the skeleton.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Index {
    /// The file's path in the tree when it was archived; for people.
    pub origin: String,
    /// Name of the profile it was encoded with.
    pub profile: String,
    /// Format of the container; for people.
    pub container: String,
    /// The prediction that made it a keyframe, or a super-step and not a keyframe; for people. Empty for all others.
    pub note: String,
    /// Lossy generations: the number of restores from quantized states behind this one.
    pub generations: u32,
    /// Largest error of a weight, in root mean squares of its update to the next newer state; as an f32, rounded up. 0 if
    /// all weights are exact, or the update is unknown.
    pub error_updates: f64,
    /// Tensors by ascending, disjoint extents.
    pub tensors: Vec<TensorEntry>,
    /// All other bytes of the file, concatenated, in chunks of [`TILE_BYTES`].
    pub skeleton: Vec<Tile>,
}

/// A large tensor leaves its first bytes (this many) and its last bytes to the skeleton, both or neither. To find one
/// tensor in a torch zip, a program reads all headers. The pages with the headers also hold the edges of tensors, and
/// each edge would cost a tile. A read of 4 KiB that starts in the header before a tensor reaches this far into it, in
/// whole pages.
pub const HEAD_BYTES: u64 = 8192;
/// The page where a header begins holds less than this of the tensor before it.
pub const TAIL_BYTES: u64 = 4096;
/// Limit on a payload. Incompressible data is stored as it is, with a few bytes for modes and lengths. Exceptions of a
/// lattice take at most 14 bytes for each element of two; a keyframe in the same tile takes its bytes once more.
pub(super) const MAX_TILE_STORED: u32 = 10 * TILE_BYTES as u32;
/// More tensors than any checkpoint has. An entry takes some 25 times the bytes that a crafted index needs to claim it.
pub(super) const MAX_TENSORS: usize = 1 << 22;
/// Maximum number of dimensions of a tensor; torch stops at 64.
pub(super) const MAX_DIMS: usize = 64;

/// Number of rows of a tensor of this shape, and elements of each row.
pub fn rows_and_width(shape: &[u64]) -> (u64, u64) {
    let product = |dims: &[u64]| dims.iter().fold(1u64, |product, dim| product.saturating_mul(*dim));
    match shape {
        [rows, rest @ ..] if !rest.is_empty() => (*rows, product(rest)),
        _ => (1, product(shape)),
    }
}

/// Index of the first element of tile `tile` in a tensor with `len` bytes in tiles. The first bytes of large tensors
/// are in the skeleton.
pub fn first_element(shape: &[u64], dtype: Dtype, len: u64, tile: usize) -> u64 {
    let size = dtype.size() as u64;
    let bytes = shape.iter().try_fold(size, |product, &dim| product.checked_mul(dim));
    let has_edges = len.checked_add(HEAD_BYTES + TAIL_BYTES).is_some_and(|whole| bytes == Some(whole));
    let head = if has_edges { HEAD_BYTES / size } else { 0 };
    head + (tile * TILE_BYTES) as u64 / size
}

/// Checks that a number of tensors is plausible.
fn believed(count: usize) -> Result<usize, Damage> {
    if count <= MAX_TENSORS { Ok(count) } else { Err(Damage("it has more tensors than any file")) }
}

/// Number of tiles for this many bytes.
pub fn tiles_of(bytes: u64) -> u64 {
    bytes.div_ceil(TILE_BYTES as u64)
}

impl Index {
    /// The gaps between tensors in a file of `logical_len` bytes: the skeleton's extents.
    pub fn gaps(&self, logical_len: u64) -> Vec<Range<u64>> {
        gaps(self.tensors.iter().map(|t| t.extent.clone()), logical_len)
    }

    /// The index's bytes.
    pub fn encode(&self) -> Vec<u8> {
        columns::encode(self)
    }

    /// Parses the index of an object whose payloads end at `payload_end` and whose file has `logical_len` bytes. The
    /// result is sound: extents ascend within the file; tiles lie within the payloads and cover their tensors. Each
    /// companion that a tensor needs exists and has its length and type.
    ///
    /// # Errors
    /// [`Damage`] names the broken rule.
    pub fn decode(bytes: &[u8], logical_len: u64, payload_end: u64) -> Result<Index, Damage> {
        let index = columns::decode(bytes, logical_len)?;
        index.check(payload_end)?;
        Ok(index)
    }

    /// Checks the rules for a sound index.
    fn check(&self, payload_end: u64) -> Result<(), Damage> {
        let factors = self.tensors.iter().filter_map(|tensor| tensor.factors.as_ref());
        let tiles = self.tensors.iter().flat_map(|tensor| &tensor.tiles).chain(&self.skeleton);
        for tile in tiles {
            if tile.stored > MAX_TILE_STORED {
                return Err(Damage("a tile's payload is too long"));
            }
            if tile.offset.checked_add(u64::from(tile.stored)).is_none_or(|end| end > payload_end) {
                return Err(Damage("a tile reaches beyond the payloads"));
            }
        }
        for tile in factors {
            if tile.offset.checked_add(u64::from(tile.stored)).is_none_or(|end| end > payload_end) {
                return Err(Damage("factors reach beyond the payloads"));
            }
        }
        self.tensors.iter().try_for_each(|tensor| self.check_coding(tensor))
    }

    fn check_coding(&self, tensor: &TensorEntry) -> Result<(), Damage> {
        let coding = tensor.coding;
        let of_lattice = tensor.dtype.is_lattice_float();
        let step = coding.step().or(coding.ratio().map(|(step, _)| step));
        if step.is_some_and(|step| !(lattice::is_step(step) && of_lattice)) {
            return Err(Damage("a lattice's step is not a positive number"));
        }
        if coding.unit().is_some_and(|unit| !(log::is_unit(unit) && of_lattice)) {
            return Err(Damage("a logarithmic lattice has no such unit"));
        }
        if coding.is_external() && !papers::tile::is_for(tensor.dtype) {
            return Err(Damage("a published system's tensor has an unsupported type"));
        }
        if tensor.factors.is_some() != coding.has_factors() {
            return Err(Damage("a tensor's factors are missing, or not needed"));
        }
        // Decoding allocates memory for as many factors as the shape demands.
        let (rows, width) = tensor.rows_and_width();
        let bytes = (tensor.extent.end - tensor.extent.start).saturating_add(HEAD_BYTES + TAIL_BYTES);
        if tensor.factors.is_some() && rows.saturating_mul(width) > bytes / tensor.dtype.size() as u64 {
            return Err(Damage("a tensor's elements do not match its factors"));
        }
        let Some(beside) = coding.companion() else { return Ok(()) };
        let other = self.tensors.get(beside as usize).ok_or(Damage("a tensor's companion is missing"))?;
        let elements = |tensor: &TensorEntry| (tensor.extent.end - tensor.extent.start) / tensor.dtype.size() as u64;
        let fits = match coding.codec {
            Codec::Cast { .. } => other.dtype.is_lattice_float() && of_lattice,
            _ => other.dtype == tensor.dtype,
        };
        match fits && other.coding.rank() < coding.rank() && elements(other) == elements(tensor) {
            true => Ok(()),
            false => Err(Damage("a tensor's companion does not fit it")),
        }
    }
}

/// The gaps between ascending `extents` in a file of `len` bytes, without empty ones.
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
