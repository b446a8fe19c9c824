//! Quantization to evenly spaced values, codes 0 to `levels` (at most 255) on a grid of f32, and to the nearest of some
//! centroids.

use codec::entropy::simd::{Level, multiversion};

/// A grid: value = zero point + scale * code.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Grid {
    /// The value of code 0.
    pub(super) zero: f32,
    /// The step.
    pub(super) scale: f32,
}

impl Grid {
    /// From `min` to `max`.
    pub(super) fn between(min: f64, max: f64, levels: u32) -> Grid {
        Grid { zero: min as f32, scale: ((max - min) / f64::from(levels)) as f32 }
    }

    /// The value of a code. Rounded twice, each time as IEEE defines it; results beyond f32's range are clamped to stay
    /// finite.
    #[inline(always)]
    fn value(self, code: f64) -> f32 {
        let value = (f64::from(self.zero) + f64::from(self.scale) * code) as f32;
        // Comparisons, since `clamp` does not become one instruction.
        let value = if value > f32::MAX { f32::MAX } else { value };
        if value < f32::MIN { f32::MIN } else { value }
    }
}

/// Adding and subtracting it rounds to the nearest integer, ties to even.
const ROUNDER: f64 = 6_755_399_441_055_744.0;

/// The codes of `x` and their values.
pub(super) fn quantized(grid: Grid, levels: u32, x: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let (mut codes, mut values) = (vec![0; x.len()], vec![0.0; x.len()]);
    quantize(grid, levels, x, &mut codes, &mut values);
    (codes, values)
}

/// Writes the codes of `x` and their values.
pub(super) fn quantize(grid: Grid, levels: u32, x: &[f32], codes: &mut [u8], values: &mut [f32]) {
    // A single value, or a range below what f32 can divide: all codes are 0.
    let inverse = if grid.scale == 0.0 { 0.0 } else { 1.0 / f64::from(grid.scale) };
    quantize_all(Level::detect(), x, grid, inverse, f64::from(levels), codes, values);
}

multiversion! {
    fn quantize_all(x: &[f32], grid: Grid, inverse: f64, levels: f64, codes: &mut [u8], values: &mut [f32]) -> () {
        for ((&x, code), value) in x.iter().zip(codes).zip(values) {
            let steps = (f64::from(x) - f64::from(grid.zero)) * inverse;
            let steps = if steps > 0.0 { steps } else { 0.0 };
            let steps = if steps < levels { steps } else { levels };
            let rounded = steps + ROUNDER;
            *code = rounded.to_bits() as u8;
            *value = grid.value(rounded - ROUNDER);
        }
    }
}

/// The values of [`quantize`]'s codes.
pub(super) fn dequantize(grid: Grid, codes: &[u8], values: &mut [f32]) {
    dequantize_all(Level::detect(), grid, codes, values);
}

multiversion! {
    fn dequantize_all(grid: Grid, codes: &[u8], values: &mut [f32]) -> () {
        for (&code, value) in codes.iter().zip(values) {
            *value = grid.value(f64::from(code));
        }
    }
}

/// Values whose bins are found together: they stay in the first-level cache while one border after the other passes.
const BLOCK: usize = 2048;

/// Index of the nearest centroid for each value. Centroids ascend, at most 256; a value in the middle of two belongs to
/// the lower one.
pub(super) fn nearest(values: &[f32], centroids: &[f32]) -> Vec<u8> {
    let middle = |pair: &[f32]| f64::midpoint(pair[0].into(), pair[1].into()) as f32;
    let borders: Vec<f32> = centroids.windows(2).map(middle).collect();
    let mut bins = vec![0; values.len()];
    for (bins, values) in bins.chunks_mut(BLOCK).zip(values.chunks(BLOCK)) {
        for &border in &borders {
            bins.iter_mut().zip(values).for_each(|(bin, &value)| *bin += u8::from(value > border));
        }
    }
    bins
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_gives_the_same() {
        let x: Vec<f32> =
            (0..997).map(|i| ((i * 7919) % 1009) as f32 * 0.001 - 0.4).chain([f32::MAX, f32::MIN]).collect();
        for grid in [Grid::between(-0.4, 0.6, 15), Grid::between(f32::MIN.into(), f32::MAX.into(), 255)] {
            let run = |level| {
                let (mut codes, mut values, mut again) = (vec![0; x.len()], vec![0.0; x.len()], vec![0.0; x.len()]);
                quantize_all(level, &x, grid, 1.0 / f64::from(grid.scale), 15.0, &mut codes, &mut values);
                dequantize_all(level, grid, &codes, &mut again);
                assert_eq!(values, again);
                assert!(values.iter().all(|value| value.is_finite()));
                (codes, values)
            };
            Level::available().into_iter().for_each(|level| assert_eq!(run(level), run(Level::PORTABLE), "{level:?}"));
        }
    }
}
