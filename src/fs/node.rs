//! One file, directory or other inode that the kernel knows.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use fuser::{FileType, Generation};

use super::passthrough::Backing;
use super::patience::Patience;
use super::workers::Job;
use crate::archive::FileId;
use crate::recall::Reader;
use crate::store::{Id, Stub};
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard};

/// The daemon's record of an inode that the kernel refers to.
pub(super) struct Node {
    /// The kind of file; never changes.
    pub(super) kind: FileType,
    /// The file in the store's tree. Changes at release and recall.
    pub(super) file: FileId,
    /// Tells it from other files with its number; never changes.
    pub(super) generation: Generation,
    /// Parent and name, as far as looked up. A directory has one, an unlinked file none.
    pub(super) names: Vec<(u64, OsString)>,
    /// Entries of a directory, as far as looked up.
    pub(super) children: HashMap<OsString, u64>,
    /// The kernel's references to it, less those that it forgot.
    pub(super) lookups: u64,
    /// The stub, if the file is released.
    pub(super) stub: Option<Stub>,
    /// Handles, while there are any.
    pub(super) opened: Option<Opened>,
    /// Opens for which the kernel is being asked whether it serves the file.
    pub(super) opening: u32,
    /// Set while a worker changes the representation: operations that wait for it.
    pub(super) waiting: Option<Vec<Job>>,
    /// No handle is open, but a mapping may still write to it (see `mapped`).
    pub(super) mapped: bool,
    /// The daemon could not read the file, so its next open or change checks whether it is a stub.
    pub(super) unread: bool,
    /// Refers to the file once it has no name left, so that it can be reached until the kernel forgets it.
    pub(super) held: Option<Arc<File>>,
    /// In a shared store: the stub's when its name was last looked up. See [`super::inodes::Table::metadata`].
    pub(super) seen: Option<Box<Metadata>>,
    /// Of its file ([`crate::store::engine::identity`]).
    pub(super) identity: Vec<u32>,
    /// Counts the changes to its bytes that the kernel's page cache does not see.
    pub(super) version: u64,
    /// The version that the kernel's page cache holds.
    pub(super) cached: Option<u64>,
    /// The version that was decoded as a whole, so that the kernel may have all of its pages.
    pub(super) decoded: Option<u64>,
    /// A directory's ctime since a file in it was released, and the one before. Programs see the latter: tar calls a
    /// directory changed, and fails, if its ctime changes meanwhile.
    pub(super) hidden_ctime: Option<[(i64, i64); 2]>,
    /// Changes of its names in their directories that may not be durable yet: an fsync has to see to that too. 0: none.
    pub(super) unsynced_names: u64,
}

impl Node {
    /// The first `count` changes of its names are durable. A later one may have come meanwhile.
    pub(super) fn names_synced(&mut self, count: u64) {
        if self.unsynced_names == count {
            self.unsynced_names = 0;
        }
    }

    pub(super) fn new(kind: FileType, file: FileId, stub: Option<Stub>) -> Self {
        Self {
            kind,
            file,
            generation: Generation(0),
            names: Vec::new(),
            children: HashMap::new(),
            lookups: 0,
            stub,
            opened: None,
            opening: 0,
            waiting: None,
            mapped: false,
            unread: false,
            held: None,
            seen: None,
            identity: Vec::new(),
            version: 0,
            cached: None,
            decoded: None,
            hidden_ctime: None,
            unsynced_names: 0,
        }
    }

    /// The time that programs see instead of this ctime.
    pub(super) fn shown_ctime(&self, actual: (i64, i64)) -> (i64, i64) {
        self.hidden_ctime.filter(|hidden| hidden[0] == actual).map_or(actual, |hidden| hidden[1])
    }

    /// Neither the kernel nor a handle nor an entry needs it.
    pub(super) fn unused(&self) -> bool {
        self.lookups == 0 && !self.busy() && self.children.is_empty()
    }

    /// Its representation must stay as it is.
    pub(super) fn busy(&self) -> bool {
        self.opened.is_some() || self.opening > 0 || self.waiting.is_some() || self.mapped
    }

    /// Whether it may be mapped for writing now.
    pub(super) fn may_be_mapped(&self) -> bool {
        self.mapped || self.opened.as_ref().is_some_and(|opened| opened.mappable)
    }
}

/// The access that an open asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) read: bool,
    pub(super) write: bool,
    pub(super) truncate: bool,
    /// O_NOATIME.
    pub(super) aside: bool,
    /// O_APPEND.
    pub(super) append: bool,
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
            append: flags & libc::O_APPEND != 0,
            by: None,
        }
    }

    /// The bytes may change through this open.
    pub(super) fn changes(self) -> bool {
        self.write || self.truncate
    }
}

/// The handles of one node. The first decides the mode until the last is released, because the kernel refuses a
/// mixture with EIO.
pub(super) struct Opened {
    pub(super) mode: Mode,
    /// The first handle's source. Later handles share it if it allows their access.
    pub(super) source: Source,
    pub(super) readable: bool,
    pub(super) writable: bool,
    pub(super) handles: HashMap<u64, Arc<Handle>>,
    /// A handle since the node was last at rest could be mapped for writing.
    pub(super) mappable: bool,
    /// A handle since the node was last at rest could write.
    pub(super) wrote: bool,
    /// The kernel may have pages of it. Handles that bypass its page cache have to know.
    pub(super) has_pages: Arc<AtomicBool>,
}

impl Opened {
    /// Bytes of the plain file; more than any file has if that cannot be said.
    pub(super) fn len(&self) -> u64 {
        match &self.source {
            Source::File(file) => file.metadata().map_or(u64::MAX, |metadata| metadata.len()),
            Source::Reader(reader) => reader.len(),
        }
    }

    /// The kernel serves it.
    pub(super) fn passes_through(&self) -> bool {
        matches!(self.mode, Mode::Passthrough(_))
    }
}

/// Who serves reads and writes of an open node.
#[derive(Clone)]
pub(super) enum Mode {
    /// The kernel, from this file of the store.
    Passthrough(Arc<Backing>),
    /// The daemon.
    Daemon,
}

/// One open of a file.
pub(super) struct Handle {
    pub(super) node: u64,
    /// It bypasses the kernel's page cache.
    pub(super) direct: bool,
    /// [`Opened::has_pages`].
    has_pages: Arc<AtomicBool>,
    /// Training may go on from its bytes.
    pub(super) reading: Option<Reading>,
    source: Mutex<Source>,
    /// Taken for moments. No other lock is taken under it.
    patience: Mutex<Patience>,
    /// The kernel writes through it by itself: counts it ([`super::room::Room::writer`]).
    _writer: Option<Arc<()>>,
}

/// How much of a released file was read through one handle.
pub(super) struct Reading {
    object: Id,
    /// The process that opened it.
    by: u32,
    /// Bytes left to be read before it counts; 0 once it does.
    left: AtomicU64,
}

impl Reading {
    pub(super) fn new(stub: &Stub, by: u32) -> Self {
        Self { object: stub.object, by, left: AtomicU64::new(stub.logical_len.div_ceil(2)) }
    }

    /// Counts bytes that were read. Returns the object and its reader exactly once: when half was read.
    pub(super) fn read(&self, count: u64) -> Option<(Id, u32)> {
        let less = |left: u64| (left > 0).then(|| left.saturating_sub(count));
        let before = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok()?;
        (before <= count).then_some((self.object, self.by))
    }

    /// The kernel may have read everything.
    pub(super) fn all_read(&self) -> Option<(Id, u32)> {
        self.read(u64::MAX)
    }
}

/// Where the bytes of an open file are.
#[derive(Clone)]
pub(super) enum Source {
    /// In a plain file.
    File(Arc<File>),
    /// In an object, to be decoded.
    Reader(Arc<Reader>),
}

impl Source {
    /// The version of a released file, if each of its bytes is decoded.
    pub(super) fn decoded(&self, version: u64) -> Option<u64> {
        matches!(self, Source::Reader(reader) if reader.whole().is_some()).then_some(version)
    }
}

impl Handle {
    pub(super) fn new(
        node: u64,
        direct: bool,
        has_pages: &Arc<AtomicBool>,
        source: Source,
        reading: Option<Reading>,
        writer: Option<Arc<()>>,
    ) -> Self {
        let (has_pages, source, patience) = (Arc::clone(has_pages), Mutex::new(source), Mutex::default());
        Self { node, direct, has_pages, reading, source, patience, _writer: writer }
    }

    /// How long its calls wait for room.
    pub(super) fn patience(&self) -> MutexGuard<'_, Patience> {
        self.patience.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether pages that others read have to be dropped after a write. Since Linux 6.16 the kernel does it too.
    pub(super) fn writes_below_pages(&self) -> bool {
        self.direct && self.has_pages.load(Ordering::Relaxed)
    }

    fn slot(&self) -> MutexGuard<'_, Source> {
        self.source.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where to read and write now.
    pub(super) fn source(&self) -> Source {
        self.slot().clone()
    }

    /// The plain file, if one is open.
    pub(super) fn file(&self) -> Option<Arc<File>> {
        match &*self.slot() {
            Source::File(file) => Some(Arc::clone(file)),
            Source::Reader(_) => None,
        }
    }

    /// The file was recalled: go on with the same bytes there.
    pub(super) fn switch(&self, file: &Arc<File>) {
        *self.slot() = Source::File(Arc::clone(file));
    }
}
