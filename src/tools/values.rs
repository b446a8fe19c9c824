//! Tensors as numbers: how large they are, and how far apart.

use std::io;
use std::ops::Range;

use codec::entropy::simd::{Level, multiversion};
use codec::{Dtype, cast};
use formats::ReadAt;

/// Bytes read at once of either file: whole elements of every type. Those of two files fit a core's second-level cache.
const PIECE: u64 = 256 << 10;

/// Elements of either tensor that are widened and compared at once, in the first-level cache.
pub(super) const CHUNK: usize = 512;

/// Sums that run side by side, as many as the widest vector of a processor has numbers. Another number gives other last bits.
const LANES: usize = 8;

/// Root mean square and largest of many numbers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Size {
    squares: f64,
    count: u64,
    /// The largest magnitude.
    pub(super) max: f64,
}

impl Size {
    /// Of both together.
    pub(super) fn merge(&mut self, other: &Size) {
        self.squares += other.squares;
        self.count += other.count;
        self.max = self.max.max(other.max);
    }

    /// Root mean square; of nothing, 0.
    pub(super) fn rms(&self) -> f64 {
        if self.count == 0 { 0.0 } else { (self.squares / self.count as f64).sqrt() }
    }
}

/// A tensor's bytes in a file.
pub(super) struct Place<'a> {
    pub(super) file: &'a dyn ReadAt,
    pub(super) extent: Range<u64>,
}

/// The size of a tensor's values, and of their differences to another tensor's. Pairs with a number that is not finite
/// have no size. If both tensors have the same bits in one there is no difference, else an infinite one.
pub(super) fn sizes(dtype: Dtype, a: &Place, b: &Place) -> io::Result<(Size, Size)> {
    let mut change = change(dtype, a, b, &|_| ()).map_err(|(_, error)| error)?;
    if change.broken > 0 {
        change.difference.merge(&Size { squares: f64::INFINITY, count: change.broken, max: f64::INFINITY });
    }
    Ok((change.before, change.difference))
}

/// How one tensor differs from another of its type and shape.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Change {
    /// Elements with other bits.
    pub(super) changed: u64,
    /// Elements of either that are not finite. Pairs with one have no size.
    pub(super) not_finite: [u64; 2],
    /// Pairs of elements with other bits, of which one is not finite.
    broken: u64,
    /// The size of the first tensor, of the second, and of their difference.
    pub(super) before: Size,
    after: Size,
    pub(super) difference: Size,
    product: f64,
}

impl Change {
    /// The cosine of the angle between both; not a number if one is 0.
    pub(super) fn cosine(&self) -> f64 {
        (self.product / (self.before.squares * self.after.squares).sqrt()).clamp(-1.0, 1.0)
    }

    /// Of both parts together. The order of parts decides the last bits of a sum.
    pub(super) fn merge(&mut self, other: &Change) {
        self.changed += other.changed;
        self.not_finite = [0, 1].map(|of| self.not_finite[of] + other.not_finite[of]);
        self.broken += other.broken;
        self.before.merge(&other.before);
        self.after.merge(&other.after);
        self.difference.merge(&other.difference);
        self.product += other.product;
    }

    /// From some elements to others. Those of types of which nothing is quantized have no size.
    fn of(dtype: Dtype, left: &[u8], right: &[u8]) -> Change {
        let size = dtype.size();
        if !dtype.is_lattice_float() {
            let by_size = [changed::<1>, changed::<2>, changed::<4>, changed::<8>, changed::<16>];
            return Change { changed: by_size[size.ilog2() as usize](left, right), ..Change::default() };
        }
        let mut change = Change::default();
        let (level, mut sums, mut count) = (Level::detect(), Sums::default(), 0);
        let mut values = [[[0.0; LANES]; CHUNK / LANES]; 2];
        for bytes in left.chunks(CHUNK * size).zip(right.chunks(CHUNK * size)).map(<[&[u8]; 2]>::from) {
            let len = bytes[0].len() / size;
            for (bytes, values) in bytes.iter().zip(&mut values) {
                let (values, rest) = values.as_flattened_mut().split_at_mut(len);
                cast::widen(dtype, bytes, values);
                // It adds nothing.
                rest.fill(0.0);
            }
            let [x, y] = &values;
            let left_out = add(level, x, y, &mut sums);
            count += len as u64 - left_out;
            if left_out > 0 {
                let elements = bytes.map(|bytes| bytes.chunks_exact(size));
                change.count_not_finite(elements, x.as_flattened(), y.as_flattened());
            }
        }
        let of = |at: usize| Size {
            squares: sums.squares[at].iter().sum(),
            count,
            max: sums.largest[at].iter().copied().fold(0.0, f64::max),
        };
        change.changed = sums.changed.iter().sum::<u64>() + change.broken;
        Change { before: of(0), after: of(1), difference: of(2), product: sums.products.iter().sum(), ..change }
    }

    fn count_not_finite(&mut self, [left, right]: [std::slice::ChunksExact<u8>; 2], x: &[f64], y: &[f64]) {
        for ((left, right), (x, y)) in left.zip(right).zip(x.iter().zip(y)) {
            let not_finite = [x, y].map(|value| u64::from(!value.is_finite()));
            self.not_finite = [0, 1].map(|of| self.not_finite[of] + not_finite[of]);
            self.broken += u64::from(not_finite != [0, 0] && left != right);
        }
    }
}

/// Elements with other bits.
fn changed<const N: usize>(left: &[u8], right: &[u8]) -> u64 {
    let pairs = left.as_chunks::<N>().0.iter().zip(right.as_chunks::<N>().0);
    pairs.filter(|(x, y)| x != y).count() as u64
}

/// Sums over pairs of elements, each in [`LANES`] parts.
#[derive(Clone, Copy, Default)]
struct Sums {
    /// Of the first elements, of the second, and of their differences.
    squares: [[f64; LANES]; 3],
    largest: [[f64; LANES]; 3],
    products: [f64; LANES],
    changed: [u64; LANES],
}

multiversion! {
    /// Adds pairs of finite elements. Returns the number of other pairs.
    fn add(left: &[[f64; LANES]], right: &[[f64; LANES]], sums: &mut Sums) -> u64 {
        let (mut now, mut left_out) = (*sums, [0; LANES]);
        for (left, right) in left.iter().zip(right) {
            for lane in 0..LANES {
                let (x, y) = (left[lane], right[lane]);
                let is_finite = x.is_finite() & y.is_finite();
                let (x, y) = if is_finite { (x, y) } else { (0.0, 0.0) };
                for (at, value) in [x, y, y - x].into_iter().enumerate() {
                    now.squares[at][lane] += value * value;
                    let magnitude = value.abs();
                    let largest = &mut now.largest[at][lane];
                    *largest = if magnitude > *largest { magnitude } else { *largest };
                }
                now.products[lane] += x * y;
                now.changed[lane] += u64::from(x.to_bits() != y.to_bits());
                left_out[lane] += u64::from(!is_finite);
            }
        }
        *sums = now;
        left_out.iter().sum()
    }
}

/// How a tensor differs from another one. Calls `read` with the bytes of each after each piece of both.
///
/// # Errors
/// A file cannot be read: 0 for `a`, 1 for `b`, with the reason.
pub(super) fn change(dtype: Dtype, a: &Place, b: &Place, read: &dyn Fn(u64)) -> Result<Change, (usize, io::Error)> {
    let (mut change, mut bytes) = (Change::default(), [Vec::new(), Vec::new()]);
    let len = a.extent.end - a.extent.start;
    for at in (0..len).step_by(PIECE as usize) {
        // Whole elements.
        let count = PIECE.min(len - at);
        for (number, (bytes, of)) in bytes.iter_mut().zip([a, b]).enumerate() {
            bytes.resize(count as usize, 0);
            of.file.read_exact_at(bytes, of.extent.start + at).map_err(|error| (number, error))?;
        }
        change.merge(&Change::of(dtype, &bytes[0], &bytes[1]));
        read(count);
    }
    Ok(change)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_of_finite_values_and_of_what_became_of_them() {
        let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let sizes = |a: &[f32], b: &[f32]| {
            let (a, b) = (bytes(a), bytes(b));
            let extent = 0..a.len() as u64;
            let place = |file| Place { file, extent: extent.clone() };
            super::sizes(Dtype::F32, &place(&a.as_slice()), &place(&b.as_slice())).unwrap()
        };
        let (value, difference) = sizes(&[3.0, -4.0, f32::NAN], &[3.0, -2.0, f32::NAN]);
        assert_eq!((value.rms(), value.max), (12.5f64.sqrt(), 4.0));
        assert_eq!((difference.rms(), difference.max), (2f64.sqrt(), 2.0));
        assert_eq!(sizes(&[f32::INFINITY], &[1.0]).1.max, f64::INFINITY);
        assert_eq!(sizes(&[], &[]).1.rms(), 0.0);
    }
}
