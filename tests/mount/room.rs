//! A disk below the reserve: calls wait while the archive is at work, and only as long. `tests/real/faults/test_room.py` fills
//! real disks.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::retention::text;
use super::support::{Mounted, state, wait_until};
use stepfs::archive::Waits;
use stepfs::store::Store;
use stepfs::store::durable::{CrashPoint, Device, Disk, Io};

/// A failing test ends after this. Longer than a test takes on a busy machine.
const LONG: Duration = Duration::from_secs(110);
/// Logs end below this, and never wait for the sake of the reserve.
const LOGS: u64 = 64 << 20;

/// The disk, to which no object is written while it is shut. So the archive is at work, and frees nothing.
#[derive(Debug, Default)]
struct Gate {
    shut: AtomicBool,
    waits: AtomicBool,
}

impl Device for Gate {
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64, at: CrashPoint) -> io::Result<usize> {
        let began = Instant::now();
        while at == CrashPoint::ObjectWritten && self.shut.load(Ordering::SeqCst) && began.elapsed() < LONG {
            self.waits.store(true, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(5));
        }
        Disk.write_at(file, bytes, offset, at)
    }
}

/// A mount whose disk has less room than the reserve, and whose archive is at work until the gate opens.
fn at_work(passthrough: bool) -> (Mounted, Arc<Gate>) {
    let dir = tempfile::tempdir().unwrap();
    drop(Store::open(&dir.path().join("store")).unwrap());
    let settings = dir.path().join("store/stepfs.toml");
    let toml = fs::read_to_string(&settings).unwrap();
    fs::write(&settings, toml.replace("# reserve = \"20 GB\"", "reserve = \"8000000 GB\"")).unwrap();
    let gate = Arc::new(Gate { shut: true.into(), waits: false.into() });
    let m = Mounted::with_io(dir, &Io::new(Arc::clone(&gate) as _), passthrough);
    (1..4).for_each(|step| fs::write(path(&m, step), text(step)).unwrap());
    wait_until("the archive is at work", || gate.waits.load(Ordering::SeqCst));
    (m, gate)
}

fn path(m: &Mounted, step: u64) -> PathBuf {
    m.mnt().join(format!("step-{step}.txt"))
}

fn waits(m: &Mounted) -> Waits {
    m.archive.status().waits
}

/// A program that writes 4 MiB behind the length of a log.
fn writer(path: &Path) -> Child {
    let of = format!("of={}", path.display());
    let words = ["if=/dev/zero", &of, "bs=1M", "count=4", "seek=64", "conv=notrunc"];
    Command::new("dd").args(words).stderr(Stdio::null()).spawn().unwrap()
}

both! {
    fn a_program_waits_and_others_go_on(passthrough) {
        let (m, gate) = at_work(passthrough);
        let mut program = writer(&path(&m, 4));
        wait_until("it waits", || waits(&m).waiting == 1);
        let began = Instant::now();
        assert_eq!(fs::read_dir(m.mnt()).unwrap().count(), 4);
        assert!(fs::read(path(&m, 3)).unwrap() == text(3));
        fs::write(m.mnt().join("log"), text(9)).unwrap();
        fs::rename(m.mnt().join("log"), m.mnt().join("train.log")).unwrap();
        File::open(m.mnt().join("train.log")).unwrap().sync_all().unwrap();
        assert!(began.elapsed() < LONG && program.try_wait().unwrap().is_none());
        assert_eq!((waits(&m).waiting, waits(&m).waited), (1, 0));
        gate.shut.store(false, Ordering::SeqCst);
        assert!(program.wait().unwrap().success());
        assert_eq!(path(&m, 4).metadata().unwrap().len(), LOGS + (4 << 20));
        wait_until("the wait is told", || waits(&m).waited == 1);
        let told = waits(&m);
        assert!(told.waiting == 0 && told.longest_ms > 0 && told.longest_ms == told.total_ms, "{told:?}");
        wait_until("it is released", || state(&path(&m, 1)) == "released");
    }

    fn a_killed_program_waits_no_longer(passthrough) {
        let (m, gate) = at_work(passthrough);
        let mut program = writer(&path(&m, 4));
        wait_until("it waits", || waits(&m).waiting == 1);
        program.kill().unwrap();
        assert!(!program.wait().unwrap().success());
        wait_until("nobody waits", || waits(&m).waiting == 0);
        // Nothing was freed by then.
        assert!(state(&path(&m, 1)) != "released" && gate.shut.load(Ordering::SeqCst));
        let mut next = writer(&path(&m, 4));
        wait_until("the next one waits", || waits(&m).waiting == 1);
        gate.shut.store(false, Ordering::SeqCst);
        assert!(next.wait().unwrap().success());
    }

    fn many_calls_wait_and_none_needs_another(passthrough) {
        // More of them than there are threads for any work.
        const MANY: u64 = 40;
        let (m, gate) = at_work(passthrough);
        let mut programs: Vec<Child> = (0..MANY).map(|step| writer(&path(&m, 100 + step))).collect();
        wait_until("all wait", || waits(&m).waiting == MANY);
        assert!(fs::read(path(&m, 3)).unwrap() == text(3));
        assert_eq!(fs::read_dir(m.mnt()).unwrap().count() as u64, 3 + MANY);
        gate.shut.store(false, Ordering::SeqCst);
        for program in &mut programs {
            assert!(program.wait().unwrap().success());
        }
        wait_until("all waits are told", || waits(&m).waited == MANY && waits(&m).waiting == 0);
    }

    fn allocations_and_copies_wait_too(passthrough) {
        let (m, gate) = at_work(passthrough);
        let to = File::create(path(&m, 4)).unwrap();
        let from = File::open(path(&m, 3)).unwrap();
        std::thread::scope(|scope| {
            let allocated = scope.spawn(|| {
                // SAFETY: a call on an open file.
                unsafe { libc::posix_fallocate(to.as_raw_fd(), 0, LOGS as i64 + 4096) }
            });
            wait_until("the allocation waits", || waits(&m).waiting == 1);
            let copied = scope.spawn(|| {
                let (mut at, mut to_at) = (0, LOGS as i64 + 4096);
                // SAFETY: both files are open, and both places live until the call returns.
                unsafe { libc::copy_file_range(from.as_raw_fd(), &mut at, to.as_raw_fd(), &mut to_at, 100_001, 0) }
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(!allocated.is_finished() && !copied.is_finished());
            gate.shut.store(false, Ordering::SeqCst);
            assert_eq!((allocated.join().unwrap(), copied.join().unwrap()), (0, 100_001));
        });
    }

    fn a_forced_end_of_the_mount_ends_the_wait(passthrough) {
        let (m, gate) = at_work(passthrough);
        let mut program = writer(&path(&m, 4));
        wait_until("it waits", || waits(&m).waiting == 1);
        m.cut_off(|| {
            assert!(!program.wait().unwrap().success());
            gate.shut.store(false, Ordering::SeqCst);
        });
    }
}

/// Once nothing is at work, the reserve is for programs.
#[test]
fn nobody_waits_for_an_archive_that_is_at_rest() {
    let (m, gate) = at_work(true);
    gate.shut.store(false, Ordering::SeqCst);
    wait_until("it is released", || state(&path(&m, 2)) == "released");
    let file = File::create(path(&m, 4)).unwrap();
    let began = Instant::now();
    for at in 0..400 {
        file.write_all_at(&[1; 64 << 10], LOGS + (at << 16)).unwrap();
    }
    // Half a pause for each would take longer.
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}
