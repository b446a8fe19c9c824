//! Opcodes with values: big integers, strings and bytes, whose length precedes them, and lines of text.

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

    /// A line of text: the name of a module or of a class.
    pub(super) fn text_line(&mut self) -> Result<Item, Fail> {
        let whole = self.input.line(&mut self.line)?;
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
