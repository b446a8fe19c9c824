//! Judges which checkpoints of a series are whole.

use super::Rule;
use super::plan::{Kind, SETTLED_NS, Unit};

/// The judgement of one checkpoint of a series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Judged {
    /// It is whole, and no program writes it.
    pub(super) complete: bool,
    /// It has fewer files than the complete one before, and shows that this is no accident.
    pub(super) witness: bool,
    /// It is complete, and no later complete one has as many files and tensors in as many.
    pub(super) fullest: bool,
}

/// Judges the members of a series, given oldest first.
///
/// A program that writes several files closes each before it opens the next. Between two, a checkpoint only has fewer
/// files than the one before. If the program dies within one, stepfs finds no tensors in that. Fewer are complete if
/// two checkpoints in a row have that number and the first has settled. The first stays, to show it to those after it.
pub(super) fn judge(units: &[Unit], rule: &Rule, now_ns: i64, members: &[usize]) -> Vec<Judged> {
    let mut judged = vec![Judged::default(); members.len()];
    // The last complete one.
    let mut reference: Option<(u64, u64)> = None;
    for (place, &at) in members.iter().enumerate() {
        let (unit, own) = (&units[at], fullness(&units[at], rule));
        let is_sound = unit.files > 0 && unit.bytes > 0 && !unit.lacks && !unit.being_written;
        let is_version = rule.keep_checkpoint_max.is_none() || unit.is_version;
        let as_full = reference.is_none_or(|last| own >= last);
        let settled = now_ns.saturating_sub(unit.modified_ns) >= SETTLED_NS;
        let agrees = || members.get(place + 1).is_some_and(|&next| fullness(&units[next], rule) == own);
        judged[place].witness = is_sound && is_version && !as_full && settled && agrees();
        judged[place].complete = is_sound && is_version && (as_full || judged[place].witness);
        if judged[place].complete {
            reference = Some(own);
        }
    }
    let mut later: Vec<(u64, u64)> = Vec::new();
    for (place, &at) in members.iter().enumerate().rev().filter(|(_, at)| units[**at].files > 0) {
        let (tensors, files) = fullness(&units[at], rule);
        if judged[place].complete && !later.iter().any(|most| most.0 >= tensors && most.1 >= files) {
            judged[place].fullest = true;
            later.push((tensors, files));
        }
    }
    judged
}

/// How much a checkpoint has, to compare it with others of its series: first by files with tensors, then by files.
/// Shards may be fewer than before, if stepfs finds tensors in each.
pub(super) fn fullness(unit: &Unit, rule: &Rule) -> (u64, u64) {
    match unit.kind {
        Kind::Directory if rule.keep_checkpoint_max.is_none() => (unit.with_tensors, unit.files),
        _ if unit.with_tensors >= unit.files => (u64::MAX, 0),
        _ => (unit.with_tensors, 0),
    }
}
