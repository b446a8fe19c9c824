//! The blobs of a mirror, as its writer knows them: what is there is not put again.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use super::pace::Pace;
use super::place::{Error, Place, Result};
use super::tree::{BLOBS, Blob};
use super::work::Work;
use crate::store::{Id, in_parallel};

/// See the module.
pub(super) struct Blobs {
    place: Arc<dyn Place>,
    there: HashSet<Id>,
}

impl Blobs {
    /// Of a mirror, with nothing known yet.
    pub(super) fn of(place: &Arc<dyn Place>) -> Blobs {
        Blobs { place: Arc::clone(place), there: HashSet::new() }
    }

    /// Learns what is there. Returns it, and when each was put.
    pub(super) fn list(&mut self) -> Result<Vec<(Id, i64)>> {
        let hash = |name: &str| name.rsplit_once('/').and_then(|(_, hash)| hash.parse().ok());
        let listed = self.place.list(BLOBS)?;
        let listed: Vec<(Id, i64)> = listed.iter().filter_map(|of| Some((hash(&of.name)?, of.put_ns))).collect();
        self.there = listed.iter().map(|(hash, _)| *hash).collect();
        Ok(listed)
    }

    /// Whether a blob is there.
    pub(super) fn has(&self, hash: &Id) -> bool {
        self.there.contains(hash)
    }

    /// These are damaged: they are put again.
    pub(super) fn lose(&mut self, damaged: &[Id]) {
        self.there.retain(|hash| !damaged.contains(hash));
    }

    /// Puts a blob, unless it is there. `None` if its turn does not come in time.
    fn put(&self, bytes: &[u8], pace: &Pace, until: Option<Instant>) -> Result<Option<Id>> {
        let blob = Blob::of(bytes);
        while !self.has(&blob.hash) {
            if !pace.take(blob.len, until) {
                return Ok(None);
            }
            let put = self.place.put(&blob.name(), bytes);
            let is_busy = matches!(put, Err(Error::Busy(_)));
            pace.answered(is_busy);
            if !is_busy {
                return put.map(|()| Some(blob.hash));
            }
        }
        Ok(Some(blob.hash))
    }

    /// Puts all of these, side by side.
    ///
    /// # Errors
    /// That of one of them; the daemon stops.
    pub(super) fn put_all(&mut self, packed: &[(Blob, Vec<u8>)], pace: &Pace) -> Result<()> {
        for put in in_parallel(packed, |(_, bytes)| self.put(bytes, pace, None)) {
            self.there.insert(put?.ok_or_else(|| Error::Away("the daemon stops".into()))?);
        }
        Ok(())
    }

    /// Puts the missing pieces of all work, side by side, until the time is over. Each error is of one file.
    pub(super) fn bring(&mut self, works: &mut [(PathBuf, Work)], pace: &Pace, until: Instant) -> Vec<Option<Error>> {
        let all = works.iter().enumerate();
        let jobs: Vec<_> = all.flat_map(|(work, (_, of))| of.missing().map(move |piece| (work, piece))).collect();
        let done = in_parallel(&jobs, |job| {
            let (work, piece) = *job;
            // A slow mirror gets one piece at least.
            let until = (jobs.first() != Some(job)).then_some(until);
            match until.is_some_and(|until| Instant::now() > until) {
                true => Ok(None),
                false => self.put(&works[work].1.bytes(piece)?, pace, until),
            }
        });
        let mut errors: Vec<Option<Error>> = works.iter().map(|_| None).collect();
        for ((work, piece), done) in jobs.into_iter().zip(done) {
            match done {
                Ok(Some(hash)) => {
                    works[work].1.has_come(piece, hash);
                    self.there.insert(hash);
                }
                Ok(None) => {}
                Err(error) => errors[work] = Some(error),
            }
        }
        errors
    }

    /// Deletes these, side by side. Some may be gone in spite of an error, because only its answer was lost.
    pub(super) fn delete(&mut self, garbage: &HashSet<Id>) -> Result<()> {
        self.there.retain(|hash| !garbage.contains(hash));
        let garbage: Vec<&Id> = garbage.iter().collect();
        let deleted = in_parallel(&garbage, |hash| self.place.delete(&Blob { hash: **hash, len: 0 }.name()));
        deleted.into_iter().collect()
    }
}
