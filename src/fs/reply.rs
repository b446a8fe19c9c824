//! Replies that several operations share.

use fuser::{ReplyEmpty, ReplyEntry};

use super::attr::{Attributes, TTL};
use super::errno::Result;

pub(super) fn entry(reply: ReplyEntry, result: Result<Attributes>) {
    match result {
        Ok((ttl, shown, generation)) => reply.entry_with_ttls(&ttl, &TTL, &shown, generation),
        Err(fault) => reply.error(fault.into()),
    }
}

pub(super) fn done(reply: ReplyEmpty, result: Result<()>) {
    match result {
        Ok(()) => reply.ok(),
        Err(fault) => reply.error(fault.into()),
    }
}
