//! The encoding of an index: one column per field, so that similar tensors cost a few bytes each. No field can be
//! derived from another.

use crate::store::Damage;
use crate::store::bytes::{Fields, put_short_text};
use codec::Dtype;
use codec::entropy::varint;
use codec::moment::Rule;
use formats::Role;

use super::super::HEADER_BYTES;
use super::{Index, MAX_DIMS, TensorEntry, Tile, believed, tiles_of};
use crate::tile::{Codec, Coding};

/// Minimum bytes of a tensor: path, type, role, coding, dimensions, gap, length, error.
const LEAST_TENSOR: usize = 11;
/// Bytes of a tile's two hashes.
const HASHES: usize = 12;

/// Bit of a coding's code: a difference to a parent.
const DIFFERENCE: u8 = 0x80;

fn code(coding: Coding) -> u8 {
    let codec = match coding.codec {
        Codec::Lossless => 0,
        Codec::Lattice { .. } => 1,
        Codec::Rows { .. } => 2,
        Codec::Log { .. } => 3,
        Codec::Moment { rule: Rule::Root | Rule::Sign, .. } => 4,
        Codec::Moment { rule: Rule::Norm, .. } => 5,
        Codec::Moment { rule: Rule::Inward, .. } => 6,
        Codec::Sized { rule: Rule::Sign, .. } => 8,
        Codec::Sized { .. } => 7,
        Codec::Cast { .. } => 9,
        Codec::External => 10,
    };
    codec | if coding.parent.is_some() { DIFFERENCE } else { 0 }
}

/// The coding with this code, before its other columns are read.
fn coding(code: u8) -> Result<Coding, Damage> {
    let (second, step) = (0, 0.0);
    let codec = match code & !DIFFERENCE {
        0 => Codec::Lossless,
        1 => Codec::Lattice { step },
        2 => Codec::Rows { step },
        3 => Codec::Log { unit: 0 },
        4 => Codec::Moment { second, step, rule: Rule::Root },
        5 => Codec::Moment { second, step, rule: Rule::Norm },
        6 => Codec::Moment { second, step, rule: Rule::Inward },
        7 => Codec::Sized { step, rule: Rule::Norm },
        8 => Codec::Sized { step, rule: Rule::Sign },
        9 => Codec::Cast { of: 0 },
        10 => Codec::External,
        _ => return Err(Damage("a tensor's coding is unknown")),
    };
    match code & DIFFERENCE != 0 {
        false => Ok(codec.alone()),
        true if codec.has_differences() => Ok(codec.on(0)),
        true => Err(Damage("a tensor's coding is unknown")),
    }
}

/// Writes the distance to another tensor's number. It is small in both directions, and equal for many tensors.
fn put_relative(out: &mut Vec<u8>, other: u32, own: usize) {
    let distance = i64::from(other) - own as i64;
    varint::put(((distance << 1) ^ (distance >> 63)) as u64, out);
}

fn relative(fields: &mut Fields, own: usize) -> Result<u32, Damage> {
    let zigzag = fields.varint()?;
    let distance = (zigzag >> 1) as i64 ^ -((zigzag & 1) as i64);
    let number = (own as i64).checked_add(distance).and_then(|number| u32::try_from(number).ok());
    number.ok_or(Damage("a tensor refers to one that cannot exist"))
}

pub(super) fn encode(index: &Index) -> Vec<u8> {
    let mut out = Vec::new();
    for text in [&index.origin, &index.profile, &index.container, &index.note] {
        put_short_text(&mut out, text);
    }
    varint::put(index.generations.into(), &mut out);
    out.extend_from_slice(&round_up(index.error_updates).to_le_bytes());
    let tensors = &index.tensors;
    varint::put(tensors.len() as u64, &mut out);
    tensors.iter().for_each(|tensor| put_short_text(&mut out, &tensor.path));
    out.extend(tensors.iter().map(|tensor| tensor.dtype as u8));
    out.extend(tensors.iter().map(|tensor| tensor.role as u8));
    let codings: Vec<Coding> = tensors.iter().map(|tensor| tensor.coding).collect();
    out.extend(codings.iter().map(|&coding| code(coding)));
    out.extend(tensors.iter().map(|tensor| tensor.shape.len() as u8));
    tensors.iter().flat_map(|tensor| &tensor.shape).for_each(|&dim| varint::put(dim, &mut out));
    let mut end = 0;
    for tensor in tensors {
        // Wraps if tensors overlap; no reader accepts that.
        varint::put(tensor.extent.start.wrapping_sub(end), &mut out);
        end = tensor.extent.end;
    }
    tensors.iter().for_each(|tensor| varint::put(tensor.extent.end - tensor.extent.start, &mut out));
    let mut relative = |other: &dyn Fn(&Coding) -> Option<u32>| {
        let numbered = codings.iter().enumerate().filter_map(|(own, coding)| Some((own, other(coding)?)));
        numbered.for_each(|(own, other)| put_relative(&mut out, other, own));
    };
    relative(&|coding| coding.parent);
    relative(&|coding| coding.companion());
    let steps = codings.iter().filter_map(|coding| coding.step().or(coding.ratio().map(|(step, _)| step)));
    steps.for_each(|step| out.extend_from_slice(&step.to_le_bytes()));
    codings.iter().filter_map(|coding| coding.unit()).for_each(|unit| varint::put(unit.into(), &mut out));
    let lossy = || tensors.iter().filter(|tensor| tensor.coding.is_lossy());
    lossy().for_each(|tensor| out.extend_from_slice(&tensor.bound.to_le_bytes()));
    lossy().for_each(|tensor| out.extend_from_slice(&round_up(tensor.max_abs_error).to_le_bytes()));
    let factors = || tensors.iter().filter_map(|tensor| tensor.factors.as_ref());
    let tiles = || factors().chain(tensors.iter().flat_map(|tensor| &tensor.tiles)).chain(&index.skeleton);
    tiles().for_each(|tile| varint::put(tile.stored.into(), &mut out));
    let mut expected = HEADER_BYTES as u64;
    for tile in tiles() {
        let distance = tile.offset.wrapping_sub(expected) as i64;
        varint::put(((distance << 1) ^ (distance >> 63)) as u64, &mut out);
        expected = tile.offset.wrapping_add(tile.stored.into());
    }
    tiles().for_each(|tile| out.extend_from_slice(&tile.payload_hash.to_le_bytes()));
    tiles().for_each(|tile| out.extend_from_slice(&tile.decoded_hash.to_le_bytes()));
    out
}

/// The smallest f32 not below `value`: an error must never be understated.
fn round_up(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) < value { near.next_up() } else { near }
}

pub(super) fn decode(bytes: &[u8], logical_len: u64) -> Result<Index, Damage> {
    let fields = &mut Fields::new(bytes);
    let (origin, profile, container, note) =
        (fields.short_text()?, fields.short_text()?, fields.short_text()?, fields.short_text()?);
    let generations = u32::try_from(fields.varint()?).map_err(|_| Damage("its generations are not a number"))?;
    let error_updates = fields.f32()?.into();
    let count = believed(fields.varcount(LEAST_TENSOR)?)?;
    let paths = (0..count).map(|_| fields.short_text()).collect::<Result<Vec<_>, _>>()?;
    let dtypes = fields.take(count)?.iter().map(|&code| Dtype::from_code(code));
    let dtypes = dtypes.collect::<Option<Vec<_>>>().ok_or(Damage("a tensor's type is unknown"))?;
    let roles = fields.take(count)?.iter().map(|&code| Role::ALL.get(usize::from(code)).copied());
    let roles = roles.collect::<Option<Vec<_>>>().ok_or(Damage("a tensor's role is unknown"))?;
    let mut codings = fields.take(count)?.iter().map(|&code| coding(code)).collect::<Result<Vec<_>, _>>()?;
    let dims = fields.take(count)?;
    if dims.iter().any(|&dims| usize::from(dims) > MAX_DIMS) {
        return Err(Damage("a tensor has too many dimensions"));
    }
    let shapes = dims.iter().map(|&dims| (0..dims).map(|_| fields.varint()).collect::<Result<Vec<_>, _>>());
    let shapes = shapes.collect::<Result<Vec<_>, _>>()?;
    let extents = extents(fields, count, logical_len)?;
    for (own, coding) in codings.iter_mut().enumerate() {
        coding.parent = coding.parent.map(|_| relative(fields, own)).transpose()?;
    }
    for (own, coding) in codings.iter_mut().enumerate() {
        if let Codec::Moment { second: other, .. } | Codec::Cast { of: other } = &mut coding.codec {
            *other = relative(fields, own)?;
        }
    }
    for coding in &mut codings {
        if let Codec::Lattice { step } | Codec::Rows { step } | Codec::Moment { step, .. } | Codec::Sized { step, .. } =
            &mut coding.codec
        {
            *step = fields.f64()?;
        }
    }
    for coding in &mut codings {
        if let Codec::Log { unit } = &mut coding.codec {
            *unit = u32::try_from(fields.varint()?).map_err(|_| Damage("a unit is no number"))?;
        }
    }
    let lossy = || codings.iter().map(|coding| coding.is_lossy());
    let bounds = lossy().map(|lossy| if lossy { fields.f64() } else { Ok(0.0) }).collect::<Result<Vec<_>, _>>()?;
    let errors = lossy().map(|lossy| if lossy { fields.f32() } else { Ok(0.0) }).collect::<Result<Vec<_>, _>>()?;
    let with_factors = |coding: &&Coding| coding.has_factors();
    let factors = codings.iter().filter(with_factors).count();
    let lens: Vec<u64> = extents.iter().map(|extent| extent.end - extent.start).collect();
    let skeleton = tiles_of(logical_len - lens.iter().sum::<u64>());
    let total = lens.iter().map(|&len| tiles_of(len)).sum::<u64>().saturating_add(skeleton);
    let total = total.saturating_add(factors as u64);
    let mut tiles = tiles(fields, total)?.into_iter();
    later_fields(fields)?;
    let mut factors: Vec<Option<Tile>> =
        codings.iter().map(|coding| with_factors(&coding).then(|| tiles.next()).flatten()).collect();
    let mut tensors = Vec::with_capacity(count);
    for (own, path) in paths.into_iter().enumerate() {
        tensors.push(TensorEntry {
            path,
            dtype: dtypes[own],
            role: roles[own],
            shape: shapes[own].clone(),
            extent: extents[own].clone(),
            coding: codings[own],
            bound: bounds[own],
            max_abs_error: errors[own].into(),
            factors: factors[own].take(),
            tiles: tiles.by_ref().take(tiles_of(lens[own]) as usize).collect(),
        });
    }
    Ok(Index { origin, profile, container, note, generations, error_updates, tensors, skeleton: tiles.collect() })
}

/// Fields from later versions stand at the end, each with its length. A reader may skip a field with an even number,
/// and must not skip one with an odd number.
fn later_fields(fields: &mut Fields) -> Result<(), Damage> {
    while fields.remaining() > 0 {
        let must_be_understood = fields.varint()? % 2 == 1;
        let length = fields.varcount(1)?;
        fields.take(length)?;
        if must_be_understood {
            return Err(Damage("a newer version of stepfs wrote it"));
        }
    }
    Ok(())
}

fn extents(fields: &mut Fields, count: usize, logical_len: u64) -> Result<Vec<std::ops::Range<u64>>, Damage> {
    let gaps = (0..count).map(|_| fields.varint()).collect::<Result<Vec<_>, _>>()?;
    let mut end = 0u64;
    gaps.into_iter()
        .map(|gap| {
            let start = end.checked_add(gap);
            let last = start.and_then(|start| start.checked_add(fields.varint().ok()?));
            match (start, last) {
                (Some(start), Some(last)) if last <= logical_len => {
                    end = last;
                    Ok(start..last)
                }
                _ => Err(Damage("its tensors reach beyond the file")),
            }
        })
        .collect()
}

fn tiles(fields: &mut Fields, count: u64) -> Result<Vec<Tile>, Damage> {
    let count = usize::try_from(count)
        .ok()
        .filter(|count| count.checked_mul(HASHES + 2).is_some_and(|bytes| bytes <= fields.remaining()));
    let count = count.ok_or(Damage("the number of tiles does not match the bytes"))?;
    let mut tiles = Vec::with_capacity(count);
    for _ in 0..count {
        let stored = u32::try_from(fields.varint()?).map_err(|_| Damage("a tile's payload is too long"))?;
        tiles.push(Tile { offset: 0, stored, payload_hash: 0, decoded_hash: 0 });
    }
    let mut expected = HEADER_BYTES as u64;
    for tile in &mut tiles {
        let zigzag = fields.varint()?;
        let distance = (zigzag >> 1) as i64 ^ -((zigzag & 1) as i64);
        tile.offset = expected.wrapping_add(distance as u64);
        expected = tile.offset.wrapping_add(tile.stored.into());
    }
    for tile in &mut tiles {
        tile.payload_hash = fields.u32()?;
    }
    for tile in &mut tiles {
        tile.decoded_hash = fields.u64()?;
    }
    Ok(tiles)
}
