//! Opcodes with values: big integers, strings and bytes, whose length precedes them, and lines of text (protocol 0).

use super::super::read::{Fail, bad};
use super::vm::Vm;
use super::{Item, MAX_TEXT, Node, Text};

impl Vm<'_> {
    /// An integer of `n` bytes, two's complement.
    pub(super) fn long(&mut self, n: u64) -> Result<Item, Fail> {
        if n > 8 {
            self.input.skip(n)?;
            return Ok(Item::Scalar);
        }
        let mut bytes = [0; 8];
        for b in &mut bytes[..n as usize] {
            *b = self.input.byte()?;
        }
        let unused = 8 * (8 - n as u32);
        let value = match n {
            0 => 0,
            _ => (i64::from_le_bytes(bytes) << unused) >> unused,
        };
        Ok(Item::Int(value))
    }

    /// The length that precedes a string, bytes or a big integer.
    pub(super) fn length(&mut self, op: u8) -> Result<u64, Fail> {
        Ok(match op {
            b'U' | b'C' | 0x8a | 0x8c => self.input.byte()?.into(),
            b'X' | b'B' => u32::from_le_bytes(self.input.array()?).into(),
            b'T' | 0x8b => match u64::try_from(i32::from_le_bytes(self.input.array()?)) {
                Ok(n) => n,
                Err(_) => return bad("pickle: a negative length"),
            },
            _ => u64::from_le_bytes(self.input.array()?),
        })
    }

    pub(super) fn string(&mut self, n: u64) -> Result<Item, Fail> {
        if n > MAX_TEXT as u64 {
            self.input.skip(n)?;
            return Ok(Item::LongStr(n));
        }
        self.charge(n as usize / 16 + 1)?;
        let start = self.graph.text.len() as u32;
        self.input.take(n as usize, &mut self.graph.text)?;
        let len = n as u32;
        Ok(Item::Str(Text { start, len }))
    }

    /// Passes over bytes, and keeps their place if such places are asked for.
    pub(super) fn bytes(&mut self, n: u64) -> Result<Item, Fail> {
        let start = self.input.position();
        self.input.skip(n)?;
        match self.arrays {
            true => self.add(Node::Bytes(start..start + n), 4),
            false => Ok(Item::Scalar),
        }
    }

    pub(super) fn number_line(&mut self, op: u8) -> Result<Item, Fail> {
        self.input.line(&mut self.line)?;
        let text = std::str::from_utf8(&self.line).unwrap_or("").trim();
        Ok(match (op, text) {
            (b'I', "00") => Item::Bool(false),
            (b'I', "01") => Item::Bool(true),
            (b'F', t) => t.parse().map_or(Item::Scalar, Item::Float),
            (_, t) => t.trim_end_matches('L').parse().map_or(Item::Scalar, Item::Int),
        })
    }

    /// A line as it is: module and class names, persistent ids.
    pub(super) fn text_line(&mut self) -> Result<Item, Fail> {
        let whole = self.input.line(&mut self.line)?;
        self.keep_line(whole)
    }

    pub(super) fn string_line(&mut self, op: u8) -> Result<Item, Fail> {
        let whole = self.input.line(&mut self.line)?;
        let quoted = matches!(self.line.as_slice(), [a, .., b] if a == b && b"'\"".contains(a));
        if op == b'S' && quoted {
            self.line.pop();
            self.line.remove(0);
        }
        if self.line.contains(&b'\\') {
            self.line = unescape(&self.line);
        }
        self.keep_line(whole)
    }

    fn keep_line(&mut self, whole: bool) -> Result<Item, Fail> {
        let n = self.line.len();
        if !whole || n > MAX_TEXT {
            return Ok(Item::LongStr(n as u64));
        }
        self.charge(n / 16 + 1)?;
        let start = self.graph.text.len() as u32;
        self.graph.text.extend_from_slice(&self.line);
        let len = n as u32;
        Ok(Item::Str(Text { start, len }))
    }
}

/// Resolves the escapes that Python's text protocol writes. All other text stays as it is.
fn unescape(line: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(line.len());
    let mut rest = line;
    while let Some((&b, tail)) = rest.split_first() {
        let (code, after) = match (b, tail.first()) {
            (b'\\', Some(&c)) => (c, &tail[1..]),
            _ => {
                out.push(b);
                rest = tail;
                continue;
            }
        };
        let digits = match code {
            b'x' => 2,
            b'u' => 4,
            b'U' => 8,
            _ => 0,
        };
        let hex = after.get(..digits).and_then(|h| std::str::from_utf8(h).ok());
        let value = hex.and_then(|h| u32::from_str_radix(h, 16).ok());
        match (code, value.and_then(char::from_u32)) {
            (b'x' | b'u' | b'U', Some(c)) => {
                out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
                rest = &after[digits..];
                continue;
            }
            (b'n', _) => out.push(b'\n'),
            (b't', _) => out.push(b'\t'),
            (b'r', _) => out.push(b'\r'),
            (b'\\' | b'\'' | b'"', _) => out.push(code),
            _ => out.extend_from_slice(&[b'\\', code]),
        }
        rest = after;
    }
    out
}
