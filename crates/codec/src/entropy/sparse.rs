//! Zero runs, for streams where nearly all symbols are equal: the positions of the others, and their values.
//!
//! A gap byte below [`SKIP`] is the number of common symbols before the next literal. Byte `SKIP + i` skips `SKIP << i`
//! of them, and no literal follows. After the last literal all symbols are common.
//!
//! Layout: the common symbol, the number of gap bytes, the length of their payload, the payload; the literals' payload.

use super::outside::Outside;
use super::scratch::Scratch;
use super::simd::{Level, multiversion};
use super::{Corrupt, varint};

/// First gap byte that only skips. The 16 skips reach 7.8 Mi symbols at once: a tile's gap takes at most ten bytes.
const SKIP: usize = 240;

/// Appends `symbols`; nearly all of them should be `common`. `nested` encodes the gaps and the literals.
pub(super) fn encode(symbols: &[u8], common: u8, out: &mut Vec<u8>, nested: impl Fn(&[u8], &mut Vec<u8>)) {
    let mut gaps = Vec::new();
    let mut literals = Vec::new();
    let mut next = 0;
    Outside::new(Level::detect(), symbols, common, 1).each(|place| {
        let mut gap = place - next;
        while gap >= SKIP {
            let skip = ((gap / SKIP).ilog2() as usize).min(255 - SKIP);
            gaps.push((SKIP + skip) as u8);
            gap -= SKIP << skip;
        }
        gaps.push(gap as u8);
        literals.push(symbols[place]);
        next = place + 1;
    });
    out.push(common);
    varint::put(gaps.len() as u64, out);
    varint::put_bytes(out, |out| nested(&gaps, out));
    nested(&literals, out);
}

/// Fills `out` from a payload of [`encode`]; `nested` decodes gaps and literals.
pub(super) fn decode(
    mut payload: &[u8],
    out: &mut [u8],
    nested: impl Fn(&[u8], &mut [u8]) -> Result<(), Corrupt>,
) -> Result<(), Corrupt> {
    let (&common, rest) = payload.split_first().ok_or(Corrupt("truncated zero runs"))?;
    payload = rest;
    // Each gap byte covers at least one symbol.
    let gaps = usize::try_from(varint::take(&mut payload)?).unwrap_or(usize::MAX);
    Corrupt::when(gaps > out.len(), "more gaps than symbols")?;
    let body = varint::take_bytes(&mut payload)?;
    let mut gaps = Scratch::new(gaps);
    nested(body, &mut gaps)?;
    let mut literals = Scratch::new(ends(Level::detect(), &gaps));
    nested(payload, &mut literals)?;
    out.fill(common);
    if put_literals(&gaps, &literals, out) { Ok(()) } else { Err(Corrupt("gap beyond the end")) }
}

multiversion! {
    /// The number of gaps that end at a literal.
    fn ends(gaps: &[u8]) -> usize {
        // Counted in bytes, in chunks whose count fits one byte.
        let few = |gaps: &[u8]| gaps.iter().fold(0u8, |ends, &gap| ends + u8::from(gap < SKIP as u8));
        gaps.chunks(255).map(|gaps| usize::from(few(gaps))).sum()
    }
}

/// Writes each literal after its gap; false if that is beyond the end. Not inlined, so that all its state stays in
/// registers.
#[inline(never)]
fn put_literals(gaps: &[u8], literals: &[u8], out: &mut [u8]) -> bool {
    let mut literals = literals.iter();
    let mut at = 0;
    for &gap in gaps {
        let gap = usize::from(gap);
        if gap >= SKIP {
            at += SKIP << (gap - SKIP);
            if at > out.len() {
                return false;
            }
            continue;
        }
        at += gap;
        let (Some(symbol), Some(literal)) = (out.get_mut(at), literals.next()) else {
            return false;
        };
        *symbol = *literal;
        at += 1;
    }
    true
}
