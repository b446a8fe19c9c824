//! Whether one file is a later state of the training run of another.
//!
//! Names alone do not tell: the finished models of a sweep, folds, subjects, agents and critics have numbers too. They
//! have the same tensors, and some begin at the same weights. None of them is a later state of another, and a step of the
//! lattice would be as large as their difference. So the files' own contents must say that one came after the other, or
//! the name must have a word for training, and nothing in the files may contradict it:
//!
//! - *The optimizer's count of steps* rises from a state to a later one. Where it is equal or falls, the two are siblings,
//!   or another run has begun.
//! - *Adam's arithmetic*: v' = b v + (1 - b) g^2, so n iterations later no second moment is below b^n times itself. A
//!   pair that breaks it is refuted. One that obeys it is proven only where a sibling would not: a longer training has
//!   larger second moments anyway, since they grow from 0.
//! - *The number in the name* is a count in the file, in both.

use std::collections::HashSet;
use std::io;
use std::slice::from_ref;

use rayon::prelude::*;

use crate::store::step_pattern::Counted;
use codec::Dtype;
use codec::floor::are_finite;
use codec::lattice::values;
use formats::{Description, ReadAt, Role, Tensor, Use};

use super::plan::pace::{optimizer_step, trainer_step};
use super::plan::{read, sample};

/// A file: its bytes, its tensors, and the numbers in its name.
pub(crate) struct State<'a> {
    pub(crate) source: &'a dyn ReadAt,
    pub(crate) description: &'a Description,
    pub(crate) counted: Counted,
}

/// Second moments may shrink to this share of themselves for the arithmetic to refute: two runs differ by more in one
/// element of twenty.
const TELLING: f64 = 1.0 / 3.0;
/// Most that the second moments of a sibling may be larger by its longer training, for the arithmetic to prove. At this
/// growth a quarter of a sibling's elements break it, and 1% where it is the same training at a rate 10% higher.
const MOST_GROWTH: f64 = 1.25;
/// Share of elements that may break the arithmetic: some lie among the smallest numbers of their type.
const FEW: f64 = 1e-3;

/// Why `after` is no proven later state of `before`'s run, in words. `None`: it is.
///
/// # Errors
/// Those of the sources.
pub(crate) fn refusal(before: &State, after: &State) -> io::Result<Option<String>> {
    let counts = |state: &State| optimizer_step(state.source, state.description);
    let of_optimizer = counts(before)?.zip(counts(after)?);
    let of_trainer = trainer_step(before.description).zip(trainer_step(after.description));
    if let Some((then, now)) = of_optimizer.filter(|(then, now)| now <= then) {
        return Ok(Some(match now < then {
            true => format!("the optimizer has counted {then} steps here, and {now} in the newer file"),
            false => format!("the optimizer has counted {then} steps in both"),
        }));
    }
    if let Some((then, now)) = of_trainer.filter(|(then, now)| now < then) {
        return Ok(Some(format!("its trainer has counted {then} steps here, and {now} in the newer file")));
    }
    let adam = match of_optimizer {
        Some((then, now)) => adam(before, after, (then, now))?,
        None => Adam::Silent,
    };
    if adam == Adam::Refutes {
        return Ok(Some("its second moments do not lead to those of the newer file".into()));
    }
    if after.counted.is_worded && before.counted.is_worded || adam == Adam::Proves || is_counted(before, after)? {
        return Ok(None);
    }
    Ok(Some(
        "no number in this name is known to count training; write step_N, epoch_N, iter_N or checkpoint-N to let it shrink"
            .into(),
    ))
}

/// The paths of the parameters, and of an optimizer's moments of them, that are not finite. Reads all of these.
///
/// # Errors
/// Those of the source.
pub(crate) fn not_finite(source: &(dyn ReadAt + Sync), description: &Description) -> io::Result<HashSet<String>> {
    const PIECE: u64 = 1 << 20;
    let is_of_training =
        |tensor: &&Tensor| !matches!(tensor.role, Role::Other | Role::Optimizer) && tensor.dtype.is_lattice_float();
    let tensors: Vec<&Tensor> = description.tensors.iter().filter(is_of_training).collect();
    let is_finite = |tensor: &Tensor| -> io::Result<bool> {
        let len = tensor.bytes();
        for start in (0..len).step_by(PIECE as usize) {
            let piece = start..len.min(start + PIECE);
            if !are_finite(tensor.dtype, &read(source, tensor, from_ref(&piece))?) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    let look = |tensor: &&Tensor| Ok((!is_finite(tensor)?).then(|| tensor.path.clone()));
    let found: io::Result<Vec<Option<String>>> = tensors.par_iter().map(look).collect();
    Ok(found?.into_iter().flatten().collect())
}

/// The verdict of Adam's arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Adam {
    Proves,
    Refutes,
    Silent,
}

/// Compares the second moments of two states whose optimizer has counted so many iterations.
fn adam(before: &State, after: &State, (then, now): (f64, f64)) -> io::Result<Adam> {
    let decays = [before, after].map(|state| state.description.progress.second_decay);
    let [Some(decay), Some(other)] = decays else { return Ok(Adam::Silent) };
    let least = decay.powf(now - then);
    if decay != other || !(TELLING..1.0).contains(&least) {
        return Ok(Adam::Silent);
    }
    let growth = (1.0 - decay.powf(now)) / (1.0 - decay.powf(then)) / least;
    let is_of_adam = |tensor: &&Tensor| {
        tensor.role == Role::SecondMoment && matches!(tensor.used, Use::ByRole | Use::Centered) && !tensor.lossless
    };
    let later = |tensor: &Tensor| {
        let mut tensors = after.description.tensors.iter();
        tensors.find(|other| other.path == tensor.path && other.shape == tensor.shape && other.dtype == tensor.dtype)
    };
    /// Tensors looked at.
    const TENSORS: usize = 32;
    let mut seconds: Vec<&Tensor> = before.description.tensors.iter().filter(is_of_adam).collect();
    seconds.sort_by_key(|tensor| std::cmp::Reverse(tensor.bytes()));
    let (mut broken, mut elements) = (0u64, 0u64);
    for tensor in seconds.into_iter().take(TENSORS) {
        let Some(twin) = later(tensor) else { continue };
        // The rounding of each iteration, to the type and of the product.
        let slack = if tensor.dtype == Dtype::F32 || tensor.dtype == Dtype::F64 { 1e-3 } else { 0.25 };
        let places = sample(tensor);
        let then = values(tensor.dtype, &read(before.source, tensor, &places)?);
        let now = values(twin.dtype, &read(after.source, twin, &places)?);
        for (then, now) in then.iter().zip(&now).filter(|(then, _)| **then > f64::from(f32::MIN_POSITIVE)) {
            elements += 1;
            broken += u64::from(*now < least * then * (1.0 - slack));
        }
    }
    /// Of fewer elements too few would be broken by siblings.
    const LEAST_ELEMENTS: u64 = 1024;
    Ok(match broken as f64 > FEW * elements as f64 {
        _ if elements < LEAST_ELEMENTS => Adam::Silent,
        true => Adam::Refutes,
        false if growth <= MOST_GROWTH => Adam::Proves,
        false => Adam::Silent,
    })
}

/// Whether a count in both files is the number in their names, or off by the same one.
fn is_counted(before: &State, after: &State) -> io::Result<bool> {
    let (Some(then), Some(now)) = (before.counted.step, after.counted.step) else { return Ok(false) };
    if now <= then {
        return Ok(false);
    }
    let is_off_by = |counts: (f64, f64)| {
        let off = (counts.0 - then as f64, counts.1 - now as f64);
        off.0 == off.1 && off.0.abs() <= 1.0
    };
    let counters = &before.description.progress.counters;
    let of_trainer = counters.iter().filter_map(|(name, then)| {
        let (_, now) = after.description.progress.counters.iter().find(|(other, _)| other == name)?;
        Some((*then as f64, *now as f64))
    });
    let of_optimizer =
        optimizer_step(before.source, before.description)?.zip(optimizer_step(after.source, after.description)?);
    Ok(of_trainer.chain(of_optimizer).any(is_off_by))
}
