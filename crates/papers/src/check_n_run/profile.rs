//! Parameters of the greedy search, from a small sample of the checkpoint (section 5.2, "Parameter selection").

use std::io;
use std::ops::Range;

use super::super::select::{ranges, row_lengths, tiles};
use super::super::{Tensor, Tile};
use super::quantizer::{Method, Search, l2_error, quantized};
use super::{code, is_same};

/// Share of the rows in the sample: the paper's .001%.
const SHARE: f64 = 0.00001;
/// Minimum rows in the sample: fewer would say little about a model of the usual size for this system.
const LEAST_ROWS: usize = 128;
/// Maximum tiles of the sample; reading them is the cost of the profile.
const MOST_TILES: usize = 64;
/// Maximum values of a row to examine: a vector is a single row of any length.
const MOST_VALUES: usize = 1024;
/// Gain over asymmetric quantization, relative to its error, that more work must bring. Below it, the gain has tapered
/// off.
const TAPERED: f64 = 0.005;

/// Some consecutive rows.
#[derive(Debug, Default)]
pub(super) struct Sample {
    pub(super) values: Vec<f32>,
    pub(super) lengths: Vec<usize>,
    /// The whole rows that have a previous state.
    pub(super) chained: Chained,
}

/// Consecutive rows, and their previous states.
#[derive(Debug, Default)]
pub(super) struct Chained {
    values: Vec<f32>,
    before: Vec<f32>,
    lengths: Vec<usize>,
}

impl Sample {
    /// Adds `each` rows of a tile, spread evenly, without those that are constant or not finite.
    fn add(&mut self, tile: &Tile, width: u64, each: usize) {
        let lengths = row_lengths(tile.first, width, tile.values.len());
        let rows = lengths.len();
        let take = each.min(rows);
        let all: Vec<Range<usize>> = ranges(&lengths).collect();
        for whole in (0..take).map(|i| all[at(i, rows, take)].clone()) {
            let length = whole.len();
            let row = &tile.values[whole.start..whole.start + length.min(MOST_VALUES)];
            if row.iter().all(|x| x.is_finite()) && row.windows(2).any(|pair| pair[0] != pair[1]) {
                self.values.extend_from_slice(row);
                self.lengths.push(row.len());
                if let Some(before) = tile.before().filter(|_| length <= MOST_VALUES) {
                    self.chained.values.extend_from_slice(row);
                    self.chained.before.extend_from_slice(&before[whole]);
                    self.chained.lengths.push(length);
                }
            }
        }
    }
}

/// Rows spread evenly over all tensors' tiles.
pub(super) fn sample(tensors: &[&dyn Tensor]) -> io::Result<Sample> {
    let tiles = tiles(tensors);
    let from = tiles.len().min(MOST_TILES);
    let rows: u64 = tensors.iter().map(|tensor| tensor.rows().0).sum();
    let each = ((rows as f64 * SHARE) as usize).max(LEAST_ROWS).div_ceil(from.max(1));
    let mut sample = Sample::default();
    for (number, tensor) in (0..from).map(|i| tiles[at(i, tiles.len(), from)]) {
        sample.add(&tensor.tile(number)?, tensor.rows().1, each);
    }
    Ok(sample)
}

/// Position of sample `i` of `n` among `of`: the middle of its share.
fn at(i: usize, of: usize, n: usize) -> usize {
    (2 * i + 1) * of / (2 * n)
}

/// All tried values of `num_bins`, and all of `ratio` in percent.
fn bins() -> impl Iterator<Item = u16> {
    (1..=10).map(|i| 5 * i)
}
fn percents() -> impl Iterator<Item = u8> {
    (1..=10).map(|i| 10 * i)
}

/// The parameters of the previous state's quantization, if unchanged rows show them. Other parameters would give these
/// rows other values, and so mark them as modified. Otherwise the smallest `num_bins`, then the smallest `ratio`,
/// beyond which the further gain is not worth it.
pub(super) fn choose(bits: u32, sample: &Sample) -> Search {
    let fresh = taper(bits, sample);
    if sample.chained.lengths.is_empty() {
        return fresh;
    }
    // Among parameters that explain equally many rows, the ones just found win.
    let others = bins().flat_map(|bins| percents().map(move |percent| Search { bins, percent }));
    let mut best = (explained(bits, &sample.chained, fresh), fresh);
    for search in others {
        let rows = explained(bits, &sample.chained, search);
        if rows > best.0 {
            best = (rows, search);
        }
    }
    best.1
}

/// Number of rows whose previous state equals their quantization with these parameters.
fn explained(bits: u32, rows: &Chained, search: Search) -> usize {
    let values = quantized(Method::Adaptive(search), bits, &rows.values, &rows.lengths);
    let is_explained = |row: &Range<usize>| {
        let row = row.clone();
        is_same(code::narrowest(&rows.values[row.clone()]).1, &values[row.clone()], &rows.before[row])
    };
    ranges(&rows.lengths).filter(is_explained).count()
}

/// The parameters beyond which the gain tapers off.
fn taper(bits: u32, sample: &Sample) -> Search {
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
    let found = least(bins().map(|bins| Search { bins, percent: 100 }).collect()).unwrap_or(published);
    least(percents().map(|percent| Search { percent, ..found }).collect()).unwrap_or(found)
}
