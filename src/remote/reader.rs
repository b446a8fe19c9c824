//! Brings a view up to date with the journals on a remote.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::journal::{self, MAX_SEGMENT_BYTES, Segment, Unreadable};
use super::place::{Error, Place, Result, get_all};
use super::view::View;
use crate::store::in_parallel;

/// How often to list a journal again because its owner replaced segments by a snapshot meanwhile.
const ATTEMPTS: u32 = 4;

/// Reads journals.
pub struct Reader;

/// New segments of one node, and why others cannot be read.
struct News {
    node: String,
    segments: Vec<Segment>,
    broken: Option<String>,
    newer: bool,
}

impl Reader {
    /// Reads all segments that the view has not. A damaged segment, or one of a newer format, does not keep the others
    /// from being read. The view is locked for moments, and never during a request.
    ///
    /// # Errors
    /// The remote does not answer; the view is as it was.
    pub fn refresh(place: &dyn Place, view: &Mutex<View>) -> Result<()> {
        let nodes: Vec<String> = place.folders("nodes/")?.into_iter().filter(|node| journal::is_node(node)).collect();
        let read: Vec<_> = {
            let view = lock(view);
            let of = |node: &String| view.nodes().get(node).map(|node| node.read.clone()).unwrap_or_default();
            nodes.into_iter().map(|node| (of(&node), node)).collect()
        };
        let found = in_parallel(&read, |(read, node)| news(place, node, read));
        let found: Vec<News> = found.into_iter().collect::<Result<_>>()?;
        let mut view = lock(view);
        for News { node, segments, broken, newer } in found {
            segments.iter().for_each(|segment| view.apply(segment));
            let of = view.node_mut(&node);
            of.newer = broken.clone().filter(|_| newer);
            if let Some(why) = broken.filter(|why| of.broken.as_ref() != Some(why)) {
                log::error!("remote: node {node}: {why}");
                of.broken = Some(why);
            }
        }
        Ok(())
    }
}

/// Locks a view.
pub(super) fn lock(view: &Mutex<View>) -> MutexGuard<'_, View> {
    view.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The segments of a node that are not read yet, in order.
fn news(place: &dyn Place, node: &str, read: &BTreeSet<journal::Place>) -> Result<News> {
    let mut attempt = 1;
    loop {
        match news_once(place, node, read) {
            // A snapshot has replaced the segment since it was listed.
            Err(Error::Missing(_)) if attempt < ATTEMPTS => attempt += 1,
            Err(Error::Missing(name)) => return Err(Error::Away(format!("{name} was listed and is missing"))),
            result => return result,
        }
    }
}

fn news_once(place: &dyn Place, node: &str, read: &BTreeSet<journal::Place>) -> Result<News> {
    let prefix = format!("nodes/{node}/journal/");
    let listed = place.list(&prefix)?;
    let parse = |name: &str| journal::Place::parse(name.strip_prefix(&prefix)?);
    let all: BTreeSet<journal::Place> = listed.iter().filter_map(|listed| parse(&listed.name)).collect();
    let from = all.iter().rev().find(|place| place.snapshot).copied();
    let mut found = News { node: node.to_string(), segments: Vec::new(), broken: None, newer: false };
    // The store that wrote the first segment has the node's name.
    let owner = all.first().map(|first| first.store);
    if let Some(other) = all.iter().find(|place| Some(place.store) != owner) {
        let words = format!("another store ({:08x}) claims this name too; its entries do not count", other.store);
        found.broken = Some(words);
    }
    let due = all.iter().filter(|place| from.is_none_or(|from| **place >= from) && !read.contains(place));
    for at in due.filter(|place| Some(place.store) == owner) {
        let name = format!("{prefix}{}", at.text());
        let segment = match get_all(place, &name, MAX_SEGMENT_BYTES) {
            Ok(bytes) => Segment::decode(&bytes),
            Err(Error::Wrong(why)) => {
                found.broken = Some(why);
                continue;
            }
            Err(error) => return Err(error),
        };
        match segment {
            Ok(segment) if segment.name() == name => found.segments.push(segment),
            Ok(_) => found.broken = Some(format!("{name}: it is another segment under this name; it is left out")),
            // All that follows may build on it.
            Err(Unreadable::Newer(_)) => {
                found.broken = segment.err().map(|why| format!("{name}: {why}"));
                found.newer = true;
                break;
            }
            Err(why) => found.broken = Some(format!("{name}: {why}; it is left out")),
        }
    }
    Ok(found)
}

/// Checks the name of a node.
///
/// # Errors
/// The name is not one; says what is.
pub fn check_name(node: &str) -> std::result::Result<(), String> {
    match journal::is_node(node) {
        true => Ok(()),
        false => Err(format!("{node:?} is no name for a node: use letters, digits, '-', '_' and '.'")),
    }
}
