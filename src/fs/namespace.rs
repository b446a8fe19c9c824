//! What the archive may do to a file while the tree is mounted.

use std::io;
use std::path::Path;

use super::Core;
use super::node::{Place, file_id};
use crate::archive::{FileId, Namespace, Outcome};

impl Namespace for Core {
    fn idle(&self, _: &Path, expect: FileId) -> Outcome {
        let mut table = self.table();
        let ino = table.number(expect);
        match table.get_mut(ino).is_some_and(|node| node.busy()) {
            true => Outcome::Busy,
            false => Outcome::Done,
        }
    }

    fn exclusively(
        &self,
        path: &Path,
        expect: FileId,
        commit: &mut dyn FnMut(&Path) -> io::Result<()>,
    ) -> io::Result<Outcome> {
        let mut table = self.table();
        let absolute = table.absolute(path);
        let is = |error: io::Error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => Ok(None),
            _ => Err(error),
        };
        let found = absolute.symlink_metadata().map(|metadata| Some(file_id(&metadata))).or_else(is)?;
        if found != Some(expect) {
            return Ok(Outcome::Changed);
        }
        let ino = table.number(expect);
        if table.get_mut(ino).is_some_and(|node| node.busy()) {
            return Ok(Outcome::Busy);
        }
        let committed = commit(&absolute);
        // Also if it failed: perhaps only after the rename.
        let now = file_id(&absolute.symlink_metadata()?);
        if now != expect {
            table.replaced(expect, now);
            if let Some(node) = table.get_mut(ino) {
                node.file = now;
                node.stub = self.archive.stub(&Place::named(absolute).open(true, false)?)?;
                node.version += 1;
                self.invalidations.inode(ino);
            }
        }
        committed.map(|()| Outcome::Done)
    }
}
