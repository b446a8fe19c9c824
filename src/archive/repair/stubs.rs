//! Stubs that are damaged, or that carry another store's id, and the object that only can be meant.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::store::durable::{self, CrashPoint, DeviceFile};
use crate::store::object::{Header, Id, path_of};
use crate::store::{Committed, MIN_RELEASE_BYTES, Objects, Prepared, STUB_BYTES, Store, Stub, modified_ns};

use super::super::entry::State;
use super::super::resident::ResidentReason;
use super::super::scan::FoundFile;
use super::remains::open_plain;

/// A regular file of the tree.
pub(super) enum Seen {
    /// It names an object.
    Released(Stub),
    /// It has its own bytes.
    Resident,
    /// A damaged stub: why, and the stub that it was, if only one can be meant.
    Damaged(String, Option<Stub>),
}

/// Looks at the file at this path inside the tree.
///
/// # Errors
/// The device's errors.
pub(super) fn look(store: &Store, headers: &[Header], path: &Path) -> io::Result<Seen> {
    let file = open_plain(store.io(), &store.tree().join(path))?;
    let words = match Stub::read_on(&file, store.id()) {
        Ok(Some(stub)) => return Ok(Seen::Released(stub)),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => error.to_string(),
        Err(error) => return Err(error),
        Ok(None) => match (Stub::foreign(&file, store.id())?, zeroed(headers, &file)?) {
            (Some(stub), _) if path_of(&store.objects(), stub.object).exists() => {
                "its object is here, but its stub has another id than `store` in stepfs.toml".into()
            }
            (_, Some(id)) => {
                format!("its stub was overwritten: it reads as zeros, and object {id} has its length and time")
            }
            _ => return Ok(Seen::Resident),
        },
    };
    Ok(Seen::Damaged(words, meant(store, headers, &file)?))
}

/// The object of a file whose stub became zeros. The file has at most one block, and only zeros. Exactly one object has
/// its length and its modification time in nanoseconds.
fn zeroed(headers: &[Header], file: &DeviceFile) -> io::Result<Option<Id>> {
    let metadata = file.metadata()?;
    if !is_block(&metadata) {
        return Ok(None);
    }
    let of_file =
        |header: &&Header| (header.logical_len, header.modified_ns) == (metadata.len(), modified_ns(&metadata));
    let Some(id) = only(headers.iter().filter(of_file)) else { return Ok(None) };
    let mut block = [0; STUB_BYTES];
    file.read_exact_at(&mut block, 0)?;
    Ok((block == [0; STUB_BYTES]).then_some(id))
}

/// True if a file takes as little room as a stub.
fn is_block(metadata: &Metadata) -> bool {
    metadata.len() >= MIN_RELEASE_BYTES && metadata.blocks() * 512 <= STUB_BYTES as u64
}

/// The stub that a damaged one was.
fn meant(store: &Store, headers: &[Header], file: &DeviceFile) -> io::Result<Option<Stub>> {
    let logical_len = file.metadata()?.len();
    let stub = |object| Stub { store: store.id(), object, logical_len };
    let mut block = [0; STUB_BYTES];
    file.read_exact_at(&mut block, 0)?;
    // It has the id of an object of this length; or the checksum of a stub that names one.
    let fits = |header: &&Header| header.logical_len == logical_len && stub(header.id).resembles(&block);
    let id = match zeroed(headers, file)? {
        Some(id) => Some(id),
        None => only(headers.iter().filter(fits)),
    };
    Ok(id.map(stub))
}

/// The id of the one object, if it is one.
fn only<'a>(mut headers: impl Iterator<Item = &'a Header>) -> Option<Id> {
    headers.next().filter(|_| headers.next().is_none()).map(|header| header.id)
}

/// Replaces a damaged file by a stub, and sets the file aside.
///
/// # Errors
/// The device's errors. The file has not changed then.
pub(super) fn replace(store: &Store, path: &Path, stub: &Stub) -> io::Result<()> {
    let absolute = store.tree().join(path);
    super::set_aside(store, &absolute)?;
    // After that, which changed its change time and number of names.
    let metadata = fs::symlink_metadata(&absolute)?;
    let changed = || io::Error::other("it was changed meanwhile");
    let prepared = Prepared::new(store, path, &metadata, stub)?.ok_or_else(changed)?;
    if prepared.commit(&absolute)? != Committed::Done {
        return Err(changed());
    }
    store.io().sync_dir(durable::parent(&absolute), CrashPoint::RepairInPlace)
}

/// The object of a regular file that was a stub and became zeros.
pub fn lost_stub(objects: &Objects, file: &DeviceFile) -> io::Result<Option<Id>> {
    match is_block(&file.metadata()?) {
        true => zeroed(&objects.all(), file),
        false => Ok(None),
    }
}

/// Tells sparse files from files that lost their stubs. Objects of lost stubs must not be removed.
pub(in crate::archive) fn find_lost_stubs(store: &Store, objects: &Objects, found: &mut [FoundFile]) {
    let is_hole = |state: &State| matches!(state, State::Resident(ResidentReason::Hole));
    let mut holes = found.iter_mut().filter(|file| is_hole(&file.state)).peekable();
    let headers = if holes.peek().is_some() { objects.all() } else { Vec::new() };
    for FoundFile { path, state, .. } in holes {
        let file = open_plain(store.io(), &store.tree().join(&*path));
        *state = match file.and_then(|file| zeroed(&headers, &file)) {
            Ok(Some(id)) => {
                log::error!(
                    "{}: its stub, of object {id}, was overwritten; run `stepfs verify --repair`",
                    path.display()
                );
                State::Resident(ResidentReason::DamagedStub)
            }
            _ => State::Closed,
        };
    }
}
