//! From the root of a pickle's graph to its tensors, with paths and roles.
//!
//! Depth first, without recursion: the graph may be as deep as the pickle is long, cyclic, and shared so often that
//! it has more paths than atoms exist. A container is entered at most once in each of the two contexts (parameters
//! possible or not). So the walk is linear in the graph's size. Paths are cut off at [`MAX_PATH`].

use std::collections::HashMap;
use std::rc::Rc;

use super::Role;
use super::path::{self, Part};
use super::pickle::{Elements, Graph, Item, Node};
use super::read::{Fail, refuse_if};
use super::role::{self, Context};
use super::slots::{self, Optimizers, Parameter, Standing};
use super::storages::{Records, Storages, Stored, Use};
use super::view::{self, View};
use codec::Dtype;

/// Longest path in bytes: real ones are below 200. Deeper tensors are left out.
const MAX_PATH: usize = 4 << 10;

/// Key bytes looked at: about a second. A key that is shared through the memo is looked at each time. 250,000 tensors
/// with names of 100 bytes need a fifth of it.
const MAX_WRITTEN: usize = 128 << 20;

/// Longest key that is looked at for the name of a model; bounds the time spent on keys.
const MAX_MODEL_NAME: usize = 64;

/// A container that is being walked.
struct Frame {
    node: u32,
    /// Next child.
    cursor: usize,
    path_len: usize,
    /// The context of its children.
    context: Context,
    shape: Mapping,
    /// The step that leads to it.
    part: Part,
    /// Has, by its name, one parameter's optimizer state in it.
    beside_slot: bool,
    /// Its own key, in the mapping above, is the name of one slot of all parameters.
    is_slot: bool,
    /// A key on the way to it names an average of weights.
    average: bool,
}

/// The facts about a container's tensors that follow from its keys and values.
#[derive(Default)]
struct Mapping {
    /// String keys, and nearly all values are tensors.
    state_dict: bool,
    /// Hash of the key set of each child mapping that is named like a model, sorted; only if there are several
    /// mappings.
    models: Vec<u64>,
    /// Keys of Adam's moments, if it has both.
    moments: Option<[&'static str; 2]>,
}

/// Finds all tensors below the graph's root, in storages that lie in `records`.
pub(super) fn tensors(graph: &Graph, records: &dyn Records) -> Result<Stored, Fail> {
    let mut walk = Walk {
        graph,
        storages: Storages::new(records),
        visited: vec![0; graph.len()],
        key_sets: HashMap::new(),
        optimizers: Optimizers::default(),
        group_lists: HashMap::new(),
        masters: HashMap::new(),
        path: String::new(),
        written: 0,
        frames: Vec::new(),
    };
    walk.enter(graph.root, Part::Here, None)?;
    while let Some(frame) = walk.frames.last_mut() {
        let (node, cursor) = (frame.node, frame.cursor);
        frame.cursor += 1;
        let path_len = frame.path_len;
        walk.path.truncate(path_len);
        match child(graph, node, cursor) {
            Some((part, item)) => walk.enter(item, part, Some(walk.frames.len() - 1))?,
            None => {
                walk.frames.pop();
            }
        }
    }
    Ok(walk.storages.finish(&walk.optimizers))
}

struct Walk<'a> {
    graph: &'a Graph,
    storages: Storages<'a>,
    /// Bit 0: entered with parameters possible; bit 1: entered without.
    visited: Vec<u8>,
    /// Of mappings, by node: a shared one is asked for often.
    key_sets: HashMap<u32, u64>,
    optimizers: Optimizers,
    /// Parameters of each group, by the node of `param_groups`. A shared one is asked for often.
    group_lists: HashMap<u32, Rc<Vec<u64>>>,
    /// Copies of parameters seen so far, by the node of their list.
    masters: HashMap<u32, u64>,
    path: String,
    written: usize,
    frames: Vec<Frame>,
}

impl Walk<'_> {
    /// Looks at one child of the frame `parent`: a tensor is noted, a container gets a frame of its own.
    fn enter(&mut self, item: Item, part: Part, parent: Option<usize>) -> Result<(), Fail> {
        let Item::Node(index) = item else {
            return Ok(());
        };
        if matches!(self.graph.node(index), Node::Global(..) | Node::Bytes(_)) {
            return Ok(());
        }
        let before = self.path.len();
        path::push(&mut self.path, self.graph, part);
        self.written += self.path.len() - before;
        refuse_if(self.written > MAX_WRITTEN, "torch: the keys are too long and too many")?;
        if self.path.len() > MAX_PATH {
            self.storages.too_deep += 1;
            return Ok(());
        }
        let graph = self.graph;
        let context = parent.map_or(Context::Open, |p| self.frames[p].context);
        let listed = parent.is_some_and(|p| self.frames[p].shape.state_dict);
        let key = match part {
            Part::Key(key) => graph.str(key).unwrap_or(""),
            _ => "",
        };
        let tensor = view::view(graph, item);
        let is_bare = tensor.is_none();
        if let Some(view) = tensor.or_else(|| View::of_all(view::storage(graph, item)?)) {
            let standing = parent.filter(|_| !is_bare).and_then(|p| self.standing(p, key));
            let role = match context {
                _ if !is_bare => role::tensor(context, listed || view.parameter, key, view.dtype.unwrap_or(Dtype::U8)),
                Context::Closed(Role::Optimizer, why) => (Role::Optimizer, why),
                _ => (Role::Other, "a storage without a tensor that stepfs knows"),
            };
            // A pickled optimizer lists the model's parameters among its param_groups.
            let reference = view.parameter && matches!(context, Context::Closed(Role::Optimizer, _));
            // A file may be one tensor and nothing else.
            let path = if self.path.is_empty() { "." } else { &self.path };
            return self.storages.add(Use { view, path, role, reference, standing });
        }
        let context = match parent {
            // A module's children carry names that users gave to layers, which say nothing about their role.
            Some(p) if !self.is_modules(p) => {
                let shape = &self.frames[p].shape;
                let below = match shape.moments {
                    Some(keys) if context == Context::Open && keys.contains(&key) => role::MOMENT,
                    _ => role::below(context, key),
                };
                let paired = below == Context::Open && !shape.models.is_empty() && !role::names_model(key) && {
                    let keys = self.key_set(index);
                    self.frames[p].shape.models.binary_search(&keys).is_ok()
                };
                if paired { role::PAIRED } else { below }
            }
            _ => context,
        };
        let bit = 1 << u8::from(context != Context::Open);
        let visited = &mut self.visited[index as usize];
        if *visited & bit != 0 {
            return Ok(());
        }
        *visited |= bit;
        let children = graph.pairs(item);
        let moments = role::moments(|name| graph.named(children, name).is_some());
        let beside_slot = children.iter().any(|&(k, v)| {
            let name = graph.str(k).filter(|name| name.len() <= MAX_MODEL_NAME);
            name.is_some_and(role::is_slot) && view::is_tensor(graph, v)
        });
        let above = parent.map(|p| &self.frames[p]);
        let is_slot = role::is_slot(key) || above.and_then(|a| a.shape.moments).is_some_and(|keys| keys.contains(&key));
        let named = key.len() <= MAX_MODEL_NAME && slots::names_average(key);
        let average = named || above.is_some_and(|a| a.average);
        self.note_optimizers(children);
        let (context, mut shape) = self.mapping(item, context, beside_slot);
        shape.moments = moments;
        let (cursor, path_len) = (0, self.path.len());
        self.frames.push(Frame { node: index, cursor, path_len, context, shape, part, beside_slot, is_slot, average });
        self.note_foreign(children);
        Ok(())
    }

    /// Where a tensor under `key` of the frame `parent` stands.
    fn standing(&mut self, parent: usize, key: &str) -> Option<Standing> {
        let frame = &self.frames[parent];
        let above = parent.checked_sub(1).map(|p| self.frames[p].node);
        let lists = [Some(frame.node), above];
        if let Some(list) = lists.into_iter().flatten().find(|node| self.optimizers.masters.contains_key(node)) {
            let next = self.masters.entry(list).or_default();
            *next += 1;
            return Some(Standing::Master { owner: self.optimizers.masters[&list], number: *next - 1 });
        }
        if key.is_empty() {
            return None;
        }
        let owner = above.unwrap_or(frame.node);
        if frame.beside_slot || above.is_some_and(|node| self.optimizers.groups.contains_key(&node)) {
            return Some(Standing::Slot { owner, parameter: self.parameter(parent), slot: key.into() });
        }
        // In an object or a mapping that is a slot: it must not pass for one of another parameter.
        let kept = |p: &usize| self.optimizers.groups.contains_key(&self.frames[*p].node);
        if let Some(state) = (0..parent.saturating_sub(1)).rev().find(kept) {
            let container = match self.frames[state + 2].part {
                Part::Key(name) => self.graph.str(name).unwrap_or(""),
                _ => "",
            };
            let slot = format!("{container}/{key}");
            let (owner, parameter) = (self.frames[state].node, self.parameter(state + 1));
            return Some(Standing::Slot { owner, parameter, slot });
        }
        if let (true, Part::Key(slot)) = (frame.is_slot, frame.part) {
            let slot = self.graph.str(slot)?.into();
            return Some(Standing::Slot { owner, parameter: Parameter::Name(key.into()), slot });
        }
        Some(Standing::named(frame.node, key, frame.average))
    }

    /// The parameter whose state a frame is.
    fn parameter(&self, frame: usize) -> Parameter {
        let Frame { part, node, .. } = self.frames[frame];
        match part {
            Part::Key(Item::Int(n)) if n >= 0 => Parameter::Number(n as u64),
            Part::Index(n) => Parameter::Number(n),
            Part::Key(name) => self.graph.str(name).map_or(Parameter::Node(node), |n| Parameter::Name(n.into())),
            _ => Parameter::Node(node),
        }
    }

    /// Notes an optimizer's state of a parameter beside tensors, if the last frame is that state.
    fn note_foreign(&mut self, pairs: &[(Item, Item)]) {
        let Some(owner) = self.frames.len().checked_sub(2).map(|p| self.frames[p].node) else { return };
        if !self.optimizers.groups.contains_key(&owner) {
            return;
        }
        let graph = self.graph;
        let beside = pairs.iter().filter(|&&(_, value)| value != Item::None && !view::is_tensor(graph, value));
        // A key that is no string, or longer than any name, is an unknown slot.
        let name = |&(key, _): &(Item, Item)| graph.str(key).filter(|name| name.len() <= MAX_MODEL_NAME).unwrap_or("?");
        let names: Vec<String> = beside.map(name).map(String::from).collect();
        if !names.is_empty() {
            self.optimizers.foreign.insert((owner, self.parameter(self.frames.len() - 1)), names);
        }
    }

    /// Notes the optimizer that a mapping is, or that it wraps with copies of the parameters.
    fn note_optimizers(&mut self, pairs: &[(Item, Item)]) {
        let graph = self.graph;
        let get = |name: &str| match graph.named(pairs, name) {
            Some(Item::Node(n)) => Some(n),
            _ => None,
        };
        if let Some(state) = get("state") {
            if let Some(groups) = graph.named(pairs, "param_groups") {
                let sizes = match groups {
                    Item::Node(n) => {
                        let list = self.group_lists.entry(n);
                        list.or_insert_with(|| Rc::new(group_sizes(graph, groups).unwrap_or_default())).clone()
                    }
                    _ => Rc::default(),
                };
                self.optimizers.groups.insert(state, sizes);
            }
            // fastai lists the state of each parameter, beside the numbers of each group.
            if let (Some(_), Some(states)) = (get("hypers"), graph.list(Item::Node(state))) {
                self.optimizers.groups.insert(state, Rc::new(vec![states.len]));
            }
        }
        let Some(list) = slots::MASTERS.iter().find_map(|name| get(name)) else {
            return;
        };
        let Some(base) = slots::BASES.iter().find_map(|name| get(name)) else {
            return;
        };
        let owner = match graph.node(base) {
            // DeepSpeed's elastic checkpoints list the state of one flat parameter per group.
            Node::List(states) => {
                self.optimizers.groups.insert(base, Rc::new(vec![states.len]));
                base
            }
            _ => match graph.named(graph.pairs(Item::Node(base)), "state") {
                Some(Item::Node(state)) => state,
                _ => return,
            },
        };
        self.optimizers.masters.insert(list, owner);
    }

    /// Whether the frame is the `_modules` of a module.
    fn is_modules(&self, frame: usize) -> bool {
        let path = &self.path[..self.frames[frame].path_len];
        path == "_modules" || path.ends_with("/_modules")
    }

    /// Hash of a mapping's set of string keys, in any order.
    fn key_set(&mut self, node: u32) -> u64 {
        let graph = self.graph;
        *self.key_sets.entry(node).or_insert_with(|| {
            let keys = graph.pairs(Item::Node(node)).iter();
            let hash = |k: &str| codec::hash::xxh3_64(k.as_bytes()) | 1;
            keys.filter_map(|&(k, _)| graph.str(k)).fold(0, |h, k| h.wrapping_add(hash(k)))
        })
    }

    /// The facts that follow from an item's keys and values, and the context below it.
    fn mapping(&mut self, item: Item, context: Context, beside_slot: bool) -> (Context, Mapping) {
        let graph = self.graph;
        let pairs = graph.pairs(item);
        if context != Context::Open || pairs.is_empty() {
            return (context, Mapping::default());
        }
        let has = |name: &str| graph.named(pairs, name).is_some();
        if has("param_groups") && has("state") {
            return (role::OPTIMIZER_STATE, Mapping::default());
        }
        if beside_slot {
            return (role::BESIDE_SLOT, Mapping::default());
        }
        let (mut tensors, mut others, mut strings) = (0, 0, true);
        let mut mappings = Vec::new();
        for &(key, value) in pairs {
            let name = graph.str(key);
            if value == Item::None || name.is_some_and(|k| k.ends_with("_extra_state")) {
                continue;
            }
            if view::is_tensor(graph, value) {
                tensors += 1;
                strings &= matches!(key, Item::Str(_));
                continue;
            }
            others += 1;
            if let (Some(name), Item::Node(n)) = (name, value)
                && name.len() <= MAX_MODEL_NAME
                && !graph.pairs(value).is_empty()
            {
                mappings.push((name, n));
            }
        }
        let mut models = Vec::new();
        if mappings.len() > 1 {
            mappings.retain(|(name, _)| role::names_model(name));
            models.extend(mappings.into_iter().map(|(_, n)| self.key_set(n)));
            models.sort_unstable();
        }
        let state_dict = strings && tensors > 0 && others * 10 <= tensors + others;
        let shape = Mapping { state_dict, models, moments: None };
        (context, shape)
    }
}

/// Number of parameters in each of an optimizer's groups: a list of mappings with a list `params` each.
fn group_sizes(graph: &Graph, groups: Item) -> Option<Vec<u64>> {
    let groups = graph.list(groups)?;
    let size = |&(_, group): &(u64, u32)| Some(graph.list(graph.get(Item::Node(group), "params")?)?.len);
    let sizes = groups.nodes.iter().map(size).collect::<Option<Vec<u64>>>()?;
    (sizes.len() as u64 == groups.len).then_some(sizes)
}

/// The `cursor`-th child of a node, and the step that leads to it.
fn child(graph: &Graph, node: u32, cursor: usize) -> Option<(Part, Item)> {
    let element = |list: &Elements, i: usize| list.nodes.get(i).map(|&(at, n)| (Part::Index(at), Item::Node(n)));
    let pair = |pairs: &[(Item, Item)], i: usize| pairs.get(i).map(|&(k, v)| (Part::Key(k), v));
    match graph.node(node) {
        Node::Tuple { .. } => {
            graph.tuple(Item::Node(node))?.get(cursor).map(|&item| (Part::Index(cursor as u64), item))
        }
        Node::List(list) => element(list, cursor),
        Node::Dict(pairs) => pair(pairs, cursor),
        Node::Persid(id) => (cursor == 0).then_some((Part::Name("id"), *id)),
        Node::Global(..) | Node::Bytes(_) => None,
        Node::Object(o) => {
            let (pairs, nodes) = (o.pairs.len(), o.list.nodes.len());
            match cursor {
                0 => Some((Part::Name("func"), o.func)),
                1 => Some((Part::Name("args"), o.args)),
                2 => Some((Part::Name("kwargs"), o.kwargs)),
                c if c - 3 < pairs => pair(&o.pairs, c - 3),
                c if c - 3 - pairs < nodes => element(&o.list, c - 3 - pairs),
                c => o.states.get(c - 3 - pairs - nodes).map(|&state| (Part::Here, state)),
            }
        }
    }
}
