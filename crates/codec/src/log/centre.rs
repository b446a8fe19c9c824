//! Centres the prediction among the elements, so that a restored run keeps its speed.
//!
//! An optimizer divides a gradient by the root of v. The gain of a step is the gradient times the step, which is v /
//! sqrt(v_q) on average. A geometric mean as prediction, with a unit of two octaves, makes that sum up to 7% larger
//! than the original's. The few elements far above the prediction come back too small, and they have most of the
//! gradient. The run then has a learning rate that is that much larger, for 1 / (1 - beta2) iterations. So the
//! prediction moves up until both sums are equal.

use super::factors::{Factors, Grid, SHIFT};
use super::{FRACTION_BITS, quantize};
use crate::Dtype;
use crate::lattice::values;

/// A move of the prediction changes some q, which calls for another move. Two turns come within a sixteenth of an
/// octave.
const TURNS: usize = 2;

/// Some elements of a tensor: the index of the first one, and their bytes.
pub type Piece = (u64, Vec<u8>);

/// Moves `factors` for steps of `unit`, judged by these pieces of the tensor.
#[must_use]
pub fn centred(factors: Factors, dtype: Dtype, pieces: &[Piece], unit: u32) -> Factors {
    let mut factors = factors;
    for _ in 0..TURNS {
        let Some(speed) = speed(&factors, dtype, pieces, unit) else { break };
        let sixteenths = 2.0 * speed.log2() * f64::from(1u32 << (FRACTION_BITS - SHIFT));
        factors = factors.moved(sixteenths.round() as i32);
    }
    factors
}

/// Sum of v / sqrt(v_q) divided by the sum of sqrt(v). `None` if there is nothing to compare, or a piece does not fit.
fn speed(factors: &Factors, dtype: Dtype, pieces: &[Piece], unit: u32) -> Option<f64> {
    let (mut gained, mut before) = (0.0, 0.0);
    let (mut q, mut decoded) = (Vec::new(), Vec::new());
    for (first, v) in pieces {
        q.resize(v.len() / dtype.size(), 0);
        decoded.resize(v.len(), 0);
        quantize(dtype, v, Grid { factors, first: *first }, unit, None, &mut q, &mut decoded).ok()?;
        for (v, v_q) in values(dtype, v).into_iter().zip(values(dtype, &decoded)) {
            if v > 0.0 && v_q > 0.0 {
                gained += v / v_q.sqrt();
                before += v.sqrt();
            }
        }
    }
    let speed = gained / before;
    (speed.is_finite() && speed > 0.0).then_some(speed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::FactorsBuilder;

    /// Elements whose logarithms are normal with a deviation of an octave.
    fn tile(rows: usize, width: usize) -> Vec<u8> {
        let mut state = 7u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let mut normal = || (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
        (0..rows * width).flat_map(|_| ((1e-8 * normal().exp2()) as f32).to_le_bytes()).collect()
    }

    #[test]
    fn a_run_goes_on_as_fast_as_it_was() {
        let (rows, width) = (256, 256);
        let pieces = [(0, tile(rows, width))];
        for (octaves, at_least) in [(2u32, 1.01), (4, 1.1), (8, 1.15)] {
            let unit = octaves << FRACTION_BITS;
            let mut builder = FactorsBuilder::new(rows, width);
            builder.add(Dtype::F32, 0, &pieces[0].1);
            let factors = builder.finish(unit);
            let before = speed(&factors, Dtype::F32, &pieces, unit).unwrap();
            let centred = centred(factors, Dtype::F32, &pieces, unit);
            let after = speed(&centred, Dtype::F32, &pieces, unit).unwrap();
            assert!(before > at_least && (0.96..1.04).contains(&after), "{octaves} octaves: {before} {after}");
        }
    }

    #[test]
    fn what_does_not_fit_stays_where_it_is() {
        let factors = Factors::flat(100);
        for tile in [Vec::new(), (-1f32).to_le_bytes().to_vec(), vec![0; 4096]] {
            assert_eq!(centred(factors.clone(), Dtype::F32, &[(0, tile)], 1 << 17), factors);
        }
    }
}
