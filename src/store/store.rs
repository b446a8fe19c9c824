//! The directories of a store, its lock, and the recovery at open.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tempfile::TempPath;

use crate::clock;

use super::durable::{self, CrashPoint, DeviceFile, Io};
use super::engine::{Engine, admit};
use super::fence::{Fence, Fences, surely};
use super::locks::{self, Kind, LOCK, WHOLE};
use super::object::{Id, path_of};
use super::settings::{self, Settings};
use super::shared::{self, Epoch, Seat};
use super::{Error, Profile, Profiles, Stub, beneath, files_below, guide, profile_mark, release};

const DIRECTORIES: [&str; 4] = ["tree", "objects", "tmp", "cache"];
pub(super) const SETTINGS: &str = "stepfs.toml";

/// Whether a directory is a store.
pub fn is_store(path: &Path) -> bool {
    path.join(SETTINGS).is_file()
}

/// The store that a path is, or lies in. A directory with a copy of the settings alone is none.
pub fn store_around(path: &Path) -> Option<&Path> {
    path.ancestors().find(|above| is_store(above) && above.join("tree").is_dir())
}
const SETTINGS_STEPS: (CrashPoint, CrashPoint) = (CrashPoint::SettingsWritten, CrashPoint::SettingsInPlace);
/// The files of a store that was never used. The settings go first: without them the rest is no store.
const OWN_FILES: [&str; 3] = [SETTINGS, DAEMON_LOG, LOCK];
/// Larger than any real settings; a larger file is not read into memory.
const MAX_SETTINGS_BYTES: u64 = 1 << 20;

/// The log of the daemon that serves a store.
pub const DAEMON_LOG: &str = "daemon.log";

/// One store. [`Store::open`] holds its lock for this process; [`Store::look`] does not.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    settings: Settings,
    io: Io,
    /// Files that lost bytes, by device and inode number, with the error. The kernel reports it once, and somebody else
    /// was told. The lock is held only briefly.
    failed: Mutex<HashMap<(u64, u64), i32>>,
    engine: Engine,
    /// The kernel releases it when the process ends for any reason.
    lock: Option<File>,
    place: Place,
}

/// Where a process makes files ready.
#[derive(Debug)]
enum Place {
    /// In the store's own directories: it has the store alone.
    Store,
    /// A daemon of a shared store.
    Seat(Seat),
    /// The keeper of a shared store.
    Epoch(Epoch),
}

impl Store {
    fn of(root: PathBuf, settings: Settings, io: Io, lock: Option<File>, place: Place) -> Store {
        // A store that cannot be asked answers no other call either.
        let engine = Engine::of(&root).unwrap_or(Engine::Coherent);
        Store { root, settings, io, failed: Mutex::default(), engine, lock, place }
    }

    /// Opens a store for writing: takes its lock, then finishes or undoes the work that a crash interrupted. Creates
    /// the store if the directory is missing or empty.
    pub fn open(root: &Path) -> Result<Store, Error> {
        Store::open_on(Io::disk(), root)
    }

    /// [`Store::open`] on another device than the disk.
    pub fn open_on(io: Io, root: &Path) -> Result<Store, Error> {
        let made = if root.join(SETTINGS).exists() { None } else { Some(create(&io, root, false)?) };
        let root = fs::canonicalize(root).map_err(Error::io(root))?;
        // Check the format first: a newer store must not be touched, not even to check whether it is in use.
        let settings = read_settings(&root)?;
        let lock = match made {
            Some(lock) => lock,
            None => locks::hold(&root, &root.join(LOCK), Kind::Alone)?,
        };
        make_directories(&io, &root, settings.shared)?;
        let store = Store::of(root, settings, io, Some(lock), Place::Store);
        release::recover(&store, &store.tmp()).map_err(Error::io(store.tmp()))?;
        if store.is_shared() {
            let recover = |notes: &Path| release::recover(&store, notes);
            shared::end(&store.root, u64::MAX, &recover).map_err(Error::io(&store.root))?;
        }
        store.io.empty(&store.tmp(), CrashPoint::TmpEmptied).map_err(Error::io(store.tmp()))?;
        guide::leave(&store.root, &store.tmp());
        Ok(store)
    }

    /// Creates a store that several daemons may serve, unless there is a store.
    ///
    /// # Errors
    /// [`Error::Engine`] if its file system cannot be shared; those of [`Store::open`].
    pub fn create_shared(root: &Path) -> Result<(), Error> {
        if root.join(SETTINGS).exists() {
            return Ok(());
        }
        admit(root)?;
        match create(&Io::disk(), root, true) {
            // Another daemon has made it since, and serves it.
            Err(Error::Busy { .. }) if surely(&root.join(SETTINGS), |path| fs::symlink_metadata(path)).is_ok() => {
                Ok(())
            }
            made => made.map(drop),
        }
    }

    /// Opens a shared store for the daemon that serves it on `point`, beside other daemons.
    ///
    /// # Errors
    /// [`Error::Engine`] and [`Error::LocalLocks`] if the store's file system cannot be shared; those of [`Store::open`].
    pub fn join(root: &Path, point: &Path) -> Result<Store, Error> {
        Store::join_on(Io::disk(), root, point)
    }

    /// [`Store::join`] on another device than the disk.
    pub fn join_on(io: Io, root: &Path, point: &Path) -> Result<Store, Error> {
        let root = fs::canonicalize(root).map_err(Error::io(root))?;
        let settings = read_settings(&root)?;
        admit(&root)?;
        let lock = locks::hold(&root, &root.join(LOCK), Kind::Shared)?;
        make_directories(&io, &root, true)?;
        if let Some(seat) = shared::unseen(&root, point).map_err(Error::io(&root))? {
            return Err(Error::LocalLocks { root, seat });
        }
        let seat = Seat::take(&io, &root, point)?;
        let store = Store::of(root, settings, io, Some(lock), Place::Seat(seat));
        guide::leave(&store.root, &store.tmp());
        Ok(store)
    }

    /// Makes this daemon the keeper, if there is none. Answers the store for its archive: all that this makes lies in the
    /// epoch's directory first.
    ///
    /// # Errors
    /// Device errors. There is no keeper then, and the next attempt goes on.
    pub fn elect(&self) -> io::Result<Option<Store>> {
        let recover = |notes: &Path| release::recover(self, notes);
        let Some(epoch) = Epoch::begin(&self.io, &self.root, &recover)? else { return Ok(None) };
        let lock = self.lock.as_ref().map(File::try_clone).transpose()?;
        let (root, settings, io) = (self.root.clone(), self.settings.clone(), self.io.clone());
        Ok(Some(Store::of(root, settings, io, lock, Place::Epoch(epoch))))
    }

    /// Whether several daemons may serve it.
    pub fn is_shared(&self) -> bool {
        self.settings.shared
    }

    /// Whether this daemon serves a shared store.
    pub fn is_serving(&self) -> bool {
        matches!(self.place, Place::Seat(_))
    }

    /// Whether this is the store of the keeper, and no other keeper was elected since.
    pub fn is_keepers(&self) -> bool {
        // A client may remember an epoch that another daemon has ended: it asks the server about the directory first.
        let is_there = |epoch: &Epoch| {
            let above = File::open(epoch.dir.parent().unwrap_or(&self.root))?;
            self.engine.refresh(&above, "").and_then(|()| fs::symlink_metadata(&epoch.dir))
        };
        matches!(&self.place, Place::Epoch(epoch) if is_there(epoch).is_ok())
    }

    /// Answers the clock that stamps the store's files, nanoseconds since 1970. A server's may differ from this machine's. In a shared
    /// store this shows that the daemon lives, and takes locks anew that were lost while this machine was cut off.
    ///
    /// # Errors
    /// Another daemon has such a lock; device errors.
    pub fn beat(&self) -> io::Result<i64> {
        let own = match &self.place {
            Place::Store => return Ok(clock::stamp_ns()),
            Place::Seat(Seat { lock, .. }) | Place::Epoch(Epoch { lock, .. }) => lock,
        };
        for (lock, kind) in self.lock.iter().map(|lock| (lock, Kind::Shared)).chain([(own, Kind::Alone)]) {
            if !locks::take(lock, kind, &WHOLE)? {
                return Err(io::ErrorKind::ResourceBusy.into());
            }
        }
        shared::stamp(own)
    }

    /// Puts up a fence for the file with this inode number. The keeper's comes through its epoch's directory, so a former keeper,
    /// whose objects may be gone, puts up none.
    ///
    /// # Errors
    /// `NotFound`: another keeper was elected; device errors.
    pub fn fence(&self, ino: u64) -> io::Result<Fence> {
        let fence = self.fences().raise(ino)?;
        if let Place::Epoch(epoch) = &self.place {
            let token = epoch.dir.join(format!("fence-{}", Id::random()?));
            File::create_new(&token)?;
            fs::rename(token, fence.dir().join("epoch"))?;
        }
        Ok(fence)
    }

    /// The file system of the store.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// A name for [`open_beside`](super::fence::open_beside), where the file system wants that.
    pub fn second_name(&self) -> io::Result<Option<TempPath>> {
        Ok(match self.engine() {
            Engine::Nfs => Some(TempPath::try_from_path(self.tmp().join(format!("name-{}", Id::random()?)))?),
            Engine::Coherent => None,
        })
    }

    /// The permissions to replace files of a shared store.
    pub fn fences(&self) -> Fences {
        Fences::below(&self.root)
    }

    /// Opens a store for reading, mounted or not. Changes nothing.
    ///
    /// # Errors
    /// [`Error::Missing`] without a store there; [`Error::NoSettings`] for one without `stepfs.toml`.
    pub fn look(root: &Path) -> Result<Store, Error> {
        let settings = root.join(SETTINGS);
        // Another user's store is there, although nobody else may look.
        match settings.try_exists() {
            Ok(true) => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(Error::io(settings)(error)),
            _ => return Err(without_settings(root).unwrap_or_else(|| Error::Missing(root.to_path_buf()))),
        }
        let root = fs::canonicalize(root).map_err(Error::io(root))?;
        let settings = read_settings(&root)?;
        directories(settings.shared).try_for_each(|name| beneath::real_directory(&root.join(name)))?;
        Ok(Store::of(root, settings, Io::disk(), None, Place::Store))
    }

    /// Removes a store without files and objects. One that holds anything stays.
    ///
    /// # Errors
    /// Device errors. The next open then creates what is missing.
    pub fn remove_if_empty(self) -> io::Result<()> {
        const UNMADE: CrashPoint = CrashPoint::StoreMade;
        for entry in fs::read_dir(&self.root)? {
            let name = entry?.file_name();
            let is_directory = DIRECTORIES.iter().any(|directory| name == **directory);
            if is_directory && fs::read_dir(self.root.join(&name))?.next().is_some()
                || !is_directory && !OWN_FILES.iter().any(|own| name == **own) && !guide::is_guide(&self.root, &name)
            {
                return Ok(());
            }
        }
        let device = self.io.device();
        // Only empty directories can go, so what came meanwhile stays. Without the settings it is no store any more.
        DIRECTORIES.iter().try_for_each(|name| device.remove_dir(&self.root.join(name), UNMADE))?;
        let files = OWN_FILES.iter().chain(&guide::NAMES);
        files.into_iter().try_for_each(|name| self.io.remove(&self.root.join(name), UNMADE))?;
        device.remove_dir(&self.root, UNMADE)
    }

    /// True if a process has the store open for writing.
    ///
    /// # Errors
    /// [`Error::Missing`] without a store there.
    pub fn is_locked(root: &Path) -> Result<bool, Error> {
        is_lock_held(root, root.join(LOCK))
    }

    /// True if a daemon serves the store on this mount point, or, if it is not shared, on any.
    ///
    /// # Errors
    /// [`Error::Missing`] without a store there.
    pub fn is_served_on(root: &Path, point: &Path) -> Result<bool, Error> {
        is_lock_held(root, shared::lock_of(root, point))
    }

    /// The process that has the store open for writing, by the number that it left there.
    pub fn holder(root: &Path) -> Option<u32> {
        holder_of(root, root.join(LOCK))
    }

    /// The process that serves the store on this mount point.
    pub fn server(root: &Path, point: &Path) -> Option<u32> {
        holder_of(root, shared::lock_of(root, point))
    }

    /// The error for a store that another process has.
    pub fn in_use(root: &Path) -> Error {
        let holder = Store::holder(root).map_or_else(|| locks::ANOTHER_MACHINE.into(), |pid| pid.to_string());
        Error::Busy { path: root.to_path_buf(), holder }
    }

    /// Where this open store is by now, if somebody has moved it. `None` if it is gone.
    pub fn place(&self) -> Option<PathBuf> {
        let lock = fs::read_link(format!("/proc/self/fd/{}", self.lock.as_ref()?.as_raw_fd())).ok()?;
        lock.parent().filter(|root| root.join(SETTINGS).exists()).map(Path::to_path_buf)
    }

    /// Checks that a file can be locked like a store's.
    pub fn can_lock(path: &Path) -> io::Result<()> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        match locks::take(&file, Kind::Alone, &WHOLE)? {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::EAGAIN)),
        }
    }

    /// Absolute path of the store.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The I/O for all durable steps of the store.
    pub fn io(&self) -> &Io {
        &self.io
    }

    /// Makes a file of the tree durable that nobody writes any more.
    ///
    /// # Errors
    /// As of [`Io::sync_file`]; the error of [`Store::sync_failed`], if the file has one.
    pub fn sync_written(&self, file: &DeviceFile, at: CrashPoint) -> io::Result<()> {
        let failed = number(file.as_file()).ok().and_then(|number| self.failed().remove(&number));
        let synced = file.sync(at);
        // It counts more than an error of this sync, after which the caller may try again: then nothing would tell of it.
        failed.map_or(synced, |code| Err(io::Error::from_raw_os_error(code)))
    }

    /// Notes that bytes of a file could not be written. A program may ignore that, so the next
    /// [`Store::sync_written`] fails too.
    pub fn sync_failed(&self, file: &File, error: &io::Error) {
        if let Ok(number) = number(file) {
            self.failed().insert(number, error.raw_os_error().unwrap_or(libc::EIO));
        }
    }

    fn failed(&self) -> MutexGuard<'_, HashMap<(u64, u64), i32>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The store's id.
    pub fn id(&self) -> Id {
        self.settings.id
    }

    /// Its settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Makes a profile the default one, also in `stepfs.toml`.
    ///
    /// # Errors
    /// Device errors; [`Error::Settings`] if the setting has no line of its own in the file.
    pub fn set_default_profile(&mut self, profile: Profile) -> Result<(), Error> {
        self.change_settings(|text| Settings::with_default_profile(text, profile))
    }

    /// Gives the store a mirror, also in `stepfs.toml`.
    ///
    /// # Errors
    /// Device errors; [`Error::Settings`] if it has another one.
    pub fn set_mirror(&mut self, url: &str) -> Result<(), Error> {
        self.change_settings(|text| Settings::with_mirror(text, url))
    }

    fn change_settings(&mut self, change: impl FnOnce(&str) -> Result<String, Error>) -> Result<(), Error> {
        let path = self.root.join(SETTINGS);
        let text = settings_text(&path)?;
        let changed = change(&text).map_err(|error| error.of_store(&self.root))?;
        if changed != text {
            let new = self.root.join("stepfs.toml.new");
            self.io.replace(&new, &path, changed.as_bytes(), SETTINGS_STEPS).map_err(Error::io(&path))?;
        }
        self.settings = Settings::parse(&changed)?;
        Ok(())
    }

    /// The requested profiles for a path inside the tree: the one set on it or above it, else those of the rules.
    pub fn profiles(&self, path: &Path) -> io::Result<Profiles> {
        let rules = self.settings.profiles(path);
        Ok(match profile_mark(&self.tree(), path)? {
            Some(profile) => rules.overridden(profile),
            None => rules,
        })
    }

    /// The directory that the mount shows.
    pub fn tree(&self) -> PathBuf {
        self.root.join("tree")
    }

    /// The directory of the objects.
    pub fn objects(&self) -> PathBuf {
        self.root.join("objects")
    }

    /// The directory of unfinished files; on the same device as all others.
    pub fn tmp(&self) -> PathBuf {
        match &self.place {
            Place::Store => self.made_again(self.root.join("tmp")),
            Place::Seat(seat) => self.made_again(seat.dir.join("tmp")),
            // Never made again: without it this is the keeper no longer.
            Place::Epoch(epoch) => epoch.dir.clone(),
        }
    }

    /// The directory of decoded files.
    pub fn cache(&self) -> PathBuf {
        match &self.place {
            Place::Store => &self.root,
            Place::Seat(seat) => &seat.dir,
            Place::Epoch(epoch) => &epoch.dir,
        }
        .join("cache")
    }

    /// A directory that is empty most of the time. Programs that clean up may have removed it, so it is made again.
    fn made_again(&self, directory: PathBuf) -> PathBuf {
        if self.lock.is_some() && !directory.exists() {
            match self.io.make_dir(&directory, 0o700, CrashPoint::StoreMade) {
                Ok(()) => log::warn!("{} was removed; stepfs made it again", directory.display()),
                Err(error) => log::error!("{} was removed, and cannot be made: {error}", directory.display()),
            }
        }
        directory
    }
}

/// Creates a store. The settings come last, so that after a crash the next attempt completes it. It holds the lock: of
/// two processes that create the same store, one must not change its id after the other has begun to use it.
fn create(io: &Io, root: &Path, shared: bool) -> Result<File, Error> {
    if let Some(error) = without_settings(root) {
        return Err(error);
    }
    if root.exists() {
        for entry in fs::read_dir(root).map_err(Error::io(root))? {
            let name = entry.map_err(Error::io(root))?.file_name();
            let ours = directories(true).any(|d| name == *d)
                || name == LOCK
                || name == "stepfs.toml.new"
                || guide::is_guide(root, &name);
            let tree = root.join("tree");
            let occupied = tree.is_dir() && fs::read_dir(&tree).map_err(Error::io(&tree))?.next().is_some();
            // Another process has created it in the meantime.
            let made = name == SETTINGS;
            if !made && (!ours || occupied) {
                return Err(Error::NotAStore(root.to_path_buf()));
            }
        }
    } else {
        io.make_dir(root, 0o700, CrashPoint::StoreMade).map_err(Error::io(root))?;
    }
    let lock = locks::hold(root, &root.join(LOCK), Kind::Alone)?;
    // Another machine may have made them since this one looked: a second id would make plain files of all its stubs.
    if surely(&root.join(SETTINGS), |path| fs::symlink_metadata(path)).is_ok() {
        return Ok(lock);
    }
    make_directories(io, root, shared)?;
    let id = Id::random().map_err(Error::io(root))?;
    let path = root.join(SETTINGS);
    // The store's own name first: once its settings exist, the store is not created again.
    io.sync_dir(durable::parent(root), CrashPoint::StoreMade).map_err(Error::io(root))?;
    let new = root.join("stepfs.toml.new");
    io.replace(&new, &path, settings::template(id, shared).as_bytes(), SETTINGS_STEPS).map_err(Error::io(&path))?;
    Ok(lock)
}

/// The error for a store that was used and has no `stepfs.toml`. The store's id is in its stubs. A stub copied from another
/// store has no object here.
fn without_settings(root: &Path) -> Option<Error> {
    let (tree, objects) = (root.join("tree"), root.join("objects"));
    if root.join(SETTINGS).exists() || !objects.is_dir() || !root.join(LOCK).exists() {
        return None;
    }
    let stub = |path: &PathBuf| Stub::of_any(&beneath::open_file(&tree, path).ok()?).ok().flatten();
    let files = files_below(&tree, Path::new("")).ok().filter(|files| !files.is_empty())?;
    let found = files.iter().filter_map(stub).find(|stub| path_of(&objects, stub.object).exists());
    Some(Error::NoSettings { root: root.to_path_buf(), id: found.map(|stub| stub.store) })
}

/// True if a process holds the lock at a path, in the store at `root`.
fn is_lock_held(root: &Path, path: PathBuf) -> Result<bool, Error> {
    match beneath::open_plain(&path) {
        Ok(file) => locks::is_held(&file, Kind::Alone, &WHOLE).map_err(Error::io(path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Error::Missing(root.to_path_buf())),
        Err(error) => Err(Error::io(path)(error)),
    }
}

/// The process that holds the lock at a path, by the number that it left there.
fn holder_of(root: &Path, lock: PathBuf) -> Option<u32> {
    is_lock_held(root, lock.clone()).ok().filter(|is_held| *is_held)?;
    fs::read_to_string(lock).ok()?.trim().parse().ok()
}

/// Device and inode number.
fn number(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// The directories of a store.
fn directories(shared: bool) -> impl Iterator<Item = &'static str> {
    DIRECTORIES.into_iter().chain(shared::DIRECTORIES.into_iter().filter(move |_| shared))
}

/// Creates the directories. The tree is the mount's root and has the mode of any new directory; the others are only for
/// the owner. None may be a symlink: most are emptied, and objects are removed. Syncs the store's
/// directory if one was missing, since nothing else does before the names are needed.
fn make_directories(io: &Io, root: &Path, shared: bool) -> Result<(), Error> {
    close(root, false).map_err(Error::io(root))?;
    let mut missing = false;
    for name in directories(shared) {
        let (path, is_tree) = (root.join(name), name == "tree");
        if fs::symlink_metadata(&path).is_err() {
            missing = true;
            io.make_dir(&path, if is_tree { 0o755 } else { 0o700 }, CrashPoint::StoreMade).map_err(Error::io(&path))?;
        }
        beneath::real_directory(&path)?;
        close(&path, is_tree).map_err(Error::io(path))?;
    }
    if missing { io.sync_dir(root, CrashPoint::StoreMade).map_err(Error::io(root)) } else { Ok(()) }
}

/// The default ACL, which new files in a directory inherit. The mount only knows modes: an ACL that lets in one user
/// would look like a mode that lets in a whole group.
const INHERITED: &str = "system.posix_acl_default";

/// Restricts a directory of the store to its owner, whatever its mode was. The tree's own mode belongs to the
/// applications.
fn close(directory: &Path, is_tree: bool) -> io::Result<()> {
    let held = beneath::hold(directory, Path::new(""))?;
    let path = beneath::by_descriptor(&held);
    match xattr::remove_deref(&path, INHERITED) {
        Err(error) if !matches!(error.raw_os_error(), Some(libc::ENODATA | libc::EOPNOTSUPP | libc::EPERM)) => {
            return Err(error);
        }
        _ => {}
    }
    let mode = held.metadata()?.mode() & 0o7777;
    if is_tree || mode & 0o077 == 0 {
        return Ok(());
    }
    match fs::set_permissions(&path, Permissions::from_mode(mode & 0o700)) {
        // Another user's directory: `exposed` reports the consequence.
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Ok(()),
        result => result,
    }
}

/// The first directory at or above `root` (absolute, without links) where a user other than root and this process's
/// user can replace the store. `None` if there is none.
pub fn exposed(root: &Path) -> io::Result<Option<PathBuf>> {
    let own = rustix::process::geteuid().as_raw();
    for directory in root.ancestors() {
        let metadata = fs::symlink_metadata(directory)?;
        let mode = metadata.mode();
        let strangers = mode & 0o022 != 0 && mode & libc::S_ISVTX == 0;
        if ![0, own].contains(&metadata.uid()) || strangers {
            return Ok(Some(directory.to_path_buf()));
        }
    }
    Ok(None)
}

fn read_settings(root: &Path) -> Result<Settings, Error> {
    Settings::parse(&settings_text(&root.join(SETTINGS))?).map_err(|error| error.of_store(root))
}

fn settings_text(path: &Path) -> Result<String, Error> {
    let mut text = String::new();
    let read = beneath::open_plain(path).and_then(|file| match file.metadata()?.len() {
        0..=MAX_SETTINGS_BYTES => file.take(MAX_SETTINGS_BYTES).read_to_string(&mut text),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "it is too large for settings")),
    });
    read.map(|_| text).map_err(Error::io(path))
}

#[cfg(test)]
mod tests;
