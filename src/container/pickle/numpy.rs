//! Element types as numpy pickles them: `dtype('f4', False, True)`, and a state with the order of bytes.

use super::super::npy;
use super::{Graph, Item};
use crate::codec::Dtype;

/// The bit of a type's flags that says that elements are objects, or have objects in them.
const HAS_OBJECTS: i64 = 1;

/// Of an element type: what stepfs calls it, if it knows it, and its size in bytes. `Ok(None)` for elements that are
/// objects.
pub(in super::super) fn element(graph: &Graph, item: Item) -> Option<Option<(Option<Dtype>, u64)>> {
    let dtype = graph.object(item)?;
    if graph.global(dtype.func) != Some(("numpy", "dtype")) {
        return None;
    }
    let (&code, [state]) = (graph.tuple(dtype.args)?.first()?, &dtype.states[..]) else { return None };
    // Version, order, subtype, names, fields, size, alignment, flags; and metadata of times.
    let &[_, order, subtype, _, fields, size, _, Item::Int(flags), ..] = graph.tuple(*state)? else { return None };
    if flags & HAS_OBJECTS != 0 {
        return Some(None);
    }
    // Types of ml_dtypes have a class in place of a code.
    if let Some((_, name)) = graph.global(code).filter(|(module, _)| *module == "ml_dtypes") {
        let Item::Int(size @ 1..=16) = size else { return None };
        let dtype = match name {
            "bfloat16" => Some(Dtype::Bf16),
            "float8_e4m3fn" => Some(Dtype::F8E4m3),
            "float8_e5m2" => Some(Dtype::F8E5m2),
            _ => None,
        };
        return Some(Some((dtype.filter(|dtype| dtype.size() as i64 == size), size as u64)));
    }
    if subtype != Item::None {
        return None;
    }
    if let (true, Item::Int(size @ 1..)) = (fields != Item::None, size) {
        return Some(Some((None, size as u64)));
    }
    let (code, order) = (graph.str(code)?, graph.str(order)?);
    // All machines that train are little-endian.
    let order = if order == "=" { "<" } else { order };
    npy::element(&format!("{order}{code}")).ok().map(Some)
}
