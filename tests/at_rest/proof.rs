//! Only proven parameters become lossy, and only above a floor.

use super::adam::{Adam, Parameter};
use super::series::*;

/// Names of the lossy tensors in the third of five states, whose tensors move by this much.
fn lossy(mut tensors: Vec<Tensor>, size: f64) -> Vec<String> {
    let mut random = Random(11);
    let mut rest = Rest::new();
    for at in 1..=5 {
        tensors.iter_mut().for_each(|tensor| tensor.update(size, &mut random));
        rest.write(&step(at), &safetensors(&tensors));
    }
    rest.settle();
    let index = rest.faithful(&step(3));
    index.tensors.iter().filter(|t| t.coding.is_lossy()).map(|t| t.path.clone()).collect()
}

fn matrix(name: &str) -> Tensor {
    Tensor::new(name, Dtype::F32, &[128, 160], &mut Random(7))
}

#[test]
fn without_an_optimizer_two_states_prove_matrices_of_layers_only() {
    let named = ["fc.weight", "fc.table", "obs", "norm._mean", "fc.weight_mask", "queue", "lora_A.default.weight"];
    assert_eq!(lossy(named.map(matrix).to_vec(), 1e-3), ["fc.weight", "lora_A.default.weight"]);
}

#[test]
fn what_does_not_move_as_parameters_do_is_no_parameter() {
    let with = |change: &dyn Fn(&mut Tensor)| {
        let mut tensor = matrix("fc.weight");
        change(&mut tensor);
        vec![tensor, matrix("other.weight")]
    };
    let only_other = ["other.weight"];
    assert_eq!(lossy(with(&|_| {}), 1e-3).len(), 2);
    // One sign, zeros, few values, rows of one length.
    assert_eq!(lossy(with(&|t| t.values.iter_mut().for_each(|x| *x = 1.0 + x.abs())), 1e-3), only_other);
    assert_eq!(lossy(with(&|t| t.values.iter_mut().step_by(2).for_each(|x| *x = f64::NAN)), 1e-3), only_other);
    // Unrelated from state to state, as data are.
    assert!(lossy(with(&|_| {}), 1.0).is_empty());
}

#[test]
fn a_symmetric_matrix_is_a_statistic() {
    let mut random = Random(3);
    let mut square = Tensor::new("whitening.weight", Dtype::F32, &[96, 96], &mut random);
    let mut rest = Rest::new();
    for at in 1..=4 {
        square.update(1e-3, &mut random);
        for row in 0..96 {
            for column in 0..row {
                square.values[row * 96 + column] = square.values[column * 96 + row];
            }
        }
        rest.write(&step(at), &safetensors(&[square.clone(), matrix("fc.weight")]));
    }
    rest.settle();
    assert!(!entry(&rest.faithful(&step(3)), "whitening.weight").coding.is_lossy());
}

#[test]
fn a_codebook_beside_its_counts_is_a_statistic() {
    let tensors = ["vq._codebook.weight", "vq._codebook.cluster_size", "vq._ema_w", "sq_mean.weight", "fc.weight"];
    assert_eq!(lossy(tensors.map(matrix).to_vec(), 1e-3), ["fc.weight"]);
}

#[test]
fn a_proven_scale_never_becomes_zero() {
    // Scales that are small against their update, with their optimizer's state.
    let parameter = |random: &mut Random| vec![Parameter::new("scale", Dtype::F32, &[96, 96], random)];
    let mut adam = Adam::new(0.999, 5, parameter);
    let mut rest = Rest::new();
    for at in 1..=5 {
        adam.train(1);
        let mut tensors = adam.tensors();
        find(&mut tensors, "scale").values.iter_mut().for_each(|value| *value = value.abs());
        rest.write(&step(at), &safetensors(&tensors));
    }
    rest.settle();
    for at in 2..5 {
        let (written, read) = (&rest.written[&step(at)], rest.read(&step(at)).unwrap());
        let object = rest.object(&step(at));
        let scale = entry(object.index(), "scale");
        assert!(scale.coding.step().is_some() && scale.bound > 1e-4, "{:?}", scale.coding);
        let extent = scale.extent.start as usize..scale.extent.end as usize;
        let floats = |bytes: &[u8]| -> Vec<f32> {
            bytes[extent.clone()].as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
        };
        for (was, is) in floats(written).into_iter().zip(floats(&read)) {
            assert!((is > 0.0) == (was > 0.0) && (is - was).abs() <= was / 8.0, "{was} became {is}");
        }
    }
}

#[test]
fn an_optimizer_proves_its_parameters_whatever_they_are_called() {
    let parameter = |random: &mut Random| vec![Parameter::new("queue", Dtype::F32, &[64, 300], random)];
    let mut adam = Adam::new(0.999, 6, parameter);
    let mut rest = Rest::new();
    for at in 1..=4 {
        adam.train(5);
        let mut tensors = adam.tensors();
        tensors.push(Tensor { name: "bank".into(), ..adam.parameters[0].weight.clone() });
        rest.write(&step(at), &safetensors(&tensors));
    }
    rest.settle();
    let object = rest.object(&step(3));
    let lossy = |name: &str| entry(object.index(), name).coding.is_lossy();
    assert!(lossy("queue") && !lossy("bank"));
}
