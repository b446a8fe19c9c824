//! How many iterations lie between two checkpoints, as their optimizer counts them.
//!
//! A profile promises iterations, and its steps are multiples of the update between two checkpoints. If checkpoints
//! follow each other closely, that update is small, and its error costs a small part of an iteration. So the steps
//! may be larger for the same promise.

use std::io;

use crate::codec::Dtype;
use crate::container::{Description, ReadAt, Role};

use super::{Material, lattice};

/// The interval that the profiles' numbers were measured at.
const USUAL: f64 = 20.0;
/// Most that a step may be larger for a short interval.
const MOST: f64 = 6.0;
/// Updates add up like something between a drift and a random walk, whose root mean square grows by the root of the
/// interval. On GPT every 5 iterations, a step of 6 updates has half the error of one of 3 every 20; this exponent
/// makes them alike.
const EXPONENT: f64 = 0.75;

/// Factor on the steps of weights. 1 where the optimizer does not count.
pub(super) fn relief(material: &Material) -> io::Result<f64> {
    let now = step(material.source, material.description)?;
    let then = step(material.newer.0, material.newer.1)?;
    Ok(now.zip(then).filter(|(now, then)| then > now).map_or(1.0, |(now, then)| factor(then - now)))
}

fn factor(interval: f64) -> f64 {
    (USUAL / interval).powf(EXPONENT).clamp(1.0, MOST)
}

/// The first parameter's `step`, which torch keeps as a number of fp32.
fn step(source: &dyn ReadAt, description: &Description) -> io::Result<Option<f64>> {
    let is_step = |path: &str| path.ends_with("/step") && path.contains("/state/");
    let mut tensors = description.tensors.iter();
    let found = tensors.find(|t| {
        t.role == Role::Optimizer && t.dtype == Dtype::F32 && t.shape.iter().product::<u64>() == 1 && is_step(&t.path)
    });
    let Some(tensor) = found else { return Ok(None) };
    let bytes = lattice::read(source, tensor, &(0..4))?;
    let value = f64::from(f32::from_le_bytes(bytes.try_into().unwrap_or_default()));
    Ok(Some(value).filter(|value| value.is_finite() && *value >= 0.0))
}

#[cfg(test)]
mod tests {
    use super::factor;

    #[test]
    fn short_intervals_get_larger_steps_and_long_ones_do_not_get_smaller_ones() {
        assert_eq!((factor(1.0), factor(20.0), factor(1000.0)), (6.0, 1.0, 1.0));
        assert!((2.8..2.9).contains(&factor(5.0)));
    }
}
