//! Chunks of zarr arrays, versions 2 and 3, without compression: each is a file with nothing but elements.
//!
//! Its array's description lies in a directory above: `.zarray` or `zarr.json`. A chunk of two or more dimensions is
//! read here. Its name has as many numbers: `w/0.0`, `w/c.0.0`, `w/c/0/0`. The role follows from all names on the way
//! to it. A moment of an optimizer is in another file than its partner, so only weights can become lossy, and only if
//! two states show that they are trained.
//!
//! Bounds: descriptions of 1 MiB, 32 dimensions.

use std::io;
use std::path::Path;

use serde_json::Value;

use super::kinds::is_real;
use super::proof::Training;
use super::role::{self, Context};
use super::{Description, Kind, ReadAt, Role, Tensor, path};
use crate::codec::Dtype;

const MAX_JSON: u64 = 1 << 20;
const MAX_DIMS: usize = 32;

/// Directories of an optimizer's state that have no other meaning to `role`, but may have a model's names below them.
const STATE: [&str; 5] = ["m", "v", "nu", "trace", "opt_state"];

fn number(text: &str) -> Option<u64> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The numbers in the name of a chunk below its array's directory.
fn place(below: &Path) -> Option<Vec<u64>> {
    let name = below.to_str()?.replace('/', ".");
    name.strip_prefix("c.").unwrap_or(&name).split('.').take(MAX_DIMS + 1).map(number).collect()
}

/// Where the name of a chunk begins in a path, by the number of parts. `w/0/1` could be any file of that name.
fn parts(path: &Path) -> Option<usize> {
    let is_chunk = |below: &Path| place(below).is_some_and(|place| place.len() > 1);
    if is_chunk(Path::new(path.file_name()?)) {
        return Some(1);
    }
    let above =
        path.ancestors().skip(1).take(MAX_DIMS + 1).find(|above| above.file_name().is_some_and(|name| name == "c"))?;
    let below = path.strip_prefix(above.parent()?).ok()?;
    is_chunk(below).then(|| below.iter().count())
}

/// Whether a file may be a chunk, by its path.
pub(super) fn is_chunk(path: &Path) -> bool {
    parts(path).is_some()
}

/// An array, as its description says.
struct Array {
    dtype: Dtype,
    shape: Vec<u64>,
    chunk: Vec<u64>,
}

/// Describes the chunk at `path`; `None` if it is none.
pub(super) fn describe<T: ReadAt>(
    path: &Path,
    size: u64,
    open: impl Fn(&Path) -> io::Result<T>,
) -> Option<Description> {
    let directory = path.ancestors().nth(parts(path)?)?;
    let readers = [(".zarray", Array::of_2 as fn(&Value) -> Option<Array>), ("zarr.json", Array::of_3)];
    let array = readers.iter().find_map(|(name, read)| read(&json(&open(&directory.join(name)).ok()?)?))?;
    let place = place(path.strip_prefix(directory).ok()?).filter(|place| place.len() == array.shape.len())?;
    let elements = array.chunk.iter().try_fold(array.dtype.size() as u64, |size, dim| size.checked_mul(*dim))?;
    let is_within = place.iter().zip(&array.shape).zip(&array.chunk).all(|((at, all), one)| *at < all.div_ceil(*one));
    if elements != size || !is_within || place.len() < 2 {
        return None;
    }
    // The group's own name may have a step in it.
    let mut name = "./".to_string();
    path::push_text(&mut name, directory.file_name()?.to_str()?);
    let role = role(directory, &name[2..], array.dtype);
    let is_whole = array.chunk == array.shape;
    if !is_whole {
        name.push_str(&format!("{place:?}"));
    }
    let mut tensor = Tensor::found(name, (array.dtype, array.chunk), role, 0..size);
    tensor.is_part_of(&array.shape);
    Some(Description::new(Kind::Zarr, vec![tensor], Training::default()))
}

fn role(directory: &Path, name: &str, dtype: Dtype) -> (Role, &'static str) {
    let above = directory.parent().into_iter().flat_map(Path::iter).map(|part| part.to_str().unwrap_or("?"));
    if above.clone().chain(name.split('.')).any(|part| STATE.contains(&part)) {
        return (Role::Optimizer, "below a name of optimizer state, in a zarr array");
    }
    let context = above.fold(Context::Open, role::below);
    match role::tensor(context, true, name, dtype) {
        (Role::Weight, _) => (Role::Weight, "floating point, in a zarr array"),
        other => other,
    }
}

fn json(file: &dyn ReadAt) -> Option<Value> {
    let mut text = vec![0; file.size().min(MAX_JSON) as usize];
    file.read_exact_at(&mut text, 0).ok()?;
    serde_json::from_slice(&text).ok()
}

fn sizes(value: &Value) -> Option<Vec<u64>> {
    value.as_array()?.iter().map(|dim| dim.as_u64().filter(|dim| *dim > 0)).collect()
}

impl Array {
    /// Of `.zarray`.
    fn of_2(json: &Value) -> Option<Array> {
        let is_empty = |name: &str| json[name].is_null() || json[name].as_array().is_some_and(Vec::is_empty);
        let is_plain =
            json["zarr_format"] == 2 && json["order"] == "C" && is_empty("compressor") && is_empty("filters");
        let dtype = match json["dtype"].as_str()? {
            "<f2" => Dtype::F16,
            "<f4" => Dtype::F32,
            "<f8" => Dtype::F64,
            "bfloat16" => Dtype::Bf16,
            _ => return None,
        };
        Array { dtype, shape: sizes(&json["shape"])?, chunk: sizes(&json["chunks"])? }.if_sound(is_plain)
    }

    /// Of `zarr.json`.
    fn of_3(json: &Value) -> Option<Array> {
        let codecs = json["codecs"].as_array()?;
        let [codec] = &codecs[..] else { return None };
        let is_plain = json["zarr_format"] == 3
            && json["node_type"] == "array"
            && json["chunk_grid"]["name"] == "regular"
            && json["storage_transformers"].as_array().is_none_or(Vec::is_empty)
            && codec["name"] == "bytes"
            && codec["configuration"]["endian"] == "little";
        let dtype = super::view::dtype_named(json["data_type"].as_str()?)?;
        let chunk = sizes(&json["chunk_grid"]["configuration"]["chunk_shape"])?;
        Array { dtype, shape: sizes(&json["shape"])?, chunk }.if_sound(is_plain)
    }

    fn if_sound(self, is_plain: bool) -> Option<Array> {
        let has_dims = self.shape.len() == self.chunk.len() && self.shape.len() <= MAX_DIMS;
        (is_plain && has_dims && is_real(self.dtype)).then_some(self)
    }
}
