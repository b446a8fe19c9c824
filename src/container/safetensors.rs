//! The header of a safetensors file: u64 length, JSON, payloads. Little-endian.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::proof::Training;
use super::read::{Fail, bad, cut_short};
use super::{Description, Kind, ReadAt, Tensor, named};
use crate::codec::Dtype;

/// Largest header looked at: the reference implementation's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// Most dimensions of a tensor. torch and numpy stop at 64; without a limit a header could list millions.
const MAX_DIMS: usize = 64;

/// Describes the file. `None` if it does not begin like a safetensors file.
pub(super) fn describe(src: &dyn ReadAt, size: u64) -> Result<Option<Description>, Fail> {
    let mut start = [0; 9];
    if size < 10 {
        return Ok(None);
    }
    src.read_exact_at(&mut start, 0)?;
    if start[8] != b'{' {
        return Ok(None);
    }
    let mut len = [0; 8];
    len.copy_from_slice(&start[..8]);
    let len = u64::from_le_bytes(len);
    // Many a file of another format has this brace there, but no such length.
    if len > MAX_HEADER {
        return Ok(None);
    }
    let payload = len + 8;
    if payload > size {
        return cut_short("safetensors: header goes beyond the end of the file");
    }
    let mut json = vec![0; len as usize];
    src.read_exact_at(&mut json, 8)?;
    let header: Header = match serde_json::from_slice(&json) {
        Ok(header) => header,
        Err(e) => return bad(format!("safetensors: the header is not valid: {e}")),
    };
    drop(json);
    let (tensors, training) = tensors(header, payload, size)?;
    Ok(Some(Description::new(Kind::Safetensors, tensors, training)))
}

fn tensors(header: Header, payload: u64, size: u64) -> Result<(Vec<Tensor>, Training), Fail> {
    let mut tensors = Vec::with_capacity(header.0.len());
    for (path, info) in header.0 {
        let (from, to) = info.data_offsets;
        if from > to || to > size - payload {
            return cut_short("safetensors: a tensor lies beyond the end of the file");
        }
        let len = to - from;
        let elements = info.shape.0.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        let Some(elements) = elements else {
            return bad("safetensors: a shape is too large");
        };
        let extent = payload + from..payload + to;
        let Some(dtype) = Dtype::from_name(&info.dtype) else {
            if len > 0 {
                tensors.push(Tensor::found(path, (Dtype::U8, vec![len]), named::UNKNOWN, extent));
            }
            continue;
        };
        if elements.checked_mul(dtype.size() as u64) != Some(len) {
            return bad("safetensors: a shape does not fit its offsets");
        }
        if len == 0 {
            continue;
        }
        let role = named::role(&path, dtype, "floating point, in a safetensors file");
        tensors.push(Tensor::found(path, (dtype, info.shape.0), role, extent));
    }
    tensors.sort_by_key(|t| t.extent.start);
    if tensors.windows(2).any(|w| w[1].extent.start < w[0].extent.end) {
        return bad("safetensors: tensors overlap");
    }
    // The format's own library wants every byte to be some tensor's, and refuses to load anything else.
    let mut end = payload;
    for tensor in &tensors {
        if tensor.extent.start != end {
            return bad("safetensors: bytes between its tensors belong to none");
        }
        end = tensor.extent.end;
    }
    if end != size {
        return bad("safetensors: bytes behind its tensors");
    }
    if Description::has_twins(&tensors) {
        return bad("safetensors: two tensors have the same name");
    }
    let training = named::relate(&mut tensors);
    Ok((tensors, training))
}

/// The entries of the JSON object, in order, with duplicates.
struct Header(Vec<(String, Info)>);

#[derive(serde::Deserialize)]
struct Info {
    dtype: String,
    shape: Shape,
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    if key == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((key, map.next_value()?));
                    }
                }
                Ok(Header(entries))
            }
        }
        d.deserialize_map(Entries)
    }
}

/// A shape of at most [`MAX_DIMS`] dimensions.
struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Dims;
        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a list of sizes")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut dims = Vec::new();
                while let Some(dim) = seq.next_element()? {
                    if dims.len() == MAX_DIMS {
                        return Err(A::Error::custom("more than 64 dimensions"));
                    }
                    dims.push(dim);
                }
                Ok(Shape(dims))
            }
        }
        d.deserialize_seq(Dims)
    }
}
