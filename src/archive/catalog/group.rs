//! The files of a checkpoint. Those of a directory are archived and released together. Files beside each other whose
//! names have the same step only wait for those without which a run cannot go on.

use std::collections::BTreeSet;

use super::lineage::Rank;

/// Files to archive and to release, oldest first.
#[derive(Debug, Default)]
pub(super) struct Ready {
    pub(super) archives: BTreeSet<Rank>,
    pub(super) releases: BTreeSet<Rank>,
    /// Files that are being archived.
    pub(super) archiving: usize,
    /// The number of these files, and of those that wait for another attempt.
    pub(super) queued: usize,
}

impl Ready {
    /// The next file to release. All are archived before the first is released.
    pub(super) fn next_release(&self) -> Option<&Rank> {
        self.releases.first().filter(|_| self.archives.is_empty() && self.archiving == 0)
    }

    /// The sequences of all files with a step to take now.
    pub(super) fn sequences(&self) -> impl Iterator<Item = u64> {
        self.archives.iter().chain(&self.releases).map(|rank| rank.2)
    }
}

/// The files of a checkpoint.
#[derive(Debug)]
pub(super) struct Group {
    /// Else its files lie beside others.
    is_directory: bool,
    pub(super) ready: Ready,
    pub(super) members: usize,
    /// Files that are not history yet, by sequence.
    pub(super) pending: BTreeSet<u64>,
    /// Those of them without which a run cannot go on. They may be the last of their lineage because a crash cut the
    /// next checkpoint short: the run then goes on from this one, at any later time.
    pub(super) essential: BTreeSet<u64>,
    /// Modification times of its files and of the newer files that made them history.
    pub(super) touched: BTreeSet<(i64, u64)>,
    /// A directory with more files than each newer one of its run: a crash may have cut that one short.
    pub(super) is_fullest: bool,
    /// The group is not waited for any more, unless something was modified after this time.
    pub(super) settled: i64,
    /// A user wants it released, unless something was modified after this time.
    pub(super) asked: i64,
    /// Its place among the heads of the index.
    pub(super) head: Option<(u8, Rank)>,
    pub(super) timer: Option<i64>,
    pub(super) counted: usize,
}

impl Group {
    /// A group without members.
    pub(super) fn new(is_directory: bool) -> Group {
        Group {
            is_directory,
            ready: Ready::default(),
            members: 0,
            pending: BTreeSet::new(),
            essential: BTreeSet::new(),
            touched: BTreeSet::new(),
            is_fullest: false,
            settled: i64::MIN,
            asked: i64::MIN,
            head: None,
            timer: None,
            counted: 0,
        }
    }

    pub(super) fn newest(&self) -> i64 {
        self.touched.last().map_or(i64::MIN, |(at, _)| *at)
    }

    /// A file that keeps it closed.
    pub(super) fn held_up_by(&self) -> Option<u64> {
        self.essential.first().or_else(|| self.pending.first()).copied()
    }

    /// No time opens it, but only a newer checkpoint.
    pub(super) fn waits_without_limit(&self) -> bool {
        self.is_fullest || !self.essential.is_empty()
    }

    pub(super) fn is_open(&self) -> bool {
        let is_settled = || !self.is_directory || self.pending.is_empty() || self.newest() <= self.settled;
        (!self.waits_without_limit() && is_settled()) || self.newest() <= self.asked
    }
}
