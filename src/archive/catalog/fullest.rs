//! Which checkpoint directories have more files than each newer one of their run.
//!
//! A run that dies between two files of a checkpoint may be unable to go on from it, whatever the missing file is. Such
//! a directory has fewer files than the one before, so that one keeps its exact bytes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Bound;
use std::path::{Path, PathBuf};

use crate::store::step_pattern;

/// The place of a directory in its run: by its steps, then by its path.
type Place = (Vec<u64>, PathBuf);

/// The durable files of all checkpoint directories, by run. Empty and temporary ones do not count.
#[derive(Debug, Default)]
pub(super) struct Fullest {
    /// By the directories' path without their steps.
    runs: HashMap<Vec<u8>, Run>,
    /// The directories that are the fullest so far, seen from the newest one.
    directories: HashSet<PathBuf>,
}

/// The directories of one run with their numbers of durable files.
#[derive(Debug, Default)]
struct Run {
    counts: BTreeMap<Place, usize>,
    /// Those with more files than each newer one: the number falls with the place.
    fullest: BTreeMap<Place, usize>,
}

impl Fullest {
    /// Whether each newer directory of the run has fewer files.
    pub(super) fn has(&self, directory: &Path) -> bool {
        self.directories.contains(directory)
    }

    /// A file of a checkpoint directory became durable, or is so no longer. Returns the directories for which the
    /// answer of [`Fullest::has`] changed.
    ///
    /// Time: O(log n) for n directories of the run; O(n) if the file was of one of the fullest and went.
    pub(super) fn count(&mut self, directory: &Path, came: bool) -> Vec<PathBuf> {
        let counted = step_pattern::of_directory(directory);
        let place = (counted.steps, directory.to_path_buf());
        let run = self.runs.entry(counted.series.clone()).or_default();
        let before = run.counts.get(&place).copied().unwrap_or(0);
        let changed = run.set(&place, if came { before + 1 } else { before.saturating_sub(1) });
        if run.counts.is_empty() {
            self.runs.remove(&counted.series);
        }
        for directory in &changed {
            if !self.directories.remove(directory) {
                self.directories.insert(directory.clone());
            }
        }
        changed
    }
}

impl Run {
    /// Sets the number of a directory's files. Returns the directories that became one of the fullest, or are so no
    /// longer.
    fn set(&mut self, place: &Place, files: usize) -> Vec<PathBuf> {
        match files {
            0 => self.counts.remove(place),
            files => self.counts.insert(place.clone(), files),
        };
        let was = self.fullest.remove(place);
        let newer = self.fullest.range((Bound::Excluded(place), Bound::Unbounded)).next();
        let mut most = newer.map_or(0, |(_, files)| *files);
        let mut changed = Vec::new();
        if files > most {
            most = files;
            self.fullest.insert(place.clone(), files);
        }
        if was.is_some() != self.fullest.contains_key(place) {
            changed.push(place.1.clone());
        }
        // Older ones that have no more than this one now.
        let beaten = self.fullest.range(..place).rev().take_while(|(_, files)| **files <= most);
        let beaten: Vec<Place> = beaten.map(|(place, _)| place.clone()).collect();
        for place in beaten {
            self.fullest.remove(&place);
            changed.push(place.1);
        }
        // Those that only this one had beaten, down to the next of the fullest.
        if was.is_some_and(|was| was > most) {
            let next = self.fullest.range(..place).next_back().map(|(place, _)| place.clone());
            let from = next.map_or(Bound::Unbounded, Bound::Excluded);
            for (place, &files) in self.counts.range((from, Bound::Excluded(place.clone()))).rev() {
                if files > most {
                    most = files;
                    self.fullest.insert(place.clone(), files);
                    changed.push(place.1.clone());
                }
            }
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The directories with more files than each newer one, by looking at all.
    fn searched(files: &BTreeMap<u64, usize>) -> HashSet<PathBuf> {
        let is_fullest = |(step, count): &(&u64, &usize)| files.range(*step + 1..).all(|(_, newer)| newer < count);
        files.iter().filter(is_fullest).map(|(step, _)| directory(*step)).collect()
    }

    fn directory(step: u64) -> PathBuf {
        PathBuf::from(format!("run/checkpoint-{step}"))
    }

    proptest! {
        #[test]
        fn the_fullest_are_those_that_no_newer_one_reaches(
            changes in prop::collection::vec((0..12u64, prop::bool::weighted(0.6)), 0..200)
        ) {
            let (mut fullest, mut files) = (Fullest::default(), BTreeMap::new());
            for (step, came) in changes {
                let count = files.entry(step).or_insert(0);
                if !came && *count == 0 {
                    files.retain(|_, count| *count > 0);
                    continue;
                }
                *count = if came { *count + 1 } else { *count - 1 };
                files.retain(|_, count| *count > 0);
                let before = fullest.directories.clone();
                let changed: HashSet<PathBuf> = fullest.count(&directory(step), came).into_iter().collect();
                prop_assert_eq!(&fullest.directories, &searched(&files));
                let differ: HashSet<PathBuf> = before.symmetric_difference(&fullest.directories).cloned().collect();
                prop_assert_eq!(changed, differ);
            }
        }
    }

    #[test]
    fn runs_do_not_mix() {
        let mut fullest = Fullest::default();
        for path in ["a/checkpoint-1", "b/checkpoint-2", "b/checkpoint-2"] {
            fullest.count(Path::new(path), true);
        }
        assert!(fullest.has(Path::new("a/checkpoint-1")) && fullest.has(Path::new("b/checkpoint-2")));
    }
}
