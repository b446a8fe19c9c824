//! How a released file is opened, and how it becomes resident again.
//!
//! Both take long, so a worker does them, without the table's lock. Meanwhile the node is in transition: the archive
//! finds it busy. Another open or truncation of it waits on its list, and tries again afterwards.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fuser::FileType;

use super::errno::Result;
use super::inodes::Table;
use super::node::{Opened, Source};
use super::shared::{put_in_place, until_free};
use super::tree::Tree;
use super::workers::Workers;
use crate::archive::FileId;
use crate::recall::Reader;
use crate::store::beneath::Reached;
use crate::store::durable::{CrashPoint, DeviceFile, scratch};
use crate::store::{Stub, changed_ns, copy_attributes, copy_to_new_bytes, replace_stub, sync_replaced};
use crate::sync::MutexGuard;

/// The step that a released file needs first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecallGoal {
    /// Open its object for reading.
    Reader,
    /// Make it resident with its bytes: it is going to be changed.
    Bytes,
    /// Make it resident with its bytes: a user wants it so.
    Resident,
    /// Make it resident and empty: its bytes are not wanted any more.
    Empty,
}

/// An operation on a file that may have to wait for [`Recalls::make`].
pub(super) enum Step<T> {
    /// It is done.
    Done(T),
    /// This is needed first; then try again.
    First(RecallGoal),
}

/// A reader and the stub that it reads.
pub(super) type Prepared = Option<(Stub, Arc<Reader>)>;

/// Ends a transition in every case.
struct Transition {
    recalls: Recalls,
    ino: u64,
}

impl Drop for Transition {
    fn drop(&mut self) {
        let mut table = self.recalls.tree.table();
        let waiting = table.get_mut(self.ino).and_then(|node| node.waiting.take());
        table.reap(self.ino);
        drop(table);
        for job in waiting.into_iter().flatten() {
            self.recalls.workers.submit(job);
        }
    }
}

/// Times that a stub's attributes are copied because a program changed them meanwhile, or since the clock stands still as on a
/// virtual machine that waits for its host. After that the file is busy: nothing was done, and no change is lost.
const MOST_ROUNDS: u32 = 64;
/// The kernel's clock for files usually advances within this time.
const A_TICK: Duration = Duration::from_millis(5);

/// A file's attributes at some time.
struct Seen {
    metadata: Metadata,
    /// The clock had advanced since the last change, so a later change has another time.
    settled: bool,
}

impl Seen {
    /// `stamp`: the clock of the file system, before.
    fn of(file: &File, stamp: i64) -> io::Result<Seen> {
        let metadata = file.metadata()?;
        Ok(Seen { settled: changed_ns(&metadata) < stamp, metadata })
    }

    fn is_still(&self, now: &Seen) -> bool {
        let changed = |seen: &Seen| (seen.metadata.ctime(), seen.metadata.ctime_nsec());
        self.settled && changed(self) == changed(now)
    }
}

/// A file that is removed unless it was put in its place.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = scratch::remove(&self.0) {
            log::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// The way from a stub to its bytes.
#[derive(Clone)]
pub(super) struct Recalls {
    tree: Arc<Tree>,
    pub(super) workers: Arc<Workers>,
}

impl Recalls {
    pub(super) fn new(tree: Arc<Tree>) -> Self {
        Self { tree, workers: Arc::default() }
    }

    /// Takes the wanted step with a released file, then calls `again` from a worker. Calls it at once if no step is
    /// needed.
    pub(super) fn make(&self, ino: u64, wanted: RecallGoal, again: impl FnOnce(Result<Prepared>) + Send + 'static) {
        let mut table = self.tree.table();
        let node = match table.node_mut(ino) {
            Ok(node) => node,
            Err(fault) => {
                drop(table);
                return again(Err(fault));
            }
        };
        if let Some(waiting) = &mut node.waiting {
            waiting.push(Box::new(move || again(Ok(None))));
            return;
        }
        let Some(stub) = node.stub.clone() else {
            drop(table);
            return again(Ok(None));
        };
        node.waiting = Some(Vec::new());
        drop(table);
        let recalls = self.clone();
        let transition = Transition { recalls: self.clone(), ino };
        self.workers.submit(Box::new(move || {
            // `Locked`: another daemon recalls it, or changes its attributes.
            let made = until_free(Instant::now(), || recalls.prepare(ino, stub.clone(), wanted));
            drop(transition);
            again(made);
        }));
    }

    fn prepare(&self, ino: u64, stub: Stub, wanted: RecallGoal) -> Result<Prepared> {
        match wanted {
            RecallGoal::Reader => Ok(Some((stub.clone(), self.tree.archive().reader_for(&stub, ino)?))),
            RecallGoal::Bytes | RecallGoal::Resident | RecallGoal::Empty => {
                self.bring_back(ino, &stub, wanted).map(|()| None)
            }
        }
    }

    /// Makes a released file resident, then calls `done` from a worker; at once when it is.
    pub(super) fn recall(&self, ino: u64, done: impl FnOnce(Result<()>) + Send + 'static) {
        let state = self.tree.table().node(ino).map(|node| (node.kind, node.stub.is_none() && node.waiting.is_none()));
        match state {
            Ok((FileType::RegularFile, true)) => done(Ok(())),
            Ok((FileType::RegularFile, false)) => {
                let recalls = self.clone();
                let again: Box<dyn FnOnce(Result<Prepared>) + Send> = Box::new(move |made| match made {
                    Ok(_) => recalls.recall(ino, Box::new(done) as Box<dyn FnOnce(Result<()>) + Send>),
                    Err(fault) => done(Err(fault)),
                });
                self.make(ino, RecallGoal::Resident, again);
            }
            Ok((FileType::Directory, _)) => done(Err(libc::EISDIR.into())),
            Ok(_) => done(Err(libc::EINVAL.into())),
            Err(fault) => done(Err(fault)),
        }
    }

    /// A new path in the store's `tmp/`.
    fn temporary(&self) -> PathBuf {
        let number = self.tree.number();
        self.tree.archive().store().tmp().join(format!("mount-{number}"))
    }

    /// Replaces a stub by a plain file. If readers have decoded all of it, what they read from becomes that file: the
    /// kernel may serve them from it, and takes no other file for this inode then.
    fn bring_back(&self, ino: u64, stub: &Stub, wanted: RecallGoal) -> Result<()> {
        let (original, reader, passes_through) = {
            let table = self.tree.table();
            let opened = table.node(ino)?.opened.as_ref();
            let reader = opened.and_then(|opened| match &opened.source {
                Source::Reader(reader) => Some(Arc::clone(reader)),
                Source::File(_) => None,
            });
            (table.place(ino)?.hold()?, reader, opened.is_some_and(Opened::passes_through))
        };
        // What readers see must not be emptied before it is the file.
        let is_new_bytes = wanted == RecallGoal::Empty && !passes_through;
        let is_shared = self.tree.archive().store().is_shared();
        let given = reader.as_ref().filter(|_| !is_new_bytes && !is_shared).and_then(|reader| reader.give());
        // Before the bytes: others may change the stub's attributes meanwhile, and say so by taking it down.
        let fence = is_shared.then(|| self.tree.archive().store().fence(original.metadata()?.ino())).transpose()?;
        let before = Seen::of(&original, self.tree.archive().store().beat()?)?;
        let (path, file) = if is_new_bytes {
            let path = self.temporary();
            let file = self.tree.io().create(&path, CrashPoint::RecallWritten);
            (path.clone(), file.inspect_err(|_| self.tree.io().discard(&path, CrashPoint::RecallWritten))?)
        } else {
            let archive = self.tree.archive();
            match (archive.recall(stub, &original, given), given) {
                // Programs go on to read from it, so it is written anew at once.
                (Err(_), Some((decoded, true))) => archive.recall(stub, &original, Some((decoded, false)))?,
                (recalled, _) => recalled?,
            }
        };
        let _unless_in_place = given.is_none().then(|| Temporary(path.clone()));
        let (mut table, now) = self.carry_attributes(ino, &original, (!is_new_bytes).then_some(before), &file)?;
        let opened = Arc::new(file.into_file());
        // Before a name leads to the file: a program's fsync of it then makes the names durable, or fails.
        let node = table.node_mut(ino)?;
        node.unsynced_names += 1;
        let unsynced = node.unsynced_names;
        let replaced = match &fence {
            Some(fence) => {
                let store = self.tree.archive().store();
                drop(original);
                put_in_place(store, &table, ino, &now, (&path, &opened), fence)?;
                None
            }
            None => Some(self.replace_names(&mut table, ino, &now, (&path, &opened), wanted)?),
        };
        if let (Some(reader), Some(_)) = (&reader, given) {
            reader.is_in_place();
        }
        table.recalled(ino, &opened)?;
        table.node_mut(ino)?.version += u64::from(is_new_bytes);
        drop(table);
        self.tree.invalidations.inode(ino);
        // In a shared store the stub may come back after a crash: its object stays for an hour.
        let Some((_names, replaced)) = replaced else { return Ok(()) };
        let synced = replaced.and_then(|directories| sync_replaced(self.tree.io(), &directories));
        if let (Ok(()), Some(node)) = (&synced, self.tree.table().get_mut(ino)) {
            node.names_synced(unsynced);
        }
        Ok(synced?)
    }

    /// Gives all names of a stub to a file. Answers the names, which keep the paths of their directories alive, and these
    /// directories, or an error after which some names lead to the file.
    ///
    /// # Errors
    /// All names lead to the stub.
    fn replace_names(
        &self,
        table: &mut Table,
        ino: u64,
        stub: &Metadata,
        (path, opened): (&Path, &File),
        wanted: RecallGoal,
    ) -> Result<(Vec<Reached>, io::Result<Vec<PathBuf>>)> {
        let replacement = FileId::of(&opened.metadata()?);
        let paths = Self::names(table, ino, stub)?;
        let names = paths.iter().map(|path| table.reach(path)).collect::<io::Result<Vec<_>>>()?;
        let is_in_place = |name: &Path| name.symlink_metadata().is_ok_and(|found| FileId::of(&found) == replacement);
        let replaced = match replace_stub(self.tree.io(), path, &names, &mut || self.temporary()) {
            Err(error) if !names.iter().any(|name| is_in_place(name)) => return Err(error.into()),
            replaced => replaced,
        };
        if replaced.is_err() {
            self.part(table, ino, is_in_place);
        }
        // The object keeps its name until it is known whether the bytes change. A program that opens the file for writing
        // says so afterwards, under the names that the kernel knows.
        for (path, _) in paths.iter().zip(&names).filter(|(_, name)| replaced.is_ok() || is_in_place(name)) {
            self.tree.archive().recalled(path, wanted == RecallGoal::Resident);
        }
        Ok((names, replaced))
    }

    /// After an error between the renames of a file with several names: those that still lead to the stub are another
    /// file from now on, as they are after a crash there. The kernel looks them up anew.
    fn part(&self, table: &mut Table, ino: u64, is_in_place: impl Fn(&Path) -> bool) {
        let names = table.node(ino).map_or_else(|_| Vec::new(), |node| node.names.clone());
        for (parent, name) in names {
            let path = table.child(parent, &name).and_then(|path| Ok(table.reach(&path)?));
            if !path.is_ok_and(|path| is_in_place(&path)) {
                table.unbind(parent, &name);
                self.tree.invalidations.entry(parent, &name);
            }
        }
    }

    /// Gives `new` the attributes of a stub, durably, and returns the table's lock once none of them has changed
    /// since. Programs may change them until then, and no finished call of theirs may be undone. `seen`: the stub's
    /// state when `new` got its attributes, if it has them.
    fn carry_attributes(
        &self,
        ino: u64,
        original: &File,
        mut seen: Option<Seen>,
        new: &DeviceFile,
    ) -> Result<(MutexGuard<'_, Table>, Metadata)> {
        let with_bytes = seen.is_some();
        for round in 1.. {
            // Before the lock: in a shared store the server is asked.
            let stamp = self.tree.archive().store().beat()?;
            let table = self.tree.table();
            table.node(ino)?;
            let now = Seen::of(original, stamp)?;
            if seen.as_ref().is_some_and(|seen| seen.is_still(&now)) {
                return Ok((table, now.metadata));
            }
            // Not under the lock, even if programs change them without a pause.
            drop(table);
            if round > MOST_ROUNDS {
                break;
            }
            match with_bytes {
                true => copy_attributes(original, &now.metadata, new, CrashPoint::RecallWritten)?,
                false => copy_to_new_bytes(original, &now.metadata, new, CrashPoint::RecallWritten)?,
            }
            new.sync(CrashPoint::RecallWritten)?;
            if !now.settled {
                std::thread::sleep(A_TICK);
            }
            seen = Some(now);
        }
        Err(libc::EBUSY.into())
    }

    /// Every name of a stub, relative to the tree, also those that the kernel does not know.
    fn names(table: &Table, ino: u64, stub: &Metadata) -> Result<Vec<PathBuf>> {
        if table.place(ino)?.follow() || stub.nlink() <= 1 {
            return Ok(table.paths(ino));
        }
        let mut found = Vec::new();
        every_name(table, Path::new(""), FileId::of(stub), &mut found)?;
        Ok(found)
    }
}

/// All names of a file below `directory`, a path inside the tree. Only needed for a stub with several links.
fn every_name(table: &Table, directory: &Path, file: FileId, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in std::fs::read_dir(table.reach(directory)?)? {
        let entry = entry?;
        let (path, metadata) = (directory.join(entry.file_name()), entry.metadata()?);
        if metadata.is_dir() {
            every_name(table, &path, file, found)?;
        } else if FileId::of(&metadata) == file {
            found.push(path);
        }
    }
    Ok(())
}
