//! Inshrinkerator (Agrawal et al. 2023, also DynaQuant): few bins where they matter, and differences of bins.
//!
//! - Each parameter is protected, pruned or quantized, by quantiles of its magnitude and of its sensitivity |w g| (4.1
//!   to 4.3; `partition`, [`sketch`]). g is the tile's gradient, if there is one: Adam's first moment replaces the
//!   paper's moving average. Pruning takes the same fraction of each type of layer ([`Layer`]), protection of the whole
//!   model.
//! - The other parameters go to the nearest of the centroids of their layer (4.4; [`kmeans`]).
//! - Levels (bins; pruned and protected are two more) are stored as differences to the previous ones (6;
//!   [`super::levels`]).
//! - A search finds the configuration (5; [`search`]).
//!
//! The paper says both that protected values keep full precision (section 3) and that they are kept as bfloat16 (4.2).
//! Here they are exact: two bytes each if all of a tile's are bfloat16, else four.
//!
//! Payload: number of levels, u8; the centroids, f32 each; the levels ([`super::levels`]); the exact protected values
//! in order.

pub mod kmeans;
mod layers;
mod named;
mod partition;
pub mod search;
mod sketch;
#[cfg(test)]
mod tests;

pub use super::levels::Coding;
pub use layers::Layer;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use super::clusters::to_f32;
use super::levels::{self, MOST_LEVELS};
use super::{Fit, State, System, Tensor, Tile, code, quantize};
use codec::Corrupt;
use partition::{FIRST_BIN, PROTECTED, PRUNED, Scores, Thresholds};
use sketch::Histogram;

/// Hundredths of a percent in all.
const WHOLE: u16 = 10_000;

/// Hundredths of a percent as a number from 0 to 1.
fn share(hundredths: u16) -> f64 {
    f64::from(hundredths) / f64::from(WHOLE)
}

/// The criterion for pruning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Metric {
    /// |w|.
    Magnitude,
    /// |w g|.
    Sensitivity,
}

/// A quantization configuration (table 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Config {
    /// Bins of all layers except embeddings.
    pub bins: u16,
    /// Bins of embeddings.
    pub embedding_bins: u16,
    /// Parameters to prune, in hundredths of a percent.
    pub prune: u16,
    /// The criterion for pruning.
    pub metric: Metric,
    /// Parameters that each metric protects, in hundredths of a percent.
    pub protect: u16,
}

impl Config {
    /// This many bins, with the paper's smallest shares to prune and protect.
    pub fn new(bins: u16) -> Config {
        Config { bins, embedding_bins: bins.max(16), prune: 1000, metric: Metric::Magnitude, protect: 5 }
    }

    /// True if both numbers of bins are 2 to 239, and the shares 0 to 100%.
    pub fn is_sound(&self) -> bool {
        let most = MOST_LEVELS as u16 - FIRST_BIN;
        [self.bins, self.embedding_bins].iter().all(|bins| (2..=most).contains(bins))
            && self.prune.max(self.protect) <= WHOLE
    }
}

/// The system in one configuration.
#[derive(Debug)]
pub struct Inshrinkerator {
    config: Config,
    coding: Coding,
}

/// The mix of frequency and magnitude, see [`kmeans`].
const ALPHA: f64 = 0.5;

impl Inshrinkerator {
    /// The paper's system in a sound configuration.
    pub fn new(config: Config) -> Inshrinkerator {
        Inshrinkerator { config, coding: Coding::Rearranged }
    }

    /// With fewer of the delta encoder's stages, as figure 12 compares them.
    pub fn with_coding(self, coding: Coding) -> Inshrinkerator {
        Inshrinkerator { coding, ..self }
    }
}

impl System for Inshrinkerator {
    fn fit(&self, tensors: &[&dyn Tensor], _position: u32) -> io::Result<Vec<Arc<dyn Fit>>> {
        // Each kind of state separately, and in it each type of layer.
        let mut types: BTreeMap<(&str, Layer), Scores> = BTreeMap::new();
        for tensor in tensors {
            let scores = types.entry((layers::slot(tensor.name()), Layer::of(*tensor))).or_default();
            for number in 0..tensor.tiles() {
                scores.add(&tensor.tile(number)?);
            }
        }
        let mut kinds: BTreeMap<&str, Scores> = BTreeMap::new();
        for (&(kind, _), scores) in &types {
            kinds.entry(kind).or_default().merge(scores);
        }
        let one = |tensor: &&dyn Tensor| {
            let (kind, layer) = (layers::slot(tensor.name()), Layer::of(*tensor));
            let Config { bins, embedding_bins, prune, metric, protect } = self.config;
            let prune = if layer == Layer::Vector { 0 } else { prune };
            let bins = if layer == Layer::Embedding { embedding_bins } else { bins };
            let thresholds =
                Thresholds::new(metric, share(prune), share(protect), &types[&(kind, layer)], &kinds[kind]);
            let mut histogram = Histogram::default();
            for number in 0..tensor.tiles() {
                let tile = tensor.tile(number)?;
                let parts = tile.values.iter().zip(thresholds.split(&tile));
                histogram.add(&parts.filter(|&(_, level)| level == FIRST_BIN).map(|(&w, _)| w).collect::<Vec<f32>>());
            }
            let points = histogram.points();
            let centroids = kmeans::cluster(&points, &kmeans::weights(&points, ALPHA), bins.into());
            Ok(Arc::new(Fitted { thresholds, centroids: to_f32(&centroids), coding: self.coding }) as Arc<dyn Fit>)
        };
        tensors.iter().map(one).collect()
    }

    fn take(&self, payload: &mut &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let count = usize::from(code::take_byte(payload)?);
        let bins = count.checked_sub(FIRST_BIN.into()).ok_or(Corrupt("number of levels"))?;
        let centroids = code::take_floats(payload, bins)?;
        let levels = levels::take(payload, count, previous, len)?;
        let protected = levels.iter().filter(|&&level| level == PROTECTED).count();
        Ok(state(levels, &centroids, &code::take_exact(payload, protected)?))
    }
}

/// The parameters to encode a tile.
#[derive(Debug)]
struct Fitted {
    thresholds: Thresholds,
    /// Ascending, without duplicates.
    centroids: Vec<f32>,
    coding: Coding,
}

impl Fit for Fitted {
    fn put(&self, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
        let mut levels = self.thresholds.split(tile);
        for (level, bin) in levels.iter_mut().zip(quantize::nearest(&tile.values, &self.centroids)) {
            *level += if *level == FIRST_BIN { bin.into() } else { 0 };
        }
        let count = self.centroids.len() + usize::from(FIRST_BIN);
        // If all values of a tensor are pruned or protected, no tile of it needs a bin.
        if levels.iter().any(|&level| usize::from(level) >= count) {
            return None;
        }
        let protected = tile.values.iter().zip(&levels).filter(|&(_, &level)| level == PROTECTED);
        let protected: Vec<f32> = protected.map(|(&w, _)| w).collect();
        out.push(count as u8);
        code::put_floats(&self.centroids, out);
        levels::put(&levels, count, tile.previous.as_ref(), self.coding, out);
        code::put_exact(&protected, out);
        Some(state(levels, &self.centroids, &protected))
    }
}

/// The state of levels: each is a bin, pruned or protected, and `protected` has as many values as protected levels.
fn state(levels: Vec<u16>, centroids: &[f32], protected: &[f32]) -> State {
    let mut protected = protected.iter().copied();
    let one = |&level: &u16| match level {
        PRUNED => 0.0,
        PROTECTED => protected.next().unwrap_or(0.0),
        bin => centroids.get(usize::from(bin - FIRST_BIN)).copied().unwrap_or(0.0),
    };
    let values: Vec<f32> = levels.iter().map(one).collect();
    State { values: values.into(), bins: Some(levels) }
}
