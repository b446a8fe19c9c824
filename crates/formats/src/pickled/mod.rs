//! Pickles with arrays of numpy in them, as `pickle`, joblib and Paddle write them. Nothing in them is executed.
//!
//! The pickle is loaded as a graph. Each array becomes a tensor of torch in it, and what Paddle keeps of its
//! optimizers becomes a state dict of torch. Then the walk of torch's files finds paths, roles, pairs and
//! proofs. Arrays of objects, and those whose bytes are text (protocol 2), are left out: their bytes are kept as they
//! are. So is what follows the first pickle of a file.

mod paddle;

use std::ops::Range;

use super::made::{self, Places};
use super::npy::{self, Array};
use super::pickle::{self, Graph, Item, element, is_wrapper};
use super::progress::Progress;
use super::read::{Fail, bad, bytes, refuse_if, start};
use super::storages::Stored;
use super::view::{sizes, type_name};
use super::{Description, Kind, ReadAt, walk};

/// Most arrays of a file: some 150 MB of nodes.
const MAX_ARRAYS: usize = 1 << 18;

/// Describes the file, or `None` if its beginning is not that of a binary pickle, or if no array is in it. A pickle of
/// protocol 0 or 1 has no magic number.
pub(super) fn describe(src: &dyn ReadAt, size: u64) -> Result<Option<Description>, Fail> {
    if !matches!(start(src, size)?, Some([0x80, 2..=5])) {
        return Ok(None);
    }
    let mut graph = pickle::load_arrays(src, 0, size)?;
    let mut found: Vec<(u32, Array)> = Vec::new();
    let (mut wrapped, mut texts) = (false, 0);
    for node in 0..graph.len() as u32 {
        if let Some(array) = array(&graph, Item::Node(node)) {
            wrapped |= graph.object(Item::Node(node)).is_some_and(|object| is_wrapper(&graph, object.func));
            found.push((node, array));
        }
        texts += u64::from(is_text(&graph, Item::Node(node)));
    }
    refuse_if(found.len() > MAX_ARRAYS, "pickle: more than 262,144 arrays")?;
    let texts =
        (texts > 0).then(|| format!("pickle: {texts} arrays are text, as protocol 2 has them; use protocol 4 or 5"));
    if found.is_empty() {
        return texts.map_or(Ok(None), bad);
    }
    // What is rewritten below says nothing of steps and decays.
    let progress = Progress::of(&graph);
    let places = replace(&mut graph, found);
    paddle::rewrite(&mut graph);
    let Stored { tensors, training, note, .. } = walk::tensors(&graph, &places)?;
    let note = note.map(|note| note.replacen("torch", "pickle", 1)).or(texts);
    let kind = if wrapped { Kind::Joblib } else { Kind::Pickle };
    Ok(Some(Description { note, progress, ..Description::new(kind, tensors, training) }))
}

/// Puts tensors in the places of arrays. Answers where their elements are.
fn replace(graph: &mut Graph, mut found: Vec<(u32, Array)>) -> Places {
    // The order of elements in the file is that in which the pickle names the arrays.
    found.sort_by_key(|(_, array)| array.extent.start);
    let mut places: Vec<Range<u64>> = Vec::new();
    for (node, Array { dtype, shape, extent }) in found {
        if places.last() != Some(&extent) {
            places.push(extent.clone());
        }
        let name = dtype.map_or("unknown", type_name);
        let tensor = made::tensor(graph, places.len() - 1, name, &shape, extent.end - extent.start);
        *graph.node_mut(node) = tensor;
    }
    Places(places)
}

/// The array that an item is; `None` for anything else, and for an array that makes no sense or has no elements.
fn array(graph: &Graph, item: Item) -> Option<Array> {
    let call = graph.object(item)?;
    let (elements, dtype, shape, order) = match graph.global(call.func)? {
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
    let extent = graph.bytes(elements)?;
    let (dtype, unit) = element(graph, dtype)??;
    let shape = sizes(graph, shape)?;
    let elements = bytes(&shape, 1)?;
    if elements == 0 || elements.checked_mul(unit)? != extent.end - extent.start {
        return None;
    }
    Some(Array { dtype, shape: npy::shape(shape, order != "C"), extent })
}

/// Whether an item is an array whose elements are text, as Python 3 writes bytes below protocol 3.
fn is_text(graph: &Graph, item: Item) -> bool {
    let elements = || {
        let call = graph.object(item)?;
        let (_, name) = graph.global(call.func)?;
        let elements = *graph.tuple(*call.states.first()?)?.last()?;
        (name == "_reconstruct").then_some(graph.global(graph.object(elements)?.func)?)
    };
    elements() == Some(("_codecs", "encode"))
}
