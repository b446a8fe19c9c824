//! The delta encoder (section 6): levels to bytes, as cyclic differences to the levels of the previous state.
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

use super::super::pack;
use crate::entropy::{Corrupt, ints, symbols, varint};

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
pub(crate) const MOST_LEVELS: usize = 256 - LENGTHS;

const CODINGS: [Coding; 3] = [Coding::Huffman, Coding::RunLength, Coding::Rearranged];

/// Appends the levels, all below `cycle`, as differences to `before` (as many, below `cycle` too), or to 0.
pub(crate) fn encode(levels: &[u16], before: Option<&[u16]>, cycle: usize, coding: Coding, out: &mut Vec<u8>) {
    debug_assert!((1..=coding.most_levels()).contains(&cycle));
    out.push(CODINGS.iter().position(|&other| other == coding).unwrap_or(0) as u8);
    let difference = |now: u16, then: u16| ((usize::from(now) + cycle - usize::from(then)) % cycle) as u8;
    let mut differences = vec![0; levels.len()];
    match before {
        None => differences.iter_mut().zip(levels).for_each(|(d, &now)| *d = now as u8),
        Some(before) if coding == Coding::Rearranged => {
            let mut next = starts(before, cycle);
            for (&now, &then) in levels.iter().zip(before) {
                let place = &mut next[usize::from(then)];
                differences[*place] = difference(now, then);
                *place += 1;
            }
            let starts = starts(before, cycle);
            for range in starts.windows(2).filter(|range| range[0] < range[1]) {
                put_group(&differences[range[0]..range[1]], cycle, coding, out);
            }
            return;
        }
        Some(before) => {
            let both = levels.iter().zip(before);
            differences.iter_mut().zip(both).for_each(|(d, (&now, &then))| *d = difference(now, then));
        }
    }
    if !differences.is_empty() {
        put_group(&differences, cycle, coding, out);
    }
}

/// Takes the levels off the front of `payload`.
pub(crate) fn decode(
    payload: &mut &[u8],
    before: Option<&[u16]>,
    cycle: usize,
    levels: &mut [u16],
) -> Result<(), Corrupt> {
    let coding = *CODINGS.get(usize::from(pack::take_byte(payload)?)).ok_or(Corrupt("coding of levels"))?;
    let sound = before
        .is_none_or(|before| before.len() == levels.len() && before.iter().all(|&level| usize::from(level) < cycle));
    if !(1..=coding.most_levels()).contains(&cycle) || !sound {
        return Err(Corrupt("levels of the previous state"));
    }
    let mut differences = vec![0; levels.len()];
    let sum = |then: u16, d: u8| ((usize::from(then) + usize::from(d)) % cycle) as u16;
    match before {
        Some(before) if coding == Coding::Rearranged => {
            let mut next = starts(before, cycle);
            for range in next.windows(2).filter(|range| range[0] < range[1]) {
                take_group(payload, cycle, coding, &mut differences[range[0]..range[1]])?;
            }
            for (level, &then) in levels.iter_mut().zip(before) {
                let place = &mut next[usize::from(then)];
                *level = sum(then, differences[*place]);
                *place += 1;
            }
            return Ok(());
        }
        _ if differences.is_empty() => {}
        _ => take_group(payload, cycle, coding, &mut differences)?,
    }
    match before {
        None => levels.iter_mut().zip(&differences).for_each(|(level, &d)| *level = d.into()),
        Some(before) => {
            let both = before.iter().zip(&differences);
            levels.iter_mut().zip(both).for_each(|(level, (&then, &d))| *level = sum(then, d));
        }
    }
    Ok(())
}

/// The start of each level's group, and the end of the last.
fn starts(before: &[u16], cycle: usize) -> Vec<usize> {
    let mut starts = vec![0; cycle + 1];
    before.iter().for_each(|&level| starts[usize::from(level) + 1] += 1);
    (0..cycle).for_each(|level| starts[level + 1] += starts[level]);
    starts
}

fn put_group(differences: &[u8], cycle: usize, coding: Coding, out: &mut Vec<u8>) {
    let (mut symbols, mut long) = (Vec::new(), Vec::new());
    if coding == Coding::Huffman {
        symbols.extend_from_slice(differences);
    } else {
        for run in differences.chunk_by(|a, b| a == b) {
            symbols.push(run[0]);
            if SHORT.contains(&run.len()) {
                symbols.push((cycle + run.len() - SHORT.start()) as u8);
            } else if run.len() > 1 {
                symbols.push((cycle + LENGTHS - 1) as u8);
                long.push(run.len() as i32);
            }
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
    if count > differences.len() {
        return Err(Corrupt("more symbols than values"));
    }
    let mut symbols = vec![0; count];
    symbols::decode(varint::take_bytes(payload)?, &mut symbols)?;
    if coding == Coding::Huffman {
        if count != differences.len() || symbols.iter().any(|&symbol| usize::from(symbol) >= cycle) {
            return Err(Corrupt("symbol of a difference"));
        }
        differences.copy_from_slice(&symbols);
        return Ok(());
    }
    let last = cycle + LENGTHS - 1;
    let mut long = vec![0; symbols.iter().filter(|&&symbol| usize::from(symbol) == last).count()];
    if !long.is_empty() {
        ints::decode(varint::take_bytes(payload)?, &mut long)?;
    }
    let (mut long, mut left) = (long.into_iter(), differences);
    let mut symbols = symbols.into_iter().map(usize::from).peekable();
    while let Some(value) = symbols.next() {
        if value >= cycle {
            return Err(Corrupt("length without a value"));
        }
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
