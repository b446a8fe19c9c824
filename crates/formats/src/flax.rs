//! Flax's msgpack (`flax.serialization.to_bytes`): one mapping, in which arrays are extensions of type 1, and numpy's
//! scalars of type 3.
//!
//! Such an extension is msgpack again: a list of the shape, the type's name and the elements as bytes. Flax cuts
//! arrays above 1 GiB into chunks; each chunk is an array of one dimension here. The format has no magic number, so
//! all of the file must be one such mapping.
//!
//! Bounds: 128 mappings in each other, 2^18 arrays, as many other values, paths of 4096 bytes and 64 MiB together.
//! Beyond a bound a file is opaque.

use super::input::Input;
use super::read::{Fail, bad, bytes, refuse_if, start, unless_bad};
use super::role::{self, Context};
use super::view::dtype_named;
use super::{Description, Kind, ReadAt, Role, Tensor, named, optax, path};
use codec::Dtype;

const MAX_DEPTH: usize = 128;
const MAX_ARRAYS: usize = 1 << 18;
const MAX_PATH: usize = 4096;
const MAX_PATHS: usize = 64 << 20;
/// Longest key, and longest name of a type.
const MAX_KEY: u64 = 1 << 10;
/// Most dimensions of an array, as in numpy.
const MAX_DIMS: u64 = 64;

/// The types of extensions that are an array, and a single element in the same form.
const ARRAY: u8 = 1;
const ELEMENT: u8 = 3;

/// A mapping or a list that is being read.
struct Frame {
    /// Entries that are left.
    left: u64,
    /// The next one's number, in a list.
    index: Option<u64>,
    path_len: usize,
}

/// A value by its first bytes.
enum Value {
    /// `nil`, a truth value or a float, which have been passed over.
    Scalar,
    Int(u64),
    Str(u64),
    Bin(u64),
    List(u64),
    Map(u64),
    Ext(u8, u64),
}

/// Describes the file, or `None` if it is no such mapping.
pub(super) fn describe(src: &dyn ReadAt, size: u64) -> Result<Option<Description>, Fail> {
    if !matches!(start(src, size)?, Some([0x81..=0x8f | 0xde | 0xdf])) {
        return Ok(None);
    }
    let found = unless_bad(arrays(&mut Input::new("msgpack", src, 0, size), size))?;
    let Some((mut tensors, others)) = found else { return Ok(None) };
    if tensors.is_empty() || Description::has_twins(&tensors) {
        return Ok(None);
    }
    let training = optax::relate(&mut tensors, &others);
    Ok(Some(Description::new(Kind::Flax, tensors, training)))
}

/// The arrays of the mapping that the input is, and the paths of other values and of empty mappings.
fn arrays(input: &mut Input, size: u64) -> Result<(Vec<Tensor>, Vec<String>), Fail> {
    let (mut tensors, mut others, mut paths) = (Vec::new(), Vec::new(), 0);
    let mut path = String::new();
    let mut frames: Vec<Frame> = Vec::new();
    let Value::Map(left) = value(input)? else { return bad("msgpack: no mapping") };
    frames.push(Frame { left, index: None, path_len: 0 });
    let mut text = Vec::new();
    while let Some(frame) = frames.last_mut() {
        path.truncate(frame.path_len);
        if frame.left == 0 {
            frames.pop();
            continue;
        }
        frame.left -= 1;
        if !path.is_empty() {
            path.push('/');
        }
        match &mut frame.index {
            Some(index) => {
                path.push_str(&index.to_string());
                *index += 1;
            }
            None => {
                string(input, &mut text)?;
                let Ok(key) = std::str::from_utf8(&text) else { return bad("msgpack: a key that is no text") };
                path::push_text(&mut path, key);
            }
        }
        refuse_if(path.len() > MAX_PATH, "msgpack: a path of more than 4096 bytes")?;
        let value = value(input)?;
        if !matches!(value, Value::List(1..) | Value::Map(1..) | Value::Ext(ARRAY | ELEMENT, _)) {
            paths += path.len();
            refuse_if(others.len() == MAX_ARRAYS || paths > MAX_PATHS, "msgpack: too many values")?;
            others.push(path.clone());
        }
        match value {
            Value::Scalar | Value::Int(_) => {}
            Value::Str(len) | Value::Bin(len) => input.skip(len)?,
            Value::List(left) => frames.push(Frame { left, index: Some(0), path_len: path.len() }),
            Value::Map(left) => frames.push(Frame { left, index: None, path_len: path.len() }),
            Value::Ext(ARRAY | ELEMENT, len) => {
                paths += path.len();
                refuse_if(tensors.len() == MAX_ARRAYS || paths > MAX_PATHS, "msgpack: too many arrays")?;
                tensors.extend(array(input, len, &path)?);
            }
            Value::Ext(_, len) => input.skip(len)?,
        }
        refuse_if(frames.len() > MAX_DEPTH, "msgpack: nested too deeply")?;
    }
    refuse_if(input.position() != size, "msgpack: bytes behind the mapping")?;
    Ok((tensors, others))
}

/// The array in an extension of this length; `None` for one without elements.
fn array(input: &mut Input, len: u64, path: &str) -> Result<Option<Tensor>, Fail> {
    let end = input.position().saturating_add(len);
    let (Value::List(3), Value::List(dims @ 0..=MAX_DIMS)) = (value(input)?, value(input)?) else {
        return bad("msgpack: no array");
    };
    let mut shape = Vec::new();
    for _ in 0..dims {
        let Value::Int(dim) = value(input)? else { return bad("msgpack: a shape that is no numbers") };
        shape.push(dim);
    }
    let mut name = Vec::new();
    string(input, &mut name)?;
    let Value::Bin(len) = value(input)? else { return bad("msgpack: elements that are no bytes") };
    let start = input.position();
    input.skip(len)?;
    refuse_if(input.position() != end, "msgpack: an array is not as long as its extension")?;
    let dtype = std::str::from_utf8(&name).ok().and_then(dtype_named);
    if len == 0 {
        return Ok(None);
    }
    let (elements, role) = match dtype {
        Some(dtype) if bytes(&shape, dtype.size() as u64) == Some(len) => ((dtype, shape), role(path, dtype)),
        Some(_) => return bad("msgpack: a shape does not fit its bytes"),
        None => ((Dtype::U8, vec![len]), named::UNKNOWN),
    };
    Ok(Some(Tensor::found(path.to_string(), elements, role, start..end)))
}

/// The role by the keys on the way to an array.
fn role(path: &str, dtype: Dtype) -> (Role, &'static str) {
    let above = path.rsplit_once('/').map_or("", |(above, _)| above);
    let context = above.split('/').filter(|key| !key.is_empty()).fold(Context::Open, role::below);
    match role::tensor(context, true, path, dtype) {
        (Role::Weight, _) => (Role::Weight, "floating point, in Flax's msgpack"),
        other => other,
    }
}

/// The next text, which is a key or a name.
fn string(input: &mut Input, text: &mut Vec<u8>) -> Result<(), Fail> {
    match value(input)? {
        Value::Str(len @ 0..=MAX_KEY) => {
            text.clear();
            input.take(len as usize, text)
        }
        _ => bad("msgpack: no key"),
    }
}

/// The beginning of the next value.
fn value(input: &mut Input) -> Result<Value, Fail> {
    fn uint<const N: usize>(input: &mut Input) -> Result<u64, Fail> {
        Ok(input.array::<N>()?.iter().fold(0, |n, byte| n << 8 | u64::from(*byte)))
    }
    let first = input.byte()?;
    Ok(match first {
        0x00..=0x7f => Value::Int(first.into()),
        0x80..=0x8f => Value::Map((first & 0x0f).into()),
        0x90..=0x9f => Value::List((first & 0x0f).into()),
        0xa0..=0xbf => Value::Str((first & 0x1f).into()),
        0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => Value::Scalar,
        0xc4 => Value::Bin(uint::<1>(input)?),
        0xc5 => Value::Bin(uint::<2>(input)?),
        0xc6 => Value::Bin(uint::<4>(input)?),
        0xc7..=0xc9 => {
            let len = match first {
                0xc7 => uint::<1>(input)?,
                0xc8 => uint::<2>(input)?,
                _ => uint::<4>(input)?,
            };
            Value::Ext(input.byte()?, len)
        }
        0xca | 0xcb | 0xd0..=0xd3 => {
            input.skip(match first {
                0xd0 => 1,
                0xd1 => 2,
                0xca | 0xd2 => 4,
                _ => 8,
            })?;
            Value::Scalar
        }
        0xcc => Value::Int(uint::<1>(input)?),
        0xcd => Value::Int(uint::<2>(input)?),
        0xce => Value::Int(uint::<4>(input)?),
        0xcf => Value::Int(uint::<8>(input)?),
        0xd4..=0xd8 => Value::Ext(input.byte()?, 1 << (first - 0xd4)),
        0xd9 => Value::Str(uint::<1>(input)?),
        0xda => Value::Str(uint::<2>(input)?),
        0xdb => Value::Str(uint::<4>(input)?),
        0xdc => Value::List(uint::<2>(input)?),
        0xdd => Value::List(uint::<4>(input)?),
        0xde => Value::Map(uint::<2>(input)?),
        0xdf => Value::Map(uint::<4>(input)?),
        0xc1 => return bad("msgpack: a byte that is never used"),
    })
}
