//! The keeper of a shared store looks at the tree again and again, since nobody tells it of changes on other machines. The
//! difference to the look before goes to the catalog, as the mount's notes do in a store of one daemon.
//!
//! A file counts as closed once no daemon has it open to write, and nothing has changed it for [`QUIET_NS`] by the server's clock:
//! a younger time of change may be that of two changes. A stub counts at once, because nobody ever changes one.
//!
//! An object goes once no name needed it at two complete looks a grace apart, nor at any look between them. A file that cannot be read
//! may need any object, and so may all below a directory that cannot be listed.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, Stat, statat};
use rustix::io::Errno;

use crate::store::engine::Engine;
use crate::store::{Id, MIN_RELEASE_BYTES, beneath, is_pinned, locks};

use super::entry::{Entry, Held, State};
use super::namespace::{FileId, found_at};
use super::scan::{self, FoundFile};
use super::shared::Shared;

/// Longer than the coarsest clock of a file system that is admitted.
pub(super) const QUIET_NS: i64 = 3_000_000_000;
/// A directory that changed less than this before it was listed may have changed again at the same time.
const DIRECTORY_NS: i64 = 1_000_000_000;
/// Pause between two looks, at least.
const PAUSE: Duration = Duration::from_secs(2);
/// And so many times the duration of the last one.
const PAUSE_FACTOR: u32 = 10;
/// A look that is younger than this is new enough for whoever waits.
const FRESH: Duration = Duration::from_millis(250);
/// How long somebody waits for a look.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// How long an object stays that nothing needs. A program may have a name in a place where no look finds it, for a while: it is
/// just being renamed; and readers on other machines may have it open.
const GRACE: Duration = Duration::from_secs(3600);
/// For tests: the grace in milliseconds.
const GRACE_VARIABLE: &str = "STEPFS_GRACE_MS";

/// What shows that a file changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Print {
    file: FileId,
    len: u64,
    modified_ns: i64,
    changed_ns: i64,
}

impl Print {
    fn of(stat: &Stat) -> Print {
        let ns = |seconds: i64, rest: u64| seconds.saturating_mul(1_000_000_000).saturating_add(rest as i64);
        Print {
            file: FileId { dev: stat.st_dev, ino: stat.st_ino },
            len: stat.st_size.unsigned_abs(),
            modified_ns: ns(stat.st_mtime, stat.st_mtime_nsec),
            changed_ns: ns(stat.st_ctime, stat.st_ctime_nsec),
        }
    }
}

/// A look at all names.
#[derive(Default)]
struct Listing {
    files: HashMap<PathBuf, Print>,
    links: HashMap<PathBuf, Print>,
    /// No name can have been missed: no directory changed between its listing and the end of the look.
    is_complete: bool,
    /// Directories that this daemon may not list.
    hidden: Vec<PathBuf>,
}

impl Listing {
    /// Lists the tree; `now_ns` is the server's clock before.
    fn of(tree: &Path, engine: Engine, now_ns: i64) -> io::Result<Listing> {
        let mut listing = Listing { is_complete: true, ..Listing::default() };
        let (mut rest, mut directories) = (vec![PathBuf::new()], Vec::new());
        while let Some(path) = rest.pop() {
            match listing.enter(tree, engine, &path, &mut rest) {
                Ok(print) => directories.push((path, print)),
                Err(error) => {
                    listing.is_complete = false;
                    match error.raw_os_error() {
                        Some(libc::ENOENT | libc::ENOTDIR | libc::ESTALE) => {}
                        _ if error.kind() == io::ErrorKind::PermissionDenied => listing.hidden.push(path),
                        _ => return Err(error),
                    }
                }
            }
        }
        let is_old = |print: &Print| print.changed_ns.max(print.modified_ns) < now_ns.saturating_sub(DIRECTORY_NS);
        let is_still = |path: &Path, print: &Print| open(tree, engine, path).is_ok_and(|(_, now)| now == *print);
        listing.is_complete &= directories.iter().all(|(path, print)| is_old(print) && is_still(path, print));
        Ok(listing)
    }

    /// Lists a directory; those in it are left to do. Answers what would show a change of it.
    fn enter(&mut self, tree: &Path, engine: Engine, path: &Path, rest: &mut Vec<PathBuf>) -> io::Result<Print> {
        let (directory, print) = open(tree, engine, path)?;
        for entry in fs::read_dir(beneath::by_descriptor(&directory))? {
            let name = entry?.file_name();
            // The answer is that of the next call.
            let _ = engine.refresh_name(&directory, &name);
            let stat = match statat(&directory, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT | Errno::STALE) => {
                    self.is_complete = false;
                    continue;
                }
                stat => stat?,
            };
            let below = path.join(name);
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => rest.push(below),
                FileType::RegularFile => drop(self.files.insert(below, Print::of(&stat))),
                FileType::Symlink => drop(self.links.insert(below, Print::of(&stat))),
                _ => {}
            }
        }
        Ok(print)
    }
}

/// A directory of the tree, as the server has it.
fn open(tree: &Path, engine: Engine, path: &Path) -> io::Result<(File, Print)> {
    let directory = beneath::open_dir(tree, path)?;
    engine.refresh(&directory)?;
    let print = Print::of(&rustix::fs::fstat(&directory)?);
    Ok((directory, print))
}

struct Seen {
    print: Print,
    stage: Stage,
}

/// How far a file is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Somebody may write it.
    Written,
    /// It was changed just now, and will be given if nothing happens any more.
    Young,
    /// It cannot be read.
    Hidden,
    /// The catalog has it as closed, or as a stub.
    Given,
}

#[derive(Default)]
struct Schedule {
    /// When the last look began that has ended.
    began: Option<Instant>,
    /// Somebody waits for a look that begins after this.
    wanted: Option<Instant>,
    /// Files that settle, if nothing happens to them.
    unsettled: usize,
}

/// The looks of one keeper.
pub(super) struct Looks {
    shared: Arc<Shared>,
    grace: Duration,
    /// Taken for moments only.
    schedule: Mutex<Schedule>,
    changed: Condvar,
}

impl Looks {
    pub(super) fn of(shared: &Arc<Shared>) -> Looks {
        let set = std::env::var(GRACE_VARIABLE).ok().and_then(|text| text.parse().ok());
        let grace = set.map_or(GRACE, Duration::from_millis);
        Looks { shared: Arc::clone(shared), grace, schedule: Mutex::default(), changed: Condvar::new() }
    }

    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a look has ended that began now, or with `recent` a moment ago. Answers how many files no step can be taken of
    /// yet, because they are being written or changed just now. Without such a look within `patience` it is one at least: nobody
    /// knows that nothing is left.
    pub(super) fn await_look(&self, recent: bool, patience: Duration) -> usize {
        let asked = Instant::now();
        let from = if recent { asked.checked_sub(FRESH).unwrap_or(asked) } else { asked };
        let mut schedule = self.schedule();
        let is_new = |schedule: &Schedule| schedule.began.is_some_and(|began| began >= from);
        while !is_new(&schedule) && asked.elapsed() < patience && !self.shared.is_stopping() {
            schedule.wanted = Some(from);
            self.changed.notify_all();
            schedule = self.changed.wait_timeout(schedule, FRESH).unwrap_or_else(PoisonError::into_inner).0;
        }
        schedule.unsettled.max(usize::from(!is_new(&schedule)))
    }

    /// Looks until the archive stops. `clock` gives the server's time.
    pub(super) fn run(&self, clock: impl Fn() -> io::Result<i64>) {
        let mut eyes = Eyes::default();
        let mut told = String::new();
        while !self.shared.is_stopping() {
            let began = Instant::now();
            let looked = clock().and_then(|now_ns| eyes.look(&self.shared, now_ns, self.grace));
            let took = began.elapsed();
            let mut schedule = self.schedule();
            match looked {
                Ok(unsettled) => (schedule.began, schedule.unsettled) = (Some(began), unsettled),
                Err(error) => tell(&mut told, format!("the tree cannot be looked at: {error}; the next try follows")),
            }
            self.changed.notify_all();
            let pause = PAUSE.max(took * PAUSE_FACTOR);
            while began.elapsed() < took + pause && !self.shared.is_stopping() {
                if schedule.wanted.take_if(|wanted| *wanted <= began).is_none() && schedule.wanted.is_some() {
                    break;
                }
                // Also to see that the archive stops.
                schedule = self.changed.wait_timeout(schedule, FRESH).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

/// Warns of something that every look finds again: once.
fn tell(told: &mut String, news: String) {
    if *told != news {
        log::warn!("{news}");
        *told = news;
    }
}

/// What was seen. The thread that looks has it alone.
#[derive(Default)]
struct Eyes {
    seen: HashMap<PathBuf, Seen>,
    links: HashMap<PathBuf, Print>,
    /// Objects that nothing needed, since a complete look at this time.
    unneeded: HashMap<Id, Instant>,
    /// The last warning of a directory that cannot be listed.
    told: String,
}

/// Whether somebody writes a file, or may: through a daemon, or on this machine without one. A daemon's own descriptor counts as a
/// writer, even if programs only read.
fn is_written(file: &File) -> io::Result<bool> {
    Ok(locks::is_open(file, true)? || !locks::is_open(file, false)? && locks::has_writer(file)?)
}

impl Eyes {
    /// Looks, and tells the catalog the difference. Answers how many files are not settled.
    fn look(&mut self, shared: &Shared, now_ns: i64, grace: Duration) -> io::Result<usize> {
        let began = Instant::now();
        let tree = shared.store.tree();
        shared.quiet_ns.store(now_ns.saturating_sub(QUIET_NS), Ordering::Relaxed);
        let listing = Listing::of(&tree, shared.store.engine(), now_ns)?;
        let hidden =
            listing.hidden.first().map(|path| format!("{}: cannot be listed, so no object is removed", path.display()));
        tell(&mut self.told, hidden.unwrap_or_default());
        let mut changes = Vec::new();
        for (path, print) in &listing.files {
            let known = self.seen.get(path).filter(|known| known.print == *print).map(|known| known.stage);
            if known == Some(Stage::Given) {
                continue;
            }
            let (stage, found) = match examine(shared, path, print, now_ns) {
                // Nothing of it is known if it went meanwhile: the next look says so. A small one hides no object.
                Err(error) if error.kind() == io::ErrorKind::NotFound || print.len < MIN_RELEASE_BYTES => continue,
                Err(error) => {
                    (Stage::Hidden, (known != Some(Stage::Hidden)).then(|| FoundFile::unreadable(path, &error)))
                }
                Ok(examined) => examined,
            };
            changes.push((path, print.len, known.is_none(), stage, found));
            self.seen.insert(path.clone(), Seen { print: *print, stage });
        }
        let is_gone = |path: &Path| found_at(&tree, path).is_ok_and(|found| found.is_none_or(|it| !it.is_file()));
        let missing = self.seen.keys().filter(|path| !listing.files.contains_key(*path) && is_gone(path));
        let gone: Vec<PathBuf> = missing.cloned().collect();
        let links = self.links.keys().chain(listing.links.keys());
        let links: HashSet<&PathBuf> = links.filter(|link| self.links.get(*link) != listing.links.get(*link)).collect();
        {
            let mut catalog = shared.catalog();
            let now = Instant::now();
            // New names first, so that an object which a former one needs, too, has one all the time.
            changes.sort_by_key(|(.., found)| found.is_none());
            for (path, len, is_new, stage, found) in changes {
                match (found, catalog.get(path).map(|entry| &entry.state)) {
                    (Some(FoundFile { state: State::Released(found), .. }), Some(State::Released(known)))
                        if found == *known => {}
                    (Some(file), known) => {
                        let is_known = known.is_some();
                        let held = if let State::Released(id) = file.state { shared.objects.hold(id) } else { None };
                        if is_known {
                            catalog.removed(path);
                        }
                        scan::enter_one(file, &shared.objects, &mut catalog);
                        drop(held);
                    }
                    (None, _) => {
                        if is_new {
                            catalog.opened_for_writing(path, now);
                        }
                        if stage == Stage::Given {
                            catalog.closed(path, Some((len, now)));
                        }
                    }
                }
            }
            for path in gone {
                self.seen.remove(&path);
                catalog.removed(&path);
            }
            links.into_iter().for_each(|link| catalog.link_changed(link));
        }
        self.links = listing.links;
        self.try_again(shared);
        shared.notify();
        self.count(shared, began, listing.is_complete, grace);
        Ok(self.seen.values().filter(|seen| seen.stage == Stage::Young).count())
    }

    /// Nobody tells that a handle was closed or a pin removed: it is looked at.
    fn try_again(&self, shared: &Shared) {
        let waits: Vec<PathBuf> = {
            let catalog = shared.catalog();
            let waits = |entry: &Entry| entry.busy || entry.held == Some(Held::Pinned);
            catalog.files().iter().filter(|(_, entry)| waits(entry)).map(|(path, _)| path.to_path_buf()).collect()
        };
        let is_free = |path: &&PathBuf| {
            let is_open = || shared.open_file(path).and_then(|file| locks::is_open(file.as_file(), false));
            !is_pinned(&shared.store.tree(), path).unwrap_or(true) && !is_open().unwrap_or(false)
        };
        for path in waits.iter().filter(is_free) {
            let mut catalog = shared.catalog();
            catalog.closed(path, None);
            catalog.unpinned(path);
        }
    }

    /// Counts how long objects have been unneeded.
    fn count(&mut self, shared: &Shared, began: Instant, is_complete: bool, grace: Duration) {
        let lineages = shared.catalog().files().lineages();
        let keep: HashSet<Id> = lineages.into_iter().filter_map(|lineage| shared.objects.newest(lineage)).collect();
        let unneeded = shared.objects.unneeded(&keep);
        self.unneeded.retain(|id, _| unneeded.contains(id));
        if !is_complete {
            shared.ripe().retain(|id| unneeded.contains(id));
            return;
        }
        for id in unneeded {
            self.unneeded.entry(id).or_insert(began);
        }
        let is_ripe = |since: &Instant| began.saturating_duration_since(*since) >= grace && *since < began;
        let ripe: HashSet<Id> = self.unneeded.iter().filter(|(_, since)| is_ripe(since)).map(|(id, _)| *id).collect();
        if !ripe.is_empty() {
            shared.garbage.store(true, Ordering::Relaxed);
        }
        *shared.ripe() = ripe;
        shared.notify();
    }
}

/// How far a file is known, and the file if it is a stub, or nothing that a sealer can look at.
fn examine(shared: &Shared, path: &Path, print: &Print, now_ns: i64) -> io::Result<(Stage, Option<FoundFile>)> {
    let file = shared.open_file(path)?;
    let found = (print.len >= MIN_RELEASE_BYTES).then(|| scan::found(&shared.store, path)).transpose()?;
    let is_written = is_written(file.as_file())?;
    let is_it = Print::of(&rustix::fs::fstat(file.as_file())?) == *print;
    let found = found.filter(|found| is_it && !matches!(found.state, State::Closed));
    let is_stub = found.as_ref().is_some_and(|found| matches!(found.state, State::Released(_)));
    Ok(match () {
        () if is_stub => (Stage::Given, found),
        () if is_written => (Stage::Written, None),
        () if !is_it || print.changed_ns >= now_ns.saturating_sub(QUIET_NS) => (Stage::Young, None),
        () => (Stage::Given, found),
    })
}

#[cfg(test)]
mod tests;
