//! How fast training goes between two checkpoints, and the step of weights that keeps a profile's promise there.
//!
//! A profile promises that going on from a state costs at most so many iterations, or a share of the iterations since the
//! state before if that is more. Steps are multiples c of the update between two checkpoints. How much such an error
//! costs depends on the interval:
//!
//! - *Short intervals*: the update is small, and so is its error. Steps grow.
//! - *Long intervals*: the loss rises by about h (c u)^2 / 24, for an update u and a curvature h. In the same time training
//!   lowers the loss by the part of u that has a direction: about cos u^2 / (rate I), with I iterations and the cosine cos
//!   between two successive updates. So the error costs a share of the interval that grows with c^2 I / cos. The factor
//!   before it, rate times h, is much the same everywhere, since an optimizer is stable only below a fixed product of
//!   the two. In four series of GPTs (1 and 5 million parameters, training and fine-tuning, intervals of 100 to 2,500,
//!   all phases of training) it is 1 / 1,000,000 to 1 / 50,000, and mostly below 1 / 100,000.

use std::io;

use crate::recall::walk;
use crate::tile::{Codec, Coding};
use codec::Dtype;
use codec::lattice::updates;
use formats::{Description, ReadAt, Tensor};

use super::rates::{BALANCED, Rates};
use super::subject::{Archived, Material, read_tile, tiles};

/// The interval that the profiles' steps were measured at. Shorter ones have longer steps.
const USUAL: f64 = 20.0;
/// Most that a step may be larger for a short interval.
const MOST: f64 = 6.0;
/// Updates add up like something between a drift and a random walk, whose root mean square grows by the root of the
/// interval. On GPT every 5 iterations, a step of 6 updates has half the error of one of 3 every 20; this exponent
/// makes them alike.
const EXPONENT: f64 = 0.75;
/// An error of c updates costs the share c^2 I / (FACTOR cos) of an interval of I iterations.
const FACTOR: f64 = 80_000.0;
/// Less than this tells nothing more: where training only wanders, an iteration is worth nothing.
const LEAST_COSINE: f64 = 0.05;
/// The cosine where it is unknown. It is .2 to .5 while the loss falls.
const USUAL_COSINE: f64 = 0.2;
/// The iterations between two checkpoints where nothing counts them: at most this many in most runs.
const UNKNOWN: f64 = 1000.0;
/// From this interval on, coarse moments cost a small part of the promise: one to five iterations of GPT. Below it, the
/// moments of `balanced` serve all profiles.
const FAR: f64 = 400.0;
/// Least share of a profile's step.
const LEAST: f64 = 1.0 / 16.0;

/// The pace of training between a file and the states around it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Iterations to the state after the file.
    iterations: Option<f64>,
    /// The cosine between the updates to the file and from it.
    cosine: Option<f64>,
}

/// A weight, the tensor in the state after it, and in the archived state before it.
pub(super) type Weight<'a> = (&'a Tensor, &'a Tensor, Archived<'a>);

impl Pace {
    pub(super) fn of<'a>(material: &Material, weights: impl Iterator<Item = Weight<'a>>) -> io::Result<Pace> {
        // Only the state before is known there.
        let cosine = if material.ahead { None } else { cosine(material, weights)? };
        Ok(Pace { iterations: iterations(material)?, cosine })
    }

    /// The numbers of a profile at this pace.
    pub(super) fn rates(&self, rates: Rates) -> Rates {
        let iterations = self.iterations.unwrap_or(UNKNOWN);
        let relief = (USUAL / iterations).powf(EXPONENT).clamp(1.0, MOST);
        let allowed = rates.share.max(rates.iterations / iterations);
        let cosine = self.cosine.unwrap_or(USUAL_COSINE).clamp(LEAST_COSINE, 1.0);
        let most = (FACTOR * allowed * cosine / iterations).sqrt();
        let weight = (rates.weight * relief).min(most).max(LEAST * rates.weight);
        // A row's update is its own, and most rows rest: a short interval gives them nothing.
        let row = rates.row * (weight / rates.weight).min(1.0);
        let moments = if self.iterations.is_some_and(|iterations| iterations >= FAR) { rates } else { BALANCED };
        let Rates { outward, least_kept, second_moment, full_change, .. } = moments;
        let first_moment = moments.first_moment / relief.powf(rates.first_moment_relief);
        Rates { weight, row, first_moment, outward, least_kept, second_moment, full_change, ..rates }
    }
}

/// Iterations between a file and the state after it, or before it where that stands for it.
fn iterations(material: &Material) -> io::Result<Option<f64>> {
    let files = [(material.source, material.description), material.newer];
    let [now, other] = files.map(|(source, description)| optimizer_step(source, description));
    let apart = |(now, other): (f64, f64)| Some((other - now).abs()).filter(|iterations| *iterations > 0.0);
    if let Some(counted) = now?.zip(other?).and_then(apart) {
        return Ok(Some(counted));
    }
    // A trainer and names may count saves, epochs or rounds of many iterations, which would promise short intervals.
    let [now, other] = files.map(|(_, description)| trainer_step(description));
    let stated = now.zip(other).and_then(apart).or(material.apart);
    Ok(stated.filter(|iterations| *iterations >= USUAL))
}

/// The cosine between two successive updates of all matrices. `None` where no state before is known.
fn cosine<'a>(material: &Material, weights: impl Iterator<Item = Weight<'a>>) -> io::Result<Option<f64>> {
    /// Tensors looked at: the cosine of 32 tiles is good to .001.
    const TENSORS: usize = 32;
    let is_on_lattice = |coding: Coding| !matches!(coding.codec, Codec::Rows { .. } | Codec::Cast { .. });
    let mut weights: Vec<Weight> =
        weights.filter(|(tensor, _, before)| tensor.shape.len() > 1 && is_on_lattice(before.entry.coding)).collect();
    weights.sort_by_key(|(tensor, ..)| std::cmp::Reverse(tensor.bytes()));
    weights.truncate(TENSORS);
    let (mut both, mut last, mut next) = (0.0, 0.0, 0.0);
    for (tensor, twin, before) in weights {
        let middle = tiles(tensor) / 2;
        let now = read_tile(material.source, tensor, middle)?;
        let then = read_tile(material.newer.0, twin, middle)?;
        let former = walk::decode(before.chain, before.number as usize, middle)?;
        let (from, to) = (updates(tensor.dtype, &now, &former), updates(tensor.dtype, &then, &now));
        let count = from.len().max(1) as f64;
        let weight = tensor.bytes() as f64 / count;
        let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        // The state before is known with an error that is uniform over its step.
        let noise = before.entry.coding.step().map_or(0.0, |step| step * step / 12.0 * count);
        both += weight * sum(&from, &to);
        last += weight * (sum(&from, &from) - noise).max(0.0);
        next += weight * sum(&to, &to);
    }
    /// Where the state before stands for the one after (`stepfs compare`), the updates are opposite.
    const OPPOSITE: f64 = -0.9;
    let cosine = both / (last * next).sqrt();
    Ok(Some(cosine).filter(|cosine| *cosine > OPPOSITE))
}

/// What the trainer counts in this file. It may be iterations.
pub(in super::super) fn trainer_step(description: &Description) -> Option<f64> {
    /// The trainer's counts of iterations. It counts epochs as well.
    const NAMES: &str = "global_step global_steps step steps iteration iterations iter iter_num it current_step num_updates updates update";
    let counters = &description.progress.counters;
    let found = NAMES.split(' ').find_map(|known| counters.iter().find(|(name, _)| *name == known));
    found.map(|(_, count)| *count as f64)
}

/// The optimizer's count.
pub(in super::super) fn optimizer_step(source: &dyn ReadAt, description: &Description) -> io::Result<Option<f64>> {
    let Some(tensor) = description.step() else {
        return Ok(description.progress.optimizer_step.map(|step| step as f64));
    };
    let mut bytes = [0; 8];
    source.read_exact_at(&mut bytes[..tensor.dtype.size()], tensor.extent.start)?;
    let value = match tensor.dtype {
        Dtype::F32 => f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
        _ => u64::from_le_bytes(bytes) as f64,
    };
    Ok(Some(value).filter(|value| value.is_finite() && *value >= 0.0))
}

#[cfg(test)]
mod tests {
    use super::super::rates::rates;
    use super::*;
    use crate::store::Profile;

    #[test]
    fn first_moments_are_finer_at_short_intervals_under_balanced() {
        let first = |profile, iterations| {
            Pace { iterations: Some(iterations), cosine: None }.rates(rates(profile).unwrap()).first_moment
        };
        let usual = BALANCED.first_moment;
        assert!((0.59..0.60).contains(&(first(Profile::Balanced, 5.0) / usual)));
        for iterations in [20.0, 100.0, 1000.0] {
            assert_eq!(first(Profile::Balanced, iterations), usual, "{iterations}");
        }
        assert_eq!((first(Profile::Compact, 5.0), first(Profile::Compact, 400.0)), (usual, 2.9));
    }

    #[test]
    fn the_step_follows_the_interval_on_both_sides() {
        let multiple = |profile, iterations, cosine| {
            let rates = rates(profile).unwrap();
            Pace { iterations, cosine }.rates(rates).weight / rates.weight
        };
        let balanced = |iterations: f64, cosine: f64| multiple(Profile::Balanced, Some(iterations), Some(cosine));
        assert_eq!((balanced(1.0, 0.5), balanced(20.0, 0.1)), (6.0, 1.0));
        assert!((2.8..2.9).contains(&balanced(5.0, 0.5)));
        // Where the loss falls, every 100 iterations are no long interval. Every 400 and more are.
        assert_eq!(balanced(100.0, 0.5), 1.0);
        assert!((0.4..0.6).contains(&balanced(400.0, 0.5)) && (0.2..0.4).contains(&balanced(1000.0, 0.4)));
        assert!(balanced(400.0, 0.0) < 0.2, "training only wanders");
        let unknown = multiple(Profile::Balanced, None, None);
        assert_eq!(unknown, balanced(UNKNOWN, USUAL_COSINE), "the safe side");
        for iterations in [5.0, 100.0, 1000.0, 1e9] {
            let compact = multiple(Profile::Compact, Some(iterations), Some(0.3));
            assert!(compact >= LEAST && compact >= 0.9 * balanced(iterations, 0.3), "{iterations}");
        }
    }
}
