//! Open and release: who serves the bytes of a file while it is open.
//!
//! The first open of a node decides who serves it until the last release: the kernel (passthrough), or the daemon. The
//! kernel answers EIO if a later open differs, or names another backing file (measured). So each node has one mode from
//! its first open to its last release, and every open gets an answer that fits it:
//!
//! | node                    | passthrough allowed                 | otherwise                                        |
//! |-------------------------|-------------------------------------|--------------------------------------------------|
//! | resident                | the file itself                     | write-only: direct; else the kernel's page cache |
//! | released, decoded whole | the decoded file                    | page cache                                       |
//! | released                | page cache                          | page cache                                       |

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use fuser::{FileHandle, FileType, FopenFlags, ReplyAttr, ReplyOpen, Request};
use passthrough::Client;

use super::attr::{Attributes, Change};
use super::early::Early;
use super::errno::{Fault, Result};
use super::inodes::Table;
use super::mapped::Mappings;
use super::node::{Access, Handle, Mode, Opened, Reading, Source};
use super::opening::{Opening, open_file};
use super::passthrough::{Backing, Passthrough, Reply};
use super::privileges::Caller;
use super::room::Room;
use super::shared::{give_back, lock_open, until_free, when_free};
use super::sys;
use super::transition::{Prepared, RecallGoal, Recalls, Step};
use super::tree::{Creator, Tree, created};
use crate::archive::process_of;
use crate::store::engine::Engine;
use crate::sync::{Mutex, MutexGuard};

/// The answer to an open, for the kernel.
pub(super) struct Answer {
    pub(super) fh: FileHandle,
    pub(super) flags: FopenFlags,
    pub(super) backing: Option<Arc<Backing>>,
}

/// What an open that is not done needs next.
pub(super) enum Tried {
    Done(Answer),
    /// A released file: this step first.
    Recall(RecallGoal),
    /// The kernel is asked whether it serves this file.
    Register(Opening),
}

/// Files with their handles; shared by the threads that answer the kernel and the workers.
pub(super) struct OpenFiles {
    pub(super) tree: Arc<Tree>,
    pub(super) recalls: Recalls,
    pub(super) mappings: Arc<Mappings>,
    pub(super) early: Arc<Early>,
    pub(super) room: Arc<Room>,
    /// By handle number. Taken for moments only.
    handles: Mutex<HashMap<u64, Arc<Handle>>>,
    /// The kernel has to send FLUSH at each close, since the store's file system may have an error to report.
    reports_at_close: bool,
    pub(super) passthrough: Arc<Passthrough>,
}

impl OpenFiles {
    pub(super) fn new(tree: Arc<Tree>, passthrough: bool, helper: Option<Arc<Client>>) -> Self {
        let reports_at_close = sys::reports_at_close(&tree.archive().store().tree());
        let mappings = Arc::new(Mappings::new(Arc::clone(&tree)));
        let passthrough = Passthrough::new((!passthrough).then_some("it was mounted with --no-passthrough"), helper);
        if !mappings.has_leases() {
            passthrough.give_up("the store's file system has no leases");
        }
        let (recalls, early): (Recalls, _) = (Recalls::new(Arc::clone(&tree)), Arc::default());
        let room = Room::new(Arc::clone(&tree), Arc::clone(&recalls.workers));
        Self { tree, recalls, mappings, early, room, handles: Mutex::default(), reports_at_close, passthrough }
    }

    fn handles(&self) -> MutexGuard<'_, HashMap<u64, Arc<Handle>>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The open file that the kernel means.
    pub(super) fn handle(&self, fh: FileHandle) -> Result<Arc<Handle>> {
        self.handles().get(&fh.0).cloned().ok_or(Fault::Code(libc::EBADF))
    }

    /// Answers an OPEN.
    pub(super) fn answer_open(self: &Arc<Self>, ino: u64, request: &Request, flags: i32, reply: ReplyOpen) {
        let access = Access::of(flags);
        let is_stub = || self.tree.table().node(ino).is_ok_and(|node| node.stub.is_some());
        // Now, since the thread waits for the answer: later it may be gone.
        let by = match access.changes() {
            true => self.tree.archive().restores().who_read(request.pid()),
            false if is_stub() => process_of(request.pid()),
            false => None,
        };
        self.open(ino, Caller::of(request), Access { by, ..access }, None, reply);
    }

    /// Answers an OPEN, at once or from a worker.
    fn open(self: &Arc<Self>, ino: u64, caller: Caller, access: Access, reader: Prepared, reply: ReplyOpen) {
        self.go_on(ino, caller, access, self.try_open(ino, caller, access, reader, &mut None), reply);
    }

    fn go_on(self: &Arc<Self>, ino: u64, caller: Caller, access: Access, tried: Result<Tried>, reply: ReplyOpen) {
        match tried {
            Ok(Tried::Done(answer)) => match &answer.backing {
                Some(backing) => {
                    if access.read && access.write {
                        // Through a mapping it is changed unseen: what a look-up gave for a second holds no longer.
                        self.tree.invalidations.attributes(ino);
                    }
                    reply.opened_passthrough(answer.fh, answer.flags, backing.id());
                }
                None => reply.opened(answer.fh, answer.flags),
            },
            Ok(Tried::Register(mut opening)) => {
                opening.register(&self.passthrough, access.changes().then_some(&*self.room), &reply);
                let mut opening = Some(opening);
                let tried = self.try_open(ino, caller, access, None, &mut opening);
                drop(opening);
                if tried.is_err() {
                    // A release may have found it busy.
                    let table = self.tree.table();
                    table.paths(ino).iter().for_each(|path| self.tree.archive().closed(path));
                }
                self.go_on(ino, caller, access, tried, reply);
            }
            Ok(Tried::Recall(wanted)) => {
                let files = Arc::clone(self);
                self.recalls.make(ino, wanted, move |made| match made {
                    Ok(made) => files.open(ino, caller, access, made, reply),
                    Err(fault) => reply.error(fault.into()),
                });
            }
            Err(Fault::Locked) => {
                let (files, began) = (Arc::clone(self), Instant::now());
                self.recalls.workers.submit(Box::new(move || {
                    let again = || files.try_open(ino, caller, access, None, &mut None);
                    let tried = until_free(began, again);
                    files.go_on(ino, caller, access, tried, reply);
                }));
            }
            Err(fault) => reply.error(fault.into()),
        }
    }

    /// One attempt of an open. `opening`: the last attempt asked to register this. If it is not needed, the caller drops
    /// it, without the table's lock: a helper may have to give its file up.
    pub(super) fn try_open(
        &self,
        ino: u64,
        caller: Caller,
        access: Access,
        reader: Prepared,
        opening: &mut Option<Opening>,
    ) -> Result<Tried> {
        let mut fresh = None;
        let mut table = self.tree.table();
        table.node_mut(ino)?.opening -= u32::from(opening.is_some());
        let node = table.node(ino)?;
        if node.kind != FileType::RegularFile {
            return Err(if node.kind == FileType::Directory { libc::EISDIR } else { libc::ENXIO }.into());
        }
        let wanted = match (access.write, access.truncate) {
            (_, true) => RecallGoal::Empty,
            (true, false) => RecallGoal::Bytes,
            (false, false) => RecallGoal::Reader,
        };
        if node.waiting.is_some() {
            return Ok(Tried::Recall(wanted));
        }
        let is_first = node.opened.is_none();
        let opening = match (&node.stub, &node.opened) {
            (Some(_), _) if wanted != RecallGoal::Reader => return Ok(Tried::Recall(wanted)),
            (Some(_), Some(_)) => &mut fresh,
            (_, None) if opening.as_ref().is_some_and(|opening| opening.is_of(node)) => opening,
            (Some(stub), None) => match reader {
                Some((read, reader)) if read == *stub => {
                    fresh = Some(Opening::reader(reader, read, table.is_shared()));
                    &mut fresh
                }
                _ => return Ok(Tried::Recall(RecallGoal::Reader)),
            },
            (None, Some(opened))
                if (opened.readable || !access.read)
                    && (opened.writable || !access.changes())
                    && (opened.passes_through() || !access.aside) =>
            {
                if let (Source::File(file), true) = (&opened.source, access.changes()) {
                    lock_open(self.tree.archive().store(), &table, ino, &Arc::clone(file), true)?;
                }
                &mut fresh
            }
            (None, _) => {
                // The kernel asks for one backing file. An NFS server would delegate a file to a client that only reads it, and keep
                // others waiting for a machine that was cut off. CephFS gives each reader a cache if nobody may write.
                let both = self.passthrough.is_on() || table.engine() == Engine::Nfs;
                let opened = open_file(&table.place_to_lock(ino)?, access, both);
                let (file, readable, writable) = match opened {
                    // The server was not asked about the name.
                    Err(_) if table.is_shared() => open_file(&table.place(ino)?, access, both)?,
                    opened => opened?,
                };
                lock_open(self.tree.archive().store(), &table, ino, &file, access.changes())?;
                // A file that its owner may only write cannot be locked: what readers have open is, until the last release.
                if let (false, Some(Opened { source: Source::File(first), .. })) = (readable, &table.node(ino)?.opened)
                {
                    lock_open(self.tree.archive().store(), &table, ino, first, access.changes())?;
                }
                if self.tree.find_out(&mut table, ino, &file)? {
                    return Ok(Tried::Recall(wanted));
                }
                fresh = Some(Opening::file(file, readable, writable));
                &mut fresh
            }
        };
        if is_first
            && self.passthrough.is_on()
            && let Some(opening) = opening.take_if(|opening| opening.mode.is_none())
        {
            table.node_mut(ino)?.opening += 1;
            return Ok(Tried::Register(opening));
        }
        if access.changes() && caller.drop_privileges(&table.place(ino)?)? {
            self.tree.invalidations.inode(ino);
        }
        let (answer, handle) = self.install(&mut table, ino, access, opening)?;
        if access.truncate {
            table.node_mut(ino)?.version += 1;
            drop(table);
            // The handle keeps the file as it is represented, so the lock is not needed while blocks are freed.
            let truncated = handle.file().map_or(Ok(()), |file| file.set_len(0));
            if let Err(error) = truncated {
                self.release(ino, answer.fh);
                return Err(error.into());
            }
        }
        Ok(Tried::Done(answer))
    }

    /// Creates and opens a file. ESTALE when it exists after all: the kernel then looks it up and opens it.
    pub(super) fn create(
        &self,
        parent: u64,
        name: &OsStr,
        creator: Creator,
        flags: i32,
        reply: &dyn Reply,
    ) -> Result<(Attributes, Answer)> {
        let access = Access {
            truncate: false,
            by: self.tree.archive().restores().who_read(creator.thread()),
            ..Access::of(flags)
        };
        let mut table = self.tree.table();
        let mut made = None;
        let creator = creator.of_a_file(access.write);
        let entry = self.tree.make_entry(&mut table, parent, name, creator, &mut |path, mode| {
            let (file, number) = created(path, mode)?;
            made = Some(file);
            Ok(Some(number))
        });
        let entry = match entry {
            Err(Fault::Os(error)) if error.kind() == io::ErrorKind::AlreadyExists && flags & libc::O_EXCL == 0 => {
                return Err(libc::ESTALE.into());
            }
            other => other?,
        };
        let ino = entry.1.ino.0;
        let file = made.ok_or(Fault::Code(libc::EIO))?;
        if let Err(fault) = lock_open(self.tree.archive().store(), &table, ino, &file, access.changes()) {
            table.forget(ino, 1);
            return Err(fault);
        }
        let node = table.node_mut(ino)?;
        node.unsynced_names += 1;
        node.opening += 1;
        let mut opening = Opening::file(file, true, true);
        drop(table);
        opening.register(&self.passthrough, access.changes().then_some(&*self.room), reply);
        let opening = &mut Some(opening);
        let mut table = self.tree.table();
        table.node_mut(ino)?.opening -= 1;
        match self.install(&mut table, ino, access, opening) {
            Ok((answer, _)) => {
                // Through a mapping it is changed unseen, and it was not open when its attributes were taken.
                let ttl = if table.node(ino)?.may_be_mapped() { Duration::ZERO } else { entry.0.min(self.tree.ttl) };
                Ok(((ttl, entry.1, entry.2), answer))
            }
            Err(fault) => {
                table.forget(ino, 1);
                Err(fault)
            }
        }
    }

    /// Enters a handle. `opening` is a file opened for it, if the node's own does not do. It is taken if the node is
    /// not open yet.
    fn install(
        &self,
        table: &mut Table,
        ino: u64,
        access: Access,
        opening: &mut Option<Opening>,
    ) -> Result<(Answer, Arc<Handle>)> {
        let changes = access.changes();
        let is_read = matches!(opening, Some(Opening { source: Source::Reader(_), .. }));
        let is_shared = table.is_shared();
        if is_read && table.node(ino)?.opened.is_none() {
            table.hold_while_open(ino)?;
        }
        let paths = if changes { table.paths(ino) } else { Vec::new() };
        let node = table.node_mut(ino)?;
        let file_id = node.file;
        let own = opening.as_ref().map(|opening| opening.source.clone());
        if let (Some(opened), Some(opening)) = (&mut node.opened, &*opening)
            && opening.readable
            && opening.writable
            && !opened.writable
            && !opened.passes_through()
        {
            // Later opens share the file that may be written, and the last release makes that one durable.
            (opened.source, opened.writable) = (opening.source.clone(), true);
        }
        let counted = opening.as_mut().and_then(|opening| opening.writer.take());
        if node.opened.is_none() {
            let Opening { source, readable, writable, mode, .. } = opening.take().ok_or(Fault::Code(libc::EIO))?;
            let mode = mode.unwrap_or(Mode::Daemon);
            // A mapping that is left may still write to it.
            let left = std::mem::take(&mut node.mapped);
            let (handles, has_pages) = Default::default();
            node.opened =
                Some(Opened { mode, source, readable, writable, handles, mappable: left, wrote: left, has_pages });
        }
        let Some(opened) = &mut node.opened else { return Err(libc::EIO.into()) };
        let fh = self.tree.number();
        let mut flags = FopenFlags::empty();
        let direct = match opened.mode {
            Mode::Passthrough(_) => false,
            // Half of what going through the page cache costs (measured). Such a handle cannot be mapped anyway. In a shared store
            // the kernel would keep appended bytes where the file's end was when it looked last.
            Mode::Daemon => access.write && (!access.read || access.append && is_shared),
        };
        opened.mappable |= access.read && access.write;
        opened.wrote |= changes;
        // With pages of its own the kernel writes what a mapping has changed before it sends FLUSH.
        let has_pages = !direct && !opened.passes_through();
        opened.has_pages.fetch_or(has_pages, Ordering::Relaxed);
        if !changes || !(self.reports_at_close || has_pages) {
            // There is nothing that close could report. FLUSH would make it wait for a thread of ours.
            flags |= FopenFlags::FOPEN_NOFLUSH;
        }
        let source = own.unwrap_or_else(|| opened.source.clone());
        if let (true, Source::File(file)) = (changes, &source) {
            self.early.add(ino, file);
        }
        node.decoded = source.decoded(node.version).or(node.decoded);
        let reading = node.stub.as_ref().filter(|_| !changes).zip(access.by);
        let reading = reading.map(|(stub, by)| Reading::new(stub, by));
        let writer = (changes && opened.passes_through()).then(|| counted.unwrap_or_else(|| self.room.writer()));
        let handle = Arc::new(Handle::new(ino, direct, &opened.has_pages, source, reading, writer));
        opened.handles.insert(fh, Arc::clone(&handle));
        let backing = match &opened.mode {
            Mode::Passthrough(id) => Some(Arc::clone(id)),
            Mode::Daemon => None,
        };
        if direct {
            flags |= FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        }
        // The daemon sees no read that the kernel answers: opening a file that was decoded as a whole counts as reading it.
        let unseen = backing.is_some() || [node.decoded, node.cached] == [Some(node.version); 2];
        let read = handle.reading.as_ref().filter(|_| unseen).and_then(Reading::all_read);
        if direct || (changes && backing.is_some()) {
            node.version += 1;
        } else if backing.is_none() {
            if node.cached == Some(node.version) && !is_shared {
                flags |= FopenFlags::FOPEN_KEEP_CACHE;
            }
            node.cached = Some(node.version);
        }
        self.handles().insert(fh, Arc::clone(&handle));
        for path in paths {
            self.tree.archive().opened_for_writing(&path);
        }
        if changes {
            self.tree.archive().restores().written_by(file_id, access.by);
        }
        read.into_iter().for_each(|(object, by)| self.tree.archive().restores().read_by(object, by));
        Ok((Answer { fh: FileHandle(fh), flags, backing }, handle))
    }

    /// A handle and all mappings made through it are gone.
    pub(super) fn release(&self, ino: u64, fh: FileHandle) {
        let handle = self.handles().remove(&fh.0);
        handle.iter().for_each(|handle| self.room.leaves(handle));
        let mut table = self.tree.table();
        let (paths, is_shared) = (table.paths(ino), table.is_shared());
        let Some(node) = table.get_mut(ino) else {
            return;
        };
        let Some(opened) = &mut node.opened else {
            return;
        };
        opened.handles.remove(&fh.0);
        if handle.as_ref().is_some_and(|handle| handle.direct) {
            node.version += 1;
        }
        if !opened.handles.is_empty() {
            return;
        }
        let last = node.opened.take();
        if is_shared {
            node.held = None;
        }
        // The decoded file may go before the kernel's pages do.
        node.decoded = last.as_ref().and_then(|opened| opened.source.decoded(node.version)).or(node.decoded);
        let wrote = last.as_ref().is_some_and(|opened| opened.wrote);
        // In a shared store the keeper finds out about mappings.
        let mappable = !is_shared && last.as_ref().is_some_and(|opened| opened.mappable && opened.passes_through());
        let len = last.as_ref().filter(|opened| opened.wrote && !mappable).map_or(0, Opened::len);
        node.mapped = mappable;
        // A file without a name is nobody's checkpoint.
        for path in paths.iter().filter(|_| !mappable) {
            match wrote {
                true => self.tree.archive().written(path, len),
                false => self.tree.archive().closed(path),
            }
        }
        table.reap(ino);
        // Closing what was open may free a file's blocks; and while we have it open, it has a writer.
        drop(table);
        if is_shared {
            return give_back(self.tree.archive(), &self.recalls.workers, last, handle);
        }
        drop((last, handle));
        if mappable {
            self.mappings.rest_when_unmapped(ino);
        }
    }

    /// Answers a SETATTR, at once or from a worker.
    pub(super) fn setattr(self: &Arc<Self>, ino: u64, caller: Caller, change: Change, reply: ReplyAttr) {
        let (files, then) = (Arc::clone(self), Arc::clone(self));
        let set = move || files.set(ino, caller, &change);
        when_free(&self.recalls.workers, set, move |set| match set {
            Ok(Step::Done((ttl, attributes, _))) => reply.attr(&ttl, &attributes),
            Ok(Step::First(wanted)) => then.clone().recalls.make(ino, wanted, move |made| match made {
                Ok(_) => then.setattr(ino, caller, change, reply),
                Err(fault) => reply.error(fault.into()),
            }),
            Err(fault) => reply.error(fault.into()),
        });
    }

    fn set(&self, ino: u64, caller: Caller, change: &Change) -> Result<Step<Attributes>> {
        match change.size.map(|size| self.truncate(ino, caller, size, change.fh)).transpose()? {
            Some(Step::First(wanted)) => Ok(Step::First(wanted)),
            Some(Step::Done(())) | None => self.tree.change(ino, change).map(Step::Done),
        }
    }

    /// Sets the length of a resident file.
    fn truncate(&self, ino: u64, caller: Caller, size: u64, fh: Option<FileHandle>) -> Result<Step<()>> {
        let mut table = self.tree.table();
        let node = table.node(ino)?;
        if node.kind != FileType::RegularFile {
            return Err(if node.kind == FileType::Directory { libc::EISDIR } else { libc::EINVAL }.into());
        }
        if node.unread && node.opened.is_none() {
            let file = table.place(ino)?.open(true, false)?;
            self.tree.find_out(&mut table, ino, &file)?;
        }
        let node = table.node(ino)?;
        if node.stub.is_some() || node.waiting.is_some() {
            return Ok(Step::First(if size == 0 { RecallGoal::Empty } else { RecallGoal::Bytes }));
        }
        let paths = table.paths(ino);
        let place = table.place(ino)?;
        let file = fh.and_then(|fh| self.handle(fh).ok()).and_then(|handle| handle.file());
        let file = match file {
            Some(file) => file,
            None => {
                let file = place.open(table.is_shared(), true)?;
                lock_open(self.tree.archive().store(), &table, ino, &file, true)?;
                Arc::new(file)
            }
        };
        caller.drop_privileges(&place)?;
        for path in &paths {
            self.tree.archive().opened_for_writing(path);
        }
        let node = table.node_mut(ino)?;
        node.version += 1;
        if let Some(opened) = &mut node.opened {
            opened.wrote = true;
            // Open handles keep the file resident, so the lock is not needed while blocks are freed.
            drop(table);
            file.set_len(size)?;
            return Ok(Step::Done(()));
        }
        let done = file.set_len(size);
        // With a mapping left, the file is sealed at the mapping's end.
        for path in paths.iter().filter(|_| !node.mapped) {
            self.tree.archive().written(path, size);
        }
        done?;
        Ok(Step::Done(()))
    }
}

#[cfg(test)]
mod tests;
