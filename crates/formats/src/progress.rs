//! What a file itself counts of its training: steps, epochs, and the decay of its second moments.

use std::collections::HashSet;

use super::pickle::{Graph, Item};
use super::{Description, Kind, Role, Tensor};
use codec::Dtype;

/// What a file itself counts of its training.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// The trainer's own counters among the entries at the file's root: name and value.
    pub counters: Vec<(&'static str, u64)>,
    /// The losses among the entries at the file's root, where they are plain floats: name and value.
    pub losses: Vec<(&'static str, f64)>,
    /// The optimizer's count of its steps, where it is a plain number of the pickle: torch before 1.12, Adafactor and
    /// apex write it so. The largest of those looked at.
    pub optimizer_step: Option<u64>,
    /// The decay of the second moments that all parameter groups of the file have (`betas[1]`). `None` if they differ,
    /// if one of them states none, and if there are too many to look at.
    pub second_decay: Option<f64>,
}

/// Names of counters at the root of a checkpoint.
const COUNTERS: [&str; 18] = [
    "epoch", "current_epoch", "step", "global_step", "global_steps", "steps", "iteration", "iterations", "iter",
    "iter_num", "it", "current_step", "num_updates", "n_iter", "update", "updates", "n_updates", "num_timesteps",
];

/// Names of losses at the root of a checkpoint. A best loss so far is none: it belongs to another state.
const LOSSES: [&str; 8] =
    ["loss", "train_loss", "val_loss", "valid_loss", "validation_loss", "eval_loss", "test_loss", "dev_loss"];

/// Containers between the root and an optimizer. Lightning has a list, and a GAN's trainer mappings by name.
const MAX_DEPTH: usize = 4;
/// Values looked at in the search for optimizers: those of the largest model, and as many again.
const MAX_LOOKED: usize = 1 << 19;
/// Optimizers looked at. A GAN has two.
const MAX_OPTIMIZERS: usize = 64;
/// Parameter groups of an optimizer that are looked at, and parameters whose state is.
const MAX_OF_EACH: usize = 1 << 10;

impl Progress {
    /// What a pickle says. Time: at most linear in its size.
    pub(super) fn of(graph: &Graph) -> Progress {
        let mut progress = Progress { counters: counters(graph), losses: losses(graph), ..Progress::default() };
        let (optimizers, mut are_all) = optimizers(graph);
        are_all &= optimizers.len() <= MAX_OPTIMIZERS;
        let mut decays = Vec::new();
        for optimizer in optimizers.into_iter().take(MAX_OPTIMIZERS) {
            let of = |name| graph.get(optimizer, name).unwrap_or(Item::None);
            let states = graph.pairs(of("state")).iter().take(MAX_OF_EACH).map(|&(_, state)| state);
            let groups = elements(graph, of("param_groups"));
            are_all &= groups.len() <= MAX_OF_EACH;
            let groups = groups.iter().take(MAX_OF_EACH).map(|&(_, group)| Item::Node(group));
            decays.extend(groups.clone().map(|group| second_decay(graph, group)));
            // apex counts once for each group.
            let counts = states.chain(groups).filter_map(|it| graph.get(it, "step")?.natural());
            progress.optimizer_step = progress.optimizer_step.max(counts.max());
        }
        let first = decays.first().copied().flatten();
        progress.second_decay = first.filter(|_| are_all && decays.iter().all(|decay| *decay == first));
        progress
    }
}

fn counters(graph: &Graph) -> Vec<(&'static str, u64)> {
    let mut found = [None; COUNTERS.len()];
    for &(key, value) in graph.pairs(graph.root) {
        if let Some(at) = graph.str(key).and_then(|key| COUNTERS.iter().position(|name| *name == key)) {
            found[at] = value.natural();
        }
    }
    COUNTERS.into_iter().zip(found).filter_map(|(name, value)| Some((name, value?))).collect()
}

fn losses(graph: &Graph) -> Vec<(&'static str, f64)> {
    let loss = |name: &'static str| match graph.get(graph.root, name)? {
        Item::Float(value) if value.is_finite() => Some((name, value)),
        _ => None,
    };
    LOSSES.into_iter().filter_map(loss).collect()
}

/// The mappings below the root that are an optimizer's `state_dict()`, and whether these are all. Breadth first, so
/// that the many tensors of a model come late.
fn optimizers(graph: &Graph) -> (Vec<Item>, bool) {
    let mut found = Vec::new();
    let (mut level, mut below) = (vec![graph.root], Vec::new());
    let (mut seen, mut left) = (HashSet::new(), MAX_LOOKED);
    for depth in 0..=MAX_DEPTH {
        for item in level.drain(..) {
            if graph.get(item, "state").is_some() && graph.get(item, "param_groups").is_some() {
                found.push(item);
                continue;
            }
            if depth == MAX_DEPTH {
                continue;
            }
            let elements = elements(graph, item).iter().map(|&(_, node)| Item::Node(node));
            let tuple = graph.tuple(item).unwrap_or(&[]).iter().copied();
            for child in graph.pairs(item).iter().map(|&(_, value)| value).chain(elements).chain(tuple) {
                if left == 0 {
                    return (found, false);
                }
                left -= 1;
                if let Item::Node(node) = child
                    && holds_values(graph, child)
                    && seen.insert(node)
                {
                    below.push(child);
                }
            }
        }
        std::mem::swap(&mut level, &mut below);
    }
    (found, true)
}

/// Whether an item is a mapping, a list or a tuple. A tensor is none.
fn holds_values(graph: &Graph, item: Item) -> bool {
    !graph.pairs(item).is_empty() || !elements(graph, item).is_empty() || graph.tuple(item).is_some()
}

/// The elements of a list that are no plain values.
fn elements(graph: &Graph, item: Item) -> &[(u64, u32)] {
    graph.list(item).map_or(&[], |list| &list.nodes)
}

/// The decay of the second moments that a group states. Elements of a list are not in the graph, those of a tuple are.
fn second_decay(graph: &Graph, group: Item) -> Option<f64> {
    let betas = graph.get(group, "betas").and_then(|betas| match graph.tuple(betas)? {
        [_, second] => Some(*second),
        _ => None,
    });
    match betas.or(graph.get(group, "beta2")).or(graph.get(group, "b2"))? {
        Item::Float(decay) => Some(decay).filter(|decay| (0.0..1.0).contains(decay)),
        _ => None,
    }
}

impl Description {
    /// The number that counts the iterations of its optimizer: torch has a `step` of each parameter, as fp32; Keras one
    /// of all and optax a `count` in each state, as integers.
    pub fn step(&self) -> Option<&Tensor> {
        let is_one = |t: &&Tensor| t.role == Role::Optimizer && t.shape.iter().product::<u64>() == 1;
        self.tensors.iter().filter(is_one).find(|t| is_step(self.kind, t))
    }
}

fn is_step(kind: Kind, tensor: &Tensor) -> bool {
    let separators = ['/', '.'];
    let (above, name) = tensor.path.rsplit_once(separators).unwrap_or_default();
    match kind {
        Kind::Keras | Kind::Hdf5 => {
            let is_count = (above == "optimizer/vars" && name == "0")
                || (above.starts_with("optimizer_weights/") && name == "iteration");
            is_count && [Dtype::I32, Dtype::I64].contains(&tensor.dtype)
        }
        Kind::Flax => name == "count" && tensor.dtype == Dtype::I32,
        _ => name == "step" && above.split(separators).any(|part| part == "state") && tensor.dtype == Dtype::F32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_known_by_name_and_type() {
        let known = |kind: Kind, path: &str, dtype: Dtype| {
            let role = (Role::Optimizer, "test");
            is_step(kind, &Tensor::found(path.to_string(), (dtype, Vec::new()), role, 0..dtype.size() as u64))
        };
        for path in ["optimizer/state/0/step", "optim/state/h.weight/step", "optimizer/state.h.weight.step"] {
            assert!(known(Kind::TorchZip, path, Dtype::F32), "{path}");
        }
        assert!(known(Kind::Keras, "optimizer/vars/0", Dtype::I64));
        assert!(known(Kind::Hdf5, "optimizer_weights/adam/iteration", Dtype::I64));
        assert!(known(Kind::Flax, "opt_state/0/count", Dtype::I32));
        for (kind, path, dtype) in [
            (Kind::Flax, "opt_state/0/count", Dtype::F32),
            (Kind::Keras, "optimizer/vars/1", Dtype::I64),
            (Kind::Keras, "optimizer/vars/0", Dtype::F32),
            (Kind::TorchZip, "optimizer/vars/0", Dtype::I64),
            (Kind::TorchZip, "optimizer/step", Dtype::F32),
            (Kind::TorchZip, "step", Dtype::F32),
        ] {
            assert!(!known(kind, path, dtype), "{path}");
        }
    }
}
