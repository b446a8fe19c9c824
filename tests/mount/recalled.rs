//! Recalls that the device interrupts: the rest is served rightly, and the next attempt succeeds.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Seek};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::support::{Mounted, errno, state, wait_until};
use stepfs::store::durable::{CrashPoint, Device, Disk, Io};

/// A position that only a descriptor has which a test has marked, and its copies.
const MARK: u64 = 1 << 40;
/// Calls that are never reached.
const NEVER: usize = usize::MAX;

/// The disk, which fails as the test says.
#[derive(Debug)]
struct Failing {
    /// Inode numbers of files whose bytes did not reach the device. The kernel tells marked descriptors so, once. The
    /// others are newer than the error.
    lost: Mutex<HashSet<u64>>,
    /// Renames and links of recalled files that succeed before the first one that fails.
    renames: AtomicUsize,
    links: AtomicUsize,
    /// A failed rename has its effect all the same.
    renames_nevertheless: AtomicBool,
    /// Directories cannot be made durable.
    keeps_no_names: AtomicBool,
}

impl Default for Failing {
    fn default() -> Failing {
        let (renames, links) = (NEVER.into(), NEVER.into());
        let (lost, renames_nevertheless, keeps_no_names) = Default::default();
        Failing { lost, renames, links, renames_nevertheless, keeps_no_names }
    }
}

fn failed<T>(code: i32) -> io::Result<T> {
    Err(io::Error::from_raw_os_error(code))
}

/// True once a countdown has ended.
fn is_over(left: &AtomicUsize) -> bool {
    let less = |left: usize| (left != NEVER).then(|| left.saturating_sub(1));
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less) == Ok(0)
}

impl Device for Failing {
    fn sync_file(&self, file: &File, at: CrashPoint) -> io::Result<()> {
        Disk.sync_file(file, at)?;
        let is_told = (&*file).stream_position()? == MARK;
        match is_told && self.lost.lock().unwrap().remove(&file.metadata()?.ino()) {
            true => failed(libc::EIO),
            false => Ok(()),
        }
    }

    fn sync_dir(&self, dir: &Path, at: CrashPoint) -> io::Result<()> {
        let is_asked_for = matches!(at, CrashPoint::RecallSynced | CrashPoint::Fsync);
        match is_asked_for && self.keeps_no_names.load(Ordering::SeqCst) {
            true => failed(libc::EIO),
            false => Disk.sync_dir(dir, at),
        }
    }

    fn rename(&self, from: &Path, to: &Path, at: CrashPoint) -> io::Result<()> {
        if at == CrashPoint::RecallInPlace && is_over(&self.renames) {
            if self.renames_nevertheless.load(Ordering::SeqCst) {
                Disk.rename(from, to, at)?;
            }
            return failed(libc::EIO);
        }
        Disk.rename(from, to, at)
    }

    fn link(&self, from: &Path, to: &Path, at: CrashPoint) -> io::Result<()> {
        if at == CrashPoint::RecallInPlace && is_over(&self.links) {
            failed(libc::ENOSPC)
        } else {
            Disk.link(from, to, at)
        }
    }
}

/// Text that compresses, of a length that is no multiple of anything.
fn text(seed: usize) -> Vec<u8> {
    (0..).flat_map(|i: usize| format!("line {i} of {seed}\n").into_bytes()).take(300_001).collect()
}

/// A mount with a released file, and its bytes.
struct Released {
    m: Mounted,
    device: Arc<Failing>,
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Released {
    fn new(passthrough: bool) -> Released {
        let device = Arc::new(Failing::default());
        let m = Mounted::with_io(tempfile::tempdir().unwrap(), &Io::new(Arc::clone(&device) as _), passthrough);
        let path = m.mnt().join("step-1.txt");
        for step in 1..4 {
            let file = File::create(m.mnt().join(format!("step-{step}.txt"))).unwrap();
            file.write_all_at(&text(step), 0).unwrap();
            // Its name is durable, too.
            file.sync_all().unwrap();
        }
        wait_until("it is released", || state(&path) == "released");
        Released { m, device, path, bytes: text(1) }
    }

    /// Decodes it as a whole, so that readers have a file of the cache. Returns one.
    fn reader(&self) -> File {
        assert!(fs::read(&self.path).unwrap() == self.bytes);
        wait_until("the cache has it", || self.m.archive.status().cache_bytes > 0);
        File::open(&self.path).unwrap()
    }

    /// The daemon's descriptor of the only file in its cache. The daemon is this process.
    fn decoded(&self) -> PathBuf {
        let cache = self.m.dir.path().canonicalize().unwrap().join("store/cache");
        let descriptors = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
        let of_cache = |path: &PathBuf| fs::read_link(path).is_ok_and(|target| target.starts_with(&cache));
        descriptors.into_iter().find(of_cache).expect("it is decoded")
    }

    fn open_to_write(&self) -> io::Result<File> {
        File::options().read(true).write(true).open(&self.path)
    }
}

fn read_at(file: &File, offset: u64, len: usize) -> Vec<u8> {
    let mut part = vec![0; len];
    let read = file.read_at(&mut part, offset).unwrap();
    part[..read].to_vec()
}

/// The kernel writes a file of the cache back at any time. It tells a descriptor of an error once, and newer ones never.
#[test]
fn what_the_cache_has_lost_never_becomes_the_file() {
    for passthrough in [true, false] {
        let released = Released::new(passthrough);
        let reader = released.reader();
        let decoded = released.decoded();
        let number: i32 = decoded.file_name().unwrap().to_str().unwrap().parse().unwrap();
        // SAFETY: no memory is passed. The reader keeps the descriptor open.
        assert_eq!(unsafe { libc::lseek(number, MARK as i64, libc::SEEK_SET) }, MARK as i64);
        // The device has zeros instead, and they are read from it.
        File::options().write(true).open(&decoded).unwrap().write_all_at(&[0; 4096], 8192).unwrap();
        released.device.lost.lock().unwrap().insert(fs::metadata(&decoded).unwrap().ino());
        // It is written anew at once, while readers have it open: the kernel takes no other file for them.
        let writer = released.open_to_write().unwrap();
        assert!(released.device.lost.lock().unwrap().is_empty(), "the device has told of it");
        assert!(fs::read(&released.path).unwrap() == released.bytes);
        assert!(fs::read(released.m.tree().join("step-1.txt")).unwrap() == released.bytes);
        writer.write_all_at(b"CHANGED", 9000).unwrap();
        assert_eq!(read_at(&reader, 9000, 7), b"CHANGED");
        writer.sync_all().unwrap();
    }
}

#[test]
fn a_recall_that_fails_is_tried_again_by_the_next_open() {
    for passthrough in [true, false] {
        let released = Released::new(passthrough);
        let reader = released.reader();
        released.device.renames.store(0, Ordering::SeqCst);
        (0..3).for_each(|_| assert_eq!(errno(released.open_to_write()), libc::EIO));
        assert_eq!(state(&released.path), "released");
        released.device.renames.store(NEVER, Ordering::SeqCst);
        let writer = released.open_to_write().unwrap();
        writer.write_all_at(b"CHANGED", 9000).unwrap();
        assert_eq!(read_at(&reader, 9000, 7), b"CHANGED");
        assert_eq!(reader.metadata().unwrap().ino(), writer.metadata().unwrap().ino());
    }
}

/// An error between two renames leaves two files with the same bytes, as a crash there does.
#[test]
fn names_that_a_recall_did_not_reach_are_served_as_what_they_are() {
    const NAMES: [&str; 3] = ["step-1.txt", "second.txt", "third.txt"];
    for (passthrough, nevertheless) in [(true, false), (false, false), (true, true)] {
        let released = Released::new(passthrough);
        let Released { m, device, path, bytes } = &released;
        let at = |name: &str| m.mnt().join(name);
        NAMES[1..].iter().for_each(|name| fs::hard_link(path, at(name)).unwrap());
        let reader = released.reader();
        device.renames_nevertheless.store(nevertheless, Ordering::SeqCst);
        device.renames.store(1, Ordering::SeqCst);
        assert_eq!(errno(released.open_to_write()), libc::EIO);
        device.renames.store(NEVER, Ordering::SeqCst);
        let is_plain = |name: &&str| fs::metadata(m.tree().join(name)).unwrap().blocks() * 512 > 100_000;
        let replaced: HashSet<&str> = NAMES.into_iter().filter(is_plain).collect();
        assert_eq!(replaced.len(), if nevertheless { 2 } else { 1 });
        let links = |name: &str| if replaced.contains(name) { replaced.len() } else { 3 - replaced.len() };
        let are_looked_up = |name: &&str| fs::metadata(at(name)).unwrap().nlink() == links(name) as u64;
        wait_until("the kernel has looked them up", || NAMES.iter().all(are_looked_up));
        assert!(NAMES.iter().all(|name| fs::read(at(name)).unwrap() == *bytes));
        assert!(read_at(&reader, 0, bytes.len()) == *bytes);
        // One of each is written, and the others keep their bytes.
        let expected = |name: &str| {
            let mut changed = bytes.clone();
            changed[5000..5003].copy_from_slice(if replaced.contains(name) { b"ONE" } else { b"TWO" });
            changed
        };
        for is_replaced in [true, false] {
            let name = NAMES.into_iter().find(|name| replaced.contains(name) == is_replaced).unwrap();
            let writer = File::options().write(true).open(at(name)).unwrap();
            writer.write_all_at(&expected(name)[5000..5003], 5000).unwrap();
            writer.sync_all().unwrap();
        }
        NAMES.iter().for_each(|name| assert!(fs::read(at(name)).unwrap() == expected(name), "{name}"));
        drop(reader);
        wait_until("nothing is left to do", || m.archive.queue().queued == 0);
        let expected = NAMES.map(expected);
        let m = Mounted::on(released.m.unmount_keeping(), passthrough);
        for (name, expected) in NAMES.iter().zip(&expected) {
            assert!(fs::read(m.mnt().join(name)).unwrap() == *expected, "{name}");
        }
    }
}

#[test]
fn a_recall_without_room_for_its_names_changes_none() {
    let released = Released::new(true);
    let path = &released.path;
    let names = ["a", "b"].map(|name| released.m.mnt().join(name));
    names.iter().for_each(|name| fs::hard_link(path, name).unwrap());
    released.device.links.store(1, Ordering::SeqCst);
    assert_eq!(errno(released.open_to_write()), libc::ENOSPC);
    assert_eq!((state(path), fs::metadata(path).unwrap().nlink()), ("released".into(), 3));
    let tmp = released.m.dir.path().join("store/tmp");
    wait_until("nothing is left over", || fs::read_dir(&tmp).unwrap().next().is_none());
    released.device.links.store(NEVER, Ordering::SeqCst);
    released.open_to_write().unwrap().write_all_at(b"ALL", 5000).unwrap();
    assert!(names.iter().all(|name| fs::read(name).unwrap()[5000..5003] == *b"ALL"));
}

#[test]
fn a_name_that_a_recall_could_not_make_durable_is_made_so_by_fsync() {
    for passthrough in [true, false] {
        let released = Released::new(passthrough);
        let device = &released.device;
        device.keeps_no_names.store(true, Ordering::SeqCst);
        assert_eq!(errno(released.open_to_write()), libc::EIO);
        // It is resident by now, but the stub may come back after a crash.
        let writer = released.open_to_write().unwrap();
        writer.write_all_at(b"CHANGED", 9000).unwrap();
        (0..2).for_each(|_| assert_eq!(errno(writer.sync_all()), libc::EIO));
        device.keeps_no_names.store(false, Ordering::SeqCst);
        writer.sync_all().unwrap();
        device.keeps_no_names.store(true, Ordering::SeqCst);
        // Once is enough.
        writer.sync_all().unwrap();
    }
}

/// Each name of a file has its own entry in the archive, also one that the kernel has not looked up.
#[test]
fn no_name_of_a_recalled_file_is_shown_as_released() {
    let Released { m, path, .. } = Released::new(true);
    let (other, second) = (m.mnt().join("other.txt"), m.mnt().join("step-2.txt"));
    fs::hard_link(&path, &other).unwrap();
    wait_until("all older ones are released", || state(&other) == "released" && state(&second) == "released");
    let m = m.remounted(true);
    let released = || m.archive.status().released;
    wait_until("the archive has found them", || released() == 3);
    let writer = File::options().write(true).open(&path).unwrap();
    writer.write_all_at(b"CHANGED", 9000).unwrap();
    // While it is open nothing else is released.
    wait_until("neither name is released", || released() == 1);
    drop(writer);
    assert!(fs::read(&other).unwrap()[9000..9007] == *b"CHANGED");
}

/// Programs that clean up may cut a file of the cache short. The object has the bytes.
#[test]
fn a_cache_that_was_cut_short_says_nothing_about_the_object() {
    let released = Released::new(false);
    let reader = released.reader();
    let decoded = File::options().write(true).open(released.decoded()).unwrap();
    decoded.set_len(1000).unwrap();
    // SAFETY: no memory is passed; the descriptor is open.
    let forgotten = unsafe { libc::posix_fadvise(reader.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(forgotten, 0);
    assert!(read_at(&reader, 0, 300_001) == released.bytes);
    let problems = released.m.archive.status().problems;
    assert!(problems.is_empty(), "{problems:?}");
    // Nor does it become the file.
    released.open_to_write().unwrap().set_len(300_000).unwrap();
    assert!(fs::read(&released.path).unwrap() == released.bytes[..300_000]);
}
