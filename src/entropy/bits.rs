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

    /// Appends the low `width` bits of `value`; `width` at most 32, the bits above it zero.
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

/// Takes bit fields off a payload.
#[derive(Clone, Copy)]
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
            if self.held < width {
                return Err(Corrupt("truncated bit field"));
            }
        }
        let value = (self.acc & ((1 << width) - 1)) as u32;
        self.acc >>= width;
        self.held -= width;
        Ok(value)
    }

    /// The next bits of at most two fields of 25, zeros behind the end, and how many there are; [`BitReader::skip`] takes them.
    #[inline(always)]
    pub(super) fn look(&mut self) -> (u64, u32) {
        if self.held < 50
            && let Some((word, _)) = self.payload.split_first_chunk::<8>()
        {
            // As many whole bytes as fit; the bits of the others are read again.
            let bytes = (63 - self.held) / 8;
            self.acc |= u64::from_le_bytes(*word) << self.held;
            self.held += 8 * bytes;
            self.acc &= (1 << self.held) - 1;
            self.payload = &self.payload[bytes as usize..];
        } else {
            while self.held <= 48
                && let Some((&byte, rest)) = self.payload.split_first()
            {
                self.acc |= u64::from(byte) << self.held;
                self.held += 8;
                self.payload = rest;
            }
        }
        (self.acc, self.held)
    }

    /// Takes bits that were looked at, no more than there were.
    #[inline(always)]
    pub(super) fn skip(&mut self, width: u32) {
        self.acc >>= width;
        self.held -= width;
    }

    /// What lies behind the byte that holds the last bit taken.
    pub(super) fn rest(self) -> &'a [u8] {
        let read = self.whole.len() - self.payload.len();
        &self.whole[read - (self.held / 8) as usize..]
    }
}
