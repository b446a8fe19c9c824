//! Delta-DNN (Hu et al., ICPP 2020): the difference to the previous state, quantized uniformly within one error bound
//! for the whole model.
//!
//! M = floor((A - B) / (2 log(1 + e)) + 1/2) and A' = B + 2 log(1 + e) M. The relative error bound e is the system's
//! parameter; M is then coded without loss. The paper selects it by a score of accuracy and size; here the user does.
//! Known here from public descriptions and from Inshrinkerator's section 11. The paper passes M to a general
//! compressor; here it goes through [`ints`]. A first state, or one whose M exceed 30 bits, stays lossless.
//!
//! Payload: the step as f64, and an `ints` payload.

use std::io;
use std::sync::Arc;

use super::{Fit, Floats, NO_PREVIOUS, State, System, Tensor, Tile, code};
use codec::Corrupt;
use codec::entropy::ints;

/// Largest M; far above the result of any useful bound.
const MOST: f64 = (1u32 << 30) as f64;

/// The system with its error bound.
#[derive(Debug)]
pub(super) struct DeltaDnn {
    /// e, above 1e-9 and at most 1.
    pub(super) bound: f64,
}

impl System for DeltaDnn {
    fn fit(&self, tensors: &[&dyn Tensor], _position: u32) -> io::Result<Vec<Arc<dyn Fit>>> {
        let step: Arc<dyn Fit> = Arc::new(Step(2.0 * self.bound.ln_1p()));
        Ok(vec![step; tensors.len()])
    }

    fn stands_alone(&self) -> bool {
        false
    }

    fn take(&self, payload: &mut &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let step = f64::from_le_bytes(code::take_words(payload, 1)?[0]);
        // No bound gives a step outside; so no sum can be infinite or NaN.
        Corrupt::when(!(step > 0.0 && step < 2.0), "step of a difference")?;
        let mut m = vec![0; len];
        ints::decode(std::mem::take(payload), &mut m)?;
        Ok(State::of(add(&previous.ok_or(NO_PREVIOUS)?.values, step, &m)))
    }
}

#[derive(Debug)]
struct Step(f64);

impl Fit for Step {
    fn put(&self, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
        let before = tile.before().filter(|before| code::are_finite(before))?;
        let m = multiples(&tile.values, before, self.0)?;
        out.extend(self.0.to_le_bytes());
        ints::encode(&m, out);
        Some(State::of(add(before, self.0, &m)))
    }
}

/// M of each value, if all are in range.
fn multiples(now: &[f32], before: &[f32], step: f64) -> Option<Vec<i32>> {
    let mut largest = 0f64;
    let one = |(&now, &before): (&f32, &f32)| {
        let m = ((f64::from(now) - f64::from(before)) / step + 0.5).floor();
        largest = largest.max(m.abs());
        m as i32
    };
    let m = now.iter().zip(before).map(one).collect();
    (largest <= MOST).then_some(m)
}

/// A' of each value: two roundings in f64, one to f32, and never beyond its range.
fn add(before: &Floats, step: f64, m: &[i32]) -> Vec<f32> {
    let one =
        |(&before, &m): (&f32, &i32)| ((f64::from(before) + step * f64::from(m)) as f32).clamp(f32::MIN, f32::MAX);
    before.iter().zip(m).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{Made, Noise, checkpoint, conforms};
    use super::*;

    #[test]
    fn all_conform() {
        for bound in [1e-8, 1e-3, 1.0] {
            conforms(&DeltaDnn { bound });
        }
    }

    #[test]
    fn errors_stay_within_the_bound_and_do_not_add_up() {
        let mut noise = Noise(3);
        let mut layer = Made { tile: 5000, ..Made::layer("w", 50, 100, &mut noise) };
        let system = DeltaDnn { bound: 1e-3 };
        for position in 0..5 {
            let (states, bytes) = checkpoint(&system, std::slice::from_ref(&layer), position).remove(0);
            let bound = 1e-3f64.ln_1p() * (1.0 + 1e-6) + 1e-9;
            for (&w, &r) in layer.values.iter().zip(&states[0].values) {
                assert!((f64::from(w) - f64::from(r)).abs() <= bound, "{w} {r}");
            }
            // Lossless at first, so without a payload; then steps of about two of these bounds.
            let exact = states[0].values.iter().eq(&layer.values);
            assert!(
                if position == 0 { exact && bytes == 0 } else { (1..2_500).contains(&bytes) },
                "{position} {bytes}"
            );
            layer.previous = Some(states);
            layer.values.iter_mut().for_each(|w| *w += 0.002 * noise.normal());
        }
    }
}
