//! Notices restores: training goes on from a lossy file. The next states of the lineage are then kept as faithfully
//! as that number of restores needs (`store/profile.rs`).
//!
//! stepfs cannot see a restore. It sees that one handle read half of a lossy file or more. `torch.load` and
//! `safe_open` do, and so do `cp` and a backup, unless they open it with O_NOATIME. A copy too many makes later
//! states finer, never coarser. Counting each file at most once a minute stops regular backups from raising the
//! profile.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::clock::stamp_ns;
use crate::store::object::{Header, Id, Object};
use crate::store::{Profiles, Restores, Store};
use crate::sync::{Mutex, MutexGuard};

use super::Archive;
use super::catalog::State;

/// Reads of the same file within this time are one restore: the ranks of a job read it at once.
const ONE_RESTORE: Duration = Duration::from_secs(60);
/// Files that can be noticed within that time; more are not counted.
const MOST_NOTICED: usize = 4096;

/// The known restores.
#[derive(Debug, Default)]
pub(super) struct Noticed {
    /// Objects whose file was read. Taken for moments by threads that serve reads; no other lock under it.
    reads: Mutex<Reads>,
    /// The store's record. Only the housekeeper changes it. No lock but `objects`' under it, and no wait.
    known: Mutex<Restores>,
}

#[derive(Debug, Default)]
struct Reads {
    /// When a file was counted last, for [`ONE_RESTORE`].
    last: HashMap<Id, Instant>,
    /// Those not entered yet, with the time in nanoseconds since 1970.
    pending: Vec<(Id, i64)>,
    /// The record could not be written.
    unsaved: bool,
}

/// A lineage that was restored from lossy files, as users are told of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    /// Path of the file that was restored last.
    pub path: String,
    /// How often the lineage was restored.
    pub restores: u32,
    /// How often that was expected, if somebody said so.
    pub expected_restores: Option<u32>,
    /// Lossy restores behind the sealed state.
    pub generations: u32,
    /// The profile that the rules or an attribute ask for.
    pub asked: String,
    /// The profile of its next checkpoints.
    pub profile: String,
}

impl Restored {
    /// Everything that is remembered in a store.
    pub fn all(store: &Store, restores: &Restores) -> Vec<Restored> {
        let one = |(_, lineage): (u64, &crate::store::Lineage)| {
            let path = Path::new(&lineage.origin);
            let asked = store.profiles(path).unwrap_or_else(|_| store.settings().profiles(path));
            Restored {
                path: lineage.origin.clone(),
                restores: lineage.restores,
                expected_restores: asked.expected_restores(),
                generations: lineage.generations(i64::MAX),
                asked: asked.words(),
                profile: asked.in_force(lineage.restores).words(),
            }
        };
        restores.all().map(one).collect()
    }
}

impl Noticed {
    /// Loads a store's record. An unreadable record is begun anew, since checkpoints do not depend on it.
    pub(super) fn load(store: &Store) -> Noticed {
        let known = Restores::load(store).unwrap_or_else(|error| {
            log::warn!("the record of restores cannot be read, and is begun anew: {error}");
            Restores::default()
        });
        Noticed { reads: Mutex::default(), known: Mutex::new(known) }
    }

    /// Whether something was noticed that is not entered yet.
    pub(super) fn has_news(&self) -> bool {
        !self.reads().pending.is_empty()
    }

    fn reads(&self) -> MutexGuard<'_, Reads> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, Restores> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Archive {
    /// Half of a released file, or more, was read through one handle. For any thread: waits for nothing.
    pub fn restored(&self, object: Id) {
        let lossy = |(header, _): &(Header, u64)| header.lossy;
        if !self.objects.get(object).as_ref().is_some_and(lossy) {
            return;
        }
        {
            let mut reads = self.noticed.reads();
            let now = Instant::now();
            reads.last.retain(|_, at| now.duration_since(*at) < ONE_RESTORE);
            if reads.last.contains_key(&object) || reads.last.len() >= MOST_NOTICED {
                return;
            }
            reads.last.insert(object, now);
            // A file written right after must not seem older.
            reads.pending.push((object, stamp_ns()));
        }
        self.notify();
    }

    /// Enters the noticed restores, durably. For the housekeeper.
    pub(super) fn note_restores(&self) {
        let (pending, unsaved) = {
            let mut reads = self.noticed.reads();
            (std::mem::take(&mut reads.pending), std::mem::take(&mut reads.unsaved))
        };
        if pending.is_empty() && !unsaved {
            return;
        }
        for (id, at_ns) in pending {
            let Some((header, _)) = self.objects.get(id) else { continue };
            let of = |object: std::sync::Arc<Object>| (object.index().origin.clone(), object.index().generations);
            let (origin, generations) = self.objects.open(id).map(of).unwrap_or_default();
            let mut known = self.noticed.known();
            known.restored(header.lineage, at_ns, generations, &origin);
            log::info!("{origin}: restored, {} of its lineage", times(known.seen(header.lineage)));
        }
        if !self.catalog().has_unsealed() {
            let lineages: std::collections::HashSet<u64> = self.catalog().lineages().collect();
            let lives = |lineage| lineages.contains(&lineage) || self.objects.newest(lineage).is_some();
            self.noticed.known().retain(lives);
        }
        let known = self.noticed.known().clone();
        if let Err(error) = known.save(&self.store) {
            log::warn!("the record of restores cannot be written now; the next restore tries again: {error}");
            self.noticed.reads().unsaved = true;
        }
    }

    /// The restored lineages, for users.
    pub(super) fn restored_lineages(&self) -> Vec<Restored> {
        let known = self.noticed.known().clone();
        Restored::all(&self.store, &known)
    }

    /// The profiles with which a file is archived now; says so if more restores than expected have made them finer.
    pub(super) fn profiles(&self, path: &Path, lineage: u64) -> io::Result<Profiles> {
        let asked = self.store.profiles(path)?;
        let seen = self.restores_seen(lineage);
        let used = asked.in_force(seen);
        if let Some(expected) = asked.expected_restores().filter(|expected| seen > *expected && used != asked) {
            let (used, asked) = (used.words(), asked.words());
            log::info!("{}: {used} instead of {asked}: restored {}, {expected} expected", path.display(), times(seen));
        }
        Ok(used)
    }

    /// How often a lineage was restored.
    pub(super) fn restores_seen(&self, lineage: u64) -> u32 {
        self.noticed.known().seen(lineage)
    }

    /// Lossy restores behind a state of a lineage that was modified at this time, and is not archived yet.
    pub(super) fn generations_at(&self, lineage: u64, modified_ns: i64) -> u32 {
        self.noticed.known().generations(lineage, modified_ns)
    }

    /// Lossy restores behind a file; `None` while it is not known which lineage it has. Blocks on the device.
    pub(super) fn generations(&self, state: &State) -> Option<u32> {
        match state {
            State::Durable(sealed) | State::Sealed(sealed) => {
                Some(self.generations_at(sealed.lineage, sealed.modified_ns))
            }
            State::Archived(_, id) | State::Released(id) => Some(self.objects.open(*id).ok()?.index().generations),
            State::Staged | State::Closed | State::Resident(_) => None,
        }
    }
}

fn times(count: u32) -> String {
    if count == 1 { "once".into() } else { format!("{count} times") }
}
