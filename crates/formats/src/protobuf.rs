//! The wire format of Protocol Buffers, read strictly: any deviation from its writers' form is refused.
//!
//! stepfs needs the places of a message's bytes, which libraries do not tell. Only numbers (varints) and runs of
//! bytes are understood. Groups, which are deprecated, fixed-width fields and overlong numbers are refused. Nothing
//! nests by itself: the caller asks for a message inside another one, so its own grammar bounds the depth.

use std::ops::Range;

use super::ReadAt;
use super::input::Input;
use super::read::{Fail, bad, refuse_if};
use codec::Dtype;
use codec::entropy::varint;

/// Largest number of a field, by the language's definition.
const MAX_FIELD: u64 = (1 << 29) - 1;

/// A field's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    /// Wire type 0.
    Number(u64),
    /// Wire type 2: where its bytes are in the file.
    Bytes(Range<u64>),
}

impl Value {
    /// The number; refused if it is not one.
    pub(super) fn number(self) -> Result<u64, Fail> {
        match self {
            Value::Number(n) => Ok(n),
            Value::Bytes(_) => bad("protobuf: a field that is no number stands where one belongs"),
        }
    }

    /// The run of bytes; a number is refused.
    pub(super) fn bytes(self) -> Result<Range<u64>, Fail> {
        match self {
            Value::Bytes(range) => Ok(range),
            Value::Number(_) => bad("protobuf: a number stands where bytes belong"),
        }
    }
}

/// Reads fields from a place in a file on.
pub(super) struct Wire<'a> {
    src: &'a dyn ReadAt,
    input: Input<'a>,
}

impl<'a> Wire<'a> {
    pub(super) fn new(src: &'a dyn ReadAt, size: u64) -> Wire<'a> {
        Wire { src, input: Input::new("protobuf", src, 0, size) }
    }

    /// The next field of a message, of which `rest` is left; `None` at its end. Shortens `rest`.
    pub(super) fn field(&mut self, rest: &mut Range<u64>) -> Result<Option<(u64, Value)>, Fail> {
        if rest.start >= rest.end {
            return Ok(None);
        }
        let tag = self.varint(rest)?;
        let number = tag >> 3;
        refuse_if(number == 0 || number > MAX_FIELD, "protobuf: a field has a number that none can have")?;
        let value = match tag & 7 {
            0 => Value::Number(self.varint(rest)?),
            2 => {
                let len = self.varint(rest)?;
                refuse_if(len > rest.end - rest.start, "protobuf: a field goes beyond the end of its message")?;
                let start = rest.start;
                rest.start += len;
                Value::Bytes(start..start + len)
            }
            _ => return bad("protobuf: a field of a kind that is not used here"),
        };
        Ok(Some((number, value)))
    }

    /// A number of at most 64 bits, least significant 7 bits first, in as few bytes as it needs.
    pub(super) fn varint(&mut self, rest: &mut Range<u64>) -> Result<u64, Fail> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte(rest)?;
            // Of the tenth byte one bit is left.
            if shift == 63 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                refuse_if(byte == 0 && shift > 0, "protobuf: a number with more bytes than it needs")?;
                return Ok(value);
            }
        }
        bad("protobuf: a number of more than 64 bits")
    }

    fn byte(&mut self, rest: &mut Range<u64>) -> Result<u8, Fail> {
        refuse_if(rest.start >= rest.end, "protobuf: a message ends in the middle of a number")?;
        rest.start += 1;
        self.input.byte_at(rest.start - 1)
    }

    /// A text of at most `most` bytes.
    pub(super) fn text(&mut self, range: Range<u64>, most: u64) -> Result<String, Fail> {
        refuse_if(range.end - range.start > most, "protobuf: a name is too long")?;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.src.read_exact_at(&mut bytes, range.start)?;
        String::from_utf8(bytes).or_else(|_| bad("protobuf: a text is not UTF-8"))
    }
}

/// Appends the head of a field of this number that holds `len` bytes, which are to follow.
pub(super) fn put_head(field: u64, len: u64, out: &mut Vec<u8>) {
    varint::put(field << 3 | 2, out);
    varint::put(len, out);
}

/// Appends a field that is a number. The format leaves out a 0.
pub(super) fn put_number(field: u64, value: u64, out: &mut Vec<u8>) {
    if value != 0 {
        varint::put(field << 3, out);
        varint::put(value, out);
    }
}

/// The element type with this number in TensorFlow, if stepfs knows it. Texts have no places of their own.
pub(super) fn data_type(number: u64) -> Option<Dtype> {
    Some(match number {
        1 => Dtype::F32,
        2 => Dtype::F64,
        3 => Dtype::I32,
        4 => Dtype::U8,
        5 => Dtype::I16,
        6 => Dtype::I8,
        8 => Dtype::C64,
        9 => Dtype::I64,
        10 => Dtype::Bool,
        14 => Dtype::Bf16,
        17 => Dtype::U16,
        18 => Dtype::C128,
        19 => Dtype::F16,
        22 => Dtype::U32,
        23 => Dtype::U64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8]) -> Result<u64, Fail> {
        Wire::new(&bytes, bytes.len() as u64).varint(&mut (0..bytes.len() as u64))
    }

    proptest! {
        #[test]
        fn numbers_come_back(value: u64, shift in 0u32..64) {
            let mut out = Vec::new();
            varint::put(value >> shift, &mut out);
            prop_assert_eq!(read(&out).ok(), Some(value >> shift));
            out.pop();
            prop_assert!(read(&out).is_err());
        }
    }

    #[test]
    fn numbers_that_no_writer_writes_are_refused() {
        assert_eq!(read(&[0xff; 9].iter().copied().chain([1]).collect::<Vec<_>>()).ok(), Some(u64::MAX));
        for bytes in [&[0x80, 0x00][..], &[0xff; 10], &[0xff; 11], &[0x80; 20], &[]] {
            assert!(read(bytes).is_err(), "{bytes:x?}");
        }
    }

    #[test]
    fn fields_stay_in_their_message() {
        let fields = |bytes: &[u8]| -> Result<Vec<(u64, Value)>, Fail> {
            let (mut wire, mut rest) = (Wire::new(&bytes, bytes.len() as u64), 0..bytes.len() as u64);
            let mut found = Vec::new();
            while let Some(field) = wire.field(&mut rest)? {
                found.push(field);
            }
            Ok(found)
        };
        let known = [(1, Value::Number(40)), (2, Value::Bytes(4..6))];
        assert_eq!(fields(b"\x08\x28\x12\x02ab").unwrap(), known);
        for hostile in [
            &b"\x12\x03ab"[..],
            b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01ab",
            b"\x00\x01",
            b"\x0b",
            b"\x0d\0\0\0\0",
            b"\xf8\xff\xff\xff\xff\x01\x00",
            b"\x08",
        ] {
            assert!(fields(hostile).is_err(), "{hostile:x?}");
        }
    }
}
