//! The way of files through the archive.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use stepfs::archive::{Archive, AtRest, Commit, FileId, Namespace, Outcome};
use stepfs::store::MAX_CHAIN;
use stepfs::tile::{Codec, Coding};

use super::series::{Dtype, Random, Rest, Tensor, entry, model, safetensors, states, step, train, until, work};

#[test]
fn the_newest_is_exact_and_all_others_are_within_their_bounds() {
    let rest = Rest::of(5);
    assert!(rest.stub(&step(5)).is_none());
    assert_eq!(fs::read(rest.path(&step(5))).unwrap(), rest.written[&step(5)]);
    for at in 1..5 {
        let index = rest.faithful(&step(at));
        let lattices: Vec<&str> =
            index.tensors.iter().filter(|t| t.coding.step().is_some()).map(|t| &*t.path).collect();
        // Nothing proves a vector, and resting tensors lose nothing.
        assert_eq!(lattices, ["c.weight", "a.weight", "b.weight"], "in order of their bytes");
        let (frozen, weight) = (entry(&index, "frozen.weight"), entry(&index, "a.weight"));
        // The first of a lineage is a keyframe.
        let (of_frozen, of_weight) = if at == 1 { (15_000, 65_536 / 3) } else { (100, 65_536 / 10) };
        assert!(frozen.stored() < of_frozen, "{}", frozen.stored());
        assert!(weight.stored() < of_weight, "{}", weight.stored());
    }
    assert_eq!(fs::read_dir(rest.root().join("tmp")).unwrap().count(), 0);
}

#[test]
fn what_is_not_finite_makes_its_tensor_exact() {
    for (value, place) in [(f64::NAN, 0), (f64::INFINITY, 9999), (f64::NEG_INFINITY, 16383)] {
        let mut random = Random(2);
        let mut model = model(&mut random);
        let mut rest = Rest::new();
        for at in 1..=6 {
            train(&mut model, 1e-3, &mut random);
            let mut state = model.clone();
            if at == 3 {
                state[0].values[place] = value;
            }
            rest.write(&step(at), &safetensors(&state));
        }
        rest.settle();
        for at in 1..6 {
            let index = rest.faithful(&step(at));
            let on_lattice = |name| entry(&index, name).coding.step().is_some();
            match at {
                1 => {}
                // The state that is not finite is no newer state of the one before.
                3 => assert!(!on_lattice("a.weight"), "{value}"),
                // Its base has the value, so it may be exact as well.
                4 => {}
                _ => assert!(on_lattice("a.weight"), "{value} in 3, seen in {at}"),
            }
            assert!(at == 1 || on_lattice("c.weight"));
        }
    }
}

#[test]
fn the_exact_profile_is_exact() {
    let mut rest = Rest::new();
    for (at, state) in states(4).into_iter().enumerate() {
        rest.write(&format!("best_{at}.safetensors"), &state);
    }
    rest.settle();
    for at in 0..3 {
        let name = format!("best_{at}.safetensors");
        let object = rest.object(&name);
        assert_eq!(object.index().profile, "exact");
        assert!(!object.header().lossy);
        assert_eq!(rest.read(&name).unwrap(), rest.written[&name]);
    }
}

#[test]
fn chains_end() {
    let mut random = Random(3);
    let mut model = vec![Tensor::new("w.weight", Dtype::F32, &[128, 129], &mut random)];
    let mut rest = Rest::new();
    for at in 1..=40 {
        train(&mut model, 1e-3, &mut random);
        rest.write(&step(at), &safetensors(&model));
    }
    rest.settle();
    let objects = rest.objects();
    let mut keyframes = 0;
    for at in 1..40 {
        let index = rest.faithful(&step(at));
        let chain = stepfs::recall::Chain::open(&objects, rest.id(&step(at))).unwrap();
        assert!(chain.objects().len() <= MAX_CHAIN as usize);
        assert!(chain.objects().len() as u32 <= chain.leaf().header().depth + 1);
        if let Coding { codec: Codec::Lattice { .. }, parent: None } = entry(&index, "w.weight").coding {
            assert_eq!(chain.objects().len(), 1);
            keyframes += 1;
        }
    }
    assert_eq!(keyframes, 2);
}

#[test]
fn a_copy_is_no_newer_state() {
    let states = states(3);
    let mut rest = Rest::new();
    rest.write(&step(1), &states[0]);
    rest.write(&step(2), &states[1]);
    rest.write(&step(3), &states[1]);
    rest.settle();
    assert!(rest.stub(&step(1)).is_some());
    assert!(rest.stub(&step(2)).is_none() && rest.stub(&step(3)).is_none());
    rest.write(&step(4), &states[2]);
    rest.settle();
    assert_eq!(rest.id(&step(2)), rest.id(&step(3)), "stored once");
    rest.faithful(&step(3));
    assert_eq!(rest.count(), 2);
}

#[test]
fn a_copy_under_the_exact_profile_is_exact() {
    let rule = |text: String| {
        let rule = "[[profile]]\nglob = \"**/step_00060.*\"\nprofile = \"exact\"\n\n[[profile]]";
        text.replacen("[[profile]]", rule, 1)
    };
    let states = states(3);
    let mut rest = Rest::with(rule);
    for (at, state) in [(1, 0), (2, 1), (3, 1), (4, 2)] {
        rest.write(&step(at), &states[state]);
    }
    rest.settle();
    assert_ne!(rest.read(&step(2)).unwrap(), states[1], "quantized");
    assert_eq!(rest.read(&step(3)).unwrap(), states[1]);
}

#[test]
fn a_copy_of_a_damaged_file_is_kept_by_itself() {
    let states = states(3);
    let mut rest = Rest::new();
    for (at, state) in states.iter().enumerate() {
        rest.write(&step(at + 1), state);
    }
    rest.settle();
    let path = rest.object_path(&step(2));
    let mut bytes = fs::read(&path).unwrap();
    bytes[200] ^= 1;
    fs::write(&path, bytes).unwrap();
    rest.read(&step(2)).unwrap_err();
    // The same bytes once more, as the older of two.
    rest.write(&step(4), &states[1]);
    rest.write(&step(5), &states[0]);
    rest.settle();
    assert_ne!(rest.id(&step(4)), rest.id(&step(2)));
    rest.faithful(&step(4));
    rest.faithful(&step(3));
}

#[test]
fn a_link_with_a_name_of_its_own_stays_exact() {
    let states = states(3);
    let mut rest = Rest::new();
    rest.write(&step(1), &states[0]);
    rest.write(&step(2), &states[1]);
    let archive = rest.open();
    work(&archive);
    // As the file system does: link, a newer state, then the name with the step goes.
    let (from, to) = (step(2), "run/keep.safetensors");
    fs::hard_link(rest.path(&from), rest.path(to)).unwrap();
    archive.linked(Path::new(&from), Path::new(to));
    archive.opened_for_writing(Path::new(&step(3)));
    rest.write(&step(3), &states[2]);
    archive.sealed(Path::new(&step(3)));
    until(|| archive.queue().queued == 0);
    fs::remove_file(rest.path(&from)).unwrap();
    archive.removed(Path::new(&from));
    until(|| archive.queue().queued == 0);
    archive.stop();
    assert!(rest.stub(to).is_none());
    assert_eq!(fs::read(rest.path(to)).unwrap(), states[1]);
}

#[test]
fn what_nobody_needs_goes_and_all_else_stays() {
    let rest = Rest::of(6);
    let before: Vec<Vec<u8>> = (1..6).map(|at| rest.read(&step(at)).unwrap()).collect();
    assert_eq!(rest.count(), 5);
    let settle = |objects: usize| {
        let archive = rest.open();
        work(&archive);
        until(|| rest.count() == objects);
        archive.stop();
    };
    // The one in the middle is the base of the next.
    fs::remove_file(rest.path(&step(3))).unwrap();
    settle(4);
    for at in [1, 2, 4, 5] {
        assert_eq!(rest.read(&step(at)).unwrap(), before[at - 1]);
    }
    // No released file is a difference to these; the last one would be the base of the next state, if there were one.
    fs::remove_file(rest.path(&step(5))).unwrap();
    settle(4);
    fs::remove_file(rest.path(&step(6))).unwrap();
    settle(3);
    fs::remove_file(rest.path(&step(4))).unwrap();
    settle(2);
    for at in [1, 2] {
        assert_eq!(rest.read(&step(at)).unwrap(), before[at - 1]);
    }
}

#[test]
fn the_step_follows_updates_that_grow() {
    let mut random = Random(4);
    let mut model = vec![Tensor::new("w.weight", Dtype::F32, &[256, 256], &mut random)];
    let mut rest = Rest::new();
    for at in 1..=10 {
        train(&mut model, if at < 5 { 1e-4 } else { 1e-2 }, &mut random);
        rest.write(&step(at), &safetensors(&model));
    }
    rest.settle();
    let steps: Vec<f64> =
        (2..10).map(|at| entry(&rest.faithful(&step(at)), "w.weight").coding.step().unwrap()).collect();
    assert!(steps[7] > 50.0 * steps[0], "{steps:?}");
    for at in 6..10 {
        let index = rest.faithful(&step(at));
        // The last one is a super-step.
        let percent = if at == 9 { 12 } else { 8 };
        let stored = entry(&index, "w.weight").stored();
        assert!(stored < 256 * 256 * 4 * percent / 100, "{at}: {stored}");
    }
}

#[test]
fn an_opaque_file_is_exact_or_stays() {
    let mut random = Random(5);
    let mut rest = Rest::new();
    for at in 1..=3 {
        let text: Vec<u8> = (0..20_000).flat_map(|line| format!("{at} {line}\n").into_bytes()).collect();
        rest.write(&format!("x_{at}.bin"), &text);
        let noise: Vec<u8> = (0..20_000).flat_map(|_| random.next().to_le_bytes()).collect();
        rest.write(&format!("y_{at}.bin"), &noise);
        rest.write(&format!("small_{at}.bin"), &text[..60_000]);
    }
    rest.settle();
    for at in 1..=3 {
        let (text, noise, small) = (format!("x_{at}.bin"), format!("y_{at}.bin"), format!("small_{at}.bin"));
        assert_eq!(rest.stub(&text).is_some(), at < 3);
        assert!(rest.stub(&noise).is_none() && rest.stub(&small).is_none());
        for name in [text, noise, small] {
            assert_eq!(rest.read(&name).unwrap(), rest.written[&name], "{name}");
        }
    }
}

#[test]
fn a_crash_before_the_release_does_not_archive_twice() {
    let rest = Rest::of(4);
    let before: Vec<_> = (1..4).map(|at| rest.id(&step(at))).collect();
    // The objects are durable, and the files are still there.
    for at in [2, 3] {
        let path = rest.path(&step(at));
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        fs::write(&path, &rest.written[&step(at)]).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        assert!(rest.stub(&step(at)).is_none());
    }
    rest.settle();
    assert_eq!((1..4).map(|at| rest.id(&step(at))).collect::<Vec<_>>(), before);
    assert_eq!(rest.count(), 3);
}

/// A mount in which every file has an open handle when its stub is to replace it.
struct InUse;

impl Namespace for InUse {
    fn idle(&self, _: &Path, _: FileId) -> Outcome {
        Outcome::Done
    }

    fn exclusively(&self, _: &Path, _: FileId, _: &mut Commit<'_>) -> std::io::Result<Outcome> {
        Ok(Outcome::Busy)
    }

    fn remove(&self, _: &Path, _: FileId, _: &mut dyn FnMut() -> std::io::Result<bool>) -> std::io::Result<Outcome> {
        Ok(Outcome::Busy)
    }

    fn remove_directory(&self, _: &Path, _: FileId) -> std::io::Result<Outcome> {
        Ok(Outcome::Busy)
    }
}

#[test]
fn a_file_renamed_between_archive_and_release_is_what_its_new_name_asks_for() {
    let mut rest = Rest::new();
    for (at, state) in states(3).into_iter().enumerate() {
        rest.write(&step(at + 1), &state);
    }
    let archive = rest.open();
    archive.start(Arc::new(InUse));
    let from = step(2);
    until(|| archive.status().busy == 2);
    assert!(archive.attribute(Path::new(&from), "object").is_some(), "its object is durable");
    let to = "run/best.safetensors";
    fs::rename(rest.path(&from), rest.path(to)).unwrap();
    archive.renamed(Path::new(&from), Path::new(to));
    until(|| archive.queue().queued == 0);
    assert_eq!(archive.attribute(Path::new(to), "object"), None);
    archive.stop();
    drop(archive);
    rest.settle();
    assert_eq!(rest.read(to).unwrap(), rest.written[&from]);
    rest.faithful(&step(1));
}

/// A mount in which every file has an open handle until its close is reported.
struct InUseUntil {
    closed: AtomicBool,
    rest: AtRest,
}

impl Namespace for InUseUntil {
    fn idle(&self, _: &Path, _: FileId) -> Outcome {
        Outcome::Done
    }

    fn exclusively(&self, path: &Path, expect: FileId, commit: &mut Commit<'_>) -> std::io::Result<Outcome> {
        match self.closed.load(Ordering::SeqCst) {
            true => self.rest.exclusively(path, expect, commit),
            false => Ok(Outcome::Busy),
        }
    }

    fn remove(
        &self,
        path: &Path,
        expect: FileId,
        still: &mut dyn FnMut() -> std::io::Result<bool>,
    ) -> std::io::Result<Outcome> {
        self.rest.remove(path, expect, still)
    }

    fn remove_directory(&self, path: &Path, expect: FileId) -> std::io::Result<Outcome> {
        self.rest.remove_directory(path, expect)
    }
}

/// A mount in which a program works in the directory of a file right before its release, and right after it.
struct Beside {
    rest: AtRest,
    before: fn(&Path),
    after: fn(&Path),
}

impl Namespace for Beside {
    fn idle(&self, _: &Path, _: FileId) -> Outcome {
        Outcome::Done
    }

    fn exclusively(&self, path: &Path, expect: FileId, commit: &mut Commit<'_>) -> std::io::Result<Outcome> {
        self.rest.exclusively(path, expect, &mut |absolute| {
            let directory = absolute.parent().unwrap();
            (self.before)(directory);
            let done = commit(absolute)?;
            (self.after)(directory);
            Ok(done)
        })
    }

    fn remove(
        &self,
        path: &Path,
        expect: FileId,
        still: &mut dyn FnMut() -> std::io::Result<bool>,
    ) -> std::io::Result<Outcome> {
        self.rest.remove(path, expect, still)
    }

    fn remove_directory(&self, path: &Path, expect: FileId) -> std::io::Result<Outcome> {
        self.rest.remove_directory(path, expect)
    }
}

#[test]
fn a_directory_that_goes_right_after_its_release_leaves_nothing_in_tmp() {
    let mut rest = Rest::new();
    for (at, state) in states(3).into_iter().enumerate() {
        rest.write(&format!("checkpoint-{at}/model.safetensors"), &state);
    }
    let archive = rest.open();
    let after = |directory: &Path| fs::rename(directory, directory.with_extension("gone")).unwrap();
    archive.start(Arc::new(Beside { rest: AtRest::of(archive.store()), before: |_| (), after }));
    until(|| rest.path("checkpoint-0.gone").exists() && rest.path("checkpoint-1.gone").exists());
    archive.stop();
    let left: Vec<_> = fs::read_dir(rest.root().join("tmp")).unwrap().map(|left| left.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// A mount in which a program has just renamed a file, and whose note of that comes when its lock is free again.
struct JustRenamed {
    rest: AtRest,
    archive: Weak<Archive>,
    names: Mutex<Option<(String, String)>>,
}

impl Namespace for JustRenamed {
    fn idle(&self, path: &Path, expect: FileId) -> Outcome {
        if let Some((from, to)) = self.names.lock().unwrap().take() {
            self.archive.upgrade().unwrap().renamed(Path::new(&from), Path::new(&to));
        }
        self.rest.idle(path, expect)
    }

    fn exclusively(&self, path: &Path, expect: FileId, commit: &mut Commit<'_>) -> std::io::Result<Outcome> {
        self.rest.exclusively(path, expect, commit)
    }

    fn remove(
        &self,
        path: &Path,
        expect: FileId,
        still: &mut dyn FnMut() -> std::io::Result<bool>,
    ) -> std::io::Result<Outcome> {
        self.rest.remove(path, expect, still)
    }

    fn remove_directory(&self, path: &Path, expect: FileId) -> std::io::Result<Outcome> {
        self.rest.remove_directory(path, expect)
    }
}

/// A mark of plain bytes on a stub would give its bytes to programs instead of the checkpoint's.
#[test]
fn a_stub_that_takes_the_name_of_a_closed_file_stays_a_stub() {
    let mut rest = Rest::of(3);
    let (released, latest) = (step(1), "run/latest.safetensors");
    let before = rest.read(&released).unwrap();
    let archive = rest.open();
    archive.opened_for_writing(Path::new(latest));
    rest.write(latest, &states(4)[3]);
    archive.sealed(Path::new(latest));
    fs::rename(rest.path(&released), rest.path(latest)).unwrap();
    archive.start(Arc::new(JustRenamed {
        rest: AtRest::of(archive.store()),
        archive: Arc::downgrade(&archive),
        names: Mutex::new(Some((released, latest.to_string()))),
    }));
    until(|| archive.queue().queued == 0);
    assert_eq!(archive.attribute(Path::new(latest), "state").unwrap(), b"released");
    archive.stop();
    drop(archive);
    assert!(xattr::get(rest.path(latest), "user.stepfs.plain").unwrap().is_none());
    assert!(rest.stub(latest).is_some() && rest.read(latest).unwrap() == before);
}

#[test]
fn a_file_is_released_although_names_come_and_go_beside_it_all_the_time() {
    let mut rest = Rest::new();
    for (at, state) in states(3).into_iter().enumerate() {
        rest.write(&step(at + 1), &state);
    }
    let archive = rest.open();
    let before = |directory: &Path| {
        fs::write(directory.join("lock"), "").unwrap();
        fs::remove_file(directory.join("lock")).unwrap();
    };
    archive.start(Arc::new(Beside { rest: AtRest::of(archive.store()), before, after: |_| () }));
    until(|| archive.queue().queued == 0);
    archive.stop();
    assert!((1..=2).all(|at| rest.stub(&step(at)).is_some()));
    assert_eq!(fs::read_dir(rest.root().join("tmp")).unwrap().count(), 0);
}

#[test]
fn what_becomes_the_newest_again_before_it_is_released_stays_exact() {
    let mut rest = Rest::new();
    for (at, state) in states(3).into_iter().enumerate() {
        rest.write(&step(at + 1), &state);
    }
    let archive = rest.open();
    let mount = Arc::new(InUseUntil { closed: AtomicBool::new(false), rest: AtRest::of(archive.store()) });
    archive.start(mount.clone());
    until(|| archive.status().busy == 2);
    assert!(archive.attribute(Path::new(&step(2)), "object").is_some(), "its object is durable");
    fs::remove_file(rest.path(&step(3))).unwrap();
    archive.removed(Path::new(&step(3)));
    mount.closed.store(true, Ordering::SeqCst);
    (1..=2).for_each(|at| archive.closed(Path::new(&step(at))));
    until(|| archive.queue().queued == 0);
    archive.stop();
    assert!(rest.stub(&step(2)).is_none(), "it is the newest");
    assert_eq!(fs::read(rest.path(&step(2))).unwrap(), rest.written[&step(2)]);
    assert!(rest.stub(&step(1)).is_some(), "it is not");
    rest.faithful(&step(1));
}

/// Without second moments the updates give the sensitivity of each tensor relative to the others. A tensor that blows
/// up must not make the last sound state of the others coarser.
#[test]
fn a_tensor_that_blows_up_does_not_coarsen_the_others() {
    let mut random = Random(31);
    let mut model = vec![
        Tensor::new("a.weight", Dtype::F32, &[128, 128], &mut random),
        Tensor::new("b.weight", Dtype::F32, &[128, 128], &mut random),
    ];
    let mut rest = Rest::new();
    for at in 1..=6 {
        train(&mut model, 1e-3, &mut random);
        if at == 6 {
            model[1].values.iter_mut().for_each(|value| *value *= 1e12);
        }
        rest.write(&step(at), &safetensors(&model));
    }
    rest.settle();
    let of = |at: usize| entry(&rest.faithful(&step(at)), "a.weight").coding.step().unwrap();
    assert!(of(5) <= 1.5 * of(4), "{} after {}", of(5), of(4));
}
