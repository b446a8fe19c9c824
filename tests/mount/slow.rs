//! A mount over a slow device: savers and readers never wait for the archive's syncs.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::series::{Dtype, Random, Tensor, safetensors, states, train};
use super::support::{Mounted, state, wait_until};
use stepfs::store::Objects;
use stepfs::store::durable::{CrashPoint, Device, Disk, Io};

/// A sync waits until the device is well again, or this long.
const DELAY: Duration = Duration::from_secs(20);

/// An object's write waits so long, unless the test lets it continue. That is longer than the test takes on a busy
/// machine, and not for ever, so that a failing test ends.
const OBJECT_DELAY: Duration = Duration::from_secs(110);

/// Bytes of a file that waits for no others.
const LARGE: u64 = 64 << 10;

/// The disk, whose syncs take very long while it is ill.
#[derive(Debug, Default)]
struct Slow {
    ill: AtomicBool,
    /// Syncs that wait, of the archive and of programs.
    waiting: AtomicUsize,
    fsyncs: AtomicUsize,
    marks: AtomicUsize,
    /// Slow are the archive's syncs of files of at least, or below, [`LARGE`] bytes.
    slow_large: AtomicBool,
    slow_small: AtomicBool,
    /// Objects are written slowly; all else is well.
    slow_objects: AtomicBool,
    /// Slow are the objects that become differences to others.
    slow_merges: AtomicBool,
    /// Writes to either that wait.
    writing: AtomicUsize,
    merging: AtomicUsize,
}

impl Slow {
    fn wait(&self, at: CrashPoint) {
        let count = match at {
            CrashPoint::Fsync => &self.fsyncs,
            CrashPoint::Marked => &self.marks,
            _ => &self.waiting,
        };
        count.fetch_add(1, Ordering::SeqCst);
        let began = Instant::now();
        while self.ill.load(Ordering::SeqCst) && began.elapsed() < DELAY {
            std::thread::sleep(Duration::from_millis(5));
        }
        count.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Device for Slow {
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64, at: CrashPoint) -> io::Result<usize> {
        let slow = match at {
            CrashPoint::ObjectWritten => Some((&self.slow_objects, &self.writing)),
            CrashPoint::MergeWritten => Some((&self.slow_merges, &self.merging)),
            _ => None,
        };
        if let Some((slow, count)) = slow {
            count.fetch_add(1, Ordering::SeqCst);
            let began = Instant::now();
            while slow.load(Ordering::SeqCst) && began.elapsed() < OBJECT_DELAY {
                std::thread::sleep(Duration::from_millis(5));
            }
            count.fetch_sub(1, Ordering::SeqCst);
        }
        Disk.write_at(file, bytes, offset, at)
    }

    fn sync_file(&self, file: &File, at: CrashPoint) -> io::Result<()> {
        self.wait(at);
        if at == CrashPoint::FileSealed {
            let slow = if file.metadata()?.len() >= LARGE { &self.slow_large } else { &self.slow_small };
            self.waiting.fetch_add(1, Ordering::SeqCst);
            let began = Instant::now();
            while slow.load(Ordering::SeqCst) && began.elapsed() < OBJECT_DELAY {
                std::thread::sleep(Duration::from_millis(5));
            }
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        Disk.sync_file(file, at)
    }

    fn sync_data(&self, file: &File, at: CrashPoint) -> io::Result<()> {
        self.wait(at);
        Disk.sync_data(file, at)
    }

    fn sync_dir(&self, dir: &Path, at: CrashPoint) -> io::Result<()> {
        self.wait(at);
        Disk.sync_dir(dir, at)
    }

    fn sync_all(&self, dir: &Path, at: CrashPoint) -> io::Result<()> {
        self.wait(at);
        Disk.sync_all(dir, at)
    }
}

/// Text that compresses.
fn text(seed: usize) -> Vec<u8> {
    (0..).flat_map(|i: usize| format!("line {i} of {seed}\n").into_bytes()).take(300_001).collect()
}

#[test]
fn a_slow_device_keeps_nobody_waiting_but_who_asks_for_it() {
    for passthrough in [true, false] {
        let slow = Arc::new(Slow::default());
        let m = Mounted::with_io(tempfile::tempdir().unwrap(), &Io::new(Arc::clone(&slow) as _), passthrough);
        let path = |step: usize| m.mnt().join(format!("step-{step}.txt"));
        (1..4).for_each(|step| fs::write(path(step), text(step)).unwrap());
        wait_until("it is released", || state(&path(2)) == "released");
        fs::create_dir(m.mnt().join("pinned")).unwrap();
        slow.ill.store(true, Ordering::SeqCst);
        fs::write(path(4), text(4)).unwrap();
        wait_until("the archive waits for the device", || slow.waiting.load(Ordering::SeqCst) > 0);
        let began = Instant::now();
        for step in 5..8 {
            fs::write(path(step), text(step)).unwrap();
            fs::write(path(step).with_extension("tmp"), text(step)).unwrap();
            fs::rename(path(step).with_extension("tmp"), path(step)).unwrap();
        }
        // A released file, one that waits, and the names of all.
        for step in [1, 3, 4, 7] {
            assert!(fs::read(path(step)).unwrap() == text(step));
        }
        assert_eq!(fs::read_dir(m.mnt()).unwrap().count(), 8);
        fs::create_dir(m.mnt().join("dir")).unwrap();
        fs::hard_link(path(4), m.mnt().join("dir/again.txt")).unwrap();
        fs::remove_dir_all(m.mnt().join("dir")).unwrap();
        fs::remove_file(path(1)).unwrap();
        fs::remove_file(path(6)).unwrap();
        // No result came from the device giving in.
        assert!(began.elapsed() < DELAY && slow.waiting.load(Ordering::SeqCst) > 0);
        // A call that promises durability does wait, and others meanwhile do not.
        let fsync = std::thread::spawn({
            let file = File::options().write(true).open(path(7)).unwrap();
            move || file.sync_all()
        });
        wait_until("the fsync has come to the device", || slow.fsyncs.load(Ordering::SeqCst) > 0);
        assert!(fs::read(path(2)).unwrap() == text(2));
        assert!(!fsync.is_finished());
        // A released file, too: its attributes may not be durable.
        let of_stub = std::thread::spawn({
            let file = File::open(path(2)).unwrap();
            move || file.sync_all()
        });
        wait_until("that fsync has come to the device", || slow.fsyncs.load(Ordering::SeqCst) == 2);
        assert!(!of_stub.is_finished());
        // So does a pin, because a policy will follow it: on a file that is durable itself, and on a directory.
        let pinned = [path(3), m.mnt().join("pinned")];
        let pin = |path| std::thread::spawn(move || xattr::set(path, "user.stepfs.pin", b"1"));
        let marks = pinned.clone().map(pin);
        wait_until("the pins have come to the device", || slow.marks.load(Ordering::SeqCst) == marks.len());
        assert!(!marks.iter().any(|mark| mark.is_finished()));
        slow.ill.store(false, Ordering::SeqCst);
        marks.into_iter().for_each(|mark| mark.join().unwrap().unwrap());
        pinned.iter().for_each(|path| xattr::remove(path, "user.stepfs.pin").unwrap());
        fsync.join().unwrap().unwrap();
        of_stub.join().unwrap().unwrap();
        wait_until("the waiting file is released", || state(&path(5)) == "released");
        for step in [2, 3, 4, 5, 7] {
            assert!(fs::read(path(step)).unwrap() == text(step), "{step}");
        }
    }
}

/// While a file takes long to be archived, newly closed files become durable and are sealed, and others are archived
/// and released.
#[test]
fn nothing_that_is_closed_waits_for_a_file_that_is_being_archived() {
    let slow = Arc::new(Slow::default());
    let m = Mounted::with_io(tempfile::tempdir().unwrap(), &Io::new(Arc::clone(&slow) as _), true);
    let path = |run: &str, step: usize| m.mnt().join(format!("{run}-{step}.txt"));
    slow.slow_objects.store(true, Ordering::SeqCst);
    for step in [1, 2] {
        fs::write(path("large", step), text(step)).unwrap();
    }
    wait_until("an object is being written", || slow.writing.load(Ordering::SeqCst) == 1);
    let began = Instant::now();
    for file in 1..20 {
        fs::write(path("small", file), text(file + 2)).unwrap();
        wait_until("it is sealed", || state(&path("small", file)) == "sealed");
    }
    wait_until("another lineage is being archived too", || slow.writing.load(Ordering::SeqCst) == 2);
    assert!(began.elapsed() < OBJECT_DELAY, "the archive had to end first");
    assert_eq!(state(&path("large", 1)), "sealed");
    slow.slow_objects.store(false, Ordering::SeqCst);
    wait_until("all are released", || {
        state(&path("large", 1)) == "released" && (1..19).all(|file| state(&path("small", file)) == "released")
    });
}

/// Small files are made durable together, by a thread of their own.
#[test]
fn large_and_small_files_do_not_wait_for_each_other() {
    let slow = Arc::new(Slow::default());
    let m = Mounted::with_io(tempfile::tempdir().unwrap(), &Io::new(Arc::clone(&slow) as _), true);
    let large = |n: usize| m.mnt().join(format!("large-{n}.txt"));
    let small = |n: usize| m.mnt().join(format!("logs/{n}.json"));
    fs::create_dir(m.mnt().join("logs")).unwrap();
    let began = Instant::now();
    // More than there are sealers.
    slow.slow_large.store(true, Ordering::SeqCst);
    (0..6).for_each(|n| fs::write(large(n), text(n)).unwrap());
    wait_until("every sealer waits", || slow.waiting.load(Ordering::SeqCst) >= 4);
    (0..40).for_each(|n| fs::write(small(n), "{}").unwrap());
    wait_until("the small ones are durable", || (0..40).all(|n| state(&small(n)) == "sealed"));
    assert!((0..6).all(|n| state(&large(n)) == "staged"));
    slow.slow_large.store(false, Ordering::SeqCst);
    // The older ones may be archived, and even released, by then.
    let durable = |n: usize| ["sealed", "archived", "released"].contains(&state(&large(n)).as_str());
    wait_until("the large ones are sealed", || (0..6).all(durable));
    slow.slow_small.store(true, Ordering::SeqCst);
    (0..40).for_each(|n| fs::write(small(n), "{again}").unwrap());
    wait_until("the small ones wait", || slow.waiting.load(Ordering::SeqCst) > 0);
    (6..12).for_each(|n| fs::write(large(n), text(n)).unwrap());
    wait_until("these are sealed", || (6..12).all(durable));
    assert!((0..40).all(|n| state(&small(n)) == "staged"));
    assert!(began.elapsed() < OBJECT_DELAY, "the device had to give in first");
    slow.slow_small.store(false, Ordering::SeqCst);
    wait_until("all are durable", || (0..40).all(|n| state(&small(n)) == "sealed"));
}

/// A job that starts right after the mount asks before stepfs has looked at any file.
#[test]
fn the_newest_checkpoint_is_found_before_it_is_sealed() {
    let slow = Arc::new(Slow::default());
    let m = Mounted::with_io(tempfile::tempdir().unwrap(), &Io::new(Arc::clone(&slow) as _), true);
    slow.slow_large.store(true, Ordering::SeqCst);
    let file = |step: usize| m.mnt().join(format!("step_{step}.safetensors"));
    states(6).into_iter().enumerate().for_each(|(step, state)| fs::write(file(step), state).unwrap());
    assert!((0..6).all(|step| state(&file(step)) == "staged"));
    let latest = || Command::new(env!("CARGO_BIN_EXE_stepfs")).arg("latest").arg(m.mnt()).output().unwrap();
    let answered = |step: usize| {
        let Output { stdout, stderr, .. } = latest();
        assert_eq!(String::from_utf8_lossy(&stdout).trim(), file(step).to_str().unwrap(), "{stderr:?}");
    };
    answered(5);
    // One that is open for writing is none.
    let open = File::options().append(true).open(file(5)).unwrap();
    answered(4);
    drop(open);
    slow.slow_large.store(false, Ordering::SeqCst);
}

/// A super-step is a difference to the super-step before it. That state has lost its name, and while the new one is
/// being encoded the states in between cease to need it. Then only the file that is being encoded needs it.
#[test]
fn the_base_of_a_file_that_is_being_archived_stays() {
    let slow = Arc::new(Slow::default());
    let m = Mounted::with_io(tempfile::tempdir().unwrap(), &Io::new(Arc::clone(&slow) as _), true);
    let path = |step: usize| m.mnt().join(format!("step_{step}.safetensors"));
    let mut random = Random(3);
    let mut model = vec![Tensor::new("w.weight", Dtype::F32, &[256, 256], &mut random)];
    let mut written = Vec::new();
    let mut save = |step: usize| {
        // Differences about as large as a keyframe, so that merging one over a removed state pays.
        train(&mut model, 0.02, &mut random);
        written.push(safetensors(&model));
        fs::write(path(step), &written[step]).unwrap();
        wait_until("it is sealed", || state(&path(step)) == "sealed");
    };
    (0..9).for_each(&mut save);
    wait_until("all before the super-step are released", || (0..8).all(|step| state(&path(step)) == "released"));
    // The housekeeper begins to merge when there is no other work. Files saved meanwhile are archived beside it.
    slow.slow_merges.store(true, Ordering::SeqCst);
    fs::remove_file(path(0)).unwrap();
    wait_until("the second state is being merged over the first", || slow.merging.load(Ordering::SeqCst) == 1);
    slow.slow_objects.store(true, Ordering::SeqCst);
    save(9);
    wait_until("the super-step is being encoded", || slow.writing.load(Ordering::SeqCst) == 1);
    slow.slow_merges.store(false, Ordering::SeqCst);
    let parent_of = |origin: &str| {
        let objects = Objects::load(&m.dir.path().join("store/objects"), |_, error| panic!("{error}")).unwrap();
        let is = |id| objects.open(id).is_ok_and(|object| object.index().origin == origin);
        let header = objects.all().into_iter().find(|header| is(header.id));
        header.map(|header| header.parent)
    };
    let (first, second) = ("step_0.safetensors", "step_1.safetensors");
    wait_until("the second state needs the first no more", || parent_of(second) == Some(None));
    // Garbage goes now.
    m.archive.set_attribute(Path::new(""), "gc").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(parent_of(first).is_some(), "the base of the file that is being encoded is gone");
    slow.slow_objects.store(false, Ordering::SeqCst);
    wait_until("the super-step is released", || state(&path(8)) == "released");
    assert_eq!(fs::read(path(8)).unwrap().len(), written[8].len());
    assert!(fs::read(path(9)).unwrap() == written[9]);
}

/// A program opens a released file for writing, which takes a while. Another program's changes to the file meanwhile
/// persist.
#[test]
fn what_is_said_of_a_file_while_it_is_brought_back_holds() {
    for (passthrough, truncate) in [(true, false), (true, true), (false, false), (false, true)] {
        let slow = Arc::new(Slow::default());
        let m = Mounted::with_io(tempfile::tempdir().unwrap(), &Io::new(Arc::clone(&slow) as _), passthrough);
        let path = |step: usize| m.mnt().join(format!("step-{step}.txt"));
        (1..4).for_each(|step| fs::write(path(step), text(step)).unwrap());
        wait_until("they are released", || [1, 2].iter().all(|step| state(&path(*step)) == "released"));
        xattr::set(path(1), "user.old", b"1").unwrap();
        xattr::set(path(1), "user.kept", b"1").unwrap();
        m.archive.set_attribute(Path::new(""), "sync").unwrap();
        wait_until("nothing is left to do", || m.archive.queue().queued == 0);
        slow.ill.store(true, Ordering::SeqCst);
        let opened = std::thread::spawn({
            let path = path(1);
            move || File::options().write(true).truncate(truncate).open(path).map(drop)
        });
        wait_until("it is being brought back", || slow.waiting.load(Ordering::SeqCst) > 0);
        let began = Instant::now();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(path(1), mode).unwrap();
        xattr::remove(path(1), "user.old").unwrap();
        xattr::set(path(1), "user.new", b"2").unwrap();
        assert!(began.elapsed() < DELAY && !opened.is_finished(), "it was too late for that");
        // Its answer comes when it is durable.
        let pinned = std::thread::spawn({
            let path = path(1);
            move || xattr::set(path, "user.stepfs.pin", b"1")
        });
        wait_until("the pin has come to the device", || slow.marks.load(Ordering::SeqCst) > 0);
        slow.ill.store(false, Ordering::SeqCst);
        opened.join().unwrap().unwrap();
        pinned.join().unwrap().unwrap();
        let value = |name: &str| xattr::get(path(1), name).unwrap();
        let said = ["user.old", "user.kept", "user.new", "user.stepfs.pin"].map(value);
        assert_eq!(
            said,
            [None, Some(b"1".to_vec()), Some(b"2".to_vec()), Some(b"1".to_vec())],
            "{passthrough} {truncate}"
        );
        let metadata = fs::metadata(path(1)).unwrap();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o7777, 0o600);
        assert_eq!(fs::read(path(1)).unwrap(), if truncate { Vec::new() } else { text(1) });
    }
}
