//! Any element type, bit for bit: NaN payloads, the sign of zero, everything.
//!
//! With a parent tile, elements become differences to it: of integers, or of floats as integers in the order of their
//! values, zigzag, so that small updates have zeros in their upper bytes. Then one plane per byte place,
//! each coded for itself; the lower planes of a float's mantissa are usually noise and stay raw.
//!
//! Payload: nothing for no data; else one byte, 1 if the tile is a difference to its parent and 0 if not; then for each
//! plane, the lowest byte place first, its length and its payload ([`crate::entropy::bytes`]). Data that is not whole
//! elements is a sequence of bytes.

use super::ordered::{Order, Word};
use super::{Corrupt, Dtype, planes};
use crate::entropy::level::Level;
use crate::entropy::scratch::Scratch;
use crate::entropy::{bytes, varint};

/// Pieces of a tile looked at to decide whether its parent helps, and elements of each.
const SAMPLES: usize = 8;
const SAMPLE_ELEMENTS: usize = 256;

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

/// Width in bytes and order of the words; single bytes where `data` is not whole elements.
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

/// Appends the payload of `data`. A parent is used where it helps, and can only if it has the same length.
pub fn encode(dtype: Dtype, data: &[u8], parent: Option<&[u8]>, out: &mut Vec<u8>) {
    if data.is_empty() {
        return;
    }
    let parent = parent.filter(|parent| parent.len() == data.len() && parent_helps(dtype, data, parent));
    out.push(u8::from(parent.is_some()));
    let planes = for_word!(dtype, data, |order| split::<_>(data, parent, order));
    for plane in planes.chunks(data.len() / word_of(dtype, data).0) {
        varint::put_bytes(out, |out| bytes::encode(plane, out));
    }
}

/// Fills `out` from a payload. `parent` must be what the encoder had, as far as it was used.
pub fn decode(dtype: Dtype, mut payload: &[u8], parent: Option<&[u8]>, out: &mut [u8]) -> Result<(), Corrupt> {
    if out.is_empty() {
        return if payload.is_empty() { Ok(()) } else { Err(Corrupt("data where none belongs")) };
    }
    let (&delta, rest) = payload.split_first().ok_or(Corrupt("no data"))?;
    payload = rest;
    let parent = match (delta, parent) {
        (0, _) => None,
        (1, Some(parent)) if parent.len() == out.len() => Some(parent),
        (1, _) => return Err(Corrupt("difference to a parent that is not there")),
        _ => return Err(Corrupt("kind of lossless payload")),
    };
    for_word!(dtype, out, |order| join::<_>(payload, parent, order, out))
}

/// Bits that `data` would take, by the order-0 entropy of its planes. For decisions on samples.
pub fn estimate(dtype: Dtype, data: &[u8], parent: Option<&[u8]>) -> f64 {
    let parent = parent.filter(|parent| parent.len() == data.len());
    let planes = for_word!(dtype, data, |order| split::<_>(data, parent, order));
    let plane = (data.len() / word_of(dtype, data).0).max(1);
    planes.chunks(plane).map(|plane| bytes::entropy_bits(&bytes::histogram(plane))).sum()
}

/// Whether differences to the parent look cheaper, from samples spread over the tile.
fn parent_helps(dtype: Dtype, data: &[u8], parent: &[u8]) -> bool {
    let piece = SAMPLE_ELEMENTS * dtype.size();
    if data.len() <= SAMPLES * piece {
        return estimate(dtype, data, Some(parent)) < estimate(dtype, data, None);
    }
    let sample = |of: &[u8]| -> Vec<u8> {
        let stride = of.len() / SAMPLES / dtype.size() * dtype.size();
        of.chunks(stride).take(SAMPLES).flat_map(|chunk| &chunk[..piece]).copied().collect()
    };
    let (data, parent) = (sample(data), sample(parent));
    estimate(dtype, &data, Some(&parent)) < estimate(dtype, &data, None)
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
        *plane = bytes::decode_borrowed(varint::take_bytes(&mut payload)?, out.len(), buffer)?;
    }
    if !payload.is_empty() {
        return Err(Corrupt("bytes behind the planes"));
    }
    planes::join::<T>(Level::detect(), &planes[..T::BYTES], parent.map(T::elements), order, out);
    Ok(())
}

#[cfg(test)]
mod tests;
