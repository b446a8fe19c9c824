//! Decides which checkpoints stay. Pure: facts in, a verdict for each out.
//!
//! The checkpoints that match one rule and differ only in their step are a *series*, ordered by step, then by
//! modification time. No rule ever removes these:
//! - a pinned checkpoint;
//! - one that its run's files or a link name as the best;
//! - the newest complete one;
//! - one newer than that, since it may still be being written;
//! - the complete one that was written last, in case steps began anew;
//! - the last one with so many files, or with tensors in so many: a run may die at the same place again and again;
//! - a file beside the newest complete file of another series with the same step: together they may be a checkpoint.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::Rule;

/// No job pauses longer than this between two files of one checkpoint, nanoseconds. A checkpoint that did not change
/// for an hour is not being written.
pub const SETTLED_NS: i64 = 3600 * 1_000_000_000;

/// Why a checkpoint stays that may be the next one.
const NOT_COMPLETE: Cow<'static, str> = Cow::Borrowed("not complete, may still be being written");
const FEWER: Cow<'static, str> =
    Cow::Borrowed("fewer files, or fewer with tensors, than in the complete one before; may still be being written");
/// Why a checkpoint stays that a run may go on from.
const FULLEST: Cow<'static, str> = Cow::Borrowed("the last one with so many files, or with tensors in so many");
const NEWEST: Cow<'static, str> = Cow::Borrowed("the newest complete one");

/// The kind of a checkpoint in the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// One file, or all shards of one name beside each other.
    File,
    /// A directory with all its content.
    Directory,
}

/// One checkpoint as found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Path inside the tree; for shards, with `*` for their number.
    pub path: PathBuf,
    /// Index of the first matching rule.
    pub rule: usize,
    /// Its kind.
    pub kind: Kind,
    /// The same for all checkpoints of one series.
    pub series: Vec<u8>,
    /// Its place in the series: all numbers that count training.
    pub steps: Vec<u64>,
    /// The one that `keep_every` divides; `u64::MAX` also stands for larger numbers.
    pub step: Option<u64>,
    /// Last change of its newest file, or of the directory itself if it has no files. Nanoseconds since 1970.
    pub modified_ns: i64,
    /// Number of regular files in it.
    pub files: u64,
    /// Number of those in which stepfs finds tensors.
    pub with_tensors: u64,
    /// Size that programs see.
    pub bytes: u64,
    /// A file of it is open for writing, or not durable yet.
    pub being_written: bool,
    /// A shard or the bytes of a released file are missing.
    pub lacks: bool,
    /// True for a version that ElasticDL calls valid: it has as many entries as their names say, and at least one.
    pub is_version: bool,
    /// The checkpoint, something above it or something in it is pinned.
    pub pinned: bool,
    /// A file of the run, or a link, names it or something in it as the best.
    pub best: bool,
}

/// The decision about a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It stays; the text gives the reason.
    Keep(Cow<'static, str>),
    /// It is removed; the text names the limits it failed.
    Remove(String),
}

impl Verdict {
    /// True if it is removed.
    pub fn removes(&self) -> bool {
        matches!(self, Verdict::Remove(_))
    }
}

/// A verdict for each of `units`, whose rules are in `rules`, at the time `now_ns` (since 1970).
///
/// A second plan for the remaining checkpoints removes nothing. Completeness depends on the checkpoints before, so each
/// result is planned again until nothing more is removed.
pub fn plan(units: &[Unit], rules: &[Rule], now_ns: i64) -> Vec<Verdict> {
    let mut series: BTreeMap<(usize, Kind, &[u8]), Vec<usize>> = BTreeMap::new();
    for (at, unit) in units.iter().enumerate() {
        series.entry((unit.rule, unit.kind, &unit.series)).or_default().push(at);
    }
    let mut verdicts = vec![Verdict::Keep(NOT_COMPLETE); units.len()];
    for ((rule, _, _), mut members) in series {
        let Some(rule) = rules.get(rule) else { continue };
        members.sort_by_key(|&at| (&units[at].steps, units[at].modified_ns, &units[at].path));
        while let Some(gone) = one_pass(units, rule, now_ns, &members, &mut verdicts) {
            members = gone;
        }
    }
    keep_beside_newest(units, &mut verdicts);
    verdicts
}

/// Keeps files that lie beside the newest complete file of another series, and have its steps. A run that dies between
/// the model's file and the optimizer's goes on from the two before.
fn keep_beside_newest(units: &[Unit], verdicts: &mut [Verdict]) {
    let key = |unit: &Unit| match unit.kind {
        Kind::File if !unit.steps.is_empty() => Some((unit.path.parent().map(Path::to_path_buf), unit.steps.clone())),
        _ => None,
    };
    let is_newest = |verdict: &Verdict| matches!(verdict, Verdict::Keep(why) if *why == NEWEST);
    let newest = units.iter().zip(&*verdicts).filter(|(_, verdict)| is_newest(verdict));
    let mut series: HashMap<_, HashSet<&[u8]>> = HashMap::new();
    for (key, unit) in newest.filter_map(|(unit, _)| Some((key(unit)?, unit))) {
        series.entry(key).or_default().insert(&unit.series);
    }
    let is_other = |of: &HashSet<&[u8]>, unit: &Unit| of.iter().any(|series| *series != unit.series);
    for (unit, verdict) in units.iter().zip(verdicts) {
        if verdict.removes() && key(unit).and_then(|key| series.get(&key)).is_some_and(|of| is_other(of, unit)) {
            *verdict = Verdict::Keep("beside the newest complete one of another series, with its step".into());
        }
    }
}

/// Decides for the members of one series, oldest first. Returns the remaining ones if any is removed.
fn one_pass(
    units: &[Unit],
    rule: &Rule,
    now_ns: i64,
    members: &[usize],
    verdicts: &mut [Verdict],
) -> Option<Vec<usize>> {
    let complete = complete(units, rule, now_ns, members);
    let fullest = fullest(units, rule, members, &complete);
    let newest = complete.iter().rposition(|complete| *complete);
    let of_complete = members.iter().zip(&complete).filter(|(_, complete)| **complete).map(|(&at, _)| at);
    let last_written = of_complete.max_by_key(|&at| (units[at].modified_ns, at == members[newest.unwrap_or(0)]));
    // Number of complete ones that are newer than the current one.
    let mut newer = 0;
    let mut stay = Vec::new();
    for (place, &at) in members.iter().enumerate().rev() {
        let unit = &units[at];
        let kept = match newest {
            _ if unit.pinned => Some("pinned".into()),
            _ if unit.best => Some("named as the best of its run".into()),
            _ if unit.being_written => Some("being written".into()),
            _ if newest == Some(place) => Some(NEWEST),
            _ if fullest[place] => Some(FULLEST),
            // A checkpoint that was half removed at a power failure is never taken for a half-written one. Its step and
            // the times of its files are older than a complete one's, and removing other files does not change them. An
            // empty directory has only its own time; it waits for an hour.
            Some(newest) if place < newest => {
                let after = unit.modified_ns > units[members[newest]].modified_ns;
                match after && now_ns.saturating_sub(unit.modified_ns) < SETTLED_NS {
                    true => Some("written after the one with the largest step, less than an hour ago".into()),
                    false if last_written == Some(at) => Some("the one written last".into()),
                    false => wanted(unit, rule, newer, now_ns),
                }
            }
            Some(newest) if fullness(unit) < fullness(&units[members[newest]]) => Some(FEWER),
            _ => Some(NOT_COMPLETE),
        };
        newer += u64::from(complete[place]);
        verdicts[at] = match kept {
            Some(keep) => {
                stay.push(at);
                Verdict::Keep(keep)
            }
            None => Verdict::Remove(unwanted(unit, rule, complete[place])),
        };
    }
    stay.reverse();
    (stay.len() < members.len()).then_some(stay)
}

/// Which members of a series are whole checkpoints that no program writes.
fn complete(units: &[Unit], rule: &Rule, now_ns: i64, members: &[usize]) -> Vec<bool> {
    let mut complete = Vec::with_capacity(members.len());
    // The last complete one, and the one just before.
    let (mut reference, mut before): (Option<&Unit>, Option<&Unit>) = (None, None);
    for &at in members {
        let unit = &units[at];
        // A program that writes several files closes each before it opens the next. Between two, a checkpoint only has
        // fewer files than the one before. If the program dies within one, stepfs finds no tensors in that. Fewer are
        // complete if two checkpoints in a row have that number and the second has settled.
        let settled = now_ns.saturating_sub(unit.modified_ns) >= SETTLED_NS;
        let agree = |before: &Unit| fullness(before) == fullness(unit);
        let whole = match rule.keep_checkpoint_max {
            Some(_) => unit.is_version,
            None => {
                reference.is_none_or(|last| fullness(unit) >= fullness(last)) || (settled && before.is_some_and(agree))
            }
        };
        let is_complete = whole && unit.files > 0 && unit.bytes > 0 && !unit.lacks && !unit.being_written;
        complete.push(is_complete);
        reference = if is_complete { Some(unit) } else { reference };
        before = Some(unit);
    }
    complete
}

/// How much a checkpoint has, to compare it with others of its series: first by files with tensors, then by files. One
/// file may have fewer shards than the one before, if stepfs finds tensors in each.
fn fullness(unit: &Unit) -> (u64, u64) {
    match unit.kind {
        Kind::File if unit.with_tensors >= unit.files => (u64::MAX, 0),
        Kind::File => (unit.with_tensors, 0),
        Kind::Directory => (unit.with_tensors, unit.files),
    }
}

/// Which complete members of a series have more than each later complete one. ElasticDL itself says what is complete.
fn fullest(units: &[Unit], rule: &Rule, members: &[usize], complete: &[bool]) -> Vec<bool> {
    let mut fullest = vec![false; members.len()];
    let mut most = None;
    for place in (0..members.len()).rev().filter(|&place| complete[place] && rule.keep_checkpoint_max.is_none()) {
        let fullness = Some(fullness(&units[members[place]]));
        if fullness > most {
            (fullest[place], most) = (true, fullness);
        }
    }
    fullest
}

/// Why the rule keeps a checkpoint; `newer` complete ones are newer.
fn wanted(unit: &Unit, rule: &Rule, newer: u64, now_ns: i64) -> Option<Cow<'static, str>> {
    let last = |count: u64| match count {
        1 => "no newer one is complete".into(),
        count => format!("among the last {count}").into(),
    };
    if let Some(count) = rule.keep_last.filter(|count| newer < *count) {
        return Some(last(count));
    }
    // A number too large for 64 bits may be a multiple.
    let is_multiple = |number: &u64| unit.step.is_some_and(|step| step == u64::MAX || step % number == 0);
    if let Some(number) = rule.keep_every.filter(is_multiple) {
        return Some(format!("its step is a multiple of {number}").into());
    }
    let age = now_ns.saturating_sub(unit.modified_ns);
    let is_young = |span: u64| age < i64::try_from(span).unwrap_or(i64::MAX);
    if let Some((_, text)) = rule.keep_for.as_ref().filter(|(span, _)| is_young(*span)) {
        return Some(format!("younger than {text}").into());
    }
    match rule.keep_checkpoint_max? {
        0 => Some("keep_checkpoint_max = 0 keeps all".into()),
        _ if unit.kind == Kind::File => Some("no version directory".into()),
        max => (newer < max).then(|| last(max)),
    }
}

/// Why no part of the rule keeps a checkpoint.
fn unwanted(unit: &Unit, rule: &Rule, complete: bool) -> String {
    let mut why = Vec::new();
    if !complete {
        why.push(if unit.files == 0 { "empty".to_string() } else { "not complete".to_string() });
    }
    if let Some(count) = rule.keep_last.or(rule.keep_checkpoint_max) {
        why.push(match count {
            1 => "a newer one is complete".into(),
            count => format!("not among the last {count}"),
        });
    }
    if let Some(number) = rule.keep_every {
        why.push(match unit.step {
            Some(step) => format!("{step} is no multiple of {number}"),
            None => format!("it has no step that could be a multiple of {number}"),
        });
    }
    if let Some((_, text)) = &rule.keep_for {
        why.push(format!("older than {text}"));
    }
    why.join(", ")
}

#[cfg(test)]
mod tests;
