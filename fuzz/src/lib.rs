//! Runs the fuzz targets, for the fuzzer's programs (`fuzz_targets/`) and the test of its corpora (`tests/corruption/`).

mod targets;

/// Runs the target of this name on one input. Panics when a promise is broken.
pub fn run(target: &str, input: &[u8]) {
    let (_, run) = targets::TARGETS.iter().find(|(name, _)| *name == target).expect("a target of this name");
    run(input);
}

/// The names of all targets.
pub fn names() -> impl Iterator<Item = &'static str> {
    targets::TARGETS.iter().map(|(name, _)| *name)
}
