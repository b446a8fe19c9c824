//! The archive's requests to the part that serves the files.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use rustix::fs::{AtFlags, StatxFlags, makedev};

use crate::store::durable::{CrashPoint, Io};
use crate::store::{Store, beneath};
use crate::sync::{Mutex, MutexGuard};

pub(crate) use crate::store::found_at;

/// Which file of the store's tree is meant: a path may be given to another file meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Device of the file in the store.
    pub dev: u64,
    /// Inode number of the file in the store.
    pub ino: u64,
}

impl FileId {
    /// The file that `metadata` describe.
    pub fn of(metadata: &fs::Metadata) -> FileId {
        FileId { dev: metadata.dev(), ino: metadata.ino() }
    }

    /// The file that is open. It stays the same one, so no server is asked.
    ///
    /// # Errors
    /// Device errors.
    pub fn of_open(file: &fs::File) -> io::Result<FileId> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let found = rustix::fs::statx(file, "", flags, StatxFlags::INO)?;
        Ok(FileId { dev: makedev(found.stx_dev_major, found.stx_dev_minor), ino: found.stx_ino })
    }
}

/// How an attempt to replace a file ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The file was replaced (or may be, for [`Namespace::idle`]).
    Done,
    /// A handle or mapping is open; [`super::Archive::closed`] or [`super::Archive::sealed`] tells when it is worth
    /// another try.
    Busy,
    /// That path is no longer that file.
    Changed,
}

impl Outcome {
    /// `replaced`: the answer of `commit` in [`Namespace::exclusively`].
    pub(crate) fn of_commit(replaced: bool) -> Outcome {
        if replaced { Outcome::Done } else { Outcome::Changed }
    }
}

/// See [`Namespace::exclusively`].
pub type Commit<'a> = dyn FnMut(&Path) -> io::Result<bool> + 'a;

/// The part that serves the tree while the archive works on it: the mount, or [`AtRest`].
pub trait Namespace: Send + Sync {
    /// Whether no handle is open on the file.
    fn idle(&self, path: &Path, expect: FileId) -> Outcome;

    /// Runs `commit` with the file's absolute path. Meanwhile no handle is open on it, none can be opened, and no
    /// name in its directory can change. `commit` replaces the file by another with the same attributes (one rename),
    /// and returns whether it did: `Changed` if not.
    ///
    /// # Errors
    /// Those of `commit`. Then nothing has changed.
    fn exclusively(&self, path: &Path, expect: FileId, commit: &mut Commit<'_>) -> io::Result<Outcome>;

    /// Removes a name of a file (or of anything but a directory) if `still` returns true. Meanwhile no program can
    /// open or change the file. Programs that have it open keep it. `Busy`: a program is about to write to it.
    fn remove(&self, path: &Path, expect: FileId, still: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<Outcome>;

    /// Removes a directory. `Busy`: there is something in it.
    fn remove_directory(&self, path: &Path, expect: FileId) -> io::Result<Outcome>;
}

/// Removes a directory of a tree, for a [`Namespace`] that has no mount.
pub(super) fn remove_directory(tree: &Path, io: &Io, path: &Path, expect: FileId) -> io::Result<Outcome> {
    match found_at(tree, path)? {
        Some(found) if FileId::of(&found) == expect && found.is_dir() => {
            let at = beneath::reach(tree, path)?;
            unless_occupied(io.device().remove_dir(&at, CrashPoint::NameRemoved))
        }
        _ => Ok(Outcome::Changed),
    }
}

/// The answer to an attempt to remove a directory that may have something in it.
pub(crate) fn unless_occupied(result: io::Result<()>) -> io::Result<Outcome> {
    match result {
        Ok(()) => Ok(Outcome::Done),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTEMPTY | libc::EEXIST)) => Ok(Outcome::Busy),
        Err(error) => Err(error),
    }
}

/// The namespace of a store that is not mounted: the store's lock keeps other processes away.
#[derive(Debug)]
pub struct AtRest {
    tree: PathBuf,
    io: Io,
    /// An encoder takes it while it replaces a file, the housekeeper while it removes one. Otherwise a stub could
    /// take the name of a file that retention has just removed. It may be held across those calls: no other thread
    /// waits for it.
    turn: Mutex<()>,
}

impl AtRest {
    /// Of a store that the caller has locked.
    pub fn of(store: &Store) -> AtRest {
        AtRest { tree: store.tree(), io: store.io().clone(), turn: Mutex::new(()) }
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file at a path now, if it is the expected one.
    fn found(&self, path: &Path, expect: FileId) -> io::Result<Option<fs::Metadata>> {
        Ok(found_at(&self.tree, path)?.filter(|found| FileId::of(found) == expect))
    }
}

impl Namespace for AtRest {
    fn idle(&self, _: &Path, _: FileId) -> Outcome {
        Outcome::Done
    }

    fn exclusively(&self, path: &Path, expect: FileId, commit: &mut Commit<'_>) -> io::Result<Outcome> {
        let _turn = self.turn();
        match self.found(path, expect)? {
            Some(_) => commit(&beneath::reach(&self.tree, path)?).map(Outcome::of_commit),
            None => Ok(Outcome::Changed),
        }
    }

    fn remove(&self, path: &Path, expect: FileId, still: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<Outcome> {
        let _turn = self.turn();
        match self.found(path, expect)? {
            Some(found) if !found.is_dir() && still()? => {
                let at = beneath::reach(&self.tree, path)?;
                self.io.device().remove_file(&at, CrashPoint::NameRemoved).map(|()| Outcome::Done)
            }
            _ => Ok(Outcome::Changed),
        }
    }

    fn remove_directory(&self, path: &Path, expect: FileId) -> io::Result<Outcome> {
        let _turn = self.turn();
        remove_directory(&self.tree, &self.io, path, expect)
    }
}
