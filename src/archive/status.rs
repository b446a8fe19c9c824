//! The status of the store and of single files, for users.

use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::{doubted, is_future, wall_ns};
use crate::mirror::Progress;
use crate::recall::{Decoded, MemoryStatus, Reads};
use crate::store::durable::{CrashPoint, DeviceFile};
use crate::store::{Id, STUB_BYTES, Stub, is_recalled, is_trash, modified_ns};

use super::about::About;
use super::catalog::Catalog;
use super::entry::{Entry, State};
use super::growth::{self, Part, Room, Run};
use super::health::{FileStatus, Problem, fault};
use super::look::FRESH;
use super::resident::ResidentReason;
use super::saves::Save;
use super::shared::Shared;
use super::{Archive, ReadError, Reader, Restored, Waits};

/// Problems that a status names; an attribute holds 64 KiB. `stepfs ls` shows all.
const MOST: usize = 32;

/// The content of `stepfs status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Its problems, the worst first; not more than an attribute holds.
    pub problems: Vec<Problem>,
    /// Regular files.
    pub files: u64,
    /// Files that a stub stands for.
    pub released: u64,
    /// Bytes that programs see.
    pub logical_bytes: u64,
    /// Bytes that the store occupies: resident files, stubs and objects; the cache is not counted.
    pub stored_bytes: u64,
    /// Bytes of files that are as they were written.
    pub resident_bytes: u64,
    /// Bytes of objects.
    pub object_bytes: u64,
    /// Bytes of those of them that no file names any more: kept because others are differences to them, or the next
    /// state will be.
    pub unnamed_bytes: u64,
    /// Bytes that programs may still write to the file system of the store.
    pub free_bytes: u64,
    /// Removed files in the trash, and the bytes that programs see of them.
    pub trash_files: u64,
    /// See `trash_files`.
    pub trash_bytes: u64,
    /// How long programs waited for room since the mount.
    pub waits: Waits,
    /// Bytes of decoded files in the cache.
    pub cache_bytes: u64,
    /// Decoded states in memory.
    pub memory: MemoryStatus,
    /// Steps that can be taken now or will be tried again.
    pub queued: u64,
    /// How long the oldest of these steps could have been taken, in seconds. `None` if there is none.
    pub backlog_seconds: Option<u64>,
    /// Files that wait for the rest of their checkpoint.
    pub settling: u64,
    /// Files that wait for a handle to be closed.
    pub busy: u64,
    /// Why a queued step could not be taken, when it is being tried again.
    pub stalled: Option<String>,
    /// Why no room is given back at the moment, if so: something is damaged or missing.
    pub frozen: Option<String>,
    /// Files that could not be archived, each with the reason; they stay as they were written.
    pub failed: Vec<String>,
    /// Lineages from whose lossy files training went on.
    pub restored: Vec<Restored>,
    /// The mirror, if the store is mounted with one.
    pub mirror: Option<Progress>,
    /// The last saves of checkpoints since the mount, the newest first.
    pub saves: Vec<Save>,
    /// The runs with the newest checkpoints, the newest first.
    pub runs: Vec<Run>,
    /// The room for more checkpoints, if the mount has enough of them to tell.
    pub room: Option<Room>,
    /// Reads of released files since the mount.
    pub reads: Reads,
    /// The profile of a file that no rule or mark names. Empty when the store is not mounted.
    pub profile: String,
    /// Process number of the daemon; none when the store is not mounted.
    pub daemon: Option<u32>,
    /// Who reads and writes the resident files, if the store is mounted.
    pub serving: Option<Serving>,
    /// In a shared store: whether this daemon is the keeper, or which one is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<String>,
    /// [`crate::version`] of the daemon; empty when the store is not mounted, or from a daemon that does not tell.
    pub version: String,
}

/// Who reads and writes the resident files of a mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "by", content = "because")]
pub enum Serving {
    /// The kernel.
    Kernel,
    /// The kernel. A helper registers the files with it.
    Helper,
    /// The daemon, for this reason.
    Daemon(String),
}

/// The outstanding steps, and why they are delayed. Programs that wait poll it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Queue {
    /// Steps that can be taken now or will be tried again.
    pub queued: u64,
    /// Why a queued step could not be taken, when it is being tried again.
    pub stalled: Option<String>,
    /// Files that could not be archived, each with the reason; they stay as they were written.
    pub failed: Vec<String>,
    /// Files that are open for writing, or whose close the kernel has not told yet.
    pub open: u64,
    /// Grows with every change of a file or its name.
    pub newest: u64,
    /// The sequence when a file was last opened for writing.
    pub opened: u64,
    /// The lowest such number that a file in the queue, or at work, was opened with, if there is one.
    pub oldest: Option<u64>,
    /// A closed file or a new link was not yet read for the best of a run.
    pub may_learn: bool,
}

impl Queue {
    /// Whether all is done that could be when `newest` was this, and programs have gone on saving: of that something
    /// may be left.
    pub fn has_done(&self, newest: u64) -> bool {
        self.opened > newest && self.oldest.is_none_or(|oldest| oldest > newest)
    }
}

impl Archive {
    /// The state of the store as a whole. Looks at the size of every resident file: not for the file system's threads.
    pub fn status(&self) -> Status {
        if let Some(keeper) = &self.keeper {
            return keeper.status(self.store());
        }
        let mut status = Status {
            object_bytes: self.shared.objects.stored(),
            unnamed_bytes: self.shared.objects.stored_unnamed(),
            cache_bytes: self.shared.recall.cached_bytes(),
            memory: self.shared.recall.memory().status(),
            reads: self.shared.recall.reads(),
            profile: self.shared.store.settings().profiles(Path::new("")).words(),
            frozen: self.shared.objects.frozen().map(String::from),
            restored: self.restores.lineages(),
            mirror: self.mirror.progress(),
            waits: self.reserve.waits(),
            ..Status::default()
        };
        let now_ns = wall_ns();
        let (entries, freed_each) = {
            let mut catalog = self.shared.catalog();
            (status.queued, status.stalled) = self.count_queue(&mut catalog);
            status.settling = catalog.steps().settling() as u64;
            let since = catalog.steps().queued_since();
            status.backlog_seconds = since.map(|since| (now_ns.saturating_sub(since) / 1_000_000_000).max(0) as u64);
            status.saves = catalog.saves.last();
            let entry = |(path, entry): (&Path, &Entry)| (path.to_path_buf(), entry.clone(), None);
            let mut entries: Vec<_> = catalog.files().iter().map(entry).collect();
            for (path, entry, part) in &mut entries {
                if entry.unsound {
                    // Unless the run has left it behind.
                    let decision = catalog.decided().decision(path);
                    entry.unsound = matches!(entry.state, State::Sealed(_)) && decision.is_some_and(|of| !of.has_newer);
                }
                let shrinks = matches!(entry.state, State::Sealed(_)) && catalog.steps().is_to_be_archived(path);
                if matches!(entry.state, State::Released(_)) || entry.state.sealed().is_some() {
                    *part = catalog.files().file(path).map(|file| (Arc::clone(&file.run), shrinks));
                }
            }
            (entries, catalog.saves.freed_each())
        };
        let mut health = Health::of(&self.shared);
        let mut parts = Vec::new();
        for (path, entry, part) in entries {
            let Ok(metadata) = fs::symlink_metadata(self.shared.store.tree().join(&path)) else {
                continue;
            };
            status.files += 1;
            status.logical_bytes += metadata.len();
            if is_trash(&path) {
                status.trash_files += 1;
                status.trash_bytes += metadata.len();
            }
            status.busy += u64::from(entry.busy);
            health.look(&path, &entry, &metadata);
            if let Some((run, shrinks)) = part.filter(|_| !is_trash(&path)) {
                let object =
                    if let State::Released(id) | State::Archived(_, id) = entry.state { Some(id) } else { None };
                let stored = object.and_then(|id| self.shared.objects.get(id)).map(|(_, stored)| stored);
                let (logical, stored) = (metadata.len(), stored.unwrap_or(metadata.blocks() * 512));
                parts.push(Part { path, run, modified_ns: modified_ns(&metadata), logical, stored, shrinks });
            }
            if let Some(failed) = entry.failed.filter(|failed| failed.retry.is_none()) {
                status.failed.push(failed.why);
            }
            match entry.state {
                State::Released(_) => {
                    status.released += 1;
                    status.stored_bytes += STUB_BYTES as u64;
                }
                _ => status.resident_bytes += metadata.blocks() * 512,
            }
        }
        status.stored_bytes += status.resident_bytes + status.object_bytes;
        (status.daemon, status.version) = (Some(std::process::id()), crate::version().into());
        health.conclude(&mut status);
        status.runs = growth::runs(&parts);
        status.room = growth::room(&mut parts, status.free_bytes, &freed_each, now_ns / 1_000_000_000);
        status
    }

    /// The outstanding steps. Reads no file. The keeper's archive looks at the tree first. There files count that a step may be taken of
    /// later, and programs that go on saving do not end a wait.
    pub fn queue(&self) -> Queue {
        let unsettled = self.look(FRESH) as u64;
        let mut catalog = self.shared.catalog();
        let (queued, stalled) = self.count_queue(&mut catalog);
        let (newest, opened, oldest) = catalog.progress();
        let gone = |entry: &Entry| entry.failed.as_ref().filter(|failed| failed.retry.is_none()).map(|f| f.why.clone());
        let failed = catalog.files().iter().filter_map(|(_, entry)| gone(entry)).collect();
        let open = catalog.files().iter().filter(|(_, entry)| matches!(entry.state, State::Staged)).count() as u64;
        let may_learn = catalog.steps().may_learn();
        let (queued, opened) = (queued + unsettled, if self.looks.is_some() { 0 } else { opened });
        Queue { queued, stalled, failed, open, newest, opened, oldest, may_learn }
    }

    /// Steps to take, and why one could not be taken.
    fn count_queue(&self, catalog: &mut Catalog) -> (u64, Option<String>) {
        let (queued, stalled) = catalog.steps().queued();
        let working = usize::from(queued == 0 && catalog.steps().is_busy());
        // Objects without a name were not yet examined.
        let merges = self.merges.pending().max(self.shared.garbage.load(Ordering::Relaxed).into());
        let merging = || self.merges.stalled();
        let links = usize::from(catalog.steps().has_links());
        ((queued + working + merges + links) as u64, stalled.or_else(merging))
    }

    /// The stub in `file`, if the file at `path` is one. Reads one block. A damaged stub names no object: it can be
    /// removed, renamed and overwritten, but reading it is an error. So is one that became zeros, although its bytes
    /// do not show it.
    pub fn stub(&self, path: &Path, file: &fs::File) -> io::Result<Option<Stub>> {
        let store = self.shared.store.id();
        let damaged = || Ok(Some(Stub { store, object: Id::NONE, logical_len: file.metadata()?.len() }));
        match Stub::read(file, store) {
            Ok(None) if self.is_damaged_stub(path) || self.has_lost_its_stub(path, file)? => damaged(),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => damaged(),
            read => read,
        }
    }

    fn is_damaged_stub(&self, path: &Path) -> bool {
        let entry = |entry: &Entry| matches!(entry.state, State::Resident(ResidentReason::DamagedStub));
        self.shared.catalog().get(path).is_some_and(entry)
    }

    /// Whether the file at `path` was a stub at the last look and became zeros. Nothing but its bytes has changed,
    /// and it has no more blocks than a stub.
    fn has_lost_its_stub(&self, path: &Path, file: &fs::File) -> io::Result<bool> {
        let object = match self.shared.catalog().get(path).map(|entry| &entry.state) {
            Some(State::Released(object)) => *object,
            _ => return Ok(false),
        };
        let metadata = file.metadata()?;
        let same_length =
            self.shared.objects.get(object).is_some_and(|(header, _)| header.logical_len == metadata.len());
        if !same_length || metadata.blocks() * 512 > STUB_BYTES as u64 || is_recalled(file) {
            return Ok(false);
        }
        let mut block = [0; STUB_BYTES];
        file.read_exact_at(&mut block, 0)?;
        Ok(block.iter().all(|byte| *byte == 0))
    }

    /// Whether the file at `path` may be a stub. Only the archive makes stubs, and it knows which. A file that a
    /// program wrote is no stub, even with a stub's bytes.
    pub fn may_be_stub(&self, path: &Path) -> bool {
        let unknown = [ResidentReason::DamagedStub, ResidentReason::Unreadable];
        self.shared.catalog().get(path).is_none_or(|entry| match entry.state {
            // If the device failed twice during the release, the entry does not say that it is a stub. Its bytes and
            // their mark do.
            State::Released(_) | State::Archived(..) => true,
            State::Resident(ref why) => unknown.contains(why),
            State::Staged | State::Closed | State::Durable(_) | State::Sealed(_) => false,
        })
    }

    /// Bytes that a stub's object occupies, for st_blocks.
    pub fn stored_bytes(&self, stub: &Stub) -> u64 {
        self.shared.objects.get(stub.object).map_or(0, |(_, stored)| stored)
    }

    /// Opens a released file for reading. Blocks on the device: never on a thread that answers the kernel.
    pub fn reader(&self, stub: &Stub) -> Result<std::sync::Arc<Reader>, ReadError> {
        self.reader_for(stub, 0)
    }

    /// The same for an inode of a mount ([`crate::recall::Recall::reader_for`]).
    pub fn reader_for(&self, stub: &Stub, owner: u64) -> Result<std::sync::Arc<Reader>, ReadError> {
        let open = || {
            let reader = self.shared.recall.reader_for(stub.object, owner)?;
            ReadError::unless_as_long(stub, reader.len())?;
            self.shared.recall.was_opened();
            Ok(reader)
        };
        open().inspect_err(|error| self.shared.recall.read_failed(stub.object, error))
    }

    /// The value of a `user.stepfs.*` attribute (name without the prefix) of the file or directory at `path`.
    ///
    /// - Every path has `store`, `version`, `status` and `gc` (JSON, the last for a run of retention), and `queue` (the
    ///   quick part of the status). `mirror` is JSON too: how far it has come.
    /// - Files have `file`: [`FileStatus`] as JSON.
    /// - Files also have `state`, `profile`, `why` (it is exact, lossy, or as it was written), `release` (the obstacle),
    ///   `generations` (lossy restores behind it), `lossy` ([`super::lossy_words`]) and `best` (the file that names
    ///   it), and `condition` (JSON, for retention). Archived ones also have `object` and `original` (SHA-256).
    /// - Directories have `profile` if one is set for them or above them.
    pub fn attribute(&self, path: &Path, name: &str) -> Option<Vec<u8>> {
        match name {
            "store" => {
                let store = &self.shared.store;
                let place = store.place().unwrap_or_else(|| store.root().to_path_buf());
                return Some(place.into_os_string().into_encoded_bytes());
            }
            "version" => return Some(crate::version().into()),
            "status" => return serde_json::to_vec(&self.status()).ok(),
            _ if self.keeper.is_some() => return self.keeper.as_ref()?.attribute(self.store(), path, name),
            "queue" => return serde_json::to_vec(&self.queue()).ok(),
            "gc" => return serde_json::to_vec(&self.retention.report()).ok(),
            "mirror" => return serde_json::to_vec(&self.mirror.progress()?).ok(),
            _ => {}
        }
        let about = About { shared: &self.shared, restores: &self.restores, path };
        match name {
            "file" => serde_json::to_vec(&FileStatus::of(&about)?).ok(),
            _ => about.attribute(name),
        }
    }

    /// A user sets a `user.stepfs.*` attribute. `sync`, on any path, asks for all outstanding steps now, `gc` for the
    /// policy. `release` asks for the release of the files at and below the path, without waiting for the rest of a
    /// checkpoint.
    ///
    /// # Errors
    /// The errno `EPERM`: all other attributes are stepfs's own.
    pub fn set_attribute(&self, path: &Path, name: &str) -> Result<(), i32> {
        if let Some(keeper) = &self.keeper {
            return keeper.keeping().ok_or(libc::EOPNOTSUPP)?.set_attribute(path, name);
        }
        if name == "sync" || name == "gc" {
            self.look(Duration::ZERO);
        }
        match name {
            "release" => {
                self.tell(path, Catalog::asked_to_release);
                Ok(())
            }
            "sync" => {
                self.shared.note(Catalog::retry);
                self.mirror.hasten();
                Ok(())
            }
            "gc" => {
                self.retention.ask();
                Ok(())
            }
            _ => Err(libc::EPERM),
        }
    }

    /// Brings a released file back for writing: makes a durable file with the attributes of `from`, of which only the
    /// handle may be left. It is the file that a reader gave ([`Reader::give`]), or a new file in `tmp/`. The caller renames it
    /// over the file, and makes later changes durable by the returned descriptor. Blocks until then.
    ///
    /// # Errors
    /// [`ReadError`] names the missing or damaged object, or the device's lack of room.
    pub fn recall(
        &self,
        stub: &Stub,
        from: &fs::File,
        given: Option<(&Decoded, bool)>,
    ) -> Result<(PathBuf, DeviceFile), ReadError> {
        let fail = |error| ReadError::object(stub.object, error);
        // As a reader is told, too: it would become another file.
        if let Some((header, _)) = self.shared.objects.get(stub.object) {
            ReadError::unless_as_long(stub, header.logical_len)?;
        }
        let io = self.shared.io();
        let (path, file) = match given {
            // The descriptor that wrote it: another one may not be told that its bytes did not reach the device.
            Some((decoded, _)) => (decoded.path().to_path_buf(), io.adopt(decoded.file().try_clone().map_err(fail)?)),
            None => {
                let new = self.shared.store.tmp().join(format!("recall-{}", Id::random().map_err(fail)?));
                let created = io.create(&new, CrashPoint::RecallWritten);
                // It may be there all the same.
                let file = created.inspect_err(|_| io.discard(&new, CrashPoint::RecallWritten)).map_err(fail)?;
                (new, file)
            }
        };
        let decode = || -> Result<(), ReadError> {
            if !given.is_some_and(|(_, is_whole)| is_whole) {
                let put = |bytes: &[u8], at| file.write_all_at(bytes, at, CrashPoint::RecallWritten);
                let copied = self.shared.recall.copy(stub.object, &put);
                copied.inspect_err(|error| self.shared.recall.read_failed(stub.object, error))?;
            }
            let metadata = from.metadata().map_err(fail)?;
            crate::store::copy_attributes(from, &metadata, &file, CrashPoint::RecallWritten).map_err(fail)?;
            crate::store::mark_recalled(&file, stub.object);
            Stub::disown_if_possible(&file, CrashPoint::RecallWritten).map_err(fail)?;
            file.sync(CrashPoint::RecallWritten).map_err(fail)
        };
        decode().inspect_err(|_| {
            if given.is_none() {
                io.discard(&path, CrashPoint::RecallWritten);
            }
        })?;
        Ok((path, file))
    }
}

/// Gathers the problems while a status is made.
struct Health<'a> {
    shared: &'a Shared,
    problems: Vec<Problem>,
    /// The largest file that a program wrote and that is still as written, bytes.
    largest: u64,
    /// Files with times in the future: their number, and the one with the latest.
    future: (usize, i64, PathBuf),
    /// Files with weights that are not finite: their number, and the last one by path.
    not_finite: (usize, PathBuf),
}

impl Health<'_> {
    fn of(shared: &Shared) -> Health<'_> {
        Health { shared, problems: Vec::new(), largest: 0, future: Default::default(), not_finite: Default::default() }
    }

    fn look(&mut self, path: &Path, entry: &Entry, metadata: &fs::Metadata) {
        if !matches!(entry.state, State::Released(_)) {
            self.largest = self.largest.max(metadata.len());
        }
        let (modified_ns, (count, latest, of)) = (modified_ns(metadata), &mut self.future);
        if is_future(modified_ns) {
            *count += 1;
            if modified_ns > *latest {
                (*latest, *of) = (modified_ns, path.to_path_buf());
            }
        }
        if entry.unsound {
            self.not_finite = (self.not_finite.0 + 1, path.to_path_buf());
        }
        if entry.cut {
            return self.problems.push(Problem::cut_short(path, "the disk was full when a program wrote it"));
        }
        let Some(why) = fault(self.shared, entry) else { return };
        self.problems.push(match &entry.state {
            State::Resident(ResidentReason::CutShort(_)) => Problem::cut_short(path, &why),
            State::Resident(ResidentReason::NotDurable) => {
                Problem::new("failed", format!("{}: {why}", path.display()), "save it again")
            }
            _ => Problem::damaged(path, &why),
        });
    }

    /// Adds what concerns the whole store, and writes all into the status.
    fn conclude(mut self, status: &mut Status) {
        let root = self.shared.store.root();
        let place = self.shared.store.place();
        if place.as_deref() != Some(root) {
            let place = place.map_or_else(|| "it is gone".into(), |place| format!("it is at {}", place.display()));
            let says = format!("the store is no longer at {}: {place}, and nothing is archived", root.display());
            let mend = "move it back, or unmount and mount it from its new place";
            self.problems.push(Problem::new("moved", says, mend));
        } else if !self.shared.store.objects().is_dir() {
            let says = format!("{} is gone: released files cannot be read", self.shared.store.objects().display());
            let mend = "put it back; else unmount, and `stepfs verify --repair STORE`";
            self.problems.push(Problem::new("damaged", says, mend));
        } else if !self.shared.store.tmp().is_dir() {
            let tmp = self.shared.store.tmp();
            let says = format!("{} is gone: nothing is archived", tmp.display());
            self.problems.push(Problem::new("stalled", says, format!("mkdir -m 700 {}", tmp.display())));
        }
        if let Ok(found) = rustix::fs::statvfs(root) {
            status.free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
            self.problems.extend(Problem::full(status.free_bytes, self.largest));
        }
        let (count, latest, path) = &self.future;
        self.problems.extend((*count > 0).then(|| Problem::future(*count, path, *latest)));
        self.problems.extend(Problem::leapt(doubted()));
        let (count, path) = &self.not_finite;
        self.problems.extend((*count > 0).then(|| Problem::not_finite(*count, path)));
        if let Some(why) = &status.stalled {
            self.problems.push(Problem::new("stalled", why, "stepfs tries again by itself"));
        }
        let lagging = status
            .mirror
            .iter()
            .flat_map(|mirror| mirror.failing.iter().chain(&mirror.failed).map(move |why| (mirror, why)));
        for (mirror, why) in lagging {
            self.problems.push(Problem::new(
                "mirror",
                format!("the mirror {} lags behind: {why}", mirror.url),
                "stepfs tries again by itself",
            ));
        }
        if let Some(why) = &status.frozen {
            let says = format!("stepfs removes nothing, and frees no room: {why}");
            self.problems.push(Problem::new("kept", says, "`stepfs verify STORE` names it"));
        }
        let again = "it stays as it was written; `stepfs sync` tries again";
        self.problems.extend(status.failed.iter().map(|why| Problem::new("failed", why, again)));
        let order =
            ["moved", "damaged", "cut-short", "not-finite", "full", "stalled", "mirror", "failed", "kept", "clock"];
        self.problems.sort_by_key(|problem| order.iter().position(|kind| *kind == problem.kind));
        let more = self.problems.len().saturating_sub(MOST);
        self.problems.truncate(MOST);
        if more > 0 {
            self.problems.push(Problem::new(
                "failed",
                format!("{more} more files like these"),
                "`stepfs ls` shows them",
            ));
        }
        status.failed.truncate(MOST);
        status.problems = self.problems;
    }
}
