//! Tensors that share a storage, and tensors that are a rank's part of a distributed one.

use super::by_hand::{adam, dict, strided, subclass, tensor, text, tuple, view};
use super::hostile::zip_with;
use super::*;

/// The description of a pickle with storages of these lengths, in elements.
fn of(pickle: &[u8], storages: &[usize]) -> Description {
    let bytes: Vec<Vec<u8>> = storages.iter().map(|len| vec![0; 4 * len]).collect();
    let bytes: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
    check(&zip_with(&[pickle, b"."].concat(), &bytes))
}

fn at<'d>(d: &'d Description, path: &str) -> &'d Tensor {
    let found = d.tensors.iter().find(|t| t.path == path || t.aliases.iter().any(|alias| alias == path));
    found.unwrap_or_else(|| panic!("no {path}: {:?}", d.note))
}

fn is_proven(d: &Description, path: &str) -> bool {
    at(d, path).trained.is_some()
}

/// A model and its Adam. The model has an embedding, a layer with these tensors, and an output.
fn model(layer: &[(&str, Vec<u8>)], len: usize) -> Description {
    let mut own = vec![("emb.weight", tensor(0, &[8, 4]))];
    own.extend(layer.iter().cloned());
    own.push(("out.weight", tensor(2, &[8, 6])));
    let shapes: [&[i32]; 5] = [&[8, 4], &[6, 4], &[6, 6], &[6], &[8, 6]];
    let lengths = shapes.map(|shape| shape.iter().product::<i32>() as usize);
    let mut storages = vec![lengths[0], len, lengths[4]];
    storages.extend(lengths.iter().flat_map(|&len| [len; 2]));
    of(&dict(&[("model", dict(&own)), ("optimizer", adam(3, &shapes))]), &storages)
}

const LAYER: [&str; 3] = ["rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.bias_ih_l0"];

fn flat() -> Vec<(&'static str, Vec<u8>)> {
    let [input, hidden, bias] = LAYER;
    vec![(input, view(1, 66, 0, &[6, 4])), (hidden, view(1, 66, 24, &[6, 6])), (bias, view(1, 66, 60, &[6]))]
}

#[test]
fn weights_in_one_storage_are_proven_with_the_others() {
    let d = model(&flat(), 66);
    for path in ["model/emb.weight", "model/out.weight", "model/rnn.weight_hh_l0"] {
        assert!(is_proven(&d, path), "{path}");
    }
    let rnn = at(&d, "model/rnn.bias_ih_l0");
    assert!(rnn.is_weight() && rnn.is_flat() && rnn.is_trained_by_numbers() && !rnn.is_trained_by_shape_only());
    assert_eq!((rnn.shape.as_slice(), rnn.aliases.len()), (&[66][..], 2));
    // The state of a separate weight is paired with it. The state of a weight in the storage is not.
    let path = |i: Option<usize>| i.map(|i| d.tensors[i].path.as_str());
    assert_eq!(path(at(&d, "optimizer/state/0/exp_avg").of), Some("model/emb.weight"));
    for state in ["optimizer/state/1/exp_avg", "optimizer/state/2/exp_avg_sq"] {
        assert_eq!((path(at(&d, state).of), at(&d, state).partner.is_some()), (None, true));
    }
}

#[test]
fn a_storage_is_exact_where_not_all_of_it_is_trained() {
    let [input, hidden, bias] = LAYER;
    // Bytes in no view; two views of the same bytes; elements with others between; a name that no layer has.
    let gap = flat();
    let mut overlap = flat();
    overlap[2] = (bias, view(1, 66, 54, &[6]));
    let mut strides = flat();
    strides[2] = (bias, strided(1, 71, 60, &[6], &[2]));
    strides[0] = (input, view(1, 71, 0, &[6, 4]));
    strides[1] = (hidden, view(1, 71, 24, &[6, 6]));
    let gap = gap.into_iter().map(|(name, _)| name).zip([
        view(1, 70, 0, &[6, 4]),
        view(1, 70, 24, &[6, 6]),
        view(1, 70, 60, &[6]),
    ]);
    let mut named = flat();
    named[2].0 = "rnn.offsets";
    for (layer, len) in [(gap.collect(), 70), (overlap, 66), (strides, 71), (named, 66)] {
        let d = model(&layer, len);
        assert!(is_proven(&d, "model/emb.weight") && is_proven(&d, "model/out.weight"), "{layer:?}");
        let rnn = at(&d, "model/rnn.weight_ih_l0");
        assert!(rnn.is_weight() && rnn.trained.is_none(), "{layer:?}");
    }
}

#[test]
fn what_shares_bytes_with_something_else_is_no_weight() {
    let mut layer = flat();
    layer[2].0 = "rnn.running_mean";
    let d = model(&layer, 66);
    let rnn = at(&d, "model/rnn.weight_ih_l0");
    assert_eq!((rnn.role, rnn.trained), (Role::Other, None));
}

#[test]
fn one_storage_that_the_optimizer_trains_as_one_is_proven_as_one() {
    let model = [("a.weight", view(0, 60, 0, &[6, 4])), ("b.weight", view(0, 60, 24, &[6, 6]))];
    let d = of(&dict(&[("model", dict(&model)), ("optimizer", adam(1, &[&[60]]))]), &[60, 60, 60]);
    assert!(is_proven(&d, "model/a.weight"));
    assert_eq!(d.tensors.iter().filter(|t| t.of.is_some()).count(), 2);
}

/// A rank's part of a distributed tensor.
fn part(class: &str, whole: &[i32], local: Vec<u8>) -> Vec<u8> {
    subclass(class, whole, &[("_local_tensor", local), ("_spec", tuple(&[text("mesh")]))])
}

const CLASSES: [&str; 3] = [
    "torch.distributed.tensor DTensor", "torch.distributed._tensor.api DTensor",
    "torch.distributed.tensor._api DTensor",
];

#[test]
fn a_distributed_tensor_is_its_ranks_part() {
    let shapes: [&[i32]; 2] = [&[4, 8], &[4, 4]];
    let plain = dict(&[("a.weight", tensor(0, shapes[0])), ("b.weight", tensor(1, shapes[1]))]);
    let storages = [32, 16, 32, 32, 16, 16];
    let expected = of(&dict(&[("model", plain), ("optimizer", adam(2, &shapes))]), &storages);
    for class in CLASSES {
        let named = [
            ("a.weight", part(class, &[8, 8], tensor(0, shapes[0]))),
            ("b.weight", part(class, &[8, 4], tensor(1, shapes[1]))),
        ];
        let d = of(&dict(&[("model", dict(&named)), ("optimizer", adam(2, &shapes))]), &storages);
        let said = |d: &Description| {
            let of = |t: &Tensor| (t.path.clone(), t.shape.clone(), t.role, t.of, t.partner, t.trained, t.lossless);
            d.tensors.iter().map(of).collect::<Vec<_>>()
        };
        assert_eq!(said(&d), said(&expected), "{class}");
        assert!(is_proven(&d, "model/a.weight"));
    }
}

#[test]
fn a_part_that_hides_the_whole_is_proven_by_an_optimizer_only() {
    let class = CLASSES[0];
    let named = [
        ("square.weight", part(class, &[8, 8], tensor(0, &[4, 8]))),
        ("rows.weight", part(class, &[8, 16], tensor(1, &[4, 16]))),
        ("bias", part(class, &[8], tensor(2, &[4]))),
    ];
    let mut d = of(&dict(&named), &[32, 64, 4]);
    let lossless = |d: &Description| ["square.weight", "rows.weight", "bias"].map(|path| at(d, path).lossless);
    assert_eq!(lossless(&d), [true, false, true]);
    let shapes = [(vec![4, 8], 1), (vec![4, 16], 1)];
    d.prove(&[Trained { count: 2, shapes: BTreeMap::from(shapes) }]);
    assert_eq!(lossless(&d), [false, false, true]);
    assert!(is_proven(&d, "square.weight") && !is_proven(&d, "bias"));
}

#[test]
fn other_subclasses_are_no_tensors() {
    let of_class = |class: &str| of(&dict(&[("w", part(class, &[4, 8], tensor(0, &[4, 8])))]), &[32]);
    assert_eq!(of_class("torch.distributed.tensor DTensor").tensors[0].path, "w");
    for class in ["torch.distributed.tensor DTensors", "torchao.dtypes DTensor", "mine.torch.distributed. DTensor"] {
        assert_ne!(of_class(class).tensors[0].path, "w", "{class}");
    }
}
