//! The checkpoint that a file names as the best so far, as Lightning's `ModelCheckpoint` writes it into each `.ckpt`.
//!
//! `callbacks` maps a callback's name to its state. A state with `best_model_path` names one. That path is also the
//! best of its `best_k_models`, which are not read.

use super::pickle::{Graph, Item};
use super::walk::pairs;

/// Callbacks looked at: a job has some dozens.
const MAX_CALLBACKS: usize = 1 << 10;
/// Names handed out: a job has a few callbacks that save checkpoints.
const MAX_NAMES: usize = 64;

/// The paths that a pickle's callbacks name; `None` if no callback of it speaks of the best.
pub(super) fn named(graph: &Graph) -> Option<Vec<String>> {
    let get = |pairs: &[(Item, Item)], name: &str| {
        pairs.iter().find(|&&(key, _)| graph.str(key) == Some(name)).map(|&(_, value)| value)
    };
    let callbacks = pairs(graph, get(pairs(graph, graph.root), "callbacks")?);
    let states = callbacks.iter().take(MAX_CALLBACKS).map(|&(_, state)| pairs(graph, state));
    let named: Vec<Item> = states.filter_map(|state| get(state, "best_model_path")).take(MAX_NAMES).collect();
    let words = named.iter().filter_map(|&item| graph.str(item)).filter(|name| !name.is_empty());
    (!named.is_empty()).then(|| words.map(String::from).collect())
}
