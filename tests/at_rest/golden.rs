//! Stores that earlier versions wrote (`tests/golden/v1`, `v2`, `v3`): this one must read them, bit for bit, for ever.

use std::fs;
use std::path::{Path, PathBuf};

use stepfs::archive::Archive;
use stepfs::store::Store;
use xxhash_rust::xxh3::xxh3_128;

use super::hostile::{coding_name, states};
use super::series::{Dtype, Random, Rest, Tensor, copy, decode, safetensors, step, train, until, work};
use super::sound::sound;

fn golden(version: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(version)
}

/// Every coding and every lattice type, small: what makes the files long enough to be released costs nothing.
fn written() -> Rest {
    let mut random = Random(8);
    let mut model = vec![
        Tensor::new("a.weight", Dtype::F32, &[24, 64], &mut random),
        Tensor::new("b.weight", Dtype::BF16, &[40, 64], &mut random),
        Tensor::new("c.weight", Dtype::F64, &[16, 40], &mut random),
        Tensor::new("a.bias", Dtype::F32, &[1100], &mut random),
        Tensor::new("ids", Dtype::I64, &[7000], &mut random),
    ];
    model[4].values.fill(3.0);
    let mut rest = Rest::on_keyframes();
    for at in 1..=34 {
        // Updates that change, so that steps do; rare and large ones, so that there are exceptions.
        let size = if at < 3 { 1e-3 } else { 4e-3 };
        model[..4].iter_mut().for_each(|tensor| tensor.update(size, &mut random));
        if [1, 2, 3, 4, 34].contains(&at) {
            rest.write(&step(at), &safetensors(&model));
        }
    }
    for at in 1..=2 {
        let text: Vec<u8> = (0..14_000).flat_map(|line| format!("{at} {}\n", line / 50).into_bytes()).collect();
        rest.write(&format!("log_{at}.txt"), &text);
    }
    // As many states as it takes to begin another chain.
    let mut model = vec![model.swap_remove(4), Tensor::new("w", Dtype::F32, &[64, 40], &mut random)];
    for at in 1..=35 {
        model[1].update(1e-3, &mut random);
        rest.write(&key(at), &safetensors(&model));
    }
    // A chain whose first object goes, so that another holds its keyframe.
    let mut model = vec![
        Tensor::new("w", Dtype::F32, &[64, 160], &mut random),
        Tensor::new("b.bias", Dtype::F32, &[8000], &mut random),
        Tensor::new("ids", Dtype::I64, &[4000], &mut random),
    ];
    for at in 1..=4 {
        train(&mut model, 1e-3, &mut random);
        rest.write(&heir(at), &safetensors(&model));
    }
    // Optimizer state, a table and copies; once whole, once without its first state.
    for (run, rows) in [("state", 256), ("later", 260)] {
        for (at, state) in states(4, rows).iter().enumerate() {
            rest.write(&state_of(run, at + 1), state);
        }
    }
    rest.settle();
    // The newest are resident: not what this is about, and large. Nor are the states of the chain before.
    let resident = [step(34), "log_2.txt".to_string(), key(35), heir(4), state_of("state", 4), state_of("later", 4)];
    for name in resident.into_iter().chain((1..33).map(key)).chain([heir(1), state_of("later", 1)]) {
        fs::remove_file(rest.path(&name)).unwrap();
    }
    let archive = rest.open();
    work(&archive);
    until(|| rest.count() == names().len());
    archive.stop();
    rest
}

fn key(number: usize) -> String {
    format!("key/step_{number}.safetensors")
}

fn heir(number: usize) -> String {
    format!("heir/step_{number}.safetensors")
}

/// Not by the name that is kept exact: their first states are quantized.
fn state_of(run: &str, number: usize) -> String {
    format!("{run}/at_{number}.safetensors")
}

fn names() -> Vec<String> {
    let log = ["log_1.txt".to_string()];
    let state = (1..=3).map(|at| state_of("state", at)).chain((2..=3).map(|at| state_of("later", at)));
    (1..=4).map(step).chain((33..=34).map(key)).chain(log).chain((2..=3).map(heir)).chain(state).collect()
}

/// What this version makes of the same files is as faithful as ever. Where STEPFS_GOLDEN names a directory that does
/// not exist, the store goes there, with the hashes of what it decodes to: so `v1` to `v3` were made.
#[test]
fn the_same_series_can_be_archived_today() {
    let rest = written();
    let mut hashes = String::new();
    for name in names() {
        match name.ends_with(".safetensors") {
            true => drop(sound(&rest, &name)),
            false => assert!(rest.read(&name).unwrap() == rest.written[&name]),
        }
        hashes += &format!("{:032x} {name}\n", xxh3_128(&rest.read(&name).unwrap()));
    }
    if let Some(to) = std::env::var_os("STEPFS_GOLDEN") {
        let to = Path::new(&to);
        assert!(!to.exists(), "a golden store is never made anew");
        for part in ["tree", "objects"] {
            copy(&rest.root().join(part), &to.join(part));
        }
        fs::copy(rest.root().join("stepfs.toml"), to.join("stepfs.toml")).unwrap();
        fs::write(to.join("hashes.txt"), hashes).unwrap();
    }
}

#[test]
fn version_1_is_read_for_ever() {
    // With parents and without: both codecs.
    assert_eq!(is_read("v1", 7).len(), 4);
}

#[test]
fn version_2_is_read_for_ever() {
    let codings = is_read("v2", 9);
    assert!(codings.contains("lattice with its keyframe"), "{codings:?}");
    assert_eq!(codings.len(), 5);
}

#[test]
fn version_3_is_read_for_ever() {
    let codings = is_read("v3", 14);
    assert_eq!(codings.len(), 11, "{codings:?}");
}

/// Reads every file of a golden store, and again after one of each chain was removed and the rest merged. Returns the
/// codings in it.
fn is_read(version: &str, files: usize) -> std::collections::BTreeSet<&'static str> {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    copy(&golden(version), &root);
    // It is not part of a store.
    let hashes = fs::read_to_string(root.join("hashes.txt")).unwrap();
    fs::remove_file(root.join("hashes.txt")).unwrap();
    let archive = Archive::open(Store::open(&root).unwrap()).unwrap();
    let objects = stepfs::store::Objects::load(&root.join("objects"), |id, error| panic!("{id}: {error}")).unwrap();
    let mut read = 0;
    let mut codings = std::collections::BTreeSet::new();
    for line in hashes.lines() {
        let (hash, name) = line.split_once(' ').unwrap();
        let file = fs::File::open(root.join("tree").join(name)).unwrap();
        let stub = archive.stub(&file).unwrap().unwrap_or_else(|| panic!("{name} is no stub"));
        let bytes = decode(&objects, stub.object).unwrap();
        assert_eq!(format!("{:032x}", xxh3_128(&bytes)), hash, "{name}");
        let mut pieces = vec![0; bytes.len()];
        let reader = archive.reader(&stub).unwrap();
        for (at, piece) in pieces.chunks_mut(7777).enumerate() {
            assert_eq!(reader.read_at(at as u64 * 7777, piece).unwrap(), piece.len());
        }
        assert!(pieces == bytes, "{name}");
        let object = objects.open(stub.object).unwrap();
        codings.extend(object.index().tensors.iter().map(|tensor| coding_name(tensor.coding)));
        read += 1;
    }
    assert_eq!(read, files);
    drop(archive);
    let gone = [step(1), step(3), key(33), state_of("state", 1), state_of("later", 2)];
    let there = gone.iter().map(|name| root.join("tree").join(name)).filter(|path| path.exists());
    there.for_each(|path| fs::remove_file(path).unwrap());
    let archive = Archive::open(Store::open(&root).unwrap()).unwrap();
    work(&archive);
    archive.stop();
    let objects = stepfs::store::Objects::load(&root.join("objects"), |id, error| panic!("{id}: {error}")).unwrap();
    for (hash, name) in hashes.lines().map(|line| line.split_once(' ').unwrap()) {
        let Ok(file) = fs::File::open(root.join("tree").join(name)) else { continue };
        let stub = archive.stub(&file).unwrap().unwrap();
        assert_eq!(format!("{:032x}", xxh3_128(&decode(&objects, stub.object).unwrap())), hash, "{name}, merged");
    }
    assert!(objects.all().len() < files, "{}", objects.all().len());
    codings
}
