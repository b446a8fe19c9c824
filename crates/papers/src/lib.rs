//! Published systems for shrinking checkpoints, each as its paper describes it, so that users can compare them on their
//! own files. Weaknesses of a paper (a step's error, a moment's sign) remain; improvements are in stepfs's own
//! profiles.
//!
//! A system is four stages and its own parameters; a part that only one system has is in that system's file.
//!
//! | stage | |
//! |---|---|
//! | select | the elements that a state stores: [`select`] (largest items, rows, runs); TOPN's places |
//! | predict | from the previous values ([`Tile::before`]) or the previous bins ([`levels`]) |
//! | quantize | [`quantize`] (grids, nearest centroids), [`clusters`], LC-Checkpoint's buckets |
//! | code | [`code`] (fixed widths, exact values), [`levels`], [`codec::entropy`] |
//!
//! A system sees a whole checkpoint once ([`System::fit`]: code tables, bucket promotions, centroids, thresholds,
//! partitions). Then each tensor's [`Fit`] sees each tile by itself, so that a tile can be read without the others. A
//! tile's payload holds all that it needs of the tensor's fit: some tens of bytes in half a megabyte.
//!
//! Values are f32. Narrower types are widened exactly before, and the reconstruction is rounded to the type afterwards;
//! the next state is a difference to that rounded value. Wider types, integers and values that are not finite stay
//! lossless.

pub mod check_n_run;
mod clusters;
mod code;
#[cfg(test)]
mod conformance;
mod delta_dnn;
mod floats;
pub mod gobo;
pub mod inshrinkerator;
pub mod lc;
mod levels;
mod partial;
mod qd_compressor;
mod quantize;
pub mod registry;
mod select;
pub mod tile;

use std::fmt::Debug;
use std::io;
use std::sync::Arc;

use codec::Corrupt;

pub use floats::Floats;

/// One tensor of a checkpoint, a tile at a time: never all of it in memory.
pub trait Tensor: Sync {
    /// The path inside the checkpoint, which shows the layer type.
    fn name(&self) -> &str;
    /// Rows and their width: the first dimension, and all others together; a vector is one row.
    fn rows(&self) -> (u64, u64);
    /// Number of tiles.
    fn tiles(&self) -> usize;
    /// A tile, read or decoded again at each call.
    fn tile(&self, number: usize) -> io::Result<Tile>;
}

/// A tile's values.
#[derive(Clone, Debug, Default)]
pub struct Tile {
    /// Index of its first element in the tensor.
    pub first: u64,
    /// As written.
    pub values: Floats,
    /// The previous state, as decoded; `None` for the first of a chain.
    pub previous: Option<State>,
    /// The gradient's running mean (Adam's first moment in the same checkpoint), if there is one.
    pub gradient: Option<Floats>,
}

impl Tile {
    /// The previous values, if there are as many: after a change of shape they are another tensor's.
    fn before(&self) -> Option<&Floats> {
        self.previous.as_ref().map(|previous| &previous.values).filter(|values| values.len() == self.values.len())
    }
}

/// The decoded form of a tile.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// The values.
    pub values: Floats,
    /// The number of each value's bin, for systems whose next difference is between bins; else `None`.
    pub bins: Option<Vec<u16>>,
}

impl State {
    /// One without bins.
    fn of(values: impl Into<Floats>) -> State {
        State { values: values.into(), bins: None }
    }
}

/// A published system with its parameters; [`registry`] has its name.
pub trait System: Send + Sync + Debug {
    /// Examines a whole checkpoint; returns the parameters for each tensor's tiles. `position`: states since the chain
    /// began.
    fn fit(&self, tensors: &[&dyn Tensor], position: u32) -> io::Result<Vec<Arc<dyn Fit>>>;

    /// True if the first state of a chain is quantized too. Otherwise it keeps its full precision, and so does every
    /// tensor that the previous state lacks.
    fn stands_alone(&self) -> bool {
        true
    }

    /// Chooses the base of each state's difference.
    fn policy(&self) -> Policy {
        Policy::Consecutive
    }

    /// The inverse of [`Fit::put`], off the front of `payload`. `previous` is given if it was when the tile was encoded
    /// and has `len` elements.
    ///
    /// # Errors
    /// [`Corrupt`] if `put` never writes such a payload. Memory stays in proportion to `len`.
    fn take(&self, payload: &mut &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt>;
}

/// A system's parameters for one tensor.
pub trait Fit: Send + Sync + Debug {
    /// Appends the payload of a tile, all finite, and returns its decoded state, bit for bit as [`System::take`] will
    /// return it. `None`, and nothing appended, if the tensor must stay lossless.
    fn put(&self, tile: &Tile, out: &mut Vec<u8>) -> Option<State>;
}

/// Appends the payload of a tile to `out` and returns its decoded state. `None`, and nothing appended, if the tensor
/// must stay lossless.
pub fn encode(fit: &dyn Fit, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
    if code::are_finite(&tile.values) { fit.put(tile, out) } else { None }
}

/// The inverse, with the same previous state; `len`: elements.
///
/// # Errors
/// [`Corrupt`] if `encode` never writes such a payload.
pub fn decode(system: &dyn System, mut payload: &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
    let previous = previous.filter(|previous| previous.values.len() == len);
    let state = system.take(&mut payload, previous, len)?;
    if payload.is_empty() { Ok(state) } else { Err(Corrupt("bytes after a tile")) }
}

/// A difference whose previous state is missing, or has another shape.
const NO_PREVIOUS: Corrupt = Corrupt("no previous state");

/// The base of a state's difference: Check-N-Run's section 5.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The previous state.
    Consecutive,
    /// The first of the chain.
    OneShot,
    /// The first of the chain; its predictor begins new chains.
    Intermittent,
}
