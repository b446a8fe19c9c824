//! How a store grows: the runs in it, and the room for more checkpoints, by the checkpoints that it has.
//!
//! The newest checkpoint of a series is whole, and gives most of its room back when the next one comes. So a series grows
//! by the room that its earlier checkpoints take.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::clock::is_future;
use crate::store::step_pattern;

use super::saves::{checkpoint, shown};

/// The newest checkpoints by which the growth is measured: they span four cycles of super-steps, which take more room.
const RECENT: usize = 33;
/// Fewer earlier checkpoints show no growth.
const FEWEST: usize = 2;
/// A single save may free at most so many times the room of a checkpoint: who empties a directory once removes no
/// checkpoint for each new one.
const MOST_FREED: u64 = 4;
/// A growth below this part of a checkpoint is none: those that come and go differ that much in size.
const STEADY: u64 = 4;
/// A run that saved nothing for so many intervals, and for so long, has stopped: it has no pace.
const MOST_INTERVALS: i64 = 4;
const PAUSE: i64 = 3600;
/// Runs that a status shows.
const MOST_RUNS: usize = 8;
const DAY: i64 = 86_400;
const SECOND_NS: i64 = 1_000_000_000;

/// The room for more checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// Bytes by which the store grows with each checkpoint. 0: about as many bytes go as come.
    pub bytes_per_checkpoint: u64,
    /// Checkpoints for which there is room. `None` if the store does not grow.
    pub checkpoints: Option<u64>,
    /// Bytes by which the store grows in a day, at the pace of the last checkpoints. `None` if they have stopped.
    pub bytes_per_day: Option<u64>,
    /// When the disk is full at that pace, in seconds since 1970.
    pub full: Option<i64>,
}

/// A directory with checkpoints of one run, or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Below the mount; empty for the mount itself.
    pub path: String,
    /// Files of checkpoints below it.
    pub files: u64,
    /// Its newest checkpoint, below the mount.
    pub newest: String,
    /// The number in that path that counts training.
    pub step: Option<u64>,
    /// When that one was modified, in seconds since 1970.
    pub modified: i64,
}

/// A file of a checkpoint.
#[derive(Debug)]
pub struct Part {
    /// Below the mount.
    pub path: PathBuf,
    /// See [`step_pattern::run`].
    pub run: Arc<Path>,
    /// Nanoseconds since 1970.
    pub modified_ns: i64,
    /// Bytes that programs see.
    pub logical: u64,
    /// Bytes in the store.
    pub stored: u64,
    /// It takes less room soon.
    pub shrinks: bool,
}

/// The runs with the newest checkpoints, the newest first.
pub(super) fn runs(parts: &[Part]) -> Vec<Run> {
    let mut found: BTreeMap<&Path, (&Part, u64)> = BTreeMap::new();
    for part in parts {
        let (newest, files) = found.entry(&part.run).or_insert((part, 0));
        *files += 1;
        if part.modified_ns > newest.modified_ns {
            *newest = part;
        }
    }
    let mut found: Vec<_> = found.into_iter().collect();
    found.sort_by_key(|(_, (newest, _))| Reverse(newest.modified_ns));
    found.truncate(MOST_RUNS);
    let run = |(path, (newest, files)): (&Path, (&Part, u64))| Run {
        path: shown(path),
        files,
        newest: shown(&checkpoint(&newest.path)),
        step: step_pattern::of_file(&newest.path).step,
        modified: newest.modified_ns / SECOND_NS,
    };
    found.into_iter().map(run).collect()
}

/// A checkpoint: a file, or all files of one.
struct Whole {
    path: PathBuf,
    modified_ns: i64,
    logical: u64,
    stored: u64,
    shrinks: bool,
}

/// The newest checkpoints among these parts, the newest first. Of the oldest of them some files may be missing.
fn recent(parts: &mut [Part]) -> Vec<Whole> {
    parts.sort_by_key(|part| Reverse(part.modified_ns));
    let (mut found, mut places): (Vec<Whole>, HashMap<PathBuf, usize>) = Default::default();
    for part in parts.iter().filter(|part| !is_future(part.modified_ns)) {
        let path = checkpoint(&part.path);
        match places.get(&path) {
            Some(&place) => {
                let whole = &mut found[place];
                whole.logical += part.logical;
                whole.stored += part.stored;
                whole.shrinks |= part.shrinks;
            }
            None if found.len() == RECENT => break,
            None => {
                places.insert(path.clone(), found.len());
                let Part { modified_ns, logical, stored, shrinks, .. } = *part;
                found.push(Whole { path, modified_ns, logical, stored, shrinks });
            }
        }
    }
    found
}

/// The room in `free` bytes. `freed_each`: the bytes of earlier checkpoints that went after each of the last saves. `now`:
/// seconds since 1970. `None` if there are too few checkpoints to tell. Sorts the parts.
pub fn room(parts: &mut [Part], free: u64, freed_each: &[u64], now: i64) -> Option<Room> {
    let recent = recent(parts);
    let mut series = HashSet::new();
    let is_earlier = |whole: &&Whole| !series.insert(step_pattern::pattern(&whole.path)) && !whole.shrinks;
    let earlier: Vec<u64> = recent.iter().filter(is_earlier).map(|whole| whole.stored).collect();
    if earlier.len() < FEWEST {
        return None;
    }
    let each = earlier.iter().sum::<u64>() / earlier.len() as u64;
    let freed = freed_each.iter().map(|&freed| freed.min(each.saturating_mul(MOST_FREED))).sum::<u64>();
    let growth = each.saturating_sub(freed.checked_div(freed_each.len() as u64).unwrap_or(0));
    if growth <= each / STEADY {
        return Some(Room::default());
    }
    // The next one is whole before the one before it shrinks.
    let count = free.saturating_sub(recent[0].logical) / growth;
    let (newest, oldest) = (recent[0].modified_ns, recent[recent.len() - 1].modified_ns);
    let interval_ns = newest.saturating_sub(oldest) / (recent.len() as i64 - 1);
    let since = now.saturating_sub(newest / SECOND_NS);
    let has_pace = interval_ns > 0 && since < PAUSE.max((interval_ns / SECOND_NS).saturating_mul(MOST_INTERVALS));
    let per_day = i128::from(growth) * i128::from(DAY) * i128::from(SECOND_NS) / i128::from(interval_ns.max(1));
    let left = i128::from(count) * i128::from(interval_ns) / i128::from(SECOND_NS);
    Some(Room {
        bytes_per_checkpoint: growth,
        checkpoints: Some(count),
        bytes_per_day: u64::try_from(per_day).ok().filter(|_| has_pace),
        full: i64::try_from(left).ok().and_then(|left| now.checked_add(left)).filter(|_| has_pace),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const HOUR: i64 = 3600;

    /// A checkpoint each hour, the last one now; the newest is whole.
    fn hourly(count: i64, now: i64) -> Vec<Part> {
        let part = |at: i64| Part {
            path: format!("run/step_{at}.pt").into(),
            run: Path::new("run").into(),
            modified_ns: (now - (count - 1 - at) * HOUR) * SECOND_NS,
            logical: 100 * MIB,
            stored: if at == count - 1 { 100 * MIB } else { 4 * MIB },
            shrinks: false,
        };
        (0..count).map(part).collect()
    }

    #[test]
    fn a_store_grows_by_its_earlier_checkpoints() {
        let now = 1_700_000_000;
        let room = |count, free, freed: &[u64], now| room(&mut hourly(count, 1_700_000_000), free, freed, now);
        assert_eq!(room(2, 900 * MIB, &[], now), None, "one earlier checkpoint");
        let found = room(40, 900 * MIB, &[], now).unwrap();
        assert_eq!(
            (found.bytes_per_checkpoint, found.checkpoints),
            (4 * MIB, Some(200)),
            "the next one is whole first"
        );
        assert_eq!((found.bytes_per_day, found.full), (Some(96 * MIB), Some(now + 200 * HOUR)));
        assert_eq!(room(40, 50 * MIB, &[], now).unwrap().checkpoints, Some(0));
        // Nothing was saved for half a day.
        let stopped = room(40, 900 * MIB, &[], now + 12 * HOUR).unwrap();
        assert_eq!((stopped.checkpoints, stopped.bytes_per_day, stopped.full), (Some(200), None, None));
        assert_eq!(room(40, u64::MAX, &[], i64::MAX).unwrap().full, None);
    }

    #[test]
    fn a_rotation_takes_no_more_room() {
        let room = |freed: &[u64]| room(&mut hourly(4, 1_700_000_000), 900 * MIB, freed, 1_700_000_000).unwrap();
        assert_eq!(room(&[4 * MIB; 8]), Room::default(), "one goes for each that comes");
        assert_eq!(room(&[0, 4 * MIB, 0, 4 * MIB]).bytes_per_checkpoint, 2 * MIB, "every other one stays");
        let emptied = room(&[0, 0, 0, 0, 0, 0, 0, 9000 * MIB]);
        assert_eq!(emptied.bytes_per_checkpoint, 2 * MIB, "a directory was emptied once");
    }

    #[test]
    fn files_of_one_checkpoint_grow_it_together() {
        let part = |step: i64, name: &str, stored| Part {
            path: format!("run/checkpoint-{step}/{name}").into(),
            run: Path::new("run").into(),
            modified_ns: (1_600_000_000 + step) * SECOND_NS,
            logical: 10 * MIB,
            stored,
            shrinks: false,
        };
        let of = |step| [part(step, "model.safetensors", MIB), part(step, "optimizer.pt", 2 * MIB)];
        let mut parts: Vec<Part> = (0..5).flat_map(of).collect();
        let runs = runs(&parts);
        assert_eq!(runs.len(), 1);
        assert_eq!(
            (&*runs[0].path, runs[0].files, &*runs[0].newest, runs[0].step),
            ("run", 10, "run/checkpoint-4", Some(4))
        );
        // One that waits to be archived says nothing of the room that it takes then.
        parts.extend(of(5).map(|part| Part { stored: 10 * MIB, shrinks: true, ..part }));
        parts.extend(of(6));
        assert_eq!(room(&mut parts, 0, &[], 0).unwrap().bytes_per_checkpoint, 3 * MIB);
    }
}
