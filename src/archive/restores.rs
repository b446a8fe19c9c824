//! Counts restores: training goes on from a lossy file. The next states of the lineage are then kept as faithfully
//! as that number of restores needs (`store/profile.rs`).
//!
//! Reading is not restoring: programs also compare, copy and evaluate checkpoints. A restore is a process that reads
//! half of a lossy file, or more, and later saves a newer state of its lineage. The mount says which process opens a
//! file. Files are told apart by their identity, since programs write under one name and rename to another.

use std::collections::{HashSet, VecDeque};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::clock::stamp_ns;
use crate::store::object::{Id, Object};
use crate::store::{self, Profiles, Store};
use crate::sync::{Mutex, MutexGuard};

use super::entry::State;
use super::namespace::FileId;
use super::shared::Shared;

/// Reads and files that are remembered; the oldest go first. A job's ranks on one node read some thousand files when
/// they start. Each takes 50 bytes.
const MOST: usize = 4096;
/// How long a read is remembered when its process has ended. The last files of the process are closed and renamed by
/// then. Afterwards the kernel may give the number to another process.
const REMEMBERED: Duration = Duration::from_secs(60);

/// Notices restores, and keeps the store's record of them.
pub struct Restores {
    shared: Arc<Shared>,
    noticed: Noticed,
    /// The store's record. Encoders, the housekeeper and threads that ask for a status take it, and may read an object
    /// under it: a count must have the restore that is being entered. Only `noticed` and the locks of `objects` under it.
    known: Mutex<store::Restores>,
}

/// What may become a restore. Threads that answer the kernel take the lock for moments, also under the file system's
/// lock, and so do those that take `known`. No other lock under it.
#[derive(Debug, Default)]
struct Noticed(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    /// The newest read of each process and lineage; the oldest first.
    reads: VecDeque<Read>,
    /// Files, and the process that was the last to open each for writing, if it has a read; the oldest first.
    written: VecDeque<(FileId, u32)>,
    /// A restore was entered that is not in the store yet.
    news: bool,
}

/// A process has read half of a lossy file, or more.
#[derive(Debug)]
struct Read {
    by: u32,
    lineage: u64,
    object: Id,
    /// When, in nanoseconds since 1970.
    at_ns: i64,
    /// When it was found that the process has ended.
    ended: Option<Instant>,
}

impl Seen {
    fn read(&mut self, read: Read) {
        self.reads.retain(|known| (known.by, known.lineage) != (read.by, read.lineage));
        self.reads.push_back(read);
        if self.reads.len() > MOST {
            self.reads.pop_front();
        }
    }

    fn written(&mut self, file: FileId, by: Option<u32>) {
        self.written.retain(|(known, _)| *known != file);
        self.written.extend(by.map(|by| (file, by)));
        if self.written.len() > MOST {
            self.written.pop_front();
        }
    }

    /// The files that may turn out to be states of a restored run. Forgets all others.
    fn candidates(&mut self) -> HashSet<FileId> {
        if self.written.is_empty() {
            return HashSet::new();
        }
        let readers: HashSet<u32> = self.reads.iter().map(|read| read.by).collect();
        self.written.retain(|(_, by)| readers.contains(by));
        self.written.iter().map(|(file, _)| *file).collect()
    }

    /// A file is a state of a lineage, and was modified then. Takes the read that its writer went on from, if any.
    fn saved(&mut self, file: FileId, lineage: u64, modified_ns: i64) -> Option<Read> {
        let (_, by) = *self.written.iter().find(|(known, _)| *known == file)?;
        let is_it = |read: &Read| (read.by, read.lineage) == (by, lineage) && read.at_ns <= modified_ns;
        let at = self.reads.iter().position(is_it)?;
        self.reads.remove(at)
    }
}

/// The numbers of a thread's process, and of the process that started it. `None` if they cannot be seen here: a thread
/// of another PID namespace is 0. Asks the kernel, and waits for nobody.
fn process_and_parent(thread: u32) -> Option<(u32, u32)> {
    let status = fs::read(format!("/proc/{thread}/status")).ok()?;
    // The name of the program may be any bytes.
    let status = String::from_utf8_lossy(&status);
    let value = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    // A thread of the kernel has no memory. It may serve NFS, where it reads and writes for everybody.
    value("VmSize:")?;
    Some((value("Tgid:")?.trim().parse().ok()?, value("PPid:")?.trim().parse().ok()?))
}

/// A lineage that was restored from lossy files, as users are told of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    /// Path of the file that was restored last.
    pub path: String,
    /// How often the lineage was restored.
    pub restores: u32,
    /// How often that was expected, if somebody said so.
    pub expected_restores: Option<u32>,
    /// Lossy restores behind the sealed state.
    pub generations: u32,
    /// The profile that the rules or an attribute ask for.
    pub asked: String,
    /// The profile of its next checkpoints.
    pub profile: String,
}

impl Restored {
    /// Everything that is remembered in a store.
    pub fn all(store: &Store, restores: &store::Restores) -> Vec<Restored> {
        let one = |(_, lineage): (u64, &crate::store::Lineage)| {
            let path = Path::new(&lineage.origin);
            let asked = store.profiles(path).unwrap_or_else(|_| store.settings().profiles(path));
            Restored {
                path: lineage.origin.clone(),
                restores: lineage.restores,
                expected_restores: asked.expected_restores(),
                generations: lineage.generations(i64::MAX),
                asked: asked.words(),
                profile: asked.in_force(lineage.restores).words(),
            }
        };
        restores.all().map(one).collect()
    }
}

impl Noticed {
    /// Forgets the reads of processes that are gone. Asks the kernel.
    fn forget(&self) {
        let running = |read: &Read| read.ended.is_none().then_some(read.by);
        let mut ended: HashSet<u32> = self.seen().reads.iter().filter_map(running).collect();
        ended.retain(|by| !Path::new(&format!("/proc/{by}")).exists());
        let (mut seen, now) = (self.seen(), Instant::now());
        seen.reads.iter_mut().filter(|read| ended.contains(&read.by)).for_each(|read| read.ended = Some(now));
        seen.reads.retain(|read| read.ended.is_none_or(|at| now.duration_since(at) < REMEMBERED));
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The process of a thread, if it can be seen.
pub fn process_of(thread: u32) -> Option<u32> {
    process_and_parent(thread).map(|(process, _)| process)
}

impl Restores {
    /// Loads a store's record. An unreadable record is begun anew, since checkpoints do not depend on it.
    pub(super) fn load(shared: Arc<Shared>) -> Restores {
        let known = store::Restores::load(&shared.store).unwrap_or_else(|error| {
            log::warn!("the record of restores cannot be read, and is begun anew: {error}");
            store::Restores::default()
        });
        Restores { shared, noticed: Noticed::default(), known: Mutex::new(known) }
    }

    fn known(&self) -> MutexGuard<'_, store::Restores> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a restore was entered that is not durable yet.
    pub(super) fn has_news(&self) -> bool {
        self.noticed.seen().news
    }

    /// The process of a thread, or else the one that started it, if that has read a lossy file. Saves often happen in a
    /// process of their own.
    pub fn who_read(&self, thread: u32) -> Option<u32> {
        if self.noticed.seen().reads.is_empty() {
            return None;
        }
        let (process, parent) = process_and_parent(thread)?;
        let seen = self.noticed.seen();
        [process, parent].into_iter().find(|by| seen.reads.iter().any(|read| read.by == *by))
    }

    /// A process has read half of a released file, or more. For any thread: waits for nothing.
    pub fn read_by(&self, object: Id, by: u32) {
        if let Some((header, _)) = self.shared.objects.get(object).filter(|(header, _)| header.lossy) {
            // A file written right after must not seem older.
            let read = Read { by, lineage: header.lineage, object, at_ns: stamp_ns(), ended: None };
            self.noticed.seen().read(read);
        }
    }

    /// A file was opened for writing, by a process with a read or by another one. Must come after
    /// [`super::Archive::opened_for_writing`]: what the file was before is not the process's state.
    pub fn written_by(&self, file: FileId, by: Option<u32>) {
        self.noticed.seen().written(file, by);
    }

    /// The store's record, once the restores are entered whose new states are sealed. Blocks on the device.
    ///
    /// Looks at all files, but only while a process with a read has written some.
    fn restores(&self) -> MutexGuard<'_, store::Restores> {
        let written = self.noticed.seen().candidates();
        let mut saved = Vec::new();
        if !written.is_empty() {
            let catalog = self.shared.catalog();
            let states = catalog.files().iter().filter_map(|(_, entry)| match &entry.state {
                State::Sealed(sealed) | State::Archived(sealed, _) => Some(sealed),
                _ => None,
            });
            // Training has not gone on in a copy.
            saved.extend(states.filter(|sealed| !sealed.copy && written.contains(&sealed.file)).cloned());
        }
        let mut known = self.known();
        for state in saved {
            let read = self.noticed.seen().saved(state.file, state.lineage, state.modified_ns);
            // Nothing was restored by a read that failed.
            let read = read.filter(|read| self.shared.recall.failure(read.object).is_none());
            read.into_iter().for_each(|read| self.enter(&mut known, state.lineage, read.object, read.at_ns));
        }
        known
    }

    /// Training goes on from a released file: for tests without a mount.
    pub fn restored(&self, object: Id) {
        if let Some((header, _)) = self.shared.objects.get(object).filter(|(header, _)| header.lossy) {
            self.enter(&mut self.known(), header.lineage, object, stamp_ns());
        }
        self.shared.notify();
    }

    fn enter(&self, known: &mut store::Restores, lineage: u64, object: Id, at_ns: i64) {
        let of = |object: std::sync::Arc<Object>| (object.index().origin.clone(), object.index().generations);
        let (origin, generations) = self.shared.objects.open(object).map(of).unwrap_or_default();
        known.restored(lineage, at_ns, generations, &origin);
        log::info!("{origin}: restored, {} of its lineage", times(known.seen(lineage)));
        self.noticed.seen().news = true;
    }

    /// Makes the record of restores durable. For the housekeeper.
    pub(super) fn note(&self) {
        // Asked before: whatever an ended process has closed is entered then.
        let all_sealed = !self.shared.catalog().steps().has_unsealed();
        drop(self.restores());
        if all_sealed {
            self.noticed.forget();
        }
        if !std::mem::take(&mut self.noticed.seen().news) {
            return;
        }
        if !self.shared.catalog().steps().has_unsealed() {
            let lineages = self.shared.catalog().files().lineages();
            let lives = |lineage| lineages.contains(&lineage) || self.shared.objects.newest(lineage).is_some();
            self.known().retain(lives);
        }
        let known = self.known().clone();
        if let Err(error) = known.save(&self.shared.store) {
            log::warn!("the record of restores cannot be written now; the next restore tries again: {error}");
        }
    }

    /// The restored lineages, for users.
    pub(super) fn lineages(&self) -> Vec<Restored> {
        let known = self.restores().clone();
        Restored::all(&self.shared.store, &known)
    }

    /// The profiles with which a file is archived now; says so if more restores than expected have made them finer.
    pub(super) fn profiles(&self, path: &Path, lineage: u64) -> io::Result<Profiles> {
        let asked = self.shared.store.profiles(path)?;
        let seen = self.seen_of(lineage);
        let used = asked.in_force(seen);
        if let Some(expected) = asked.expected_restores().filter(|expected| seen > *expected && used != asked) {
            let (used, asked) = (used.words(), asked.words());
            log::info!("{}: {used} instead of {asked}: restored {}, {expected} expected", path.display(), times(seen));
        }
        Ok(used)
    }

    /// How often a lineage was restored.
    pub(super) fn seen_of(&self, lineage: u64) -> u32 {
        self.restores().seen(lineage)
    }

    /// Lossy restores behind a state of a lineage that was modified at this time, and is not archived yet.
    pub(super) fn generations_at(&self, lineage: u64, modified_ns: i64) -> u32 {
        self.restores().generations(lineage, modified_ns)
    }

    /// Lossy restores behind a file; `None` while it is not known which lineage it has. Blocks on the device.
    pub(super) fn generations(&self, state: &State) -> Option<u32> {
        match state {
            State::Durable(sealed) | State::Sealed(sealed) => {
                Some(self.generations_at(sealed.lineage, sealed.modified_ns))
            }
            State::Archived(_, id) | State::Released(id) => {
                Some(self.shared.objects.open(*id).ok()?.index().generations)
            }
            State::Staged | State::Closed | State::Resident(_) => None,
        }
    }
}

fn times(count: u32) -> String {
    if count == 1 { "once".into() } else { format!("{count} times") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_is_bounded_and_ends_with_its_process() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let read = |by, lineage| Read { by, lineage, object: Id::NONE, at_ns: 0, ended: None };
        let file = |ino| FileId { dev: 0, ino };
        let noticed = Noticed::default();
        let left = || {
            let mut seen = noticed.seen();
            (seen.candidates(), seen.reads.iter().map(|read| read.by).collect::<Vec<_>>())
        };
        for number in 0..MOST as u64 + 9 {
            noticed.seen().read(read(child.id(), number));
            noticed.seen().written(file(number), Some(child.id()));
        }
        noticed.seen().read(read(std::process::id(), 0));
        assert_eq!((left().0.len(), left().1.len()), (MOST, MOST));
        assert!(!left().0.contains(&file(8)), "the oldest goes first");
        // Its last file may not be sealed yet.
        noticed.forget();
        assert_eq!(left().1.len(), MOST);
        let long_ago = |read: &mut Read| read.ended = read.ended.and_then(|at| at.checked_sub(REMEMBERED));
        noticed.seen().reads.iter_mut().for_each(long_ago);
        noticed.forget();
        assert_eq!(left(), (HashSet::new(), vec![std::process::id()]));
    }

    #[test]
    fn a_thread_belongs_to_its_process() {
        let thread = || fs::read_link("/proc/thread-self").unwrap().file_name()?.to_str()?.parse().ok();
        let own = move || process_and_parent(thread()?);
        let of_thread = std::thread::spawn(own).join().unwrap();
        assert_eq!(of_thread, Some((std::process::id(), std::os::unix::process::parent_id())));
        assert_eq!(process_and_parent(0), None, "a thread of another PID namespace");
    }
}
