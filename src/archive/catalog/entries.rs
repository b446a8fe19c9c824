//! The entries with their index: there is no way to change one without the other.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::index::Index;
use super::{Entry, State};
use crate::store::step_pattern;

#[derive(Debug)]
pub(super) struct Entries {
    map: BTreeMap<PathBuf, Entry>,
    index: Index,
    /// An entry went that kept objects from being removed without naming one.
    freed: bool,
    /// Grows with every change of an entry.
    changes: u64,
}

impl Entries {
    pub(super) fn new(settle_ns: i64) -> Entries {
        Entries { map: BTreeMap::new(), index: Index::new(settle_ns), freed: false, changes: 0 }
    }

    pub(super) fn get(&self, path: &Path) -> Option<&Entry> {
        self.map.get(path)
    }

    /// All, by path.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&PathBuf, &Entry)> {
        self.map.iter()
    }

    /// Those at and below a path.
    pub(super) fn below<'a>(&'a self, path: &'a Path) -> impl Iterator<Item = (&'a PathBuf, &'a Entry)> {
        let range = (Bound::Included(path), Bound::Unbounded);
        self.map.range::<Path, _>(range).take_while(move |(p, _)| p.starts_with(path))
    }

    /// Grows with every change of an entry.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    pub(super) fn index(&self) -> &Index {
        &self.index
    }

    /// Enters a file, and returns the entry that was there.
    pub(super) fn insert(&mut self, path: PathBuf, entry: Entry) -> Option<Entry> {
        let old = self.remove(&path);
        self.changes += 1;
        self.index.add(&path, &entry);
        if entry.state.counts_as_file() {
            self.index.count_file(&path, true);
        }
        self.map.insert(path, entry);
        old
    }

    pub(super) fn remove(&mut self, path: &Path) -> Option<Entry> {
        let old = self.map.remove(path)?;
        self.changes += 1;
        self.index.remove(old.sequence);
        if old.state.counts_as_file() {
            self.index.count_file(path, false);
        }
        self.freed |= matches!(old.state, State::Resident(ref why) if why.hides_an_object());
        Some(old)
    }

    /// Whether objects may have become garbage since this was asked last, though none lost a name.
    pub(super) fn take_freed(&mut self) -> bool {
        self.index.take_lineage_ended() | std::mem::take(&mut self.freed)
    }

    /// Takes out a path and everything below it.
    pub(super) fn take(&mut self, path: &Path) -> Vec<(PathBuf, Entry)> {
        let paths: Vec<PathBuf> = self.below(path).map(|(path, _)| path.clone()).collect();
        paths.into_iter().filter_map(|path| self.remove(&path).map(|entry| (path, entry))).collect()
    }

    /// Changes one, if it is there.
    pub(super) fn edit(&mut self, path: &Path, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.map.get_mut(path) {
            self.index.remove(entry.sequence);
            let did_count = entry.state.counts_as_file();
            change(entry);
            self.index.add(path, entry);
            if did_count != entry.state.counts_as_file() {
                self.index.count_file(path, !did_count);
            }
            self.changes += 1;
        }
    }

    /// Changes the entries at and below a path for which `holds` is true.
    pub(super) fn edit_below(
        &mut self,
        path: &Path,
        holds: impl Fn(&Path, &Entry) -> bool,
        mut change: impl FnMut(&mut Entry),
    ) {
        let held = self.below(path).filter(|(path, entry)| holds(path, entry));
        let held: Vec<PathBuf> = held.map(|(path, _)| path.clone()).collect();
        held.iter().for_each(|path| self.edit(path, &mut change));
    }

    /// See [`Index::claim`].
    pub(super) fn claim(&mut self, sequence: u64) {
        self.index.claim(sequence);
    }

    /// See [`Index::done`].
    pub(super) fn done(&mut self, sequence: u64) {
        self.index.done(sequence);
    }

    /// See [`Index::has_spoken`].
    pub(super) fn has_spoken(&mut self, sequence: u64) {
        self.index.has_spoken(sequence);
    }

    /// The groups of the files at and below a path are not waited for any longer.
    pub(super) fn hasten(&mut self, path: &Path) {
        let groups = self.below(path).filter_map(|(_, entry)| self.index.group(entry).cloned());
        let groups: BTreeSet<Arc<step_pattern::Group>> = groups.collect();
        groups.iter().for_each(|group| self.index.hasten(group));
    }

    /// Groups whose time has passed are not waited for any longer.
    pub(super) fn expire(&mut self, wall_ns: i64) {
        self.index.expire(wall_ns);
    }
}
