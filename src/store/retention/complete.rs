//! Judges which checkpoints of a series are whole.

use super::Rule;
use super::plan::{Kind, SETTLED_NS, Unit};

/// A checkpoint with less than this share of another one's bytes lacks something that the other has, as numerator and
/// denominator. Weights without the optimizer's state are a third to two thirds (8-bit AdamW) of a whole state. What a
/// format does not tell may be cut short, too.
const LEAST_BYTES: (u128, u128) = (3, 4);

/// The judgement of one checkpoint of a series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Judged {
    /// It is whole, and no program writes it.
    pub(super) complete: bool,
    /// It has less than the complete one before, and shows that this is no accident.
    pub(super) witness: bool,
    /// It is complete, and no later complete one has as many files, tensors in as many, and hardly fewer bytes.
    pub(super) fullest: bool,
}

/// Judges the members of a series, given oldest first.
///
/// A program that writes several files closes each before it opens the next. Between two, a checkpoint only has fewer
/// files than the one before. If the program dies within one, stepfs finds no tensors in that. A save of weights alone
/// has far fewer bytes. Less than before is complete if two checkpoints in a row have the same and the first has
/// settled. The first stays, to show it to those after it.
pub(super) fn judge(units: &[Unit], rule: &Rule, now_ns: i64, members: &[usize]) -> Vec<Judged> {
    let mut judged = vec![Judged::default(); members.len()];
    let mut last_complete: Option<Fullness> = None;
    for (place, &at) in members.iter().enumerate() {
        let (unit, own) = (&units[at], Fullness::of(&units[at], rule));
        let is_sound = unit.files > 0 && unit.bytes > 0 && !unit.lacks && !unit.being_written;
        let is_version = rule.keep_checkpoint_max.is_none() || unit.is_version;
        let as_full = last_complete.is_none_or(|last| own.lack(last).is_none());
        let settled = now_ns.saturating_sub(unit.modified_ns) >= SETTLED_NS;
        let agrees = || members.get(place + 1).is_some_and(|&next| Fullness::of(&units[next], rule).is_like(own));
        judged[place].witness = is_sound && is_version && !as_full && settled && agrees();
        judged[place].complete = is_sound && is_version && (as_full || judged[place].witness);
        if judged[place].complete {
            last_complete = Some(own);
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
pub(super) struct Fullness {
    /// Files with tensors, and files. Shards may be fewer than before, if stepfs finds tensors in each: then
    /// `u64::MAX` and 0.
    files: (u64, u64),
    /// 0 for an ElasticDL version: its names say whether it is whole, and its tables may shrink.
    bytes: u64,
}

/// What a checkpoint has less of than another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// Files with tensors, or files.
    Files,
    Bytes,
}

impl Fullness {
    pub(super) fn of(unit: &Unit, rule: &Rule) -> Fullness {
        let files = match unit.kind {
            Kind::Directory if rule.keep_checkpoint_max.is_none() => (unit.with_tensors, unit.files),
            _ if unit.with_tensors >= unit.files => (u64::MAX, 0),
            _ => (unit.with_tensors, 0),
        };
        Fullness { files, bytes: if rule.keep_checkpoint_max.is_none() { unit.bytes } else { 0 } }
    }

    /// What this one lacks that the other has. Files with tensors count before files.
    pub(super) fn lack(self, other: Fullness) -> Option<Lack> {
        match self.files < other.files {
            true => Some(Lack::Files),
            false => (!self.has_bytes_of(other)).then_some(Lack::Bytes),
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
