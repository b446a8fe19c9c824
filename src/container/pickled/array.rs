//! Arrays of numpy in a pickle: a call, whose bytes lie in the pickle, or behind a wrapper of joblib.

use std::ops::Range;

use super::super::pickle::{Graph, Item, element, is_wrapper};
use super::super::view::sizes;
use crate::codec::Dtype;

/// An array whose elements lie in the file.
#[derive(Debug, PartialEq)]
pub(super) struct Array {
    /// The type of its elements; `None` if stepfs does not know it.
    pub(super) dtype: Option<Dtype>,
    /// Its shape. An array in Fortran order has one dimension, as in an npy file.
    pub(super) shape: Vec<u64>,
    /// Where its elements are.
    pub(super) extent: Range<u64>,
}

/// The array that an item is; `None` for anything else, and for an array that makes no sense or has no elements.
pub(super) fn array(graph: &Graph, item: Item) -> Option<Array> {
    let call = graph.object(item)?;
    let (bytes, dtype, shape, order) = match graph.global(call.func)? {
        ("numpy._core.multiarray" | "numpy.core.multiarray", "_reconstruct") => {
            let [class, ..] = graph.tuple(call.args)? else { return None };
            let ([state], Some(("numpy", "ndarray"))) = (&call.states[..], graph.global(*class)) else { return None };
            let &[_, shape, dtype, Item::Bool(fortran), bytes] = graph.tuple(*state)? else { return None };
            (bytes, dtype, shape, if fortran { "F" } else { "C" })
        }
        ("numpy._core.numeric" | "numpy.core.numeric", "_frombuffer") => {
            let [bytes, dtype, shape, order, ..] = *graph.tuple(call.args)? else { return None };
            (bytes, dtype, shape, graph.str(order)?)
        }
        _ if is_wrapper(graph, call.func) => {
            let state = *call.states.last()?;
            let get = |name| graph.get(state, name);
            (call.args, get("dtype")?, get("shape")?, graph.str(get("order")?)?)
        }
        _ => return None,
    };
    let extent = graph.bytes(bytes)?;
    let (dtype, unit) = element(graph, dtype)??;
    let shape = sizes(graph, shape)?;
    let elements = shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim))?;
    if elements == 0 || elements.checked_mul(unit)? != extent.end - extent.start {
        return None;
    }
    let is_flat = order != "C" && shape.iter().filter(|&&dim| dim != 1).count() > 1;
    Some(Array { dtype, shape: if is_flat { vec![elements] } else { shape }, extent })
}

/// Whether an item is an array whose elements are text, as Python 3 writes bytes below protocol 3.
pub(super) fn is_text(graph: &Graph, item: Item) -> bool {
    let elements = || {
        let call = graph.object(item)?;
        let (_, name) = graph.global(call.func)?;
        let elements = *graph.tuple(*call.states.first()?)?.last()?;
        (name == "_reconstruct").then_some(graph.global(graph.object(elements)?.func)?)
    };
    elements() == Some(("_codecs", "encode"))
}
