//! Bit fields, low bits first, for headers and the extra bits of large values; the hot streams have their own loops.

use super::Corrupt;

/// Appends bit fields to a byte vector.
pub(super) struct BitWriter<'a> {
    out: &'a mut Vec<u8>,
    acc: u64,
    held: u32,
}

impl<'a> BitWriter<'a> {
    pub(super) fn new(out: &'a mut Vec<u8>) -> Self {
        BitWriter { out, acc: 0, held: 0 }
    }

    /// Appends the low `width` bits of `value`; `width` is at most 32, and the bits above it are zero.
    #[inline]
    pub(super) fn put(&mut self, value: u32, width: u32) {
        self.acc |= u64::from(value) << self.held;
        self.held += width;
        if self.held >= 32 {
            self.out.extend_from_slice(&(self.acc as u32).to_le_bytes());
            self.acc >>= 32;
            self.held -= 32;
        }
    }

    /// Pads the last byte with zero bits.
    pub(super) fn finish(self) {
        let bytes = self.held.div_ceil(8) as usize;
        self.out.extend_from_slice(&self.acc.to_le_bytes()[..bytes]);
    }
}

/// Reads bit fields from a payload.
pub(super) struct BitReader<'a> {
    /// From the byte with the next bit on.
    payload: &'a [u8],
    /// Bits of that byte that were read, at most 7.
    taken: u32,
}

impl<'a> BitReader<'a> {
    pub(super) fn new(payload: &'a [u8]) -> Self {
        BitReader { payload, taken: 0 }
    }

    /// The unread bytes, from the one with the next bit on, and the number of bits of that byte that are already read.
    #[inline]
    pub(super) fn ahead(&self) -> (&'a [u8], u32) {
        (self.payload, self.taken)
    }

    /// The next 32 bits, with zeros after the last.
    #[inline]
    pub(super) fn peek(&self) -> u32 {
        let mut word = [0; 8];
        let ahead = self.payload.len().min(word.len());
        word[..ahead].copy_from_slice(&self.payload[..ahead]);
        (u64::from_le_bytes(word) >> self.taken) as u32
    }

    /// Skips bits, which must be there.
    #[inline]
    pub(super) fn skip(&mut self, bits: u32) -> Result<(), Corrupt> {
        let end = (self.taken + bits) as usize;
        Corrupt::when(end > 8 * self.payload.len(), "truncated bit field")?;
        (self.payload, self.taken) = (&self.payload[end / 8..], (end % 8) as u32);
        Ok(())
    }

    /// The bytes after the one with the last bit read.
    pub(super) fn rest(self) -> &'a [u8] {
        &self.payload[usize::from(self.taken > 0)..]
    }
}
