//! The directories of a store, its lock, and what `open` puts right.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::object::Id;
use super::settings::{self, Settings};
use super::{Error, Profile, Profiles, durable, profile_mark, release, rescue};

const DIRECTORIES: [&str; 4] = ["tree", "objects", "tmp", "cache"];
const SETTINGS: &str = "stepfs.toml";
const LOCK: &str = "lock";
/// A daemon that was just told to end, or killed, lets go of its lock a moment later; and so does a child that it was
/// starting, which has the lock until it is another program.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// One store. [`Store::open`] holds its lock for this process; [`Store::look`] does not.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    settings: Settings,
    /// Released by the kernel when the process ends, however it ends.
    _lock: Option<File>,
}

impl Store {
    /// Opens a store for writing: takes its lock, then finishes or undoes what a crash left. Makes the store when the
    /// directory is missing or empty.
    ///
    /// # Errors
    /// [`Error`] in words for the user.
    pub fn open(root: &Path) -> Result<Store, Error> {
        let made = if root.join(SETTINGS).exists() { None } else { Some(create(root)?) };
        let root = fs::canonicalize(root).map_err(Error::io(root))?;
        // The format first: a newer store must not be touched, not even to find out whether it is in use.
        let settings = read_settings(&root)?;
        let lock = match made {
            Some(lock) => lock,
            None => take_lock(&root)?,
        };
        make_directories(&root)?;
        let store = Store { root, settings, _lock: Some(lock) };
        release::recover(&store).map_err(Error::io(store.tmp()))?;
        empty(&store.tmp()).map_err(Error::io(store.tmp()))?;
        Ok(store)
    }

    /// Opens a store for writing whose `stepfs.toml` may be damaged or gone: it is written anew then, as far as it can be known,
    /// and what there is stays beside it as `stepfs.toml.damaged`. Answers what was done, in words.
    ///
    /// # Errors
    /// [`Error`] in words for the user: also when nothing else says that this is a store, or whose.
    pub fn open_damaged(root: &Path) -> Result<(Store, Option<String>), Error> {
        let path = root.join(SETTINGS);
        let text = match fs::read(&path) {
            Ok(text) => String::from_utf8_lossy(&text).into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(Error::io(path)(error)),
        };
        match Settings::parse(&text) {
            Err(Error::Settings(_)) => {}
            Ok(settings) if path.exists() && !rescue::is_wrong(root, settings.id).map_err(Error::io(root))? => {
                return Ok((Store::open(root)?, None));
            }
            Ok(_) => {}
            Err(error) => return Err(error),
        }
        if !["tree", "objects", LOCK].iter().all(|name| root.join(name).exists()) {
            return Err(Error::NotAStore(root.to_path_buf()));
        }
        let lock = take_lock(root)?;
        let (text, words) = rescue::settings(&root.join("tree"), &text)?;
        if path.exists() {
            rescue::keep(&path).map_err(Error::io(&path))?;
        }
        durable::replace(&root.join("stepfs.toml.new"), &path, text.as_bytes()).map_err(Error::io(&path))?;
        drop(lock);
        Ok((Store::open(root)?, Some(words)))
    }

    /// Opens a store to look at it, mounted or not. Nothing is changed.
    ///
    /// # Errors
    /// [`Error`] in words for the user.
    pub fn look(root: &Path) -> Result<Store, Error> {
        if !root.join(SETTINGS).exists() {
            return Err(Error::Missing(root.to_path_buf()));
        }
        let root = fs::canonicalize(root).map_err(Error::io(root))?;
        let settings = read_settings(&root)?;
        Ok(Store { root, settings, _lock: None })
    }

    /// Whether some process has the store open for writing.
    ///
    /// # Errors
    /// [`Error::Missing`]; what the device reports.
    pub fn is_locked(root: &Path) -> Result<bool, Error> {
        let path = root.join(LOCK);
        match File::open(&path) {
            Ok(file) => held_by_another(&file).map_err(Error::io(path)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Error::Missing(root.to_path_buf())),
            Err(error) => Err(Error::io(path)(error)),
        }
    }

    /// Absolute path of the store.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The store's name.
    pub fn id(&self) -> Id {
        self.settings.id
    }

    /// What its users chose.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Makes a profile the default one, in `stepfs.toml` too.
    ///
    /// # Errors
    /// What the device reports; [`Error::Settings`] when the file does not say it in a line of its own.
    pub fn set_default_profile(&mut self, profile: Profile) -> Result<(), Error> {
        let path = self.root.join(SETTINGS);
        let text = fs::read_to_string(&path).map_err(Error::io(&path))?;
        let changed = Settings::with_default_profile(&text, profile)?;
        if changed != text {
            let new = self.root.join("stepfs.toml.new");
            durable::replace(&new, &path, changed.as_bytes()).map_err(Error::io(&path))?;
        }
        self.settings = Settings::parse(&changed)?;
        Ok(())
    }

    /// The profiles that users ask for, for a path inside the tree: what is set on it or above it, else what the rules say.
    ///
    /// # Errors
    /// What the device reports about attributes.
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

    /// The directory of half-done things; on the same device as all others.
    pub fn tmp(&self) -> PathBuf {
        self.root.join("tmp")
    }

    /// The directory of decoded files.
    pub fn cache(&self) -> PathBuf {
        self.root.join("cache")
    }
}

/// Makes a store; the settings last, so that a crash leaves something that the next attempt completes. Under the lock:
/// of two processes that make the same store, one must not give it another id after the other has begun to use it.
fn create(root: &Path) -> Result<File, Error> {
    if root.exists() {
        for entry in fs::read_dir(root).map_err(Error::io(root))? {
            let name = entry.map_err(Error::io(root))?.file_name();
            let ours = DIRECTORIES.iter().any(|d| name == **d) || name == LOCK || name == "stepfs.toml.new";
            let tree = root.join("tree");
            let occupied = tree.is_dir() && fs::read_dir(&tree).map_err(Error::io(&tree))?.next().is_some();
            // Made by another process since its settings were looked for.
            let made = name == SETTINGS;
            if !made && (!ours || occupied) {
                return Err(Error::NotAStore(root.to_path_buf()));
            }
        }
    } else {
        make_directory(root, 0o700)?;
    }
    let lock = take_lock(root)?;
    if root.join(SETTINGS).exists() {
        return Ok(lock);
    }
    make_directories(root)?;
    let id = Id::random().map_err(Error::io(root))?;
    let path = root.join(SETTINGS);
    durable::replace(&root.join("stepfs.toml.new"), &path, settings::template(id).as_bytes())
        .map_err(Error::io(&path))?;
    durable::sync_dir(durable::parent(root)).map_err(Error::io(root))?;
    Ok(lock)
}

/// The tree is the mount's root, and looks like any new directory there; the rest is the owner's alone.
fn make_directories(root: &Path) -> Result<(), Error> {
    DIRECTORIES
        .iter()
        .try_for_each(|name| make_directory(&root.join(name), if *name == "tree" { 0o755 } else { 0o700 }))
}

fn make_directory(path: &Path, mode: u32) -> Result<(), Error> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(Error::io(path)(error)),
        _ => Ok(()),
    }
}

fn read_settings(root: &Path) -> Result<Settings, Error> {
    let path = root.join(SETTINGS);
    Settings::parse(&fs::read_to_string(&path).map_err(Error::io(&path))?)
}

/// An open-file-description lock: it goes with the process, works over NFS, and is not lost when another descriptor
/// of the file is closed.
fn take_lock(root: &Path) -> Result<File, Error> {
    let path = root.join(LOCK);
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(Error::io(&path))?;
    let lock = whole_file();
    let began = Instant::now();
    // SAFETY: the descriptor is open and `lock` is an initialised flock that outlives the call.
    while unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } != 0 {
        let error = io::Error::last_os_error();
        if !matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) {
            return Err(Error::io(path)(error));
        }
        if began.elapsed() < LOCK_PATIENCE {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        let mut holder = String::new();
        let _ = (&mut file).take(32).read_to_string(&mut holder);
        let holder = match holder.trim() {
            "" => "another machine".to_string(),
            pid => pid.to_string(),
        };
        return Err(Error::Busy { path: root.to_path_buf(), holder });
    }
    // Only words for the next one who finds it locked: best effort.
    let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    Ok(file)
}

fn held_by_another(file: &File) -> io::Result<bool> {
    let mut lock = whole_file();
    // SAFETY: the descriptor is open and `lock` is an initialised flock that outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) } {
        0 => Ok(lock.l_type != libc::F_UNLCK as libc::c_short),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A write lock on all of a file.
fn whole_file() -> libc::flock {
    // SAFETY: flock is plain data; all zeros is a valid value of it.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock
}

/// Removes everything in `tmp/`.
fn empty(tmp: &Path) -> io::Result<()> {
    for entry in fs::read_dir(tmp)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(entry.path())?,
            false => durable::remove(&entry.path())?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
