//! Decides which checkpoints stay. Pure: facts in, a verdict for each out.
//!
//! The checkpoints that match one rule and differ only in their step are a *series*, ordered by step, then by
//! modification time. No rule ever removes these:
//! - a pinned checkpoint;
//! - one that its run's files or a link name as the best;
//! - the newest complete one, and the newest one of these that is not known to have diverged: those that are known count only
//!   for each other;
//! - one newer than that, since it may still be being written;
//! - the complete one that was written last, in case steps began anew;
//! - the last one with so many files, with tensors in so many, or with about so many bytes: a run may die at the same
//!   place again and again, or save weights alone;
//! - the first one with less that counts as complete, as long as fuller ones are there;
//! - a file beside the newest complete file of another series with the same step: together they may be a checkpoint;
//! - a file in the newest complete directory of a series, or in the last one with so many files, whatever rule the file has.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::Rule;

/// No job pauses longer than this between two files of one checkpoint, nanoseconds. A checkpoint that did not change
/// for an hour is not being written.
pub const SETTLED_NS: i64 = 3600 * 1_000_000_000;

/// Why a checkpoint stays that may be the next one.
const NOT_COMPLETE: Cow<'static, str> = Cow::Borrowed("not complete, may still be being written");
const FEWER: Cow<'static, str> = Cow::Borrowed(
    "it has fewer files, or fewer with tensors, than the complete one before; may still be being written",
);
const NO_TENSORS: Cow<'static, str> =
    Cow::Borrowed("stepfs finds no tensors in it, but in the complete one before: it may be cut short");
const SMALLER: Cow<'static, str> = Cow::Borrowed(
    "it has less than three quarters of the bytes of the complete one before: it may lack an optimizer's state",
);
/// Why a checkpoint stays that a run may go on from.
const FULLEST: Cow<'static, str> =
    Cow::Borrowed("it has more files, more with tensors, or far more bytes than each newer complete one");
const WITNESS: Cow<'static, str> = Cow::Borrowed(
    "the first with fewer files than before, fewer with tensors or far fewer bytes: it shows that newer ones are complete",
);
const NEWEST: Cow<'static, str> = Cow::Borrowed("the newest complete one");
const FINITE: Cow<'static, str> = Cow::Borrowed("the newest complete one whose weights are finite");
const LATER: Cow<'static, str> = Cow::Borrowed("written after the one with the largest step, less than an hour ago");
const LAST: Cow<'static, str> = Cow::Borrowed("the one written last");

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
    /// Number of regular files in it that are neither empty, nor cut short, nor temporary.
    pub files: u64,
    /// Number of those in which stepfs finds tensors.
    pub with_tensors: u64,
    /// Size that programs see.
    pub bytes: u64,
    /// Of these, files that a rule of their own may remove.
    pub own: Own,
    /// A file of it is open for writing, or not durable yet.
    pub being_written: bool,
    /// A shard or the bytes of a released file are missing.
    pub lacks: bool,
    /// Weights in it are known not to be finite, and those of the state before it are.
    pub diverged: bool,
    /// True for a version that ElasticDL calls valid: it has as many entries as their names say, and at least one.
    pub is_version: bool,
    /// The checkpoint, something above it or something in it is pinned.
    pub pinned: bool,
    /// A file of the run, or a link, names it or something in it as the best.
    pub best: bool,
}

/// The files in a directory that a rule of their own may remove, as [`Unit`] counts all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Own {
    /// Files that count.
    pub files: u64,
    /// Those with tensors.
    pub with_tensors: u64,
    /// Size that programs see.
    pub bytes: u64,
}

/// The decision about a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It stays; the text gives the reason.
    Keep(Cow<'static, str>),
    /// It is removed.
    Remove {
        /// Names the limits it failed.
        why: String,
        /// Index of the newest complete one of its series, which stays.
        newest: usize,
    },
}

impl Verdict {
    /// True if it is removed.
    pub fn removes(&self) -> bool {
        matches!(self, Verdict::Remove { .. })
    }
}

/// A verdict for each of `units`, whose rules are in `rules`, at the time `now_ns` (since 1970).
///
/// A second plan for the remaining checkpoints removes nothing. Completeness depends on the checkpoints before, so each
/// result is planned again until nothing more is removed.
pub fn plan(units: &[Unit], rules: &[Rule], now_ns: i64) -> Vec<Verdict> {
    let mut verdicts = vec![Verdict::Keep(NOT_COMPLETE); units.len()];
    // Of each complete one: the number of newer complete ones.
    let mut newer = vec![None; units.len()];
    for (rule, mut members) in series(units, rules) {
        while let Some(left) = one_pass(units, (rule, now_ns), &members, &mut newer, &mut verdicts) {
            members = left;
        }
    }
    keep_beside_newest(units, &newer, &mut verdicts);
    keep_in_newest(units, &mut verdicts);
    verdicts
}

/// The series of checkpoints, each by its rule and from the oldest to the newest.
fn series<'a>(units: &[Unit], rules: &'a [Rule]) -> impl Iterator<Item = (&'a Rule, Vec<usize>)> {
    let mut series: BTreeMap<(usize, Kind, &[u8]), Vec<usize>> = BTreeMap::new();
    for (at, unit) in units.iter().enumerate() {
        series.entry((unit.rule, unit.kind, &unit.series)).or_default().push(at);
    }
    let members = series.into_iter().filter_map(|((rule, ..), mut members)| {
        members.sort_by_key(|&at| (&units[at].steps, units[at].modified_ns, &units[at].path));
        Some((rules.get(rule)?, members))
    });
    members.collect::<Vec<_>>().into_iter()
}

/// Which of `units` are whole, and are not being written, at the time `now_ns` (since 1970).
pub fn complete(units: &[Unit], rules: &[Rule], now_ns: i64) -> Vec<bool> {
    let mut complete = vec![false; units.len()];
    for (rule, members) in series(units, rules) {
        let judged = judge(units, rule, now_ns, &members);
        members.iter().zip(judged).for_each(|(&at, judged)| complete[at] = judged.complete);
    }
    complete
}

/// Keeps a complete file where one beside it, with its steps, is the newest complete one of another series. A run that
/// dies between the model's file and the optimizer's, however often, goes on from the last two of one step.
fn keep_beside_newest(units: &[Unit], newer: &[Option<u64>], verdicts: &mut [Verdict]) {
    let key = |unit: &Unit| match unit.kind {
        Kind::File if !unit.steps.is_empty() => Some((unit.path.parent().map(Path::to_path_buf), unit.steps.clone())),
        _ => None,
    };
    let newest = units.iter().zip(newer).filter(|(_, newer)| **newer == Some(0));
    let mut series: HashMap<_, HashSet<&[u8]>> = HashMap::new();
    for (key, unit) in newest.filter_map(|(unit, _)| Some((key(unit)?, unit))) {
        series.entry(key).or_default().insert(&unit.series);
    }
    let is_other = |of: &HashSet<&[u8]>, unit: &Unit| of.iter().any(|series| *series != unit.series);
    for ((unit, newer), verdict) in units.iter().zip(newer).zip(verdicts) {
        let goes = verdict.removes() && newer.is_some();
        if goes && key(unit).and_then(|key| series.get(&key)).is_some_and(|of| is_other(of, unit)) {
            *verdict = Verdict::Keep("beside the newest complete one of another series, with its step".into());
        }
    }
}

/// Keeps the files in a directory that a run may go on from, whatever rule they have of their own: so in one of which something
/// is pinned or named as the best. A run that dies in a save, however often, may leave whole files in newer directories
/// that are not complete.
fn keep_in_newest(units: &[Unit], verdicts: &mut [Verdict]) {
    let goes_on = |(unit, verdict): &(&Unit, &Verdict)| {
        let Verdict::Keep(why) = verdict else { return false };
        unit.kind == Kind::Directory
            && (unit.pinned || unit.best || [NEWEST, FINITE, FULLEST, LAST, LATER].contains(why))
    };
    let kept = units.iter().zip(&*verdicts).filter(goes_on).map(|(unit, _)| unit.path.as_path());
    let kept: HashSet<&Path> = kept.collect();
    for (unit, verdict) in units.iter().zip(verdicts) {
        if verdict.removes() && unit.path.ancestors().skip(1).any(|above| kept.contains(above)) {
            *verdict = Verdict::Keep("in a checkpoint that the run may go on from".into());
        }
    }
}

/// Decides for the members of one series, oldest first. Returns the remaining ones if any is removed.
fn one_pass(
    units: &[Unit],
    (rule, now_ns): (&Rule, i64),
    members: &[usize],
    newer_of: &mut [Option<u64>],
    verdicts: &mut [Verdict],
) -> Option<Vec<usize>> {
    let judged = judge(units, rule, now_ns, members);
    let newest = judged.iter().rposition(|judged| judged.complete);
    let mut both = judged.iter().zip(members);
    let finite = both.rposition(|(judged, &at)| judged.complete && !units[at].diverged);
    // Without a complete one nothing is removed.
    let newest_at = newest.map_or(usize::MAX, |newest| members[newest]);
    let of_complete = members.iter().zip(&judged).filter(|(_, judged)| judged.complete).map(|(&at, _)| at);
    let last_written = of_complete.max_by_key(|&at| (units[at].modified_ns, at == newest_at));
    // Number of complete ones that are newer than the current one, and of those that have not diverged.
    let (mut newer, mut newer_finite) = (0, 0);
    let mut stay = Vec::new();
    for (place, &at) in members.iter().enumerate().rev() {
        let unit = &units[at];
        let kept = match newest {
            _ if unit.pinned => Some("pinned".into()),
            _ if unit.best => Some("named as the best of its run".into()),
            _ if unit.being_written => Some("being written".into()),
            _ if newest == Some(place) => Some(NEWEST),
            _ if finite == Some(place) => Some(FINITE),
            _ if judged[place].fullest => Some(FULLEST),
            _ if judged[place].witness => Some(WITNESS),
            // A checkpoint that was half removed at a power failure is never taken for a half-written one. Its step and
            // the times of its files are older than a complete one's, and removing other files does not change them. An
            // empty directory has only its own time; it waits for an hour.
            Some(newest) if place < newest => {
                let after = unit.modified_ns > units[members[newest]].modified_ns;
                match after && now_ns.saturating_sub(unit.modified_ns) < SETTLED_NS {
                    true => Some(LATER),
                    false if last_written == Some(at) => Some(LAST),
                    false => wanted(unit, rule, if unit.diverged { newer } else { newer_finite }, now_ns),
                }
            }
            Some(newest) => {
                let lack = Fullness::of(unit, rule).lack(Fullness::of(&units[members[newest]], rule));
                Some(match (lack, unit.kind) {
                    (Some(Lack::Files), Kind::File) => NO_TENSORS,
                    (Some(Lack::Files), Kind::Directory) => FEWER,
                    (Some(Lack::Bytes), _) => SMALLER,
                    (None, _) => NOT_COMPLETE,
                })
            }
            None => Some(NOT_COMPLETE),
        };
        newer_of[at] = judged[place].complete.then_some(newer);
        newer += u64::from(judged[place].complete);
        newer_finite += u64::from(judged[place].complete && !unit.diverged);
        verdicts[at] = match kept {
            Some(keep) => {
                stay.push(at);
                Verdict::Keep(keep)
            }
            None => Verdict::Remove { why: unwanted(unit, rule, judged[place].complete), newest: newest_at },
        };
    }
    stay.reverse();
    (stay.len() < members.len()).then_some(stay)
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
        why.push(if unit.bytes == 0 { "empty".to_string() } else { "not complete".to_string() });
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

/// A checkpoint with less than this share of another one's bytes lacks something that the other has, as numerator and
/// denominator. Weights without the optimizer's state are a third to two thirds (8-bit AdamW) of a whole state. What a
/// format does not tell may be cut short, too.
const LEAST_BYTES: (u128, u128) = (3, 4);

/// The judgement of one checkpoint of a series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Judged {
    /// It is whole, and no program writes it.
    complete: bool,
    /// It has less than the complete one before, and shows that this is no accident.
    witness: bool,
    /// It is complete, and no later complete one has as many files, tensors in as many, and hardly fewer bytes.
    fullest: bool,
}

/// Judges the members of a series, given oldest first.
///
/// A program that writes several files closes each before it opens the next. Between two, a checkpoint only has fewer
/// files than the one before. If the program dies within one, stepfs finds no tensors in that. A save of weights alone
/// has far fewer bytes. Less than before is complete if two checkpoints in a row have the same and the first has
/// settled. The first stays, to show it to those after it. It is also complete if it lacks nothing but files with a rule
/// of their own, and a later one lacks nothing.
fn judge(units: &[Unit], rule: &Rule, now_ns: i64, members: &[usize]) -> Vec<Judged> {
    let mut judged = vec![Judged::default(); members.len()];
    let mut last_complete: Option<&Unit> = None;
    for (place, &at) in members.iter().enumerate() {
        let (unit, own) = (&units[at], Fullness::of(&units[at], rule));
        let is_sound = unit.files > 0 && unit.bytes > 0 && !unit.lacks && !unit.being_written;
        let is_version = rule.keep_checkpoint_max.is_none() || unit.is_version;
        let as_full = last_complete.is_none_or(|last| own.lack(Fullness::of(last, rule)).is_none());
        let is_stripped = unit.own.files == 0
            && last_complete.is_some_and(|last| {
                // A later one that is as full shows that the rule took them, not a writer's death.
                let is_as_full = |later: &usize| {
                    let later = &units[*later];
                    !later.lacks
                        && !later.being_written
                        && Fullness::of(later, rule).lack(Fullness::of(last, rule)).is_none()
                };
                own.lack(Fullness::without_own(last, rule)).is_none()
                    && members[place + 1..].iter().rev().any(is_as_full)
            });
        let settled = now_ns.saturating_sub(unit.modified_ns) >= SETTLED_NS;
        let agrees = || members.get(place + 1).is_some_and(|&next| Fullness::of(&units[next], rule).is_like(own));
        judged[place].witness = is_sound && is_version && !as_full && !is_stripped && settled && agrees();
        judged[place].complete = is_sound && is_version && (as_full || is_stripped || judged[place].witness);
        // A stripped one says nothing about the files of the next.
        if judged[place].complete && (as_full || !is_stripped) {
            last_complete = Some(unit);
        }
    }
    let mut later: Vec<Fullness> = Vec::new();
    for (place, &at) in members.iter().enumerate().rev().filter(|(_, at)| units[**at].files > 0) {
        let own = Fullness::of(&units[at], rule);
        if judged[place].complete && !later.iter().any(|later| later.covers(own)) {
            judged[place].fullest = true;
            later.push(own);
        }
    }
    judged
}

/// How much a checkpoint has, to compare it with others of its series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fullness {
    /// Files with tensors, and files. Shards may be fewer than before, if stepfs finds tensors in each: then
    /// `u64::MAX` and 0.
    files: (u64, u64),
    /// 0 for an ElasticDL version: its names say whether it is whole, and its tables may shrink.
    bytes: u64,
}

/// What a checkpoint has less of than another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lack {
    /// Files with tensors, or files.
    Files,
    Bytes,
}

impl Fullness {
    fn of(unit: &Unit, rule: &Rule) -> Fullness {
        let files = match unit.kind {
            Kind::Directory if rule.keep_checkpoint_max.is_none() => (unit.with_tensors, unit.files),
            _ if unit.with_tensors >= unit.files => (u64::MAX, 0),
            _ => (unit.with_tensors, 0),
        };
        Fullness { files, bytes: if rule.keep_checkpoint_max.is_none() { unit.bytes } else { 0 } }
    }

    /// Without the files that a rule of their own may remove.
    fn without_own(unit: &Unit, rule: &Rule) -> Fullness {
        let Own { files, with_tensors, bytes } = unit.own;
        let (files, with_tensors) = (unit.files - files, unit.with_tensors - with_tensors);
        Fullness::of(
            &Unit { files, with_tensors, bytes: unit.bytes - bytes, own: Own::default(), ..unit.clone() },
            rule,
        )
    }

    /// What this one lacks that the other has. Files with tensors count before files, and more of them before bytes:
    /// else a full checkpoint would stop being complete once one between the two is gone.
    fn lack(self, other: Fullness) -> Option<Lack> {
        match self.files.cmp(&other.files) {
            Ordering::Less => Some(Lack::Files),
            Ordering::Equal => (!self.has_bytes_of(other)).then_some(Lack::Bytes),
            Ordering::Greater => None,
        }
    }

    fn has_bytes_of(self, other: Fullness) -> bool {
        u128::from(self.bytes) * LEAST_BYTES.1 >= u128::from(other.bytes) * LEAST_BYTES.0
    }

    /// Whether two checkpoints show each other that they are meant to be as they are. A whole state after a save of
    /// weights alone shows nothing about that.
    fn is_like(self, other: Fullness) -> bool {
        self.files == other.files && self.has_bytes_of(other) && other.has_bytes_of(self)
    }

    /// Whether the other one has nothing that this one lacks.
    fn covers(self, other: Fullness) -> bool {
        self.files.0 >= other.files.0 && self.files.1 >= other.files.1 && self.has_bytes_of(other)
    }
}

#[cfg(test)]
mod tests;
