//! Removing files: the others keep their bytes, and unneeded objects free their space.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use codec::lattice;
use stepfs::archive::{Archive, AtRest};
use stepfs::recall::Chain;
use stepfs::recall::walk;
use stepfs::store::object::Object;
use stepfs::store::{Id, Objects, Store};
use stepfs::tile::{Codec, State};

use super::series::{Dtype, Random, Rest, Tensor, decode, entry, model, safetensors, step, train, until, work};

/// Longest chain that a read applies: a keyframe, 3 super-steps and 7 states after the last of them; the promise is 12.
const LONGEST: usize = 12;

/// A settled series of this many states with every type of tensor, and the bytes that each released one reads as.
fn series(count: usize, seed: u64) -> (Rest, BTreeMap<usize, Vec<u8>>) {
    let mut random = Random(seed);
    let mut model = model(&mut random);
    let mut rest = Rest::on_keyframes();
    for at in 1..=count {
        train(&mut model, 1e-3, &mut random);
        rest.write(&step(at), &safetensors(&model));
    }
    rest.settle();
    let read = (1..count).map(|at| (at, rest.read(&step(at)).unwrap())).collect();
    (rest, read)
}

fn remove(rest: &Rest, at: impl IntoIterator<Item = usize>) {
    at.into_iter().for_each(|at| fs::remove_file(rest.path(&step(at))).unwrap());
}

#[track_caller]
fn unchanged(rest: &Rest, read: &BTreeMap<usize, Vec<u8>>) {
    let objects = rest.objects();
    for (at, bytes) in read.iter().filter(|(at, _)| rest.path(&step(**at)).exists()) {
        let id = rest.id(&step(*at));
        assert!(decode(&objects, id).unwrap() == *bytes, "{at}");
        assert!(Chain::open(&objects, id).unwrap().objects().len() <= LONGEST, "{at}");
    }
}

fn object_bytes(rest: &Rest) -> u64 {
    rest.objects().stored()
}

#[test]
fn every_eighth_state_is_a_super_step_and_chains_are_short() {
    let (rest, read) = series(70, 1);
    unchanged(&rest, &read);
    let objects = rest.objects();
    let mut longest = 0;
    for at in 1..70 {
        let chain = Chain::open(&objects, rest.id(&step(at))).unwrap();
        let header = chain.leaf().header();
        assert_eq!(header.position as usize, (at - 1) % 32, "{at}");
        // The parent of a super-step is the super-step before, of all others the state before.
        let before = match (at - 1) % 32 {
            0 => None,
            position if position % 8 == 0 => Some(at - 8),
            _ => Some(at - 1),
        };
        assert_eq!(header.parent, before.map(|before| rest.id(&step(before))), "{at}");
        assert_eq!(chain.leaf().index().note.is_empty(), (at - 1) % 8 != 0 || at == 1, "{at}");
        longest = longest.max(chain.objects().len());
    }
    assert_eq!(longest, 11);
}

#[test]
fn a_super_step_costs_at_most_60_percent_of_its_parts() {
    let mut random = Random(16);
    let mut model = vec![Tensor::new("w", Dtype::F32, &[256, 512], &mut random)];
    let mut rest = Rest::new();
    for at in 1..=20 {
        train(&mut model, 1e-3, &mut random);
        rest.write(&step(at), &safetensors(&model));
    }
    rest.settle();
    let stored = |at: usize| entry(rest.object(&step(at)).index(), "w").stored() as f64;
    for super_step in [9, 17] {
        let parts: f64 = (super_step - 7..super_step).map(stored).sum::<f64>() * 8.0 / 7.0;
        assert!(stored(super_step) <= 0.6 * parts, "{super_step}: {} of {parts}", stored(super_step));
    }
}

#[test]
fn a_merged_chain_takes_what_its_survivors_need() {
    let (rest, read) = series(70, 2);
    let keyframe = Object::open(&rest.root().join("objects"), rest.id(&step(1))).unwrap().stored();
    remove(&rest, (1..70).filter(|at| at % 16 != 1));
    rest.settle();
    unchanged(&rest, &read);
    // The newest released state goes when a newer one is there: the newer one will be a difference to it.
    assert_eq!(rest.count(), 6);
    // The size of the survivors as differences to each other, counted without the merging program.
    let objects = rest.objects();
    let survivors: Vec<Id> = (1..70).step_by(16).map(|at| rest.id(&step(at))).collect();
    let mut needed = keyframe as f64;
    for pair in survivors.windows(2) {
        needed += direct(&objects, pair[0], pair[1]);
    }
    let unnamed = objects.stored_unnamed() - survivors.iter().map(|id| objects.get(*id).unwrap().1).sum::<u64>();
    let stored = (objects.stored() - unnamed) as f64;
    assert!(stored <= 1.15 * needed, "{stored} against {needed}");
}

/// Bytes of a state as a difference to another, tile by tile, and the rest of its object.
fn direct(objects: &Objects, from: Id, to: Id) -> f64 {
    let (from, to) = (Chain::open(objects, from).unwrap(), Chain::open(objects, to).unwrap());
    let index = to.leaf().index();
    let mut bytes = 4096;
    for (number, tensor) in index.tensors.iter().enumerate() {
        for at in 0..tensor.tiles.len() {
            let mut payload = Vec::new();
            match (&*walk::state(&to, number, at).unwrap(), &*walk::state(&from, number, at).unwrap()) {
                (State::Lattice { accumulators, step, .. }, State::Lattice { accumulators: base, step: was, .. })
                    if tensor.coding != Codec::Lattice { step: *step }.alone() =>
                {
                    let mut base = base.values();
                    lattice::rescale(&mut base, *was, *step).unwrap();
                    lattice::encode_tile(&accumulators.wide(), Some(&base), &[], &mut payload).unwrap();
                }
                (State::Lattice { accumulators, .. }, _) => {
                    lattice::encode_tile(&accumulators.wide(), None, &[], &mut payload).unwrap();
                }
                (State::Bytes(now), State::Bytes(then)) => {
                    codec::lossless::encode(tensor.dtype, now, Some(then), &mut payload);
                }
                (State::Bytes(now), _) => codec::lossless::encode(tensor.dtype, now, None, &mut payload),
                (State::Log { .. } | State::Moment { .. } | State::External { .. }, _) => {
                    bytes += tensor.tiles[at].stored as usize
                }
            }
            bytes += payload.len();
        }
    }
    (bytes + index.skeleton.iter().map(|chunk| chunk.stored as usize).sum::<usize>()) as f64
}

#[test]
fn whatever_goes_the_others_keep_their_bytes() {
    let (rest, read) = series(40, 3);
    let whole = object_bytes(&rest);
    let mut random = Random(4);
    let mut cases: Vec<Vec<usize>> = vec![vec![1], vec![39], vec![9], vec![1, 2, 3], (1..33).collect(), vec![33]];
    cases.extend((0..6).map(|_| (1..40).filter(|_| random.below(2) == 0).collect()));
    for case in cases {
        let rest = rest.copied();
        remove(&rest, case.iter().copied());
        rest.settle();
        unchanged(&rest, &read);
        let left = 39 - case.len() + usize::from(case.contains(&39));
        assert_eq!(rest.count(), left, "{case:?}");
        // The next state will be a difference to the last one, so it stays without a name.
        assert!(object_bytes(&rest) < whole || case == [39], "{case:?}");
        assert_eq!(fs::read_dir(rest.root().join("tmp")).unwrap().count(), 0);
    }
}

#[test]
fn when_the_first_goes_its_keyframe_is_kept_once() {
    let (rest, read) = series(20, 5);
    let before = object_bytes(&rest);
    let first = rest.object(&step(1));
    let weights: u64 =
        ["a.weight", "b.weight", "c.weight"].iter().map(|name| entry(first.index(), name).stored()).sum();
    remove(&rest, [1]);
    rest.settle();
    unchanged(&rest, &read);
    // Both the second state and the super-step were differences to it. One has the keyframe of the weights now.
    let holds = |at: &usize| {
        let (object, mut payload) = (rest.object(&step(*at)), Vec::new());
        let weight = entry(object.index(), "a.weight");
        object.payload(&weight.tiles[0], &mut payload).unwrap();
        // Without a keyframe its length is 0.
        weight.coding.parent.is_none() && payload[0] != 0
    };
    assert_eq!((2..20).filter(holds).collect::<Vec<_>>(), [2]);
    assert!(object_bytes(&rest) < before, "{} {before}", object_bytes(&rest));
    assert!(object_bytes(&rest) > before - first.stored() + weights / 2);
    // And on from there, as a run that keeps its last few checkpoints does.
    for at in 2..19 {
        remove(&rest, [at]);
        rest.settle();
        unchanged(&rest, &read);
    }
    assert_eq!(rest.count(), 1);
}

#[test]
fn a_run_that_keeps_its_last_two_takes_no_more_than_they_need() {
    let mut random = Random(6);
    let mut model = model(&mut random);
    let mut rest = Rest::new();
    let mut most = 0;
    for at in 1..=40 {
        train(&mut model, 1e-3, &mut random);
        rest.write(&step(at), &safetensors(&model));
        if at > 2 {
            fs::remove_file(rest.path(&step(at - 2))).unwrap();
            rest.written.remove(&step(at - 2));
        }
        rest.settle();
        if at > 2 {
            rest.faithful(&step(at - 1));
            // A merge that would free little for its writing waits for the next.
            assert!(rest.count() <= 4, "{at}: {}", rest.count());
            most = most.max(object_bytes(&rest));
        }
    }
    let raw = rest.written[&step(40)].len() as u64;
    assert!(most < raw + raw / 8, "{most} of {raw}");
}

#[test]
fn what_many_runs_were_begun_from_is_not_copied_into_each() {
    let mut random = Random(7);
    let mut trunk = vec![Tensor::new("w", Dtype::F32, &[256, 256], &mut random)];
    let mut rest = Rest::new();
    for at in 1..=4 {
        train(&mut trunk, 1e-3, &mut random);
        rest.write(&format!("trunk/step_{at}.safetensors"), &safetensors(&trunk));
    }
    rest.settle();
    for run in 0..6 {
        let mut model = trunk.clone();
        for at in 1..=2 {
            train(&mut model, 1e-3, &mut random);
            rest.write(&format!("fork{run}/step_{at}.safetensors"), &safetensors(&model));
        }
    }
    rest.settle();
    let names: Vec<String> = (0..6).map(|run| format!("fork{run}/step_1.safetensors")).collect();
    let read: Vec<Vec<u8>> = names.iter().map(|name| rest.read(name).unwrap()).collect();
    let before = object_bytes(&rest);
    fs::remove_dir_all(rest.path("trunk")).unwrap();
    rest.settle();
    for (name, bytes) in names.iter().zip(&read) {
        assert!(rest.read(name).unwrap() == *bytes, "{name}");
    }
    assert!(object_bytes(&rest) < before, "{} {before}", object_bytes(&rest));
    assert!(rest.count() <= 7, "{}", rest.count());
    // Once: not tried again at every mount.
    let after = object_bytes(&rest);
    rest.settle();
    assert_eq!(object_bytes(&rest), after);
}

#[test]
fn a_state_saved_twice_costs_next_to_nothing() {
    let mut random = Random(8);
    let mut model = model(&mut random);
    let mut rest = Rest::new();
    for at in 1..=6 {
        train(&mut model, 1e-3, &mut random);
        rest.write(&step(at), &safetensors(&model));
        // The same tensors in another file, with other bytes around them.
        let mut again = model.clone();
        again.push(Tensor::new("note", Dtype::I64, &[3], &mut random));
        rest.write(&format!("run/last-step{}.safetensors", 20 * at), &safetensors(&again));
    }
    rest.settle();
    for at in 2..6 {
        let name = format!("run/last-step{}.safetensors", 20 * at);
        rest.faithful(&name);
        let object = rest.object(&name);
        let tensors: u64 = object.index().tensors.iter().map(|tensor| tensor.stored()).sum();
        assert!(at == 2 || tensors < rest.written[&name].len() as u64 / 100, "{at}: {tensors}");
    }
}

#[test]
fn a_merge_that_is_cut_short_is_carried_on() {
    let (rest, read) = series(34, 9);
    remove(&rest, (1..34).filter(|at| at % 3 != 0));
    let mut random = Random(10);
    let mut stops = 0u64;
    loop {
        let archive = rest.open();
        archive.start(Arc::new(AtRest::of(archive.store())));
        // Longer each time: on a busy machine a step of the work that outlasts all pauses would never be done.
        std::thread::sleep(std::time::Duration::from_micros(500 * random.below(60 + stops * stops)));
        let idle = archive.queue().queued == 0;
        // At any point of its work.
        archive.stop();
        unchanged(&rest, &read);
        if idle {
            break;
        }
        stops += 1;
    }
    assert!(stops > 3, "{stops}");
    assert_eq!(rest.count(), 11 + 1 - 1);
    // A crash after the new encoding took its name and before the old parent went, and one before.
    let (rest, read) = series(12, 11);
    let parent = rest.object_path(&step(3));
    let kept = fs::read(&parent).unwrap();
    remove(&rest, [3]);
    rest.settle();
    assert!(!parent.exists());
    fs::write(&parent, kept).unwrap();
    let tmp = rest.root().join("tmp").join(format!("object-{}", rest.id(&step(4))));
    fs::copy(rest.object_path(&step(4)), &tmp).unwrap();
    rest.settle();
    unchanged(&rest, &read);
    assert!(!parent.exists() && !tmp.exists());
}

#[test]
fn readers_see_nothing_of_it() {
    let (rest, read) = series(34, 12);
    let archive = rest.open();
    let done = AtomicBool::new(false);
    let stubs: BTreeMap<usize, _> = (1..34).map(|at| (at, rest.stub(&step(at)).unwrap())).collect();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (archive, done, stubs, read) = (&archive, &done, &stubs, &read);
            scope.spawn(move || {
                let mut random = Random(thread);
                while !done.load(Ordering::Relaxed) {
                    // The remaining files.
                    let at = 4 * (1 + random.below(8) as usize);
                    let reader = archive.reader(&stubs[&at]).unwrap();
                    let mut bytes = vec![0; read[&at].len()];
                    assert_eq!(reader.read_at(0, &mut bytes).unwrap(), bytes.len());
                    assert!(bytes == read[&at], "{at}");
                }
            });
        }
        work(&archive);
        for at in (1..34).filter(|at| at % 4 != 0) {
            fs::remove_file(rest.path(&step(at))).unwrap();
            archive.removed(Path::new(&step(at)));
        }
        until(|| archive.queue().queued == 0);
        done.store(true, Ordering::Relaxed);
    });
    archive.stop();
    assert_eq!(rest.count(), 9);
    unchanged(&rest, &read);
}

#[test]
fn the_next_state_is_encoded_without_reading_its_parent() {
    let mut random = Random(13);
    let mut model = vec![Tensor::new("w", Dtype::F32, &[512, 1024], &mut random)];
    let mut rest = Rest::new();
    let archive = rest.open();
    work(&archive);
    let mut read = Vec::new();
    let mut write = |rest: &mut Rest, at: usize| {
        train(&mut model, 1e-3, &mut random);
        archive.opened_for_writing(Path::new(&step(at)));
        rest.write(&step(at), &safetensors(&model));
        archive.sealed(Path::new(&step(at)));
        until(|| archive.queue().queued == 0);
        read.push(archive.status().memory.tiles_read);
    };
    (1..=20).for_each(|at| write(&mut rest, at));
    archive.stop();
    // The comparison of each state with its file reads its own 4 tiles, once: no parent's. The two super-steps are
    // compared with nothing taken from memory, so their base is known to be good on the device.
    let each: Vec<u64> = read.windows(2).skip(1).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(each.iter().filter(|read| **read == 4).count(), each.len() - 2, "{each:?}");
    assert!(each.iter().all(|read| *read <= 3 * 4), "{each:?}");
    (1..20).for_each(|at| drop(rest.faithful(&step(at))));
}

#[test]
fn memory_keeps_no_states_that_helped_nothing() {
    let bytes = |with_numbers: bool| {
        let mut random = Random(21);
        let mut model = vec![Tensor::new("w", Dtype::F32, &[512, 1024], &mut random)];
        let mut rest = Rest::new();
        let archive = rest.open();
        work(&archive);
        for at in 1..=6 {
            train(&mut model, 1e-3, &mut random);
            model.truncate(1);
            if with_numbers {
                model.push(Tensor::new("numbers", Dtype::I64, &[256, 512], &mut random));
            }
            archive.opened_for_writing(Path::new(&step(at)));
            rest.write(&step(at), &safetensors(&model));
            archive.sealed(Path::new(&step(at)));
            until(|| archive.queue().queued == 0);
        }
        archive.stop();
        archive.status().memory.bytes
    };
    // Each state has a MiB of numbers to which the one before is no help. Only the keyframe did not know that.
    let more = bytes(true) - bytes(false);
    assert!((1 << 20..3 << 19).contains(&more), "{more}");
}

#[test]
fn without_memory_it_works_as_well() {
    let (rest, read) = series(20, 14);
    remove(&rest, (1..20).filter(|at| at % 2 == 0));
    let archive = Archive::open_with(Store::open(&rest.root()).unwrap(), 0).unwrap();
    work(&archive);
    assert_eq!(archive.status().memory.bytes, 0);
    archive.stop();
    unchanged(&rest, &read);
}

#[test]
fn a_lost_parent_stops_merging_until_its_files_are_gone() {
    let (rest, read) = series(12, 15);
    let lost = rest.object_path(&step(5));
    fs::remove_file(&lost).unwrap();
    remove(&rest, [3, 5]);
    rest.settle();
    // All before it serve. Those after it do not, and everything is still there that they would need if it came back.
    for at in [1, 2, 4, 9, 10, 11] {
        assert!(rest.read(&step(at)).unwrap() == read[&at], "{at}");
    }
    for at in [6, 7, 8] {
        let error = rest.read(&step(at)).unwrap_err();
        assert_eq!(error.source.kind(), std::io::ErrorKind::NotFound, "{at}");
    }
    assert_eq!(rest.count(), 10);
    remove(&rest, [6, 7, 8]);
    rest.settle();
    assert_eq!(rest.count(), 6);
    for at in [1, 2, 4, 9, 10, 11] {
        assert!(rest.read(&step(at)).unwrap() == read[&at], "{at}");
    }
}
