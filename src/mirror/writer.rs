//! Brings what a store has to its mirror: first the bytes, then a manifest that names them.
//!
//! It keeps the tree of the last manifest. A name that changed waits until the mirror can have it as it was seen, and
//! keeps what it had. So each manifest is complete, and one file that fails delays only itself.
//!
//! The catalog's answer, a look at a name, and the bytes of a file are three instants. So nothing is entered of a name
//! that changed between them: the catalog is asked again first, and tells of the name anew.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::pace::Pace;
use super::place::{Place, Result};
use super::settings::{Progress, Settings};
use super::source::{Found, Seen, Shape, Source, see};
use super::states::States;
use super::tree::{Attributes, Content, File, Node, Tree, Witness};
use super::waiting::Waiting;
use super::work::Work;
use crate::store::{Id, entries};

/// Files that travel at once. Each may be open meanwhile.
const AT_ONCE: usize = 256;
/// Files that travel in one round. Each round looks at all names that wait, so with fewer a million would wait for looks.
const MOST_IN_A_ROUND: usize = 1 << 14;
/// After this time a manifest names what is there; what is under way goes on in the next round.
const ROUND: Duration = Duration::from_secs(5);
/// Failures that `stepfs status` and `stepfs sync --mirror` name.
const MOST_NAMED: usize = 20;

/// See the module.
pub(super) struct Writer {
    states: States,
    tree: Tree,
    /// The bytes of files, by inode number.
    known: HashMap<u64, (Witness, Content)>,
    /// What the tree has not as the store has it.
    waiting: BTreeMap<PathBuf, Waiting>,
    /// The store's change that was looked at last, and the first one after the look before: a name that was told now may have
    /// changed by any between.
    change: u64,
    first: u64,
}

impl Writer {
    /// Reads what the mirror has.
    ///
    /// # Errors
    /// It is another store's; those of the mirror. Damage is none: what is lost is written again.
    pub(super) fn open(place: &Arc<dyn Place>, store: Id, settings: &Settings) -> Result<Writer> {
        let (states, tree) = States::open(place, store, settings)?;
        let (known, waiting) = Default::default();
        let mut writer = Writer { states, tree, known, waiting, change: 0, first: 1 };
        let names = writer.tree.iter().map(|(path, _)| path).chain([PathBuf::new()]);
        names.collect::<Vec<_>>().into_iter().for_each(|path| writer.note(path));
        writer.lose();
        Ok(writer)
    }

    /// A name is looked at in the next round, whether it changes or not.
    fn note(&mut self, path: PathBuf) {
        let change = self.change;
        self.waiting.entry(path).or_insert_with(|| Waiting::new(None, change)).look.get_or_insert(change);
    }

    /// Takes from the tree all that the mirror has lost: it travels again.
    fn lose(&mut self) {
        for path in self.tree.lose(&|hash| self.states.has(hash)) {
            log::warn!("mirror: bytes of {} are gone there; they travel again", path.display());
            self.note(path);
        }
        let files = self.tree.iter().filter_map(|(_, node)| match node {
            Node::File(File { content, witness, .. }) => Some((witness.inode, (*witness, content.clone()))),
            _ => None,
        });
        self.known = files.collect();
    }

    /// Whether something is to be done although nothing has changed.
    pub(super) fn is_due(&self) -> bool {
        let is_due = |of: &Waiting| of.look.is_some() || of.is_wanted() && of.retry.is_due();
        self.states.is_due() || self.waiting.values().any(is_due)
    }

    /// The mirror has all changes of the store up to the first number, and up to the second one but for files that fail.
    /// A later change of a file does not count for an earlier one: saves may go on all the time.
    pub(super) fn done(&self) -> (u64, u64) {
        let before = |fails: bool| {
            let lacking = self.waiting.values().filter(|of| fails || of.retry.failed.is_none());
            lacking.filter_map(Waiting::lacks).min().map_or(self.change, |change| change.saturating_sub(1))
        };
        (before(true), before(false))
    }

    /// Notes the files that are still to come.
    pub(super) fn tell(&self, progress: &mut Progress) {
        let wanted = self.waiting.values().filter(|of| of.is_wanted());
        progress.files = wanted.clone().count() as u64;
        progress.bytes = wanted.clone().filter_map(|of| Some(of.file()?.len)).sum();
        progress.lag_seconds = wanted.map(|of| of.since.elapsed().as_secs()).max();
        let failed = self.waiting.iter().filter_map(|(path, of)| Some((path, of.retry.failed.as_ref()?)));
        progress.failed = failed.take(MOST_NAMED).map(|(path, why)| format!("{}: {why}", path.display())).collect();
    }

    /// Brings files that are to come, for some seconds, and puts a manifest. [`Writer::look`] comes before. `asked`: somebody
    /// waits, so the mirror must answer.
    ///
    /// # Errors
    /// Those of the mirror that are not of one file.
    pub(super) fn round(&mut self, source: &dyn Source, pace: &Pace, asked: bool) -> Result<()> {
        if asked || self.is_due() || !self.states.have(&self.tree) {
            self.states.check()?;
        }
        // Also while puts fail: deleting makes room.
        if self.states.is_due()
            && let Err(error) = self.collect()
        {
            log::warn!("mirror: what nothing needs stays for now: {error}");
        }
        self.push(source, pace);
        self.states.publish(&mut self.tree, pace)
    }

    /// Looks at the names that changed, and enters what the mirror can have. `change`: the store's present one. `asked`:
    /// failed files are tried again now.
    pub(super) fn look(&mut self, source: &dyn Source, change: u64, asked: bool) {
        let is_new = self.change == 0;
        (self.first, self.change) = (self.change + 1, change);
        if asked {
            self.waiting.values_mut().for_each(|of| of.retry.at = None);
        }
        let tree = source.store().tree();
        // A file may be archived, or get another name or mode, while its bytes are on their way: that makes it no later. Of
        // two states of one file, the same time means the same bytes.
        let of_file = |of: &Waiting| Some((of.file()?.attributes.modified_ns, of.change));
        let changes: BTreeSet<(i64, u64)> = self.waiting.values().filter_map(of_file).collect();
        // A file that failed may have changed without a note.
        let is_to_be_looked_at = |of: &Waiting| of.look.is_some() || of.retry.failed.is_some() && of.retry.is_due();
        let also = self.waiting.iter().filter(|(_, of)| is_to_be_looked_at(of)).map(|(path, _)| path.clone());
        let also: Vec<PathBuf> = also.collect();
        let told = source.changed(is_new, also.clone());
        // A name that comes or goes changes the time of its directory.
        let above: BTreeSet<&Path> = told.iter().flat_map(|(path, _)| path.ancestors().skip(1)).collect();
        // One that is new, or could not be listed, is listed.
        let is_new = |path: &Path| self.tree.others(path).is_none() || self.waiting.contains_key(path);
        let above = above.into_iter().map(|path| (path.to_path_buf(), Ok(None), is_new(path))).collect::<Vec<_>>();
        let told = told.into_iter().map(|(path, shape)| (path, shape, true));
        let (mut rest, mut listed): (Vec<_>, _) = (above.into_iter().chain(told).collect(), HashSet::new());
        while let Some((path, shape, is_told)) = rest.pop() {
            let mut seen = shape.and_then(|shape| see(&tree, &path, shape));
            // Another directory may have its place, and of all that is in it only files are told.
            if let (true, Ok(Some(Seen::Other(Node::Directory(..))))) = (is_told, &seen)
                && listed.insert(path.clone())
            {
                rest.extend(self.tree.others(&path).into_iter().flatten().map(|path| (path, Ok(None), true)));
                match entries(&tree, &path) {
                    Ok(entries) => {
                        let others = entries.into_iter().filter(|(_, kind)| !kind.is_file());
                        rest.extend(others.map(|(path, _)| (path, Ok(None), true)));
                    }
                    Err(error) => seen = Err(error),
                }
            }
            self.learn(&path, seen, &changes);
        }
        for path in also {
            self.waiting.entry(path).and_modify(|of| of.look = None);
        }
        self.waiting.retain(|_, of| of.seen.is_some() || of.retry.failed.is_some());
        self.settle(source);
    }

    /// Notes a name as it was seen. One that cannot be looked at is tried again. `changes` has the times of files that wait,
    /// each with their changes.
    fn learn(&mut self, path: &Path, seen: io::Result<Option<Seen>>, changes: &BTreeSet<(i64, u64)>) {
        // If the archive has not told of a file, the note of it is on its way.
        let Some(seen) = seen.transpose() else { return };
        let waiting = self.waiting.entry(path.into()).or_insert_with(|| Waiting::new(None, self.first));
        let first = waiting.look.unwrap_or(self.first);
        match seen {
            Ok(seen) if waiting.seen.as_ref() == Some(&seen) => waiting.change = waiting.change.min(first),
            Ok(seen) => {
                let (look, work) = (waiting.look, waiting.work.take());
                *waiting = Waiting { look, work, ..Waiting::new(Some(seen), first) };
                if let Some(Found { attributes: Attributes { modified_ns, .. }, .. }) = waiting.file() {
                    let same = changes.range((*modified_ns, 0)..=(*modified_ns, u64::MAX)).next();
                    waiting.change = same.map_or(first, |(_, change)| first.min(*change));
                }
            }
            Err(error) => {
                (waiting.seen, waiting.change) = (None, waiting.change.min(first));
                waiting.postpone(path, Some(error.into()));
            }
        }
    }

    /// The bytes of a file, if they are there. The collector may have taken an ancestor of its object meanwhile.
    fn content(&self, found: &Found) -> Option<Content> {
        let content = match found.shape {
            Shape::Object(id) => Content::Object(id, found.len),
            Shape::Newest | Shape::Whole => {
                let (witness, content) = self.known.get(&found.witness.inode)?;
                let is_lossy = |id| self.tree.objects.get(id).is_some_and(|object| object.lossy);
                match content {
                    _ if (*witness, content.len()) != (found.witness, found.len) => return None,
                    Content::Object(id, _) if found.shape == Shape::Whole && is_lossy(id) => return None,
                    content => content.clone(),
                }
            }
            Shape::Stuck | Shape::Unsettled => return None,
        };
        self.tree.has(&content, &|hash| self.states.has(hash)).then_some(content)
    }

    /// The node of a name that waits, if the mirror can have it; `None` inside if the name went.
    fn node(&self, waiting: &Waiting) -> Option<Option<Node>> {
        Some(match waiting.seen.as_ref()? {
            Seen::Nothing => None,
            Seen::Other(node) => Some(node.clone()),
            Seen::File(found) => {
                let Found { attributes, witness, .. } = *found;
                Some(Node::File(File { attributes, content: self.content(found)?, witness }))
            }
        })
    }

    /// Enters all names that the mirror can have as they were seen, but for those that changed since.
    fn settle(&mut self, source: &dyn Source) {
        let changed = source.changed(false, Vec::new());
        let is_quiet = changed.is_empty();
        changed.into_iter().for_each(|(path, _)| self.note(path));
        // With a directory that moved, all below it is told anew.
        let is_noted =
            |path: &Path| path.ancestors().any(|at| self.waiting.get(at).is_some_and(|of| of.look.is_some()));
        let settled = self.waiting.iter().filter(|(path, _)| !is_noted(path));
        let settled = settled.filter_map(|(path, of)| Some((path.clone(), self.node(of)?)));
        let (mut gone, mut renewed) = (Vec::new(), HashMap::new());
        for (path, node) in settled.collect::<Vec<_>>() {
            if node.is_none() {
                gone.push(path);
                continue;
            }
            self.tree.set(&path, node);
            // A file changes under all of its names, and the archive may know of one only.
            if let Some(Found { names: 2.., witness, .. }) = self.waiting.remove(&path).as_ref().and_then(Waiting::file)
            {
                renewed.insert(witness.inode, *witness);
            }
        }
        self.take_away(gone, is_quiet);
        if !renewed.is_empty() {
            let is_former = |node: &Node| matches!(node, Node::File(of) if renewed.get(&of.witness.inode).is_some_and(|witness| *witness != of.witness));
            let former = self.tree.iter().filter(|(_, node)| is_former(node)).map(|(path, _)| path);
            former.collect::<Vec<_>>().into_iter().for_each(|path| self.note(path));
        }
    }

    /// Takes away names that went. A file that moved is never without a name. `is_quiet`: nothing changed meanwhile.
    fn take_away(&mut self, gone: Vec<PathBuf>, is_quiet: bool) {
        let moving: HashSet<u64> = self.waiting.values().filter_map(|of| Some(of.file()?.witness.inode)).collect();
        let is_moving = |node: &Node| matches!(node, Node::File(file) if moving.contains(&file.witness.inode));
        for path in gone {
            let Some(waiting) = self.waiting.get_mut(&path) else { continue };
            if !is_quiet && !std::mem::replace(&mut waiting.is_doubted, true) {
                waiting.look = Some(waiting.change);
            } else if !self.tree.get(&path).is_some_and(is_moving) && !self.tree.below(&path).any(|of| is_moving(of.1))
            {
                self.tree.set(&path, None);
                self.waiting.remove(&path);
            }
        }
    }

    /// Brings the bytes of the newest files that wait for theirs, as many as come in time.
    fn push(&mut self, source: &dyn Source, pace: &Pace) {
        let until = Instant::now() + ROUND;
        let due = self.waiting.iter().filter(|(_, of)| of.is_wanted() && of.retry.is_due());
        let due = due.filter_map(|(path, of)| Some((path, of.file()?)));
        let due = due.filter(|(_, found)| self.content(found).is_none());
        let mut due: Vec<_> = due.map(|(path, found)| (path.clone(), found.clone())).collect();
        // A file travels under one of its names.
        let newest = |(_, found): &(PathBuf, Found)| Reverse((found.attributes.modified_ns, found.witness.inode));
        due.sort_by_key(newest);
        due.dedup_by_key(|(_, found)| found.witness.inode);
        due.truncate(MOST_IN_A_ROUND);
        for some in due.chunks(AT_ONCE) {
            self.push_some(source, pace, some, until);
            if Instant::now() > until {
                break;
            }
        }
        // What a program has opened meanwhile may have been read half written.
        self.settle(source);
    }

    /// Brings the bytes of some files that wait for theirs, side by side.
    fn push_some(&mut self, source: &dyn Source, pace: &Pace, some: &[(PathBuf, Found)], until: Instant) {
        let (mut works, mut coming) = (Vec::new(), HashSet::new());
        for (path, found) in some {
            if pace.is_stopped() || Instant::now() > until && !works.is_empty() {
                break;
            }
            let Some(waiting) = self.waiting.get_mut(path) else { continue };
            let work = match waiting.work.take().filter(|work| work.found == *found) {
                Some(work) => Ok(Some(work)),
                None => Work::begin(source, path, found, &self.tree).map(|work| work.map(Box::new)),
            };
            match work {
                // Another file brings its object now.
                Ok(Some(work)) if work.object.is_some_and(|(id, ..)| !coming.insert(id)) => {}
                Ok(Some(work)) => works.push((path.clone(), work)),
                later => waiting.postpone(path, later.err()),
            }
        }
        self.states.bring(&mut works, pace, until);
        for (path, mut work) in works {
            let witness = work.found.witness;
            if let Some((object, content)) = work.come() {
                // Never another encoding of an object that is there: directories of the mirror need its pieces.
                if let Some(object) = object {
                    self.tree.objects.entry(object.id).or_insert(object);
                }
                self.known.extend(content.map(|content| (witness.inode, (witness, content))));
            } else if let Some(waiting) = self.waiting.get_mut(&path) {
                work.failed.take().into_iter().for_each(|error| waiting.postpone(&path, Some(error)));
                waiting.work = Some(work);
            }
        }
    }

    /// Deletes the states that are too old, and the blobs that nothing needs.
    ///
    /// # Errors
    /// As of [`States::collect`].
    pub(super) fn collect(&mut self) -> Result<()> {
        let listed = self.states.list()?;
        self.lose();
        let works = self.waiting.values().filter_map(|of| of.work.as_deref());
        let on_their_way = works.flat_map(|work| &work.pieces).copied().flatten().collect();
        let collected = self.states.collect(&self.tree, &listed, on_their_way);
        self.lose();
        collected
    }
}
