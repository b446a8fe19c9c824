//! Merges: objects that no file names go, and their heirs are rebased over them, one at a time.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::encode::{StepError, StepResult};
use crate::recall::Chain;
use crate::store::{Id, Merge};

use super::housekeeper::{Housekeeper, Merging};
use super::reparent::{Move, parent_words};
use super::{Archive, LONGEST_PAUSE};

/// A merge with several heirs must free at least this share of the size of the objects that go.
const LEAST_GAIN: f64 = 0.05;
/// A single heir must free this share of its new size. Otherwise a run that keeps its last few checkpoints would
/// write its keyframe again with each, for a few percent.
const LEAST_FREED: f64 = 0.1;
/// Another parent than the next one above must save this share: it may be further from the keyframe.
const BETTER: f64 = 0.9;
/// Most heirs that are examined before a decision about all. A base of many runs may have thousands.
const MOST_ESTIMATED: usize = 16;

impl Housekeeper<'_> {
    /// One step: one object becomes a difference to an object that stays. Its former base goes once no other needs
    /// it. Returns how long to wait before the next step.
    pub(super) fn merge(&mut self) -> Duration {
        let begun = self.merging.take();
        let merging = match begun.filter(|merging| self.still_holds(merging)) {
            Some(merging) => merging,
            None => {
                let (merge, pending) = self.archive.objects.next_merge(&self.keep);
                self.archive.merges.store(pending, Ordering::Relaxed);
                let Some(merge) = merge else { return Duration::ZERO };
                Merging { merge, todo: VecDeque::new(), chosen: None }
            }
        };
        let dying = merging.merge.dying.clone();
        let step = self.take_step(merging);
        self.archive.garbage.store(true, Ordering::Relaxed);
        let (pause, why) = match step {
            Ok(()) => (Duration::ZERO, None),
            Err(error) => self.merge_failed(&dying, &error),
        };
        *self.archive.merge_stalled.lock().unwrap_or_else(PoisonError::into_inner) = why;
        pause
    }

    /// Whether nothing has changed about a merge since it was decided.
    fn still_holds(&self, merging: &Merging) -> bool {
        let parent = |id: &Id| self.archive.objects.get(*id).and_then(|(header, _)| header.parent);
        let Some(next) = merging.todo.front() else { return false };
        let waits = parent(next).is_some_and(|parent| merging.merge.dying.contains(&parent));
        waits && merging.merge.above.is_none_or(|above| self.archive.objects.stays(above, &self.keep))
    }

    fn take_step(&mut self, mut merging: Merging) -> StepResult<()> {
        if merging.todo.is_empty() {
            let (worth_it, chosen) = self.is_worth_it(&merging.merge)?;
            if !worth_it {
                return Ok(());
            }
            merging.chosen = chosen;
            merging.todo.extend(&merging.merge.heirs);
        }
        let Some(heir) = merging.todo.pop_front() else { return Ok(()) };
        let parent = match merging.chosen.take() {
            Some(parent) => parent,
            None => self.cheapest(heir, &merging.merge)?.0,
        };
        self.reparent(heir, parent)?;
        if !merging.todo.is_empty() {
            self.merging = Some(merging);
        }
        Ok(())
    }

    /// Whether to merge, and, where there is one heir, the parent that it gets. If not, that is noted, and not asked
    /// again before something about it has changed.
    fn is_worth_it(&self, merge: &Merge) -> StepResult<(bool, Option<Option<Id>>)> {
        let stored = |id: &Id| self.archive.objects.get(*id).map_or(0.0, |(_, stored)| stored as f64);
        let goes: f64 = merge.dying.iter().map(stored).sum();
        if let ([heir], true) = (merge.heirs.as_slice(), merge.is_line) {
            let (parent, written) = self.cheapest(*heir, merge)?;
            let worth_it = goes + stored(heir) - written >= LEAST_FREED * written;
            if !worth_it {
                self.archive.objects.defer(&merge.dying);
            }
            return Ok((worth_it, Some(parent)));
        }
        let every = merge.heirs.len().div_ceil(MOST_ESTIMATED).max(1);
        let mut growth = 0.0;
        for heir in merge.heirs.iter().step_by(every) {
            breathe(self.archive)?;
            growth += (self.cheapest(*heir, merge)?.1 - stored(heir)) * every as f64;
        }
        let worth_it = growth < goes * (1.0 - LEAST_GAIN);
        if !worth_it {
            let joints = merge.dying.iter().filter(|id| self.archive.objects.children(**id) != 1).copied();
            self.archive.objects.share(&joints.collect::<Vec<Id>>());
        }
        Ok((worth_it, None))
    }

    /// The parent with which an heir takes the least room, and its size. Candidates are the next one above that
    /// stays, and another one that has the keyframe, like the first of the heirs.
    fn cheapest(&self, heir: Id, merge: &Merge) -> StepResult<(Option<Id>, f64)> {
        let old = self.archive.recall.chain(heir)?;
        let estimate = |parent: Option<Id>| -> StepResult<f64> {
            let parent = self.chain_of(parent)?;
            let breathe = || breathe(self.archive);
            let change = Move { old: &old, parent: parent.as_ref(), breathe: &breathe };
            Ok(self.archive.workers.install(|| change.estimate())?)
        };
        let mut best = (merge.above, estimate(merge.above)?);
        let first = merge.heirs.first().copied().filter(|first| self.archive.objects.can_follow(heir, *first, merge));
        // The others are to follow the first, and no chain is to become longer than it is.
        let is_first = merge.heirs.len() > 1 && merge.heirs.first() == Some(&heir);
        let deepest = if is_first { merge.roof.checked_sub(1) } else { Some(u32::MAX) };
        let siblings = deepest.map(|deepest| self.archive.objects.siblings(heir, deepest, &self.keep));
        for sibling in first.into_iter().chain(siblings.into_iter().flatten()) {
            if sibling == heir || merge.above == Some(sibling) || merge.dying.contains(&sibling) {
                continue;
            }
            match estimate(Some(sibling)) {
                Ok(bytes) if bytes < BETTER * best.1 => best = (Some(sibling), bytes),
                Ok(_) => {}
                // A parent that cannot be decoded is no candidate.
                Err(error) if error.is_damage() => log::error!("{error}"),
                Err(error) => return Err(error),
            }
        }
        Ok(best)
    }

    fn reparent(&self, heir: Id, parent: Option<Id>) -> StepResult<()> {
        let started = Instant::now();
        let old = self.archive.recall.chain(heir)?;
        let chain = self.chain_of(parent)?;
        let breathe = || breathe(self.archive);
        let change = Move { old: &old, parent: chain.as_ref(), breathe: &breathe };
        self.archive
            .workers
            .install(|| change.carry_out(&self.archive.objects, (self.archive.io(), &self.archive.store.tmp())))?;
        self.archive.recall.memory().reencoded(heir);
        let origin = &old.leaf().index().origin;
        let (former, words) = (old.leaf().header().parent, parent_words(parent));
        log::info!(
            "{origin}: now a difference to {words}, was to {} ({:.1?})",
            parent_words(former),
            started.elapsed()
        );
        Ok(())
    }

    fn chain_of(&self, parent: Option<Id>) -> StepResult<Option<Chain>> {
        Ok(match parent {
            Some(parent) => Some(self.archive.recall.chain(parent)?),
            None => None,
        })
    }

    /// How long to wait, and why merging stalls if it does.
    fn merge_failed(&self, dying: &[Id], error: &StepError) -> (Duration, Option<String>) {
        match error {
            StepError::Cancelled | StepError::Superseded => (Duration::ZERO, None),
            _ if error.is_damage() => {
                log::error!("{error}; removed states stay, because others are differences to them");
                self.archive.objects.share(dying);
                (Duration::ZERO, None)
            }
            _ => {
                let why = format!("states cannot be merged over removed ones: {error}");
                log::warn!("{why}; next try in {LONGEST_PAUSE:.0?}");
                (LONGEST_PAUSE, Some(why))
            }
        }
    }
}

/// Called between two batches of tiles, so that closing a store does not wait for a merge.
///
/// # Errors
/// [`StepError::Cancelled`] if the store is being closed. The next mount begins the merge again.
fn breathe(archive: &Archive) -> StepResult<()> {
    match archive.is_stopping() {
        true => Err(StepError::Cancelled),
        false => Ok(()),
    }
}
