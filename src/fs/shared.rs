//! A shared store: each call locks the files that it changes, since other daemons change the same tree (`store/fence.rs`).

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fuser::FileType;
use rustix::fs::OFlags;
use tempfile::TempPath;

use super::errno::{Fault, Result};
use super::inodes::{Found, Table};
use super::node::{Handle, Opened, Source};
use super::workers::Workers;
use crate::archive::{Archive, FileId};
use crate::store::durable::CrashPoint;
use crate::store::fence::{Fence, Taken, is_gone, leads_to, open_beside};
use crate::store::{Fingerprint, MIN_RELEASE_BYTES, Store, Stub, locks, replace_taken};

/// How long others hold a file that they replace: a few system calls.
const PAUSE: Duration = Duration::from_millis(2);
/// How long a program waits for a daemon that was suspended while it replaced a file.
const LONGEST: Duration = Duration::from_secs(30);

/// Repeats an operation while another daemon has the file. For a worker. Never answers `Locked`.
pub(super) fn until_free<T>(began: Instant, mut operation: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match operation() {
            Err(Fault::Locked) if began.elapsed() < LONGEST => std::thread::sleep(PAUSE),
            Err(Fault::Locked) => return Err(libc::EBUSY.into()),
            done => return done,
        }
    }
}

/// Does an operation and answers it; from a worker while another daemon has the file. Never answers `Locked`.
pub(super) fn when_free<T>(
    workers: &Workers,
    operation: impl Fn() -> Result<T> + Send + 'static,
    answer: impl FnOnce(Result<T>) + Send + 'static,
) {
    match operation() {
        Err(Fault::Locked) => {
            let began = Instant::now();
            workers.submit(Box::new(move || answer(until_free(began, operation))));
        }
        done => answer(done),
    }
}

/// A file that was opened; none if the daemon may not open it. Then no other daemon of its user replaces it either.
fn readable<T>(opened: io::Result<T>) -> Result<Option<T>> {
    match opened {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        opened => match opened.map_err(Fault::from) {
            Err(fault) if fault.is_loss() => Err(Fault::Locked),
            opened => Ok(Some(opened?)),
        },
    }
}

/// Locks a file until it is closed, unless `check` finds that another one is meant by now. If the caller changes the file, others
/// replace it neither meanwhile, nor by an attempt that began before.
fn lock(store: &Store, file: &File, writes: bool, changes: bool, check: impl FnOnce() -> Result<()>) -> Result<()> {
    // A file that its owner may not read: no daemon of that user archives or replaces it.
    let may_be_none = |error: io::Error| if error.raw_os_error() == Some(libc::EBADF) { Ok(true) } else { Err(error) };
    if !locks::open(file, writes).or_else(may_be_none)? {
        return Err(Fault::Locked);
    }
    check()?;
    if changes {
        store.fences().revoke(FileId::of_open(file)?.ino)?;
    }
    Ok(())
}

/// Checks that a locked file is a node's; with `named`, that it still has the node's name, too.
fn check_node(table: &Table, ino: u64, file: &File, named: bool) -> Result<()> {
    table.require(ino, file)?;
    for (parent, name) in table.node(ino)?.names.iter().filter(|_| named) {
        if !leads_to(table.engine(), &*table.directory(*parent)?, name, file)? {
            // Replaced or renamed since: the kernel looks the name up anew.
            return Err(libc::ESTALE.into());
        }
    }
    Ok(())
}

/// Locks a file while a program changes its attributes or names. The lock ends with the result. Only files that stepfs may replace
/// need it.
pub(super) fn lock_node(store: &Store, table: &Table, ino: u64) -> Result<Option<File>> {
    let node = table.node(ino)?;
    if !table.is_shared() || node.kind != FileType::RegularFile {
        return Ok(None);
    }
    let place = table.place(ino)?;
    if place.metadata()?.len() < MIN_RELEASE_BYTES {
        return Ok(None);
    }
    let Some(file) = readable(place.open(true, false))? else { return Ok(None) };
    // A program may have it open that another one has removed.
    lock(store, &file, false, true, || check_node(table, ino, &file, node.opened.is_none()))?;
    Ok(Some(file))
}

/// Locks the file at a name that a program takes away, or gives to another file.
pub(super) fn lock_name(
    store: &Store,
    table: &Table,
    (parent, name): (u64, &OsStr),
    found: &Found,
) -> Result<Option<(File, Option<TempPath>)>> {
    if !table.is_shared() || !found.metadata.is_file() {
        return Ok(None);
    }
    let directory = table.directory(parent)?;
    let opened = open_beside(&directory, name, OFlags::RDONLY, store.second_name()?);
    let Some((file, second)) = readable(opened.map_err(io::Error::from))? else { return Ok(None) };
    lock(store, &file, false, true, || {
        let is_it = FileId::of_open(&file)? == FileId::of(&found.metadata);
        if is_it && leads_to(store.engine(), &directory, name, &file)? { Ok(()) } else { Err(Fault::Locked) }
    })?;
    Ok(Some((file, second)))
}

/// Locks a file that a program opens.
pub(super) fn lock_open(store: &Store, table: &Table, ino: u64, file: &File, writes: bool) -> Result<()> {
    let check = || check_node(table, ino, file, true);
    if table.is_shared() { lock(store, file, writes, writes, check) } else { Ok(()) }
}

/// Closes a file, whose lock goes with that. If it was written, its bytes become durable first: only this description hears of an
/// error. After an error the lock stays, so no older state is given up for this one.
pub(super) fn give_back(
    archive: &Arc<Archive>,
    workers: &Workers,
    opened: Option<Opened>,
    handle: Option<Arc<Handle>>,
) {
    let source = opened.as_ref().filter(|opened| opened.wrote).map(|opened| opened.source.clone());
    let Some(Source::File(file)) = source else { return };
    if file.metadata().is_ok_and(|metadata| metadata.len() < MIN_RELEASE_BYTES || metadata.nlink() == 0) {
        return;
    }
    let archive = Arc::clone(archive);
    workers.submit(Box::new(move || {
        let _held = (opened, handle);
        // Only a caller of `sync` waits for this lock.
        let _ = locks::closing(&file, false);
        let synced = file.try_clone().and_then(|own| {
            let store = archive.store();
            let own = store.io().adopt(own);
            match Stub::disown(&own, CrashPoint::FileSealed) {
                Err(error) if error.raw_os_error() != Some(libc::EOPNOTSUPP) => Err(error),
                _ => store.sync_written(&own, CrashPoint::FileSealed),
            }
        });
        if let Err(error) = synced {
            log::error!("a file that was written could not be made durable: {error}; save it again");
            let _ = locks::closing(&file, true);
            std::mem::forget(file);
        }
    }));
}

/// Gives a recalled file the stub's name, unless another daemon replaces or changes the stub. `original`: the stub's metadata when the
/// file got its attributes. The caller has the stub not open by its name any more.
pub(super) fn put_in_place(
    store: &Store,
    table: &Table,
    ino: u64,
    original: &Metadata,
    (path, opened): (&Path, &File),
    fence: &Fence,
) -> Result<()> {
    let (parent, name) = table.node(ino)?.names.first().ok_or(Fault::Code(libc::ESTALE))?;
    let taken = match Taken::of(store.engine(), &*table.directory(*parent)?, name, store.second_name()?) {
        Ok(taken) if FileId::of(taken.metadata()) == FileId::of(original) => taken,
        Err(error) if !is_gone(&error) => return Err(error.into()),
        // Another daemon brought it back first, say: the kernel looks the name up anew.
        Ok(_) | Err(_) => return Err(libc::ESTALE.into()),
    };
    // From its first moment under that name it is open to be written, by this node.
    if Fingerprint::of(taken.metadata()) != Fingerprint::of(original) || !locks::open(opened, true)? {
        return Err(Fault::Locked);
    }
    let ready = fence.dir().join("recalled");
    let replaced = fence.stand_alone().and_then(|()| std::fs::rename(path, &ready));
    let replaced = replaced.and_then(|()| replace_taken(store.io(), &ready, &taken));
    // A new keeper takes down all fences.
    replaced.map_err(|error| if error.kind() == io::ErrorKind::NotFound { Fault::Locked } else { error.into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::numbers::ROOT;

    const NAME: &str = "file";

    /// A table of a shared store, with one file and its node.
    struct World {
        _dir: tempfile::TempDir,
        archive: Arc<Archive>,
        table: Table,
        ino: u64,
    }

    impl World {
        fn new() -> World {
            let dir = tempfile::tempdir().unwrap();
            let archive = Archive::open(Store::open(dir.path()).unwrap()).unwrap();
            let table = Table::new(&archive.store().tree(), true).unwrap();
            let mut world = World { _dir: dir, archive, table, ino: 0 };
            world.give_name_to_another();
            world.ino = world.look();
            world
        }

        fn path(&self) -> std::path::PathBuf {
            self.archive.store().tree().join(NAME)
        }

        fn look(&mut self) -> u64 {
            let found = self.table.look(ROOT, OsStr::new(NAME)).unwrap();
            self.table.admit(&self.archive, ROOT, OsStr::new(NAME), &found).unwrap()
        }

        /// As another daemon does.
        fn give_name_to_another(&self) {
            let other = self.path().with_file_name("other");
            std::fs::write(&other, [1; 100_000]).unwrap();
            std::fs::rename(other, self.path()).unwrap();
        }
    }

    /// Another daemon gives a stub a file's name between the look at the name and the open: a program must not get the stub.
    #[test]
    fn a_file_that_took_the_name_is_not_opened() {
        let world = World::new();
        let lock = || {
            let file = File::open(world.path()).unwrap();
            lock_open(world.archive.store(), &world.table, world.ino, &file, false)
        };
        assert!(lock().is_ok());
        world.give_name_to_another();
        assert!(matches!(lock(), Err(Fault::Code(libc::ESTALE))));
    }

    /// The kernel looks up a name anew only once, and a keeper may replace a file by a stub, and that by another, meanwhile.
    #[test]
    fn a_stub_that_was_just_replaced_is_read_all_the_same() {
        let mut world = World::new();
        let object = crate::store::Id::random().unwrap();
        let stub = Stub { store: world.archive.store().id(), object, logical_len: 100_000 };
        world.table.node_mut(world.ino).unwrap().stub = Some(stub);
        assert_eq!(world.look(), world.ino);
        world.give_name_to_another();
        world.table.hold_while_open(world.ino).unwrap();
        assert!(world.table.node(world.ino).unwrap().seen.is_some());
        assert!(
            world.table.metadata(world.ino).is_err_and(|fault| fault.is_loss()),
            "whoever did not open it looks anew"
        );
    }
}
