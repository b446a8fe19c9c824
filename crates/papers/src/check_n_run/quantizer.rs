//! Uniform quantization of one row (section 5.2): symmetric, asymmetric, and adaptive asymmetric, whose range a greedy
//! search finds.

use std::ops::Range;

use super::super::quantize::{self, Grid};
use super::super::select::ranges;
use codec::entropy::simd::{Level, multiversion};

/// How a row's range is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// From minus to plus the largest magnitude.
    Symmetric,
    /// From the smallest to the largest value.
    Asymmetric,
    /// The best range that a greedy search meets while it shrinks the asymmetric one.
    Adaptive(Search),
}

/// Parameters of the greedy search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Search {
    /// Steps of the whole range (`num_bins`), at least 2.
    pub bins: u16,
    /// Share of the range that the search covers (`ratio`), in percent.
    pub percent: u8,
}

impl Search {
    /// The paper's best values (figures 10 and 11): 25 steps for 2 and 3 bits, 45 for more, the whole range.
    pub fn published(bits: u32) -> Search {
        Search { bins: if bits <= 3 { 25 } else { 45 }, percent: 100 }
    }

    /// Number of ranges to try after the first; the last one is never empty.
    fn rounds(self) -> u16 {
        let rounds = u32::from(self.bins) * u32::from(self.percent.min(100)) / 100;
        (rounds as u16).min(self.bins.saturating_sub(1))
    }
}

/// The grid of symmetric quantization, which only stores its x_max.
pub(super) fn symmetric(max: f32, bits: u32) -> Grid {
    Grid::between(-f64::from(max), f64::from(max), levels(bits))
}

/// The largest code.
pub(super) fn levels(bits: u32) -> u32 {
    (1 << bits) - 1
}

/// Values processed side by side: with one, each addition would wait for the last.
const LANES: usize = 16;
/// Widest row for the search of several rows side by side, one per lane: their 16 KiB stay in the first-level cache. In
/// narrow rows, adding up lanes would take most of the time. A wider row alone is spread over all lanes.
const NARROW: usize = 256;

/// Adding and subtracting it rounds an f32 from 0 to 2^22 to the nearest integer, ties to even.
const ROUNDER: f32 = 12_582_912.0;

/// The grid of each row of `x` (all finite); `lengths` of the rows, none of them 0.
pub(super) fn grids(method: Method, bits: u32, x: &[f32], lengths: &[usize]) -> Vec<Grid> {
    let Method::Adaptive(search) = method else {
        let one = |row: Range<usize>| match extremes(Level::detect(), &x[row]) {
            (min, max) if method == Method::Symmetric => symmetric(max.max(-min), bits),
            (min, max) => Grid::between(min.into(), max.into(), levels(bits)),
        };
        return ranges(lengths).map(one).collect();
    };
    let (mut grids, mut left) = (Vec::with_capacity(lengths.len()), x);
    for alike in lengths.chunk_by(|a, b| a == b) {
        let is_wide = alike[0] > NARROW;
        for group in alike.chunks(if is_wide { 1 } else { LANES }) {
            let (rows, rest) = left.split_at(group.len() * group[0]);
            grids.extend(shrink(search, bits, rows, group[0], is_wide));
            left = rest;
        }
    }
    grids
}

/// The grid of a range that begins `low` steps of the search above the smallest value and ends `high` below the
/// largest.
fn shrunk(search: Search, bits: u32, (min, max): (f32, f32), low: f32, high: f32) -> Grid {
    let step = (f64::from(max) - f64::from(min)) / f64::from(search.bins.max(1));
    // Without a step, the ends are exactly those of the row.
    let (min, max) = (f64::from(min) + step * f64::from(low), f64::from(max) - step * f64::from(high));
    Grid::between(min, max, levels(bits))
}

/// Steps of the search in a unit. 0 for ranges too narrow or too wide for f32, which are not searched: they are all
/// rounding error, or no weights.
fn per_step(search: Search, (min, max): (f32, f32)) -> f32 {
    let per_step = f32::from(search.bins) / (max - min);
    if per_step.is_normal() && (max - min).is_normal() { per_step } else { 0.0 }
}

/// The greedy search of at most [`LANES`] rows of one length, or of a single row whose values are spread over the lanes.
/// In each round either x_min goes one step up or x_max one step down, whichever leaves the smaller error. The round
/// with the smallest error wins, or the whole range if none is better. A row's result does not depend on other rows.
fn shrink(search: Search, bits: u32, rows: &[f32], length: usize, is_spread: bool) -> Vec<Grid> {
    let level = Level::detect();
    let ranges: Vec<(f32, f32)> = rows.chunks_exact(length).map(|row| extremes(level, row)).collect();
    // Of each lane.
    let of = |lane: usize| ranges[if is_spread { 0 } else { lane.min(ranges.len() - 1) }];
    let least: [f32; LANES] = std::array::from_fn(|lane| of(lane).0);
    let per_step: [f32; LANES] = std::array::from_fn(|lane| per_step(search, of(lane)));
    let (across, down) = if is_spread { (1, LANES) } else { (length, 1) };
    let step = |at: usize, lane: usize| rows.get(at).map_or(0.0, |value| (value - least[lane]) * per_step[lane]);
    let column = |i: usize| std::array::from_fn(|lane| step(i * down + lane * across, lane));
    let columns: Vec<[f32; LANES]> = (0..length.div_ceil(down)).map(column).collect();
    let spread = is_spread.then_some((columns.len() * LANES - length) as f32);
    let (low, high) = search_all(level, &columns, levels(bits) as f32, f32::from(search.bins), search.rounds(), spread);
    let one = |(lane, range): (usize, &(f32, f32))| {
        let taken = if per_step[lane] == 0.0 { (0.0, 0.0) } else { (low[lane], high[lane]) };
        shrunk(search, bits, *range, taken.0, taken.1)
    };
    ranges.iter().enumerate().map(one).collect()
}

multiversion! {
    /// Steps taken from below and from above, for each row. `spread`: if the lanes are one row, how many of their last
    /// values are padding.
    fn search_all(
        columns: &[[f32; LANES]],
        levels: f32,
        bins: f32,
        rounds: u16,
        spread: Option<f32>,
    ) -> ([f32; LANES], [f32; LANES]) {
        let (mut low, mut best_low, mut best_high) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
        let scale = levels / bins;
        let mut best = errors(columns, levels, scale, &low, &low, spread).0;
        best.iter_mut().for_each(|error| *error /= scale * scale);
        for round in 1..=rounds {
            let round = f32::from(round);
            let scale = levels / (bins - round);
            let raised = low.map(|low| low + 1.0);
            let (up, down) = errors(columns, levels, scale, &raised, &low, spread);
            for lane in 0..LANES {
                low[lane] = if up[lane] < down[lane] { raised[lane] } else { low[lane] };
                let error = if up[lane] < down[lane] { up[lane] } else { down[lane] } / (scale * scale);
                let better = error < best[lane];
                best[lane] = if better { error } else { best[lane] };
                best_low[lane] = if better { low[lane] } else { best_low[lane] };
                best_high[lane] = if better { round - low[lane] } else { best_high[lane] };
            }
        }
        (best_low, best_high)
    }
}

/// Squared errors of each row, in steps of the grid, for a range that begins at each of two places.
#[inline(always)]
fn errors(
    columns: &[[f32; LANES]],
    levels: f32,
    scale: f32,
    from: &[f32; LANES],
    other: &[f32; LANES],
    spread: Option<f32>,
) -> ([f32; LANES], [f32; LANES]) {
    let (mut sums, mut others) = ([0f32; LANES], [0f32; LANES]);
    for column in columns {
        for lane in 0..LANES {
            let missed = miss((column[lane] - from[lane]) * scale, levels);
            sums[lane] += missed * missed;
            let missed = miss((column[lane] - other[lane]) * scale, levels);
            others[lane] += missed * missed;
        }
    }
    let Some(padding) = spread else { return (sums, others) };
    // A padding value is 0, so it misses by the whole distance to the range.
    let total = |sums: [f32; LANES], from: f32| sums.iter().sum::<f32>() - padding * (from * scale) * (from * scale);
    ([total(sums, from[0]); LANES], [total(others, other[0]); LANES])
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

/// Distance of a value from its quantized value, in steps of its grid.
#[inline(always)]
fn miss(value: f32, levels: f32) -> f32 {
    let clipped = if value > 0.0 { value } else { 0.0 };
    let clipped = if clipped < levels { clipped } else { levels };
    value - ((clipped + ROUNDER) - ROUNDER)
}

/// The quantized values of rows (all finite). `bits`: 1 to 8; `lengths`: of the rows of `x`, none of them 0.
pub fn quantized(method: Method, bits: u32, x: &[f32], lengths: &[usize]) -> Vec<f32> {
    let (mut codes, mut values) = (vec![0; x.len()], vec![0.0; x.len()]);
    for (row, grid) in ranges(lengths).zip(grids(method, bits, x, lengths)) {
        let codes = &mut codes[row.clone()];
        quantize::quantize(grid, levels(bits), &x[row.clone()], codes, &mut values[row]);
    }
    values
}

/// Mean l2 error of rows (all finite) in this quantization: the paper's measure. `lengths`: of the rows of `x`, none of
/// them 0.
pub(super) fn l2_error(method: Method, bits: u32, x: &[f32], lengths: &[usize]) -> f64 {
    l2_distance(x, &quantized(method, bits, x, lengths), lengths)
}

/// Mean distance over rows between the quantized and the original values.
pub fn l2_distance(x: &[f32], values: &[f32], lengths: &[usize]) -> f64 {
    let square = |(&x, &q): (&f32, &f32)| (f64::from(x) - f64::from(q)).powi(2);
    let distance = |row: Range<usize>| x[row.clone()].iter().zip(&values[row]).map(square).sum::<f64>().sqrt();
    ranges(lengths).map(distance).sum::<f64>() / lengths.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The search decides on sums: they must not depend on the machine.
    #[test]
    fn every_instruction_set_gives_the_same() {
        let row: Vec<f32> = (0..997).map(|i| ((i * 7919) % 1009) as f32 * 0.045).collect();
        let run = |level| {
            let (min, max) = extremes(level, &row);
            let columns: Vec<[f32; LANES]> = row.as_chunks().0.to_vec();
            let search = |spread| search_all(level, &columns, 15.0, 45.0, 40, spread);
            (min.to_bits(), max.to_bits(), search(None), search(Some(3.0)))
        };
        let portable = run(Level::PORTABLE);
        for level in Level::available() {
            assert_eq!(run(level), portable, "{level:?}");
        }
    }

    /// A row's result does not depend on the other rows, and hardly on the kind of search.
    #[test]
    fn rows_do_not_touch_each_other() {
        let x: Vec<f32> = (0..40 * 37).map(|i| (((i * 7919) % 1009) as f32 * 0.002 - 1.0).powi(3)).collect();
        let search = Search::published(4);
        let all = grids(Method::Adaptive(search), 4, &x, &[37; 40]);
        for (row, grid) in x.chunks(37).zip(&all) {
            assert_eq!(grids(Method::Adaptive(search), 4, row, &[37]), [*grid]);
            let alone = shrink(search, 4, row, 37, true)[0];
            let (mut codes, mut values) = ([0; 37], [0.0; 37]);
            let mut error = |grid| {
                quantize::quantize(grid, 15, row, &mut codes, &mut values);
                row.iter().zip(&values).map(|(x, q)| (x - q) * (x - q)).sum::<f32>()
            };
            let (a, b) = (error(alone), error(*grid));
            assert!((a - b).abs() <= 0.01 * a, "{a} {b}");
        }
        // Rows of other lengths beside each other, including wide ones.
        let lengths = [5, 300, 300, 5, 5, 865];
        let mixed = grids(Method::Adaptive(search), 4, &x, &lengths);
        let mut start = 0;
        for (length, grid) in lengths.into_iter().zip(mixed) {
            assert_eq!(grids(Method::Adaptive(search), 4, &x[start..start + length], &[length]), [grid]);
            start += length;
        }
    }
}
