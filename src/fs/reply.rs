//! Replies that several operations share.

use fuser::{ReplyEmpty, ReplyEntry};

use super::attr::Attributes;
use super::errno::Result;
use super::tree::Tree;

pub(super) fn entry(tree: &Tree, reply: ReplyEntry, result: Result<Attributes>) {
    match result {
        Ok((ttl, shown, generation)) => reply.entry_with_ttls(&ttl, &tree.ttl, &shown, generation),
        Err(fault) => reply.error(fault.into()),
    }
}

pub(super) fn done(reply: ReplyEmpty, result: Result<()>) {
    match result {
        Ok(()) => reply.ok(),
        Err(fault) => reply.error(fault.into()),
    }
}
