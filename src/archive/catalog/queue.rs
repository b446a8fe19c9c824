//! The files that are not durable or examined yet.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crate::archive::decide::{File, Work, work};

/// The files that are not durable or examined yet, in the order in which they were closed. Those that failed or that a
/// thread works on are here, too.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Closed files that can be sealed at once.
    closed: BTreeMap<u64, Arc<File>>,
    /// Files that wait for each other, until then.
    together: BTreeMap<(Instant, u64), Arc<File>>,
    /// Durable files that may be copies.
    copies: BTreeMap<u64, Arc<File>>,
    /// How many of them have failed.
    failed: usize,
}

impl Queue {
    pub(super) fn enter(&mut self, file: &Arc<File>) {
        let (sequence, own) = (file.entry.sequence, Arc::clone(file));
        let work = work(&file.entry);
        self.failed += usize::from(work.is_some() && file.entry.failed.is_some());
        match work {
            Some(Work::Seal) => drop(self.closed.insert(sequence, own)),
            Some(Work::Compare) => drop(self.copies.insert(sequence, own)),
            Some(Work::Together) => {
                let turn = file.entry.waits_until();
                turn.into_iter().for_each(|at| drop(self.together.insert((at, sequence), Arc::clone(file))));
            }
            Some(Work::Archive(_) | Work::Release) | None => {}
        }
    }

    pub(super) fn leave(&mut self, file: &File) {
        let sequence = file.entry.sequence;
        let work = work(&file.entry);
        self.failed -= usize::from(work.is_some() && file.entry.failed.is_some());
        match work {
            Some(Work::Seal) => drop(self.closed.remove(&sequence)),
            Some(Work::Compare) => drop(self.copies.remove(&sequence)),
            Some(Work::Together) => {
                file.entry.waits_until().into_iter().for_each(|at| drop(self.together.remove(&(at, sequence))));
            }
            Some(Work::Archive(_) | Work::Release) | None => {}
        }
    }

    /// Closed files that can be sealed at once.
    pub(super) fn closed(&self) -> impl Iterator<Item = &Arc<File>> {
        self.closed.values()
    }

    /// Durable files that may be copies.
    pub(super) fn copies(&self) -> impl Iterator<Item = &Arc<File>> {
        self.copies.values()
    }

    /// Files that wait for each other, the one first whose turn comes first.
    pub(super) fn together(&self) -> impl Iterator<Item = &Arc<File>> {
        self.together.values()
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<File>> {
        self.closed().chain(self.copies()).chain(self.together())
    }

    pub(super) fn len(&self) -> usize {
        self.closed.len() + self.copies.len() + self.together.len()
    }

    /// Whether some files were not examined yet. Files that wait for each other are no checkpoints.
    pub(super) fn has_unsealed(&self) -> bool {
        !self.closed.is_empty() || !self.copies.is_empty()
    }

    /// The lowest number that a file was opened with.
    pub(super) fn opened(&self) -> Option<u64> {
        self.all().map(|file| file.entry.opened).min()
    }

    /// When the next failed attempt may be repeated.
    pub(super) fn retry(&self, now: Instant) -> Option<Instant> {
        let all = self.all().take(if self.failed > 0 { usize::MAX } else { 0 });
        all.filter_map(|file| file.entry.failed.as_ref()?.retry).filter(|at| *at > now).min()
    }
}
