//! Every kept input of the fuzzer: the smallest inputs with the most coverage, and all that ever broke a promise. Long
//! runs are `scripts/fuzz.sh`; `docs/FUZZING.md` counts them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::targets;

fn inputs(kind: &str, target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(kind).join(target);
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let paths: BTreeSet<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

fn replay(kind: &str, least: usize) {
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some((target, run)) = targets::TARGETS.get(at) else { break };
                    let inputs = inputs(kind, target);
                    assert!(inputs.len() >= least, "{target} has no {kind}");
                    for (path, input) in inputs {
                        // The panic names the fault; this names the input.
                        let shown = path.display().to_string();
                        let result = std::panic::catch_unwind(|| run(&input));
                        assert!(result.is_ok(), "{target}: {shown}");
                    }
                }
            });
        }
    });
}

#[test]
fn corpora_keep_all_promises() {
    replay("corpus", 1);
}

#[test]
fn what_was_found_once_is_found_no_more() {
    replay("findings", 0);
}

/// A folder without a target of its name would never be read.
#[test]
fn every_folder_is_a_target() {
    for kind in ["corpus", "findings"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(kind);
        for entry in fs::read_dir(folder).into_iter().flatten() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(name.starts_with('.') || targets::TARGETS.iter().any(|(target, _)| *target == name), "{name}");
        }
    }
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/fuzz_targets");
    for (target, _) in targets::TARGETS {
        assert!(programs.join(format!("{target}.rs")).exists(), "{target} has no program");
    }
}
