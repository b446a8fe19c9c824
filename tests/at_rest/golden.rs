//! Stores of the present format (`tests/golden`): every later version must read them, bit for bit, for ever.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use papers::registry::FAMILIES;
use stepfs::archive::Archive;
use stepfs::store::object::Header;
use stepfs::store::{PROFILE, Store, Stub};
use xxhash_rust::xxh3::xxh3_128;

use super::elasticdl;
use super::hostile::{coding_name, states};
use super::optimizers;
use super::series::{Dtype, Random, Rest, Tensor, copy, decode, entry, safetensors, train, until, work};
use super::sound::sound;

/// The names in the stores.
fn step(number: usize) -> String {
    format!("run/step_{number:05}.safetensors")
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Weights of every lattice type, and states of Adam, small: the padding that makes the files long enough to be
/// released costs nothing.
fn adam() -> Rest {
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
    // Enough states to begin another chain.
    let mut model = vec![model.swap_remove(4), Tensor::new("w.weight", Dtype::F32, &[64, 80], &mut random)];
    for at in 1..=35 {
        model[1].update(1e-3, &mut random);
        rest.write(&key(at), &safetensors(&model));
    }
    // A chain whose first object goes, so that another holds its keyframe.
    let mut model = vec![
        Tensor::new("w.weight", Dtype::F32, &[64, 160], &mut random),
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
    // The newest are resident and large, and not under test. Nor are the states of the chain before.
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

/// Not under the name that is kept exact: their first states are quantized.
fn state_of(run: &str, number: usize) -> String {
    format!("{run}/iter_{number}.safetensors")
}

fn names() -> Vec<String> {
    let log = ["log_1.txt".to_string()];
    let state = (1..=3).map(|at| state_of("state", at)).chain((2..=3).map(|at| state_of("later", at)));
    (1..=4).map(step).chain((33..=34).map(key)).chain(log).chain((2..=3).map(heir)).chain(state).collect()
}

/// A series under each family of published systems. ElasticDL's tables with rows in another order at every save.
/// Updates whose rows and columns differ in activity, and exact updates.
fn published() -> Rest {
    let mut random = Random(21);
    let mut rest = Rest::under("compact");
    let mut profiles: Vec<(String, String)> = vec![("exact".into(), "exact".into()), ("busy".into(), "compact".into())];
    for family in FAMILIES {
        let system = family.usual[0];
        let name = if system == 0 { family.word.to_string() } else { format!("{}-{system}", family.word) };
        profiles.push((family.word.to_string(), name));
    }
    for (run, profile) in &profiles {
        let dir = rest.path(run);
        fs::create_dir_all(&dir).unwrap();
        xattr::set(&dir, PROFILE, profile.as_bytes()).unwrap();
        let mut model = vec![
            Tensor::new("w.weight", Dtype::F32, &[72, 72], &mut random),
            Tensor::new("ids", Dtype::I64, &[7000], &mut random),
        ];
        model[1].values.fill(3.0);
        let busy: Vec<f64> = (0..72).map(|_| [1.0, 8.0, 64.0][random.below(3) as usize]).collect();
        for at in 1..=4 {
            match run.as_str() {
                "busy" => {
                    for (number, value) in model[0].values.iter_mut().enumerate() {
                        *value += 1e-5 * busy[number / 72] * busy[number % 72] * random.normal();
                    }
                }
                "exact" => model[0].update(1e-4, &mut random),
                _ => model[0].update(1e-3, &mut random),
            }
            rest.write(&state_of(run, at), &safetensors(&model));
        }
    }
    let mut table = elasticdl::Table::new(1500);
    for version in 1..=4 {
        rest.write(&elasticdl::name(version), &table.save(version, true));
    }
    rest.settle();
    // The newest are resident, and large.
    let newest = profiles.iter().map(|(run, _)| state_of(run, 4)).chain([elasticdl::name(4)]);
    newest.for_each(|name| fs::remove_file(rest.path(&name)).unwrap());
    let archive = rest.open();
    work(&archive);
    archive.stop();
    rest
}

/// Names of the files that are still in the tree.
fn left(rest: &Rest) -> Vec<String> {
    rest.written.keys().filter(|name| rest.path(name).exists()).cloned().collect()
}

#[test]
fn published_systems_can_be_archived_today() {
    let rest = published();
    let names = left(&rest);
    assert_eq!(names.len(), 3 * (FAMILIES.len() + 3));
    for name in names.iter().filter(|name| name.ends_with(".safetensors")) {
        let index = rest.faithful(name);
        assert!(entry(&index, "w.weight").tiles.len() == 1);
    }
    assert!(rest.read(&state_of("exact", 3)).unwrap() == rest.written[&state_of("exact", 3)]);
    keep(&rest, &names, "published");
}

/// Values with packed low bits, in tensors of as many elements as a whole tile of f32 and more; those of bf16 are no
/// multiple of anything.
fn wide() -> Rest {
    let mut random = Random(6);
    let mut rest = Rest::under("compact");
    let mut model = vec![
        Tensor::new("f.weight", Dtype::F32, &[1300, 103], &mut random),
        Tensor::new("h.weight", Dtype::BF16, &[1300, 103], &mut random),
    ];
    for at in 1..=4 {
        model[0].update(2e-4, &mut random);
        model[1].update(2e-3, &mut random);
        rest.write(&step(at), &safetensors(&model));
    }
    rest.settle();
    fs::remove_file(rest.path(&step(4))).unwrap();
    let archive = rest.open();
    work(&archive);
    archive.stop();
    rest
}

#[test]
fn wide_tensors_can_be_archived_today() {
    let rest = wide();
    let names = left(&rest);
    names.iter().for_each(|name| drop(rest.faithful(name)));
    has_halved_values(&rest.root());
    keep(&rest, &names, "wide");
}

/// Optimizers with slots that have their own codings.
fn others() -> Rest {
    let mut rest = Rest::under("compact");
    for (run, optimizer) in optimizers::UNLIKE_ADAM {
        optimizers::write_small(&mut rest, run, optimizer, 4);
    }
    rest.settle();
    for (run, _) in optimizers::UNLIKE_ADAM {
        fs::remove_file(rest.path(&optimizers::name_in(run, 4))).unwrap();
    }
    let archive = rest.open();
    work(&archive);
    archive.stop();
    rest
}

#[test]
fn other_optimizers_can_be_archived_today() {
    let rest = others();
    let names = left(&rest);
    assert_eq!(names.len(), 3 * optimizers::UNLIKE_ADAM.len());
    names.iter().for_each(|name| drop(sound(&rest, name)));
    keep(&rest, &names, "optimizers");
}

/// Files of a format of their own: a log that grows, and floats behind it that move and change.
fn opaque() -> Rest {
    let mut random = Random(12);
    let mut rest = Rest::new();
    let mut floats = Tensor::new("w", Dtype::F32, &[24_000], &mut random);
    let mut log = Vec::new();
    for at in 1..=4 {
        floats.update(1e-4, &mut random);
        let line = |line| format!("step {} of run {at}, loss {:.3}\n", line + 1000 * at, random.normal());
        // So short that most of it is still beside its old place when everything moves as far as the floats.
        let lines = if at == 1 { 3000 } else { 100 };
        log.extend((0..lines).map(line).collect::<String>().into_bytes());
        rest.write(&format!("own_{at}.bin"), &[log.clone(), floats.bytes()].concat());
    }
    rest.settle();
    fs::remove_file(rest.path("own_4.bin")).unwrap();
    let archive = rest.open();
    work(&archive);
    archive.stop();
    rest
}

#[test]
fn unknown_formats_can_be_archived_today() {
    let rest = opaque();
    let names = left(&rest);
    let mut kinds = BTreeSet::new();
    for name in &names {
        assert!(rest.read(name).unwrap() == rest.written[name], "{name}");
        let (object, mut payload) = (rest.object(name), Vec::new());
        for tensor in &object.index().tensors {
            object.payload(&tensor.tiles[0], &mut payload).unwrap();
            kinds.insert((tensor.dtype == codec::Dtype::F32, payload[0]));
        }
    }
    // Bytes that repeat, alone and in their parent; planes, alone and as differences.
    for kind in [(false, 3), (false, 4), (true, 0)] {
        assert!(kinds.contains(&kind), "{kinds:?}");
    }
    assert!(kinds.contains(&(true, 1)) || kinds.contains(&(true, 2)), "{kinds:?}");
    keep(&rest, &names, "opaque");
}

/// Only a keyframe of this store has values with packed low bits: a 0 stands behind the length of a tile's symbols.
fn has_halved_values(root: &Path) {
    let objects = stepfs::store::Objects::load(&root.join("objects"), |id, error| panic!("{id}: {error}")).unwrap();
    for Header { id, .. } in objects.all() {
        let (object, mut payload) = (objects.open(id).unwrap(), Vec::new());
        for tensor in &object.index().tensors {
            object.payload(&tensor.tiles[0], &mut payload).unwrap();
            // A keyframe has a byte in front: it has no K.
            let payload = &payload[usize::from(tensor.coding.parent.is_none())..];
            let length = payload.iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
            assert_eq!(payload[length] == 0, tensor.coding.parent.is_none(), "{id}, {}", tensor.path);
        }
    }
}

/// If `STEPFS_GOLDEN` names a directory, the store goes there under this name, with the hashes of its decoded files
/// (`scripts/golden.sh`).
fn keep(rest: &Rest, names: &[String], name: &str) {
    let Some(to) = std::env::var_os("STEPFS_GOLDEN") else { return };
    let to = Path::new(&to).join(name);
    assert!(!to.exists(), "{} is there already", to.display());
    for part in ["tree", "objects"] {
        copy(&rest.root().join(part), &to.join(part));
    }
    fs::copy(rest.root().join("stepfs.toml"), to.join("stepfs.toml")).unwrap();
    let archive = rest.open();
    let hash = |name: &String| {
        let stub = archive.stub(Path::new(name), &fs::File::open(rest.path(name)).unwrap()).unwrap().unwrap();
        format!("{:032x} {name}\n", xxh3_128(&whole(&archive, &stub)))
    };
    fs::write(to.join("hashes.txt"), names.iter().map(hash).collect::<String>()).unwrap();
}

#[test]
fn states_of_adam_can_be_archived_today() {
    let rest = adam();
    for name in names() {
        match name.ends_with(".safetensors") {
            true => drop(sound(&rest, &name)),
            false => assert!(rest.read(&name).unwrap() == rest.written[&name]),
        }
    }
    keep(&rest, &names(), "adam");
}

/// All golden stores are read, and together they have every coding.
#[test]
fn golden_stores_are_read_for_ever() {
    has_halved_values(&golden("wide"));
    let stores =
        [("adam", 14), ("published", 3 * (FAMILIES.len() + 3)), ("wide", 3), ("optimizers", 12), ("opaque", 3)];
    let codings: BTreeSet<_> = stores.into_iter().flat_map(|(name, files)| is_read(name, files)).collect();
    assert_eq!(codings.len(), 16, "{codings:?}");
}

/// A file as a reader gets it, in pieces.
fn whole(archive: &Arc<Archive>, stub: &Stub) -> Vec<u8> {
    let mut pieces = vec![0; stub.logical_len as usize];
    let reader = archive.reader(stub).unwrap();
    for (at, piece) in pieces.chunks_mut(7777).enumerate() {
        assert_eq!(reader.read_at(at as u64 * 7777, piece).unwrap(), piece.len());
    }
    pieces
}

/// Reads every file of a golden store, and again after one of each chain was removed and the rest merged. Returns the
/// codings in it.
fn is_read(name: &str, files: usize) -> BTreeSet<&'static str> {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    copy(&golden(name), &root);
    // It is not part of a store.
    let hashes = fs::read_to_string(root.join("hashes.txt")).unwrap();
    fs::remove_file(root.join("hashes.txt")).unwrap();
    let archive = Archive::open(Store::open(&root).unwrap()).unwrap();
    let objects = stepfs::store::Objects::load(&root.join("objects"), |id, error| panic!("{id}: {error}")).unwrap();
    let mut read = 0;
    let mut codings = BTreeSet::new();
    for line in hashes.lines() {
        let (hash, name) = line.split_once(' ').unwrap();
        let file = fs::File::open(root.join("tree").join(name)).unwrap();
        let stub = archive.stub(Path::new(name), &file).unwrap().unwrap_or_else(|| panic!("{name} is no stub"));
        let bytes = whole(&archive, &stub);
        assert_eq!(format!("{:032x}", xxh3_128(&bytes)), hash, "{name}");
        // An object alone knows nothing of the order of a file's rows.
        let object = objects.open(stub.object).unwrap();
        let in_order = object.header().ordered;
        assert!(in_order || bytes == decode(&objects, stub.object).unwrap(), "{name}");
        codings.extend(object.index().tensors.iter().map(|tensor| coding_name(tensor.coding)));
        read += 1;
    }
    assert_eq!(read, files);
    drop(archive);
    let gone = [step(1), step(3), key(33), state_of("state", 1), state_of("later", 2)];
    let gone = gone
        .into_iter()
        .chain(FAMILIES.iter().map(|family| state_of(family.word, 2)))
        .chain(optimizers::UNLIKE_ADAM.iter().map(|(run, _)| optimizers::name_in(run, 2)))
        .chain([state_of("busy", 1), elasticdl::name(2), "own_2.bin".to_string()]);
    let there = gone.map(|name| root.join("tree").join(name)).filter(|path| path.exists());
    there.for_each(|path| fs::remove_file(path).unwrap());
    let archive = Archive::open(Store::open(&root).unwrap()).unwrap();
    work(&archive);
    archive.stop();
    let objects = stepfs::store::Objects::load(&root.join("objects"), |id, error| panic!("{id}: {error}")).unwrap();
    for (hash, name) in hashes.lines().map(|line| line.split_once(' ').unwrap()) {
        let Ok(file) = fs::File::open(root.join("tree").join(name)) else { continue };
        let stub = archive.stub(Path::new(name), &file).unwrap().unwrap();
        assert_eq!(format!("{:032x}", xxh3_128(&whole(&archive, &stub))), hash, "{name}, merged");
    }
    assert!(objects.all().len() < files, "{}", objects.all().len());
    codings
}
