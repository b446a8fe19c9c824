//! Tells by values which optimizer keeps two moments, where names and shapes leave it open.
//!
//! optax and MLX name Adam's moments as Adamax's. Of both, m is a mean of gradients g with the decay b1. Adam divides
//! by the root of v, a mean of g^2. Adamax divides by v itself, the largest |g| so far, which fades by b2 at each step:
//!
//! - For Adamax v >= b2^k |g| of k steps before. So |m| <= (1 - b1) sum (b1 / b2)^k v < v (1 - b1) / (1 - b1 / b2).
//!   This is 1.01 v for b1 = .9 and b2 = .999, and below [`TIMES`] v unless b2 is almost b1 or less. There m can pass
//!   the bound only where gradients have vanished, and then it has vanished itself. Adamax adds its epsilon to v, and
//!   roundings are relative.
//! - For Adam both shrink with the gradients, v with their square. So |m| is far above v where gradients are small.
//!
//! So most of the large elements of m prove that v is no norm of Adamax. Where gradients are large, nothing is proven,
//! and both moments stay exact.
//!
//! optax's centered RMSprop may have these names, too. Its update divides by the root of v - m^2, with one decay for
//! both. By Cauchy and Schwarz its m^2 is at most v. If no m^2 is beyond v, the pair is treated as centered. That is
//! safe for Adam, too: m then never grows in units of the root of v. ADOPT is `moments::first`'s to reject. Yogi,
//! RAdam, NAdam and AdaBelief divide by the root of v, as Adam does.

use std::io;

use crate::codec::lattice::values;
use crate::container::{ReadAt, Role, Tensor, Use};

use super::lattice::{mean_square, read, sample};

/// Times v that an m must be, so that it is none of Adamax.
const TIMES: f64 = 8.0;
/// Least share of the elements of at least the root mean square that must be so large.
const LEAST_SHARE: f64 = 0.5;
/// Fewer samples prove nothing.
const LEAST_SAMPLES: usize = 16;
/// Times v that a square of m must be, so that it is none of centered RMSprop. Sums in 16 bits stop to grow too early:
/// at a third of what v should be.
const SQUARE_TIMES: f64 = 1.25;
const SQUARE_TIMES_OF_16_BITS: f64 = 4.0;
/// Smaller elements say nothing: their squares are no normal numbers of 32 bits.
const LEAST: f64 = 1e-15;

/// Decides on all such pairs among a file's tensors. Those without a proof are an optimizer's state of no known kind.
pub(super) fn close(source: &dyn ReadAt, tensors: &mut [Tensor]) -> io::Result<()> {
    for first in 0..tensors.len() {
        if tensors[first].used != Use::Open || tensors[first].role != Role::FirstMoment {
            continue;
        }
        let Some(second) = tensors[first].partner else { continue };
        let used = decide(source, &tensors[first], &tensors[second])?;
        for tensor in [first, second] {
            match used {
                Some(used) => tensors[tensor].used = used,
                None => tensors[tensor].role = Role::Optimizer,
            }
        }
    }
    Ok(())
}

fn decide(source: &dyn ReadAt, first: &Tensor, second: &Tensor) -> io::Result<Option<Use>> {
    let mut pairs: Vec<(f64, f64)> = Vec::new();
    sample(first, |range| {
        let (m, v) = (read(source, first, &range)?, read(source, second, &range)?);
        pairs.extend(values(first.dtype, &m).into_iter().zip(values(second.dtype, &v)));
        Ok(())
    })?;
    Ok(judge(&pairs, if second.dtype.size() == 2 { SQUARE_TIMES_OF_16_BITS } else { SQUARE_TIMES }))
}

/// How an optimizer uses these moments; `None` if they do not show it.
fn judge(pairs: &[(f64, f64)], square_times: f64) -> Option<Use> {
    let sane = |(m, v): &(f64, f64)| m.is_finite() && v.is_finite() && *v >= 0.0;
    let firsts: Vec<f64> = pairs.iter().map(|(m, _)| *m).filter(|m| *m != 0.0).collect();
    let least = mean_square(&firsts).sqrt().max(LEAST);
    let large: Vec<_> = pairs.iter().filter(|(m, _)| m.abs() >= least).collect();
    let proofs = large.iter().filter(|(m, v)| m.abs() > TIMES * v).count();
    let is_proven =
        pairs.iter().all(sane) && large.len() >= LEAST_SAMPLES && proofs as f64 >= LEAST_SHARE * large.len() as f64;
    let is_beyond = |(m, v): &(f64, f64)| m.abs() >= LEAST && m * m > square_times * v;
    is_proven.then(|| if pairs.iter().any(is_beyond) { Use::ByRole } else { Use::Centered })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(pairs: &[(f64, f64)]) -> Option<Use> {
        judge(pairs, SQUARE_TIMES)
    }

    const B1: f64 = 0.9;
    const B2: f64 = 0.999;

    /// Gradients of 2,000 elements, each of its own size, around `scale`; `grows` times as large at each step.
    fn gradients(steps: usize, scale: f64, grows: f64) -> impl Iterator<Item = Vec<f64>> {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = move || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 11) as f64 / (1u64 << 53) as f64 - 0.5
        };
        let sizes: Vec<f64> = (0..2000).map(|_| scale * (6.0 * next()).exp()).collect();
        (0..steps).map(move |step| sizes.iter().map(|size| (next() + 0.2) * size * grows.powi(step as i32)).collect())
    }

    /// m and v after these gradients, rounded to f32 at each step; `second` gives the next v.
    fn moments(
        gradients: impl Iterator<Item = Vec<f64>>,
        b1: f64,
        second: impl Fn(f64, f64, f64) -> f64,
    ) -> Vec<(f64, f64)> {
        let mut state = vec![(0.0, 0.0); 2000];
        for gradients in gradients {
            for ((m, v), g) in state.iter_mut().zip(gradients) {
                let next = second(*v, g, *m);
                *m = f64::from((b1 * *m + (1.0 - b1) * g) as f32);
                *v = f64::from(next as f32);
            }
        }
        state
    }

    fn adam(v: f64, g: f64, _: f64) -> f64 {
        B2 * v + (1.0 - B2) * g * g
    }

    #[test]
    fn small_gradients_prove_adam() {
        for scale in [1e-3, 1e-6, 1e-10] {
            let early = moments(gradients(80, scale, 1.0), B1, adam);
            assert_eq!(told(&early), Some(Use::ByRole), "{scale}");
            assert!(told(&moments(gradients(5000, scale, 1.0), B1, adam)).is_some(), "{scale}");
        }
        // Where they are large nobody can tell.
        assert_eq!(told(&moments(gradients(80, 100.0, 1.0), B1, adam)), None);
    }

    #[test]
    fn no_gradients_make_adamax_pass_for_adam() {
        for (b1, b2) in [(B1, B2), (0.95, 0.999), (0.9, 0.95), (0.0, 0.9)] {
            for scale in [1e-30, 1e-10, 1e-5, 1.0, 1e5] {
                for grows in [0.8, 0.95, 1.0, 1.05, 1.3] {
                    let norm = |v: f64, g: f64, _: f64| (b2 * v).max(g.abs() + 1e-8);
                    let state = moments(gradients(60, scale, grows), b1, norm);
                    assert_eq!(told(&state), None, "{b1} {b2} {scale} {grows}");
                    let without_epsilon = |v: f64, g: f64, _: f64| (b2 * v).max(g.abs());
                    assert_eq!(told(&moments(gradients(60, scale, grows), b1, without_epsilon)), None);
                }
            }
        }
    }

    #[test]
    fn centered_rmsprop_never_passes_for_adam() {
        for (scale, grows) in [(1e-3, 1.0), (1e-3, 1.2), (1e-6, 0.9), (1e-14, 1.0), (1.0, 1.0)] {
            let centered = |v: f64, g: f64, _: f64| B1 * v + (1.0 - B1) * g * g;
            let state = moments(gradients(60, scale, grows), B1, centered);
            assert!(matches!(told(&state), None | Some(Use::Centered)), "{scale} {grows}");
        }
    }

    #[test]
    fn what_is_no_pair_of_moments_proves_nothing() {
        assert_eq!(told(&[]), None);
        assert_eq!(told(&vec![(0.0, 0.0); 100]), None);
        let mut state = moments(gradients(80, 1e-3, 1.0), B1, adam);
        for odd in [(f64::NAN, 1.0), (1e-3, f64::INFINITY), (1e-3, -1e-9)] {
            state[7] = odd;
            assert_eq!(told(&state), None);
        }
    }
}
