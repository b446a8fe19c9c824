//! File handles: what `name_to_handle_at` gave, and NFS keeps, leads to the file again after the kernel forgot it.
//!
//! The kernel makes a handle of a node's number and generation. It looks up `.` in a number that it does not know any more,
//! and `..` in a directory whose parent it does not know. A number that we know has a path. For another one a worker goes
//! through the tree. Another file may have got the number meanwhile, so the generation is that of the file in the store.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fuser::ReplyEntry;

use super::Core;
use super::attr::Attributes;
use super::errno::{Fault, Result};
use super::generation::NONE;
use super::inodes::Table;
use super::numbers::ROOT;
use super::reply::entry;
use crate::archive::FileId;
use crate::store::beneath;

/// Times that the tree is gone through because the file had another name when it was to be looked up.
const ROUNDS: usize = 3;

/// A path inside the tree of the file with this number in the store. Goes through the whole tree if it must.
fn path_of(root: &Path, file: FileId) -> Result<Option<PathBuf>> {
    use std::os::unix::fs::DirEntryExt;
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        // It may be gone by now, or be no directory any more.
        let Ok(opened) = beneath::open_dir(root, &directory) else { continue };
        for listed in std::fs::read_dir(beneath::by_descriptor(&opened))? {
            let listed = listed?;
            let path = directory.join(listed.file_name());
            if listed.ino() == file.ino {
                return Ok(Some(path));
            }
            if listed.file_type().is_ok_and(|kind| kind.is_dir()) {
                directories.push(path);
            }
        }
    }
    Ok(None)
}

impl Core {
    /// Answers a look-up of a node in itself, at once or from a worker.
    pub(super) fn lookup_self(self: &Arc<Self>, ino: u64, reply: ReplyEntry) {
        if let Some(known) = self.known(ino) {
            return entry(reply, known);
        }
        let core = Arc::clone(self);
        self.workers.submit(Box::new(move || entry(reply, core.find_number(ino))));
    }

    /// The directory that a directory lies in.
    pub(super) fn lookup_parent(&self, ino: u64) -> Result<Attributes> {
        let mut table = self.table();
        let (parent, _) = table.node(ino)?.names.first().cloned().ok_or(Fault::Code(libc::ENOENT))?;
        let metadata = table.place(parent)?.metadata()?;
        table.count(parent);
        Ok(self.shown(&table, parent, &metadata))
    }

    /// A node that is in the table.
    fn known(&self, ino: u64) -> Option<Result<Attributes>> {
        let mut table = self.table();
        table.get_mut(ino)?;
        Some(table.place(ino).and_then(|place| Ok(place.metadata()?)).map(|metadata| {
            table.count(ino);
            self.shown(&table, ino, &metadata)
        }))
    }

    /// A node that the kernel knew once.
    fn find_number(&self, ino: u64) -> Result<Attributes> {
        let (root, file) = {
            let table = self.table();
            (table.root().to_path_buf(), table.file_of(ino).ok_or(Fault::Code(libc::ENOENT))?)
        };
        for _ in 0..ROUNDS {
            let Some(path) = path_of(&root, file)? else { break };
            let mut table = self.table();
            if !table.reach(&path).and_then(|path| path.symlink_metadata()).is_ok_and(|now| FileId::of(&now) == file) {
                // It has another name by now.
                continue;
            }
            return self.enter(&mut table, &path, ino);
        }
        Err(libc::ENOENT.into())
    }

    /// Enters everything on the way to a path, and answers with what is there.
    fn enter(&self, table: &mut Table, path: &Path, expect: u64) -> Result<Attributes> {
        let (mut parent, mut at) = (ROOT, PathBuf::new());
        let names: Vec<&OsStr> = path.iter().collect();
        let Some((last, above)) = names.split_last() else { return Err(libc::ENOENT.into()) };
        for name in above {
            at.push(name);
            let metadata = table.reach(&at)?.symlink_metadata()?;
            parent = table.admit(&self.archive, parent, name, &metadata)?;
        }
        let metadata = table.reach(path)?.symlink_metadata()?;
        let found = self.entry(table, parent, last, &metadata)?;
        if found.1.ino.0 != expect || found.2 == NONE {
            table.forget(found.1.ino.0, 1);
            return Err(libc::ENOENT.into());
        }
        Ok(found)
    }
}
