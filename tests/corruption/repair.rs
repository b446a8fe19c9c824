//! The files that `stepfs verify --repair` saves, and those that it leaves.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use stepfs::mirror::{Ahead, Daemon, Settings, Shape, Source, Told};
use stepfs::store::object::{FOOTER_BYTES, Footer, HEADER_BYTES, Header};
use stepfs::store::{Id, Objects, STUB_BYTES, Store, Stub};
use stepfs::tile::Coding;

use super::series::{Random, Rest, decode, step};
use super::store::{Victim, is_full, paths, write_stub};

/// Every file of a store but its lock, with content, mode and time: a check must not change them.
fn snapshot(root: &Path) -> BTreeMap<PathBuf, (Vec<u8>, SystemTime)> {
    let (mut found, mut rest) = (BTreeMap::new(), vec![root.to_path_buf()]);
    while let Some(path) = rest.pop() {
        match path.is_dir() {
            true => rest.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path())),
            false if path.ends_with("lock") => {}
            false => {
                let time = fs::metadata(&path).unwrap().modified().unwrap();
                found.insert(path.clone(), (fs::read(&path).unwrap(), time));
            }
        }
    }
    found
}

/// A check changes nothing, and says that all can be repaired. A repair saves it all. Another one finds nothing to do.
#[track_caller]
fn is_saved(victim: &Victim, what: &str) -> serde_json::Value {
    let before = snapshot(&victim.root);
    let (code, report) = victim.verify(&[]);
    assert_eq!(code, 3, "{what}: {report}");
    assert!(
        report["damaged"].as_array().unwrap().iter().any(|damage| damage["remedy"].is_string()),
        "{what}: {report}"
    );
    assert!(snapshot(&victim.root) == before, "{what}: a check changes nothing");
    let (code, report) = victim.verify(&["--repair"]);
    assert_eq!(code, 0, "{what}: {report}");
    assert!(!report["repaired"].as_array().unwrap().is_empty(), "{what}");
    victim.check_all(what, |_| false);
    let after = snapshot(&victim.root);
    let (code, again) = victim.verify(&["--repair"]);
    assert_eq!((code, again["repaired"].as_array().unwrap().len()), (0, 0), "{what}: {again}");
    assert!(snapshot(&victim.root) == after, "{what}: nothing is left to do");
    report
}

/// The damaged bytes are kept.
#[track_caller]
fn is_kept(victim: &Victim, bytes: &[u8]) {
    let kept = fs::read_dir(victim.root.join("damaged")).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap());
    assert!(kept.into_iter().any(|kept| kept == bytes), "the damaged bytes are in damaged/");
}

fn ids(victim: &Victim) -> Vec<Id> {
    victim.files.values().map(|(id, _)| *id).collect()
}

#[test]
fn what_was_appended_is_taken_off() {
    let victim = Victim::golden("adam");
    let path = victim.path(ids(&victim)[2]);
    let longer = [&fs::read(&path).unwrap()[..], &[0; 5000]].concat();
    fs::write(&path, &longer).unwrap();
    is_saved(&victim, "appended");
    is_kept(&victim, &longer);
}

#[test]
fn objects_under_other_names_get_their_own() {
    let victim = Victim::golden("adam");
    let all = ids(&victim);
    let [a, b] = [victim.path(all[0]), victim.path(all[3])];
    let (at_a, at_b) = (fs::read(&a).unwrap(), fs::read(&b).unwrap());
    fs::write(&a, &at_b).unwrap();
    fs::write(&b, &at_a).unwrap();
    is_saved(&victim, "swapped");
}

/// More than a byte is lost of every kind of part. The repair finds a file with the same bytes and encodes it as
/// before, so that differences to it stay valid.
#[test]
fn lost_parts_are_taken_from_a_file_with_the_same_bytes() {
    let mut codings = std::collections::BTreeSet::new();
    for store in ["adam", "published", "wide", "optimizers"] {
        let whole = Victim::golden(store);
        let chains = whole.chains();
        for (path, (id, bytes)) in &whole.files {
            let object = whole.object(*id);
            // Lost is a part of a parent that its differences may need.
            let has_heirs = chains.iter().any(|(other, chain)| other != id && chain.contains(id));
            let parts: Vec<(String, Coding, u64, u32)> = (object.index().tensors.iter())
                .flat_map(|t| t.tiles.iter().map(|tile| (t.path.clone(), t.coding, tile.offset, tile.stored)))
                .filter(|(.., stored)| *stored > 8)
                .collect();
            for (tensor, coding, offset, stored) in parts {
                let mut first = [0];
                fs::File::open(whole.path(*id)).unwrap().read_exact_at(&mut first, offset).unwrap();
                let has_keyframe = coding.parent.is_none() && coding.step().is_some() && first != [0];
                if has_heirs && (coding.is_external() || has_keyframe) {
                    continue;
                }
                if object.header().ordered {
                    // Its file has rows in another order than the decoded object.
                    continue;
                }
                // The results with and without heirs differ.
                if !codings.insert(format!("{store} {} {has_heirs}", name_of(coding))) && !is_full() {
                    continue;
                }
                let victim = Victim::golden(store);
                fs::write(victim.root.join("tree/clone.bin"), bytes).unwrap();
                let file = fs::File::options().write(true).open(victim.path(*id)).unwrap();
                file.write_all_at(&vec![0xb7; stored as usize], offset).unwrap();
                let what = format!("{store}: {tensor} of {}, {coding:?}", path.display());
                is_saved(&victim, &what);
            }
        }
    }
    let of = |store: &str| codings.iter().filter(|coding| coding.starts_with(store)).count();
    assert!(of("adam") > 10 && of("published") > 4 && of("optimizers") > 2, "{codings:?}");
}

fn name_of(coding: Coding) -> String {
    format!("{} {}", coding.codec.name(), coding.parent.is_some())
}

/// Two models have a tensor in common: the other model still has the lost bytes.
#[test]
fn lost_parts_are_taken_from_other_objects() {
    let mut rest = Rest::under("exact");
    let tensor = |name: &str, side: usize, seed: u64| {
        super::series::Tensor::new(name, super::series::Dtype::F32, &[side, side], &mut Random(seed))
    };
    for (run, side) in [("a", 64), ("b", 80)] {
        let mut model = vec![tensor("frozen.weight", 120, 3), tensor("w", side, 4)];
        for at in 1..4 {
            model[1].update(1e-3, &mut Random(at * 7));
            rest.write(&format!("{run}/step_{at}.safetensors"), &super::series::safetensors(&model));
        }
    }
    rest.settle();
    for run in ["a", "b"] {
        let victim = Victim::of(&rest.root());
        let (id, _) = &victim.files[Path::new(&format!("{run}/step_1.safetensors"))];
        let object = victim.object(*id);
        let frozen = object.index().tensors.iter().find(|tensor| tensor.path.ends_with("frozen.weight")).unwrap();
        let tile = frozen.tiles[0];
        assert!(tile.stored > 40_000, "it is there as a whole: {} bytes", tile.stored);
        let file = fs::File::options().write(true).open(victim.path(*id)).unwrap();
        file.write_all_at(&vec![1; tile.stored as usize], tile.offset).unwrap();
        let report = is_saved(&victim, run);
        let said = report["repaired"][0].as_str().unwrap();
        let mut theirs =
            victim.files.iter().filter(|(path, _)| !path.starts_with(run)).map(|(_, (id, _))| id.to_string());
        assert!(theirs.any(|id| said.contains(&id)), "{run}: {said}");
    }
}

/// An object that nothing is a difference to, and its file's bytes.
fn without_heirs(victim: &Victim) -> (Id, Vec<u8>) {
    let chains = victim.chains();
    let has_none = |id: &Id| chains.values().filter(|chain| chain.contains(id)).count() == 1;
    victim.files.values().find(|(id, _)| has_none(id)).unwrap().clone()
}

/// Only the header of an object is left. `prepare` puts its content somewhere else, given its id, its file's bytes and
/// its own.
fn is_made_anew(prepare: impl Fn(&Victim, Id, &[u8], &[u8])) {
    for damage in ["cut short", "a byte of its index", "a byte of its end"] {
        let victim = Victim::golden("adam");
        let (id, bytes) = without_heirs(&victim);
        let mut object = fs::read(victim.path(id)).unwrap();
        prepare(&victim, id, &bytes, &object);
        let end = object.len();
        match damage {
            "cut short" => object.truncate(end - 100),
            "a byte of its index" => object[end - FOOTER_BYTES - 5] ^= 0x40,
            _ => object[end - 5] ^= 1,
        }
        fs::write(victim.path(id), &object).unwrap();
        is_saved(&victim, damage);
        is_kept(&victim, &object);
    }
}

#[test]
fn an_object_is_made_anew_from_a_file() {
    is_made_anew(|victim, _, bytes, _| fs::write(victim.root.join("tree/clone.bin"), bytes).unwrap());
}

#[test]
fn an_object_is_made_anew_from_another_that_decodes_to_the_same() {
    is_made_anew(|victim, _, _, object| {
        let id = Id([7; 16]);
        let (start, end) = object.split_first_chunk::<HEADER_BYTES>().unwrap();
        let (body, end) = end.split_last_chunk::<FOOTER_BYTES>().unwrap();
        let header = Header { id, ..Header::decode(start).unwrap() }.encode();
        let footer = Footer { id, ..Footer::decode(end).unwrap() }.encode();
        fs::create_dir_all(victim.path(id).parent().unwrap()).unwrap();
        fs::write(victim.path(id), [&header[..], body, &footer].concat()).unwrap();
    });
}

/// What a mirror asks of a store that does not change.
struct Still(Store, Arc<Objects>);

impl Source for Still {
    fn store(&self) -> &Store {
        &self.0
    }

    fn objects(&self) -> &Arc<Objects> {
        &self.1
    }

    fn changes(&self) -> u64 {
        0
    }

    fn changed(&self, all: bool, _: Vec<PathBuf>) -> Vec<Told> {
        if !all {
            return Vec::new();
        }
        let files = stepfs::store::files_below(&self.0.tree(), Path::new("")).unwrap().into_iter();
        let stub =
            |path: &PathBuf| Stub::read(&fs::File::open(self.0.tree().join(path)).unwrap(), self.0.id()).unwrap();
        files.filter_map(|path| Some((path.clone(), Ok(Some(Shape::Object(stub(&path)?.object)))))).collect()
    }

    fn ahead(&self, _: &Path) -> io::Result<Ahead> {
        Ok(Ahead::Whole)
    }
}

/// The mirror has the object: also a missing one comes back, and with it all that is a difference to it.
#[test]
fn objects_are_taken_from_the_mirror() {
    for damage in ["gone", "zeros"] {
        let victim = Victim::golden("adam");
        let (id, _) = victim.files.values().next().unwrap();
        let store = Store::look(&victim.root).unwrap();
        let url = format!("file://{}", victim.root.with_file_name("mirror").display());
        let place = stepfs::mirror::open(&url).unwrap();
        stepfs::mirror::claim(place.as_ref(), store.id()).unwrap();
        let objects = Arc::new(Objects::load(&store.objects(), |_, _| {}).unwrap());
        let still: Arc<dyn Source> = Arc::new(Still(store, objects));
        let settings = Settings { url: url.clone(), keep: Duration::from_secs(60), bandwidth: None };
        let daemon = Daemon::start(Arc::clone(&still), place, settings).unwrap();
        while daemon.progress(still.as_ref()).done == 0 {
            std::thread::sleep(Duration::from_millis(10));
        }
        daemon.stop();
        let mut settings = fs::File::options().append(true).open(victim.root.join("stepfs.toml")).unwrap();
        writeln!(settings, "[mirror]\nurl = \"{url}\"").unwrap();
        match damage {
            "gone" => fs::remove_file(victim.path(*id)).unwrap(),
            _ => fs::write(victim.path(*id), [0; 5000]).unwrap(),
        }
        let report = is_saved(&victim, damage);
        assert!(report["repaired"][0].as_str().unwrap().contains("mirror"), "{report}");
    }
}

/// The parent of a file is gone, but the file's bytes are still there, and nothing is a difference to it.
#[test]
fn a_file_whose_base_is_lost_is_made_anew_from_its_bytes() {
    let victim = Victim::golden("adam");
    let chains = victim.chains();
    let heirs = |id: &Id| chains.values().filter(|chain| chain.contains(id)).count() - 1;
    let (_, (id, bytes)) = victim
        .files
        .iter()
        .find(|(_, (id, _))| chains[id].len() == 2 && heirs(id) == 0)
        .expect("a last one of a short chain");
    let base = *chains[id].iter().find(|other| *other != id).unwrap();
    fs::write(victim.root.join("tree/clone.bin"), bytes).unwrap();
    fs::remove_file(victim.path(base)).unwrap();
    let (code, report) = victim.verify(&["--repair"]);
    assert_eq!(
        code,
        if victim.files.values().any(|(id, _)| *id == base) || heirs(&base) > 1 { 3 } else { 0 },
        "{report}"
    );
    assert_eq!(report["repaired"].as_array().unwrap().len(), 1, "{report}");
    assert!(decode(&victim.objects(), *id).unwrap() == *bytes);
}

/// Nothing has the bytes: nothing changes, and the report names the lost files.
#[test]
fn what_cannot_be_saved_is_left_and_named() {
    let victim = Victim::golden("adam");
    let chains = victim.chains();
    let (_, (id, _)) = victim.files.iter().next().unwrap();
    fs::remove_file(victim.path(*id)).unwrap();
    let lost = victim.check_all("gone", |path| chains[&victim.files[path].0].contains(id));
    let before = snapshot(&victim.root);
    for arguments in [&[][..], &["--repair"], &["--repair"]] {
        let (code, report) = victim.verify(arguments);
        assert_eq!((code, paths(&report)), (3, lost.clone()), "{report}");
        assert!(report["damaged"].as_array().unwrap().iter().all(|damage| damage["remedy"].is_null()), "{report}");
        assert!(snapshot(&victim.root) == before);
    }
    // A backup completes it.
    fs::write(victim.path(*id), fs::read(Victim::golden("adam").path(*id)).unwrap()).unwrap();
    assert_eq!(victim.verify(&[]).0, 0);
}

#[test]
fn stubs_are_written_again_where_one_object_only_can_be_meant() {
    let victim = Victim::golden("adam");
    let mut random = Random(11);
    for (number, path) in victim.files.keys().enumerate() {
        let absolute = victim.root.join("tree").join(path);
        let before = fs::metadata(&absolute).unwrap();
        let mut block = [0; STUB_BYTES];
        let file = fs::File::options().read(true).write(true).open(&absolute).unwrap();
        file.read_exact_at(&mut block, 0).unwrap();
        let mut changed = block;
        match number % 5 {
            // The magic number, the words, the checksum.
            0 => changed[..8].fill(0),
            1 => changed[60..200].fill(random.next() as u8),
            2 => changed[4088..].fill(0),
            // The id.
            3 => changed[32 + random.below(16) as usize] ^= 0x21,
            // All but id, with other zeros than before.
            _ => changed[200..].fill(3),
        }
        file.write_all_at(&changed, 0).unwrap();
        file.set_modified(before.modified().unwrap()).unwrap();
        drop(file);
        is_saved(&victim, &format!("stub {number}"));
        let mut now = [0; STUB_BYTES];
        fs::File::open(&absolute).unwrap().read_exact_at(&mut now, 0).unwrap();
        assert!(now == block, "{number}");
        let after = fs::metadata(&absolute).unwrap();
        assert_eq!((after.modified().unwrap(), after.len()), (before.modified().unwrap(), before.len()));
    }
}

/// One stub has another store's id, all others this one's: it is rewritten, and no object is removed meanwhile.
#[test]
fn a_stub_with_another_id_whose_object_is_here_gets_this_one() {
    let rest = Rest::of(4);
    let victim = Victim::of(&rest.root());
    let absolute = victim.root.join("tree").join(step(2));
    let stub = victim.stub(&absolute).unwrap().unwrap();
    let before = fs::metadata(&absolute).unwrap();
    let file = write_stub(&absolute, &stepfs::store::Stub { store: Id([5; 16]), ..stub });
    file.set_modified(before.modified().unwrap()).unwrap();
    drop(file);
    let archive = stepfs::archive::Archive::open(Store::open(&victim.root).unwrap()).unwrap();
    super::series::work(&archive);
    archive.stop();
    drop(archive);
    is_saved(&victim, "another id");
}

/// A page of zeros in the place of a stub: a file of zeros, but for its length and time. It causes no removal.
#[test]
fn a_stub_that_became_zeros_is_found_by_its_object() {
    let rest = Rest::of(4);
    let victim = Victim::of(&rest.root());
    for name in [step(1), step(2), step(3)] {
        let time = fs::metadata(rest.path(&name)).unwrap().modified().unwrap();
        let absolute = victim.root.join("tree").join(&name);
        let file = fs::File::options().write(true).open(&absolute).unwrap();
        file.set_len(0).unwrap();
        file.set_len(rest.written[&name].len() as u64).unwrap();
        file.write_all_at(&[0; STUB_BYTES], 0).unwrap();
        file.set_modified(time).unwrap();
        // No zeros without a mount either.
        let cat = Command::new(env!("CARGO_BIN_EXE_stepfs")).arg("cat").arg(&victim.root).arg(&name).output().unwrap();
        assert!(!cat.status.success() && cat.stdout.is_empty(), "{name}");
    }
    // As the next mount finds it.
    let archive = stepfs::archive::Archive::open(Store::open(&victim.root).unwrap()).unwrap();
    super::series::work(&archive);
    archive.stop();
    drop(archive);
    let (code, report) = victim.verify(&[]);
    assert_eq!((code, paths(&report).len()), (3, 3), "{report}");
    is_saved(&victim, "zeros");
}

#[test]
fn settings_with_another_id_are_named_and_left() {
    let victim = Victim::golden("adam");
    let path = victim.root.join("stepfs.toml");
    let text = fs::read_to_string(&path).unwrap();
    let id = Store::look(&victim.root).unwrap().id().to_string();
    fs::write(&path, text.replace(&id, &Id([9; 16]).to_string())).unwrap();
    let (code, report) = victim.verify(&[]);
    assert_eq!((code, paths(&report).len()), (3, victim.files.len()), "{report}");
    let opened = stepfs::archive::Archive::open(Store::open(&victim.root).unwrap());
    assert!(opened.is_err(), "released files would be served as stubs");
    // Moved away: the error says the right id.
    fs::remove_file(&path).unwrap();
    let error = Store::look(&victim.root).unwrap_err().to_string();
    assert!(error.contains(&format!("store = \"{id}\"")), "{error}");
}

#[test]
fn a_store_that_is_in_use_is_left_alone() {
    let victim = Victim::golden("wide");
    let path = victim.path(ids(&victim)[0]);
    let changed = [&fs::read(&path).unwrap()[..], b"more"].concat();
    fs::write(&path, &changed).unwrap();
    let held = Store::open(&victim.root).unwrap();
    assert_eq!(victim.verify(&["--repair"]).0, 1);
    assert!(fs::read(&path).unwrap() == changed);
    drop(held);
    is_saved(&victim, "let go of");
}

/// After a kill at any instant, the next repair finishes the work.
#[test]
fn a_repair_that_was_killed_is_gone_on_with() {
    let mut random = Random(77);
    let mut killed = 0;
    for round in 0..if is_full() { 60 } else { 8 } {
        let victim = Victim::golden("adam");
        // Each lies under the name of the next, but the last, which has become longer.
        let paths: Vec<PathBuf> = ids(&victim).into_iter().map(|id| victim.path(id)).collect();
        let whole: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
        let (last, others) = whole.split_last().unwrap();
        (0..others.len()).for_each(|at| fs::write(&paths[(at + 1) % others.len()], &others[at]).unwrap());
        fs::write(&paths[others.len()], [last, &b"more"[..]].concat()).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_stepfs"))
            .args(["verify", "--repair"])
            .arg(&victim.root)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(random.below(250)));
        let _ = child.kill();
        killed += usize::from(!child.wait().unwrap().success());
        let (code, report) = victim.verify(&["--repair"]);
        assert_eq!(code, 0, "round {round}: {report}");
        victim.check_all("killed", |_| false);
    }
    assert!(killed > 0);
}

/// The readable tensors of a partly lost file are saved.
#[test]
fn what_can_be_read_of_a_damaged_file_comes_out_as_safetensors() {
    let rest = Rest::of(4);
    let name = step(2);
    let object = rest.object(&name);
    let right = decode(&rest.objects(), rest.id(&name)).unwrap();
    let hurt = object.index().tensors.iter().find(|tensor| tensor.path.ends_with("a.weight")).unwrap();
    let file = fs::File::options().write(true).open(rest.object_path(&name)).unwrap();
    file.write_all_at(&[1, 2, 3, 4, 5, 6, 7], hurt.tiles[0].offset + 9).unwrap();
    let salvage = |to: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stepfs"));
        command.args(["export", "--salvage"]).arg(rest.root()).arg(&name).arg(to).output().unwrap()
    };
    let to = rest.dir.path().join("saved.safetensors");
    let done = salvage(&to);
    let words = String::from_utf8(done.stdout).unwrap();
    assert_eq!(done.status.code(), Some(3), "{words}");
    assert!(words.contains("lost: ") && words.contains("a.weight") && words.contains(", 1 lost"), "{words}");
    let bytes = fs::read(&to).unwrap();
    let saved = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let all = safetensors::SafeTensors::deserialize(&right).unwrap();
    assert_eq!(saved.len() + 1, all.len());
    for (path, tensor) in saved.tensors() {
        let same = all.tensor(&path).unwrap();
        assert!((tensor.dtype(), tensor.shape(), tensor.data()) == (same.dtype(), same.shape(), same.data()), "{path}");
    }
    // Without its parent, a difference is lost, and nothing else.
    fs::remove_file(rest.object_path(&step(1))).unwrap();
    let to = rest.dir.path().join("alone.safetensors");
    assert_eq!(salvage(&to).status.code(), Some(3));
    let bytes = fs::read(&to).unwrap();
    let saved = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert!(saved.len() < all.len());
}
