//! Several histories at once on one mount, each in a directory of its own, while other threads move files around in
//! shared directories.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::histories::setting;
use super::history::{Ground, PATIENCE};
use super::judge::pattern;
use super::op::histories;
use super::series::Random;
use super::sys;
use super::world::list;

/// Histories of each thread in the suite.
const CASES: u64 = 20;
/// Threads with a history of their own.
const ALONE: u64 = 3;
/// Threads in the directories that all share.
const SHARING: u64 = 3;
const DIRECTORIES: u64 = 3;
const TOKENS: u8 = 10;

/// A file that is moved around: its bytes identify it. Some are large enough to be released.
fn token(number: u8) -> Vec<u8> {
    let len = if number.is_multiple_of(3) { 70_000 } else { 500 };
    let mut bytes = vec![number; len];
    bytes.extend(pattern(100, number));
    bytes
}

/// One thread in the shared directories. The possible errors: another thread was quicker to take a name.
fn share(dir: &Path, seed: u64, over: &AtomicBool, met: &AtomicU64) {
    let mut random = Random(seed);
    let (mut number, own) = (0, dir.join(format!("own-{seed}")));
    let fail = |what: &str, path: &Path, code: i32| panic!("{what} {}: errno {code}", path.display());
    while !over.load(Ordering::Relaxed) {
        let mut place = || dir.join(format!("d{}", random.below(DIRECTORIES)));
        let (from, to) = (place(), place());
        let names = list(&from).expect("a directory that stays");
        if names.is_empty() {
            continue;
        }
        let mut pick = || from.join(names[random.below(names.len() as u64) as usize].trim_end());
        let (path, other) = (pick(), pick());
        number += 1;
        let new = to.join(format!("t{seed}-{number}"));
        let done = match random.below(6) {
            0 => sys::rename(&path, &new, libc::RENAME_NOREPLACE),
            1 => sys::rename(&path, &new, 0),
            2 => sys::rename(&path, &other, libc::RENAME_EXCHANGE),
            // A second name for a moment, where nobody else looks.
            3 => sys::link(&path, &own).and_then(|()| sys::unlink(&own)),
            4 => sys::chmod(&path, 0o600 + random.below(64) as u32),
            _ => match fs::read(&path) {
                Ok(bytes) => {
                    let whole = bytes.first().is_some_and(|number| token(*number) == bytes);
                    assert!(
                        whole,
                        "{}: {} bytes that are no file of ours: {}",
                        path.display(),
                        bytes.len(),
                        odd(&path, &bytes)
                    );
                    met.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                }
                Err(error) => Err(error.raw_os_error().unwrap_or(-1)),
            },
        };
        match done {
            Ok(()) | Err(libc::ENOENT) => {}
            Err(code) => fail("cannot change", &path, code),
        }
        // The archive needs its turn, too.
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

/// Where bytes that are no token differ from the token that most of them are of.
fn odd(path: &Path, bytes: &[u8]) -> String {
    let number = *bytes.get(bytes.len() / 2).unwrap_or(&0);
    let expected = token(number);
    let differ: Vec<usize> = (0..bytes.len()).filter(|at| expected.get(*at) != bytes.get(*at)).collect();
    let (first, last) = (differ.first().copied().unwrap_or(0), differ.last().copied().unwrap_or(0));
    let some = &bytes[first..bytes.len().min(first + 40)];
    let said = |name: &str| sys::getxattr(path, name).map(|value| String::from_utf8_lossy(&value).into_owned());
    let about: Vec<_> =
        ["state", "object", "why", "release"].iter().map(|name| said(&format!("user.stepfs.{name}"))).collect();
    let ino = sys::lstat(path).map(|stat| stat.ino);
    format!("{about:?} {ino:?} of {number} {} differ, from {first} to {last}, first {some:?}", differ.len())
}

/// All files are there, each as often as it has links.
fn all_there(dir: &Path) {
    let mut names: BTreeMap<u64, (u64, u64, u8)> = BTreeMap::new();
    for directory in 0..DIRECTORIES {
        for entry in fs::read_dir(dir.join(format!("d{directory}"))).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            let (stat, bytes) = (sys::lstat(&path).unwrap(), fs::read(&path).unwrap());
            assert!(bytes == token(bytes[0]), "{}", path.display());
            names.entry(stat.ino).or_insert((0, stat.nlink, bytes[0])).0 += 1;
        }
    }
    let mut found: Vec<u8> = names.values().map(|(_, _, number)| *number).collect();
    found.sort_unstable();
    assert_eq!(found, (0..TOKENS).collect::<Vec<_>>(), "each file once");
    for (ino, (count, links, _)) in names {
        assert_eq!(count, links, "names and links of {ino}");
    }
}

fn run(passthrough: bool) {
    let cases = setting("STEPFS_MODEL_HISTORIES").map_or(CASES, |count| count / ALONE);
    let seed = setting("STEPFS_MODEL_SEED").unwrap_or(1);
    let ground = Ground::shared(passthrough);
    let shared = ground.dir.join("mnt/shared");
    for directory in 0..DIRECTORIES {
        fs::create_dir_all(shared.join(format!("d{directory}"))).unwrap();
    }
    for number in 0..TOKENS {
        fs::write(shared.join(format!("d0/step-{number}")), token(number)).unwrap();
    }
    let (over, met) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..SHARING {
            let (shared, over, met) = (&shared, &over, &met);
            scope.spawn(move || share(shared, seed * 100 + thread, over, met));
        }
        let alone: Vec<_> = (0..ALONE)
            .map(|thread| {
                let ground = &ground;
                scope.spawn(move || {
                    let bytes = [seed, thread, 7, 7].map(u64::to_le_bytes).concat();
                    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
                    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
                    for case in 0..cases {
                        let (cadence, operations) = histories(false).new_tree(&mut runner).unwrap().current();
                        if let Err(why) = ground.history(cadence, &operations) {
                            let lines: Vec<String> = operations.iter().map(|op| format!("    {op:?},")).collect();
                            return Err(format!("thread {thread}, history {case}: {why}\nall:\n{}", lines.join("\n")));
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        let results: Vec<_> = alone.into_iter().map(|thread| thread.join()).collect();
        over.store(true, Ordering::Relaxed);
        for result in results {
            result.unwrap().unwrap_or_else(|why| panic!("{why}"));
        }
    });
    all_there(&shared);
    // Nobody gives the archive work any more, and its counts are right.
    ground.wait_for_archive(PATIENCE, true).unwrap();
    all_there(&shared);
    let files = ground.with(|mounted| mounted.archive.status().files);
    assert_eq!(files, u64::from(TOKENS));
    println!("passthrough {passthrough}, threads: {:?}, {met:?} whole files read in shared directories", ground.counts);
    assert!(met.load(Ordering::Relaxed) > 0);
    assert!(ground.counts.released.load(Ordering::Relaxed) > 0, "{:?}", ground.counts);
}

#[test]
fn threads_with_passthrough() {
    run(true);
}

#[test]
fn threads_without_passthrough() {
    run(false);
}
