//! Whether restored bytes are allowed, judged by the numbers in both files alone: it uses none of the product's own
//! checks.

use codec::Dtype;
use codec::moment::Rule;
use stepfs::store::object::{Index, TensorEntry};
use stepfs::tile::Codec;

use super::series::Rest;

/// The elements of a tensor of floats.
pub(crate) fn values(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    let value = |bytes: &[u8]| match dtype {
        Dtype::F16 => half::f16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
        Dtype::Bf16 => half::bf16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
        Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().unwrap())),
        Dtype::F64 => f64::from_le_bytes(bytes.try_into().unwrap()),
        _ => panic!("{dtype:?} is not quantized"),
    };
    bytes.chunks(dtype.size()).map(value).collect()
}

/// Smallest positive value of a type, and the relative error of rounding to it.
fn precision(dtype: Dtype) -> (f64, f64) {
    match dtype {
        Dtype::F16 => (2f64.powi(-24), 2f64.powi(-11)),
        Dtype::Bf16 => (2f64.powi(-133), 2f64.powi(-8)),
        // The quotient is computed in this type as well.
        Dtype::F32 => (2f64.powi(-149), 2f64.powi(-21)),
        _ => (f64::MIN_POSITIVE, 2f64.powi(-50)),
    }
}

/// A tensor as written and as restored.
struct Both<'a> {
    entry: &'a TensorEntry,
    was: Vec<f64>,
    is: Vec<f64>,
}

impl Both<'_> {
    fn pairs(&self) -> impl Iterator<Item = (f64, f64)> {
        self.was.iter().copied().zip(self.is.iter().copied())
    }

    #[track_caller]
    fn are_finite(&self) {
        let path = &self.entry.path;
        assert!(self.was.iter().chain(&self.is).all(|value| value.is_finite()), "{path} is quantized and not finite");
    }

    /// Everywhere within half a step.
    #[track_caller]
    fn is_within_bound(&self) {
        self.are_finite();
        let entry = self.entry;
        let error = self.pairs().map(|(was, is)| (was - is).abs()).fold(0.0, f64::max);
        assert!(error <= entry.bound, "{} is off by {error}, {}", entry.path, entry.bound);
        // It is kept as an f32, rounded up.
        let most = if error > f64::from(f32::MAX) { f64::INFINITY } else { error * (1.0 + 1e-6) + 2f64.powi(-149) };
        assert!((error..=most).contains(&entry.max_abs_error), "{}: {error}, not {}", entry.path, entry.max_abs_error);
    }

    /// A second moment: 0 only where it was 0, never below, within `octaves`.
    #[track_caller]
    fn is_second_moment(&self, unit: u32) {
        self.are_finite();
        let path = &self.entry.path;
        // Half of the step, or three quarters where values that moved little stay the same; plus the rounding error.
        let most = f64::from(unit) / 65536.0 * (0.75 + 1.0 / 16.0);
        assert!(self.entry.bound <= most, "{path}: {} of {most}", self.entry.bound);
        // Octaves are measured by straight lines between powers of two.
        let most = self.entry.bound + 0.0861;
        for (was, is) in self.pairs() {
            assert!(was >= 0.0 && is >= 0.0 && is.is_sign_positive(), "{path}: {was} became {is}");
            assert_eq!(was == 0.0, is == 0.0, "{path}: {was} became {is}");
            let octaves = if was == 0.0 { 0.0 } else { (was.log2() - is.log2()).abs() };
            assert!(octaves <= most, "{path}: {was} became {is}, {octaves} octaves of {most}");
        }
    }

    /// A first moment whose second is `second`: an update never grows by more than its rule allows, or not at all, and
    /// no sign flips.
    #[track_caller]
    fn is_first_moment(&self, second: &Both, step: f64, rule: Rule) {
        self.are_finite();
        let (path, (least, rounding)) = (&self.entry.path, precision(self.entry.dtype));
        for ((m, m_is), (v, v_is)) in self.pairs().zip(second.pairs()) {
            if v == 0.0 {
                assert_eq!(m, m_is, "{path}: where the second moment is 0");
                continue;
            }
            let divisor = |v: f64| if rule == Rule::Norm { v } else { v.sqrt() };
            let (ratio, ratio_is) = (m.abs() / divisor(v), m_is.abs() / divisor(v_is));
            let grows = if rule == Rule::Inward { 0.0 } else { step * Rule::Root.steps() };
            let most = (ratio + grows) * (1.0 + rounding) + least / divisor(v_is);
            if rule == Rule::Inward {
                // Centered RMSprop divides by the root of this.
                let (left, left_is) = ((v - m * m) / v, (v_is - m_is * m_is) / v_is);
                assert!(left_is >= left && (left_is > 0.0 || left <= 0.0), "{path}: {m}, {v} became {m_is}, {v_is}");
            }
            assert!(ratio_is <= most, "{path}: {m}, {v} became {m_is}, {v_is}");
            assert!(m_is == 0.0 || (m_is > 0.0) == (m > 0.0), "{path}: {m} became {m_is}");
        }
    }
}

impl Both<'_> {
    /// In units of the size of rows and columns, computed here once more. No sign flips. By `Rule::Sign` no sign is
    /// lost; otherwise no element is off by more than half a step. Sizes of small tensors are stored in quarters of an
    /// octave.
    #[track_caller]
    fn is_sized(&self, step: f64, rule: Rule) {
        self.are_finite();
        let path = &self.entry.path;
        let width = match self.entry.shape.as_slice() {
            [_, rest @ ..] if !rest.is_empty() => rest.iter().product::<u64>() as usize,
            _ => self.was.len(),
        };
        let root = |sum: f64, count: usize| (sum / count as f64).sqrt();
        let rows: Vec<f64> =
            self.was.chunks(width).map(|row| root(row.iter().map(|m| m * m).sum(), row.len())).collect();
        let column = |at: usize| self.was.iter().skip(at).step_by(width).map(|m| m * m).sum::<f64>();
        let columns: Vec<f64> = (0..width).map(|at| root(column(at), rows.len())).collect();
        let all = root(self.was.iter().map(|m| m * m).sum(), self.was.len());
        let is_matrix = rows.len() > 1 && width > 1;
        let (_, rounding) = precision(self.entry.dtype);
        for (at, (was, is)) in self.pairs().enumerate() {
            let size = if is_matrix { rows[at / width] * columns[at % width] / all } else { all };
            assert!(is == 0.0 || (is > 0.0) == (was > 0.0), "{path}: {was} became {is}");
            assert!(rule != Rule::Sign || (is == 0.0) == (was == 0.0), "{path}: {was} became {is}");
            let steps = if rule == Rule::Sign { 1.0 } else { 0.5 };
            let most = steps * step * size * 1.6 * (1.0 + rounding) + rounding * was.abs();
            assert!((was - is).abs() <= most, "{path}: {was} became {is}, size {size}, step {step}");
        }
    }
}

/// Compares a released file with the written one; returns its index.
#[track_caller]
pub(crate) fn sound(rest: &Rest, name: &str) -> Index {
    let (written, read) = (&rest.written[name], rest.read(name).unwrap());
    assert_eq!(written.len(), read.len(), "{name}");
    let index = rest.object(name).index().clone();
    let range = |entry: &TensorEntry| entry.extent.start as usize..entry.extent.end as usize;
    let both = |number: u32| {
        let entry = &index.tensors[number as usize];
        let [was, is] = [written, &read].map(|file| values(entry.dtype, &file[range(entry)]));
        Both { entry, was, is }
    };
    let mut end = 0;
    for (entry, number) in index.tensors.iter().zip(0..) {
        let range = range(entry);
        if index.container == "safetensors" {
            assert!(read[end..range.start] == written[end..range.start], "{name}: the part before {}", entry.path);
        }
        end = range.end;
        match entry.coding.codec {
            Codec::Lossless => assert!(read[range.clone()] == written[range], "{name}: {} differs", entry.path),
            Codec::Lattice { step } => {
                assert!(entry.bound == step / 2.0, "{}: {}, step {step}", entry.path, entry.bound);
                both(number).is_within_bound();
            }
            Codec::Rows { .. } | Codec::Cast { .. } | Codec::External => both(number).is_within_bound(),
            Codec::Log { unit } => both(number).is_second_moment(unit),
            Codec::Moment { second, step, rule } => both(number).is_first_moment(&both(second), step, rule),
            Codec::Sized { step, rule } => both(number).is_sized(step, rule),
        }
        if let Codec::Cast { of } = entry.coding.codec {
            let (copy, original) = (both(number), both(of));
            // Straight from f32: the conversions of `half` from f64 drop bits before they round.
            assert_eq!(original.entry.dtype, Dtype::F32);
            let rounded = |value: &f64| match entry.dtype {
                Dtype::F16 => half::f16::from_f32(*value as f32).to_f64(),
                Dtype::F32 => *value,
                _ => half::bf16::from_f32(*value as f32).to_f64(),
            };
            assert_eq!(copy.is, original.is.iter().map(rounded).collect::<Vec<_>>(), "{}", entry.path);
        }
    }
    if index.container == "safetensors" {
        assert!(read[end..] == written[end..], "{name}: the end");
    }
    index
}
