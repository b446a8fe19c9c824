//! States that nobody names any more: what is a difference to them is merged over them, one object at a time.

use std::collections::HashSet;
use std::io;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::recall::{Chain, ReadError};
use crate::store::{Id, Merge};

use super::reparent::{Move, parent_words};
use super::{Archive, LONGEST_PAUSE};

/// Merging must bring this share of what goes: less is not worth reading and writing everything for.
const LEAST_GAIN: f64 = 0.05;
/// Another parent than the next one above must save this share: it may be further from the keyframe.
const BETTER: f64 = 0.9;

impl Archive {
    /// One step: one object becomes a difference to one that stays. What it was a difference to goes once no other needs
    /// it.
    /// Returns how long to wait before the next.
    pub(super) fn merge(&self) -> Duration {
        let keep = self.keep.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (merge, pending) = self.objects.next_merge(&keep);
        self.merges.store(pending, Ordering::Relaxed);
        let Some(merge) = merge else { return Duration::ZERO };
        let step = self.is_worth_it(&merge, &keep).and_then(|worth_it| match (worth_it, merge.heirs.first()) {
            (true, Some(heir)) => self.reparent(*heir, merge.above, &keep),
            _ => {
                // Not asked again before something about it changes.
                let joints = merge.dying.iter().filter(|id| self.objects.children(**id) != 1).copied();
                self.objects.share(&joints.collect::<Vec<Id>>());
                Ok(())
            }
        });
        self.garbage.store(true, Ordering::Relaxed);
        let (pause, why) = match step {
            Ok(()) => (Duration::ZERO, None),
            Err(error) => self.merge_failed(&merge, &error),
        };
        *self.merge_stalled.lock().unwrap_or_else(PoisonError::into_inner) = why;
        pause
    }

    /// Whether all heirs together grow by less than what goes. In a line there is one, and it does.
    fn is_worth_it(&self, merge: &Merge, keep: &HashSet<Id>) -> io::Result<bool> {
        if merge.heirs.is_empty() || merge.is_line {
            return Ok(!merge.heirs.is_empty());
        }
        let stored = |id: &Id| self.objects.get(*id).map_or(0.0, |(_, stored)| stored as f64);
        let freed: f64 = merge.dying.iter().map(stored).sum();
        let mut growth = 0.0;
        let mut before = None;
        for heir in &merge.heirs {
            self.breathe()?;
            let sibling = before.or_else(|| self.objects.sibling(*heir, keep));
            let (_, bytes) = self.cheapest(*heir, merge.above, sibling)?;
            growth += bytes - stored(heir);
            if growth > freed * (1.0 - LEAST_GAIN) {
                return Ok(false);
            }
            before = Some(*heir);
        }
        Ok(true)
    }

    /// The parent with which an object takes the least room, and how much that is: the next one above that stays, or a
    /// sibling, which has what both were differences to.
    fn cheapest(&self, heir: Id, above: Option<Id>, sibling: Option<Id>) -> io::Result<(Option<Id>, f64)> {
        let old = self.recall.chain(heir)?;
        let estimate = |parent: Option<Id>| -> io::Result<f64> {
            let parent = self.chain_of(parent)?;
            let breathe = || self.breathe();
            let change = Move { old: &old, parent: parent.as_ref(), breathe: &breathe };
            self.pool.install(|| change.estimate())
        };
        let bytes = estimate(above)?;
        if sibling.is_some() && sibling != above {
            let other = estimate(sibling)?;
            if other < BETTER * bytes {
                return Ok((sibling, other));
            }
        }
        Ok((above, bytes))
    }

    fn reparent(&self, heir: Id, above: Option<Id>, keep: &HashSet<Id>) -> io::Result<()> {
        let started = Instant::now();
        let sibling = self.objects.sibling(heir, keep);
        let parent = match sibling.is_some() && sibling != above {
            true => self.cheapest(heir, above, sibling)?.0,
            false => above,
        };
        let old = self.recall.chain(heir)?;
        let chain = self.chain_of(parent)?;
        let breathe = || self.breathe();
        let change = Move { old: &old, parent: chain.as_ref(), breathe: &breathe };
        self.pool.install(|| change.carry_out(&self.objects, &self.store.tmp()))?;
        let origin = &old.leaf().index().origin;
        let (former, words) = (old.leaf().header().parent, parent_words(parent));
        log::info!(
            "{origin}: now a difference to {words}, was to {} ({:.1?})",
            parent_words(former),
            started.elapsed()
        );
        Ok(())
    }

    fn chain_of(&self, parent: Option<Id>) -> io::Result<Option<Chain>> {
        Ok(match parent {
            Some(parent) => Some(self.recall.chain(parent)?),
            None => None,
        })
    }

    /// Between two batches of tiles: files that were closed meanwhile are made durable, for that must not wait for what
    /// only frees room.
    ///
    /// # Errors
    /// `Interrupted` when the store is being closed; what was begun is begun again at the next mount.
    pub(super) fn breathe(&self) -> io::Result<()> {
        if self.stopping.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        self.seal_waiting();
        Ok(())
    }

    /// How long to wait, and why merging stalls if it does.
    fn merge_failed(&self, merge: &Merge, error: &io::Error) -> (Duration, Option<String>) {
        match error.kind() {
            io::ErrorKind::Interrupted => (Duration::ZERO, None),
            _ if error.get_ref().is_some_and(|inner| inner.is::<ReadError>()) => {
                log::error!("{error}; removed states that others are differences to are left as they are");
                self.objects.share(&merge.dying);
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
