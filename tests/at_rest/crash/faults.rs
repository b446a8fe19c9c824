//! A device that fails at any call: written bytes are there, reports are true, and when the device is well again the
//! archive continues by itself.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use stepfs::archive::{Archive, AtRest};
use stepfs::store::durable::Io;
use stepfs::store::{Error, Objects, Store, Stub};

use super::faulty::{Fault, Faulty};
use super::live::LONGEST;
use super::series::directory;
use super::series::{Dtype, Random, Tensor, decode, is_faithful, safetensors, step, train};
use stepfs::store::object::Object;

/// Parallel runs: most of the time they wait for the next try.
const AT_ONCE: usize = 24;
/// Saved checkpoints, and those removed in between.
const SAVED: usize = 6;
const REMOVED: [usize; 2] = [1, 3];

/// One run of the history with a fault in it.
struct Faulted {
    device: Arc<Faulty>,
    written: BTreeMap<usize, Vec<u8>>,
}

fn checkpoints() -> Vec<Vec<u8>> {
    let mut random = Random(3);
    let mut model = vec![Tensor::new("a.weight", Dtype::F32, &[128, 128], &mut random)];
    model.push(Tensor::new("ids", Dtype::I64, &[64], &mut random));
    let mut next = || {
        train(&mut model, 1e-3, &mut random);
        safetensors(&model)
    };
    (0..SAVED).map(|_| next()).collect()
}

/// Runs a store through the history. With `patient`, no test asks for another try when the device is well again.
fn run(fault: Fault, at: usize, lasts: bool, patient: bool, checkpoints: &[Vec<u8>]) -> Faulted {
    let dir = directory();
    let root = fs::canonicalize(dir.path()).unwrap().join("store");
    let device = Arc::new(Faulty::new(fault, at, lasts));
    let mut faulted = Faulted { device: Arc::clone(&device), written: BTreeMap::new() };
    let open = || Store::open_on(Io::new(Arc::clone(&device) as _), &root).and_then(Archive::open);
    let archive = open().unwrap_or_else(|error| {
        // In words, and with the device's error.
        assert!(matches!(error, Error::Io { .. }), "{error}");
        device.heal();
        open().unwrap()
    });
    archive.start(Arc::new(AtRest::of(archive.store())));
    let tree = archive.store().tree();
    for (number, bytes) in checkpoints.iter().enumerate().map(|(at, bytes)| (at + 1, bytes)) {
        let (name, path) = (step(number), tree.join(step(number)));
        archive.opened_for_writing(Path::new(&name));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        let time = std::time::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + 60 * number as u64);
        File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        archive.sealed(Path::new(&name));
        faulted.written.insert(number, bytes.clone());
        settle(&archive, &device, Duration::from_millis(60));
        if number == 5 {
            for gone in REMOVED {
                fs::remove_file(tree.join(step(gone))).unwrap();
                archive.removed(Path::new(&step(gone)));
                faulted.written.remove(&gone);
            }
            settle(&archive, &device, Duration::from_millis(60));
        }
        // A read gives the right bytes, or an error that says so.
        faulted.readable(&archive, false);
    }
    device.heal();
    let began = Instant::now();
    while !(archive.queue().queued == 0 && nothing_left(&root)) {
        if !patient {
            let _ = archive.set_attribute(Path::new(""), "sync");
        }
        let waited = began.elapsed();
        assert!(waited < Duration::from_secs(120), "it does not heal: {:?}, {:?}", archive.status(), left(&root));
        std::thread::sleep(Duration::from_millis(50));
    }
    faulted.readable(&archive, true);
    let status = archive.status();
    assert_eq!((status.stalled, status.frozen), (None, None));
    // All but the newest is archived, except files that the device did not make durable: those stay as written.
    for number in faulted.written.keys() {
        let name = step(*number);
        let text = |what| String::from_utf8(archive.attribute(Path::new(&name), what).unwrap_or_default()).unwrap();
        let excused = text("why").contains("could not be made durable");
        assert!(
            text("state") == "released" || *number == SAVED || excused || faulted.newer_is_excused(&archive, *number),
            "{name} is {}: {}",
            text("state"),
            text("release")
        );
    }
    archive.stop();
    drop(archive);
    // And the next daemon finds a sound store.
    let archive = Archive::open(Store::open_on(Io::new(Arc::clone(&device) as _), &root).unwrap()).unwrap();
    archive.start(Arc::new(AtRest::of(archive.store())));
    settle(&archive, &device, Duration::from_secs(30));
    faulted.readable(&archive, true);
    assert_eq!(archive.status().failed, [""; 0]);
    archive.stop();
    faulted
}

/// Waits until the archive has nothing to do, or has called the device for the last time `most` ago: it rests after a fault.
fn settle(archive: &Arc<Archive>, device: &Faulty, most: Duration) {
    let (began, mut calls, mut last) = (Instant::now(), device.calls(), Instant::now());
    while archive.queue().queued > 0 && last.elapsed() < most {
        assert!(began.elapsed() < LONGEST, "the device is called again and again: {:?}", archive.status());
        if device.calls() != calls {
            (calls, last) = (device.calls(), Instant::now());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The contents of `tmp/`, and objects that no file needs.
fn left(root: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().to_string_lossy().into_owned();
    let mut left: Vec<String> = fs::read_dir(root.join("tmp")).unwrap().map(name).collect();
    // A directory that did not get its times back has its note for the next mount.
    left.retain(|name| !name.starts_with("times-"));
    let store = Store::look(root).unwrap();
    let Ok(objects) = Objects::load(&store.objects(), |_, _| {}) else { return left };
    let mut needed = HashSet::new();
    let newest = objects.all().into_iter().max_by_key(|header| header.modified_ns).map(|header| header.id);
    for number in 1..=SAVED {
        let Ok(file) = File::open(store.tree().join(step(number))) else { continue };
        let stub = Stub::read(&file, store.id()).ok().flatten().map(|stub| stub.object);
        let mut next = stub;
        while let Some(id) = next.filter(|id| needed.insert(*id)) {
            next = objects.get(id).and_then(|(header, _)| header.parent);
        }
    }
    let mut next = newest;
    while let Some(id) = next.filter(|id| needed.insert(*id)) {
        next = objects.get(id).and_then(|(header, _)| header.parent);
    }
    left.extend(objects.all().iter().filter(|h| !needed.contains(&h.id)).map(|h| format!("object {}", h.id)));
    left
}

fn nothing_left(root: &Path) -> bool {
    left(root).is_empty()
}

impl Faulted {
    /// Every file reads as written, within its bound, or cannot be read while the device is ill.
    fn readable(&self, archive: &Arc<Archive>, well: bool) {
        let store = archive.store();
        for (number, written) in &self.written {
            // Opened once: the archive may replace it by a stub meanwhile.
            let mut file = File::open(store.tree().join(step(*number))).unwrap();
            let Some(stub) = Stub::read(&file, store.id()).unwrap() else {
                let mut bytes = Vec::new();
                file.rewind().unwrap();
                file.read_to_end(&mut bytes).unwrap();
                assert!(bytes == *written, "{number}");
                continue;
            };
            // Through the device.
            let mut bytes = vec![0; written.len()];
            match archive.reader(&stub).and_then(|reader| reader.read_at(0, &mut bytes)) {
                Ok(len) => assert_eq!(len, written.len()),
                Err(error) if !well => {
                    assert!(!error.is_damage(), "the device was not asked rightly, or lies: {error}");
                    continue;
                }
                Err(error) => panic!("{number}: {error}"),
            }
            let objects = Objects::load(&store.objects(), |_, _| {}).unwrap();
            assert!(decode(&objects, stub.object).unwrap() == bytes, "{number}");
            let object = Object::open(&store.objects(), stub.object).unwrap();
            is_faithful(&step(*number), object.index(), written, &bytes);
        }
    }

    /// Whether all newer files count for nothing.
    fn newer_is_excused(&self, archive: &Arc<Archive>, number: usize) -> bool {
        self.written.keys().filter(|newer| **newer > number).all(|newer| {
            let why = archive.attribute(Path::new(&step(*newer)), "why").unwrap_or_default();
            String::from_utf8_lossy(&why).contains("could not be made durable")
        })
    }
}

fn number(name: &str, usual: usize) -> usize {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap())
}

/// Runs these, many at once; returns the steps at which calls failed.
fn all(cases: &[(Fault, usize, bool)], patient: bool) -> HashSet<String> {
    let checkpoints = checkpoints();
    let (next, met, failures) = (AtomicUsize::new(0), Mutex::new(HashSet::new()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((fault, at, lasts)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let one = || run(*fault, *at, *lasts, patient, &checkpoints);
                    match catch_unwind(AssertUnwindSafe(one)) {
                        Ok(faulted) => met.lock().unwrap().extend(faulted.device.failed()),
                        Err(panic) => {
                            let why = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                            failures.lock().unwrap().push(format!("{fault:?} at call {at}, lasts {lasts}: {why}"));
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    println!("{} runs, {} of them wrong", cases.len(), failures.len());
    assert!(failures.is_empty(), "{}", failures[..failures.len().min(20)].join("\n"));
    met.into_inner().unwrap()
}

#[test]
fn whichever_call_fails_nothing_is_lost_and_the_archive_heals_by_itself() {
    let calls = run(Fault::Errno(0), usize::MAX, false, false, &checkpoints()).device.calls();
    // Every call in the long run (scripts/crash.sh).
    let stride = number("STEPFS_FAULT_STRIDE", 9);
    let kinds = [
        (Fault::Errno(libc::EIO), false),
        (Fault::Errno(libc::ENOSPC), true),
        (Fault::Sync(libc::EIO), false),
        (Fault::Errno(libc::EIO), true),
        (Fault::Short, true),
        (Fault::Errno(libc::EDQUOT), false),
        (Fault::Sync(libc::ENOSPC), true),
    ];
    let mut cases = Vec::new();
    for at in (0..calls).step_by(stride) {
        let turns = if stride == 1 { kinds.len() } else { 1 };
        for turn in 0..turns {
            let (fault, lasts) = kinds[(at / stride + turn) % kinds.len()];
            cases.push((fault, at, lasts));
        }
    }
    let met = all(&cases, false);
    println!("{calls} calls; steps that failed: {}", met.len());
    assert!(met.len() > 10, "{met:?}");
}

#[test]
fn when_the_device_is_well_again_nobody_needs_to_ask() {
    let cases: Vec<_> = [60, 150, 240, 330, 420]
        .into_iter()
        .flat_map(|at| [libc::EIO, libc::ENOSPC, libc::EDQUOT].map(|code| (Fault::Errno(code), at, true)))
        .collect();
    all(&cases, true);
}
