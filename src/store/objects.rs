//! All objects of a store: which exist, which need which, and which nothing needs.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError, Weak};

use crate::sync::{AtomicBool, Mutex, MutexGuard};

use super::durable::{CrashPoint, Io};
use super::object::{Header, Id, Object, ObjectWriter, path_of};
use super::parallel::in_parallel;

mod elsewhere;
mod graph;
#[cfg(test)]
mod tests;

pub use elsewhere::Elsewhere;
pub use graph::Merge;

/// Longest chain of objects in a read: a published system's. All others have at most 12. A new chain also begins after
/// this many states. A lattice keyframe costs as much as about 32 merged deltas, so longer chains save nothing.
/// (Measured before the first line of code: 4 to 10 bits against 1.9 to 4.0.)
pub const MAX_CHAIN: u32 = 32;

/// Objects removed in one go, so that the archive can do other work in between.
const COLLECT_AT_ONCE: usize = 256;

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

/// The table behind the lock.
#[derive(Debug, Default)]
struct Inside {
    known: HashMap<Id, Known>,
    /// Objects that no file names.
    unnamed: BTreeSet<Id>,
    /// States of a lineage, and of files with the same tensors, by modification time.
    lineages: HashMap<u64, BTreeSet<(i64, Id)>>,
    signatures: HashMap<u64, BTreeSet<(i64, Id)>>,
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
    /// Objects that were taken out, and that [`Objects::remove`] has not removed yet.
    going: HashSet<Id>,
}

impl Inside {
    /// Counts a file that names the object; false if the object is missing.
    fn name(&mut self, id: Id) -> bool {
        let Some(known) = self.known.get_mut(&id) else { return false };
        known.names += 1;
        self.unnamed.remove(&id);
        self.shared.remove(&id);
        self.deferred.remove(&id);
        true
    }
}

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
    /// Objects that a remote has.
    elsewhere: OnceLock<Arc<dyn Elsewhere>>,
    /// An object lost a name since somebody last asked.
    unnamed: AtomicBool,
    /// Held only for single look-ups and changes, never during I/O.
    inside: Mutex<Inside>,
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
        let mut inside = Inside::default();
        let headers = in_parallel(&ids, |id| Object::header_of(&io, directory, *id));
        for (id, found) in ids.into_iter().zip(headers) {
            match found {
                Ok((header, stored)) => inside.insert(header, stored),
                // Removed since its name was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => damaged(id, error),
            }
        }
        inside.connect();
        let (frozen, unnamed) = (AtomicBool::new(false), AtomicBool::new(false));
        let elsewhere = OnceLock::new();
        Ok(Objects { io, directory: directory.to_path_buf(), frozen, unnamed, elsewhere, inside: Mutex::new(inside) })
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens an object; shares one that is already open.
    ///
    /// # Errors
    /// `InvalidData` if the object is damaged, `NotFound` if it is missing.
    pub fn open(&self, id: Id) -> io::Result<Arc<Object>> {
        let open = self.lock().known.get(&id).and_then(|known| known.open.upgrade());
        // If a user removed an object by hand, an open handle must not hide that.
        if let Some(object) = open.filter(|object| object.has_its_name(&self.directory)) {
            return Ok(object);
        }
        let object = Arc::new(Object::open_on(&self.io, &self.directory, id)?);
        if let Some(known) = self.lock().known.get_mut(&id) {
            // Do not share one that was re-parented since it was opened: its parent may be removed at any moment.
            if known.header == *object.header() {
                known.open = Arc::downgrade(&object);
            }
        }
        Ok(object)
    }

    /// Finishes an object and adds it: from here on it exists. The caller must name it, or it is garbage at once.
    ///
    /// # Errors
    /// `NotFound` if its parent is gone. After any error the object does not exist.
    pub fn add(&self, writer: ObjectWriter, header: Header, stored: u64) -> io::Result<()> {
        // The caller holds the parent. Without the parent the object would be unreadable, so it is not added.
        if header.parent.is_some_and(|parent| !self.lock().known.contains_key(&parent)) {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the parent object is gone"));
        }
        writer.finish(&header, &self.directory)?;
        let mut inside = self.lock();
        inside.adopt(header.parent, header.id);
        let id = header.id;
        inside.insert(header, stored);
        inside.name(id);
        Ok(())
    }

    /// Finishes another encoding of an object, as a difference to another parent, and replaces the existing one. Open
    /// handles keep the old encoding and its ancestors.
    ///
    /// # Errors
    /// Device errors; the object then has either encoding, and both decode to the same bytes.
    pub fn replace(&self, writer: ObjectWriter, header: Header, stored: u64) -> io::Result<()> {
        let id = header.id;
        // Before the rename: if it succeeds and a later step fails, the new parent is needed, and perhaps the old one
        // too.
        {
            let mut inside = self.lock();
            inside.adopt(header.parent, id);
            inside.tried.entry(id).or_default().extend(header.parent);
        }
        writer.finish(&header, &self.directory)?;
        let mut inside = self.lock();
        let tried = inside.tried.remove(&id).unwrap_or_default();
        let Some(known) = inside.known.get_mut(&id) else { return Ok(()) };
        known.open = Weak::new();
        known.stored = stored;
        let parent = header.parent;
        let former = std::mem::replace(&mut known.header, header).parent;
        tried
            .into_iter()
            .map(Some)
            .chain([former])
            .filter(|other| *other != parent)
            .for_each(|other| inside.disown(other, id));
        Ok(())
    }

    /// Counts a file that names the object.
    pub fn name(&self, id: Id) {
        let mut inside = self.lock();
        if !inside.name(id) {
            *inside.lost.entry(id).or_default() += 1;
        }
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
        let mut inside = self.lock();
        match inside.known.get_mut(&id) {
            Some(known) => {
                known.names = known.names.saturating_sub(1);
                if known.names > 0 {
                    return;
                }
                inside.unnamed.insert(id);
            }
            None => {
                if let Some(names) = inside.lost.get_mut(&id) {
                    *names = names.saturating_sub(1);
                }
            }
        }
        self.unnamed.store(true, Ordering::Relaxed);
    }

    /// True if an object lost a name since the last call.
    pub fn take_unnamed(&self) -> bool {
        self.unnamed.swap(false, Ordering::Relaxed)
    }

    /// The object's header and size.
    pub fn get(&self, id: Id) -> Option<(Header, u64)> {
        self.lock().known.get(&id).map(|known| (known.header.clone(), known.stored))
    }

    /// True if an object remains after all garbage is removed.
    pub fn stays(&self, id: Id, keep: &HashSet<Id>) -> bool {
        let inside = self.lock();
        let named = inside.known.get(&id).map(|known| known.names > 0);
        named.is_some_and(|named| named || keep.contains(&id) || inside.shared.contains(&id))
    }

    /// Number of objects that a read of this one applies, including itself, as far as its ancestors exist.
    pub fn chain_len(&self, id: Id) -> u32 {
        self.lock().depth(id) + 1
    }

    /// Headers of all objects, in no order.
    pub fn all(&self) -> Vec<Header> {
        self.lock().known.values().map(|known| known.header.clone()).collect()
    }

    /// Headers of the states of a lineage, by modification time.
    pub fn of_lineage(&self, lineage: u64) -> Vec<Header> {
        let inside = self.lock();
        inside.headers(inside.lineages.get(&lineage))
    }

    /// Headers of the states that have the same tensors, by modification time.
    pub fn of_signature(&self, signature: u64) -> Vec<Header> {
        let inside = self.lock();
        inside.headers(inside.signatures.get(&signature))
    }

    /// The newest state of a lineage.
    pub fn newest(&self, lineage: u64) -> Option<Id> {
        self.lock().lineages.get(&lineage)?.last().map(|(_, id)| *id)
    }

    /// Total size of all objects.
    pub fn stored(&self) -> u64 {
        self.lock().known.values().map(|known| known.stored).sum()
    }

    /// Total size of the objects that no file names but that others are differences to.
    pub fn stored_unnamed(&self) -> u64 {
        let inside = self.lock();
        inside.unnamed.iter().filter_map(|id| inside.known.get(id)).map(|known| known.stored).sum()
    }

    /// Stops all removals: some data may need an object without naming it.
    pub fn freeze(&self) {
        self.frozen.store(true, Ordering::Relaxed);
    }

    /// Permits removals again: no such data is left.
    pub fn thaw(&self) {
        self.frozen.store(false, Ordering::Relaxed);
    }

    /// The reason if nothing may be removed: damaged or missing data may need an object without naming it. This ends
    /// when the unreadable files are removed.
    pub fn frozen(&self) -> Option<&'static str> {
        if self.frozen.load(Ordering::Relaxed) {
            return Some("a stub is damaged or unreadable, and the object that it needs is unknown");
        }
        let (lost, is_orphaned) = {
            let inside = self.lock();
            let lost = inside.lost.iter().filter(|(_, names)| **names > 0).map(|(id, _)| *id);
            (lost.collect::<Vec<Id>>(), inside.orphans.iter().any(|id| inside.is_live(*id)))
        };
        // Without the lock: the remote's thread may hold its own for a while.
        let away = |id: &Id| self.elsewhere.get().is_some_and(|elsewhere| elsewhere.has(*id));
        let words = "an object that files need is missing or damaged, and the objects that it needs are unknown";
        (is_orphaned || !lost.iter().all(away)).then_some(words)
    }

    /// Lossy objects that no file names.
    pub fn unnamed_lossy(&self) -> Vec<Id> {
        let inside = self.lock();
        let is_lossy = |id: &&Id| inside.known.get(id).is_some_and(|known| known.header.lossy);
        inside.unnamed.iter().filter(is_lossy).copied().collect()
    }

    /// Takes garbage out of the table: objects that no file names, no object is a difference to, and `keep` does not
    /// hold. Takes a bounded number, each child before its parent. Nobody can name them from here on; the caller
    /// removes them.
    pub fn take_garbage(&self, keep: &HashSet<Id>) -> Vec<Id> {
        match self.frozen() {
            Some(_) => Vec::new(),
            None => self.lock().take_garbage(keep, COLLECT_AT_ONCE),
        }
    }

    /// Removes objects that were taken out; if the device refuses one, [`Io::sweep`] tries again. Open handles stay
    /// readable.
    pub fn remove(&self, garbage: &[Id]) {
        garbage.iter().for_each(|id| self.io.discard(&path_of(&self.directory, *id), CrashPoint::ObjectRemoved));
        let mut inside = self.lock();
        // One that the device refuses to remove stays until `Io::sweep` has removed it.
        inside.going.retain(|id| !garbage.contains(id) || path_of(&self.directory, *id).exists());
    }
}
