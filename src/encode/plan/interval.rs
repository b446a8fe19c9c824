//! How many iterations lie between two checkpoints, as their optimizer counts them.
//!
//! A profile promises iterations, and its steps are multiples of the update between two checkpoints. If checkpoints
//! follow each other closely, that update is small, and its error costs a small part of an iteration. So the steps
//! may be larger for the same promise.

use std::io;

use crate::codec::Dtype;
use crate::container::{Description, Kind, ReadAt, Role, Tensor};

use super::Material;

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
    let other = step(material.newer.0, material.newer.1)?;
    let (now, then) = if material.ahead { (other, now) } else { (now, other) };
    Ok(now.zip(then).filter(|(now, then)| then > now).map_or(1.0, |(now, then)| factor(then - now)))
}

fn factor(interval: f64) -> f64 {
    (USUAL / interval).powf(EXPONENT).clamp(1.0, MOST)
}

/// What the optimizer counts: torch has a `step` of each parameter, Keras one of all, optax a `count` in each state.
fn step(source: &dyn ReadAt, description: &Description) -> io::Result<Option<f64>> {
    let is_one = |t: &&Tensor| t.role == Role::Optimizer && t.shape.iter().product::<u64>() == 1;
    let Some(tensor) = description.tensors.iter().filter(is_one).find(|t| is_step(description.kind, t)) else {
        return Ok(None);
    };
    let mut bytes = [0; 8];
    source.read_exact_at(&mut bytes[..tensor.dtype.size()], tensor.extent.start)?;
    let value = match tensor.dtype {
        Dtype::F32 => f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
        _ => u64::from_le_bytes(bytes) as f64,
    };
    Ok(Some(value).filter(|value| value.is_finite() && *value >= 0.0))
}

/// Whether a number of the optimizer is its count of iterations. torch keeps it as fp32, Keras and optax as an integer.
fn is_step(kind: Kind, tensor: &Tensor) -> bool {
    let separators = ['/', '.'];
    let (above, name) = tensor.path.rsplit_once(separators).unwrap_or_default();
    match kind {
        Kind::Keras | Kind::Hdf5 => {
            let is_count = (above == "optimizer/vars" && name == "0")
                || (above.starts_with("optimizer_weights/") && name == "iteration");
            is_count && [Dtype::I32, Dtype::I64].contains(&tensor.dtype)
        }
        Kind::Flax => name == "count" && tensor.dtype == Dtype::I32,
        _ => name == "step" && above.split(separators).any(|part| part == "state") && tensor.dtype == Dtype::F32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_intervals_get_larger_steps_and_long_ones_do_not_get_smaller_ones() {
        assert_eq!((factor(1.0), factor(20.0), factor(1000.0)), (6.0, 1.0, 1.0));
        assert!((2.8..2.9).contains(&factor(5.0)));
    }

    #[test]
    fn counts_are_known_by_name_and_type() {
        let known = |kind: Kind, path: &str, dtype: Dtype| {
            let role = (Role::Optimizer, "test");
            is_step(kind, &Tensor::found(path.to_string(), (dtype, Vec::new()), role, 0..dtype.size() as u64))
        };
        for path in ["optimizer/state/0/step", "optim/state/h.weight/step", "optimizer/state.h.weight.step"] {
            assert!(known(Kind::TorchZip, path, Dtype::F32), "{path}");
        }
        assert!(known(Kind::Keras, "optimizer/vars/0", Dtype::I64));
        assert!(known(Kind::Hdf5, "optimizer_weights/adam/iteration", Dtype::I64));
        assert!(known(Kind::Flax, "opt_state/0/count", Dtype::I32));
        for (kind, path, dtype) in [
            (Kind::Flax, "opt_state/0/count", Dtype::F32),
            (Kind::Keras, "optimizer/vars/1", Dtype::I64),
            (Kind::Keras, "optimizer/vars/0", Dtype::F32),
            (Kind::TorchZip, "optimizer/vars/0", Dtype::I64),
            (Kind::TorchZip, "optimizer/step", Dtype::F32),
            (Kind::TorchZip, "step", Dtype::F32),
        ] {
            assert!(!known(kind, path, dtype), "{path}");
        }
    }
}
