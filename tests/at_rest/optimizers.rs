//! Optimizers other than Adam, by their papers and torch's sources: each slot comes back so that its optimizer can use
//! it safely.

use std::collections::BTreeMap;

use formats::Role;
use stepfs::store::object::Index;

use super::adam::round;
use super::optimizer::{read_all, without};
use super::series::{Dtype, Random, Rest, Tensor};
use super::sound::{sound, values};
use super::torch::{self, Value};

/// One parameter: its value, its slots, and the size of each element's gradients.
struct Parameter {
    weight: Tensor,
    slots: Vec<Tensor>,
    scale: Vec<f64>,
}

/// An optimizer: its slots, and one step of one element. The arguments are the old slots, the gradient, and the number
/// of the step.
pub(crate) struct Optimizer {
    slots: &'static [&'static str],
    step: fn(w: &mut f64, slots: &mut [f64], gradient: f64, number: i32),
    /// The coding of each slot.
    codecs: &'static [&'static str],
    /// The largest share of the whole file that a difference takes under balanced and compact, in percent.
    share: [f64; 2],
}

/// Adam of Transformer Engine and apex: the parameter is a copy of `master_param`.
const MASTERS: Optimizer = Optimizer {
    slots: &["exp_avg", "exp_avg_sq", "master_param"],
    step: |w, s, g, n| {
        s[0] = 0.9 * s[0] + 0.1 * g;
        s[1] = 0.99 * s[1] + 0.01 * g * g;
        let (mean, square) = (s[0] / (1.0 - 0.9f64.powi(n)), s[1] / (1.0 - 0.99f64.powi(n)));
        *w -= 1e-3 * mean / (square.sqrt() + 1e-8);
        s[2] = *w;
    },
    codecs: &["moment", "log", "lattice"],
    share: [8.0, 5.5],
};

const LION: Optimizer = Optimizer {
    slots: &["exp_avg"],
    step: |w, s, g, _| {
        *w -= 1e-4 * (0.9 * s[0] + 0.1 * g).signum();
        s[0] = 0.99 * s[0] + 0.01 * g;
    },
    codecs: &["sized"],
    share: [8.0, 5.5],
};

const ADAMAX: Optimizer = Optimizer {
    slots: &["exp_avg", "exp_inf"],
    step: |w, s, g, n| {
        s[0] = 0.9 * s[0] + 0.1 * g;
        s[1] = (0.999 * s[1]).max(g.abs() + 1e-8);
        *w -= 1e-3 / (1.0 - 0.9f64.powi(n)) * s[0] / s[1];
    },
    codecs: &["moment", "log"],
    share: [8.0, 5.5],
};

const CENTERED: Optimizer = Optimizer {
    slots: &["square_avg", "grad_avg", "momentum_buffer"],
    step: |w, s, g, _| {
        s[0] = 0.99 * s[0] + 0.01 * g * g;
        s[1] = 0.99 * s[1] + 0.01 * g;
        s[2] = 0.9 * s[2] + g / ((s[0] - s[1] * s[1]).sqrt() + 1e-8);
        *w -= 1e-4 * s[2];
    },
    codecs: &["log", "moment", "lattice"],
    share: [9.0, 6.5],
};

const ADADELTA: Optimizer = Optimizer {
    slots: &["square_avg", "acc_delta"],
    step: |w, s, g, _| {
        s[0] = 0.9 * s[0] + 0.1 * g * g;
        let update = ((s[1] + 1e-6).sqrt() / (s[0] + 1e-6).sqrt()) * g;
        s[1] = 0.9 * s[1] + 0.1 * update * update;
        *w -= update;
    },
    codecs: &["log", "log"],
    share: [9.0, 6.0],
};

const RPROP: Optimizer = Optimizer {
    slots: &["prev", "step_size"],
    step: |w, s, g, n| {
        if n == 1 {
            s[1] = 1e-4;
        }
        let factor = match (g * s[0]).partial_cmp(&0.0) {
            Some(std::cmp::Ordering::Greater) => 1.2,
            Some(std::cmp::Ordering::Less) => 0.5,
            _ => 1.0,
        };
        s[1] = (s[1] * factor).clamp(1e-6, 50.0);
        let g = if factor == 0.5 { 0.0 } else { g };
        *w -= g.signum() * s[1] * f64::from(u8::from(g != 0.0));
        s[0] = g;
    },
    codecs: &["signs", "lossless"],
    // Updates of all sizes keep the weights lossless here.
    share: [75.0, 75.0],
};

const SCHEDULE_FREE: Optimizer = Optimizer {
    slots: &["z", "exp_avg_sq"],
    step: |w, s, g, n| {
        if n == 1 {
            s[0] = *w;
        }
        s[1] = 0.99 * s[1] + 0.01 * g * g;
        let update = 1e-3 * g / ((s[1] / (1.0 - 0.99f64.powi(n))).sqrt() + 1e-8);
        *w += (s[0] - *w) / f64::from(n) - 0.1 * update;
        s[0] -= update;
    },
    codecs: &["lattice", "log"],
    share: [9.0, 6.5],
};

/// Before its average begins, as long as torch's `t0` of a million steps.
const ASGD: Optimizer = Optimizer {
    slots: &["ax"],
    step: |w, s, g, _| {
        *w -= 1e-2 * g;
        s[0] = *w;
    },
    codecs: &["cast"],
    share: [12.0, 10.0],
};

/// Once it has begun.
const ASGD_LATER: Optimizer = Optimizer {
    slots: &["ax"],
    step: |w, s, g, n| {
        if n == 1 {
            s[0] = *w;
        }
        *w -= 1e-2 * g;
        s[0] += (*w - s[0]) / f64::from(n);
    },
    codecs: &["lattice"],
    share: [20.0, 16.0],
};

/// Adam with the largest second moment.
const AMSGRAD: Optimizer = Optimizer {
    slots: &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    step: |w, s, g, _| {
        s[0] = 0.9 * s[0] + 0.1 * g;
        s[1] = 0.99 * s[1] + 0.01 * g * g;
        s[2] = s[2].max(s[1]);
        *w -= 1e-3 * s[0] / (s[2].sqrt() + 1e-8);
    },
    codecs: &["moment", "log", "log"],
    share: [7.0, 5.0],
};

/// Its slots have Adam's names, but average quotients, so it is another optimizer.
const ADOPT: Optimizer = Optimizer {
    slots: &["exp_avg", "exp_avg_sq"],
    step: |w, s, g, n| {
        if n > 1 {
            s[0] = 0.9 * s[0] + 0.1 * (g / s[1].sqrt().max(1e-6)).clamp(-2.0, 2.0);
        }
        s[1] = 0.9999 * s[1] + 0.0001 * g * g;
        *w -= 1e-3 * s[0];
    },
    codecs: &["lossless", "lossless"],
    share: [70.0, 70.0],
};

/// Those with slots that have other codings than Adam's.
pub(crate) const UNLIKE_ADAM: [(&str, &Optimizer); 4] =
    [("lion", &LION), ("adamax", &ADAMAX), ("centered", &CENTERED), ("rprop", &RPROP)];

impl Parameter {
    fn new(name: &str, slots: &[&str], dtype: Dtype, shape: &[usize], random: &mut Random) -> Parameter {
        let width = shape.iter().skip(1).product::<usize>().max(1);
        let mut octaves = |count: usize| -> Vec<f64> { (0..count).map(|_| (1.5 * random.normal()).exp2()).collect() };
        let (rows, columns) = (octaves(shape[0]), octaves(width));
        let scale = rows.iter().flat_map(|row| columns.iter().map(move |column| 1e-3 * row * column)).collect();
        let mut of = |name: &str| Tensor::new(name, dtype, shape, random);
        let mut weight = of(name);
        weight.values.iter_mut().for_each(|value| *value = round(dtype, *value));
        let mut slots: Vec<Tensor> = slots.iter().map(|slot| of(slot)).collect();
        slots.iter_mut().for_each(|slot| slot.values.fill(0.0));
        Parameter { weight, slots, scale }
    }

    fn train(&mut self, optimizer: &Optimizer, number: i32, random: &mut Random) {
        let dtype = self.weight.dtype;
        let mut slots = vec![0.0; self.slots.len()];
        for at in 0..self.scale.len() {
            slots.iter_mut().zip(&self.slots).for_each(|(value, slot)| *value = slot.values[at]);
            let gradient = self.scale[at] * (random.normal() + 0.3);
            let mut weight = self.weight.values[at];
            (optimizer.step)(&mut weight, &mut slots, gradient, number);
            self.weight.values[at] = round(dtype, weight);
            slots.iter().zip(&mut self.slots).for_each(|(value, slot)| slot.values[at] = round(dtype, *value));
        }
    }
}

/// The name of a state, 20 iterations after the one before: the profiles' steps suit that.
fn name(at: usize) -> String {
    name_in("run", 20 * at)
}

/// A file of a run without its own directory.
pub(crate) fn name_in(run: &str, at: usize) -> String {
    format!("{run}/step_{at:05}.pt")
}

/// Writes a series of few elements, three steps between states.
pub(crate) fn write_small(rest: &mut Rest, run: &str, optimizer: &Optimizer, count: usize) {
    let mut random = Random(6);
    let mut parameters = [Parameter::new("a.weight", optimizer.slots, Dtype::F32, &[80, 128], &mut random)];
    for at in 1..=count {
        for number in 3 * at - 2..=3 * at {
            parameters[0].train(optimizer, number as i32, &mut random);
        }
        rest.write(&name_in(run, at), &file(&parameters));
    }
}

fn file(parameters: &[Parameter]) -> Vec<u8> {
    let tensor = |tensor: &Tensor| Value::Tensor(tensor.clone());
    let model = Value::named(parameters.iter().map(|p| (p.weight.name.clone(), tensor(&p.weight))));
    let state = parameters.iter().map(|p| Value::named(p.slots.iter().map(|slot| (slot.name.clone(), tensor(slot)))));
    torch::save(&Value::named([("model", model), ("optimizer", torch::optimizer(state.collect()))])).0
}

/// A settled series of this optimizer, ten steps between states.
fn series(optimizer: &Optimizer, profile: &str, count: usize) -> Rest {
    let mut random = Random(5);
    let mut parameters = vec![
        Parameter::new("a.weight", optimizer.slots, Dtype::F32, &[96, 128], &mut random),
        Parameter::new("b.weight", optimizer.slots, Dtype::F32, &[120, 80], &mut random),
        Parameter::new("a.bias", optimizer.slots, Dtype::F32, &[1100], &mut random),
    ];
    let mut rest = Rest::under(profile);
    let mut number = 0;
    for at in 1..=count {
        for _ in 0..10 {
            number += 1;
            parameters.iter_mut().for_each(|p| p.train(optimizer, number, &mut random));
        }
        rest.write(&name(at), &file(&parameters));
    }
    rest.settle();
    rest
}

fn codec_of(index: &Index, slot: &str) -> Vec<&'static str> {
    let of_slot = index.tensors.iter().filter(|tensor| tensor.path.ends_with(&format!("/{slot}")));
    of_slot.map(|tensor| tensor.coding.codec.name()).collect()
}

/// Every state of both profiles is sound, has the expected coding and size, and stays the same whatever goes.
#[track_caller]
fn is_small_and_safe(optimizer: &Optimizer) {
    for (profile, most) in ["balanced", "compact"].into_iter().zip(optimizer.share) {
        let rest = series(optimizer, profile, 10);
        let (mut stored, mut raw) = (0, 0);
        for at in 1..10 {
            let index = sound(&rest, &name(at));
            for (slot, codec) in optimizer.slots.iter().zip(optimizer.codecs) {
                let codecs = codec_of(&index, slot);
                assert!(codecs.len() == 3 && codecs.iter().all(|is| is == codec), "{at}: {slot}: {codecs:?}");
            }
            if at > 1 {
                stored += index.tensors.iter().map(|tensor| tensor.stored()).sum::<u64>();
                raw += index.tensors.iter().map(|tensor| tensor.extent.end - tensor.extent.start).sum::<u64>();
            }
        }
        let share = 100.0 * stored as f64 / raw as f64;
        assert!(share <= most, "{profile}: {share}% of {most}");
        let read = read_all(&rest);
        for gone in [vec![1], vec![4, 5], vec![1, 2, 3, 4, 5, 6, 7, 8]] {
            let gone: Vec<String> = gone.into_iter().map(name).collect();
            let after = without(&rest, &read, &gone);
            (1..10).map(name).filter(|name| !gone.contains(name)).for_each(|name| drop(sound(&after, &name)));
        }
    }
}

#[test]
fn lion() {
    is_small_and_safe(&LION);
}

#[test]
fn adamax() {
    is_small_and_safe(&ADAMAX);
}

#[test]
fn centered_rmsprop() {
    is_small_and_safe(&CENTERED);
}

#[test]
fn adadelta() {
    is_small_and_safe(&ADADELTA);
}

#[test]
fn rprop() {
    is_small_and_safe(&RPROP);
}

#[test]
fn schedule_free() {
    is_small_and_safe(&SCHEDULE_FREE);
}

#[test]
fn asgd() {
    is_small_and_safe(&ASGD);
    is_small_and_safe(&ASGD_LATER);
}

#[test]
fn amsgrad() {
    is_small_and_safe(&AMSGRAD);
}

#[test]
fn adam_that_keeps_the_parameter_too() {
    is_small_and_safe(&MASTERS);
}

#[test]
fn what_only_bears_the_names_of_adam_is_exact() {
    is_small_and_safe(&ADOPT);
}

/// The average of a constant gradient is the root of the average of its squares. Then the difference is 0 but for
/// rounding, and must not become negative.
#[test]
fn a_centered_pair_on_the_edge() {
    let mut random = Random(9);
    let mut parameters = [Parameter::new("a.weight", CENTERED.slots, Dtype::F32, &[64, 64], &mut random)];
    let mut rest = Rest::under("compact");
    for at in 1..=6 {
        let Parameter { weight, slots, scale } = &mut parameters[0];
        for (i, scale) in scale.iter().enumerate() {
            // Some elements have no gradient at all, some a constant one, the others a changing one.
            let share = [0.0, 1.0 - 1e-6, 0.999, 0.7, 0.05 * random.normal().clamp(-9.0, 9.0)][(i % 23).min(4)];
            slots[0].values[i] = if i % 23 == 0 { 0.0 } else { round(Dtype::F32, scale * scale) };
            slots[1].values[i] = round(Dtype::F32, share * scale);
            slots[2].values[i] = round(Dtype::F32, random.normal());
            weight.values[i] = round(Dtype::F32, weight.values[i] - 1e-3 * random.normal());
        }
        rest.write(&name(at), &file(&parameters));
    }
    rest.settle();
    for at in 1..6 {
        // `sound` checks the difference.
        let index = sound(&rest, &name(at));
        assert_eq!((codec_of(&index, "grad_avg"), codec_of(&index, "square_avg")), (vec!["moment"], vec!["log"]));
        let means = index.tensors.iter().find(|tensor| tensor.path.ends_with("/grad_avg")).unwrap();
        let bytes = &rest.read(&name(at)).unwrap()[means.extent.start as usize..means.extent.end as usize];
        let kept = values(means.dtype, bytes).iter().filter(|mean| **mean != 0.0).count();
        assert!(kept > 64 * 64 / 20, "{kept} of the means are still there");
    }
}

/// One NaN in a mean makes both of its pair exact: quantizing only the other could make their difference negative.
#[test]
fn a_pair_of_which_one_does_not_fit_is_exact() {
    for (optimizer, slot) in [(&CENTERED, 1), (&ADAMAX, 0), (&AMSGRAD, 0)] {
        let mut random = Random(3);
        let mut parameters = [Parameter::new("a.weight", optimizer.slots, Dtype::F32, &[96, 96], &mut random)];
        let mut rest = Rest::under("balanced");
        for at in 1..=5 {
            (1..=3).for_each(|n| parameters[0].train(optimizer, at as i32 * 3 + n, &mut random));
            // Only in the file: training with it would leave no weight finite.
            let value = std::mem::replace(&mut parameters[0].slots[slot].values[17], f64::NAN);
            rest.write(&name(at), &file(&parameters));
            parameters[0].slots[slot].values[17] = value;
        }
        rest.settle();
        for at in 1..5 {
            let index = sound(&rest, &name(at));
            let second =
                optimizer.slots.iter().rev().find(|slot| ["square_avg", "exp_inf", "max_exp_avg_sq"].contains(slot));
            for slot in [optimizer.slots[slot], second.unwrap()] {
                assert_eq!(codec_of(&index, slot), ["lossless"], "{at}: {slot}");
            }
        }
    }
}

/// With one more number it is another optimizer.
#[test]
fn numbers_and_lists_count_as_state() {
    let mut random = Random(2);
    let parameter = Parameter::new("a.weight", LION.slots, Dtype::F32, &[64, 64], &mut random);
    let told = |more: Vec<(&str, Value)>| -> BTreeMap<String, Role> {
        let slots = parameter.slots.iter().map(|slot| (slot.name.clone(), Value::Tensor(slot.clone())));
        let state = Value::named(slots.chain(more.into_iter().map(|(name, value)| (name.to_string(), value))));
        let bytes = torch::save(&Value::named([("optimizer", torch::optimizer(vec![state]))])).0;
        let description = formats::describe(&bytes).unwrap();
        description.tensors.iter().map(|tensor| (tensor.path.clone(), tensor.role)).collect()
    };
    let path = "optimizer/state/0/exp_avg";
    assert_eq!(told(vec![])[path], Role::Momentum);
    assert_eq!(told(vec![("step", Value::Int(4))])[path], Role::Momentum);
    assert_eq!(told(vec![("d", Value::Float(0.5))])[path], Role::Other);
    let factor = Value::List(vec![Value::Tensor(parameter.weight.clone())]);
    assert_eq!(told(vec![("Q", factor)])[path], Role::Other);
}
