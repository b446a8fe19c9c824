//! Any element type, bit for bit: NaN payloads, the sign of zero, everything.
//!
//! With a parent tile, elements become differences to it: of integers, or of floats as integers in the order of their
//! values, zigzag. So small updates have zeros in their upper bytes. Then each byte place forms one plane, and each
//! plane is coded by itself. The lower planes of a float's mantissa are usually noise and stay raw.
//!
//! If the parent's exponents predict the size of the differences well enough, the differences are sorted by them
//! instead (`sections`).
//!
//! The payload of no data is empty. Otherwise its first byte is 1 if the tile is a difference to its parent, and 0 if
//! not. Then each plane follows, the lowest byte place first, with its length and its payload
//! ([`crate::entropy::bytes`]). First byte 2: a difference in sections. Data that is not whole elements is a sequence
//! of bytes. First byte 3 or 4, for single bytes only: they repeat, in themselves or in the parent (`repeats`).

mod repeats;
mod sections;

use std::borrow::Cow;

use super::ordered::{Order, Word};
use super::{Corrupt, Dtype, planes};
use crate::entropy::cost::entropy_bits;
use crate::entropy::scratch::Scratch;
use crate::entropy::simd::Level;
use crate::entropy::{symbols, varint};

/// Number of pieces of a tile that are sampled to decide how its parent helps, and elements of each.
const SAMPLES: usize = 8;
const SAMPLE_ELEMENTS: usize = 256;
/// The same for the choice between planes and sections; sections have many more frequencies to estimate.
const SECTION_SAMPLE_ELEMENTS: usize = 2048;
/// Share of the planes' bits that sections must save: they take longer to decode.
const SECTIONS_SAVE: f64 = 0.005;

/// Kinds of payload: alone, as difference, and as difference in sections.
const ALONE: u8 = 0;
const DIFFERENCE: u8 = 1;
const SECTIONS: u8 = 2;
const REPEATS: u8 = 3;
const REPEATS_OF_PARENT: u8 = 4;

/// Calls a generic function for the words that elements of this type consist of.
macro_rules! for_word {
    ($dtype:expr, $data:expr, |$order:ident| $function:ident::<_>($($arg:expr),*)) => {{
        let (width, $order) = word_of($dtype, $data);
        match width {
            1 => $function::<u8>($($arg),*),
            2 => $function::<u16>($($arg),*),
            4 => $function::<u32>($($arg),*),
            _ => $function::<u64>($($arg),*),
        }
    }};
}

/// Width in bytes and order of the words; single bytes if `data` is not whole elements.
fn word_of(dtype: Dtype, data: &[u8]) -> (usize, Order) {
    if !data.len().is_multiple_of(dtype.size()) {
        return (1, Order::Integer);
    }
    match dtype {
        Dtype::U8 | Dtype::I8 | Dtype::Bool => (1, Order::Integer),
        Dtype::F8E4m3 | Dtype::F8E5m2 => (1, Order::Float),
        Dtype::I16 | Dtype::U16 => (2, Order::Integer),
        Dtype::F16 | Dtype::Bf16 => (2, Order::Float),
        Dtype::I32 | Dtype::U32 => (4, Order::Integer),
        Dtype::F32 | Dtype::C64 => (4, Order::Float),
        Dtype::I64 | Dtype::U64 => (8, Order::Integer),
        Dtype::F64 | Dtype::C128 => (8, Order::Float),
    }
}

/// Appends the payload of `data`. Uses a parent of the same length if it helps.
pub fn encode(dtype: Dtype, data: &[u8], parent: Option<&[u8]>, out: &mut Vec<u8>) {
    if data.is_empty() {
        return;
    }
    let parent = parent.filter(|parent| parent.len() == data.len());
    if let Some((kind, frame)) = repeats_of(dtype, data, parent) {
        out.push(kind);
        out.extend_from_slice(&frame);
        return;
    }
    let parent = parent.filter(|parent| parent_helps(dtype, data, parent));
    if let Some(parent) = parent.filter(|parent| sections_help(dtype, data, parent)) {
        out.push(SECTIONS);
        if sections::encode(dtype, data, parent, out) {
            return;
        }
        out.pop();
    }
    out.push(if parent.is_some() { DIFFERENCE } else { ALONE });
    let planes = for_word!(dtype, data, |order| split::<_>(data, parent, order));
    for plane in planes.chunks(data.len() / word_of(dtype, data).0) {
        varint::put_bytes(out, |out| symbols::encode(plane, out));
    }
}

/// Fills `out` from a payload. `parent` must be the encoder's, if it used one.
pub fn decode(dtype: Dtype, mut payload: &[u8], parent: Option<&[u8]>, out: &mut [u8]) -> Result<(), Corrupt> {
    if out.is_empty() {
        return if payload.is_empty() { Ok(()) } else { Err(Corrupt("unexpected data")) };
    }
    let (&kind, rest) = payload.split_first().ok_or(Corrupt("no data"))?;
    payload = rest;
    let parent = match (kind, parent) {
        (ALONE, _) => None,
        (SECTIONS, Some(parent)) => return sections::decode(dtype, payload, parent, out),
        (REPEATS | REPEATS_OF_PARENT, _) if word_of(dtype, out).0 != 1 => return Err(Corrupt("bytes of wider words")),
        (REPEATS, _) => return repeats::decode(payload, None, out),
        (REPEATS_OF_PARENT, Some(parent)) => return repeats::decode(payload, Some(parent), out),
        (DIFFERENCE, Some(parent)) if parent.len() == out.len() => Some(parent),
        (DIFFERENCE | SECTIONS | REPEATS_OF_PARENT, _) => return Err(Corrupt("difference to a missing parent")),
        _ => return Err(Corrupt("kind of lossless payload")),
    };
    for_word!(dtype, out, |order| join::<_>(payload, parent, order, out))
}

/// Estimated bits of `data`, by order-0 entropies; of single bytes that repeat, the bits that they take. For decisions
/// on samples.
pub fn estimate(dtype: Dtype, data: &[u8], parent: Option<&[u8]>) -> f64 {
    let parent = parent.filter(|parent| parent.len() == data.len());
    if let Some((_, frame)) = repeats_of(dtype, data, parent) {
        return 8.0 * frame.len() as f64;
    }
    let planes = planes_bits(dtype, data, parent);
    parent.map_or(planes, |parent| planes.min(sections::bits(dtype, data, parent, 1.0)))
}

fn planes_bits(dtype: Dtype, data: &[u8], parent: Option<&[u8]>) -> f64 {
    let planes = for_word!(dtype, data, |order| split::<_>(data, parent, order));
    let plane = (data.len() / word_of(dtype, data).0).max(1);
    planes.chunks(plane).map(|plane| entropy_bits(&symbols::histogram(plane))).sum()
}

/// The kind and the frame of single bytes that repeat, if that is smaller than their plane.
fn repeats_of(dtype: Dtype, data: &[u8], parent: Option<&[u8]>) -> Option<(u8, Vec<u8>)> {
    if word_of(dtype, data).0 != 1 || parent.is_some_and(|parent| parent == data) {
        return None;
    }
    // Words of one byte have the order of integers or of floats; their differences are equally frequent.
    let alone = |piece: &[u8]| entropy_bits(&symbols::histogram(piece));
    if !repeats::may_help(data, parent, alone) {
        return None;
    }
    let frame = repeats::encode(data, parent)?;
    let planes = parent.map_or(alone(data), |parent| alone(data).min(planes_bits(dtype, data, Some(parent))));
    let kind = if parent.is_some() { REPEATS_OF_PARENT } else { REPEATS };
    (8.0 * (frame.len() as f64) < planes).then_some((kind, frame))
}

/// True if differences to the parent look cheaper.
fn parent_helps(dtype: Dtype, data: &[u8], parent: &[u8]) -> bool {
    let (data, parent) = (sample(dtype, data, SAMPLE_ELEMENTS), sample(dtype, parent, SAMPLE_ELEMENTS));
    planes_bits(dtype, &data, Some(&parent)) < planes_bits(dtype, &data, None)
}

/// True if they look cheaper still in sections.
fn sections_help(dtype: Dtype, data: &[u8], parent: &[u8]) -> bool {
    let all = data.len() as f64;
    let (data, parent) = [data, parent].map(|of| sample(dtype, of, SECTION_SAMPLE_ELEMENTS)).into();
    let share = all / data.len() as f64;
    sections::bits(dtype, &data, &parent, share)
        < (1.0 - SECTIONS_SAVE) * share * planes_bits(dtype, &data, Some(&parent))
}

/// Pieces spread over a tile; all of a small one.
fn sample(dtype: Dtype, of: &[u8], elements: usize) -> Cow<'_, [u8]> {
    let piece = elements * dtype.size();
    if of.len() <= SAMPLES * piece {
        return Cow::Borrowed(of);
    }
    let stride = of.len() / SAMPLES / dtype.size() * dtype.size();
    Cow::Owned(of.chunks(stride).take(SAMPLES).flat_map(|chunk| &chunk[..piece]).copied().collect())
}

fn split<T: Word>(data: &[u8], parent: Option<&[u8]>, order: Order) -> Scratch {
    let mut planes = Scratch::new(data.len());
    planes::split::<T>(Level::detect(), T::elements(data), parent.map(T::elements), order, &mut planes);
    planes
}

fn join<T: Word>(mut payload: &[u8], parent: Option<&[u8]>, order: Order, out: &mut [u8]) -> Result<(), Corrupt> {
    let out = T::elements_mut(out);
    let mut buffers: [Scratch; 8] = Default::default();
    let mut planes = [[].as_slice(); 8];
    for (plane, buffer) in planes.iter_mut().zip(&mut buffers).take(T::BYTES) {
        *plane = symbols::decode_borrowed(varint::take_bytes(&mut payload)?, out.len(), buffer)?;
    }
    Corrupt::when(!payload.is_empty(), "bytes after the planes")?;
    planes::join::<T>(Level::detect(), &planes[..T::BYTES], parent.map(T::elements), order, out);
    Ok(())
}

#[cfg(test)]
mod tests;
