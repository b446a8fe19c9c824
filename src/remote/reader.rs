//! Brings a view up to date with the journals on a remote.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::journal::{self, HEADS, MAX_SEGMENT_BYTES, Segment, Unreadable};
use super::place::{Error, Place, Result, get_all};
use super::view::{Damaged, View};
use crate::store::in_parallel;

/// How often to list a journal again because its owner replaced segments by a snapshot meanwhile.
const ATTEMPTS: u32 = 4;
/// How long a segment that cannot be read is left alone, at first and at most: its owner may mend it.
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// Why a journal counts as broken whose list has neither its first segment nor a snapshot.
const TORN: &str = "the beginning of its journal is missing";

/// Reads journals.
pub struct Reader;

/// New segments of one node, and why others cannot be read.
struct News {
    node: String,
    segments: Vec<Segment>,
    /// The store that wrote the first segment that is there, if they were listed.
    owner: Option<u32>,
    broken: Option<String>,
    newer: bool,
    damaged: HashMap<journal::Place, Damaged>,
}

impl News {
    fn of(node: &str) -> News {
        let (segments, damaged) = (Vec::new(), HashMap::new());
        News { node: node.to_string(), segments, owner: None, broken: None, newer: false, damaged }
    }

    /// Notes a segment that cannot be read. It is asked for again after pauses that grow.
    fn leave_out(&mut self, at: journal::Place, why: String, before: Option<&Damaged>) {
        let pause = before.map_or(FIRST_PAUSE, |before| (before.pause * 2).min(LONGEST_PAUSE));
        self.broken = Some(why.clone());
        self.damaged.insert(at, Damaged { why, again: Instant::now() + pause, pause });
    }
}

impl Reader {
    /// Reads all segments that the view has not, of all nodes. A damaged segment, or one of a newer format, does not keep
    /// the others from being read. The view is locked for moments, and never during a request.
    ///
    /// # Errors
    /// The remote does not answer; the view is as it was.
    pub fn refresh(place: &dyn Place, view: &Mutex<View>) -> Result<()> {
        let nodes = place.folders("nodes/")?.into_iter().filter(|node| journal::is_node(node));
        Reader::read(place, view, nodes.map(|node| (node, None)).collect())?;
        lock(view).set_read();
        Ok(())
    }

    /// Reads the segments that heads tell of: one list, and a request for each segment. Lists the journal of a node that has
    /// no head. A segment whose writer died
    /// before it put the head is found by [`Reader::refresh`] only.
    ///
    /// # Errors
    /// As [`Reader::refresh`].
    pub fn look(place: &dyn Place, view: &Mutex<View>) -> Result<()> {
        let heads = heads(place)?;
        let news: Vec<(String, Option<journal::Place>)> = {
            let view = lock(view);
            let is_told = |node: &str, head: journal::Place| {
                view.nodes().get(node).and_then(|node| node.read.last()).is_some_and(|last| *last >= head)
            };
            // A second store may have claimed the node's name in the same moment as the first.
            let is_contested = |node: &str, heads: &BTreeSet<journal::Place>| {
                let is_known = view.nodes().get(node).is_some_and(|of| of.broken.is_some());
                !is_known && heads.iter().any(|head| Some(head.store) != heads.first().map(|first| first.store))
            };
            // A list of a directory may miss a head that is exchanged meanwhile: then the node has news.
            let silent = view.nodes().iter().filter(|(name, of)| !of.read.is_empty() && !heads.contains_key(*name));
            let silent: Vec<_> = silent.map(|(node, _)| (node.clone(), None)).collect();
            let told = heads.into_iter().filter_map(|(node, heads)| {
                let head = *heads.last()?;
                match is_contested(&node, &heads) {
                    true => Some((node, None)),
                    false => (!is_told(&node, head)).then_some((node, Some(head))),
                }
            });
            told.chain(silent).collect()
        };
        if news.is_empty() { Ok(()) } else { Reader::read(place, view, news) }
    }

    fn read(place: &dyn Place, view: &Mutex<View>, nodes: Vec<(String, Option<journal::Place>)>) -> Result<()> {
        let read: Vec<_> = {
            let view = lock(view);
            let of = |node: &String| {
                view.nodes().get(node).map(|node| (node.read.clone(), node.damaged.clone(), node.broken.is_some()))
            };
            nodes.into_iter().map(|(node, head)| (of(&node).unwrap_or_default(), node, head)).collect()
        };
        let found = in_parallel(&read, |((read, damaged, is_broken), node, head)| {
            if let (Some(head), Some(last), true) = (head, read.last(), damaged.is_empty() && !*is_broken)
                && let Some(segments) = next_ones(place, node, *last, *head)?
            {
                return Ok(News { segments, ..News::of(node) });
            }
            news(place, node, read, damaged)
        });
        let found: Vec<News> = found.into_iter().collect::<Result<_>>()?;
        let mut view = lock(view);
        for News { node, segments, owner, broken, newer, damaged } in found {
            // Another thread has added later ones meanwhile. The next look reads all.
            if view.is_overtaken(&node, &segments) {
                continue;
            }
            segments.iter().for_each(|segment| view.apply(segment));
            let of = view.node_mut(&node);
            of.owner = owner.or(of.owner);
            of.newer = broken.clone().filter(|_| newer);
            of.damaged = damaged;
            if let Some(why) = broken.as_ref().filter(|why| of.broken.as_ref() != Some(why)) {
                log::error!("remote: node {node}: {why}");
            }
            of.broken = broken;
        }
        Ok(())
    }
}

/// Segments that are asked for without a list. A node that was not read for longer is listed.
const FEW: u64 = 16;

/// The last segment of each node, as the heads say.
///
/// # Errors
/// The remote does not answer.
pub(super) fn heads(place: &dyn Place) -> Result<BTreeMap<String, BTreeSet<journal::Place>>> {
    let mut heads: BTreeMap<String, BTreeSet<journal::Place>> = BTreeMap::new();
    for (node, at) in place.list(HEADS)?.iter().filter_map(|listed| journal::Place::parse_head(&listed.name)) {
        heads.entry(node).or_default().insert(at);
    }
    Ok(heads)
}

/// The segments behind those that were read, up to `head`; `None` if a list must tell which there are.
fn next_ones(
    place: &dyn Place,
    node: &str,
    last: journal::Place,
    head: journal::Place,
) -> Result<Option<Vec<Segment>>> {
    let is_near = (last.epoch, last.store) == (head.epoch, head.store)
        && head.sequence.checked_sub(last.sequence).is_some_and(|few| few <= FEW);
    let mut found = Vec::new();
    for sequence in if is_near { last.sequence + 1..head.sequence.saturating_add(1) } else { 0..0 } {
        let at = journal::Place { sequence, snapshot: head.snapshot && sequence == head.sequence, ..head };
        let name = format!("nodes/{node}/journal/{}", at.text());
        match get_all(place, &name, MAX_SEGMENT_BYTES).map(|bytes| Segment::decode(&bytes)) {
            Ok(Ok(segment)) if segment.name() == name => found.push(segment),
            Err(error @ (Error::Away(_) | Error::Denied(_))) => return Err(error),
            _ => return Ok(None),
        }
    }
    Ok((!found.is_empty()).then_some(found))
}

/// Locks a view.
pub(super) fn lock(view: &Mutex<View>) -> MutexGuard<'_, View> {
    view.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The segments of a node that are not read yet, in order.
fn news(
    place: &dyn Place,
    node: &str,
    read: &BTreeSet<journal::Place>,
    damaged: &HashMap<journal::Place, Damaged>,
) -> Result<News> {
    let mut attempt = 1;
    loop {
        match news_once(place, node, read, damaged) {
            // A directory was listed while a snapshot replaced its segments.
            Ok(News { broken: Some(why), .. }) if why == TORN && attempt < ATTEMPTS => attempt += 1,
            // A snapshot has replaced the segment since it was listed.
            Err(Error::Missing(_)) if attempt < ATTEMPTS => attempt += 1,
            Err(Error::Missing(name)) => return Err(Error::Away(format!("{name} was listed and is missing"))),
            result => return result,
        }
    }
}

fn news_once(
    place: &dyn Place,
    node: &str,
    read: &BTreeSet<journal::Place>,
    damaged: &HashMap<journal::Place, Damaged>,
) -> Result<News> {
    let prefix = format!("nodes/{node}/journal/");
    let listed = place.list(&prefix)?;
    let parse = |name: &str| journal::Place::parse(name.strip_prefix(&prefix)?);
    let all: BTreeSet<journal::Place> = listed.iter().filter_map(|listed| parse(&listed.name)).collect();
    let from = all.iter().rev().find(|place| place.snapshot).copied();
    // A snapshot that could not be read before hides what came after it: all of that is read with it.
    let none = BTreeSet::new();
    let read = if from.is_some_and(|from| !read.contains(&from)) { &none } else { read };
    let mut found = News::of(node);
    // The store that wrote the first segment has the node's name.
    let owner = all.first().map(|first| first.store);
    found.owner = owner;
    // The first segment of all, or a snapshot, is always there.
    if from.is_none() && all.first().map_or(!read.is_empty(), |first| first.sequence != 0) {
        found.broken = Some(TORN.into());
    }
    if let Some(other) = all.iter().find(|place| Some(place.store) != owner) {
        let words = format!("another store ({:08x}) claims this name too; its entries do not count", other.store);
        found.broken = Some(words);
    }
    let due = all.iter().filter(|place| from.is_none_or(|from| **place >= from) && !read.contains(place));
    for at in due.filter(|place| Some(place.store) == owner) {
        let name = format!("{prefix}{}", at.text());
        let before = damaged.get(at);
        if let Some(known) = before.filter(|known| known.again > Instant::now()) {
            found.broken = Some(known.why.clone());
            found.damaged.insert(*at, known.clone());
            continue;
        }
        let segment = match get_all(place, &name, MAX_SEGMENT_BYTES) {
            Ok(bytes) => Segment::decode(&bytes),
            Err(Error::Wrong(why)) => {
                found.leave_out(*at, why, before);
                continue;
            }
            Err(error) => return Err(error),
        };
        match segment {
            Ok(segment) if segment.name() == name => found.segments.push(segment),
            Ok(_) => {
                found.leave_out(*at, format!("{name}: it is another segment under this name; it is left out"), before)
            }
            // All that follows may build on it.
            Err(Unreadable::Newer(_)) => {
                found.broken = segment.err().map(|why| format!("{name}: {why}"));
                found.newer = true;
                break;
            }
            Err(why) => found.leave_out(*at, format!("{name}: {why}; it is left out"), before),
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
