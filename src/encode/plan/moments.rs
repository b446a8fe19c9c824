//! Optimizer state: which codec, and its step.
//!
//! Second moments that live long, or belong to weights where the loss is steep, have finer steps than the profile's.
//! An optimizer remembers a second moment, and so the error in it, for 1 / (1 - beta2) iterations. At beta2 .95 a
//! step of four octaves has no visible cost. At .999 it was the whole cost of a restore: 1.7 iterations; two octaves
//! cost .9. A long-lived moment also changes little between checkpoints, so differences stay short with finer steps.
//! A step is therefore a multiple of that change, and at most the profile's. One element in 50 changes its symbol
//! with `compact`, one in 13 with `balanced`.
//!
//! Noise in a second moment costs most in the matrices that every token goes through, as noise in weights does
//! ([`super::steep`]). A mixture of experts lost .71 iterations a restore, and loses .51 with the same cautions here.
//! Half the step for all its tensors saves as little more, for five times the bytes.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::recall::walk;
use crate::store::object::rows_and_width;
use crate::tile::{Around, Codec, Coding, State};
use codec::entropy::scratch;
use codec::lattice::values;
use codec::log::{Factors, FactorsBuilder};
use codec::moment::{Rule, Sample};
use codec::{lattice, moment};
use formats::{ReadAt, Tensor, Use};

use super::lattice::{mean_square, read, root_mean_square, sample, short_sample};
use super::rates::{Rates, VECTOR};
use super::subject::{Choice, Subject, read_tile, tiles};

/// The bits of a factor, about.
const FACTOR_BITS: f64 = 3.0;

/// Adam's first moment is a mean of gradients, the second a mean of their squares. So by Cauchy and Schwarz |m| /
/// sqrt(v) is at most (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)): 7.3 for b2 = .999, 23 for .9999, 73 for .99999.
/// Optimizers that keep other values by the same names (ADOPT averages quotients) go far beyond it.
const LARGEST_QUOTIENT: f64 = 80.0;
/// One sample in so many may be beyond it, because the smallest values of a type are imprecise.
const FEW: usize = 1000;

/// Least share of the profile's step.
const LEAST_UNIT: f64 = 1.0 / 8.0;
/// A chain keeps its unit while the ideal one is within this factor, in octaves of it. A chain begins anew with
/// another unit.
const KEEP_WITHIN: f64 = 0.8;

/// Made ahead, it becomes finer early, so that the state after seldom asks for less.
const KEEP_AHEAD: f64 = 0.4;

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
    let places = sample(tensor);
    let (m, v) = (read(source, tensor, &places)?, read(source, second, &places)?);
    let samples = moment::samples((rule, tensor.dtype), &m, &v);
    if !are_quotients(&samples) {
        return Ok(None);
    }
    let step = first_step(&samples, rule, &subject.rates);
    // A first moment is never a difference, so it costs the same with and without a base.
    Ok(step.map(|step| Choice::of(Codec::Moment { second: place, step, rule }.alone())))
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
    lattice::choose_g(codec::Dtype::F32, &[rms], c)
}

/// A momentum buffer: a lattice from 0. At the distance of checkpoints, its former value tells little about the new
/// one.
pub(super) fn momentum(subject: &Subject) -> io::Result<Option<Choice>> {
    let tensor = subject.tensor;
    let rms = root_mean_square(subject)?;
    let step = lattice::choose_g(tensor.dtype, &[rms], subject.rates.momentum);
    Ok(step.map(|step| Choice::of(Codec::Lattice { step }.alone())))
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
    Ok(lattice_step(1.0, step).map(|step| Choice::of(Codec::Sized { step, rule }.alone())))
}

/// The unit of a second moment, octaves / 65536.
fn unit(subject: &Subject) -> io::Result<u32> {
    let (most, full) = (subject.rates.second_moment, subject.rates.full_change);
    let Some(twin) = subject.twin else { return Ok(most) };
    let before = subject.parent.and_then(|parent| parent.entry.coding.unit());
    Ok(match change(subject, twin)? {
        Some(octaves) => {
            let share = (octaves / full).min(1.0) * subject.caution;
            choose(most, share, before, subject.material.ahead)
        }
        None => most,
    })
}

/// `share`: the elements' change, in units of the change from which on the unit is `most`. `ahead`: the change to the
/// next state may be smaller.
fn choose(most: u32, share: f64, before: Option<u32>, ahead: bool) -> u32 {
    // How often the step is halved.
    let wanted = -share.clamp(LEAST_UNIT, 1.0).log2();
    let halved = |unit: u32| f64::from(most).log2() - f64::from(unit).log2();
    let finer = if ahead { KEEP_AHEAD } else { KEEP_WITHIN };
    let kept = before.filter(|unit| *unit <= most && (-KEEP_WITHIN..=finer).contains(&(wanted - halved(*unit))));
    kept.unwrap_or_else(|| most >> (if ahead { wanted.ceil() } else { wanted.round() }) as u32)
}

/// Root mean square of the elements' changes to the next state, in octaves, without their common change, which the
/// prediction covers. `None`: no element can be compared.
fn change(subject: &Subject, twin: &Tensor) -> io::Result<Option<f64>> {
    let (tensor, places) = (subject.tensor, short_sample(subject.tensor).collect::<Vec<_>>());
    let now = values(tensor.dtype, &read(subject.material.source, tensor, &places)?);
    let then = values(tensor.dtype, &read(subject.material.newer.0, twin, &places)?);
    let both = now.iter().zip(&then).filter(|(now, then)| **now > 0.0 && **then > 0.0);
    let mut logs: Vec<f64> = both.map(|(now, then)| (then / now).log2()).filter(|log| log.is_finite()).collect();
    let mean = logs.iter().sum::<f64>() / logs.len().max(1) as f64;
    logs.iter_mut().for_each(|log| *log -= mean);
    Ok((!logs.is_empty()).then(|| mean_square(&logs).sqrt()))
}

/// A second moment of Adam. If it does not fit its unit, because its type is too coarse among its smallest numbers, then
/// the finest one that fits, up to the profile's.
pub(super) fn second_of_adam(subject: &Subject) -> io::Result<Option<Choice>> {
    let mut unit = unit(subject)?;
    loop {
        let choice = second(subject, unit)?;
        if choice.is_some() || unit >= subject.rates.second_moment {
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
    let alone = Codec::Log { unit }.alone();
    // One tile suffices to weigh them.
    let factors = Arc::new(factors(subject.material.source, tensor, alone, middle..middle + 1)?);
    let (rows, width) = rows_and_width(&tensor.shape);
    let share = data.len() as f64 / tensor.bytes() as f64;
    let factor_bits = if factors.is_flat() { 0.0 } else { FACTOR_BITS * (rows + width) as f64 * share };
    let around = Around { factors: Some(&factors), ..Around::default() };
    let Some(key_bits) = subject.bits(middle, &data, alone, around)? else { return Ok(None) };
    let key_bits = key_bits + factor_bits;
    let key = Choice { bits: (key_bits, key_bits), ..Choice::of(alone) };
    let Some(parent) = subject.parent else { return Ok(Some(key)) };
    let state = walk::state(parent.chain, parent.number as usize, middle)?;
    if !matches!(&*state, State::Log { unit: before, .. } if *before == unit) {
        return Ok(Some(key));
    }
    let coding = Codec::Log { unit }.on(parent.number);
    let delta = subject.bits(middle, &data, coding, Around { parent: Some(&state), ..around })?;
    Ok(Some(match delta.map(|delta| delta + factor_bits).filter(|delta| *delta < key_bits) {
        Some(delta) => Choice { coding, bits: (delta, key_bits), ..key },
        None => key,
    }))
}

/// The rank-1 prediction of a tensor, or of the size of its elements, from these of its tiles.
pub(in super::super) fn factors(
    source: &dyn ReadAt,
    tensor: &Tensor,
    coding: Coding,
    tiles: Range<usize>,
) -> io::Result<Factors> {
    let of_sizes = matches!(coding.codec, Codec::Sized { .. });
    let Some((rows, width)) = has_factors(&tensor.shape) else {
        let middle = read_tile(source, tensor, super::tiles(tensor) / 2)?;
        let flat = if of_sizes { Factors::size_of } else { Factors::flat_of };
        return Ok(flat(tensor.dtype, &middle));
    };
    let mut builder = if of_sizes { FactorsBuilder::of_sizes } else { FactorsBuilder::new }(rows, width);
    for number in tiles {
        let data = read_tile(source, tensor, number)?;
        builder.add(tensor.dtype, super::rows(tensor, number).first, &data);
        scratch::give_bytes(data.into());
    }
    Ok(builder.finish(coding.unit().unwrap_or(0)))
}

/// The number of rows and their length, if a rank-1 prediction is possible: two rows and columns at least.
fn has_factors(shape: &[u64]) -> Option<(usize, usize)> {
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

    const OCTAVE: u32 = 1 << 16;

    #[test]
    fn what_changes_little_has_a_fine_step() {
        assert_eq!(choose(4 * OCTAVE, 3.0, None, false), 4 * OCTAVE);
        assert_eq!(choose(4 * OCTAVE, 0.5, None, false), 2 * OCTAVE);
        assert_eq!(choose(2 * OCTAVE, 0.005, None, false), OCTAVE / 4);
        assert_eq!(choose(4 * OCTAVE, 0.0, None, false), OCTAVE / 2);
    }

    #[test]
    fn a_chain_keeps_its_unit_until_another_is_clearly_right() {
        assert_eq!(choose(4 * OCTAVE, 0.32, Some(2 * OCTAVE), false), 2 * OCTAVE);
        assert_eq!(choose(4 * OCTAVE, 0.2, Some(2 * OCTAVE), false), OCTAVE);
        // A finer profile since.
        assert_eq!(choose(2 * OCTAVE, 1.5, Some(4 * OCTAVE), false), 2 * OCTAVE);
    }
}
