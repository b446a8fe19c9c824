//! Bytes of open files that the kernel does not serve itself, and their durability.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use fuser::{Errno, FileHandle, ReplyData, ReplyEmpty, ReplyLseek, ReplyWrite, WriteFlags};
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::ReadWriteFlags;

use super::errno::{Fault, Result};
use super::node::{Handle, Source};
use super::open::OpenFiles;
use super::privileges::Caller;
use super::reply::done;
use super::room::Need;
use super::sys;
use super::workers::Workers;
use crate::store::beneath;
use crate::store::durable::CrashPoint;
use crate::store::durable::scratch::read_full;

/// Most bytes that one copy moves: the reply has 32 bits, and a worker should be back in a second or so.
const COPY_MOST: u64 = 1 << 30;

thread_local! {
    /// A buffer per thread that answers reads; grows to the largest read, at most 1 MiB with default limits.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Answers a read with the bytes that `read` puts into a buffer of this size, and counts.
fn answer<E: Into<Fault>>(size: u32, reply: ReplyData, read: impl FnOnce(&mut [u8]) -> std::result::Result<usize, E>) {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < size as usize {
            buffer.resize(size as usize, 0);
        }
        match read(&mut buffer[..size as usize]) {
            Ok(len) => reply.data(&buffer[..len]),
            Err(error) => reply.error(error.into().into()),
        }
    });
}

/// Writes all, or as much as there is room for. Without an offset at the end of the file, wherever another daemon has moved that.
fn write_full(file: &File, data: &[u8], offset: Option<u64>) -> io::Result<usize> {
    let mut done = 0;
    while done < data.len() {
        let rest = &data[done..];
        let written = match offset {
            Some(offset) => file.write_at(rest, offset + done as u64),
            None => Ok(rustix::io::pwritev2(file, &[IoSlice::new(rest)], 0, ReadWriteFlags::APPEND)?),
        };
        match written {
            Ok(0) => break,
            Ok(len) => done += len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) if done > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// A write that was done: its bytes, and the file.
type Written = (usize, Arc<File>);

/// How the kernel writes, the flags of the program's file, and the program.
type How = (WriteFlags, i32, Caller);

/// The end of a file that the kernel knows may be a former one: so O_APPEND is left to the store's file system. Bytes of a mapping
/// have their place.
fn try_write(handle: &Handle, offset: u64, data: &[u8], (how, flags, caller): How) -> Result<Written> {
    let file = handle.file().ok_or(Fault::Code(libc::EBADF))?;
    if how.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) {
        caller.drop_bits(&file)?;
    }
    let appends = flags & libc::O_APPEND != 0 && !how.contains(WriteFlags::FUSE_WRITE_CACHE);
    Ok((write_full(&file, data, (!appends).then_some(offset))?, file))
}

/// Reads and writes of open files.
pub(super) struct Bytes {
    files: Arc<OpenFiles>,
    workers: Arc<Workers>,
}

impl Bytes {
    pub(super) fn new(files: Arc<OpenFiles>, workers: Arc<Workers>) -> Arc<Self> {
        Arc::new(Self { files, workers })
    }

    /// The plain file behind a handle; a released file that is only read has none.
    fn plain(&self, fh: FileHandle) -> Result<Arc<File>> {
        self.files.handle(fh)?.file().ok_or(Fault::Code(libc::EBADF))
    }

    pub(super) fn read(self: &Arc<Self>, fh: FileHandle, offset: u64, size: u32, reply: ReplyData) {
        let handle = self.files.handle(fh);
        if let Ok(Some(reading)) = handle.as_ref().map(|handle| &handle.reading)
            && let Some((object, by)) = reading.read(size.into())
        {
            self.files.tree.archive().restores().read_by(object, by);
        }
        match handle.map(|handle| handle.source()) {
            Ok(Source::File(file)) => answer(size, reply, |buffer| read_full(&file, buffer, offset)),
            Ok(Source::Reader(reader)) => match reader.present(offset, size.into()) {
                Some(decoded) => answer(size, reply, |buffer| read_full(decoded.file(), buffer, offset)),
                None => {
                    let reader = Arc::clone(&reader);
                    self.workers.submit(Box::new(move || {
                        answer(size, reply, |buffer| reader.read_at(offset, buffer).map_err(Fault::from));
                    }));
                }
            },
            Err(fault) => reply.error(fault.into()),
        }
    }

    pub(super) fn write(
        self: &Arc<Self>,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        (how, flags, caller): How,
        reply: ReplyWrite,
    ) {
        let handle = match self.files.handle(fh) {
            Ok(handle) => handle,
            Err(fault) => return reply.error(fault.into()),
        };
        let need = Need::new(&handle, caller.thread, offset, data.len() as u64);
        // The kernel holds closes back while many of these are unanswered.
        if how.contains(WriteFlags::FUSE_WRITE_CACHE) {
            let written = try_write(&handle, offset, data, (how, flags, caller));
            // The kernel takes a short answer for the whole.
            let written = written.and_then(|of| {
                if of.0 < data.len() { Err(io::Error::from_raw_os_error(libc::ENOSPC).into()) } else { Ok(of) }
            });
            if written.as_ref().is_err_and(Fault::lacks_room) {
                self.files.room.refused(&need);
            }
            return self.conclude(handle, offset, flags, written, reply);
        }
        match self.files.room.unless_short(&need, || try_write(&handle, offset, data, (how, flags, caller))) {
            Some(written) => self.conclude(handle, offset, flags, written, reply),
            None => {
                let (bytes, own, data) = (Arc::clone(self), Arc::clone(&handle), data.to_vec());
                let attempt = move || try_write(&own, offset, &data, (how, flags, caller));
                let answer = move |written| bytes.conclude(handle, offset, flags, written, reply);
                self.files.room.wait(need, attempt, answer);
            }
        }
    }

    /// Answers a write.
    fn conclude(
        self: &Arc<Self>,
        handle: Arc<Handle>,
        offset: u64,
        flags: i32,
        written: Result<Written>,
        reply: ReplyWrite,
    ) {
        match written {
            // The kernel sends FSYNC after O_DSYNC writes only through the page cache. Direct I/O must sync here.
            Ok((len, file)) if handle.writes_below_pages() || handle.direct && flags & libc::O_DSYNC != 0 => {
                let bytes = Arc::clone(self);
                self.workers.submit(Box::new(move || {
                    if handle.writes_below_pages() {
                        bytes.files.tree.invalidations.pages(handle.node, offset, len);
                    }
                    let synced = match flags & libc::O_DSYNC {
                        0 => Ok(()),
                        _ => bytes.files.tree.io().device().sync_data(&file, CrashPoint::Fsync),
                    };
                    match synced {
                        Ok(()) => reply.written(len as u32),
                        Err(error) => {
                            bytes.files.tree.archive().store().sync_failed(&file, &error);
                            reply.error(Fault::from(error).into());
                        }
                    }
                }))
            }
            Ok((len, ..)) => reply.written(len as u32),
            Err(fault) => {
                // A handle that lost its lock writes no more, and a later fsync may answer that all is well.
                if let (Fault::Os(error), Some(file)) = (&fault, handle.file())
                    && matches!(error.raw_os_error(), Some(libc::EIO | libc::ESTALE))
                {
                    self.files.tree.archive().store().sync_failed(&file, error);
                }
                reply.error(fault.into());
            }
        }
    }

    /// A descriptor of the file is closed. Network file systems report late errors then.
    pub(super) fn flush(self: &Arc<Self>, fh: FileHandle, reply: ReplyEmpty) {
        match self.files.handle(fh).map(|handle| handle.file()) {
            Ok(Some(file)) => {
                self.workers.submit(Box::new(move || {
                    let flushed = sys::flush(&file).map_err(Fault::from);
                    done(reply, flushed);
                }));
            }
            Ok(None) => reply.ok(),
            Err(fault) => reply.error(fault.into()),
        }
    }

    pub(super) fn fsync(self: &Arc<Self>, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let bytes = Arc::clone(self);
        self.workers.submit(Box::new(move || {
            done(reply, bytes.sync(fh, datasync));
        }));
    }

    /// After this the bytes survive a crash, and so does the name of a file that was created through the mount.
    fn sync(&self, fh: FileHandle, datasync: bool) -> Result<()> {
        let handle = self.files.handle(fh)?;
        match handle.file() {
            Some(file) => {
                let synced = match datasync {
                    true => self.files.tree.io().device().sync_data(&file, CrashPoint::Fsync),
                    false => self.files.tree.io().sync_file(&file, CrashPoint::Fsync),
                };
                synced.inspect_err(|error| self.files.tree.archive().store().sync_failed(&file, error))?;
            }
            // Its bytes are durable. Its attributes become durable with the stub.
            None if datasync => {}
            None => self.files.tree.sync_node(handle.node, CrashPoint::Fsync)?,
        }
        // Held, because a program may rename a directory meanwhile, and counted, because another fsync of the file may run
        // beside this one: neither may return before the name is durable.
        let (unsynced, directories) = {
            let table = self.files.tree.table();
            let unsynced = table.node(handle.node)?.unsynced_names;
            let names = if unsynced > 0 { &table.node(handle.node)?.names[..] } else { &[] };
            let held = names.iter().map(|(parent, _)| table.directory(*parent));
            (unsynced, held.collect::<Result<Vec<_>>>()?)
        };
        for directory in &directories {
            self.files.tree.io().sync_dir(&beneath::by_descriptor(directory), CrashPoint::Fsync)?;
        }
        if unsynced > 0
            && let Some(node) = self.files.tree.table().get_mut(handle.node)
        {
            node.names_synced(unsynced);
        }
        Ok(())
    }

    pub(super) fn fallocate(
        self: &Arc<Self>,
        fh: FileHandle,
        (offset, length, mode): (u64, u64, i32),
        caller: Caller,
        reply: ReplyEmpty,
    ) {
        let both = self.files.handle(fh).and_then(|handle| Ok((handle, self.plain(fh)?)));
        let (handle, file) = match both {
            Ok(both) => both,
            Err(fault) => return reply.error(fault.into()),
        };
        let mode = FallocateFlags::from_bits_retain(mode.cast_unsigned());
        // A hole takes no room.
        let len = if FallocateFlags::KEEP_SIZE.contains(mode) { length } else { 0 };
        let need = Need::new(&handle, caller.thread, offset, len);
        let attempt = move || rustix::fs::fallocate(&file, mode, offset, length).map_err(Fault::from);
        self.take_room(need, attempt, move |allocated| done(reply, allocated));
    }

    /// Makes an attempt from a worker, or several, and answers the last one.
    fn take_room<T: 'static>(
        &self,
        need: Need,
        mut attempt: impl FnMut() -> Result<T> + Send + 'static,
        answer: impl FnOnce(Result<T>) + Send + 'static,
    ) {
        let room = Arc::clone(&self.files.room);
        self.workers.submit(Box::new(move || match room.unless_short(&need, &mut attempt) {
            Some(done) => answer(done),
            None => room.wait(need, attempt, answer),
        }));
    }

    pub(super) fn lseek(&self, fh: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let found = self.files.handle(fh).and_then(|handle| match handle.source() {
            Source::File(file) => {
                let from = match whence {
                    libc::SEEK_DATA => SeekFrom::Data(offset.cast_unsigned()),
                    libc::SEEK_HOLE => SeekFrom::Hole(offset.cast_unsigned()),
                    // The kernel asks for nothing else.
                    _ => return Err(libc::EINVAL.into()),
                };
                Ok(rustix::fs::seek(&file, from)?.cast_signed())
            }
            // A released file is data from end to end, then the hole that every file ends with.
            Source::Reader(reader) => {
                let len = i64::try_from(reader.len()).unwrap_or(i64::MAX);
                match whence {
                    _ if offset < 0 || offset >= len => Err(libc::ENXIO.into()),
                    libc::SEEK_DATA => Ok(offset),
                    libc::SEEK_HOLE => Ok(len),
                    _ => Err(libc::EINVAL.into()),
                }
            }
        });
        match found {
            Ok(offset) => reply.offset(offset),
            Err(fault) => reply.error(fault.into()),
        }
    }

    /// Between plain files the kernel copies (and shares blocks, if it can); otherwise it is told to read and write.
    pub(super) fn copy(
        self: &Arc<Self>,
        from: (FileHandle, u64),
        to: (FileHandle, u64),
        len: u64,
        caller: Caller,
        reply: ReplyWrite,
    ) {
        let all = || Ok((self.files.handle(from.0)?.file(), self.files.handle(to.0)?, self.plain(to.0)?));
        let (source, handle, file) = match all() {
            Ok(all) => all,
            Err(fault) => return reply.error(Fault::into(fault)),
        };
        let Some(source) = source else {
            return reply.error(Errno::EOPNOTSUPP);
        };
        let len = len.min(COPY_MOST);
        let need = Need::new(&handle, caller.thread, to.1, len);
        let attempt = move || {
            let (mut at, mut to_at) = (from.1, to.1);
            let copied = rustix::fs::copy_file_range(&source, Some(&mut at), &file, Some(&mut to_at), len as usize);
            copied.map_err(Fault::from)
        };
        self.take_room(need, attempt, |copied| match copied {
            Ok(copied) => reply.written(copied as u32),
            Err(fault) => reply.error(fault.into()),
        });
    }
}
