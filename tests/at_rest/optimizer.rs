//! The state of optimizers: moments, momentum buffers and sums of squares come back so that training survives, whatever
//! was removed around them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use formats::Role;
use stepfs::recall::Chain;
use stepfs::store::object::{Index, TensorEntry};
use stepfs::tile::Codec;

use super::adam::{Adam, Parameter, round};
use super::hostile::coding_name;
use super::optimizers::name_in;
use super::series::{Dtype, Random, Rest, Tensor, decode, entry, safetensors, step};
use super::sound::{sound, values};
use super::torch::{self, Value};

/// Longest chain that a read applies; the promise is 12.
const LONGEST: usize = 12;

/// A settled series of Adam's under a profile: so many steps of training between states.
fn series(profile: &str, beta2: f64, between: usize, count: usize) -> Rest {
    series_apart(profile, beta2, between, count, 1)
}

/// The same, `apart` times 20 iterations apart by their names.
fn series_apart(profile: &str, beta2: f64, between: usize, count: usize, apart: usize) -> Rest {
    let mut adam = Adam::new(beta2, 21, Adam::model);
    adam.train(40);
    let mut rest = Rest::under(profile);
    for at in 1..=count {
        adam.train(between);
        rest.write(&step(apart * at), &adam.file());
    }
    rest.settle();
    rest
}

fn stored(rest: &Rest) -> u64 {
    rest.objects().stored()
}

fn codec(index: &Index, name: &str) -> &'static str {
    entry(index, name).coding.codec.name()
}

#[test]
fn state_is_known_by_what_it_is_beside() {
    let mut adam = Adam::new(0.999, 1, Adam::model);
    adam.train(1);
    let description = formats::describe(&adam.file()).unwrap();
    let find = |name: &str| description.tensors.iter().position(|tensor| tensor.path == name).unwrap();
    for name in ["a.weight", "b.weight", "c.weight", "a.bias"] {
        let (first, second) = (find(&format!("state.{name}.exp_avg")), find(&format!("state.{name}.exp_avg_sq")));
        let told =
            |at: usize| (description.tensors[at].role, description.tensors[at].of, description.tensors[at].partner);
        assert_eq!(told(find(name)), (Role::Weight, None, None));
        assert_eq!(told(first), (Role::FirstMoment, Some(find(name)), Some(second)));
        assert_eq!(told(second), (Role::SecondMoment, Some(find(name)), Some(first)));
    }
}

#[test]
fn every_promise_holds_for_every_state() {
    for profile in ["balanced", "compact"] {
        for (beta2, between) in [(0.999, 2), (0.95, 10)] {
            let rest = series(profile, beta2, between, 20);
            let mut codings = BTreeMap::<&str, usize>::new();
            for at in 1..20 {
                let index = sound(&rest, &step(at));
                for tensor in &index.tensors {
                    let what = coding_name(tensor.coding);
                    *codings.entry(what).or_default() += 1;
                    // stepfs knows all of it, in every type.
                    assert!(tensor.coding.is_lossy(), "{at}: {}", tensor.path);
                }
                for name in ["a.weight", "b.weight", "c.weight", "a.bias"] {
                    assert_eq!(codec(&index, &format!("state.{name}.exp_avg")), "moment");
                    assert_eq!(codec(&index, &format!("state.{name}.exp_avg_sq")), "log");
                }
            }
            // Differences, and the first of a chain. At four octaves little but the factors is stored, and a difference
            // has those, too.
            assert!(beta2 < 0.99 || codings["log"] > 3 * codings["log keyframe"], "{codings:?}");
        }
    }
}

#[test]
fn a_coarser_profile_takes_less_room() {
    let raw: usize = series("exact", 0.999, 2, 20).written.values().map(Vec::len).sum::<usize>() / 20 * 19;
    for (beta2, between) in [(0.999, 2), (0.95, 10)] {
        let [exact, balanced, compact] = ["exact", "balanced", "compact"]
            .map(|profile| stored(&series(profile, beta2, between, 20)) as f64 / raw as f64);
        assert!(exact > 2.0 * balanced && balanced > 1.05 * compact, "{exact} {balanced} {compact}");
        assert!(exact < 0.8 && balanced < 0.08 && compact < 0.07, "{exact} {balanced} {compact}");
    }
}

/// The statements of docs/QUALITY.md on second moments and on m/sqrt(v), in the numbers of each profile.
#[test]
fn bounds_are_what_the_documents_state() {
    // Octaves of a second moment: stored ones, and true ones, which straight lines between powers of two miss by .0861.
    // m/sqrt(v) grows by half a step at most, with `compact` by .06 more.
    let profiles = [("balanced", 1.125, 1.625, 1.75, 0.45..=0.52), ("compact", 2.25, 3.25, 2.9, 0.5..=0.57)];
    for (profile, alone, difference, rms, growth) in profiles {
        // So far apart that `compact` has moments of its own.
        let rest = series_apart(profile, 0.999, 2, 12, 20);
        let (mut octaves, mut grown) = (0f64, 0f64);
        for at in 1..12 {
            let name = step(20 * at);
            let index = sound(&rest, &name);
            let (written, read) = (&rest.written[&name], rest.read(&name).unwrap());
            for first in &index.tensors {
                if first.coding.is_log() {
                    let most = if first.coding.parent.is_some() { difference } else { alone };
                    assert!(first.bound <= most, "{} of {most}", first.bound);
                }
                let Codec::Moment { second, step, .. } = first.coding.codec else { continue };
                let second = &index.tensors[second as usize];
                let of = |file: &[u8], entry: &TensorEntry| {
                    values(entry.dtype, &file[entry.extent.start as usize..entry.extent.end as usize])
                };
                let (m, v, m_is, v_is) = (of(written, first), of(written, second), of(&read, first), of(&read, second));
                let quotients =
                    |m: &[f64], v: &[f64]| -> Vec<f64> { m.iter().zip(v).map(|(m, v)| m.abs() / v.sqrt()).collect() };
                let (u, u_is) = (quotients(&m, &v), quotients(&m_is, &v_is));
                let mean = (u.iter().map(|u| u * u).sum::<f64>() / u.len() as f64).sqrt();
                // The step is shortened to a few bits.
                assert!(step <= rms * mean * 1.07, "{step} of {mean}");
                let most = v.iter().zip(&v_is).map(|(v, v_is)| (v / v_is).log2().abs()).fold(0.0, f64::max);
                octaves = octaves.max(most);
                grown = grown.max(u.iter().zip(&u_is).map(|(u, u_is)| (u_is - u) / step).fold(0.0, f64::max));
            }
        }
        // No element passes them. At so large a unit few elements of this series come near; growth does.
        assert!((0.4 * alone..=difference + 0.0861).contains(&octaves), "{profile}: {octaves} octaves");
        assert!(growth.contains(&grown), "{profile}: {grown} steps");
    }
}

/// A small matrix with large gradients beside a large one: an error in each of its elements costs more.
#[test]
fn where_the_loss_is_steep_both_the_weight_and_its_second_moment_have_finer_steps() {
    let mut adam = Adam::new(0.9, 33, |random| {
        vec![
            Parameter::new("wide.weight", Dtype::F32, &[256, 128], random),
            Parameter::new("steep.weight", Dtype::F32, &[48, 128], random).steeper(16.0),
        ]
    });
    adam.train(40);
    let mut rest = Rest::under("balanced");
    for at in 1..=5 {
        adam.train(20);
        rest.write(&step(at), &adam.file());
    }
    rest.settle();
    for at in 1..5 {
        let index = sound(&rest, &step(at));
        let unit = |name: &str| entry(&index, &format!("state.{name}.exp_avg_sq")).coding.unit().unwrap();
        let length = |name: &str| entry(&index, name).coding.step().unwrap();
        assert!(2 * unit("steep.weight") <= unit("wide.weight"), "{at}: {}", unit("steep.weight"));
        assert!(1.5 * length("steep.weight") < length("wide.weight"), "{at}: {}", length("steep.weight"));
    }
}

/// Files with the same names, weights and moments: only the optimizer's count says how far apart they are.
#[test]
fn the_optimizers_own_count_sets_the_steps() {
    let lengths = |profile: &str, counted: usize| {
        let model = |random: &mut Random| vec![Parameter::new("a.weight", Dtype::F32, &[96, 128], random)];
        let mut adam = Adam::new(0.95, 21, model);
        adam.train(40);
        let mut rest = Rest::under(profile);
        for at in 1..=4 {
            adam.train(5);
            let [weight, first, second] = adam.parameters[0].tensors().map(|tensor| Value::Tensor(tensor.clone()));
            let count =
                Tensor { name: "step".into(), dtype: Dtype::F32, shape: vec![], values: vec![(counted * at) as f64] };
            let state = Value::named([("step", Value::Tensor(count)), ("exp_avg", first), ("exp_avg_sq", second)]);
            let (model, state) = (Value::named([("a.weight", weight)]), torch::optimizer(vec![state]));
            rest.write(
                &name_in("run", 20 * at),
                &torch::save(&Value::named([("model", model), ("optimizer", state)])).0,
            );
        }
        rest.settle();
        let index = rest.object(&name_in("run", 60)).index().clone();
        let coding = |name: &str| entry(&index, name).coding;
        (coding("model/a.weight").step().unwrap(), coding("optimizer/state/0/exp_avg").ratio().unwrap().0)
    };
    let [five, twenty, thousand] = [5, 20, 1000].map(|counted| lengths("balanced", counted));
    assert!((2.4..3.2).contains(&(five.0 / twenty.0)), "{five:?} {twenty:?}");
    assert!((0.55..0.65).contains(&(five.1 / twenty.1)), "{five:?} {twenty:?}");
    assert!(thousand.0 < 0.5 * twenty.0 && thousand.1 == twenty.1, "{thousand:?} {twenty:?}");
    let [near, far] = [5, 1000].map(|counted| lengths("compact", counted));
    assert!(far.0 < 0.5 * near.0 && far.1 > 1.5 * near.1, "{near:?} {far:?}");
}

/// Every second state of the exact profile is bit for bit as written.
#[test]
fn the_exact_profile_is_exact() {
    let rest = series("exact", 0.95, 1, 12);
    for at in 1..12 {
        assert!(rest.read(&step(at)).unwrap() == rest.written[&step(at)], "{at}");
    }
}

/// The bytes of all released files.
pub(crate) fn read_all(rest: &Rest) -> BTreeMap<String, Vec<u8>> {
    let released = rest.written.keys().filter(|name| rest.stub(name).is_some());
    released.map(|name| (name.clone(), rest.read(name).unwrap())).collect()
}

/// Removes files; all others must stay the same.
#[track_caller]
pub(crate) fn without(rest: &Rest, read: &BTreeMap<String, Vec<u8>>, gone: &[String]) -> Rest {
    let rest = rest.copied();
    gone.iter().for_each(|name| fs::remove_file(rest.path(name)).unwrap());
    rest.settle();
    let objects = rest.objects();
    for (name, bytes) in read.iter().filter(|(name, _)| !gone.contains(name)) {
        let id = rest.id(name);
        assert!(decode(&objects, id).unwrap() == *bytes, "{name} changed when {gone:?} went");
        assert!(Chain::open(&objects, id).unwrap().objects().len() <= LONGEST, "{name}");
    }
    assert_eq!(fs::read_dir(rest.root().join("tmp")).unwrap().count(), 0);
    rest
}

/// The choices of removed states: the first, some in the middle, a super-step, random ones, all but every eighth.
fn removals(count: usize, seed: u64) -> Vec<Vec<usize>> {
    let mut random = Random(seed);
    let mut cases = vec![vec![1], vec![5], vec![9], vec![8, 9, 10], (1..=9).collect(), vec![count - 1]];
    cases.extend((0..4).map(|_| (1..count).filter(|_| random.below(2) == 0).collect()));
    cases.push((1..count).filter(|at| at % 8 != 0).collect());
    cases
}

#[test]
fn whatever_goes_the_moments_of_others_stay() {
    for (profile, beta2, between) in [("balanced", 0.999, 2), ("compact", 0.95, 3)] {
        let rest = series(profile, beta2, between, 20);
        let read = read_all(&rest);
        for case in removals(20, 5) {
            let names: Vec<String> = case.iter().map(|at| step(*at)).collect();
            let after = without(&rest, &read, &names);
            assert!(stored(&after) < stored(&rest) || case == [19], "{case:?}");
            for at in (1..20).filter(|at| !case.contains(at)) {
                sound(&after, &step(at));
            }
        }
    }
}

#[test]
fn second_moments_whose_base_goes_stand_alone_with_its_factors_and_stay_cheap() {
    let rest = series("balanced", 0.999, 2, 8);
    let read = read_all(&rest);
    let slot = "state.a.weight.exp_avg_sq";
    let coding = |rest: &Rest, at: usize| entry(rest.object(&step(at)).index(), slot).coding;
    let factors = |rest: &Rest, at: usize| {
        let object = rest.object(&step(at));
        let number = object.index().tensors.iter().position(|tensor| tensor.path == slot).unwrap();
        object.factors(number).unwrap()
    };
    assert!(coding_name(coding(&rest, 1)) == "log keyframe", "{:?}", coding(&rest, 1));
    for at in 2..8 {
        assert!(coding_name(coding(&rest, at)) == "log", "{at}: {:?}", coding(&rest, at));
    }
    let bytes = entry(rest.object(&step(1)).index(), slot).stored();
    for last in 1..7 {
        let gone: Vec<String> = (1..=last).map(step).collect();
        let after = without(&rest, &read, &gone);
        assert!(coding_name(coding(&after, last + 1)) == "log keyframe", "{last}: {:?}", coding(&after, last + 1));
        assert_eq!(factors(&after, last + 1), factors(&rest, last + 1));
        let now = entry(after.object(&step(last + 1)).index(), slot).stored();
        assert!(now <= bytes + bytes / 4, "{last}: {now} of {bytes}");
        for at in last + 1..8 {
            sound(&after, &step(at));
        }
    }
}

/// A table of which a fifth of the rows is used between two states, and Adagrad's sum of squares.
struct Table {
    weight: Tensor,
    sum: Tensor,
    dense: Tensor,
    dense_sum: Tensor,
    random: Random,
}

impl Table {
    const ROWS: usize = 1024;
    const WIDTH: usize = 24;

    fn new(seed: u64) -> Table {
        let mut random = Random(seed);
        let mut tensor = |name: &str, shape: &[usize], value: Option<f64>| {
            let mut tensor = Tensor::new(name, Dtype::F32, shape, &mut random);
            tensor.values.iter_mut().for_each(|v| *v = value.unwrap_or(round(Dtype::F32, *v)));
            tensor
        };
        let shape = [Self::ROWS, Self::WIDTH];
        let (weight, sum) = (tensor("table.weight", &shape, None), tensor("sum", &shape, Some(0.0)));
        let (dense, dense_sum) = (tensor("dense.weight", &[48, 48], None), tensor("sum", &[48, 48], Some(0.0)));
        Table { weight, sum, dense, dense_sum, random }
    }

    /// One step: `w -= lr * g / (sqrt(sum) + eps)`, for those rows that were used.
    fn train(&mut self) {
        let random = &mut self.random;
        let mut update = |w: &mut f64, sum: &mut f64| {
            let gradient = 1e-2 * random.normal();
            *sum = round(Dtype::F32, *sum + gradient * gradient);
            *w = round(Dtype::F32, *w - 1e-3 * gradient / (sum.sqrt() + 1e-10));
        };
        self.dense.values.iter_mut().zip(&mut self.dense_sum.values).for_each(|(w, sum)| update(w, sum));
        let mut used = Random(update_seed(&self.dense));
        let rows = self.weight.values.chunks_mut(Self::WIDTH).zip(self.sum.values.chunks_mut(Self::WIDTH));
        for (row, sums) in rows.filter(|_| used.below(5) == 0) {
            row.iter_mut().zip(sums).for_each(|(w, sum)| update(w, sum));
        }
    }

    fn file(&self) -> Vec<u8> {
        let tensor = |tensor: &Tensor| Value::Tensor(tensor.clone());
        let state = [&self.weight, &self.dense].map(|weight| (weight.name.clone(), tensor(weight)));
        let sums = [&self.sum, &self.dense_sum].map(|sum| Value::named([("sum", tensor(sum))]));
        let file = [("model", Value::named(state)), ("optimizer", torch::optimizer(sums.into()))];
        torch::save(&Value::named(file)).0
    }
}

fn update_seed(of: &Tensor) -> u64 {
    of.values[0].to_bits()
}

fn name(at: usize) -> String {
    format!("table/step_{at:05}.pt")
}

/// The content of a tensor, and the file made anew from the restored tensors, so that checksums are right as well.
#[track_caller]
fn is_whole_zip(read: &[u8]) {
    let description = formats::describe(&read.to_vec()).unwrap();
    assert!(description.tensors.len() > 2, "{description:?}");
    let mut at = 0;
    let mut checked = 0;
    while read[at..].starts_with(b"PK\x03\x04") {
        let u16_at = |at: usize| u16::from_le_bytes(read[at..at + 2].try_into().unwrap()) as usize;
        let u32_at = |at: usize| u32::from_le_bytes(read[at..at + 4].try_into().unwrap());
        let start = at + 30 + u16_at(at + 26) + u16_at(at + 28);
        let end = start + u32_at(at + 18) as usize;
        assert_eq!(crc32fast::hash(&read[start..end]), u32_at(at + 14));
        (at, checked) = (end, checked + 1);
    }
    assert!(checked > 4, "{checked}");
}

/// A row that was not used since the last state reads the same.
#[track_caller]
fn rows_that_rest_stay(rest: &Rest, at: usize) {
    let extent = entry(rest.object(&name(at)).index(), "model/table.weight").extent.clone();
    let table = |file: &[u8]| file[extent.start as usize..extent.end as usize].to_vec();
    let written = [at - 1, at].map(|at| table(&rest.written[&name(at)]));
    let read = [at - 1, at].map(|at| table(&rest.read(&name(at)).unwrap()));
    let rows = |files: &[Vec<u8>; 2]| -> Vec<bool> {
        let pairs = files[0].chunks(4 * Table::WIDTH).zip(files[1].chunks(4 * Table::WIDTH));
        pairs.map(|(before, now)| before == now).collect()
    };
    let (rest, same) = (rows(&written), rows(&read));
    assert!((Table::ROWS * 7 / 10..Table::ROWS * 9 / 10).contains(&rest.iter().filter(|rest| **rest).count()));
    assert!(rest.iter().zip(&same).all(|(rest, same)| *same || !rest), "{at}");
}

#[test]
fn tables_and_adagrads_sums() {
    for profile in ["balanced", "compact", "balanced after an exact one"] {
        let mut table = Table::new(3);
        (0..10).for_each(|_| table.train());
        let mut rest = match profile {
            "balanced" | "compact" => Rest::under(profile),
            _ => Rest::on_keyframes(),
        };
        for at in 1..=20 {
            table.train();
            rest.write(&name(at), &table.file());
        }
        rest.settle();
        let mut tensors = 0;
        for at in 1..20 {
            let index = sound(&rest, &name(at));
            is_whole_zip(&rest.read(&name(at)).unwrap());
            if at > 1 {
                assert_eq!(codec(&index, "optimizer/state/0/sum"), "log", "{at}");
                assert_eq!(codec(&index, "optimizer/state/1/sum"), "log", "{at}");
                assert_eq!(codec(&index, "model/table.weight"), "rows", "{at}");
                tensors += entry(&index, "model/table.weight").stored();
            }
        }
        // A super-step is a difference to the one before.
        for at in (2..20).filter(|at| at % 8 != 1) {
            rows_that_rest_stay(&rest, at);
        }
        // Most rows are flags.
        let share = tensors as f64 / 18.0 / (4 * Table::ROWS * Table::WIDTH) as f64;

        assert!(share < 0.05, "{share}");
        let read = read_all(&rest);
        for case in removals(20, 6) {
            let names: Vec<String> = case.iter().map(|at| name(*at)).collect();
            let after = without(&rest, &read, &names);
            for at in (1..20).filter(|at| !case.contains(at)) {
                sound(&after, &name(at));
            }
        }
    }
}

/// Tensors of 8 MiB have their first and last pages in the skeleton, and a copy in 16 bits has the matching pages.
#[test]
fn large_tensors() {
    let mut adam = Adam::new(0.999, 4, |random| vec![Parameter::new("a.weight", Dtype::F32, &[1061, 2003], random)]);
    let mut rest = Rest::under("compact");
    for at in 1..=4 {
        adam.train(1);
        let mut tensors = adam.tensors();
        let mut copy = adam.parameters[0].weight.clone();
        (copy.name, copy.dtype) = ("copy".into(), Dtype::BF16);
        copy.values.iter_mut().for_each(|value| *value = round(Dtype::BF16, *value));
        tensors.push(copy);
        rest.write(&step(at), &safetensors(&tensors));
    }
    rest.settle();
    let len = |index: &Index, name: &str| {
        let tensor = entry(index, name);
        tensor.extent.end - tensor.extent.start
    };
    let check = |rest: &Rest, at: usize| {
        let index = sound(rest, &step(at));
        let codecs =
            ["a.weight", "copy", "state.a.weight.exp_avg", "state.a.weight.exp_avg_sq"].map(|name| codec(&index, name));
        assert_eq!(codecs, ["lattice", "cast", "moment", "log"], "{at}");
        assert!(len(&index, "a.weight") < 4 * 1061 * 2003 && len(&index, "a.weight") == 2 * len(&index, "copy"));
        index
    };
    let before: Vec<Index> = (1..4).map(|at| check(&rest, at)).collect();
    let read = read_all(&rest);
    let after = without(&rest, &read, &[step(1)]);
    assert_ne!(check(&after, 2).tensors, before[1].tensors);
    check(&after, 3);
}

#[test]
fn momentum_buffers() {
    let mut sizes = Vec::new();
    for profile in ["exact", "balanced", "compact"] {
        let mut random = Random(12);
        let mut tensors = vec![
            Tensor::new("a.weight", Dtype::F32, &[128, 96], &mut random),
            Tensor::new("state.a.weight.momentum_buffer", Dtype::F32, &[128, 96], &mut random),
            Tensor::new("b.weight", Dtype::BF16, &[96, 96], &mut random),
            Tensor::new("state.b.weight.momentum_buffer", Dtype::BF16, &[96, 96], &mut random),
        ];
        let mut rest = Rest::under(profile);
        for at in 1..=20 {
            for pair in tensors.chunks_mut(2) {
                let [weight, buffer] = pair else { unreachable!() };
                for _ in 0..5 {
                    for (w, b) in weight.values.iter_mut().zip(&mut buffer.values) {
                        *b = round(buffer.dtype, 0.9 * *b + 1e-2 * random.normal());
                        *w = round(weight.dtype, *w - 1e-2 * *b);
                    }
                }
            }
            rest.write(&step(at), &safetensors(&tensors));
        }
        rest.settle();
        let mut codings = BTreeSet::new();
        for at in 1..20 {
            let index = sound(&rest, &step(at));
            for name in ["a", "b"] {
                let tensor = entry(&index, &format!("state.{name}.weight.momentum_buffer"));
                assert_eq!(tensor.role, Role::Momentum);
                codings.insert(tensor.coding.codec.name());
            }
        }
        assert_eq!(codings, BTreeSet::from([if profile == "exact" { "lossless" } else { "lattice" }]));
        sizes.push(stored(&rest) as f64);
        let read = read_all(&rest);
        for case in removals(20, 7) {
            without(&rest, &read, &case.iter().map(|at| step(*at)).collect::<Vec<_>>());
        }
    }
    assert!(sizes[0] > 2.0 * sizes[1] && sizes[1] > 1.1 * sizes[2], "{sizes:?}");
}
