//! Where a tensor stands among the others: in a mapping by its name, or in one parameter's optimizer state.

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use super::role;

/// What tells the parameters of an optimizer apart: the key of its state. torch numbers them through all groups.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Parameter {
    Number(u64),
    Name(String),
    /// Anything else: the node of the mapping.
    Node(u32),
}

/// Where a tensor stands. Nodes are those of the pickle's graph; other containers have one mapping, 0.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Standing {
    /// Under `key` in a mapping. `average`: a key above it names an average of weights.
    Listed { mapping: u32, key: String, average: bool },
    /// Several weights under keys of one mapping.
    Views(Box<Flat>),
    /// State of one parameter. `owner` is the node that holds the state of all.
    Slot { owner: u32, parameter: Parameter, slot: String },
    /// The `number`-th of an optimizer's own copies of the parameters, whose state is `owner`.
    Master { owner: u32, number: u64 },
}

impl Standing {
    /// Of a tensor in a mapping that says no more than its name.
    pub(super) fn named(mapping: u32, key: &str, average: bool) -> Standing {
        match flattened(key) {
            Some((name, slot)) => {
                let parameter = Parameter::Name(name.to_string());
                Standing::Slot { owner: mapping, parameter, slot: slot.to_string() }
            }
            None => Standing::Listed { mapping, key: key.to_string(), average },
        }
    }

    /// The mapping, the first key in it, and whether a key above names an average: of one tensor or of several.
    pub(super) fn listed(&self) -> Option<(u32, &str, bool)> {
        match self {
            Standing::Listed { mapping, key, average } => Some((*mapping, key, *average)),
            Standing::Views(flat) => Some((flat.mapping, &flat.key, flat.average)),
            _ => None,
        }
    }

    /// Bytes of text that it holds.
    pub(super) fn len(&self) -> usize {
        match self {
            Standing::Listed { key, .. } => key.len(),
            Standing::Views(flat) => flat.key.len(),
            Standing::Slot { parameter: Parameter::Name(name), slot, .. } => name.len() + slot.len(),
            Standing::Slot { slot, .. } => slot.len(),
            Standing::Master { .. } => 0,
        }
    }
}

/// Most dimensions of a view that is noted, which bounds memory.
const MAX_DIMS: usize = 8;

/// Where a view lies in its storage.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Window {
    /// Its first element.
    pub(super) offset: u64,
    pub(super) shape: Vec<u64>,
    /// No others lie between its elements.
    pub(super) is_dense: bool,
}

impl Window {
    /// Number of elements; 0 if there are more than can be counted.
    fn elements(&self) -> u64 {
        self.shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim)).unwrap_or(0)
    }

    /// Whether it is a part of a storage of so many elements, small enough to be noted.
    pub(super) fn is_part_of(&self, elements: u64) -> bool {
        (1..elements).contains(&self.elements()) && self.shape.len() <= MAX_DIMS
    }
}

/// The views of one storage that are weights of one mapping. `flatten_parameters` of an LSTM or a GRU makes such storages
/// on a GPU.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Flat {
    /// Where the first of them stands.
    pub(super) mapping: u32,
    key: String,
    average: bool,
    /// The first element and the shape of each. Tied weights are one.
    windows: BTreeSet<(u64, Vec<u64>)>,
    /// None of them has gaps.
    is_dense: bool,
    /// All of them have names of layers.
    pub(super) is_of_layers: bool,
}

impl Flat {
    /// Notes a view of this path in `flat`, if it stands under a key of the same mapping. Answers whether it does.
    pub(super) fn note(flat: &mut Option<Box<Flat>>, window: Window, standing: Option<&Standing>, path: &str) -> bool {
        let Some(Standing::Listed { mapping, key, average }) = standing else { return false };
        let flat = flat.get_or_insert_with(|| {
            Box::new(Flat {
                mapping: *mapping,
                key: key.clone(),
                average: *average,
                windows: BTreeSet::new(),
                is_dense: true,
                is_of_layers: true,
            })
        });
        if flat.mapping != *mapping {
            return false;
        }
        flat.is_dense &= window.is_dense;
        flat.is_of_layers &= role::is_of_layer(path);
        // Of one with gaps only the number of its elements is compared.
        let elements = window.elements();
        flat.windows.insert((window.offset, if window.is_dense { window.shape } else { vec![elements] }));
        true
    }

    /// The shape of each view.
    pub(super) fn shapes(&self) -> impl Iterator<Item = &Vec<u64>> {
        self.windows.iter().map(|(_, shape)| shape)
    }

    /// Whether each of so many elements is in exactly one view.
    pub(super) fn covers(&self, elements: u64) -> bool {
        let mut at = Some(0u64);
        for (offset, shape) in &self.windows {
            at = at.filter(|at| at == offset).and_then(|at| at.checked_add(shape.iter().product()));
        }
        self.is_dense && at == Some(elements)
    }
}

/// Slots that are found at the end of a longer name.
const FLAT: [&str; 5] = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg"];
/// Slots that are found in front of a name, behind `optimizer.state`.
const IN_FRONT: [&str; 3] = ["exp_avg", "exp_avg_sq", "fp32_param"];
/// What may stand between the parts of a name.
const SEPARATORS: [char; 2] = ['.', '/'];

/// The name of the parameter and the slot, if the key is that of flattened optimizer state:
/// `state.layer.weight.exp_avg` and `optim.state.layer.weight.exp_avg` as torch.distributed writes it,
/// `optimizer/layer/weight/exp_avg`, and Megatron's `optimizer.state.exp_avg.layer.weight`.
fn flattened(key: &str) -> Option<(&str, &str)> {
    let [in_front, behind] = any_slot(key);
    in_front.filter(|(_, slot)| IN_FRONT.contains(slot)).or(behind.filter(|(_, slot)| FLAT.contains(slot)))
}

/// Name and slot as the key would have them, whatever the slot: one in front of the name, which has to stand behind
/// `optimizer.state`, and one behind it.
pub(super) fn any_slot(key: &str) -> [Option<(&str, &str)>; 2] {
    let bare = |words: &[&str], key: &'_ str| match key.split_once(SEPARATORS) {
        Some((first, _)) if words.contains(&first) => first.len() + 1,
        _ => 0,
    };
    let own = &key[bare(&["optimizer", "optim"], key)..];
    let state = &own[bare(&["state"], own)..];
    let in_front = state.split_once(SEPARATORS).filter(|_| own.len() < key.len() && state.len() < own.len());
    [in_front.map(|(slot, name)| (name, slot)), state.rsplit_once(SEPARATORS)]
}

/// Keys of the lists in which optimizers for low precision (DeepSpeed's ZeRO and bf16, Megatron, apex) keep their own
/// copies of the parameters; believed only beside one of [`BASES`].
pub(super) const MASTERS: [&str; 5] = [
    "single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_groups_flat", "fp32_from_fp16_params",
    "fp32_from_fp16_groups",
];

/// Keys of the optimizer that such an optimizer wraps.
pub(super) const BASES: [&str; 3] = ["base_optimizer_state", "optimizer_state_dict", "optimizer"];

/// The optimizers of a file that are known by their structure.
#[derive(Debug, Default)]
pub(super) struct Optimizers {
    /// Number of parameters in each group, by the node that holds the state of all parameters. Empty if there are no
    /// groups as optimizers have them: then it is not believed.
    pub(super) groups: HashMap<u32, Rc<Vec<u64>>>,
    /// Names of what an optimizer keeps of one parameter beside tensors, by the node of its state.
    pub(super) foreign: HashMap<(u32, Parameter), Vec<String>>,
    /// The node of the state, by the node of the list of the optimizer's own copies.
    pub(super) masters: HashMap<u32, u32>,
}

/// Whether a container's name says that it is an average of weights.
pub(super) fn names_average(name: &str) -> bool {
    let mut words = name.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase);
    words.any(|word| ["ema", "swa", "shadow", "averaged", "polyak"].contains(&word.as_str()) || word.starts_with("ema"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_flattened_state_are_taken_apart() {
        for (key, name, slot) in [
            ("state.h.0.weight.exp_avg", "h.0.weight", "exp_avg"),
            ("optim.state.h.0.weight.exp_avg_sq", "h.0.weight", "exp_avg_sq"),
            ("optimizer.h.0.weight.exp_avg", "h.0.weight", "exp_avg"),
            ("optimizer/dense_0.kernel/exp_avg", "dense_0.kernel", "exp_avg"),
            ("optimizer/state/dense/kernel/momentum_buffer", "dense/kernel", "momentum_buffer"),
            ("h.0.weight.exp_avg", "h.0.weight", "exp_avg"),
            ("optimizer.state.exp_avg.decoder.weight", "decoder.weight", "exp_avg"),
            ("optimizer.state.fp32_param.decoder.weight", "decoder.weight", "fp32_param"),
        ] {
            assert_eq!(flattened(key), Some((name, slot)), "{key}");
        }
        // A slot in front counts behind the optimizer's state only, and a name alone is none.
        for key in [
            "exp_avg.h.weight", "state.exp_avg.h.weight", "optimizer.exp_avg.h.weight", "exp_avg",
            "optimizer.state.exp_avg",
        ] {
            assert_eq!(flattened(key), None, "{key}");
        }
    }
}
