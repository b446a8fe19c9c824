//! The limits of lossy values, and the floor under them.
//!
//! A program may keep a tensor within limits: a probability, a mask, a value behind a clamp. So no element leaves the
//! least and the largest one of the tensor as it was written.
//!
//! A tensor of one sign is a divisor, or the argument of a root or logarithm: a variance, a scale, a temperature. So if
//! no element of a tensor is negative (or none positive), every element comes back with its sign. Zero stays 0, nothing
//! else becomes 0, and no element is more than an eighth of itself off. Elements that a lattice would bring beyond the
//! limits or below the floor are kept exactly, as *exceptions*.
//!
//! These must never happen: a decoded value is beyond all written ones; it is 0, has another sign, or makes a division
//! by it infinite, although the written file had no such value.

use super::Dtype;
use super::exception::Exception;
use super::float::{Float, for_float};
use crate::entropy::simd::{Level, multiversion};

/// The least and the largest element of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// The least.
    pub least: f64,
    /// The largest; below the least if there are no elements.
    pub most: f64,
}

impl Limits {
    /// Those of no elements.
    pub const OF_NONE: Limits = Limits { least: f64::INFINITY, most: f64::NEG_INFINITY };

    /// Adds these elements. A NaN has no place among them.
    pub fn add(&mut self, dtype: Dtype, data: &[u8]) {
        let found =
            for_float!(dtype, F => limits::<F>(Level::detect(), F::elements(data)), else (self.least, self.most));
        self.join(Limits { least: found.0, most: found.1 });
    }

    /// Adds the elements of other limits.
    pub fn join(&mut self, other: Limits) {
        *self = Limits { least: self.least.min(other.least), most: self.most.max(other.most) };
    }

    /// Whether no two elements have different signs. Then the tensor has a floor.
    pub fn have_one_sign(self) -> bool {
        self.least >= 0.0 || self.most <= 0.0
    }

    fn contain(self, value: f64) -> bool {
        (self.least..=self.most).contains(&value)
    }
}

multiversion! {
    fn limits<F: Float>(data: &[F::Bytes]) -> (f64, f64) {
        let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
        for &element in data {
            let value = F::widen(element);
            least = if value < least { value } else { least };
            most = if value > most { value } else { most };
        }
        (least, most)
    }
}

/// The elements of a lattice tile that are kept exactly, besides those beyond the bound.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Keep {
    /// None.
    #[default]
    Nothing,
    /// Elements that would leave the limits of their tensor, or fall below its floor.
    Within(Limits),
    /// Elements whose decoded bits would differ: the tile is what an object decodes to.
    Bits,
}

/// Writes the exact bits of these elements of `w` into `r`, and adds them to `exceptions`, which stay ascending.
pub fn keep(dtype: Dtype, keep: Keep, w: &[u8], r: &mut [u8], exceptions: &mut Vec<Exception>) {
    fn all<F: Float>(keep: Keep, w: &[F::Bytes], r: &mut [F::Bytes], exceptions: &mut Vec<Exception>) {
        let has_floor = matches!(keep, Keep::Within(limits) if limits.have_one_sign());
        if let (Keep::Within(within), false) = (keep, has_floor) {
            // Hardly any block has an element near the limits.
            let (least, most) = limits::<F>(Level::detect(), r);
            if least >= within.least && most <= within.most {
                return;
            }
        }
        for (index, (&w, r)) in w.iter().zip(r).enumerate() {
            let (value, back) = (F::widen(w), F::widen(*r));
            let stays = match keep {
                Keep::Nothing => true,
                Keep::Within(limits) => limits.contain(back) && (!has_floor || is_above(value, back, MOST_OFF)),
                Keep::Bits => F::to_raw(w) == F::to_raw(*r),
            };
            if !stays {
                *r = w;
                exceptions.push(Exception { index: index as u32, raw: F::to_raw(w) });
            }
        }
    }
    if keep == Keep::Nothing {
        return;
    }
    let before = exceptions.len();
    for_float!(dtype, F => all::<F>(keep, F::elements(w), F::elements_mut(r), exceptions), else ());
    if exceptions.len() > before && before > 0 {
        // An element beyond the bound is exact already, and within the limits.
        exceptions.sort_unstable_by_key(|exception| exception.index);
    }
}

/// True if no element is infinite or NaN.
pub fn are_finite(dtype: Dtype, data: &[u8]) -> bool {
    for_float!(dtype, F => F::elements(data).iter().all(|&element| F::widen(element).is_finite()), else true)
}

/// True if all elements are within these limits.
pub fn are_within(dtype: Dtype, within: Limits, r: &[u8]) -> bool {
    let mut found = Limits::OF_NONE;
    found.add(dtype, r);
    r.is_empty() || found.least >= within.least && found.most <= within.most
}

/// A codec's promise for the elements of a tensor of one sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Floor {
    /// The sign, and at most an eighth off: a lattice.
    Eighth,
    /// The same promise for a copy in a narrower type, with its own rounding on top.
    Quarter,
    /// Only the sign: nobody divides by a mean of gradients. (A logarithmic codec keeps signs and zeros by itself.)
    Sign,
}

/// True if `r`, the decoded `w`, keeps to the floor in all elements.
pub fn holds(dtype: Dtype, floor: Floor, w: &[u8], r: &[u8]) -> bool {
    fn all<F: Float>(floor: Floor, w: &[F::Bytes], r: &[F::Bytes]) -> bool {
        let share = match floor {
            Floor::Eighth => MOST_OFF,
            Floor::Quarter => 2.0 * MOST_OFF,
            Floor::Sign => f64::INFINITY,
        };
        w.iter().zip(r).all(|(&w, &r)| is_above(F::widen(w), F::widen(r), share))
    }
    w.len() == r.len() && for_float!(dtype, F => all::<F>(floor, F::elements(w), F::elements(r)), else false)
}

/// Maximum error of an element, relative to itself. A quotient with it as divisor is then off by at most a seventh.
const MOST_OFF: f64 = 1.0 / 8.0;

fn is_above(w: f64, r: f64, share: f64) -> bool {
    let alike = (w > 0.0) == (r > 0.0) && (w < 0.0) == (r < 0.0);
    alike && (share.is_infinite() || (r - w).abs() <= share * w.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn elements_below_the_floor_are_kept_exactly() {
        let w = bytes(&[1.0, 0.4, 3e-14, 0.0, 5.0, 1e-40]);
        let mut r = bytes(&[1.1, 0.1, 0.0, 1.0, 11.0, 1e-40]);
        let mut exceptions = vec![Exception { index: 5, raw: 1 }];
        let limits = Limits { least: 0.0, most: 5.0 };
        keep(Dtype::F32, Keep::Within(limits), &w, &mut r, &mut exceptions);
        assert_eq!(r, bytes(&[1.1, 0.4, 3e-14, 0.0, 5.0, 1e-40]));
        assert_eq!(exceptions.iter().map(|e| e.index).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert!(holds(Dtype::F32, Floor::Eighth, &w, &r));
    }

    #[test]
    fn a_value_below_the_floor_is_noticed() {
        let w = bytes(&[1.0, 0.5]);
        for (r, eighth, quarter, sign) in [
            ([0.875, 0.5625], true, true, true),
            ([0.87, 0.5], false, true, true),
            ([0.74, 0.5], false, false, true),
            ([1.0, 0.0], false, false, false),
            ([-1.0, 0.5], false, false, false),
            ([f32::NAN, 0.5], false, false, false),
        ] {
            let holds = |floor| holds(Dtype::F32, floor, &w, &bytes(&r));
            assert_eq!(
                [holds(Floor::Eighth), holds(Floor::Quarter), holds(Floor::Sign)],
                [eighth, quarter, sign],
                "{r:?}"
            );
        }
    }

    #[test]
    fn elements_beyond_the_limits_are_kept_exactly() {
        let w = bytes(&[-1.0, 0.9, 1.0, 0.2]);
        let limits = {
            let mut limits = Limits::OF_NONE;
            limits.add(Dtype::F32, &w);
            limits
        };
        assert_eq!(limits, Limits { least: -1.0, most: 1.0 });
        let (mut r, mut exceptions) = (bytes(&[-1.01, 1.02, 0.97, -0.1]), Vec::new());
        assert!(!are_within(Dtype::F32, limits, &r));
        keep(Dtype::F32, Keep::Within(limits), &w, &mut r, &mut exceptions);
        assert_eq!(r, bytes(&[-1.0, 0.9, 0.97, -0.1]));
        assert_eq!(exceptions.iter().map(|e| e.index).collect::<Vec<_>>(), [0, 1]);
        assert!(are_within(Dtype::F32, limits, &r) && are_within(Dtype::F32, limits, &[]));
    }

    #[test]
    fn limits_tell_one_sign() {
        let of = |values: &[f32]| {
            let mut limits = Limits::OF_NONE;
            limits.add(Dtype::F32, &bytes(values));
            limits.have_one_sign()
        };
        assert!(of(&[0.0, -0.0]) && of(&[0.0, 2.0]) && of(&[-1.0, 0.0]) && of(&[]) && of(&[-1.0, f32::NAN]));
        assert!(!of(&[-1.0, 2.0]));
    }
}
