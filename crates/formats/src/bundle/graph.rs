//! The object graph of a bundle: a message `TrackableObjectGraph` in the tensor `_CHECKPOINTABLE_OBJECT_GRAPH`. It
//! tells which variables are an optimizer's, which it trains, and the names that Keras has given them.

use std::collections::{HashMap, HashSet};

use super::super::optimizers::keras_slots;
use super::super::read::{Fail, refuse_if};
use super::table::MAX_NAME;
use super::wire::{Fields, Value};

/// Most objects: a model of 100,000 layers.
const MAX_NODES: usize = 1 << 20;

/// An object of the program.
#[derive(Default)]
struct Node<'a> {
    children: Vec<(&'a str, usize)>,
    /// If it is a variable: its name, and its key in the bundle.
    variable: Option<(&'a str, &'a str)>,
}

/// A variable of an optimizer of Keras.
#[derive(Debug, PartialEq)]
pub(super) struct Slot<'a> {
    pub(super) key: &'a str,
    /// The key of the parameter that it is state of, and its slot as `optimizers.rs` knows it.
    pub(super) of: Option<(&'a str, &'static str)>,
    pub(super) optimizer: usize,
}

/// What the graph tells of a bundle's tensors.
#[derive(Default)]
pub(super) struct Graph<'a> {
    /// The names of variables by key. Several may have one name.
    pub(super) names: HashMap<&'a str, &'a str>,
    pub(super) slots: Vec<Slot<'a>>,
    /// Keys of the variables that optimizers train.
    pub(super) trained: HashSet<&'a str>,
}

impl<'a> Graph<'a> {
    pub(super) fn read(message: &'a [u8]) -> Result<Graph<'a>, Fail> {
        let (mut nodes, mut fields) = (Vec::new(), Fields::new(message));
        while let Some((number, value)) = fields.next()? {
            let (1, Value::Bytes(message)) = (number, value) else { continue };
            refuse_if(nodes.len() == MAX_NODES, "TensorFlow: an object graph of more than a million objects")?;
            nodes.push(node(message)?);
        }
        let mut graph = Graph::default();
        for (name, key) in nodes.iter().filter_map(|node| node.variable) {
            graph.names.insert(key, name);
        }
        // A list is looked at once, however many objects have it.
        let mut seen = HashSet::new();
        for (number, node) in nodes.iter().enumerate() {
            let Some(list) =
                node.child("_variables").filter(|list| node.child("_iterations").is_some() && seen.insert(*list))
            else {
                continue;
            };
            let trained = node.child("_trainable_variables").filter(|list| seen.insert(*list));
            graph.add(
                number,
                &variables(&nodes, list),
                &trained.map(|list| variables(&nodes, list)).unwrap_or_default(),
            );
        }
        Ok(graph)
    }

    /// Adds an optimizer with these variables, which trains those. Names and keys are of each.
    fn add(&mut self, optimizer: usize, variables: &[(&'a str, &'a str)], trained: &[(&'a str, &'a str)]) {
        self.trained.extend(trained.iter().map(|(_, key)| *key));
        let mut parameters: HashMap<String, Option<&str>> = HashMap::new();
        for (name, key) in trained {
            // Two of one name: neither is meant for sure.
            parameters.entry(name.replace('/', "_")).and_modify(|key| *key = None).or_insert(Some(key));
        }
        let mut first = None;
        let mut is_known = true;
        let mut slots = Vec::new();
        for (name, key) in variables {
            let Some((owner, name)) = name.split_once('/') else {
                is_known = false;
                slots.push(Slot { key, of: None, optimizer });
                continue;
            };
            let known = keras_slots(owner).iter().find_map(|(end, slot)| Some((name.strip_suffix(end)?, *slot)));
            let of = known.and_then(|(name, slot)| Some(((*parameters.get(name)?)?, slot)));
            is_known &= *first.get_or_insert(owner) == owner;
            is_known &= of.is_some() || ["iteration", "learning_rate"].contains(&name);
            slots.push(Slot { key, of, optimizer });
        }
        if !is_known {
            slots.iter_mut().for_each(|slot| slot.of = None);
        }
        self.slots.extend(slots);
    }
}

impl<'a> Node<'a> {
    fn child(&self, name: &str) -> Option<usize> {
        self.children.iter().find(|(child, _)| *child == name).map(|(_, node)| *node)
    }
}

/// Names and keys of the variables in a list.
fn variables<'a>(nodes: &[Node<'a>], list: usize) -> Vec<(&'a str, &'a str)> {
    let children = nodes.get(list).into_iter().flat_map(|list| &list.children);
    children.filter_map(|(_, node)| nodes.get(*node)?.variable).collect()
}

/// A message `TrackableObject`.
fn node(message: &[u8]) -> Result<Node<'_>, Fail> {
    let (mut node, mut fields) = (Node::default(), Fields::new(message));
    while let Some((number, value)) = fields.next()? {
        let Value::Bytes(message) = value else { continue };
        let (mut id, mut texts, mut fields) = (0, [""; 4], Fields::new(message));
        while let Some((field, value)) = fields.next()? {
            match value {
                Value::Number(n) => id = n,
                Value::Bytes(bytes) => {
                    // Many children may have one name: a longer one, copied for each, would take hours.
                    if let Some(text) = texts.get_mut(field as usize).filter(|_| bytes.len() <= MAX_NAME) {
                        *text = std::str::from_utf8(bytes).unwrap_or_default();
                    }
                }
                _ => {}
            }
        }
        match number {
            // `ObjectReference`: number and name.
            1 => node.children.push((texts[2], usize::try_from(id).unwrap_or(usize::MAX))),
            // `SerializedTensor`: its kind, its name, its key.
            2 if texts[1] == "VARIABLE_VALUE" && !texts[3].is_empty() => node.variable = Some((texts[2], texts[3])),
            _ => {}
        }
    }
    Ok(node)
}
