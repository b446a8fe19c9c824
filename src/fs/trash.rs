//! Removes files. With `trash_for` they move to the trash, and stay there that long ([`crate::archive`] empties it).
//!
//! `rm run/step_5.pt` becomes a rename to `.stepfs-trash/UID/MINUTE/run/step_5.pt`. A file in the trash is an ordinary file of
//! the mount: programs list and read it, `mv` brings it back, and `rm` removes it. Each user has a directory that no other
//! user may enter, since the file may come from a directory that others may not enter either.

use std::ffi::{OsStr, OsString};
use std::fs::{Metadata, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

use fuser::RenameFlags;

use super::errno::{Fault, Result};
use super::inodes::Table;
use super::numbers::ROOT;
use super::privileges::Caller;
use super::tree::Tree;
use crate::archive::Archive;
use crate::clock::{local, wall_ns};
use crate::store::{TRASH, is_trash};

/// Files of one name that a minute takes. A program that removes more of them, such as a lock file, does not want them back.
const MOST_OF_A_NAME: u32 = 8;

/// Removes a name of anything but a directory.
pub(super) fn unlink(tree: &Tree, parent: u64, name: &OsStr, caller: Caller) -> Result<()> {
    let mut table = tree.table();
    let path = table.child(parent, name)?;
    let found = table.look(parent, name)?;
    if found.metadata.is_dir() {
        return Err(libc::EISDIR.into());
    }
    if takes(tree.archive(), &path, &found.metadata) {
        match (Trash { tree, table: &mut table, caller }).take((parent, name), &path) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            // On a full disk the trash has no room for a directory, and the remover may need the file's.
            Err(fault) => log::warn!("{}: removed, since the trash cannot take it: {fault:?}", path.display()),
        }
    }
    tree.take_away(&mut table, parent, &path, &found)
}

/// Whether a removal of this file goes to the trash. An empty file has nothing to bring back. Below the reserve a save needs
/// the room more.
fn takes(archive: &Archive, path: &Path, metadata: &Metadata) -> bool {
    let is_last = metadata.is_file() && metadata.nlink() == 1 && metadata.len() > 0;
    archive.store().settings().trash_for.is_some() && is_last && !is_trash(path) && !archive.reserve.is_touched()
}

/// One removal, under the table's lock.
struct Trash<'a> {
    tree: &'a Tree,
    table: &'a mut Table,
    /// The remover.
    caller: Caller,
}

impl Trash<'_> {
    /// Moves a file to the trash, and answers whether that took it.
    ///
    /// # Errors
    /// Those of the file system, and EEXIST if another user made the directory. Then the file is where it was.
    fn take(mut self, from: (u64, &OsStr), path: &Path) -> Result<bool> {
        // A daemon that is not root can give nothing away, so all removals are its user's.
        let owner = if self.tree.user == 0 { self.caller.uid } else { self.tree.user };
        let now = local(wall_ns() / 1_000_000_000);
        let date = format!("{}-{:02}-{:02}", 1900 + now.tm_year, now.tm_mon + 1, now.tm_mday);
        let minute = format!("{date}_{:02}-{:02}", now.tm_hour, now.tm_min);
        let owner_name = owner.to_string();
        let own = [OsStr::new(&owner_name), OsStr::new(&minute)].into_iter().chain(path.parent().unwrap_or(path));
        let own = own.map(|part| (part, 0o700, owner));
        let mut directory = ROOT;
        let mut parts = std::iter::once((OsStr::new(TRASH), 0o755, self.tree.user)).chain(own);
        let entered = parts.try_for_each(|(part, mode, owner)| {
            directory = self.enter(directory, part, mode, owner)?;
            Ok(())
        });
        let moved = entered.and_then(|()| self.put(from, directory));
        self.table.reap(directory);
        moved
    }

    /// A directory of the trash, which is made if it is missing.
    fn enter(&mut self, parent: u64, name: &OsStr, mode: u32, owner: u32) -> Result<u64> {
        let path = self.table.child(parent, name)?;
        let reached = self.table.reach(&path)?;
        match std::fs::DirBuilder::new().mode(mode).create(&*reached) {
            Ok(()) => {
                // Whatever the daemon's own umask is.
                let made = std::fs::set_permissions(&*reached, Permissions::from_mode(mode)).and_then(|()| {
                    let other = (owner != self.tree.user).then_some(owner);
                    std::os::unix::fs::lchown(&*reached, other, other.map(|_| self.caller.gid))
                });
                made.inspect_err(|_| drop(std::fs::remove_dir(&*reached)))?;
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error.into()),
        }
        let found = self.table.look(parent, name)?;
        // A link would lead out of the trash, and the owner of a directory may read the names in it.
        if !found.metadata.is_dir() || found.metadata.uid() != owner {
            return Err(Fault::Code(libc::EEXIST));
        }
        self.tree.archive().touched(&path);
        self.table.admit(self.tree.archive(), parent, name, &found)
    }

    /// Moves the file into a directory, under its own name or with a number after it. False: all those are taken.
    fn put(&mut self, from: (u64, &OsStr), directory: u64) -> Result<bool> {
        let names = (1..MOST_OF_A_NAME).map(|number| {
            let mut name = OsString::from(from.1);
            name.push(format!(".{number}"));
            name
        });
        for name in std::iter::once(from.1.to_owned()).chain(names) {
            match self.tree.rename_in(self.table, from, (directory, &name), RenameFlags::RENAME_NOREPLACE) {
                Err(Fault::Code(libc::EEXIST)) => {}
                moved => return moved.map(|()| true),
            }
        }
        Ok(false)
    }
}
