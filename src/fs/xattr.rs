//! Extended attributes. `user.stepfs.*` are the archive's, all others are the file's own.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use fuser::{Errno, FileType, ReplyEmpty, ReplyXattr};

use super::errno::{Fault, Result};
use super::inodes::Table;
use super::open::OpenFiles;
use super::passthrough::Passthrough;
use super::place::Place;
use super::reply::done;
use super::shared::{lock_node, when_free};
use super::transition::Recalls;
use super::tree::Tree;
use crate::archive::Status;
use crate::store::durable::CrashPoint;
use crate::store::{PIN, PROFILE, Profile};
use crate::sync::MutexGuard;

/// Attributes with this prefix are stepfs's own. stepfs computes them, and stores only pins and profiles. They are
/// not listed: `cp -a` and `rsync -X` would otherwise carry them to other files.
const OWN: &str = "user.stepfs.";

/// Access control lists. The kernel would have to enforce them, and does not with these mounts. A refusal is safer
/// than a list without effect.
const ACL: &str = "system.posix_acl_";

/// Only root may see these names, as only root may see their values.
const TRUSTED: &str = "trusted.";

/// Attributes of the whole store. Users who may see only some of its files do not get them.
const OF_ALL: [&str; 5] = ["store", "status", "queue", "gc", "sync"];

enum Name<'a> {
    Own(&'a str),
    Acl,
    File,
}

fn classify(name: &OsStr) -> Name<'_> {
    match name.to_str() {
        Some(text) => match text.strip_prefix(OWN) {
            Some(own) => Name::Own(own),
            None if text.starts_with(ACL) => Name::Acl,
            None => Name::File,
        },
        None => Name::File,
    }
}

/// Reads and writes extended attributes.
pub(super) struct Xattrs {
    tree: Arc<Tree>,
    recalls: Recalls,
    passthrough: Arc<Passthrough>,
}

impl Xattrs {
    pub(super) fn new(files: &OpenFiles) -> Arc<Self> {
        let (tree, passthrough) = (Arc::clone(&files.tree), Arc::clone(&files.passthrough));
        Arc::new(Self { tree, recalls: files.recalls.clone(), passthrough })
    }

    fn named(&self, ino: u64) -> Result<PathBuf> {
        self.tree.table().path(ino).ok_or(Fault::Code(libc::ENODATA))
    }

    fn getxattr(&self, ino: u64, name: &OsStr) -> Result<Vec<u8>> {
        match classify(name) {
            // Not under the lock: the archive may have to count a lot for its answer.
            Name::Own(own) if own != "pin" => {
                let path = self.named(ino)?;
                if own == "status" {
                    let status = Status { serving: Some(self.passthrough.serving()), ..self.tree.archive().status() };
                    return Ok(serde_json::to_vec(&status).map_err(io::Error::from)?);
                }
                self.tree.archive().attribute(&path, own).ok_or(Fault::Code(libc::ENODATA))
            }
            Name::Acl => Err(libc::EOPNOTSUPP.into()),
            Name::Own(_) | Name::File => {
                let table = self.tree.table();
                let place = table.place(ino)?;
                Ok(place.getxattr(name)?)
            }
        }
    }

    /// The kernel checks who may read or set an attribute, but not who may know of it.
    fn listxattr(&self, ino: u64, uid: u32) -> Result<Vec<u8>> {
        let table = self.tree.table();
        let place = table.place(ino)?;
        let names = place.listxattr()?;
        let mut shown = Vec::with_capacity(names.len());
        for name in names.split_inclusive(|&byte| byte == 0) {
            let bare = name.strip_suffix(&[0]).unwrap_or(name);
            let hidden = uid != 0 && bare.starts_with(TRUSTED.as_bytes());
            if !hidden && matches!(classify(OsStr::from_bytes(bare)), Name::File) {
                shown.extend_from_slice(name);
            }
        }
        Ok(shown)
    }

    fn setxattr(&self, ino: u64, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
        match classify(name) {
            // The archive looks for a pin under the same lock before it changes a file.
            Name::Own("pin") => {
                let table = self.mark(ino, PIN, b"1", flags)?;
                // The mirror may have an object that a pinned file does not become any more.
                table.paths(ino).iter().for_each(|path| self.tree.archive().touched(path));
                Ok(())
            }
            Name::Own("profile") => {
                let profile: Option<Profile> = std::str::from_utf8(value).ok().and_then(|name| name.parse().ok());
                let profile = profile.ok_or(Fault::Code(libc::EINVAL))?;
                let table = self.mark(ino, PROFILE, profile.name().as_bytes(), flags)?;
                table.paths(ino).iter().for_each(|path| self.tree.archive().profile_changed(path));
                Ok(())
            }
            Name::Own(own) => {
                let path = self.named(ino)?;
                Ok(self.tree.archive().set_attribute(&path, own)?)
            }
            Name::Acl => Err(libc::EOPNOTSUPP.into()),
            Name::File => {
                let (_table, place, _locked) = self.locked(ino)?;
                Ok(place.setxattr(name, value, flags)?)
            }
        }
    }

    /// Sets an attribute for the archive, on a file or directory. Returns the table's lock, under which the caller
    /// tells the archive.
    fn mark(&self, ino: u64, name: &str, value: &[u8], flags: i32) -> Result<MutexGuard<'_, Table>> {
        let (table, place, _locked) = self.locked(ino)?;
        if !matches!(table.node(ino)?.kind, FileType::RegularFile | FileType::Directory) {
            return Err(libc::EOPNOTSUPP.into());
        }
        place.setxattr(OsStr::new(name), value, flags)?;
        Ok(table)
    }

    pub(super) fn removexattr(&self, ino: u64, name: &OsStr) -> Result<()> {
        match classify(name) {
            Name::Own(mark @ ("pin" | "profile")) => {
                let (table, place, _locked) = self.locked(ino)?;
                place.removexattr(name)?;
                table.paths(ino).iter().for_each(|path| match mark {
                    "pin" => self.tree.archive().unpinned(path),
                    _ => self.tree.archive().profile_changed(path),
                });
                Ok(())
            }
            Name::Own(_) => Err(libc::EPERM.into()),
            Name::Acl => Err(libc::EOPNOTSUPP.into()),
            Name::File => {
                let (_table, place, _locked) = self.locked(ino)?;
                Ok(place.removexattr(name)?)
            }
        }
    }

    /// The table, and a file whose attributes are about to change: see [`lock_node`].
    fn locked(&self, ino: u64) -> Result<(MutexGuard<'_, Table>, Place, Option<File>)> {
        let table = self.tree.table();
        let (place, locked) = (table.place(ino)?, lock_node(self.tree.archive().store(), &table, ino)?);
        Ok((table, place, locked))
    }

    /// True if this store-wide attribute is hidden from `uid` (neither root nor the daemon's user).
    fn is_kept_from(&self, uid: u32, name: &OsStr) -> bool {
        let of_all = matches!(classify(name), Name::Own(own) if OF_ALL.contains(&own));
        of_all && !self.tree.is_owner(uid)
    }

    pub(super) fn answer_getxattr(self: &Arc<Self>, ino: u64, uid: u32, name: &OsStr, size: u32, reply: ReplyXattr) {
        if self.is_kept_from(uid, name) {
            return reply.error(Errno::EPERM);
        }
        let class = classify(name);
        let asks_for_look = self.tree.archive().store().is_shared() && matches!(class, Name::Own("queue"));
        if asks_for_look
            || matches!(
                class,
                Name::Own("status" | "file" | "mirror" | "generations" | "lossy" | "original" | "profile" | "why")
            )
        {
            // The keeper looks at the tree first; or it reads the size of every file, or an object.
            let (xattrs, name) = (Arc::clone(self), name.to_owned());
            return self.recalls.workers.submit(Box::new(move || answer(xattrs.getxattr(ino, &name), size, reply)));
        }
        answer(self.getxattr(ino, name), size, reply);
    }

    pub(super) fn answer_setxattr(
        self: &Arc<Self>,
        ino: u64,
        uid: u32,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        reply: ReplyEmpty,
    ) {
        if self.is_kept_from(uid, name) {
            return reply.error(Errno::EPERM);
        }
        match classify(name) {
            Name::Own("recall") => self.recalls.recall(ino, move |result| done(reply, result)),
            // The keeper looks at the tree first.
            Name::Own("sync" | "gc") if self.tree.archive().store().is_shared() => {
                let (xattrs, name, value) = (Arc::clone(self), name.to_owned(), value.to_vec());
                let set = move || done(reply, xattrs.setxattr(ino, &name, &value, flags));
                self.recalls.workers.submit(Box::new(set));
            }
            _ => {
                let value = value.to_vec();
                self.change(ino, name, reply, move |xattrs, name| xattrs.setxattr(ino, name, &value, flags));
            }
        }
    }

    pub(super) fn answer_removexattr(self: &Arc<Self>, ino: u64, name: &OsStr, reply: ReplyEmpty) {
        self.change(ino, name, reply, move |xattrs, name| xattrs.removexattr(ino, name));
    }

    /// Changes an attribute; from a worker while another daemon has the file.
    fn change(
        self: &Arc<Self>,
        ino: u64,
        name: &OsStr,
        reply: ReplyEmpty,
        change: impl Fn(&Self, &OsStr) -> Result<()> + Send + 'static,
    ) {
        let (xattrs, then, name): (_, _, Arc<OsStr>) = (Arc::clone(self), Arc::clone(self), name.into());
        let named = Arc::clone(&name);
        when_free(
            &self.recalls.workers,
            move || change(&xattrs, &named),
            move |changed| {
                then.answer_marked(ino, classify(&name), changed, reply);
            },
        );
    }

    /// A pin and a profile are as durable as the file when the call returns, because the policy depends on them.
    fn answer_marked(self: &Arc<Self>, ino: u64, name: Name<'_>, result: Result<()>, reply: ReplyEmpty) {
        let xattrs = Arc::clone(self);
        match (name, result) {
            (Name::Own("pin" | "profile"), Ok(())) => {
                self.recalls.workers.submit(Box::new(move || done(reply, xattrs.sync_mark(ino))));
            }
            (_, result) => done(reply, result),
        }
    }

    /// Makes a mark of a file or directory durable. A file that is not durable yet becomes so together with its mark.
    /// It must not be synced here: the archive alone may receive an error of its bytes.
    fn sync_mark(&self, ino: u64) -> Result<()> {
        let (path, kind) = {
            let table = self.tree.table();
            (table.path(ino), table.node(ino)?.kind)
        };
        match path.is_some_and(|path| kind == FileType::Directory || self.tree.archive().is_durable(&path)) {
            true => self.tree.sync_node(ino, CrashPoint::Marked),
            false => Ok(()),
        }
    }

    pub(super) fn answer_listxattr(&self, ino: u64, uid: u32, size: u32, reply: ReplyXattr) {
        answer(self.listxattr(ino, uid), size, reply);
    }
}

/// A size of 0 asks for the size.
fn answer(value: Result<Vec<u8>>, size: u32, reply: ReplyXattr) {
    match value {
        Ok(value) if size == 0 => reply.size(u32::try_from(value.len()).unwrap_or(u32::MAX)),
        Ok(value) if value.len() > size as usize => reply.error(Errno::ERANGE),
        Ok(value) => reply.data(&value),
        Err(fault) => reply.error(fault.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart() {
        assert!(matches!(classify(OsStr::new("user.stepfs.state")), Name::Own("state")));
        assert!(matches!(classify(OsStr::new("user.stepfs")), Name::File));
        assert!(matches!(classify(OsStr::new("system.posix_acl_access")), Name::Acl));
        assert!(matches!(classify(OsStr::from_bytes(b"user.\xff")), Name::File));
    }
}
