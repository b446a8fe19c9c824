//! The A of a tile, row by row, to bytes and back.

use super::MAX_E;
use crate::entropy::scratch::Scratch;
use crate::entropy::simd::{Level, multiversion};
use crate::entropy::{ints, symbols, varint};
use crate::exception::{put_exceptions, take_exceptions};
use crate::lattice::Exception;
use crate::{Corrupt, Rows, Unfit};

/// Code of a row that equals its parent's.
const UNCHANGED: u8 = 0;

/// `a` in units of 2^e, rounded, halves up; nothing overflows.
#[inline(always)]
fn in_units(a: i32, e: u32) -> i32 {
    // The highest dropped bit decides whether to round up; for e = 0 there is none.
    (a >> e) + (a >> e.saturating_sub(1) & i32::from(e > 0))
}

/// Appends the payload of a tile with any A. It has three parts. First each row's code: unchanged from the parent, or
/// its e, the number of zero bits that its A end in. (A row of zeros gets the largest e of the others.) Then the
/// symbols of the changed rows, (A - P) / 2^e, where P is the parent's A rounded to a multiple of 2^e, halves up. Then
/// the exceptions, whose indices ascend. `parent_a` has the length of `a`, or is `None` for zeros.
pub fn encode_tile(
    a: &[i32],
    parent_a: Option<&[i32]>,
    rows: Rows,
    exceptions: &[Exception],
    out: &mut Vec<u8>,
) -> Result<(), Unfit> {
    Unfit::when(parent_a.is_some_and(|parent| parent.len() != a.len()) || rows.width == 0, "lengths differ")?;
    let level = Level::detect();
    let (codes, changed) = row_codes(level, a, parent_a, rows);
    let mut symbols = Vec::with_capacity(changed);
    let (mut start, mut fits) = (0, true);
    for (length, &code) in rows.lengths(a.len()).zip(&codes) {
        let range = start..start + length;
        start += length;
        if code != UNCHANGED {
            let at = symbols.len();
            match parent_a {
                Some(parent) => symbols.extend_from_slice(&parent[range.clone()]),
                None => symbols.resize(at + length, 0),
            }
            fits &= to_symbols(level, &a[range], u32::from(code) - 1, &mut symbols[at..]);
        }
    }
    Unfit::when(!fits, "too many steps from the parent")?;
    varint::put_bytes(out, |out| symbols::encode(&codes, out));
    varint::put_bytes(out, |out| ints::encode(&symbols, out));
    put_exceptions(exceptions, out);
    Ok(())
}

multiversion! {
    /// The code of each row, and the number of elements in changed rows.
    fn row_codes(a: &[i32], parent_a: Option<&[i32]>, rows: Rows) -> (Vec<u8>, usize) {
        /// A row of zeros, until the largest e of the others is known.
        const ZEROS: u8 = u8::MAX;
        let mut codes = Vec::new();
        let (mut changed, mut largest, mut start) = (0, 0, 0);
        for length in rows.lengths(a.len()) {
            let (a, parent) = (&a[start..][..length], parent_a.map(|parent| &parent[start..][..length]));
            start += length;
            let bits = a.iter().fold(0, |all, a| all | a);
            if parent.map_or(bits == 0, |parent| a.iter().zip(parent).fold(0, |all, (a, p)| all | (a ^ p)) == 0) {
                codes.push(UNCHANGED);
                continue;
            }
            changed += length;
            if bits == 0 {
                codes.push(ZEROS);
            } else {
                let e = bits.trailing_zeros().min(MAX_E) as u8;
                largest = largest.max(e);
                codes.push(e + 1);
            }
        }
        codes.iter_mut().filter(|code| **code == ZEROS).for_each(|code| *code = largest + 1);
        (codes, changed)
    }
}

multiversion! {
    /// Turns the parent's A into the symbols of `a`; false if one does not fit.
    fn to_symbols(a: &[i32], e: u32, symbols: &mut [i32]) -> bool {
        let mut overflow = 0;
        for (symbol, &a) in symbols.iter_mut().zip(a) {
            let (a, p) = (a >> e, in_units(*symbol, e));
            let difference = a.wrapping_sub(p);
            overflow |= (a ^ p) & (a ^ difference);
            *symbol = difference;
        }
        overflow >= 0
    }
}

/// Decodes a payload of [`encode_tile`]. `acc` holds the parent's A (zeros if there is none) and becomes this tile's.
/// Appends the exceptions. After an error `acc` is useless.
pub fn decode_tile_add(
    mut payload: &[u8],
    acc: &mut [i32],
    rows: Rows,
    exceptions_out: &mut Vec<Exception>,
) -> Result<(), Corrupt> {
    Corrupt::when(rows.width == 0, "rows of no elements")?;
    let body = varint::take_bytes(&mut payload)?;
    let mut codes = Scratch::new(rows.lengths(acc.len()).count());
    symbols::decode(body, &mut codes)?;
    Corrupt::when(codes.iter().fold(0, |most, &code| code.max(most)) > MAX_E as u8 + 1, "code of a row")?;
    let coded = || rows.lengths(acc.len()).zip(codes.iter());
    let changed = coded().filter(|&(_, &code)| code != UNCHANGED).map(|(length, _)| length).sum();
    let mut coded = coded();
    let level = Level::detect();
    // The start of the next row, and the rest of the current one.
    let (mut next, mut left, mut e) = (0, 0, 0);
    ints::decode_blocks(varint::take_bytes(&mut payload)?, changed, |_, mut symbols| {
        while !symbols.is_empty() {
            while left == 0 {
                let (length, &code) = coded.next().ok_or(Corrupt("symbols after the last row"))?;
                next += length;
                if code != UNCHANGED {
                    (left, e) = (length, u32::from(code) - 1);
                }
            }
            let (now, rest) = symbols.split_at(left.min(symbols.len()));
            Corrupt::when(!add(level, now, e, &mut acc[next - left..][..now.len()]), "sum beyond 32 bits")?;
            (left, symbols) = (left - now.len(), rest);
        }
        Ok(())
    })?;
    take_exceptions(payload, acc.len(), exceptions_out)
}

multiversion! {
    /// Adds the symbols to the parent's A; false if a result is beyond 32 bits.
    fn add(symbols: &[i32], e: u32, acc: &mut [i32]) -> bool {
        let mut sound = true;
        for (a, &symbol) in acc.iter_mut().zip(symbols) {
            let p = in_units(*a, e);
            let units = p.wrapping_add(symbol);
            let sum = units << e;
            sound &= ((p ^ units) & (symbol ^ units) >= 0) & (sum >> e == units);
            *a = sum;
        }
        sound
    }
}
