//! The union of all nodes' journals: which names exist, and which objects hold their bytes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::journal::{Content, Encoding, Kind, Place, Record, Segment, Shown};
use crate::store::{Id, MAX_CHAIN};

/// Orders all changes of one name: a Lamport time, then the node's name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    /// Lamport time.
    pub time: u64,
    /// The node.
    pub node: String,
}

/// The last change of a name by one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Lamport time.
    pub time: u64,
    /// What the name shows; `None` if it is gone.
    pub shown: Option<Shown>,
}

/// A segment that cannot be read.
#[derive(Clone, Debug)]
pub struct Damaged {
    /// Why.
    pub why: String,
    /// When to try again.
    pub again: Instant,
    /// The pause before that.
    pub pause: Duration,
}

/// A node's part.
#[derive(Debug, Default)]
pub struct Node {
    /// The store that wrote the node's first segment.
    pub store: Option<Id>,
    /// The first digits of that store's id, as the names of all segments say that are there.
    pub(super) owner: Option<u32>,
    /// Segments that were read: the last snapshot, and those after it.
    pub read: BTreeSet<Place>,
    /// Its objects.
    pub objects: HashMap<Id, Encoding>,
    /// Segments that cannot be read: why, and until when nobody tries again.
    pub damaged: HashMap<Place, Damaged>,
    /// Why part of it cannot be read.
    pub broken: Option<String>,
    /// A newer stepfs wrote part of it; says so.
    pub newer: Option<String>,
}

/// All nodes.
#[derive(Debug, Default)]
pub struct View {
    nodes: BTreeMap<String, Node>,
    names: BTreeMap<PathBuf, BTreeMap<String, Change>>,
    /// The nodes that have an object.
    owners: HashMap<Id, BTreeSet<String>>,
    /// The highest time of all.
    latest: u64,
    /// Grows with every segment.
    version: u64,
    /// All journals were read at least once.
    is_read: bool,
}

impl View {
    /// Adds a segment, unless it is there, or a snapshot has replaced it.
    pub fn apply(&mut self, segment: &Segment) {
        let place = segment.place();
        let node = self.nodes.entry(segment.node.clone()).or_default();
        node.store.get_or_insert(segment.store);
        let is_replaced = node.read.first().is_some_and(|first| first.snapshot && place < *first);
        if is_replaced || node.read.contains(&place) {
            return;
        }
        self.version += 1;
        // A node's first snapshot replaces nothing, and a look through all names takes its time.
        if segment.kind == Kind::Snapshot && !node.read.is_empty() {
            // It has everything that the node had before it.
            for (id, _) in node.objects.drain() {
                if let Some(owners) = self.owners.get_mut(&id) {
                    owners.remove(&segment.node);
                }
            }
            self.owners.retain(|_, owners| !owners.is_empty());
            node.read.clear();
            for changes in self.names.values_mut() {
                changes.remove(&segment.node);
            }
            self.names.retain(|_, changes| !changes.is_empty());
        }
        node.read.insert(place);
        for record in &segment.records {
            let (time, path, shown) = match record {
                Record::Object(encoding) => {
                    node.objects.insert(encoding.id, encoding.clone());
                    self.owners.entry(encoding.id).or_default().insert(segment.node.clone());
                    continue;
                }
                Record::Put { time, path, shown } => (*time, path, Some(shown.clone())),
                Record::Removed { time, path } => (*time, path, None),
            };
            self.latest = self.latest.max(time);
            let changes = self.names.entry(path.clone()).or_default();
            // Segments may arrive in any order.
            if changes.get(&segment.node).is_none_or(|known| known.time <= time) {
                changes.insert(segment.node.clone(), Change { time, shown });
            }
        }
    }

    /// True if a node's segments were read before later ones came: a snapshot among them would hide those.
    pub(super) fn is_overtaken(&self, node: &str, segments: &[Segment]) -> bool {
        let Some(node) = self.nodes.get(node) else { return false };
        let is_news = |segment: &Segment| segment.kind == Kind::Snapshot && !node.read.contains(&segment.place());
        segments.iter().any(is_news) && segments.last().map(Segment::place) < node.read.last().copied()
    }

    /// The next Lamport time: later than all that is known.
    pub fn next_time(&self) -> u64 {
        self.latest.saturating_add(1)
    }

    /// True once all journals were read: what the view has not, the remote had not.
    pub fn is_read(&self) -> bool {
        self.is_read
    }

    /// Notes that all journals were read.
    pub(super) fn set_read(&mut self) {
        self.is_read = true;
    }

    /// Grows whenever something changes.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The nodes.
    pub fn nodes(&self) -> &BTreeMap<String, Node> {
        &self.nodes
    }

    /// A node, which is added if it is new.
    pub(super) fn node_mut(&mut self, node: &str) -> &mut Node {
        self.nodes.entry(node.to_string()).or_default()
    }

    /// The change of a name that counts.
    pub fn winner(&self, path: &Path) -> Option<(Stamp, Option<&Shown>)> {
        self.names.get(path).and_then(won)
    }

    /// The last change of a name by one node.
    pub fn of_node(&self, path: &Path, node: &str) -> Option<&Change> {
        self.names.get(path)?.get(node)
    }

    /// All names with the change that counts, removed ones too.
    pub fn all(&self) -> impl Iterator<Item = (&PathBuf, Stamp, Option<&Shown>)> {
        self.names.iter().filter_map(|(path, changes)| won(changes).map(|(stamp, shown)| (path, stamp, shown)))
    }

    /// The names that exist.
    pub fn files(&self) -> impl Iterator<Item = (&PathBuf, Stamp, &Shown)> {
        self.all().filter_map(|(path, stamp, shown)| Some((path, stamp, shown?)))
    }

    /// An object with all its ancestors, the oldest first; `None` if one of them is unknown.
    pub fn chain(&self, owner: &str, id: Id) -> Option<Vec<&Encoding>> {
        let objects = &self.nodes.get(owner)?.objects;
        let mut chain = vec![objects.get(&id)?];
        while let Some(parent) = chain.last().and_then(|encoding| encoding.parent) {
            if chain.len() > MAX_CHAIN as usize {
                return None;
            }
            chain.push(objects.get(&parent)?);
        }
        chain.reverse();
        Some(chain)
    }

    /// A node that has an object with all its ancestors.
    pub fn owner_of(&self, id: Id) -> Option<&str> {
        let mut owners = self.owners.get(&id)?.iter().map(String::as_str);
        owners.find(|owner| self.chain(owner, id).is_some())
    }

    /// Objects of a node that some name needs, with their ancestors.
    pub fn needed(&self, owner: &str) -> BTreeSet<Id> {
        let mut needed = BTreeSet::new();
        for (_, _, shown) in self.files() {
            let Content::Object { owner: of, id } = &shown.content else { continue };
            if of == owner {
                needed.extend(self.chain(owner, *id).into_iter().flatten().map(|encoding| encoding.id));
            }
        }
        needed
    }

    /// A snapshot's records of a node: its objects in `keep`, its names that count, and its removals that hide another
    /// node's name.
    pub(super) fn snapshot(&self, node: &str, keep: &BTreeSet<Id>) -> Vec<Record> {
        let mut records = Vec::new();
        if let Some(of) = self.nodes.get(node) {
            let mut objects: Vec<&Encoding> = of.objects.values().filter(|object| keep.contains(&object.id)).collect();
            objects.sort_by_key(|object| object.id);
            records.extend(objects.into_iter().cloned().map(Record::Object));
        }
        for (path, changes) in &self.names {
            let Some(change) = changes.get(node) else { continue };
            let counts = won(changes).is_some_and(|(stamp, _)| stamp.node == *node);
            let (time, path) = (change.time, path.clone());
            match &change.shown {
                Some(shown) if counts => records.push(Record::Put { time, path, shown: shown.clone() }),
                None if changes.len() > 1 && counts => records.push(Record::Removed { time, path }),
                _ => {}
            }
        }
        records
    }
}

fn won(changes: &BTreeMap<String, Change>) -> Option<(Stamp, Option<&Shown>)> {
    let (node, change) = changes.iter().max_by_key(|(node, change)| (change.time, *node))?;
    Some((Stamp { time: change.time, node: node.clone() }, change.shown.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(id: u8, owner: &str) -> Shown {
        Shown {
            mode: 0o644,
            uid: 0,
            gid: 0,
            len: 100_000,
            modified_ns: 0,
            identity: 0,
            content: Content::Object { owner: owner.into(), id: Id([id; 16]) },
        }
    }

    fn put(time: u64, path: &str, id: u8, owner: &str) -> Record {
        Record::Put { time, path: path.into(), shown: shown(id, owner) }
    }

    fn removed(time: u64, path: &str) -> Record {
        Record::Removed { time, path: path.into() }
    }

    fn object(id: u8, parent: Option<u8>) -> Record {
        let parent = parent.map(|parent| Id([parent; 16]));
        Record::Object(Encoding { id: Id([id; 16]), parent, hash: u128::from(id), len: 10, lossy: false })
    }

    fn segment(node: &str, sequence: u64, kind: Kind, records: Vec<Record>) -> Segment {
        Segment { kind, store: Id([1; 16]), node: node.into(), epoch: 1, sequence, records }
    }

    fn wins(view: &View, path: &str) -> Option<(u64, String, bool)> {
        view.winner(Path::new(path)).map(|(stamp, shown)| (stamp.time, stamp.node, shown.is_some()))
    }

    #[test]
    fn the_order_of_segments_does_not_matter() {
        let segments = [
            segment("a", 1, Kind::Changes, vec![object(1, None), put(1, "x", 1, "a")]),
            segment("a", 2, Kind::Changes, vec![removed(4, "x"), put(5, "y", 1, "a")]),
            segment("b", 1, Kind::Changes, vec![put(4, "x", 9, "b"), object(9, None), put(5, "y", 9, "b")]),
        ];
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut view = View::default();
            order.iter().for_each(|at| view.apply(&segments[*at]));
            // Twice is as good as once.
            order.iter().for_each(|at| view.apply(&segments[*at]));
            assert_eq!(wins(&view, "x"), Some((4, "b".into(), true)));
            assert_eq!(wins(&view, "y"), Some((5, "b".into(), true)));
            assert_eq!(view.next_time(), 6);
        }
    }

    #[test]
    fn a_segment_that_comes_after_its_snapshot_changes_nothing() {
        let old = segment("a", 1, Kind::Changes, vec![object(1, None), put(1, "x", 1, "a")]);
        let snapshot = segment("a", 2, Kind::Snapshot, vec![object(2, None), put(2, "y", 2, "a")]);
        let last = segment("a", 3, Kind::Changes, vec![object(3, None), put(3, "z", 3, "a")]);
        let mut view = View::default();
        [&snapshot, &last, &old, &snapshot].into_iter().for_each(|segment| view.apply(segment));
        // The object of `x` was deleted when the snapshot was put.
        let names: Vec<_> = view.files().map(|(path, ..)| path.display().to_string()).collect();
        assert_eq!((names, view.owner_of(Id([1; 16]))), (vec!["y".to_string(), "z".to_string()], None));
        // Read by another thread before the last one was put.
        let mut view = View::default();
        [&old, &last].into_iter().for_each(|segment| view.apply(segment));
        assert!(view.is_overtaken("a", std::slice::from_ref(&snapshot)));
        assert!(!view.is_overtaken("a", &[snapshot, last]) && !view.is_overtaken("a", &[old]));
    }

    #[test]
    fn a_chain_is_whole_or_not_there() {
        let mut view = View::default();
        view.apply(&segment("a", 1, Kind::Changes, vec![object(2, Some(1)), object(4, Some(3)), object(1, None)]));
        let ids: Vec<u8> = view.chain("a", Id([2; 16])).unwrap().iter().map(|encoding| encoding.id.0[0]).collect();
        assert_eq!(ids, [1, 2]);
        assert!(view.chain("a", Id([4; 16])).is_none() && view.chain("b", Id([2; 16])).is_none());
        assert_eq!(view.owner_of(Id([2; 16])), Some("a"));
        view.apply(&segment("a", 2, Kind::Changes, vec![object(5, Some(6)), object(6, Some(5))]));
        assert!(view.chain("a", Id([5; 16])).is_none(), "a cycle");
    }

    #[test]
    fn a_snapshot_shows_the_same_names() {
        let mut view = View::default();
        view.apply(&segment("b", 1, Kind::Changes, vec![put(1, "of-b", 9, "b"), put(2, "x", 9, "b"), object(9, None)]));
        view.apply(&segment(
            "a",
            1,
            Kind::Changes,
            vec![
                object(1, None),
                object(2, Some(1)),
                object(3, None),
                put(3, "x", 2, "a"),
                put(4, "mine", 3, "a"),
                removed(5, "of-b"),
                removed(6, "mine"),
            ],
        ));
        let needed = view.needed("a");
        assert_eq!(needed, BTreeSet::from([Id([1; 16]), Id([2; 16])]));
        let snapshot = segment("a", 2, Kind::Snapshot, view.snapshot("a", &needed));
        // The removal of its own name hides nothing of others.
        assert_eq!(snapshot.records.len(), 4);
        let before: Vec<_> = view.files().map(|(path, stamp, _)| (path.clone(), stamp)).collect();
        view.apply(&snapshot);
        let after: Vec<_> = view.files().map(|(path, stamp, _)| (path.clone(), stamp)).collect();
        assert_eq!(before, after);
        let mut fresh = View::default();
        fresh.apply(&snapshot);
        fresh.apply(&segment(
            "b",
            1,
            Kind::Changes,
            vec![put(1, "of-b", 9, "b"), put(2, "x", 9, "b"), object(9, None)],
        ));
        assert_eq!(after, fresh.files().map(|(path, stamp, _)| (path.clone(), stamp)).collect::<Vec<_>>());
        assert!(fresh.nodes()["a"].objects.len() == 2);
    }
}
