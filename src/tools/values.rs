//! Tensors as numbers: how large they are, and how far apart.

use std::cmp::Ordering;
use std::io;
use std::ops::Range;

use codec::Dtype;
use formats::ReadAt;

/// Bytes read at once of either file: whole elements of every type.
const CHUNK: u64 = 1 << 20;

/// Root mean square and largest of many numbers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Size {
    squares: f64,
    count: u64,
    /// The largest magnitude.
    pub(super) max: f64,
}

impl Size {
    fn add(&mut self, value: f64) {
        self.squares += value * value;
        self.count += 1;
        self.max = self.max.max(value.abs());
    }

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

/// The size of a tensor's values, and of their differences to another tensor's. Numbers that are not finite have no
/// size. If both tensors have the same bits in one there is no difference, else an infinite one.
pub(super) fn sizes(dtype: Dtype, a: &Place, b: &Place) -> io::Result<(Size, Size)> {
    let (mut value, mut difference) = (Size::default(), Size::default());
    in_pieces(&[a, b], |_, left, right| {
        each(dtype, left, right, |x, y, same| {
            if x.is_finite() {
                value.add(x);
            }
            match (same, x.is_finite() && y.is_finite()) {
                (true, false) => {}
                (_, true) => difference.add(x - y),
                (false, false) => difference.add(f64::INFINITY),
            }
        });
    })
    .map_err(|(_, error)| error)?;
    Ok((value, difference))
}

/// Passes each tensor, but the first, with the one before it, in pieces of whole elements. Reads each once. An error has the
/// place of the tensor that could not be read.
fn in_pieces(tensors: &[&Place], mut both: impl FnMut(usize, &[u8], &[u8])) -> Result<(), (usize, io::Error)> {
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let (mut at, len) = (0, tensors.first().map_or(0, |first| first.extent.end - first.extent.start));
    while at < len {
        let count = CHUNK.min(len - at) as usize;
        for (number, tensor) in tensors.iter().enumerate() {
            right.resize(count, 0);
            tensor.file.read_exact_at(&mut right, tensor.extent.start + at).map_err(|error| (number, error))?;
            if number > 0 {
                both(number - 1, &left, &right);
            }
            std::mem::swap(&mut left, &mut right);
        }
        at += count as u64;
    }
    Ok(())
}

/// How one tensor differs from another of its type and shape.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Change {
    /// Elements with other bits.
    pub(super) changed: u64,
    /// Elements of either that are not finite. Pairs with one have no size.
    pub(super) not_finite: [u64; 2],
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
}

/// How a tensor differs from another one. Calls `read` with the bytes of each after each piece of both.
///
/// # Errors
/// Those of the files.
pub(super) fn change(dtype: Dtype, a: &Place, b: &Place, read: &dyn Fn(u64)) -> io::Result<Change> {
    Ok(changes(dtype, &[a, b], read).map_err(|(_, error)| error)?.pop().unwrap_or_default())
}

/// The same for each of several states of a tensor and the one after it. Reads each state once.
///
/// # Errors
/// The error of the first state that cannot be read, with that state's place among them.
pub(super) fn changes(dtype: Dtype, states: &[&Place], read: &dyn Fn(u64)) -> Result<Vec<Change>, (usize, io::Error)> {
    let mut changes = vec![Change::default(); states.len().saturating_sub(1)];
    in_pieces(states, |number, left, right| {
        let change = &mut changes[number];
        let pairs = left.chunks_exact(dtype.size()).zip(right.chunks_exact(dtype.size()));
        change.changed += pairs.filter(|(x, y)| x != y).count() as u64;
        each(dtype, left, right, |x, y, _| match (x.is_finite(), y.is_finite()) {
            (true, true) => {
                change.before.add(x);
                change.after.add(y);
                change.difference.add(y - x);
                change.product += x * y;
            }
            (x, y) => change.not_finite = [change.not_finite[0] + u64::from(!x), change.not_finite[1] + u64::from(!y)],
        });
        read(left.len() as u64);
    })?;
    Ok(changes)
}

/// Adds the nearest value of a type.
pub(super) fn put(dtype: Dtype, value: f64, out: &mut Vec<u8>) {
    match dtype {
        Dtype::F16 => out.extend(half::f16::from_f32(odd(value)).to_le_bytes()),
        Dtype::Bf16 => out.extend(half::bf16::from_f32(odd(value)).to_le_bytes()),
        Dtype::F32 => out.extend((value as f32).to_le_bytes()),
        _ => out.extend(value.to_le_bytes()),
    }
}

/// The value if it is a float, else the odd one of the two floats around it: then a type of 16 bits is rounded to once.
/// `from_f64` of `half` looks at the upper 32 bits alone.
fn odd(value: f64) -> f32 {
    let near = value as f32;
    let bits = near.to_bits();
    match f64::from(near).abs().partial_cmp(&value.abs()) {
        Some(Ordering::Less) if bits & 1 == 0 => f32::from_bits(bits + 1),
        Some(Ordering::Greater) if bits & 1 == 0 && near.is_finite() => f32::from_bits(bits - 1),
        _ => near,
    }
}

/// Calls `f` with each pair of elements and whether their bits are the same.
fn each(dtype: Dtype, left: &[u8], right: &[u8], mut f: impl FnMut(f64, f64, bool)) {
    macro_rules! pairs {
        ($N:literal, $value:expr) => {{
            let (left, right) = (left.as_chunks::<$N>().0, right.as_chunks::<$N>().0);
            left.iter().zip(right).for_each(|(x, y)| f($value(*x), $value(*y), x == y));
        }};
    }
    match dtype {
        Dtype::F16 => pairs!(2, |b| half::f16::from_le_bytes(b).to_f64()),
        Dtype::Bf16 => pairs!(2, |b| half::bf16::from_le_bytes(b).to_f64()),
        Dtype::F32 => pairs!(4, |b| f64::from(f32::from_le_bytes(b))),
        Dtype::F64 => pairs!(8, f64::from_le_bytes),
        // Nothing is quantized of the others.
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_once_to_the_nearest() {
        let put = |dtype, value: f64| {
            let mut out = Vec::new();
            super::put(dtype, value, &mut out);
            u16::from_le_bytes([out[0], out[1]])
        };
        let between = |low: f32, dtype| {
            let step = if dtype == Dtype::Bf16 { 2f64.powi(-7) } else { 2f64.powi(-10) };
            let half = f64::from(low) + step / 2.0;
            [half - 1e-15, half, half + 1e-15].map(|value| put(dtype, value))
        };
        // The even one has the lower bits at 1, and the higher ones at the next value.
        assert_eq!(between(1.0, Dtype::Bf16), [0x3f80, 0x3f80, 0x3f81]);
        assert_eq!(between(1.0 + 1.0 / 128.0, Dtype::Bf16), [0x3f81, 0x3f82, 0x3f82]);
        assert_eq!(between(1.0, Dtype::F16), [0x3c00, 0x3c00, 0x3c01]);
        assert_eq!([1e300, f64::NEG_INFINITY, -0.0].map(|value| put(Dtype::F16, value)), [0x7c00, 0xfc00, 0x8000]);
        assert_eq!([1e-300, -1e-300].map(|value| put(Dtype::Bf16, value)), [0, 0x8000]);
    }

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
