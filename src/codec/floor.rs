//! The floor under lossy values: no loss may make an element useless as a divisor or as the argument of a root or
//! logarithm.
//!
//! A tensor of one sign is used that way: a variance, a scale, a temperature, an averaged square. So if no element of a
//! tensor is negative (or none positive), every element comes back with its sign. Zero stays 0, nothing else becomes 0,
//! and no element is more than an eighth of itself off. Elements that a lattice would bring below the floor are kept
//! exactly, as *exceptions*.
//!
//! This must never happen: a decoded value is 0, has another sign, or makes a division by it infinite, although the
//! written file had no such value.

use super::Dtype;
use super::exception::Exception;
use super::float::{Float, for_float};

/// The signs that occur among elements. A 0 of either sign has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signs {
    /// An element is above 0.
    pub positive: bool,
    /// An element is below 0.
    pub negative: bool,
}

impl Signs {
    /// Adds the signs of these elements. Stops once both were seen: after a few elements of most tensors.
    pub fn add(&mut self, dtype: Dtype, data: &[u8]) {
        fn add<F: Float>(signs: &mut Signs, data: &[F::Bytes]) {
            for &element in data {
                let value = F::widen(element);
                signs.positive |= value > 0.0;
                signs.negative |= value < 0.0;
                if signs.both() {
                    return;
                }
            }
        }
        for_float!(dtype, F => add::<F>(self, F::elements(data)), else ());
    }

    /// True if both signs occur: then the tensor has no floor.
    pub fn both(self) -> bool {
        self.positive && self.negative
    }
}

/// The elements of a lattice tile that are kept exactly, besides those beyond the bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    /// None: the tensor has both signs.
    #[default]
    Nothing,
    /// Elements that would fall below the floor: the tensor has one sign.
    Floor,
    /// Elements whose decoded bits would differ: the tile is what an object decodes to.
    Bits,
}

/// Writes the exact bits of these elements of `w` into `r`, and adds them to `exceptions`, which stay ascending.
pub fn keep(dtype: Dtype, keep: Keep, w: &[u8], r: &mut [u8], exceptions: &mut Vec<Exception>) {
    fn all<F: Float>(bits: bool, w: &[F::Bytes], r: &mut [F::Bytes], exceptions: &mut Vec<Exception>) {
        for (index, (&w, r)) in w.iter().zip(r).enumerate() {
            let (raw, back) = (F::to_raw(w), F::to_raw(*r));
            if if bits { raw != back } else { !is_above(F::widen(w), F::widen(*r), MOST_OFF) } {
                *r = w;
                exceptions.push(Exception { index: index as u32, raw });
            }
        }
    }
    if keep == Keep::Nothing {
        return;
    }
    let before = exceptions.len();
    for_float!(dtype, F => all::<F>(keep == Keep::Bits, F::elements(w), F::elements_mut(r), exceptions), else ());
    if exceptions.len() > before && before > 0 {
        exceptions.sort_unstable_by_key(|exception| exception.index);
    }
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
        keep(Dtype::F32, Keep::Floor, &w, &mut r, &mut exceptions);
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
    fn signs_are_told_without_zeros() {
        let of = |values: &[f32]| {
            let mut signs = Signs::default();
            signs.add(Dtype::F32, &bytes(values));
            signs
        };
        assert_eq!(of(&[0.0, -0.0]), Signs::default());
        assert_eq!(of(&[0.0, 2.0]), Signs { positive: true, negative: false });
        assert!(of(&[-1.0, 2.0]).both() && !of(&[-1.0, f32::NAN]).both());
    }
}
