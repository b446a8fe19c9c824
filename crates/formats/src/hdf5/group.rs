//! The content of a group: names, and addresses of object headers.

use super::super::read::{Fail, bad, refuse_if, u16_at, u64_at, uint};
use super::header::{Header, LINK, LINK_INFO, SYMBOL_TABLE};
use super::source::{NOWHERE, Source};

/// Longest name of a link.
const MAX_NAME: usize = 1024;
/// Largest heap of names.
const MAX_HEAP: u64 = 16 << 20;

/// A hard link.
pub(super) struct Link {
    pub(super) name: String,
    pub(super) address: u64,
}

const DAMAGED: &str = "HDF5: a group is damaged";

/// Whether a group's links are in a heap of their own.
pub(super) fn is_in_heap(header: &Header) -> bool {
    let Some(info) = header.one(LINK_INFO) else { return false };
    // A flag tells of a field before the heap's address.
    let at = if info.get(1).is_some_and(|flags| flags & 1 != 0) { 10 } else { 2 };
    info.len() >= at + 8 && u64_at(info, at) != NOWHERE
}

/// The hard links of a group, in the order of the file. Links in a heap of their own (more than eight, by newer
/// writers) are not looked at, nor are names that are no text.
pub(super) fn links(source: &mut Source, header: &Header) -> Result<Vec<Link>, Fail> {
    let mut links = Vec::new();
    if let Some(table) = header.one(SYMBOL_TABLE) {
        refuse_if(table.len() < 16, DAMAGED)?;
        let names = heap(source, u64_at(table, 8))?;
        tree(source, u64_at(table, 0), None, &names, &mut links)?;
    } else if header.has(LINK_INFO) {
        for message in header.all(LINK).filter(|message| !message.shared) {
            links.extend(link(&message.body)?);
        }
    }
    links.retain(|link| !link.name.is_empty() && link.name != ".");
    Ok(links)
}

/// The names of a group with a symbol table.
fn heap(source: &mut Source, address: u64) -> Result<Vec<u8>, Fail> {
    let head = source.read(address, 32)?;
    let len = u64_at(&head, 8);
    refuse_if(!head.starts_with(b"HEAP\0") || len > MAX_HEAP, DAMAGED)?;
    source.read(u64_at(&head, 24), len)
}

/// A node of the tree of a group.
fn tree(source: &mut Source, address: u64, level: Option<u8>, names: &[u8], links: &mut Vec<Link>) -> Result<(), Fail> {
    let (own, entries) = source.node(address, 0, level, 8)?;
    for entry in entries.chunks_exact(16) {
        match own {
            0 => symbols(source, u64_at(entry, 8), names, links)?,
            _ => tree(source, u64_at(entry, 8), Some(own - 1), names, links)?,
        }
    }
    Ok(())
}

/// A leaf of the tree of a group.
fn symbols(source: &mut Source, address: u64, names: &[u8], links: &mut Vec<Link>) -> Result<(), Fail> {
    source.enter(address)?;
    let head = source.read(address, 8)?;
    refuse_if(!head.starts_with(b"SNOD\x01"), DAMAGED)?;
    let count = u64::from(u16_at(&head, 6));
    let body = source.read(address.saturating_add(8), count * 40)?;
    for entry in body.chunks_exact(40) {
        let (name, address) = (u64_at(entry, 0), u64_at(entry, 8));
        // A soft link has none.
        if address == NOWHERE {
            continue;
        }
        let name = usize::try_from(name).ok().and_then(|at| names.get(at..)).unwrap_or_default();
        let len = name.iter().take(MAX_NAME).position(|byte| *byte == 0).ok_or(DAMAGED)?;
        source.spend(len as u64)?;
        if let Ok(name) = std::str::from_utf8(&name[..len]) {
            links.push(Link { name: name.to_string(), address });
        }
    }
    Ok(())
}

/// A link that stands in the group's header; `None` if it is soft or external.
fn link(body: &[u8]) -> Result<Option<Link>, Fail> {
    let parse = || {
        let (&[1, flags], mut rest) = body.split_first_chunk()? else { return None };
        let kind = if flags & 8 != 0 { *rest.split_off_first()? } else { 0 };
        // Its order, and the set of characters.
        rest.split_off(..if flags & 4 != 0 { 8 } else { 0 } + usize::from(flags & 16 != 0))?;
        let len = usize::try_from(uint(rest.split_off(..1 << (flags & 3))?)).ok()?;
        let name = rest.split_off(..len).filter(|name| name.len() <= MAX_NAME)?;
        if kind != 0 {
            return Some(None);
        }
        let address = u64_at(rest.split_off(..8)?, 0);
        Some(std::str::from_utf8(name).ok().map(|name| Link { name: name.to_string(), address }))
    };
    parse().map_or_else(|| bad(DAMAGED), Ok)
}
