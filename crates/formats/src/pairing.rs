//! Which moment belongs to which parameter, and what kind of state it is.
//!
//! Names propose, structure decides: a kind is given only where one parameter's state is complete, of one shape, and
//! has nothing in it that stepfs does not know, since an unknown optimizer may mean something else by the same name.
//! What calls itself a moment and is not borne out becomes `Other`. Tensors become a `Weight` here only where an
//! optimizer keeps state under their names.

use std::collections::{BTreeMap, HashMap};

use super::optimizers::{Slots, State, doubt, is_full, is_real};
use super::role;
use super::slots::{self, Flat, Optimizers, Parameter, Standing};
use super::{Role, Tensor};

/// Optimizers in one file whose parameters are looked for by number, which takes time in proportion to all weights. A GAN
/// has two; thousands would be an attack.
const MAX_NUMBERED: usize = 64;

/// Parts of one name that are looked at as the name of a moment: each costs a copy of the name.
const MAX_NAMED: usize = 8;

/// Gives optimizer state its kind and pairs it with its parameter and its other moment; finds averages of weights.
/// `tensors` by ascending extent, with what is known of where each stands; roles as `role` has them.
pub(super) fn refine(tensors: &mut [Tensor], standings: &[Option<Standing>], optimizers: &Optimizers) {
    moments_by_name(tensors, standings);
    averages(tensors, standings);
    let masters = masters(tensors, standings);
    let mut owners: BTreeMap<u32, BTreeMap<&Parameter, Slots>> = BTreeMap::new();
    for (i, standing) in standings.iter().enumerate() {
        if let Some(Standing::Slot { owner, parameter, slot }) = standing
            && !matches!(tensors[i].role, Role::Weight | Role::Ema)
        {
            owners.entry(*owner).or_default().entry(parameter).or_default().push((slot, i));
        }
    }
    unknown_slots(tensors, standings, &mut owners);
    weights_by_name(tensors, standings, &owners);
    let weights = Weights::of(tensors, standings);
    let mut done = vec![false; tensors.len()];
    let mut verdicts = Vec::new();
    for (at, (owner, parameters)) in owners.iter().enumerate() {
        let groups = optimizers.groups.get(owner).map(|groups| groups.as_slice());
        let numbered = match (masters.get(owner), groups) {
            (Some(masters), _) => masters.clone(),
            (None, Some(groups)) if at < MAX_NUMBERED => weights.by_number(tensors, groups, parameters),
            (None, _) => HashMap::new(),
        };
        for (parameter, slots) in parameters {
            let claimed = match parameter {
                Parameter::Number(n) => numbered.get(n).copied(),
                Parameter::Name(name) => weights.by_name(name),
                Parameter::Node(_) => None,
            };
            let shape = full_shape(tensors, slots);
            let of = claimed.filter(|&w| shape == Some(&tensors[w].shape));
            let is_misfit =
                matches!(parameter, Parameter::Name(_)) && claimed.is_some() && of.is_none() && shape.is_some();
            let known = match (parameter, groups) {
                (Parameter::Number(n), Some(groups)) => *n < groups.iter().fold(0, |a, &g| a.saturating_add(g)),
                (_, groups) => groups.is_some_and(|groups| !groups.is_empty()),
            };
            let foreign = optimizers.foreign.get(&(*owner, (*parameter).clone())).map_or(&[][..], Vec::as_slice);
            let found = match is_misfit {
                true => doubt(slots, "named like optimizer state, but not of its parameter's shape"),
                false => State { tensors, slots, foreign, known, matched: of.is_some() }.verdicts(),
            };
            for verdict in found {
                done[verdict.tensor] = true;
                verdicts.push((verdict, of));
            }
        }
    }
    for (verdict, of) in verdicts {
        let tensor = &mut tensors[verdict.tensor];
        (tensor.role, tensor.why, tensor.partner) = (verdict.role, verdict.why, verdict.partner);
        tensor.used = verdict.used;
        tensor.of = of.filter(|_| !matches!(verdict.role, Role::Other | Role::Optimizer));
    }
    for (i, tensor) in tensors.iter_mut().enumerate() {
        if !done[i] && tensor.role == Role::Optimizer && role::by_name_only(tensor.why) {
            (tensor.role, tensor.why) =
                (Role::Other, "named like optimizer state, but nothing beside it bears that out");
        }
    }
}

/// Takes the role of a weight away from two tensors whose names differ in one part only, which names Adam's first
/// moment in one, its second in the other: `opt_state/0/mu/dense/kernel` and `opt_state/0/nu/dense/kernel`. A moment
/// moves as a weight does.
fn moments_by_name(tensors: &mut [Tensor], standings: &[Option<Standing>]) {
    let listed = |i: usize| {
        let (mapping, key, _) = standings[i].as_ref()?.listed()?;
        (tensors[i].role == Role::Weight).then_some((mapping, key))
    };
    let keys: HashMap<(u32, &str), usize> = (0..tensors.len()).filter_map(|i| Some((listed(i)?, i))).collect();
    let mut found = Vec::new();
    for (&(mapping, key), &first) in &keys {
        let (mut at, mut left) = (0, MAX_NAMED);
        for part in key.split_inclusive(['.', '/', ':']) {
            let name = part.trim_end_matches(['.', '/', ':']);
            if let Some(other) = role::second_moment(name).filter(|_| left > 0) {
                left -= 1;
                let second = format!("{}{other}{}", &key[..at], &key[at + name.len()..]);
                found.extend(keys.get(&(mapping, second.as_str())).map(|&second| [first, second]));
            }
            at += part.len();
        }
    }
    for tensor in found.into_iter().flatten() {
        (tensors[tensor].role, tensors[tensor].why) = (Role::Other, "named like one of Adam's two moments");
    }
}

/// Adds what else an optimizer keeps under the name of a parameter. A slot that stepfs does not know makes it another
/// optimizer.
fn unknown_slots<'a>(
    tensors: &[Tensor],
    standings: &'a [Option<Standing>],
    owners: &mut BTreeMap<u32, BTreeMap<&'a Parameter, Slots<'a>>>,
) {
    for (i, standing) in standings.iter().enumerate() {
        if let Some(Standing::Listed { mapping, key, .. }) = standing
            && tensors[i].role == Role::Optimizer
            && let Some(parameters) = owners.get_mut(mapping)
        {
            for (name, slot) in slots::any_slot(key).into_iter().flatten() {
                if let Some(slots) = parameters.get_mut(&Parameter::Name(name.to_string())) {
                    slots.push((slot, i));
                    break;
                }
            }
        }
    }
}

/// Makes weights of the tensors beside other things in a mapping, if an optimizer keeps state under the names of most
/// of them, of their shapes. torchtitan puts the model's tensors at the root of its checkpoint, beside `optimizer`.
fn weights_by_name(
    tensors: &mut [Tensor],
    standings: &[Option<Standing>],
    owners: &BTreeMap<u32, BTreeMap<&Parameter, Slots>>,
) {
    // By mapping: the tensors that would be weights in a state dict.
    let mut beside: BTreeMap<u32, HashMap<&str, usize>> = BTreeMap::new();
    for (i, standing) in standings.iter().enumerate() {
        if let Some(Standing::Listed { mapping, key, average: false }) = standing
            && tensors[i].why == role::NOT_LISTED
            && role::tensor(role::Context::Open, true, key, tensors[i].dtype).0 == Role::Weight
        {
            beside.entry(*mapping).or_default().insert(key, i);
        }
    }
    for names in beside.into_values() {
        let is_of = |(parameter, slots): &(&&Parameter, &Slots)| match parameter {
            Parameter::Name(name) => {
                names.get(name.as_str()).is_some_and(|&i| full_shape(tensors, slots) == Some(&tensors[i].shape))
            }
            _ => false,
        };
        let named = owners.values().flatten().filter(is_of).count();
        if 2 * named > names.len() {
            for i in names.into_values() {
                (tensors[i].role, tensors[i].why) =
                    (Role::Weight, "beside others that an optimizer keeps state of, by name");
            }
        }
    }
}

/// The shape that all full slots of one parameter have.
fn full_shape<'t>(tensors: &'t [Tensor], slots: &Slots) -> Option<&'t Vec<u64>> {
    let mut shapes = slots.iter().filter(|(slot, _)| is_full(slot)).map(|&(_, i)| &tensors[i]);
    // ASGD's `mu` is one number, and Adam's by another name.
    let many: Vec<_> = shapes.by_ref().filter(|t| !(t.shape.is_empty() && slots.len() > 2)).map(|t| &t.shape).collect();
    let (first, rest) = many.split_first()?;
    rest.iter().all(|shape| shape == first).then_some(*first)
}

/// A name without what wrappers (DistributedDataParallel, AveragedModel) put before it.
fn bare(name: &str) -> &str {
    name.strip_prefix("module.").unwrap_or(name)
}

/// The weights of a file, to be found by name or by number.
struct Weights<'a> {
    names: HashMap<&'a str, Vec<usize>>,
    /// Those of each mapping in order of their payloads, which is the order of the mapping; then all.
    families: Vec<Vec<usize>>,
    /// Those of them with several weights in one storage.
    flats: HashMap<usize, &'a Flat>,
}

impl<'a> Weights<'a> {
    fn of(tensors: &[Tensor], standings: &'a [Option<Standing>]) -> Weights<'a> {
        let mut names: HashMap<&str, Vec<usize>> = HashMap::new();
        let mut families: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        let (mut all, mut flats) = (Vec::new(), HashMap::new());
        for (i, standing) in standings.iter().enumerate() {
            let mapping = match standing {
                Some(Standing::Listed { mapping, key, .. }) if tensors[i].role == Role::Weight => {
                    names.entry(bare(key)).or_default().push(i);
                    *mapping
                }
                Some(Standing::Views(flat)) => {
                    flats.insert(i, &**flat);
                    flat.mapping
                }
                _ => continue,
            };
            families.entry(mapping).or_default().push(i);
            all.push(i);
        }
        let mut families: Vec<_> = families.into_values().collect();
        if families.len() > 1 {
            families.push(all);
        }
        Weights { names, families, flats }
    }

    /// The only weight of this name.
    fn by_name(&self, name: &str) -> Option<usize> {
        match self.names.get(bare(name)).map(Vec::as_slice) {
            Some([one]) => Some(*one),
            _ => None,
        }
    }

    /// The weights of numbered parameters. A group lists its parameters in the model's order, and groups are made by
    /// kind. So those of one shape are paired in order where all of that shape are in one group, and there are as
    /// many weights of that shape: then a frozen or shared one cannot shift them. Only if one mapping alone can be
    /// meant. State of a weight that shares its storage with others has no tensor to be paired with.
    fn by_number(
        &self,
        tensors: &[Tensor],
        groups: &[u64],
        parameters: &BTreeMap<&Parameter, Slots>,
    ) -> HashMap<u64, usize> {
        let ends: Vec<u64> = groups
            .iter()
            .scan(0u64, |end, &n| {
                *end = end.saturating_add(n);
                Some(*end)
            })
            .collect();
        // Numbers ascend, so those of each shape do.
        let mut wanted: HashMap<&Vec<u64>, Vec<(u64, usize)>> = HashMap::new();
        for (parameter, slots) in parameters {
            if let (Parameter::Number(n), Some(shape)) = (parameter, full_shape(tensors, slots)) {
                wanted.entry(shape).or_default().push((*n, ends.partition_point(|end| end <= n)));
            }
        }
        let shapes = |family: &[usize], views: bool| {
            let mut shapes: HashMap<&Vec<u64>, Vec<Option<usize>>> = HashMap::new();
            for &i in family {
                match self.flats.get(&i).filter(|_| views) {
                    Some(flat) => flat.shapes().for_each(|shape| shapes.entry(shape).or_default().push(None)),
                    None if tensors[i].role == Role::Weight => {
                        shapes.entry(&tensors[i].shape).or_default().push(Some(i));
                    }
                    None => {}
                }
            }
            shapes
        };
        let fits = |have: &HashMap<&Vec<u64>, Vec<Option<usize>>>| {
            wanted.iter().all(|(shape, numbers)| have.get(shape).is_some_and(|have| have.len() >= numbers.len()))
        };
        let (all, single) = match self.families.len() {
            0 => return HashMap::new(),
            1 => (None, &self.families[..]),
            n => (self.families.last(), &self.families[..n - 1]),
        };
        let fitting_of = |family: &Vec<usize>| [false, true].map(|views| shapes(family, views)).into_iter().find(fits);
        let mut fitting: Vec<_> = single.iter().filter_map(fitting_of).collect();
        if fitting.is_empty() {
            fitting.extend(all.and_then(fitting_of));
        }
        let [have] = fitting.as_slice() else { return HashMap::new() };
        let mut found = HashMap::new();
        for (shape, numbers) in wanted {
            let have: Option<Vec<usize>> = have[shape].iter().copied().collect();
            let Some(have) = have else { continue };
            if have.len() == numbers.len() && numbers.iter().all(|(_, group)| *group == numbers[0].1) {
                found.extend(numbers.iter().map(|&(n, _)| n).zip(have));
            }
        }
        found
    }
}

/// Names the copies that an optimizer keeps of its parameters; by owner and number.
fn masters(tensors: &mut [Tensor], standings: &[Option<Standing>]) -> HashMap<u32, HashMap<u64, usize>> {
    let mut found: HashMap<u32, HashMap<u64, usize>> = HashMap::new();
    for (i, standing) in standings.iter().enumerate() {
        if let Some(Standing::Master { owner, number }) = standing
            && tensors[i].role == Role::Optimizer
            && is_real(tensors[i].dtype)
        {
            (tensors[i].role, tensors[i].why) =
                (Role::Master, "an optimizer's own copy of parameters, beside its state");
            found.entry(*owner).or_default().insert(*number, i);
        }
    }
    found
}

/// Names the averages: below a key that says so, with a weight of the same name, shape and type elsewhere.
fn averages(tensors: &mut [Tensor], standings: &[Option<Standing>]) {
    let mut names: HashMap<&str, Vec<usize>> = HashMap::new();
    let mut copies: BTreeMap<u32, Vec<(&str, usize)>> = BTreeMap::new();
    for (i, standing) in standings.iter().enumerate() {
        match (standing.as_ref().and_then(Standing::listed), tensors[i].role) {
            (Some((_, key, false)), Role::Weight) => names.entry(bare(key)).or_default().push(i),
            (Some((mapping, key, true)), Role::Weight | Role::Other) => {
                copies.entry(mapping).or_default().push((key, i));
            }
            _ => {}
        }
    }
    for copies in copies.into_values() {
        let of = |&(key, i): &(&str, usize)| match names.get(bare(key)).map(Vec::as_slice) {
            Some(&[w]) if tensors[w].shape == tensors[i].shape && tensors[w].dtype == tensors[i].dtype => Some((i, w)),
            _ => None,
        };
        if copies.iter().any(|copy| tensors[copy.1].role == Role::Weight && of(copy).is_none()) {
            continue;
        }
        let pairs: Vec<(usize, usize)> = copies.iter().filter_map(of).collect();
        for (i, w) in pairs {
            let tensor = &mut tensors[i];
            // What was no weight by where it stands is not quantized because of its name.
            tensor.lossless = tensor.role != Role::Weight;
            tensor.why = "named like an average, with a weight's name, shape and type";
            (tensor.role, tensor.of) = (Role::Ema, Some(w));
        }
    }
}
