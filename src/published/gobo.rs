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
//! Payload: [`ID`]; bits b of an index; number of representatives - 1, u8; these, f32 each; varint number of outliers.
//! Then for each outlier a varint, its place minus the previous place minus 1; their values, f32 each; all other
//! indexes, packed.

use std::io;

use super::inshrinkerator::{Layer, count_below, kmeans, to_f32};
use super::{Corrupt, Fit, State, System, Tensor, Tile, pack};
use crate::entropy::varint;

/// First byte of a payload.
pub const ID: u8 = 32;

/// A weight with a smaller log-density is an outlier.
const LOG_DENSITY: f64 = -4.0;
/// Minimum bits of embeddings.
const EMBEDDING_BITS: u32 = 4;
/// Maximum rounds of clustering (table 12).
const ROUNDS: usize = 1000;
/// Cells that weights are counted in.
const CELLS: usize = 1 << 16;

/// The system with its bits.
#[derive(Clone, Copy, Debug)]
pub struct Gobo {
    bits: u32,
}

impl Gobo {
    /// Bits of an index, 1 to 8; `None` for others.
    pub fn new(bits: u32) -> Option<Gobo> {
        (1..=8).contains(&bits).then_some(Gobo { bits })
    }

    fn fit_one(&self, tensor: &dyn Tensor) -> io::Result<Fit> {
        let bits = if Layer::of(tensor) == Layer::Embedding { self.bits.max(EMBEDDING_BITS) } else { self.bits };
        let (low, high) = bulk(tensor)?;
        let mut cells = Cells::new(low, high);
        for number in 0..tensor.tiles() {
            cells.add(&tensor.tile(number)?.values);
        }
        let mut fit = vec![bits as u8];
        fit.extend([low, high].iter().flat_map(|border| border.to_le_bytes()));
        pack::put_floats(&to_f32(&cells.cluster(1 << bits)), &mut fit);
        Ok(fit)
    }
}

/// The range of weights that are no outliers; empty if its end is below its start.
fn bulk(tensor: &dyn Tensor) -> io::Result<(f64, f64)> {
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
        return Ok((f64::NEG_INFINITY, f64::INFINITY));
    }
    let peak = -(deviation * std::f64::consts::TAU.sqrt()).ln();
    let reach = deviation * (2.0 * (peak - LOG_DENSITY)).sqrt();
    // The root of a negative number: the peak itself is below the limit.
    Ok(if reach.is_nan() { (0.0, -1.0) } else { (mean - reach, mean + reach) })
}

/// Number and sum of the weights in even cells between two borders.
struct Cells {
    low: f64,
    high: f64,
    counts: Vec<f64>,
    sums: Vec<f64>,
}

impl Cells {
    fn new(low: f64, high: f64) -> Cells {
        Cells { low, high, counts: vec![0.0; CELLS], sums: vec![0.0; CELLS] }
    }

    fn add(&mut self, values: &[f32]) {
        let scale = CELLS as f64 / (self.high - self.low);
        for &value in values {
            let value = f64::from(value);
            if value >= self.low && value <= self.high {
                // All values are equal: the scale is 0, and all are in the first cell.
                let cell = ((value - self.low) * scale) as usize;
                let cell = cell.min(CELLS - 1);
                self.counts[cell] += 1.0;
                self.sums[cell] += value;
            }
        }
    }

    /// Representatives, at most `k`, ascending.
    fn cluster(&self, k: usize) -> Vec<f64> {
        let filled = self.counts.iter().zip(&self.sums).filter(|&(&count, _)| count > 0.0);
        let (counts, sums): (Vec<f64>, Vec<f64>) = filled.unzip();
        let means: Vec<f64> = counts.iter().zip(&sums).map(|(count, sum)| sum / count).collect();
        if means.len() <= k {
            return means;
        }
        let running = |parts: &[f64]| {
            let mut total = 0.0;
            let sums = parts.iter().map(|part| {
                total += part;
                total
            });
            std::iter::once(0.0).chain(sums).collect::<Vec<f64>>()
        };
        let (count, sum) = (running(&counts), running(&sums));
        let mean = |range: &[usize]| (sum[range[1]] - sum[range[0]]) / (count[range[1]] - count[range[0]]);
        let all = count[means.len()];
        // Equally many weights each; a cell with more than that gets a single representative.
        let mut borders: Vec<usize> =
            (0..=k).map(|i| count.partition_point(|&c| c < all * i as f64 / k as f64).min(means.len())).collect();
        borders.dedup();
        let mut centroids: Vec<f64> = borders.windows(2).map(mean).collect();
        let mut best: Option<(f64, Vec<f64>)> = None;
        for _ in 0..ROUNDS {
            let border = |pair: &[f64]| means.partition_point(|&m| m <= f64::midpoint(pair[0], pair[1]));
            borders = [0].into_iter().chain(centroids.windows(2).map(border)).chain([means.len()]).collect();
            let distance = |(range, &c): (&[usize], &f64)| {
                let at = range[0] + means[range[0]..range[1]].partition_point(|&m| m < c);
                let below = c * (count[at] - count[range[0]]) - (sum[at] - sum[range[0]]);
                below + (sum[range[1]] - sum[at]) - c * (count[range[1]] - count[at])
            };
            let total: f64 = borders.windows(2).zip(&centroids).map(distance).sum();
            if best.as_ref().is_some_and(|(least, _)| total >= *least) {
                break;
            }
            best = Some((total, centroids.clone()));
            for (centroid, range) in centroids.iter_mut().zip(borders.windows(2)) {
                if range[0] < range[1] {
                    *centroid = mean(range).clamp(means[range[0]], means[range[1] - 1]);
                }
            }
        }
        best.map_or(centroids, |(_, centroids)| centroids)
    }
}

impl System for Gobo {
    fn fit(&self, tensors: &[&dyn Tensor], _position: u32) -> io::Result<Vec<Fit>> {
        tensors.iter().map(|tensor| self.fit_one(*tensor)).collect()
    }

    fn encode(&self, fit: &Fit, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
        let (&bits, rest) = fit.split_first()?;
        let (low, rest) = rest.split_first_chunk()?;
        let (high, mut rest) = rest.split_first_chunk()?;
        let (low, high) = (f64::from_le_bytes(*low), f64::from_le_bytes(*high));
        let count = rest.len() / 4;
        let centroids = pack::take_floats(&mut rest, count).ok()?;
        if !tile.values.iter().all(|x| x.is_finite()) || centroids.len() > 1 << bits {
            return None;
        }
        // A layer of outliers only has no representatives.
        let centroids = if centroids.is_empty() { vec![0.0] } else { centroids };
        let mut indexes = vec![0; tile.values.len()];
        count_below(&tile.values, &kmeans::borders(&centroids), &mut indexes);
        let outlier = |&x: &f32| !(f64::from(x) >= low && f64::from(x) <= high);
        let places: Vec<usize> = (0..tile.values.len()).filter(|&i| outlier(&tile.values[i])).collect();
        let mut values: Vec<f32> = indexes.iter().map(|&index| centroids[usize::from(index)]).collect();
        out.extend_from_slice(&[ID, bits, (centroids.len() - 1) as u8]);
        pack::put_floats(&centroids, out);
        varint::put(places.len() as u64, out);
        let mut next = 0;
        for &place in &places {
            varint::put((place - next) as u64, out);
            next = place + 1;
            values[place] = tile.values[place];
        }
        pack::put_floats(&places.iter().map(|&place| tile.values[place]).collect::<Vec<f32>>(), out);
        let kept: Vec<u8> =
            tile.values.iter().zip(&indexes).filter(|&(x, _)| !outlier(x)).map(|(_, &index)| index).collect();
        pack::put(&kept, bits.into(), out);
        Some(State { values: values.into(), bins: None })
    }

    fn decode(&self, mut payload: &[u8], _previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let payload = &mut payload;
        if pack::take_byte(payload)? != ID {
            return Err(Corrupt("not of GOBO"));
        }
        let bits = u32::from(pack::take_byte(payload)?);
        let count = usize::from(pack::take_byte(payload)?) + 1;
        if !(1..=8).contains(&bits) || count > 1 << bits {
            return Err(Corrupt("bits of an index"));
        }
        let centroids = pack::take_floats(payload, count)?;
        let outliers = usize::try_from(varint::take(payload)?).unwrap_or(usize::MAX);
        if outliers > len {
            return Err(Corrupt("more outliers than values"));
        }
        let mut places = Vec::with_capacity(outliers);
        let mut next = 0usize;
        for _ in 0..outliers {
            let gap = usize::try_from(varint::take(payload)?).unwrap_or(usize::MAX);
            let place = next.checked_add(gap).filter(|&place| place < len).ok_or(Corrupt("place of an outlier"))?;
            places.push(place);
            next = place + 1;
        }
        let kept = pack::take_floats(payload, outliers)?;
        let mut indexes = vec![0; len - outliers];
        pack::take(payload, bits, &mut indexes)?;
        if indexes.iter().any(|&index| usize::from(index) >= count) || !payload.is_empty() {
            return Err(Corrupt("indexes of a tile"));
        }
        let mut values = vec![0.0; len];
        let (mut indexes, mut outliers) = (indexes.into_iter(), places.into_iter().zip(kept).peekable());
        for (i, value) in values.iter_mut().enumerate() {
            *value = match outliers.next_if(|&(place, _)| place == i) {
                Some((_, exact)) => exact,
                None => indexes.next().map_or(0.0, |index| centroids[usize::from(index)]),
            };
        }
        Ok(State { values: values.into(), bins: None })
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{Made, Noise, checkpoint, conforms};
    use super::*;

    #[test]
    fn all_conform() {
        [1, 3, 8].into_iter().for_each(|bits| conforms(&Gobo::new(bits).unwrap()));
        assert!(Gobo::new(0).is_none() && Gobo::new(9).is_none());
    }

    /// Bell-shaped weights of deviation .02. One in 5000 is beyond 3.74 deviations; the rest is within the limit of 8
    /// levels (a distortion of .0345, Max 1960).
    #[test]
    fn outliers_are_exact_and_the_rest_is_near() {
        let mut noise = Noise(3);
        let mut layer = Made { tile: 50_000, ..Made::layer("fc.weight", 200, 500, &mut noise) };
        layer.values[77] = 0.5;
        let (states, bytes) = checkpoint(&Gobo::new(3).unwrap(), std::slice::from_ref(&layer), 0).remove(0);
        let values: Vec<f32> = states.iter().flat_map(|state| state.values.to_vec()).collect();
        let exact = layer.values.iter().zip(&values).filter(|(w, r)| w == r).count();
        assert!(values[77] == 0.5 && (2..40).contains(&exact), "{exact}");
        let squares: f32 = layer.values.iter().zip(&values).map(|(w, r)| (w - r).powi(2)).sum();
        let distortion = squares / 100_000.0 / 0.0004;
        assert!((0.030..0.045).contains(&distortion), "{distortion}");
        assert!((37_500..38_200).contains(&bytes), "{bytes}");
        // Wide weights are all outliers.
        let wide = Made::new("fc.weight", 10, (0..500).map(|_| 100.0 * noise.normal()).collect());
        let states = checkpoint(&Gobo::new(3).unwrap(), std::slice::from_ref(&wide), 0).remove(0).0;
        assert!(states.iter().flat_map(|state| &state.values).eq(&wide.values));
    }
}
