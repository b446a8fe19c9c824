//! Little-endian reading and writing of the store's own structures. Every length is checked before use.

use super::Damage;
use codec::entropy::varint;

/// Reads consecutive fields from bytes that may be damaged.
pub(crate) struct Fields<'a> {
    bytes: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Fields { bytes }
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8], Damage> {
        if count > self.bytes.len() {
            return Err(Damage("a field reaches beyond the end"));
        }
        let (head, rest) = self.bytes.split_at(count);
        self.bytes = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Damage> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Damage> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Damage> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn f64(&mut self) -> Result<f64, Damage> {
        Ok(f64::from_le_bytes(self.array()?))
    }

    /// An unsigned LEB128 integer.
    pub(crate) fn varint(&mut self) -> Result<u64, Damage> {
        varint::take(&mut self.bytes).map_err(|_| Damage("an integer is cut short"))
    }

    /// A count of items of at least `each` bytes in the remaining bytes, so it may bound an allocation.
    pub(crate) fn varcount(&mut self, each: usize) -> Result<usize, Damage> {
        let count = self.varint()?;
        let fits = |count: &usize| count.checked_mul(each).is_some_and(|total| total <= self.bytes.len());
        usize::try_from(count).ok().filter(fits).ok_or(Damage("a count is larger than the rest"))
    }

    /// A string with its length as a varint.
    pub(crate) fn short_text(&mut self) -> Result<String, Damage> {
        let length = self.varcount(1)?;
        String::from_utf8(self.take(length)?.to_vec()).map_err(|_| Damage("a name is not UTF-8"))
    }

    pub(crate) fn f32(&mut self) -> Result<f32, Damage> {
        Ok(f32::from_le_bytes(self.array()?))
    }

    pub(crate) fn remaining(&self) -> usize {
        self.bytes.len()
    }
}

/// Appends a string as its length (a varint) and its UTF-8 bytes.
pub(crate) fn put_short_text(out: &mut Vec<u8>, text: &str) {
    varint::put(text.len() as u64, out);
    out.extend_from_slice(text.as_bytes());
}
