//! Reads an object back from the device, and compares it with the bytes of its encoder. Nothing is released before.
//!
//! The encoder has the bytes that each tile decodes to. It compared each element of these bytes with the file: for a
//! quantized tensor with the bound and the floor, for any other bit for bit ([`super::tile_encoder`]). Of these same
//! bytes it keeps the hash. So a tile that decodes to this hash is within its bound.

use std::io;
use std::sync::Arc;

use crate::recall::layout::{Segment, Unit};
use crate::recall::{Chain, Layout, decode_unit, order, walk};
use codec::entropy::scratch;
use codec::hash::Xxh3Of128;
use formats::{Order, Patch, ReadAt};

use super::error::{StepError, StepResult};
use super::fingerprint::Sampler;
use super::skeleton::patch;
use super::workers::Workers;

/// The bytes that reads will return.
pub(super) struct Decoded {
    /// Their xxh3-128.
    pub(super) hash: u128,
    /// Their fingerprint.
    pub(super) sample: u64,
    /// True if the skeleton differs from the file as it was written.
    pub(super) patched: bool,
}

/// What an object must decode to, besides its tiles.
pub(super) struct Expected<'a> {
    /// The file, with its tables in order.
    pub(super) source: &'a (dyn ReadAt + Sync),
    /// The places of its tables' rows.
    pub(super) rows: &'a Order,
    /// Bytes of the skeleton that differ from the file's.
    pub(super) patches: &'a [Patch],
}

/// Decodes the object at the chain's leaf from the device. Checks the hash of each tile, all other bytes against the
/// file with its patches, and that the rows of tables return to their places.
///
/// # Errors
/// [`StepError::Object`] or `InvalidData` names the difference; the object must then not be used. Also the errors of
/// the device.
pub(super) fn verify(
    chain: &Chain,
    expected: &Expected,
    workers: &Workers,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> StepResult<Decoded> {
    let layout = Layout::of(chain.leaf());
    let mut hash = Xxh3Of128::default();
    let mut patched = false;
    let mut sample = Sampler::new(chain.leaf().header().logical_len);
    let mut end = 0;
    // Chunks come in order, each scattered over many segments: the last one is kept.
    let mut chunk: Option<(usize, Arc<Vec<u8>>)> = None;
    let tile = |segment: &Segment| match layout.units[segment.unit] {
        Unit::Tile { tensor, tile } => walk::decode(chain, tensor as usize, tile as usize).map(Some),
        Unit::Skeleton { .. } => Ok(None),
    };
    let segments = layout.segments.iter().map(|segment| ((segment.range.end - segment.range.start) as usize, segment));
    workers.in_order_of_lengths(
        segments,
        |segment| (segment, tile(segment)),
        |(segment, tile)| {
            if cancelled() {
                return Err(StepError::Cancelled);
            }
            let offset = segment.range.start;
            if offset != end {
                return Err(wrong(format!("byte {end} of the file is missing")).into());
            }
            end = segment.range.end;
            if let Some(decoded) = tile? {
                hash.update(&decoded);
                sample.update(offset, &decoded);
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
            patched |= expected.check_skeleton(offset, run)?;
            hash.update(run);
            sample.update(offset, run);
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
    Ok(Decoded { hash: hash.digest(), sample: sample.finish(), patched })
}

fn wrong(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Expected<'_> {
    /// Compares a run of the skeleton with the patched file. True if it differs from the file as it was written.
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
