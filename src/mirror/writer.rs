//! Brings what a store has to its mirror: first the bytes, then a manifest that names them.
//!
//! It keeps the tree of the last manifest, and enters into it what changed. A name whose bytes are not there yet keeps
//! what it had. So each manifest is complete, and one file that fails delays only itself.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::blobs::Blobs;
use super::manifest::{self, Number};
use super::pace::Pace;
use super::place::{Error, Place, Result};
use super::settings::{Progress, Settings};
use super::source::{Shape, Source};
use super::tree::{Attributes, Blob, Content, Directory, Encodings, File, Loaded, Node, Witness, chain, load};
use super::work::{Found, Work, attributes_of};
use crate::clock::age_ns;
use crate::store::{Id, MIN_RELEASE_BYTES, Newest, beneath, found_at};

/// Files that travel in one round. Each may be open meanwhile.
const AT_ONCE: usize = 256;
/// After this time a manifest names what is there; what is under way goes on in the next round.
const ROUND: Duration = Duration::from_secs(5);
/// How long a file that failed is left alone, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The longest wait for the first collection after a start.
const FIRST_COLLECTION: Duration = Duration::from_secs(60);
/// Failures that `stepfs status` and `stepfs sync --mirror` name.
const MOST_NAMED: usize = 20;

/// A file whose bytes are not on the mirror yet.
struct Pending {
    found: Found,
    since: Instant,
    /// What is under way.
    work: Option<Work>,
    /// When it is tried again, and after which pause.
    again: Option<Instant>,
    pause: Duration,
    failed: Option<String>,
}

impl Pending {
    /// Whether it is to be tried now.
    fn is_due(&self, now: Instant) -> bool {
        self.again.is_none_or(|at| at <= now)
    }
}

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
    /// When that was put, or found.
    last_seen: Instant,
    /// The tree that the last manifest names.
    published: Option<Blob>,
    pending: BTreeMap<PathBuf, Pending>,
    /// Names that went. One stays on the mirror while a pending file may have taken its bytes.
    gone: BTreeSet<PathBuf>,
    /// Inode numbers of files that are not sealed yet, which may have had another name.
    unsettled: BTreeMap<PathBuf, u64>,
    /// Names to look at, whether they changed or not.
    again: Vec<PathBuf>,
    /// Names that changed while bytes were on their way.
    noted: Vec<(PathBuf, Option<Shape>)>,
    /// Directories that are not put yet.
    packed: Vec<(Blob, Vec<u8>)>,
    is_new: bool,
    collect_at: Instant,
}

impl Writer {
    /// Reads what the mirror has.
    ///
    /// # Errors
    /// It is another store's; those of the mirror. Damage is none: what is lost is written again.
    pub(super) fn open(place: &Arc<dyn Place>, store: Id, settings: &Settings) -> Result<Writer> {
        manifest::check(place.as_ref(), store)?;
        let last = manifest::list(place.as_ref(), store)?.pop();
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
            last_seen: Instant::now(),
            pending: BTreeMap::new(),
            gone: BTreeSet::new(),
            unsettled: BTreeMap::new(),
            again: Vec::new(),
            noted: Vec::new(),
            packed: Vec::new(),
            is_new: true,
            // What is new comes first.
            collect_at: Instant::now() + settings.keep.min(FIRST_COLLECTION),
        };
        writer.list()?;
        writer.blobs.lose(&damaged);
        writer.tree.lose(&|hash| writer.blobs.has(hash));
        writer.tree.each(&mut |path, _| writer.again.push(path));
        Ok(writer)
    }

    /// Takes from the tree what the mirror has lost: it travels again. Returns all blobs, and when each was put.
    fn list(&mut self) -> Result<Vec<(Id, i64)>> {
        let listed = self.blobs.list()?;
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
            self.again.push(path);
        }
        self.tree.lose(&|hash| self.blobs.has(hash));
        Ok(listed)
    }

    /// Whether something is to be done although nothing has changed.
    pub(super) fn is_due(&self) -> bool {
        let now = Instant::now();
        self.collect_at <= now || !self.again.is_empty() || self.pending.values().any(|pending| pending.is_due(now))
    }

    /// Notes what is still to come.
    pub(super) fn tell(&self, progress: &mut Progress) {
        let all = self.pending.values();
        progress.files = self.pending.len() as u64;
        progress.bytes = all.clone().map(|pending| pending.found.len).sum();
        progress.lag_seconds = all.map(|pending| pending.since.elapsed().as_secs()).max();
        let failed = self.pending.iter().filter_map(|(path, pending)| Some((path, pending.failed.as_ref()?)));
        progress.failed = failed.take(MOST_NAMED).map(|(path, why)| format!("{}: {why}", path.display())).collect();
    }

    /// Brings what is to come, for some seconds, and puts a manifest. [`Writer::look`] comes before. True if nothing is left.
    /// `asked`: somebody waits, so the mirror must answer.
    ///
    /// # Errors
    /// Those of the mirror that are not of one file.
    pub(super) fn round(&mut self, source: &dyn Source, pace: &Pace, asked: bool) -> Result<bool> {
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
        self.publish(pace)?;
        Ok(self.pending.is_empty() && self.gone.is_empty() && self.noted.is_empty())
    }

    /// Enters what changed into the tree, as far as its bytes are there. `asked`: failed files are tried again now.
    pub(super) fn look(&mut self, source: &dyn Source, asked: bool) {
        if asked {
            self.pending.values_mut().for_each(|pending| pending.again = None);
        }
        let tree = source.store().tree();
        let is_new = std::mem::take(&mut self.is_new);
        // What failed may have changed without a note.
        let failed =
            self.pending.iter().filter(|(_, pending)| pending.failed.is_some() && pending.is_due(Instant::now()));
        self.again.extend(failed.map(|(path, _)| path.clone()));
        let mut changed = source.changed(is_new, std::mem::take(&mut self.again));
        if is_new {
            changed.push((PathBuf::new(), None));
        }
        // The earlier ones are looked at first, from the end.
        changed.append(&mut self.noted);
        // A name that comes or goes changes the time of its directory.
        let above: BTreeSet<PathBuf> =
            changed.iter().filter_map(|(path, _)| Some(path.parent()?.to_path_buf())).collect();
        let (known, new): (Vec<_>, Vec<_>) = above.into_iter().partition(|path| self.tree.others(path).is_some());
        known.iter().for_each(|path| drop(self.look_at(source, path, None)));
        changed.extend(new.into_iter().map(|path| (path, None)));
        let mut listed = HashSet::new();
        while let Some((path, shape)) = changed.pop() {
            match self.look_at(source, &path, shape) {
                // Another directory may have its place, and nobody tells of what is in it but files.
                Ok(true) if listed.insert(path.clone()) => changed.extend(self.others_in(&tree, &path)),
                Ok(_) => {}
                Err(error) => {
                    let (attributes, witness) = Default::default();
                    self.await_bytes(&path, Found { shape: Shape::Stuck, attributes, len: 0, witness });
                    self.postpone(&path, Some(error.into()));
                }
            }
        }
    }

    /// The links and directories that are in a directory, here and on the mirror. Of files the archive tells.
    fn others_in(&self, tree: &Path, path: &Path) -> Vec<(PathBuf, Option<Shape>)> {
        let mut others: Vec<PathBuf> = self.tree.others(path).into_iter().flatten().collect();
        let mut list = || -> io::Result<()> {
            let opened = beneath::open_dir(tree, path)?;
            for entry in fs::read_dir(beneath::by_descriptor(&opened))? {
                let entry = entry?;
                if !entry.file_type()?.is_file() {
                    others.push(path.join(entry.file_name()));
                }
            }
            Ok(())
        };
        // If it has gone, the note of that is on its way.
        let _ = list();
        others.into_iter().map(|path| (path, None)).collect()
    }

    /// Looks at a name. True for a directory.
    fn look_at(&mut self, source: &dyn Source, path: &Path, shape: Option<Shape>) -> io::Result<bool> {
        if path.as_os_str().is_empty() {
            return Ok(true);
        }
        let tree = source.store().tree();
        self.unsettled.remove(path);
        let Some(metadata) = found_at(&tree, path)? else {
            self.pending.remove(path);
            self.gone.insert(path.to_path_buf());
            return Ok(false);
        };
        let attributes = attributes_of(&metadata);
        let kind = metadata.file_type();
        if kind.is_file() {
            match shape {
                Some(shape) => self.want(source, path, Found::of(shape, &metadata))?,
                // The note of it is on its way.
                None => return Ok(false),
            }
        } else if kind.is_symlink() {
            let target = fs::read_link(beneath::reach(&tree, path)?)?;
            self.set(source, path, Node::Link(attributes, target.as_os_str().as_bytes().to_vec()));
        } else if kind.is_dir() {
            self.set(source, path, Node::Directory(attributes, Directory::default()));
        } else {
            self.gone.insert(path.to_path_buf());
            return Ok(false);
        }
        if !kind.is_file() {
            self.pending.remove(path);
        }
        self.gone.remove(path);
        Ok(kind.is_dir())
    }

    fn set(&mut self, source: &dyn Source, path: &Path, node: Node) {
        let tree = source.store().tree();
        let missing = Attributes { mode: 0o755, ..Attributes::default() };
        let above = |path: &Path| found_at(&tree, path).ok().flatten().map_or(missing, |of| attributes_of(&of));
        self.tree.set(path, Some(node), &above);
    }

    /// Enters a file whose bytes are there, and notes any other.
    fn want(&mut self, source: &dyn Source, path: &Path, found: Found) -> io::Result<()> {
        let is_behind = || self.newest == Newest::None && found.len >= MIN_RELEASE_BYTES;
        let content = match found.shape {
            Shape::Object(id) => chain(&self.objects, id).map(|_| Content::Object(id)),
            Shape::Stuck => None,
            Shape::Newest if is_behind() && !source.stays_exact(path)? => {
                self.pending.remove(path);
                return Ok(());
            }
            Shape::Newest | Shape::Whole => {
                // What stays exact is not shown as an object that was made ahead.
                let is_ahead = self.newest == Newest::Quantized && found.shape == Shape::Newest;
                let is_lossy_fine = is_ahead && !source.stays_exact(path)?;
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
        if self.pending.get(path).is_none_or(|pending| pending.found != found) {
            let (since, pause) = (Instant::now(), FIRST_PAUSE);
            let pending = Pending { found, since, work: None, again: None, pause, failed: None };
            self.pending.insert(path.to_path_buf(), pending);
        }
    }

    fn is_exact(&self, content: Content) -> bool {
        match content {
            Content::Small(_) => true,
            Content::Object(id) => self.objects.get(&id).is_some_and(|object| !object.lossy),
        }
    }

    /// Enters a file whose bytes are there.
    fn enter(&mut self, source: &dyn Source, path: &Path, found: Found, content: Content) {
        let Found { shape, attributes, len, mut witness } = found;
        // A stub's own bytes say nothing.
        if let Shape::Object(_) = shape {
            witness = Witness::default();
        }
        let file = File { attributes, len, content, witness };
        self.known.insert(witness.inode, file.clone());
        self.set(source, path, Node::File(file));
        self.pending.remove(path);
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
        self.noted = source.changed(false, Vec::new());
        let noted: HashSet<PathBuf> = self.noted.iter().map(|(path, _)| path.clone()).collect();
        for ((path, work), error) in works.into_iter().zip(errors) {
            self.settle(source, &path, work, (error, noted.contains(&path)));
        }
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
        let Some(pending) = self.pending.get_mut(path) else { return };
        pending.again = Some(Instant::now() + pending.pause);
        if let Some(error) = error {
            let why = error.to_string();
            if pending.failed.as_ref() != Some(&why) {
                log::warn!("mirror: {} is not there: {why}; stepfs tries again", path.display());
            }
            pending.failed = Some(why);
            pending.pause = (pending.pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Takes away the names that went. A file that moved is never without a name.
    fn take_away(&mut self) {
        let pending = self.pending.values().map(|pending| pending.found.witness.inode);
        let moving: HashSet<u64> =
            pending.chain(self.unsettled.values().copied()).filter(|inode| *inode != 0).collect();
        let has_moving = |node: &Node| {
            let mut found = false;
            let mut look = |node: &Node| {
                found |= matches!(node, Node::File(file) if moving.contains(&file.witness.inode));
            };
            look(node);
            if let Node::Directory(_, directory) = node {
                directory.each(&mut |_, node| look(node));
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

    fn now_ms(&self) -> u64 {
        manifest::now_ms((age_ns() / 1_000_000).max(0) as u64, self.last, self.last_seen.elapsed())
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
        let number = Number::after(self.last, self.now_ms(), self.store);
        // Its answer may be lost: no number is used twice.
        (self.last, self.last_seen) = (Some(number), Instant::now());
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
        let mut states = manifest::list(place.as_ref(), self.store)?;
        let old = manifest::outdated(&states, self.now_ms(), self.keep);
        manifest::delete(place.as_ref(), &old)?;
        states.retain(|state| !old.contains(state));
        let listed = self.list()?;
        let mut needed = HashSet::new();
        self.tree.blobs(&self.objects, &mut needed);
        if !states.iter().any(|state| Some(*state) == self.last) {
            // Somebody removed the newest state: it is put again.
            self.published = None;
        }
        for state in states {
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
        // By the mirror's own clock. A blob may be young because its file is on its way.
        let newest = listed.iter().map(|(_, put_ns)| *put_ns).max().unwrap_or_default();
        let grace = self.keep.min(manifest::ALL_FOR).as_nanos() as i64;
        let is_garbage = |(hash, put_ns): &&(Id, i64)| !needed.contains(hash) && newest - put_ns >= grace;
        let garbage: HashSet<Id> = listed.iter().filter(is_garbage).map(|(hash, _)| *hash).collect();
        let deleted = self.blobs.delete(&garbage);
        let blobs = &self.blobs;
        self.objects.retain(|_, object| blobs.has_all(object));
        deleted
    }
}
