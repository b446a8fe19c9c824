//! Values whose length precedes them: big integers, strings and bytes.

use super::super::read::{Fail, bad};
use super::vm::Vm;
use super::{Item, MAX_TEXT, Node, Text};

impl Vm<'_> {
    /// An integer of `n` bytes, two's complement.
    pub(super) fn long(&mut self, n: u64) -> Result<(), Fail> {
        if n > 8 {
            self.input.skip(n)?;
            return self.push(Item::Scalar);
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
        self.push(Item::Int(value))
    }

    /// The length that precedes a string or bytes.
    pub(super) fn length(&mut self, op: u8) -> Result<u64, Fail> {
        Ok(match op {
            b'U' | b'C' | 0x8c => self.input.byte()?.into(),
            b'X' | b'B' => u32::from_le_bytes(self.input.array()?).into(),
            b'T' => match u64::try_from(i32::from_le_bytes(self.input.array()?)) {
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
    pub(super) fn bytes(&mut self, n: u64) -> Result<(), Fail> {
        let start = self.input.position();
        self.input.skip(n)?;
        match self.arrays {
            true => self.push_node(Node::Bytes(start..start + n), 4),
            false => self.push(Item::Scalar),
        }
    }
}
