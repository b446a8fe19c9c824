//! Elements kept exactly beside a quantized tile, since no symbol brings them within the bound.

use super::float::{Float, for_float};
use super::{Corrupt, Dtype};
use crate::entropy::varint;

/// An element kept exactly, because no A brings R within the bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exception {
    /// Index of the element in its tile.
    pub index: u32,
    /// Its bits, in the low bits of `raw`.
    pub raw: u64,
}

/// Writes the exact bits of the exceptions into a reconstructed tile.
pub fn apply_exceptions(dtype: Dtype, exceptions: &[Exception], out: &mut [u8]) -> Result<(), Corrupt> {
    fn apply<F: Float>(exceptions: &[Exception], out: &mut [F::Bytes]) -> Result<(), Corrupt> {
        for exception in exceptions {
            let element = out.get_mut(exception.index as usize).ok_or(Corrupt("exception beyond the tile"))?;
            *element = F::from_raw(exception.raw).ok_or(Corrupt("exception wider than its element"))?;
        }
        Ok(())
    }
    for_float!(
        dtype, F => apply::<F>(exceptions, F::elements_mut(out)), else Err(Corrupt("element type of the lattice"))
    )
}

/// Appends the exceptions, whose indices ascend. First their count; if any, their width in bytes (2, 4 or 8); then for
/// each the distance to the last index and the bits.
pub(super) fn put_exceptions(exceptions: &[Exception], out: &mut Vec<u8>) {
    varint::put(exceptions.len() as u64, out);
    let Some(widest) = exceptions.iter().map(|e| e.raw).max() else {
        return;
    };
    let width = match widest {
        0..=0xffff => 2,
        0x1_0000..=0xffff_ffff => 4,
        _ => 8,
    };
    out.push(width);
    let mut next = 0;
    for exception in exceptions {
        varint::put(u64::from(exception.index).wrapping_sub(next), out);
        out.extend_from_slice(&exception.raw.to_le_bytes()[..width as usize]);
        next = u64::from(exception.index) + 1;
    }
}

/// Parses the output of [`put_exceptions`], which is all of `payload`, for a tile of `elements`.
pub(super) fn take_exceptions(mut payload: &[u8], elements: usize, out: &mut Vec<Exception>) -> Result<(), Corrupt> {
    let count = varint::take(&mut payload)?;
    if count > 0 {
        let (&width, rest) = payload.split_first().ok_or(Corrupt("truncated exceptions"))?;
        Corrupt::when(!matches!(width, 2 | 4 | 8), "width of exceptions")?;
        payload = rest;
        let mut next = 0u64;
        // Each exception takes bytes of the payload, so a false count ends with it.
        for _ in 0..count {
            let index = next.checked_add(varint::take(&mut payload)?).filter(|&index| index < elements as u64);
            let index = index.ok_or(Corrupt("exception beyond the tile"))?;
            let (bits, rest) = payload.split_at_checked(width.into()).ok_or(Corrupt("truncated exceptions"))?;
            payload = rest;
            let mut raw = [0; 8];
            raw[..bits.len()].copy_from_slice(bits);
            out.push(Exception { index: index as u32, raw: u64::from_le_bytes(raw) });
            next = index + 1;
        }
    }
    if payload.is_empty() { Ok(()) } else { Err(Corrupt("bytes after the exceptions")) }
}
