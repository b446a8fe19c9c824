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
    whole: &'a [u8],
    payload: &'a [u8],
    acc: u64,
    held: u32,
}

impl<'a> BitReader<'a> {
    pub(super) fn new(payload: &'a [u8]) -> Self {
        BitReader { whole: payload, payload, acc: 0, held: 0 }
    }

    #[inline]
    fn refill(&mut self) {
        if let Some((word, rest)) = self.payload.split_first_chunk::<4>() {
            self.acc |= u64::from(u32::from_le_bytes(*word)) << self.held;
            self.held += 32;
            self.payload = rest;
            return;
        }
        while self.held <= 56
            && let Some((&byte, rest)) = self.payload.split_first()
        {
            self.acc |= u64::from(byte) << self.held;
            self.held += 8;
            self.payload = rest;
        }
    }

    /// The next `width` bits, at most 32.
    #[inline]
    pub(super) fn take(&mut self, width: u32) -> Result<u32, Corrupt> {
        if self.held < width {
            self.refill();
            Corrupt::when(self.held < width, "truncated bit field")?;
        }
        let value = (self.acc & ((1 << width) - 1)) as u32;
        self.acc >>= width;
        self.held -= width;
        Ok(value)
    }

    /// The unread bytes, from the byte with the next bit on, and the number of bits of that byte that are already read.
    #[inline]
    pub(super) fn ahead(&self) -> (&'a [u8], u32) {
        let place = 8 * (self.whole.len() - self.payload.len()) - self.held as usize;
        (&self.whole[place / 8..], (place % 8) as u32)
    }

    /// Skips bits that [`BitReader::ahead`] returned.
    #[inline]
    pub(super) fn skip(&mut self, bits: u32) {
        let (ahead, taken) = self.ahead();
        let place = (taken + bits) as usize;
        (self.payload, self.acc, self.held) = (&ahead[(place / 8).min(ahead.len())..], 0, 0);
        let taken = (place % 8) as u32;
        if let Some((&byte, rest)) = self.payload.split_first().filter(|_| taken > 0) {
            (self.payload, self.acc, self.held) = (rest, u64::from(byte) >> taken, 8 - taken);
        }
    }

    /// The bytes after the one with the last bit read.
    pub(super) fn rest(self) -> &'a [u8] {
        let read = self.whole.len() - self.payload.len();
        &self.whole[read - (self.held / 8) as usize..]
    }
}
