//! Files of torch.save before version 1.6, and with `_use_new_zipfile_serialization=False`.
//!
//! Five pickles in a row: a magic number, the protocol's number, a description of the writer's machine, the object,
//! and the list of the storages' keys. Then for each key a number of elements and the payload. The keys are
//! addresses, so they and the order of the payloads differ from save to save. The tensors' paths do not.

use std::collections::HashMap;
use std::ops::Range;

use super::pickle::{self, Graph, Item, Node};
use super::progress::Progress;
use super::read::{Fail, bad, cut_short, refuse_if, u64_at};
use super::storages::{Record, Records, Stored};
use super::torch::BIG_ENDIAN;
use super::{Description, Kind, ReadAt, best, view, walk};

/// The magic number and the end of its pickle.
const MAGIC: [u8; 13] = *b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";

/// The protocol's number.
const PROTOCOL: Item = Item::Int(1001);

/// Longest pickle of those before the object. torch writes less than 200 bytes.
const MAX_HEAD: u64 = 4 << 10;

/// Describes the file. `None` if it does not begin like a legacy file.
pub(super) fn describe(src: &dyn ReadAt, size: u64) -> Result<Option<Description>, Fail> {
    let Some(protocol) = after_magic(src, size)? else {
        return Ok(None);
    };
    let head = |start: u64| pickle::load(src, start, size.min(start + MAX_HEAD));
    let protocol = head(protocol)?;
    refuse_if(protocol.root != PROTOCOL, "legacy torch: a protocol other than 1001")?;
    let system = head(protocol.end)?;
    refuse_if(system.get(system.root, "little_endian") == Some(Item::Bool(false)), BIG_ENDIAN)?;
    let graph = pickle::load(src, system.end, size)?;
    let payloads = Payloads::read(src, size, &graph)?;
    let Stored { tensors, training, note, .. } = walk::tensors(&graph, &payloads)?;
    let (kind, best, progress) = (Kind::TorchLegacy, best::named(&graph), Progress::of(&graph));
    Ok(Some(Description { note, best, progress, ..Description::new(kind, tensors, training) }))
}

/// The offset behind the magic number's pickle, of any binary protocol.
fn after_magic(src: &dyn ReadAt, size: u64) -> Result<Option<u64>, Fail> {
    /// Protocol and frame.
    const MOST: usize = 2 + 9;
    let mut start = [0; MOST + MAGIC.len()];
    let start = &mut start[..size.min((MOST + MAGIC.len()) as u64) as usize];
    src.read_exact_at(start, 0)?;
    let [0x80, 2..=5, rest @ ..] = &*start else { return Ok(None) };
    let (skipped, rest) = match rest {
        [0x95, _, _, _, _, _, _, _, _, rest @ ..] => (MOST, rest),
        rest => (2, rest),
    };
    Ok(rest.starts_with(&MAGIC).then_some((skipped + MAGIC.len()) as u64))
}

/// Where the payloads are.
struct Payloads<'g>(HashMap<&'g str, Payload>);

struct Payload {
    /// Storages that the pickle names before this one.
    number: u32,
    /// Elements and their size.
    expected: (u64, u64),
    extent: Option<Range<u64>>,
}

impl<'g> Payloads<'g> {
    /// Reads the list of keys behind the object, and the number of elements before each payload. All that a reader
    /// compares must agree: else it would refuse the file, or read other bytes than stepfs.
    fn read(src: &dyn ReadAt, size: u64, graph: &'g Graph) -> Result<Self, Fail> {
        let mut named = HashMap::new();
        for node in 0..graph.len() as u32 {
            if !matches!(graph.node(node), Node::Persid(_)) {
                continue;
            }
            let Some(storage) = view::storage(graph, Item::Node(node)) else { continue };
            let unit = storage.unit().ok_or("legacy torch: a storage of a type that stepfs does not know")?;
            let (number, expected) = (named.len() as u32, (storage.len, unit));
            let payload = named.entry(storage.key).or_insert(Payload { number, expected, extent: None });
            refuse_if(payload.expected != expected, "legacy torch: a storage has two lengths or two types")?;
        }
        let mut order = Vec::with_capacity(named.len());
        let start = pickle::strings(src, graph.end, size, |key| {
            let known = std::str::from_utf8(key).ok().and_then(|key| named.get_key_value(key));
            let (&key, _) = known
                .filter(|_| order.len() < named.len())
                .ok_or("legacy torch: a payload that no tensor is in, or one that is listed twice")?;
            order.push(key);
            Ok(())
        })?;
        let mut at = start;
        for key in order {
            let Some(payload) = named.get_mut(key) else { continue };
            let (count, unit) = payload.expected;
            let from = at.saturating_add(8);
            let end = count.checked_mul(unit).and_then(|len| from.checked_add(len)).filter(|&end| end <= size);
            let Some(end) = end else {
                return cut_short("legacy torch: a payload goes beyond the end of the file");
            };
            let mut declared = [0; 8];
            src.read_exact_at(&mut declared, at)?;
            refuse_if(u64_at(&declared, 0) != count, "legacy torch: a payload has another length than its storage")?;
            if payload.extent.replace(from..end).is_some() {
                return bad("legacy torch: a payload that no tensor is in, or one that is listed twice");
            }
            at = end;
        }
        Ok(Payloads(named))
    }
}

impl Records for Payloads<'_> {
    fn record(&self, key: &str) -> Option<Record> {
        let Payload { number, extent, .. } = self.0.get(key)?;
        Some(Record { number: *number, payload: extent.clone()?, stored: true })
    }
}
