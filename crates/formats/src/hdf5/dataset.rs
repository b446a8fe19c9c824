//! Type, shape and place of a dataset.

use super::super::npy::number;
use super::super::read::{Fail, bytes, u16_at, u32_at, u64_at, uint};
use super::chunks::{self, Index, Part};
use super::header::{DATASPACE, DATATYPE, EXTERNAL, FILTERS, Header, LAYOUT};
use super::source::{NOWHERE, Source};
use codec::Dtype;

/// Most dimensions, as in HDF5.
const MAX_DIMS: usize = 32;

/// Filters that people know by name.
const FILTER_NAMES: [(u16, &str); 4] = [
    (1, "compressed with gzip"),
    (3, "checksummed with fletcher32"),
    (4, "compressed with szip"),
    (32_000, "compressed with lzf"),
];

/// The word for any other filter.
pub(super) const UNNAMED: &str = "filtered";

/// The kind of an object.
pub(super) enum Dataset {
    /// Elements that stepfs knows, where they are.
    Found(Array),
    /// Chunks go through filters; the word for the first filter that has one.
    Filtered(&'static str),
    /// Something else: it is kept as other bytes.
    Other,
}

/// Elements of a dataset.
pub(super) struct Array {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) parts: Vec<Part>,
}

impl Dataset {
    /// Of an object with a layout.
    pub(super) fn of(source: &mut Source, header: &Header) -> Result<Dataset, Fail> {
        if let Some(filters) = header.all(FILTERS).next() {
            return Ok(Dataset::Filtered(filter(&filters.body)));
        }
        if header.has(EXTERNAL) {
            return Ok(Dataset::Other);
        }
        let parts = (header.one(DATASPACE), header.one(DATATYPE), header.one(LAYOUT));
        let (Some(space), Some(kind), Some(layout)) = parts else { return Ok(Dataset::Other) };
        let (Some(shape), Some(dtype)) = (dimensions(space), element(kind)) else { return Ok(Dataset::Other) };
        let unit = dtype.size() as u64;
        let Some(bytes) = bytes(&shape, unit).filter(|bytes| *bytes > 0) else { return Ok(Dataset::Other) };
        let parts = match Layout::read(layout, &shape, unit) {
            Some(Layout::Whole { address, len }) if len == bytes => {
                let place = source.place(address, len);
                place.map(|extent| vec![Part { extent, chunk: None }]).unwrap_or_default()
            }
            Some(Layout::Chunked { chunk, index }) => chunks::read(source, index, &shape, &chunk, unit)?,
            _ => Vec::new(),
        };
        Ok(match parts.is_empty() {
            true => Dataset::Other,
            false => Dataset::Found(Array { dtype, shape, parts }),
        })
    }
}

/// The word for a pipeline of filters. Shuffle has none here, and comes before the compressor.
fn filter(body: &[u8]) -> &'static str {
    let (version, count, mut rest) = match body {
        [1, count, _, _, _, _, _, _, rest @ ..] => (1, *count, rest),
        [2, count, rest @ ..] => (2, *count, rest),
        _ => return UNNAMED,
    };
    for _ in 0..count.min(32) {
        if rest.len() < 8 {
            break;
        }
        let id = u16_at(rest, 0);
        if let Some((_, name)) = FILTER_NAMES.iter().find(|(known, _)| *known == id) {
            return name;
        }
        // The second version leaves out the name of a filter that HDF5 has itself.
        let named = version == 1 || id >= 256;
        let name = if named { usize::from(u16_at(rest, 2)) } else { 0 };
        let values = 4 * usize::from(u16_at(rest, if named { 6 } else { 4 }));
        let (name, values) =
            if version == 1 { (name.next_multiple_of(8), values.next_multiple_of(8)) } else { (name, values) };
        rest = rest.get(if named { 8 } else { 6 } + name + values..).unwrap_or_default();
    }
    UNNAMED
}

fn dimensions(body: &[u8]) -> Option<Vec<u64>> {
    let (rank, at) = match *body {
        [1, rank, _, _, _, _, _, _, ..] => (rank, 8),
        // A scalar, or an array.
        [2, rank, _, 0 | 1, ..] => (rank, 4),
        _ => return None,
    };
    let rank = usize::from(rank);
    let dims = body.get(at..at + 8 * rank).filter(|_| rank <= MAX_DIMS)?;
    Some(dims.chunks_exact(8).map(|dim| u64_at(dim, 0)).collect())
}

/// The type that a message describes, if it is a number in the usual form and little-endian.
fn element(body: &[u8]) -> Option<Dtype> {
    if body.len() < 12 || !(1..=3).contains(&(body[0] >> 4)) {
        return None;
    }
    let (class, bits, size) = (body[0] & 15, &body[1..4], u32_at(body, 4));
    let (offset, precision) = (u16_at(body, 8), u32::from(u16_at(body, 10)));
    if offset != 0 || precision != size.checked_mul(8)? {
        return None;
    }
    match (class, bits) {
        (0, [sign @ (0 | 8), 0, 0]) => number(if *sign == 8 { 'i' } else { 'u' }, size),
        // A leading one that is not written, zeros as padding, and the sign's place.
        (1, [0x20, sign, 0]) if u32::from(*sign) + 1 == precision => {
            let properties = body.get(12..20)?;
            match (size, properties) {
                (2, [10, 5, 0, 10, 15, 0, 0, 0]) => Some(Dtype::F16),
                (2, [7, 8, 0, 7, 127, 0, 0, 0]) => Some(Dtype::Bf16),
                (4, [23, 8, 0, 23, 127, 0, 0, 0]) => Some(Dtype::F32),
                (8, [52, 11, 0, 52, 255, 3, 0, 0]) => Some(Dtype::F64),
                _ => None,
            }
        }
        _ => None,
    }
}

/// How elements lie.
enum Layout {
    Whole { address: u64, len: u64 },
    Chunked { chunk: Vec<u64>, index: Index },
}

impl Layout {
    /// `None` for a dataset in its header, one without bytes, and unknown layouts.
    fn read(body: &[u8], shape: &[u64], unit: u64) -> Option<Layout> {
        match body {
            [3 | 4, 1, rest @ ..] if rest.len() >= 16 => {
                let (address, len) = (u64_at(rest, 0), u64_at(rest, 8));
                (address != NOWHERE).then_some(Layout::Whole { address, len })
            }
            [3, 2, rank, rest @ ..] => {
                let rank = usize::from(*rank);
                let (address, dims) = rest.split_at_checked(8)?;
                let dims = dims.get(..4 * rank)?.chunks_exact(4).map(|dim| u64::from(u32_at(dim, 0))).collect();
                let chunk = chunk(dims, shape, unit)?;
                Some(Layout::Chunked { chunk, index: Index::Tree(u64_at(address, 0)) })
            }
            [4, 2, flags, rank, width @ 1..=8, rest @ ..] => {
                let (rank, width) = (usize::from(*rank), usize::from(*width));
                let (dims, rest) = rest.split_at_checked(width * rank)?;
                let chunk = chunk(dims.chunks_exact(width).map(uint).collect(), shape, unit)?;
                let index = match rest {
                    // With a size and a mask it is filtered.
                    [1, rest @ ..] if rest.len() >= 8 && flags & 2 == 0 => Index::Single(u64_at(rest, 0)),
                    [2, rest @ ..] if rest.len() >= 8 => Index::InARow(u64_at(rest, 0)),
                    [3, _, rest @ ..] if rest.len() >= 8 => Index::Array(u64_at(rest, 0)),
                    _ => return None,
                };
                Some(Layout::Chunked { chunk, index })
            }
            _ => None,
        }
    }
}

/// The shape of a chunk, which stands before the size of an element.
fn chunk(mut dims: Vec<u64>, shape: &[u64], unit: u64) -> Option<Vec<u64>> {
    let last = dims.pop()?;
    (last == unit && dims.len() == shape.len() && !dims.contains(&0)).then_some(dims)
}
