//! The state of optax's optimizers, by paths: `opt_state/0/mu/Dense_0/kernel` beside `params/Dense_0/kernel`.
//!
//! A state is believed only if it is whole. Adam's has `count`, `mu` and `nu`, a momentum has `trace`, and neither
//! has a tensor beside them (AMSGrad has `nu_max`). Both trees of Adam have the same names, shapes and types. And the
//! file must have a tree of parameters with these names and shapes, outside of optimizers.
//!
//! Such a state proves the parameters. But `mu` and `nu` stay exact, because optax's Adam shares their names with others.
//! Adamax divides by `nu` itself, not by its root. Ano takes the sign of `mu`, and ACProp divides a fresh gradient.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use super::optimizers::is_real;
use super::proof::{BY_NAME, Trained, Training};
use super::slots::{self, Optimizers, Parameter, Standing};
use super::{Role, Tensor, pairing};

/// Trees of state that are looked at, each of which takes time in proportion to its tensors. A model has a few.
const MAX_STATES: usize = 64;

/// Trees of parameters that are compared with one state.
const MAX_TREES: usize = 16;

/// Levels of a path at which a state is looked for. optax nests some four.
const MAX_LEVELS: usize = 32;

/// The first number of an optimizer's state. Mappings of weights have the numbers below.
const OWNERS: u32 = 1 << 20;

/// The trees of a state.
const TREES: [&str; 3] = ["mu", "nu", MOMENTUM];
const MOMENTUM: &str = "trace";

const OF_OPTAX: &str = "a state of optax: several of its optimizers use the names mu and nu, for different things";

/// The tensors of one state, by tree and by the rest of the path.
#[derive(Default)]
struct State<'t> {
    trees: BTreeMap<&'static str, BTreeMap<&'t str, usize>>,
    has_count: bool,
    has_others: bool,
}

/// Finds pairs and proofs among the tensors of a file, by ascending extent. `others` are the paths of all that is no
/// tensor.
pub(super) fn relate(tensors: &mut [Tensor], others: &[String]) -> Training {
    let listed = |mapping: u32, key: &str, average: bool| Standing::Listed { mapping, key: key.to_string(), average };
    let mut standings: Vec<_> = tensors.iter().map(|tensor| Some(listed(0, &tensor.path, false))).collect();
    let mut optimizers = Optimizers::default();
    let (mut of_states, mut proven, mut adams) = (Vec::new(), Vec::new(), Vec::new());
    let places: HashMap<&str, usize> = tensors.iter().enumerate().map(|(at, t)| (t.path.as_str(), at)).collect();
    let mut models: HashMap<&str, u32> = HashMap::new();
    for (owner, state) in (OWNERS..).zip(states(tensors, others).into_values()) {
        let Some(first) = state.trees.values().next().filter(|_| state.is_known(tensors)) else { continue };
        let found = parameters(tensors, &places, first);
        if found.is_empty() {
            continue;
        }
        // Of two trees nobody knows which one is trained.
        if let [(_, only)] = found.iter().filter(|(prefix, _)| !slots::names_average(prefix)).collect::<Vec<_>>()[..] {
            proven.extend(only.iter().map(|(_, parameter)| *parameter));
        }
        for (prefix, parameters) in &found {
            let next = models.len() as u32 + 1;
            let mapping = *models.entry(*prefix).or_insert(next);
            for (key, parameter) in parameters {
                standings[*parameter] = Some(listed(mapping, key, slots::names_average(prefix)));
            }
        }
        of_states.extend(state.trees.values().flat_map(|tree| tree.values().copied()));
        let Some(trace) = state.trees.get(MOMENTUM) else {
            let mut trained = Trained { count: first.len() as u64, ..Trained::default() };
            first.values().for_each(|&mu| *trained.shapes.entry(tensors[mu].shape.clone()).or_default() += 1);
            adams.push(trained);
            continue;
        };
        optimizers.groups.insert(owner, Rc::new(vec![trace.len() as u64]));
        for (name, &tensor) in trace {
            let (parameter, slot) = (Parameter::Name(name.to_string()), "momentum_buffer".to_string());
            standings[tensor] = Some(Standing::Slot { owner, parameter, slot });
        }
    }
    for tensor in of_states {
        (tensors[tensor].role, tensors[tensor].why) = (Role::Optimizer, OF_OPTAX);
    }
    pairing::refine(tensors, &standings, &optimizers);
    let mut training = Training::of(tensors, &standings, &optimizers);
    for parameter in proven {
        if tensors[parameter].is_weight() {
            tensors[parameter].trained = Some(BY_NAME);
        }
    }
    training.optimizers.extend(adams);
    // Averages of what is proven now.
    training.prove(tensors, &[]);
    training
}

/// The states of a file, by the path above their trees.
fn states<'t>(tensors: &'t [Tensor], others: &[String]) -> BTreeMap<&'t str, State<'t>> {
    let mut states: BTreeMap<&str, State> = BTreeMap::new();
    for (at, tensor) in tensors.iter().enumerate() {
        if let Some((prefix, tree, rest)) = split(&tensor.path) {
            states.entry(prefix).or_default().trees.entry(tree).or_default().insert(rest, at);
        }
    }
    if states.len() > MAX_STATES {
        return BTreeMap::new();
    }
    let arrays = tensors.iter().map(|t| (t.path.as_str(), t.shape.is_empty() && !is_real(t.dtype)));
    let beside = arrays.chain(others.iter().map(|path| (path.as_str(), false)));
    for (path, may_count) in beside.filter(|(path, _)| split(path).is_none()) {
        // All that stands below the path above the trees counts, at any depth.
        for (at, _) in path.match_indices('/').take(MAX_LEVELS) {
            let Some(state) = states.get_mut(&path[..at]) else { continue };
            let is_count = &path[at..] == "/count" && may_count;
            state.has_count |= is_count;
            state.has_others |= !is_count;
        }
    }
    states
}

/// What stands before and behind the first tree in a path. A tree at the root of a file is none of optax's.
fn split(path: &str) -> Option<(&str, &'static str, &str)> {
    let mut at = 0;
    for part in path.split('/') {
        if let Some(tree) = TREES.into_iter().find(|tree| *tree == part) {
            let rest = path[at + part.len()..].strip_prefix('/')?;
            return (at > 0).then(|| (&path[..at - 1], tree, rest));
        }
        at += part.len() + 1;
    }
    None
}

impl State<'_> {
    fn is_known(&self, tensors: &[Tensor]) -> bool {
        let same = |(a, b): (&usize, &usize)| {
            let (a, b) = (&tensors[*a], &tensors[*b]);
            a.shape == b.shape && a.dtype == b.dtype
        };
        let is_adam = || {
            let (Some(mu), Some(nu)) = (self.trees.get("mu"), self.trees.get("nu")) else { return false };
            self.has_count && mu.keys().eq(nu.keys()) && mu.values().zip(nu.values()).all(same)
        };
        // A layer may be called `trace`. Only a key above it, such as `opt_state`, says that it is none.
        let is_optimizers = |&tensor: &usize| tensors[tensor].role == Role::Optimizer;
        let is_momentum = || self.trees.get(MOMENTUM).is_some_and(|trace| trace.values().all(is_optimizers));
        let is_whole = match self.trees.len() {
            1 => is_momentum() && !self.has_count,
            2 => is_adam(),
            _ => false,
        };
        is_whole && !self.has_others
    }
}

/// Trees that have all these names, with the same shapes, and are no optimizer's: the path above each, and its
/// tensors by name.
fn parameters<'t>(
    tensors: &'t [Tensor],
    places: &HashMap<&str, usize>,
    wanted: &BTreeMap<&'t str, usize>,
) -> Vec<(&'t str, Vec<(&'t str, usize)>)> {
    let Some((first, _)) = wanted.first_key_value() else { return Vec::new() };
    let weights = tensors.iter().filter(|tensor| tensor.role == Role::Weight);
    let prefixes = weights.filter_map(|tensor| tensor.path.strip_suffix(first)?.strip_suffix('/'));
    let is_tree = |prefix: &&str| prefix.split('/').any(|part| TREES.contains(&part));
    let prefixes = prefixes.filter(|prefix| !is_tree(prefix));
    let mut found = Vec::new();
    for prefix in prefixes.take(MAX_TREES) {
        let tensor = |(name, &state): (&&'t str, &usize)| {
            let parameter = *places.get(format!("{prefix}/{name}").as_str())?;
            let fits = tensors[parameter].shape == tensors[state].shape && tensors[parameter].role == Role::Weight;
            fits.then_some((*name, parameter))
        };
        let parameters: Option<Vec<(&str, usize)>> = wanted.iter().map(tensor).collect();
        found.extend(parameters.map(|parameters| (prefix, parameters)));
    }
    found
}
