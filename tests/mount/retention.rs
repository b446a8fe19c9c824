//! The policy of `stepfs.toml` in a mount: it works by itself, and the kernel and open handles see its removals as an
//! `rm`.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::support::{Mounted, attribute, c, errno, state, wait_until};
use stepfs::archive::GcReport;
use stepfs::store::Store;

const PIN: &str = "user.stepfs.pin";

/// Text that compresses and is long enough to be released.
pub(super) fn text(seed: u64) -> Vec<u8> {
    (0..).flat_map(|i: usize| format!("line {i} of {seed}\n").into_bytes()).take(100_001).collect()
}

/// A mount of a new store with these rules.
fn mounted(passthrough: bool, rules: &str) -> Mounted {
    let dir = tempfile::tempdir().unwrap();
    drop(Store::open(&dir.path().join("store")).unwrap());
    let settings = dir.path().join("store/stepfs.toml");
    fs::write(&settings, fs::read_to_string(&settings).unwrap() + rules).unwrap();
    Mounted::on(dir, passthrough)
}

fn rule(glob: &str, keep: &str) -> String {
    format!("\n[[retention]]\nglob = {glob:?}\n{keep}\n")
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Asks for the policy, as `stepfs gc` does, and waits for it.
fn gc(m: &Mounted) -> GcReport {
    let report = || -> GcReport { serde_json::from_str(&attribute(&m.mnt(), "user.stepfs.gc").unwrap()).unwrap() };
    let asked = report().asked;
    let point = c(&m.mnt());
    // SAFETY: all strings end with NUL, the value has its length.
    let set = unsafe { libc::setxattr(point.as_ptr(), c"user.stepfs.gc".as_ptr(), c"1".as_ptr().cast(), 1, 0) };
    assert_eq!(set, 0);
    wait_until("the policy was applied", || report().done > asked);
    report()
}

/// Pins something by its file in the store.
fn pin(m: &Mounted, path: &str) {
    xattr::set(m.tree().join(path), PIN, b"1").unwrap();
}

both! {
    fn old_files_go_by_themselves(passthrough) {
        let m = mounted(passthrough, &rule("run/step_*.txt", "keep_last = 2\nkeep_every = 4"));
        let dir = m.mnt().join("run");
        fs::create_dir(&dir).unwrap();
        for step in 1..=7 {
            fs::write(dir.join(format!("step_{step}.txt")), text(step)).unwrap();
            // One after the other, as training writes them.
            wait_until("it is durable", || state(&dir.join(format!("step_{step}.txt"))) != "staged");
        }
        fs::write(dir.join("log.txt"), "x").unwrap();
        wait_until("the policy was applied", || names(&dir) == ["log.txt", "step_4.txt", "step_6.txt", "step_7.txt"]);
        assert_eq!(errno(fs::metadata(dir.join("step_1.txt"))), libc::ENOENT);
        for step in [4, 6, 7] {
            assert!(fs::read(dir.join(format!("step_{step}.txt"))).unwrap() == text(step), "{step}");
        }
        assert_eq!(names(&m.tree().join("run")), names(&dir));
        assert_eq!(gc(&m).removed, 0);
        assert_eq!(m.archive.status().failed, [""; 0]);
        // And it is still so after a remount.
        let m = Mounted::on(m.unmount_keeping(), passthrough);
        assert_eq!(names(&m.mnt().join("run")).len(), 4);
    }

    fn the_kernel_forgets_the_name_at_once(passthrough) {
        // A separate thread tells the kernel, and on a busy machine it may be late. One time in time is enough, since
        // without the thread no time would be.
        let in_time = (0..10).any(|_| {
            let m = mounted(passthrough, &rule("step_*", "keep_last = 1"));
            let old = m.mnt().join("step_1");
            fs::write(&old, "old").unwrap();
            pin(&m, "step_1");
            fs::write(m.mnt().join("step_2"), "new").unwrap();
            assert_eq!(gc(&m).removed, 0);
            // The kernel looks it up and may believe it for a second.
            let started = Instant::now();
            assert_eq!(fs::read(&old).unwrap(), b"old");
            xattr::remove(m.tree().join("step_1"), PIN).unwrap();
            // The housekeeper may be at work just now, and remove the file before it is asked to.
            gc(&m);
            assert!(!m.tree().join("step_1").exists());
            wait_until("the kernel forgot it", || fs::metadata(&old).is_err());
            assert_eq!(errno(fs::metadata(&old)), libc::ENOENT);
            let in_time = started.elapsed() < Duration::from_millis(900);
            fs::write(&old, "again").unwrap();
            in_time
        });
        assert!(in_time, "nobody told the kernel");
    }

    fn whoever_has_it_open_keeps_it(passthrough) {
        let m = mounted(passthrough, &rule("checkpoint-*", "keep_last = 1"));
        let write = |step: u64| {
            fs::create_dir(m.mnt().join(format!("checkpoint-{step}"))).unwrap();
            for name in ["model.txt", "optimizer.txt"] {
                fs::write(m.mnt().join(format!("checkpoint-{step}/{name}")), text(step)).unwrap();
            }
        };
        write(1);
        // One pinned file keeps all of its checkpoint; the other is released all the same.
        pin(&m, "checkpoint-1/optimizer.txt");
        write(2);
        wait_until("it is released", || state(&m.mnt().join("checkpoint-1/model.txt")) == "released");
        let model = m.mnt().join("checkpoint-1/model.txt");
        let (mut released, mut beside) = (File::open(&model).unwrap(), File::open(m.mnt().join("checkpoint-2/model.txt")).unwrap());
        let inside = File::open(m.mnt().join("checkpoint-1")).unwrap();
        xattr::remove(m.tree().join("checkpoint-1/optimizer.txt"), PIN).unwrap();
        // The housekeeper may be at work just now, and remove it before it is asked to.
        gc(&m);
        assert_eq!(names(&m.mnt()), ["checkpoint-2"]);
        wait_until("the kernel was told", || errno(fs::metadata(&model)) == libc::ENOENT);
        let mut bytes = Vec::new();
        released.read_to_end(&mut bytes).unwrap();
        assert!(bytes == text(1));
        assert!(inside.metadata().unwrap().file_type().is_dir());
        bytes.clear();
        beside.read_to_end(&mut bytes).unwrap();
        assert!(bytes == text(2));
        // The name is free again.
        drop((released, inside));
        write(1);
        assert!(fs::read(&model).unwrap() == text(1));
    }

    fn what_is_open_for_writing_stays(passthrough) {
        let m = mounted(passthrough, &rule("step_*", "keep_last = 1"));
        for step in 1..=3 {
            let path = m.mnt().join(format!("step_{step}"));
            let mut file = File::create(&path).unwrap();
            file.write_all(b"a state").unwrap();
            if step == 1 {
                std::mem::forget(file.try_clone().unwrap());
            }
            drop(file);
        }
        wait_until("2 went", || names(&m.mnt()) == ["step_1", "step_3"]);
        assert_eq!(gc(&m).removed, 0);
        assert_eq!(names(&m.mnt()), ["step_1", "step_3"]);
        let closed = Instant::now();
        close_forgotten(&m.mnt().join("step_1"));
        wait_until("1 is closed and goes", || names(&m.mnt()) == ["step_3"]);
        // Not at the next look a minute later: a close is news, also of a resident file.
        assert!(closed.elapsed() < Duration::from_secs(30));
    }

    fn versions_of_several_writers(passthrough) {
        let m = mounted(passthrough, &rule("ckpt/version-*", "keep_checkpoint_max = 2"));
        let root = m.mnt().join("ckpt");
        fs::create_dir(&root).unwrap();
        let path = |version: u64, shard: u64| -> PathBuf {
            root.join(format!("version-{version}/variables-{shard}-of-2.ckpt"))
        };
        std::thread::scope(|scope| {
            for shard in 0..2 {
                let path = &path;
                scope.spawn(move || {
                    for version in (100..=1000).step_by(100) {
                        let path = path(version, shard);
                        let _ = fs::create_dir(path.parent().unwrap());
                        fs::write(&path, text(version + shard)).unwrap();
                        // One of them is slower.
                        std::thread::sleep(Duration::from_millis(5 + 20 * shard));
                    }
                });
            }
        });
        wait_until("two are left", || names(&root) == ["version-1000", "version-900"]);
        for version in [900, 1000] {
            for shard in 0..2 {
                assert!(fs::read(path(version, shard)).unwrap() == text(version + shard));
            }
        }
        // One shard of the next: it does not count, and causes no removal.
        fs::create_dir(root.join("version-1100")).unwrap();
        fs::write(path(1100, 1), text(1)).unwrap();
        wait_until("it is durable", || state(&path(1100, 1)) != "staged");
        assert_eq!(gc(&m).removed, 0);
        assert_eq!(names(&root).len(), 3);
        fs::write(path(1100, 0), text(1)).unwrap();
        wait_until("it counts", || names(&root) == ["version-1000", "version-1100"]);
    }

    fn pinned_and_newest_stay(passthrough) {
        let m = mounted(passthrough, &rule("**/step_*", "keep_for = \"0s\""));
        for run in ["a", "b"] {
            fs::create_dir(m.mnt().join(run)).unwrap();
            pin(&m, run);
            for step in 1..=4 {
                fs::write(m.mnt().join(run).join(format!("step_{step}")), "x").unwrap();
            }
        }
        assert_eq!(gc(&m).removed, 0);
        pin(&m, "a/step_2");
        xattr::remove(m.tree().join("a"), PIN).unwrap();
        gc(&m);
        assert_eq!(names(&m.mnt().join("a")), ["step_2", "step_4"]);
        assert_eq!(names(&m.mnt().join("b")).len(), 4);
    }
}

/// Closes this process's descriptor of the file.
fn close_forgotten(path: &Path) {
    for entry in fs::read_dir("/proc/self/fd").unwrap() {
        let entry = entry.unwrap();
        if fs::read_link(entry.path()).is_ok_and(|target| target == path) {
            let number = entry.file_name().into_string().unwrap().parse().unwrap();
            // SAFETY: the descriptor was forgotten on purpose; nobody else uses it.
            unsafe { libc::close(number) };
        }
    }
}
