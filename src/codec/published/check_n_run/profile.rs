//! Parameters of the greedy search from a small sample of the checkpoint (section 5.2, "Parameter selection").

use std::io;

use super::super::Tensor;
use super::quantizer::{Method, Search, l2_error};
use super::row_lengths;

/// Share of the rows in the sample: the paper's .001%.
const SHARE: f64 = 0.00001;
/// Rows in the sample at least: fewer would say little about a model of the size people try this with.
const LEAST_ROWS: u64 = 64;
/// Tiles that the sample is taken from at most; reading them is what the profile costs.
const MOST_TILES: u64 = 64;
/// Values of a row that are looked at: a vector is a single row, however long.
const MOST_VALUES: usize = 4096;
/// Gain over asymmetric quantization, as a part of its error, that more work must bring. Below, the gain has tapered off.
const TAPERED: f64 = 0.005;

/// Some rows, one after the other.
#[derive(Default)]
pub(super) struct Sample {
    pub(super) values: Vec<f32>,
    pub(super) lengths: Vec<usize>,
}

/// Rows spread evenly over all tensors' tiles, without those that are constant or not finite.
pub(super) fn sample(tensors: &[&dyn Tensor]) -> io::Result<Sample> {
    let tiles: u64 = tensors.iter().map(|tensor| tensor.tiles() as u64).sum();
    let rows: u64 = tensors.iter().map(|tensor| tensor.rows().0).sum();
    let from = tiles.min(MOST_TILES);
    if from == 0 {
        return Ok(Sample::default());
    }
    let each = ((rows as f64 * SHARE) as u64).max(LEAST_ROWS).div_ceil(from);
    let mut sample = Sample::default();
    let (mut next, mut start) = (0, 0);
    for tensor in tensors {
        let end = start + tensor.tiles() as u64;
        while next < from && at(next, tiles, from) < end {
            let tile = tensor.tile((at(next, tiles, from) - start) as usize)?;
            let lengths: Vec<usize> = row_lengths(tile.first, tensor.rows().1, tile.values.len()).collect();
            let take = each.min(lengths.len() as u64);
            let chosen: Vec<u64> = (0..take).map(|i| at(i, lengths.len() as u64, take)).collect();
            let mut from = 0;
            for (number, length) in lengths.into_iter().enumerate() {
                let row = &tile.values[from..from + length.min(MOST_VALUES)];
                from += length;
                let varies = row.windows(2).any(|pair| pair[0] != pair[1]);
                if chosen.binary_search(&(number as u64)).is_ok() && varies && row.iter().all(|x| x.is_finite()) {
                    sample.values.extend_from_slice(row);
                    sample.lengths.push(row.len());
                }
            }
            next += 1;
        }
        start = end;
    }
    Ok(sample)
}

/// Place of sample number `i` of `n` among `of`: the middle of its share.
fn at(i: u64, of: u64, n: u64) -> u64 {
    (2 * i + 1) * of / (2 * n)
}

/// The least `num_bins` and then the least `ratio` from which on more gain nothing worth it.
pub(super) fn choose(bits: u32, sample: &Sample) -> Search {
    let published = Search::published(bits);
    let error = |method| l2_error(method, bits, &sample.values, &sample.lengths);
    let plain = error(Method::Asymmetric);
    if plain == 0.0 {
        return published;
    }
    let least = |searches: Vec<Search>| {
        let gains: Vec<f64> = searches.iter().map(|&search| 1.0 - error(Method::Adaptive(search)) / plain).collect();
        let most = gains.iter().copied().fold(0.0, f64::max);
        searches.into_iter().zip(gains).find(|&(_, gain)| gain >= most - TAPERED).map(|(search, _)| search)
    };
    let bins = least((1..=10).map(|tenth| Search { bins: 5 * tenth, percent: 100 }).collect()).unwrap_or(published);
    least((1..=10).map(|tenth| Search { bins: bins.bins, percent: 10 * tenth }).collect()).unwrap_or(bins)
}
