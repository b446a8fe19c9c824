//! Objects that only a remote has: they come when a read needs them.

use std::fmt::Debug;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Hold, Objects};
use crate::store::durable::{CrashPoint, DeviceFile, parent};
use crate::store::object::{Id, Object, path_of};
use crate::store::{Damage, beneath};

/// A removal takes as long as its names' fsyncs; after a failure it is tried again within ten seconds.
const REMOVAL: Duration = Duration::from_secs(15);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Where objects may be that the store has not.
pub trait Elsewhere: Send + Sync + Debug {
    /// True if the object and all its ancestors can be brought. Answers at once.
    fn has(&self, id: Id) -> bool;

    /// True if nobody can tell yet, because the remote's names were not read since the start. Answers at once.
    fn may_have(&self, id: Id) -> bool;

    /// True if the object decodes to other bytes than were written. Answers at once; false for an unknown one.
    fn is_lossy(&self, id: Id) -> bool;

    /// Opens the object and its ancestors, the object first, to be read piece by piece. `None` if they are so small
    /// that it is better to bring them. Blocks on the network.
    ///
    /// # Errors
    /// As of [`Elsewhere::bring`].
    fn open(&self, objects: &Arc<Objects>, id: Id) -> io::Result<Option<Vec<Arc<Object>>>>;

    /// Brings the object and its missing ancestors with [`Objects::receive`]. Blocks on the network.
    ///
    /// # Errors
    /// The remote does not answer, or its bytes are not the object's.
    fn bring(&self, objects: &Arc<Objects>, id: Id) -> io::Result<()>;
}

impl Objects {
    /// Names where missing objects may be. Only the first call counts.
    pub fn look_elsewhere(&self, elsewhere: Arc<dyn Elsewhere>) {
        let _ = self.elsewhere.set(elsewhere);
    }

    /// True if only a remote has the object, or may have it: nobody can tell before the remote's names are read.
    pub fn is_elsewhere(&self, id: Id) -> bool {
        let Some(elsewhere) = self.elsewhere.get() else { return false };
        let is_here = self.lock().known.contains_key(&id);
        !is_here && (elsewhere.has(id) || elsewhere.may_have(id))
    }

    /// True if a known object, here or on a remote, decodes to other bytes than were written.
    pub fn is_lossy(&self, id: Id) -> bool {
        match self.get(id) {
            Some((header, _)) => header.lossy,
            None => self.elsewhere.get().is_some_and(|elsewhere| elsewhere.is_lossy(id)),
        }
    }

    /// Brings an object that only a remote has. Does nothing for any other object.
    pub fn bring(self: &Arc<Self>, id: Id) -> io::Result<()> {
        match self.elsewhere.get() {
            Some(elsewhere) if self.is_elsewhere(id) => elsewhere.bring(self, id),
            _ => Ok(()),
        }
    }

    /// Opens an object that only a remote has, with its ancestors, to be read piece by piece. `None` for any other
    /// object, and for a small one: [`Objects::bring`] does for these.
    ///
    /// # Errors
    /// As of [`Elsewhere::open`].
    pub fn open_elsewhere(self: &Arc<Self>, id: Id) -> io::Result<Option<Vec<Arc<Object>>>> {
        match self.elsewhere.get() {
            Some(elsewhere) if self.is_elsewhere(id) => elsewhere.open(self, id),
            _ => Ok(None),
        }
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
        self.wait_until_removed(id)?;
        const WRITTEN: CrashPoint = CrashPoint::ObjectWritten;
        let part = tmp.join(format!("received-{id}"));
        self.io.remove(&part, WRITTEN)?;
        let file = self.io.create(&part, WRITTEN)?;
        let receive = || -> io::Result<()> {
            write(&file)?;
            file.sync(CrashPoint::ObjectCompleted)?;
            let target = path_of(&self.directory, id);
            let shard = parent(&target);
            self.io.make_dirs(shard, 0o700, CrashPoint::ShardMade)?;
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
        let mut inside = self.lock();
        if header.parent.is_some_and(|parent| !inside.known.contains_key(&parent)) {
            drop(inside);
            self.io.discard(&path_of(&self.directory, id), CrashPoint::ObjectRemoved);
            return Err(Damage("its parent was not brought before it").into());
        }
        if !inside.known.contains_key(&id) {
            inside.adopt(header.parent, id);
            inside.insert(header, stored);
        }
        // The names that waited for it, and one for the result.
        let names = inside.lost.remove(&id).unwrap_or_default() + 1;
        (0..names).for_each(|_| {
            inside.name(id);
        });
        drop(inside);
        Ok(Hold { objects: Arc::clone(self), id })
    }
    /// Waits until an object that was garbage is off the device: its removal must not take the new one's name.
    fn wait_until_removed(&self, id: Id) -> io::Result<()> {
        let until = Instant::now() + REMOVAL;
        while self.lock().going.contains(&id) {
            if !path_of(&self.directory, id).exists() {
                self.lock().going.remove(&id);
                break;
            }
            if Instant::now() > until {
                return Err(io::Error::other("the object is being removed; try again"));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }
}
