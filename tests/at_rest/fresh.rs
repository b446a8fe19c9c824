//! Memory, descriptors and other runs must not harm a store.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use stepfs::archive::Archive;

use super::series::{Dtype, Random, Rest, Tensor, entry, model, safetensors, step, train, until, work};

/// One tensor of 256 KiB.
fn one(random: &mut Random) -> Vec<Tensor> {
    vec![Tensor::new("w", Dtype::F32, &[256, 256], random)]
}

/// A store at work. A model of one tensor is saved into it as training continues.
struct Run {
    rest: Rest,
    archive: Arc<Archive>,
    model: Vec<Tensor>,
    random: Random,
}

impl Run {
    fn new(seed: u64) -> Run {
        let mut random = Random(seed);
        let model = one(&mut random);
        let rest = Rest::new();
        let archive = rest.open();
        work(&archive);
        Run { rest, archive, model, random }
    }

    /// Saves these states, each after all work on the previous one.
    fn save(&mut self, steps: std::ops::RangeInclusive<usize>) {
        for at in steps {
            train(&mut self.model, 1e-3, &mut self.random);
            self.archive.opened_for_writing(Path::new(&step(at)));
            self.rest.write(&step(at), &safetensors(&self.model));
            self.archive.sealed(Path::new(&step(at)));
            until(|| self.archive.status().queued == 0);
        }
    }

    /// A bit of a state's object goes bad.
    fn damage(&self, at: usize) {
        let object = self.rest.object(&step(at));
        let tile = entry(object.index(), "w").tiles[0];
        let path = self.rest.object_path(&step(at));
        let mut bytes = fs::read(&path).unwrap();
        bytes[(tile.offset + u64::from(tile.stored) / 2) as usize] ^= 0x10;
        fs::write(&path, bytes).unwrap();
    }

    /// Ends it; returns the states that cannot be read.
    fn lost(self, steps: std::ops::Range<usize>) -> Vec<usize> {
        self.archive.stop();
        steps.filter(|at| self.rest.read(&step(*at)).is_err()).collect()
    }
}

#[test]
fn states_saved_after_an_object_was_deleted_by_hand_do_not_need_it() {
    let mut run = Run::new(1);
    run.save(1..=4);
    // Somebody removes an object by hand while the store is mounted.
    fs::remove_file(run.rest.object_path(&step(2))).unwrap();
    run.save(5..=8);
    // The second is gone, and so is the third. All others were resident at that time.
    assert_eq!(run.lost(4..8), [0; 0]);
}

#[test]
fn a_good_copy_is_not_given_up_for_an_object_that_only_memory_still_has() {
    let mut run = Run::new(2);
    run.save(1..=3);
    // The owner has a backup of the damaged object and puts it back.
    run.damage(2);
    let (rest, archive) = (&run.rest, &run.archive);
    let backup = rest.written[&step(2)].clone();
    let time = fs::metadata(rest.path(&step(2))).unwrap().modified().unwrap();
    archive.removed(Path::new(&step(2)));
    fs::remove_file(rest.path(&step(2))).unwrap();
    archive.opened_for_writing(Path::new(&step(2)));
    fs::write(rest.path(&step(2)), &backup).unwrap();
    fs::File::options().write(true).open(rest.path(&step(2))).unwrap().set_modified(time).unwrap();
    archive.sealed(Path::new(&step(2)));
    until(|| archive.status().queued == 0);
    archive.stop();
    assert!(rest.read(&step(2)).is_ok(), "{}", rest.read(&step(2)).unwrap_err());
}

#[test]
fn a_merge_is_no_worse_than_it_was_estimated() {
    let mut random = Random(7);
    let mut trunk = one(&mut random);
    let mut rest = Rest::new();
    for at in 1..=4 {
        train(&mut trunk, 1e-3, &mut random);
        rest.write(&format!("trunk/step_{at}.safetensors"), &safetensors(&trunk));
    }
    rest.settle();
    // Runs are put into the store one after the other, each older than those before it. So each is a difference to the
    // trunk, and none to another run.
    for run in 0..12u64 {
        let mut model = trunk.clone();
        for at in 1..=2 {
            train(&mut model, 1e-6, &mut random);
            let name = format!("fork{run:02}/step_{at}.safetensors");
            rest.write(&name, &safetensors(&model));
            let time = std::time::Duration::from_secs(1_700_100_000 - 600 * run + 60 * at);
            let file = fs::File::options().write(true).open(rest.path(&name)).unwrap();
            file.set_modified(std::time::SystemTime::UNIX_EPOCH + time).unwrap();
        }
        rest.settle();
    }
    let before = rest.objects().stored();
    fs::remove_dir_all(rest.path("trunk")).unwrap();
    rest.settle();
    let after = rest.objects().stored();
    assert!(after <= before, "{after} after, {before} before");
}

#[test]
fn queued_says_so_before_merging_begins() {
    let mut random = Random(3);
    let mut tensors = model(&mut random);
    let mut rest = Rest::new();
    for at in 1..=12 {
        train(&mut tensors, 1e-3, &mut random);
        rest.write(&step(at), &safetensors(&tensors));
    }
    rest.settle();
    let archive = rest.open();
    work(&archive);
    std::thread::sleep(std::time::Duration::from_millis(300));
    let mut early = 0;
    for at in 2..10 {
        fs::remove_file(rest.path(&step(at))).unwrap();
        archive.removed(Path::new(&step(at)));
        // The question of `stepfs sync`: is everything done?
        early += usize::from(archive.status().queued == 0);
        std::thread::sleep(std::time::Duration::from_millis(300));
    }
    archive.stop();
    assert_eq!(early, 0);
}

#[test]
fn memory_does_not_take_a_descriptor_for_each_state() {
    let mut random = Random(4);
    let mut model = vec![Tensor::new("w", Dtype::F32, &[128, 160], &mut random)];
    let from = tempfile::tempdir().unwrap();
    let clock = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
    for at in 0..200u64 {
        train(&mut model, 1e-3, &mut random);
        let path = from.path().join(format!("step_{at:05}.safetensors"));
        fs::write(&path, safetensors(&model)).unwrap();
        let time = clock + std::time::Duration::from_secs(60 * at);
        fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    }
    let rest = Rest::new();
    let done = Command::new("sh")
        .args(["-c", "ulimit -n 128; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_stepfs"), "import"])
        .args([rest.root().as_path(), from.path()])
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn what_was_removed_gives_its_room_back_to_the_device() {
    let mut run = Run::new(5);
    run.save(1..=12);
    let (rest, archive) = (&run.rest, &run.archive);
    for at in 1..11 {
        fs::remove_file(rest.path(&step(at))).unwrap();
        archive.removed(Path::new(&step(at)));
    }
    until(|| rest.count() == 1 && archive.status().queued == 0);
    std::thread::sleep(std::time::Duration::from_millis(100));
    // An open file without a name still takes its blocks.
    let objects = rest.root().join("objects");
    let held: Vec<_> = (fs::read_dir("/proc/self/fd").unwrap())
        .filter_map(|entry| fs::read_link(entry.unwrap().path()).ok())
        .filter(|target| target.starts_with(&objects) && target.to_string_lossy().ends_with(" (deleted)"))
        .collect();
    archive.stop();
    assert_eq!(held.len(), 0, "{held:?}");
}

#[test]
fn states_saved_after_an_object_went_bad_do_not_need_it() {
    let mut run = Run::new(6);
    run.save(1..=4);
    run.damage(3);
    // Saving reads nothing of the parent from the device, unless a super-step is due: that finds the damage.
    run.save(5..=14);
    let lost = run.lost(4..14);
    assert!(lost.iter().all(|at| *at <= 8), "{lost:?}");
}

#[test]
fn the_same_state_saved_by_many_ranks_does_not_make_chains_long() {
    let mut random = Random(8);
    let mut model = one(&mut random);
    let mut rest = Rest::new();
    for at in 1..=9 {
        train(&mut model, 1e-3, &mut random);
        for rank in 0..16 {
            // The same weights, and a tensor of its own.
            let mut own = model.clone();
            own.push(Tensor::new("rng", Dtype::I64, &[8], &mut random));
            rest.write(&format!("rank{rank:02}/step_{at}.safetensors"), &safetensors(&own));
        }
    }
    rest.settle();
    let objects = rest.objects();
    let longest = objects.all().iter().map(|header| objects.chain_len(header.id)).max();
    assert!(longest <= Some(12), "{longest:?}");
}
