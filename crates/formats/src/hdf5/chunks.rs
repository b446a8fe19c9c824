//! Where the chunks of a dataset are. Chunks that go beyond the dataset's end are left out: a part of such a chunk is
//! padding.

use std::ops::Range;

use super::super::read::{Fail, bad, bytes, refuse_if, u32_at, u64_at};
use super::source::Source;

/// Most chunks of a dataset.
const MAX_CHUNKS: u64 = 1 << 20;

/// The cost of a chunk: about the memory of a tensor.
const CHUNK: u64 = 512;

/// A run of elements.
pub(super) struct Part {
    /// Bytes of the whole file.
    pub(super) extent: Range<u64>,
    /// Of a chunk: where it begins, in elements by dimension, and how many it has of each.
    pub(super) chunk: Option<(Vec<u64>, Vec<u64>)>,
}

/// An index of chunks.
pub(super) enum Index {
    /// A B-tree of the first version, by the address of its root.
    Tree(u64),
    /// There is one chunk.
    Single(u64),
    /// All chunks one behind the other.
    InARow(u64),
    /// Addresses in an array, by its header's address.
    Array(u64),
}

const DAMAGED: &str = "HDF5: an index of chunks is damaged";

/// The dataset and its chunks.
struct Grid<'a> {
    shape: &'a [u64],
    chunk: &'a [u64],
    /// Bytes of a chunk.
    len: u64,
}

/// The whole chunks of a dataset, by ascending number.
pub(super) fn read(
    source: &mut Source,
    index: Index,
    shape: &[u64],
    chunk: &[u64],
    unit: u64,
) -> Result<Vec<Part>, Fail> {
    let counts = shape.iter().zip(chunk).map(|(dim, chunk)| dim.div_ceil(*chunk));
    let count = counts.clone().try_fold(1u64, u64::checked_mul).filter(|count| *count <= MAX_CHUNKS);
    let (Some(count), Some(len)) = (count, bytes(chunk, unit)) else { return Ok(Vec::new()) };
    let grid = Grid { shape, chunk, len };
    let counts: Vec<u64> = counts.collect();
    let mut parts = Vec::new();
    let found = match index {
        Index::Tree(root) => {
            grid.tree(source, root, None, &mut parts)?;
            return Ok(parts);
        }
        Index::Single(address) if count == 1 => vec![address],
        Index::InARow(address) => {
            source.spend(8 * count)?;
            let place = |number: u64| number.checked_mul(len).and_then(|at| address.checked_add(at));
            (0..count).map_while(place).collect()
        }
        Index::Array(address) => array(source, address, count)?,
        Index::Single(_) => Vec::new(),
    };
    for (number, address) in found.into_iter().enumerate() {
        let mut rest = number as u64;
        let mut offsets = vec![0; shape.len()];
        for (at, count) in counts.iter().enumerate().rev() {
            offsets[at] = rest % count * chunk[at];
            rest /= count;
        }
        grid.add(source, address, offsets, &mut parts)?;
    }
    Ok(parts)
}

impl Grid<'_> {
    /// Adds a chunk if it is whole and in the file.
    fn add(&self, source: &mut Source, address: u64, offsets: Vec<u64>, parts: &mut Vec<Part>) -> Result<(), Fail> {
        let whole = (offsets.iter().zip(self.chunk).zip(self.shape))
            .all(|((offset, chunk), dim)| offset.checked_add(*chunk).is_some_and(|end| end <= *dim));
        let Some(extent) = source.place(address, self.len).filter(|_| whole) else { return Ok(()) };
        source.spend(CHUNK)?;
        let chunk = (self.chunk != self.shape).then(|| (offsets, self.chunk.to_vec()));
        parts.push(Part { extent, chunk });
        Ok(())
    }

    /// A node of the tree of chunks.
    fn tree(&self, source: &mut Source, address: u64, level: Option<u8>, parts: &mut Vec<Part>) -> Result<(), Fail> {
        if level.is_none() && source.place(address, 0).is_none() {
            // No chunk was ever written.
            return Ok(());
        }
        let rank = self.shape.len();
        // The offset has one dimension more, within an element.
        let key = 8 + 8 * (rank + 1);
        let (own, entries) = source.node(address, 1, level, key)?;
        for entry in entries.chunks_exact(key + 8) {
            let child = u64_at(entry, key);
            if own > 0 {
                self.tree(source, child, Some(own - 1), parts)?;
                continue;
            }
            let offsets: Vec<u64> = entry[8..key].chunks_exact(8).map(|offset| u64_at(offset, 0)).collect();
            let aligned = offsets[..rank].iter().zip(self.chunk).all(|(offset, chunk)| offset % chunk == 0);
            if u64::from(u32_at(entry, 0)) != self.len || u32_at(entry, 4) != 0 || offsets[rank] != 0 || !aligned {
                return bad(DAMAGED);
            }
            self.add(source, child, offsets[..rank].to_vec(), parts)?;
        }
        Ok(())
    }
}

/// The addresses in a fixed array; none if it is so long that it has pages.
fn array(source: &mut Source, address: u64, count: u64) -> Result<Vec<u64>, Fail> {
    if source.place(address, 0).is_none() {
        return Ok(Vec::new());
    }
    let head = source.read_checked(address, 28)?;
    let [b'F', b'A', b'H', b'D', 0, 0, 8, bits, ..] = *head else { return bad(DAMAGED) };
    let (entries, block) = (u64_at(&head, 8), u64_at(&head, 16));
    if entries != count || bits > 63 || entries > 1 << bits || source.place(block, 0).is_none() {
        return Ok(Vec::new());
    }
    let body = source.read_checked(block, 14 + 8 * count + 4)?;
    refuse_if(!body.starts_with(b"FADB\0\0") || u64_at(&body, 6) != address, DAMAGED)?;
    Ok(body[14..].chunks_exact(8).map(|address| u64_at(address, 0)).collect())
}
