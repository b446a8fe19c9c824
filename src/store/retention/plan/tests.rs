use super::*;
use crate::store::retention::{RuleText, parse};
use proptest::prelude::*;

const HOUR: i64 = SETTLED_NS;
const NOW: i64 = 1_800_000_000_000_000_000;

fn rule(keys: &str) -> Rule {
    let text: RuleText = toml::from_str(&format!("glob = \"**\"\n{keys}")).unwrap();
    parse(vec![text]).unwrap().remove(0)
}

/// A complete directory, written a little over a day ago, in the order of steps.
fn unit(step: u64) -> Unit {
    Unit {
        path: PathBuf::from(format!("checkpoint-{step}")),
        rule: 0,
        kind: Kind::Directory,
        series: b"checkpoint-#".to_vec(),
        steps: vec![step],
        step: Some(step),
        modified_ns: NOW - 24 * HOUR + step as i64 * 1_000_000_000,
        files: 3,
        with_tensors: 2,
        bytes: 1000,
        own: Own::default(),
        being_written: false,
        lacks: false,
        diverged: false,
        is_version: true,
        pinned: false,
        best: false,
    }
}

fn units(steps: impl IntoIterator<Item = u64>) -> Vec<Unit> {
    steps.into_iter().map(unit).collect()
}

fn gone(units: &[Unit], keys: &str) -> Vec<u64> {
    let verdicts = plan(units, &[rule(keys)], NOW);
    let mut gone: Vec<u64> =
        units.iter().zip(verdicts).filter(|(_, v)| v.removes()).map(|(u, _)| u.step.unwrap_or(0)).collect();
    gone.sort_unstable();
    gone
}

#[test]
fn each_part_of_a_rule_keeps_its_own() {
    let ten = units((1..=10).map(|i| i * 100));
    assert_eq!(gone(&ten, "keep_last = 3"), [100, 200, 300, 400, 500, 600, 700]);
    assert_eq!(gone(&ten, "keep_every = 500"), [100, 200, 300, 400, 600, 700, 800, 900]);
    assert_eq!(gone(&ten, "keep_last = 2\nkeep_every = 400"), [100, 200, 300, 500, 600, 700]);
    assert_eq!(gone(&ten, "keep_for = \"1w\""), [0; 0]);
    // Written 86,100 to 85,400 s ago; the last of them is the newest.
    assert_eq!(gone(&ten, "keep_for = \"85650s\""), [100, 200, 300, 400, 500, 600, 700]);
    assert_eq!(gone(&ten, "keep_checkpoint_max = 4"), [100, 200, 300, 400, 500, 600]);
    assert_eq!(gone(&ten, "keep_checkpoint_max = 0"), [0; 0]);
    assert_eq!(gone(&ten, "keep_last = 100"), [0; 0]);
    assert_eq!(gone(&ten, "keep_last = 9223372036854775807"), [0; 0]);
}

#[test]
fn a_rule_that_wants_nothing_leaves_the_newest() {
    let ten = units(1..=10);
    assert_eq!(gone(&ten, "keep_for = \"0s\""), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(gone(&ten, "keep_every = 1000000"), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(gone(&units([5]), "keep_for = \"0s\""), [0; 0]);
    assert_eq!(gone(&[], "keep_last = 1"), [0; 0]);
}

#[test]
fn step_0_is_a_multiple_and_one_too_large_may_be() {
    let mut some = units([0, 1, 7, 8]);
    some[2].steps = vec![u64::MAX];
    some[2].step = Some(u64::MAX);
    some[2].modified_ns = NOW - HOUR;
    // The too large one is the newest; the one before it is not.
    assert_eq!(gone(&some, "keep_every = 10"), [1, 8]);
    some.push(Unit { steps: vec![u64::MAX], step: Some(u64::MAX), modified_ns: NOW, ..unit(9) });
    assert_eq!(gone(&some, "keep_every = 10"), [1, 8]);
}

#[test]
fn names_without_a_number_are_ordered_by_time() {
    let mut some = units([1, 2, 3]);
    for (unit, age) in some.iter_mut().zip([2, 9, 4]) {
        (unit.steps, unit.step, unit.modified_ns) = (Vec::new(), None, NOW - age * HOUR);
    }
    let verdicts = plan(&some, &[rule("keep_last = 1")], NOW);
    assert_eq!(verdicts[0], Verdict::Keep("the newest complete one".into()));
    assert!(verdicts[1].removes() && verdicts[2].removes());
}

#[test]
fn series_do_not_mix() {
    let mut some = units(1..=4);
    some[0].series = b"a/checkpoint-#".to_vec();
    some[1].rule = 1;
    some[2].kind = Kind::File;
    let verdicts = plan(&some, &[rule("keep_last = 1"), rule("keep_for = \"0s\"")], NOW);
    assert!(verdicts.iter().all(|verdict| *verdict == Verdict::Keep("the newest complete one".into())), "{verdicts:?}");
}

#[test]
fn what_is_not_complete_does_not_count_and_may_be_in_the_making() {
    for spoil in [
        |unit: &mut Unit| unit.being_written = true,
        |unit: &mut Unit| unit.lacks = true,
        // As many as the writer has closed so far.
        |unit: &mut Unit| (unit.files, unit.modified_ns) = (2, NOW),
        |unit: &mut Unit| unit.files = 0,
    ] {
        let mut some = units(1..=4);
        spoil(&mut some[3]);
        assert_eq!(gone(&some, "keep_last = 1"), [1, 2]);
        spoil(&mut some[2]);
        assert_eq!(gone(&some, "keep_last = 1"), [1]);
    }
    let mut versions = units(1..=4);
    versions[3].is_version = false;
    assert_eq!(gone(&versions, "keep_checkpoint_max = 2"), [1]);
    // Fewer shards than the version before, and none is missing.
    versions[3].is_version = true;
    versions[3].files = 1;
    assert_eq!(gone(&versions, "keep_checkpoint_max = 2"), [1, 2]);
}

#[test]
fn what_was_half_removed_goes_on_going() {
    let mut some = units(1..=4);
    some[0].files = 1;
    some[0].is_version = false;
    for keys in ["keep_last = 2", "keep_checkpoint_max = 2", "keep_for = \"1h\""] {
        assert!(gone(&some, keys).starts_with(&[1]), "{keys}");
    }
    // Empty: its own time is that of the removal.
    some[0].files = 0;
    some[0].modified_ns = NOW - HOUR / 2;
    assert_eq!(gone(&some, "keep_last = 2"), [2]);
    some[0].modified_ns = NOW - HOUR;
    assert_eq!(gone(&some, "keep_last = 2"), [1, 2]);
}

#[test]
fn fewer_files_are_believed_once_two_agree_and_an_hour_has_passed() {
    let mut some = units(1..=5);
    for unit in &mut some[2..] {
        unit.files = 2;
    }
    let verdicts = plan(&some, &[rule("keep_last = 2")], NOW);
    assert_eq!(verdicts[1], Verdict::Keep(FULLEST));
    assert_eq!(verdicts[3], Verdict::Keep("among the last 2".into()));
    let verdicts = plan(&some[..3], &[rule("keep_last = 1")], NOW);
    assert_eq!(verdicts[2], Verdict::Keep(FEWER));
    assert_eq!(gone(&some, "keep_last = 1"), [1, 4]);
    // 3 shows it to each that follows, at once.
    some.push(Unit { files: 2, modified_ns: NOW, ..unit(6) });
    assert_eq!(gone(&some, "keep_last = 1"), [1, 4, 5]);
    some.pop();
    some.push(unit(6));
    assert_eq!(gone(&some, "keep_last = 1"), [1, 2, 3, 4, 5], "as many files again");
    some.pop();
    for unit in &mut some[2..] {
        unit.modified_ns += 23 * HOUR + HOUR / 2;
    }
    assert_eq!(gone(&some, "keep_last = 1"), [1]);
}

/// A file whose writer died has no tensors that stepfs finds.
#[test]
fn a_truncated_file_takes_no_whole_one_with_it() {
    let file = |step| Unit { kind: Kind::File, files: 1, with_tensors: 1, ..unit(step) };
    let cut = |step| Unit { with_tensors: 0, ..file(step) };
    let keys = "keep_last = 1";
    assert_eq!(gone(&[file(1), file(2), cut(3)], keys), [1]);
    assert_eq!(gone(&[file(1), file(2), cut(3), cut(4), cut(5)], keys), [1, 4], "however often it dies");
    assert_eq!(gone(&[file(1), file(2), cut(3), file(4)], keys), [1, 2, 3]);
    assert_eq!(gone(&[file(1), Unit { bytes: 0, ..cut(2) }], keys), [0; 0]);
    assert_eq!(gone(&[cut(1), cut(2), cut(3)], keys), [1, 2], "a format without tensors");
    // Fewer shards than before, each whole; and with one that is cut.
    let shards = |step, files, with_tensors| Unit { files, with_tensors, ..file(step) };
    assert_eq!(gone(&[shards(1, 4, 4), shards(2, 2, 2)], keys), [1]);
    assert_eq!(gone(&[shards(1, 4, 4), shards(2, 4, 3)], keys), [0; 0]);
}

#[test]
fn a_cut_file_in_a_directory_takes_no_whole_one_with_it() {
    let mut some = units(1..=4);
    some[2].with_tensors = 1;
    some[3].with_tensors = 1;
    assert_eq!(gone(&some, "keep_last = 1"), [1], "3 shows that 4 is complete");
    some.push(Unit { with_tensors: 1, ..unit(5) });
    assert_eq!(gone(&some, "keep_last = 1"), [1, 4]);
    // More files do not make up for tensors, nor tensors for files.
    let full = |step, with_tensors, files| Unit { with_tensors, files, ..unit(step) };
    assert_eq!(gone(&[full(1, 2, 8), full(2, 4, 5)], "keep_last = 1"), [0; 0]);
    assert_eq!(gone(&[full(1, 2, 8), full(2, 1, 9)], "keep_last = 1"), [0; 0]);
}

#[test]
fn what_a_rule_took_from_the_middle_of_a_series_makes_it_no_less_complete() {
    let full = |step| Unit { own: Own { files: 1, with_tensors: 1, bytes: 600 }, ..unit(step) };
    let stripped = |step| Unit { files: 2, with_tensors: 1, bytes: 400, ..unit(step) };
    let (keys, best) = ("keep_last = 3", Unit { best: true, ..full(1) });
    let mut some = vec![best, stripped(2), stripped(3), stripped(4), full(5)];
    assert_eq!(gone(&some, keys), [2]);
    // The newest one that lacks its own files may be in the making, and a file without a rule of its own is missed anywhere.
    some.push(stripped(6));
    assert_eq!(gone(&some, keys), [2]);
    assert!(!complete(&some, &[rule(keys)], NOW)[5]);
    some[2].files = 1;
    assert_eq!(complete(&some, &[rule(keys)], NOW), [true, true, false, true, true, false]);
    // A later one with a part of its own files died in its save, as the one before it.
    let died = Unit { own: Own { files: 1, ..Own::default() }, files: 2, with_tensors: 1, ..stripped(3) };
    let all = Unit { own: Own { files: 2, ..Own::default() }, ..unit(1) };
    let own_missing = Unit { files: 1, with_tensors: 1, ..stripped(2) };
    assert_eq!(complete(&[all, own_missing, died], &[rule(keys)], NOW), [true, false, false]);
}

#[test]
fn a_rule_for_files_takes_none_of_a_checkpoint_that_a_run_may_go_on_from() {
    let file = |step: u64| Unit {
        path: PathBuf::from(format!("checkpoint-{step}/optimizer.pt")),
        rule: 1,
        kind: Kind::File,
        series: b"checkpoint-#/optimizer.pt".to_vec(),
        files: 1,
        with_tensors: 1,
        ..unit(step)
    };
    let rules = [rule("keep_last = 9"), rule("keep_last = 1")];
    let gone = |directories: [Unit; 3]| {
        let all: Vec<Unit> = directories.into_iter().chain([1, 2, 3].map(file)).collect();
        let verdicts = plan(&all, &rules, NOW);
        let going = all.iter().zip(&verdicts).filter(|(_, verdict)| verdict.removes());
        going.filter_map(|(unit, _)| unit.step).collect::<Vec<_>>()
    };
    let died = Unit { files: 1, with_tensors: 1, modified_ns: NOW, ..unit(3) };
    assert_eq!(gone([unit(1), unit(2), died.clone()]), [1]);
    assert_eq!(gone([unit(1), Unit { pinned: true, ..unit(2) }, died.clone()]), [1]);
    assert_eq!(gone([Unit { best: true, ..unit(1) }, unit(2), unit(3)]), [2]);
    // A run that began anew at 1 wrote it last.
    let last = Unit { modified_ns: NOW - 2 * HOUR, ..unit(1) };
    assert_eq!(gone([last, unit(2), died]), [0; 0]);
}

/// A save of weights alone among whole states.
#[test]
fn weights_alone_take_no_whole_state_with_them() {
    let of = |step, bytes| Unit { kind: Kind::File, files: 1, with_tensors: 1, bytes, ..unit(step) };
    let (whole, weights) = (|step| of(step, 1200), |step| of(step, 400));
    let keys = "keep_last = 1";
    assert_eq!(gone(&[whole(1), whole(2), weights(3)], keys), [1]);
    let verdicts = plan(&[whole(1), weights(2)], &[rule(keys)], NOW);
    assert_eq!(verdicts[1], Verdict::Keep(SMALLER));
    assert_eq!(gone(&[whole(1), weights(2), whole(3), weights(4)], keys), [1, 2]);
    assert_eq!(gone(&[whole(1), weights(2), weights(3), weights(4)], keys), [3], "2 shows that 4 is meant so");
    assert_eq!(
        gone(&[whole(1), whole(2), weights(3), whole(4)], "keep_last = 2"),
        [1],
        "a whole state does not show that weights alone are complete"
    );
    assert_eq!(gone(&[of(1, 1200), of(2, 900)], keys), [1], "a little less is no lack");
    assert_eq!(gone(&[of(1, 1200), of(2, 899)], keys), [0; 0]);
    // A series that shrinks slowly leaves the last with about so much.
    assert_eq!(gone(&[of(1, 1000), of(2, 900), of(3, 800), of(4, 700), of(5, 600)], keys), [1, 3, 4]);
    // The tables of a version may shrink.
    let version = |step, bytes| Unit { bytes, ..unit(step) };
    assert_eq!(gone(&[version(1, 1000), version(2, 100)], "keep_checkpoint_max = 1"), [1]);
}

/// A version may have fewer shards than the one before, but not one that is cut.
#[test]
fn a_full_one_stays_complete_when_one_before_it_goes() {
    let of = |step, (files, with_tensors, bytes)| Unit { files, with_tensors, bytes, ..unit(step) };
    let some = [of(0, (1, 0, 1000)), of(7, (1, 0, 900)), of(11, (2, 1, 700)), of(17, (1, 0, 900))];
    assert_eq!(gone(&some, "keep_every = 2"), [7]);
}

#[test]
fn a_cut_version_takes_no_whole_one_with_it() {
    let version = |step, with_tensors| Unit { files: 2, with_tensors, ..unit(step) };
    let keys = "keep_checkpoint_max = 1";
    assert_eq!(gone(&[version(1, 2), version(2, 2), version(3, 1)], keys), [1]);
    assert_eq!(gone(&[version(1, 2), version(2, 2), Unit { files: 1, ..version(3, 1) }], keys), [1, 2]);
}

/// Runs of a sweep end at different steps. No name tells them from files that belong together.
#[test]
fn an_ended_run_keeps_one_file_of_each_other_one() {
    let file = |name: &str, step: u64| Unit {
        kind: Kind::File,
        path: PathBuf::from(format!("{name}_step{step}.pt")),
        series: name.as_bytes().to_vec(),
        ..unit(step)
    };
    let some = [file("a", 1), file("a", 2), file("b", 1), file("b", 2), file("b", 3), file("b", 4)];
    let verdicts = plan(&some, &[rule("keep_last = 1")], NOW);
    assert_eq!(verdicts.iter().map(Verdict::removes).collect::<Vec<_>>(), [true, false, true, false, true, false]);
}

/// A model's files and an optimizer's are two series.
#[test]
fn files_beside_the_newest_of_another_series_stay() {
    let file = |name: &str, step| Unit {
        kind: Kind::File,
        path: PathBuf::from(format!("run/{name}_step{step}.pt")),
        series: name.as_bytes().to_vec(),
        ..unit(step)
    };
    let mut some = vec![file("model", 10), file("optim", 10), file("model", 20), file("optim", 20), file("model", 30)];
    let verdicts = plan(&some, &[rule("keep_last = 1")], NOW);
    let removed: Vec<bool> = verdicts.iter().map(Verdict::removes).collect();
    assert_eq!(removed, [true, true, false, false, false], "{verdicts:?}");
    // Whatever reason the newest one has to stay.
    some[3].best = true;
    let again = plan(&some, &[rule("keep_last = 1")], NOW);
    assert_eq!(again.iter().map(Verdict::removes).collect::<Vec<_>>(), removed);
    some[3].best = false;
    // It dies again before the optimizer's file: nothing goes on from step 30.
    some.push(file("model", 40));
    let removed: Vec<bool> = plan(&some, &[rule("keep_last = 1")], NOW).iter().map(Verdict::removes).collect();
    assert_eq!(removed, [true, true, false, false, true, false]);
    some.push(file("optim", 40));
    let removed: Vec<bool> = plan(&some, &[rule("keep_last = 1")], NOW).iter().map(Verdict::removes).collect();
    assert_eq!(removed, [true, true, true, true, true, false, false]);
}

#[test]
fn a_run_that_goes_on_from_an_earlier_step_is_not_pruned_under_its_feet() {
    let mut some = units([100, 110, 200, 300]);
    // Resumed at 100: 110 is new, and the only one of the new branch.
    some[1].modified_ns = NOW - HOUR / 2;
    assert_eq!(gone(&some, "keep_last = 1"), [100, 200]);
    some[1].files = 1;
    assert_eq!(gone(&some, "keep_last = 1"), [100, 200], "nor while it is being written");
    some[1].files = 3;
    some[1].modified_ns = NOW - 2 * HOUR;
    let verdicts = plan(&some, &[rule("keep_last = 1")], NOW);
    assert_eq!(verdicts[1], Verdict::Keep("the one written last".into()));
}

#[test]
fn a_run_that_diverged_keeps_its_last_finite_states() {
    let mut ten = units(1..=10);
    ten[4..].iter_mut().for_each(|unit| unit.diverged = true);
    assert_eq!(gone(&ten, "keep_last = 2"), [1, 2, 5, 6, 7, 8]);
    assert_eq!(gone(&ten, "keep_for = \"0s\""), [1, 2, 3, 5, 6, 7, 8, 9]);
    // The newest is not compared yet.
    ten[9].diverged = false;
    assert_eq!(gone(&ten, "keep_last = 2"), [1, 2, 3, 5, 6, 7, 8]);
    ten.iter_mut().for_each(|unit| unit.diverged = true);
    assert_eq!(gone(&ten, "keep_last = 2"), [1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn reasons_are_words() {
    let verdicts = plan(&units([7, 8, 9]), &[rule("keep_last = 2\nkeep_every = 5\nkeep_for = \"2h\"")], NOW);
    let Verdict::Remove { why, .. } = &verdicts[0] else { panic!("{verdicts:?}") };
    assert_eq!(why, "not among the last 2, 7 is no multiple of 5, older than 2h");
    assert_eq!(verdicts[1], Verdict::Keep("among the last 2".into()));
}

fn any_unit() -> impl Strategy<Value = Unit> {
    let weird = (prop::bool::weighted(0.1), prop::bool::weighted(0.1), prop::bool::weighted(0.2), 0..4u64);
    let marked = (prop::bool::weighted(0.2), prop::bool::weighted(0.1), prop::bool::weighted(0.3));
    let found = (prop::bool::weighted(0.3), 0..3u64, prop::sample::select(vec![300, 700, 900, 1000]));
    (0..30u64, 0..3u8, -3 * HOUR..48 * HOUR, weird, marked, found).prop_map(
        |(
            step,
            series,
            age,
            (being_written, lacks, is_invalid, files),
            (pinned, best, diverged),
            (is_file, with_tensors, bytes),
        )| {
            Unit {
                kind: if is_file { Kind::File } else { Kind::Directory },
                with_tensors: with_tensors.min(files),
                bytes,
                series: vec![series],
                path: PathBuf::from(format!("{series}/{step}-{age}")),
                modified_ns: NOW - age,
                being_written,
                lacks,
                diverged,
                is_version: !is_invalid,
                files,
                pinned,
                best,
                ..unit(step)
            }
        },
    )
}

fn any_rule() -> impl Strategy<Value = Rule> {
    let parts = (prop::option::of(1..5u64), prop::option::of(1..9u64), prop::option::of(0..60u64));
    (parts, prop::option::of(0..4u64)).prop_filter_map("a rule", |((last, every, hours), max)| {
        let mut keys = String::new();
        last.into_iter().for_each(|n| keys += &format!("keep_last = {n}\n"));
        every.into_iter().for_each(|n| keys += &format!("keep_every = {n}\n"));
        hours.into_iter().for_each(|n| keys += &format!("keep_for = \"{n}h\"\n"));
        max.into_iter().for_each(|n| keys += &format!("keep_checkpoint_max = {n}\n"));
        (!keys.is_empty()).then(|| rule(&keys))
    })
}

/// Members of each series in order.
fn ordered(units: &[Unit]) -> Vec<Vec<usize>> {
    let mut series: BTreeMap<(Kind, &[u8]), Vec<usize>> = BTreeMap::new();
    for (at, unit) in units.iter().enumerate() {
        series.entry((unit.kind, &unit.series)).or_default().push(at);
    }
    let mut all: Vec<Vec<usize>> = series.into_values().collect();
    for members in &mut all {
        members.sort_by_key(|&at| (&units[at].steps, units[at].modified_ns, &units[at].path));
    }
    all
}

proptest! {
    #[test]
    fn what_must_stay_stays(units in prop::collection::vec(any_unit(), 0..40), rule in any_rule()) {
        let rules = [rule];
        let verdicts = plan(&units, &rules, NOW);
        for (unit, verdict) in units.iter().zip(&verdicts) {
            prop_assert!(!verdict.removes() || !(unit.pinned || unit.best || unit.being_written));
            let multiple = rules[0].keep_every.is_some_and(|n| unit.steps[0] % n == 0);
            let young = rules[0].keep_for.as_ref().is_some_and(|f| NOW - unit.modified_ns < f.0 as i64);
            prop_assert!(!verdict.removes() || !(multiple || young));
            if let Verdict::Remove { newest, .. } = verdict {
                prop_assert!(!verdicts[*newest].removes() && units[*newest].series == unit.series);
            }
        }
        for members in ordered(&units) {
            let judged = judge(&units, &rules[0], NOW, &members);
            let complete: Vec<bool> = judged.iter().map(|judged| judged.complete).collect();
            let newest = complete.iter().rposition(|complete| *complete);
            // The newest complete one, and everything after it; without one, everything.
            for &at in &members[newest.unwrap_or(0)..] {
                prop_assert!(!verdicts[at].removes(), "{:?}", units[at]);
            }
            // The last N complete ones.
            let count = rules[0].keep_last.unwrap_or(0) as usize;
            let last = members.iter().zip(&complete).rev().filter(|(_, c)| **c).take(count);
            for (&at, _) in last {
                prop_assert!(!verdicts[at].removes(), "{:?}", units[at]);
            }
        }
    }

    #[test]
    fn a_second_run_removes_nothing(units in prop::collection::vec(any_unit(), 0..40), rule in any_rule()) {
        let rules = [rule];
        let verdicts = plan(&units, &rules, NOW);
        let left: Vec<Unit> =
            units.iter().zip(&verdicts).filter(|(_, v)| !v.removes()).map(|(u, _)| u.clone()).collect();
        let again = plan(&left, &rules, NOW);
        prop_assert!(again.iter().all(|verdict| !verdict.removes()), "{again:?}");
    }

    #[test]
    fn the_order_of_looking_does_not_matter(
        units in prop::collection::vec(any_unit(), 0..30), rule in any_rule(), turn in 0..30usize
    ) {
        let mut units = units;
        units.sort_by(|a, b| a.path.cmp(&b.path));
        units.dedup_by(|a, b| a.path == b.path);
        let rules = [rule];
        let by_path = |units: &[Unit]| {
            let verdicts = plan(units, &rules, NOW);
            let why = |verdict: &Verdict| match verdict {
                Verdict::Keep(why) => why.to_string(),
                Verdict::Remove { why, .. } => why.clone(),
            };
            let newest = |verdict: &Verdict| match verdict {
                Verdict::Keep(_) => None,
                Verdict::Remove { newest, .. } => Some(units[*newest].path.clone()),
            };
            let said = verdicts.iter().map(|verdict| (why(verdict), newest(verdict)));
            units.iter().map(|unit| unit.path.clone()).zip(said).collect::<BTreeMap<_, _>>()
        };
        let expected = by_path(&units);
        units.reverse();
        prop_assert_eq!(&by_path(&units), &expected);
        let middle = turn % units.len().max(1);
        units.rotate_left(middle);
        prop_assert_eq!(&by_path(&units), &expected);
    }

    #[test]
    fn keep_last_keeps_exactly_so_many(
        steps in prop::collection::btree_set(0..1000u64, 1..40), pins in prop::collection::vec(any::<bool>(), 40),
        count in 1..10u64
    ) {
        // Written in the order of their steps; pinned ones count like all others.
        let mut units = units(steps);
        units.iter_mut().zip(pins).for_each(|(unit, pinned)| unit.pinned = pinned && unit.step.unwrap_or(0) % 3 == 0);
        let verdicts = plan(&units, &[rule(&format!("keep_last = {count}"))], NOW);
        for (place, (unit, verdict)) in units.iter().rev().zip(verdicts.iter().rev()).enumerate() {
            prop_assert_eq!(verdict.removes(), place as u64 >= count && !unit.pinned);
        }
    }
}
