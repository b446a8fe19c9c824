//! What its writer knows of a mirror: the blobs, the states, and what nothing needs.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::blobs::Blobs;
use super::manifest::{self, Number};
use super::pace::Pace;
use super::place::{Error, Place, Result};
use super::settings::Settings;
use super::tree::{Blob, Tree};
use crate::clock::{age_ns, wall_ns};
use crate::store::Id;

/// The longest wait for the first collection after a start.
const FIRST_COLLECTION: Duration = Duration::from_secs(60);
/// The shortest time between two collections.
const OFTEN: Duration = Duration::from_secs(1);

/// See the module.
pub(super) struct States {
    place: Arc<dyn Place>,
    store: Id,
    keep: Duration,
    pub(super) blobs: Blobs,
    last: Option<Number>,
    /// The tree that the last manifest names.
    published: Option<Blob>,
    /// Directories that are not put yet.
    packed: Vec<(Blob, Vec<u8>)>,
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
        let mut states = States {
            place: Arc::clone(place),
            store,
            keep: settings.keep,
            blobs: Blobs::of(place),
            last: None,
            published: None,
            packed: Vec::new(),
            collect_at: Instant::now(),
            clock: (0, Instant::now()),
        };
        states.check()?;
        states.last = manifest::list(place.as_ref(), store)?.pop().map(|(number, _)| number);
        let root = states.last.map(|number| manifest::get(place.as_ref(), number));
        let tree = match root.map(|root| Tree::load(place.as_ref(), root?, &|_, _| true)) {
            None => Tree::default(),
            Some(Err(error @ (Error::Wrong(_) | Error::Missing(_)))) => {
                log::warn!("mirror: {error}; everything is looked at again");
                Tree::default()
            }
            Some(tree) => tree?,
        };
        tree.unread.values().for_each(|why| log::warn!("mirror: {why}; it is written again"));
        states.published = tree.root();
        states.list()?;
        states.blobs.lose(&tree.damaged);
        // What is new comes first.
        states.collect_at = Instant::now() + settings.keep.min(FIRST_COLLECTION);
        Ok((states, tree))
    }

    /// Refuses a mirror that is not this store's.
    pub(super) fn check(&self) -> Result<()> {
        manifest::check(self.place.as_ref(), self.store)
    }

    /// Whether the last manifest names this tree, and nothing of it is missing.
    pub(super) fn have(&self, tree: &Tree) -> bool {
        tree.root().is_some() && tree.root() == self.published && self.packed.is_empty()
    }

    /// Learns which blobs are there. Returns them, and when each was put. A collection follows.
    pub(super) fn list(&mut self) -> Result<Vec<(Id, i64)>> {
        self.collect_at = Instant::now() + self.keep.clamp(OFTEN, manifest::ALL_FOR);
        let listed = self.blobs.list()?;
        let newest = listed.iter().map(|(_, put_ns)| *put_ns).max().unwrap_or_default();
        // Old is what this machine's clock calls old, too. Else a clock that was ahead once would thin a directory for ever.
        self.clock = (newest.max(self.now_ns()).min(age_ns()), Instant::now());
        Ok(listed)
    }

    /// The mirror's own time, or an earlier one: this machine's clock may be wrong by years.
    fn now_ns(&self) -> i64 {
        self.clock.0 + self.clock.1.elapsed().as_nanos() as i64
    }

    /// Puts the directories of a tree that changed, and then a manifest.
    pub(super) fn publish(&mut self, tree: &mut Tree, pace: &Pace) -> Result<()> {
        let root = tree.pack(&mut self.packed)?;
        // The mirror may have lost directories of the last state, too.
        self.blobs.put_all(&self.packed, pace)?;
        self.packed.clear();
        if self.published == Some(root) {
            return Ok(());
        }
        let now_ms = (wall_ns() / 1_000_000).max(0) as u64;
        let number = Number::after(self.last, now_ms, self.store);
        // Its answer may be lost: no number is used twice.
        self.last = Some(number);
        manifest::put(self.place.as_ref(), self.store, number, root)?;
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
    pub(super) fn collect(&mut self, tree: &Tree, listed: &[(Id, i64)], on_their_way: &[Id]) -> Result<()> {
        let place = Arc::clone(&self.place);
        let mut states = manifest::list(place.as_ref(), self.store)?;
        let old = manifest::outdated(&states, self.now_ns(), self.keep);
        manifest::delete(place.as_ref(), &old)?;
        states.retain(|(state, _)| !old.contains(state));
        let mut needed = HashSet::new();
        tree.blobs(&mut needed);
        if states.last().map(|(state, _)| *state) != self.last {
            // Somebody removed the newest state: it is put again.
            self.published = None;
        }
        for (state, _) in states {
            let root = manifest::get(place.as_ref(), state)?;
            // A directory that was read has told what it needs.
            let loaded = Tree::load(place.as_ref(), root, &|_, blob| !needed.contains(&blob.hash))?;
            if let Some(why) = loaded.unread.values().next() {
                return Err(Error::Wrong(format!("{why}; it may need anything")));
            }
            loaded.blobs(&mut needed);
        }
        // After the states: a directory of theirs that is packed here, too, was not read by anybody.
        needed.extend(self.packed.iter().map(|(blob, _)| blob.hash).chain(on_their_way.iter().copied()));
        // A blob may be young because its file is on its way.
        let (now_ns, grace) = (self.now_ns(), self.keep.min(manifest::ALL_FOR).as_nanos() as i64);
        let is_garbage = |(hash, put_ns): &&(Id, i64)| !needed.contains(hash) && now_ns - put_ns >= grace;
        self.blobs.delete(&listed.iter().filter(is_garbage).map(|(hash, _)| *hash).collect())
    }
}
