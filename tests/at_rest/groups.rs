//! Checkpoints that are directories, pins, and copies.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::series::{Rest, states, step, until, work};

fn name(step: usize, file: &str) -> String {
    format!("run/checkpoint-{step}/{file}.safetensors")
}

/// As [`Rest::write`], but a moment ago: long before the settle time ends.
fn write_now(rest: &mut Rest, name: &str, bytes: &[u8]) {
    rest.write(name, bytes);
    fs::File::options().write(true).open(rest.path(name)).unwrap().set_modified(SystemTime::now()).unwrap();
}

#[test]
fn a_checkpoint_is_released_when_all_its_files_have_a_newer_state() {
    let states = states(6);
    let mut rest = Rest::new();
    for (at, state) in states.iter().take(4).enumerate() {
        write_now(&mut rest, &name(10 * (at / 2 + 1), ["model", "ema"][at % 2]), state);
    }
    write_now(&mut rest, &name(30, "model"), &states[4]);
    rest.settle();
    for file in ["model", "ema"] {
        assert!(rest.stub(&name(10, file)).is_some(), "{file}: all of checkpoint-20 is there");
        assert!(rest.stub(&name(20, file)).is_none(), "{file}: checkpoint-30 is not complete");
    }
    let archive = rest.open();
    work(&archive);
    assert_eq!(archive.status().settling, 1);
    // Its last file comes.
    archive.opened_for_writing(Path::new(&name(30, "ema")));
    write_now(&mut rest, &name(30, "ema"), &states[5]);
    archive.sealed(Path::new(&name(30, "ema")));
    until(|| archive.queue().queued == 0 && archive.status().settling == 0);
    archive.stop();
    for file in ["model", "ema"] {
        assert!(rest.stub(&name(20, file)).is_some(), "{file}");
        assert_eq!(fs::read(rest.path(&name(30, file))).unwrap(), rest.written[&name(30, file)]);
        rest.faithful(&name(20, file));
    }
}

#[test]
fn a_file_without_a_successor_is_waited_for_as_long_as_is_set() {
    let states = states(3);
    // Without tensors: a run can go on without it.
    let text: String = (0..40_000).map(|line| format!("{line}\n")).collect();
    let with = |settle: &str| {
        let settle = format!("settle_seconds = {settle}");
        let mut rest = Rest::with(|text| text.replace("settle_seconds = 600", &settle));
        write_now(&mut rest, &name(10, "model"), &states[0]);
        write_now(&mut rest, &name(10, "only_here"), text.as_bytes());
        write_now(&mut rest, &name(20, "model"), &states[2]);
        write_now(&mut rest, &name(20, "something_else"), b"as many files");
        rest
    };
    for (settle, waits) in [("600", true), ("0", false)] {
        let rest = with(settle);
        rest.settle();
        assert_eq!(rest.stub(&name(10, "model")).is_none(), waits, "{settle}");
    }
    // The worker wakes up by itself.
    let rest = with("2");
    let archive = rest.open();
    work(&archive);
    until(|| rest.stub(&name(10, "model")).is_some());
    archive.stop();
    assert!(rest.stub(&name(10, "only_here")).is_none(), "the newest of its lineage");
}

/// A run died after its large files were saved: whatever is missing, it may be unable to go on from the newer checkpoint.
#[test]
fn a_checkpoint_waits_until_a_newer_one_has_as_many_files() {
    // Died before the first byte was written, within it, or within a file of torch.save.
    let halves: [(&str, &[u8]); 3] =
        [("trainer_state.json", b""), ("trainer_state.json", b"{\"log\": ["), ("scheduler.pt", b"PK\x03\x04 and more")];
    halves.into_iter().for_each(|(last, half)| waits_for_the_last_file(last, half));
}

fn waits_for_the_last_file(last_name: &str, half: &[u8]) {
    let states = states(6);
    let mut rest = Rest::with(|text| text.replace("settle_seconds = 600", "settle_seconds = 1"));
    let save = |rest: &mut Rest, step, last: bool| {
        write_now(rest, &name(step, "model"), &states[step / 10 * 2 - 2]);
        write_now(rest, &name(step, "optimizer"), &states[step / 10 * 2 - 1]);
        if last {
            write_now(rest, &format!("run/checkpoint-{step}/{last_name}"), b"{\"log\": []}");
        }
    };
    save(&mut rest, 10, true);
    save(&mut rest, 20, false);
    // The other one is not a file of the checkpoint.
    write_now(&mut rest, &format!("run/checkpoint-20/{last_name}"), half);
    write_now(&mut rest, "run/checkpoint-20/model.safetensors.tmp", b"half");
    std::thread::sleep(Duration::from_secs(2));
    rest.settle();
    let archive = rest.open();
    work(&archive);
    let why = archive.attribute(Path::new(&name(10, "model")), "release").unwrap();
    assert_eq!(
        String::from_utf8(why).unwrap(),
        "it waits until a newer checkpoint has as many files; `stepfs release` ends the wait"
    );
    archive.stop();
    drop(archive);
    for file in ["model", "optimizer"] {
        assert_eq!(fs::read(rest.path(&name(10, file))).unwrap(), rest.written[&name(10, file)]);
    }
    // The run goes on from step 10, and saves step 20 once more.
    save(&mut rest, 20, true);
    rest.settle();
    assert!(rest.stub(&name(10, "model")).is_some() && rest.stub(&name(20, "model")).is_none());
    // A user who wants the room all the same asks for it.
    save(&mut rest, 30, false);
    rest.settle();
    assert!(rest.stub(&name(20, "model")).is_none());
    let archive = rest.open();
    archive.set_attribute(Path::new(&name(20, "model")), "release").unwrap();
    work(&archive);
    until(|| rest.stub(&name(20, "model")).is_some());
    archive.stop();
}

#[test]
fn a_pinned_file_stays_and_counts_as_newer_state() {
    let states = states(4);
    let mut rest = Rest::new();
    for (at, state) in states.iter().enumerate() {
        rest.write(&step(at + 1), state);
    }
    xattr::set(rest.path(&step(2)), "user.stepfs.pin", b"1").unwrap();
    rest.settle();
    assert!(rest.stub(&step(1)).is_some() && rest.stub(&step(3)).is_some());
    assert_eq!(fs::read(rest.path(&step(2))).unwrap(), states[1]);
    // It goes when the pin goes, also a directory's.
    xattr::set(rest.path("run"), "user.stepfs.pin", b"1").unwrap();
    xattr::remove(rest.path(&step(2)), "user.stepfs.pin").unwrap();
    let archive = rest.open();
    work(&archive);
    until(|| archive.attribute(Path::new(&step(2)), "why").is_some_and(|why| why.starts_with(b"it is pinned")));
    assert!(rest.stub(&step(2)).is_none());
    xattr::remove(rest.path("run"), "user.stepfs.pin").unwrap();
    archive.unpinned(Path::new("run"));
    until(|| rest.stub(&step(2)).is_some());
    archive.stop();
    rest.faithful(&step(2));
}

#[test]
fn a_copy_of_a_released_file_is_stored_once_and_at_once() {
    let mut rest = Rest::of(4);
    let count = rest.count();
    let (first, second) = (rest.read(&step(1)).unwrap(), rest.read(&step(2)).unwrap());
    assert_ne!(second, rest.written[&step(2)], "quantized");
    let archive = rest.open();
    work(&archive);
    // Newest of its own lineage, and newest of the others' lineage.
    for (name, bytes) in [("last.safetensors".to_string(), &second), (step(9), &first)] {
        archive.opened_for_writing(Path::new(&name));
        rest.write(&name, bytes);
        archive.sealed(Path::new(&name));
    }
    // A copy of the newest is no copy of an object, nor is a file with an object's original bytes.
    for (name, of) in [("newest.safetensors", 4), ("as_written.safetensors", 2)] {
        let bytes = rest.written[&step(of)].clone();
        archive.opened_for_writing(Path::new(name));
        rest.write(name, &bytes);
        archive.sealed(Path::new(name));
    }
    until(|| archive.queue().queued == 0);
    archive.stop();
    assert_eq!(rest.id("last.safetensors"), rest.id(&step(2)));
    assert_eq!(rest.id(&step(9)), rest.id(&step(1)));
    assert!(rest.stub(&step(4)).is_none(), "an old state's copy is no newer state");
    assert!(rest.stub("newest.safetensors").is_none() && rest.stub("as_written.safetensors").is_none());
    assert_eq!(rest.count(), count);
}

#[test]
fn what_was_recalled_becomes_the_same_object_again() {
    let rest = Rest::of(4);
    // The last object: no other is a difference to it.
    let (name, id) = (step(3), rest.id(&step(3)));
    let bytes = rest.read(&name).unwrap();
    assert_ne!(bytes, rest.written[&name], "quantized");
    // Something that would keep it as the base of the next.
    fs::remove_file(rest.path(&step(4))).unwrap();
    let archive = rest.open();
    work(&archive);
    let recall = |archive: &stepfs::archive::Archive| {
        let (made, _) =
            archive.recall(&rest.stub(&name).unwrap(), &fs::File::open(rest.path(&name)).unwrap(), None).unwrap();
        fs::rename(made, rest.path(&name)).unwrap();
        archive.recalled(Path::new(&name), true);
    };
    recall(&archive);
    until(|| archive.attribute(Path::new(&name), "why").is_some_and(|why| why.starts_with(b"it was recalled")));
    until(|| archive.queue().queued == 0);
    assert_eq!(fs::read(rest.path(&name)).unwrap(), bytes);
    archive.set_attribute(Path::new("run"), "release").unwrap();
    until(|| rest.stub(&name).is_some());
    assert_eq!(rest.id(&name), id, "by hand");
    recall(&archive);
    until(|| archive.queue().queued == 0);
    assert!(rest.stub(&name).is_none());
    archive.stop();
    drop(archive);
    rest.settle();
    assert_eq!(rest.id(&name), id, "by the next mount");
    assert_eq!(rest.read(&name).unwrap(), bytes);
    assert!(xattr::list(rest.path(&name)).unwrap().next().is_none(), "nothing is left of it");
}
