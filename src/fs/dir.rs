//! Reading directories. A handle lists the entries from its open or rewind, so offsets stay valid while entries come
//! and go.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::DirEntryExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fuser::{
    FileHandle, FileType, FopenFlags, Generation, INodeNo, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyOpen,
};

use super::attr::attributes;
use super::errno::{Fault, Result};
use super::inodes::kind;
use super::numbers::ROOT;
use super::tree::Tree;
use super::workers::Workers;
use crate::archive::FileId;

/// An entry as the store's file system lists it.
#[derive(Clone)]
struct Listed {
    file: FileId,
    kind: FileType,
    name: OsString,
}

/// One open directory.
struct Directory {
    node: u64,
    file: File,
    listed: Mutex<Arc<Vec<Listed>>>,
}

impl Directory {
    /// Lists it anew, without `.` and `..`.
    fn list(&self) -> Result<Arc<Vec<Listed>>> {
        let dev = FileId::of(&self.file.metadata()?).dev;
        let mut listed = Vec::new();
        for entry in std::fs::read_dir(format!("/proc/self/fd/{}", self.file.as_raw_fd()))? {
            let entry = entry?;
            // Some file systems do not list the type, and it may be gone when we ask.
            let file_type = match entry.file_type() {
                Ok(file_type) => file_type,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error.into()),
            };
            listed.push(Listed {
                file: FileId { dev, ino: entry.ino() },
                kind: kind(file_type),
                name: entry.file_name(),
            });
        }
        let listed = Arc::new(listed);
        *self.listed.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&listed);
        Ok(listed)
    }

    /// The listing to serve a request at `offset` from.
    fn at(&self, offset: u64) -> Result<Arc<Vec<Listed>>> {
        if offset == 0 {
            return self.list();
        }
        Ok(Arc::clone(&self.listed.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

/// `.` and `..` come first.
const DOTS: [&str; 2] = [".", ".."];

/// Open directories.
pub(super) struct Directories {
    tree: Arc<Tree>,
    workers: Arc<Workers>,
    /// By handle number. Taken for moments only.
    open: Mutex<HashMap<u64, Arc<Directory>>>,
}

impl Directories {
    pub(super) fn new(tree: Arc<Tree>, workers: Arc<Workers>) -> Self {
        Self { tree, workers, open: Mutex::default() }
    }

    fn open(&self) -> MutexGuard<'_, HashMap<u64, Arc<Directory>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn directory(&self, fh: FileHandle) -> Result<Arc<Directory>> {
        self.open().get(&fh.0).cloned().ok_or(Fault::Code(libc::EBADF))
    }

    pub(super) fn opendir(&self, ino: u64, reply: ReplyOpen) {
        let opened = || -> Result<u64> {
            let table = self.tree.table();
            let place = table.place(ino)?;
            if table.node(ino)?.kind != FileType::Directory {
                return Err(libc::ENOTDIR.into());
            }
            let file = File::open(&place.path)?;
            drop(table);
            let fh = self.tree.number();
            let listed = Mutex::new(Arc::default());
            self.open().insert(fh, Arc::new(Directory { node: ino, file, listed }));
            Ok(fh)
        };
        match opened() {
            Ok(fh) => reply.opened(FileHandle(fh), FopenFlags::empty()),
            Err(fault) => reply.error(fault.into()),
        }
    }

    pub(super) fn releasedir(&self, fh: FileHandle) {
        self.open().remove(&fh.0);
    }

    pub(super) fn fsyncdir(&self, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let directory = match self.directory(fh) {
            Ok(directory) => directory,
            Err(fault) => return reply.error(fault.into()),
        };
        self.workers.submit(Box::new(move || {
            let file = &directory.file;
            match if datasync { file.sync_data() } else { file.sync_all() } {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(Fault::from(error).into()),
            }
        }));
    }

    /// Numbers of the directory and its parent.
    fn dots(&self, ino: u64) -> [u64; 2] {
        let table = self.tree.table();
        let parent = table.node(ino).ok().and_then(|node| node.names.first()).map_or(ROOT, |(parent, _)| *parent);
        [ino, parent]
    }

    pub(super) fn readdir(&self, fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let found = self.directory(fh).and_then(|directory| Ok((directory.at(offset)?, directory)));
        let (listed, directory) = match found {
            Ok(found) => found,
            Err(fault) => return reply.error(fault.into()),
        };
        let dots = self.dots(directory.node);
        let mut next = offset as usize;
        while next < DOTS.len() {
            if reply.add(INodeNo(dots[next]), next as u64 + 1, FileType::Directory, DOTS[next]) {
                return reply.ok();
            }
            next += 1;
        }
        let mut table = self.tree.table();
        for entry in listed.iter().skip(next - DOTS.len()) {
            let ino = table.number(entry.file);
            if reply.add(INodeNo(ino), next as u64 + 1, entry.kind, &entry.name) {
                break;
            }
            next += 1;
        }
        drop(table);
        reply.ok();
    }

    /// As readdir, and each entry counts as looked up, except the dots.
    pub(super) fn readdirplus(&self, fh: FileHandle, offset: u64, mut reply: ReplyDirectoryPlus) {
        let found =
            self.directory(fh).and_then(|directory| Ok((directory.at(offset)?, directory.file.metadata()?, directory)));
        let (listed, metadata, directory) = match found {
            Ok(found) => found,
            Err(fault) => return reply.error(fault.into()),
        };
        let dots = self.dots(directory.node);
        let ttl = self.tree.ttl;
        let mut next = offset as usize;
        while next < DOTS.len() {
            let shown = attributes(dots[next], &metadata, 0);
            if reply.add(INodeNo(dots[next]), next as u64 + 1, DOTS[next], &ttl, &shown, Generation(0)) {
                return reply.ok();
            }
            next += 1;
        }
        let mut table = self.tree.table();
        let mut first = next == offset as usize;
        for entry in listed.iter().skip(next - DOTS.len()) {
            let position = next as u64 + 1;
            next += 1;
            let found = table.look(directory.node, &entry.name);
            let looked_up = found.and_then(|found| self.tree.entry(&mut table, directory.node, &entry.name, &found));
            let (ttl, shown, generation) = match looked_up {
                Ok(looked_up) => looked_up,
                // Removed since it was listed.
                Err(fault) if fault.is_absence() => continue,
                // A failing device must not hide a name: a program that copies the listed files would not notice.
                Err(fault) if first => return reply.error(fault.into()),
                Err(_) => break,
            };
            first = false;
            // The reply has one time for the name and for the attributes.
            let ttl = ttl.min(self.tree.ttl);
            if reply.add(shown.ino, position, &entry.name, &ttl, &shown, generation) {
                table.forget(shown.ino.0, 1);
                break;
            }
        }
        drop(table);
        reply.ok();
    }
}
