//! The encoding of an index: one column per field, so that similar tensors cost a few bytes each. No field can be
//! derived from another.

use crate::store::Damage;
use codec::Dtype;
use codec::entropy::varint;
use codec::moment::Rule;
use formats::Role;

use super::super::HEADER_BYTES;
use super::{Index, MAX_DIMS, TensorEntry, Tile, believed, tiles_of};
use crate::tile::{Codec, Coding};

/// Minimum bytes of a tensor: path, type, role, coding, dimensions, gap, length. An exact one has no error.
const LEAST_TENSOR: usize = 7;
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

/// Bytes that may be damaged, of which fields are taken off the front. Every length is checked before use.
type Fields<'a> = &'a [u8];

fn take<'a>(fields: &mut Fields<'a>, count: usize) -> Result<&'a [u8], Damage> {
    fields.split_off(..count).ok_or(Damage("a field reaches beyond the end"))
}

fn array<const N: usize>(fields: &mut Fields) -> Result<[u8; N], Damage> {
    take(fields, N)?.try_into().map_err(|_| Damage("a field reaches beyond the end"))
}

fn number(fields: &mut Fields) -> Result<u64, Damage> {
    varint::take(fields).map_err(|_| Damage("an integer is cut short"))
}

/// A count of items of at least `each` bytes in the remaining bytes, so it may bound an allocation.
fn count(fields: &mut Fields, each: usize) -> Result<usize, Damage> {
    let count = usize::try_from(number(fields)?).ok();
    let fits = |count: &usize| count.checked_mul(each).is_some_and(|total| total <= fields.len());
    count.filter(fits).ok_or(Damage("a count is larger than the rest"))
}

/// A string, as its length and its UTF-8 bytes.
fn text(fields: &mut Fields) -> Result<String, Damage> {
    let length = count(fields, 1)?;
    String::from_utf8(take(fields, length)?.to_vec()).map_err(|_| Damage("a name is not UTF-8"))
}

fn put_text(text: &str, out: &mut Vec<u8>) {
    varint::put(text.len() as u64, out);
    out.extend_from_slice(text.as_bytes());
}

/// A number that is small in both directions: the distance to another tensor's number, which is equal for many
/// tensors, or to the expected place of a payload.
fn put_signed(distance: i64, out: &mut Vec<u8>) {
    varint::put(((distance << 1) ^ (distance >> 63)) as u64, out);
}

fn signed(fields: &mut Fields) -> Result<i64, Damage> {
    let zigzag = number(fields)?;
    Ok((zigzag >> 1) as i64 ^ -((zigzag & 1) as i64))
}

fn relative(fields: &mut Fields, own: usize) -> Result<u32, Damage> {
    let number = (own as i64).checked_add(signed(fields)?).and_then(|number| u32::try_from(number).ok());
    number.ok_or(Damage("a tensor refers to one that cannot exist"))
}

pub(super) fn encode(index: &Index) -> Vec<u8> {
    let mut out = Vec::new();
    for text in [&index.origin, &index.profile, &index.container, &index.note] {
        put_text(text, &mut out);
    }
    varint::put(index.generations.into(), &mut out);
    out.extend_from_slice(&round_up(index.error_updates).to_le_bytes());
    let tensors = &index.tensors;
    varint::put(tensors.len() as u64, &mut out);
    tensors.iter().for_each(|tensor| put_text(&tensor.path, &mut out));
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
        numbered.for_each(|(own, other)| put_signed(i64::from(other) - own as i64, &mut out));
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
        put_signed(tile.offset.wrapping_sub(expected) as i64, &mut out);
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

pub(super) fn decode(mut bytes: &[u8], logical_len: u64) -> Result<Index, Damage> {
    let fields = &mut bytes;
    let (origin, profile, container, note) = (text(fields)?, text(fields)?, text(fields)?, text(fields)?);
    let generations = u32::try_from(number(fields)?).map_err(|_| Damage("its generations are not a number"))?;
    let error_updates = f32::from_le_bytes(array(fields)?).into();
    let count = believed(count(fields, LEAST_TENSOR)?)?;
    // The columns fill the entries one after the other.
    let mut tensors = Vec::with_capacity(count);
    for _ in 0..count {
        tensors.push(TensorEntry {
            path: text(fields)?,
            dtype: Dtype::U8,
            role: Role::Other,
            shape: Vec::new(),
            extent: 0..0,
            coding: Coding::LOSSLESS,
            bound: 0.0,
            max_abs_error: 0.0,
            factors: None,
            tiles: Vec::new(),
        });
    }
    for (tensor, code) in tensors.iter_mut().zip(take(fields, count)?) {
        tensor.dtype = Dtype::from_code(*code).ok_or(Damage("a tensor's type is unknown"))?;
    }
    for (tensor, code) in tensors.iter_mut().zip(take(fields, count)?) {
        tensor.role = *Role::ALL.get(usize::from(*code)).ok_or(Damage("a tensor's role is unknown"))?;
    }
    for (tensor, code) in tensors.iter_mut().zip(take(fields, count)?) {
        tensor.coding = coding(*code)?;
    }
    for (tensor, dims) in tensors.iter_mut().zip(take(fields, count)?) {
        if usize::from(*dims) > MAX_DIMS {
            return Err(Damage("a tensor has too many dimensions"));
        }
        tensor.shape = (0..*dims).map(|_| number(fields)).collect::<Result<_, _>>()?;
    }
    extents(fields, &mut tensors, logical_len)?;
    for (own, tensor) in tensors.iter_mut().enumerate() {
        tensor.coding.parent = tensor.coding.parent.map(|_| relative(fields, own)).transpose()?;
    }
    for (own, tensor) in tensors.iter_mut().enumerate() {
        if let Codec::Moment { second: other, .. } | Codec::Cast { of: other } = &mut tensor.coding.codec {
            *other = relative(fields, own)?;
        }
    }
    for tensor in &mut tensors {
        if let Codec::Lattice { step } | Codec::Rows { step } | Codec::Moment { step, .. } | Codec::Sized { step, .. } =
            &mut tensor.coding.codec
        {
            *step = f64::from_le_bytes(array(fields)?);
        }
    }
    for tensor in &mut tensors {
        if let Codec::Log { unit } = &mut tensor.coding.codec {
            *unit = u32::try_from(number(fields)?).map_err(|_| Damage("a unit is no number"))?;
        }
    }
    for tensor in tensors.iter_mut().filter(|tensor| tensor.coding.is_lossy()) {
        tensor.bound = f64::from_le_bytes(array(fields)?);
    }
    for tensor in tensors.iter_mut().filter(|tensor| tensor.coding.is_lossy()) {
        tensor.max_abs_error = f32::from_le_bytes(array(fields)?).into();
    }
    let len = |tensor: &TensorEntry| tensor.extent.end - tensor.extent.start;
    let factors = tensors.iter().filter(|tensor| tensor.coding.has_factors()).count() as u64;
    let skeleton = tiles_of(logical_len - tensors.iter().map(len).sum::<u64>());
    let total = tensors.iter().map(|tensor| tiles_of(len(tensor))).sum::<u64>().saturating_add(skeleton);
    let mut tiles = tiles(fields, total.saturating_add(factors))?.into_iter();
    later_fields(fields)?;
    for tensor in tensors.iter_mut().filter(|tensor| tensor.coding.has_factors()) {
        tensor.factors = tiles.next();
    }
    for tensor in &mut tensors {
        tensor.tiles = tiles.by_ref().take(tiles_of(len(tensor)) as usize).collect();
    }
    Ok(Index { origin, profile, container, note, generations, error_updates, tensors, skeleton: tiles.collect() })
}

/// Fields from later versions stand at the end, each with its length. A reader may skip a field with an even number,
/// and must not skip one with an odd number.
fn later_fields(fields: &mut Fields) -> Result<(), Damage> {
    while !fields.is_empty() {
        let must_be_understood = number(fields)? % 2 == 1;
        let length = count(fields, 1)?;
        take(fields, length)?;
        if must_be_understood {
            return Err(Damage("a newer version of stepfs wrote it"));
        }
    }
    Ok(())
}

/// Where each tensor begins behind the one before, then their lengths.
fn extents(fields: &mut Fields, tensors: &mut [TensorEntry], logical_len: u64) -> Result<(), Damage> {
    const BEYOND: Damage = Damage("its tensors reach beyond the file");
    for tensor in &mut *tensors {
        tensor.extent.start = number(fields)?;
    }
    let mut end = 0u64;
    for tensor in tensors {
        let start = end.checked_add(tensor.extent.start).ok_or(BEYOND)?;
        end = start.checked_add(number(fields)?).filter(|end| *end <= logical_len).ok_or(BEYOND)?;
        tensor.extent = start..end;
    }
    Ok(())
}

fn tiles(fields: &mut Fields, count: u64) -> Result<Vec<Tile>, Damage> {
    let fits = |count: &usize| count.checked_mul(HASHES + 2).is_some_and(|bytes| bytes <= fields.len());
    let count = usize::try_from(count).ok().filter(fits);
    let count = count.ok_or(Damage("the number of tiles does not match the bytes"))?;
    let mut tiles = Vec::with_capacity(count);
    for _ in 0..count {
        let stored = u32::try_from(number(fields)?).map_err(|_| Damage("a tile's payload is too long"))?;
        tiles.push(Tile { offset: 0, stored, payload_hash: 0, decoded_hash: 0 });
    }
    let mut expected = HEADER_BYTES as u64;
    for tile in &mut tiles {
        tile.offset = expected.wrapping_add(signed(fields)? as u64);
        expected = tile.offset.wrapping_add(tile.stored.into());
    }
    for tile in &mut tiles {
        tile.payload_hash = u32::from_le_bytes(array(fields)?);
    }
    for tile in &mut tiles {
        tile.decoded_hash = u64::from_le_bytes(array(fields)?);
    }
    Ok(tiles)
}
