//! What Keras writes: HDF5 with its own paths, alone (`.weights.h5`, `.h5`) or stored in a zip (`.keras`).
//!
//! Keras 3 numbers an optimizer's variables: `optimizer/vars/0` is the iteration, `1` the learning rate. Behind them stand each
//! parameter's moments, in the order of the model's parameters: of Adam and AdamW the first, then the second. Other optimizers have
//! as many in the same places. So the file must say by name which one it is: in `config.json`, or as the `name` of the
//! variables' group. Then numbers and shapes must bear it out. What is not Adam's stays an optimizer's, and lossless.
//!
//! In legacy files (`model_weights/`, `optimizer_weights/adam/`) moments have their parameter's name.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use super::super::patch::{Crcs, Tails};
use super::super::proof::Training;
use super::super::read::{Fail, bad};
use super::super::slots::{Optimizers, Parameter, Standing};
use super::super::zip::{Record, Zip};
use super::super::{Description, Kind, ReadAt, Role, Tensor, pairing};
use super::{Contents, read};
use crate::codec::Dtype;

/// The group of the optimizer's variables.
pub(super) const OPTIMIZER: &str = "optimizer/vars";

/// The groups of a legacy file.
const MODEL_WEIGHTS: &str = "model_weights/";
const OPTIMIZER_WEIGHTS: &str = "optimizer_weights/";

const WEIGHTS: &[u8] = b"model.weights.h5";
const CONFIG: &[u8] = b"config.json";

/// Largest `config.json` that is looked at.
const MAX_CONFIG: u64 = 4 << 20;

/// Standings: one mapping of weights, and one optimizer.
const MODEL: u32 = 0;
const STATE: u32 = 1;

/// Whether the zip is one of Keras's.
pub(in super::super) fn is_keras(zip: &Zip) -> bool {
    let has = |name: &[u8]| zip.records.iter().any(|record| zip.name(record) == name);
    has(WEIGHTS) && has(CONFIG)
}

/// Describes a `.keras` file.
pub(in super::super) fn describe(src: &dyn ReadAt, zip: Zip) -> Result<Description, Fail> {
    let find = |name: &[u8]| zip.records.iter().position(|record| zip.name(record) == name);
    let (Some(weights), Some(config)) = (find(WEIGHTS), find(CONFIG)) else {
        return bad("Keras: no model.weights.h5");
    };
    let record = &zip.records[weights];
    if !record.stored {
        return bad("Keras: model.weights.h5 is compressed");
    }
    let payload = record.payload.clone();
    let Contents { mut tensors, note, adam } = read(src, payload.clone())?;
    let adam = Adam { sure: configured(src, &zip.records[config])?, ..adam };
    let training = adam.relate(&mut tensors);
    let tails = tensors.iter().map(|tensor| payload.end - tensor.extent.end).collect();
    let of_tensor = vec![weights as u32; tensors.len()];
    let zip = Some(Crcs::new(zip, of_tensor, None).with_tails(Tails(tails)));
    Ok(Description { kind: Kind::Keras, note, tensors, tables: Vec::new(), training, best: None, zip })
}

/// Whether `config.json` says that Adam trains the model, and nothing beside it; `None` if it says nothing.
fn configured(src: &dyn ReadAt, record: &Record) -> Result<Option<bool>, Fail> {
    let Range { start, end } = record.payload;
    if !record.stored || end - start > MAX_CONFIG {
        return Ok(None);
    }
    let mut text = vec![0; (end - start) as usize];
    src.read_exact_at(&mut text, start)?;
    let config: Result<Config, _> = serde_json::from_slice(&text);
    let compiled = config.ok().and_then(|config| config.compile_config);
    Ok(match compiled.and_then(|compiled| compiled.optimizer) {
        Some(Given::Name(name)) => Some(is_adam(&name)),
        Some(Given::Object(optimizer)) => Some(optimizer.is_adam()),
        None => None,
    })
}

#[derive(serde::Deserialize)]
struct Config {
    compile_config: Option<Compiled>,
}

#[derive(serde::Deserialize)]
struct Compiled {
    optimizer: Option<Given>,
}

#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Given {
    Name(String),
    Object(Optimizer),
}

#[derive(serde::Deserialize)]
struct Optimizer {
    module: Option<String>,
    class_name: String,
    config: Options,
}

/// What gives an optimizer more variables.
#[derive(serde::Deserialize)]
struct Options {
    #[serde(default)]
    amsgrad: bool,
    #[serde(default)]
    use_ema: bool,
    gradient_accumulation_steps: Option<u64>,
}

impl Optimizer {
    fn is_adam(&self) -> bool {
        let own = self.module.as_ref().is_none_or(|module| module.starts_with("keras."));
        let Options { amsgrad, use_ema, gradient_accumulation_steps } = self.config;
        let more = amsgrad || use_ema || gradient_accumulation_steps.is_some();
        own && ["Adam", "AdamW"].contains(&self.class_name.as_str()) && !more
    }
}

/// Whether Keras gives this name to Adam or AdamW; the second one of a process is `adam_1`.
fn is_adam(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    let word = lower.trim_end_matches(|c: char| c.is_ascii_digit());
    let word = if word.len() < lower.len() { word.strip_suffix('_').unwrap_or(&lower) } else { word };
    ["adam", "adam_w", "adamw"].contains(&word)
}

/// What a file says of its optimizer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Adam {
    /// The name of the variables' group is Adam's.
    named: bool,
    /// What a configuration says, which knows better.
    sure: Option<bool>,
}

impl Adam {
    /// By the name of the variables' group.
    pub(super) fn of(name: Option<&str>) -> Adam {
        Adam { named: name.is_some_and(is_adam), sure: None }
    }

    /// Finds pairs and proofs among the tensors of a file, by ascending extent.
    pub(super) fn relate(self, tensors: &mut [Tensor]) -> Training {
        let mut optimizers = Optimizers::default();
        let mut standings: Vec<Option<Standing>> = tensors.iter().map(|t| standing(&t.path)).collect();
        if self.sure.unwrap_or(self.named)
            && let Some(moments) = moments(tensors)
        {
            optimizers.groups.insert(STATE, Rc::new(vec![moments.len() as u64 / 2]));
            let numbers = numbers(tensors, &moments);
            for (pair, number) in moments.chunks_exact(2).zip(numbers) {
                for (tensor, slot) in pair.iter().zip(["moment1", "moment2"]) {
                    let parameter = Parameter::Number(number);
                    standings[*tensor] = Some(Standing::Slot { owner: STATE, parameter, slot: slot.to_string() });
                }
            }
        }
        by_name(tensors, &mut standings);
        pairing::refine(tensors, &standings, &optimizers);
        Training::of(tensors, &standings, &optimizers)
    }
}

/// Where a dataset stands if nothing else is known. A chunk has another shape than its dataset, and stands nowhere.
fn standing(path: &str) -> Option<Standing> {
    if path.ends_with(']') {
        return None;
    }
    Some(Standing::named(MODEL, path, false))
}

/// The variables of `optimizer/vars` behind the first two, if they are as many pairs of equals as Adam has, and the file has a
/// weight of its own for each pair.
fn moments(tensors: &[Tensor]) -> Option<Vec<usize>> {
    let prefix = "optimizer/";
    let mut numbered: Vec<(usize, usize)> = Vec::new();
    for (index, tensor) in tensors.iter().enumerate() {
        if let Some(rest) = tensor.path.strip_prefix(prefix) {
            // What stands beside the variables is an optimizer within this one.
            numbered.push((rest.strip_prefix("vars/")?.parse().ok()?, index));
        }
    }
    numbered.sort_unstable();
    let in_order = numbered.iter().enumerate().all(|(at, (number, _))| at == *number);
    let of = |at: usize| numbered.get(at).map(|(_, index)| &tensors[*index]);
    let scalar = |at: usize, types: &[Dtype]| of(at).is_some_and(|t| t.shape.is_empty() && types.contains(&t.dtype));
    let head = scalar(0, &[Dtype::I32, Dtype::I64]) && scalar(1, &[Dtype::F32, Dtype::F64]);
    if !in_order || !head || numbered.len() < 4 || !numbered.len().is_multiple_of(2) {
        return None;
    }
    let moments: Vec<usize> = numbered[2..].iter().map(|(_, index)| *index).collect();
    let mut weights: HashMap<&[u64], u64> = HashMap::new();
    for tensor in tensors.iter().filter(|tensor| tensor.role == Role::Weight) {
        *weights.entry(&tensor.shape).or_default() += 1;
    }
    for pair in moments.chunks_exact(2) {
        let (first, second) = (&tensors[pair[0]], &tensors[pair[1]]);
        let left = weights.get_mut(first.shape.as_slice()).filter(|left| **left > 0)?;
        *left -= 1;
        if first.shape != second.shape || first.dtype != second.dtype {
            return None;
        }
    }
    Some(moments)
}

/// Parts of layers that are built in another order than they are written in, which is that of their names.
const BUILT: [&str; 4] = ["query_dense", "key_dense", "forward_layer", "backward_layer"];

/// A number for each pair of moments. Moments stand in the order of building, weights in the order of writing, and numbers of one
/// shape are paired with weights in the latter.
fn numbers(tensors: &[Tensor], moments: &[usize]) -> Vec<u64> {
    let mut weights: HashMap<&[u64], Vec<usize>> = HashMap::new();
    for (index, tensor) in tensors.iter().enumerate().filter(|(_, tensor)| tensor.role == Role::Weight) {
        weights.entry(&tensor.shape).or_default().push(index);
    }
    let mut pairs: HashMap<&[u64], Vec<usize>> = HashMap::new();
    for (pair, moments) in moments.chunks_exact(2).enumerate() {
        pairs.entry(&tensors[moments[0]].shape).or_default().push(pair);
    }
    let mut numbers: Vec<u64> = (0..moments.len() as u64 / 2).collect();
    for (shape, pairs) in pairs {
        let weights = weights.get(shape).filter(|weights| weights.len() == pairs.len());
        let places = weights.map(|weights| order_of_building(tensors, weights)).unwrap_or_default();
        for (at, place) in places.into_iter().enumerate() {
            numbers[pairs[at]] = pairs[place] as u64;
        }
    }
    numbers
}

/// The weights in the order of building, by their places in the order of writing.
fn order_of_building(tensors: &[Tensor], weights: &[usize]) -> Vec<usize> {
    let mut firsts: HashMap<&str, usize> = HashMap::new();
    let mut keys = Vec::with_capacity(weights.len());
    for (place, weight) in weights.iter().enumerate() {
        let path = &tensors[*weight].path;
        let part = path.split('/').enumerate().find_map(|(depth, part)| {
            let rank = BUILT.iter().position(|built| *built == part)?;
            let above = path.match_indices('/').nth(depth.checked_sub(1)?)?.0;
            Some((&path[..above], rank))
        });
        keys.push(match part {
            Some((above, rank)) => (*firsts.entry(above).or_insert(place), rank, place),
            None => (place, 0, place),
        });
    }
    keys.sort_unstable();
    keys.into_iter().map(|(_, _, place)| place).collect()
}

/// Where the tensors of a legacy file stand: both by the parameter's name, in which the optimizer has `_` for `/`.
fn by_name(tensors: &[Tensor], standings: &mut [Option<Standing>]) {
    let state = |path: &str| -> Option<(String, String)> {
        let (optimizer, name) = path.strip_prefix(OPTIMIZER_WEIGHTS)?.split_once('/')?;
        is_adam(optimizer).then(|| (optimizer.to_string(), name.to_string()))
    };
    let slots: Vec<(usize, String, String)> = (tensors.iter().enumerate())
        .filter_map(|(index, t)| state(&t.path).map(|(optimizer, name)| (index, optimizer, name)))
        .collect();
    let of = |name: &str| {
        let known = [("_momentum", "m"), ("_velocity", "v")];
        known.iter().find_map(|(end, slot)| name.strip_suffix(end).map(|name| (name.to_string(), *slot)))
    };
    let is_adams = |(_, optimizer, name): &(usize, String, String)| {
        *optimizer == slots[0].1 && (["iteration", "learning_rate"].contains(&name.as_str()) || of(name).is_some())
    };
    let beside = tensors.iter().filter(|t| t.path.starts_with(OPTIMIZER_WEIGHTS)).count();
    if slots.is_empty() || slots.len() != beside || !slots.iter().all(is_adams) {
        return;
    }
    for (tensor, standing) in tensors.iter().zip(&mut *standings) {
        let key = tensor.path.strip_prefix(MODEL_WEIGHTS).and_then(|path| path.split_once('/'));
        if let (Some((_, key)), true) = (key, standing.is_some()) {
            *standing = Some(Standing::Listed { mapping: MODEL, key: key.replace('/', "_"), average: false });
        }
    }
    for (index, _, name) in &slots {
        if let Some((name, slot)) = of(name) {
            let parameter = Parameter::Name(name);
            standings[*index] = Some(Standing::Slot { owner: STATE, parameter, slot: slot.to_string() });
        }
    }
}
