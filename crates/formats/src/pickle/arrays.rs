//! Arrays in pickles: element types as numpy pickles them, `dtype('f4', False, True)` and a state with the order of bytes;
//! and the wrappers of joblib, with the elements right behind the wrapper's BUILD.
//!
//! Since joblib 1.2 the wrapper states an alignment. Then one byte precedes the elements, with the number of bytes of
//! padding behind it. An array of objects is a whole pickle in that place.

use super::super::npy;
use super::super::read::{Fail, bytes};
use super::super::view::sizes;
use super::vm::{Vm, load};
use super::{Graph, Item, Node};
use codec::Dtype;

/// The bit of a type's flags that says that elements are objects, or have objects in them.
const HAS_OBJECTS: i64 = 1;

/// Of an element type: what stepfs calls it, if it knows it, and its size in bytes. `Ok(None)` for elements that are
/// objects.
pub(crate) fn element(graph: &Graph, item: Item) -> Option<Option<(Option<Dtype>, u64)>> {
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

/// Whether an object is a wrapper of joblib. scikit-learn had joblib inside until 0.21.
pub(crate) fn is_wrapper(graph: &Graph, func: Item) -> bool {
    graph.global(func).is_some_and(|(module, name)| {
        name == "NumpyArrayWrapper"
            && ["joblib.numpy_pickle", "sklearn.externals.joblib.numpy_pickle"].contains(&module)
    })
}

impl Vm<'_> {
    /// Passes over the elements behind a wrapper, and keeps their place as the wrapper's arguments. Does nothing for
    /// other objects.
    pub(super) fn raw_array(&mut self, node: u32) -> Result<(), Fail> {
        let graph = &self.graph;
        let Node::Object(wrapper) = graph.node(node) else { return Ok(()) };
        let ([.., state], true) = (&wrapper.states[..], is_wrapper(graph, wrapper.func)) else { return Ok(()) };
        let get = |name| graph.get(*state, name);
        let element = get("dtype")
            .and_then(|dtype| element(graph, dtype))
            .ok_or("joblib: an array of a type that stepfs does not know")?;
        let Some((_, unit)) = element else {
            let start = self.input.position();
            let end = load(self.src, start, self.end)?.end;
            return self.input.skip(end - start);
        };
        let shape = get("shape").and_then(|shape| sizes(graph, shape));
        let bytes = shape.and_then(|shape| bytes(&shape, unit));
        let bytes = bytes.ok_or("joblib: an array without a shape")?;
        if matches!(get("numpy_array_alignment_bytes"), Some(Item::Int(_))) {
            let padding = self.input.byte()?;
            self.input.skip(padding.into())?;
        }
        let start = self.input.position();
        self.input.skip(bytes)?;
        let place = self.add(Node::Bytes(start..start + bytes), 4)?;
        if let Node::Object(wrapper) = self.graph.node_mut(node) {
            wrapper.args = place;
        }
        Ok(())
    }
}
