//! The one way in which stepfs replaces or removes a file of a shared store.
//!
//! 1. A *fence* is put up: `replacing/INODE/UNIQUE/`. The replacement is made ready in it.
//! 2. The file is locked against all others, on the description that [`Take::of`] opens.
//! 3. Its name is looked up again, in its directory opened anew. What was made ready for must still be there.
//! 4. One rename puts the replacement in place, or moves the name behind the fence.
//!
//! Whoever changes the file itself takes its lock, and then takes down its fences ([`Fences::revoke`]). So the rename of a daemon
//! that was suspended, and lost its lock meanwhile, fails, whatever its clock says.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;

use super::object::Id;
use super::{beneath, locks};

/// Asks again for a name that seems to be missing, once its directory was opened: a network file system may have cached that.
pub fn surely<T>(path: &Path, ask: impl Fn(&Path) -> io::Result<T>) -> io::Result<T> {
    ask(path).or_else(|error| match (error.kind(), path.parent()) {
        (io::ErrorKind::NotFound, Some(above)) if File::open(above).is_ok() => ask(path),
        _ => Err(error),
    })
}

/// Removes a name, and all below it, although others may still write there. Returns once it is gone. Never follows a symlink: another
/// user may have made the store.
pub(super) fn tear_down(path: &Path) -> io::Result<()> {
    let unless_gone = |result: io::Result<()>| match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    };
    loop {
        match surely(path, |path| fs::remove_file(path)) {
            Err(error) if error.raw_os_error() == Some(libc::EISDIR) => {}
            gone => return unless_gone(gone),
        }
        let entries = match fs::read_dir(path) {
            Err(error) => return unless_gone(Err(error)),
            Ok(entries) => entries,
        };
        for entry in entries {
            tear_down(&entry?.path())?;
        }
        match unless_gone(fs::remove_dir(path)) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTEMPTY | libc::EEXIST)) => {}
            gone => return gone,
        }
    }
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

    /// Takes down all fences of a file, but not the caller's own. The caller has the file's lock, so whoever put up another has lost
    /// it, or has not got it.
    pub fn revoke(&self, ino: u64, own: Option<&Fence>) -> io::Result<()> {
        let above = self.of(ino);
        let fences = match surely(&above, |above| fs::read_dir(above)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            fences => fences?,
        };
        for fence in fences {
            let fence = fence?.path();
            if own.is_none_or(|own| own.dir != fence) {
                tear_down(&fence)?;
            }
        }
        let _ = fs::remove_dir(above);
        Ok(())
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

/// A file that nobody else has open, and its name, until this is dropped. Or something that is no regular file.
#[derive(Debug)]
pub struct Taken {
    file: File,
    parent: File,
    name: OsString,
}

impl Taken {
    /// The file's metadata.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
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
        if !leads_to(&self.parent, &self.name, &self.file)? {
            return Ok(false);
        }
        let (path, aside) = (self.path(), fence.dir.join("removed"));
        fs::rename(&path, &aside)?;
        let (moved, own) = (fs::symlink_metadata(&aside)?, self.metadata()?);
        let is_it = (moved.dev(), moved.ino()) == (own.dev(), own.ino());
        if !is_it {
            fs::hard_link(&aside, &path)?;
        }
        Ok(is_it)
    }
}

/// The answer to [`Take::of`].
#[derive(Debug)]
pub enum Take {
    /// It is ours.
    Taken(Taken),
    /// Somebody has it open.
    Busy,
    /// The name leads to another file, or nowhere.
    Gone,
}

impl Take {
    /// Takes the file at a name in a directory to replace or remove it, unless somebody has it open. The caller has put up a
    /// fence before. Nobody writes to what is no regular file, so nobody locks it.
    pub fn of(directory: &File, name: &OsStr) -> io::Result<Take> {
        let parent = open_anew(directory)?;
        let open = |flags| rustix::fs::openat(&parent, name, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
        let found = match open(OFlags::PATH) {
            Err(Errno::NOENT | Errno::STALE) => return Ok(Take::Gone),
            found => File::from(found?),
        };
        if !found.metadata()?.is_file() {
            return Ok(Take::Taken(Taken { file: found, parent, name: name.to_owned() }));
        }
        let file = match open(OFlags::RDWR | OFlags::NONBLOCK) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT | Errno::STALE | Errno::LOOP | Errno::ISDIR | Errno::NXIO) => return Ok(Take::Gone),
            // A file that its owner may not write, and a daemon that is not root; or somebody has a lease for a moment.
            Err(Errno::ACCESS | Errno::TXTBSY | Errno::AGAIN) => return Ok(Take::Busy),
            Err(error) => return Err(error.into()),
        };
        if !locks::alone(&file)? {
            return Ok(Take::Busy);
        }
        if !leads_to(&parent, name, &file)? {
            return Ok(Take::Gone);
        }
        if !locks::has_no_other(&file)? {
            return Ok(Take::Busy);
        }
        Ok(Take::Taken(Taken { file, parent, name: name.to_owned() }))
    }
}

/// Opens a directory anew: a network file system then checks its cache.
pub fn open_anew(directory: &File) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, beneath::by_descriptor(directory), flags, Mode::empty())?.into())
}

/// Whether a name in a directory, opened anew, leads to an open file.
pub fn leads_to(directory: &File, name: &OsStr, file: &File) -> io::Result<bool> {
    let own = match file.metadata() {
        Err(error) if error.raw_os_error() == Some(libc::ESTALE) => return Ok(false),
        own => own?,
    };
    match rustix::fs::statat(open_anew(directory)?, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => Ok(own.nlink() > 0 && (found.st_dev, found.st_ino) == (own.dev(), own.ino())),
        Err(Errno::NOENT | Errno::STALE | Errno::NOTDIR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
