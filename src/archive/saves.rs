//! The last saves of checkpoints, as the file system saw them: the first open for writing, and the last close.
//!
//! With passthrough the daemon sees no writes, so the time of a save is that between the two. The record is made when a
//! closed file has been examined, so neither open nor close waits for it.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::store::{MIN_RELEASE_BYTES, step_pattern};

/// Saves that are kept: enough to see a trend, and few lines of a screen.
const MOST: usize = 8;
/// Files of one checkpoint belong to one save if the next one follows within this time. A rank that waits for others
/// may pause; a run that saves a checkpoint anew takes longer.
const GAP: Duration = Duration::from_secs(30);
/// Characters of a path that a status shows. An attribute holds 64 KiB.
const MOST_CHARACTERS: usize = 200;

/// A save of a checkpoint: of one file, or of files that programs wrote in a row.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Save {
    /// The file, or the directory that is one checkpoint, below the mount. `*` stands for the number of a shard.
    pub path: String,
    /// Its files that are large enough to be released.
    pub files: u64,
    /// Bytes of these files.
    pub bytes: u64,
    /// From the first open for writing to the last close, in milliseconds.
    pub milliseconds: u64,
    /// The last close, in seconds since 1970.
    pub closed: i64,
}

impl Save {
    /// `None` for a save that took less than a millisecond.
    pub fn bytes_per_second(&self) -> Option<u64> {
        (self.bytes.saturating_mul(1000)).checked_div(self.milliseconds)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Saves(VecDeque<Record>);

#[derive(Debug)]
struct Record {
    path: PathBuf,
    files: u64,
    bytes: u64,
    opened: Instant,
    closed: Instant,
    /// The same by the wall clock; nanoseconds since 1970.
    closed_ns: i64,
    /// Bytes in the store of earlier states that were removed since.
    freed: u64,
}

/// The checkpoint of a file, as `stepfs ls` lists it: the file, its directory, or with `*` for the number of a shard.
pub(super) fn checkpoint(path: &Path) -> PathBuf {
    let shards = || step_pattern::shard(path.file_name()?.as_bytes());
    let name = |shard: step_pattern::Shard| path.with_file_name(OsStr::from_bytes(&shard.of));
    step_pattern::group(path).or_else(|| shards().map(name)).unwrap_or_else(|| path.to_path_buf())
}

/// A path for a status: the end of a long one.
pub(super) fn shown(path: &Path) -> String {
    let path = path.to_string_lossy();
    match path.char_indices().rev().nth(MOST_CHARACTERS) {
        Some((at, cut)) => format!("…{}", &path[at + cut.len_utf8()..]),
        None => path.into_owned(),
    }
}

impl Saves {
    /// A file of so many bytes was examined that programs had open between these times. `closed_ns`: the last one by the
    /// wall clock. Only checkpoints count: small files and logs would hide them.
    pub(super) fn add(
        &mut self,
        (path, bytes): (&Path, u64),
        has_tensors: Option<bool>,
        (opened, closed): (Instant, Instant),
        closed_ns: i64,
    ) {
        let is_checkpoint = || has_tensors == Some(true) || step_pattern::of_file(path).is_worded;
        if bytes < MIN_RELEASE_BYTES || !is_checkpoint() {
            return;
        }
        let of = checkpoint(path);
        let is_near = |save: &Record| opened < save.closed + GAP && save.opened < closed + GAP;
        let same = self.0.iter_mut().rev().find(|save| of != path && save.path == of && is_near(save));
        if let Some(save) = same {
            save.files += 1;
            save.bytes += bytes;
            (save.opened, save.closed) = (save.opened.min(opened), save.closed.max(closed));
            save.closed_ns = save.closed_ns.max(closed_ns);
            return;
        }
        if self.0.len() == MOST {
            self.0.pop_front();
        }
        self.0.push_back(Record { path: of, files: 1, bytes, opened, closed, closed_ns, freed: 0 });
    }

    /// An earlier state was removed that took so many bytes in the store.
    pub(super) fn freed(&mut self, bytes: u64) {
        if let Some(last) = self.0.back_mut() {
            last.freed += bytes;
        }
    }

    /// The bytes that were freed after each save; not of the last one if they may go yet.
    pub(super) fn freed_each(&self) -> Vec<u64> {
        let all = self.0.len() - usize::from(self.0.back().is_some_and(|last| last.freed == 0));
        self.0.iter().take(all).map(|save| save.freed).collect()
    }

    /// Names moved.
    pub(super) fn moved(&mut self, moved: impl Fn(&Path) -> PathBuf) {
        self.0.iter_mut().for_each(|save| save.path = moved(&save.path));
    }

    /// The last saves, the newest first.
    pub(super) fn last(&self) -> Vec<Save> {
        let mut records: Vec<&Record> = self.0.iter().collect();
        records.sort_by_key(|save| std::cmp::Reverse(save.closed));
        let save = |save: &Record| Save {
            path: shown(&save.path),
            files: save.files,
            bytes: save.bytes,
            milliseconds: u64::try_from(save.closed.saturating_duration_since(save.opened).as_millis()).unwrap_or(0),
            closed: save.closed_ns / 1_000_000_000,
        };
        records.into_iter().map(save).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn files_of_one_checkpoint_are_one_save() {
        let (start, mut saves) = (Instant::now(), Saves::default());
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut add = |path: &str, bytes, from, to| {
            saves.add((Path::new(path), bytes), Some(true), (at(from), at(to)), to as i64 * 1_000_000);
        };
        add("run/checkpoint-1/model.safetensors", 6 * MIB, 0, 2000);
        add("run/checkpoint-1/optimizer.pt", 2 * MIB, 2500, 4000);
        add("run/checkpoint-1/trainer_state.json", 100, 4000, 9000);
        add("step_2.pt", MIB, 10_000, 10_500);
        add("step_2.pt", MIB, 11_000, 11_250);
        // The same directory an hour later.
        add("run/checkpoint-1/optimizer.pt", MIB, 3_600_000, 3_600_000);
        let last = saves.last();
        let seen: Vec<_> =
            last.iter().map(|save| (&*save.path, save.files, save.bytes / MIB, save.milliseconds)).collect();
        let one = "run/checkpoint-1";
        assert_eq!(seen, [(one, 1, 1, 0), ("step_2.pt", 1, 1, 250), ("step_2.pt", 1, 1, 500), (one, 2, 8, 4000)]);
        assert_eq!((last[3].bytes_per_second(), last[0].bytes_per_second()), (Some(2 * MIB), None));
        assert_eq!(last[3].closed, 4);
    }

    #[test]
    fn logs_and_small_files_hide_no_save_and_the_record_is_bounded() {
        let (now, mut saves) = (Instant::now(), Saves::default());
        saves.add((Path::new("step_1.pt"), MIB), Some(true), (now, now), 0);
        for at in 0..1000 {
            saves.add((Path::new("train.log"), MIB), Some(false), (now, now), at);
            saves.add((Path::new("model.pt"), 1000), None, (now, now), at);
        }
        assert_eq!(saves.last().len(), 1);
        // A format that stepfs does not know, under a name that counts training.
        (0..1000).for_each(|at| saves.add((Path::new(&format!("step_{at}.bin")), MIB), Some(false), (now, now), at));
        assert_eq!(saves.last().len(), MOST);
        saves.moved(|path| Path::new("run").join(path));
        assert!(saves.last().iter().all(|save| save.path.starts_with("run/step_")));
    }

    #[test]
    fn bytes_that_go_after_a_save_count_for_it() {
        let (now, mut saves) = (Instant::now(), Saves::default());
        saves.freed(7);
        for at in 0..3 {
            saves.add((Path::new(&format!("step_{at}.pt")), MIB), Some(true), (now, now), at);
            assert_eq!(saves.freed_each(), [5; 2][..at as usize], "the last one may go yet");
            (0..5).for_each(|_| saves.freed(1));
        }
        assert_eq!(saves.freed_each(), [5; 3]);
    }

    #[test]
    fn a_long_path_keeps_its_end() {
        let path = format!("{}/é{}", "x".repeat(9000), "/step_1.pt".repeat(19));
        assert_eq!(shown(Path::new(&path)).chars().count(), MOST_CHARACTERS + 1);
        assert!(shown(Path::new(&path)).ends_with("/step_1.pt") && shown(Path::new("a")) == "a");
    }
}
