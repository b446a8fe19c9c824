//! Compares what was written, decoded from the device, with the file it stands for. Nothing is released before.

use std::fs::File;
use std::io;

use xxhash_rust::xxh3::Xxh3;

use crate::codec::lattice;
use crate::container::{Patch, ReadAt};
use crate::recall::layout::Unit;
use crate::recall::{Chain, Layout, stream};

use super::encode::patch;
use super::samples::Sampler;

/// Hashes of a file as written and as it will be read, xxh3-128.
pub(super) struct Hashes {
    pub(super) source: u128,
    pub(super) decoded: u128,
    /// Of samples of what will be read.
    pub(super) sample: u32,
}

/// Decodes the object at the chain's leaf and compares it with `source`: lossless tensors and skeleton byte for byte
/// (but for the patches), lattice tensors against their bound, element by element.
///
/// # Errors
/// `InvalidData` says what differs; the object must then not be used. What the device reports.
pub(super) fn verify(
    chain: &Chain,
    source: &File,
    patches: &[Patch],
    cancelled: &(dyn Fn() -> bool + Sync),
) -> io::Result<Hashes> {
    let layout = Layout::of(chain.leaf());
    let tensors = &chain.leaf().index().tensors;
    let (mut source_hash, mut decoded_hash) = (Xxh3::new(), Xxh3::new());
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
        source_hash.update(&original);
        decoded_hash.update(decoded);
        sample.update(offset, decoded);
        match unit {
            Unit::Tile { tensor, .. } if tensors[tensor as usize].coding.step().is_some() => {
                let entry = &tensors[tensor as usize];
                if lattice::largest_error(entry.dtype, &original, decoded).is_none_or(|error| error > entry.bound) {
                    return Err(wrong(format!("tensor {} is off by more than its bound", entry.path)));
                }
            }
            Unit::Tile { tensor, .. } if original != decoded => {
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
    if expected != chain.leaf().header().logical_len || source.size() != expected {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the end of the file is missing"));
    }
    Ok(Hashes { source: source_hash.digest128(), decoded: decoded_hash.digest128(), sample: sample.finish() })
}
