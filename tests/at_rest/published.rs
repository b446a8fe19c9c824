//! Published systems as profiles: through the archive and back, and the rest of a chain when a part of it goes.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use papers::registry::SystemId;
use stepfs::recall::Chain;
use stepfs::store::PROFILE;
use stepfs::tile::Codec;

use super::series::{Dtype, Random, Rest, Tensor, decode, entry, model, safetensors, states, step, train};

/// A settled series under a profile, and the bytes of each released state.
fn series(profile: &str, count: usize) -> (Rest, BTreeMap<usize, Vec<u8>>) {
    let mut rest = Rest::under(profile);
    for (at, state) in states(count).iter().enumerate() {
        rest.write(&step(at + 1), state);
    }
    rest.settle();
    let read = (1..count).map(|at| (at, rest.read(&step(at)).unwrap())).collect();
    (rest, read)
}

fn verified(rest: &Rest) -> bool {
    Command::new(env!("CARGO_BIN_EXE_stepfs")).arg("verify").arg(rest.root()).output().unwrap().status.success()
}

#[test]
fn every_system_is_a_profile() {
    for system in SystemId::usual() {
        let (rest, _) = series(&system.to_string(), 6);
        for at in 1..6 {
            let index = rest.faithful(&step(at));
            assert_eq!(index.profile, system.to_string());
            let of = |name: &str| entry(&index, name).coding;
            for name in ["a.weight", "b.weight"] {
                let whole = at == 1 && !system.system().stands_alone();
                assert_eq!(of(name).is_external(), !whole, "{system} {at}: {name} is {:?}", of(name));
            }
            // No system takes fp64, and no codec takes integers; nothing proves that the others are trained.
            for name in ["c.weight", "ids", "frozen.weight", "a.bias"] {
                assert!(!of(name).is_lossy(), "{system}: {name} is {:?}", of(name));
            }
        }
        assert!(verified(&rest), "{system}");
    }
}

#[test]
fn each_state_is_a_difference_to_the_one_before_and_a_chain_ends() {
    let (rest, _) = series("lc-3", 36);
    for at in 1..36 {
        let chain = Chain::open(&rest.objects(), rest.id(&step(at))).unwrap();
        assert_eq!(chain.objects().len(), (at - 1) % 32 + 1, "{at}");
        let header = chain.leaf().header();
        assert_eq!(header.parent, ((at - 1) % 32 > 0).then(|| rest.id(&step(at - 1))), "{at}");
        // The first of a chain has its full precision.
        assert_eq!(!header.lossy, (at - 1) % 32 == 0, "{at}");
    }
}

/// Removes states, settles, and compares the others.
fn remove(rest: &Rest, gone: impl IntoIterator<Item = usize>, read: &BTreeMap<usize, Vec<u8>>) {
    gone.into_iter().for_each(|at| fs::remove_file(rest.path(&step(at))).unwrap());
    rest.settle();
    let objects = rest.objects();
    for (at, bytes) in read.iter().filter(|(at, _)| rest.path(&step(**at)).exists()) {
        assert!(decode(&objects, rest.id(&step(*at))).unwrap() == *bytes, "{at}");
    }
    assert!(verified(rest));
}

#[test]
fn whatever_goes_the_others_keep_their_bytes_and_their_errors() {
    for profile in ["lc-3", "scar-5", "topn-10"] {
        let (rest, read) = series(profile, 14);
        let mut random = Random(9);
        let mut cases: Vec<Vec<usize>> = vec![vec![1], vec![5], (1..12).collect(), vec![13]];
        cases.extend((0..2).map(|_| (1..14).filter(|_| random.below(2) == 0).collect()));
        for case in cases {
            let rest = rest.copied();
            remove(&rest, case.iter().copied(), &read);
            for at in (2..14).filter(|at| !case.contains(at)) {
                let index = rest.faithful(&step(at));
                assert!(entry(&index, "a.weight").bound > 0.0, "{profile} {at}: it is said to be exact");
            }
        }
    }
}

#[test]
fn a_merged_chain_goes_on_as_if_nothing_had_gone() {
    let (rest, read) = series("lc-3", 14);
    let mut without = rest.copied();
    // All but the newest, which then has no parent.
    remove(&without, 1..13, &read);
    let left = without.object(&step(13));
    assert_eq!((left.header().parent, entry(left.index(), "a.weight").coding), (None, Codec::External.alone()));
    let mut rest = rest;
    for (at, state) in states(18).iter().enumerate().skip(14) {
        rest.write(&step(at + 1), state);
        without.write(&step(at + 1), state);
    }
    rest.settle();
    without.settle();
    for at in 14..18 {
        assert!(rest.read(&step(at)).unwrap() == without.read(&step(at)).unwrap(), "{at}");
        without.faithful(&step(at));
    }
}

#[test]
fn profiles_can_change_in_the_middle_of_a_lineage() {
    let mut rest = Rest::under("lc-3");
    for (at, state) in states(16).iter().enumerate() {
        rest.write(&step(at + 1), state);
        let profile = ["lc-3", "balanced", "exact", "topn-10", "lc-2"][at / 3 % 5];
        xattr::set(rest.path(&step(at + 1)), PROFILE, profile.as_bytes()).unwrap();
    }
    rest.settle();
    let made: Vec<String> = (1..16).map(|at| rest.faithful(&step(at)).profile).collect();
    assert_eq!(made[..7], ["lc-3", "lc-3", "lc-3", "balanced", "balanced", "balanced", "exact"]);
    let read = (1..16).map(|at| (at, rest.read(&step(at)).unwrap())).collect();
    remove(&rest, [2, 4, 6, 9, 10, 13], &read);
}

#[test]
fn a_tensor_that_is_not_finite_stays_lossless_until_it_is() {
    let mut random = Random(3);
    let mut model = model(&mut random);
    let mut rest = Rest::under("lc-3");
    for at in 1..=7 {
        train(&mut model, 1e-3, &mut random);
        let mut written = model.clone();
        if at == 3 || at == 4 {
            written[0].values[777] = f64::NAN;
            written[1].values[5] = f64::INFINITY;
        }
        rest.write(&step(at), &safetensors(&written));
    }
    rest.settle();
    for at in 1..7 {
        let index = rest.faithful(&step(at));
        let lossy = |name: &str| entry(&index, name).coding.is_lossy();
        // The states that are not finite are no newer states of the one before. From the last there is no finite difference.
        let expected = at != 1 && !(3..=5).contains(&at);
        assert_eq!((lossy("a.weight"), lossy("b.weight"), lossy("c.weight")), (expected, expected, false), "{at}");
    }
}

#[test]
fn a_model_that_changes_its_shape_begins_anew_and_only_where_it_did() {
    let mut random = Random(4);
    let mut tensors = vec![
        Tensor::new("a.weight", Dtype::F32, &[128, 128], &mut random),
        Tensor::new("b.weight", Dtype::F32, &[128, 128], &mut random),
    ];
    let mut rest = Rest::under("lc-3");
    for at in 1..=6 {
        train(&mut tensors, 1e-3, &mut random);
        if at == 4 {
            tensors[1] = Tensor::new("b.weight", Dtype::F32, &[128, 96], &mut random);
        }
        rest.write(&step(at), &safetensors(&tensors));
    }
    rest.settle();
    let kept = (1..6).filter(|at| rest.stub(&step(*at)).is_some());
    let indexes: Vec<_> = kept.map(|at| rest.faithful(&step(at))).collect();
    assert!(indexes.len() >= 3 && indexes.iter().any(|index| entry(index, "a.weight").coding.is_lossy()));
}

#[test]
fn another_run_begins_with_full_precision() {
    let mut rest = Rest::under("lc-3");
    let states = states(8);
    for run in ["a", "b"] {
        for (at, state) in states.iter().enumerate().skip(if run == "b" { 3 } else { 0 }).step_by(2) {
            rest.write(&format!("{run}/step_{at}.safetensors"), state);
        }
    }
    rest.settle();
    let first = rest.object("b/step_3.safetensors");
    assert_eq!((first.header().parent, first.header().lossy), (None, false));
    assert_eq!(rest.object("b/step_5.safetensors").header().parent, Some(rest.id("b/step_3.safetensors")));
    rest.faithful("b/step_5.safetensors");
}

#[test]
fn damaged_payloads_are_an_error() {
    let (rest, _) = series("lc-3", 6);
    let path = rest.object_path(&step(4));
    let tile = entry(rest.object(&step(4)).index(), "a.weight").tiles[0];
    let mut bytes = fs::read(&path).unwrap();
    bytes[tile.offset as usize + 9] ^= 0x10;
    fs::remove_file(&path).unwrap();
    fs::write(&path, bytes).unwrap();
    assert!(rest.read(&step(3)).is_ok() && rest.read(&step(4)).is_err() && rest.read(&step(5)).is_err());
    assert!(!verified(&rest));
}
