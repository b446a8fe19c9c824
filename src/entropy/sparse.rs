//! Zero runs, for streams where nearly every symbol is the same: where the others are, and what they are.
//!
//! A gap byte below [`SKIP`] says how many of the common symbol come before the next literal. From [`SKIP`] on,
//! byte `SKIP + i` skips `SKIP << i` of them and no literal follows. Behind the last literal all are common.
//!
//! Layout: the common symbol, the number of gap bytes, the length of their payload, the payload; the literals' payload.

use super::scratch::Scratch;
use super::{Corrupt, bytes, varint};

/// First gap byte that skips only. The 16 skips reach 7.8 Mi symbols at once: a tile's gap takes ten bytes at most.
const SKIP: usize = 240;

/// Appends `symbols`, of which `common` should be nearly all.
pub(super) fn encode(symbols: &[u8], common: u8, out: &mut Vec<u8>) {
    let mut gaps = Vec::new();
    let mut literals = Vec::new();
    let mut gap = 0;
    for chunk in symbols.chunks(64) {
        if chunk.iter().fold(true, |all, &symbol| all & (symbol == common)) {
            gap += chunk.len();
            continue;
        }
        for &symbol in chunk {
            if symbol == common {
                gap += 1;
                continue;
            }
            while gap >= SKIP {
                let skip = ((gap / SKIP).ilog2() as usize).min(255 - SKIP);
                gaps.push((SKIP + skip) as u8);
                gap -= SKIP << skip;
            }
            gaps.push(gap as u8);
            literals.push(symbol);
            gap = 0;
        }
    }
    out.push(common);
    varint::put(gaps.len() as u64, out);
    varint::put_bytes(out, |out| bytes::encode_within(&gaps, bytes::Modes::WITHIN_SPARSE, out));
    bytes::encode_within(&literals, bytes::Modes::WITHIN_SPARSE, out);
}

/// Fills `out` from a payload of [`encode`].
pub(super) fn decode(mut payload: &[u8], out: &mut [u8]) -> Result<(), Corrupt> {
    let (&common, rest) = payload.split_first().ok_or(Corrupt("truncated zero runs"))?;
    payload = rest;
    // Each gap byte covers at least one symbol.
    let gaps = usize::try_from(varint::take(&mut payload)?).unwrap_or(usize::MAX);
    if gaps > out.len() {
        return Err(Corrupt("more gaps than symbols"));
    }
    let body = varint::take_bytes(&mut payload)?;
    let mut gaps = Scratch::new(gaps);
    bytes::decode_within(body, bytes::Modes::WITHIN_SPARSE, &mut gaps)?;
    let mut literals = Scratch::new(gaps.iter().filter(|&&gap| (gap as usize) < SKIP).count());
    bytes::decode_within(payload, bytes::Modes::WITHIN_SPARSE, &mut literals)?;
    out.fill(common);
    let mut literals = literals.iter();
    let mut at = 0;
    for &gap in gaps.iter() {
        let gap = usize::from(gap);
        if gap >= SKIP {
            at += SKIP << (gap - SKIP);
        } else {
            at += gap;
            let (Some(symbol), Some(literal)) = (out.get_mut(at), literals.next()) else {
                return Err(Corrupt("gap beyond the end"));
            };
            *symbol = *literal;
            at += 1;
        }
        if at > out.len() {
            return Err(Corrupt("gap beyond the end"));
        }
    }
    Ok(())
}
