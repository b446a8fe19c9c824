//! The file `.index` of a bundle: a sorted table in the format of LevelDB. Its values are messages `BundleEntryProto`.
//!
//! A block ends with the places at which its keys begin anew, which a reader in order does not need, then a byte for
//! its compression, and a CRC-32C. TensorFlow does not compress the index.

use super::super::read::{Fail, bad, refuse_if, u32_at, u64_at};
use super::super::{ReadAt, path};
use super::wire::{Fields, Value};
use codec::hash::castagnoli;

/// Largest index that is read, in bytes. A tensor takes less than 200.
const MAX_INDEX: u64 = 64 << 20;
/// Bytes of names that are kept. A key may repeat a long part of the one before it at the cost of three bytes.
const MAX_NAMES: usize = 64 << 20;
/// Longest name, in bytes.
pub(super) const MAX_NAME: usize = 4096;
/// Most tensors. An entry takes 3 bytes of the index and a hundred of memory.
const MAX_TENSORS: usize = 1 << 18;
/// Most dimensions of a tensor, as TensorFlow has it.
const MAX_DIMS: usize = 254;

const FOOTER: usize = 48;
const MAGIC: u64 = 0xdb47_7524_8b80_fb57;
/// Bytes behind a block: its compression, and a CRC-32C.
const TRAILER: usize = 5;

/// One tensor of a bundle.
#[derive(Debug, Default)]
pub(super) struct Entry {
    pub(super) key: String,
    /// Number of its type in TensorFlow.
    pub(super) kind: u64,
    pub(super) shape: Vec<u64>,
    pub(super) shard: u64,
    pub(super) offset: u64,
    pub(super) size: u64,
    /// CRC-32C of its bytes.
    pub(super) crc: u32,
    /// Its parts are entries of their own.
    pub(super) is_parted: bool,
}

/// An index.
pub(super) struct Table {
    /// Number of files with tensors.
    pub(super) shards: u64,
    /// By name.
    pub(super) entries: Vec<Entry>,
}

/// TensorFlow masks each CRC, so that no CRC is one of bytes that hold one.
pub(super) fn unmasked(crc: u32) -> u32 {
    crc.wrapping_sub(0xa282_ead8).rotate_left(15)
}

/// Reads the whole index.
pub(super) fn read(src: &dyn ReadAt) -> Result<Table, Fail> {
    let size = src.size();
    refuse_if(size > MAX_INDEX, "TensorFlow: an index of more than 64 MiB")?;
    let mut bytes = vec![0; size as usize];
    src.read_exact_at(&mut bytes, 0)?;
    let footer = bytes.len().checked_sub(FOOTER).map(|at| &bytes[at..]).ok_or("TensorFlow: the index is cut short")?;
    refuse_if(u64_at(footer, FOOTER - 8) != MAGIC, "TensorFlow: the index is no table, or is cut short")?;
    let mut handles = Fields::new(&footer[..FOOTER - 8]);
    let (_, _) = (handles.varint()?, handles.varint()?);
    let root = block(&bytes, (handles.varint()?, handles.varint()?))?;
    let (mut table, mut names, mut key) = (Table { shards: 0, entries: Vec::new() }, 0, Vec::new());
    let mut header = false;
    // No block is read twice, so the size of the file bounds the time.
    let mut end = 0;
    let mut of_blocks = Vec::new();
    each(root, &mut of_blocks, |_, value| {
        let mut handle = Fields::new(value);
        let place = (handle.varint()?, handle.varint()?);
        refuse_if(place.0 < end, "TensorFlow: blocks of the index overlap")?;
        end = place.0.saturating_add(place.1);
        each(block(&bytes, place)?, &mut key, |key, value| {
            if !header {
                header = true;
                table.shards = shards(key, value)?;
                return Ok(());
            }
            let Some(name) = name(key) else { return Ok(()) };
            names += name.len();
            if names > MAX_NAMES || table.entries.len() >= MAX_TENSORS {
                return bad("TensorFlow: the index has too many names to keep");
            }
            table.entries.push(Entry { key: name, ..entry(value)? });
            Ok(())
        })
    })?;
    refuse_if(table.shards == 0, "TensorFlow: an index without a header")?;
    Ok(table)
}

/// A block without its trailer.
fn block(bytes: &[u8], (offset, size): (u64, u64)) -> Result<&[u8], Fail> {
    let range = usize::try_from(offset).ok().zip(usize::try_from(size).ok());
    let whole = range.and_then(|(at, size)| bytes.get(at..)?.get(..size.checked_add(TRAILER)?));
    let whole = whole.ok_or("TensorFlow: a block of the index is beyond its end")?;
    let (checked, crc) = whole.split_at(whole.len() - 4);
    refuse_if(unmasked(u32_at(crc, 0)) != castagnoli(0, checked), "TensorFlow: a block of the index is damaged")?;
    match checked.split_last() {
        Some((0, block)) => Ok(block),
        _ => bad("TensorFlow: the index is compressed"),
    }
}

/// Calls `take` for each key and value of a block, in order. `key` is room for the keys.
fn each(block: &[u8], key: &mut Vec<u8>, mut take: impl FnMut(&[u8], &[u8]) -> Result<(), Fail>) -> Result<(), Fail> {
    const CUT: &str = "TensorFlow: a block of the index makes no sense";
    key.clear();
    let restarts = block.len().checked_sub(4).map(|at| (at, u32_at(block, at) as usize));
    let end = restarts.and_then(|(at, count)| at.checked_sub(count.checked_mul(4)?));
    let entries = end.and_then(|end| block.get(..end)).ok_or(CUT)?;
    let mut fields = Fields::new(entries);
    while !fields.is_empty() {
        let (shared, own, len) = (fields.varint()?, fields.varint()?, fields.varint()?);
        refuse_if(shared > key.len() as u64 || shared.saturating_add(own) > MAX_NAME as u64, CUT)?;
        key.truncate(shared as usize);
        key.extend_from_slice(fields.take(own)?);
        take(key, fields.take(len)?)?;
    }
    Ok(())
}

/// The number of files, from the header. It is the first entry, and its key is empty.
fn shards(key: &[u8], value: &[u8]) -> Result<u64, Fail> {
    let (mut shards, mut fields) = (0, Fields::new(value));
    while let Some((number, value)) = fields.next()? {
        match (number, value) {
            (1, Value::Number(n)) => shards = n,
            (2, Value::Number(1..)) => return bad("TensorFlow: a bundle of a big-endian machine"),
            _ => {}
        }
    }
    refuse_if(!key.is_empty(), "TensorFlow: an index without a header")?;
    Ok(shards)
}

/// The name of a tensor. Parts of tensors have keys that are no text.
fn name(key: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(key).ok().filter(|text| !text.is_empty() && !text.contains(char::is_control))?;
    let mut name = String::new();
    path::push_text(&mut name, text);
    Some(name)
}

/// A message `BundleEntryProto`. A field that is 0 is not written.
fn entry(message: &[u8]) -> Result<Entry, Fail> {
    let (mut entry, mut fields) = (Entry::default(), Fields::new(message));
    while let Some((number, value)) = fields.next()? {
        match (number, value) {
            (1, Value::Number(n)) => entry.kind = n,
            (2, Value::Bytes(bytes)) => entry.shape = shape(bytes)?,
            (3, Value::Number(n)) => entry.shard = n,
            (4, Value::Number(n)) => entry.offset = n,
            (5, Value::Number(n)) => entry.size = n,
            (6, Value::Fixed(crc)) => entry.crc = unmasked(crc),
            (7, Value::Bytes(_)) => entry.is_parted = true,
            _ => {}
        }
    }
    Ok(entry)
}

/// A message `TensorShapeProto`.
fn shape(message: &[u8]) -> Result<Vec<u64>, Fail> {
    let (mut shape, mut fields) = (Vec::new(), Fields::new(message));
    while let Some((number, value)) = fields.next()? {
        let (2, Value::Bytes(dim)) = (number, value) else { continue };
        let (mut size, mut fields) = (0, Fields::new(dim));
        while let Some((number, value)) = fields.next()? {
            if let (1, Value::Number(n)) = (number, value) {
                size = n;
            }
        }
        refuse_if(shape.len() == MAX_DIMS, "TensorFlow: a tensor of more than 254 dimensions")?;
        shape.push(size);
    }
    Ok(shape)
}
