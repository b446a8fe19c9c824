//! Maps bytes of the file to pieces of an object.

use std::ops::Range;

use crate::store::object::{Object, gaps};
use codec::TILE_BYTES;

/// A unit that decodes as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// A tile of a tensor: one segment.
    Tile {
        /// Index of the tensor.
        tensor: u32,
        /// Number of the tile in it.
        tile: u32,
    },
    /// A chunk of the skeleton: scattered over the gaps between tensors.
    Skeleton {
        /// Number of the chunk.
        chunk: u32,
    },
}

/// A run of bytes of the file that comes from one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Bytes of the file.
    pub range: Range<u64>,
    /// Index into [`Layout::units`].
    pub unit: usize,
    /// Offset of the run in the decoded unit.
    pub at: usize,
}

/// The file as a sequence of segments, without holes.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Segments by ascending range.
    pub segments: Vec<Segment>,
    /// All units.
    pub units: Vec<Unit>,
}

impl Layout {
    /// The layout of an object's file.
    pub fn of(object: &Object) -> Layout {
        let index = object.index();
        let mut segments = Vec::new();
        let mut units = Vec::new();
        for (number, tensor) in index.tensors.iter().enumerate() {
            for tile in 0..tensor.tiles.len() {
                let start = tensor.extent.start + tile as u64 * TILE_BYTES as u64;
                let end = (start + TILE_BYTES as u64).min(tensor.extent.end);
                segments.push(Segment { range: start..end, unit: units.len(), at: 0 });
                units.push(Unit::Tile { tensor: number as u32, tile: tile as u32 });
            }
        }
        let first_chunk = units.len();
        units.extend((0..index.skeleton.len()).map(|chunk| Unit::Skeleton { chunk: chunk as u32 }));
        let mut taken = 0u64;
        for gap in gaps(index.tensors.iter().map(|t| t.extent.clone()), object.header().logical_len) {
            let mut start = gap.start;
            while start < gap.end {
                let at = (taken % TILE_BYTES as u64) as usize;
                let end = gap.end.min(start + (TILE_BYTES - at) as u64);
                let unit = first_chunk + (taken / TILE_BYTES as u64) as usize;
                segments.push(Segment { range: start..end, unit, at });
                taken += end - start;
                start = end;
            }
        }
        segments.sort_by_key(|segment| segment.range.start);
        Layout { segments, units }
    }

    /// Indices of the segments that hold `range`.
    pub fn covering(&self, range: Range<u64>) -> Range<usize> {
        let first = self.segments.partition_point(|segment| segment.range.end <= range.start);
        let last = self.segments.partition_point(|segment| segment.range.start < range.end);
        first..last.max(first)
    }
}
