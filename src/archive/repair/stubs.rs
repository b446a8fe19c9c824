//! Repairs stubs that are damaged, or that carry another store's id. The object follows if only one fits.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::store::durable::{self, CrashPoint, DeviceFile};
use crate::store::object::{Header, Id};
use crate::store::{Committed, MIN_RELEASE_BYTES, Objects, Prepared, STUB_BYTES, Store, Stub};

use super::super::catalog::{State, modified_ns};
use super::super::resident::ResidentReason;
use super::damaged_object::open_plain;

/// Objects by length and modification time of their files.
pub(super) struct ByTime {
    objects: HashMap<(u64, i64), Vec<Id>>,
    headers: Vec<Header>,
}

impl ByTime {
    pub(super) fn of(objects: &Objects) -> ByTime {
        let headers = objects.all();
        let mut by_time: HashMap<(u64, i64), Vec<Id>> = HashMap::new();
        for header in &headers {
            by_time.entry((header.logical_len, header.modified_ns)).or_default().push(header.id);
        }
        ByTime { objects: by_time, headers }
    }

    /// [`ByTime::object_of`] the file at this path inside the tree, if it is one that can be read.
    pub(super) fn lost_stub(&self, store: &Store, path: &Path) -> Option<Id> {
        let file = open_plain(store.io(), &store.tree().join(path)).ok()?;
        self.object_of(&file).ok().flatten()
    }

    /// The object of a file whose stub became zeros. The file has at most one block, and only zeros. Exactly one
    /// object has its length and its modification time in nanoseconds.
    pub(super) fn object_of(&self, file: &DeviceFile) -> io::Result<Option<Id>> {
        let metadata = file.metadata()?;
        if metadata.len() < MIN_RELEASE_BYTES || metadata.blocks() * 512 > STUB_BYTES as u64 {
            return Ok(None);
        }
        let ids = self.objects.get(&(metadata.len(), modified_ns(&metadata))).map_or(&[][..], Vec::as_slice);
        let mut block = [0; STUB_BYTES];
        file.read_exact_at(&mut block, 0)?;
        Ok(
            if let [id] = ids
                && block.iter().all(|byte| *byte == 0)
            {
                Some(*id)
            } else {
                None
            },
        )
    }

    /// The stub that a damaged one was, if only one can be meant.
    pub(super) fn stub(&self, store: &Store, path: &Path) -> io::Result<Option<Stub>> {
        let file = open_plain(store.io(), &store.tree().join(path))?;
        let metadata = file.metadata()?;
        let len = metadata.len();
        let mut block = [0; STUB_BYTES];
        if len < STUB_BYTES as u64 {
            return Ok(None);
        }
        file.read_exact_at(&mut block, 0)?;
        if block.iter().all(|byte| *byte == 0) {
            return Ok(self.lost_stub(store, path).map(|object| Stub { store: store.id(), object, logical_len: len }));
        }
        let candidates = self.headers.iter().filter(|header| header.logical_len == len);
        let stub = |header: &Header| Stub { store: store.id(), object: header.id, logical_len: len };
        // It has the id of an object of this length; or the checksum of a stub that names one.
        let meant = |header: &&Header| stub(header).resembles(&block);
        let mut all = candidates.filter(meant);
        Ok(match (all.next(), all.next()) {
            (Some(header), None) => Some(stub(header)),
            _ => None,
        })
    }
}

/// Replaces a damaged file by a stub, and sets the file aside.
///
/// # Errors
/// The device's errors. The file has not changed then.
pub(super) fn replace(store: &Store, path: &Path, stub: &Stub) -> io::Result<()> {
    let absolute = store.tree().join(path);
    let metadata = fs::symlink_metadata(&absolute)?;
    super::set_aside(store, &absolute)?;
    // Its change time and number of names were changed by that.
    let metadata = fs::symlink_metadata(&absolute).unwrap_or(metadata);
    let changed = || io::Error::other("it was changed meanwhile");
    let prepared = Prepared::new(store, path, &metadata, stub)?.ok_or_else(changed)?;
    if prepared.commit(&absolute)? != Committed::Done {
        return Err(changed());
    }
    store.io().sync_dir(durable::parent(&absolute), CrashPoint::RepairInPlace)
}

/// The object of a regular file that was a stub and became zeros.
pub fn lost_stub(objects: &Objects, file: &DeviceFile) -> io::Result<Option<Id>> {
    match file.metadata()?.blocks() * 512 <= STUB_BYTES as u64 {
        true => ByTime::of(objects).object_of(file),
        false => Ok(None),
    }
}

/// Tells sparse files from files that lost their stubs. Objects of lost stubs must not be removed.
pub(in crate::archive) fn find_lost_stubs(
    store: &Store,
    objects: &Objects,
    found: &mut [(PathBuf, io::Result<State>)],
) {
    let mut holes =
        found.iter_mut().filter(|(_, state)| matches!(state, Ok(State::Resident(ResidentReason::Hole)))).peekable();
    if holes.peek().is_none() {
        return;
    }
    let by_time = ByTime::of(objects);
    for (path, state) in holes {
        *state = Ok(match by_time.lost_stub(store, path) {
            Some(id) => {
                log::error!(
                    "{}: its stub, of object {id}, was overwritten; run `stepfs verify --repair`",
                    path.display()
                );
                State::Resident(ResidentReason::DamagedStub)
            }
            None => State::Closed,
        });
    }
}
