//! A binary range coder with adaptive probabilities. Integers only: the same bits on every machine.
//!
//! It is Martin's range coder in the form that LZMA made common: `low` with a carry that runs through bytes held back,
//! and 32 bits of range.

use super::Corrupt;

/// Bits of a probability in the coder.
const BITS: u32 = 15;
/// No bit is ever taken as certain.
const LEAST: u32 = 24;
/// Below this the range is refilled.
const BOTTOM: u32 = 1 << 24;

/// The probability of a 1: the mean of a fast and a slow estimate. Both begin as plain means.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bit {
    fast: u16,
    slow: u16,
    seen: u8,
}

/// Weight of a new bit in an estimate after n bits: 1 / (n + 1.5), in 65536ths.
static WEIGHTS: [u16; SLOW] = {
    let mut weights = [0; SLOW];
    let mut n = 0;
    while n < weights.len() {
        weights[n] = (2 * 65536 / (2 * n + 3)) as u16;
        n += 1;
    }
    weights
};

/// Bits that the estimates remember. Measured on updates of small layers; anything from 8 and 64 to 32 and 256 matters
/// little.
const FAST: usize = 16;
const SLOW: usize = 128;

impl Bit {
    pub(super) const NEW: Bit = Bit { fast: 1 << 15, slow: 1 << 15, seen: 0 };

    /// The probability of a 1, in 2^-15, never 0 and never 1.
    #[inline(always)]
    fn probability(self) -> u32 {
        let sum = u32::from(self.fast) + u32::from(self.slow);
        (sum >> (17 - BITS)).clamp(LEAST, (1 << BITS) - LEAST)
    }

    #[inline(always)]
    fn learn(&mut self, bit: bool) {
        let target = if bit { 0xffff } else { 0 };
        let step = |p: u16, weight: u16| {
            let p = i32::from(p);
            (p + (((target - p) * i32::from(weight >> 1)) >> 15)) as u16
        };
        let seen = usize::from(self.seen);
        self.fast = step(self.fast, WEIGHTS[seen.min(FAST - 1)]);
        self.slow = step(self.slow, WEIGHTS[seen]);
        self.seen = (seen + 1).min(SLOW - 1) as u8;
    }
}

/// Appends bits to a buffer.
pub(super) struct Encoder<'a> {
    out: &'a mut Vec<u8>,
    low: u64,
    range: u32,
    /// The byte that a carry would still change, and the number of 0xff bytes after it.
    held: Option<u8>,
    full: u64,
}

impl<'a> Encoder<'a> {
    pub(super) fn new(out: &'a mut Vec<u8>) -> Encoder<'a> {
        Encoder { out, low: 0, range: u32::MAX, held: None, full: 0 }
    }

    #[inline(always)]
    pub(super) fn put(&mut self, model: &mut Bit, bit: bool) {
        let ones = (self.range >> BITS) * model.probability();
        if bit {
            self.range = ones;
        } else {
            self.low += u64::from(ones);
            self.range -= ones;
        }
        model.learn(bit);
        while self.range < BOTTOM {
            self.range <<= 8;
            self.shift();
        }
    }

    fn shift(&mut self) {
        let carry = (self.low >> 32) as u8;
        if carry == 1 || self.low < 0xff00_0000 {
            if let Some(held) = self.held {
                self.out.push(held.wrapping_add(carry));
            }
            for _ in 0..self.full {
                self.out.push(0xffu8.wrapping_add(carry));
            }
            (self.held, self.full) = (Some((self.low >> 24) as u8), 0);
        } else {
            self.full += 1;
        }
        self.low = (self.low & 0x00ff_ffff) << 8;
    }

    /// Writes the bytes held back: the decoder reads exactly as many bytes as were written.
    pub(super) fn finish(mut self) {
        (0..5).for_each(|_| self.shift());
    }
}

/// Takes bits from a payload.
pub(super) struct Decoder<'a> {
    rest: &'a [u8],
    code: u32,
    range: u32,
    /// A read went beyond the end.
    missing: bool,
}

impl<'a> Decoder<'a> {
    pub(super) fn new(payload: &'a [u8]) -> Decoder<'a> {
        let mut decoder = Decoder { rest: payload, code: 0, range: u32::MAX, missing: false };
        (0..4).for_each(|_| decoder.fill());
        decoder
    }

    #[inline(always)]
    pub(super) fn take(&mut self, model: &mut Bit) -> bool {
        let ones = (self.range >> BITS) * model.probability();
        let bit = self.code < ones;
        if bit {
            self.range = ones;
        } else {
            self.code -= ones;
            self.range -= ones;
        }
        model.learn(bit);
        while self.range < BOTTOM {
            self.range <<= 8;
            self.fill();
        }
        bit
    }

    fn fill(&mut self) {
        let byte = self.rest.split_off_first();
        self.missing |= byte.is_none();
        self.code = self.code << 8 | u32::from(byte.copied().unwrap_or(0));
    }

    /// # Errors
    /// The payload has fewer or more bytes than the decoder needs.
    pub(super) fn finish(self) -> Result<(), Corrupt> {
        match (self.missing, self.rest) {
            (false, []) => Ok(()),
            (true, _) => Err(Corrupt("truncated symbols")),
            (false, _) => Err(Corrupt("bytes after the symbols")),
        }
    }
}
