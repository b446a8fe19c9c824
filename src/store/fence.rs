//! The one way in which stepfs replaces or removes a file of a shared store.
//!
//! 1. A *fence* is put up: `replacing/INODE/UNIQUE/`. The replacement is made ready in it.
//! 2. The file is locked against all others, on the description that [`Take::of`] opens.
//! 3. Its name is looked up again, in its directory opened anew. What was made ready for must still be there.
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

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;

use super::engine::Engine;
use super::object::Id;
use super::{beneath, locks};

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
    let is_kept = || path.file_name().is_some_and(Engine::keeps_removed);
    let gone = |result: io::Result<()>| match result.map_err(|error| (error.raw_os_error(), error)) {
        Ok(()) | Err((Some(libc::ENOENT), _)) => Ok(true),
        Err((Some(libc::ENOTEMPTY | libc::EEXIST), _)) => Ok(false),
        Err((Some(libc::EBUSY), _)) if is_kept() => Ok(false),
        Err((_, error)) => Err(error),
    };
    match surely(path, |path| fs::remove_file(path)) {
        Err(error) if error.raw_os_error() == Some(libc::EISDIR) => {}
        removed => return gone(removed),
    }
    match fs::read_dir(path) {
        Err(error) => return gone(Err(error)),
        Ok(entries) => entries.into_iter().try_for_each(|entry| remove(&entry?.path()).map(drop))?,
    }
    gone(fs::remove_dir(path))
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

/// A second name of a file, until this is dropped. The file is closed before.
#[derive(Debug)]
pub struct Second(PathBuf);

impl Drop for Second {
    fn drop(&mut self) {
        // What stays goes when its directory does.
        let _ = fs::remove_file(&self.0);
    }
}

/// Opens the file at a name in a directory, so that another file can take its place while this one is open. `aside`: its second
/// name meanwhile, where the file system wants one ([`Store::second_name`](super::Store::second_name)).
pub fn open_beside(
    parent: &File,
    name: &OsStr,
    flags: OFlags,
    aside: Option<PathBuf>,
) -> io::Result<(File, Option<Second>)> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Some(aside) = aside else { return Ok((rustix::fs::openat(parent, name, flags, Mode::empty())?.into(), None)) };
    rustix::fs::linkat(parent, name, CWD, &aside, AtFlags::empty())?;
    let second = Second(aside);
    let file = rustix::fs::openat(CWD, &second.0, flags, Mode::empty())?;
    Ok((file.into(), Some(second)))
}

/// A file that nobody else has open, and its name, until this is dropped. Or something that is no regular file.
#[derive(Debug)]
pub struct Taken {
    file: File,
    /// With the file's metadata before it had two names. After the file, which is closed first.
    second: Option<(Second, Box<Metadata>)>,
    parent: File,
    name: OsString,
}

impl Taken {
    /// The file's metadata.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.second.as_ref().map_or_else(|| self.file.metadata(), |(_, before)| Ok(Metadata::clone(before)))
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
    /// fence before. Nobody writes to what is no regular file, so nobody locks it. `aside`: see [`open_beside`].
    pub fn of(directory: &File, name: &OsStr, aside: Option<PathBuf>) -> io::Result<Take> {
        let parent = open_anew(directory)?;
        let open = |flags| rustix::fs::openat(&parent, name, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
        let found = match open(OFlags::PATH) {
            Err(Errno::NOENT | Errno::STALE) => return Ok(Take::Gone),
            found => File::from(found?),
        };
        if !found.metadata()?.is_file() {
            return Ok(Take::Taken(Taken { file: found, second: None, parent, name: name.to_owned() }));
        }
        let mut file = match open(OFlags::RDWR | OFlags::NONBLOCK) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT | Errno::STALE | Errno::LOOP | Errno::ISDIR | Errno::NXIO) => return Ok(Take::Gone),
            // A file that its owner may not write, and a daemon that is not root; or somebody has a lease for a moment.
            Err(Errno::ACCESS | Errno::TXTBSY | Errno::AGAIN) => return Ok(Take::Busy),
            Err(error) => return Err(error.into()),
        };
        if !locks::alone(&file)? {
            return Ok(Take::Busy);
        }
        let mut second = None;
        if aside.is_some() {
            let before = file.metadata()?;
            drop(file);
            // Whoever changes the file from here on takes down the caller's fence.
            let (again, named) = match open_beside(&parent, name, OFlags::RDWR, aside) {
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESTALE | libc::ELOOP)) => {
                    return Ok(Take::Gone);
                }
                opened => opened?,
            };
            file = again;
            if !locks::alone(&file)? {
                return Ok(Take::Busy);
            }
            let known = |of: &Metadata| (of.dev(), of.ino(), of.len(), of.mtime(), of.mtime_nsec());
            if known(&file.metadata()?) != known(&before) {
                return Ok(Take::Gone);
            }
            second = named.map(|named| (named, Box::new(before)));
        }
        if !leads_to(&parent, name, &file)? {
            return Ok(Take::Gone);
        }
        if !locks::has_no_other(&file)? {
            return Ok(Take::Busy);
        }
        Ok(Take::Taken(Taken { file, second, parent, name: name.to_owned() }))
    }
}

/// Opens a directory anew: a network file system then checks its cache.
pub fn open_anew(directory: &File) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let anew: File = rustix::fs::openat(CWD, beneath::by_descriptor(directory), flags, Mode::empty())?.into();
    Engine::of_file(&anew)?.refresh(&anew)?;
    Ok(anew)
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
