//! Uniform quantization of one row (section 5.2): symmetric, asymmetric, and adaptive asymmetric, whose range a greedy
//! search finds.

use super::super::uniform::{self, Grid};
use crate::entropy::simd::{Level, multiversion};

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
const LANES: usize = 32;

/// Adding and subtracting it rounds an f32 from 0 to 2^22 to the nearest integer, ties to even.
const ROUNDER: f32 = 12_582_912.0;

/// The grid of each row of `x` (all finite); `lengths` of the rows, none of them 0.
pub(super) fn grids(method: Method, bits: u32, x: &[f32], lengths: &[usize]) -> Vec<Grid> {
    let level = Level::detect();
    let mut grids = Vec::with_capacity(lengths.len());
    let mut buffers = (Vec::new(), Vec::new());
    let (mut start, mut left) = (0, lengths);
    while let Some(&length) = left.first() {
        let mut count = 1;
        let rows = &x[start..];
        match method {
            Method::Adaptive(search) if length <= NARROW => {
                count = left.iter().take(GROUP).take_while(|&&other| other == length).count();
                let found = shrink_group(search, bits, &rows[..count * length], length, &mut buffers.0);
                grids.extend_from_slice(&found[..count]);
            }
            Method::Adaptive(search) => grids.push(shrink(search, bits, &rows[..length], &mut buffers.1)),
            Method::Asymmetric => {
                let (min, max) = extremes(level, &rows[..length]);
                grids.push(Grid::between(f64::from(min), f64::from(max), levels(bits)));
            }
            Method::Symmetric => {
                let (min, max) = extremes(level, &rows[..length]);
                grids.push(symmetric(max.max(-min), bits));
            }
        }
        start += count * length;
        left = &left[count..];
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

/// The greedy search of one row. In each round either x_min goes one step up or x_max one step down, whichever leaves
/// the smaller error. The round with the smallest error wins, or the whole range if none is better.
fn shrink(search: Search, bits: u32, row: &[f32], steps: &mut Vec<f32>) -> Grid {
    let level = Level::detect();
    let range = extremes(level, row);
    let per_step = per_step(search, range);
    if per_step == 0.0 {
        return shrunk(search, bits, range, 0.0, 0.0);
    }
    to_steps(level, row, range.0, per_step, steps);
    let (levels, bins) = (levels(bits) as f32, f32::from(search.bins));
    let (mut low, mut high) = (0.0, 0.0);
    let scale = levels / bins;
    let mut best = (errors(level, steps, levels, scale, [0.0, 0.0])[0] / (scale * scale), (0.0, 0.0));
    for round in 1..=search.rounds() {
        let scale = levels / (bins - f32::from(round));
        let [up, down] = errors(level, steps, levels, scale, [low + 1.0, low]);
        let error = if up < down {
            low += 1.0;
            up
        } else {
            high += 1.0;
            down
        };
        let error = error / (scale * scale);
        if error < best.0 {
            best = (error, (low, high));
        }
    }
    shrunk(search, bits, range, best.1.0, best.1.1)
}

/// Rows searched side by side, one per lane: in narrow ones, adding up lanes would take most of the time.
const GROUP: usize = 16;
/// Widest row for this search: the group's 16 KiB stay in the first-level cache.
const NARROW: usize = 256;

/// The greedy search of at most [`GROUP`] rows of one length. A row's result does not depend on the other rows.
fn shrink_group(
    search: Search,
    bits: u32,
    rows: &[f32],
    length: usize,
    columns: &mut Vec<[f32; GROUP]>,
) -> [Grid; GROUP] {
    columns.clear();
    columns.resize(length, [0.0; GROUP]);
    for (lane, row) in rows.chunks_exact(length).enumerate() {
        columns.iter_mut().zip(row).for_each(|(column, &value)| column[lane] = value);
    }
    let mut ranges = [(f32::MAX, f32::MIN); GROUP];
    for column in columns.iter() {
        for (range, &value) in ranges.iter_mut().zip(column) {
            *range = (range.0.min(value), range.1.max(value));
        }
    }
    let per_step = ranges.map(|range| per_step(search, range));
    for column in columns.iter_mut() {
        (0..GROUP).for_each(|lane| column[lane] = (column[lane] - ranges[lane].0) * per_step[lane]);
    }
    let level = Level::detect();
    let (low, high) = search_group(level, columns, levels(bits) as f32, f32::from(search.bins), search.rounds());
    std::array::from_fn(|lane| {
        let taken = if per_step[lane] == 0.0 { (0.0, 0.0) } else { (low[lane], high[lane]) };
        shrunk(search, bits, ranges[lane], taken.0, taken.1)
    })
}

multiversion! {
    /// Steps taken from below and from above, for each row.
    fn search_group(
        columns: &[[f32; GROUP]],
        levels: f32,
        bins: f32,
        rounds: u16,
    ) -> ([f32; GROUP], [f32; GROUP]) {
        let (mut low, mut best_low, mut best_high) = ([0f32; GROUP], [0f32; GROUP], [0f32; GROUP]);
        let scale = levels / bins;
        let mut best = errors_group(columns, levels, scale, &low, &low).0;
        best.iter_mut().for_each(|error| *error /= scale * scale);
        for round in 1..=rounds {
            let round = f32::from(round);
            let scale = levels / (bins - round);
            let raised = low.map(|low| low + 1.0);
            let (up, down) = errors_group(columns, levels, scale, &raised, &low);
            for lane in 0..GROUP {
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
fn errors_group(
    columns: &[[f32; GROUP]],
    levels: f32,
    scale: f32,
    from: &[f32; GROUP],
    other: &[f32; GROUP],
) -> ([f32; GROUP], [f32; GROUP]) {
    let (mut sums, mut others) = ([0f32; GROUP], [0f32; GROUP]);
    for column in columns {
        for lane in 0..GROUP {
            let missed = miss((column[lane] - from[lane]) * scale, levels);
            sums[lane] += missed * missed;
            let missed = miss((column[lane] - other[lane]) * scale, levels);
            others[lane] += missed * missed;
        }
    }
    (sums, others)
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
    /// The row in steps of the search, counted from its smallest value.
    fn to_steps(row: &[f32], min: f32, per_step: f32, steps: &mut Vec<f32>) -> () {
        steps.clear();
        steps.extend(row.iter().map(|&value| (value - min) * per_step));
    }
}

multiversion! {
    /// Squared error, in steps of the grid, for a range that begins at each of these two places.
    fn errors(steps: &[f32], levels: f32, scale: f32, from: [f32; 2]) -> [f32; 2] {
        let mut sums = [[0f32; LANES]; 2];
        let (chunks, tail) = steps.as_chunks::<LANES>();
        for chunk in chunks {
            for (sums, from) in sums.iter_mut().zip(from) {
                for lane in 0..LANES {
                    let missed = miss((chunk[lane] - from) * scale, levels);
                    sums[lane] += missed * missed;
                }
            }
        }
        for (sums, from) in sums.iter_mut().zip(from) {
            for (sum, &value) in sums.iter_mut().zip(tail) {
                let missed = miss((value - from) * scale, levels);
                *sum += missed * missed;
            }
        }
        sums.map(|sums| sums.iter().sum())
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
    let mut start = 0;
    for (grid, length) in grids(method, bits, x, lengths).into_iter().zip(lengths) {
        let row = start..start + length;
        uniform::quantize(grid, levels(bits), &x[row.clone()], &mut codes[row.clone()], &mut values[row]);
        start += length;
    }
    values
}

/// Mean l2 error of rows (all finite) in this quantization: the paper's measure. `lengths`: of the rows of `x`, none of
/// them 0.
pub fn l2_error(method: Method, bits: u32, x: &[f32], lengths: &[usize]) -> f64 {
    l2_distance(x, &quantized(method, bits, x, lengths), lengths)
}

/// Mean distance over rows between the quantized and the original values.
pub fn l2_distance(x: &[f32], values: &[f32], lengths: &[usize]) -> f64 {
    let (mut start, mut sum) = (0, 0.0);
    for length in lengths {
        let row = start..start + length;
        let square = |(&x, &q): (&f32, &f32)| (f64::from(x) - f64::from(q)).powi(2);
        sum += x[row.clone()].iter().zip(&values[row]).map(square).sum::<f64>().sqrt();
        start += length;
    }
    sum / lengths.len().max(1) as f64
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
            let errors = errors(level, &steps, 15.0, 15.0 / 41.0, [3.0, 2.0]);
            let columns: Vec<[f32; GROUP]> = steps.as_chunks().0.to_vec();
            let group = search_group(level, &columns, 15.0, 45.0, 40);
            (min.to_bits(), max.to_bits(), errors.map(f32::to_bits), group)
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
            let alone = shrink(search, 4, row, &mut Vec::new());
            let (mut codes, mut values) = ([0; 37], [0.0; 37]);
            let mut error = |grid| {
                uniform::quantize(grid, 15, row, &mut codes, &mut values);
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
