//! Optimizer state: which codec, and its step.

use std::io;
use std::sync::Arc;

use crate::codec::log::{Factors, FactorsBuilder};
use crate::codec::moment::{Rule, Sample};
use crate::codec::{lattice, moment};
use crate::container::{Role, Tensor, Use};
use crate::recall::walk;
use crate::store::object::rows_and_width;
use crate::tile::{self, Around, Codec, Coding, State};

use super::lattice::{read, root_mean_square, sample};
use super::rates::{Rates, VECTOR};
use super::{Choice, Plan, Subject, read_tile, tiles};

/// The bits of a factor, about.
const FACTOR_BITS: f64 = 3.0;

/// Adam's first moment is a mean of gradients, the second a mean of their squares. So by Cauchy and Schwarz |m| /
/// sqrt(v) is at most (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)): 7.3 for b2 = .999, 23 for .9999, 73 for .99999.
/// Optimizers that keep other values by the same names (ADOPT averages quotients) go far beyond it.
const LARGEST_QUOTIENT: f64 = 80.0;
/// One sample in so many may be beyond it, because the smallest values of a type are imprecise.
const FEW: usize = 1000;

/// A first moment's step becomes finer at most so many times, each time by this factor: an eighth in all.
const FINER_STEPS: i32 = 12;
const FINER: f64 = 0.840_896_415_253_714_5; // 2^(-1/4)

/// A first moment, in units of the root of its second. `None` if the second is not in the file, or nothing has a
/// ratio.
pub(super) fn first(subject: &Subject) -> io::Result<Option<Choice>> {
    let Some((second, place)) = subject.partner else { return Ok(None) };
    let (tensor, source) = (subject.tensor, subject.material.source);
    let rule = match tensor.used {
        Use::Norm => Rule::Norm,
        Use::Centered => Rule::Inward,
        _ => Rule::Root,
    };
    let mut samples = Vec::new();
    sample(tensor, |range| {
        let (m, v) = (read(source, tensor, &range)?, read(source, second, &range)?);
        samples.extend(moment::samples((rule, tensor.dtype), &m, &v));
        Ok(())
    })?;
    if !are_quotients(&samples) {
        return Ok(None);
    }
    let step = first_step(&samples, rule, &subject.rates);
    // A first moment is never a difference, so it costs the same with and without a base.
    Ok(step.map(|step| {
        let coding = Codec::Moment { second: place, step, rule }.alone();
        Choice { coding, alone: coding, bits: (0.0, 0.0) }
    }))
}

/// Whether these can be moments of Adam: then nearly none is beyond [`LARGEST_QUOTIENT`].
fn are_quotients(samples: &[Sample]) -> bool {
    let beyond = samples.iter().filter(|sample| sample.ratio.abs() > LARGEST_QUOTIENT).count();
    beyond <= samples.len() / FEW
}

/// The step of a first moment: the profile's, or a finer one that keeps the momentum. `None` if nothing has a ratio.
fn first_step(samples: &[Sample], rule: Rule, rates: &Rates) -> Option<f64> {
    let squares = samples.iter().map(|sample| sample.ratio * sample.ratio).sum::<f64>();
    let rms = (squares / samples.len().max(1) as f64).sqrt();
    // Rounding toward 0 may be off by a whole step, and always loses momentum.
    if rule == Rule::Inward {
        return lattice_step(rms, 0.5 * rates.first_moment);
    }
    let mut multiple = rates.first_moment;
    let mut step = lattice_step(rms, multiple)?;
    for _ in 0..FINER_STEPS {
        if moment::kept(samples, (step, rates.outward)) >= rates.least_kept {
            break;
        }
        multiple *= FINER;
        let Some(finer) = lattice_step(rms, multiple) else { break };
        step = finer;
    }
    Some(step)
}

/// A step in ratios, which depends on no element type's grid.
fn lattice_step(rms: f64, c: f64) -> Option<f64> {
    lattice::choose_g(crate::codec::Dtype::F32, &[rms], c)
}

/// A momentum buffer: a lattice from 0. At the distance of checkpoints, its former value tells little about the new
/// one.
pub(super) fn momentum(subject: &Subject) -> io::Result<Option<Choice>> {
    let tensor = subject.tensor;
    let rms = root_mean_square(subject)?;
    let step = lattice::choose_g(tensor.dtype, &[rms], subject.rates.momentum);
    Ok(step.map(|step| {
        let coding = Codec::Lattice { step }.alone();
        Choice { coding, alone: coding, bits: (0.0, 0.0) }
    }))
}

/// A momentum of which small elements count as much as large ones: in units of its row's and column's size. One step
/// for the tensor would take everything from rows with small gradients. It costs an iteration of Lion; this costs a
/// quarter.
pub(super) fn direction(subject: &Subject) -> io::Result<Option<Choice>> {
    let is_vector = has_factors(&subject.tensor.shape).is_none();
    sized(subject, subject.rates.momentum * if is_vector { VECTOR } else { 1.0 }, Rule::Norm)
}

/// State of which only the sign counts. So the step may be as long as the largest elements.
pub(super) fn signs(subject: &Subject) -> io::Result<Option<Choice>> {
    const STEP: f64 = 4.0;
    sized(subject, STEP, Rule::Sign)
}

fn sized(subject: &Subject, step: f64, rule: Rule) -> io::Result<Option<Choice>> {
    if root_mean_square(subject)? == 0.0 {
        return Ok(None);
    }
    Ok(lattice_step(1.0, step).map(|step| {
        let coding = Codec::Sized { step, rule }.alone();
        Choice { coding, alone: coding, bits: (0.0, 0.0) }
    }))
}

/// The update is made of both moments, so the second of a pair is lossy only if the first is in units of it. Then its
/// error cancels, and the update cannot grow.
pub(super) fn keep_together(tensors: &[Tensor], plans: &mut [Plan]) {
    // Indexes of the description, as plans have them.
    let firsts: Vec<usize> =
        plans.iter().filter(|plan| matches!(plan.coding.codec, Codec::Moment { .. })).map(|plan| plan.index).collect();
    for plan in plans {
        let tensor = &tensors[plan.index];
        let partner = tensor.partner.filter(|_| tensor.role == Role::SecondMoment);
        if partner.is_some_and(|first| firsts.binary_search(&first).is_err()) {
            (plan.coding, plan.alone, plan.parent) = (Coding::LOSSLESS, Coding::LOSSLESS, None);
        }
    }
}

/// A second moment in this unit. If it does not fit, because its type is too coarse among its smallest numbers, then in
/// the finest one that fits, up to `most`.
pub(super) fn second_up_to(subject: &Subject, mut unit: u32, most: u32) -> io::Result<Option<Choice>> {
    loop {
        let choice = second(subject, unit)?;
        if choice.is_some() || unit >= most {
            return Ok(choice);
        }
        unit *= 2;
    }
}

/// A second moment or sum of squares: as a logarithmic difference to the base, or with factors of its own, whichever
/// makes the middle tile smaller.
pub(super) fn second(subject: &Subject, unit: u32) -> io::Result<Option<Choice>> {
    let tensor = subject.tensor;
    let middle = tiles(tensor) / 2;
    let data = Arc::new(read_tile(subject.material.source, tensor, middle)?);
    let spec = |coding| super::spec(tensor, coding, middle);
    let bits = |coding, around: Around, extra: f64| -> io::Result<Option<f64>> {
        let Some((state, _)) = tile::quantize(spec(coding), &data, around, None) else {
            return Ok(None);
        };
        let mut out = Vec::new();
        let fits = tile::encode(spec(coding), &state, around.parent, &mut out)?;
        Ok(fits.then_some(8.0 * out.len() as f64 + extra))
    };
    let alone = Codec::Log { unit }.alone();
    let factors = Arc::new(factors_of_tile(subject, middle, &data, unit));
    let (rows, width) = rows_and_width(&tensor.shape);
    let share = data.len() as f64 / (tensor.extent.end - tensor.extent.start) as f64;
    let factor_bits = if factors.is_flat() { 0.0 } else { FACTOR_BITS * (rows + width) as f64 * share };
    let around = Around { factors: Some(&factors), ..Around::default() };
    let Some(key_bits) = bits(alone, around, factor_bits)? else { return Ok(None) };
    let key = Choice { coding: alone, alone, bits: (key_bits, key_bits) };
    let Some(parent) = subject.parent else { return Ok(Some(key)) };
    let state = walk::state(parent.chain, parent.number as usize, middle)?;
    if !matches!(&*state, State::Log { unit: before, .. } if *before == unit) {
        return Ok(Some(key));
    }
    let coding = Codec::Log { unit }.on(parent.number);
    let delta = bits(coding, Around { parent: Some(&state), ..around }, factor_bits)?;
    Ok(Some(match delta.filter(|delta| *delta < key_bits) {
        Some(delta) => Choice { coding, alone, bits: (delta, key_bits) },
        None => key,
    }))
}

/// Factors from one tile only, which suffices to weigh them.
fn factors_of_tile(subject: &Subject, number: usize, data: &[u8], unit: u32) -> Factors {
    let tensor = subject.tensor;
    match has_factors(&tensor.shape) {
        Some((rows, width)) => {
            let mut builder = FactorsBuilder::new(rows, width);
            builder.add(tensor.dtype, super::rows(tensor, number).first, data);
            builder.finish(unit)
        }
        None => Factors::flat_of(tensor.dtype, data),
    }
}

/// The number of rows and their length, if a rank-1 prediction is possible: two rows and columns at least.
pub(in super::super) fn has_factors(shape: &[u64]) -> Option<(usize, usize)> {
    let (rows, width) = rows_and_width(shape);
    (rows > 1 && width > 1).then_some(())?;
    Some((usize::try_from(rows).ok()?, usize::try_from(width).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encode::plan::rates::rates;
    use crate::store::Profile;

    /// Sums of uniform numbers: nearly normal, with a root mean square of 1.
    fn normal(count: usize) -> impl Iterator<Item = f64> {
        let mut state = 1u64;
        let mut uniform = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f64 / (1u64 << 24) as f64 - 0.5
        };
        (0..count).map(move |_| (0..12).map(|_| uniform()).sum())
    }

    /// Rows of a table of embeddings: a tenth is frequent, with a thousand times the second moment of the rare ones.
    fn table(size_of_frequent: f64) -> Vec<Sample> {
        let rare = normal(9000).map(|u| Sample { ratio: u, weight: u.abs() * 1e-3 });
        let frequent = normal(1000).map(|u| Sample { ratio: size_of_frequent * u, weight: size_of_frequent * u.abs() });
        rare.chain(frequent).collect()
    }

    #[test]
    fn momentum_stays_where_rare_rows_have_the_larger_ratios() {
        for profile in [Profile::Balanced, Profile::Compact] {
            let rates = rates(profile).unwrap();
            let step = |samples: &[Sample]| first_step(samples, Rule::Root, &rates).unwrap();
            let usual = step(&table(1.0));
            assert!((0.9..1.1).contains(&(usual / rates.first_moment)), "one step suits all rows: {usual}");
            let skewed = table(0.2);
            let lost = moment::kept(&skewed, (0.9 * rates.first_moment, rates.outward));
            assert!(lost < 0.5, "the step of all rows would keep {lost} of the momentum");
            let finer = step(&skewed);
            assert!(moment::kept(&skewed, (finer, rates.outward)) >= rates.least_kept);
            assert!(finer > 0.05 * rates.first_moment, "{finer} is finer than need be");
            assert_eq!(first_step(&[Sample { ratio: 0.0, weight: 0.0 }; 9], Rule::Root, &rates), None);
        }
    }
}
