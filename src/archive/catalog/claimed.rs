//! Files that threads take steps of: nobody else takes a step of one of them.

use super::index::Index;
use super::member::{Claim, Work};

impl Index {
    /// Whether a closed file can be sealed: now, or once a thread has finished with its previous content.
    pub(super) fn is_any_closed(&self) -> bool {
        let is_another = |(sequence, claim): (&u64, &Claim)| {
            let member = self.members.get(sequence).filter(|member| member.version != claim.version);
            member.is_some_and(|member| member.work == Some(Work::Seal) && member.waits.is_none())
        };
        !self.closed.is_empty() || self.claims.iter().any(is_another)
    }

    /// Whether a thread does such work.
    pub(super) fn is_any(&self, work: Work) -> bool {
        self.claims.values().any(|claim| claim.work == Some(work))
    }

    /// Whether no file is being archived that this one has to wait for.
    pub(super) fn may_begin(&self, sequence: u64) -> bool {
        let Some(member) = self.members.get(&sequence) else { return false };
        let waits_for = |claim: &Claim| {
            claim.lineage.zip(member.lineage).is_some_and(|((other, its), (own, print))| {
                other == own || its == print || claim.kin.may_be_the_same(member.kin)
            })
        };
        !self.claims.values().any(waits_for)
    }

    /// A thread takes a step of this file: nobody else does before [`Index::done`].
    pub(super) fn claim(&mut self, sequence: u64) {
        self.offer(sequence, false);
        if let Some(member) = self.members.get(&sequence) {
            let lineage = member.lineage.filter(|_| member.work == Some(Work::Archive));
            let (work, may_speak) = (member.work, member.work == Some(Work::Seal));
            let (opened, version, kin) = (member.opened, member.version, member.kin);
            self.claims.insert(sequence, Claim { opened, version, lineage, kin, work, may_speak });
        }
        self.offer_again(sequence);
    }

    /// The step is done.
    pub(super) fn done(&mut self, sequence: u64) {
        self.offer(sequence, false);
        self.claims.remove(&sequence);
        self.offer_again(sequence);
    }

    fn offer_again(&mut self, sequence: u64) {
        self.offer(sequence, true);
        let group = self.members.get(&sequence).and_then(|member| member.group.clone());
        group.iter().for_each(|group| self.refresh(group));
    }

    /// It is known what a file that is being sealed names as the best of a run.
    pub(super) fn has_spoken(&mut self, sequence: u64) {
        if let Some(claim) = self.claims.get_mut(&sequence) {
            claim.may_speak = false;
        }
    }

    /// Whether steps are being taken.
    pub(super) fn is_busy(&self) -> bool {
        !self.claims.is_empty()
    }

    /// Whether some closed file has not been read yet for what it names as the best of its run.
    pub(super) fn may_learn(&self) -> bool {
        self.is_any_closed() || self.claims.values().any(|claim| claim.may_speak)
    }

    /// The numbers that the files were opened with which threads work on.
    #[cfg(test)]
    pub(super) fn claimed_opened(&self) -> impl Iterator<Item = u64> {
        self.claims.values().map(|claim| claim.opened)
    }

    /// Whether a file was claimed that waited for others.
    #[cfg(test)]
    pub(super) fn is_claimed_together(&self, sequence: u64) -> bool {
        self.claims.get(&sequence).is_some_and(|claim| claim.work == Some(Work::Together))
    }
}
