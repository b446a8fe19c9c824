//! Proves by the optimizers in a file which weights are trained parameters.
//!
//! A state dict holds parameters and buffers alike, and a normalizer's variance looks like a weight. Only an
//! optimizer knows its parameters: it keeps state of each, or at least counts them. A weight without such a proof may
//! still be proven by its moves, when it is archived; otherwise it stays lossless.
//!
//! An optimizer must never prove a tensor that it does not train. So a mapping of weights counts as the optimizer's
//! only if it has every shape of which the optimizer keeps state. A shape proves its weights only if the mapping has
//! no more of them than the optimizer trains.
//!
//! A storage of several weights counts as each of its views, or as one weight: whichever has the optimizer's shapes.

use std::collections::{BTreeMap, HashMap};

use super::optimizers::is_full;
use super::role::is_of_layer;
use super::slots::{Flat, Optimizers, Parameter, Standing};
use super::{Role, Tensor, Use, role};

/// The parameters that one optimizer trains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trained {
    /// Parameters in all of its groups; 0 where the file does not say.
    pub count: u64,
    /// How many parameters of each shape it keeps state of.
    pub shapes: BTreeMap<Vec<u64>, u64>,
}

/// The optimizers of a file, and the mappings of weights that they may train.
#[derive(Clone, Debug, Default)]
pub(super) struct Training {
    pub(super) optimizers: Vec<Trained>,
    /// Indexes of the weights in one mapping: a module's `state_dict()`.
    families: Vec<Vec<usize>>,
    /// Those of them with several weights in one storage.
    flats: Flats,
    /// Weights that are parts of larger ones and hide their structure: exact, unless an optimizer proves them.
    hidden: Vec<usize>,
}

/// Storages of several weights, by the index of their tensor.
type Flats = BTreeMap<usize, Flat>;

impl Training {
    /// Takes a file's tensors, whose roles and pairs are known, and proves as many as the file itself can.
    pub(super) fn of(tensors: &mut [Tensor], standings: &[Option<Standing>], known: &Optimizers) -> Training {
        let flat = |(i, standing): (usize, &Option<Standing>)| match standing {
            Some(Standing::Views(flat)) => Some((i, (**flat).clone())),
            _ => None,
        };
        let training = Training {
            optimizers: optimizers(tensors, standings, known),
            families: families(tensors, standings),
            flats: standings.iter().enumerate().filter_map(flat).collect(),
            hidden: Vec::new(),
        };
        by_pairs(tensors, standings);
        training.prove(tensors, &training.optimizers);
        training
    }

    /// Adds what is known of tensors that now stand from index `first` on.
    pub(super) fn append(&mut self, other: Training, first: usize) {
        self.optimizers.extend(other.optimizers);
        let families = other.families.into_iter();
        self.families.extend(families.map(|family| family.into_iter().map(|index| first + index).collect()));
        self.flats.extend(other.flats.into_iter().map(|(index, flat)| (first + index, flat)));
        self.hidden.extend(other.hidden.into_iter().map(|index| first + index));
    }

    /// Follows tensors that were put in another order: `place` has the new index of each.
    pub(super) fn renumber(&mut self, place: &[usize]) {
        self.families.iter_mut().flatten().chain(&mut self.hidden).for_each(|index| *index = place[*index]);
        self.flats = std::mem::take(&mut self.flats).into_iter().map(|(index, flat)| (place[index], flat)).collect();
    }

    /// Proves the weights that these optimizers train: of the file itself, or of another file of its checkpoint.
    pub(super) fn prove(&self, tensors: &mut [Tensor], optimizers: &[Trained]) {
        by_optimizers(tensors, &self.families, &self.flats, optimizers);
        self.hidden.iter().for_each(|&i| tensors[i].lossless = tensors[i].trained.is_none());
    }

    /// Takes the tensors at these indexes for parts of tensors of these shapes.
    pub(super) fn hide(&mut self, tensors: &mut [Tensor], wholes: &[(usize, Vec<u64>)]) {
        let hides = |(i, whole): &&(usize, Vec<u64>)| tensors[*i].is_weight() && tensors[*i].hides(whole);
        self.hidden = wholes.iter().filter(hides).map(|(i, _)| *i).collect();
        self.hidden.iter().for_each(|&i| tensors[i].lossless = tensors[i].trained.is_none());
    }
}

/// Slots of factored second moments: one for the rows, one for the columns (torch's Adafactor, transformers').
const FACTORS: [[&str; 2]; 2] = [["row_var", "col_var"], ["exp_avg_sq_row", "exp_avg_sq_col"]];

/// Most optimizers that are compared with the weights of a file, each of which takes time in proportion to them.
const MOST_OPTIMIZERS: usize = 64;
/// Most mappings of weights that are compared with the optimizers.
const MOST_FAMILIES: usize = 256;

/// Reasons. A proof by numbers and shapes alone is checked once more if the name is not that of a layer's parameter.
pub(super) const BY_NAME: &str = "an optimizer keeps state under its name";
const OF_ITS_OWN: &str = "an optimizer keeps state of it";
const OF_ITS_SHAPE: &str = "an optimizer keeps state of as many parameters of its shape as there are";
const COUNTED: &str = "an optimizer trains as many parameters as there are";
/// Of one flat storage.
const VIEWS: &str = "an optimizer trains all of the parameters that share its bytes";
/// Workers push gradients to a parameter server for each of its variables, and for nothing else.
pub(super) const FORMAT: &str = "a variable of a parameter server";
/// Of one flat storage, or of a weight by itself.
pub(super) const LISTED: &str = "DeepSpeed lists it among the parameters that its optimizer trains";

/// Slots of one parameter with their tensors, by parameter.
type Parameters<'a> = BTreeMap<&'a Parameter, Vec<(&'a str, &'a Tensor)>>;

/// The optimizers of a file, by the slots below each.
fn optimizers(tensors: &[Tensor], standings: &[Option<Standing>], optimizers: &Optimizers) -> Vec<Trained> {
    let mut slots: BTreeMap<u32, Parameters> = BTreeMap::new();
    for (tensor, standing) in tensors.iter().zip(standings) {
        if let Some(Standing::Slot { owner, parameter, slot }) = standing
            && !matches!(tensor.role, Role::Weight | Role::Other)
        {
            slots.entry(*owner).or_default().entry(parameter).or_default().push((slot, tensor));
        }
    }
    // SGD without momentum keeps no state.
    for owner in optimizers.groups.keys() {
        slots.entry(*owner).or_default();
    }
    let trained = |(owner, parameters): (u32, Parameters)| {
        let groups = optimizers.groups.get(&owner).map_or(&[][..], |groups| groups);
        let mut trained = Trained { count: groups.iter().fold(0, |n, &g| n.saturating_add(g)), ..Trained::default() };
        for shape in parameters.values().filter_map(|slots| shape_of(slots)) {
            *trained.shapes.entry(shape).or_default() += 1;
        }
        trained
    };
    slots.into_iter().take(MOST_OPTIMIZERS).map(trained).filter(|t| *t != Trained::default()).collect()
}

/// The shape of the parameter whose state these slots are.
fn shape_of(slots: &[(&str, &Tensor)]) -> Option<Vec<u64>> {
    let get = |name: &str| slots.iter().find(|(slot, _)| *slot == name).map(|(_, tensor)| &tensor.shape);
    // Also in a mapping or an object that is a slot (bitsandbytes, torchao).
    let full = slots.iter().filter(|(slot, _)| slot.split('/').any(is_full)).max_by_key(|(_, tensor)| tensor.bytes());
    if let Some((_, tensor)) = full {
        return Some(tensor.shape.clone());
    }
    let (row, column) = FACTORS.iter().find_map(|[row, column]| get(row).zip(get(column)))?;
    match (row.split_last(), column.split_last()) {
        // torch keeps both with a dimension of 1 in place of the other.
        (Some((1, rows)), Some((width, _))) if row.len() == column.len() && row.len() > 1 => {
            Some([rows, &[*width]].concat())
        }
        (_, Some((width, _))) => Some([row, &[*width][..]].concat()),
        _ => None,
    }
}

fn families(tensors: &[Tensor], standings: &[Option<Standing>]) -> Vec<Vec<usize>> {
    let mut families: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (i, standing) in standings.iter().enumerate() {
        match standing {
            Some(Standing::Listed { mapping, .. }) if tensors[i].is_weight() => {
                families.entry(*mapping).or_default().push(i);
            }
            // If something else shares its bytes, it is no weight. Those in it still count.
            Some(Standing::Views(flat)) => families.entry(flat.mapping).or_default().push(i),
            _ => {}
        }
    }
    families.into_values().collect()
}

/// Proves the weights that an optimizer's state is paired with.
fn by_pairs(tensors: &mut [Tensor], standings: &[Option<Standing>]) {
    let state = tensors.iter().zip(standings).filter(|(tensor, _)| tensor.role.group() == Role::Optimizer);
    let named =
        |standing: &Option<Standing>| matches!(standing, Some(Standing::Slot { parameter: Parameter::Name(_), .. }));
    let paired: Vec<(usize, bool)> =
        state.filter_map(|(tensor, standing)| Some((tensor.of?, named(standing)))).collect();
    for (i, named) in paired {
        if tensors[i].is_weight() {
            tensors[i].trained = Some(if named { BY_NAME } else { OF_ITS_OWN });
        }
    }
}

impl Tensor {
    /// Whether it may be many parameters in one flat storage, so that its shape says nothing of theirs.
    pub fn is_flat(&self) -> bool {
        (self.role == Role::Master && self.used != Use::Iterate)
            || (self.trained == Some(LISTED) && !self.aliases.is_empty())
            || self.trained == Some(VIEWS)
    }

    /// Whether an optimizer keeps state of it by its number, not by its name.
    pub fn is_paired_by_number(&self) -> bool {
        self.trained == Some(OF_ITS_OWN)
    }

    /// Whether only numbers or shapes show that it is trained, whatever its name says. A statistic of each parameter
    /// has them, too.
    pub fn is_trained_by_numbers(&self) -> bool {
        matches!(self.trained, Some(OF_ITS_SHAPE | COUNTED | VIEWS))
    }

    /// Whether numbers and shapes alone show that it is trained, and not even its name bears that out. An optimizer may
    /// train a parameter of this shape that is in no file, and this be a buffer.
    pub fn is_trained_by_shape_only(&self) -> bool {
        self.trained.is_some_and(|why| ![BY_NAME, FORMAT, LISTED].contains(&why)) && !is_of_layer(&self.path)
    }
}

/// Proves the weights of the mappings that these optimizers train.
fn by_optimizers(tensors: &mut [Tensor], families: &[Vec<usize>], flats: &Flats, optimizers: &[Trained]) {
    let mut candidates: Vec<Trained> = optimizers.iter().take(MOST_OPTIMIZERS).cloned().collect();
    if candidates.len() > 1 {
        candidates.push(together(&candidates));
    }
    let families = &families[..families.len().min(MOST_FAMILIES)];
    let whole = Flats::new();
    let readings = &[&whole, flats][..if flats.is_empty() { 1 } else { 2 }];
    for trained in &candidates {
        let does_fit = |family: &&Vec<usize>| {
            readings.iter().any(|flats| fits(&shapes_of(tensors, family.as_slice(), flats), trained))
        };
        let mut fitting: Vec<&Vec<usize>> = families.iter().filter(does_fit).collect();
        if fitting.len() > 1 {
            // A model, and its parameters' state.
            fitting.retain(|family| family.iter().all(|&i| stands_in_model(&tensors[i].path)));
        }
        for family in fitting {
            readings.iter().for_each(|flats| prove(tensors, family, flats, trained));
        }
    }
    // A model and its critic may be two mappings of one optimizer.
    let all: Vec<usize> = families.iter().flatten().copied().collect();
    if families.len() > 1
        && let Some(trained) = candidates.last()
    {
        readings.iter().for_each(|flats| prove(tensors, &all, flats, trained));
    }
    averages(tensors);
}

/// Several optimizers as one: two may train parts of one model.
fn together(optimizers: &[Trained]) -> Trained {
    let mut all = Trained::default();
    for one in optimizers {
        all.count = all.count.saturating_add(one.count);
        one.shapes.iter().for_each(|(shape, n)| *all.shapes.entry(shape.clone()).or_default() += n);
    }
    all
}

/// Whether the mapping's name, or one above it, says that it is a model.
fn stands_in_model(path: &str) -> bool {
    path.rsplit_once('/').is_some_and(|(mapping, _)| mapping.split('/').any(role::names_model))
}

/// How many of a mapping's weights have each shape.
fn shapes_of<'a>(tensors: &'a [Tensor], family: &[usize], flats: &'a Flats) -> HashMap<&'a Vec<u64>, u64> {
    let mut shapes: HashMap<&Vec<u64>, u64> = HashMap::new();
    for i in family {
        match flats.get(i) {
            Some(flat) => flat.shapes().for_each(|shape| *shapes.entry(shape).or_default() += 1),
            None if tensors[*i].role.group() == Role::Weight => *shapes.entry(&tensors[*i].shape).or_default() += 1,
            None => {}
        }
    }
    shapes
}

/// Whether a mapping has all the parameters that an optimizer keeps state of.
fn fits(shapes: &HashMap<&Vec<u64>, u64>, trained: &Trained) -> bool {
    !shapes.is_empty() && trained.shapes.iter().all(|(shape, n)| shapes.get(shape).is_some_and(|have| have >= n))
}

/// Proves the weights in a mapping, if it fits the optimizer.
fn prove(tensors: &mut [Tensor], family: &[usize], flats: &Flats, trained: &Trained) {
    let shapes = shapes_of(tensors, family, flats);
    if !fits(&shapes, trained) {
        return;
    }
    // A number says less than a shape: then the names must be those of layers, too, and all of them where it stands
    // alone.
    let is_named = |i: &usize| flats.get(i).map_or_else(|| is_of_layer(&tensors[*i].path), |flat| flat.is_of_layers);
    let named: Vec<bool> = family.iter().map(is_named).collect();
    let counted = trained.count == shapes.values().sum::<u64>()
        && (!trained.shapes.is_empty() || named.iter().all(|named| *named));
    let is_shaped = |shape: &Vec<u64>| trained.shapes.get(shape) == shapes.get(shape);
    let why = |(i, named): (&usize, bool)| match flats.get(i) {
        Some(flat) => {
            let tensor = &tensors[*i];
            let elements = tensor.elements();
            let is_whole = tensor.role.group() == Role::Weight && named && flat.covers(elements);
            (is_whole && (counted || flat.shapes().all(is_shaped))).then_some(VIEWS)
        }
        None if tensors[*i].role.group() != Role::Weight => None,
        None if is_shaped(&tensors[*i].shape) => Some(OF_ITS_SHAPE),
        None => (counted && named).then_some(COUNTED),
    };
    let found: Vec<Option<&'static str>> = family.iter().zip(named).map(why).collect();
    for (&i, why) in family.iter().zip(found) {
        tensors[i].trained = tensors[i].trained.or(why);
    }
}

/// An average of a trained parameter is as good as one.
fn averages(tensors: &mut [Tensor]) {
    for i in 0..tensors.len() {
        if tensors[i].role == Role::Ema
            && let Some(of) = tensors[i].of.and_then(|of| tensors[of].trained)
        {
            tensors[i].trained = Some(of);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use codec::Dtype;

    fn weight(path: &str, shape: &[u64]) -> Tensor {
        let role = (Role::Weight, "test");
        Tensor::found(path.to_string(), (Dtype::F32, shape.to_vec()), role, 0..4 * shape.iter().product::<u64>())
    }

    fn trained(count: u64, shapes: &[(&[u64], u64)]) -> Trained {
        Trained { count, shapes: shapes.iter().map(|(shape, n)| (shape.to_vec(), *n)).collect() }
    }

    fn proven(tensors: &[(&str, &[u64])], families: &[&[usize]], optimizers: &[Trained]) -> Vec<bool> {
        let mut tensors: Vec<Tensor> = tensors.iter().map(|(path, shape)| weight(path, shape)).collect();
        let families: Vec<Vec<usize>> = families.iter().map(|family| family.to_vec()).collect();
        by_optimizers(&mut tensors, &families, &Flats::new(), optimizers);
        tensors.iter().map(|t| t.trained.is_some()).collect()
    }

    #[test]
    fn a_normalizer_of_a_parameters_size_is_not_proven() {
        let tensors: [(&str, &[u64]); 4] = [
            ("model/norm._mean", &[64]),
            ("model/norm._var", &[64]),
            ("model/fc.weight", &[64, 32]),
            ("model/fc.bias", &[64]),
        ];
        let adam = [trained(2, &[(&[64, 32], 1), (&[64], 1)])];
        assert_eq!(proven(&tensors, &[&[0, 1, 2, 3]], &adam), [false, false, true, false]);
        // In a mapping of its own it is not trained by the optimizer.
        assert_eq!(proven(&tensors, &[&[0, 1], &[2, 3]], &adam), [false, false, true, true]);
    }

    #[test]
    fn idle_and_stateless_parameters_are_proven_by_their_number() {
        let experts: [(&str, &[u64]); 3] = [("m/e.0.weight", &[8, 8]), ("m/e.1.weight", &[8, 8]), ("m/out.bias", &[3])];
        assert_eq!(proven(&experts, &[&[0, 1, 2]], &[trained(3, &[(&[8, 8], 1), (&[3], 1)])]), [true; 3]);
        assert_eq!(proven(&experts, &[&[0, 1, 2]], &[trained(3, &[])]), [true; 3]);
        let statistics: [(&str, &[u64]); 2] = [("m/mean", &[64]), ("m/cov", &[64, 64])];
        assert_eq!(proven(&statistics, &[&[0, 1]], &[trained(2, &[])]), [false; 2]);
    }

    #[test]
    fn two_models_and_two_optimizers_are_told_apart() {
        let gan: [(&str, &[u64]); 4] =
            [("g/a.weight", &[4, 8]), ("g/a.bias", &[4]), ("d/a.weight", &[1, 4]), ("d/stats", &[4])];
        let optimizers = [trained(2, &[(&[4, 8], 1), (&[4], 1)]), trained(1, &[(&[1, 4], 1)])];
        assert_eq!(proven(&gan, &[&[0, 1], &[2, 3]], &optimizers), [true, true, true, false]);
    }

    #[test]
    fn statistics_of_each_parameter_are_not_proven_beside_the_model() {
        let fisher: [(&str, &[u64]); 2] = [("model/fc.weight", &[8, 8]), ("fisher/fc.weight", &[8, 8])];
        assert_eq!(proven(&fisher, &[&[0], &[1]], &[trained(1, &[(&[8, 8], 1)])]), [true, false]);
        let unnamed: [(&str, &[u64]); 2] = [("proj/weight", &[8, 8]), ("whiten/covariance", &[8, 8])];
        assert_eq!(proven(&unnamed, &[&[0], &[1]], &[trained(1, &[(&[8, 8], 1)])]), [false, false]);
    }

    #[test]
    fn a_number_proves_names_of_layers_only() {
        let actor: [(&str, &[u64]); 3] = [("m/fc.weight", &[8, 8]), ("m/_mean", &[8]), ("m/_var", &[8])];
        assert_eq!(proven(&actor, &[&[0, 1, 2]], &[trained(3, &[(&[8, 8], 1)])]), [true, false, false]);
    }

    #[test]
    fn a_frozen_twin_leaves_the_question_open() {
        let twins: [(&str, &[u64]); 2] = [("m/trained.weight", &[8, 8]), ("m/frozen.weight", &[8, 8])];
        assert_eq!(proven(&twins, &[&[0, 1]], &[trained(1, &[(&[8, 8], 1)])]), [false; 2]);
    }
}
