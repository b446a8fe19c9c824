//! Writes a node's part of a remote: objects first, then the segment that names them.
//!
//! Killed anywhere, it leaves objects that nothing names, and the next start finds them by listing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::ErrorKind;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::journal::{self, Encoding, Kind, Record, Segment};
use super::place::{Error, Listed, Pacer, Place, Result, put_bytes};
use super::reader::{Reader, heads, lock};
use super::view::View;
use crate::clock::{since_boot, wall_ns};
use crate::store::Id;
use crate::store::object::{Header, Object};
use codec::hash::Xxh3Of128;
use formats::ReadAt;

/// Segments after which a snapshot replaces them: a new reader then gets a node's names with one request.
const SNAPSHOT_AFTER: u64 = 64;
/// A snapshot that is too large to be read is not tried again for so long.
const TOO_LARGE_FOR: Duration = Duration::from_secs(3600);
/// A machine that slept between reading the journals and its snapshot reads them again: names may have come meanwhile. No
/// grace is useful that is not much longer.
const READ_FOR: Duration = Duration::from_secs(60);
/// Lamport times of a start begin at its epoch times this. So a remote that was emptied never sees a time again that a
/// store's files are marked with. A start makes fewer changes a second than this.
const TIMES_A_SECOND: u64 = 1 << 20;
/// Bytes read at once for a hash.
const PIECE: usize = 1 << 20;

/// The writer of one node.
pub struct Writer {
    place: Arc<dyn Place>,
    view: Arc<Mutex<View>>,
    node: String,
    store: Id,
    epoch: u64,
    sequence: u64,
    /// The node's object files on the remote, with their lengths.
    present: BTreeMap<String, u64>,
    /// Object files that no name needs, and since when.
    idle: HashMap<String, Instant>,
    segments: u64,
    /// When the journal was found too large for a snapshot.
    too_large: Option<Instant>,
    /// The head that is to be put.
    news: Option<journal::Place>,
    /// The heads that are there, of segments before it.
    told: BTreeSet<journal::Place>,
}

impl Writer {
    /// Claims a node's name for a store. The store that wrote the node's first segment has the name. `known`: the store
    /// has pushed there before.
    ///
    /// # Errors
    /// [`Error::Denied`] if another store has it, or a newer stepfs wrote the node's journal. [`Error::Away`] if the
    /// remote is empty, but should not be. Those of the remote.
    pub fn claim(place: Arc<dyn Place>, view: Arc<Mutex<View>>, node: &str, store: Id, known: bool) -> Result<Writer> {
        Reader::refresh(place.as_ref(), &view)?;
        let (owner, newer) = lock(&view).nodes().get(node).map_or((None, None), |of| (of.store, of.newer.clone()));
        let taken = |by: String| Err(belongs_to_another(node, &by));
        if let Some(why) = newer {
            return Err(Error::Denied(why));
        }
        if let Some(owner) = owner.filter(|owner| *owner != store) {
            return taken(owner.to_string());
        }
        check_owner(&view, node, store)?;
        let segments = journal_of(place.as_ref(), node)?;
        if known && segments.is_empty() {
            let words = "this store has pushed to the remote, and nothing of it is there: is its file system mounted? \
                         To begin anew, remove remote.shown from the store";
            return Err(Error::Away(words.into()));
        }
        let seconds = u64::try_from(wall_ns() / 1_000_000_000).unwrap_or_default();
        // Later than every known start, and than a start whose last request may still be on its way.
        let Some(next) = segments.last().map_or(Some(0), |last| last.epoch.checked_add(1)) else {
            return Err(Error::Wrong(format!("the journal of node {node} has a segment that no start can follow")));
        };
        let epoch = next.max(seconds);
        place.sweep(&format!("nodes/{node}/"))?;
        place.sweep("heads/")?;
        let objects = place.list(&format!("nodes/{node}/objects/"))?;
        let present = objects.into_iter().map(|listed| (listed.name, listed.len)).collect();
        let mut writer = Writer {
            view,
            node: node.to_string(),
            store,
            epoch,
            sequence: 0,
            present,
            idle: HashMap::new(),
            segments: segments.len() as u64,
            too_large: None,
            news: None,
            told: heads(place.as_ref())?.remove(node).unwrap_or_default(),
            place,
        };
        // A former process may have died before it told of its last segment.
        writer.news = segments.last().filter(|last| !writer.told.contains(last)).copied();
        if segments.is_empty() {
            writer.append(Vec::new())?;
            let first = journal_of(writer.place.as_ref(), node)?.first().copied();
            if let Some(first) = first.filter(|first| first.store != journal::short(store)) {
                return taken(format!("{:08x}...", first.store));
            }
        }
        Ok(writer)
    }

    /// Reads the news of all nodes.
    ///
    /// # Errors
    /// Those of [`Reader::look`].
    pub(super) fn look(&self) -> Result<()> {
        Reader::look(self.place.as_ref(), &self.view)
    }

    /// Checks that no other store has the node's name: two may have claimed it in the same moment.
    ///
    /// # Errors
    /// [`Error::Denied`].
    pub(super) fn check_owner(&self) -> Result<()> {
        check_owner(&self.view, &self.node, self.store)
    }

    /// Segments that this writer has put.
    pub(super) fn put_segments(&self) -> u64 {
        self.sequence
    }

    /// True if `stepfs gc --node` has written this node's journal since: segments of this writer would lie before its
    /// snapshot, where nobody reads them.
    ///
    /// # Errors
    /// [`Error::Denied`] if another daemon has: a copy of this store is mounted elsewhere. Each would take the other's files
    /// for changes of its own, and push all of its own again, for ever.
    pub(super) fn is_outdated(&self) -> Result<bool> {
        let view = lock(&self.view);
        let read = view.nodes().get(&self.node).into_iter().flat_map(|node| &node.read);
        let mut later = read.filter(|place| place.epoch > self.epoch).peekable();
        let is_outdated = later.peek().is_some();
        match later.all(|place| place.snapshot) {
            true => Ok(is_outdated),
            false => Err(Error::Denied(format!(
                "a copy of this store is mounted elsewhere as node {}; unmount one of them, or give one a `node` of its own in \
                 stepfs.toml",
                self.node
            ))),
        }
    }

    /// The node's name.
    pub fn node(&self) -> &str {
        &self.node
    }

    fn segment(&self, kind: Kind, records: Vec<Record>) -> Segment {
        let (store, node) = (self.store, self.node.clone());
        Segment { kind, store, node, epoch: self.epoch, sequence: self.sequence, records }
    }

    /// Puts the objects of a chain, the oldest first, and returns the records of those that were not known.
    ///
    /// # Errors
    /// Those of the remote and the device.
    pub(super) fn push_chain(&mut self, chain: &[Arc<Object>], pace: &Pacer) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        for object in chain.iter().rev() {
            records.extend(self.push_object(object.header(), object.file(), pace)?);
        }
        Ok(records)
    }

    /// Puts one object. Its ancestors are there already.
    ///
    /// # Errors
    /// Those of the remote and the device.
    pub(super) fn push_object(
        &mut self,
        header: &Header,
        file: &(dyn ReadAt + Sync),
        pace: &Pacer,
    ) -> Result<Option<Record>> {
        let id = header.id;
        if lock(&self.view).nodes().get(&self.node).is_some_and(|node| node.objects.contains_key(&id)) {
            return Ok(None);
        }
        let len = file.size();
        let (parent, lossy) = (header.parent, header.lossy);
        let encoding = Encoding { id, parent, hash: hash_of(file, len)?, len, lossy };
        let name = encoding.name(&self.node);
        if self.present.get(&name) != Some(&len) {
            self.place.put(&name, file, len, pace)?;
            self.present.insert(name, len);
        }
        Ok(Some(Record::Object(encoding)))
    }

    /// Puts a segment with these changes, each later than all known ones. Returns the time of the first.
    ///
    /// # Errors
    /// Those of the remote. The segment may be there nevertheless; later changes still count more.
    pub fn append(&mut self, mut records: Vec<Record>) -> Result<u64> {
        let of_start = self.epoch.saturating_mul(TIMES_A_SECOND).min(journal::MAX_TIME / 2);
        let first = lock(&self.view).next_time().max(of_start);
        let mut next = first;
        for record in &mut records {
            if let Record::Put { time, .. } | Record::Removed { time, .. } = record {
                *time = next;
                next += 1;
            }
        }
        self.put(Kind::Changes, records)?;
        Ok(first)
    }

    fn put(&mut self, kind: Kind, records: Vec<Record>) -> Result<()> {
        let segment = self.segment(kind, records);
        let bytes = segment.encode()?;
        // Never the same name twice: a request whose answer was lost may have been carried out.
        self.sequence += 1;
        put_bytes(self.place.as_ref(), &segment.name(), bytes)?;
        self.segments += 1;
        lock(&self.view).apply(&segment);
        self.news = Some(segment.place());
        self.tell()
    }

    /// Tells other nodes of the last segment, if that is not done yet.
    ///
    /// # Errors
    /// Those of the remote; a later call goes on.
    pub(super) fn tell(&mut self) -> Result<()> {
        let Some(news) = self.news else { return Ok(()) };
        put_bytes(self.place.as_ref(), &news.head(&self.node), Vec::new())?;
        self.news = None;
        for old in std::mem::replace(&mut self.told, BTreeSet::from([news])) {
            if old != news && self.place.delete(&old.head(&self.node)).is_err() {
                // The highest counts; the next segment's head takes it away.
                self.told.insert(old);
            }
        }
        Ok(())
    }

    /// The object files that no known name has needed for `grace`.
    fn due(&mut self, grace: Duration) -> Vec<String> {
        let needed = lock(&self.view).needed(&self.node);
        let is_needed = |name: &String| id_of(name).is_some_and(|id| needed.contains(&id));
        let now = Instant::now();
        self.idle.retain(|name, _| !is_needed(name));
        for name in self.present.keys().filter(|name| !is_needed(name)) {
            self.idle.entry(name.clone()).or_insert(now);
        }
        self.idle.iter().filter(|(_, since)| since.elapsed() >= grace).map(|(name, _)| name.clone()).collect()
    }

    /// Deletes this node's objects that no name of any node has needed for `grace`, and now and then replaces the
    /// journal by a snapshot. Reads all journals first, and deletes nothing while part of one cannot be read. Returns the
    /// number of deleted objects.
    ///
    /// # Errors
    /// Those of the remote; what is left is deleted by a later call.
    pub fn tidy(&mut self, grace: Duration) -> Result<usize> {
        self.collect(&|writer| writer.due(grace))
    }

    /// Deletes objects of a node that is gone for good: those that no name needs, and that are older than `grace` by
    /// the remote's own clock. Returns their number.
    ///
    /// # Errors
    /// [`Error::Denied`] if the node has written to its journal within `grace`. Those of [`Writer::claim`] and
    /// [`Writer::tidy`].
    pub fn bury(
        place: Arc<dyn Place>,
        view: Arc<Mutex<View>>,
        node: &str,
        store: Id,
        grace: Duration,
    ) -> Result<usize> {
        let clock = format!("nodes/{node}/clock-{}", Id::random()?);
        put_bytes(place.as_ref(), &clock, Vec::new())?;
        let listed = place.list(&format!("nodes/{node}/"));
        place.delete(&clock)?;
        let listed = listed?;
        let now = listed.iter().find(|found| found.name == clock).map(|found| found.put_ns);
        let now = now.ok_or_else(|| Error::Away(format!("{clock} was put, and is not listed")))?;
        let age = |found: &Listed| Duration::from_nanos(u64::try_from(now - found.put_ns).unwrap_or_default());
        let journal = format!("nodes/{node}/journal/");
        let last = listed.iter().filter(|found| found.name.starts_with(&journal)).map(age).min();
        if let Some(last) = last.filter(|last| *last < grace) {
            return Err(Error::Denied(format!(
                "node {node} has written to its journal {} seconds ago, so its daemon may run; unmount it, and wait, \
                 or set a shorter --grace if it is surely gone",
                last.as_secs()
            )));
        }
        let old: BTreeSet<String> =
            listed.iter().filter(|found| age(found) >= grace).map(|found| found.name.clone()).collect();
        let mut writer = Writer::claim(place, view, node, store, true)?;
        writer.collect(&|writer| {
            let mut due = writer.due(Duration::ZERO);
            due.retain(|name| old.contains(name));
            due
        })
    }

    fn collect(&mut self, due: &dyn Fn(&mut Writer) -> Vec<String>) -> Result<usize> {
        if due(self).is_empty() && self.segments < SNAPSHOT_AFTER
            || self.too_large.is_some_and(|since| since.elapsed() < TOO_LARGE_FOR)
        {
            return Ok(0);
        }
        let mut read_at = since_boot();
        Reader::refresh(self.place.as_ref(), &self.view)?;
        if since_boot().saturating_sub(read_at) > READ_FOR {
            read_at = since_boot();
            self.look()?;
        }
        // A segment that cannot be read may have a name that needs an object.
        if lock(&self.view).nodes().values().any(|node| node.broken.is_some()) {
            self.idle.clear();
            return Ok(0);
        }
        let due = due(self);
        if due.is_empty() && self.segments < SNAPSHOT_AFTER {
            return Ok(0);
        }
        // The journal forgets the objects before they go: nobody is told of an object that is not there.
        let gone: BTreeSet<Id> = due.iter().filter_map(|name| id_of(name)).collect();
        let records = {
            let view = lock(&self.view);
            let objects =
                view.nodes().get(&self.node).map(|node| node.objects.keys().copied().collect::<BTreeSet<_>>());
            let keep = objects.unwrap_or_default().difference(&gone).copied().collect();
            view.snapshot(&self.node, &keep)
        };
        if since_boot().saturating_sub(read_at) > READ_FOR {
            return Ok(0);
        }
        match self.put(Kind::Snapshot, records) {
            Err(Error::Local(error)) if error.kind() == ErrorKind::FileTooLarge => {
                log::warn!("remote: {error}: it has too many small files for a snapshot, so nothing is deleted there");
                self.too_large = Some(Instant::now());
                return Ok(0);
            }
            put => put?,
        }
        for name in &due {
            self.place.delete(name)?;
            self.present.remove(name);
            self.idle.remove(name);
        }
        let segments = journal_of(self.place.as_ref(), &self.node)?;
        let last = segments.iter().rev().find(|segment| segment.snapshot).copied();
        for old in segments.iter().filter(|segment| last.is_some_and(|last| **segment < last)) {
            self.place.delete(&format!("nodes/{}/journal/{}", self.node, old.text()))?;
        }
        self.segments = 1;
        Ok(due.len())
    }
}

fn belongs_to_another(node: &str, store: &str) -> Error {
    Error::Denied(format!("node {node} of this remote belongs to another store ({store}); set `node` in [remote]"))
}

fn check_owner(view: &Mutex<View>, node: &str, store: Id) -> Result<()> {
    let owner = lock(view).nodes().get(node).and_then(|of| of.owner);
    match owner.filter(|owner| *owner != journal::short(store)) {
        Some(other) => Err(belongs_to_another(node, &format!("{other:08x}..."))),
        None => Ok(()),
    }
}

/// The places of a node's segments.
fn journal_of(place: &dyn Place, node: &str) -> Result<BTreeSet<journal::Place>> {
    let prefix = format!("nodes/{node}/journal/");
    let listed = place.list(&prefix)?;
    Ok(listed.iter().filter_map(|listed| journal::Place::parse(listed.name.strip_prefix(&prefix)?)).collect())
}

/// The object of a name below `objects/`.
fn id_of(name: &str) -> Option<Id> {
    name.rsplit('/').next()?.split('-').next()?.parse().ok()
}

fn hash_of(file: &(dyn ReadAt + Sync), len: u64) -> Result<u128> {
    let mut hash = Xxh3Of128::default();
    let mut buf = vec![0; PIECE];
    let mut at = 0;
    while at < len {
        let bytes = &mut buf[..PIECE.min((len - at) as usize)];
        file.read_exact_at(bytes, at)?;
        hash.update(bytes);
        at += bytes.len() as u64;
    }
    Ok(hash.digest())
}
