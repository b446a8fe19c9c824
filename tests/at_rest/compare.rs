//! `stepfs compare`: its figures equal those of a real store and of decoded files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use stepfs::store::STUB_BYTES;

use super::series::{Random, Rest, model, safetensors, states, train};

const COUNT: usize = 5;
const LOSSLESS: [&str; 3] = ["exact", "zstd-3", "zstd-patch-3"];
const LOSSY: [&str; 5] = ["balanced", "compact", "lc-3", "check-n-run-4", "topn-10"];

fn write(dir: &Path, states: &[Vec<u8>]) -> Vec<PathBuf> {
    let write = |(at, state): (usize, &Vec<u8>)| {
        let path = dir.join(format!("step_{}.safetensors", 20 * (at + 1)));
        fs::write(&path, state).unwrap();
        path
    };
    states.iter().enumerate().map(write).collect()
}

fn compare(paths: &[PathBuf], more: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_stepfs")).arg("compare").args(paths).args(more).output().unwrap()
}

fn report(paths: &[PathBuf], more: &[&str]) -> Value {
    let output = compare(paths, &[more, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn complaint(paths: &[PathBuf], more: &[&str]) -> String {
    let output = compare(paths, more);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
    String::from_utf8(output.stderr).unwrap()
}

fn codec<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["codecs"].as_array().unwrap().iter().find(|kept| kept["name"] == name).unwrap()
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

/// The size of the same files in a store under a profile, under the same names: for each its stub and its object.
fn stored(states: &[Vec<u8>], profile: &str) -> Vec<u64> {
    let mut rest = Rest::under(profile);
    let name = |at: usize| format!("step_{}.safetensors", 20 * (at + 1));
    states.iter().enumerate().for_each(|(at, state)| rest.write(&name(at), state));
    rest.write(&name(states.len()), &states[states.len() - 2]);
    rest.settle();
    let bytes = |at| fs::metadata(rest.object_path(&name(at))).unwrap().len() + STUB_BYTES as u64;
    (0..states.len()).map(bytes).collect()
}

#[test]
fn the_report_says_what_a_store_has_and_what_comes_back() {
    let (dir, states) = (tempfile::tempdir().unwrap(), states(COUNT));
    let paths = write(dir.path(), &states);
    let temporary = tempfile::tempdir().unwrap();
    let names = [&LOSSLESS[..], &LOSSY[..]].concat();
    let at = temporary.path().to_str().unwrap();
    let report = report(&paths, &["--codecs", &names.join(","), "--dir", at]);
    assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0, "something is left behind");
    let files: Vec<&str> = report["files"].as_array().unwrap().iter().map(|file| file.as_str().unwrap()).collect();
    assert_eq!(files, paths.iter().map(|path| path.to_str().unwrap()).collect::<Vec<_>>());
    let found: Vec<&str> = report["codecs"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap()).collect();
    assert_eq!(found, names);
    let raw: Vec<u64> = states.iter().map(|state| state.len() as u64).collect();
    for name in names {
        let kept = codec(&report, name);
        let bytes = numbers(&kept["bytes"]);
        assert_eq!(numbers(&kept["raw"]), raw, "{name}");
        assert_eq!((bytes.len(), kept["total"].as_u64()), (COUNT, Some(bytes.iter().sum())), "{name}");
        let roles = kept["roles"].as_object().unwrap();
        assert_eq!(roles.is_empty(), name.starts_with("zstd"), "{name}");
        if !roles.is_empty() {
            let sum = |what: &str| roles.values().map(|role| role[what].as_u64().unwrap()).sum::<u64>();
            assert_eq!((sum("bytes"), sum("raw")), (bytes.iter().sum(), raw.iter().sum()), "{name}");
        }
        for speed in ["encode_mb_s", "decode_mb_s"] {
            assert!(kept[speed].as_f64().unwrap() > 0.0, "{name}");
        }
        let error = |of: &str, which: &str| kept["error"][of][which].as_f64().unwrap();
        let lossless = LOSSLESS.contains(&name);
        for (of, which) in [("of_update", "rms"), ("of_update", "max"), ("of_weights", "rms"), ("of_weights", "max")] {
            assert_eq!(error(of, which) == 0.0, lossless, "{name}: {of} {which}");
        }
        assert!(error("of_update", "max") >= error("of_update", "rms"));
        assert!(error("of_update", "rms") >= error("of_weights", "rms"));
        let exact = codec(&report, "exact")["total"].as_u64();
        assert!(lossless || kept["total"].as_u64() < exact, "{name} is not smaller than {exact:?}");
    }
    // An object records its file's name: here the same as in a store.
    let mut by_name = Command::new(env!("CARGO_BIN_EXE_stepfs"));
    by_name.current_dir(dir.path()).args(["compare", "--json", "--codecs", "exact,balanced,lc-3"]);
    let output = by_name.args(paths.iter().map(|path| path.file_name().unwrap())).output().unwrap();
    let by_name: Value = serde_json::from_slice(&output.stdout).unwrap();
    for name in ["exact", "balanced", "lc-3"] {
        assert_eq!(numbers(&codec(&by_name, name)["bytes"]), stored(&states, name), "{name}");
    }
    // Half a step of two rms of the update, distributed over tensors by their sensitivity.
    let balanced = codec(&report, "balanced")["error"]["of_update"]["max"].as_f64().unwrap();
    assert!((0.5..4.0).contains(&balanced), "{balanced}");
    let chain = |name: &str| codec(&report, name)["chain"].clone();
    assert_eq!(chain("zstd-patch-3"), serde_json::json!({"mean": 3.0, "max": COUNT}));
    assert_eq!(chain("lc-3"), serde_json::json!({"mean": 3.0, "max": COUNT}));
    assert_eq!(chain("zstd-3"), serde_json::json!({"mean": 1.0, "max": 1}));
}

#[test]
fn a_patch_against_the_file_before_is_small_where_little_has_changed() {
    let dir = tempfile::tempdir().unwrap();
    let mut states = vec![states(1).remove(0)];
    for at in 1..3 {
        let mut next: Vec<u8> = states[at - 1].clone();
        let end = next.len() - 1;
        next[end - at] ^= 0x55;
        states.push(next);
    }
    let report = report(&write(dir.path(), &states), &["--codecs", "zstd-patch-19,zstd-19"]);
    let (patch, alone) =
        (numbers(&codec(&report, "zstd-patch-19")["bytes"]), numbers(&codec(&report, "zstd-19")["bytes"]));
    assert_eq!(patch[0], alone[0]);
    assert!(patch[1..].iter().all(|bytes| *bytes < 200), "{patch:?}");
    assert!(alone[1..].iter().all(|bytes| *bytes > 100_000), "{alone:?}");
}

#[test]
fn files_with_the_same_bytes_are_one_object() {
    let (dir, states) = (tempfile::tempdir().unwrap(), states(2));
    let series: Vec<Vec<u8>> = [0, 0, 1, 1].map(|at| states[at].clone()).to_vec();
    let report = report(&write(dir.path(), &series), &["--codecs", "balanced"]);
    let bytes = numbers(&codec(&report, "balanced")["bytes"]);
    assert!(bytes[1] == STUB_BYTES as u64 && bytes[3] == STUB_BYTES as u64, "{bytes:?}");
    assert!(bytes[0] > bytes[1] && bytes[2] > bytes[3], "{bytes:?}");
}

#[test]
fn a_directory_is_its_checkpoints_in_the_order_of_their_numbers() {
    let (dir, states) = (tempfile::tempdir().unwrap(), states(11));
    let paths = write(dir.path(), &states);
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    fs::write(dir.path().join(".hidden"), "").unwrap();
    let directory = [dir.path().to_path_buf()];
    let report = report(&directory, &["--codecs", "zstd-1"]);
    let files: Vec<&str> = report["files"].as_array().unwrap().iter().map(|file| file.as_str().unwrap()).collect();
    assert_eq!(files, paths.iter().map(|path| path.to_str().unwrap()).collect::<Vec<_>>());
    let output = compare(&directory, &["--codecs", "zstd-1"]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("config.json") && !told.contains("hidden"), "{told}");
}

#[test]
fn what_cannot_be_compared_is_said() {
    let (dir, states) = (tempfile::tempdir().unwrap(), states(2));
    let paths = write(dir.path(), &states);
    let said = complaint(&paths[..1], &[]);
    assert!(said.contains("only one checkpoint") && said.contains("step_20"), "{said}");
    let said = complaint(&[dir.path().join("missing"), paths[0].clone()], &[]);
    assert!(said.contains("missing: No such file"), "{said}");
    let text = dir.path().join("notes.txt");
    fs::write(&text, "loss goes down").unwrap();
    let said = complaint(&[paths[0].clone(), text], &[]);
    assert!(said.contains("notes.txt: not a checkpoint"), "{said}");
    let empty = tempfile::tempdir().unwrap();
    let said = complaint(&[empty.path().to_path_buf()], &[]);
    assert!(said.contains("without checkpoints in it"), "{said}");
    let mut random = Random(5);
    let mut other = model(&mut random);
    train(&mut other, 1e-3, &mut random);
    other[0] = super::series::Tensor::new("a.weight", super::series::Dtype::F32, &[128, 96], &mut random);
    let path = dir.path().join("other.safetensors");
    fs::write(&path, safetensors(&other)).unwrap();
    let said = complaint(&[paths[0].clone(), path], &[]);
    assert!(said.contains("not of the same model") && said.contains("a.weight"), "{said}");
    let said = complaint(&paths, &["--codecs", "exact,lc-9"]);
    assert!(said.contains("\"lc-9\"") && said.contains("check-n-run-4") && said.contains("zstd-patch-3"), "{said}");
    let said = complaint(&paths, &["--dir", "/nowhere/at/all"]);
    assert!(said.contains("/nowhere/at/all"), "{said}");
    assert_eq!(compare(&[], &[]).status.code(), Some(2));
}

#[test]
fn the_help_lists_every_usual_system() {
    let words = String::from_utf8(compare(&[], &["--help"]).stdout).unwrap();
    for system in papers::registry::SystemId::usual() {
        assert!(words.contains(&format!("\n  {system} ")), "{system} in {words}");
    }
}

#[test]
fn the_tables_name_every_codec() {
    let (dir, states) = (tempfile::tempdir().unwrap(), states(3));
    let output = compare(&write(dir.path(), &states), &["--codecs", "balanced,lc-3,zstd-3"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let words = String::from_utf8(output.stdout).unwrap();
    assert!(["balanced", "lc-3", "zstd-3"].iter().all(|name| words.contains(name)), "{words}");
}

#[test]
fn nothing_is_left_behind_when_it_is_interrupted() {
    let (dir, states) = (tempfile::tempdir().unwrap(), states(12));
    let paths = write(dir.path(), &states);
    let temporary = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_stepfs"));
    command.arg("compare").args(&paths).arg("--dir").arg(temporary.path());
    let mut child = command.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::null()).spawn().unwrap();
    let is_empty = || fs::read_dir(temporary.path()).unwrap().next().is_none();
    super::series::until(|| !is_empty());
    // SAFETY: a child of ours that was not waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    let output = child.wait().unwrap();
    assert_eq!((output.code(), is_empty()), (Some(130), true));
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
    assert!(said.contains("interrupted"), "{said}");
    assert!(paths.iter().zip(&states).all(|(path, state)| fs::read(path).unwrap() == *state));
}
