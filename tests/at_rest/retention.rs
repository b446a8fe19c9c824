//! The policy of `stepfs.toml` on stores that are not mounted: removed files, kept files, and the state after a crash.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use stepfs::archive::{Archive, AtRest, Commit, FileId, GcReport, Namespace, Outcome};

use super::series::{Dtype, Random, Rest, Tensor, safetensors, states, until, work};

fn step(number: usize) -> String {
    format!("run/step_{number:05}.safetensors")
}

const PIN: &str = "user.stepfs.pin";

/// A store with these rules.
fn with(rules: &str) -> Rest {
    Rest::with(|text| format!("{text}\n{rules}"))
}

fn rule(glob: &str, keep: &str) -> String {
    format!("[[retention]]\nglob = {glob:?}\n{keep}\n")
}

/// `stepfs gc ARGS... STORE`: exit code and output.
fn gc(rest: &Rest, args: &[&str]) -> (i32, String) {
    let done = Command::new(env!("CARGO_BIN_EXE_stepfs")).arg("gc").args(args).arg(rest.root()).output().unwrap();
    let said = String::from_utf8(done.stdout).unwrap() + &String::from_utf8(done.stderr).unwrap();
    (done.status.code().unwrap(), said)
}

fn report(rest: &Rest, args: &[&str]) -> serde_json::Value {
    let (code, said) = gc(rest, &[&["--json"], args].concat());
    assert_eq!(code, 0, "{said}");
    serde_json::from_str(&said).unwrap()
}

/// Paths that a report removes, in its order.
fn going(report: &serde_json::Value) -> Vec<String> {
    let lines = report["checkpoints"].as_array().unwrap().iter();
    lines.filter(|line| line["verdict"] == "remove").map(|line| line["path"].as_str().unwrap().to_string()).collect()
}

/// Everything in a directory, by path and content.
fn all(root: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut rest = vec![root.to_path_buf()];
    while let Some(directory) = rest.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                rest.push(path.clone());
            }
            found.push((path.clone(), fs::read(&path).unwrap_or_default()));
        }
    }
    found.sort();
    found
}

/// Names in a directory of the tree.
fn names(rest: &Rest, directory: &str) -> Vec<String> {
    let entries = fs::read_dir(rest.path(directory)).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Shifts the times of all files in the tree.
fn older(rest: &Rest, path: &str, seconds: u64) {
    let path = rest.path(path);
    let modified = fs::metadata(&path).unwrap().modified().unwrap() - Duration::from_secs(seconds);
    File::open(path).unwrap().set_modified(modified).unwrap();
}

#[test]
fn what_a_run_names_as_its_best_stays() {
    let mut rest = with(&rule("run/checkpoint-*", "keep_last = 1"));
    let file = |at: usize, name: &str| format!("run/checkpoint-{at}/{name}");
    for (at, state) in states(5).into_iter().enumerate() {
        rest.write(&file(at, "model.safetensors"), &state);
        let says = r#"{"best_model_checkpoint": "/elsewhere/run/checkpoint-1"}"#;
        rest.write(&file(at, "trainer_state.json"), says.as_bytes());
    }
    std::os::unix::fs::symlink("checkpoint-2", rest.path("run/best")).unwrap();
    assert_eq!(going(&report(&rest, &["--dry-run"])), ["run/checkpoint-0", "run/checkpoint-3"]);
    let (_, words) = gc(&rest, &["--dry-run", "-v"]);
    assert!(words.contains("named as the best of its run"), "{words}");
    assert_eq!(going(&report(&rest, &[])), ["run/checkpoint-0", "run/checkpoint-3"]);
    // Another is the best now.
    let says = r#"{"best_model_checkpoint": "/elsewhere/run/checkpoint-4"}"#;
    rest.write(&file(4, "trainer_state.json"), says.as_bytes());
    fs::remove_file(rest.path("run/best")).unwrap();
    assert_eq!(going(&report(&rest, &[])), ["run/checkpoint-1", "run/checkpoint-2"]);
    assert_eq!(names(&rest, "run"), ["checkpoint-4"]);
}

#[test]
fn a_dry_run_says_what_gc_then_does() {
    let mut rest =
        with(&(rule("run/*.safetensors", "keep_last = 2\nkeep_every = 4") + &rule("nothing/*", "keep_last = 1")));
    for (at, state) in states(10).into_iter().enumerate() {
        rest.write(&step(at + 1), &state);
    }
    rest.write("run/notes.txt", b"not a checkpoint");
    rest.settle();
    // Settling applied the policy.
    let kept = [4, 8, 9, 10].map(step);
    assert_eq!(names(&rest, "run").len(), 5);
    for name in &kept[..3] {
        rest.faithful(name);
    }
    for (at, state) in states(12).into_iter().enumerate().skip(10) {
        rest.write(&step(at + 1), &state);
    }
    let before = all(rest.dir.path());
    let dry = report(&rest, &["--dry-run"]);
    assert_eq!(going(&dry), [step(9), step(10)]);
    assert_eq!(dry["matches_nothing"], serde_json::json!(["nothing/*"]));
    assert_eq!(all(rest.dir.path()), before, "nothing was changed");
    let (_, words) = gc(&rest, &["--dry-run", "-v"]);
    for part in ["nothing/*", "would go", "9 is no multiple of 4", "stays", "its step is a multiple of 4", "the newest"]
    {
        assert!(words.contains(part), "{part}: {words}");
    }

    let done = report(&rest, &[]);
    assert_eq!(going(&done), [step(9), step(10)]);
    assert!(done["stored_after"].as_u64() < done["stored_before"].as_u64(), "{done}");
    assert_eq!(
        names(&rest, "run"),
        [
            "notes.txt", "step_00004.safetensors", "step_00008.safetensors", "step_00011.safetensors",
            "step_00012.safetensors"
        ]
    );
    for name in [4, 8, 11].map(step) {
        rest.faithful(&name);
    }
    assert_eq!(fs::read(rest.path(&step(12))).unwrap(), rest.written[&step(12)]);
    // A second run has nothing to do.
    let before = all(&rest.root().join("tree"));
    assert_eq!(going(&report(&rest, &[])), [""; 0]);
    assert_eq!(all(&rest.root().join("tree")), before);
}

#[test]
fn without_rules_no_file_goes() {
    let mut rest = Rest::of(3);
    rest.write("a/checkpoint-1/x.bin", b"x");
    let before = names(&rest, "run");
    assert_eq!(going(&report(&rest, &["--dry-run"])), [""; 0]);
    assert_eq!(going(&report(&rest, &[])), [""; 0]);
    assert_eq!(names(&rest, "run"), before);
    assert!(rest.path("a/checkpoint-1/x.bin").exists());
}

#[test]
fn bad_rules_are_refused_before_anything_is_touched() {
    for (keys, word) in [
        ("keep_last = 0", "always stays"),
        ("keep_for = \"-1d\"", "-1d"),
        ("keep = 3", "unknown field"),
        ("", "keeps nothing"),
        ("keep_last = 99999999999999999999", "keep_last"),
    ] {
        let mut rest = Rest::with(|text| text + "\n" + &rule("*", keys));
        rest.write("step_1", b"1");
        rest.write("step_2", b"2");
        for args in [&["--dry-run"][..], &[]] {
            let (code, said) = gc(&rest, args);
            assert_eq!(code, 1, "{said}");
            assert!(said.contains(word) && said.contains("stepfs.toml"), "{keys}: {said}");
        }
        assert_eq!(names(&rest, ""), ["step_1", "step_2"]);
    }
}

#[test]
fn directories_go_as_a_whole_and_pinned_ones_stay() {
    let mut rest = with(&rule("*/checkpoint-*/", "keep_last = 1"));
    let states = states(6);
    for run in ["a", "b"] {
        for (at, state) in states.iter().enumerate() {
            rest.write(&format!("{run}/checkpoint-{}/model.safetensors", at * 10), state);
            rest.write(&format!("{run}/checkpoint-{}/deep/er/state.json", at * 10), b"{}");
            std::os::unix::fs::symlink("model.safetensors", rest.path(&format!("{run}/checkpoint-{}/last", at * 10)))
                .unwrap();
        }
    }
    rest.write("a/checkpoint-best/model.safetensors", &states[0]);
    rest.write("a/config.json", b"{}");
    // The directory, a file deep in it, and all of a run.
    xattr::set(rest.path("a/checkpoint-10"), PIN, b"1").unwrap();
    xattr::set(rest.path("a/checkpoint-30/deep/er/state.json"), PIN, b"").unwrap();
    let dry = report(&rest, &["--dry-run"]);
    assert_eq!(going(&dry).len(), 3 + 5);
    xattr::set(rest.path("b"), PIN, b"1").unwrap();
    let done = report(&rest, &[]);
    assert_eq!(going(&done), ["a/checkpoint-0", "a/checkpoint-20", "a/checkpoint-40"]);
    assert_eq!(
        names(&rest, "a"),
        ["checkpoint-10", "checkpoint-30", "checkpoint-50", "checkpoint-best", "config.json"]
    );
    assert_eq!(names(&rest, "b").len(), 6);
    xattr::remove(rest.path("b"), PIN).unwrap();
    assert_eq!(going(&report(&rest, &[])).len(), 5);
    assert_eq!(names(&rest, "b"), ["checkpoint-50"]);
    // Pinned ones stay as they were written, too.
    assert_eq!(fs::read(rest.path("a/checkpoint-10/model.safetensors")).unwrap(), states[1]);
    rest.faithful("a/checkpoint-30/model.safetensors");
    assert_eq!(fs::read(rest.path("b/checkpoint-50/model.safetensors")).unwrap(), states[5]);
}

/// Directories of a model and an optimizer each, under a rule for the optimizers' files and one for the directories.
fn with_optimizers(keep: &str, directories: &str) -> Rest {
    let mut rest =
        with(&(rule("run/checkpoint-*/optimizer.safetensors", keep) + &rule("run/checkpoint-*", directories)));
    for (at, state) in states(8).iter().enumerate() {
        for file in ["model", "optimizer"] {
            rest.write(&format!("run/checkpoint-{}/{file}.safetensors", at + 1), state);
        }
    }
    rest
}

#[test]
fn only_the_last_checkpoints_keep_their_optimizers_state() {
    let rest = with_optimizers("keep_last = 2", "keep_last = 5");
    let optimizer = |number: usize| format!("run/checkpoint-{number}/optimizer.safetensors");
    xattr::set(rest.path("run/checkpoint-5"), PIN, b"1").unwrap();
    let all = going(&report(&rest, &["--dry-run"]));
    // A file that goes with its directory is not named.
    assert_eq!(all, ["run/checkpoint-1", "run/checkpoint-2", "run/checkpoint-3", &optimizer(4), &optimizer(6)]);
    assert_eq!(going(&report(&rest, &[])), all);
    assert_eq!(names(&rest, "run").len(), 5);
    for (number, files) in [(4, 1), (5, 2), (6, 1), (7, 2), (8, 2)] {
        assert_eq!(names(&rest, &format!("run/checkpoint-{number}")).len(), files, "{number}");
        assert!(rest.path(&format!("run/checkpoint-{number}/model.safetensors")).exists());
    }
    assert_eq!(going(&report(&rest, &["--dry-run"])), [""; 0]);
}

#[test]
fn saves_that_died_do_not_take_the_optimizer_of_the_newest_whole_one() {
    for directories in [true, false] {
        let rest = with_optimizers("keep_last = 1", "keep_last = 8");
        if !directories {
            let settings = rest.root().join("stepfs.toml");
            let text = fs::read_to_string(&settings).unwrap();
            fs::write(&settings, &text[..text.rfind("[[retention]]").unwrap()]).unwrap();
        }
        // Three saves in a row died after the optimizer's file and before the model's.
        for number in 6..=8 {
            fs::remove_file(rest.path(&format!("run/checkpoint-{number}/model.safetensors"))).unwrap();
        }
        let gone = going(&report(&rest, &[]));
        let kept: Vec<usize> = (1..=8)
            .filter(|number| rest.path(&format!("run/checkpoint-{number}/optimizer.safetensors")).exists())
            .collect();
        assert_eq!((kept, gone.len()), (vec![5, 8], 6), "{directories}");
    }
}

#[test]
fn a_policy_that_wants_nothing_leaves_the_newest_of_each_series() {
    let mut rest = with(&rule("**", "keep_for = \"0s\""));
    for name in ["exp1", "exp2"] {
        for at in [9, 10, 11] {
            rest.write(&format!("{name}/step_{at}.bin"), b"x");
        }
        rest.write(&format!("{name}/last.bin"), b"x");
    }
    let done = report(&rest, &[]);
    assert_eq!(going(&done).len(), 4);
    for name in ["exp1", "exp2"] {
        assert_eq!(names(&rest, name), ["last.bin", "step_11.bin"]);
    }
}

#[test]
fn shards_are_one_checkpoint_and_versions_go_as_elasticdl_has_it() {
    let mut rest = with(&(rule("versions/version-*", "keep_checkpoint_max = 2") + &rule("flat/*", "keep_last = 1")));
    for version in [8, 9, 10, 11, 12] {
        for shard in 0..2 {
            // One shard of 12 is still to come, and one of 9 is missing for ever.
            if !matches!((version, shard), (12, 1) | (9, 0)) {
                rest.write(&format!("versions/version-{version}/variables-{shard}-of-2.ckpt"), b"model");
            }
        }
    }
    fs::create_dir(rest.path("versions/version-13")).unwrap();
    for at in 1..=3 {
        for shard in 1..=2 {
            if (at, shard) != (3, 2) {
                rest.write(&format!("flat/step_{at}-0000{shard}-of-00002.bin"), b"part");
            }
        }
    }
    let done = report(&rest, &[]);
    assert_eq!(going(&done), ["flat/step_1-*-of-00002.bin", "versions/version-8", "versions/version-9"]);
    assert_eq!(names(&rest, "versions"), ["version-10", "version-11", "version-12", "version-13"]);
    assert_eq!(names(&rest, "flat").len(), 3, "both of 2, one of 3");
    rest.write("versions/version-12/variables-1-of-2.ckpt", b"model");
    rest.write("flat/step_3-00002-of-00002.bin", b"part");
    report(&rest, &[]);
    assert_eq!(names(&rest, "versions"), ["version-11", "version-12", "version-13"]);
    assert_eq!(names(&rest, "flat"), ["step_3-00001-of-00002.bin", "step_3-00002-of-00002.bin"]);
}

#[test]
fn names_may_be_anything() {
    let rest = with(&rule("**/step*", "keep_last = 1"));
    let bytes = |name: &[u8]| rest.root().join("tree").join(OsStr::from_bytes(name));
    let time = |at: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + at);
    let write = |name: &[u8], at| {
        let path = bytes(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, b"x").unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(time(at)).unwrap();
    };
    for run in [&b"r\xff"[..], b"r\xfe", b"R\xff", "r\u{1b}[2J".as_bytes()] {
        for (at, step) in [(1, "1"), (2, "2"), (3, "99999999999999999999999"), (4, "99999999999999999999999999")] {
            write(&[run, b"/step_", step.as_bytes(), b".bin"].concat(), at);
        }
    }
    let (code, said) = gc(&rest, &["--dry-run", "-v"]);
    assert_eq!(code, 0, "{said}");
    assert!(!said.contains('\u{1b}'), "{said:?}");
    let done = report(&rest, &[]);
    assert_eq!(going(&done).len(), 12);
    for run in [&b"r\xff"[..], b"r\xfe", b"R\xff", "r\u{1b}[2J".as_bytes()] {
        let left: Vec<_> = fs::read_dir(bytes(run)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(
            left,
            ["step_99999999999999999999999999.bin"],
            "the largest numbers are equal, the last written stays"
        );
    }
}

/// Nobody serves the tree. Something happens just before the file of a given number is removed.
struct Meddler {
    rest: AtRest,
    archive: OnceLock<std::sync::Weak<Archive>>,
    count: AtomicUsize,
    what: fn(&Archive, &Path, usize) -> io::Result<()>,
}

impl Namespace for Meddler {
    fn idle(&self, _: &Path, _: FileId) -> Outcome {
        Outcome::Done
    }

    fn exclusively(&self, path: &Path, expect: FileId, commit: &mut Commit<'_>) -> io::Result<Outcome> {
        self.rest.exclusively(path, expect, commit)
    }

    fn remove(&self, path: &Path, expect: FileId, still: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<Outcome> {
        let archive = self.archive.get().and_then(std::sync::Weak::upgrade).unwrap();
        (self.what)(&archive, path, self.count.fetch_add(1, Ordering::SeqCst))?;
        self.rest.remove(path, expect, still)
    }

    fn remove_directory(&self, path: &Path, expect: FileId) -> io::Result<Outcome> {
        self.rest.remove_directory(path, expect)
    }
}

/// Runs the policy while somebody interferes.
fn meddle(rest: &Rest, what: fn(&Archive, &Path, usize) -> io::Result<()>) -> GcReport {
    let archive = rest.open();
    let count = AtomicUsize::new(0);
    let meddler = Arc::new(Meddler { rest: AtRest::of(archive.store()), archive: OnceLock::new(), count, what });
    meddler.archive.set(Arc::downgrade(&archive)).unwrap();
    let ticket = archive.ask_gc();
    archive.start(meddler);
    until(|| archive.gc_report().done >= ticket);
    archive.stop();
    archive.gc_report()
}

fn two_directories() -> Rest {
    let mut rest = with(&rule("checkpoint-*", "keep_last = 1"));
    for at in [10, 20] {
        for file in ["a.bin", "b.bin", "c/d.bin"] {
            rest.write(&format!("checkpoint-{at}/{file}"), b"x");
        }
    }
    rest
}

#[test]
fn what_is_opened_or_pinned_meanwhile_stays() {
    let rest = two_directories();
    let said = meddle(&rest, |archive, path, _| {
        archive.opened_for_writing(path);
        Ok(())
    });
    assert_eq!((said.removed, said.failed.len()), (0, 1), "{said:?}");
    assert_eq!(names(&rest, "checkpoint-10"), ["a.bin", "b.bin", "c"]);
    assert!(rest.path("checkpoint-10/c/d.bin").exists());

    let said = meddle(&rest, |archive, _, _| xattr::set(archive.store().tree().join("checkpoint-10"), PIN, b"1"));
    assert_eq!((said.removed, said.failed.len()), (0, 1), "{said:?}");
    assert!(rest.path("checkpoint-10/c/d.bin").exists());

    // A new file is there when the directory is to go.
    xattr::remove(rest.path("checkpoint-10"), PIN).unwrap();
    let said = meddle(&rest, |archive, _, _| fs::write(archive.store().tree().join("checkpoint-10/new"), b"x"));
    assert_eq!((said.removed, said.failed.len()), (0, 1), "{said:?}");
    assert_eq!(names(&rest, "checkpoint-10"), ["new"]);
    assert_eq!(names(&rest, "checkpoint-20").len(), 3);
}

#[test]
fn nothing_goes_for_a_newest_one_that_went_meanwhile() {
    let mut rest = with(&rule("checkpoint-*", "keep_last = 1"));
    for at in [10, 20, 30, 40] {
        rest.write(&format!("checkpoint-{at}/a.bin"), b"x");
    }
    // While the first one goes, a user removes the newest.
    let said = meddle(&rest, |archive, _, count| match count {
        0 => fs::remove_dir_all(archive.store().tree().join("checkpoint-40")),
        _ => Ok(()),
    });
    assert_eq!((said.removed, said.failed.len()), (1, 2), "{said:?}");
    assert!(said.failed[0].contains("checkpoint-40/a.bin of the newest complete one was removed"), "{said:?}");
    // A second run by itself may have removed `checkpoint-20` for it.
    assert!(rest.path("checkpoint-30/a.bin").exists());
    let said = meddle(&rest, |_, _, _| Ok(()));
    assert!(said.failed.is_empty(), "{said:?}");
    assert_eq!(names(&rest, ""), ["checkpoint-30"]);

    // A program begins to write the newest anew.
    for at in [50, 60] {
        rest.write(&format!("checkpoint-{at}/a.bin"), b"x");
    }
    let said = meddle(&rest, |archive, _, count| {
        if count == 0 {
            archive.opened_for_writing(Path::new("checkpoint-60/a.bin"));
        }
        Ok(())
    });
    assert_eq!((said.removed, said.failed.len()), (1, 1), "{said:?}");
    assert!(rest.path("checkpoint-50/a.bin").exists());
}

#[test]
fn what_could_not_go_just_then_goes_soon_without_any_news() {
    let rest = two_directories();
    let archive = rest.open();
    // Open at this moment, as a file that a reader has just asked for.
    let what = |_: &Archive, _: &Path, count| if count < 1 { Err(io::Error::other("in use")) } else { Ok(()) };
    let meddler =
        Meddler { rest: AtRest::of(archive.store()), archive: OnceLock::new(), count: AtomicUsize::new(0), what };
    meddler.archive.set(Arc::downgrade(&archive)).unwrap();
    archive.start(Arc::new(meddler));
    let started = Instant::now();
    until(|| names(&rest, "") == ["checkpoint-20"]);
    assert!(started.elapsed() < Duration::from_secs(30), "only when the rules were looked at anyway, once a minute");
    archive.stop();
}

#[test]
fn what_a_crash_left_half_removed_goes_at_the_next_run() {
    for after in 0..3 {
        let rest = two_directories();
        let said = meddle(
            &rest,
            match after {
                0 => |_, _, _| Err(io::Error::other("the power went")),
                1 => |_, _, count| if count < 1 { Ok(()) } else { Err(io::Error::other("the power went")) },
                _ => |_, _, count| if count < 2 { Ok(()) } else { Err(io::Error::other("the power went")) },
            },
        );
        assert_eq!(said.removed, 0);
        assert!(said.failed[0].contains("the power went"), "{said:?}");
        assert!(rest.path("checkpoint-10").exists());
        assert_eq!(going(&report(&rest, &[])), ["checkpoint-10"], "{after} files were removed");
        assert_eq!(names(&rest, ""), ["checkpoint-20"]);
    }
    // Only the directory was left: it might be one that a program has just made, until it is an hour old.
    let rest = two_directories();
    fs::remove_dir_all(rest.path("checkpoint-10")).unwrap();
    fs::create_dir(rest.path("checkpoint-10")).unwrap();
    assert_eq!(going(&report(&rest, &[])), [""; 0]);
    older(&rest, "checkpoint-10", 3601);
    assert_eq!(going(&report(&rest, &[])), ["checkpoint-10"]);
}

#[test]
fn a_checkpoint_with_fewer_files_than_the_one_before_does_not_replace_it() {
    let rest = two_directories();
    fs::remove_file(rest.path("checkpoint-20/c/d.bin")).unwrap();
    let dry = report(&rest, &["--dry-run"]);
    assert_eq!(going(&dry), [""; 0], "{dry}");
    let archive = rest.open();
    work(&archive);
    archive.stop();
    assert_eq!(names(&rest, ""), ["checkpoint-10", "checkpoint-20"]);
}

#[test]
fn a_checkpoint_that_cannot_be_read_is_not_the_newest() {
    let mut rest = with(&rule("run/*", "keep_last = 1"));
    for (at, state) in states(4).into_iter().enumerate() {
        rest.write(&step(at + 1), &state);
    }
    let settings = rest.root().join("stepfs.toml");
    let text = fs::read_to_string(&settings).unwrap();
    fs::write(&settings, text.replace("keep_last = 1", "keep_last = 100")).unwrap();
    rest.settle();
    // Step 4 is the newest, and resident. Without it step 3 would be the newest, but its object is gone.
    fs::remove_file(rest.path(&step(4))).unwrap();
    fs::remove_file(rest.object_path(&step(3))).unwrap();
    fs::write(&settings, text).unwrap();
    let dry = report(&rest, &["--dry-run"]);
    assert_eq!(going(&dry), [step(1)]);
    assert_eq!(going(&report(&rest, &[])), [step(1)]);
    rest.faithful(&step(2));
}

/// A run dies again and again while it saves. Whatever its rule says, the last state that it can go on from stays.
#[test]
fn a_truncated_checkpoint_takes_no_whole_one_with_it() {
    let mut rest = with(&rule("run/*", "keep_last = 1"));
    cut(states(5), &mut rest);
    // Below the size of files that are archived.
    for width in [64, 8] {
        let mut random = Random(7);
        let small = |_| safetensors(&[Tensor::new("weight", Dtype::F32, &[width, width], &mut random)]);
        let mut rest = with(&rule("run/*", "keep_last = 1"));
        cut((0..5).map(small).collect(), &mut rest);
    }
}

/// The first two of these states are whole, those after them more and more so, but for the last.
fn cut(states: Vec<Vec<u8>>, rest: &mut Rest) {
    for (at, state) in states.iter().enumerate() {
        // Without its end, a zip has no directory; a header alone promises tensors that are not there.
        let cut = if at < 2 { &state[..] } else { &state[..state.len() * at / 6] };
        rest.write(&step(at + 1), cut);
        older(rest, &step(at + 1), 7200 - at as u64);
    }
    let dry = report(rest, &["--dry-run"]);
    assert_eq!(going(&dry), going(&report(rest, &[])));
    assert!(!going(&dry).contains(&step(2)) && going(&dry).contains(&step(1)), "{dry}");
    rest.settle();
    assert_eq!(going(&report(rest, &["--dry-run"])), [""; 0]);
    assert_eq!(fs::read(rest.path(&step(2))).unwrap(), states[1]);
    // The next whole one frees the room.
    rest.write(&step(6), &states[4]);
    let gone = going(&report(rest, &[]));
    assert!(gone.contains(&step(2)) && names(rest, "run").len() == 1, "{gone:?}");
}

/// The run died while it wrote its smallest file.
#[test]
fn half_a_small_file_makes_no_checkpoint_complete() {
    let small = safetensors(&[Tensor::new("factor", Dtype::F32, &[8, 8], &mut Random(1))]);
    let json = b"{\"log_history\": [{\"loss\": NaN}]}".to_vec();
    for (last, whole) in [("trainer_state.json", json), ("scheduler.safetensors", small)] {
        let mut rest = with(&rule("run/checkpoint-*", "keep_last = 1"));
        let name = |step: usize, file: &str| format!("run/checkpoint-{step}/{file}");
        for (at, state) in states(3).iter().enumerate() {
            rest.write(&name(at + 1, "model.safetensors"), state);
            let cut = if at < 2 { whole.len() } else { whole.len() - 1 };
            rest.write(&name(at + 1, last), &whole[..cut]);
        }
        let dry = report(&rest, &["--dry-run"]);
        assert_eq!(going(&dry), going(&report(&rest, &[])));
        assert_eq!(names(&rest, "run"), ["checkpoint-2", "checkpoint-3"], "{dry}");
        rest.settle();
        assert_eq!(names(&rest, "run"), ["checkpoint-2", "checkpoint-3"]);
        rest.write(&name(3, last), &whole);
        rest.settle();
        report(&rest, &[]);
        assert_eq!(names(&rest, "run"), ["checkpoint-3"]);
    }
}

/// The run died once it had created its last shard.
#[test]
fn an_empty_shard_makes_no_checkpoint_complete() {
    for (shards, keep) in
        [("step_#-0000%-of-00002.pt", "keep_last = 1"), ("version-#/v-%-of-2.ckpt", "keep_checkpoint_max = 1")]
    {
        let mut rest = with(&rule(if keep.contains("max") { "version-*" } else { "*" }, keep));
        let name = |step: usize, shard: &str| shards.replace('#', &step.to_string()).replace('%', shard);
        for (at, state) in states(3).iter().enumerate() {
            rest.write(&name(at + 1, "1"), state);
            rest.write(&name(at + 1, "2"), if at < 2 { state } else { b"" });
        }
        let gone = going(&report(&rest, &[]));
        assert_eq!(gone.len(), 1, "{gone:?}");
        assert!(!rest.path(&name(1, "2")).exists() && rest.path(&name(2, "2")).exists());
    }
}
