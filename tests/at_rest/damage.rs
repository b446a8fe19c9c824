//! Objects that changed at rest.

use std::fs;
use std::process::Command;

use stepfs::archive::ReadError;
use stepfs::recall::Chain;
use stepfs::store::object::{HEADER_BYTES, Header};

use super::series::{Dtype, Random, Rest, Tensor, decode, entry, safetensors, states, step};

/// Flips a bit in the middle of the payload of a tensor of a released file.
fn hurt(rest: &Rest, name: &str, tensor: &str) {
    let object = rest.object(name);
    let tile = entry(object.index(), tensor).tiles[0];
    let path = rest.object_path(name);
    let mut bytes = fs::read(&path).unwrap();
    bytes[(tile.offset + u64::from(tile.stored) / 2) as usize] ^= 0x10;
    fs::write(&path, bytes).unwrap();
}

fn verify(rest: &Rest) -> (Option<i32>, serde_json::Value, String) {
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stepfs"));
        command.arg("verify").arg(rest.root()).args(args).output().unwrap()
    };
    let (json, words) = (run(&["--json"]), run(&[]));
    assert_eq!(json.status.code(), words.status.code());
    let report = serde_json::from_slice(&json.stdout).unwrap();
    (json.status.code(), report, String::from_utf8(words.stdout).unwrap())
}

#[test]
fn nothing_is_said_of_a_whole_store() {
    let rest = Rest::of(4);
    let (code, report, words) = verify(&rest);
    assert_eq!(code, Some(0), "{words}");
    assert_eq!((report["files"].as_u64(), report["objects"].as_u64()), (Some(4), Some(3)));
    assert!(words.contains("no damage"), "{words}");
}

#[test]
fn damage_is_named_and_hurts_only_what_needs_it() {
    let rest = Rest::of(6);
    let before: Vec<Vec<u8>> = (1..7).map(|at| rest.read(&step(at)).unwrap()).collect();
    hurt(&rest, &step(4), "a.weight");
    let hurt = rest.id(&step(4));
    let archive = rest.open();
    for at in [4, 5] {
        // The next state is a difference to it.
        let index = rest.object(&step(at)).index().clone();
        let reader = archive.reader(&rest.stub(&step(at)).unwrap()).unwrap();
        let extent = entry(&index, "a.weight").extent.clone();
        for _ in 0..2 {
            let error = reader.read_at(extent.start + 100, &mut [0; 10]).unwrap_err();
            assert!(error.is_damage());
            assert_eq!((error.object, error.tensor.as_deref()), (hurt, Some("a.weight")));
            assert!(error.to_string().contains("checksum"), "{error}");
        }
        // All its other bytes can be read.
        for tensor in index.tensors.iter().filter(|t| t.path != "a.weight") {
            let (from, to) = (tensor.extent.start as usize, tensor.extent.end as usize);
            let mut buf = vec![0; to - from];
            reader.read_at(from as u64, &mut buf).unwrap();
            assert_eq!(buf, before[at - 1][from..to], "{}", tensor.path);
        }
        assert!(rest.read(&step(at)).is_err());
    }
    for at in [1, 2, 3, 6] {
        assert_eq!(rest.read(&step(at)).unwrap(), before[at - 1]);
    }
    let (code, report, words) = verify(&rest);
    assert_eq!(code, Some(3));
    let damaged = report["damaged"].as_array().unwrap();
    assert_eq!(damaged.len(), 2, "{report}");
    for damaged in damaged {
        assert_eq!(damaged["object"].as_str(), Some(&*hurt.to_string()));
        assert_eq!(damaged["tensor"].as_str(), Some("a.weight"));
    }
    assert!(words.contains(&step(4)) && words.contains(&step(5)) && words.contains("a.weight"), "{words}");
    assert!(!words.contains(&step(3)), "{words}");
}

#[test]
fn a_missing_object_is_missed_by_its_files_only() {
    let rest = Rest::of(6);
    let before: Vec<Vec<u8>> = (1..7).map(|at| rest.read(&step(at)).unwrap()).collect();
    let missing = rest.id(&step(5));
    fs::remove_file(rest.object_path(&step(5))).unwrap();
    let archive = rest.open();
    let error = archive.reader(&rest.stub(&step(5)).unwrap()).unwrap_err();
    assert!(error.is_damage() && error.object == missing);
    for at in [1, 2, 3, 4, 6] {
        assert_eq!(rest.read(&step(at)).unwrap(), before[at - 1]);
    }
    let (code, report, words) = verify(&rest);
    assert_eq!(code, Some(3));
    assert_eq!(report["damaged"].as_array().unwrap().len(), 1);
    assert!(words.contains(&step(5)) && words.contains("missing"), "{words}");
}

#[test]
fn objects_under_each_others_names_are_refused() {
    let rest = Rest::of(4);
    let (a, b) = (rest.object_path(&step(2)), rest.object_path(&step(3)));
    let (at_a, at_b) = (fs::read(&a).unwrap(), fs::read(&b).unwrap());
    fs::write(&a, at_b).unwrap();
    fs::write(&b, at_a).unwrap();
    for at in [2, 3] {
        let error = rest.read(&step(at)).unwrap_err();
        assert!(error.to_string().contains("another object under this name"), "{error}");
    }
    rest.read(&step(1)).unwrap();
    let (code, report, _) = verify(&rest);
    assert_eq!(code, Some(3));
    assert_eq!(report["damaged"].as_array().unwrap().len(), 2);
    // The header of one object on the body of the other is damage, too.
    let mixed = [&fs::read(&b).unwrap()[..HEADER_BYTES], &fs::read(&a).unwrap()[HEADER_BYTES..]].concat();
    fs::write(&a, mixed).unwrap();
    let error = rest.read(&step(2)).unwrap_err();
    assert!(error.to_string().contains("its end belongs to another object"), "{error}");
}

#[test]
fn a_damaged_base_does_not_stop_its_lineage() {
    let states = states(6);
    let mut rest = Rest::new();
    for (at, state) in states[..4].iter().enumerate() {
        rest.write(&step(at + 1), state);
    }
    rest.settle();
    hurt(&rest, &step(3), "b.weight");
    for (at, state) in states.iter().enumerate().skip(4) {
        rest.write(&step(at + 1), state);
    }
    rest.settle();
    rest.faithful(&step(4));
    rest.faithful(&step(5));
    assert_eq!(rest.object(&step(4)).header().parent, None);
}

/// Two small objects, a keyframe and a difference to it: every byte of each changed, and every shorter file.
#[test]
fn no_changed_or_shortened_object_gives_other_bytes() {
    let mut random = Random(7);
    let mut model = vec![
        Tensor::new("w", Dtype::F32, &[32, 40], &mut random),
        Tensor::new("ids", Dtype::I64, &[8192], &mut random),
    ];
    model[1].values.fill(3.0);
    let mut rest = Rest::new();
    for at in 1..=3 {
        model[0].update(1e-3, &mut random);
        rest.write(&step(at), &safetensors(&model));
    }
    rest.settle();
    rest.faithful(&step(2));
    let objects = rest.objects();
    let right: Vec<Vec<u8>> = (1..3).map(|at| rest.read(&step(at)).unwrap()).collect();
    for at in 1..3 {
        let path = rest.object_path(&step(at));
        let bytes = fs::read(&path).unwrap();
        assert!(bytes.len() < 10_000, "{}", bytes.len());
        let leaf = rest.id(&step(2));
        let check = |changed: &[u8], what: &str, place: usize| {
            fs::write(&path, changed).unwrap();
            let read: Result<Vec<u8>, ReadError> = decode(&objects, leaf);
            match read {
                Ok(read) => assert!(read == right[1], "{what} {place} of object {at}"),
                Err(error) => assert!(error.is_damage(), "{error}"),
            }
        };
        for place in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[place] ^= 1 << (place % 8);
            check(&changed, "byte", place);
            if place % 3 == 0 {
                check(&bytes[..place], "length", place);
            }
        }
        fs::write(&path, &bytes).unwrap();
        assert_eq!(Chain::open(&objects, leaf).unwrap().objects().len(), 2);
    }
    assert_eq!(rest.read(&step(2)).unwrap(), right[1]);
}

/// Files below objects/, damaged ones too.
fn files(rest: &Rest) -> usize {
    let shards = fs::read_dir(rest.root().join("objects")).unwrap();
    shards.map(|shard| fs::read_dir(shard.unwrap().path()).unwrap().count()).sum()
}

#[test]
fn nothing_is_removed_while_something_damaged_may_need_it() {
    // An unreadable header no longer names its object's parent.
    let rest = Rest::of(5);
    let whole = fs::read(rest.object_path(&step(2))).unwrap();
    let path = rest.object_path(&step(2));
    let mut damaged = whole.clone();
    damaged[40] ^= 1;
    fs::write(&path, &damaged).unwrap();
    let third = rest.read(&step(4)).err();
    assert!(third.is_some(), "it is a difference to the damaged one");
    fs::remove_file(rest.path(&step(1))).unwrap();
    let before = files(&rest);
    rest.settle();
    assert_eq!(files(&rest), before);
    // Repaired, everything is there again.
    fs::write(&path, &whole).unwrap();
    rest.settle();
    (2..=4).for_each(|at| drop(rest.read(&step(at)).unwrap()));

    // A damaged stub no longer names its object.
    let rest = Rest::of(3);
    let path = rest.path(&step(2));
    let whole = fs::read(&path).unwrap();
    let mut damaged = whole.clone();
    damaged[33] ^= 1;
    fs::write(&path, &damaged).unwrap();
    let before = files(&rest);
    rest.settle();
    assert_eq!(files(&rest), before);
    fs::write(&path, &whole).unwrap();
    rest.read(&step(2)).unwrap();
}

#[test]
fn a_circle_of_parents_is_reported_and_harms_no_other_file() {
    let mut rest = Rest::of(4);
    // Of another shape, or it would be a difference to these.
    let mut random = Random(17);
    let mut model = vec![Tensor::new("w", Dtype::F32, &[130, 130], &mut random)];
    for at in 0..3 {
        model[0].update(1e-3, &mut random);
        rest.write(&format!("other/step_{at}.safetensors"), &safetensors(&model));
    }
    rest.settle();
    // The first is a difference to the third, which is one to the second, which is one to the first.
    let path = rest.object_path(&step(1));
    let mut bytes = fs::read(&path).unwrap();
    let header = Header { parent: Some(rest.id(&step(3))), ..rest.object(&step(1)).header().clone() };
    bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
    fs::write(&path, bytes).unwrap();
    for at in 1..4 {
        let error = rest.read(&step(at)).unwrap_err();
        assert!(error.is_damage(), "{error}");
    }
    rest.faithful("other/step_0.safetensors");
    let verify = || {
        let done =
            Command::new(env!("CARGO_BIN_EXE_stepfs")).args(["verify", "--json"]).arg(rest.root()).output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
        let of = |damaged: &serde_json::Value| damaged["paths"][0].as_str().unwrap_or("no file").to_string();
        let mut paths: Vec<String> = report["damaged"].as_array().unwrap().iter().map(of).collect();
        paths.sort();
        (done.status.code(), paths)
    };
    assert_eq!(verify(), (Some(3), (1..4).map(step).collect()));
    // Neither removing nor archiving hangs on it. When its files are gone, it is garbage.
    fs::remove_file(rest.path(&step(2))).unwrap();
    rest.settle();
    assert_eq!(verify().0, Some(3));
    [1, 3].iter().for_each(|at| fs::remove_file(rest.path(&step(*at))).unwrap());
    rest.settle();
    rest.read("other/step_1.safetensors").unwrap();
}

#[test]
fn an_object_deleted_by_hand_is_reported_by_its_files() {
    let rest = Rest::of(6);
    let kept: Vec<Vec<u8>> = (1..3).map(|at| rest.read(&step(at)).unwrap()).collect();
    fs::remove_file(rest.object_path(&step(3))).unwrap();
    let done = Command::new(env!("CARGO_BIN_EXE_stepfs")).arg("verify").arg(rest.root()).output().unwrap();
    assert_eq!(done.status.code(), Some(3));
    let text = String::from_utf8(done.stdout).unwrap();
    (3..6).for_each(|at| assert!(text.contains(&step(at)), "{text}"));
    (1..3).for_each(|at| assert!(!text.contains(&step(at)), "{text}"));
    rest.settle();
    (1..3).for_each(|at| assert!(rest.read(&step(at)).unwrap() == kept[at - 1]));
    (3..6).for_each(|at| drop(rest.read(&step(at)).unwrap_err()));
    // The newest is whole, and the run continues from it.
    assert_eq!(fs::read(rest.path(&step(6))).unwrap(), rest.written[&step(6)]);
}
