//! Compares what was written, decoded from the device, with the file it stands for. Nothing is released before.

use std::io;

use crate::codec::log::Grid;
use crate::codec::{TILE_BYTES, lattice, log, moment};
use crate::container::{Order, Patch, ReadAt};
use crate::entropy::scratch::{self, Scratch};
use crate::hash::Xxh3Of128;
use crate::recall::layout::Unit;
use crate::recall::{Chain, Layout, order, stream, tile};
use crate::store::object::Coding;

use super::payload::is_above_floor;
use super::plan::Plan;
use super::samples::Sampler;
use super::skeleton::patch;

/// What a file will be read as.
pub(super) struct Decoded {
    /// xxh3-128 of it.
    pub(super) hash: u128,
    /// Its fingerprint.
    pub(super) sample: u64,
    /// Whether it differs from the file as it was written.
    pub(super) lossy: bool,
}

/// Decodes the object at the chain's leaf and compares it with `source`: lossless tensors and skeleton byte for byte
/// (but for the patches), lattice tensors against their bound and tensors of one sign against their floor, element by
/// element; and that the rows of tables go back to where they were. `plans` are of the object's tensors.
///
/// # Errors
/// `InvalidData` says what differs; the object must then not be used. What the device reports.
pub(super) fn verify(
    chain: &Chain,
    (source, rows): (&(dyn ReadAt + Sync), &Order),
    plans: &[Plan],
    patches: &[Patch],
    cancelled: &(dyn Fn() -> bool + Sync),
) -> io::Result<Decoded> {
    let layout = Layout::of(chain.leaf());
    let tensors = &chain.leaf().index().tensors;
    let mut hash = Xxh3Of128::new();
    let mut lossy = false;
    let mut sample = Sampler::new(chain.leaf().header().logical_len);
    let mut original = Vec::new();
    let mut expected = 0;
    stream(chain, &layout, |offset, unit, decoded| -> io::Result<()> {
        if cancelled() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        if offset != expected {
            return Err(wrong(format!("byte {expected} of the file is missing")));
        }
        expected = offset + decoded.len() as u64;
        original.resize(decoded.len(), 0);
        source.read_exact_at(&mut original, offset)?;
        hash.update(decoded);
        sample.update(offset, decoded);
        let differs = original != decoded;
        lossy |= differs;
        match unit {
            Unit::Tile { tensor, tile } if tensors[tensor as usize].coding.is_lossy() => {
                let entry = &tensors[tensor as usize];
                let error = error_of(chain, source, tensor as usize, tile as usize, &original, decoded)?;
                if error.is_none_or(|error| error > entry.bound) {
                    return Err(wrong(format!("tensor {} is off by more than its bound", entry.path)));
                }
                let one_sign = plans[tensor as usize].one_sign;
                if one_sign && !is_above_floor(entry.dtype, entry.coding, &original, decoded) {
                    return Err(wrong(format!("tensor {} lost a sign, or an element that is not 0", entry.path)));
                }
            }
            Unit::Tile { tensor, .. } if differs => {
                return Err(wrong(format!("tensor {} is not bit-exact", tensors[tensor as usize].path)));
            }
            Unit::Tile { .. } => {}
            Unit::Skeleton { .. } => {
                patch(patches, offset, &mut original);
                if original != decoded {
                    return Err(wrong(format!("bytes at {offset} are not exact")));
                }
            }
        }
        Ok(())
    })?;
    if order(chain)? != *rows {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "rows of a table are not where they were"));
    }
    if expected != chain.leaf().header().logical_len || source.size() != expected {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the end of the file is missing"));
    }
    Ok(Decoded { hash: hash.digest(), sample: sample.finish(), lossy })
}

/// The largest error of a tile in the terms of its codec; `None` when what must hold of it does not.
fn error_of(
    chain: &Chain,
    source: &(dyn ReadAt + Sync),
    tensor: usize,
    number: usize,
    original: &[u8],
    decoded: &[u8],
) -> io::Result<Option<f64>> {
    let tensors = &chain.leaf().index().tensors;
    let entry = &tensors[tensor];
    Ok(match entry.coding {
        Coding::Log { .. } | Coding::LogKey { .. } => log::largest_error(entry.dtype, original, decoded),
        Coding::Sized { step, rule } => {
            let factors = chain.leaf().factors(tensor)?;
            let grid = Grid { factors: &factors, first: entry.first_element(number) };
            let sizes = log::prediction(entry.dtype, grid, original.len() / entry.dtype.size())?;
            moment::largest_error((rule, entry.dtype), original, &sizes, decoded, &sizes, step)
        }
        Coding::Moment { second, step, rule } => {
            let mut written = Scratch::new(original.len());
            let start = tensors[second as usize].extent.start + number as u64 * TILE_BYTES as u64;
            source.read_exact_at(&mut written, start)?;
            let second = tile::decode_again(chain, second as usize, number)?;
            let error = moment::largest_error((rule, entry.dtype), original, &written, decoded, &second, step);
            scratch::give_bytes(second);
            error
        }
        _ => lattice::largest_error(entry.dtype, original, decoded),
    })
}
