//! What follows from the catalog's entries: what can be done next, what is the newest of its lineage, which checkpoints
//! are complete. Kept up to date with every change of an entry, so that nothing is ever looked for among all files:
//! a change costs O(log n), and O(k) where k byte-identical files are the newest of one lineage.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use super::group::{Group, Ready};
use super::lineage::{Lineage, Print, Rank, rank};
use super::{Entry, State};

/// What the archive does for a file next, if it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Seal,
    Archive,
    Release,
}

/// What the index knows of one entry. Everything but `history` and `since` follows from the entry alone.
#[derive(Debug)]
struct Member {
    path: PathBuf,
    group: Option<Arc<Path>>,
    rank: Rank,
    /// See [`Entry`].
    opened: u64,
    /// Of a sealed or archived file.
    lineage: Option<(u64, Print)>,
    sealed: bool,
    /// What there is to do for it; `Archive` only once it is history.
    work: Option<Work>,
    /// An attempt failed, and it is not yet time for another.
    waits: Option<Instant>,
    /// Its group is complete only when it is history.
    counts: bool,
    /// When it was last modified, or was seen to be written; nanoseconds since 1970.
    touched: i64,
    /// A newer state of its lineage is sealed, and one with higher steps.
    history: bool,
    /// If so: when the later of the two was last modified.
    since: i64,
}

impl Member {
    fn new(path: &Path, group: Option<Arc<Path>>, entry: &Entry) -> Member {
        let given_up = entry.failed.as_ref().is_some_and(|failed| failed.retry.is_none());
        let able = !entry.busy && !given_up && entry.held.is_none();
        let (lineage, touched) = match &entry.state {
            State::Sealed(sealed) | State::Archived(sealed, _) => {
                (Some((sealed.lineage, (sealed.len, sealed.sample))), sealed.modified_ns.min(entry.seen_ns))
            }
            _ => (None, entry.seen_ns),
        };
        let unfinished = matches!(entry.state, State::Staged | State::Closed | State::Sealed(_) | State::Archived(..));
        Member {
            path: path.to_path_buf(),
            group,
            rank: rank(entry),
            opened: entry.opened,
            lineage,
            sealed: matches!(entry.state, State::Sealed(_)),
            work: match &entry.state {
                State::Closed if !given_up => Some(Work::Seal),
                State::Sealed(_) if able => Some(Work::Archive),
                State::Archived(..) if able => Some(Work::Release),
                _ => None,
            },
            waits: entry.failed.as_ref().and_then(|failed| failed.retry).filter(|_| !entry.due),
            counts: unfinished && !given_up && entry.held.is_none(),
            touched,
            history: false,
            since: i64::MIN,
        }
    }

    fn queued(&self) -> Option<Work> {
        self.work.filter(|work| *work != Work::Archive || self.history)
    }
}

/// What [`Index::next`] found, by paths.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Seal(PathBuf),
    /// With the path of the state after it.
    Archive(PathBuf, PathBuf),
    Release(PathBuf),
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// How long a group is waited for, nanoseconds; 0: there are no groups.
    settle_ns: i64,
    /// By the entry's sequence.
    members: HashMap<u64, Member>,
    lineages: HashMap<u64, Lineage>,
    groups: HashMap<Arc<Path>, Group>,
    /// Files that can be sealed.
    closed: BTreeSet<Rank>,
    /// Closed files, also those that wait for another attempt.
    unsealed: usize,
    /// Work of files that are in no group.
    single: Ready,
    /// What comes first of every open group: 1 a release, 2 something to archive.
    heads: BTreeSet<(u8, Rank)>,
    /// When groups that are not complete are not waited for any longer.
    timers: BTreeSet<(i64, Arc<Path>)>,
    /// Entries whose failure waits for a time, or has waited.
    waiting: BTreeSet<(Instant, u64)>,
    /// Work of open groups.
    open: usize,
    /// Files of groups that are waited for.
    settling: usize,
}

impl Index {
    pub(super) fn new(settle_ns: i64) -> Index {
        Index { settle_ns, ..Index::default() }
    }

    /// An entry is there from now on. `group`: the directory of the checkpoint it is a part of.
    pub(super) fn add(&mut self, path: &Path, group: Option<Arc<Path>>, entry: &Entry) {
        // A copy of what is archived already loses nothing, whatever becomes of the rest.
        let waits_for_nobody = matches!(&entry.state, State::Archived(sealed, _) if sealed.copy);
        let mut member = Member::new(path, group.filter(|_| self.settle_ns > 0), entry);
        if waits_for_nobody {
            member.group = None;
        }
        let (sequence, rank, of, sealed) = (entry.sequence, member.rank.clone(), member.lineage, member.sealed);
        self.members.insert(sequence, member);
        if let Some((id, print)) = of {
            self.lineages.entry(id).or_default().insert(rank, print, sealed);
            self.judge(sequence);
            self.place(sequence);
            self.advance(id);
        } else {
            self.place(sequence);
        }
    }

    /// An entry is gone.
    pub(super) fn remove(&mut self, sequence: u64) {
        self.unplace(sequence);
        let Some(member) = self.members.remove(&sequence) else { return };
        if let Some((id, _)) = member.lineage {
            if let Some(lineage) = self.lineages.get_mut(&id) {
                lineage.remove(&member.rank, member.sealed);
            }
            self.advance(id);
            if self.lineages.get(&id).is_some_and(Lineage::is_empty) {
                self.lineages.remove(&id);
            }
        }
    }

    /// Finds out anew whether a file is history; it is not placed meanwhile.
    fn judge(&mut self, sequence: u64) {
        let Some(member) = self.members.get(&sequence) else { return };
        let Some((id, print)) = member.lineage else { return };
        let Some(lineage) = self.lineages.get(&id) else { return };
        let history = lineage.is_history(&member.rank, print);
        let touched = |sequence: u64| self.members.get(&sequence).map(|other| other.touched);
        let successors = lineage.successors(&member.rank, print).filter_map(touched);
        let since = successors.max().filter(|_| history).unwrap_or(i64::MIN);
        if let Some(member) = self.members.get_mut(&sequence) {
            (member.history, member.since) = (history, since);
        }
    }

    /// A sealed or archived state came or went: those at the end of the lineage may have become history, or the newest.
    fn advance(&mut self, id: u64) {
        let Some(lineage) = self.lineages.get_mut(&id) else { return };
        let mut flipped = lineage.advance();
        let lineage = &*lineage;
        flipped.retain(|sequence| {
            self.members.get(sequence).is_some_and(|member| {
                let print = member.lineage.map(|(_, print)| print);
                print.is_some_and(|print| member.history != lineage.is_history(&member.rank, print))
            })
        });
        for sequence in flipped {
            self.unplace(sequence);
            self.judge(sequence);
            self.place(sequence);
        }
    }

    fn place(&mut self, sequence: u64) {
        self.count(sequence, true);
    }

    fn unplace(&mut self, sequence: u64) {
        self.count(sequence, false);
    }

    /// Enters a member into everything but its lineage, or takes it out.
    fn count(&mut self, sequence: u64, enter: bool) {
        let Some(member) = self.members.get(&sequence) else { return };
        if let Some(at) = member.waits {
            put(&mut self.waiting, (at, sequence), enter);
        }
        let now = member.waits.is_none();
        let step = |count: &mut usize| if enter { *count += 1 } else { *count -= 1 };
        let work = member.queued();
        if work == Some(Work::Seal) {
            step(&mut self.unsealed);
            if now {
                put(&mut self.closed, member.rank.clone(), enter);
            }
        }
        let ready = match &member.group {
            None => &mut self.single,
            Some(directory) => {
                let group = self.groups.entry(Arc::clone(directory)).or_insert_with(Group::new);
                step(&mut group.members);
                if member.counts {
                    if !member.history {
                        step(&mut group.pending);
                    }
                    put(&mut group.touched, (member.touched.max(member.since), sequence), enter);
                }
                &mut group.ready
            }
        };
        let set = match work {
            Some(Work::Archive) => Some(&mut ready.archives),
            Some(Work::Release) => Some(&mut ready.releases),
            Some(Work::Seal) | None => None,
        };
        if let Some(set) = set {
            step(&mut ready.queued);
            if now {
                put(set, member.rank.clone(), enter);
            }
        }
        if let Some(group) = member.group.clone() {
            self.refresh(&group);
        }
    }

    /// Puts a group where it belongs after a change.
    fn refresh(&mut self, directory: &Arc<Path>) {
        let Some(group) = self.groups.get_mut(directory) else { return };
        if let Some(head) = group.head.take() {
            self.heads.remove(&head);
        }
        match group.timer.take() {
            Some(due) => {
                self.timers.remove(&(due, Arc::clone(directory)));
                self.settling -= group.counted;
            }
            None => self.open -= group.counted,
        }
        group.counted = group.ready.queued;
        if group.members == 0 {
            self.groups.remove(directory);
        } else if group.is_open() {
            self.open += group.counted;
            // All are archived before the first is released.
            let archive = group.ready.archives.first().map(|rank| (2, rank.clone()));
            group.head = archive.or_else(|| group.ready.releases.first().map(|rank| (1, rank.clone())));
            self.heads.extend(group.head.clone());
        } else if group.counted > 0 {
            let due = group.newest().saturating_add(self.settle_ns);
            self.settling += group.counted;
            group.timer = Some(due);
            self.timers.insert((due, Arc::clone(directory)));
        }
    }

    /// Groups whose time has passed are not waited for any longer.
    pub(super) fn expire(&mut self, wall_ns: i64) {
        while let Some((_, directory)) = self.timers.first().filter(|(due, _)| *due <= wall_ns).cloned() {
            self.hasten(&directory);
        }
    }

    /// A group is not waited for any longer as it is now.
    pub(super) fn hasten(&mut self, directory: &Arc<Path>) {
        if let Some(group) = self.groups.get_mut(directory) {
            group.settled = group.newest();
            self.refresh(directory);
        }
    }

    /// An entry whose failed attempt may be repeated by now.
    pub(super) fn due(&self, now: Instant) -> Option<&PathBuf> {
        let (_, sequence) = self.waiting.first().filter(|(at, _)| *at <= now)?;
        self.members.get(sequence).map(|member| &member.path)
    }

    /// When the next failed attempt may be repeated.
    pub(super) fn retry(&self) -> Option<Instant> {
        self.waiting.first().map(|(at, _)| *at)
    }

    /// When the next group is not waited for any longer; nanoseconds since 1970.
    pub(super) fn settles(&self) -> Option<i64> {
        self.timers.first().map(|(due, _)| *due)
    }

    /// What is most urgent.
    pub(super) fn next(&self) -> Option<Next> {
        if let Some(rank) = self.closed.first() {
            return Some(Next::Seal(self.path(rank)?));
        }
        let of_group = |urgency: u8| self.heads.first().filter(|(u, _)| *u == urgency).map(|(_, rank)| rank);
        let older = |a: Option<&Rank>, b: Option<&Rank>| a.into_iter().chain(b).min().cloned();
        if let Some(rank) = older(self.single.releases.first(), of_group(1)) {
            return Some(Next::Release(self.path(&rank)?));
        }
        let rank = older(self.single.archives.first(), of_group(2))?;
        let member = self.members.get(&rank.2)?;
        let (id, print) = member.lineage?;
        let after = self.lineages.get(&id)?.after(&rank, print)?;
        Some(Next::Archive(member.path.clone(), self.path(after)?))
    }

    fn path(&self, rank: &Rank) -> Option<PathBuf> {
        self.members.get(&rank.2).map(|member| member.path.clone())
    }

    /// The next file of an open group that can be released, if all that can be are archived.
    pub(super) fn next_release(&self, directory: &Path) -> Option<PathBuf> {
        let group = self.groups.get(directory).filter(|group| group.is_open() && group.ready.archives.is_empty())?;
        self.path(group.ready.releases.first()?)
    }

    /// The group of an entry.
    pub(super) fn group(&self, entry: &Entry) -> Option<&Arc<Path>> {
        self.members.get(&entry.sequence)?.group.as_ref()
    }

    /// Whether nothing in the file's group keeps it from being archived and released.
    pub(super) fn is_open(&self, entry: &Entry) -> bool {
        self.members.get(&entry.sequence).is_none_or(|member| self.is_free(member))
    }

    fn is_free(&self, member: &Member) -> bool {
        member.group.as_ref().and_then(|directory| self.groups.get(directory)).is_none_or(Group::is_open)
    }

    /// Whether a newer sealed state of the lineage `id` exists with other bytes than `print` says.
    pub(super) fn has_newer(&self, id: u64, rank: &Rank, print: Print) -> bool {
        self.lineages.get(&id).is_some_and(|lineage| lineage.has_newer(rank, print))
    }

    /// Whether a newer sealed state of the lineage `id` exists with other bytes than `print` says, and one with higher steps.
    pub(super) fn is_history(&self, id: u64, rank: &Rank, print: Print) -> bool {
        self.lineages.get(&id).is_some_and(|lineage| lineage.is_history(rank, print))
    }

    /// Whether there are files of which it is not yet known what they are.
    pub(super) fn has_unsealed(&self) -> bool {
        self.unsealed > 0
    }

    /// Whether a closed file can be looked at now.
    pub(super) fn can_seal(&self) -> bool {
        !self.closed.is_empty()
    }

    /// Lineages with sealed or archived files.
    pub(super) fn lineages(&self) -> impl Iterator<Item = u64> {
        self.lineages.keys().copied()
    }

    /// Whether there is something to do for the entry of this sequence, now or after a failure has passed.
    pub(super) fn is_queued(&self, sequence: u64) -> bool {
        self.members.get(&sequence).is_some_and(|member| match member.queued() {
            Some(Work::Seal) => true,
            Some(_) => self.is_free(member),
            None => false,
        })
    }

    /// The lowest number that an entry was opened with for which there is something to do, now or after a failure has passed. Costs a
    /// look at each of those.
    pub(super) fn oldest(&self) -> Option<u64> {
        let closed = self.closed.iter().map(|rank| rank.2);
        let groups = self.groups.values().filter(|group| group.is_open());
        let ready = self.single.sequences().chain(groups.flat_map(|group| group.ready.sequences()));
        let waiting = self.waiting.iter().map(|(_, sequence)| *sequence).filter(|sequence| self.is_queued(*sequence));
        let opened = |sequence: u64| self.members.get(&sequence).map(|member| member.opened);
        closed.chain(ready).chain(waiting).filter_map(opened).min()
    }

    /// Number of things to do, and of those that wait for their group.
    pub(super) fn queued(&self) -> (usize, usize) {
        (self.unsealed + self.single.queued + self.open, self.settling)
    }
}

fn put<T: Ord>(set: &mut BTreeSet<T>, value: T, enter: bool) {
    let changed = if enter { set.insert(value) } else { set.remove(&value) };
    debug_assert!(changed, "the index and the catalog differ");
}
