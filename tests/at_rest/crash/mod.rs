//! Crashes and faults of the device (docs/DESIGN.md, "Crashes"). Histories of a store run on a device that records
//! every change. Then every state is built that a power failure may leave after any change.

mod check;
mod faults;
mod faulty;
mod histories;
mod image;
mod live;
mod recorder;
mod reshard;

use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::series;
use check::Failure;
use image::{Image, Luck};
use live::{Run, What};
use recorder::{Op, Record};
use stepfs::store::durable::CrashPoint;

/// Images that are checked in parallel: while one waits for its archive another is written.
const AT_ONCE: usize = 4;

/// A failure to check: its history, the changes before it, the parts that are durable by luck, and whether there is
/// another one while the store recovers.
type Case = (usize, usize, Luck, Option<u64>);

/// Orders in which names become durable, tried to notice an omitted sync.
const ORDERS: u64 = 8;

/// Seeds per sync point and per change. Without the second, each change of a name gets one of two kinds of failure. The
/// long run (scripts/crash.sh) has many of both.
fn thoroughness() -> (usize, usize) {
    let number = |name: &str, usual: usize| std::env::var(name).map_or(usual, |text| text.parse().unwrap());
    (number("STEPFS_CRASH_SEEDS", 1), number("STEPFS_CRASH_EVERY", 0))
}

fn cases(runs: &[Run]) -> Vec<Case> {
    let (seeds, every) = thoroughness();
    let mut cases = Vec::new();
    for (number, run) in runs.iter().enumerate() {
        for (at, entry) in run.record.log.iter().enumerate() {
            let is_sync = matches!(entry.op, Op::Sync { .. });
            let is_name = matches!(entry.op, Op::Rename { .. } | Op::Remove { .. } | Op::Link { .. });
            let lucks = [Luck::Names, Luck::Bytes, Luck::All, Luck::None];
            if is_sync {
                // Before it only the last sync holds; after it nothing else does.
                cases.extend((0..seeds).map(|seed| (number, at, Luck::Some(seed as u64), None)));
                cases.push((number, at + 1, Luck::None, None));
            }
            if is_name && (every > 0 || at % 2 == 0) {
                // The process alone is killed, and the machine after the next one has done all work.
                cases.push((number, at + 1, Luck::All, Some(at as u64)));
            }
            if every > 0 || is_sync || is_name && at % 2 == 1 {
                // And one of these in turn, with another failure during recovery.
                let count = if every > 0 { lucks.len() } else { 1 };
                for turn in 0..count {
                    let seed = (at * 31 + number * 7 + turn) as u64;
                    cases.push((number, at + 1, lucks[(at / 2 + turn) % lucks.len()], Some(seed)));
                }
            }
            cases.extend((0..every).map(|seed| (number, at, Luck::Some((1000 + seed) as u64), None)));
        }
    }
    cases
}

#[test]
fn whatever_a_crash_leaves_keeps_what_was_promised() {
    let began = Instant::now();
    let runs = histories::all();
    let mut met: BTreeMap<CrashPoint, usize> = BTreeMap::new();
    for entry in runs.iter().flat_map(|run| &run.record.log) {
        *met.entry(entry.point.unwrap_or(CrashPoint::Fsync)).or_default() += 1;
    }
    let (cases, is_thorough) = (cases(&runs), thoroughness().1 > 0);
    let (next, looked_at, again) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let seen: Mutex<HashSet<(usize, u64)>> = Mutex::default();
    let failures: Mutex<Vec<String>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((number, done, luck, second)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let failure = Failure { run: &runs[*number], done: *done, luck: *luck, again: false };
                    let image = Image::after(&failure.run.record, *done, *luck);
                    // The same image was checked before, and with no fewer promises.
                    let key = (*number, image.key() ^ failure.run.promised(*done));
                    if second.is_none() && !seen.lock().unwrap().insert(key) {
                        again.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                    let more = if is_thorough { 2 } else { 1 };
                    looked_at.fetch_add(1 + if second.is_some() { more } else { 0 }, Ordering::Relaxed);
                    let checked = catch_unwind(AssertUnwindSafe(|| failure.check(&image, *second, is_thorough)));
                    if let Err(panic) = checked {
                        let why = panic.downcast_ref::<String>().cloned();
                        let why = why.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
                        failures.lock().unwrap().push(format!("{}: {}", failure.words(), why.unwrap_or_default()));
                    }
                }
            });
        }
    });
    // Steps of recoveries, which were recorded to let them fail. `reshard` checks its own steps.
    // tests/corruption/repair.rs tries repairs with every kind of damage, and kills them. Pins are set through a mount:
    // tests/mount/slow.rs.
    for point in check::RECOVERIES.lock().unwrap().iter() {
        met.entry(*point).or_default();
    }
    let elsewhere = [
        CrashPoint::ReshardWritten,
        CrashPoint::ReshardInPlace,
        CrashPoint::RepairWritten,
        CrashPoint::DamagedSetAside,
        CrashPoint::RepairInPlace,
        CrashPoint::Marked,
    ];
    for point in CrashPoint::ALL.iter().filter(|point| !elsewhere.contains(point)) {
        assert!(met.contains_key(point), "no history comes by {point:?}: {}", point.sentence());
    }
    let failures = failures.into_inner().unwrap();
    let syncs = |run: &Run| run.record.log.iter().filter(|entry| matches!(entry.op, Op::Sync { .. })).count();
    for run in &runs {
        println!("{}: {} changes, {} sync points", run.name, run.record.log.len(), syncs(run));
    }
    println!(
        "{} images of {} failures ({} were as others) in {:.0?}: {} broke a promise",
        looked_at.into_inner(),
        cases.len(),
        again.into_inner(),
        began.elapsed(),
        failures.len()
    );
    // One of each kind: names that differ in numbers only are one kind.
    let mut kinds: BTreeMap<String, (usize, &String)> = BTreeMap::new();
    for failure in &failures {
        let what = failure.split(": ").skip(2).collect::<Vec<_>>().join(": ");
        kinds.entry(what.replace(|c: char| c.is_ascii_digit(), "")).or_insert((0, failure)).0 += 1;
    }
    kinds.values().for_each(|(count, first)| println!("{count} as this: {first}"));
    assert!(failures.is_empty(), "{} broke a promise", failures.len());
}

/// What was closed is durable within a second, also if it was opened again. A busy machine gets three times as long.
#[test]
fn nothing_that_was_closed_for_a_second_is_lost() {
    const LONGEST: Duration = Duration::from_secs(3);
    let run = histories::logs();
    let mut longest = Duration::ZERO;
    for event in &run.events {
        let (What::Written(node, _) | What::Appended(node, _)) = &event.what else { continue };
        let at = run.promised_at(&event.path, *node, event.end);
        let at = at.unwrap_or_else(|| panic!("{}: never durable", event.path));
        let took = run.record.log[at].when.duration_since(run.record.log[event.end - 1].when);
        assert!(took < LONGEST, "{}: durable after {took:.2?}", event.path);
        longest = longest.max(took);
    }
    println!("{} closes, each durable within {longest:.2?}", run.events.len());
}

/// Whether omitting the syncs of a step breaks a promise. First where nothing is durable by luck. Then where a name is
/// durable that was changed after others that are not, because a sync between two names prevents that.
fn is_noticed(runs: &[Run], point: CrashPoint) -> bool {
    let lucks = std::iter::once(Luck::None).chain([Luck::Names]).chain((0..ORDERS).map(Luck::Some));
    lucks.into_iter().any(|luck| {
        runs.iter().any(|run| {
            let log = &run.record.log;
            let Some(first) = log.iter().position(|entry| entry.point == Some(point)) else { return false };
            let record = run.record.without_syncs(point);
            let is_end = |op: &Op| match luck {
                Luck::None => matches!(op, Op::Sync { .. }),
                _ => matches!(op, Op::Rename { .. } | Op::Remove { .. }),
            };
            (first..log.len()).filter(|at| is_end(&log[*at].op)).any(|at| {
                let failure = Failure { run, done: at + 1, luck, again: false };
                let breaks = |record: &Record| {
                    let image = Image::after(record, at + 1, luck);
                    catch_unwind(AssertUnwindSafe(|| failure.check(&image, None, false))).is_err()
                };
                // With the sync the promise holds, so the missing sync broke it.
                breaks(&record) && !breaks(&run.record)
            })
        })
    })
}

/// Every one of these syncs keeps a promise: without it one is broken, and the test above says so. The sync of an
/// object's name (`ObjectInPlace`) is not among them: where renames are whole, the sync of `tmp/` for the note before a
/// stub makes it durable, too.
#[test]
fn a_sync_that_is_left_out_is_noticed() {
    let runs = histories::all();
    let needed = [
        CrashPoint::FileSealed,
        CrashPoint::NamesSealed,
        CrashPoint::ObjectCompleted,
        CrashPoint::ShardMade,
        CrashPoint::StubWritten,
        CrashPoint::RecallWritten,
        CrashPoint::ImportWritten,
        CrashPoint::MergeCompleted,
        CrashPoint::NoteWritten,
        CrashPoint::RecallSynced,
        CrashPoint::RemovedNamesSynced,
        CrashPoint::ImportInPlace,
        CrashPoint::SettingsWritten,
    ];
    // These failures are expected, and need no page of output each. Other tests of this process keep theirs.
    thread_local!(static IS_EXPECTED: Cell<bool> = const { Cell::new(false) });
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !IS_EXPECTED.get() {
            hook(panic);
        }
    }));
    let unnoticed: Vec<_> = std::thread::scope(|scope| {
        let runs = &runs;
        let all: Vec<_> = needed
            .map(|point| {
                (
                    point,
                    scope.spawn(move || {
                        IS_EXPECTED.set(true);
                        let noticed = is_noticed(runs, point);
                        println!("{point:?}: noticed: {noticed}");
                        noticed
                    }),
                )
            })
            .into_iter()
            .collect();
        all.into_iter().filter_map(|(point, noticed)| (!noticed.join().unwrap()).then_some(point)).collect()
    });
    assert_eq!(unnoticed, []);
}
