//! Counts how often training continued from lossy checkpoints of a lineage (docs/FORMAT.md, "Restores").
//!
//! One small file, replaced as a whole: a crash loses at most the last counts. A damaged file is replaced by an empty
//! one. It only decides how faithfully future states are kept, and does not affect existing ones.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::hash::xxh3_64;

use super::bytes::Fields;
use super::durable::CrashPoint;
use super::{Damage, Store};

const MAGIC: [u8; 8] = *b"stepfsRS";
const VERSION: u32 = 1;
const NAME: &str = "restores";
/// Lineages remembered; the least recently restored are dropped first. A few hundred bytes each.
const MOST_LINEAGES: usize = 4096;
/// Changes of a lineage's generations that are remembered. They date states that are not archived yet, which are few.
const MOST_EVENTS: usize = 8;
/// Maximum bytes of a path that is kept for people.
const MOST_ORIGIN: usize = 255;
/// This program writes no longer file.
const MOST_BYTES: u64 = (MOST_LINEAGES * (MOST_ORIGIN + 32 + 12 * MOST_EVENTS) + 32) as u64;

/// The record of a lineage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&(self.lineages.len() as u32).to_le_bytes());
        for (lineage, known) in &self.lineages {
            out.extend_from_slice(&lineage.to_le_bytes());
            out.extend_from_slice(&known.restores.to_le_bytes());
            out.extend_from_slice(&known.last_ns.to_le_bytes());
            out.extend_from_slice(&known.before.to_le_bytes());
            out.extend_from_slice(&(known.events.len() as u32).to_le_bytes());
            for (at, generations) in &known.events {
                out.extend_from_slice(&at.to_le_bytes());
                out.extend_from_slice(&generations.to_le_bytes());
            }
            out.extend_from_slice(&(known.origin.len() as u32).to_le_bytes());
            out.extend_from_slice(known.origin.as_bytes());
        }
        out.extend_from_slice(&xxh3_64(&out).to_le_bytes());
        out
    }

    /// Parses the bytes of the file.
    ///
    /// # Errors
    /// [`Damage`] if a byte was changed or another version of stepfs wrote them.
    pub fn decode(bytes: &[u8]) -> Result<Restores, Damage> {
        let body = bytes.get(..bytes.len().wrapping_sub(8)).ok_or(Damage("it is cut short"))?;
        if Fields::new(&bytes[body.len()..]).u64()? != xxh3_64(body) {
            return Err(Damage("its checksum does not match"));
        }
        let mut fields = Fields::new(body);
        if fields.take(8)? != MAGIC {
            return Err(Damage("its first bytes are wrong"));
        }
        if fields.u32()? != VERSION {
            return Err(Damage("another version of stepfs wrote it"));
        }
        let mut lineages = BTreeMap::new();
        for _ in 0..fields.count(32)? {
            let (lineage, restores, last_ns) = (fields.u64()?, fields.u32()?, fields.u64()? as i64);
            let before = fields.u32()?;
            let events = (0..fields.count(12)?).map(|_| Ok((fields.u64()? as i64, fields.u32()?)));
            let events: Vec<(i64, u32)> = events.collect::<Result<_, Damage>>()?;
            let origin = fields.text()?;
            let fits = events.len() <= MOST_EVENTS && origin.len() <= MOST_ORIGIN;
            if !fits || !events.is_sorted_by_key(|(at, _)| *at) {
                return Err(Damage("a lineage has impossible values"));
            }
            lineages.insert(lineage, Lineage { restores, origin, last_ns, before, events });
        }
        match fields.remaining() {
            0 if lineages.len() <= MOST_LINEAGES => Ok(Restores { lineages }),
            _ => Err(Damage("it is longer than it may be")),
        }
    }
}

fn path(root: &Path) -> PathBuf {
    root.join(NAME)
}

#[cfg(test)]
mod tests;
