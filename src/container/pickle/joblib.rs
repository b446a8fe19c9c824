//! Arrays as joblib writes them: a wrapper in the pickle, and right behind the wrapper's BUILD the elements
//! themselves.
//!
//! Since joblib 1.2 the wrapper states an alignment. Then one byte precedes the elements, with the number of bytes of
//! padding behind it. An array of objects is a whole pickle in that place.

use super::super::read::{Fail, bad};
use super::super::view::sizes;
use super::vm::{Vm, load};
use super::{Graph, Item, Node, element};

/// Whether an object is a wrapper of joblib. scikit-learn had joblib inside until 0.21.
pub(in super::super) fn is_wrapper(graph: &Graph, func: Item) -> bool {
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
        let Some(element) = get("dtype").and_then(|dtype| element(graph, dtype)) else {
            return bad("joblib: an array of a type that stepfs does not know");
        };
        let Some((_, unit)) = element else {
            let start = self.input.position();
            let end = load(self.src, start, self.end)?.end;
            return self.input.skip(end - start);
        };
        let shape = get("shape").and_then(|shape| sizes(graph, shape));
        let bytes = shape.and_then(|shape| shape.iter().try_fold(unit, |n, &dim| n.checked_mul(dim)));
        let Some(bytes) = bytes else { return bad("joblib: an array without a shape") };
        if matches!(get("numpy_array_alignment_bytes"), Some(Item::Int(_))) {
            let padding = self.input.byte()?;
            self.input.skip(padding.into())?;
        }
        let start = self.input.position();
        self.input.skip(bytes)?;
        self.push_node(Node::Bytes(start..start + bytes), 4)?;
        let place = self.pop()?;
        if let Node::Object(wrapper) = self.graph.node_mut(node) {
            wrapper.args = place;
        }
        Ok(())
    }
}
