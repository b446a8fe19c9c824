//! Profiles that are set through a mount, and restores that it counts.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::series::{Dtype, Random, Tensor, safetensors, train};
use super::support::{Mounted, attribute, errno, state, wait_until};
use stepfs::store::Store;

const PROFILE: &str = "user.stepfs.profile";

/// Nine restores are expected, and the first state is exact.
const EXPECTING: &str = "expected_restores = 9\n[[profile]]\nglob = \"step_1.*\"\nprofile = \"exact\"\n";

/// A run that saves states of 8 MiB through a mount.
struct Run {
    m: Mounted,
    paths: Vec<PathBuf>,
    model: Vec<Tensor>,
    random: Random,
}

impl Run {
    /// A mount of a store with these settings. `count` states were saved and all but the newest released.
    fn new(passthrough: bool, settings: &str, count: u64) -> Run {
        Run::with_cache(passthrough, settings, count, 1024)
    }

    /// The same with so many MiB for decoded files.
    fn with_cache(passthrough: bool, settings: &str, count: u64, cache_mib: u64) -> Run {
        let dir = tempfile::tempdir().unwrap();
        drop(Store::open(&dir.path().join("store")).unwrap());
        let path = dir.path().join("store/stepfs.toml");
        let text = fs::read_to_string(&path).unwrap();
        let text = text.replacen("cache_mib = 10240", &format!("cache_mib = {cache_mib}"), 1);
        fs::write(&path, text.replacen("[[profile]]", &format!("{settings}\n[[profile]]"), 1)).unwrap();
        let mut random = Random(3);
        let model = vec![Tensor::new("w.weight", Dtype::F32, &[1024, 2048], &mut random)];
        let mut run = Run { m: Mounted::on(dir, passthrough), paths: Vec::new(), model, random };
        (0..count).for_each(|_| run.save());
        let (_, older) = run.paths.split_last().unwrap();
        wait_until("the older ones are released", || older.iter().all(|path| state(path) == "released"));
        run
    }

    /// The next state is saved in this way.
    fn save_by(&mut self, save: impl FnOnce(&Path, &[u8])) {
        train(&mut self.model, 1e-3, &mut self.random);
        let path = self.m.mnt().join(format!("step_{}.safetensors", self.paths.len() + 1));
        save(&path, &safetensors(&self.model));
        wait_until("it is durable", || state(&path) == "sealed");
        self.paths.push(path);
    }

    fn save(&mut self) {
        self.save_by(|path, bytes| fs::write(path, bytes).unwrap());
    }

    fn restores(&self) -> u32 {
        restores(&self.m)
    }
}

/// Runs a command in a shell, which reads and writes in processes of its own.
fn shell(command: &str, path: &Path) {
    assert!(Command::new("sh").args(["-ec", command, "sh"]).arg(path).status().unwrap().success(), "{command}");
}

fn restores(m: &Mounted) -> u32 {
    m.archive.status().restored.iter().map(|lineage| lineage.restores).sum()
}

both! {
    fn reading_is_not_restoring(passthrough) {
        let mut run = Run::new(passthrough, EXPECTING, 4);
        // Other programs read and copy, also onto the name of the next state. Then another program saves.
        let old = run.paths[1].clone();
        for command in [
            "sha256sum $1 >/dev/null",
            "cp $1 ${1%/*}/step_9.safetensors",
            "cmp $1 ${1%/*}/step_9.safetensors",
        ] {
            shell(command, &old);
        }
        run.save();
        // This process reads a little of a file, a lossless one and the newest one.
        let part = |path: &Path| File::open(path).unwrap().read_exact_at(&mut [0; 1 << 20], 0).unwrap();
        (0..3).for_each(|_| part(&run.paths[2]));
        fs::read(&run.paths[0]).unwrap();
        fs::read(&run.paths[4]).unwrap();
        run.save();
        assert_eq!(run.restores(), 0);
        // This process reads, and another one saves that it has not started itself.
        fs::read(&old).unwrap();
        let outside = run.m.plain().join("next");
        run.save_by(|path, bytes| {
            fs::write(&outside, bytes).unwrap();
            shell(&format!("cp {} $1; true", outside.display()), path);
        });
        assert_eq!(run.restores(), 0);
    }

    fn a_process_that_loads_and_later_saves_is_a_restore(passthrough) {
        let mut run = Run::new(passthrough, EXPECTING, 5);
        // Five MiB of eight, by another thread than the one that saves.
        let old = run.paths[1].clone();
        let load = move || File::open(old).unwrap().read_exact_at(&mut vec![0; 5 << 20], 3 << 20).unwrap();
        std::thread::spawn(load).join().unwrap();
        assert_eq!(run.restores(), 0);
        run.save();
        assert_eq!((run.restores(), run.m.archive.status().restored[0].profile.as_str()), (1, "balanced"));
        run.save();
        assert_eq!(run.restores(), 1);
        // Somebody else has read it before, so the kernel and the cache have all of it. The save is a rename.
        shell("cat $1 >/dev/null", &run.paths[2]);
        fs::read(&run.paths[2]).unwrap();
        run.save_by(|path, bytes| {
            let part = path.with_extension("part");
            fs::write(&part, bytes).unwrap();
            fs::rename(part, path).unwrap();
        });
        assert_eq!(run.restores(), 2);
        // A process that this one has started saves.
        fs::read(&run.paths[3]).unwrap();
        let outside = run.m.plain().join("next");
        run.save_by(|path, bytes| {
            fs::write(&outside, bytes).unwrap();
            assert!(Command::new("cp").args([&outside, path]).status().unwrap().success());
        });
        assert_eq!(run.restores(), 3);
    }

    fn a_restore_counts_although_only_the_kernel_has_the_bytes(passthrough) {
        // One decoded file of 8 MiB fits, so the second takes the place of the first.
        let mut run = Run::with_cache(passthrough, EXPECTING, 5, 12);
        for at in [1, 2] {
            shell("cat $1 >/dev/null", &run.paths[at]);
        }
        wait_until("one is in the cache", || run.m.archive.status().cache_bytes == run.paths[1].metadata().unwrap().len());
        fs::read(&run.paths[1]).unwrap();
        run.save();
        assert_eq!(run.restores(), 1);
    }

    fn a_restore_just_before_the_end_is_remembered(passthrough) {
        let mut run = Run::new(passthrough, "", 4);
        fs::read(&run.paths[1]).unwrap();
        run.save();
        let m = Mounted::on(run.m.unmount_keeping(), passthrough);
        assert_eq!(restores(&m), 1);
    }

    fn profiles_are_set_as_attributes(passthrough) {
        let m = Mounted::new(passthrough);
        let (dir, file) = (m.mnt().join("run"), m.mnt().join("run/step_1.bin"));
        fs::create_dir(&dir).unwrap();
        fs::write(&file, [7; 70_000]).unwrap();
        let shown = |path: &std::path::Path| attribute(path, PROFILE);
        assert_eq!((shown(&file).as_deref(), shown(&dir)), (Some("balanced"), None));
        xattr::set(&dir, PROFILE, b"exact").unwrap();
        assert_eq!((shown(&file).as_deref(), shown(&dir).as_deref(), shown(&m.mnt())), (Some("exact"), Some("exact"), None));
        xattr::set(&file, PROFILE, b"compact").unwrap();
        assert_eq!((shown(&file).as_deref(), shown(&dir).as_deref()), (Some("compact"), Some("exact")));
        for wrong in [&b"best"[..], b"", b"Exact", b"exact\n", b"\xff"] {
            assert_eq!(errno(xattr::set(&file, PROFILE, wrong)), libc::EINVAL);
        }
        assert_eq!(shown(&file).as_deref(), Some("compact"));
        assert_eq!(xattr::list(&file).unwrap().count(), 0);
        // It goes with the file, and stays after an unmount.
        let moved = m.mnt().join("step_1.bin");
        fs::rename(&file, &moved).unwrap();
        let m = Mounted::on(m.unmount_keeping(), passthrough);
        assert_eq!(attribute(&moved, PROFILE).as_deref(), Some("compact"));
        xattr::remove(&moved, PROFILE).unwrap();
        assert_eq!(attribute(&moved, PROFILE).as_deref(), Some("balanced"));
        assert_eq!(errno(xattr::remove(&moved, PROFILE)), libc::ENODATA);
        let link = m.mnt().join("link");
        std::os::unix::fs::symlink("step_1.bin", &link).unwrap();
        let (link, name) = (super::support::c(&link), super::support::c(std::path::Path::new(PROFILE)));
        // SAFETY: both strings end with NUL, the value has its length.
        let set = unsafe { libc::lsetxattr(link.as_ptr(), name.as_ptr(), c"exact".as_ptr().cast(), 5, 0) };
        assert_eq!(set, -1);
    }
}
