//! What torch.save would have pickled, made from what other formats say: then one walk decides roles for all of them.

use std::ops::Range;

use super::pickle::{Elements, Graph, Item, Node, Object};
use super::storages::{Record, Records};

/// The places of tensors. The key of a tensor's storage is its number here.
pub(super) struct Places(pub(super) Vec<Range<u64>>);

impl Records for Places {
    fn record(&self, key: &str) -> Option<Record> {
        let number: u32 = key.parse().ok()?;
        Some(Record { number, payload: self.0.get(number as usize)?.clone(), stored: true })
    }
}

/// A tensor of any type: the node is not in the graph yet. `bytes` and dimensions fit i64.
pub(super) fn tensor(graph: &mut Graph, number: usize, type_name: &str, shape: &[u64], bytes: u64) -> Node {
    let int = |n: u64| Item::Int(n as i64);
    let mut step = 1u64;
    let mut strides: Vec<Item> = Vec::with_capacity(shape.len());
    for &dim in shape.iter().rev() {
        strides.push(int(step));
        step = step.saturating_mul(dim.max(1));
    }
    strides.reverse();
    let global = |graph: &mut Graph, module: &str, name: &str| {
        let (module, name) = (graph.add_text(module), graph.add_text(name));
        graph.add(Node::Global(module, name))
    };
    let class = global(graph, "torch.storage", "UntypedStorage");
    let id = [graph.add_text("storage"), class, graph.add_text(&number.to_string()), Item::None, int(bytes)];
    let id = graph.add_tuple(&id);
    let storage = graph.add(Node::Persid(id));
    let shape: Vec<Item> = shape.iter().map(|&dim| int(dim)).collect();
    let (shape, strides) = (graph.add_tuple(&shape), graph.add_tuple(&strides));
    let dtype = global(graph, "torch", type_name);
    let args = graph.add_tuple(&[storage, Item::Int(0), shape, strides, Item::Bool(false), Item::None, dtype]);
    let func = global(graph, "torch._utils", "_rebuild_tensor_v3");
    Node::Object(Box::new(Object::call(func, args, Item::None)))
}

/// `param_groups` with one group of so many parameters.
pub(super) fn one_group(graph: &mut Graph, parameters: u64) -> Item {
    let params = graph.add(Node::List(Elements { len: parameters, nodes: Vec::new() }));
    let name = graph.add_text("params");
    let Item::Node(group) = graph.add(Node::Dict(vec![(name, params)])) else { return Item::None };
    graph.add(Node::List(Elements { len: 1, nodes: vec![(0, group)] }))
}
