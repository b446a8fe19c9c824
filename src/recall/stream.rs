//! Decodes a whole file from its first byte to its last.

use std::sync::Arc;

use rayon::prelude::*;

use crate::entropy::scratch;
use crate::hash::Xxh3Of128;
use crate::store::Damage;

use super::layout::{Layout, Unit};
use super::{Chain, ReadError, walk};

/// Segments decoded ahead of the current one. They keep every core busy and bound memory to about 32 x 3 tiles, 50 MB.
const BATCH: usize = 32;

/// Decodes a unit.
pub(crate) fn decode_unit(chain: &Chain, unit: Unit) -> Result<Arc<Vec<u8>>, ReadError> {
    match unit {
        Unit::Tile { tensor, tile } => walk::decode(chain, tensor as usize, tile as usize),
        Unit::Skeleton { chunk } => walk::skeleton(chain.leaf(), chunk as usize).map(Arc::new),
    }
}

/// Passes the file's bytes to `sink` in order, with the offset and the unit of each run. If its tables have ids, the
/// rows come in the order of those ([`super::order()`]). Decodes in parallel on the caller's pool.
pub fn stream<E: From<ReadError>>(
    chain: &Chain,
    layout: &Layout,
    mut sink: impl FnMut(u64, Unit, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut chunk: Option<(usize, Arc<Vec<u8>>)> = None;
    for batch in layout.segments.chunks(BATCH) {
        let decoded: Vec<Option<Result<Arc<Vec<u8>>, ReadError>>> = batch
            .par_iter()
            .map(|segment| match layout.units[segment.unit] {
                unit @ Unit::Tile { .. } => Some(decode_unit(chain, unit)),
                Unit::Skeleton { .. } => None,
            })
            .collect();
        for (segment, tile) in batch.iter().zip(decoded) {
            let unit = layout.units[segment.unit];
            let len = (segment.range.end - segment.range.start) as usize;
            match tile {
                Some(bytes) => {
                    let bytes = bytes?;
                    sink(segment.range.start, unit, &bytes)?;
                    scratch::give_bytes(bytes);
                }
                None => {
                    // Chunks come in order, each scattered over many segments: keep the last one.
                    let bytes = match chunk.take() {
                        Some((number, bytes)) if number == segment.unit => bytes,
                        _ => decode_unit(chain, unit)?,
                    };
                    match bytes.get(segment.at..segment.at + len) {
                        Some(run) => sink(segment.range.start, unit, run)?,
                        None => return Err(short(chain).into()),
                    }
                    chunk = Some((segment.unit, bytes));
                }
            }
        }
    }
    Ok(())
}

/// The error for a skeleton that is shorter than the file needs.
pub(super) fn short(chain: &Chain) -> ReadError {
    ReadError::object(chain.leaf().header().id, Damage("its skeleton is cut short"))
}

/// Decodes a file, and checks the hash of all its bytes.
///
/// # Errors
/// It is another hash.
pub fn check_hash(chain: &Chain, expected: u128) -> Result<(), ReadError> {
    let mut hash = Xxh3Of128::new();
    stream(chain, &Layout::of(chain.leaf()), |_, _, bytes| {
        hash.update(bytes);
        Ok::<(), ReadError>(())
    })?;
    let wrong = || ReadError::object(chain.leaf().header().id, Damage("it does not decode to the archived bytes"));
    if hash.digest() == expected { Ok(()) } else { Err(wrong()) }
}
