//! What files count of their training.

use std::time::Duration;

use super::by_hand::{adam, dict, float, int, list, numbered, tensor, tuple};
use super::hostile::zip_with;
use super::others::array;
use super::*;

fn of(pickle: &[u8]) -> Progress {
    check(&zip_with(&[pickle, b"."].concat(), &[&[0; 64]])).progress
}

/// An optimizer's state dict with these entries of each group, and these counts of steps.
fn optimizer(groups: &[&[(&str, Vec<u8>)]], steps: &[Vec<u8>]) -> Vec<u8> {
    let groups: Vec<Vec<u8>> = groups.iter().map(|group| dict(group)).collect();
    let states: Vec<Vec<u8>> = steps.iter().map(|step| dict(&[("step", step.clone())])).collect();
    dict(&[("state", numbered(&states)), ("param_groups", list(&groups))])
}

fn betas(second: f64) -> (&'static str, Vec<u8>) {
    ("betas", tuple(&[float(0.9), float(second)]))
}

#[test]
fn counters_are_natural_numbers_at_the_root() {
    let nested = dict(&[("step", int(9))]);
    let file = dict(&[
        ("epoch", int(3)),
        ("global_step", int(1200)),
        ("iteration", int(-1)),
        ("it", b"\x88".to_vec()),
        ("step", float(7.0)),
        ("steps", tensor(0, &[16])),
        ("best_step", int(2)),
        ("trainer", nested),
    ]);
    assert_eq!(of(&file).counters, [("epoch", 3), ("global_step", 1200)]);
    // Python keeps the last.
    assert_eq!(of(&dict(&[("step", int(1)), ("step", int(2))])).counters, [("step", 2)]);
    assert_eq!(of(&dict(&[("step", int(1)), ("step", b"N".to_vec())])).counters, []);
}

#[test]
fn an_optimizer_tells_its_steps_and_its_decay_wherever_it_stands() {
    let adam = optimizer(&[&[betas(0.95)], &[betas(0.95)]], &[int(5), int(7), tensor(0, &[16])]);
    let expected = Progress { optimizer_step: Some(7), second_decay: Some(0.95), ..Progress::default() };
    let lightning = dict(&[("optimizer_states", list(std::slice::from_ref(&adam)))]);
    let pair = dict(&[("optimizers", tuple(&[dict(&[("g", adam.clone())]), adam.clone()]))]);
    let wrapped = dict(&[("optimizer", dict(&[("optimizer_state_dict", dict(&[("base", adam.clone())]))]))]);
    for file in [&adam, &dict(&[("optimizer", adam.clone())]), &lightning, &pair, &wrapped] {
        assert_eq!(of(file), expected);
    }
    let deep = (0..4).fold(adam, |file, _| dict(&[("a", file)]));
    assert_eq!(of(&deep), expected);
    assert_eq!(of(&dict(&[("a", deep)])), Progress::default());
    // apex counts in the group.
    let apex = optimizer(&[&[betas(0.999), ("step", int(40))]], &[]);
    assert_eq!(of(&apex), Progress { optimizer_step: Some(40), second_decay: Some(0.999), ..Progress::default() });
}

#[test]
fn groups_that_do_not_agree_tell_no_decay() {
    let decay = |groups: &[&[(&str, Vec<u8>)]]| of(&optimizer(groups, &[])).second_decay;
    assert_eq!(decay(&[&[("beta2", float(0.98))], &[("b2", float(0.98))]]), Some(0.98));
    /// The entries of each group of an optimizer.
    type Groups<'a> = &'a [&'a [(&'a str, Vec<u8>)]];
    let unclear: [Groups<'_>; 6] = [
        &[],
        &[&[betas(0.95)], &[betas(0.999)]],
        &[&[betas(0.95)], &[("lr", float(0.1))]],
        &[&[("betas", list(&[float(0.9), float(0.95)]))]],
        &[&[("betas", tuple(&[float(0.9), float(0.95), float(0.99)]))]],
        &[&[betas(f64::NAN)]],
    ];
    for groups in unclear {
        assert_eq!(decay(groups), None, "{groups:?}");
    }
    // Nor do two optimizers.
    let two = [0.95, 0.999].map(|second| optimizer(&[&[betas(second)]], &[]));
    assert_eq!(of(&dict(&[("optimizers", list(&two))])).second_decay, None);
}

#[test]
fn other_formats_tell_the_same() {
    for name in ["trained.pt", "trained.legacy.pt"] {
        let progress = check(&files("formats")[name]).progress;
        assert_eq!(progress.second_decay, Some(0.999), "{name}");
    }
    let optimizer = optimizer(&[&[betas(0.95)]], &[int(5)]);
    let pickle =
        [&b"\x80\x05"[..], &dict(&[("w", array()), ("step", int(6)), ("optimizer", optimizer)]), b"."].concat();
    let d = check(&pickle);
    let expected = Progress {
        counters: vec![("step", 6)],
        optimizer_step: Some(5),
        second_decay: Some(0.95),
        ..Progress::default()
    };
    assert_eq!((d.kind, d.progress), (Kind::Pickle, expected));
}

#[test]
fn a_hostile_pickle_costs_little() {
    // One mapping a million times. Its own entries hold no optimizer.
    let entries: Vec<String> = (0..1000).map(|n| format!("k{n}")).collect();
    let entries: Vec<(&str, Vec<u8>)> = entries.iter().map(|key| (key.as_str(), list(&[b"}".to_vec()]))).collect();
    let shared = [&dict(&entries)[..], b"q\x000](", &b"h\x00".repeat(1_000_000), b"e"].concat();
    let mapping = dict(&[("a", list(&[b"]".to_vec()]))]);
    let many = [&b"]("[..], &mapping.repeat(200_000), b"e"].concat();
    let groups = [&b"}q\x000]("[..], &b"h\x00".repeat(1_000_000), b"e"].concat();
    let groups = dict(&[("state", b"}".to_vec()), ("param_groups", groups)]);
    for pickle in [shared, many, groups] {
        let file = zip_with(&[&pickle[..], b"."].concat(), &[]);
        let start = of_thread();
        assert_eq!(check(&file).progress, Progress::default());
        assert!(of_thread() - start < Duration::from_secs(10));
    }
    assert_eq!(of(&dict(&[("a", adam(0, &[&[16]]))])).second_decay, None);
}
