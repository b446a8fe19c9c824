//! Messages of Protocol Buffers in memory, small ones. `protobuf.rs` reads large ones in a file.

use super::super::read::{Fail, bad, u32_at};
use codec::entropy::varint;

/// A field's value.
pub(super) enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// Of four bytes.
    Fixed(u32),
    /// Of eight bytes, which nothing here needs.
    Long,
}

/// The rest of a message.
pub(super) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn new(message: &'a [u8]) -> Fields<'a> {
        Fields(message)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next field and its number.
    pub(super) fn next(&mut self) -> Result<Option<(u64, Value<'a>)>, Fail> {
        if self.is_empty() {
            return Ok(None);
        }
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Value::Number(self.varint()?),
            1 => {
                self.take(8)?;
                Value::Long
            }
            2 => {
                let len = self.varint()?;
                Value::Bytes(self.take(len)?)
            }
            5 => Value::Fixed(u32_at(self.take(4)?, 0)),
            _ => return bad("TensorFlow: a field of a kind that is not used here"),
        };
        Ok(Some((tag >> 3, value)))
    }

    /// A number of at most 64 bits, least significant 7 bits first.
    pub(super) fn varint(&mut self) -> Result<u64, Fail> {
        varint::take(&mut self.0).or_else(|_| bad("TensorFlow: a number is cut short, or has more than 64 bits"))
    }

    /// The next bytes.
    pub(super) fn take(&mut self, len: u64) -> Result<&'a [u8], Fail> {
        let taken = usize::try_from(len).ok().and_then(|len| self.0.split_off(..len));
        taken.map_or_else(|| bad("TensorFlow: a message is cut short"), Ok)
    }
}
