//! The subject of a plan, as its parts see it: a file between its states, a tensor of it, and that tensor's tiles.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::recall::Chain;
use crate::store::Profiles;
use crate::store::object::{self, HEAD_BYTES, TAIL_BYTES, TensorEntry, rows_and_width};
use crate::tile::{self, Around, Coding, TileSpec};
use codec::entropy::scratch;
use codec::{Rows, TILE_BYTES};
use formats::{Description, ReadAt, Role, Tensor};

use super::super::base::Base;
use super::rates::{Rates, rates};

/// Tensors of at least this many bytes have edges in the skeleton: 12 KiB are 0.15% of them.
const MIN_EDGES_BYTES: u64 = 8 << 20;

/// A file between its states, which decides how each tensor of it is encoded.
#[derive(Clone, Copy)]
pub(crate) struct Material<'a> {
    /// The file, with its tables in order.
    pub(crate) source: &'a (dyn ReadAt + Sync),
    pub(crate) description: &'a Description,
    /// The state after this one, as written, with its tensors. With `ahead`, the state before it, as written.
    pub(crate) newer: (&'a (dyn ReadAt + Sync), &'a Description),
    /// No state after this one is known. The proofs of the state before hold, and the plan expects its update again.
    pub(crate) ahead: bool,
    /// The archived states before this one. Only as a super-step may a keyframe win.
    pub(crate) base: &'a Base,
    /// Iterations to the state after it, as the two names count them: for files that count none.
    pub(crate) apart: Option<f64>,
    pub(crate) profiles: &'a Profiles,
}

impl Material<'_> {
    /// The numbers for a tensor of this role; `None`: lossless.
    pub(super) fn rates(&self, role: Role) -> Option<Rates> {
        rates(self.profiles.of(role))
    }
}

/// A tensor's coding with the base and without, and the bits of its middle tile in both.
pub(super) struct Choice {
    pub(super) coding: Coding,
    pub(super) alone: Coding,
    pub(super) bits: (f64, f64),
    /// Step of a row in units of its distance to the base; 0 if it has no step of its own.
    pub(super) row_step: f64,
}

impl Choice {
    /// The same with the base and without.
    pub(super) fn of(coding: Coding) -> Choice {
        Choice { coding, alone: coding, bits: (0.0, 0.0), row_step: 0.0 }
    }
}

/// The input for the coding of one tensor.
pub(super) struct Subject<'a> {
    pub(super) material: &'a Material<'a>,
    pub(super) tensor: &'a Tensor,
    /// The tensor in the state after this one.
    pub(super) twin: Option<&'a Tensor>,
    /// The tensor in the base.
    pub(super) parent: Option<Archived<'a>>,
    /// The tensor in the state before.
    pub(super) previous: Option<Archived<'a>>,
    pub(super) rates: Rates,
    /// Factor on the step of a weight or of its second moment, at most 1, see [`steep::cautions`].
    pub(super) caution: f64,
    /// Its other moment, and that one's place among the plans.
    pub(super) partner: Option<(&'a Tensor, u32)>,
}

impl Subject<'_> {
    /// Bits of a tile, whose bytes are `data`, in a coding; `None` if it does not fit.
    pub(super) fn bits(
        &self,
        number: usize,
        data: &Arc<Vec<u8>>,
        coding: Coding,
        around: Around,
    ) -> io::Result<Option<f64>> {
        let spec = spec(self.tensor, coding, number);
        let Some((state, _)) = tile::quantize(spec, data, around, None) else { return Ok(None) };
        let mut out = Vec::new();
        let fits = tile::encode(spec, &state, around.parent, &mut out)?;
        Ok(fits.then_some(8.0 * out.len() as f64))
    }
}

/// A tensor of an archived state.
#[derive(Clone, Copy)]
pub(super) struct Archived<'a> {
    pub(super) chain: &'a Chain,
    /// Number in the leaf's table.
    pub(super) number: u32,
    pub(super) entry: &'a TensorEntry,
}

/// The tensors of an archived state by path.
pub(super) struct Tensors<'a>(HashMap<&'a str, Archived<'a>>);

impl<'a> Tensors<'a> {
    pub(super) fn of(chain: Option<&'a Chain>) -> Tensors<'a> {
        let tensors = chain.into_iter().flat_map(|chain| {
            let tensors = chain.leaf().index().tensors.iter().enumerate();
            tensors.map(move |(at, entry)| (entry.path.as_str(), Archived { chain, number: at as u32, entry }))
        });
        Tensors(tensors.collect())
    }

    /// The one that this tensor can be a difference to.
    pub(super) fn get(&self, tensor: &Tensor) -> Option<Archived<'a>> {
        let len = |extent: &Range<u64>| extent.end - extent.start;
        let found = self.0.get(tensor.path.as_str()).copied();
        found.filter(|other| other.entry.dtype == tensor.dtype && len(&other.entry.extent) == len(&tensor.extent))
    }
}

/// A tensor without its first and last pages, which stay in the skeleton, if it is so large that this costs nothing.
pub(crate) fn without_edges(tensor: &Tensor) -> Tensor {
    let mut tensor = tensor.clone();
    if tensor.bytes() >= MIN_EDGES_BYTES {
        // A container may have left a part of the last page out.
        let rest = TAIL_BYTES.saturating_sub(tensor.tail());
        tensor.extent = tensor.extent.start + HEAD_BYTES..tensor.extent.end - rest;
    }
    tensor
}

pub(in super::super) fn tiles(tensor: &Tensor) -> usize {
    tensor.bytes().div_ceil(TILE_BYTES as u64) as usize
}

/// Where a tile's elements lie in the rows of its tensor.
pub(in super::super) fn rows(tensor: &Tensor, tile: usize) -> Rows {
    let first = object::first_element(&tensor.shape, tensor.dtype, tensor.bytes(), tile);
    Rows { width: rows_and_width(&tensor.shape).1, first }
}

/// A tile of a tensor, and how it is to be encoded.
pub(in super::super) fn spec(tensor: &Tensor, coding: Coding, tile: usize) -> TileSpec {
    let start = tile as u64 * TILE_BYTES as u64;
    let len = (tensor.bytes() - start).min(TILE_BYTES as u64) as usize;
    TileSpec { dtype: tensor.dtype, coding, len, rows: rows(tensor, tile) }
}

/// Reads a tile of a tensor as written.
pub(crate) fn read_tile(source: &dyn ReadAt, tensor: &Tensor, tile: usize) -> io::Result<Vec<u8>> {
    let start = tensor.extent.start + tile as u64 * TILE_BYTES as u64;
    let mut data = scratch::bytes((tensor.extent.end - start).min(TILE_BYTES as u64) as usize);
    source.read_exact_at(&mut data, start)?;
    Ok(data)
}
