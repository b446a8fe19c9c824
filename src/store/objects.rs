//! All objects of a store: which there are, which need which, and which nobody needs.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::durable;
use super::object::{Header, Id, Object, ObjectWriter};
use super::parallel::in_parallel;

/// Longest chain of objects that a read may have to apply. A lattice keyframe costs about as much as 32 merged deltas
/// (facts measured before the first line of code: 4 to 10 bits against 1.9 to 4.0), so longer chains save nothing.
pub const MAX_CHAIN: u32 = 32;

#[derive(Debug)]
struct Known {
    header: Header,
    stored: u64,
    /// Files that name it.
    names: u32,
    /// Objects that are differences to it.
    children: u32,
    /// Open at the moment, perhaps.
    open: Weak<Object>,
}

/// The objects of one store.
#[derive(Debug)]
pub struct Objects {
    directory: PathBuf,
    /// Not everything that may need an object is known: nothing is removed.
    frozen: AtomicBool,
    /// Taken for single look-ups and changes only; never while a device is waited for, except to open an object.
    known: Mutex<HashMap<Id, Known>>,
}

impl Objects {
    /// Reads the headers of all objects below `directory`. An object that cannot be read is reported to `damaged`
    /// and left alone: the files that name it answer with EIO, and `verify` says why.
    ///
    /// # Errors
    /// What the device reports about the directories.
    pub fn load(directory: &Path, mut damaged: impl FnMut(Id, io::Error)) -> io::Result<Objects> {
        let mut ids = Vec::new();
        for shard in fs::read_dir(directory)? {
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
        let mut known = HashMap::new();
        let mut frozen = false;
        let headers = in_parallel(&ids, |id| Object::header_of(directory, *id));
        for (id, found) in ids.into_iter().zip(headers) {
            match found {
                Ok((header, stored)) => {
                    known.insert(id, Known { header, stored, names: 0, children: 0, open: Weak::new() });
                }
                // Removed since its name was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // Its parent is not known, and must not go: perhaps the damage can be mended.
                Err(error) => {
                    frozen = true;
                    damaged(id, error);
                }
            }
        }
        let parents: Vec<Id> = known.values().filter_map(|k| k.header.parent).collect();
        for parent in parents {
            if let Some(parent) = known.get_mut(&parent) {
                parent.children += 1;
            }
        }
        let frozen = AtomicBool::new(frozen);
        Ok(Objects { directory: directory.to_path_buf(), frozen, known: Mutex::new(known) })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Id, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens an object; one that is open already is shared.
    ///
    /// # Errors
    /// What the device reports; `InvalidData` when the object is damaged, `NotFound` when it is not there.
    pub fn open(&self, id: Id) -> io::Result<Arc<Object>> {
        if let Some(object) = self.lock().get(&id).and_then(|known| known.open.upgrade()) {
            return Ok(object);
        }
        let object = Arc::new(Object::open(&self.directory, id)?);
        if let Some(known) = self.lock().get_mut(&id) {
            known.open = Arc::downgrade(&object);
        }
        Ok(object)
    }

    /// Finishes an object and adds it: from here on it exists, and nobody names it yet.
    ///
    /// # Errors
    /// What the device reports; the object then does not exist.
    pub fn add(&self, writer: ObjectWriter, header: Header, stored: u64) -> io::Result<()> {
        writer.finish(&header, &self.directory)?;
        let mut known = self.lock();
        if let Some(parent) = header.parent.and_then(|id| known.get_mut(&id)) {
            parent.children += 1;
        }
        known.insert(header.id, Known { header, stored, names: 0, children: 0, open: Weak::new() });
        Ok(())
    }

    /// A file names the object.
    pub fn name(&self, id: Id) {
        if let Some(known) = self.lock().get_mut(&id) {
            known.names += 1;
        }
    }

    /// A file names the object no more.
    pub fn unname(&self, id: Id) {
        if let Some(known) = self.lock().get_mut(&id) {
            known.names = known.names.saturating_sub(1);
        }
    }

    /// The object's header and the bytes it occupies.
    pub fn get(&self, id: Id) -> Option<(Header, u64)> {
        self.lock().get(&id).map(|known| (known.header.clone(), known.stored))
    }

    /// Headers of all objects that `wanted` accepts.
    pub fn find(&self, wanted: impl Fn(&Header) -> bool) -> Vec<Header> {
        self.lock().values().filter(|known| wanted(&known.header)).map(|known| known.header.clone()).collect()
    }

    /// Whether there is an object that `wanted` accepts.
    pub fn any(&self, wanted: impl Fn(&Header) -> bool) -> bool {
        self.lock().values().any(|known| wanted(&known.header))
    }

    /// Bytes that all objects occupy.
    pub fn stored(&self) -> u64 {
        self.lock().values().map(|known| known.stored).sum()
    }

    /// Bytes of the objects that no file names: differences of others are taken to them.
    pub fn stored_unnamed(&self) -> u64 {
        self.lock().values().filter(|known| known.names == 0).map(|known| known.stored).sum()
    }

    /// Removes nothing from now on: something was found that may need an object that it cannot name.
    pub fn freeze(&self) {
        self.frozen.store(true, Ordering::Relaxed);
    }

    /// Removes every object that no file names, no object is a difference to, and `keep` does not ask for. Those that
    /// are open stay readable for whoever has them open. Returns which went.
    ///
    /// # Errors
    /// What the device reports.
    pub fn collect(&self, keep: impl Fn(&Header) -> bool) -> io::Result<Vec<Id>> {
        let mut removed = Vec::new();
        if self.frozen.load(Ordering::Relaxed) {
            return Ok(removed);
        }
        loop {
            let mut known = self.lock();
            let garbage = known.iter().find(|(_, k)| k.names == 0 && k.children == 0 && !keep(&k.header));
            let Some((&id, _)) = garbage else {
                return Ok(removed);
            };
            let parent = known.remove(&id).and_then(|k| k.header.parent);
            if let Some(parent) = parent.and_then(|parent| known.get_mut(&parent)) {
                parent.children = parent.children.saturating_sub(1);
            }
            drop(known);
            durable::remove(&super::object::path_of(&self.directory, id))?;
            removed.push(id);
        }
    }
}
