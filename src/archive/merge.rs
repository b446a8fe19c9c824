//! Merges: objects that no file names go, and their heirs are rebased over them, one at a time.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::encode::{StepError, StepResult, Workers};
use crate::recall::Chain;
use crate::store::{Id, Merge};
use crate::sync::{AtomicUsize, Mutex};

use super::reparent::Move;
use super::shared::{LONGEST_PAUSE, Shared};

/// A merge with several heirs must free at least this share of the size of the objects that go.
const LEAST_GAIN: f64 = 0.05;
/// A single heir must free this share of its new size. Otherwise a run that keeps its last few checkpoints would
/// write its keyframe again with each, for a few percent.
const LEAST_FREED: f64 = 0.1;
/// Another parent than the next one above must save this share: it may be further from the keyframe.
const BETTER: f64 = 0.9;
/// Most heirs that are examined before a decision about all. A base of many runs may have thousands.
const MOST_ESTIMATED: usize = 16;

/// How the merges of a store go on, for other threads.
#[derive(Debug, Default)]
pub(super) struct Merges {
    /// Number of states to merge.
    pending: AtomicUsize,
    /// Why they cannot be merged at the moment. Taken for moments, last of all locks.
    stalled: Mutex<Option<String>>,
}

impl Merges {
    pub(super) fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }

    pub(super) fn set_pending(&self, pending: usize) {
        self.pending.store(pending, Ordering::Relaxed);
    }

    pub(super) fn stalled(&self) -> Option<String> {
        self.stalled.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_stalled(&self, why: Option<String>) {
        *self.stalled.lock().unwrap_or_else(PoisonError::into_inner) = why;
    }
}

/// Merges states for the housekeeper.
pub(super) struct Merger {
    shared: Arc<Shared>,
    merges: Arc<Merges>,
    workers: Arc<Workers>,
    /// Objects that are needed though no file names them: the next state of their lineage will be a difference to them.
    keep: HashSet<Id>,
    /// The merge under way, and the heirs that are to be rebased.
    begun: Option<(Merge, VecDeque<Id>)>,
}

impl Merger {
    /// One that has begun no merge.
    pub(super) fn new(shared: Arc<Shared>, merges: Arc<Merges>, workers: Arc<Workers>) -> Merger {
        Merger { shared, merges, workers, keep: HashSet::new(), begun: None }
    }

    /// Objects stay that nothing names: from now on these only.
    pub(super) fn keep(&mut self, keep: HashSet<Id>) {
        self.keep = keep;
        self.merges.set_pending(self.shared.objects.next_merge(&self.keep).1);
    }

    /// One step: one object becomes a difference to an object that stays. Its former base goes once no other needs
    /// it. Returns how long to wait before the next step.
    pub(super) fn step(&mut self) -> Duration {
        let begun = self.begun.take().filter(|(merge, todo)| self.still_holds(merge, todo));
        let (merge, todo) = match begun {
            Some(begun) => begun,
            None => {
                let (merge, pending) = self.shared.objects.next_merge(&self.keep);
                self.merges.set_pending(pending);
                let Some(merge) = merge else { return Duration::ZERO };
                (merge, VecDeque::new())
            }
        };
        let dying = merge.dying.clone();
        let step = self.rebase_next(merge, todo);
        self.shared.garbage.store(true, Ordering::Relaxed);
        let (pause, why) = match step {
            Ok(()) => (Duration::ZERO, None),
            Err(error) => self.failed(&dying, &error),
        };
        self.merges.set_stalled(why);
        pause
    }

    /// Whether nothing has changed about a merge since it was decided.
    fn still_holds(&self, merge: &Merge, todo: &VecDeque<Id>) -> bool {
        let parent = |id: &Id| self.shared.objects.get(*id).and_then(|(header, _)| header.parent);
        let waits = todo.front().and_then(parent).is_some_and(|parent| merge.dying.contains(&parent));
        waits && merge.above.is_none_or(|above| self.shared.objects.stays(above, &self.keep))
    }

    fn rebase_next(&mut self, merge: Merge, mut todo: VecDeque<Id>) -> StepResult<()> {
        if todo.is_empty() {
            if !self.is_worth_it(&merge)? {
                return Ok(());
            }
            todo.extend(&merge.heirs);
        }
        let Some(heir) = todo.pop_front() else { return Ok(()) };
        let (parent, _) = self.cheapest(heir, &merge)?;
        self.reparent(heir, parent)?;
        self.begun = (!todo.is_empty()).then_some((merge, todo));
        Ok(())
    }

    /// Whether to merge. If not, that is noted, and not asked again before something about it has changed.
    fn is_worth_it(&self, merge: &Merge) -> StepResult<bool> {
        let stored = |id: &Id| self.shared.objects.get(*id).map_or(0.0, |(_, stored)| stored as f64);
        let goes: f64 = merge.dying.iter().map(stored).sum();
        if let ([heir], true) = (merge.heirs.as_slice(), merge.is_line) {
            let (_, written) = self.cheapest(*heir, merge)?;
            let worth_it = goes + stored(heir) - written >= LEAST_FREED * written;
            if !worth_it {
                self.shared.objects.defer(&merge.dying);
            }
            return Ok(worth_it);
        }
        let every = merge.heirs.len().div_ceil(MOST_ESTIMATED).max(1);
        let mut growth = 0.0;
        for heir in merge.heirs.iter().step_by(every) {
            self.breathe()?;
            growth += (self.cheapest(*heir, merge)?.1 - stored(heir)) * every as f64;
        }
        let worth_it = growth < goes * (1.0 - LEAST_GAIN);
        if !worth_it {
            let joints = merge.dying.iter().filter(|id| self.shared.objects.children(**id) != 1).copied();
            self.shared.objects.share(&joints.collect::<Vec<Id>>());
        }
        Ok(worth_it)
    }

    /// The parent with which an heir takes the least room, and its size. Candidates are the next one above that
    /// stays, and another one that has the keyframe, like the first of the heirs.
    fn cheapest(&self, heir: Id, merge: &Merge) -> StepResult<(Option<Id>, f64)> {
        let old = self.shared.recall.chain(heir)?;
        let estimate = |parent: Option<Id>| -> StepResult<f64> {
            let (parent, breathe) = (self.chain_of(parent)?, || self.breathe());
            let change = Move::new(&old, parent.as_ref(), &breathe);
            Ok(self.workers.install(|| change.estimate())?)
        };
        let mut best = (merge.above, estimate(merge.above)?);
        let first = merge.heirs.first().copied().filter(|first| self.shared.objects.can_follow(heir, *first, merge));
        // The others are to follow the first, and no chain is to become longer than it is.
        let is_first = merge.heirs.len() > 1 && merge.heirs.first() == Some(&heir);
        let deepest = if is_first { merge.roof.checked_sub(1) } else { Some(u32::MAX) };
        let siblings = deepest.map(|deepest| self.shared.objects.siblings(heir, deepest, &self.keep));
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
        let old = self.shared.recall.chain(heir)?;
        let (chain, breathe) = (self.chain_of(parent)?, || self.breathe());
        let change = Move::new(&old, chain.as_ref(), &breathe);
        let place = (self.shared.io(), &*self.shared.store.tmp());
        self.workers.install(|| change.carry_out(&self.shared.objects, place))?;
        self.shared.recall.memory().reencoded(heir);
        let (index, header) = (old.leaf().index(), old.leaf().header());
        let words = |parent: Option<Id>| parent.map_or("nothing".into(), |id| format!("object {id}"));
        log::info!(
            "{}: now a difference to {}, was to {} ({:.1?})",
            index.origin,
            words(parent),
            words(header.parent),
            started.elapsed()
        );
        Ok(())
    }

    fn chain_of(&self, parent: Option<Id>) -> StepResult<Option<Chain>> {
        Ok(parent.map(|parent| self.shared.recall.chain(parent)).transpose()?)
    }

    /// How long to wait, and why merging stalls if it does.
    fn failed(&self, dying: &[Id], error: &StepError) -> (Duration, Option<String>) {
        match error {
            StepError::Cancelled | StepError::Superseded => (Duration::ZERO, None),
            _ if error.is_damage() => {
                log::error!("{error}; removed states stay, because others are differences to them");
                self.shared.objects.share(dying);
                (Duration::ZERO, None)
            }
            _ => {
                let why = format!("states cannot be merged over removed ones: {error}");
                log::warn!("{why}; next try in {LONGEST_PAUSE:.0?}");
                (LONGEST_PAUSE, Some(why))
            }
        }
    }

    /// Called between two batches of tiles, so that closing a store does not wait for a merge.
    ///
    /// # Errors
    /// [`StepError::Cancelled`] if the store is being closed. The next mount begins the merge again.
    fn breathe(&self) -> StepResult<()> {
        match self.shared.is_stopping() {
            true => Err(StepError::Cancelled),
            false => Ok(()),
        }
    }
}
