//! The delta encoder of Inshrinkerator's section 6, and QD-Compressor's, which has Huffman codes alone: levels to bytes,
//! as cyclic differences to the levels of the previous state.
//!
//! d = (level - previous level) mod B, where B is the larger of the two numbers of levels, so that both may change
//! between checkpoints. The differences are grouped by the previous level (*rearranged*); the reader knows that level,
//! so grouping costs nothing. Each group is run-length coded, with a length only after a repeated value, and then
//! Huffman coded. The paper distinguishes values and lengths by their sign; here they are ranges of one alphabet. 0 to
//! B - 1 are values, and the next 14 are lengths 2 to 15. One more means that a longer length is in a list of its own,
//! which keeps the alphabet within a byte.
//!
//! A group has the varint number of symbols, then length and payload of the symbols ([`bytes`]). The modes for blocks
//! and runs are not used, since they would be another system's. If there are long lengths, their length and payload
//! ([`ints`]) follow.

use super::{State, code};
use codec::Corrupt;
use codec::entropy::{ints, symbols, varint};

/// The encoder's stages in use, as figure 12 compares them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// Huffman codes of the differences in the order of the parameters, as in QD-Compressor.
    Huffman,
    /// Huffman codes of their run lengths.
    RunLength,
    /// Huffman codes of the run lengths of each group.
    Rearranged,
}

impl Coding {
    /// Maximum number of levels.
    fn most_levels(self) -> usize {
        if self == Coding::Huffman { 256 } else { MOST_LEVELS }
    }
}

/// Lengths with a symbol of their own.
const SHORT: std::ops::RangeInclusive<usize> = 2..=15;
/// Symbols that are not values.
const LENGTHS: usize = 15;
/// Maximum number of levels if run lengths share their alphabet.
pub(super) const MOST_LEVELS: usize = 256 - LENGTHS;

/// The bit of the first byte for differences to the levels before; its other bits are the coding.
const DIFFERENCES: u8 = 128;

/// Appends the levels, all below `count`, as differences to those of the previous state, if there are as many.
pub(super) fn put(levels: &[u16], count: usize, previous: Option<&State>, coding: Coding, out: &mut Vec<u8>) {
    let most = coding.most_levels();
    debug_assert!((1..=most).contains(&count));
    let before = previous.and_then(|state| state.bins.as_deref()).filter(|before| before.len() == levels.len());
    let before = before.filter(|before| before.iter().all(|&level| usize::from(level) < most));
    let cycle = before.and_then(|before| before.iter().max()).map_or(0, |&level| usize::from(level) + 1).max(count);
    out.extend([coding as u8 | if before.is_some() { DIFFERENCES } else { 0 }, (cycle - 1) as u8]);
    let starts = starts(before, cycle, coding, levels.len());
    let (mut next, mut differences) = (starts.clone(), vec![0; levels.len()]);
    for (i, &now) in levels.iter().enumerate() {
        let then = before.map_or(0, |before| usize::from(before[i]));
        let place = &mut next[if coding == Coding::Rearranged { then } else { 0 }];
        differences[*place] = ((usize::from(now) + cycle - then) % cycle) as u8;
        *place += 1;
    }
    for range in starts.windows(2).filter(|range| range[0] < range[1]) {
        put_group(&differences[range[0]..range[1]], cycle, coding, out);
    }
}

/// Takes `len` levels, all below `count`, off the front of `payload`.
pub(super) fn take(
    payload: &mut &[u8],
    count: usize,
    previous: Option<&State>,
    len: usize,
) -> Result<Vec<u16>, Corrupt> {
    let kind = code::take_byte(payload)?;
    let codings = [Coding::Huffman, Coding::RunLength, Coding::Rearranged];
    let coding = *codings.get(usize::from(kind & !DIFFERENCES)).ok_or(Corrupt("coding of levels"))?;
    let cycle = usize::from(code::take_byte(payload)?) + 1;
    let before = match kind & DIFFERENCES != 0 {
        true => Some(previous.and_then(|state| state.bins.as_deref()).ok_or(Corrupt("no previous bins"))?),
        false => None,
    };
    let is_sound = |before: &[u16]| before.len() == len && before.iter().all(|&level| usize::from(level) < cycle);
    Corrupt::when(cycle > coding.most_levels() || !before.is_none_or(is_sound), "levels of the previous state")?;
    let mut next = starts(before, cycle, coding, len);
    let mut differences = vec![0; len];
    for range in next.windows(2).filter(|range| range[0] < range[1]) {
        take_group(payload, cycle, coding, &mut differences[range[0]..range[1]])?;
    }
    let mut levels = Vec::with_capacity(len);
    for i in 0..len {
        let then = before.map_or(0, |before| usize::from(before[i]));
        let place = &mut next[if coding == Coding::Rearranged { then } else { 0 }];
        levels.push(((then + usize::from(differences[*place])) % cycle) as u16);
        *place += 1;
    }
    Corrupt::when(levels.iter().any(|&level| usize::from(level) >= count), "level beyond the last bin")?;
    Ok(levels)
}

/// The start of each group, and the end of the last. Rearranged differences have a group for each level before.
fn starts(before: Option<&[u16]>, cycle: usize, coding: Coding, len: usize) -> Vec<usize> {
    let Some(before) = before.filter(|_| coding == Coding::Rearranged) else { return vec![0, len] };
    let mut starts = vec![0; cycle + 1];
    before.iter().for_each(|&level| starts[usize::from(level) + 1] += 1);
    (0..cycle).for_each(|level| starts[level + 1] += starts[level]);
    starts
}

fn put_group(differences: &[u8], cycle: usize, coding: Coding, out: &mut Vec<u8>) {
    let (mut symbols, mut long) = (Vec::with_capacity(differences.len()), Vec::new());
    for run in differences.chunk_by(|a, b| coding != Coding::Huffman && a == b) {
        symbols.push(run[0]);
        if SHORT.contains(&run.len()) {
            symbols.push((cycle + run.len() - SHORT.start()) as u8);
        } else if run.len() > 1 {
            symbols.push((cycle + LENGTHS - 1) as u8);
            long.push(run.len() as i32);
        }
    }
    varint::put(symbols.len() as u64, out);
    varint::put_bytes(out, |out| symbols::encode_huffman(&symbols, out));
    if !long.is_empty() {
        varint::put_bytes(out, |out| ints::encode(&long, out));
    }
}

/// Fills `differences` (not empty) with values below `cycle`.
fn take_group(payload: &mut &[u8], cycle: usize, coding: Coding, differences: &mut [u8]) -> Result<(), Corrupt> {
    let count = usize::try_from(varint::take(payload)?).unwrap_or(usize::MAX);
    // No run has more symbols than values.
    Corrupt::when(count > differences.len(), "more symbols than values")?;
    let mut symbols = vec![0; count];
    symbols::decode(varint::take_bytes(payload)?, &mut symbols)?;
    if coding == Coding::Huffman {
        Corrupt::when(symbols.iter().any(|&symbol| usize::from(symbol) >= cycle), "length of a run")?;
    }
    let last = cycle + LENGTHS - 1;
    let mut long = vec![0; symbols.iter().filter(|&&symbol| usize::from(symbol) == last).count()];
    if !long.is_empty() {
        ints::decode(varint::take_bytes(payload)?, &mut long)?;
    }
    let (mut long, mut left) = (long.into_iter(), differences);
    let mut symbols = symbols.into_iter().map(usize::from).peekable();
    while let Some(value) = symbols.next() {
        Corrupt::when(value >= cycle, "length without a value")?;
        let run = match symbols.next_if(|&symbol| symbol >= cycle) {
            None => 1,
            Some(symbol) if symbol < last => symbol - cycle + SHORT.start(),
            Some(symbol) if symbol == last => long.next().and_then(|run| usize::try_from(run).ok()).unwrap_or(0),
            Some(_) => return Err(Corrupt("symbol of a difference")),
        };
        let (now, rest) = std::mem::take(&mut left).split_at_mut_checked(run).ok_or(Corrupt("run beyond the end"))?;
        now.fill(value as u8);
        left = rest;
    }
    if left.is_empty() { Ok(()) } else { Err(Corrupt("missing differences")) }
}
