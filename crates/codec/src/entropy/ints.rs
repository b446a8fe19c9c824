//! `i32` symbols of any size: a *class* byte each, entropy-coded, and raw extra bits for the large ones. Nothing
//! escapes, saturates or wraps.
//!
//! Classes 0 to 30 are the values -15 to 15. A larger magnitude has class 31 + 8*(e - 4) + 2*f + s. Here e = 4 to 31 is
//! its exponent (floor of log2), f the two bits below its leading bit, and s its sign. The e - 2 bits below those are
//! its extra bits. The widest class, e = 31, is -2^31 alone.
//!
//! Payload: the length of the classes' payload, the payload ([`super::bytes`]); the extra bits, low bits first.
//!
//! Many values that are mostly large may be *halved* first, several times. Then the payload has a byte 0 (no payload of
//! classes has that length), the number of low bits that each value lost, and these bits ([`super::packed`]). The
//! payload of the remaining values follows. Extra bits must be located one by one; packed bits need not.

use super::bits::{BitReader, BitWriter};
use super::scratch::Scratch;
use super::simd::{Level, multiversion};
use super::{Corrupt, cost, huffman, packed, symbols, varint};

/// Largest magnitude with a class of its own.
pub(crate) const SMALL: i32 = 15;
/// First class of large magnitudes: the number of classes of small ones.
pub(crate) const LARGE: u8 = 2 * SMALL as u8 + 1;
/// Smallest exponent of a large magnitude.
const LARGE_EXPONENT: u32 = 4;
/// Values examined together: large ones are rare in most streams, and whole chunks pass without a branch.
const CHUNK: usize = 64;

/// Class, extra bits and their width.
#[inline]
fn classify(value: i32) -> (u8, u32, u32) {
    if (-SMALL..=SMALL).contains(&value) {
        return ((value + SMALL) as u8, 0, 0);
    }
    let magnitude = value.unsigned_abs();
    let exponent = magnitude.ilog2();
    let width = exponent - 2;
    let fraction = magnitude >> width & 3;
    let class = u32::from(LARGE) + 8 * (exponent - LARGE_EXPONENT) + 2 * fraction + u32::from(value < 0);
    (class as u8, magnitude & ((1 << width) - 1), width)
}

/// Appends the smallest payload of `values` in this format.
pub fn encode(values: &[i32], out: &mut Vec<u8>) {
    let fill = |start: usize, block: &mut [i32]| block.copy_from_slice(&values[start..][..block.len()]);
    encode_halved(values.len(), 0, out, |_, _| false, fill);
}

/// Values made and classified together, in the first-level cache.
pub(crate) const BLOCK: usize = 2048;

/// Appends the payload of `n` values, which `fill` makes block by block. `fill` gets the index of a block's first value
/// and the block; it may be called more than once for a block. `small` may be able to write the classes of a block at
/// once. It returns false for a block with a large value, and whenever it likes.
pub(crate) fn encode_blocks(
    n: usize,
    out: &mut Vec<u8>,
    small: impl FnMut(usize, &mut [u8]) -> bool,
    mut fill: impl FnMut(usize, &mut [i32]),
) {
    let width = width_to_pack(n, &mut fill);
    encode_halved(n, width, out, small, fill);
}

/// From this many values on, speed matters more than the last bytes: a whole tile of f32.
const MANY: usize = 128 * 1024;
/// Number of blocks sampled to estimate the values' size.
const LOOKED_AT: usize = 4;
/// Values are halved to a mean magnitude from this to twice this. Most are then small, and the removed low bits were
/// even enough (a Laplacian loses .02 bits per value).
const HALVED_TO: f64 = 1.5;
/// Permitted growth in bytes for packed low bits.
const PACKED_MAY_COST: f64 = 1.01;

/// Number of low bits per value that are better packed than coded; 0 for none.
fn width_to_pack(n: usize, fill: &mut impl FnMut(usize, &mut [i32])) -> u32 {
    if n < MANY {
        return 0;
    }
    let mut values = [0; LOOKED_AT * BLOCK];
    for (number, block) in values.chunks_mut(BLOCK).enumerate() {
        fill(n / BLOCK * number / LOOKED_AT * BLOCK, block);
    }
    let mean = values.iter().map(|value| f64::from(value.unsigned_abs())).sum::<f64>() / values.len() as f64;
    let width = (mean / HALVED_TO).log2().floor().min(packed::MOST_WIDTH.into());
    if width < 1.0 {
        return 0;
    }
    let before = estimate_bits(&values);
    values.iter_mut().for_each(|value| *value >>= width as u32);
    let after = estimate_bits(&values) + width * values.len() as f64;
    if after <= before * PACKED_MAY_COST { width as u32 } else { 0 }
}

/// The same for values whose `width` low bits are packed separately, unless that is 0.
pub(super) fn encode_halved(
    n: usize,
    width: u32,
    out: &mut Vec<u8>,
    mut small: impl FnMut(usize, &mut [u8]) -> bool,
    mut fill: impl FnMut(usize, &mut [i32]),
) {
    if width > 0 {
        out.extend_from_slice(&[0, width as u8]);
        out.reserve(packed::bytes(n, width));
    }
    let level = Level::detect();
    let mut classes = Scratch::new(n);
    let mut extra = Vec::new();
    let mut bits = BitWriter::new(&mut extra);
    let mut values = [0; BLOCK];
    for (number, classes) in classes.chunks_mut(BLOCK).enumerate() {
        if width == 0 && small(number * BLOCK, classes) {
            continue;
        }
        let values = &mut values[..classes.len()];
        fill(number * BLOCK, values);
        if width > 0 {
            packed::split(values, width, out);
        }
        if !small_classes(level, values, classes) {
            for (class, &value) in classes.iter_mut().zip(values.iter()) {
                let (c, low, width) = classify(value);
                *class = c;
                bits.put(low, width);
            }
        }
    }
    bits.finish();
    varint::put_bytes(out, |out| symbols::encode(&classes, out));
    out.extend_from_slice(&extra);
}

multiversion! {
    /// Writes the classes as if all values were small; returns whether they are.
    fn small_classes(values: &[i32], classes: &mut [u8]) -> bool {
        let mut all = true;
        for (class, &value) in classes.iter_mut().zip(values) {
            let index = value.wrapping_add(SMALL) as u32;
            all &= index < u32::from(LARGE);
            *class = index as u8;
        }
        all
    }
}

/// Fills `out` from the payload of exactly that many values.
pub fn decode(payload: &[u8], out: &mut [i32]) -> Result<(), Corrupt> {
    decode_blocks(payload, out.len(), |start, values| {
        out[start..][..values.len()].copy_from_slice(values);
        Ok(())
    })
}

multiversion! {
    /// Adds the symbols; false if a sum is beyond 32 bits.
    pub(crate) fn add<S: Symbol>(symbols: &[S], sums: &mut [i32]) -> bool {
        let mut overflow = 0;
        for (sum, symbol) in sums.iter_mut().zip(symbols) {
            let symbol = symbol.value();
            let new = sum.wrapping_add(symbol);
            overflow |= (*sum ^ new) & (symbol ^ new);
            *sum = new;
        }
        overflow >= 0
    }
}

/// Decodes the payload of exactly `n` values block by block: `each` gets the index of a block's first value, and the
/// block.
pub(crate) fn decode_blocks(
    payload: &[u8],
    n: usize,
    mut each: impl FnMut(usize, &[i32]) -> Result<(), Corrupt>,
) -> Result<(), Corrupt> {
    let mut blocks = Blocks::new(payload, n)?;
    let (mut small, mut any) = ([0; BLOCK], [0; BLOCK]);
    for start in (0..n).step_by(BLOCK) {
        let length = BLOCK.min(n - start);
        match blocks.next(&mut any[..length])? {
            Symbols::Small(classes) => {
                small_values(Level::detect(), classes, &mut small);
                each(start, &small[..length])?;
            }
            Symbols::Any(values) => each(start, values)?,
        }
    }
    Ok(())
}

/// A value itself, or the class of a small one. A caller that adds values up needs no buffer of decoded values.
pub(crate) trait Symbol: Copy {
    /// True if all values fit 16 bits.
    const IS_NARROW: bool;
    /// The value.
    fn value(self) -> i32;
}

impl Symbol for i32 {
    const IS_NARROW: bool = false;
    #[inline(always)]
    fn value(self) -> i32 {
        self
    }
}

impl Symbol for i16 {
    const IS_NARROW: bool = true;
    #[inline(always)]
    fn value(self) -> i32 {
        self.into()
    }
}

/// The class of a small value.
impl Symbol for u8 {
    const IS_NARROW: bool = true;
    #[inline(always)]
    fn value(self) -> i32 {
        i32::from(self) - SMALL
    }
}

/// Some values.
#[derive(Clone, Copy)]
pub(crate) enum Symbols<'a> {
    /// The classes of small values only.
    Small(&'a [u8]),
    /// Values, some of them large.
    Any(&'a [i32]),
}

/// The values of a payload, in blocks of [`BLOCK`].
pub(crate) struct Blocks<'a> {
    classes: Scratch,
    extra: BitReader<'a>,
    /// Number of low bits per value that are packed separately (0 for none), and those of the next values.
    width: u32,
    low: &'a [u8],
    done: usize,
    level: Level,
}

impl<'a> Blocks<'a> {
    /// A payload of exactly `n` values.
    pub(crate) fn new(mut payload: &'a [u8], n: usize) -> Result<Blocks<'a>, Corrupt> {
        let (mut width, mut low) = (0, [].as_slice());
        if let (Some((&[0, bits], rest)), true) = (payload.split_first_chunk(), n > 0) {
            width = u32::from(bits);
            Corrupt::when(!(1..=packed::MOST_WIDTH).contains(&width), "width of low bits")?;
            (low, payload) = rest.split_at_checked(packed::bytes(n, width)).ok_or(Corrupt("truncated low bits"))?;
        }
        let body = varint::take_bytes(&mut payload)?;
        let mut classes = Scratch::new(n);
        symbols::decode(body, &mut classes)?;
        Ok(Blocks { classes, extra: BitReader::new(payload), width, low, done: 0, level: Level::detect() })
    }

    /// The next values: [`BLOCK`], or fewer at the end, as many as `values` has room for. If some are large, they are
    /// written there; otherwise `values` stays unchanged.
    pub(crate) fn next<'b>(&'b mut self, values: &'b mut [i32]) -> Result<Symbols<'b>, Corrupt> {
        let classes = self.classes.get(self.done..self.done + values.len()).ok_or(Corrupt("values after the last"))?;
        self.done += values.len();
        if !are_small(self.level, classes) {
            for (values, classes) in values.chunks_mut(CHUNK).zip(classes.chunks(CHUNK)) {
                match are_small(self.level, classes) {
                    true => small_values(self.level, classes, values),
                    false => large_values(classes, values, &mut self.extra)?,
                }
            }
        } else if self.width == 0 {
            return Ok(Symbols::Small(classes));
        } else {
            small_values(self.level, classes, values);
        }
        if self.width > 0 {
            let (low, rest) = self.low.split_at(packed::bytes(values.len(), self.width).min(self.low.len()));
            packed::join(values, self.width, low)?;
            self.low = rest;
        }
        Ok(Symbols::Any(values))
    }
}

/// Writes the values of a chunk with some large ones.
fn large_values(classes: &[u8], values: &mut [i32], extra: &mut BitReader<'_>) -> Result<(), Corrupt> {
    let (bytes, offset) = extra.ahead();
    let (end, sound) = fields(Level::detect(), classes, values, bytes, offset);
    extra.skip(end - offset)?;
    if sound { Ok(()) } else { Err(Corrupt("value beyond 32 bits")) }
}

/// Bytes that a chunk's extra bits touch, and those that the read of the last of them may touch.
const MOST_TOUCHED: usize = (CHUNK * MOST_EXTRA).div_ceil(8) + 1 + 8;

multiversion! {
    /// Writes the values of a chunk. Their extra bits begin in the first of these bytes, after `offset` bits. Returns
    /// where they end, which may be beyond the bytes, and whether all values fit 32 bits. It locates all bits first, then
    /// reads the values: one by one, each would wait for the one before.
    fn fields(classes: &[u8], values: &mut [i32], bytes: &[u8], offset: u32) -> (u32, bool) {
        let mut places = [0; CHUNK];
        let mut end = offset;
        for (place, &class) in places.iter_mut().zip(classes) {
            *place = end;
            end += u32::from(TABLE[usize::from(class)].2);
        }
        let mut last = [0; MOST_TOUCHED];
        let bytes = if bytes.len() < MOST_TOUCHED {
            last[..bytes.len()].copy_from_slice(bytes);
            &last
        } else {
            bytes
        };
        let mut sound = true;
        for ((value, &class), &place) in values.iter_mut().zip(classes).zip(&places) {
            let (least, sign, width) = TABLE[usize::from(class)];
            let word = bytes[place as usize / 8..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
            let magnitude = least | (word >> (place % 8)) as u32 & ((1 << width) - 1);
            *value = (magnitude as i32 ^ sign).wrapping_sub(sign);
            // A large value has the sign of its class.
            sound &= (*value ^ sign) >= 0;
        }
        (end, sound)
    }
}

/// Maximum extra bits of a class.
const MOST_EXTRA: usize = 29;

/// For each class: its smallest magnitude, -1 if it is negative, and the number of its extra bits. No value has the last
/// class, 255.
static TABLE: [(u32, i32, u8); 256] = {
    let mut table = [(1 << 31, 0, 0); 256];
    let mut class = 0;
    while class < u8::MAX as usize {
        let small = class as i32 - SMALL;
        table[class] = if class < LARGE as usize {
            (small.unsigned_abs(), if small < 0 { -1 } else { 0 }, 0)
        } else {
            let index = class as u32 - LARGE as u32;
            let width = index / 8 + LARGE_EXPONENT - 2;
            ((4 + index / 2 % 4) << width, -((index % 2) as i32), width as u8)
        };
        class += 1;
    }
    table
};

multiversion! {
    /// True if all classes are those of small values.
    fn are_small(classes: &[u8]) -> bool {
        classes.iter().fold(0, |most, &class| class.max(most)) < LARGE
    }
}

multiversion! {
    /// Writes the values of small classes.
    fn small_values(classes: &[u8], values: &mut [i32]) {
        for (value, class) in values.iter_mut().zip(classes) {
            *value = class.value();
        }
    }
}

/// Estimated bits of `values`: order-0 entropy of the classes, and the extra bits. For decisions on samples.
pub fn estimate_bits(values: &[i32]) -> f64 {
    let mut extra = 0.0;
    let classes: Vec<u8> = values
        .iter()
        .map(|&value| {
            let (class, _, width) = classify(value);
            extra += f64::from(width);
            class
        })
        .collect();
    cost::entropy_bits(&huffman::histogram(&classes)) + extra
}
