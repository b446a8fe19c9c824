//! GOBO (Zadeh et al., MICRO 2020): keeps a few outliers exactly; the other weights of a layer become indexes into a
//! table of 2^b representative values.
//!
//! A weight is an outlier if the normal distribution with its layer's mean and deviation has a log-density below -4.
//! The table starts with the means of equally many weights each. It then moves as in k-means until the sum of the L1
//! distances no longer falls. Embeddings have at least 4 bits. Known here from public descriptions and from
//! Inshrinkerator's sections 8 and A.2 (table 12). Nothing is stored as a difference. Clustering uses 65536 even cells
//! of the weights, with the exact mean of each, not the weights themselves. So a tensor need not be in memory, and only
//! the index of a weight at a border can change.
//!
//! The log-density depends on the scale of the weights: in a layer whose deviation is above e^4 / sqrt(2 pi) = 21.8,
//! all of them are outliers. That is the paper's definition.
//!
//! Payload: bits b of an index; number of representatives - 1, u8; these, f32 each; the outliers as runs (see
//! [`super::select`]) and their exact values; all other indexes, packed.

use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;

use super::clusters::{Points, to_f32};
use super::inshrinkerator::Layer;
use super::select::{put_runs, take_runs};
use super::{Fit, State, System, Tensor, Tile, code, quantize};
use codec::Corrupt;

/// A weight with a smaller log-density is an outlier.
const LOG_DENSITY: f64 = -4.0;
/// Minimum bits of embeddings.
const EMBEDDING_BITS: u32 = 4;
/// Maximum rounds of clustering (table 12).
const ROUNDS: usize = 1000;
/// Cells that weights are counted in.
const CELLS: usize = 1 << 16;

/// The system with its bits.
#[derive(Debug)]
pub struct Gobo {
    /// Bits of an index, 1 to 8.
    pub bits: u32,
}

/// A layer's parameters.
#[derive(Debug)]
struct Fitted {
    bits: u32,
    /// The range of weights that are no outliers.
    bulk: RangeInclusive<f64>,
    /// Representatives, ascending; at least one.
    centroids: Vec<f32>,
}

impl Gobo {
    fn fit_one(&self, tensor: &dyn Tensor) -> io::Result<Arc<dyn Fit>> {
        let bits = if Layer::of(tensor) == Layer::Embedding { self.bits.max(EMBEDDING_BITS) } else { self.bits };
        let bulk = bulk(tensor)?;
        let (mut counts, mut sums) = (vec![0.0; CELLS], vec![0.0; CELLS]);
        let scale = CELLS as f64 / (bulk.end() - bulk.start());
        for number in 0..tensor.tiles() {
            for value in tensor.tile(number)?.values.iter().map(|&value| f64::from(value)) {
                if bulk.contains(&value) {
                    // All values are equal: the scale is 0, and all are in the first cell.
                    let cell = (((value - bulk.start()) * scale) as usize).min(CELLS - 1);
                    counts[cell] += 1.0;
                    sums[cell] += value;
                }
            }
        }
        let filled = counts.iter().zip(&sums).filter(|&(&count, _)| count > 0.0);
        let (means, counts): (Vec<f64>, Vec<f64>) = filled.map(|(&count, sum)| (sum / count, count)).unzip();
        let mut centroids = to_f32(&cluster(Points::new(means, &counts), 1 << bits));
        if centroids.is_empty() {
            // Outliers only.
            centroids.push(0.0);
        }
        Ok(Arc::new(Fitted { bits, bulk, centroids }))
    }
}

/// The range of weights that are no outliers; empty if its end is below its start.
fn bulk(tensor: &dyn Tensor) -> io::Result<RangeInclusive<f64>> {
    let (mut count, mut mean, mut squares) = (0.0, 0.0, 0.0);
    for number in 0..tensor.tiles() {
        for &value in tensor.tile(number)?.values.iter().filter(|value| value.is_finite()) {
            // Welford's method: sums of squares would lose a small deviation beside a large mean.
            count += 1.0;
            let from = f64::from(value) - mean;
            mean += from / count;
            squares += from * (f64::from(value) - mean);
        }
    }
    let deviation = (squares / f64::max(count, 1.0)).sqrt();
    if deviation == 0.0 {
        return Ok(f64::NEG_INFINITY..=f64::INFINITY);
    }
    let peak = -(deviation * std::f64::consts::TAU.sqrt()).ln();
    let reach = deviation * (2.0 * (peak - LOG_DENSITY)).sqrt();
    // The root of a negative number: the peak itself is below the limit.
    Ok(if reach.is_nan() { 0.0..=-1.0 } else { mean - reach..=mean + reach })
}

/// Representatives, at most `k`, ascending.
fn cluster(points: Points, k: usize) -> Vec<f64> {
    let Points { values, weight, moment } = &points;
    if values.len() <= k {
        return points.values;
    }
    // Equally many weights each; a cell with more than that gets a single representative.
    let share = weight[values.len()] / k as f64;
    let mut borders: Vec<usize> =
        (0..=k).map(|i| weight.partition_point(|&sum| sum < share * i as f64).min(values.len())).collect();
    borders.dedup();
    let mut centroids: Vec<f64> = borders.windows(2).filter_map(|range| points.mean(range)).collect();
    let (mut least, mut best) = (f64::INFINITY, Vec::new());
    for _ in 0..ROUNDS {
        let borders = points.borders(&centroids);
        let distance = |(range, &c): (&[usize], &f64)| {
            let at = range[0] + values[range[0]..range[1]].partition_point(|&value| value < c);
            let below = c * (weight[at] - weight[range[0]]) - (moment[at] - moment[range[0]]);
            below + (moment[range[1]] - moment[at]) - c * (weight[range[1]] - weight[at])
        };
        let total: f64 = borders.windows(2).zip(&centroids).map(distance).sum();
        if total >= least {
            break;
        }
        (least, best) = (total, centroids.clone());
        points.recentre(&mut centroids, &borders);
    }
    best
}

impl System for Gobo {
    fn fit(&self, tensors: &[&dyn Tensor], _position: u32) -> io::Result<Vec<Arc<dyn Fit>>> {
        tensors.iter().map(|tensor| self.fit_one(*tensor)).collect()
    }

    fn take(&self, payload: &mut &[u8], _previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let bits = u32::from(code::take_byte(payload)?);
        let count = usize::from(code::take_byte(payload)?) + 1;
        Corrupt::when(!(1..=8).contains(&bits) || count > 1 << bits, "bits of an index")?;
        let centroids = code::take_floats(payload, count)?;
        let places = take_runs(payload, len)?;
        let exact = code::take_exact(payload, places.len())?;
        let mut indexes = vec![0; len - places.len()];
        code::take_codes(payload, bits, &mut indexes)?;
        Corrupt::when(indexes.iter().any(|&index| usize::from(index) >= count), "indexes of a tile")?;
        Ok(state(&centroids, &indexes, places.iter().copied().zip(exact), len))
    }
}

impl Fit for Fitted {
    fn put(&self, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
        let is_outlier = |&place: &usize| !self.bulk.contains(&f64::from(tile.values[place]));
        let (places, bulk): (Vec<usize>, Vec<usize>) = (0..tile.values.len()).partition(is_outlier);
        let values = |places: &[usize]| places.iter().map(|&place| tile.values[place]).collect::<Vec<f32>>();
        let (exact, indexes) = (values(&places), quantize::nearest(&values(&bulk), &self.centroids));
        out.extend([self.bits as u8, (self.centroids.len() - 1) as u8]);
        code::put_floats(&self.centroids, out);
        put_runs(&places, out);
        code::put_exact(&exact, out);
        code::put_codes(&indexes, self.bits, out);
        Some(state(&self.centroids, &indexes, places.into_iter().zip(exact), tile.values.len()))
    }
}

/// The outliers at their places, and between them the representatives.
fn state(centroids: &[f32], indexes: &[u8], outliers: impl Iterator<Item = (usize, f32)>, len: usize) -> State {
    let (mut indexes, mut outliers) = (indexes.iter(), outliers.peekable());
    let one = |i: usize| match outliers.next_if(|&(place, _)| place == i) {
        Some((_, exact)) => exact,
        None => indexes.next().map_or(0.0, |&index| centroids[usize::from(index)]),
    };
    State::of((0..len).map(one).collect::<Vec<f32>>())
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{Made, Noise, checkpoint, conforms};
    use super::*;

    #[test]
    fn all_conform() {
        [1, 3, 8].into_iter().for_each(|bits| conforms(&Gobo { bits }));
    }

    /// Bell-shaped weights of deviation .02. One in 5000 is beyond 3.74 deviations; the rest is within the limit of 8
    /// levels (a distortion of .0345, Max 1960).
    #[test]
    fn outliers_are_exact_and_the_rest_is_near() {
        let mut noise = Noise(3);
        let mut layer = Made { tile: 50_000, ..Made::layer("fc.weight", 200, 500, &mut noise) };
        layer.values[77] = 0.5;
        let (states, bytes) = checkpoint(&Gobo { bits: 3 }, std::slice::from_ref(&layer), 0).remove(0);
        let values: Vec<f32> = states.iter().flat_map(|state| state.values.to_vec()).collect();
        let exact = layer.values.iter().zip(&values).filter(|(w, r)| w == r).count();
        assert!(values[77] == 0.5 && (2..40).contains(&exact), "{exact}");
        let squares: f32 = layer.values.iter().zip(&values).map(|(w, r)| (w - r).powi(2)).sum();
        let distortion = squares / 100_000.0 / 0.0004;
        assert!((0.030..0.045).contains(&distortion), "{distortion}");
        assert!((37_500..38_200).contains(&bytes), "{bytes}");
        // Wide weights are all outliers.
        let wide = Made::new("fc.weight", 10, (0..500).map(|_| 100.0 * noise.normal()).collect());
        let states = checkpoint(&Gobo { bits: 3 }, std::slice::from_ref(&wide), 0).remove(0).0;
        assert!(states.iter().flat_map(|state| &state.values).eq(&wide.values));
    }
}
