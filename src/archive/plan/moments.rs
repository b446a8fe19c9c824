//! Optimizer state: which codec, and its step.

use std::io;
use std::sync::Arc;

use crate::codec::log::{Factors, FactorsBuilder};
use crate::codec::{lattice, moment};
use crate::recall::{State, tile};
use crate::store::object::{Coding, rows_and_width};

use super::super::payload::{self, Around, Place};
use super::lattice::{mean_square, read, root_mean_square, sample};
use super::{Choice, Subject, read_tile, tiles};

/// Bits that a factor takes, in units of a sixteenth of an octave.
const FACTOR_BITS: f64 = 4.0;

/// A first moment, in units of the root of its second; `None` where that is not in the file, or there is no ratio.
pub(super) fn first(subject: &Subject) -> io::Result<Option<Choice>> {
    let Some((second, place)) = subject.partner else { return Ok(None) };
    let (tensor, source) = (subject.tensor, subject.material.source);
    let mut ratios = Vec::new();
    sample(tensor, |range| {
        let (m, v) = (read(source, tensor, &range)?, read(source, second, &range)?);
        ratios.extend(moment::ratios(tensor.dtype, &m, &v));
        Ok(())
    })?;
    let rms = mean_square(&ratios).sqrt();
    let step = lattice_step(rms, subject.rates.first_moment);
    // The same with a base and without: the two need not be weighed.
    Ok(step.map(|step| {
        let coding = Coding::Moment { second: place, step };
        Choice { coding, alone: coding, bits: (0.0, 0.0) }
    }))
}

/// A step in ratios: no element type's grid matters, as for fp32 weights.
fn lattice_step(rms: f64, c: f64) -> Option<f64> {
    lattice::choose_g(crate::codec::Dtype::F32, &[rms], c)
}

/// A momentum buffer: a lattice from 0. What it was before tells little about what it is, at the distance of checkpoints.
pub(super) fn momentum(subject: &Subject) -> io::Result<Option<Choice>> {
    let tensor = subject.tensor;
    let rms = root_mean_square(subject)?;
    let step = lattice::choose_g(tensor.dtype, &[rms], subject.rates.momentum);
    Ok(step.map(|step| {
        let coding = Coding::LatticeKey { step };
        Choice { coding, alone: coding, bits: (0.0, 0.0) }
    }))
}

/// A second moment or sum of squares: as logarithmic difference to the base, or with factors of its own, whichever takes
/// less of the middle tile.
pub(super) fn second(subject: &Subject, unit: u32) -> io::Result<Option<Choice>> {
    let tensor = subject.tensor;
    let middle = tiles(tensor) / 2;
    let data = Arc::new(read_tile(subject.material.source, tensor, middle)?);
    let place = |coding| Place { dtype: tensor.dtype, coding, rows: super::rows(tensor, middle) };
    let bits = |coding, around: Around, extra: f64| -> io::Result<Option<f64>> {
        let Some((state, ..)) = payload::quantize(place(coding), &data, around) else {
            return Ok(None);
        };
        let mut out = Vec::new();
        let fits = payload::payload(place(coding), &state, around.parent, &mut out)?;
        Ok(fits.then_some(8.0 * out.len() as f64 + extra))
    };
    let alone = Coding::LogKey { unit };
    let factors = Arc::new(factors_of_tile(subject, middle, &data));
    let (rows, width) = rows_and_width(&tensor.shape);
    let share = data.len() as f64 / (tensor.extent.end - tensor.extent.start) as f64;
    let factor_bits = if factors.is_flat() { 0.0 } else { FACTOR_BITS * (rows + width) as f64 * share };
    let around = Around { factors: Some(&factors), ..Around::default() };
    let Some(key_bits) = bits(alone, around, factor_bits)? else { return Ok(None) };
    let key = Choice { coding: alone, alone, bits: (key_bits, key_bits) };
    let Some(parent) = subject.parent else { return Ok(Some(key)) };
    let state = tile::state(parent.chain, parent.number as usize, middle)?;
    if !matches!(&state, State::Log { unit: before, .. } if *before == unit) {
        return Ok(Some(key));
    }
    let coding = Coding::Log { parent: parent.number, unit };
    let delta = bits(coding, Around { parent: Some(&state), ..Around::default() }, 0.0)?;
    Ok(Some(match delta.filter(|delta| *delta < key_bits) {
        Some(delta) => Choice { coding, alone, bits: (delta, key_bits) },
        None => key,
    }))
}

/// Factors as far as one tile tells: enough to weigh them.
fn factors_of_tile(subject: &Subject, number: usize, data: &[u8]) -> Factors {
    let tensor = subject.tensor;
    match has_factors(&tensor.shape) {
        Some((rows, width)) => {
            let mut builder = FactorsBuilder::new(rows, width);
            builder.add(tensor.dtype, super::rows(tensor, number).first, data);
            builder.finish()
        }
        None => Factors::flat_of(tensor.dtype, data),
    }
}

/// Rows and elements of each, where a rank-1 prediction is one: of two rows and columns at least.
pub(in super::super) fn has_factors(shape: &[u64]) -> Option<(usize, usize)> {
    let (rows, width) = rows_and_width(shape);
    (rows > 1 && width > 1).then_some(())?;
    Some((usize::try_from(rows).ok()?, usize::try_from(width).ok()?))
}
