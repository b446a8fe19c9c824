//! Indexes of objects of versions 1 and 2: a row for each tensor.

use crate::codec::Dtype;
use crate::container::Role;
use crate::store::Damage;
use crate::store::bytes::Fields;

use super::super::Coding;
use super::{Index, MAX_DIMS, TensorEntry, Tile, believed, tiles_of};

/// Bytes of one tile in the index.
const TILE_ENTRY: usize = 28;

pub(super) fn decode(bytes: &[u8], version: u32, logical_len: u64) -> Result<Index, Damage> {
    let mut fields = Fields::new(bytes);
    let origin = fields.text()?;
    let profile = fields.text()?;
    let container = fields.text()?;
    let note = if version == 1 { String::new() } else { fields.text()? };
    let count = believed(fields.count(50)?)?;
    let mut tensors = Vec::with_capacity(count);
    let mut end = 0;
    for _ in 0..count {
        let tensor = decode_tensor(&mut fields)?;
        if tensor.extent.start < end || tensor.extent.end > logical_len {
            return Err(Damage("its tensors overlap or reach beyond the file"));
        }
        end = tensor.extent.end;
        tensors.push(tensor);
    }
    let skeleton_len = logical_len - tensors.iter().map(|t| t.extent.end - t.extent.start).sum::<u64>();
    let skeleton = decode_tiles(&mut fields, skeleton_len)?;
    match fields.remaining() {
        0 => Ok(Index { origin, profile, container, note, generations: 0, original: None, tensors, skeleton }),
        _ => Err(Damage("its index has bytes left over")),
    }
}

fn decode_tensor(fields: &mut Fields) -> Result<TensorEntry, Damage> {
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
    let end = start.checked_add(len).ok_or(Damage("a tensor's extent is too long"))?;
    let tiles = decode_tiles(fields, len)?;
    Ok(TensorEntry { path, dtype, role, shape, extent: start..end, coding, bound, max_abs_error, factors: None, tiles })
}

fn decode_tiles(fields: &mut Fields, decoded: u64) -> Result<Vec<Tile>, Damage> {
    let count = fields.count(TILE_ENTRY)?;
    if count as u64 != tiles_of(decoded) {
        return Err(Damage("the number of tiles is not what the bytes need"));
    }
    (0..count)
        .map(|_| {
            Ok(Tile {
                offset: fields.u64()?,
                stored: fields.u32()?,
                // All that is looked at, since version 3.
                payload_hash: fields.u64()? as u32,
                decoded_hash: fields.u64()?,
            })
        })
        .collect()
}
