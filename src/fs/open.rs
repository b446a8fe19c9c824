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

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fuser::{BackingId, FileHandle, FileType, FopenFlags, ReplyOpen, Request};

use super::Core;
use super::errno::{Fault, Result};
use super::inodes::Table;
use super::node::{Handle, Mode, Opened, Reading, Source};
use super::privileges::drop_privileges;
use super::transition::{Prepared, RecallGoal, Step};
use crate::archive::Archive;

/// The access that an open asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) read: bool,
    pub(super) write: bool,
    pub(super) truncate: bool,
    /// O_NOATIME.
    pub(super) aside: bool,
    /// The process that opens, if this may become part of a restore.
    pub(super) by: Option<u32>,
}

impl Access {
    /// From open(2) flags.
    pub(super) fn of(flags: i32) -> Self {
        let mode = flags & libc::O_ACCMODE;
        Self {
            read: mode != libc::O_WRONLY,
            write: mode != libc::O_RDONLY,
            // Also with O_RDONLY: Linux truncates, and the kernel has checked the permission.
            truncate: flags & libc::O_TRUNC != 0,
            aside: flags & libc::O_NOATIME != 0,
            by: None,
        }
    }

    /// The bytes may change through this open.
    pub(super) fn changes(self) -> bool {
        self.write || self.truncate
    }
}

/// The answer to an open, for the kernel.
pub(super) struct Answer {
    pub(super) fh: FileHandle,
    pub(super) flags: FopenFlags,
    pub(super) backing: Option<Arc<BackingId>>,
}

/// Registers a file for passthrough.
pub(super) type Register<'a> = &'a dyn Fn(BorrowedFd<'_>) -> io::Result<BackingId>;

/// Opens a node's file, read-write if that may be, so that later opens can share it.
fn open_file(place: &super::place::Place, access: Access) -> io::Result<(File, bool, bool)> {
    let open = |read, write| if access.aside { place.open_aside(read, write) } else { place.open(read, write) };
    match open(true, true) {
        Ok(file) => Ok((file, true, true)),
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS | libc::ETXTBSY)) =>
        {
            Ok((open(access.read, access.write)?, access.read, access.write))
        }
        Err(error) => Err(error),
    }
}

impl Core {
    /// Answers an OPEN.
    pub(super) fn answer_open(self: &Arc<Self>, ino: u64, request: &Request, flags: i32, reply: ReplyOpen) {
        let access = Access::of(flags);
        let is_stub = || self.table().node(ino).is_ok_and(|node| node.stub.is_some());
        // Now, since the thread waits for the answer: later it may be gone.
        let by = match access.changes() {
            true => self.archive.who_read(request.pid()),
            false if is_stub() => Archive::process(request.pid()),
            false => None,
        };
        self.open(ino, request.uid(), Access { by, ..access }, None, reply);
    }

    /// Answers an OPEN, at once or from a worker.
    fn open(self: &Arc<Self>, ino: u64, uid: u32, access: Access, reader: Prepared, reply: ReplyOpen) {
        let register = |fd: BorrowedFd<'_>| reply.open_backing(fd);
        match self.try_open(ino, uid, access, reader, &register) {
            Ok(Step::Done(answer)) => match &answer.backing {
                Some(backing) => {
                    if access.read && access.write {
                        // Through a mapping it is changed unseen: what a look-up gave for a second holds no longer.
                        self.invalidations.attributes(ino);
                    }
                    reply.opened_passthrough(answer.fh, answer.flags, backing);
                }
                None => reply.opened(answer.fh, answer.flags),
            },
            Ok(Step::First(wanted)) => {
                let core = Arc::clone(self);
                self.make(ino, wanted, move |made| match made {
                    Ok(made) => core.open(ino, uid, access, made, reply),
                    Err(fault) => reply.error(fault.into()),
                });
            }
            Err(fault) => reply.error(fault.into()),
        }
    }

    pub(super) fn try_open(
        &self,
        ino: u64,
        uid: u32,
        access: Access,
        reader: Prepared,
        register: Register<'_>,
    ) -> Result<Step<Answer>> {
        let mut table = self.table();
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
            return Ok(Step::First(wanted));
        }
        if node.superseded {
            return Err(libc::ESTALE.into());
        }
        let source = match (&node.stub, &node.opened) {
            (Some(_), _) if wanted != RecallGoal::Reader => return Ok(Step::First(wanted)),
            (Some(_), Some(_)) => None,
            (Some(stub), None) => match reader {
                Some((read, reader)) if read == *stub => Some((Source::Reader(reader), true, false)),
                _ => return Ok(Step::First(RecallGoal::Reader)),
            },
            (None, Some(opened))
                if (opened.readable || !access.read)
                    && (opened.writable || !access.write)
                    && (opened.passes_through() || !access.aside) =>
            {
                None
            }
            (None, _) => {
                let (file, readable, writable) = open_file(&table.place(ino)?, access)?;
                if self.find_out(&mut table, ino, &file)? {
                    return Ok(Step::First(wanted));
                }
                Some((Source::File(Arc::new(file)), readable, writable))
            }
        };
        if access.changes() && drop_privileges(&table.place(ino)?, uid)? {
            self.invalidations.inode(ino);
        }
        let (answer, handle) = self.install(&mut table, ino, access, source, register)?;
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
        Ok(Step::Done(answer))
    }

    /// Finds out whether a file is released that could not be read when it was looked up. `file`: it, open for reading.
    pub(super) fn find_out(&self, table: &mut Table, ino: u64, file: &File) -> Result<bool> {
        let node = table.node(ino)?;
        if node.unread && node.opened.is_none() {
            let stub = self.archive.stub(&table.path(ino).unwrap_or_default(), file)?;
            let node = table.node_mut(ino)?;
            (node.unread, node.stub) = (false, stub);
            return Ok(node.stub.is_some());
        }
        Ok(false)
    }

    /// Enters a handle. `source` is what was opened for it, if the node's own does not do.
    pub(super) fn install(
        &self,
        table: &mut Table,
        ino: u64,
        access: Access,
        source: Option<(Source, bool, bool)>,
        register: Register<'_>,
    ) -> Result<(Answer, Arc<Handle>)> {
        let changes = access.changes();
        let paths = if changes { table.paths(ino) } else { Vec::new() };
        let node = table.node_mut(ino)?;
        let file_id = node.file;
        let own = source.as_ref().map(|(source, ..)| source.clone());
        if node.opened.is_none() {
            let (source, readable, writable) = source.ok_or(Fault::Code(libc::EIO))?;
            let mode = self.first_mode(&source, register);
            // A mapping that is left may still write to it.
            let left = std::mem::take(&mut node.mapped);
            let handles = Default::default();
            node.opened = Some(Opened { mode, source, readable, writable, handles, mappable: left, wrote: left });
        }
        let Some(opened) = &mut node.opened else {
            return Err(libc::EIO.into());
        };
        let fh = self.next.fetch_add(1, Ordering::Relaxed);
        let mut flags = FopenFlags::empty();
        let direct = match opened.mode {
            Mode::Passthrough(_) => false,
            // Half of what going through the page cache costs (measured). Such a handle cannot be mapped anyway.
            Mode::Daemon => access.write && !access.read,
        };
        opened.mappable |= access.read && access.write;
        opened.wrote |= changes;
        // With pages of its own the kernel writes what a mapping has changed before it sends FLUSH.
        let has_pages = !direct && !opened.passes_through();
        if !changes || !(self.reports_at_close || has_pages) {
            // There is nothing that close could report. FLUSH would make it wait for a thread of ours.
            flags |= FopenFlags::FOPEN_NOFLUSH;
        }
        let source = own.unwrap_or_else(|| opened.source.clone());
        if let (true, Source::File(file)) = (changes, &source) {
            self.early.add(ino, file);
        }
        let whole = matches!(&source, Source::Reader(reader) if reader.cached_file().is_some());
        let reading = node.stub.as_ref().filter(|_| !changes).zip(access.by);
        let reading = reading.map(|(stub, by)| Reading::new(stub, by));
        let handle = Arc::new(Handle::new(ino, direct, source, reading));
        opened.handles.insert(fh, Arc::clone(&handle));
        let backing = match &opened.mode {
            Mode::Passthrough(id) => Some(Arc::clone(id)),
            Mode::Daemon => None,
        };
        if direct {
            flags |= FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        }
        // What the kernel reads by itself is unseen: opening a file that was decoded as a whole counts as reading it.
        let unseen = backing.is_some() || (whole && node.cached == Some(node.version));
        let read = handle.reading.as_ref().filter(|_| unseen).and_then(Reading::all_read);
        if direct || (changes && backing.is_some()) {
            node.version += 1;
        } else if backing.is_none() {
            if node.cached == Some(node.version) {
                flags |= FopenFlags::FOPEN_KEEP_CACHE;
            }
            node.cached = Some(node.version);
        }
        self.handles().insert(fh, Arc::clone(&handle));
        for path in paths {
            self.archive.opened_for_writing(&path);
        }
        if changes {
            self.archive.written_by(file_id, access.by);
        }
        read.into_iter().for_each(|(object, by)| self.archive.read_by(object, by));
        Ok((Answer { fh: FileHandle(fh), flags, backing }, handle))
    }

    /// Passthrough if there is a whole file to pass through to and the kernel takes it.
    fn first_mode(&self, source: &Source, register: Register<'_>) -> Mode {
        if !self.passthrough.load(Ordering::Relaxed) {
            return Mode::Daemon;
        }
        let file = match source {
            Source::File(file) => Some(Arc::clone(file)),
            Source::Reader(reader) => reader.cached_file(),
        };
        let Some(file) = file else {
            return Mode::Daemon;
        };
        match register(std::os::fd::AsFd::as_fd(&*file)) {
            Ok(id) => Mode::Passthrough(Arc::new(id)),
            Err(error) => {
                let code = error.raw_os_error().unwrap_or(0);
                // Out of something for the moment; all other refusals are for ever.
                if !matches!(code, libc::ENOMEM | libc::EMFILE | libc::ENFILE | libc::EAGAIN | libc::EINTR)
                    && self.passthrough.swap(false, Ordering::Relaxed)
                {
                    log::warn!("{}", refusal(code, &error));
                }
                Mode::Daemon
            }
        }
    }

    /// A handle and all mappings made through it are gone.
    pub(super) fn release(&self, ino: u64, fh: FileHandle) {
        let handle = self.handles().remove(&fh.0);
        let mut table = self.table();
        let paths = table.paths(ino);
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
        let wrote = last.as_ref().is_some_and(|opened| opened.wrote);
        let mappable = last.as_ref().is_some_and(|opened| opened.mappable && opened.passes_through());
        let len = last.as_ref().filter(|opened| opened.wrote && !mappable).map_or(0, Opened::len);
        node.mapped = mappable;
        // A file without a name is nobody's checkpoint.
        for path in paths.iter().filter(|_| !mappable) {
            match wrote {
                true => self.archive.written(path, len),
                false => self.archive.closed(path),
            }
        }
        table.reap(ino);
        // Closing what was open may free a file's blocks; and while we have it open, it has a writer.
        drop(table);
        drop((last, handle));
        if mappable {
            self.rest_when_unmapped(ino);
        }
    }
}

/// Why reads and writes go through the daemon from now on, for the log.
fn refusal(code: i32, error: &io::Error) -> String {
    let why = match code {
        libc::EPERM => "it needs CAP_SYS_ADMIN".to_string(),
        libc::ELOOP => "the store lies on a stacked file system (such as overlayfs)".to_string(),
        libc::ENOTTY | libc::ENOSYS | libc::EOPNOTSUPP => "the kernel or the store's file system has none".to_string(),
        _ => error.to_string(),
    };
    format!("files are served without kernel passthrough, which is slower but just as safe: {why}")
}
