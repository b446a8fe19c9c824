//! Generated histories.

use std::sync::atomic::Ordering;
use std::time::Instant;

use proptest::test_runner::{
    Config, FileFailurePersistence, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner,
};

use super::history::Ground;
use super::op::histories;

/// In the suite: a few seconds in each mode. `scripts/model.sh` runs more.
const CASES: u32 = 60;

/// A number from the environment.
pub(crate) fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Runs this many histories on one mount; earlier failures come first.
fn run(passthrough: bool) {
    let cases = setting("STEPFS_MODEL_HISTORIES").map_or(CASES, |count| count as u32);
    let persistence = FileFailurePersistence::Direct("proptest-regressions/model.txt");
    let config =
        Config { cases, failure_persistence: Some(Box::new(persistence)), max_shrink_iters: 400, ..Config::default() };
    let mut runner = match setting("STEPFS_MODEL_SEED") {
        Some(seed) => {
            let bytes: Vec<u8> = seed.to_le_bytes().repeat(4);
            TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
        }
        None => TestRunner::new(config),
    };
    let (ground, began) = (Ground::new(passthrough), Instant::now());
    let result = runner.run(&histories(true), |(cadence, operations)| {
        ground.history(cadence, &operations).map_err(TestCaseError::fail)
    });
    let counts = &ground.counts;
    let seconds = began.elapsed().as_secs_f64();
    let ran = counts.histories.load(Ordering::Relaxed);
    println!("passthrough {passthrough}: {counts:?}, {seconds:.1} s, {:.1} histories per second", ran as f64 / seconds);
    match result {
        Ok(()) => {}
        Err(TestError::Fail(reason, (cadence, operations))) => {
            let lines: Vec<String> = operations.iter().map(|op| format!("    {op:?},")).collect();
            panic!("{reason}\nshrunk to, compared every {cadence}:\n{}", lines.join("\n"))
        }
        Err(error) => panic!("{error}"),
    }
    // A run without any release, or without any error, has shown little.
    assert!(counts.released.load(Ordering::Relaxed) > u64::from(cases / 20), "{counts:?}");
    assert!(counts.quantized.load(Ordering::Relaxed) > u64::from(cases / 60), "{counts:?}");
    assert!(counts.failing.load(Ordering::Relaxed) > u64::from(cases), "{counts:?}");
}

#[test]
fn histories_with_passthrough() {
    run(true);
}

#[test]
fn histories_without_passthrough() {
    run(false);
}
