//! All objects of a store: which exist, which need which, and which nothing needs.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::sync::{AtomicBool, Mutex, MutexGuard};

use super::beneath;
use super::durable::{CrashPoint, DeviceFile, Io, parent};
use super::fence::surely;
use super::object::{Header, Id, Object, ObjectWriter, path_of};
use super::parallel::in_parallel;
use graph::Graph;

mod graph;

pub use graph::Merge;

/// Longest chain of objects in a read: a published system's. All others have at most 12. A new chain also begins after
/// this many states. A lattice keyframe costs as much as about 32 merged deltas, so longer chains save nothing.
/// (Measured before the first line of code: 4 to 10 bits against 1.9 to 4.0.)
pub const MAX_CHAIN: u32 = 32;

/// Objects removed in one go, so that the archive can do other work in between.
const COLLECT_AT_ONCE: usize = 256;
/// A removal takes as long as its names' fsyncs; after a failure it is tried again within ten seconds.
const REMOVAL: Duration = Duration::from_secs(15);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Keeps an object, and all objects that it is a difference to, from being removed.
#[derive(Debug)]
pub struct Hold {
    objects: Arc<Objects>,
    id: Id,
}

impl Hold {
    /// The object.
    pub fn id(&self) -> Id {
        self.id
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.objects.unname(self.id);
    }
}

/// The objects of one store.
#[derive(Debug)]
pub struct Objects {
    io: Io,
    directory: PathBuf,
    /// Some unknown data may need an object, so nothing is removed.
    frozen: AtomicBool,
    /// An object lost a name since somebody last asked.
    unnamed: AtomicBool,
    /// Held only for single look-ups and changes, never during I/O.
    graph: Mutex<Graph>,
    /// In a shared store: the directory of the keeper's epoch.
    through: Option<PathBuf>,
}

impl Objects {
    /// Reads the headers of all objects below `directory`. Reports an unreadable object to `damaged` and leaves it
    /// alone: reads of the files that name it fail with EIO, and `verify` gives the reason.
    ///
    /// # Errors
    /// Device errors of the directories.
    pub fn load(directory: &Path, damaged: impl FnMut(Id, io::Error)) -> io::Result<Objects> {
        Objects::load_on(Io::disk(), directory, damaged)
    }

    /// [`Objects::load`] from another device than the disk.
    pub fn load_on(io: Io, directory: &Path, mut damaged: impl FnMut(Id, io::Error)) -> io::Result<Objects> {
        let mut ids = Vec::new();
        let shards = match fs::read_dir(directory) {
            // The store was copied without this directory; its files report the missing objects.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            shards => Some(shards?),
        };
        for shard in shards.into_iter().flatten() {
            let shard = shard?;
            if !shard.file_type()?.is_dir() {
                continue;
            }
            for entry in fs::read_dir(shard.path())? {
                let Some(id) = entry?.file_name().to_str().and_then(|name| Id::from_str(name).ok()) else {
                    continue;
                };
                ids.push(id);
            }
        }
        let mut graph = Graph::default();
        let headers = in_parallel(&ids, |id| Object::header_of(&io, directory, *id));
        for (id, found) in ids.into_iter().zip(headers) {
            match found {
                Ok((header, stored)) => graph.insert(header, stored),
                // Removed since its name was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => damaged(id, error),
            }
        }
        graph.connect();
        let (frozen, unnamed) = (AtomicBool::new(false), AtomicBool::new(false));
        let (directory, graph) = (directory.to_path_buf(), Mutex::new(graph));
        Ok(Objects { io, directory, frozen, unnamed, graph, through: None })
    }

    /// For a process that only reads objects. It knows none, and finds each when a file needs it.
    pub fn none(io: Io, directory: &Path) -> Objects {
        let (frozen, unnamed) = (AtomicBool::new(false), AtomicBool::new(false));
        let (directory, graph) = (directory.to_path_buf(), Mutex::default());
        Objects { io, directory, frozen, unnamed, graph, through: None }
    }

    /// The same objects, of which each leaves through this directory: without it none is removed.
    #[must_use]
    pub fn removed_through(self, directory: PathBuf) -> Objects {
        Objects { through: Some(directory), ..self }
    }

    fn lock(&self) -> MutexGuard<'_, Graph> {
        self.graph.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens an object; shares one that is already open.
    ///
    /// # Errors
    /// `InvalidData` if the object is damaged, `NotFound` if it is missing.
    pub fn open(&self, id: Id) -> io::Result<Arc<Object>> {
        let open = self.lock().open(id);
        // If a user removed an object by hand, an open handle must not hide that.
        if let Some(object) = open.filter(|object| object.has_its_name(&self.directory)) {
            return Ok(object);
        }
        let object = Arc::new(Object::open_on(&self.io, &self.directory, id)?);
        self.lock().opened(&object);
        Ok(object)
    }

    /// Finishes an object and adds it: from here on it exists. The caller must name it, or it is garbage at once.
    ///
    /// # Errors
    /// `NotFound` if its parent is gone. After any error the object does not exist.
    pub fn add(&self, writer: ObjectWriter, header: Header, stored: u64) -> io::Result<()> {
        // The caller holds the parent. Without the parent the object would be unreadable, so it is not added.
        if header.parent.is_some_and(|parent| !self.lock().has(parent)) {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the parent object is gone"));
        }
        // Another keeper may have removed it, if this one was suspended.
        let is_there = |parent| surely(&path_of(&self.directory, parent), |path| fs::symlink_metadata(path)).is_ok();
        if self.through.is_some() && !header.parent.is_none_or(is_there) {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the parent object is gone"));
        }
        writer.finish(&header, &self.directory)?;
        self.lock().add(header, stored);
        Ok(())
    }

    /// Finishes another encoding of an object, as a difference to another parent, and replaces the existing one. Open
    /// handles keep the old encoding and its ancestors.
    ///
    /// # Errors
    /// Device errors; the object then has either encoding, and both decode to the same bytes.
    pub fn replace(&self, writer: ObjectWriter, header: Header, stored: u64) -> io::Result<()> {
        self.lock().try_parent(&header);
        writer.finish(&header, &self.directory)?;
        self.lock().replace(header, stored);
        Ok(())
    }

    /// Counts a file that names the object.
    pub fn name(&self, id: Id) {
        self.lock().name_or_lose(id);
    }

    /// Names the object for a caller that just found it, if it still exists: it may have been collected since.
    #[must_use]
    pub fn try_name(&self, id: Id) -> bool {
        self.lock().name(id)
    }

    /// Names the object until the result is dropped; `None` if it no longer exists.
    pub fn hold(self: &Arc<Self>, id: Id) -> Option<Hold> {
        self.try_name(id).then(|| Hold { objects: Arc::clone(self), id })
    }

    /// Counts a file that no longer names the object.
    pub fn unname(&self, id: Id) {
        if self.lock().unname(id) {
            self.unnamed.store(true, Ordering::Relaxed);
        }
    }

    /// True if an object lost a name since the last call.
    pub fn take_unnamed(&self) -> bool {
        self.unnamed.swap(false, Ordering::Relaxed)
    }

    /// The object's header and size.
    pub fn get(&self, id: Id) -> Option<(Header, u64)> {
        self.lock().get(id)
    }

    /// True if an object remains after all garbage is removed.
    pub fn stays(&self, id: Id, keep: &HashSet<Id>) -> bool {
        self.lock().stays(id, keep)
    }

    /// Number of objects that a read of this one applies, including itself, as far as its ancestors exist.
    pub fn chain_len(&self, id: Id) -> u32 {
        self.lock().depth(id) + 1
    }

    /// Headers of all objects, in no order.
    pub fn all(&self) -> Vec<Header> {
        self.lock().all()
    }

    /// Headers of the objects that are differences to this one.
    pub fn differences(&self, id: Id) -> Vec<Header> {
        let graph = self.lock();
        graph.headers(graph.children(id).iter())
    }

    /// Headers of the objects that were made from bytes with this sample, or decode to such.
    pub fn of_sample(&self, sample: u64) -> Vec<Header> {
        self.lock().of_sample(sample)
    }

    /// The last state of a lineage that is not newer than this time, else the first after it.
    pub fn nearest(&self, lineage: u64, modified_ns: i64) -> Option<Header> {
        self.lock().nearest(lineage, modified_ns).cloned()
    }

    /// The same of all other lineages whose files have these tensors.
    pub fn nearest_other(&self, signature: u64, lineage: u64, modified_ns: i64) -> Option<Header> {
        self.lock().nearest_other(signature, lineage, modified_ns).cloned()
    }

    /// The newest state of a lineage.
    pub fn newest(&self, lineage: u64) -> Option<Id> {
        self.lock().newest(lineage)
    }

    /// Total size of all objects.
    pub fn stored(&self) -> u64 {
        self.lock().stored()
    }

    /// Total size of the objects that no file names but that others are differences to.
    pub fn stored_unnamed(&self) -> u64 {
        self.lock().stored_unnamed()
    }

    /// Stops all removals, because some data may need an object without naming it; or permits them again.
    pub fn freeze(&self, frozen: bool) {
        self.frozen.store(frozen, Ordering::Relaxed);
    }

    /// The reason if nothing may be removed: damaged or missing data may need an object without naming it. This ends
    /// when the unreadable files are removed.
    pub fn frozen(&self) -> Option<&'static str> {
        if self.frozen.load(Ordering::Relaxed) {
            return Some("a stub is damaged or unreadable, and the object that it needs is unknown");
        }
        let words = "an object that files need is missing or damaged, and the objects that it needs are unknown";
        self.lock().is_missing_some().then_some(words)
    }

    /// Takes garbage out of the table: objects that no file names, no object is a difference to, and `keep` does not
    /// hold, and that `may` go. Takes a bounded number, each child before its parent. Nobody can name them from here on; the caller
    /// removes them.
    pub fn take_garbage(&self, keep: &HashSet<Id>, may: &dyn Fn(Id) -> bool) -> Vec<Id> {
        match self.frozen() {
            Some(_) => Vec::new(),
            None => self.lock().take_garbage(keep, may, COLLECT_AT_ONCE),
        }
    }

    /// Objects that no file names, and that nothing but such objects needs.
    pub fn unneeded(&self, keep: &HashSet<Id>) -> HashSet<Id> {
        self.lock().unneeded(keep)
    }

    /// Removes objects that were taken out; if the device refuses one, [`Io::sweep`] tries again. Open handles stay
    /// readable.
    pub fn remove(&self, garbage: &[Id]) {
        for id in garbage {
            let mut path = path_of(&self.directory, *id);
            if let Some(through) = &self.through {
                let to = through.join(format!("removed-{id}"));
                match self.io.device().rename(&path, &to, CrashPoint::ObjectRemoved) {
                    Ok(()) => path = to,
                    Err(error) => {
                        log::warn!("{}: cannot be removed: {error}", path.display());
                        continue;
                    }
                }
            }
            self.io.discard(&path, CrashPoint::ObjectRemoved);
        }
        // One that the device refuses to remove stays until `Io::sweep` has removed it.
        let gone = garbage.iter().filter(|id| !path_of(&self.directory, **id).exists());
        self.lock().gone(gone.copied().collect::<Vec<_>>());
    }

    /// True if a known object decodes to other bytes than were written.
    pub fn is_lossy(&self, id: Id) -> bool {
        self.get(id).is_some_and(|(header, _)| header.lossy)
    }

    /// Adds an object that `write` writes into an empty file in `tmp`. The object is durable on return, and stays as
    /// long as the result exists or a file names it. The caller has verified the bytes that `write` writes.
    ///
    /// # Errors
    /// Those of `write`; `InvalidData` if it is another object; device errors.
    pub fn receive(
        self: &Arc<Self>,
        tmp: &Path,
        id: Id,
        write: impl FnOnce(&DeviceFile) -> io::Result<()>,
    ) -> io::Result<Hold> {
        if let Some(hold) = self.hold(id) {
            return Ok(hold);
        }
        wait_until_removed(self, id)?;
        const WRITTEN: CrashPoint = CrashPoint::ObjectWritten;
        let part = tmp.join(format!("received-{id}"));
        self.io.remove(&part, WRITTEN)?;
        let file = self.io.create(&part, WRITTEN)?;
        let receive = || -> io::Result<()> {
            write(&file)?;
            file.sync(CrashPoint::ObjectCompleted)?;
            let target = path_of(&self.directory, id);
            let shard = parent(&target);
            // Not the directories above it: a command that is interrupted removes a store that others still receive into.
            self.io.make_dir(shard, 0o700, CrashPoint::ShardMade)?;
            self.io.sync_dir(&self.directory, CrashPoint::ShardMade)?;
            // Never through a symlink.
            let name = Path::new(shard.file_name().unwrap_or_default());
            beneath::open(&self.directory, name, libc::O_PATH | libc::O_DIRECTORY)?;
            self.io.publish(&part, &target, CrashPoint::ObjectInPlace)
        };
        receive().inspect_err(|_| {
            self.io.discard(&part, WRITTEN);
        })?;
        let (header, stored) = Object::header_of(&self.io, &self.directory, id)?;
        let received = self.lock().receive(header, stored);
        if let Err(damage) = received {
            self.io.discard(&path_of(&self.directory, id), CrashPoint::ObjectRemoved);
            return Err(damage.into());
        }
        Ok(Hold { objects: Arc::clone(self), id })
    }

    /// The next merge, and the number of heirs in all waiting merges.
    pub fn next_merge(&self, keep: &HashSet<Id>) -> (Option<Merge>, usize) {
        if self.frozen().is_some() { (None, 0) } else { self.lock().next_merge(keep) }
    }

    /// Other possible parents of a state, with chains no longer than its present parent's and at most `deepest` objects
    /// below them. These are the nearest older states of its lineage, and of the same tensors. After a keyframe was
    /// removed, one of them has its K.
    pub fn siblings(&self, child: Id, deepest: u32, keep: &HashSet<Id>) -> Vec<Id> {
        self.lock().siblings(child, deepest, keep)
    }

    /// True if an object may become a difference to another heir of the same merge. Both must exist, the heir must not
    /// need the object, and the object's chain must not become longer. An heir that is not merged yet will have the
    /// chain of the merge's `above`.
    pub fn can_follow(&self, child: Id, heir: Id, merge: &Merge) -> bool {
        self.lock().can_follow(child, heir, merge)
    }

    /// Number of objects that are differences to this one.
    pub fn children(&self, id: Id) -> usize {
        self.lock().children(id).len()
    }

    /// Postpones the merge of these objects until others beside them lose their names too.
    pub fn defer(&self, ids: &[Id]) {
        self.lock().defer(ids);
    }

    /// Keeps these objects although no file names them: a merge would take more space.
    pub fn share(&self, ids: &[Id]) {
        self.lock().share(ids);
    }
}

/// Waits until an object that was garbage is off the device: its removal must not take the new one's name.
fn wait_until_removed(objects: &Objects, id: Id) -> io::Result<()> {
    let until = Instant::now() + REMOVAL;
    while objects.lock().is_going(id) {
        if !path_of(&objects.directory, id).exists() {
            objects.lock().gone([id]);
            break;
        }
        if Instant::now() > until {
            return Err(io::Error::other("the object is being removed; try again"));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// The first of identical states that many ranks saved; the others become differences to it. Otherwise a chain of twins
/// would be as long as the number of ranks. Bounded: a damaged store may have a cycle.
pub fn first_of_twins(objects: &Objects, state: Header) -> Header {
    let position = state.position;
    let parent = |state: &Header| objects.get(state.parent?).map(|(header, _)| header);
    let twins = std::iter::successors(Some(state.clone()), parent).take(MAX_CHAIN as usize);
    twins.take_while(|twin| twin.position == position).last().unwrap_or(state)
}

#[cfg(test)]
mod tests;
