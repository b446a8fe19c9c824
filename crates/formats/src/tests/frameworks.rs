//! What other libraries write of a tiny GPT (tests/corpus/frameworks, made by make_frameworks.py).

use std::collections::HashMap;

use super::{Description, Kind, Role, Tensor, check, files};
use crate::Model;

fn model(name: &str) -> Model {
    Model::read(&files("frameworks")[name]).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Each weight is proven by its name, and has both moments; `moment` has their names for a weight's.
fn has_moments_of_each_weight(model: &Model, moment: impl Fn(&str, &str) -> String) {
    let tensors = model.tensors();
    let places: HashMap<&str, usize> = tensors.iter().enumerate().map(|(i, t)| (t.path.as_str(), i)).collect();
    let weights: Vec<&Tensor> = tensors.iter().filter(|t| t.is_weight() && t.trained.is_some()).collect();
    assert!(weights.len() > 10, "{} weights", weights.len());
    for weight in weights {
        let [first, second] = ["exp_avg", "exp_avg_sq"].map(|slot| places[moment(&weight.path, slot).as_str()]);
        assert_eq!((tensors[first].role, tensors[second].role), (Role::FirstMoment, Role::SecondMoment));
        assert_eq!((tensors[first].partner, tensors[second].partner), (Some(second), Some(first)), "{}", weight.path);
        assert_eq!(tensors[first].of, Some(places[weight.path.as_str()]), "{}", weight.path);
    }
}

#[test]
fn weights_at_the_root_of_torchtitan_are_known_by_the_optimizers_names() {
    let model = model("torchtitan.metadata");
    has_moments_of_each_weight(&model, |weight, slot| format!("optimizer/state.{weight}.{slot}"));
    // The tied head has no state of its own: it is a weight without a proof.
    for tensor in model.tensors().iter().filter(|t| !t.path.starts_with("optimizer/")) {
        let proven = tensor.path != "head.weight";
        assert_eq!((tensor.is_weight(), tensor.trained.is_some()), (true, proven), "{}: {}", tensor.path, tensor.why);
    }
}

#[test]
fn megatrons_slots_in_front_of_a_name_are_paired() {
    let model = model("megatron.metadata");
    has_moments_of_each_weight(&model, |weight, slot| format!("optimizer.state.{slot}.{weight}"));
}

#[test]
fn fastais_lists_of_state_are_adams() {
    let bytes = files("frameworks").remove("fastai.pth").expect("corpus file");
    let description = check(&bytes);
    let tensors = &description.tensors;
    let weights: Vec<_> = tensors.iter().filter(|t| t.is_weight()).collect();
    assert!(weights.len() > 10 && weights.iter().all(|t| t.trained.is_some()));
    let state: Vec<_> = tensors.iter().filter(|t| t.path.ends_with("_avg")).collect();
    assert_eq!(state.len(), 2 * weights.len());
    for tensor in state {
        let of_fastai = if tensor.path.ends_with("/grad_avg") { Role::FirstMoment } else { Role::SecondMoment };
        assert_eq!((tensor.role, tensor.partner.is_some()), (of_fastai, true), "{}: {}", tensor.path, tensor.why);
    }
    // Without the groups' numbers beside it nobody knows whose names they are.
    let at = bytes.windows(6).position(|window| window == b"hypers").expect("there");
    let mut changed = bytes.clone();
    changed[at] ^= 1;
    let other = check(&changed);
    assert!(other.tensors.iter().all(|t| !matches!(t.role, Role::FirstMoment | Role::SecondMoment)));
}

fn deepspeed() -> (Vec<u8>, Description) {
    let bytes = files("frameworks").remove("deepspeed_model_states.pt").expect("corpus file");
    let description = check(&bytes);
    assert_eq!((description.kind, description.tensors.len()), (Kind::TorchZip, 1));
    (bytes, description)
}

#[test]
fn deepspeed_lists_the_views_of_its_flat_weights() {
    let (bytes, description) = deepspeed();
    let flat = &description.tensors[0];
    assert!(flat.is_weight() && flat.is_flat() && flat.trained.is_some(), "{}", flat.why);
    // A name that is in one of the lists only, and nothing is proven.
    let mut changes = 0;
    for old in [&b"wte.weight"[..], b"blocks.0.up.bias", b"shared_params", b"\0param_shapes"] {
        for at in (0..bytes.len() - old.len()).filter(|at| bytes[*at..].starts_with(old)) {
            let mut changed = bytes.clone();
            changed[at + old.len() - 1] ^= 1;
            assert!(check(&changed).tensors.iter().all(|t| t.is_weight() && t.trained.is_none()), "{at}");
            changes += 1;
        }
    }
    assert!(changes >= 7, "{changes}");
}
