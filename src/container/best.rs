//! Which checkpoints a file names as the best so far: what Lightning's `ModelCheckpoint` writes into each `.ckpt`.
//!
//! `callbacks` is a mapping from the word for a callback to its state. A state with `best_model_path` names one. Its
//! `best_k_models` are not looked at: the best of them is that path.

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
