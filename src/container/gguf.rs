//! GGUF, as llama.cpp and its converters write it: a header with keys and values, a table of tensors, and their
//! elements.
//!
//! It holds a model and no training state, so only two states of a file can prove a weight. Blocks of quantized types
//! are bytes here.
//!
//! Bounds: headers of 64 MiB, 2^17 tensors. Beyond a bound a file is opaque.

use super::pickle::Input;
use super::read::{Fail, bad, begins_with};
use super::{Description, Kind, ReadAt, Tensor, named, path};
use crate::codec::Dtype;

const MAGIC: [u8; 4] = *b"GGUF";
/// Largest header. The vocabulary of a tokenizer stands in it.
const MAX_HEADER: u64 = 64 << 20;
const MAX_TENSORS: u64 = 1 << 17;
/// Longest key and longest name of a tensor.
const MAX_NAME: u64 = 1 << 10;
/// Most dimensions of a tensor, as in ggml.
const MAX_DIMS: u32 = 8;
/// Alignment of tensors where no key tells it.
const ALIGNMENT: u64 = 32;

/// Types of values.
const TEXT: u32 = 8;
const LIST: u32 = 9;
const U32: u32 = 4;

/// Describes the file, or `None` if its beginning is not that of a little-endian GGUF file of version 2 or 3.
pub(super) fn describe(src: &dyn ReadAt, size: u64) -> Result<Option<Description>, Fail> {
    if !begins_with(src, size, &MAGIC)? {
        return Ok(None);
    }
    match read(src, size) {
        Ok(description) => Ok(description),
        // The reader's words are those of another format.
        Err(Fail::Bad(why) | Fail::CutShort(why)) => bad(format!("GGUF: {}", why.trim_start_matches("pickle: "))),
        Err(error) => Err(error),
    }
}

/// One line of the table.
struct Info {
    path: String,
    shape: Vec<u64>,
    kind: u32,
    offset: u64,
}

fn read(src: &dyn ReadAt, size: u64) -> Result<Option<Description>, Fail> {
    let mut input = Input::new(src, MAGIC.len() as u64, size.min(MAX_HEADER));
    let input = &mut input;
    if !matches!(u32::from_le_bytes(input.array()?), 2 | 3) {
        return Ok(None);
    }
    let (count, pairs) = (u64::from_le_bytes(input.array()?), u64::from_le_bytes(input.array()?));
    if count > MAX_TENSORS {
        return bad("more than 131,072 tensors");
    }
    let mut alignment = ALIGNMENT;
    let mut text = Vec::new();
    for _ in 0..pairs {
        string(input, &mut text)?;
        let kind = u32::from_le_bytes(input.array()?);
        if (text.as_slice(), kind) == (b"general.alignment", U32) {
            alignment = u32::from_le_bytes(input.array()?).into();
        } else {
            skip(input, kind)?;
        }
    }
    if !alignment.is_power_of_two() {
        return bad("an alignment that is no power of two");
    }
    let mut infos = Vec::new();
    for _ in 0..count {
        string(input, &mut text)?;
        let mut path = String::new();
        path::push_text(&mut path, &String::from_utf8_lossy(&text));
        let dims = u32::from_le_bytes(input.array()?);
        if dims > MAX_DIMS {
            return bad("more than 8 dimensions");
        }
        let mut shape = Vec::new();
        for _ in 0..dims {
            shape.push(u64::from_le_bytes(input.array()?));
        }
        // ggml names the dimension first whose elements lie side by side.
        shape.reverse();
        let (kind, offset) = (u32::from_le_bytes(input.array()?), u64::from_le_bytes(input.array()?));
        infos.push(Info { path, shape, kind, offset });
    }
    let Some(data) = input.position().checked_next_multiple_of(alignment) else {
        return bad("an alignment beyond the end");
    };
    let mut tensors = Vec::new();
    let mut unknown = 0u64;
    for info in infos {
        match tensor(info, data, size)? {
            Some(tensor) => tensors.push(tensor),
            None => unknown += 1,
        }
    }
    tensors.sort_by_key(|tensor| tensor.extent.start);
    if tensors.windows(2).any(|pair| pair[1].extent.start < pair[0].extent.end) {
        return bad("tensors overlap");
    }
    if Description::has_twins(&tensors) {
        return bad("two tensors have the same name");
    }
    let note = (unknown > 0).then(|| format!("GGUF: {unknown} tensors are of types that stepfs does not know"));
    let training = named::relate(&mut tensors);
    Ok(Some(Description { note, ..Description::new(Kind::Gguf, tensors, training) }))
}

/// The tensor in a line of the table; `None` for one without elements, or of an unknown type.
fn tensor(Info { path, shape, kind, offset }: Info, data: u64, size: u64) -> Result<Option<Tensor>, Fail> {
    let Some((dtype, block, bytes)) = element(kind) else { return Ok(None) };
    let elements = shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim));
    let len = elements.filter(|n| n.is_multiple_of(block)).and_then(|n| (n / block).checked_mul(bytes));
    let start = data.checked_add(offset);
    let range = start.zip(len).and_then(|(start, len)| Some(start..start.checked_add(len)?));
    let Some(extent) = range.filter(|range| range.end <= size) else {
        return bad("a tensor goes beyond the end");
    };
    if extent.is_empty() {
        return Ok(None);
    }
    let (elements, role) = match dtype {
        Some(dtype) => ((dtype, shape), named::role(&path, dtype, "floating point, in a GGUF file")),
        None => ((Dtype::U8, vec![extent.end - extent.start]), named::UNKNOWN),
    };
    Ok(Some(Tensor::found(path, elements, role, extent)))
}

/// The type of elements that a number means, if they are no blocks; elements of a block, and its bytes.
fn element(kind: u32) -> Option<(Option<Dtype>, u64, u64)> {
    let plain = |dtype: Dtype| Some((Some(dtype), 1, dtype.size() as u64));
    let blocks = |elements, bytes| Some((None, elements, bytes));
    match kind {
        0 => plain(Dtype::F32),
        1 => plain(Dtype::F16),
        24 => plain(Dtype::I8),
        25 => plain(Dtype::I16),
        26 => plain(Dtype::I32),
        27 => plain(Dtype::I64),
        28 => plain(Dtype::F64),
        30 => plain(Dtype::Bf16),
        2 => blocks(32, 18),
        3 => blocks(32, 20),
        6 => blocks(32, 22),
        7 => blocks(32, 24),
        8 => blocks(32, 34),
        10 => blocks(256, 84),
        11 => blocks(256, 110),
        12 => blocks(256, 144),
        13 => blocks(256, 176),
        14 => blocks(256, 210),
        15 => blocks(256, 292),
        _ => None,
    }
}

/// A text with its length before it.
fn string(input: &mut Input, text: &mut Vec<u8>) -> Result<(), Fail> {
    let len = u64::from_le_bytes(input.array()?);
    if len > MAX_NAME {
        return bad("a name of more than 1024 bytes");
    }
    text.clear();
    input.take(len as usize, text)
}

/// Passes over a value of this type.
fn skip(input: &mut Input, kind: u32) -> Result<(), Fail> {
    let text = |input: &mut Input| {
        let len = u64::from_le_bytes(input.array()?);
        input.skip(len)
    };
    match kind {
        TEXT => text(input),
        LIST => {
            let (kind, count) = (u32::from_le_bytes(input.array()?), u64::from_le_bytes(input.array()?));
            if kind == TEXT {
                // Each takes at least the 8 bytes of its length, so the header's end bounds a count that lies.
                return (0..count).try_for_each(|_| text(input));
            }
            match width(kind).and_then(|width| count.checked_mul(width)) {
                Some(bytes) => input.skip(bytes),
                None => bad("a list of lists, or of a type that stepfs does not know"),
            }
        }
        _ => match width(kind) {
            Some(width) => input.skip(width),
            None => bad("a value of a type that stepfs does not know"),
        },
    }
}

/// Bytes of a number or a truth value.
fn width(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        U32 | 5 | 6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}
