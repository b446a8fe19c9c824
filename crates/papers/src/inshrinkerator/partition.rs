//! Decides which parameters are protected, pruned or quantized (section 4.2), from quantiles of their magnitude |w| and
//! sensitivity |w g| (section 4.1).

use super::super::Tile;
use super::Metric;
use super::sketch::Sketch;

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
    pub(super) metric: Metric,
    /// By magnitude, by sensitivity; below 0 for none.
    pub(super) prune: [f32; 2],
    /// By magnitude, by sensitivity; infinity for none.
    pub(super) protect: [f32; 2],
}

impl Thresholds {
    /// `type_scores`: of all layers of the tensor's type; `all`: of all layers.
    pub(super) fn new(metric: Metric, prune: f64, protect: f64, type_scores: &Scores, all: &Scores) -> Thresholds {
        let low = |sketch: &Sketch| sketch.quantile(prune).filter(|_| prune > 0.0).map_or(-1.0, |at| at as f32);
        let high = |sketch: &Sketch| {
            sketch.quantile(1.0 - protect).filter(|_| protect > 0.0).map_or(f32::INFINITY, |at| at as f32)
        };
        Thresholds {
            metric,
            prune: [low(&type_scores.magnitude), low(&type_scores.sensitivity)],
            protect: [high(&all.magnitude), high(&all.sensitivity)],
        }
    }

    /// Level of each value, [`FIRST_BIN`] for all quantized ones.
    pub(super) fn split(&self, tile: &Tile) -> Vec<u16> {
        let gradient = gradient(tile);
        // Without gradients the sensitivity is unknown, and magnitude decides alone.
        let metric = if gradient.is_some() { self.metric as usize } else { Metric::Magnitude as usize };
        let level = |(at, w): (usize, &f32)| {
            let scores = [w.abs(), gradient.map_or(-1.0, |gradient| (w * gradient[at]).abs())];
            if scores[0] >= self.protect[0] || scores[1] >= self.protect[1] {
                PROTECTED
            } else if scores[metric] <= self.prune[metric] {
                PRUNED
            } else {
                FIRST_BIN
            }
        };
        tile.values.iter().enumerate().map(level).collect()
    }
}
