//! Finer steps for second moments that live long, or belong to weights where the loss is steep.
//!
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

use crate::codec::lattice::values;
use crate::container::Tensor;

use super::Subject;
use super::lattice::{mean_square, read, sample};

/// Least share of the profile's step.
const LEAST: f64 = 1.0 / 8.0;
/// A chain keeps its unit while the ideal one is within this factor, in octaves of it. A chain begins anew with
/// another unit.
const KEEP_WITHIN: f64 = 0.8;

/// Made ahead, it becomes finer early, so that the state after seldom asks for less.
const KEEP_AHEAD: f64 = 0.4;

/// Elements in each place of a sample. 4 places tell the change to 1%, and units differ by factors of 2. The elements
/// lie side by side, so that all columns of a narrow matrix count.
const ELEMENTS: u64 = 1024;

/// The unit of a second moment, octaves / 65536.
pub(super) fn unit(subject: &Subject) -> io::Result<u32> {
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
    let wanted = -share.clamp(LEAST, 1.0).log2();
    let halved = |unit: u32| f64::from(most).log2() - f64::from(unit).log2();
    let finer = if ahead { KEEP_AHEAD } else { KEEP_WITHIN };
    let kept = before.filter(|unit| *unit <= most && (-KEEP_WITHIN..=finer).contains(&(wanted - halved(*unit))));
    kept.unwrap_or_else(|| most >> (if ahead { wanted.ceil() } else { wanted.round() }) as u32)
}

/// Root mean square of the elements' changes to the next state, in octaves, without their common change, which the
/// prediction covers. `None`: no element can be compared.
fn change(subject: &Subject, twin: &Tensor) -> io::Result<Option<f64>> {
    let (tensor, mut logs) = (subject.tensor, Vec::new());
    sample(tensor, |range| {
        let range = range.start..range.end.min(range.start + ELEMENTS * tensor.dtype.size() as u64);
        let now = read(subject.material.source, tensor, &range)?;
        let then = read(subject.material.newer.0, twin, &range)?;
        let pairs = values(tensor.dtype, &now).into_iter().zip(values(tensor.dtype, &then));
        let both = pairs.filter(|(now, then)| *now > 0.0 && *then > 0.0);
        logs.extend(both.map(|(now, then)| (then / now).log2()).filter(|log| log.is_finite()));
        Ok(())
    })?;
    let mean = logs.iter().sum::<f64>() / logs.len().max(1) as f64;
    logs.iter_mut().for_each(|log| *log -= mean);
    Ok((!logs.is_empty()).then(|| mean_square(&logs).sqrt()))
}

#[cfg(test)]
mod tests {
    use super::choose;

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
