//! The search for a configuration (section 5): the one that compresses most among those with sufficient quality.
//!
//! All parameters except the pruning metric span a cube. Along each of its axes quality improves and compression
//! declines. For the first checkpoint, divide and conquer searches the whole cube. If a configuration is good enough,
//! all that are better on every axis only cost more; if it is not, none that is worse on every axis can be. Later
//! checkpoints try the neighbourhood of the previous configuration, never a more aggressive one on any axis. They
//! search the whole cube only if nothing there is good enough.

use super::{Config, Metric, share};

/// Axes of the cube.
const AXES: usize = 4;
/// A configuration's position on each axis.
type Place = [usize; AXES];

/// Values to choose from, on each axis from the most aggressive to the most careful.
#[derive(Clone, Debug)]
pub struct Space {
    /// Bins, ascending.
    pub bins: Vec<u16>,
    /// Bins of embeddings, ascending.
    pub embedding_bins: Vec<u16>,
    /// Hundredths of a percent to prune, descending.
    pub prune: Vec<u16>,
    /// Hundredths of a percent to protect, ascending.
    pub protect: Vec<u16>,
    /// Share of embeddings among the parameters, 0 to 1, to estimate a configuration's size.
    pub embedding_share: f64,
}

impl Space {
    /// Tables 2 and 9.
    pub fn published(embedding_share: f64) -> Space {
        Space {
            bins: vec![4, 6, 8, 12, 16, 32],
            embedding_bins: vec![16, 32],
            prune: vec![5000, 4000, 3000, 2000, 1000, 0],
            protect: vec![5, 50, 100],
            embedding_share,
        }
    }

    fn lengths(&self) -> Place {
        [self.bins.len(), self.embedding_bins.len(), self.prune.len(), self.protect.len()]
    }

    fn config(&self, place: Place, metric: Metric) -> Config {
        Config {
            bins: self.bins[place[0]],
            embedding_bins: self.embedding_bins[place[1]],
            prune: self.prune[place[2]],
            metric,
            protect: self.protect[place[3]],
        }
    }

    /// The position of a configuration: on each axis the last value that is not more careful, else the first.
    fn place(&self, config: &Config) -> Place {
        let last = |careful: usize| careful.saturating_sub(1);
        [
            last(self.bins.partition_point(|&bins| bins <= config.bins)),
            last(self.embedding_bins.partition_point(|&bins| bins <= config.embedding_bins)),
            last(self.prune.partition_point(|&prune| prune >= config.prune)),
            last(self.protect.partition_point(|&protect| protect <= config.protect)),
        ]
    }

    /// Estimated bits of a parameter without differences, which orders configurations by compression. It omits the cost
    /// of marking pruned parameters. That cost falls again towards pruning nothing, and there would be no order along
    /// that axis.
    pub fn bits(&self, config: &Config) -> f64 {
        let quantized = (1.0 - share(config.prune) - share(config.protect)).max(0.0);
        let bins = |bins: u16| f64::from(bins.max(1)).log2();
        let e = self.embedding_share.clamp(0.0, 1.0);
        quantized * (bins(config.embedding_bins) * e + bins(config.bins) * (1.0 - e)) + 16.0 * share(config.protect)
    }
}

/// The result of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    /// The configuration.
    pub config: Config,
    /// True if the whole cube was searched.
    pub exhaustive: bool,
}

/// Steps on an axis within the neighbourhood.
const REACH: usize = 1;
/// Degradation of the other pruning metric, relative to the current one's, below which the search changes to it: noise
/// must not change it.
const BETTER: f64 = 0.9;

/// A search at work.
struct Trials<'a, F> {
    space: &'a Space,
    threshold: f64,
    degradation: F,
}

impl<E, F: FnMut(&Config) -> Result<f64, E>> Trials<'_, F> {
    /// Degradation of a configuration, and whether that is good enough; NaN is not.
    fn of(&mut self, place: Place, metric: Metric) -> Result<(f64, bool), E> {
        let degradation = (self.degradation)(&self.space.config(place, metric))?;
        Ok((degradation, degradation <= self.threshold))
    }

    fn bits(&self, place: Place, metric: Metric) -> f64 {
        self.space.bits(&self.space.config(place, metric))
    }

    /// The position with the fewest bits that is good enough, from `low` to `high` on each axis.
    fn divide(&mut self, low: Place, high: Place, metric: Metric, best: &mut Option<Place>) -> Result<(), E> {
        let bound = best.map_or(f64::INFINITY, |best| self.bits(best, metric));
        if self.bits(low, metric) >= bound {
            return Ok(());
        }
        let middle: Place = std::array::from_fn(|axis| usize::midpoint(low[axis], high[axis]));
        let good = self.of(middle, metric)?.1;
        if good && self.bits(middle, metric) < bound {
            *best = Some(middle);
        }
        // Cut the rest of the box into one box per axis. If the middle was good: below it on that axis, and at it or
        // beyond on the axes before. Otherwise: beyond it on that axis, and at it or below on the axes before.
        let (mut low, mut high) = (low, high);
        for axis in 0..AXES {
            let (mut start, mut end) = (low, high);
            if good && middle[axis] > low[axis] {
                end[axis] = middle[axis] - 1;
                self.divide(start, end, metric, best)?;
            } else if !good && middle[axis] < high[axis] {
                start[axis] = middle[axis] + 1;
                self.divide(start, end, metric, best)?;
            }
            if good { low[axis] = middle[axis] } else { high[axis] = middle[axis] }
        }
        Ok(())
    }

    /// The whole cube, with both metrics.
    fn exhaustive(&mut self) -> Result<Option<(Place, Metric)>, E> {
        let high = self.space.lengths().map(|length| length - 1);
        // With its bits and its degradation: of two with equally many bits the better one.
        let mut found: Option<((f64, f64), (Place, Metric))> = None;
        for metric in [Metric::Magnitude, Metric::Sensitivity] {
            let mut best = None;
            self.divide([0; AXES], high, metric, &mut best)?;
            let Some(place) = best else { continue };
            let trial = (self.bits(place, metric), self.of(place, metric)?.0);
            if found.is_none_or(|(other, _)| trial < other) {
                found = Some((trial, (place, metric)));
            }
        }
        Ok(found.map(|(_, found)| found))
    }

    /// The neighbourhood of the configuration before.
    fn neighbourhood(&mut self, before: &Config) -> Result<Option<(Place, Metric)>, E> {
        let (start, mut metric) = (self.space.place(before), before.metric);
        let other = match metric {
            Metric::Magnitude => Metric::Sensitivity,
            Metric::Sensitivity => Metric::Magnitude,
        };
        if self.of(start, other)?.0 < BETTER * self.of(start, metric)?.0 {
            metric = other;
        }
        let lengths = self.space.lengths();
        let steps = (REACH + 1).pow(AXES as u32);
        let mut places: Vec<Place> = (0..steps)
            .map(|code| std::array::from_fn(|axis| start[axis] + code / (REACH + 1).pow(axis as u32) % (REACH + 1)))
            .filter(|place: &Place| place.iter().zip(lengths).all(|(&at, length)| at < length))
            .collect();
        // By compression, best first: the first that is good enough wins.
        places.sort_by(|&a, &b| self.bits(a, metric).total_cmp(&self.bits(b, metric)));
        for place in places {
            if self.of(place, metric)?.1 {
                return Ok(Some((place, metric)));
            }
        }
        Ok(None)
    }
}

/// Finds the configuration that compresses most with at most `threshold` of degradation, as `degradation` measures it
/// (0: none; the paper: relative, per checkpoint) and remembers it: the search may ask twice. `before`: the configuration of the previous checkpoint. `None` if no
/// configuration is good enough.
pub fn search<E>(
    space: &Space,
    before: Option<&Config>,
    threshold: f64,
    degradation: impl FnMut(&Config) -> Result<f64, E>,
) -> Result<Option<Found>, E> {
    if space.lengths().contains(&0) {
        return Ok(None);
    }
    let mut trials = Trials { space, threshold, degradation };
    let near = before.map(|before| trials.neighbourhood(before)).transpose()?.flatten();
    let found = near.map_or_else(|| trials.exhaustive(), |near| Ok(Some(near)))?;
    Ok(found.map(|(place, metric)| Found { config: space.config(place, metric), exhaustive: near.is_none() }))
}
