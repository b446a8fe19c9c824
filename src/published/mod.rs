//! Published systems for shrinking checkpoints, each as its paper describes it, so that users can compare them on their
//! own files. Weaknesses of a paper (a step's error, a moment's sign) remain; improvements are in stepfs's own
//! profiles.
//!
//! A system sees a whole checkpoint once ([`System::fit`]: code tables, bucket promotions, centroids, thresholds,
//! partitions). Then it sees each tile by itself ([`System::encode`], [`System::decode`]), so that a tile can be read
//! without the others. A tile's payload holds all that it needs of the tensor's fit: some tens of bytes in half a
//! megabyte.
//!
//! Values are f32. Narrower types are widened exactly before, and the reconstruction is rounded to the type afterwards;
//! the next state is a difference to that rounded value. Wider types, integers and values that are not finite stay
//! lossless.

pub mod check_n_run;
#[cfg(test)]
pub(crate) mod conformance;
pub mod delta_dnn;
mod floats;
pub mod gobo;
pub mod inshrinkerator;
pub mod lc;
mod pack;
mod pool;
pub mod qd_compressor;
pub mod registry;
pub mod scar;
mod select;
pub mod tile;
pub mod topn;
mod uniform;
mod values;

use crate::codec::Corrupt;

pub use floats::Floats;
pub use pool::give_back;
pub(crate) use pool::let_go;

/// One tensor of a checkpoint, a tile at a time: never all of it in memory.
pub trait Tensor: Sync {
    /// The path inside the checkpoint, which shows the layer type.
    fn name(&self) -> &str;
    /// Rows and their width: the first dimension, and all others together; a vector is one row.
    fn rows(&self) -> (u64, u64);
    /// Number of tiles.
    fn tiles(&self) -> usize;
    /// A tile, read or decoded again at each call.
    fn tile(&self, number: usize) -> std::io::Result<Tile>;
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
    /// The previous state, if it has as many values: after a change of shape it is another tensor's.
    fn before(&self) -> Option<&State> {
        self.previous.as_ref().filter(|previous| previous.values.len() == self.values.len())
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

/// A published system with its parameters; [`registry`] has its name.
pub trait System: Send + Sync + std::fmt::Debug {
    /// Examines a whole checkpoint; returns the parameters for each tensor's tiles. `position`: states since the chain
    /// began.
    fn fit(&self, tensors: &[&dyn Tensor], position: u32) -> std::io::Result<Vec<Fit>>;

    /// Appends the payload of a tile to `out` and returns its decoded state, bit for bit as [`System::decode`] will
    /// return it. `None` if this system does not support such values (NaN, infinity); the tensor stays lossless.
    fn encode(&self, fit: &Fit, tile: &Tile, out: &mut Vec<u8>) -> Option<State>;

    /// True if the first state of a chain is quantized too. Otherwise it keeps its full precision, and so does every
    /// tensor that the previous state lacks.
    fn stands_alone(&self) -> bool {
        true
    }

    /// Chooses the base of each state's difference.
    fn policy(&self) -> Policy {
        Policy::Consecutive
    }

    /// The inverse. `previous` is given if it was when the tile was encoded; `len`: elements.
    ///
    /// # Errors
    /// [`Corrupt`] if `encode` never writes such a payload. Memory stays in proportion to `len`.
    fn decode(&self, payload: &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt>;
}

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

/// A system's parameters for a tensor, in its own format.
pub type Fit = Vec<u8>;
