//! What its writer knows of a mirror: the blobs, the states, and what nothing needs.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::manifest::{self, MANIFESTS, Number, TOP_BYTES};
use super::pace::Pace;
use super::pieces::{BLOBS, Bytes, Packed, name};
use super::place::{Error, Place, Result};
use super::settings::Settings;
use super::tree::Tree;
use super::work::Work;
use crate::clock::{age_ns, wall_ns};
use crate::store::{Id, in_parallel};

/// The longest wait for the first collection after a start.
const FIRST_COLLECTION: Duration = Duration::from_secs(60);
/// The shortest time between two collections.
const OFTEN: Duration = Duration::from_secs(1);

/// See the module.
pub(super) struct States {
    place: Arc<dyn Place>,
    store: Id,
    keep: Duration,
    /// The blobs that are there.
    there: HashSet<Id>,
    last: Option<Number>,
    /// The tree that the last manifest names.
    published: Option<Bytes>,
    collect_at: Instant,
    /// The mirror's own time, in nanoseconds since 1970, was this at least at that moment.
    clock: (i64, Instant),
}

impl States {
    /// Reads the last state.
    ///
    /// # Errors
    /// The mirror is another store's; those of the mirror. Damage is none: what is lost is written again.
    pub(super) fn open(place: &Arc<dyn Place>, store: Id, settings: &Settings) -> Result<(States, Tree)> {
        manifest::check(place.as_ref(), store)?;
        let last = manifest::of_owner(&place.list(MANIFESTS)?, store).pop().map(|(number, _)| number);
        let root = last.map(|number| manifest::get(place.as_ref(), number));
        let tree = match root.map(|root| Tree::load(place.as_ref(), root?, &|_, _| true)) {
            None => Tree::default(),
            Some(Err(error @ (Error::Wrong(_) | Error::Missing(_)))) => {
                log::warn!("mirror: {error}; everything is looked at again");
                Tree::default()
            }
            Some(tree) => tree?,
        };
        tree.unread.iter().for_each(|why| log::warn!("mirror: {why}; it is written again"));
        let (place, keep, published, now) = (Arc::clone(place), settings.keep, tree.root().cloned(), Instant::now());
        let (there, clock) = (HashSet::new(), (0, now));
        let mut states = States { place, store, keep, there, last, published, collect_at: now, clock };
        states.list()?;
        states.there.retain(|hash| !tree.damaged.contains(hash));
        // What is new comes first.
        states.collect_at = Instant::now() + keep.min(FIRST_COLLECTION);
        Ok((states, tree))
    }

    /// Refuses a mirror that is not this store's.
    pub(super) fn check(&self) -> Result<()> {
        manifest::check(self.place.as_ref(), self.store)
    }

    /// Whether the last manifest names this tree.
    pub(super) fn have(&self, tree: &Tree) -> bool {
        tree.root().is_some() && tree.root() == self.published.as_ref()
    }

    /// Learns which blobs are there. Returns them, and when each was put. A collection follows.
    pub(super) fn list(&mut self) -> Result<Vec<(Id, i64)>> {
        self.collect_at = Instant::now() + self.keep.clamp(OFTEN, manifest::ALL_FOR);
        let hash = |name: &str| name.rsplit_once('/').and_then(|(_, hash)| hash.parse().ok());
        let listed = self.place.list(BLOBS)?;
        let listed: Vec<(Id, i64)> = listed.iter().filter_map(|(name, put_ns)| Some((hash(name)?, *put_ns))).collect();
        self.there = listed.iter().map(|(hash, _)| *hash).collect();
        let newest = listed.iter().map(|(_, put_ns)| *put_ns).max().unwrap_or_default();
        // Old is what this machine's clock calls old, too. Else a clock that was ahead once would thin a directory for ever.
        self.clock = (newest.max(self.now_ns()).min(age_ns()), Instant::now());
        Ok(listed)
    }

    /// The mirror's own time, or an earlier one: this machine's clock may be wrong by years.
    fn now_ns(&self) -> i64 {
        self.clock.0 + self.clock.1.elapsed().as_nanos() as i64
    }

    /// Whether a blob is there.
    pub(super) fn has(&self, hash: &Id) -> bool {
        self.there.contains(hash)
    }

    /// Puts a piece, unless it is there. `None` if its turn does not come in time.
    fn put(&self, (hash, packed): &Packed, pace: &Pace, until: Option<Instant>) -> Result<Option<Id>> {
        while !self.has(hash) {
            if !pace.take(packed.len() as u64, until) {
                return Ok(None);
            }
            let put = self.place.put(&name(*hash), packed);
            let is_busy = matches!(put, Err(Error::Busy(_)));
            pace.answered(is_busy);
            if !is_busy {
                return put.map(|()| Some(*hash));
            }
        }
        Ok(Some(*hash))
    }

    /// Puts the missing pieces of all work, side by side, until the time is over. Each error is of one file.
    pub(super) fn bring(&mut self, works: &mut [(PathBuf, Box<Work>)], pace: &Pace, until: Instant) {
        let all = works.iter().enumerate();
        let jobs: Vec<_> = all.flat_map(|(work, (_, of))| of.missing().map(move |piece| (work, piece))).collect();
        let done = in_parallel(&jobs, |job| {
            let (work, piece) = *job;
            // A slow mirror gets one piece at least.
            let until = (jobs.first() != Some(job)).then_some(until);
            match until.is_some_and(|until| pace.next() > until) {
                true => Ok(None),
                false => self.put(&works[work].1.pack(piece)?, pace, until),
            }
        });
        for ((work, piece), done) in jobs.into_iter().zip(done) {
            match done {
                Ok(Some(hash)) => {
                    works[work].1.pieces[piece] = Some(hash);
                    self.there.insert(hash);
                }
                Ok(None) => {}
                Err(error) => works[work].1.failed = Some(error),
            }
        }
    }

    /// Puts the directories of a tree that changed, and then a manifest.
    pub(super) fn publish(&mut self, tree: &mut Tree, pace: &Pace) -> Result<()> {
        // The mirror may have lost directories of the last state, too.
        let (top, mut packed) = tree.pack(&|hash| self.has(hash))?;
        let top = packed.pop_if(|_| top.len() <= TOP_BYTES).map(|_| top).unwrap_or_default();
        for put in in_parallel(&packed, |packed| self.put(packed, pace, None)) {
            self.there.insert(put?.ok_or_else(|| Error::Away("the daemon stops".into()))?);
        }
        let Some(root) = tree.root().filter(|_| !self.have(tree)).cloned() else { return Ok(()) };
        let now_ms = (wall_ns() / 1_000_000).max(0) as u64;
        let number = Number::after(self.last, now_ms, self.store);
        // Its answer may be lost: no number is used twice.
        self.last = Some(number);
        manifest::put(self.place.as_ref(), number, &(root.clone(), top))?;
        self.published = Some(root);
        Ok(())
    }

    /// Whether it is time to collect.
    pub(super) fn is_due(&self) -> bool {
        self.collect_at <= Instant::now()
    }

    /// Deletes the states that are too old, and the blobs `listed` that no state, nor `tree`, nor a file on its way needs.
    ///
    /// # Errors
    /// Those of the mirror; [`Error::Wrong`] if a state that stays cannot be read.
    pub(super) fn collect(&mut self, tree: &Tree, listed: &[(Id, i64)], on_their_way: HashSet<Id>) -> Result<()> {
        let place = self.place.as_ref();
        let mut states = manifest::of_owner(&place.list(MANIFESTS)?, self.store);
        let old = manifest::outdated(&states, self.now_ns(), self.keep);
        manifest::delete(place, &old)?;
        states.retain(|(state, _)| !old.contains(state));
        if states.last().map(|(state, _)| *state) != self.last {
            // Somebody removed the newest state: it is put again.
            self.published = None;
        }
        let (mut needed, mut told) = (on_their_way, HashSet::new());
        tree.tell(&mut needed, &mut told);
        for (state, _) in states {
            let root = manifest::get(place, state)?;
            let loaded = Tree::load(place, root, &|_, directory| !told.contains(directory))?;
            if let Some(why) = loaded.unread.first() {
                return Err(Error::Wrong(format!("{why}; it may need anything")));
            }
            loaded.tell(&mut needed, &mut told);
        }
        // A blob may be young because its file is on its way.
        let (now_ns, grace) = (self.now_ns(), self.keep.min(manifest::ALL_FOR).as_nanos() as i64);
        let is_garbage = |(hash, put_ns): &&(Id, i64)| !needed.contains(hash) && now_ns - put_ns >= grace;
        let garbage: HashSet<Id> = listed.iter().filter(is_garbage).map(|(hash, _)| *hash).collect();
        // Some may be gone in spite of an error, because only its answer was lost.
        self.there.retain(|hash| !garbage.contains(hash));
        let garbage: Vec<Id> = garbage.into_iter().collect();
        in_parallel(&garbage, |hash| place.delete(&name(*hash))).into_iter().collect()
    }
}
