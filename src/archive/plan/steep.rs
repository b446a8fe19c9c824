//! Finer steps where the loss is steep: the files' own word of what an error costs.
//!
//! An error e in a weight raises the loss by about v e^2 / 2, where v is its mean squared gradient: Adam's second moment, the
//! diagonal of the empirical Fisher matrix. A step follows the root mean square of a tensor's update, in which all elements count
//! alike. Where the elements with large gradients move much less than the others (the variances of quiet pixels), such a step
//! costs many iterations. There the update counts as its mean weighted by v says.

use std::io;

use crate::codec::lattice::updates;
use crate::container::{Role, Tensor};

use super::Material;
use super::lattice::{read, sample};

/// The weighted root mean square counts so many times. Of GPT's matrices it is .5 to 1.3 of the plain one once training has
/// settled, and .3 in the first states: a mean of few batches is a noisy curvature.
const ALLOWANCE: f64 = 2.0;
/// Least factor: a tensor of which a few elements have all the gradient must not get an endless number of steps.
const LEAST: f64 = 1.0 / 16.0;

/// The second moment of each weight, where the file has one of its type and shape.
pub(super) fn second_moments(tensors: &[Tensor]) -> Vec<Option<usize>> {
    let mut found = vec![None; tensors.len()];
    for (index, tensor) in tensors.iter().enumerate() {
        if tensor.role == Role::SecondMoment
            && let Some(of) = tensor.of
            && tensors[of].dtype == tensor.dtype
            && tensors[of].shape == tensor.shape
        {
            found[of] = Some(index);
        }
    }
    found
}

/// Factor on the step of a weight, at most 1. `second`: its second moment.
pub(super) fn caution(material: &Material, tensor: &Tensor, twin: &Tensor, second: &Tensor) -> io::Result<f64> {
    let (mut moves, mut squares) = (Vec::new(), Vec::new());
    sample(tensor, |range| {
        let now = read(material.source, tensor, &range)?;
        moves.extend(updates(tensor.dtype, &read(material.newer.0, twin, &range)?, &now));
        squares.extend(updates(tensor.dtype, &read(material.source, second, &range)?, &vec![0; now.len()]));
        Ok(())
    })?;
    Ok(factor(&moves, &squares))
}

fn factor(moves: &[f64], squares: &[f64]) -> f64 {
    let (mut weighted, mut plain, mut weights) = (0.0, 0.0, 0.0);
    for (step, v) in moves.iter().zip(squares).filter(|(step, v)| step.is_finite() && v.is_finite() && **v >= 0.0) {
        weighted += v * step * step;
        plain += step * step;
        weights += v;
    }
    let share = weighted / weights / (plain / moves.len() as f64);
    if share.is_finite() { (ALLOWANCE * share.sqrt()).clamp(LEAST, 1.0) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::factor;

    #[test]
    fn only_a_tensor_whose_steep_elements_move_less_gets_finer_steps() {
        let even = [1.0; 8];
        assert_eq!(factor(&even, &even), 1.0);
        assert_eq!(factor(&[2.0, 1.0, 1.0, 1.0], &[9.0, 1.0, 1.0, 1.0]), 1.0);
        // One element has nearly all the gradient, and moves by a tenth of what the others do.
        let share = factor(&[0.1, 1.0, 1.0, 1.0], &[1e6, 1.0, 1.0, 1.0]);
        assert!((0.2..0.3).contains(&share), "{share}");
        assert_eq!(factor(&[0.0, 0.0], &[0.0, 0.0]), 1.0);
        assert_eq!(factor(&[0.0, 1.0], &[f64::NAN, 0.0]), 1.0);
    }
}
