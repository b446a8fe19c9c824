//! Steps for runs that went on from a quantized state.
//!
//! Weights that were read from a lattice lie on its points. Training moves them by less than a step at first, and
//! rounding to the same lattice returns most of them: the move is lost, and the next restore begins behind. Rounding
//! loses 22% of a move of a third of a step, and 56% of a quarter. On a lattice where their places are random, it
//! loses nothing on average. So a step is made finer until the places look random. In a run that was never
//! interrupted they always do.

use std::f64::consts::TAU;
use std::io;

use crate::recall::walk;
use crate::tile::{Codec, Coding, State};
use codec::lattice::{short_step, updates, values};

use super::subject::{Subject, read_tile, tiles};

/// Elements looked at. The mean of so many cosines of random places is 0 within .011.
const ELEMENTS: usize = 4096;
/// With fewer moved elements there is nothing to lose.
const LEAST: usize = 512;
/// Mean cosine above which places are not random: four and a half standard errors of [`ELEMENTS`].
const COHERENT: f64 = 0.05;
/// Shares of the ideal step that are tried in turn. The last makes a move of a third of the ideal step a whole step.
const SHARES: [f64; 7] = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.35];

/// The same coding with a step whose lattice does not already contain the tensor's elements.
pub(super) fn off_lattice(subject: &Subject, coding: Option<Coding>) -> io::Result<Option<Coding>> {
    let Some(wanted) = coding.and_then(|coding| coding.step()) else { return Ok(coding) };
    let from_keyframe = places(subject, coding.is_some_and(|coding| coding.parent.is_some()))?;
    let dtype = subject.tensor.dtype;
    let steps = SHARES.iter().filter_map(|share| short_step(dtype, share * wanted)).filter(|step| *step <= wanted);
    let mut last = wanted;
    for step in steps {
        last = step;
        if coherence(&from_keyframe, step, dtype.steps_of_octave()) < COHERENT {
            break;
        }
    }
    Ok(coding.map(|coding| match coding.codec {
        Codec::Lattice { .. } => Coding { codec: Codec::Lattice { step: last }, ..coding },
        _ => coding,
    }))
}

/// Some elements of the middle tile: each one's distance from its keyframe, and its size.
fn places(subject: &Subject, chained: bool) -> io::Result<Vec<(f64, f64)>> {
    let tensor = subject.tensor;
    let middle = tiles(tensor) / 2;
    let now = read_tile(subject.material.source, tensor, middle)?;
    let keyframe = match subject.parent.filter(|_| chained) {
        Some(parent) => match &*walk::state(parent.chain, parent.number as usize, middle)? {
            State::Lattice { keyframe, .. } => keyframe.clone(),
            State::Bytes(bytes) => Some(bytes.clone()),
            _ => None,
        },
        None => None,
    };
    let size = tensor.dtype.size();
    let every = (now.len() / size).div_ceil(ELEMENTS).max(1);
    let some = |bytes: &[u8]| -> Vec<u8> { bytes.chunks_exact(size).step_by(every).flatten().copied().collect() };
    let now = some(&now);
    let values = values(tensor.dtype, &now);
    let distances = match keyframe {
        Some(keyframe) => updates(tensor.dtype, &now, &some(&keyframe)),
        None => values.clone(),
    };
    Ok(distances.into_iter().zip(values).collect())
}

/// Mean cosine of the elements' places between two points of a lattice. `steps_of_octave`: elements whose own grid is
/// about as coarse as the lattice lie on it anyway, and do not count. In types with fine grids, elements exactly on a
/// point have not moved, and do not count either.
fn coherence(places: &[(f64, f64)], step: f64, steps_of_octave: f64) -> f64 {
    /// Larger than the rounding of a point to its type.
    const ON_POINT: f64 = 1e-4;
    const FINE_GRID: f64 = (1 << 20) as f64;
    let finest = |value: f64| value.abs() <= step / 8.0 * steps_of_octave;
    let counts = |place: f64| place.abs() > ON_POINT || steps_of_octave < FINE_GRID;
    let places = places.iter().filter(|(_, value)| finest(*value)).map(|(distance, _)| distance / step);
    let moved = places.map(|place| place - place.round()).filter(|place| counts(*place));
    let (sum, count) = moved.fold((0.0, 0), |(sum, count), place| (sum + cosine(place), count + 1));
    if count < LEAST { 0.0 } else { (sum / count as f64).abs() }
}

/// cos(2 pi x) within 2e-6, for x of at most a half: the library's takes ten times as long.
fn cosine(x: f64) -> f64 {
    // cos 2a = 2 cos^2 a - 1, with a of at most pi / 2.
    let a = (TAU / 2.0 * x).powi(2);
    let half = 1.0 + a * (-1.0 / 2.0 + a * (1.0 / 24.0 + a * (-1.0 / 720.0 + a * (1.0 / 40320.0 - a / 3_628_800.0))));
    2.0 * half * half - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Places of elements that began on the points of a lattice of step 1 and moved by normal steps of this deviation.
    fn moved(deviation: f64) -> Vec<(f64, f64)> {
        let mut state = 1u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let mut normal = || (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
        let place = |_| {
            let place = (8.0 * normal()).round() + deviation * normal();
            (place, place)
        };
        (0..ELEMENTS).map(place).collect()
    }

    #[test]
    fn elements_that_began_on_the_lattice_are_noticed_until_they_have_moved_far() {
        let of = |deviation: f64| coherence(&moved(deviation), 1.0, 8388608.0);
        assert!(of(0.1) > 0.7 && of(0.25) > 0.25 && of(1.0 / 3.0) > COHERENT);
        assert!(of(0.6) < COHERENT && of(5.0) < COHERENT);
        // Unmoved: exactly on their points, with nothing to lose.
        assert_eq!(of(0.0), 0.0);
    }

    #[test]
    fn the_grid_of_a_short_type_is_no_lattice_of_its_own() {
        // Eighths of a step, equally often, as bf16 has them near eight steps.
        let places: Vec<(f64, f64)> =
            (0..ELEMENTS).map(|i| i as f64 / 8.0 % 16.0).map(|place| (place, place)).collect();
        assert!(coherence(&places, 1.0, 128.0) < COHERENT);
    }

    #[test]
    fn the_short_cosine_is_one() {
        let off = |place: i32| (cosine(f64::from(place) / 200.0) - (TAU * f64::from(place) / 200.0).cos()).abs();
        assert!((-100..=100).map(off).all(|off| off < 2e-6));
    }

    #[test]
    fn a_finer_step_makes_places_random() {
        let moved = moved(0.25);
        assert!(SHARES.iter().any(|share| coherence(&moved, *share, 8388608.0) < COHERENT));
    }
}
