//! Parents and children: finds garbage, and finds states to merge over ancestors that no file names.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Weak;

use super::{Inside, Known, MAX_CHAIN, Objects};
use crate::store::object::{Header, Id};

/// Candidates examined for another parent: a run may have thousands of states.
const SIBLINGS_LOOKED_AT: usize = 64;

/// A connected group of objects that no file names but that others are differences to, and the objects that need them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merge {
    /// The parent of the topmost one; `None` if the chain begins there.
    pub above: Option<Id>,
    /// The objects that can be removed.
    pub dying: Vec<Id>,
    /// Objects outside the group that are differences to one inside it, by modification time.
    pub heirs: Vec<Id>,
    /// True if each object of the group has only one child: a merge then always saves space.
    pub is_line: bool,
}

impl Objects {
    /// The next merge, and the number of heirs in all waiting merges.
    pub fn next_merge(&self, keep: &HashSet<Id>) -> (Option<Merge>, usize) {
        if self.frozen().is_some() {
            return (None, 0);
        }
        let inside = self.lock();
        let dies = |id: &Id| !keep.contains(id) && !inside.shared.contains(id);
        let dying: HashSet<Id> = inside.unnamed.iter().copied().filter(dies).collect();
        // Deferred objects join the merge of a neighbour that is not deferred.
        let mut rest: BTreeSet<Id> = dying.difference(&inside.deferred).copied().collect();
        let (mut next, mut pending) = (None, 0);
        while let Some(first) = rest.pop_first() {
            let merge = inside.merge_around(first, &dying);
            rest.retain(|id| !merge.dying.contains(id));
            // Without heirs the group is plain garbage, or a cycle.
            pending += merge.heirs.len();
            if next.is_none() && !merge.heirs.is_empty() {
                next = Some(merge);
            }
        }
        (next, pending)
    }

    /// Other possible parents of a state, with chains no longer than its present parent's and at most `deepest` objects
    /// below them. These are the nearest older states of its lineage, and of the same tensors. After a keyframe was
    /// removed, one of them has its K.
    pub fn siblings(&self, child: Id, deepest: u32, keep: &HashSet<Id>) -> Vec<Id> {
        let inside = self.lock();
        let Some(known) = inside.known.get(&child) else { return Vec::new() };
        let header = &known.header;
        let deepest = inside.deepest_parent(child).min(deepest);
        let stays = |id: &Id| inside.known[id].names > 0 || keep.contains(id) || inside.shared.contains(id);
        let fits = |id: &Id| stays(id) && inside.depth(*id) <= deepest && !inside.is_below(*id, child);
        let nearest = |of: Option<&BTreeSet<(i64, Id)>>| -> Option<Id> {
            let older = of?.range(..(header.modified_ns, child)).rev();
            older.map(|(_, id)| *id).take(SIBLINGS_LOOKED_AT).find(fits)
        };
        let own = nearest(inside.lineages.get(&header.lineage));
        let same = nearest(inside.signatures.get(&header.signature)).filter(|same| own != Some(*same));
        own.into_iter().chain(same).collect()
    }

    /// True if an object may become a difference to another heir of the same merge. Both must exist, the heir must not
    /// need the object, and the object's chain must not become longer. An heir that is not merged yet will have the
    /// chain of the merge's `above`.
    pub fn can_follow(&self, child: Id, heir: Id, merge: &Merge) -> bool {
        let inside = self.lock();
        let Some(known) = inside.known.get(&heir).filter(|_| inside.known.contains_key(&child)) else { return false };
        let depth = match known.header.parent {
            Some(parent) if merge.dying.contains(&parent) => merge.above.map_or(0, |above| inside.depth(above) + 1),
            _ => inside.depth(heir),
        };
        depth <= inside.deepest_parent(child) && !inside.is_below(heir, child)
    }

    /// Maximum number of objects below the first heir such that all other heirs can follow it.
    pub fn roof(&self, merge: &Merge) -> u32 {
        let inside = self.lock();
        merge.heirs.iter().map(|heir| inside.deepest_parent(*heir)).min().unwrap_or(0)
    }

    /// The first of identical states that many ranks saved; the others become differences to it. Otherwise a chain of
    /// twins would be as long as the number of ranks. Bounded: a damaged store may have a cycle.
    pub fn first_of_twins(&self, state: Header) -> Header {
        let inside = self.lock();
        let position = state.position;
        let parent =
            |state: &Header| state.parent.and_then(|parent| inside.known.get(&parent)).map(|k| k.header.clone());
        let twins = std::iter::successors(Some(state.clone()), parent).take(MAX_CHAIN as usize);
        twins.take_while(|twin| twin.position == position).last().unwrap_or(state)
    }

    /// Number of objects that are differences to this one.
    pub fn children(&self, id: Id) -> usize {
        self.lock().known.get(&id).map_or(0, |known| known.children.len())
    }

    /// Postpones the merge of these objects until others beside them lose their names too.
    pub fn defer(&self, ids: &[Id]) {
        self.lock().deferred.extend(ids);
    }

    /// Keeps these objects although no file names them: a merge would take more space.
    pub fn share(&self, ids: &[Id]) {
        self.lock().shared.extend(ids);
    }
}

impl Inside {
    pub(super) fn insert(&mut self, header: Header, stored: u64) {
        let (id, order) = (header.id, (header.modified_ns, header.id));
        self.lineages.entry(header.lineage).or_default().insert(order);
        self.signatures.entry(header.signature).or_default().insert(order);
        self.unnamed.insert(id);
        self.known.insert(id, Known { header, stored, names: 0, children: Vec::new(), open: Weak::new() });
    }

    /// Enters the children of all objects, once all are known.
    pub(super) fn connect(&mut self) {
        let edges: Vec<(Option<Id>, Id)> = self.known.values().map(|k| (k.header.parent, k.header.id)).collect();
        edges.into_iter().for_each(|(parent, child)| self.adopt(parent, child));
    }

    pub(super) fn adopt(&mut self, parent: Option<Id>, child: Id) {
        let Some(parent) = parent else { return };
        // Earlier decisions about the parent assumed other children.
        self.shared.remove(&parent);
        self.deferred.remove(&parent);
        match self.known.get_mut(&parent) {
            // A repeated attempt adds the child only once.
            Some(known) if known.children.contains(&child) => {}
            Some(known) => known.children.push(child),
            None => {
                self.orphans.insert(child);
            }
        }
    }

    pub(super) fn disown(&mut self, parent: Option<Id>, child: Id) {
        self.orphans.remove(&child);
        let Some(parent) = parent else { return };
        self.shared.remove(&parent);
        self.deferred.remove(&parent);
        if let Some(known) = self.known.get_mut(&parent) {
            known.children.retain(|other| *other != child);
        }
    }

    pub(super) fn headers(&self, of: Option<&BTreeSet<(i64, Id)>>) -> Vec<Header> {
        of.into_iter().flatten().filter_map(|(_, id)| self.known.get(id)).map(|known| known.header.clone()).collect()
    }

    /// Number of objects below this one. Bounded: a damaged store may have a cycle.
    pub(super) fn depth(&self, id: Id) -> u32 {
        let parent = |id: &Id| self.known.get(id).and_then(|known| known.header.parent);
        std::iter::successors(Some(id), parent).skip(1).take(MAX_CHAIN as usize).count() as u32
    }

    /// Number of objects below this one's parent. Another parent must not have more, or chains would grow.
    fn deepest_parent(&self, id: Id) -> u32 {
        self.known.get(&id).and_then(|known| known.header.parent).map_or(0, |parent| self.depth(parent))
    }

    /// True if `id` is `ancestor` or one of its descendants.
    fn is_below(&self, id: Id, ancestor: Id) -> bool {
        let parent = |id: &Id| self.known.get(id).and_then(|known| known.header.parent);
        std::iter::successors(Some(id), parent).take(MAX_CHAIN as usize + 1).any(|id| id == ancestor)
    }

    /// True if a file needs this object.
    pub(super) fn is_live(&self, id: Id) -> bool {
        let (mut rest, mut seen) = (vec![id], HashSet::new());
        while let Some(id) = rest.pop() {
            let Some(known) = self.known.get(&id).filter(|_| seen.insert(id)) else { continue };
            if known.names > 0 {
                return true;
            }
            rest.extend(&known.children);
        }
        false
    }

    /// Takes at most `most` objects out that no file names and no object needs.
    pub(super) fn take_garbage(&mut self, keep: &HashSet<Id>, most: usize) -> Vec<Id> {
        let is_garbage = |inside: &Inside, id: &Id| {
            !keep.contains(id) && inside.known.get(id).is_some_and(|k| k.names == 0 && k.children.is_empty())
        };
        let mut rest: Vec<Id> = self.unnamed.iter().copied().filter(|id| is_garbage(self, id)).take(most).collect();
        let mut taken = Vec::new();
        while let Some(id) = rest.pop() {
            if taken.len() == most {
                break;
            }
            let Some(known) = self.known.remove(&id) else { continue };
            self.unnamed.remove(&id);
            self.shared.remove(&id);
            self.deferred.remove(&id);
            self.going.insert(id);
            for parent in self.tried.remove(&id).into_iter().flatten() {
                self.disown(Some(parent), id);
            }
            let order = (known.header.modified_ns, id);
            remove(&mut self.lineages, known.header.lineage, order);
            remove(&mut self.signatures, known.header.signature, order);
            self.disown(known.header.parent, id);
            taken.push(id);
            rest.extend(known.header.parent.filter(|parent| is_garbage(self, parent)));
        }
        taken
    }

    /// The group of dying objects that are connected with `id`, and its heirs.
    fn merge_around(&self, id: Id, dying: &HashSet<Id>) -> Merge {
        let parent = |id: Id| self.known.get(&id).and_then(|known| known.header.parent);
        let (mut top, mut seen) = (id, HashSet::from([id]));
        while let Some(above) = parent(top).filter(|above| dying.contains(above) && seen.insert(*above)) {
            top = above;
        }
        let (mut rest, mut going, mut heirs, mut is_line) = (vec![top], Vec::new(), Vec::new(), true);
        let mut seen = HashSet::new();
        while let Some(id) = rest.pop().filter(|id| seen.insert(*id)) {
            let children = &self.known[&id].children;
            is_line &= children.len() <= 1;
            for child in children {
                if dying.contains(child) { &mut rest } else { &mut heirs }.push(*child);
            }
            going.push(id);
        }
        heirs.sort_by_key(|id| (self.known[id].header.modified_ns, *id));
        Merge { above: parent(top), dying: going, heirs, is_line }
    }
}

fn remove(index: &mut HashMap<u64, BTreeSet<(i64, Id)>>, key: u64, order: (i64, Id)) {
    if let Some(states) = index.get_mut(&key) {
        states.remove(&order);
        if states.is_empty() {
            index.remove(&key);
        }
    }
}
