//! Brings what a store has to its mirror: first the bytes, then a manifest that names them.
//!
//! It keeps the tree of the last manifest, and enters into it what changed. A name whose bytes are not there yet keeps
//! what it had. So each manifest is complete, and one file that fails delays only itself.
//!
//! The catalog's answer, a look at a name, and the bytes of a file are three instants. So nothing is entered of a name
//! that changed between them: the catalog is asked again first, and tells of the name anew.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::blobs::Blobs;
use super::look::{Found, Seen, attributes_of, others, see};
use super::manifest::{self, Number};
use super::pace::Pace;
use super::place::{Error, Place, Result};
use super::settings::{Progress, Settings};
use super::source::{Shape, Source};
use super::tree::{Attributes, Blob, Content, Directory, Encodings, File, Loaded, Node, Witness, chain, load};
use super::work::{FIRST_PAUSE, Pending, Work};
use crate::clock::{age_ns, wall_ns};
use crate::store::{Id, MIN_RELEASE_BYTES, Newest, found_at};

/// Files that travel in one round. Each may be open meanwhile.
const AT_ONCE: usize = 256;
/// After this time a manifest names what is there; what is under way goes on in the next round.
const ROUND: Duration = Duration::from_secs(5);
/// The longest wait for the first collection after a start.
const FIRST_COLLECTION: Duration = Duration::from_secs(60);
/// Failures that `stepfs status` and `stepfs sync --mirror` name.
const MOST_NAMED: usize = 20;

/// See the module.
pub(super) struct Writer {
    place: Arc<dyn Place>,
    store: Id,
    newest: Newest,
    keep: Duration,
    tree: Directory,
    objects: Encodings,
    blobs: Blobs,
    /// The bytes of files, by inode number.
    known: HashMap<u64, File>,
    last: Option<Number>,
    /// The tree that the last manifest names.
    published: Option<Blob>,
    pending: BTreeMap<PathBuf, Pending>,
    /// Names that went. One stays on the mirror while a pending file may have taken its bytes.
    gone: BTreeSet<PathBuf>,
    /// Inode numbers of files that are not sealed yet, which may have had another name.
    unsettled: BTreeMap<PathBuf, u64>,
    /// Names to look at, whether they change or not, each with the first change that the mirror may lack.
    again: BTreeMap<PathBuf, u64>,
    /// Names that looked gone in a look during which others changed: one may be the new name of such a file.
    doubted: BTreeSet<PathBuf>,
    /// Files whose other names are to be looked at, by inode number.
    renewed: HashMap<u64, Witness>,
    /// The store's change that was looked at last, and the first one after the look before: a name that was told now may have
    /// changed by any between.
    change: u64,
    first: u64,
    /// Directories that are not put yet.
    packed: Vec<(Blob, Vec<u8>)>,
    is_new: bool,
    collect_at: Instant,
    /// The mirror's own time, in nanoseconds since 1970, was this at least at that moment.
    clock: (i64, Instant),
}

impl Writer {
    /// Reads what the mirror has.
    ///
    /// # Errors
    /// It is another store's; those of the mirror. Damage is none: what is lost is written again.
    pub(super) fn open(place: &Arc<dyn Place>, store: Id, settings: &Settings) -> Result<Writer> {
        manifest::check(place.as_ref(), store)?;
        let last = manifest::list(place.as_ref(), store)?.pop().map(|(number, _)| number);
        let read = |number| load(place.as_ref(), manifest::get(place.as_ref(), number)?, &|_, _| true);
        let Loaded { tree, objects, unread, damaged } = match last.map(read) {
            None => Loaded::default(),
            Some(Err(error @ (Error::Wrong(_) | Error::Missing(_)))) => {
                log::warn!("mirror: {error}; everything is looked at again");
                Loaded::default()
            }
            Some(loaded) => loaded?,
        };
        unread.values().for_each(|why| log::warn!("mirror: {why}; it is written again"));
        let mut writer = Writer {
            place: Arc::clone(place),
            store,
            newest: settings.newest,
            keep: settings.keep,
            published: tree.stored(),
            tree,
            objects,
            blobs: Blobs::of(place),
            known: HashMap::new(),
            last,
            pending: BTreeMap::new(),
            gone: BTreeSet::new(),
            unsettled: BTreeMap::new(),
            again: BTreeMap::new(),
            doubted: BTreeSet::new(),
            renewed: HashMap::new(),
            change: 0,
            first: 1,
            packed: Vec::new(),
            is_new: true,
            // What is new comes first.
            collect_at: Instant::now() + settings.keep.min(FIRST_COLLECTION),
            clock: (0, Instant::now()),
        };
        writer.list()?;
        writer.blobs.lose(&damaged);
        writer.tree.lose(&|hash| writer.blobs.has(hash));
        writer.tree.each(&mut |path, _| {
            writer.again.insert(path, 0);
        });
        Ok(writer)
    }

    /// Takes from the tree all that the mirror has lost: it travels again. Returns all blobs, and when each was put.
    fn list(&mut self) -> Result<Vec<(Id, i64)>> {
        let listed = self.blobs.list()?;
        let newest = listed.iter().map(|(_, put_ns)| *put_ns).max().unwrap_or_default();
        // Old is what this machine's clock calls old, too. Else a clock that was ahead once would thin a directory for ever.
        self.clock = (newest.max(self.now_ns()).min(age_ns()), Instant::now());
        let blobs = &self.blobs;
        self.objects.retain(|_, object| blobs.has_all(object));
        let mut lost = Vec::new();
        self.known.clear();
        self.tree.each(&mut |path, node| {
            let Node::File(file) = node else { return };
            match file.content {
                Content::Small(blob) if !blobs.has(&blob.hash) => lost.push(path),
                Content::Object(id) if chain(&self.objects, id).is_none() => lost.push(path),
                _ => drop(self.known.insert(file.witness.inode, file.clone())),
            }
        });
        for path in lost {
            log::warn!("mirror: bytes of {} are gone there; they travel again", path.display());
            self.tree.set(&path, None, &|_| Attributes::default());
            self.again.insert(path, self.change);
        }
        self.tree.lose(&|hash| self.blobs.has(hash));
        Ok(listed)
    }

    /// The mirror's own time, or an earlier one: this machine's clock may be wrong by years.
    fn now_ns(&self) -> i64 {
        self.clock.0 + self.clock.1.elapsed().as_nanos() as i64
    }

    /// Whether something is to be done although nothing has changed.
    pub(super) fn is_due(&self) -> bool {
        let now = Instant::now();
        self.collect_at <= now || !self.again.is_empty() || self.pending.values().any(|pending| pending.is_due(now))
    }

    /// The mirror has all changes of the store up to the first number, and up to the second one but for files that fail.
    /// A later change of a file does not count for an earlier one: saves may go on all the time.
    pub(super) fn done(&self) -> (u64, u64) {
        let before = |fails: bool| {
            let pending = self.pending.values().filter(|pending| fails || pending.failed.is_none());
            let first = pending.map(|pending| pending.change).chain(self.again.values().copied()).min();
            first.map_or(self.change, |change| change.saturating_sub(1))
        };
        (before(true), before(false))
    }

    /// Notes the files that are still to come.
    pub(super) fn tell(&self, progress: &mut Progress) {
        let all = self.pending.values();
        progress.files = self.pending.len() as u64;
        progress.bytes = all.clone().map(|pending| pending.found.len).sum();
        progress.lag_seconds = all.map(|pending| pending.since.elapsed().as_secs()).max();
        let failed = self.pending.iter().filter_map(|(path, pending)| Some((path, pending.failed.as_ref()?)));
        progress.failed = failed.take(MOST_NAMED).map(|(path, why)| format!("{}: {why}", path.display())).collect();
    }

    /// Brings files that are to come, for some seconds, and puts a manifest. [`Writer::look`] comes before. `asked`: somebody
    /// waits, so the mirror must answer.
    ///
    /// # Errors
    /// Those of the mirror that are not of one file.
    pub(super) fn round(&mut self, source: &dyn Source, pace: &Pace, asked: bool) -> Result<()> {
        if asked || self.is_due() || self.tree.stored() != self.published || !self.gone.is_empty() {
            manifest::check(self.place.as_ref(), self.store)?;
        }
        if self.collect_at <= Instant::now() {
            // Also while puts fail: deleting makes room.
            let collected = self.collect();
            self.collect_at = Instant::now() + self.keep.clamp(FIRST_PAUSE, manifest::ALL_FOR);
            if let Err(error) = collected {
                log::warn!("mirror: what nothing needs stays for now: {error}");
            }
        }
        self.push(source, pace);
        self.publish(pace)
    }

    /// Enters changed names into the tree, as far as its bytes are there. `change`: the store's present one. `asked`:
    /// failed files are tried again now.
    pub(super) fn look(&mut self, source: &dyn Source, change: u64, asked: bool) {
        (self.first, self.change) = (self.change + 1, change);
        if asked {
            self.pending.values_mut().for_each(|pending| pending.again = None);
        }
        let tree = source.store().tree();
        let is_new = std::mem::take(&mut self.is_new);
        // What failed may have changed without a note.
        let mut again = std::mem::take(&mut self.again);
        for (path, pending) in self.pending.iter().filter(|(_, of)| of.failed.is_some() && of.is_due(Instant::now())) {
            again.entry(path.clone()).or_insert(pending.change);
        }
        // A file may be archived, or get another name or mode, while its bytes are on their way: that makes it no later.
        let of_file = |pending: &Pending| (pending.found.witness.inode, (pending.modified_ns(), pending.change));
        let waiting: HashMap<u64, (i64, u64)> = self.pending.values().map(of_file).collect();
        let mut changed = source.changed(is_new, again.keys().cloned().collect());
        if is_new {
            changed.push((PathBuf::new(), None));
        }
        // A name that comes or goes changes the time of its directory.
        let above: BTreeSet<PathBuf> =
            changed.iter().filter_map(|(path, _)| Some(path.parent()?.to_path_buf())).collect();
        // One that could not be listed is listed again.
        let is_known = |path: &PathBuf| self.tree.others(path).is_some() && !self.pending.contains_key(path);
        let (known, new): (Vec<_>, Vec<_>) = above.into_iter().partition(is_known);
        let mut seen: Vec<_> = known.into_iter().map(|path| (see(&tree, &path, None), path)).collect();
        changed.extend(new.into_iter().map(|path| (path, None)));
        let mut listed = HashSet::new();
        while let Some((path, shape)) = changed.pop() {
            let mut found = see(&tree, &path, shape);
            // Another directory may have its place, and of all that is in it only files are told.
            if let Ok(Some(Seen::Other(Node::Directory(..)))) = found
                && listed.insert(path.clone())
            {
                changed.extend(self.tree.others(&path).into_iter().flatten().map(|path| (path, None)));
                match others(&tree, &path) {
                    Ok(others) => changed.extend(others.into_iter().map(|path| (path, None))),
                    Err(error) => found = Err(error),
                }
            }
            seen.push((found, path));
        }
        let noted = self.changed_since(source);
        for (found, path) in seen {
            let first = again.get(&path).copied().unwrap_or(self.first);
            // With a directory that moved, all below it is told anew.
            if path.ancestors().any(|above| noted.contains(above)) {
                continue;
            }
            let is_gone = matches!(found, Ok(Some(Seen::Nothing)));
            if is_gone && !noted.is_empty() && self.doubted.insert(path.clone()) {
                self.again.insert(path, first);
                continue;
            }
            self.doubted.remove(&path);
            self.learn(source, &path, found);
            if let Some(pending) = self.pending.get_mut(&path) {
                let same = waiting.get(&pending.found.witness.inode).filter(|of| of.0 == pending.modified_ns());
                pending.change = pending.change.min(first).min(same.map_or(first, |of| of.1));
            }
        }
        self.look_at_other_names();
    }

    /// Looks again at the other names of files that changed: the archive may know of one only.
    fn look_at_other_names(&mut self) {
        let renewed = std::mem::take(&mut self.renewed);
        if renewed.is_empty() {
            return;
        }
        let (again, change) = (&mut self.again, self.change);
        self.tree.each(&mut |path, node| match node {
            Node::File(of) if renewed.get(&of.witness.inode).is_some_and(|witness| *witness != of.witness) => {
                again.entry(path).or_insert(change);
            }
            _ => {}
        });
    }

    /// The names that changed since the catalog was asked last. They are looked at in the next round.
    fn changed_since(&mut self, source: &dyn Source) -> HashSet<PathBuf> {
        let noted: HashSet<PathBuf> = source.changed(false, Vec::new()).into_iter().map(|(path, _)| path).collect();
        for path in &noted {
            self.again.entry(path.clone()).or_insert(self.change);
        }
        noted
    }

    /// Enters a name as it was seen. One that cannot be looked at is tried again.
    fn learn(&mut self, source: &dyn Source, path: &Path, seen: io::Result<Option<Seen>>) {
        // If the archive has not told of a file, the note of it is on its way.
        let Some(seen) = seen.transpose() else { return };
        self.unsettled.remove(path);
        let entered = match seen {
            Ok(Seen::Nothing) => {
                self.pending.remove(path);
                self.gone.insert(path.to_path_buf());
                return;
            }
            Ok(Seen::File(found)) => self.want(source, path, found),
            Ok(Seen::Other(node)) => {
                self.pending.remove(path);
                self.set(source, path, node);
                Ok(())
            }
            Err(error) => Err(error),
        };
        self.gone.remove(path);
        if let Err(error) = entered {
            let (attributes, witness) = Default::default();
            self.await_bytes(path, Found { shape: Shape::Stuck, attributes, len: 0, names: 0, witness });
            self.postpone(path, Some(error.into()));
        }
    }

    fn set(&mut self, source: &dyn Source, path: &Path, node: Node) {
        let tree = source.store().tree();
        let missing = Attributes { mode: 0o755, ..Attributes::default() };
        let above = |path: &Path| found_at(&tree, path).ok().flatten().map_or(missing, |of| attributes_of(&of));
        self.tree.set(path, Some(node), &above);
    }

    /// Enters a file whose bytes are there, and notes any other.
    fn want(&mut self, source: &dyn Source, path: &Path, mut found: Found) -> io::Result<()> {
        if self.newest == Newest::Quantized && found.shape == Shape::Newest && source.stays_exact(path)? {
            // An object that was made ahead, and may be on its way, is not shown.
            found.shape = Shape::Whole;
        }
        let is_behind = || self.newest == Newest::None && found.len >= MIN_RELEASE_BYTES;
        let content = match found.shape {
            Shape::Object(id) => Some(Content::Object(id)),
            Shape::Stuck => None,
            Shape::Newest if is_behind() && !source.stays_exact(path)? => {
                self.pending.remove(path);
                return Ok(());
            }
            Shape::Newest | Shape::Whole => {
                let is_lossy_fine = self.newest == Newest::Quantized && found.shape == Shape::Newest;
                let known = self.known.get(&found.witness.inode);
                let known = known.filter(|known| (known.witness, known.len) == (found.witness, found.len));
                known.map(|known| known.content).filter(|content| self.is_exact(*content) || is_lossy_fine)
            }
            // The mirror shows what the name had, and what the file had under a former name.
            Shape::Unsettled => {
                self.pending.remove(path);
                self.unsettled.insert(path.to_path_buf(), found.witness.inode);
                return Ok(());
            }
        };
        match content {
            Some(content) => self.enter(source, path, found, content),
            None => self.await_bytes(path, found),
        }
        Ok(())
    }

    /// Notes a file whose bytes are to come.
    fn await_bytes(&mut self, path: &Path, found: Found) {
        let former = self.pending.get(path);
        if former.is_none_or(|pending| pending.found != found) {
            let same = former.filter(|pending| pending.modified_ns() == found.attributes.modified_ns);
            let change = same.map_or(self.first, |of| of.change);
            self.pending.insert(path.to_path_buf(), Pending::new(found, change));
        }
    }

    fn is_exact(&self, content: Content) -> bool {
        match content {
            Content::Small(_) => true,
            Content::Object(id) => self.objects.get(&id).is_some_and(|object| !object.lossy),
        }
    }

    fn is_there(&self, content: Content) -> bool {
        match content {
            Content::Small(blob) => self.blobs.has(&blob.hash),
            Content::Object(id) => chain(&self.objects, id).is_some(),
        }
    }

    /// Enters a file if its bytes are there. The collector may have taken an ancestor of its object meanwhile.
    fn enter(&mut self, source: &dyn Source, path: &Path, found: Found, content: Content) {
        if !self.is_there(content) {
            return self.await_bytes(path, found);
        }
        let Found { shape, attributes, len, names, mut witness } = found;
        // A stub's own bytes say nothing.
        if let Shape::Object(_) = shape {
            witness = Witness::default();
        }
        let file = File { attributes, len, content, witness };
        let had = self.known.insert(witness.inode, file.clone());
        self.set(source, path, Node::File(file));
        self.pending.remove(path);
        // A file changes under all of its names, and the archive may know of one only.
        if names > 1 && had.is_some_and(|had| had.witness != witness) {
            self.renewed.insert(witness.inode, witness);
        }
    }

    /// Brings the bytes of the newest pending files.
    fn push(&mut self, source: &dyn Source, pace: &Pace) {
        let (now, until) = (Instant::now(), Instant::now() + ROUND);
        let due = self.pending.iter().filter(|(_, pending)| pending.is_due(now));
        let mut due: Vec<(i64, PathBuf)> =
            due.map(|(path, of)| (of.found.attributes.modified_ns, path.clone())).collect();
        due.sort_unstable_by(|a, b| b.cmp(a));
        due.truncate(AT_ONCE);
        let (mut works, mut coming) = (Vec::new(), HashSet::new());
        for (_, path) in due {
            if pace.is_stopped() || Instant::now() > until && !works.is_empty() {
                break;
            }
            let Some(pending) = self.pending.get_mut(&path) else { continue };
            let (work, found) = (pending.work.take(), pending.found.clone());
            let work = match work {
                Some(work) => Ok(Some(work)),
                None => {
                    let going = || !pace.is_stopped();
                    Work::begin(source, &path, &found, (&self.objects, self.newest), &going)
                }
            };
            match work {
                // Another file brings one of its objects in this round.
                Ok(Some(work)) if work.objects().any(|id| coming.contains(&id)) => {}
                Ok(Some(work)) => {
                    coming.extend(work.objects());
                    works.push((path, work));
                }
                Ok(None) => self.postpone(&path, None),
                Err(error) => self.postpone(&path, Some(error)),
            }
        }
        let errors = self.blobs.bring(&mut works, pace, until);
        // What a program has opened meanwhile may have been read half written.
        self.changed_since(source);
        let noted: HashSet<PathBuf> = self.again.keys().cloned().collect();
        for ((path, work), error) in works.into_iter().zip(errors) {
            self.settle(source, &path, work, (error, noted.contains(&path)));
        }
        self.look_at_other_names();
    }

    /// Enters a file whose bytes are all there; keeps what is there of any other, and of one that is `noted`.
    fn settle(&mut self, source: &dyn Source, path: &Path, work: Work, (error, noted): (Option<Error>, bool)) {
        for object in work.whole_objects() {
            // Never another encoding of an object that is there: directories of the mirror need its pieces.
            self.objects.entry(object.id).or_insert_with(|| Arc::new(object));
        }
        let Some(pending) = self.pending.get_mut(path) else { return };
        if error.is_none() && !noted && work.missing().next().is_none() {
            let found = pending.found.clone();
            return self.enter(source, path, found, work.content);
        }
        pending.work = Some(work);
        if error.is_some() {
            self.postpone(path, error);
        }
    }

    /// Leaves a file for later, because it failed or because its turn has not come.
    fn postpone(&mut self, path: &Path, error: Option<Error>) {
        if let Some(pending) = self.pending.get_mut(path) {
            pending.postpone(path, error);
        }
    }

    /// Takes away the names that went. A file that moved is never without a name.
    fn take_away(&mut self) {
        let pending = self.pending.values().map(|pending| pending.found.witness.inode);
        let moving: HashSet<u64> =
            pending.chain(self.unsettled.values().copied()).filter(|inode| *inode != 0).collect();
        let is_moving = |node: &Node| matches!(node, Node::File(file) if moving.contains(&file.witness.inode));
        let has_moving = |node: &Node| {
            let mut found = is_moving(node);
            if let Node::Directory(_, directory) = node {
                directory.each(&mut |_, node| found |= is_moving(node));
            }
            found
        };
        let tree = &mut self.tree;
        self.gone.retain(|path| {
            let stays = tree.get(path).is_some_and(has_moving);
            if !stays {
                tree.set(path, None, &|_| Attributes::default());
            }
            stays
        });
    }

    /// Puts the directories that changed, and then a manifest.
    fn publish(&mut self, pace: &Pace) -> Result<()> {
        self.take_away();
        let root = self.tree.pack(&self.objects, &mut self.packed)?;
        if self.published == Some(root) {
            return Ok(());
        }
        self.blobs.put_all(&self.packed, pace)?;
        self.packed.clear();
        let now_ms = (wall_ns() / 1_000_000).max(0) as u64;
        let number = Number::after(self.last, now_ms, self.store);
        // Its answer may be lost: no number is used twice.
        self.last = Some(number);
        manifest::put(self.place.as_ref(), self.store, number, root)?;
        self.published = Some(root);
        Ok(())
    }

    /// Deletes the states that are too old, and the blobs that nothing needs.
    ///
    /// # Errors
    /// Those of the mirror; [`Error::Wrong`] if a state that stays cannot be read.
    pub(super) fn collect(&mut self) -> Result<()> {
        let place = Arc::clone(&self.place);
        let listed = self.list()?;
        let mut states = manifest::list(place.as_ref(), self.store)?;
        let old = manifest::outdated(&states, self.now_ns(), self.keep);
        manifest::delete(place.as_ref(), &old)?;
        states.retain(|(state, _)| !old.contains(state));
        let mut needed = HashSet::new();
        self.tree.blobs(&self.objects, &mut needed);
        if states.last().map(|(state, _)| *state) != self.last {
            // Somebody removed the newest state: it is put again.
            self.published = None;
        }
        for (state, _) in states {
            let root = manifest::get(place.as_ref(), state)?;
            // A directory that was read has told what it needs.
            let loaded = load(place.as_ref(), root, &|_, blob| !needed.contains(&blob.hash))?;
            if let Some(why) = loaded.unread.into_values().next() {
                return Err(Error::Wrong(format!("{why}; it may need anything")));
            }
            loaded.tree.blobs(&loaded.objects, &mut needed);
        }
        // After the states: a directory of theirs that is packed here, too, was not read by anybody.
        needed.extend(self.packed.iter().map(|(blob, _)| blob.hash));
        needed.extend(self.pending.values().filter_map(|pending| pending.work.as_ref()).flat_map(Work::pieces));
        // A blob may be young because its file is on its way.
        let (now_ns, grace) = (self.now_ns(), self.keep.min(manifest::ALL_FOR).as_nanos() as i64);
        let is_garbage = |(hash, put_ns): &&(Id, i64)| !needed.contains(hash) && now_ns - put_ns >= grace;
        let garbage: HashSet<Id> = listed.iter().filter(is_garbage).map(|(hash, _)| *hash).collect();
        let deleted = self.blobs.delete(&garbage);
        let blobs = &self.blobs;
        self.objects.retain(|_, object| blobs.has_all(object));
        deleted
    }
}
