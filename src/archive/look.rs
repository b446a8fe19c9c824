//! The keeper of a shared store looks at the tree again and again, since nobody tells it of changes on other machines. The
//! difference to the look before goes to the catalog, as the mount's notes do in a store of one daemon.
//!
//! A file counts as closed once no daemon has it open to write, and nothing has changed it for [`QUIET_NS`] by the server's clock.
//! Two changes may have one time if it is younger. A stub counts at once: no program changes it. Most looks of the keeper's own
//! leave files alone that were written within this time ([`Eyes::spares`]).
//!
//! An object goes once no name needed it at two complete looks a grace apart, nor at any look between them. A file that cannot be read
//! may need any object, and so may all below a directory that cannot be listed.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::store::fence::is_gone;
use crate::store::{Fingerprint, Id, MIN_RELEASE_BYTES, Store, beneath, is_pinned, locks};

use super::entry::{Entry, Held, State};
use super::namespace::found_at;
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
/// A caller that asks again and again gets the last look, unless it began longer ago than this.
pub(super) const FRESH: Duration = Duration::from_millis(250);
/// How long an object stays that nothing needs. A program may have a name in a place where no look finds it, for a while: it is
/// just being renamed; and readers on other machines may have it open.
const GRACE: Duration = Duration::from_secs(3600);
/// For tests: the grace in milliseconds.
const GRACE_VARIABLE: &str = "STEPFS_GRACE_MS";

/// A look at all names.
#[derive(Default)]
struct Listing {
    files: HashMap<PathBuf, Fingerprint>,
    links: HashMap<PathBuf, Fingerprint>,
    /// No name can have been missed: no directory changed between its listing and the end of the look.
    is_complete: bool,
    /// Of a directory that this daemon may not list.
    warning: String,
}

impl Listing {
    /// Lists the tree; `now_ns` is the server's clock before.
    fn of(store: &Store, now_ns: i64, spares: Spares) -> io::Result<Listing> {
        let mut listing = Listing { is_complete: true, ..Listing::default() };
        let (mut rest, mut directories) = (vec![PathBuf::new()], Vec::new());
        while let Some(path) = rest.pop() {
            match listing.enter(store, &path, &mut rest, spares) {
                Ok(print) => directories.push((path, print)),
                Err(error) => {
                    listing.is_complete = false;
                    match error.kind() {
                        io::ErrorKind::PermissionDenied => {
                            listing.warning = format!("{}: cannot be listed, so no object is removed", path.display());
                        }
                        _ if is_gone(&error) && !path.as_os_str().is_empty() => {}
                        _ => return Err(error),
                    }
                }
            }
        }
        let is_old =
            |print: &Fingerprint| print.changed_ns.max(print.modified_ns) < now_ns.saturating_sub(DIRECTORY_NS);
        let is_still = |path: &Path, print: &Fingerprint| open(store, path).is_ok_and(|(_, now)| now == *print);
        listing.is_complete &= directories.iter().all(|(path, print)| is_old(print) && is_still(path, print));
        Ok(listing)
    }

    /// Lists a directory; those in it are left to do. Answers what would show a change of it.
    fn enter(&mut self, store: &Store, dir: &Path, rest: &mut Vec<PathBuf>, spares: Spares) -> io::Result<Fingerprint> {
        let (directory, print) = open(store, dir)?;
        for entry in fs::read_dir(beneath::by_descriptor(&directory))? {
            let entry = entry?;
            let below = dir.join(entry.file_name());
            let glance = spares.and_then(|_| store.engine().glance(&directory, entry.file_name()));
            if let Some(print) = glance.filter(|print| spares.is_some_and(|spares| spares(&below, print))) {
                self.files.insert(below, print);
                continue;
            }
            // The answer is that of the next call.
            let _ = store.engine().refresh(&directory, entry.file_name());
            let metadata = match entry.metadata() {
                Err(error) if is_gone(&error) => {
                    self.is_complete = false;
                    continue;
                }
                metadata => metadata?,
            };
            if metadata.is_dir() {
                rest.push(below);
            } else if metadata.is_file() {
                self.files.insert(below, Fingerprint::of(&metadata));
            } else if metadata.is_symlink() {
                self.links.insert(below, Fingerprint::of(&metadata));
            }
        }
        Ok(print)
    }
}

/// A directory of the tree, as the server has it.
fn open(store: &Store, path: &Path) -> io::Result<(File, Fingerprint)> {
    let directory = beneath::open_dir(&store.tree(), path)?;
    store.engine().refresh(&directory, "")?;
    let print = Fingerprint::of(&directory.metadata()?);
    Ok((directory, print))
}

/// Tells a file that is left alone. `None`: none is.
type Spares<'a> = Option<&'a dyn Fn(&Path, &Fingerprint) -> bool>;

struct Seen {
    print: Fingerprint,
    stage: Stage,
}

/// How far a file is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Somebody may write it.
    Written,
    /// It was closed or changed just now, and will be given if nothing happens any more.
    Young,
    /// It cannot be read.
    Hidden,
    /// The catalog has it as closed.
    Given,
    /// The catalog has it as a stub, perhaps as one that is damaged.
    Stub,
}

/// The looks of one keeper.
pub(super) struct Looks {
    shared: Arc<Shared>,
    grace: Duration,
    /// Taken for a whole look, before all other locks. Threads that want a look wait for it.
    eyes: Mutex<Eyes>,
}

impl Looks {
    pub(super) fn of(shared: &Arc<Shared>) -> Looks {
        let set = std::env::var(GRACE_VARIABLE).ok().and_then(|text| text.parse().ok());
        let grace = set.map_or(GRACE, Duration::from_millis);
        Looks { shared: Arc::clone(shared), grace, eyes: Mutex::default() }
    }

    /// Looks, unless a look has ended that began at most so long ago. Answers how many files no step can be taken of yet, because
    /// they are being written or changed just now. If the tree cannot be looked at, it is one at least: nobody knows that nothing is
    /// left. `gently`: whether it may spare files ([`Eyes::spares`]).
    pub(super) fn look(&self, age: Duration, gently: bool) -> usize {
        let asked = Instant::now();
        let mut eyes = self.eyes.lock().unwrap_or_else(PoisonError::into_inner);
        if gently || eyes.thorough.is_none_or(|began| began + age < asked) {
            let began = Instant::now();
            // A stub that somebody moves and touches again and again is seen once in each grace.
            let is_due = eyes.thorough.is_none_or(|last| began - last >= self.grace / 2);
            let gently = gently && !is_due && self.shared.objects.frozen().is_none();
            let now = self.shared.store.beat();
            let looked = now.and_then(|now_ns| eyes.look(&self.shared, now_ns, self.grace, gently));
            if let Err(error) = looked {
                eyes.tell(format!("the tree cannot be looked at: {error}; the next try follows"));
                return 1;
            }
            if !gently {
                eyes.thorough = Some(began);
            }
        }
        eyes.unsettled()
    }

    /// Looks until the archive stops.
    pub(super) fn run(&self) {
        let mut pause = Duration::ZERO;
        while self.shared.rest(pause) {
            let began = Instant::now();
            self.look(Duration::ZERO, true);
            pause = PAUSE.max(began.elapsed() * PAUSE_FACTOR);
        }
    }
}

/// What the looks have seen.
#[derive(Default)]
struct Eyes {
    /// When the last look began that has ended, and left no file alone.
    thorough: Option<Instant>,
    /// And the last one that was complete.
    complete: Option<Instant>,
    seen: HashMap<PathBuf, Seen>,
    links: HashMap<PathBuf, Fingerprint>,
    /// Objects that nothing needed, since a complete look at this time.
    unneeded: HashMap<Id, Instant>,
    /// The last warning.
    told: String,
}

/// Whether somebody writes a file, or may: through a daemon, or on this machine without one. A daemon's own descriptor counts as a
/// writer, even if programs only read.
fn is_written(file: &File) -> io::Result<bool> {
    Ok(locks::is_open(file, true)? || !locks::is_open(file, false)? && locks::has_writer(file)?)
}

impl Eyes {
    /// Warns of something that every look finds again: once.
    fn tell(&mut self, news: String) {
        if self.told != news && !news.is_empty() {
            log::warn!("{news}");
        }
        self.told = news;
    }

    /// Whether a program wrote a file just now, and probably goes on: it is left alone then. CephFS would make the writer's kernel write
    /// its pages out, and do without a cache for as long as a minute. A stub is looked at.
    fn spares(&self, path: &Path, print: &Fingerprint, now_ns: i64) -> bool {
        let is_stub = |seen: &Seen| seen.stage == Stage::Stub && seen.print.ino == print.ino;
        print.modified_ns.abs_diff(now_ns) <= QUIET_NS.unsigned_abs() && !self.seen.get(path).is_some_and(is_stub)
    }

    /// Looks, and tells the catalog the difference. `gently`: whether it spares files.
    fn look(&mut self, shared: &Shared, now_ns: i64, grace: Duration, gently: bool) -> io::Result<()> {
        let began = Instant::now();
        let tree = shared.store.tree();
        shared.quiet_ns.store(now_ns.saturating_sub(QUIET_NS), Ordering::Relaxed);
        let spares = |path: &Path, print: &Fingerprint| self.spares(path, print, now_ns);
        let listing = Listing::of(&shared.store, now_ns, gently.then_some(&spares))?;
        self.tell(listing.warning);
        let mut changes = Vec::new();
        for (path, print) in &listing.files {
            let known = self.seen.get(path).filter(|known| known.print == *print).map(|known| known.stage);
            if matches!(known, Some(Stage::Given | Stage::Stub)) {
                continue;
            }
            let is_spared = gently && self.spares(path, print, now_ns);
            let examined = if is_spared { Ok((Stage::Young, None)) } else { examine(shared, path, print, now_ns) };
            let (stage, found) = match examined {
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
                        let held = if let State::Released(id) = file.state { shared.objects.hold(id) } else { None };
                        if known.is_some() {
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
        try_again(shared);
        if listing.is_complete {
            self.complete = Some(began);
        }
        self.count(shared, listing.is_complete, grace);
        shared.notify();
        Ok(())
    }

    /// How many files will be given if nothing happens to them any more.
    fn unsettled(&self) -> usize {
        self.seen.values().filter(|seen| seen.stage == Stage::Young).count()
    }

    /// Counts how long objects have been unneeded.
    fn count(&mut self, shared: &Shared, is_complete: bool, grace: Duration) {
        let lineages = shared.catalog().files().lineages();
        let keep: HashSet<Id> = lineages.into_iter().filter_map(|lineage| shared.objects.newest(lineage)).collect();
        let unneeded = shared.objects.unneeded(&keep);
        self.unneeded.retain(|id, _| unneeded.contains(id));
        let Some(now) = self.complete else { return };
        for id in unneeded.into_iter().filter(|_| is_complete) {
            self.unneeded.entry(id).or_insert(now);
        }
        let is_ripe = |since: &Instant| now.saturating_duration_since(*since) >= grace && *since < now;
        let ripe: HashSet<Id> = self.unneeded.iter().filter(|(_, since)| is_ripe(since)).map(|(id, _)| *id).collect();
        if !ripe.is_empty() {
            shared.garbage.store(true, Ordering::Relaxed);
        }
        *shared.ripe() = ripe;
    }
}

/// Nobody tells that a handle was closed or a pin removed: it is looked at.
fn try_again(shared: &Shared) {
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

/// How far a file is known, and the file if it is a stub, or nothing that a sealer can look at.
fn examine(shared: &Shared, path: &Path, print: &Fingerprint, now_ns: i64) -> io::Result<(Stage, Option<FoundFile>)> {
    let file = shared.open_file(path)?;
    let found = (print.len >= MIN_RELEASE_BYTES).then(|| scan::found(&shared.store, path)).transpose()?;
    let is_open = is_written(file.as_file())?;
    let is_it = Fingerprint::of(&file.metadata()?) == *print;
    let found = found.filter(|found| is_it && !matches!(found.state, State::Closed));
    let is_stub = found.as_ref().is_some_and(|found| found.state.may_be_stub());
    Ok(match () {
        () if is_stub => (Stage::Stub, found),
        // It may have been closed just now. A daemon that replaces it has a lock like a writer's.
        () if is_open && !locks::is_passing(file.as_file())? && is_written(file.as_file())? => (Stage::Written, None),
        () if is_open || !is_it || print.changed_ns >= now_ns.saturating_sub(QUIET_NS) => (Stage::Young, None),
        () => (Stage::Given, found),
    })
}

#[cfg(test)]
mod tests;
