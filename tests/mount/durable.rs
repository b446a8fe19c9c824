//! Files that cannot be made durable, or do not exist any more. Needs root, ext4 and loop devices.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use super::support::{Mounted, attribute, errno, wait_until};
use stepfs::archive::{Archive, AtRest};
use stepfs::store::Store;
use stepfs::store::durable::{CrashPoint, Device, Disk, Io};

/// Part of what stepfs says of a file whose fsync failed.
const NOT_DURABLE: &str = "could not be made durable";

/// Whether stepfs has looked at a file, and says why it stays.
fn is_known(why: &str) -> bool {
    !why.is_empty() && !why.starts_with("stepfs ") && !why.starts_with("it is open")
}

/// A file system on a device with less room than it claims: writing pages loses the excess.
struct Small {
    dir: tempfile::TempDir,
}

impl Small {
    fn new(room: &str) -> Small {
        let small = Small { dir: tempfile::tempdir().unwrap() };
        let (below, image) = (small.dir.path().join("below"), small.dir.path().join("below/image"));
        fs::create_dir(&below).unwrap();
        fs::create_dir(small.root()).unwrap();
        run(Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={room}"), "tmpfs"]).arg(&below));
        File::create(&image).unwrap().set_len(300 << 20).unwrap();
        run(Command::new("mkfs.ext4").args(["-q", "-F", "-E", "nodiscard", "-O", "^has_journal"]).arg(&image));
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(small.root()));
        small
    }

    fn grow(&self) {
        run(Command::new("mount").args(["-o", "remount,size=200m"]).arg(self.dir.path().join("below")));
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }
}

fn run(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}: this test needs root and loop devices");
}

/// More bytes than a [`Small`] file system has room for, different in each page.
fn more_than_fits() -> Vec<u8> {
    (0..80u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

impl Drop for Small {
    fn drop(&mut self) {
        for name in ["mnt", "below"] {
            let _ = Command::new("umount").arg("-l").arg(self.dir.path().join(name)).status();
        }
    }
}

/// The disk, which fails once for some files.
#[derive(Debug, Default)]
struct Failing {
    /// Inode numbers of files whose fsync fails, and of files whose bytes cannot be sent to the device.
    fsync: Mutex<HashSet<u64>>,
    sending: Mutex<HashSet<u64>>,
    /// fsyncs of closed files.
    synced: Mutex<HashSet<u64>>,
}

fn fails_once(of: &Mutex<HashSet<u64>>, file: &File) -> std::io::Result<()> {
    match of.lock().unwrap().remove(&file.metadata()?.ino()) {
        true => Err(std::io::Error::from_raw_os_error(libc::EIO)),
        false => Ok(()),
    }
}

impl Device for Failing {
    fn begin_sync(&self, file: &File) -> std::io::Result<()> {
        fails_once(&self.sending, file).and_then(|()| Disk.begin_sync(file))
    }

    fn sync_file(&self, file: &File, at: CrashPoint) -> std::io::Result<()> {
        Disk.sync_file(file, at)?;
        self.synced.lock().unwrap().insert(file.metadata()?.ino());
        fails_once(&self.fsync, file)
    }
}

/// The device reports each failure once: the file that lost bytes is found among all that are made durable together, and nothing
/// that succeeds later makes it durable.
#[test]
fn of_many_files_the_one_that_is_not_durable_is_found() {
    let failing = Arc::new(Failing::default());
    let m = Mounted::with_io(tempfile::tempdir().unwrap(), &Io::new(Arc::clone(&failing) as _), true);
    let path = |n: usize| m.mnt().join(format!("{n}.json"));
    let why = |n: usize| attribute(&path(n), "user.stepfs.why").unwrap_or_default();
    // As the store knows them.
    let number = |n: usize| m.tree().join(format!("{n}.json")).metadata().unwrap().ino();
    let mut files: Vec<File> = (0..40).map(|n| File::create(path(n)).unwrap()).collect();
    failing.fsync.lock().unwrap().insert(number(7));
    failing.sending.lock().unwrap().insert(number(23));
    for file in &mut files {
        file.write_all(b"{}").unwrap();
    }
    drop(files);
    wait_until("all are looked at", || (0..40).all(|n| is_known(&why(n))));
    let lost: Vec<usize> = (0..40).filter(|n| why(*n).contains(NOT_DURABLE)).collect();
    assert_eq!(lost, [7, 23]);
    // Renamed, it is the same file.
    fs::rename(path(7), path(50)).unwrap();
    assert!(why(50).contains(NOT_DURABLE));
    // Opened again before it was durable: the program that wrote it is gone, and nobody else is told.
    fs::write(path(60), "first line").unwrap();
    let mut again = File::options().append(true).open(path(60)).unwrap();
    failing.fsync.lock().unwrap().insert(number(60));
    wait_until("what was closed is made durable", || failing.synced.lock().unwrap().contains(&number(60)));
    wait_until("it has failed", || m.archive.queue().queued == 0);
    again.write_all(b"second line").unwrap();
    drop(again);
    wait_until("it is looked at", || is_known(&why(60)));
    assert!(why(60).contains(NOT_DURABLE));
    // Saved again, all is well.
    fs::write(path(60), "first line, second line").unwrap();
    wait_until("it is durable", || why(60).starts_with("it is small"));
}

#[test]
fn what_did_not_reach_the_device_is_never_called_durable() {
    let small = Small::new("40m");
    let archive = Archive::open(Store::open(&small.root().join("store")).unwrap()).unwrap();
    archive.start(Arc::new(AtRest::of(archive.store())));
    let tree = archive.store().tree();
    let why = |name: &str| {
        let why = archive.attribute(Path::new(name), "why").unwrap_or_default();
        String::from_utf8(why).unwrap()
    };
    let sealed = |name: &str, write: &dyn Fn(&Path)| {
        archive.opened_for_writing(Path::new(name));
        write(&tree.join(name));
        archive.sealed(Path::new(name));
        wait_until("it is sealed", || is_known(&why(name)));
    };
    sealed("lost", &|path| fs::write(path, more_than_fits()).unwrap());
    assert!(why("lost").contains(NOT_DURABLE));
    // The device is well again, and so are the files from now on.
    small.grow();
    sealed("later", &|path| fs::write(path, "fits").unwrap());
    assert!(!why("later").contains(NOT_DURABLE));
    archive.stop();
}

/// The kernel tells the first caller, which is the program. It continues, and closes the file.
#[test]
fn what_a_program_was_told_is_not_durable_counts_for_stepfs_too() {
    let small = Small::new("40m");
    let m = Mounted::on(tempfile::tempdir_in(small.root()).unwrap(), true);
    let path = m.mnt().join("f");
    let file = File::create(&path).unwrap();
    file.write_all_at(&more_than_fits(), 0).unwrap();
    assert_ne!(errno(file.sync_all()), 0);
    // Until the kernel reports nothing more: that proves nothing.
    assert!((0..10).any(|_| errno(file.sync_all()) == 0));
    small.grow();
    drop(file);
    let why = || attribute(&path, "user.stepfs.why").unwrap_or_default();
    wait_until("it is sealed", || attribute(&path, "user.stepfs.state").as_deref() != Some("staged"));
    wait_until("it is said why it stays", || is_known(&why()));
    assert!(why().contains(NOT_DURABLE));
    // Saved again, it is a file like any other.
    fs::write(&path, "again").unwrap();
    wait_until("it is durable", || why().starts_with("it is small"));
    m.unmount();
}

/// A path through a directory that is a file now: retries must end.
#[test]
fn what_a_file_took_the_place_of_is_given_up() {
    let m = Mounted::new(true);
    fs::write(m.mnt().join("d"), "a file").unwrap();
    for name in ["d/f", "d/e/f", "none/f"] {
        m.archive.opened_for_writing(Path::new(name));
        m.archive.sealed(Path::new(name));
    }
    wait_until("nothing is left to be done", || m.archive.queue().queued == 0);
    // The existing files were not forgotten with it.
    let why = || attribute(&m.mnt().join("d"), "user.stepfs.why");
    wait_until("the file is sealed", || why().is_some_and(|why| why.starts_with("it is small")));
}
