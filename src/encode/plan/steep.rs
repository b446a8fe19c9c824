//! Finer steps where the loss is steep, judged by the files' own second moments.
//!
//! An error e in a weight raises the loss by about v e^2 / 2. Here v is its mean squared gradient: Adam's second
//! moment, the diagonal of the empirical Fisher matrix. A step follows the root mean square of a tensor's update
//! alone. Two corrections apply:
//!
//! - *Between tensors*: for a given number of bits, the errors of a file cost least if each element costs the same.
//!   Tensors through which every token goes (embeddings of places and bytes, the first attention) have a tenth of
//!   GPT's elements and three quarters of the cost. So an element of a tensor costs at most as much as the mean of
//!   all. That takes .2 bits more a weight, and saves two thirds of the cost. The others keep their step. A coarser
//!   one would lose their learning between two restores (`phase`).
//! - *Within a tensor*: elements with large gradients may move much less than the others (the variances of quiet
//!   pixels). Then the update counts as its mean weighted by v.

use std::io;

use rayon::prelude::*;

use codec::lattice::{updates, values};
use formats::{Role, Tensor};

use super::lattice::{read, sample};
use super::subject::Material;

/// The weighted root mean square counts so many times. For GPT's matrices it is .5 to 1.3 of the plain one once
/// training has settled. In the first states it is .3: a mean of few batches is a noisy curvature.
const ALLOWANCE: f64 = 2.0;
/// Least factor: a tensor of which a few elements have all the gradient must not get an endless number of steps.
const LEAST: f64 = 1.0 / 16.0;

/// The second moment of each weight and of each optimizer's own copy of one, where the file has one of its type and
/// shape.
pub(super) fn second_moments(tensors: &[Tensor]) -> Vec<Option<usize>> {
    let mut seconds = vec![None; tensors.len()];
    for (index, tensor) in tensors.iter().enumerate() {
        if let (Role::SecondMoment, Some(of)) = (tensor.role, tensor.of) {
            seconds[of] = Some(index);
        }
    }
    let second = |(index, tensor): (usize, &Tensor)| {
        let of = if tensor.role == Role::Master { tensor.of? } else { index };
        let alike = |other: &Tensor| other.dtype == tensor.dtype && other.shape == tensor.shape;
        seconds[of].filter(|second| alike(&tensors[*second]))
    };
    tensors.iter().enumerate().map(second).collect()
}

/// A weight, its twin in the state after this one, and its second moment.
pub(super) type Known<'a> = (&'a Tensor, &'a Tensor, &'a Tensor);

/// Factors on the steps of the weights of a file, each at most 1; 1 where nothing is known.
pub(super) fn cautions(material: &Material, weights: &[Option<Known>]) -> io::Result<Vec<f64>> {
    let look = |known: &Option<Known>| known.map(|known| look(material, known)).transpose();
    let slopes = weights.par_iter().map(look).collect::<io::Result<Vec<Option<Slope>>>>()?;
    // Vectors are few, and have finer steps than their update needs.
    let matrices = slopes.iter().flatten().filter(|slope| slope.is_matrix);
    let (cost, elements) = matrices
        .fold((0.0, 0.0), |(cost, elements), slope| (cost + slope.cost * slope.elements, elements + slope.elements));
    Ok(slopes.iter().map(|slope| slope.as_ref().map_or(1.0, |slope| slope.factor(cost / elements))).collect())
}

/// The cost of errors in one tensor.
#[derive(Debug)]
struct Slope {
    elements: f64,
    is_matrix: bool,
    /// Twice the rise of the loss by an element whose error is the update's root mean square, on average.
    cost: f64,
    /// Factor from the tensor's own elements.
    within: f64,
}

impl Slope {
    fn of(elements: f64, is_matrix: bool, moves: &[f64], squares: &[f64]) -> Slope {
        let (mut weighted, mut plain, mut weights) = (0.0, 0.0, 0.0);
        for (step, v) in moves.iter().zip(squares).filter(|(step, v)| step.is_finite() && v.is_finite() && **v >= 0.0) {
            weighted += v * step * step;
            plain += step * step;
            weights += v;
        }
        let count = moves.len() as f64;
        let (cost, share) = (weights / count * (plain / count), weighted / weights / (plain / count));
        let within = if share.is_finite() { (ALLOWANCE * share.sqrt()).clamp(LEAST, 1.0) } else { 1.0 };
        Slope { elements, is_matrix, cost: if cost.is_finite() { cost } else { 0.0 }, within }
    }

    /// Factor on the step of the tensor, where the elements of all cost `mean`.
    fn factor(&self, mean: f64) -> f64 {
        let between = if self.is_matrix && self.cost > mean { (mean / self.cost).sqrt() } else { 1.0 };
        (between * self.within).max(LEAST)
    }
}

fn look(material: &Material, (tensor, twin, second): Known) -> io::Result<Slope> {
    let places = sample(tensor);
    let (now, then) = (read(material.source, tensor, &places)?, read(material.newer.0, twin, &places)?);
    let moves = updates(tensor.dtype, &then, &now);
    let squares = values(tensor.dtype, &read(material.source, second, &places)?);
    Ok(Slope::of(tensor.elements() as f64, tensor.shape.len() > 1, &moves, &squares))
}

#[cfg(test)]
mod tests {
    use super::Slope;

    #[test]
    fn a_tensor_whose_elements_cost_more_than_the_mean_gets_finer_steps() {
        let slope = |v: f64| Slope::of(100.0, true, &[1.0; 8], &[v; 8]);
        assert_eq!((slope(4.0).factor(1.0), slope(0.1).factor(1.0)), (0.5, 1.0));
        let vector = Slope::of(100.0, false, &[1.0; 8], &[4.0; 8]);
        assert_eq!(vector.factor(1.0), 1.0);
        // The cost of every tensor is unknown.
        assert_eq!(slope(f64::NAN).factor(f64::NAN), 1.0);
    }

    #[test]
    fn only_a_tensor_whose_steep_elements_move_less_gets_finer_steps() {
        let factor = |moves: &[f64], squares: &[f64]| Slope::of(8.0, true, moves, squares).factor(f64::INFINITY);
        let even = [1.0; 8];
        assert_eq!(factor(&even, &even), 1.0);
        assert_eq!(factor(&[2.0, 1.0, 1.0, 1.0], &[9.0, 1.0, 1.0, 1.0]), 1.0);
        // One element has nearly all the gradient, and moves by a tenth of the others.
        let share = factor(&[0.1, 1.0, 1.0, 1.0], &[1e6, 1.0, 1.0, 1.0]);
        assert!((0.2..0.3).contains(&share), "{share}");
        assert_eq!(factor(&[0.0, 0.0], &[0.0, 0.0]), 1.0);
        assert_eq!(factor(&[0.0, 1.0], &[f64::NAN, 0.0]), 1.0);
    }
}
