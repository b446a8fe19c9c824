//! Published systems for shrinking checkpoints, each as its paper describes it, so that a user can hold them against one
//! another on their own files. What they leave to chance (a step's error, a moment's sign) is left to chance here, too;
//! improvements are stepfs's own profiles.
//!
//! A system sees a whole checkpoint once ([`System::fit`]: code tables, bucket promotions, centroids, thresholds, whose turn it
//! is) and then each tile by itself ([`System::encode`], [`System::decode`]), so that a tile can be read without the others.
//! Whatever a tile needs of the tensor's fit stands in the tile's payload: some tens of bytes in half a megabyte.
//!
//! Values are f32. Narrower types are widened exactly before, and the reconstruction is rounded to the type after; that rounded
//! value is what the next state is a difference to. Wider ones, integers and what is not finite stay lossless.

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
    /// What decides between layer types: the path inside the checkpoint.
    fn name(&self) -> &str;
    /// Rows and their width: the first dimension, and all others together; a vector is one row.
    fn rows(&self) -> (u64, u64);
    /// Number of tiles.
    fn tiles(&self) -> usize;
    /// A tile, read or decoded anew at each call.
    fn tile(&self, number: usize) -> std::io::Result<Tile>;
}

/// A tile's values.
#[derive(Clone, Debug, Default)]
pub struct Tile {
    /// Number of its first element in the tensor.
    pub first: u64,
    /// As written.
    pub values: Floats,
    /// The state before, as it decodes; none for the first of a chain.
    pub previous: Option<State>,
    /// The gradient's running mean (Adam's first moment in the same checkpoint), if there is one.
    pub gradient: Option<Floats>,
}

impl Tile {
    /// The state before, if it is one of as many values: after a change of shape it is another tensor's.
    fn before(&self) -> Option<&State> {
        self.previous.as_ref().filter(|previous| previous.values.len() == self.values.len())
    }
}

/// What a tile decodes to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// The values.
    pub values: Floats,
    /// The number of each value's bin, for the systems whose next difference is one of bins; else none.
    pub bins: Option<Vec<u16>>,
}

/// A published system with its parameters.
pub trait System: Send + Sync {
    /// The word for it in `stepfs.toml` and on the command line: `lc-3`, `check-n-run-4`.
    fn name(&self) -> String;

    /// Looks at a whole checkpoint; gives what each tensor's tiles are encoded with. `position`: states since the chain began.
    ///
    /// # Errors
    /// What reading the tensors reports.
    fn fit(&self, tensors: &[&dyn Tensor], position: u32) -> std::io::Result<Vec<Fit>>;

    /// Appends the payload of a tile to `out` and gives the state that it decodes to, bit for bit what [`System::decode`] will
    /// give. `None`: this system is not for such values (NaN, infinity); the tensor stays lossless.
    fn encode(&self, fit: &Fit, tile: &Tile, out: &mut Vec<u8>) -> Option<State>;

    /// Whether the first state of a chain is quantized, too. If not, it keeps its full precision, and so does every tensor that the
    /// state before does not have.
    fn stands_alone(&self) -> bool {
        true
    }

    /// Which state a state becomes a difference to.
    fn policy(&self) -> Policy {
        Policy::Consecutive
    }

    /// The inverse. `previous` is there if it was when the tile was encoded; `len`: elements.
    ///
    /// # Errors
    /// [`Corrupt`] for whatever `encode` does not write; memory stays in proportion to `len`.
    fn decode(&self, payload: &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt>;
}

/// Which state a state becomes a difference to: Check-N-Run's section 4.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The state before.
    Consecutive,
    /// The first of the chain.
    OneShot,
    /// The first of the chain, and a new chain where its predictor says so.
    Intermittent,
}

/// What a system found out about a tensor: its own words, opaque to all others.
pub type Fit = Vec<u8>;
