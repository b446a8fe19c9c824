//! The shared store: several daemons, on one or many machines, serve one store on a file system that all of them mount
//! (docs/MACHINES.md).
//!
//! - Each daemon has a *seat*, `daemons/NAME/`, with a lock for as long as it lives.
//! - One daemon is the *keeper*. It holds `keeper/lock` and works in `keeper/EPOCH/`. A new keeper removes the directories of
//!   former ones. So a former keeper that wakes up late finds neither its files to put in place, nor a place to remove to.
//! - `fence` has the way in which files of the tree are replaced.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, DirEntry, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use codec::hash::xxh3_64;
use rustix::fs::{Timespec, Timestamps, UTIME_NOW};

use super::durable::{CrashPoint, Io};
use super::engine::Engine;
use super::fence::{Fences, leads_to, tear_down};
use super::locks::{self, Kind, LOCK, WHOLE};
use super::object::Id;
use super::{Error, beneath};

const SEATS: &str = "daemons";
const KEEPER: &str = "keeper";
/// Beside the directories of every store.
pub(super) const DIRECTORIES: [&str; 3] = [SEATS, KEEPER, Fences::DIRECTORY];
/// How often a daemon shows that it lives.
pub const BEAT: Duration = Duration::from_secs(1);
/// A seat of a daemon that lives changes within this time, even where its machine is busy.
const LIVES: Duration = Duration::from_secs(4);
/// Longest part of a seat's name that tells the mount point. With the machine's name and a hash it fits any file system.
const LONGEST_POINT: usize = 100;

/// The name of this machine.
fn node() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// A daemon's own place in a shared store.
#[derive(Debug)]
pub struct Seat {
    pub(super) dir: PathBuf,
    pub(super) lock: File,
}

/// The name of the seat of a mount: no two daemons of a machine have one mount point. A mount point that the name does not tell
/// exactly is told by its hash.
fn seat_name(point: &Path) -> String {
    let text = point.to_string_lossy();
    let from = (text.len().saturating_sub(LONGEST_POINT)..).find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    let (node, shown, bytes) = (node(), text[from..].replace('/', "+"), point.as_os_str().as_bytes());
    match from > 0 || bytes.contains(&b'+') || text.as_bytes() != bytes {
        true => format!("{node}{shown}-{:016x}", xxh3_64(bytes)),
        false => format!("{node}{shown}"),
    }
}

/// The lock that a daemon holds which serves the store at `root` on `point`.
pub(super) fn lock_of(root: &Path, point: &Path) -> PathBuf {
    match root.join(SEATS).is_dir() {
        true => root.join(SEATS).join(seat_name(point)).join(LOCK),
        false => root.join(LOCK),
    }
}

/// The directory for the log of the daemon that serves the store at `root` on `point`.
pub fn log_dir(root: &Path, point: &Path) -> PathBuf {
    lock_of(root, point).parent().unwrap_or(root).to_path_buf()
}

/// Sets a file's time to the server's clock, and returns that.
pub(super) fn stamp(file: &File) -> io::Result<i64> {
    const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    rustix::fs::futimens(file, &Timestamps { last_access: NOW, last_modification: NOW })?;
    Ok(super::modified_ns(&file.metadata()?))
}

impl Seat {
    /// Takes the seat of a mount.
    pub(super) fn take(io: &Io, root: &Path, point: &Path) -> Result<Seat, Error> {
        let dir = root.join(SEATS).join(seat_name(point));
        let make = |path: &Path| {
            io.make_dir(path, 0o700, CrashPoint::StoreMade)
                .map_err(Error::io(path))
                .and_then(|()| beneath::real_directory(path))
        };
        make(&dir)?;
        let lock = locks::hold(root, &dir.join(LOCK), Kind::Alone)?;
        for name in ["tmp", "cache"] {
            make(&dir.join(name))?;
            io.empty(&dir.join(name), CrashPoint::TmpEmptied).map_err(Error::io(&dir))?;
        }
        Ok(Seat { dir, lock })
    }
}

/// The seat of a daemon whose lock is not seen here: it shows that it lives, and its lock is free. So it is on another machine, and
/// locks hold on one machine only.
pub(super) fn unseen(root: &Path, point: &Path) -> io::Result<Option<PathBuf>> {
    let (seats, own) = (root.join(SEATS), seat_name(point));
    let free = || -> io::Result<HashMap<PathBuf, i64>> {
        let mut free = HashMap::new();
        for entry in fs::read_dir(&seats)? {
            let entry = entry?;
            let Ok(file) = OpenOptions::new().read(true).write(true).open(entry.path().join(LOCK)) else { continue };
            // The time first: a daemon takes the lock, and then writes the file.
            let at = super::modified_ns(&file.metadata()?);
            if entry.file_name() != *own && !locks::is_held(&file, Kind::Alone, &WHOLE)? {
                free.insert(entry.path(), at);
            }
        }
        Ok(free)
    };
    let now = stamp(&tempfile::tempfile_in(&seats)?)?;
    // A daemon that was just killed has a young time, too; its time stands still.
    let mut young = free()?;
    young.retain(|_, at| now.saturating_sub(*at) < LIVES.as_nanos() as i64);
    let began = Instant::now();
    while !young.is_empty() && began.elapsed() < LIVES {
        let moved = |(path, at): &(PathBuf, i64)| young.get(path).is_some_and(|before| before < at);
        if let Some((seat, _)) = free()?.into_iter().find(moved) {
            return Ok(Some(seat));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(None)
}

/// The time of a keeper: it ends with another keeper's election.
#[derive(Debug)]
pub(super) struct Epoch {
    pub(super) dir: PathBuf,
    pub(super) lock: File,
}

impl Epoch {
    /// Begins one, if there is no keeper. Ends former ones: `recover` carries out the notes in their directories.
    ///
    /// # Errors
    /// Device errors. There is no keeper then, and the next attempt goes on.
    pub(super) fn begin(io: &Io, root: &Path, recover: &dyn Fn(&Path) -> io::Result<()>) -> io::Result<Option<Epoch>> {
        let keeper = root.join(KEEPER);
        let path = keeper.join(LOCK);
        let lock = locks::file(&path)?;
        // The lock of a file counts that still has the name: a client may remember one that was moved away.
        if !locks::take(&lock, Kind::Alone, &WHOLE)?
            || !leads_to(Engine::of(&keeper)?, &File::open(&keeper)?, OsStr::new(LOCK), &lock)?
        {
            return Ok(None);
        }
        let former = fs::read_dir(&keeper)?.map(|entry| Ok(number(&entry?).unwrap_or(0)));
        let own = former.collect::<io::Result<Vec<_>>>()?.into_iter().max().unwrap_or(0) + 1;
        let dir = keeper.join(format!("{own:016}"));
        match io.device().make_dir(&dir, 0o700, CrashPoint::StoreMade) {
            // This one was suspended, lost its lock, and another keeper has that epoch.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            made => made?,
        }
        io.make_dir(&dir.join("cache"), 0o700, CrashPoint::StoreMade)?;
        io.sync_dir(&keeper, CrashPoint::StoreMade)?;
        // Only for people, and there may be no room for it.
        let _ = fs::write(path, format!("{} (process {})", node(), std::process::id()));
        end(root, own, recover)?;
        Ok(Some(Epoch { dir, lock }))
    }
}

/// The number of an epoch, if this is its directory.
fn number(entry: &DirEntry) -> Option<u64> {
    entry.file_name().to_str().filter(|name| name.len() == 16).and_then(|name| name.parse().ok())
}

/// Ends the epochs before one: carries out their notes, and removes all that was made ready.
pub(super) fn end(root: &Path, before: u64, recover: &dyn Fn(&Path) -> io::Result<()>) -> io::Result<()> {
    let keeper = root.join(KEEPER);
    for entry in fs::read_dir(&keeper)?.collect::<io::Result<Vec<_>>>()? {
        if entry.file_name() == LOCK || number(&entry).is_some_and(|number| number >= before) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            recover(&entry.path())?;
        }
        tear_down(&entry.path())?;
        // A former keeper of this machine keeps files open there, and so the directory. It does not find that any more.
        match fs::rename(entry.path(), keeper.join(format!("gone-{}", Id::random()?))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Fences::below(root).clear()
}

/// The keeper of the store at `root`, as it calls itself. `None`: there is none.
pub fn keeper_of(root: &Path) -> Option<String> {
    let lock = beneath::open_plain(&root.join(KEEPER).join(LOCK)).ok()?;
    locks::is_held(&lock, Kind::Alone, &WHOLE).ok().filter(|is_held| *is_held)?;
    io::read_to_string(lock.take(256)).ok()
}

#[cfg(test)]
mod tests;
