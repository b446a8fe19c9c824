//! The header of a safetensors file: u64 length, JSON, payloads. Little-endian.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::named::{self, Array};
use super::read::{Fail, bad, cut_short, refuse_if, start};
use super::{Description, Kind, ReadAt};
use codec::Dtype;

/// Largest header looked at: the reference implementation's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// Most dimensions of a tensor. torch and numpy stop at 64; without a limit a header could list millions.
const MAX_DIMS: usize = 64;

/// The arrays that the header lists, unchecked, and where their bytes begin. `None` if the file does not begin like a
/// safetensors file.
pub(super) fn arrays(src: &dyn ReadAt, size: u64) -> Result<Option<(u64, Vec<Array>)>, Fail> {
    let Some([len @ .., b'{', _]) = start::<10>(src, size)? else { return Ok(None) };
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
    let mut arrays = Vec::with_capacity(header.0.len());
    for (name, Info { dtype, shape, data_offsets: (from, to) }) in header.0 {
        let (Some(start), Some(end)) = (payload.checked_add(from), payload.checked_add(to)) else {
            return bad("safetensors: an offset is too large");
        };
        arrays.push(Array { name, dtype: Dtype::from_name(&dtype), shape: shape.0, extent: start..end });
    }
    Ok(Some((payload, arrays)))
}

/// Describes the file. `None` if it does not begin like a safetensors file.
pub(super) fn describe(src: &dyn ReadAt, size: u64) -> Result<Option<Description>, Fail> {
    let Some((payload, arrays)) = arrays(src, size)? else { return Ok(None) };
    let description = named::describe(Kind::Safetensors, size, arrays, "floating point, in a safetensors file")?;
    // The format's own library wants every byte to be some tensor's, and refuses to load anything else.
    let mut end = payload;
    for tensor in &description.tensors {
        refuse_if(tensor.extent.start != end, "safetensors: bytes between its tensors belong to none")?;
        end = tensor.extent.end;
    }
    refuse_if(end != size, "safetensors: bytes behind its tensors")?;
    Ok(Some(description))
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
