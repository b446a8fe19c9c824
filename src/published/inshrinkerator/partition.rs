//! Decides which parameters are protected, pruned or quantized (section 4.2), from quantiles of their magnitude |w| and
//! sensitivity |w g| (section 4.1), and quantizes the rest.

use super::super::{Tile, pack};
use super::Metric;
use super::kmeans;
use super::sketch::Sketch;
use crate::entropy::{Corrupt, varint};

/// Level of a pruned value, and of a protected one; the bins follow.
pub(super) const PRUNED: u16 = 0;
pub(super) const PROTECTED: u16 = 1;
pub(super) const FIRST_BIN: u16 = 2;

/// Magnitudes and sensitivities of some tensors.
#[derive(Clone, Default)]
pub(super) struct Scores {
    pub(super) magnitude: Sketch,
    pub(super) sensitivity: Sketch,
}

impl Scores {
    pub(super) fn add(&mut self, tile: &Tile) {
        self.magnitude.add(tile.values.iter().map(|w| w.abs()));
        if let Some(gradient) = gradient(tile) {
            self.sensitivity.add(tile.values.iter().zip(gradient).map(|(w, g)| (w * g).abs()));
        }
    }

    pub(super) fn merge(&mut self, other: &Scores) {
        self.magnitude.merge(&other.magnitude);
        self.sensitivity.merge(&other.sensitivity);
    }
}

/// The tile's gradients, if there is one for each value.
fn gradient(tile: &Tile) -> Option<&[f32]> {
    tile.gradient.as_deref().filter(|gradient| gradient.len() == tile.values.len())
}

/// The thresholds of a tensor. A value at or below the metric's pruning threshold is pruned. A value at or above one of
/// the two protection thresholds is protected, whatever the other threshold says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Thresholds {
    /// Without gradients the sensitivity is unknown, and magnitude decides alone.
    pub(super) metric: Metric,
    /// By magnitude, by sensitivity; below 0 for none.
    pub(super) prune: [f32; 2],
    /// By magnitude, by sensitivity; infinity for none.
    pub(super) protect: [f32; 2],
}

impl Thresholds {
    /// `type_scores`: of all layers of the tensor's type; `all`: of all layers.
    pub(super) fn new(metric: Metric, prune: f64, protect: f64, type_scores: &Scores, all: &Scores) -> Thresholds {
        let low =
            |sketch: &Sketch| if prune > 0.0 && !sketch.is_empty() { sketch.quantile(prune) as f32 } else { -1.0 };
        let high = |sketch: &Sketch| {
            if protect > 0.0 && !sketch.is_empty() { sketch.quantile(1.0 - protect) as f32 } else { f32::INFINITY }
        };
        Thresholds {
            metric,
            prune: [low(&type_scores.magnitude), low(&type_scores.sensitivity)],
            protect: [high(&all.magnitude), high(&all.sensitivity)],
        }
    }

    /// Level of each value, [`FIRST_BIN`] for all quantized ones.
    pub(super) fn split(&self, tile: &Tile) -> Vec<u16> {
        let level = |prune: bool, protect: bool| match (protect, prune) {
            (true, _) => PROTECTED,
            (false, true) => PRUNED,
            (false, false) => FIRST_BIN,
        };
        match gradient(tile) {
            None => {
                let one = |w: &f32| level(w.abs() <= self.prune[0], w.abs() >= self.protect[0]);
                tile.values.iter().map(one).collect()
            }
            Some(gradient) => {
                let one = |(w, g): (&f32, &f32)| {
                    let scores = [w.abs(), (w * g).abs()];
                    let of_metric = self.metric as usize;
                    let protect = scores[0] >= self.protect[0] || scores[1] >= self.protect[1];
                    level(scores[of_metric] <= self.prune[of_metric], protect)
                };
                tile.values.iter().zip(gradient).map(one).collect()
            }
        }
    }
}

/// The parameters to encode a tile.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Fitted {
    pub(super) thresholds: Thresholds,
    /// Ascending, without duplicates.
    pub(super) centroids: Vec<f32>,
}

impl Fitted {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![self.thresholds.metric as u8];
        pack::put_floats(&[self.thresholds.prune, self.thresholds.protect].concat(), &mut out);
        varint::put(self.centroids.len() as u64, &mut out);
        pack::put_floats(&self.centroids, &mut out);
        out
    }

    pub(super) fn from_bytes(mut fit: &[u8]) -> Result<Fitted, Corrupt> {
        let metric = if pack::take_byte(&mut fit)? == 0 { Metric::Magnitude } else { Metric::Sensitivity };
        let (four, mut rest) = fit.split_first_chunk::<16>().ok_or(Corrupt("fit"))?;
        let four: [f32; 4] = std::array::from_fn(|i| f32::from_le_bytes(std::array::from_fn(|b| four[4 * i + b])));
        let count = usize::try_from(varint::take(&mut rest)?).unwrap_or(usize::MAX);
        let centroids = pack::take_floats(&mut rest, count)?;
        let thresholds = Thresholds { metric, prune: [four[0], four[1]], protect: [four[2], four[3]] };
        Ok(Fitted { thresholds, centroids })
    }

    /// Level of each value of a tile.
    pub(super) fn levels(&self, tile: &Tile) -> Vec<u16> {
        let mut levels = self.thresholds.split(tile);
        let borders = kmeans::borders(&self.centroids);
        let mut bins = [0u8; BLOCK];
        for (values, levels) in tile.values.chunks(BLOCK).zip(levels.chunks_mut(BLOCK)) {
            let bins = &mut bins[..values.len()];
            count_below(values, &borders, bins);
            for (level, &bin) in levels.iter_mut().zip(bins.iter()) {
                *level += if *level == FIRST_BIN { bin.into() } else { 0 };
            }
        }
        levels
    }
}

/// Values whose bins are found together: they stay in the first-level cache while one border after the other passes.
const BLOCK: usize = 2048;

/// Number of borders below each value: its bin. Fewer than 256 borders.
pub(crate) fn count_below(values: &[f32], borders: &[f32], bins: &mut [u8]) {
    bins.fill(0);
    for &border in borders {
        bins.iter_mut().zip(values).for_each(|(bin, &value)| *bin += u8::from(value > border));
    }
}

/// The stored form of centroids.
pub(crate) fn to_f32(centroids: &[f64]) -> Vec<f32> {
    let mut narrow: Vec<f32> = centroids.iter().map(|&c| (c as f32).clamp(f32::MIN, f32::MAX)).collect();
    // Far below f32's normal numbers several may become equal.
    narrow.dedup();
    narrow
}
