//! Bit streams to symbols: one table look-up yields up to eight symbols, stored as one `u64`.

use super::super::Corrupt;
use super::super::simd::{Level, multiversion};
use super::lengths::take_lengths;
use super::{Expansion, MAX_LENGTH, STREAMS, STREAMS_FROM, codes};

const TABLE: usize = 1 << MAX_LENGTH;

/// Look-ups of a round, between two refills: a refill leaves at least 56 bits, five codes of 11 take 55.
const LOOKUPS: usize = 5;

/// Bytes that one round of look-ups may write, including the slack of the last store.
const ROUND_BYTES: usize = LOOKUPS * 8;

/// From this many words on, a table with several words per look-up saves more time than it costs.
const WORTH_A_TABLE: usize = 16 * 1024;

/// A pass over the table takes as long as some thousand look-ups. If it helps fewer than one in this many, no more
/// follow.
const WORTH_A_PASS: usize = 4;

/// For all possible next [`MAX_LENGTH`] bits: the symbols that they begin with. It is built where it lies: a copy of it
/// would take as long as hundreds of look-ups.
#[derive(Clone)]
struct Table {
    symbols: [u64; TABLE],
    /// Bits used, in the low byte; symbols, 1 to 8, in the high byte.
    used: [u16; TABLE],
}

impl Table {
    const EMPTY: Table = Table { symbols: [0; TABLE], used: [0; TABLE] };

    /// One word per look-up. The code must be complete.
    fn fill_single_words(&mut self, lengths: &[u8; 256], expansion: &Expansion) {
        let codes = codes(lengths);
        for (word, &length) in lengths.iter().enumerate().filter(|(_, length)| **length > 0) {
            let used = (expansion.k as u16) << 8 | u16::from(length);
            for at in (codes[word] as usize..TABLE).step_by(1 << length) {
                (self.symbols[at], self.used[at]) = (expansion.symbols[word], used);
            }
        }
    }

    /// As many words per look-up as its bits hold, up to eight symbols, if it has one word per look-up.
    fn add_words(&mut self, lengths: &[u8; 256], expansion: &Expansion) {
        let single = self.clone();
        let shortest = lengths.iter().copied().filter(|&length| length > 0).min().unwrap_or(1);
        let most = (8 / expansion.k).min(MAX_LENGTH as usize / usize::from(shortest));
        // The bits of a good code are even, so this share of the look-ups gains a word.
        for _ in 1..most {
            if add_word(Level::detect(), &single, self) < TABLE / WORTH_A_PASS {
                break;
            }
        }
    }
}

multiversion! {
    /// Adds one more word to each look-up if it fits. Returns the number of look-ups where it does.
    fn add_word(single: &Table, table: &mut Table) -> usize {
        let mut added = 0;
        for (index, (symbols, used)) in table.symbols.iter_mut().zip(&mut table.used).enumerate() {
            let (bits, count) = (*used & 0xff, *used >> 8);
            let next = (index >> (bits & 15)) % TABLE;
            let (symbols_of_next, used_of_next) = (single.symbols[next], single.used[next]);
            let fits = (bits + (used_of_next & 0xff) <= MAX_LENGTH as u16) & (count + (used_of_next >> 8) <= 8);
            *symbols |= if fits { symbols_of_next << (8 * (count % 8)) } else { 0 };
            *used += if fits { used_of_next } else { 0 };
            added += usize::from(fits);
        }
        added
    }
}

/// Fills `out` (not empty) from a body; its last word may have fewer symbols than the others.
pub(in super::super) fn decode(mut payload: &[u8], expansion: &Expansion, out: &mut [u8]) -> Result<(), Corrupt> {
    let lengths = take_lengths(&mut payload)?;
    let words = out.len().div_ceil(expansion.k);
    let mut table = Table::EMPTY;
    table.fill_single_words(&lengths, expansion);
    // If a word is half of a look-up's maximum, there is almost nothing to gain.
    if words >= WORTH_A_TABLE && expansion.k < 4 {
        table.add_words(&lengths, expansion);
    }
    if words < STREAMS_FROM {
        return Stream::new(payload, out).finish(&table);
    }
    let (sizes, mut payload) =
        payload.split_first_chunk::<{ 4 * (STREAMS - 1) }>().ok_or(Corrupt("truncated stream lengths"))?;
    let segment = words.div_ceil(STREAMS) * expansion.k;
    let mut sizes = sizes.as_chunks::<4>().0.iter();
    let mut streams = Vec::with_capacity(STREAMS);
    for segment in out.chunks_mut(segment) {
        let size = sizes.next().map_or(payload.len(), |size| u32::from_le_bytes(*size) as usize);
        let (bytes, rest) = payload.split_at_checked(size).ok_or(Corrupt("stream beyond the payload"))?;
        payload = rest;
        streams.push(Stream::new(bytes, segment));
    }
    let mut streams: [Stream<'_>; STREAMS] = streams.try_into().map_err(|_| Corrupt("number of streams"))?;
    decode_together(Level::detect(), &mut streams, &table);
    streams.into_iter().try_for_each(|stream| stream.finish(&table))
}

/// One bit stream and the output it fills.
struct Stream<'a> {
    bytes: &'a [u8],
    /// Next byte to read.
    read: usize,
    /// Bits read, the next one lowest. Bits above `held` are zero, or those of the bytes at `read`.
    acc: u64,
    held: u32,
    out: &'a mut [u8],
    written: usize,
}

impl<'a> Stream<'a> {
    fn new(bytes: &'a [u8], out: &'a mut [u8]) -> Self {
        Stream { bytes, read: 0, acc: 0, held: 0, out, written: 0 }
    }

    /// Rounds that need no bounds check, one after the other.
    #[inline(always)]
    fn rounds(&self) -> usize {
        // A refill reads 8 bytes and advances by 7 at most.
        let refills = (self.bytes.len() - self.read).saturating_sub(1) / 7;
        refills.min((self.out.len() - self.written) / ROUND_BYTES)
    }

    /// Decodes the rest of the segment.
    fn finish(mut self, table: &Table) -> Result<(), Corrupt> {
        while self.written < self.out.len() {
            if self.held < MAX_LENGTH {
                self.refill();
            }
            // Zeros follow the end of the stream; the bits of the last symbols must not be among them.
            Corrupt::when(self.held == 0, "bit stream ends early")?;
            let index = self.acc as usize % TABLE;
            let symbols = table.symbols[index].to_le_bytes();
            let used = table.used[index];
            let room = &mut self.out[self.written..];
            match room.first_chunk_mut() {
                Some(eight) => *eight = symbols,
                None => room.iter_mut().zip(symbols).for_each(|(out, symbol)| *out = symbol),
            }
            self.written += usize::from(used >> 8);
            self.acc >>= used & 63;
            self.held = self.held.saturating_sub(u32::from(used & 63));
        }
        Ok(())
    }

    /// Reads whole bytes ahead. Bits above `held` may be there already: they are the same.
    fn refill(&mut self) {
        if let Some(next) = self.bytes[self.read..].first_chunk() {
            self.acc |= u64::from_le_bytes(*next) << self.held;
            self.read += ((63 - self.held) >> 3) as usize;
            self.held |= 56;
        }
        while self.held <= 55
            && let Some(&byte) = self.bytes.get(self.read)
        {
            self.acc |= u64::from(byte) << self.held;
            self.held += 8;
            self.read += 1;
        }
    }
}

multiversion! {
    /// Advances all streams side by side until one of them gets near an end. The look-ups of the streams take turns, so
    /// that the processor has four chains at hand within few instructions.
    fn decode_together(streams: &mut [Stream<'_>; STREAMS], table: &Table) {
        loop {
            // So many rounds need no further check: none reads more than 7 bytes further, or writes more than this.
            let rounds = streams.iter().map(Stream::rounds).min().unwrap_or(0);
            if rounds == 0 {
                return;
            }
            // Local copies stay in registers. The compiler must assume that stores may write to fields.
            let mut acc = streams.each_ref().map(|stream| stream.acc);
            let mut held = streams.each_ref().map(|stream| stream.held);
            let mut read = streams.each_ref().map(|stream| stream.bytes[stream.read..].as_ptr());
            let mut out = streams.each_mut().map(|stream| stream.out[stream.written..].as_mut_ptr());
            let (first_read, first_out) = (read, out);
            for _ in 0..rounds {
                for at in 0..STREAMS {
                    // SAFETY: `rounds` saw 8 bytes from here on.
                    let next = unsafe { read[at].cast::<[u8; 8]>().read() };
                    acc[at] |= u64::from_le_bytes(next) << held[at];
                    // SAFETY: at most 7 bytes, which were just read.
                    read[at] = unsafe { read[at].add(((63 - held[at]) >> 3) as usize) };
                    held[at] |= 56;
                }
                for _ in 0..LOOKUPS {
                    for at in 0..STREAMS {
                        let index = acc[at] as usize % TABLE;
                        let used = table.used[index];
                        // SAFETY: `rounds` saw room for this round, and a look-up advances by 8 bytes at most.
                        unsafe {
                            out[at].cast::<[u8; 8]>().write(table.symbols[index].to_le_bytes());
                            out[at] = out[at].add(usize::from(used >> 8));
                        }
                        acc[at] >>= used & 63;
                        // Of the difference only the low byte counts, which the high byte of `used` does not change.
                        held[at] = held[at].wrapping_sub(u32::from(used));
                    }
                }
                held.iter_mut().for_each(|held| *held &= 63);
            }
            for (at, stream) in streams.iter_mut().enumerate() {
                (stream.acc, stream.held) = (acc[at], held[at]);
                stream.read += read[at] as usize - first_read[at] as usize;
                stream.written += out[at] as usize - first_out[at] as usize;
            }
        }
    }
}
