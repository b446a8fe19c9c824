//! Uniform quantization of one row (section 5.2): symmetric, asymmetric, and adaptive asymmetric, whose range is found by a
//! greedy search.

use super::super::uniform::{self, Grid};
use crate::entropy::level::{Level, multiversion};

/// How a row's range is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// From minus to plus the largest magnitude.
    Symmetric,
    /// From the smallest to the largest value.
    Asymmetric,
    /// The best range that a greedy search comes by as it shrinks that one.
    Adaptive(Search),
}

/// Parameters of the greedy search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Search {
    /// Steps that the whole range is divided into (`num_bins`), at least 2.
    pub bins: u16,
    /// How much of the range the search goes through (`ratio`), in percent.
    pub percent: u8,
}

impl Search {
    /// What served the paper best (figures 10 and 11): 25 steps for 2 and 3 bits, 45 for more, the whole range.
    pub fn published(bits: u32) -> Search {
        Search { bins: if bits <= 3 { 25 } else { 45 }, percent: 100 }
    }

    /// Ranges that are tried after the first; the last one is never empty.
    fn rounds(self) -> u16 {
        let rounds = u32::from(self.bins) * u32::from(self.percent.min(100)) / 100;
        (rounds as u16).min(self.bins.saturating_sub(1))
    }
}

/// The grid of symmetric quantization, which is stored as its x_max alone.
pub(super) fn symmetric(max: f32, bits: u32) -> Grid {
    Grid::between(-f64::from(max), f64::from(max), levels(bits))
}

/// The largest code.
pub(super) fn levels(bits: u32) -> u32 {
    (1 << bits) - 1
}

/// Values that are looked at side by side: one would make each addition wait for the last.
const LANES: usize = 32;

/// Adding and taking it away again rounds an f32 from 0 to 2^22 to the nearest integer, ties to even.
const ROUNDER: f32 = 12_582_912.0;

/// The grid of a row (not empty, all finite). `steps`: a buffer to use again.
pub(super) fn grid(method: Method, bits: u32, row: &[f32], steps: &mut Vec<f32>) -> Grid {
    let level = Level::detect();
    let (min, max) = extremes(level, row);
    match method {
        Method::Symmetric => symmetric(max.max(-min), bits),
        Method::Asymmetric => Grid::between(f64::from(min), f64::from(max), levels(bits)),
        Method::Adaptive(search) => {
            let (low, high) = shrink(search, bits, row, (min, max), steps);
            let step = (f64::from(max) - f64::from(min)) / f64::from(search.bins.max(1));
            // Without a step taken, the ends are exactly those of the row.
            let (min, max) = (f64::from(min) + step * f64::from(low), f64::from(max) - step * f64::from(high));
            Grid::between(min, max, levels(bits))
        }
    }
}

/// The greedy search: how many steps x_min goes up, and how many x_max goes down. In each round one of them goes one further,
/// whichever leaves the smaller error; the round with the smallest of all wins, the whole range if none is better.
fn shrink(search: Search, bits: u32, row: &[f32], (min, max): (f32, f32), steps: &mut Vec<f32>) -> (u16, u16) {
    let level = Level::detect();
    let per_step = f32::from(search.bins) / (max - min);
    // Ranges too narrow or too wide for f32 are not searched; they are all rounding error, or no weights.
    if !per_step.is_normal() || !(max - min).is_normal() {
        return (0, 0);
    }
    to_steps(level, row, min, per_step, steps);
    let (levels, bins) = (levels(bits) as f32, f32::from(search.bins));
    let (mut low, mut high) = (0, 0);
    let first = errors(level, steps, levels, [(0.0, bins), (0.0, bins)])[0];
    let mut best = (first, (0, 0));
    for _ in 0..search.rounds() {
        let (from, to) = (f32::from(low), bins - f32::from(high));
        let [up, down] = errors(level, steps, levels, [(from + 1.0, to), (from, to - 1.0)]);
        let error = if up < down {
            low += 1;
            up
        } else {
            high += 1;
            down
        };
        if error < best.0 {
            best = (error, (low, high));
        }
    }
    best.1
}

multiversion! {
    fn extremes(row: &[f32]) -> (f32, f32) {
        let (mut least, mut most) = ([f32::MAX; LANES], [f32::MIN; LANES]);
        let mut one = |lane: usize, value: f32| {
            least[lane] = if value < least[lane] { value } else { least[lane] };
            most[lane] = if value > most[lane] { value } else { most[lane] };
        };
        let (chunks, tail) = row.as_chunks::<LANES>();
        for chunk in chunks {
            (0..LANES).for_each(|lane| one(lane, chunk[lane]));
        }
        (0..tail.len()).for_each(|lane| one(lane, tail[lane]));
        (least.iter().fold(f32::MAX, |a, &b| a.min(b)), most.iter().fold(f32::MIN, |a, &b| a.max(b)))
    }
}

multiversion! {
    /// The row in steps of the search from its smallest value on.
    fn to_steps(row: &[f32], min: f32, per_step: f32, steps: &mut Vec<f32>) -> () {
        steps.clear();
        steps.extend(row.iter().map(|&value| (value - min) * per_step));
    }
}

multiversion! {
    /// Squared error, in steps of the search, if the range were each of these two.
    fn errors(steps: &[f32], levels: f32, ranges: [(f32, f32); 2]) -> [f32; 2] {
        let scales = ranges.map(|(from, to)| levels / (to - from));
        let mut sums = [[0f32; LANES]; 2];
        let (chunks, tail) = steps.as_chunks::<LANES>();
        for chunk in chunks {
            for ((sums, scale), (from, _)) in sums.iter_mut().zip(scales).zip(ranges) {
                for lane in 0..LANES {
                    let missed = miss((chunk[lane] - from) * scale, levels);
                    sums[lane] += missed * missed;
                }
            }
        }
        if !tail.is_empty() {
            let (mut last, mut counts) = ([0f32; LANES], [0f32; LANES]);
            last[..tail.len()].copy_from_slice(tail);
            counts[..tail.len()].fill(1.0);
            for ((sums, scale), (from, _)) in sums.iter_mut().zip(scales).zip(ranges) {
                for lane in 0..LANES {
                    let missed = miss((last[lane] - from) * scale, levels) * counts[lane];
                    sums[lane] += missed * missed;
                }
            }
        }
        let total = |sums: &[f32; LANES], scale: f32| sums.iter().sum::<f32>() / (scale * scale);
        [total(&sums[0], scales[0]), total(&sums[1], scales[1])]
    }
}

/// How far a value, in steps of its grid, is from what it becomes.
#[inline(always)]
fn miss(value: f32, levels: f32) -> f32 {
    let clipped = if value > 0.0 { value } else { 0.0 };
    let clipped = if clipped < levels { clipped } else { levels };
    value - ((clipped + ROUNDER) - ROUNDER)
}

/// l2 error of a row (not empty, all finite) quantized so: the paper's measure, of which it takes the mean over rows.
pub fn l2_error(method: Method, bits: u32, row: &[f32]) -> f64 {
    let (mut codes, mut values) = (vec![0; row.len()], vec![0.0; row.len()]);
    uniform::quantize(grid(method, bits, row, &mut Vec::new()), levels(bits), row, &mut codes, &mut values);
    let squares: f64 = row.iter().zip(&values).map(|(&x, &q)| (f64::from(x) - f64::from(q)).powi(2)).sum();
    squares.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The search decides on sums: they must not depend on the machine.
    #[test]
    fn every_instruction_set_gives_the_same() {
        let row: Vec<f32> = (0..997).map(|i| ((i * 7919) % 1009) as f32 * 0.001 - 0.4).collect();
        let run = |level| {
            let mut steps = vec![9.0; 3];
            let (min, max) = extremes(level, &row);
            to_steps(level, &row, min, 45.0 / (max - min), &mut steps);
            let errors = errors(level, &steps, 15.0, [(3.0, 44.0), (2.0, 43.0)]);
            (min.to_bits(), max.to_bits(), errors.map(f32::to_bits))
        };
        let portable = run(Level::PORTABLE);
        for level in Level::available() {
            assert_eq!(run(level), portable, "{level:?}");
        }
    }
}
