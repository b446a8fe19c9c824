//! The keeper of a shared store looks at the tree again and again, since nobody tells it of changes on other machines. The
//! difference to the look before goes to the catalog, as the mount's notes do in a store of one daemon.
//!
//! A file counts as closed once no daemon has it open to write, and nothing has changed it for [`QUIET_NS`] by the server's clock:
//! a younger time of change may be that of two changes. A stub counts at once, because nobody ever changes one.
//!
//! An object goes once no name needed it at two complete looks a grace apart, nor at any look between them.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, Stat, statat};

use crate::store::{Id, MIN_RELEASE_BYTES, beneath, locks};

use super::entry::State;
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
const PATIENCE: Duration = Duration::from_secs(60);
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
}

/// Lists the tree; `now_ns` is the server's clock before.
fn list(tree: &Path, now_ns: i64) -> io::Result<Listing> {
    let mut listing = Listing { is_complete: true, ..Listing::default() };
    let (mut rest, mut directories) = (vec![PathBuf::new()], Vec::new());
    let is_gone = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ESTALE));
    while let Some(path) = rest.pop() {
        let directory = match beneath::open_dir(tree, &path) {
            Err(error) if is_gone(&error) => {
                listing.is_complete = false;
                continue;
            }
            directory => directory?,
        };
        let print = Print::of(&rustix::fs::fstat(directory.as_fd())?);
        listing.is_complete &= print.changed_ns.max(print.modified_ns) < now_ns.saturating_sub(DIRECTORY_NS);
        for entry in fs::read_dir(beneath::by_descriptor(&directory))? {
            let entry = entry?;
            let stat = match statat(&directory, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::STALE) => {
                    listing.is_complete = false;
                    continue;
                }
                stat => stat?,
            };
            let below = path.join(entry.file_name());
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => rest.push(below),
                FileType::RegularFile => drop(listing.files.insert(below, Print::of(&stat))),
                FileType::Symlink => drop(listing.links.insert(below, Print::of(&stat))),
                _ => {}
            }
        }
        directories.push((path, print));
    }
    for (path, print) in directories {
        let now = beneath::open_dir(tree, &path).and_then(|directory| Ok(Print::of(&rustix::fs::fstat(&directory)?)));
        listing.is_complete &= now.is_ok_and(|now| now == print);
    }
    Ok(listing)
}

struct Seen {
    print: Print,
    /// The catalog has it as closed, or as a stub.
    given: bool,
    /// It will be given if nothing happens any more.
    settles: bool,
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
    /// yet, because they are being written or changed just now.
    pub(super) fn await_look(&self, recent: bool) -> usize {
        let asked = Instant::now();
        let from = if recent { asked.checked_sub(FRESH).unwrap_or(asked) } else { asked };
        let mut schedule = self.schedule();
        while schedule.began.is_none_or(|began| began < from)
            && asked.elapsed() < PATIENCE
            && !self.shared.is_stopping()
        {
            schedule.wanted = Some(from);
            self.changed.notify_all();
            schedule = self.changed.wait_timeout(schedule, FRESH).unwrap_or_else(PoisonError::into_inner).0;
        }
        schedule.unsettled
    }

    /// Looks until the archive stops. `clock` gives the server's time.
    pub(super) fn run(&self, clock: impl Fn() -> io::Result<i64>) {
        let mut eyes = Eyes { seen: HashMap::new(), links: HashMap::new(), unneeded: HashMap::new() };
        while !self.shared.is_stopping() {
            let began = Instant::now();
            let looked = clock().and_then(|now_ns| eyes.look(&self.shared, now_ns, self.grace));
            let took = began.elapsed();
            let mut schedule = self.schedule();
            match looked {
                Ok(unsettled) => (schedule.began, schedule.unsettled) = (Some(began), unsettled),
                Err(error) => log::warn!("the tree cannot be looked at: {error}; the next try follows"),
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

/// What was seen. The thread that looks has it alone.
struct Eyes {
    seen: HashMap<PathBuf, Seen>,
    links: HashMap<PathBuf, Print>,
    /// Objects that nothing needed, since a complete look at this time.
    unneeded: HashMap<Id, Instant>,
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
        let listing = list(&tree, now_ns)?;
        let (mut entered, mut opened, mut closed) = (Vec::new(), Vec::new(), Vec::new());
        for (path, print) in &listing.files {
            let known = self.seen.get(path);
            let is_new = known.is_none_or(|known| known.print != *print);
            if !is_new && known.is_some_and(|known| known.given) {
                continue;
            }
            // Nothing of it is known if it went meanwhile: the next look says so.
            let Ok(found) = self.examine(shared, path, print, now_ns) else { continue };
            let (given, settles) =
                (!matches!(found, Examined::Unsettled(_)), matches!(found, Examined::Unsettled(true)));
            if is_new {
                opened.push(path.clone());
            }
            match found {
                Examined::Unsettled(_) => {}
                Examined::Closed => closed.push((path.clone(), print.len)),
                Examined::Entered(file) => entered.push(*file),
            }
            self.seen.insert(path.clone(), Seen { print: *print, given, settles });
        }
        let missing = self.seen.keys().filter(|path| !listing.files.contains_key(*path));
        let gone: Vec<PathBuf> = missing
            .filter(|path| found_at(&tree, path).is_ok_and(|found| found.is_none_or(|it| !it.is_file())))
            .cloned()
            .collect();
        for path in &gone {
            self.seen.remove(path);
        }
        let mut links: Vec<PathBuf> =
            self.links.keys().filter(|link| !listing.links.contains_key(*link)).cloned().collect();
        links.extend(
            listing
                .links
                .iter()
                .filter(|(link, print)| self.links.get(*link) != Some(print))
                .map(|(link, _)| link.clone()),
        );
        self.links = listing.links;
        {
            let mut catalog = shared.catalog();
            let now = Instant::now();
            let stubs: HashSet<PathBuf> = entered.iter().map(|file| file.path.clone()).collect();
            for file in entered {
                let is_it = catalog.get(&file.path).is_some_and(|entry| {
                    matches!((&entry.state, &file.state), (State::Released(known), State::Released(found)) if known == found)
                });
                if !is_it {
                    let former = catalog.get(&file.path).is_some().then(|| file.path.clone());
                    // The new name first, so that an object which both need has one all the time.
                    let held = if let State::Released(id) = file.state { shared.objects.hold(id) } else { None };
                    former.iter().for_each(|path| catalog.removed(path));
                    scan::enter_one(file, &shared.objects, &mut catalog);
                    drop(held);
                }
            }
            for path in opened.iter().filter(|path| !stubs.contains(*path)) {
                catalog.opened_for_writing(path, now);
            }
            for (path, len) in &closed {
                catalog.closed(path, Some((*len, now)));
            }
            gone.iter().for_each(|path| catalog.removed(path));
            links.iter().for_each(|link| catalog.link_changed(link));
            // Nobody tells that a handle was closed or a pin removed: it is tried again.
            let busy = catalog.files().iter().filter(|(_, entry)| entry.busy);
            let busy: Vec<PathBuf> = busy.map(|(path, _)| path.to_path_buf()).collect();
            busy.iter().for_each(|path| catalog.closed(path, None));
            catalog.unpinned(Path::new(""));
        }
        shared.notify();
        self.count(shared, began, listing.is_complete, grace);
        Ok(self.seen.values().filter(|seen| seen.settles).count())
    }

    fn examine(&self, shared: &Shared, path: &Path, print: &Print, now_ns: i64) -> io::Result<Examined> {
        let file = shared.open_file(path)?;
        let is_it = |file: &File| Ok::<_, io::Error>(Print::of(&rustix::fs::fstat(file)?) == *print);
        if print.len >= MIN_RELEASE_BYTES {
            let found = scan::found(&shared.store, path)?;
            if !is_it(file.as_file())? {
                return Ok(Examined::Unsettled(true));
            }
            if !matches!(found.state, State::Closed) {
                return Ok(Examined::Entered(Box::new(found)));
            }
        }
        let is_young = print.changed_ns >= now_ns.saturating_sub(QUIET_NS);
        let is_written = is_written(file.as_file())?;
        let is_settled = !is_young && !is_written && is_it(file.as_file())?;
        Ok(if is_settled { Examined::Closed } else { Examined::Unsettled(!is_written) })
    }

    /// Counts how long objects have been unneeded.
    fn count(&mut self, shared: &Shared, began: Instant, is_complete: bool, grace: Duration) {
        let lineages = shared.catalog().files().lineages();
        let keep: HashSet<Id> = lineages.into_iter().filter_map(|lineage| shared.objects.newest(lineage)).collect();
        let unneeded = shared.objects.unneeded(&keep);
        self.unneeded.retain(|id, _| unneeded.contains(id));
        if !is_complete {
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

enum Examined {
    /// It was changed just now (true), or may be written.
    Unsettled(bool),
    Closed,
    /// It is a stub, or nothing that a sealer can look at.
    Entered(Box<FoundFile>),
}
