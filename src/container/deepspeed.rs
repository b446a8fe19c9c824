//! What DeepSpeed's ZeRO 1 and 2 says of the weights in its `mp_rank_*_model_states.pt`.
//!
//! All parameters are views of one flat storage, padding included. The masters and moments lie in other files, each
//! rank's share in its own. So neither a shape nor a number shows what the optimizer trains. But DeepSpeed lists it:
//! `param_shapes` has the name and the shape of each parameter that its optimizer trains, and `shared_params` the
//! names of tied ones.

use std::collections::{BTreeSet, HashMap};

use super::pickle::{Graph, Item, Node};
use super::proof::LISTED;
use super::storages::Records;
use super::walk::pairs;
use super::{Role, Tensor, view};

/// Proves the weights of which all views in `module` are parameters that DeepSpeed's optimizer trains. `numbers` has
/// each tensor's record.
pub(super) fn prove(graph: &Graph, records: &dyn Records, tensors: &mut [Tensor], numbers: &[u32]) {
    let get = |name: &str| {
        let found = pairs(graph, graph.root).iter().find(|&&(key, _)| graph.str(key) == Some(name));
        found.map_or(Item::None, |&(_, value)| value)
    };
    let trained = trained(graph, get("param_shapes"));
    if trained.is_empty() {
        return;
    }
    let shared = pairs(graph, get("shared_params")).iter();
    let shared: HashMap<&str, &str> =
        shared.filter_map(|&(name, of)| Some((graph.str(name)?, graph.str(of)?))).collect();
    // By record: whether all views so far are trained.
    let mut views: HashMap<u32, bool> = HashMap::new();
    for &(key, value) in pairs(graph, get("module")) {
        let Some(number) = view::view(graph, value).and_then(|v| records.record(v.storage.key)).map(|r| r.number)
        else {
            continue;
        };
        let name = graph.str(key).map(|name| shared.get(name).copied().unwrap_or(name));
        let listed = name.and_then(|name| trained.get(name));
        let is_trained = listed.is_some() && view::shape(graph, value).as_ref() == listed;
        *views.entry(number).or_insert(true) &= is_trained;
    }
    for (tensor, number) in tensors.iter_mut().zip(numbers) {
        if tensor.role == Role::Weight && views.get(number) == Some(&true) {
            tensor.trained = Some(LISTED);
        }
    }
}

/// The parameters in `param_shapes`: a list with a mapping for each group, from name to shape.
fn trained(graph: &Graph, groups: Item) -> HashMap<&str, Vec<u64>> {
    let Item::Node(groups) = groups else { return HashMap::new() };
    let Node::List(groups) = graph.node(groups) else { return HashMap::new() };
    // A pickle may list one mapping a million times.
    let groups: BTreeSet<u32> = groups.nodes.iter().map(|&(_, group)| group).collect();
    let of_groups = groups.into_iter().flat_map(|group| pairs(graph, Item::Node(group)));
    of_groups.filter_map(|&(name, shape)| Some((graph.str(name)?, view::sizes(graph, shape)?))).collect()
}
