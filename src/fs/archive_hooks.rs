//! The archive's actions on files while the tree is mounted.

use std::fs::Metadata;
use std::io;
use std::path::Path;
use std::sync::Weak;

use super::attr::changed;
use super::errno::Fault;
use super::inodes::{Found, Table};
use super::open::OpenFiles;
use super::place::Place;
use crate::archive::{Commit, FileId, Namespace, Outcome, found_at, unless_occupied};
use crate::store::durable;
use crate::store::{Id, Stub};

/// Whether the file is at rest and still at that path.
fn at_rest(files: &OpenFiles, table: &mut Table, path: &Path, expect: FileId) -> io::Result<Outcome> {
    let found = found_at(table.root(), path)?;
    if found.as_ref().map(FileId::of) != Some(expect) {
        return Ok(Outcome::Changed);
    }
    let ino = table.number(expect);
    if table.get_mut(ino).is_some_and(|node| node.busy())
        || files.mappings.written_behind(&table.reach(path)?, path, expect)?
    {
        return Ok(Outcome::Busy);
    }
    Ok(Outcome::Done)
}

/// Removes a name without the kernel's request, so the kernel is told.
fn take_away_unasked(files: &OpenFiles, table: &mut Table, path: &Path, metadata: Metadata) -> io::Result<Outcome> {
    let parent = table.find(path.parent().unwrap_or(Path::new("")));
    let taken = files.tree.take_away(table, parent, path, &Found::of(metadata));
    let outcome = unless_occupied(taken.map_err(Fault::into_error))?;
    if let (Outcome::Done, Some(name), 1..) = (outcome, path.file_name(), parent) {
        files.tree.invalidations.entry(parent, name);
    }
    Ok(outcome)
}

/// The archive's handle of the mount. It is weak, since the mount holds the archive. Without the mount, the archive
/// may not replace files.
pub(super) struct Served(pub(super) Weak<OpenFiles>);

impl Namespace for Served {
    fn idle(&self, path: &Path, expect: FileId) -> Outcome {
        let Some(files) = self.0.upgrade() else { return Outcome::Busy };
        let mut table = files.tree.table();
        // An error of the path shows when the file is opened.
        at_rest(&files, &mut table, path, expect).unwrap_or(Outcome::Changed)
    }

    fn exclusively(&self, path: &Path, expect: FileId, commit: &mut Commit<'_>) -> io::Result<Outcome> {
        let Some(files) = self.0.upgrade() else { return Ok(Outcome::Busy) };
        let mut table = files.tree.table();
        let state = at_rest(&files, &mut table, path, expect)?;
        if state != Outcome::Done {
            return Ok(state);
        }
        let reached = table.reach(path)?;
        let directory = durable::parent(&reached);
        let before = directory.metadata()?;
        let committed = commit(&reached);
        // Also after a failure, which may have come after the rename.
        let now = FileId::of(&reached.symlink_metadata()?);
        if now != expect {
            let above = table.find(path.parent().unwrap_or(Path::new("")));
            if let (Some(node), Ok(after)) = (table.get_mut(above), directory.metadata()) {
                node.hidden_ctime = Some([changed(&after), node.shown_ctime(changed(&before))]);
            }
            let ino = table.number(expect);
            table.replaced(expect, now);
            if let Some(node) = table.get_mut(ino) {
                node.file = now;
                let stub =
                    Place::named(reached).open(true, false).and_then(|file| files.tree.archive().stub(path, &file));
                node.stub = stub.unwrap_or_else(|error| {
                    // Its stub is never served as content: reading is an error until the kernel has forgotten the
                    // node.
                    log::error!("{}: cannot be read after its release: {error}", path.display());
                    let store = files.tree.archive().store().id();
                    Some(Stub { store, object: Id::NONE, logical_len: 0 })
                });
                node.version += 1;
                files.tree.invalidations.inode(ino);
            }
        }
        committed.map(Outcome::of_commit)
    }

    fn remove(&self, path: &Path, expect: FileId, still: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<Outcome> {
        let Some(files) = self.0.upgrade() else { return Ok(Outcome::Busy) };
        let mut table = files.tree.table();
        let found = match found_at(table.root(), path)? {
            Some(found) if FileId::of(&found) == expect && !found.is_dir() => found,
            _ => return Ok(Outcome::Changed),
        };
        let ino = table.number(expect);
        if table.get_mut(ino).is_some_and(|node| node.waiting.is_some()) {
            // It is being recalled for writing, or is just being opened.
            return Ok(Outcome::Busy);
        }
        if !still()? {
            return Ok(Outcome::Changed);
        }
        take_away_unasked(&files, &mut table, path, found)
    }

    fn remove_directory(&self, path: &Path, expect: FileId) -> io::Result<Outcome> {
        let Some(files) = self.0.upgrade() else { return Ok(Outcome::Busy) };
        let mut table = files.tree.table();
        match found_at(table.root(), path)? {
            Some(found) if FileId::of(&found) == expect && found.is_dir() => {
                take_away_unasked(&files, &mut table, path, found)
            }
            _ => Ok(Outcome::Changed),
        }
    }
}
