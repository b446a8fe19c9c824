//! Compares an object, decoded from the device, with its file. No file is released before.

use std::io;
use std::sync::Arc;

use crate::codec::TILE_BYTES;
use crate::container::{Order, Patch, ReadAt};
use crate::entropy::scratch::{self, Scratch};
use crate::hash::Xxh3Of128;
use crate::recall::layout::{Segment, Unit};
use crate::recall::{Chain, Layout, decode_unit, order, walk};
use crate::tile::{self, Coding};

use super::error::{StepError, StepResult};
use super::fingerprint::Sampler;
use super::plan::Plan;
use super::skeleton::patch;
use super::workers::Workers;

/// The file as it will be read.
pub(super) struct Decoded {
    /// xxh3-128 of it.
    pub(super) hash: u128,
    /// Its fingerprint.
    pub(super) sample: u64,
    /// Whether it differs from the file as it was written.
    pub(super) lossy: bool,
}

/// The expected result of decoding an object.
pub(super) struct Expected<'a> {
    /// The file, with its tables in order, and where their rows were.
    pub(super) source: &'a (dyn ReadAt + Sync),
    pub(super) rows: &'a Order,
    /// Of the object's tensors.
    pub(super) plans: &'a [Plan],
    pub(super) patches: &'a [Patch],
}

/// Decodes the object at the chain's leaf and compares it with the file. Lossless tensors and the skeleton (but for
/// its patches) must agree byte for byte, lattice tensors within their bound, tensors of one sign with their floor,
/// element by element. The rows of tables must go back to their places.
///
/// # Errors
/// `InvalidData` names the difference; the object must then not be used. The device's errors.
pub(super) fn verify(
    chain: &Chain,
    expected: &Expected,
    workers: &Workers,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> StepResult<Decoded> {
    let layout = Layout::of(chain.leaf());
    let mut hash = Xxh3Of128::new();
    let mut lossy = false;
    let mut sample = Sampler::new(chain.leaf().header().logical_len);
    let mut end = 0;
    // Chunks come in order, each scattered over many segments: the last one is kept.
    let mut chunk: Option<(usize, Arc<Vec<u8>>)> = None;
    let check = |segment: &Segment| -> io::Result<Option<Checked>> {
        match layout.units[segment.unit] {
            Unit::Tile { tensor, tile } => expected.check_tile(chain, segment.range.start, (tensor, tile)).map(Some),
            Unit::Skeleton { .. } => Ok(None),
        }
    };
    let segments = layout.segments.iter().map(|segment| ((segment.range.end - segment.range.start) as usize, segment));
    workers.in_order_of_lengths(
        segments,
        |segment| (segment, check(segment)),
        |(segment, checked)| {
            if cancelled() {
                return Err(StepError::Cancelled);
            }
            let offset = segment.range.start;
            if offset != end {
                return Err(wrong(format!("byte {end} of the file is missing")).into());
            }
            end = segment.range.end;
            let mut take = |decoded: &[u8], differs: bool| {
                hash.update(decoded);
                sample.update(offset, decoded);
                lossy |= differs;
            };
            if let Some(Checked { decoded, differs }) = checked? {
                take(&decoded, differs);
                scratch::give_bytes(decoded);
                return Ok(());
            }
            let bytes = match chunk.take() {
                Some((unit, bytes)) if unit == segment.unit => bytes,
                _ => decode_unit(chain, layout.units[segment.unit])?,
            };
            let len = (segment.range.end - offset) as usize;
            let run =
                bytes.get(segment.at..segment.at + len).ok_or_else(|| wrong("its skeleton is cut short".into()))?;
            take(run, expected.check_skeleton(offset, run)?);
            chunk = Some((segment.unit, bytes));
            Ok(())
        },
    )?;
    if order(chain)? != *expected.rows {
        return Err(wrong("rows of a table are not where they were".into()).into());
    }
    if end != chain.leaf().header().logical_len || expected.source.size() != end {
        return Err(wrong("the end of the file is missing".into()).into());
    }
    Ok(Decoded { hash: hash.digest(), sample: sample.finish(), lossy })
}

fn wrong(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// A tile that was decoded and checked.
struct Checked {
    decoded: Arc<Vec<u8>>,
    /// Whether it differs from the file.
    differs: bool,
}

impl Expected<'_> {
    fn check_tile(&self, chain: &Chain, offset: u64, (tensor, number): (u32, u32)) -> io::Result<Checked> {
        let (at, entry) = (tensor as usize, &chain.leaf().index().tensors[tensor as usize]);
        let decoded = walk::decode(chain, at, number as usize)?;
        let mut original = Scratch::new(decoded.len());
        self.source.read_exact_at(&mut original, offset)?;
        let differs = *original != **decoded;
        if !entry.coding.is_lossy() {
            return match differs {
                true => Err(wrong(format!("tensor {} is not bit-exact", entry.path))),
                false => Ok(Checked { decoded, differs }),
            };
        }
        let error = error_of(chain, self.source, at, number as usize, &original, &decoded)?;
        if error.is_none_or(|error| error > entry.bound) {
            return Err(wrong(format!("tensor {} is off by more than its bound", entry.path)));
        }
        if self.plans[at].one_sign && !tile::is_above_floor(entry.dtype, entry.coding, &original, &decoded) {
            return Err(wrong(format!("tensor {} lost a sign, or an element that is not 0", entry.path)));
        }
        Ok(Checked { decoded, differs })
    }

    /// Returns whether a run of the skeleton differs from the file. It may only where it is patched.
    fn check_skeleton(&self, offset: u64, decoded: &[u8]) -> io::Result<bool> {
        let mut original = vec![0; decoded.len()];
        self.source.read_exact_at(&mut original, offset)?;
        let differs = original != decoded;
        patch(self.patches, offset, &mut original);
        match original == decoded {
            true => Ok(differs),
            false => Err(wrong(format!("bytes at {offset} are not exact"))),
        }
    }
}

/// The largest error of a tile in the terms of its codec; `None` when a condition of the codec does not hold.
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
    match entry.coding {
        Coding::Sized { .. } => {
            let factors = chain.leaf().factors(tensor)?;
            Ok(tile::error(entry.spec(number), original, decoded, None, Some(&factors))?)
        }
        Coding::Moment { second, .. } => {
            let mut written = Scratch::new(original.len());
            let start = tensors[second as usize].extent.start + number as u64 * TILE_BYTES as u64;
            source.read_exact_at(&mut written, start)?;
            let second = walk::decode_again(chain, second as usize, number)?;
            let companion = Some((entry.dtype, &*written, &second));
            let error = tile::error(entry.spec(number), original, decoded, companion, None);
            scratch::give_bytes(second);
            Ok(error?)
        }
        _ => Ok(tile::error(entry.spec(number), original, decoded, None, None)?),
    }
}
