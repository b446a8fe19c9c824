//! `trash_for`: removed files stay for a while, whole and readable, and then go.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use super::retention::text;
use super::series::{Dtype, Random, Tensor, safetensors, train};
use super::support::{Mounted, state, wait_until};
use stepfs::store::{Store, TRASH};

/// A new store whose removed files stay this long.
pub(super) fn store(trash_for: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    drop(Store::open(&dir.path().join("store")).unwrap());
    let settings = dir.path().join("store/stepfs.toml");
    let text = fs::read_to_string(&settings).unwrap();
    let changed = text.replace("# trash_for = \"1d\"", &format!("trash_for = {trash_for:?}"));
    assert_ne!(text, changed);
    fs::write(&settings, changed).unwrap();
    dir
}

fn mounted(passthrough: bool, trash_for: &str) -> Mounted {
    Mounted::on(store(trash_for), passthrough)
}

/// The files in the trash: the path after the minute, and the place.
fn trashed(m: &Mounted) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    let mut rest = vec![m.mnt().join(TRASH)];
    while let Some(directory) = rest.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                rest.push(path);
                continue;
            }
            let parts = path.strip_prefix(m.mnt()).unwrap().iter().skip(3).collect::<PathBuf>();
            found.push((parts.to_str().unwrap().to_string(), path));
        }
    }
    found.sort();
    found
}

fn names(m: &Mounted) -> Vec<String> {
    trashed(m).into_iter().map(|(name, _)| name).collect()
}

both! {
    fn removed_files_can_be_read_and_brought_back(passthrough) {
        let m = mounted(passthrough, "1h");
        let run = m.mnt().join("run");
        fs::create_dir(&run).unwrap();
        for step in 1..=3 {
            fs::write(run.join(format!("step_{step}.txt")), text(step)).unwrap();
        }
        wait_until("it is released", || state(&run.join("step_1.txt")) == "released");
        // As `rm -r` and shutil.rmtree do, a released file and the newest among them.
        fs::remove_dir_all(&run).unwrap();
        assert!(!run.exists());
        let found = trashed(&m);
        assert_eq!(names(&m), ["run/step_1.txt", "run/step_2.txt", "run/step_3.txt"]);
        for ((_, path), step) in found.iter().zip(1..) {
            assert!(fs::read(path).unwrap() == text(step), "{step}");
        }
        let status = m.archive.status();
        assert_eq!((status.trash_files, status.trash_bytes), (3, 300_003));
        // Back, by one rename.
        fs::create_dir(&run).unwrap();
        fs::rename(&found[0].1, run.join("step_1.txt")).unwrap();
        assert!(fs::read(run.join("step_1.txt")).unwrap() == text(1));
        // After a remount as well.
        let m = Mounted::on(m.unmount_keeping(), passthrough);
        assert_eq!(names(&m), ["run/step_2.txt", "run/step_3.txt"]);
        assert!(fs::read(m.mnt().join("run/step_1.txt")).unwrap() == text(1));
        assert!(fs::read(&trashed(&m)[1].1).unwrap() == text(3));
    }

    fn a_removal_in_the_trash_is_one(passthrough) {
        let m = mounted(passthrough, "1h");
        fs::write(m.mnt().join("a.txt"), text(1)).unwrap();
        fs::remove_file(m.mnt().join("a.txt")).unwrap();
        assert_eq!(names(&m), ["a.txt"]);
        fs::remove_dir_all(m.mnt().join(TRASH)).unwrap();
        assert_eq!(names(&m), [""; 0]);
        wait_until("nothing is left", || m.archive.status().files == 0);
        // And the trash is made again.
        fs::write(m.mnt().join("b.txt"), text(2)).unwrap();
        fs::remove_file(m.mnt().join("b.txt")).unwrap();
        assert_eq!(names(&m), ["b.txt"]);
    }

    fn only_the_last_name_of_a_file_with_bytes_goes_there(passthrough) {
        let m = mounted(passthrough, "1h");
        let at = |name: &str| m.mnt().join(name);
        fs::write(at("empty"), "").unwrap();
        std::os::unix::fs::symlink("a.txt", at("link")).unwrap();
        fs::write(at("a.txt"), text(1)).unwrap();
        fs::hard_link(at("a.txt"), at("b.txt")).unwrap();
        fs::write(at("c.txt"), text(2)).unwrap();
        fs::write(at("d.txt"), text(3)).unwrap();
        for name in ["empty", "link", "a.txt"] {
            fs::remove_file(at(name)).unwrap();
        }
        // Neither does a file that another one replaces.
        fs::rename(at("d.txt"), at("c.txt")).unwrap();
        assert_eq!(names(&m), [""; 0]);
        assert!(fs::read(at("b.txt")).unwrap() == text(1) && fs::read(at("c.txt")).unwrap() == text(3));
        fs::remove_file(at("b.txt")).unwrap();
        assert_eq!(names(&m), ["b.txt"]);
    }

    fn files_of_one_name_do_not_replace_each_other(passthrough) {
        let m = mounted(passthrough, "1h");
        let at = m.mnt().join("ckpt.pt");
        for seed in 1..=3 {
            fs::write(&at, text(seed)).unwrap();
            fs::remove_file(&at).unwrap();
        }
        let found: Vec<Vec<u8>> = trashed(&m).iter().map(|(_, path)| fs::read(path).unwrap()).collect();
        assert!((1..=3).all(|seed| found.contains(&text(seed))));
    }

    fn a_program_that_has_the_file_open_goes_on(passthrough) {
        let m = mounted(passthrough, "1h");
        let at = m.mnt().join("log.txt");
        let mut writer = File::create(&at).unwrap();
        writer.write_all(b"before ").unwrap();
        let mut reader = File::open(&at).unwrap();
        fs::remove_file(&at).unwrap();
        assert!(!at.exists());
        writer.write_all(b"after").unwrap();
        writer.sync_all().unwrap();
        let mut read = String::new();
        reader.read_to_string(&mut read).unwrap();
        assert_eq!(read, "before after");
        drop((writer, reader));
        assert_eq!(fs::read_to_string(&trashed(&m)[0].1).unwrap(), "before after");
        // It is archived like any other closed file.
        wait_until("nothing is open", || m.archive.queue().open == 0);
    }

    fn a_removed_file_loses_nothing_that_its_former_place_promised(passthrough) {
        let m = mounted(passthrough, "1h");
        let mut random = Random(5);
        let mut model = vec![Tensor::new("w.weight", Dtype::F32, &[256, 256], &mut random)];
        // By the first rule of a new store.
        fs::create_dir(m.mnt().join("final")).unwrap();
        let mut written = Vec::new();
        for step in 1..=3 {
            train(&mut model, 1e-3, &mut random);
            written.push(safetensors(&model));
            let path = m.mnt().join(format!("final/step_{step}.safetensors"));
            fs::write(&path, &written[step - 1]).unwrap();
            wait_until("it is durable", || state(&path) == "sealed");
            fs::remove_file(&path).unwrap();
        }
        // Under the default profile, each would be a newer state of the one before.
        wait_until("nothing is left to do", || m.archive.queue().queued == 0);
        for ((_, path), bytes) in trashed(&m).iter().zip(&written) {
            assert_ne!(state(path), "released");
            assert!(fs::read(path).unwrap() == *bytes);
        }
        assert_eq!(m.archive.status().runs, [], "the trash is no run");
    }

    fn files_go_once_their_time_is_over(passthrough) {
        let m = mounted(passthrough, "2s");
        for name in ["a.txt", "kept.txt"] {
            fs::write(m.mnt().join(name), text(1)).unwrap();
            fs::remove_file(m.mnt().join(name)).unwrap();
        }
        let kept = trashed(&m).into_iter().find(|(name, _)| name == "kept.txt").unwrap().1;
        xattr::set(m.tree().join(kept.strip_prefix(m.mnt()).unwrap()), "user.stepfs.pin", b"1").unwrap();
        wait_until("the file is gone", || names(&m) == ["kept.txt"]);
        assert!(fs::read(&kept).unwrap() == text(1));
        xattr::remove(m.tree().join(kept.strip_prefix(m.mnt()).unwrap()), "user.stepfs.pin").unwrap();
        wait_until("the trash itself is gone", || !m.tree().join(TRASH).exists());
        wait_until("nothing is left", || m.archive.status().files == 0);
    }

    fn a_link_in_place_of_the_trash_leads_nowhere(passthrough) {
        let m = mounted(passthrough, "1h");
        fs::create_dir(m.mnt().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("elsewhere", m.mnt().join(TRASH)).unwrap();
        fs::write(m.mnt().join("a.txt"), text(1)).unwrap();
        // The file goes all the same: its room may be needed.
        fs::remove_file(m.mnt().join("a.txt")).unwrap();
        assert_eq!(fs::read_dir(m.mnt().join("elsewhere")).unwrap().count(), 0);
        assert!(!m.tree().join("a.txt").exists());
    }
}

/// A save needs the room more than the trash does.
#[test]
fn a_disk_below_the_reserve_has_no_trash() {
    let dir = store("1h");
    let m = Mounted::on(dir, true);
    fs::write(m.mnt().join("a.txt"), text(1)).unwrap();
    fs::remove_file(m.mnt().join("a.txt")).unwrap();
    assert_eq!(names(&m), ["a.txt"]);
    let dir = m.unmount_keeping();
    let settings = dir.path().join("store/stepfs.toml");
    let text_of = fs::read_to_string(&settings).unwrap();
    fs::write(&settings, text_of.replace("# reserve = \"20 GB\"", "reserve = \"8000000 GB\"")).unwrap();
    let m = Mounted::on(dir, true);
    wait_until("the trash is empty", || names(&m).is_empty() && m.archive.status().trash_files == 0);
    fs::write(m.mnt().join("b.txt"), text(2)).unwrap();
    fs::remove_file(m.mnt().join("b.txt")).unwrap();
    assert_eq!(names(&m), [""; 0]);
}

/// Rules and `stepfs latest` see the files of runs, not those of the trash.
#[test]
fn a_rule_for_all_files_leaves_the_trash_alone() {
    let m = mounted(true, "1h");
    fs::write(m.mnt().join("step_1.txt"), text(1)).unwrap();
    fs::write(m.mnt().join("step_2.txt"), text(2)).unwrap();
    wait_until("it is released", || state(&m.mnt().join("step_1.txt")) == "released");
    fs::remove_file(m.mnt().join("step_1.txt")).unwrap();
    let dir = m.unmount_keeping();
    let settings = dir.path().join("store/stepfs.toml");
    let rule = "\n[[retention]]\nglob = \"**/*.txt\"\nkeep_last = 1\n";
    fs::write(&settings, fs::read_to_string(&settings).unwrap() + rule).unwrap();
    let m = Mounted::on(dir, true);
    fs::write(m.mnt().join("step_3.txt"), text(3)).unwrap();
    wait_until("the rule was applied", || !m.mnt().join("step_2.txt").exists());
    // A rule removes for good.
    assert_eq!(names(&m), ["step_1.txt"]);
    assert!(Path::new(&trashed(&m)[0].1).exists());
}
