//! The one way in which stepfs replaces or removes a file of a shared store.
//!
//! 1. A *fence* is put up: `replacing/INODE/UNIQUE/`. The replacement is made ready in it.
//! 2. The file is locked against all others, on the description that [`Taken::of`] opens.
//! 3. Its name is looked up again, by what the server says now. What was made ready for must still be there.
//! 4. One rename puts the replacement in place, or moves the name behind the fence.
//!
//! On NFS the file is opened for the lock by a second name ([`open_beside`]): a rename over a name by which this node has a file
//! open is two renames there.
//!
//! Whoever changes the file itself takes its lock, and then takes down its fences ([`Fences::revoke`]). So the rename of a daemon
//! that was suspended, and lost its lock meanwhile, fails, whatever its clock says.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;
use tempfile::TempPath;

use super::engine::Engine;
use super::object::Id;
use super::{beneath, durable, locks};

/// Asks again for a name that seems to be missing, once its directory was opened: a network file system may have cached that.
pub fn surely<T>(path: &Path, ask: impl Fn(&Path) -> io::Result<T>) -> io::Result<T> {
    ask(path).or_else(|error| match (error.kind(), path.parent()) {
        (io::ErrorKind::NotFound, Some(above)) if File::open(above).is_ok() => ask(path),
        _ => Err(error),
    })
}

/// How often, and with which pause, a name is tried again that others write into, or that NFS keeps: one second.
const ROUNDS: u32 = 200;
const PAUSE: Duration = Duration::from_millis(5);

/// Removes a name, and all below it, although others may still write there. Files that a process of this machine has open stay on
/// NFS, with their directories, under names of its own. Never follows a symlink: another user may have made the store.
pub(super) fn tear_down(path: &Path) -> io::Result<()> {
    for _ in 0..ROUNDS {
        if remove(path)? {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Tries once to remove a name, and all below it. Answers whether it is gone.
fn remove(path: &Path) -> io::Result<bool> {
    let removed = match surely(path, |path| fs::remove_file(path)) {
        Err(error) if error.raw_os_error() == Some(libc::EISDIR) => fs::read_dir(path)
            .and_then(|mut entries| entries.try_for_each(|entry| remove(&entry?.path()).map(drop)))
            .and_then(|()| fs::remove_dir(path)),
        removed => removed,
    };
    match removed.map_err(|error| (error.raw_os_error(), error)) {
        Ok(()) | Err((Some(libc::ENOENT), _)) => Ok(true),
        Err((Some(libc::ENOTEMPTY | libc::EEXIST), _)) => Ok(false),
        Err((Some(libc::EBUSY), _)) if path.file_name().is_some_and(Engine::keeps_removed) => Ok(false),
        Err((_, error)) => Err(error),
    }
}

/// Whether a file went, or another one took its place.
pub fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ESTALE))
}

/// The fences of a store.
#[derive(Debug)]
pub struct Fences(PathBuf);

impl Fences {
    /// The name of their directory in a store.
    pub(super) const DIRECTORY: &str = "replacing";

    /// Of the store at `root`.
    pub(super) fn below(root: &Path) -> Fences {
        Fences(root.join(Fences::DIRECTORY))
    }

    fn of(&self, ino: u64) -> PathBuf {
        self.0.join(format!("{ino:x}"))
    }

    /// Puts up a fence for the file with this inode number.
    pub fn raise(&self, ino: u64) -> io::Result<Fence> {
        let above = self.of(ino);
        loop {
            match fs::create_dir(&above) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            let dir = above.join(Id::random()?.to_string());
            match fs::create_dir(&dir) {
                // Another fence of the file was taken down.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                made => return made.map(|()| Fence { dir }),
            }
        }
    }

    /// Takes down all fences of a file. The caller holds the file's lock, so no daemon that put up a fence holds it.
    pub fn revoke(&self, ino: u64) -> io::Result<()> {
        tear_down(&self.of(ino))
    }

    /// Takes down all.
    pub(super) fn clear(&self) -> io::Result<()> {
        fs::read_dir(&self.0)?.try_for_each(|entry| tear_down(&entry?.path()))
    }
}

/// A permission to replace or to remove one file. It ends when somebody else changes the file.
#[derive(Debug)]
pub struct Fence {
    dir: PathBuf,
}

impl Fence {
    /// Where the replacement is made ready.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Takes down all others of the file, whose lock the caller has. `NotFound`: this one was taken down.
    pub fn stand_alone(&self) -> io::Result<()> {
        fs::read_dir(durable::parent(&self.dir))?.try_for_each(|entry| match entry?.path() {
            own if own == self.dir => Ok(()),
            other => tear_down(&other),
        })
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        if let Err(error) = tear_down(&self.dir) {
            log::warn!("{}: cannot be removed: {error}", self.dir.display());
        }
        // Unless there is another fence of this file.
        let _ = self.dir.parent().map(fs::remove_dir);
    }
}

/// Opens the file at a name in a directory, so that another file can take its place while this one is open. `second`: its second name
/// meanwhile, where the file system wants one ([`Store::second_name`](super::Store::second_name)). Close the file first.
pub fn open_beside(
    parent: &File,
    name: &OsStr,
    flags: OFlags,
    second: Option<TempPath>,
) -> rustix::io::Result<(File, Option<TempPath>)> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match &second {
        Some(second) => {
            rustix::fs::linkat(parent, name, CWD, &**second, AtFlags::empty())?;
            rustix::fs::openat(CWD, &**second, flags, Mode::empty())?
        }
        None => rustix::fs::openat(parent, name, flags, Mode::empty())?,
    };
    Ok((file.into(), second))
}

/// A file that nobody else has open, and its name, until this is dropped. Or something that is no regular file.
#[derive(Debug)]
pub struct Taken {
    file: File,
    /// After the file, which is closed first.
    _second: Option<TempPath>,
    metadata: Metadata,
    engine: Engine,
    parent: File,
    name: OsString,
}

impl Taken {
    /// Takes the file at a name in a directory to replace or remove it. The caller has put up a fence before. Nobody writes to what is
    /// no regular file, so nobody locks it. `second`: see [`open_beside`].
    ///
    /// # Errors
    /// `WouldBlock`: somebody has it open. [`is_gone`]: the name leads to another file, or nowhere. Device errors.
    pub fn of(engine: Engine, directory: &File, name: &OsStr, second: Option<TempPath>) -> io::Result<Taken> {
        let (busy, gone) = (|| io::ErrorKind::WouldBlock.into(), || Errno::STALE.into());
        let parent = directory.try_clone()?;
        engine.refresh(&parent, "")?;
        let (found, _) = open_beside(&parent, name, OFlags::PATH, None)?;
        let metadata = found.metadata()?;
        if !metadata.is_file() {
            return Ok(Taken { file: found, _second: None, metadata, engine, parent, name: name.to_owned() });
        }
        let lock = |second| match open_beside(&parent, name, OFlags::RDWR, second) {
            Ok((file, second)) if locks::alone(&file)? => Ok((file, second)),
            // Somebody has it, or a lease for a moment; or its owner may not write it, and this daemon is not root.
            Ok(_) | Err(Errno::ACCESS | Errno::TXTBSY | Errno::AGAIN) => Err(busy()),
            Err(Errno::LOOP | Errno::ISDIR | Errno::NXIO) => Err(gone()),
            Err(error) => Err(error.into()),
        };
        let (mut file, mut named) = lock(None)?;
        // The metadata while the file has one name. A daemon that changes the file from here on takes down the caller's fence.
        let metadata = file.metadata()?;
        if second.is_some() {
            drop(file);
            (file, named) = lock(second)?;
            let known = |of: &Metadata| (of.dev(), of.ino(), of.len(), of.mtime(), of.mtime_nsec());
            if known(&file.metadata()?) != known(&metadata) {
                return Err(gone());
            }
        }
        if !leads_to(engine, &parent, name, &file)? {
            return Err(gone());
        }
        if !locks::has_no_other(&file)? {
            return Err(busy());
        }
        Ok(Taken { file, _second: named, metadata, engine, parent, name: name.to_owned() })
    }

    /// The file's metadata, before it had two names.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The name, wherever its directory is by now.
    pub fn path(&self) -> PathBuf {
        beneath::by_descriptor(&self.parent).join(&self.name)
    }

    /// As if the server had given the lock to somebody else.
    #[cfg(test)]
    pub(super) fn lose_lock(&self) {
        locks::give_up(&self.file);
    }

    /// Moves the name behind the fence, from where it goes. False: it leads to another file by now. If that came at the last moment,
    /// it has its name again: nobody locks what is no regular file, or what the daemon may not open.
    ///
    /// # Errors
    /// `NotFound`: the fence was taken down.
    pub fn remove(&self, fence: &Fence) -> io::Result<bool> {
        if !leads_to(self.engine, &self.parent, &self.name, &self.file)? {
            return Ok(false);
        }
        let (path, aside) = (self.path(), fence.dir.join("removed"));
        fs::rename(&path, &aside)?;
        let (moved, own) = (fs::symlink_metadata(&aside)?, &self.metadata);
        let is_it = (moved.dev(), moved.ino()) == (own.dev(), own.ino());
        if !is_it {
            fs::hard_link(&aside, &path)?;
        }
        Ok(is_it)
    }
}

/// Whether a name in a directory leads to an open file, by what the server says now. The caller has the file's lock.
pub fn leads_to(engine: Engine, directory: &File, name: &OsStr, file: &File) -> io::Result<bool> {
    let leads = || -> io::Result<bool> {
        engine.refresh(directory, "")?;
        let own = engine.ask(file, "", StatxFlags::INO | StatxFlags::NLINK)?;
        let found = rustix::fs::statx(directory, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::INO)?;
        let id = |of: &Statx| (of.stx_dev_major, of.stx_dev_minor, of.stx_ino);
        Ok(own.stx_nlink > 0 && id(&found) == id(&own))
    };
    leads().or_else(|error| if is_gone(&error) { Ok(false) } else { Err(error) })
}
