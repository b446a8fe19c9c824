//! Answers that wait for a remote (`wait = "close"`). No thread waits meanwhile.

use std::ffi::OsStr;
use std::sync::Arc;

use fuser::{ReplyEmpty, ReplyEntry, ReplyOpen, Request};

use super::open::Access;
use super::privileges::Caller;
use super::reply::{done, entry};
use super::{Core, errno::Result, tree::Tree};
use crate::archive::process_of;

impl Tree {
    /// Answers once the remote has what is at and below a node's path. Dropped, the reply says EIO.
    pub(super) fn reply_when_pushed(&self, node: u64, reply: ReplyEmpty) {
        let path = if self.archive().is_remote_waited_for() { self.table().path(node) } else { None };
        match path {
            Some(path) => self.archive().when_pushed(path, Box::new(move || reply.ok())),
            None => reply.ok(),
        }
    }

    /// Answers with an error at once, and with success once the remote has the file.
    pub(super) fn done_when_pushed(&self, node: u64, result: Result<()>, reply: ReplyEmpty) {
        match result {
            Ok(()) => self.reply_when_pushed(node, reply),
            Err(fault) => reply.error(fault.into()),
        }
    }
}

impl Core {
    /// Answers a rename once the remote has the new name.
    pub(super) fn renamed_when_pushed(&self, to: (u64, &OsStr), result: Result<()>, reply: ReplyEmpty) {
        if result.is_err() || !self.tree.archive().is_remote_waited_for() {
            return done(reply, result);
        }
        let path = self.tree.table().child(to.0, to.1);
        match path {
            Ok(path) => self.tree.archive().when_pushed(path, Box::new(move || reply.ok())),
            Err(_) => reply.ok(),
        }
    }

    /// Looks a name up. One that is not there may have come to the remote just now.
    pub(super) fn answer_lookup(self: &Arc<Self>, parent: u64, name: &OsStr, reply: ReplyEntry) {
        match self.tree.lookup(parent, name) {
            Err(fault) if fault.is_absence() && self.tree.archive().is_remote_waited_for() => {
                let (core, name) = (Arc::clone(self), name.to_os_string());
                self.tree.archive().when_read(Box::new(move || entry(reply, core.tree.lookup(parent, &name))));
            }
            found => entry(reply, found),
        }
    }

    /// Opens a file. After a mount, the object of another node's file may have been replaced.
    pub(super) fn answer_open(self: &Arc<Self>, ino: u64, request: &Request, flags: i32, reply: ReplyOpen) {
        let stub = self.tree.table().node(ino).ok().and_then(|node| node.stub.clone());
        let (caller, access) = (Caller::of(request), Access::of(flags));
        // Now, since the thread waits for the answer: later it may be gone.
        let by = match access.changes() {
            true => self.tree.archive().restores().who_read(request.pid()),
            false => stub.as_ref().and_then(|_| process_of(request.pid())),
        };
        let access = Access { by, ..access };
        // Nothing of the old bytes is needed to write a file anew.
        if access.truncate || !stub.is_some_and(|stub| self.tree.archive().is_far(&stub)) {
            return self.files.open(ino, caller, access, None, reply);
        }
        let core = Arc::clone(self);
        self.tree.archive().when_current(Box::new(move || core.files.open(ino, caller, access, None, reply)));
    }

    /// Opens a directory, with the names that other nodes have pushed before, or with those that are known.
    pub(super) fn answer_opendir(self: &Arc<Self>, ino: u64, reply: ReplyOpen) {
        let core = Arc::clone(self);
        let open = Box::new(move || core.directories.opendir(ino, reply));
        match self.tree.archive().is_remote_waited_for() {
            true => self.tree.archive().when_read(open),
            false => self.tree.archive().when_shown(open),
        }
    }
}
