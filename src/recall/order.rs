//! The original order of the rows in a file's tables. An object has the rows in the order of their ids. The ids are in
//! its skeleton, so the skeleton is parsed as a container.

use std::io;
use std::ops::Range;

use crate::store::Damage;
use crate::store::object::gaps;
use codec::TILE_BYTES;
use formats::{Order, ReadAt, describe};

use super::{Chain, ReadError, walk};

/// Maximum number of skeleton chunks to read: half a gigabyte, more than the ids of all rows that a container may have.
const MAX_CHUNKS: usize = (512 << 20) / TILE_BYTES;

/// The order of the rows in the file of the chain's leaf. Blocks on the device.
///
/// # Errors
/// [`ReadError`] if the skeleton is damaged, or differs from the archived one.
pub fn order(chain: &Chain) -> Result<Order, ReadError> {
    let leaf = chain.leaf();
    let index = leaf.index();
    if !leaf.header().ordered {
        return Ok(Order::default());
    }
    let wrong = |what| ReadError::object(leaf.header().id, Damage(what));
    if index.skeleton.len() > MAX_CHUNKS {
        return Err(wrong("its skeleton is larger than ids can be"));
    }
    let mut bytes = Vec::new();
    for chunk in 0..index.skeleton.len() {
        bytes.extend(walk::skeleton(leaf, chunk)?);
    }
    let len = leaf.header().logical_len;
    let (mut places, mut at) = (Vec::new(), 0);
    for gap in gaps(index.tensors.iter().map(|t| t.extent.clone()), len) {
        let next = at + (gap.end - gap.start) as usize;
        places.push((gap, at));
        at = next;
    }
    if at != bytes.len() {
        return Err(wrong("its skeleton is cut short"));
    }
    let skeleton = Skeleton { places, bytes, len };
    let description = describe(&skeleton).map_err(|error| ReadError::object(leaf.header().id, error))?;
    match description.tables.is_empty() {
        false => Ok(Order::of(&description)),
        true => Err(wrong("the order of its rows is lost")),
    }
}

/// A file of which only the bytes outside of tensors are known; the others read as 0.
struct Skeleton {
    /// Ascending ranges of the file, and the offset of their bytes.
    places: Vec<(Range<u64>, usize)>,
    bytes: Vec<u8>,
    len: u64,
}

impl ReadAt for Skeleton {
    fn size(&self) -> u64 {
        self.len
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= self.len);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.fill(0);
        let first = self.places.partition_point(|(range, _)| range.end <= offset);
        for (range, at) in self.places[first..].iter().take_while(|(range, _)| range.start < end) {
            let (from, to) = (range.start.max(offset), range.end.min(end));
            let known = at + (from - range.start) as usize..at + (to - range.start) as usize;
            buf[(from - offset) as usize..(to - offset) as usize].copy_from_slice(&self.bytes[known]);
        }
        Ok(())
    }
}
