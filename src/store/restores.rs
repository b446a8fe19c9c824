//! Counts how often training continued from lossy checkpoints of a lineage (docs/FORMAT.md, "Restores").
//!
//! One small file, replaced as a whole: a crash loses at most the last counts. A damaged file is replaced by an empty
//! one. It only decides how faithfully future states are kept, and does not affect existing ones.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::durable::CrashPoint;
use super::{Damage, Store, record};

const MAGIC: &[u8; 8] = b"stepfsRS";
const NAME: &str = "restores";
/// Lineages remembered; the least recently restored are dropped first. A few hundred bytes each.
const MOST_LINEAGES: usize = 4096;
/// Changes of a lineage's generations that are remembered. They date states that are not archived yet, which are few.
const MOST_EVENTS: usize = 8;
/// Maximum bytes of a path that is kept for people.
const MOST_ORIGIN: usize = 255;
/// This program writes no longer file: a lineage has seven numbers, a path, and two numbers for each event.
const MOST_BYTES: u64 = (MOST_LINEAGES * (MOST_ORIGIN + 40 + 15 * MOST_EVENTS) + 32) as u64;

/// The record of a lineage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lineage {
    /// Number of restores from its lossy files.
    pub restores: u32,
    /// Path of the file that was restored last; for people.
    pub origin: String,
    /// Time of the last restore, nanoseconds since 1970.
    last_ns: i64,
    /// Lossy generations of states from before the first of `events`.
    before: u32,
    /// Restores that changed the generations: the time, ascending, and the generations of states sealed after it.
    events: Vec<(i64, u32)>,
}

impl Lineage {
    /// Number of lossy restores behind a state that was modified at this time.
    pub fn generations(&self, modified_ns: i64) -> u32 {
        let before = self.events.iter().rev().find(|(at, _)| *at <= modified_ns);
        before.map_or(self.before, |(_, generations)| *generations)
    }

    fn restored(&mut self, at_ns: i64, generations: u32, origin: &str) {
        self.restores = self.restores.saturating_add(1);
        let last = self.events.last().copied();
        // If the clock was set back, the event must still come after the known ones.
        self.last_ns = last.map_or(at_ns, |(at, _)| at.max(at_ns));
        let generations = generations.saturating_add(1);
        if last.map_or(self.before, |(_, before)| before) != generations {
            self.events.push((self.last_ns, generations));
        }
        if self.events.len() > MOST_EVENTS {
            self.before = self.events.remove(0).1;
        }
        let end = (0..=MOST_ORIGIN.min(origin.len())).rev().find(|end| origin.is_char_boundary(*end));
        self.origin = origin[..end.unwrap_or(0)].to_string();
    }
}

/// All lineages that were restored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restores {
    lineages: BTreeMap<u64, Lineage>,
}

impl Restores {
    /// Loads the records of a store.
    pub fn load(store: &Store) -> io::Result<Restores> {
        match store.io().read(&path(store.root()), MOST_BYTES + 1) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Restores::default()),
            bytes => Ok(Restores::decode(&bytes?)?),
        }
    }

    /// Writes the records durably.
    ///
    /// # Errors
    /// Device errors; the file then has the old content or the new one.
    pub fn save(&self, store: &Store) -> io::Result<()> {
        if self.lineages.is_empty() && !fs::exists(path(store.root()))? {
            return Ok(());
        }
        let steps = (CrashPoint::RestoresWritten, CrashPoint::RestoresInPlace);
        store.io().replace(&store.tmp().join(NAME), &path(store.root()), &self.encode(), steps)
    }

    /// The record of a lineage, if it was restored.
    pub fn get(&self, lineage: u64) -> Option<&Lineage> {
        self.lineages.get(&lineage)
    }

    /// All records.
    pub fn all(&self) -> impl Iterator<Item = (u64, &Lineage)> {
        self.lineages.iter().map(|(lineage, known)| (*lineage, known))
    }

    /// Number of restores of a lineage.
    pub fn seen(&self, lineage: u64) -> u32 {
        self.get(lineage).map_or(0, |known| known.restores)
    }

    /// Number of lossy restores behind a state of a lineage that was modified at this time.
    pub fn generations(&self, lineage: u64, modified_ns: i64) -> u32 {
        self.get(lineage).map_or(0, |known| known.generations(modified_ns))
    }

    /// Records that training continued at this time from a lossy file at the path `origin`, with this many lossy
    /// generations behind it.
    pub fn restored(&mut self, lineage: u64, at_ns: i64, generations: u32, origin: &str) {
        self.lineages.entry(lineage).or_default().restored(at_ns, generations, origin);
        while self.lineages.len() > MOST_LINEAGES {
            let oldest = self.lineages.iter().min_by_key(|(_, known)| known.last_ns).map(|(lineage, _)| *lineage);
            oldest.and_then(|lineage| self.lineages.remove(&lineage));
        }
    }

    /// Drops the lineages for which `lives` is false; true if there were any.
    pub fn retain(&mut self, lives: impl Fn(u64) -> bool) -> bool {
        let count = self.lineages.len();
        self.lineages.retain(|lineage, _| lives(*lineage));
        self.lineages.len() < count
    }

    /// The bytes of the file.
    pub fn encode(&self) -> Vec<u8> {
        record::encode(MAGIC, self)
    }

    /// Parses the bytes of the file.
    ///
    /// # Errors
    /// [`Damage`] if a byte was changed or another version of stepfs wrote them.
    pub fn decode(bytes: &[u8]) -> Result<Restores, Damage> {
        let restores: Restores = record::decode(MAGIC, bytes)?;
        let fits = |known: &Lineage| known.events.len() <= MOST_EVENTS && known.origin.len() <= MOST_ORIGIN;
        let is_sound = |known: &Lineage| fits(known) && known.events.is_sorted_by_key(|(at, _)| *at);
        match restores.lineages.len() <= MOST_LINEAGES && restores.lineages.values().all(is_sound) {
            true => Ok(restores),
            false => Err(Damage("a lineage has impossible values")),
        }
    }
}

fn path(root: &Path) -> PathBuf {
    root.join(NAME)
}

#[cfg(test)]
mod tests;
