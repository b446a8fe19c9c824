//! What Paddle keeps of its optimizers, rewritten as the state dict of a torch optimizer. Arrays are tensors already.
//!
//! Paddle keeps one mapping with keys such as `linear_0.w_0_moment1_0`: the parameter, the accumulator, a number. Adam
//! has four accumulators of each parameter, Momentum has one. Any other set is another optimizer's, and stays as it
//! is: nothing then proves a tensor.

use std::collections::HashMap;

use super::super::made;
use super::super::pickle::{Graph, Item, Node, Object};
use super::super::view;

/// Paddle's accumulators, and what torch calls them.
const ACCUMULATORS: [(&str, &str); 5] = [
    ("_moment1", "moment1"),
    ("_moment2", "moment2"),
    ("_beta1_pow_acc", "beta1_pow_acc"),
    ("_beta2_pow_acc", "beta2_pow_acc"),
    ("_velocity", "momentum_buffer"),
];

/// Entries that Paddle puts beside accumulators.
const BESIDE: [&str; 2] = ["LR_Scheduler", "master_weights"];

/// The table of parameters' names that Paddle puts into a state dict.
const NAMES: &str = "StructuredToParameterName@@";

/// Entries of a mapping that are looked at.
const MAX_ENTRIES: usize = 1 << 20;

/// Longest name of a parameter, in bytes.
const MAX_NAME: usize = 256;

/// Rewrites what is known; everything else stays.
pub(super) fn rewrite(graph: &mut Graph) {
    for node in 0..graph.len() as u32 {
        named_tensor(graph, node);
    }
    for node in 0..graph.len() as u32 {
        paddle(graph, node);
    }
}

/// `tuple((name, array))`, by which Paddle keeps a tensor with its name: it becomes the tensor.
fn named_tensor(graph: &mut Graph, node: u32) {
    let Some(call) = graph.object(Item::Node(node)) else { return };
    let inner = || {
        let [pair] = graph.tuple(call.args)? else { return None };
        let [Item::Str(_), Item::Node(inner)] = graph.tuple(*pair)? else { return None };
        Some(*inner)
    };
    let is_tuple = matches!(graph.global(call.func), Some(("builtins" | "__builtin__", "tuple")));
    let Some(inner) = inner().filter(|&inner| is_tuple && view::is_tensor(graph, Item::Node(inner))) else { return };
    let Some(tensor) = graph.object(Item::Node(inner)) else { return };
    let tensor = Box::new(Object::call(tensor.func, tensor.args, tensor.kwargs));
    *graph.node_mut(node) = Node::Object(tensor);
}

/// A name without the number behind it, and the accumulator that it ends with.
fn accumulator(name: &str) -> Option<(&str, &'static str)> {
    let (name, number) = name.rsplit_once('_')?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let (parameter, slot) =
        ACCUMULATORS.iter().find_map(|(end, slot)| name.strip_suffix(end).map(|parameter| (parameter, *slot)))?;
    (is_number && !parameter.is_empty() && parameter.len() <= MAX_NAME).then_some((parameter, slot))
}

/// Whether an entry is the table of names.
fn is_table(graph: &Graph, &(key, _): &(Item, Item)) -> bool {
    graph.str(key) == Some(NAMES)
}

/// Whether an entry is an accumulator.
fn is_state(graph: &Graph, &(key, value): &(Item, Item)) -> bool {
    graph.str(key).is_some_and(|key| accumulator(key).is_some()) && view::is_tensor(graph, value)
}

fn paddle(graph: &mut Graph, node: u32) {
    let Node::Dict(pairs) = graph.node(node) else { return };
    if pairs.len() > MAX_ENTRIES || !pairs.iter().any(|pair| is_table(graph, pair) || is_state(graph, pair)) {
        return;
    }
    let pairs: Vec<(Item, Item)> = pairs.iter().filter(|pair| !is_table(graph, pair)).copied().collect();
    let (state, rest): (Vec<_>, Vec<_>) = pairs.iter().copied().partition(|pair| is_state(graph, pair));
    let is_beside = |&(key, _): &(Item, Item)| graph.str(key).is_some_and(|key| BESIDE.contains(&key));
    let known = if rest.iter().all(is_beside) { parameters(graph, &state) } else { None };
    let pairs = match known.filter(|parameters| !parameters.is_empty()) {
        Some(parameters) => optimizer(graph, parameters).into_iter().chain(rest).collect(),
        None => pairs,
    };
    *graph.node_mut(node) = Node::Dict(pairs);
}

/// One parameter: the key of its state, and the tensors of it by slot.
type Parameter = (Item, Vec<(&'static str, Item)>);

/// The state of each parameter of a known optimizer of Paddle, in the order of the mapping.
fn parameters(graph: &mut Graph, pairs: &[(Item, Item)]) -> Option<Vec<Parameter>> {
    let mut found: Vec<(String, Vec<(&'static str, Item)>)> = Vec::new();
    let mut places = HashMap::new();
    for &(key, value) in pairs {
        let Some((parameter, slot)) = graph.str(key).and_then(accumulator) else { continue };
        let place = *places.entry(parameter.to_string()).or_insert_with(|| {
            found.push((parameter.to_string(), Vec::new()));
            found.len() - 1
        });
        found[place].1.push((slot, value));
    }
    let is_known = |(name, slots): &(String, Vec<(&'static str, Item)>)| {
        let mut names: Vec<&str> = slots.iter().map(|(slot, _)| *slot).collect();
        names.sort_unstable();
        // Data may have a key such as `arm_velocity_0`: one accumulator alone says too little.
        names == ["beta1_pow_acc", "beta2_pow_acc", "moment1", "moment2"]
            || names == ["momentum_buffer"] && is_made_up(name)
    };
    if !found.iter().all(is_known) {
        return None;
    }
    Some(found.into_iter().map(|(name, slots)| (graph.add_text(&name), slots)).collect())
}

/// Whether a name is one that Paddle makes up for a parameter: `linear_0.w_0`, `batch_norm1d_0.b_0`.
fn is_made_up(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let own = name.rsplit_once('.').and_then(|(layer, own)| Some((layer.rsplit_once('_')?.1, own)));
    own.is_some_and(|(layer, own)| {
        number(layer) && ["w_", "b_"].iter().any(|kind| own.strip_prefix(kind).is_some_and(number))
    })
}

/// `state` and `param_groups` as a torch optimizer's state dict has them.
fn optimizer(graph: &mut Graph, parameters: Vec<Parameter>) -> Vec<(Item, Item)> {
    let groups = made::one_group(graph, parameters.len() as u64);
    let mut states = Vec::with_capacity(parameters.len());
    for (key, slots) in parameters {
        let slots = slots.into_iter().map(|(slot, tensor)| (graph.add_text(slot), tensor)).collect();
        states.push((key, graph.add(Node::Dict(slots))));
    }
    let states = graph.add(Node::Dict(states));
    vec![(graph.add_text("state"), states), (graph.add_text("param_groups"), groups)]
}
