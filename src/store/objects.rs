//! All objects of a store: which there are, which need which, and which nobody needs.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};

use crate::sync::{AtomicBool, Mutex, MutexGuard};

use super::durable::{CrashPoint, Io};
use super::object::{DEVELOPMENT, Header, Id, Object, ObjectWriter, path_of};
use super::parallel::in_parallel;

mod graph;
#[cfg(test)]
mod tests;

pub use graph::Merge;

/// Longest chain of objects that is read: a published system's. All others have at most 12. Also the
/// number of states after which a new chain begins: a lattice keyframe costs about as much as 32 merged deltas (facts
/// measured before the first line of code: 4 to 10 bits against 1.9 to 4.0), so longer ones save nothing.
pub const MAX_CHAIN: u32 = 32;

/// Objects removed in one go: the archive has other things to do between.
const COLLECT_AT_ONCE: usize = 256;

#[derive(Debug)]
struct Known {
    header: Header,
    stored: u64,
    /// Files that name it.
    names: u32,
    /// Objects that are differences to it.
    children: Vec<Id>,
    /// Open at the moment, perhaps.
    open: Weak<Object>,
}

/// The table behind the lock.
#[derive(Debug, Default)]
struct Inside {
    known: HashMap<Id, Known>,
    /// Those that no file names.
    unnamed: BTreeSet<Id>,
    /// States of a lineage, and of files with the same tensors, by modification time.
    lineages: HashMap<u64, BTreeSet<(i64, Id)>>,
    signatures: HashMap<u64, BTreeSet<(i64, Id)>>,
    /// Files that name an object that is not there, or cannot be read.
    lost: HashMap<Id, u32>,
    /// Objects whose parent is not there, or cannot be read.
    orphans: HashSet<Id>,
    /// Nobody names them, but what they are the base of would take more room without them than with them.
    shared: HashSet<Id>,
    /// Nobody names them, and merging would free too little for what it writes: more must go first.
    deferred: HashSet<Id>,
    /// Parents that an object may have on the device, though it failed to get them.
    tried: HashMap<Id, Vec<Id>>,
}

impl Inside {
    /// A file names an object; false: it is not there.
    fn name(&mut self, id: Id) -> bool {
        let Some(known) = self.known.get_mut(&id) else { return false };
        known.names += 1;
        self.unnamed.remove(&id);
        self.shared.remove(&id);
        self.deferred.remove(&id);
        true
    }
}

/// Whether an object could not be read because a development version wrote it.
fn is_of_development(error: &io::Error) -> bool {
    error.get_ref().and_then(|inner| inner.downcast_ref()) == Some(&DEVELOPMENT)
}

/// Keeps an object, and all that it is a difference to, from being removed.
#[derive(Debug)]
pub struct Hold {
    objects: Arc<Objects>,
    id: Id,
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
    /// Not everything that may need an object is known: nothing is removed.
    frozen: AtomicBool,
    /// Taken for single look-ups and changes only; never while a device is waited for.
    inside: Mutex<Inside>,
}

impl Objects {
    /// Reads the headers of all objects below `directory`. An object that cannot be read is reported to `damaged`
    /// and left alone: the files that name it answer with EIO, and `verify` says why.
    ///
    /// # Errors
    /// What the device reports about the directories; `InvalidData` if a development version wrote the store.
    pub fn load(directory: &Path, damaged: impl FnMut(Id, io::Error)) -> io::Result<Objects> {
        Objects::load_on(Io::disk(), directory, damaged)
    }

    /// [`Objects::load`] from another device than the disk.
    ///
    /// # Errors
    /// What the device reports about the directories.
    pub fn load_on(io: Io, directory: &Path, mut damaged: impl FnMut(Id, io::Error)) -> io::Result<Objects> {
        let mut ids = Vec::new();
        let shards = match fs::read_dir(directory) {
            // A store that was copied without it: its files say what they miss.
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
        let headers = in_parallel(&ids, |id| Object::header_on(&io, directory, *id));
        for (id, found) in ids.into_iter().zip(headers) {
            match found {
                Ok((header, stored)) => inside.insert(header, stored),
                // Removed since its name was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if is_of_development(&error) => return Err(error),
                Err(error) => damaged(id, error),
            }
        }
        inside.connect();
        let frozen = AtomicBool::new(false);
        Ok(Objects { io, directory: directory.to_path_buf(), frozen, inside: Mutex::new(inside) })
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens an object; one that is open already is shared.
    ///
    /// # Errors
    /// What the device reports; `InvalidData` when the object is damaged, `NotFound` when it is not there.
    pub fn open(&self, id: Id) -> io::Result<Arc<Object>> {
        let open = self.lock().known.get(&id).and_then(|known| known.open.upgrade());
        // Whoever removes an object by hand must not be told that it is there as long as somebody has it open.
        if let Some(object) = open.filter(|object| object.has_its_name(&self.directory)) {
            return Ok(object);
        }
        let object = Arc::new(Object::open_on(&self.io, &self.directory, id)?);
        if let Some(known) = self.lock().known.get_mut(&id) {
            // Not one that was re-parented since it was opened: its parent may go any moment.
            if known.header == *object.header() {
                known.open = Arc::downgrade(&object);
            }
        }
        Ok(object)
    }

    /// Finishes an object and adds it: from here on it exists, and its caller names it, or it would be garbage at once.
    ///
    /// # Errors
    /// What the device reports; `NotFound` when the object before it is gone. The object then does not exist.
    pub fn add(&self, writer: ObjectWriter, header: Header, stored: u64) -> io::Result<()> {
        // Its caller holds the parent. An object without one could never be read: better none than that.
        if header.parent.is_some_and(|parent| !self.lock().known.contains_key(&parent)) {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the state before is gone"));
        }
        writer.finish(&header, &self.directory)?;
        let mut inside = self.lock();
        inside.adopt(header.parent, header.id);
        let id = header.id;
        inside.insert(header, stored);
        inside.name(id);
        Ok(())
    }

    /// Finishes another encoding of an object, as a difference to another parent, and puts it in the place of the one
    /// there is. Whoever has that open keeps it, and its ancestors.
    ///
    /// # Errors
    /// What the device reports; the object then has either encoding, and both decode to the same.
    pub fn replace(&self, writer: ObjectWriter, header: Header, stored: u64) -> io::Result<()> {
        let id = header.id;
        // Before: where the rename succeeds and what follows it fails, the new parent is needed, and so may be the old one.
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

    /// A file names the object.
    pub fn name(&self, id: Id) {
        let mut inside = self.lock();
        if !inside.name(id) {
            *inside.lost.entry(id).or_default() += 1;
        }
    }

    /// Names the object for a caller who found it a moment ago, if it is still there: garbage is collected meanwhile.
    #[must_use]
    pub fn try_name(&self, id: Id) -> bool {
        self.lock().name(id)
    }

    /// Names the object until the answer is dropped; `None`: it is not there any more.
    pub fn hold(self: &Arc<Self>, id: Id) -> Option<Hold> {
        self.try_name(id).then(|| Hold { objects: Arc::clone(self), id })
    }

    /// A file names the object no more.
    pub fn unname(&self, id: Id) {
        let mut inside = self.lock();
        match inside.known.get_mut(&id) {
            Some(known) => {
                known.names = known.names.saturating_sub(1);
                if known.names == 0 {
                    inside.unnamed.insert(id);
                }
            }
            None => {
                if let Some(names) = inside.lost.get_mut(&id) {
                    *names = names.saturating_sub(1);
                }
            }
        }
    }

    /// The object's header and the bytes it occupies.
    pub fn get(&self, id: Id) -> Option<(Header, u64)> {
        self.lock().known.get(&id).map(|known| (known.header.clone(), known.stored))
    }

    /// Whether an object will still be there when all that can go has gone.
    pub fn stays(&self, id: Id, keep: &HashSet<Id>) -> bool {
        let inside = self.lock();
        let named = inside.known.get(&id).map(|known| known.names > 0);
        named.is_some_and(|named| named || keep.contains(&id) || inside.shared.contains(&id))
    }

    /// Objects that a read of this one applies, itself among them; as far as its ancestors are there.
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

    /// Bytes that all objects occupy.
    pub fn stored(&self) -> u64 {
        self.lock().known.values().map(|known| known.stored).sum()
    }

    /// Bytes of the objects that no file names: differences of others are taken to them.
    pub fn stored_unnamed(&self) -> u64 {
        let inside = self.lock();
        inside.unnamed.iter().filter_map(|id| inside.known.get(id)).map(|known| known.stored).sum()
    }

    /// Removes nothing from now on: something was found that may need an object that it cannot name.
    pub fn freeze(&self) {
        self.frozen.store(true, Ordering::Relaxed);
    }

    /// Nothing is there any more that may need an object which it cannot name.
    pub fn thaw(&self) {
        self.frozen.store(false, Ordering::Relaxed);
    }

    /// Why nothing may be removed, if so: what is damaged or missing may need an object that it cannot name. That ends
    /// when the files that cannot be read for it are removed.
    pub fn frozen(&self) -> Option<&'static str> {
        if self.frozen.load(Ordering::Relaxed) {
            return Some("a stub is damaged or unreadable, and what it needs cannot be known");
        }
        let inside = self.lock();
        let lost = inside.lost.values().any(|names| *names > 0) || inside.orphans.iter().any(|id| inside.is_live(*id));
        lost.then_some("an object that files need is missing or damaged, and what it needs cannot be known")
    }

    /// Takes out of the table what no file names, no object is a difference to, and `keep` does not hold; a bounded number
    /// at once, a child before its parent. Nobody can name them from here on, and the caller removes them.
    pub fn take_garbage(&self, keep: &HashSet<Id>) -> Vec<Id> {
        match self.frozen() {
            Some(_) => Vec::new(),
            None => self.lock().take_garbage(keep, COLLECT_AT_ONCE),
        }
    }

    /// Removes objects that were taken out, those that the device does not let go later ([`Io::sweep`]). Those that are
    /// open stay readable for whoever has them open.
    pub fn remove(&self, garbage: &[Id]) {
        garbage.iter().for_each(|id| self.io.discard(&path_of(&self.directory, *id), CrashPoint::ObjectRemoved));
    }
}
