//! LC-Checkpoint (Chen, Liu, Ren and Jin, ICML 2020, "On Efficient Constructions of Checkpoints").
//!
//! - The difference is to the previous state *as decoded*, so errors do not add up (Algorithm 1).
//! - Exponent-based quantization (section 3.1.1): the elements of one sign and one exponent form a bucket, and all
//!   become the mean of the bucket's largest and smallest. A difference of exactly 0 stays 0.
//! - x-bit priority promotion: the 2^x - 1 buckets with the largest exponents stay. All others become 0 and wait until
//!   their difference has grown. Of two with one exponent the positive one goes first; the paper leaves that open.
//! - Huffman coding of the buckets' numbers (section 3.1.2). The paper stores code tables by number of buckets (section
//!   3.2) because making one took time. Here a tile's table comes from its own counts, which takes less time than
//!   counting.
//! - Asynchronous execution (section 3.2): the archive does that with every codec. The archive also merges into
//!   super-steps, when states in between are removed.
//!
//! u is the whole model's state, so buckets and their promotion belong to the checkpoint, not to a tensor.
//! [`Lc::by_tensor`] is the other reading, which the figures of single layers support.
//!
//! Payload: varint k, the number of buckets; the value of each, f32. Then the symbols (0, or the number of a bucket
//! from 1 on), a `bytes` payload. With more than 255 buckets their high bytes, with their length before, then their low
//! ones.

use std::io;
use std::sync::Arc;

use rayon::prelude::*;

use super::{Fit, Floats, NO_PREVIOUS, State, System, Tensor, Tile, code};
use codec::Corrupt;
use codec::entropy::scratch::Scratch;
use codec::entropy::simd::{Level, multiversion};
use codec::entropy::{symbols, varint};

/// Bits of an f32's mantissa. The bits above it, sign and exponent, are the number of a bucket.
const MANTISSA: u32 = 23;
/// Number of possible buckets.
const BUCKETS: usize = 1 << (32 - MANTISSA);
/// Values with this sign and exponent are not finite, so the number is free for differences of 0.
const ZERO: usize = BUCKETS - 1;
/// Elements checked together for one beyond its bucket's range.
const CHUNK: usize = 64;

/// LC-Checkpoint, with or without priority promotion.
#[derive(Debug)]
pub struct Lc {
    /// Bits of priority promotion, 1 to 8; `None`: all buckets stay.
    pub bits: Option<u8>,
    /// Each tensor has its own buckets and promotion.
    pub by_tensor: bool,
}

/// Smallest and largest difference in each bucket, as bits; the smallest is above the largest if the bucket is empty.
struct Ranges {
    least: Box<[u32; BUCKETS]>,
    most: Box<[u32; BUCKETS]>,
}

impl Ranges {
    fn none() -> Ranges {
        Ranges { least: Box::new([u32::MAX; BUCKETS]), most: Box::new([0; BUCKETS]) }
    }

    fn join(mut self, other: Ranges) -> Ranges {
        self.least.iter_mut().zip(other.least.iter()).for_each(|(own, other)| *own = (*own).min(*other));
        self.most.iter_mut().zip(other.most.iter()).for_each(|(own, other)| *own = (*own).max(*other));
        self
    }

    /// Adds a tile. After some tiles hardly an element is beyond the known range: whole chunks pass without one.
    fn add(&mut self, tile: &Tile) {
        let Some(previous) = tile.before() else { return };
        let level = Level::detect();
        for (new, old) in tile.values.chunks(CHUNK).zip(previous.chunks(CHUNK)) {
            if !is_beyond(level, self, new, old) {
                continue;
            }
            for (new, old) in new.iter().zip(old) {
                let difference = new - old;
                let (bucket, bits) = (bucket_of(difference), difference.to_bits());
                self.least[bucket] = self.least[bucket].min(bits);
                self.most[bucket] = self.most[bucket].max(bits);
            }
        }
    }

    /// The finite buckets that have elements, by descending exponent, each with its value.
    fn buckets(&self) -> Vec<(usize, f32)> {
        const SIGN: usize = BUCKETS / 2;
        let all = (0..SIGN - 1).rev().flat_map(|exponent| [exponent, SIGN + exponent]);
        let filled = all.filter(|&bucket| self.least[bucket] <= self.most[bucket]);
        let end = |bits: u32| f64::from(f32::from_bits(bits));
        filled.map(|bucket| (bucket, ((end(self.least[bucket]) + end(self.most[bucket])) / 2.0) as f32)).collect()
    }
}

impl Lc {
    /// Number of buckets in a tile's payload, without the one for unchanged elements.
    ///
    /// # Errors
    /// [`Corrupt`] if `encode` never writes such a payload.
    pub fn buckets(mut payload: &[u8]) -> Result<u64, Corrupt> {
        varint::take(&mut payload)
    }

    fn ranges(tensor: &dyn Tensor) -> io::Result<Ranges> {
        let tiles = 0..tensor.tiles();
        let each = tiles.into_par_iter().try_fold(Ranges::none, |mut ranges, number| {
            ranges.add(&tensor.tile(number)?);
            Ok::<_, io::Error>(ranges)
        });
        each.try_reduce(Ranges::none, |a, b| Ok(a.join(b)))
    }

    /// The buckets that stay.
    fn fit_of(&self, ranges: &Ranges) -> Arc<dyn Fit> {
        let mut buckets = ranges.buckets();
        if let Some(bits) = self.bits {
            buckets.truncate((1 << bits) - 1);
        }
        let mut table = Table { values: Vec::new(), steps: [-0.0; BUCKETS], symbols: [0; BUCKETS] };
        for (symbol, (bucket, value)) in (1..).zip(buckets) {
            table.values.push(value);
            (table.steps[bucket], table.symbols[bucket]) = (value, symbol);
        }
        Arc::new(table)
    }
}

impl System for Lc {
    fn fit(&self, tensors: &[&dyn Tensor], _: u32) -> io::Result<Vec<Arc<dyn Fit>>> {
        let each: Vec<Ranges> = tensors.iter().map(|tensor| Lc::ranges(*tensor)).collect::<io::Result<_>>()?;
        if self.by_tensor {
            return Ok(each.iter().map(|ranges| self.fit_of(ranges)).collect());
        }
        let all = each.into_iter().fold(Ranges::none(), Ranges::join);
        Ok(vec![self.fit_of(&all); tensors.len()])
    }

    fn stands_alone(&self) -> bool {
        false
    }

    fn take(&self, payload: &mut &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let previous = &previous.ok_or(NO_PREVIOUS)?.values;
        let count = varint::take(payload)?;
        Corrupt::when(count >= BUCKETS as u64, "buckets")?;
        let steps = [vec![-0.0], code::take_floats(payload, count as usize)?].concat();
        let is_wide = count > u8::MAX.into();
        let high = if is_wide { varint::take_bytes(payload)? } else { &[] };
        let mut symbols = Scratch::new(len);
        symbols::decode(std::mem::take(payload), &mut symbols)?;
        let mut values = Floats::zeros(len);
        let slots: &mut [f32] = &mut values;
        slots.copy_from_slice(previous);
        if !is_wide {
            Corrupt::when(symbols.iter().any(|&symbol| usize::from(symbol) >= steps.len()), "number of a bucket")?;
            slots.iter_mut().zip(symbols.iter()).for_each(|(value, &symbol)| *value += steps[usize::from(symbol)]);
            return Ok(State::of(values));
        }
        let mut upper = Scratch::new(len);
        symbols::decode(high, &mut upper)?;
        for (value, (&low, &high)) in slots.iter_mut().zip(symbols.iter().zip(upper.iter())) {
            let symbol = u16::from_le_bytes([low, high]);
            *value += steps.get(usize::from(symbol)).ok_or(Corrupt("number of a bucket"))?;
        }
        Ok(State::of(values))
    }
}

/// Number of the bucket of a difference.
#[inline(always)]
fn bucket_of(difference: f32) -> usize {
    let bits = difference.to_bits();
    if bits << 1 == 0 { ZERO } else { (bits >> MANTISSA) as usize }
}

/// The buckets that stay.
#[derive(Debug)]
struct Table {
    /// The value of each, in the order of their symbols from 1 on.
    values: Vec<f32>,
    /// The result for each bucket. Adding -0 changes nothing, not even the sign of a 0.
    steps: [f32; BUCKETS],
    symbols: [u32; BUCKETS],
}

impl Fit for Table {
    fn put(&self, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
        let previous = tile.before()?;
        let elements = tile.values.len();
        let (mut symbols, mut values) = (Scratch::new(elements), Floats::zeros(elements));
        if !quantize(Level::detect(), self, &tile.values, previous, &mut values, &mut symbols) {
            return None;
        }
        varint::put(self.values.len() as u64, out);
        code::put_floats(&self.values, out);
        if self.values.len() > usize::from(u8::MAX) {
            let mut high = Scratch::new(elements);
            for (symbol, (new, old)) in high.iter_mut().zip(tile.values.iter().zip(previous)) {
                *symbol = (self.symbols[bucket_of(new - old)] >> 8) as u8;
            }
            varint::put_bytes(out, |out| symbols::encode_huffman(&high, out));
        }
        symbols::encode_huffman(&symbols, out);
        Some(State::of(values))
    }
}

multiversion! {
    /// True if a difference is beyond the range of its bucket.
    fn is_beyond(ranges: &Ranges, new: &[f32], old: &[f32]) -> bool {
        let (least, most): (&[u32; BUCKETS], &[u32; BUCKETS]) = (&ranges.least, &ranges.most);
        let mut beyond = 0;
        for (new, old) in new.iter().zip(old) {
            let difference = new - old;
            let (bucket, bits) = (bucket_of(difference), difference.to_bits());
            beyond |= u32::from(bits < least[bucket]) | u32::from(bits > most[bucket]);
        }
        beyond != 0
    }
}

multiversion! {
    /// Writes the new values, and the low bytes of their buckets' numbers. `false` if a value is not finite.
    fn quantize(table: &Table, new: &[f32], old: &[f32], values: &mut [f32], symbols: &mut [u8]) -> bool {
        const EXPONENT: u32 = 0x7f80_0000;
        let mut largest = 0;
        for (((&new, &old), value), symbol) in new.iter().zip(old).zip(values).zip(symbols) {
            let difference = new - old;
            let bucket = bucket_of(difference);
            *value = old + table.steps[bucket];
            *symbol = table.symbols[bucket] as u8;
            largest = largest.max(difference.to_bits() & EXPONENT).max(value.to_bits() & EXPONENT);
        }
        largest < EXPONENT
    }
}
