//! Keras's files: HDF5 with its own paths, alone (`.weights.h5`, `.h5`) or stored in a zip (`.keras`).
//!
//! Keras 3 numbers an optimizer's variables: `optimizer/vars/0` is the iteration, `1` the learning rate. Each
//! parameter's moments follow, in the order of the model's parameters: for Adam and AdamW the first, then the second.
//! Other optimizers have as many in the same places. So the file must name Adam, in `config.json` or as the `name` of
//! the variables' group. Numbers and shapes must agree. Variables of other optimizers stay lossless.
//!
//! In legacy files (`model_weights/`, `optimizer_weights/adam/`) moments have their parameter's name. The root's
//! attribute `training_config` has the configuration.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use serde_json::Value;

use super::super::optimizers::keras_slots;
use super::super::patch::Checksums;
use super::super::proof::Training;
use super::super::read::{Fail, bad};
use super::super::slots::{Optimizers, Parameter, Standing};
use super::super::zip::{Record, Zip};
use super::super::{Description, Kind, ReadAt, Role, Tensor, pairing};
use super::{Contents, read};
use codec::Dtype;

/// The group of the optimizer's variables.
pub(super) const OPTIMIZER: &str = "optimizer/vars";

/// The groups of a legacy file.
const MODEL_WEIGHTS: &str = "model_weights/";
const OPTIMIZER_WEIGHTS: &str = "optimizer_weights/";

const WEIGHTS: &[u8] = b"model.weights.h5";
const CONFIG: &[u8] = b"config.json";

/// Largest configuration that is read, in bytes.
pub(super) const MAX_CONFIG: u64 = 4 << 20;

/// Standings: one mapping of weights, and one optimizer.
const MODEL: u32 = 0;
const STATE: u32 = 1;

/// Whether the zip is one of Keras's.
pub(crate) fn is_keras(zip: &Zip) -> bool {
    let has = |name: &[u8]| zip.records.iter().any(|record| zip.name(record) == name);
    has(WEIGHTS) && has(CONFIG)
}

/// Describes a `.keras` file.
pub(crate) fn describe(src: &dyn ReadAt, zip: Zip) -> Result<Description, Fail> {
    let find = |name: &[u8]| zip.records.iter().position(|record| zip.name(record) == name);
    let (Some(weights), Some(config)) = (find(WEIGHTS), find(CONFIG)) else {
        return bad("Keras: no model.weights.h5");
    };
    let record = &zip.records[weights];
    if !record.stored {
        return bad(
            "Keras: model.weights.h5 is compressed in the zip: kept as it is; write the zip without compression to shrink it",
        );
    }
    let payload = record.payload.clone();
    let Contents { mut tensors, note, adam } = read(src, payload.clone())?;
    let adam = Adam { sure: configured(src, &zip.records[config])?, ..adam };
    let training = adam.relate(&mut tensors);
    let checksums = Some(Checksums::of([(zip, None)]));
    Ok(Description { note, checksums, ..Description::new(Kind::Keras, tensors, training) })
}

/// Whether `config.json` says that Adam trains the model, and nothing beside it; `None` if it names no optimizer. A
/// configuration that cannot be read may name another optimizer.
fn configured(src: &dyn ReadAt, record: &Record) -> Result<Option<bool>, Fail> {
    let Range { start, end } = record.payload;
    if !record.stored || end - start > MAX_CONFIG {
        return Ok(Some(false));
    }
    let mut text = vec![0; (end - start) as usize];
    src.read_exact_at(&mut text, start)?;
    Ok(configuration(&text))
}

fn configuration(text: &[u8]) -> Option<bool> {
    match serde_json::from_slice(text) {
        Ok(Value::Object(config)) => says_adam(config.get("compile_config").unwrap_or(&Value::Null), false),
        _ => Some(false),
    }
}

/// The same of a model's compiled configuration.
fn says_adam(compiled: &Value, is_legacy: bool) -> Option<bool> {
    if !compiled.is_object() {
        return (!compiled.is_null()).then_some(false);
    }
    // Legacy files use the second name.
    let given = compiled.get("optimizer").or(compiled.get("optimizer_config"));
    let optimizer = given.filter(|optimizer| !optimizer.is_null())?;
    if let Some(name) = optimizer.as_str() {
        return Some(is_adam(name));
    }
    // Keras names no module for a class of the user's own. Legacy files name none at all.
    let is_own = is_legacy || optimizer["module"].as_str().is_some_and(|module| module.starts_with("keras."));
    let is_adam = ["Adam", "AdamW"].iter().any(|name| optimizer["class_name"] == *name);
    // Options that give it more variables.
    let is_plain = optimizer["config"].as_object().is_some_and(|config| {
        let is_off = |option: &str| config.get(option).is_none_or(|value| *value == false);
        let steps = config.get("gradient_accumulation_steps");
        is_off("amsgrad") && is_off("use_ema") && steps.is_none_or(Value::is_null)
    });
    Some(is_own && is_adam && is_plain)
}

/// Whether Keras gives this name to Adam or AdamW.
fn is_adam(name: &str) -> bool {
    keras_slots(&name.to_ascii_lowercase()) == keras_slots("adam")
}

/// A file's statement about its optimizer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Adam {
    /// The name of the variables' group is Adam's.
    named: bool,
    /// The configuration's answer. It goes before the name.
    sure: Option<bool>,
}

impl Adam {
    /// By the name of the variables' group, and by a legacy file's configuration.
    pub(super) fn of(name: Option<&str>, config: Option<&str>) -> Adam {
        let sure = config.and_then(|config| match serde_json::from_str(config) {
            Ok(compiled) => says_adam(&compiled, true),
            Err(_) => Some(false),
        });
        Adam { named: name.is_some_and(is_adam), sure }
    }

    /// Finds pairs and proofs among the tensors of a file, by ascending extent.
    pub(super) fn relate(self, tensors: &mut [Tensor]) -> Training {
        let mut optimizers = Optimizers::default();
        let mut standings: Vec<Option<Standing>> = tensors.iter().map(|t| standing(&t.path)).collect();
        if self.sure.unwrap_or(self.named)
            && let Some(moments) = moments(tensors, self.sure.is_some())
        {
            optimizers.groups.insert(STATE, Rc::new(vec![moments.len() as u64 / 2]));
            let parameters = parameters(tensors, &moments);
            for (pair, parameter) in moments.chunks_exact(2).zip(parameters) {
                for (tensor, slot) in pair.iter().zip(["moment1", "moment2"]) {
                    let parameter = parameter.clone();
                    standings[*tensor] = Some(Standing::Slot { owner: STATE, parameter, slot: slot.to_string() });
                }
            }
        }
        if self.sure != Some(false) {
            by_name(tensors, &mut standings);
        }
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

/// The variables of `optimizer/vars` behind the iteration and the learning rate, which a schedule leaves out. They
/// must be as many pairs of equals as Adam has, and the file must have a weight of its own for each pair. Unless a
/// configuration excludes Adam's options (`is_plain`), the shapes must exclude them.
fn moments(tensors: &[Tensor], is_plain: bool) -> Option<Vec<usize>> {
    let prefix = "optimizer/";
    let mut numbered: Vec<(usize, usize)> = Vec::new();
    for (index, tensor) in tensors.iter().enumerate() {
        if let Some(rest) = tensor.path.strip_prefix(prefix) {
            // The rest belongs to an inner optimizer. Then nothing is paired.
            numbered.push((rest.strip_prefix("vars/")?.parse().ok()?, index));
        }
    }
    numbered.sort_unstable();
    let in_order = numbered.iter().enumerate().all(|(at, (number, _))| at == *number);
    let of = |at: usize| numbered.get(at).map(|(_, index)| &tensors[*index]);
    let scalar = |at: usize, types: &[Dtype]| of(at).is_some_and(|t| t.shape.is_empty() && types.contains(&t.dtype));
    let head = if numbered.len().is_multiple_of(2) { 2 } else { 1 };
    let is_head = scalar(0, &[Dtype::I32, Dtype::I64]) && (head == 1 || scalar(1, &[Dtype::F32, Dtype::F64]));
    if !in_order || !is_head || numbered.len() < head + 2 {
        return None;
    }
    let moments: Vec<usize> = numbered[head..].iter().map(|(_, index)| *index).collect();
    let shapes: Vec<&[u64]> = moments.iter().map(|index| tensors[*index].shape.as_slice()).collect();
    if !is_plain && has_option(&shapes) {
        return None;
    }
    let mut weights: HashMap<&[u64], u64> = HashMap::new();
    for tensor in tensors.iter().filter(|tensor| tensor.role == Role::Weight && standing(&tensor.path).is_some()) {
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

/// Whether variables of these shapes may be those of Adam with an option. An average or the accumulated gradients of
/// each parameter stand before the pairs of moments; AMSGrad's maxima stand behind.
fn has_option(shapes: &[&[u64]]) -> bool {
    (0..=2).flat_map(|before| [(before, 0), (before, 1)]).skip(1).any(|(before, behind)| {
        let blocks = before + 2 + behind;
        let count = shapes.len() / blocks;
        if count == 0 || !shapes.len().is_multiple_of(blocks) {
            return false;
        }
        let (pairs, rest) = (&shapes[before * count..][..2 * count], &shapes[(before + 2) * count..]);
        let alone = shapes[..before * count].chunks_exact(count).chain(rest.chunks_exact(count));
        pairs.chunks_exact(2).all(|pair| pair[0] == pair[1])
            && alone.into_iter().all(|block| block.iter().eq(pairs.iter().step_by(2)))
    })
}

/// Keras writes the parts of a layer by name. It builds these in another order.
const BUILT: [&str; 4] = ["query_dense", "key_dense", "forward_layer", "backward_layer"];

/// The parameter of each pair of moments. Moments stand in the order of building, weights in the order of writing.
/// Numbers of one shape are paired with weights in the order of writing. Only for a list of layers the two orders are
/// known: elsewhere weights of one shape are not told apart, and the pair has a name that no weight has.
fn parameters(tensors: &[Tensor], moments: &[usize]) -> Vec<Parameter> {
    let mut weights: HashMap<&[u64], Vec<usize>> = HashMap::new();
    for (index, tensor) in tensors.iter().enumerate().filter(|(_, tensor)| tensor.role == Role::Weight) {
        weights.entry(&tensor.shape).or_default().push(index);
    }
    let mut pairs: HashMap<&[u64], Vec<usize>> = HashMap::new();
    for (pair, moments) in moments.chunks_exact(2).enumerate() {
        pairs.entry(&tensors[moments[0]].shape).or_default().push(pair);
    }
    let mut parameters: Vec<Parameter> = (0..moments.len() as u64 / 2).map(Parameter::Number).collect();
    for (shape, pairs) in pairs {
        let weights = weights.get(shape).map(Vec::as_slice).unwrap_or_default();
        if weights.len() > 1 && !weights.iter().all(|weight| tensors[*weight].path.starts_with("layers/")) {
            pairs.iter().for_each(|pair| parameters[*pair] = Parameter::Name(format!("[{pair}]")));
        } else if weights.len() == pairs.len() {
            for (at, place) in order_of_building(tensors, weights).into_iter().enumerate() {
                parameters[pairs[at]] = Parameter::Number(pairs[place] as u64);
            }
        }
    }
    parameters
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
        keras_slots("adam").iter().find_map(|(end, slot)| name.strip_suffix(end).map(|name| (name.to_string(), *slot)))
    };
    let is_adams = |(_, optimizer, name): &(usize, String, String)| {
        slots.first().is_some_and(|(_, first, _)| optimizer == first)
            && (["iteration", "learning_rate"].contains(&name.as_str()) || of(name).is_some())
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

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: &[u64] = &[4, 5];
    const BIAS: &[u64] = &[5];

    #[test]
    fn an_option_of_adam_shows_in_the_shapes() {
        let pairs = [KERNEL, KERNEL, BIAS, BIAS];
        let each = [KERNEL, BIAS];
        assert!(!has_option(&pairs) && !has_option(&[]) && !has_option(&[KERNEL, KERNEL]));
        for option in [[&pairs[..], &each].concat(), [&each, &pairs[..]].concat()] {
            assert!(has_option(&option), "AMSGrad, or averages");
        }
        assert!(has_option(&[&each, &pairs[..], &each].concat()), "both");
        assert!(has_option(&[&each, &each, &pairs[..]].concat()), "averages and accumulated gradients");
        assert!(!has_option(&[&pairs[..], &pairs, &pairs].concat()), "three layers alike");
    }

    #[test]
    fn a_class_that_is_not_kerass_own_is_no_adam() {
        let says = |compiled: &str| {
            let config = format!("{{\"compile_config\": {compiled}}}");
            configuration(config.as_bytes())
        };
        let adam = |more: &str| format!("{{\"optimizer\": {{\"class_name\": \"Adam\", \"config\": {{{more}}}}}}}");
        let of = |module: &str, more: &str| adam(more).replace("\"class", &format!("\"module\": {module}, \"class"));
        assert_eq!(says(&of("\"keras.optimizers\"", "")), Some(true));
        assert_eq!(says(&of("\"keras.optimizers\"", "\"amsgrad\": true")), Some(false));
        assert_eq!(says(&of("\"keras.optimizers\"", "\"amsgrad\": Infinity")), Some(false), "it cannot be read");
        assert_eq!(says(&of("null", "")), Some(false));
        assert_eq!((says("null"), says("{}")), (None, None));
        let legacy = |text: &str| Adam::of(Some("adam"), Some(text)).sure;
        assert_eq!(legacy(&adam("").replace("optimizer", "optimizer_config")), Some(true));
        assert_eq!(
            legacy(&adam("").replace("optimizer", "optimizer_config").replace("Adam", "Mine>Adam")),
            Some(false)
        );
    }
}
