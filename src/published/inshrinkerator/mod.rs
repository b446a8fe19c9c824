//! Inshrinkerator (Agrawal et al. 2023, also DynaQuant): few bins where they matter, and differences of bins.
//!
//! - Each parameter is protected, pruned or quantized, by quantiles of its magnitude and of its sensitivity |w g| (4.1
//!   to 4.3; `partition`, [`sketch`]). g is the tile's gradient, if there is one: Adam's first moment replaces the
//!   paper's moving average. Pruning takes the same fraction of each type of layer ([`Layer`]), protection of the whole
//!   model.
//! - The other parameters go to the nearest of the centroids of their layer (4.4; [`kmeans`]).
//! - Levels (bins; pruned and protected are two more) are stored as differences to the previous ones (6; `delta`).
//! - A search finds the configuration (5; [`search`]).
//!
//! The paper says both that protected values keep full precision (section 3) and that they are kept as bfloat16 (4.2).
//! Here they are exact: two bytes each if all of a tile's are bfloat16, else four.
//!
//! Payload: [`ID`]; flags (1: differences to the previous state; 2: protected values have two bytes). Number of levels,
//! u8; the centroids, f32 each; the cycle B, u8; the levels (see `delta`). Last the protected values in order, their
//! upper two bytes each, or all four.

mod delta;
pub mod kmeans;
mod layers;
mod named;
mod partition;
pub mod search;
pub mod sketch;
#[cfg(test)]
mod tests;

pub use delta::Coding;
pub(crate) use delta::{MOST_LEVELS, decode as decode_levels, encode as encode_levels};
pub use layers::Layer;
pub use named::Named;
pub(crate) use partition::{count_below, to_f32};

use std::collections::BTreeMap;
use std::io;

use super::{Corrupt, Fit, State, System, Tensor, Tile, pack};
use partition::{FIRST_BIN, Fitted, PROTECTED, PRUNED, Scores, Thresholds};
use sketch::Histogram;

/// First byte of a payload.
pub const ID: u8 = 20;

const DIFFERENCES: u8 = 1;
const SHORT: u8 = 2;

/// The criterion for pruning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Metric {
    /// |w|.
    Magnitude,
    /// |w g|.
    Sensitivity,
}

/// A quantization configuration (table 2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Bins of all layers except embeddings.
    pub bins: u16,
    /// Bins of embeddings.
    pub embedding_bins: u16,
    /// Share of the parameters to prune, 0 to 1.
    pub prune: f64,
    /// The criterion for pruning.
    pub metric: Metric,
    /// Share of the parameters that each metric protects, 0 to 1.
    pub protect: f64,
}

impl Config {
    /// This many bins, with the paper's smallest shares to prune and protect.
    pub fn new(bins: u16) -> Config {
        Config { bins, embedding_bins: bins.max(16), prune: 0.1, metric: Metric::Magnitude, protect: 0.0005 }
    }
}

/// The system in one configuration.
#[derive(Clone, Copy, Debug)]
pub struct Inshrinkerator {
    config: Config,
    coding: Coding,
    alpha: f64,
}

/// The mix of frequency and magnitude, see [`kmeans`].
const ALPHA: f64 = 0.5;

impl Inshrinkerator {
    /// `None` if a number of bins is not 2 to 239, or a share not 0 to 1.
    pub fn new(config: Config) -> Option<Inshrinkerator> {
        let most = MOST_LEVELS as u16 - FIRST_BIN;
        let bins = [config.bins, config.embedding_bins].iter().all(|bins| (2..=most).contains(bins));
        let shares = [config.prune, config.protect].iter().all(|share| (0.0..=1.0).contains(share));
        (bins && shares).then_some(Inshrinkerator { config, coding: Coding::Rearranged, alpha: ALPHA })
    }

    /// With fewer of the delta encoder's stages, as figure 12 compares them.
    pub fn with_coding(self, coding: Coding) -> Inshrinkerator {
        Inshrinkerator { coding, ..self }
    }

    /// With another mix of frequency (1) and magnitude (0).
    pub fn with_alpha(self, alpha: f64) -> Inshrinkerator {
        Inshrinkerator { alpha: alpha.clamp(0.0, 1.0), ..self }
    }
}

impl System for Inshrinkerator {
    fn fit(&self, tensors: &[&dyn Tensor], _position: u32) -> io::Result<Vec<Fit>> {
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
            let prune = if layer == Layer::Vector { 0.0 } else { prune };
            let bins = if layer == Layer::Embedding { embedding_bins } else { bins };
            let thresholds = Thresholds::new(metric, prune, protect, &types[&(kind, layer)], &kinds[kind]);
            let mut histogram = Histogram::default();
            let mut left = Vec::new();
            for number in 0..tensor.tiles() {
                let tile = tensor.tile(number)?;
                let levels = thresholds.split(&tile);
                left.clear();
                let quantized =
                    tile.values.iter().zip(levels).filter(|&(w, level)| level == FIRST_BIN && w.is_finite());
                left.extend(quantized.map(|(&w, _)| w));
                histogram.add(&left);
            }
            let points = histogram.points();
            let centroids = kmeans::cluster(&points, &kmeans::weights(&points, self.alpha), bins.into());
            Ok(Fitted { thresholds, centroids: to_f32(&centroids) }.to_bytes())
        };
        tensors.iter().map(one).collect()
    }

    fn encode(&self, fit: &Fit, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
        let fitted = Fitted::from_bytes(fit).ok()?;
        let level_count = fitted.centroids.len() + usize::from(FIRST_BIN);
        if !tile.values.iter().all(|w| w.is_finite()) || level_count > MOST_LEVELS {
            return None;
        }
        let levels = fitted.levels(tile);
        // If all values of a tensor are pruned or protected, no tile of it needs a bin.
        if levels.iter().any(|&level| usize::from(level) >= level_count) {
            return None;
        }
        let before = tile.previous.as_ref().and_then(|state| state.bins.as_deref());
        let before = before.filter(|bins| bins.len() == levels.len());
        let before = before.filter(|bins| bins.iter().all(|&level| usize::from(level) < MOST_LEVELS));
        let most_before = before.and_then(|bins| bins.iter().max()).map_or(0, |&level| usize::from(level) + 1);
        let cycle = level_count.max(most_before);
        let protected: Vec<f32> =
            tile.values.iter().zip(&levels).filter(|&(_, &level)| level == PROTECTED).map(|(&w, _)| w).collect();
        let short = protected.iter().all(|w| w.to_bits().trailing_zeros() >= 16);
        let flag = |set: bool, flag: u8| if set { flag } else { 0 };
        let flags = flag(before.is_some(), DIFFERENCES) | flag(short, SHORT);
        out.extend_from_slice(&[ID, flags, level_count as u8]);
        pack::put_floats(&fitted.centroids, out);
        out.push(cycle as u8);
        encode_levels(&levels, before, cycle, self.coding, out);
        let skip = if short { 2 } else { 0 };
        out.extend(protected.iter().flat_map(|w| w.to_le_bytes().into_iter().skip(skip)));
        Some(State { values: values(&levels, &fitted.centroids, &protected).into(), bins: Some(levels) })
    }

    fn decode(&self, mut payload: &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let payload = &mut payload;
        if pack::take_byte(payload)? != ID {
            return Err(Corrupt("not of Inshrinkerator"));
        }
        let flags = pack::take_byte(payload)?;
        let level_count = usize::from(pack::take_byte(payload)?);
        let bins = level_count.checked_sub(FIRST_BIN.into()).ok_or(Corrupt("number of levels"))?;
        let centroids = pack::take_floats(payload, bins)?;
        let cycle = usize::from(pack::take_byte(payload)?);
        let before = match flags & DIFFERENCES != 0 {
            true => Some(previous.and_then(|state| state.bins.as_deref()).ok_or(Corrupt("no previous bins"))?),
            false => None,
        };
        let mut levels = vec![0; len];
        decode_levels(payload, before, cycle, &mut levels)?;
        if levels.iter().any(|&level| usize::from(level) >= level_count) {
            return Err(Corrupt("level beyond the last bin"));
        }
        let count = levels.iter().filter(|&&level| level == PROTECTED).count();
        let protected = if flags & SHORT != 0 {
            let upper = payload.chunks_exact(2).flat_map(|word| [0, 0, word[0], word[1]]).take(4 * count);
            pack::take_floats(&mut upper.collect::<Vec<u8>>().as_slice(), count)?
        } else {
            pack::take_floats(&mut &**payload, count)?
        };
        if payload.len() != count * if flags & SHORT != 0 { 2 } else { 4 } {
            return Err(Corrupt("bytes after the protected values"));
        }
        Ok(State { values: values(&levels, &centroids, &protected).into(), bins: Some(levels) })
    }
}

/// The values of levels: each level is a bin, pruned or protected, and `protected` has as many values as protected
/// levels.
fn values(levels: &[u16], centroids: &[f32], protected: &[f32]) -> Vec<f32> {
    let mut protected = protected.iter().copied();
    let one = |&level: &u16| match level {
        PRUNED => 0.0,
        PROTECTED => protected.next().unwrap_or(0.0),
        bin => centroids.get(usize::from(bin - FIRST_BIN)).copied().unwrap_or(0.0),
    };
    levels.iter().map(one).collect()
}
