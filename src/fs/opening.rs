//! The file behind a handle that is being opened.

use std::fs::File;
use std::io;
use std::sync::Arc;

use super::node::{Access, Mode, Node, Source};
use super::passthrough::{Passthrough, Reply};
use super::place::Place;
use super::room::Room;
use crate::archive::FileId;
use crate::recall::Reader;
use crate::store::Stub;

/// The file that a handle reads and writes.
pub(super) struct Opening {
    pub(super) source: Source,
    /// The stub whose object it reads.
    pub(super) stub: Option<Stub>,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// Who serves it, if it becomes the node's first open. `None`: the kernel has not been asked.
    pub(super) mode: Option<Mode>,
    /// Counts it among the files that the kernel writes to.
    pub(super) writer: Option<Arc<()>>,
}

impl Opening {
    /// A plain file, and its access.
    pub(super) fn file(file: File, readable: bool, writable: bool) -> Self {
        Self { source: Source::File(Arc::new(file)), stub: None, readable, writable, mode: None, writer: None }
    }

    /// A released file. In a shared store the daemon serves it: a recall makes another file, for which the kernel must be free.
    pub(super) fn reader(reader: Arc<Reader>, stub: Stub, is_shared: bool) -> Self {
        let (readable, writable, mode) = (true, false, is_shared.then_some(Mode::Daemon));
        Self { source: Source::Reader(reader), stub: Some(stub), readable, writable, mode, writer: None }
    }

    /// Asks the kernel to serve the file by itself, if there is a whole one, and room for its writes. Call it without the
    /// table's lock.
    pub(super) fn register(&mut self, by: &Arc<Passthrough>, room: Option<&Room>, reply: &dyn Reply) {
        // Counted before the question, since others ask beside it.
        self.writer = room.map(Room::writer);
        let is_short = by.is_on() && room.is_some_and(Room::is_short);
        let backing = match &self.source {
            _ if is_short => None,
            Source::File(file) => by.register(file, reply),
            Source::Reader(reader) => reader.whole().and_then(|decoded| by.register(decoded.file(), reply)),
        };
        self.mode = Some(backing.map_or(Mode::Daemon, |backing| Mode::Passthrough(Arc::new(backing))));
    }

    /// The node shows this file now.
    pub(super) fn is_of(&self, node: &Node) -> bool {
        let is_file = |file: &File| FileId::of_open(file).is_ok_and(|file| file == node.file);
        self.stub == node.stub
            && match &self.source {
                Source::File(file) => is_file(file),
                Source::Reader(_) => true,
            }
    }
}

/// Opens a node's file. To be changed, or with `both`, it is opened read-write if that may be: later opens can share it.
pub(super) fn open_file(place: &Place, access: Access, both: bool) -> io::Result<(File, bool, bool)> {
    let open = |read, write| if access.aside { place.open_aside(read, write) } else { place.open(read, write) };
    let writable = both || access.changes();
    match open(true, writable) {
        Ok(file) => Ok((file, true, writable)),
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS | libc::ETXTBSY)) =>
        {
            Ok((open(access.read, access.write)?, access.read, access.write))
        }
        Err(error) => Err(error),
    }
}
