//! Odd checkpoints that no training should write, and some does. Each is archived, faithfully if it can be quantized
//! and bit for bit otherwise, and its neighbours are as without it.

use stepfs::store::object::Index;

use super::adam::{Adam, Parameter, round};
use super::series::{Dtype, Random, Rest, Tensor, entry, find, safetensors, step, train};
use super::sound::sound;

const COUNT: usize = 7;

/// A change to the tensors of the state of this number.
type Change<'a> = &'a dyn Fn(usize, &mut Vec<Tensor>);

fn adam() -> Adam {
    Adam::new(0.99, 31, |random| {
        vec![
            Parameter::new("a.weight", Dtype::F32, &[64, 96], random),
            Parameter::new("b.weight", Dtype::BF16, &[48, 64], random),
            Parameter::new("c.weight", Dtype::F64, &[24, 48], random),
            Parameter::new("d.weight", Dtype::F16, &[48, 48], random),
        ]
    })
}

/// A series of which some states are changed after they were made.
fn series(adam: &mut Adam, change: Change) -> Rest {
    adam.train(20);
    let mut rest = Rest::new();
    for at in 1..=COUNT {
        adam.train(2);
        let mut tensors = adam.tensors();
        change(at, &mut tensors);
        rest.write(&step(at), &safetensors(&tensors));
    }
    rest.settle();
    rest
}

/// Each file is as it may be. Returns the indices of the released ones. A file without a newer one of its kind is as
/// written.
#[track_caller]
fn check(rest: &Rest) -> Vec<Option<Index>> {
    let index = |at: usize| match rest.stub(&step(at)) {
        Some(_) => Some(sound(rest, &step(at))),
        None => {
            assert!(rest.read(&step(at)).unwrap() == rest.written[&step(at)], "{at}");
            None
        }
    };
    (1..=COUNT).map(index).collect()
}

fn is_lossy(index: &Index, name: &str) -> bool {
    entry(index, name).coding.is_lossy()
}

const SLOTS: [(&str, &str); 3] = [("", ""), ("state.", ".exp_avg"), ("state.", ".exp_avg_sq")];

fn slot(parameter: &str, slot: usize) -> String {
    format!("{}{parameter}{}", SLOTS[slot].0, SLOTS[slot].1)
}

#[test]
fn what_is_no_number_is_kept_bit_for_bit_and_harms_nothing_else() {
    for parameter in ["a.weight", "b.weight", "c.weight", "d.weight"] {
        for number in 0..3 {
            for odd in [f64::NAN, f64::NEG_INFINITY].into_iter().filter(|odd| odd.is_nan() || parameter == "a.weight") {
                let name = slot(parameter, number);
                let rest = series(&mut adam(), &|at, tensors| {
                    if at == 3 || at == 4 {
                        find(tensors, &name).values[777] = odd;
                    }
                });
                let all = check(&rest);
                for (at, index) in all.iter().enumerate().take(COUNT - 1) {
                    let index = index.as_ref().unwrap_or_else(|| panic!("{} is not released", at + 1));
                    for other in ["a.weight", "b.weight", "c.weight", "d.weight"] {
                        for of in 0..3 {
                            // Both moments are lossy, or neither: an update needs both.
                            let is_odd =
                                other == parameter && (of == number || [(1, 2), (2, 1)].contains(&(of, number)));
                            let lossy = is_lossy(index, &slot(other, of));
                            assert!(
                                lossy != (is_odd && (at == 2 || at == 3)) || is_near(at, of, number),
                                "{name} {odd}, {at}: {other} {of}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// The update to a state that is not a number is unknown.
fn is_near(at: usize, of: usize, number: usize) -> bool {
    of == 0 && number == 0 && (1..=4).contains(&at)
}

#[test]
fn seconds_that_are_none() {
    for odd in [-1e-6, -0.0, -f64::from(f32::MAX)] {
        let name = slot("a.weight", 2);
        let rest = series(&mut adam(), &|_, tensors| find(tensors, &name).values[3] = odd);
        for index in check(&rest).iter().take(COUNT - 1) {
            let index = index.as_ref().unwrap();
            assert!(!is_lossy(index, &name), "{odd}");
            // The root of -0 is -0, and its quotient infinite. Like the root of a negative number, it cannot be a unit.
            assert!(!is_lossy(index, &slot("a.weight", 1)) || odd == 0.0, "{odd}");
            assert!(is_lossy(index, "a.weight"));
        }
    }
}

#[test]
fn zeros() {
    // Not a step of training yet: moments are 0.
    let mut adam = adam();
    let mut rest = Rest::new();
    for at in 1..=COUNT {
        adam.parameters.iter_mut().for_each(|p| p.weight.values[0] += 1e-2);
        rest.write(&step(at), &adam.file());
    }
    rest.settle();
    check(&rest);
    let names: Vec<String> = (0..3).flat_map(|of| ["a.weight", "b.weight"].map(|p| slot(p, of))).collect();
    for name in &names {
        for from in [1, 3] {
            let rest = series(&mut self::adam(), &|at, tensors| {
                if at >= from {
                    find(tensors, name).values.fill(0.0);
                }
            });
            let all = check(&rest);
            let index = all[4].as_ref().unwrap();
            assert!(entry(index, name).stored() < 300, "{name}: {}", entry(index, name).stored());
        }
        // And -0.
        let rest = series(&mut self::adam(), &|at, tensors| {
            find(tensors, name).values.iter_mut().skip(at).step_by(5).for_each(|value| *value = -0.0);
        });
        check(&rest);
        // Some second moments are 0 where the first is not.
        let rest = series(&mut self::adam(), &|_, tensors| {
            find(tensors, name).values.iter_mut().step_by(3).for_each(|value| *value = 0.0);
        });
        let all = check(&rest);
        assert!(is_lossy(all[4].as_ref().unwrap(), name), "{name}");
    }
}

#[test]
fn the_smallest_and_the_largest_numbers() {
    for scale in [1e-300, 1e-41, 1e36] {
        for of in 0..3 {
            for parameter in ["a.weight", "b.weight", "c.weight", "d.weight"] {
                let name = slot(parameter, of);
                let rest = series(&mut adam(), &|_, tensors| {
                    let tensor = find(tensors, &name);
                    tensor.values.iter_mut().step_by(2).for_each(|value| *value *= scale);
                });
                check(&rest);
            }
        }
        // All of them.
        let rest = series(&mut adam(), &|_, tensors| {
            let of_state = |tensor: &&mut Tensor| !tensor.shape.is_empty();
            tensors.iter_mut().filter(of_state).for_each(|tensor| {
                tensor.values.iter_mut().for_each(|value| *value *= scale);
            });
        });
        check(&rest);
    }
}

#[test]
fn subnormals_are_quantized_or_exact() {
    // fp32 from its least value on, f64 below its least normal one, fp16 likewise.
    for (parameter, least) in [("a.weight", 1e-45), ("c.weight", 5e-324), ("d.weight", 6e-8)] {
        for of in 0..3 {
            let name = slot(parameter, of);
            let rest = series(&mut adam(), &|at, tensors| {
                let values = &mut find(tensors, &name).values;
                values.iter_mut().zip(at..).for_each(|(value, at)| *value = least * (at % 50) as f64);
            });
            check(&rest);
        }
    }
}

#[test]
fn moments_without_their_partner() {
    for missing in [1, 2] {
        for from in [1, 4] {
            let name = slot("a.weight", missing);
            let rest = series(&mut adam(), &|at, tensors| {
                if at >= from {
                    tensors.retain(|tensor| tensor.name != name);
                }
            });
            let all = check(&rest);
            let index = all[5].as_ref().unwrap();
            assert!(!is_lossy(index, &slot("a.weight", 3 - missing)));
            assert!(is_lossy(index, &slot("b.weight", 1)) && is_lossy(index, &slot("b.weight", 2)));
        }
    }
    // Of another type than its partner: no pair.
    let rest = series(&mut adam(), &|_, tensors| find(tensors, &slot("a.weight", 1)).dtype = Dtype::BF16);
    let all = check(&rest);
    let index = all[5].as_ref().unwrap();
    assert!(!is_lossy(index, &slot("a.weight", 1)) && !is_lossy(index, &slot("a.weight", 2)));
    // Of another shape.
    let rest = series(&mut adam(), &|_, tensors| find(tensors, &slot("a.weight", 1)).shape = vec![96, 64]);
    let all = check(&rest);
    assert!(!is_lossy(all[5].as_ref().unwrap(), &slot("a.weight", 2)));
}

/// The result for all three tensors of a parameter.
fn reshape(tensors: &mut [Tensor], shape: &[usize]) {
    let mut random = Random(6);
    for of in 0..3 {
        let tensor = find(tensors, &slot("a.weight", of));
        tensor.shape = shape.to_vec();
        tensor.values.resize_with(shape.iter().product(), || round(Dtype::F32, 1e-3 * random.normal().abs()));
    }
}

#[test]
fn shapes_that_change() {
    // As many elements in other rows, a vector, one more row, fewer rows, a dimension more.
    for shape in [&[96, 64][..], &[6144], &[65, 96], &[40, 96], &[64, 48, 2], &[1, 6144], &[6144, 1]] {
        for back in [false, true] {
            let rest = series(&mut adam(), &|at, tensors| {
                if at >= 4 && !(back && at >= 6) {
                    reshape(tensors, shape);
                }
            });
            let all = check(&rest);
            assert!(all[1].is_some() && is_lossy(all[1].as_ref().unwrap(), "b.weight"), "{shape:?}");
        }
    }
}

#[test]
fn a_layer_comes_or_goes() {
    for (from, to) in [(4, COUNT), (1, 3), (3, 4), (4, 4)] {
        // Another one too, so that numbers of tensors change.
        let rest = series(&mut adam(), &|at, tensors| {
            if (from..=to).contains(&at) {
                tensors.retain(|tensor| !tensor.name.contains("b.weight"));
            }
        });
        let all = check(&rest);
        let lossy = all.iter().flatten().filter(|index| is_lossy(index, "a.weight")).count();
        assert!(lossy >= 4, "{from} to {to}: {lossy}");
    }
}

#[test]
fn a_vocabulary_that_grows() {
    let table = |random: &mut Random| vec![Parameter::new("table.weight", Dtype::F32, &[512, 24], random)];
    let mut adam = Adam::new(0.999, 5, table);
    let rest = series(&mut adam, &|at, tensors| {
        let mut random = Random(at as u64);
        // Most rows rest except the new ones.
        for tensor in tensors.iter_mut().filter(|tensor| !tensor.shape.is_empty()) {
            let rows = if at < 4 { 512 } else { 576 };
            tensor.shape[0] = rows;
            tensor.values.resize_with(rows * 24, || round(Dtype::F32, 1e-4 * random.normal().abs()));
        }
    });
    let all = check(&rest);
    assert!(all[1].is_some() && all[5].is_some());
    assert!(is_lossy(all[1].as_ref().unwrap(), "table.weight") && is_lossy(all[5].as_ref().unwrap(), "table.weight"));
}

#[test]
fn another_model_in_the_same_directory() {
    let (mut one, mut random) = (adam(), Random(77));
    // Names alike, shapes not.
    let mut other = Adam::new(0.999, 78, |random| vec![Parameter::new("a.weight", Dtype::F32, &[80, 100], random)]);
    let mut third = super::series::model(&mut random);
    let mut rest = Rest::new();
    for at in 1..=COUNT {
        one.train(2);
        other.train(2);
        train(&mut third, 1e-3, &mut random);
        let bytes = match at % 3 {
            0 => one.file(),
            1 => other.file(),
            _ => safetensors(&third),
        };
        rest.write(&step(at), &bytes);
    }
    rest.settle();
    let all = check(&rest);
    assert!(all.iter().flatten().count() >= 3);
}

#[test]
fn types_of_low_precision() {
    for (weights, state) in [
        (Dtype::BF16, Dtype::F32),
        (Dtype::F16, Dtype::F32),
        (Dtype::F32, Dtype::BF16),
        (Dtype::F16, Dtype::F16),
        (Dtype::F64, Dtype::F16),
    ] {
        let mut adam = Adam::new(0.99, 8, |random| {
            vec![Parameter::new("a.weight", weights, &[96, 128], random).with_state(state)]
        });
        let rest = series(&mut adam, &|_, _| {});
        let all = check(&rest);
        let index = all[4].as_ref().unwrap();
        assert!((0..3).all(|of| is_lossy(index, &slot("a.weight", of))), "{weights:?} {state:?}");
    }
    for dtype in [Dtype::F8_E4M3, Dtype::F8_E5M2] {
        let mut random = Random(9);
        let mut rest = Rest::new();
        let mut tensors = vec![
            Tensor::new("a.weight", dtype, &[256, 256], &mut random),
            Tensor::new("b.weight", Dtype::F32, &[96, 96], &mut random),
        ];
        tensors[0].values.iter_mut().for_each(|value| *value = random.below(256) as f64);
        for at in 1..=COUNT {
            // A few move to the next number of their type; NaN are among them.
            for _ in 0..2000 {
                let at = random.below(256 * 256) as usize;
                tensors[0].values[at] = (tensors[0].values[at] + 1.0) % 256.0;
            }
            tensors[1].update(1e-3, &mut random);
            rest.write(&step(at), &safetensors(&tensors));
        }
        rest.settle();
        let all = check(&rest);
        let index = all[4].as_ref().unwrap();
        assert!(!is_lossy(index, "a.weight") && is_lossy(index, "b.weight"));
        let stored = entry(index, "a.weight").stored();
        assert!(stored < 65536 / 3, "{dtype:?}: {stored}");
    }
}

#[test]
fn copies_in_fewer_bits_and_what_only_looks_like_one() {
    for copy in [Dtype::BF16, Dtype::F16] {
        for odd in [None, Some(f64::NAN), Some(1e30), Some(0.5)] {
            let rest = series(&mut adam(), &|_, tensors| {
                let mut twin = find(tensors, "a.weight").clone();
                (twin.name, twin.dtype) = ("copy.a.weight".into(), copy);
                twin.values.iter_mut().for_each(|value| *value = round(copy, *value));
                if let Some(odd) = odd {
                    // At the beginning, outside of the samples that precede the full comparison; in the copy only, or
                    // in both.
                    twin.values[0] = odd;
                    find(tensors, "a.weight").values[0] = if odd == 0.5 { 0.25 } else { odd };
                }
                tensors.push(twin);
            });
            for index in check(&rest).iter().flatten() {
                let coding = entry(index, "copy.a.weight").coding.codec.name();
                assert!(odd.is_some() || coding == "cast", "{coding}");
                assert!(odd != Some(0.5) || coding != "cast", "{coding}");
            }
        }
    }
}

#[test]
fn copies_of_vectors() {
    for (shape, is_copy) in [(&[128][..], true), (&[255], true), (&[256], true), (&[100], false), (&[1, 128], true)] {
        let mut adam = Adam::new(0.99, 8, |random| {
            vec![
                Parameter::new("a.weight", Dtype::F32, &[80, 96], random),
                Parameter::new("norm.weight", Dtype::F32, shape, random),
            ]
        });
        let rest = series(&mut adam, &|_, tensors| {
            let mut twin = find(tensors, "norm.weight").clone();
            (twin.name, twin.dtype) = ("copy.norm.weight".into(), Dtype::BF16);
            twin.values.iter_mut().for_each(|value| *value = round(Dtype::BF16, *value));
            tensors.push(twin);
        });
        let all = check(&rest);
        let tensors = &all[4].as_ref().unwrap().tensors;
        let copy = tensors.iter().find(|tensor| tensor.path == "copy.norm.weight");
        assert_eq!(copy.is_some_and(|copy| copy.coding.codec.name() == "cast"), is_copy, "{shape:?}");
    }
}

#[test]
fn empty_and_tiny_tensors() {
    let mut random = Random(3);
    let mut parameters = vec![Parameter::new("a.weight", Dtype::F32, &[96, 96], &mut random)];
    for (at, shape) in
        [&[0, 5][..], &[1], &[1, 1], &[2, 2], &[63], &[64], &[7, 9, 1], &[1, 300], &[300, 1]].iter().enumerate()
    {
        parameters.push(Parameter::new(&format!("p{at}.weight"), Dtype::F32, shape, &mut random));
    }
    let rest = series(&mut Adam::new(0.9, 1, |_| parameters), &|_, _| {});
    assert_eq!(check(&rest).iter().flatten().count(), COUNT - 1);
}
