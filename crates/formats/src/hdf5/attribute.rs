//! An attribute that is one text.

use super::super::read::{Fail, bad, refuse_if, u16_at, u32_at, u64_at, unless_bad};
use super::header::{ATTRIBUTE, Header};
use super::source::Source;

/// Largest collection of the global heap. HDF5 makes them of 4096 bytes, or as long as one object.
const MAX_COLLECTION: u64 = 8 << 20;

/// The text of an attribute, of at most `max` bytes. An attribute in another place, or of another type, has none.
pub(super) fn text(source: &mut Source, header: &Header, name: &str, max: usize) -> Result<Option<String>, Fail> {
    let utf8 = |bytes: &[u8]| utf8(bytes).filter(|text| text.len() <= max);
    for message in header.all(ATTRIBUTE).filter(|message| !message.shared) {
        let Some(value) = value(&message.body, name) else { continue };
        return match value {
            Value::Here(text) => Ok(utf8(text)),
            Value::Heap { collection, number, len } => {
                let text = unless_bad(object(source, collection, number))?;
                Ok(text.and_then(|text| text.get(..len).and_then(utf8)))
            }
        };
    }
    Ok(None)
}

enum Value<'a> {
    Here(&'a [u8]),
    Heap { collection: u64, number: u32, len: usize },
}

fn utf8(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    std::str::from_utf8(&bytes[..end]).ok().map(str::to_string)
}

/// The value of an attribute message, if it has this name and is one text.
fn value<'a>(body: &'a [u8], name: &str) -> Option<Value<'a>> {
    let (version, flags, at) = match *body {
        [1, ..] => (1, 0, 8),
        [2, flags, ..] => (2, flags, 8),
        [3, flags, ..] => (3, flags, 9),
        _ => return None,
    };
    if flags != 0 || body.len() < at {
        return None;
    }
    // The first version pads each part to 8 bytes.
    let padded = |len: usize| if version == 1 { len.next_multiple_of(8) } else { len };
    let lens = [2, 4, 6].map(|at| usize::from(u16_at(body, at)));
    let mut rest = &body[at..];
    let [own, kind, space] = lens.map(|len| {
        let part = rest.split_at_checked(padded(len));
        rest = part.map_or(&[][..], |(_, behind)| behind);
        part.map(|(part, _)| &part[..len])
    });
    if own?.strip_suffix(&[0]) != Some(name.as_bytes()) {
        return None;
    }
    let (kind, space) = (kind?, space?);
    let is_one = matches!(space, [1, 0, ..] | [2, 0, _, 0, ..]);
    if !is_one || kind.len() < 8 {
        return None;
    }
    match (kind[0] & 15, kind[1] & 15) {
        (3, _) => rest.get(..usize::try_from(u32_at(kind, 4)).ok()?).map(Value::Here),
        // Of any length: the text is in a heap.
        (9, 1) if rest.len() >= 16 => {
            let len = usize::try_from(u32_at(rest, 0)).ok()?;
            Some(Value::Heap { collection: u64_at(rest, 4), number: u32_at(rest, 12), len })
        }
        _ => None,
    }
}

/// An object of the global heap.
fn object(source: &mut Source, collection: u64, number: u32) -> Result<Vec<u8>, Fail> {
    const DAMAGED: &str = "HDF5: the global heap is damaged";
    let head = source.read(collection, 16)?;
    let len = u64_at(&head, 8);
    refuse_if(!head.starts_with(b"GCOL\x01") || !(16..=MAX_COLLECTION).contains(&len), DAMAGED)?;
    let body = source.read(collection.saturating_add(16), len - 16)?;
    let mut rest = &*body;
    while rest.len() >= 16 {
        let (own, size) = (u16_at(rest, 0), u64_at(rest, 8));
        let size = usize::try_from(size).ok().filter(|size| *size <= rest.len() - 16);
        let (Some(size), 1..) = (size, own) else { return bad(DAMAGED) };
        if u32::from(own) == number {
            return Ok(rest[16..16 + size].to_vec());
        }
        rest = rest.get(16 + size.next_multiple_of(8)..).unwrap_or_default();
    }
    bad(DAMAGED)
}
