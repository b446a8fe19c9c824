//! Object headers, of both versions: the messages that describe an object.

use super::super::read::{Fail, bad, refuse_if, u16_at, u32_at, u64_at, uint};
use super::source::Source;

/// Kinds of messages that are looked at.
pub(super) const DATASPACE: u16 = 1;
pub(super) const LINK_INFO: u16 = 2;
pub(super) const DATATYPE: u16 = 3;
pub(super) const LINK: u16 = 6;
pub(super) const EXTERNAL: u16 = 7;
pub(super) const LAYOUT: u16 = 8;
pub(super) const FILTERS: u16 = 11;
pub(super) const ATTRIBUTE: u16 = 12;
const CONTINUATION: u16 = 16;
pub(super) const SYMBOL_TABLE: u16 = 17;

/// Most parts of one header.
const MAX_PARTS: usize = 1024;
/// Longest part: a header with many long attributes may have megabytes.
const MAX_PART: u64 = 16 << 20;

/// A message that stands in its header.
pub(super) struct Message {
    pub(super) kind: u16,
    pub(super) body: Vec<u8>,
    /// The body is elsewhere: a type by name, or a message that several headers share.
    pub(super) shared: bool,
}

/// The messages of an object.
pub(super) struct Header(Vec<Message>);

impl Header {
    pub(super) fn all(&self, kind: u16) -> impl Iterator<Item = &Message> {
        self.0.iter().filter(move |message| message.kind == kind)
    }

    pub(super) fn has(&self, kind: u16) -> bool {
        self.all(kind).next().is_some()
    }

    /// The only message of a kind, if it is in the header.
    pub(super) fn one(&self, kind: u16) -> Option<&[u8]> {
        let mut all = self.all(kind);
        let message = all.next()?;
        (all.next().is_none() && !message.shared).then_some(&message.body)
    }

    pub(super) fn read(source: &mut Source, address: u64) -> Result<Header, Fail> {
        let prefix = source.peek_most(address, 34)?;
        let (form, first) = match &*prefix {
            [b'O', b'H', b'D', b'R', 2, flags, ..] => {
                let form = Form::Second { ordered: flags & 4 != 0 };
                let mut fixed = 6;
                fixed += if flags & 0x20 != 0 { 16 } else { 0 };
                fixed += if flags & 0x10 != 0 { 4 } else { 0 };
                let width = 1usize << (flags & 3);
                let size = prefix.get(fixed..fixed + width).ok_or(CUT)?;
                let size = uint(size);
                let fixed = fixed + width;
                refuse_if(size > MAX_PART, "HDF5: an object header larger than 16 MiB")?;
                (form, source.read_checked(address, fixed as u64 + size + 4)?.split_off(fixed))
            }
            [1, _, _, _, ..] if prefix.len() >= 16 => {
                let size = u64::from(u32_at(&prefix, 8));
                refuse_if(size > MAX_PART, "HDF5: an object header larger than 16 MiB")?;
                source.read(address, 16)?;
                (Form::First, source.read(address.saturating_add(16), size)?)
            }
            _ => return bad("HDF5: no object header where one is said to be"),
        };
        let (mut messages, mut parts) = (Vec::new(), vec![first]);
        let mut seen = 0;
        while let Some(part) = parts.pop() {
            seen += 1;
            refuse_if(seen > MAX_PARTS, "HDF5: an object header of more than 1024 parts")?;
            for (address, len) in form.messages(source, &part, &mut messages)? {
                refuse_if(len > MAX_PART, "HDF5: an object header larger than 16 MiB")?;
                parts.push(match form {
                    Form::First => source.read(address, len)?,
                    Form::Second { .. } => {
                        let mut block = source.read_checked(address, len)?;
                        refuse_if(!block.starts_with(b"OCHK"), CUT)?;
                        block.split_off(4)
                    }
                });
            }
        }
        Ok(Header(messages))
    }
}

const CUT: &str = "HDF5: an object header is cut short";

/// How messages are written.
#[derive(Clone, Copy)]
enum Form {
    First,
    Second { ordered: bool },
}

impl Form {
    /// Reads the messages of a part; answers where the header goes on.
    fn messages(self, source: &mut Source, part: &[u8], out: &mut Vec<Message>) -> Result<Vec<(u64, u64)>, Fail> {
        let fixed = match self {
            Form::First => 8,
            Form::Second { ordered } => 4 + if ordered { 2 } else { 0 },
        };
        let (mut at, mut more) = (0, Vec::new());
        // The rest may be a gap.
        while part.len() - at >= fixed {
            let head = &part[at..at + fixed];
            let (kind, len, flags) = match self {
                Form::First => (u16_at(head, 0), u16_at(head, 2), head[4]),
                Form::Second { .. } => (u16::from(head[0]), u16_at(head, 1), head[3]),
            };
            at += fixed;
            let body = part.get(at..at + usize::from(len)).ok_or(CUT)?;
            at += usize::from(len);
            if kind == CONTINUATION {
                refuse_if(body.len() < 16, CUT)?;
                more.push((u64_at(body, 0), u64_at(body, 8)));
                continue;
            }
            source.spend(16)?;
            out.push(Message { kind, body: body.to_vec(), shared: flags & 2 != 0 });
        }
        Ok(more)
    }
}
