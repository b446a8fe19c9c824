//! The graph of a store's objects: which are differences to which, which files name, and which nothing needs.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Weak};

use super::MAX_CHAIN;
use crate::store::Damage;
use crate::store::object::{Header, Id, Object};

/// Candidates examined for another parent: a run may have thousands of states.
const SIBLINGS_LOOKED_AT: usize = 64;
/// The bounds of all ids, to look at those of one key in a set that is ordered by key and id.
const FIRST: Id = Id([0; 16]);
const LAST: Id = Id([0xff; 16]);

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
    /// Maximum number of objects below the first heir such that all other heirs can follow it.
    pub roof: u32,
}

#[derive(Debug)]
struct Known {
    header: Header,
    stored: u64,
    /// Number of files that name it.
    names: u32,
    /// Objects that are differences to it.
    children: Vec<Id>,
    /// The object, if it is open.
    open: Weak<Object>,
}

/// All known objects.
#[derive(Debug, Default)]
pub(super) struct Graph {
    known: HashMap<Id, Known>,
    /// Objects that no file names.
    unnamed: BTreeSet<Id>,
    /// The states of each lineage, by modification time.
    lineages: HashMap<u64, BTreeSet<(i64, Id)>>,
    /// The lineages of files with the same tensors.
    signatures: HashMap<u64, BTreeSet<u64>>,
    /// By the samples of the bytes that objects were made from, and of those that they decode to.
    samples: BTreeSet<(u64, Id)>,
    /// Missing or unreadable objects, with the number of files that name each.
    lost: HashMap<Id, u32>,
    /// Objects whose parent is missing or unreadable.
    orphans: HashSet<Id>,
    /// Objects that no file names, but whose removal would make the objects that depend on them larger in total.
    shared: HashSet<Id>,
    /// Objects that no file names, where a merge would free too little for the bytes it writes: more must go first.
    deferred: HashSet<Id>,
    /// Parents from replacements that failed: the file on the device may already name one of them.
    tried: HashMap<Id, Vec<Id>>,
    /// Objects that were taken out, and that [`super::Objects::remove`] has not removed yet.
    going: HashSet<Id>,
}

impl Graph {
    /// Whether the object is known.
    pub(super) fn has(&self, id: Id) -> bool {
        self.known.contains_key(&id)
    }

    pub(super) fn get(&self, id: Id) -> Option<(Header, u64)> {
        self.known.get(&id).map(|known| (known.header.clone(), known.stored))
    }

    pub(super) fn all(&self) -> Vec<Header> {
        self.known.values().map(|known| known.header.clone()).collect()
    }

    pub(super) fn of_sample(&self, sample: u64) -> Vec<Header> {
        self.headers(self.samples.range((sample, FIRST)..=(sample, LAST)).map(|(_, id)| id))
    }

    pub(super) fn headers<'a>(&self, of: impl Iterator<Item = &'a Id>) -> Vec<Header> {
        of.filter_map(|id| self.known.get(id)).map(|known| known.header.clone()).collect()
    }

    /// See [`super::Objects::nearest`].
    pub(super) fn nearest(&self, lineage: u64, modified_ns: i64) -> Option<&Header> {
        let states = self.lineages.get(&lineage)?;
        let before = states.range(..=(modified_ns, LAST)).next_back();
        let (_, id) = before.map_or_else(|| states.first(), |(at, _)| states.range((*at, FIRST)..).next())?;
        self.known.get(id).map(|known| &known.header)
    }

    /// See [`super::Objects::nearest_other`].
    pub(super) fn nearest_other(&self, signature: u64, lineage: u64, modified_ns: i64) -> Option<&Header> {
        let others = others(&self.signatures, signature, lineage);
        let others = others.filter_map(|other| self.nearest(other, modified_ns));
        others.min_by_key(|header| {
            (header.modified_ns > modified_ns, header.modified_ns.abs_diff(modified_ns), header.id)
        })
    }

    pub(super) fn newest(&self, lineage: u64) -> Option<Id> {
        self.lineages.get(&lineage)?.last().map(|(_, id)| *id)
    }

    pub(super) fn stored(&self) -> u64 {
        self.known.values().map(|known| known.stored).sum()
    }

    pub(super) fn stored_unnamed(&self) -> u64 {
        self.unnamed.iter().filter_map(|id| self.known.get(id)).map(|known| known.stored).sum()
    }

    /// The object, if it is open.
    pub(super) fn open(&self, id: Id) -> Option<Arc<Object>> {
        self.known.get(&id).and_then(|known| known.open.upgrade())
    }

    /// Shares an object that was opened. Not one that was re-parented since: its parent may be removed at any moment.
    pub(super) fn opened(&mut self, object: &Arc<Object>) {
        let known = self.known.get_mut(&object.header().id);
        if let Some(known) = known.filter(|known| known.header == *object.header()) {
            known.open = Arc::downgrade(object);
        }
    }

    /// Counts a file that names the object; false if the object is missing.
    pub(super) fn name(&mut self, id: Id) -> bool {
        let Some(known) = self.known.get_mut(&id) else { return false };
        known.names += 1;
        self.unnamed.remove(&id);
        self.shared.remove(&id);
        self.deferred.remove(&id);
        true
    }

    /// Counts a file that names an object, also a missing one.
    pub(super) fn name_or_lose(&mut self, id: Id) {
        if !self.name(id) {
            *self.lost.entry(id).or_default() += 1;
        }
    }

    /// Counts a file that no longer names the object; true if none does any more.
    pub(super) fn unname(&mut self, id: Id) -> bool {
        match self.known.get_mut(&id) {
            Some(known) => {
                known.names = known.names.saturating_sub(1);
                if known.names > 0 {
                    return false;
                }
                self.unnamed.insert(id);
            }
            None => {
                if let Some(names) = self.lost.get_mut(&id) {
                    *names = names.saturating_sub(1);
                }
            }
        }
        true
    }

    /// True if an object remains after all garbage is removed.
    pub(super) fn stays(&self, id: Id, keep: &HashSet<Id>) -> bool {
        let named = self.known.get(&id).map(|known| known.names > 0);
        named.is_some_and(|named| named || keep.contains(&id) || self.shared.contains(&id))
    }

    pub(super) fn insert(&mut self, header: Header, stored: u64) {
        let (id, order) = (header.id, (header.modified_ns, header.id));
        self.lineages.entry(header.lineage).or_default().insert(order);
        self.signatures.entry(header.signature).or_default().insert(header.lineage);
        self.samples.extend(samples(&header));
        self.unnamed.insert(id);
        self.known.insert(id, Known { header, stored, names: 0, children: Vec::new(), open: Weak::new() });
    }

    /// Enters the children of all objects, once all are known.
    pub(super) fn connect(&mut self) {
        let edges: Vec<(Option<Id>, Id)> = self.known.values().map(|k| (k.header.parent, k.header.id)).collect();
        edges.into_iter().for_each(|(parent, child)| self.adopt(parent, child));
    }

    /// Adds an object that a file names.
    pub(super) fn add(&mut self, header: Header, stored: u64) {
        let id = header.id;
        self.adopt(header.parent, id);
        self.insert(header, stored);
        self.name(id);
    }

    /// Adds an object that came from a mirror. The names that waited for it are its own now, and one of the caller.
    ///
    /// # Errors
    /// Its parent is unknown.
    pub(super) fn receive(&mut self, header: Header, stored: u64) -> Result<(), Damage> {
        let id = header.id;
        if header.parent.is_some_and(|parent| !self.has(parent)) {
            return Err(Damage("its parent was not brought before it"));
        }
        if !self.has(id) {
            self.adopt(header.parent, id);
            self.insert(header, stored);
        }
        let names = self.lost.remove(&id).unwrap_or_default() + 1;
        (0..names).for_each(|_| {
            self.name(id);
        });
        Ok(())
    }

    /// Another encoding of an object is about to take its name. If the rename succeeds and a later step fails, the new
    /// parent is needed, and perhaps the old one too.
    pub(super) fn try_parent(&mut self, header: &Header) {
        self.adopt(header.parent, header.id);
        self.tried.entry(header.id).or_default().extend(header.parent);
    }

    /// Another encoding has taken an object's name.
    pub(super) fn replace(&mut self, header: Header, stored: u64) {
        let (id, parent) = (header.id, header.parent);
        let tried = self.tried.remove(&id).unwrap_or_default();
        let Some(known) = self.known.get_mut(&id) else { return };
        known.open = Weak::new();
        known.stored = stored;
        let former = std::mem::replace(&mut known.header, header).parent;
        let others = tried.into_iter().map(Some).chain([former]).filter(|other| *other != parent);
        others.for_each(|other| self.disown(other, id));
    }

    fn adopt(&mut self, parent: Option<Id>, child: Id) {
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

    fn disown(&mut self, parent: Option<Id>, child: Id) {
        self.orphans.remove(&child);
        let Some(parent) = parent else { return };
        self.shared.remove(&parent);
        self.deferred.remove(&parent);
        if let Some(known) = self.known.get_mut(&parent) {
            known.children.retain(|other| *other != child);
        }
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

    /// True if a file needs an object that is missing.
    pub(super) fn is_missing_some(&self) -> bool {
        self.lost.values().any(|names| *names > 0) || self.orphans.iter().any(|id| self.is_live(*id))
    }

    /// True if a file needs this object.
    fn is_live(&self, id: Id) -> bool {
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
    pub(super) fn take_garbage(&mut self, keep: &HashSet<Id>, may: &dyn Fn(Id) -> bool, most: usize) -> Vec<Id> {
        let is_garbage = |graph: &Graph, id: &Id| {
            !keep.contains(id) && may(*id) && graph.known.get(id).is_some_and(|k| k.names == 0 && k.children.is_empty())
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
            let Header { signature, lineage, modified_ns, .. } = known.header;
            remove(&mut self.lineages, lineage, &(modified_ns, id));
            if !self.lineages.contains_key(&lineage) {
                remove(&mut self.signatures, signature, &lineage);
            }
            for sample in samples(&known.header) {
                self.samples.remove(&sample);
            }
            self.disown(known.header.parent, id);
            taken.push(id);
            rest.extend(known.header.parent.filter(|parent| is_garbage(self, parent)));
        }
        taken
    }

    /// See [`super::Objects::unneeded`].
    pub(super) fn unneeded(&self, keep: &HashSet<Id>) -> HashSet<Id> {
        let mut needed = HashSet::new();
        let roots = self.known.iter().filter(|(id, known)| known.names > 0 || keep.contains(id));
        let mut rest: Vec<Id> = roots.map(|(id, _)| *id).collect();
        while let Some(id) = rest.pop() {
            needed.insert(id);
            let parent = self.known.get(&id).and_then(|known| known.header.parent);
            rest.extend(parent.filter(|parent| !needed.contains(parent)));
        }
        self.known.keys().filter(|id| !needed.contains(id)).copied().collect()
    }

    /// Whether an object was taken out, and is not removed yet.
    pub(super) fn is_going(&self, id: Id) -> bool {
        self.going.contains(&id)
    }

    /// Objects that were taken out are off the device.
    pub(super) fn gone(&mut self, ids: impl IntoIterator<Item = Id>) {
        ids.into_iter().for_each(|id| {
            self.going.remove(&id);
        });
    }

    /// The next merge, and the number of heirs in all waiting merges.
    pub(super) fn next_merge(&self, keep: &HashSet<Id>) -> (Option<Merge>, usize) {
        let dies = |id: &Id| !keep.contains(id) && !self.shared.contains(id);
        let dying: HashSet<Id> = self.unnamed.iter().copied().filter(dies).collect();
        // Deferred objects join the merge of a neighbour that is not deferred.
        let mut rest: BTreeSet<Id> = dying.difference(&self.deferred).copied().collect();
        let (mut next, mut pending) = (None, 0);
        while let Some(first) = rest.pop_first() {
            let merge = self.merge_around(first, &dying);
            rest.retain(|id| !merge.dying.contains(id));
            // Without heirs the group is plain garbage, or a cycle.
            pending += merge.heirs.len();
            if next.is_none() && !merge.heirs.is_empty() {
                next = Some(merge);
            }
        }
        (next, pending)
    }

    /// See [`super::Objects::siblings`].
    pub(super) fn siblings(&self, child: Id, deepest: u32, keep: &HashSet<Id>) -> Vec<Id> {
        let Some(known) = self.known.get(&child) else { return Vec::new() };
        let header = &known.header;
        let deepest = self.deepest_parent(child).min(deepest);
        let fits = |id: &Id| self.stays(*id, keep) && self.depth(*id) <= deepest && !self.is_below(*id, child);
        let older = |lineage: u64| {
            let states = self.lineages.get(&lineage).into_iter();
            states.flat_map(|states| states.range(..(header.modified_ns, child)).rev()).take(SIBLINGS_LOOKED_AT)
        };
        let own = older(header.lineage).find(|(_, id)| fits(id));
        let others = others(&self.signatures, header.signature, header.lineage);
        let mut others: Vec<_> = others.filter_map(|other| older(other).next()).collect();
        others.sort_unstable_by(|a, b| b.cmp(a));
        let nearer = others.into_iter().take_while(|other| own.is_none_or(|own| *other > own));
        let other = nearer.take(SIBLINGS_LOOKED_AT).find(|(_, id)| fits(id));
        own.into_iter().chain(other).map(|(_, id)| *id).collect()
    }

    /// See [`super::Objects::can_follow`].
    pub(super) fn can_follow(&self, child: Id, heir: Id, merge: &Merge) -> bool {
        let Some(known) = self.known.get(&heir).filter(|_| self.known.contains_key(&child)) else { return false };
        let depth = match known.header.parent {
            Some(parent) if merge.dying.contains(&parent) => merge.above.map_or(0, |above| self.depth(above) + 1),
            _ => self.depth(heir),
        };
        depth <= self.deepest_parent(child) && !self.is_below(heir, child)
    }

    /// Objects that no file names.
    #[cfg(test)]
    pub(super) fn unnamed(&self) -> impl Iterator<Item = Id> {
        self.unnamed.iter().copied()
    }

    /// The objects that are differences to this one.
    pub(super) fn children(&self, id: Id) -> &[Id] {
        self.known.get(&id).map_or(&[], |known| &known.children)
    }

    pub(super) fn defer(&mut self, ids: &[Id]) {
        self.deferred.extend(ids);
    }

    pub(super) fn share(&mut self, ids: &[Id]) {
        self.shared.extend(ids);
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
        let roof = heirs.iter().map(|heir| self.deepest_parent(*heir)).min().unwrap_or(0);
        Merge { above: parent(top), dying: going, heirs, is_line, roof }
    }
}

/// The other lineages of files with these tensors.
fn others(signatures: &HashMap<u64, BTreeSet<u64>>, signature: u64, lineage: u64) -> impl Iterator<Item = u64> {
    signatures.get(&signature).into_iter().flatten().copied().filter(move |other| *other != lineage)
}

fn samples(header: &Header) -> [(u64, Id); 2] {
    [header.source_sample, header.decoded_sample].map(|sample| (sample, header.id))
}

fn remove<T: Ord>(index: &mut HashMap<u64, BTreeSet<T>>, key: u64, value: &T) {
    if let Some(of) = index.get_mut(&key) {
        of.remove(value);
        if of.is_empty() {
            index.remove(&key);
        }
    }
}
