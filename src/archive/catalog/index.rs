//! Indexes of the catalog's entries: the next step, the newest file of each lineage, the complete checkpoints. Each
//! change of an entry updates them, so nothing searches all files. A change costs O(log n), or O(k) if k
//! byte-identical files are the newest of one lineage.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::store::step_pattern;

use super::fullest::Fullest;
use super::group::{Group, Ready};
use super::grouping::group_of;
use super::lineage::{Lineage, Rank};
use super::member::{Claim, Member, Work};
use super::{Entry, State};

/// The next step of a file, by paths.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Seal(PathBuf),
    /// Seal it, or sync it, together with others.
    Together(PathBuf),
    /// Find out whether it is a copy.
    Compare(PathBuf),
    /// With the path of the state after it.
    Archive(PathBuf, PathBuf),
    Release(PathBuf),
}

/// Files that [`Index::next_step`] looks at for one that can be archived beside those that are being archived.
const LOOK_AHEAD: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// How long a group waits for its files, in nanoseconds. 0: there are no groups.
    pub(super) settle_ns: i64,
    /// By the entry's sequence.
    pub(super) members: HashMap<u64, Member>,
    lineages: HashMap<u64, Lineage>,
    pub(super) groups: HashMap<Arc<step_pattern::Group>, Group>,
    pub(super) fullest: Fullest,
    /// Files that can be sealed at once.
    pub(super) closed: BTreeSet<Rank>,
    /// Files that wait for each other, and until when.
    together: BTreeSet<(Instant, u64)>,
    /// These, also those that wait for another attempt or are claimed.
    joining: usize,
    /// Durable files that may be copies.
    copies: BTreeSet<Rank>,
    /// Files of `closed` and `copies`, also those that wait for another attempt.
    unsealed: usize,
    /// Steps of files outside of groups.
    single: Ready,
    /// The first step of every open group: 1 a release, 2 an archiving.
    pub(super) heads: BTreeSet<(u8, Rank)>,
    /// When incomplete groups stop waiting.
    pub(super) timers: BTreeSet<(i64, Arc<step_pattern::Group>)>,
    /// Entries with a failure, and when each may be tried again.
    waiting: BTreeSet<(Instant, u64)>,
    /// Number of steps in open groups.
    pub(super) open: usize,
    /// Number of files in groups that still wait.
    pub(super) settling: usize,
    /// Files that a thread takes a step of, by sequence: nobody else takes one of them. As many as there are threads.
    pub(super) claims: BTreeMap<u64, Claim>,
    /// A lineage lost its last state.
    lineage_ended: bool,
}

impl Index {
    pub(super) fn new(settle_ns: i64) -> Index {
        Index { settle_ns, ..Index::default() }
    }

    /// Enters an entry.
    pub(super) fn add(&mut self, path: &Path, entry: &Entry) {
        // A copy of an archived file loses nothing, whatever happens to the rest.
        let waits_for_nobody = matches!(&entry.state, State::Archived(sealed, _) if sealed.copy);
        let mut member = Member::new(path, entry, self.settle_ns > 0);
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

    /// Takes out an entry.
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
                self.lineage_ended = true;
            }
        }
    }

    /// Judges anew whether a file is history. The caller has taken it out of the index.
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

    /// A sealed or archived state came or went: the lineage's last files may have become history, or the newest.
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
        let step = |count: &mut usize| if enter { *count += 1 } else { *count -= 1 };
        let ready = match &member.group {
            None => &mut self.single,
            Some(key) => {
                let group = group_of(&mut self.groups, key);
                step(&mut group.members);
                if member.counts {
                    if !member.history {
                        put(&mut group.pending, sequence, enter);
                    }
                    if !member.history && member.essential {
                        put(&mut group.essential, sequence, enter);
                    }
                    put(&mut group.touched, (member.touched.max(member.since), sequence), enter);
                }
                &mut group.ready
            }
        };
        match member.queued() {
            Some(Work::Seal | Work::Compare) => step(&mut self.unsealed),
            Some(Work::Together) => step(&mut self.joining),
            Some(Work::Archive | Work::Release) => step(&mut ready.queued),
            None => {}
        }
        self.offer(sequence, enter);
        let group = self.members.get(&sequence).and_then(|member| member.group.clone());
        group.iter().for_each(|group| self.refresh(group));
    }

    /// Enters a member where threads look for work, or takes it out; those that wait for a time, or that a thread works
    /// on, are not there.
    pub(super) fn offer(&mut self, sequence: u64, enter: bool) {
        let Some(member) = self.members.get(&sequence) else { return };
        let Some(work) = member.queued() else { return };
        let ready = match &member.group {
            None => &mut self.single,
            Some(key) => &mut group_of(&mut self.groups, key).ready,
        };
        if self.claims.contains_key(&sequence) {
            match (work, enter) {
                (Work::Archive, true) => ready.archiving += 1,
                (Work::Archive, false) => ready.archiving -= 1,
                _ => {}
            }
        } else if member.waits.is_none() {
            let set = match work {
                Work::Together => {
                    let turn = member.turn.map(|at| (at, sequence));
                    turn.into_iter().for_each(|turn| put(&mut self.together, turn, enter));
                    return;
                }
                Work::Seal => &mut self.closed,
                Work::Compare => &mut self.copies,
                Work::Archive => &mut ready.archives,
                Work::Release => &mut ready.releases,
            };
            put(set, member.rank.clone(), enter);
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

    /// The next file to seal.
    pub(super) fn next_seal(&self) -> Option<PathBuf> {
        self.path(self.closed.first()?)
    }

    /// Until when the first of the files waits that wait for each other.
    pub(super) fn next_turn(&self) -> Option<Instant> {
        self.together.first().map(|(at, _)| *at)
    }

    /// Files that wait for each other, at most so many.
    pub(super) fn waiting_together(&self, most: usize) -> Vec<PathBuf> {
        let members = self.together.iter().filter_map(|(_, sequence)| self.members.get(sequence));
        members.take(most).map(|member| member.path.clone()).collect()
    }

    /// Whether one of the files that wait for each other was closed before the change of this number.
    pub(super) fn is_joining_since(&self, number: u64) -> bool {
        let joins = |member: &Member| member.work == Some(Work::Together);
        let old = |sequence: &u64| *sequence < number && self.members.get(sequence).is_some_and(joins);
        let waiting = self.waiting.iter().map(|(_, sequence)| sequence);
        self.together.iter().map(|(_, sequence)| sequence).chain(self.claims.keys()).chain(waiting).any(old)
    }

    /// Whether a lineage lost its last state since this was asked last.
    pub(super) fn take_lineage_ended(&mut self) -> bool {
        std::mem::take(&mut self.lineage_ended)
    }

    /// The next file to release; if there is none, one that may be a copy; else, once all
    /// that was closed is sealed, the oldest one to archive. States of one lineage are archived one after the
    /// other, since each becomes a difference to the one before; so are files that may be the same state, saved twice.
    pub(super) fn next_step(&self) -> Option<Next> {
        let of_groups = |urgency: u8| self.heads.iter().filter(move |(u, _)| *u == urgency).map(|(_, rank)| rank);
        // One at a time: each release must find the directory's times as programs left them.
        if !self.is_any(Work::Release) {
            let release = self.single.releases.iter().take(1).chain(of_groups(1).take(1)).min();
            if let Some(rank) = release {
                return Some(Next::Release(self.path(rank)?));
            }
        }
        if let Some(rank) = self.copies.first() {
            return Some(Next::Compare(self.path(rank)?));
        }
        // A file that is being sealed may be an older state than those that could be archived.
        if self.is_any_closed() || self.is_any(Work::Seal) {
            return None;
        }
        let groups = of_groups(2).filter_map(|rank| self.members.get(&rank.2)?.group.as_ref());
        let in_groups = groups.filter_map(|group| self.groups.get(group)).flat_map(|group| &group.ready.archives);
        let single = self.single.archives.iter().take(LOOK_AHEAD);
        let rank = single.chain(in_groups.take(LOOK_AHEAD)).filter(|rank| self.may_begin(rank.2)).min()?;
        let member = self.members.get(&rank.2)?;
        let (id, print) = member.lineage?;
        let after = self.lineages.get(&id)?.after(rank, print)?;
        Some(Next::Archive(member.path.clone(), self.path(after)?))
    }

    pub(super) fn path(&self, rank: &Rank) -> Option<PathBuf> {
        self.members.get(&rank.2).map(|member| member.path.clone())
    }

    /// The sealed and the archived states of a lineage.
    pub(super) fn lineage(&self, id: u64) -> Option<&Lineage> {
        self.lineages.get(&id)
    }

    /// Whether some files were not examined yet. Files that wait for each other are no checkpoints.
    pub(super) fn has_unsealed(&self) -> bool {
        self.unsealed > 0
    }

    /// Lineages with sealed or archived files.
    pub(super) fn lineages(&self) -> impl Iterator<Item = u64> {
        self.lineages.keys().copied()
    }

    /// Whether the entry of this sequence has a step under way, or will have one: also if its group waits still.
    pub(super) fn has_work(&self, sequence: u64) -> bool {
        let has = |member: &Member| member.queued().is_some();
        self.claims.contains_key(&sequence) || self.members.get(&sequence).is_some_and(has)
    }

    /// Whether the entry of this sequence has a step to take, now or after a failure has passed.
    pub(super) fn is_queued(&self, sequence: u64) -> bool {
        self.members.get(&sequence).is_some_and(|member| match member.queued() {
            Some(Work::Seal | Work::Together | Work::Compare) => true,
            Some(_) => self.is_free(member),
            None => false,
        })
    }

    /// The lowest opening number among entries with a step under way, to take now, or to take after a failure has
    /// passed. Costs a look at each of those.
    pub(super) fn oldest(&self) -> Option<u64> {
        let closed = self.closed.iter().chain(&self.copies).map(|rank| rank.2);
        let closed = closed.chain(self.together.iter().map(|(_, sequence)| *sequence));
        let groups = self.groups.values().filter(|group| group.is_open());
        let ready = self.single.sequences().chain(groups.flat_map(|group| group.ready.sequences()));
        let waiting = self.waiting.iter().map(|(_, sequence)| *sequence).filter(|sequence| self.is_queued(*sequence));
        let opened = |sequence: u64| self.members.get(&sequence).map(|member| member.opened);
        let claimed = self.claims.values().map(|claim| claim.opened);
        closed.chain(ready).chain(waiting).filter_map(opened).chain(claimed).min()
    }

    /// Number of things to do, and of those that wait for their group.
    pub(super) fn queued(&self) -> (usize, usize) {
        (self.unsealed + self.joining + self.single.queued + self.open, self.settling)
    }
}

fn put<T: Ord>(set: &mut BTreeSet<T>, value: T, enter: bool) {
    let changed = if enter { set.insert(value) } else { set.remove(&value) };
    debug_assert!(changed, "the index and the catalog differ");
}
