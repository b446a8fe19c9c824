//! The codec of a tile: from the bytes of a piece of a tensor to a payload, and back. Plain data in and out: nothing
//! here depends on objects, chains or devices.
//!
//! ```text
//! bytes --quantize--> State --encode--> payload --decode--> State --bytes--> bytes
//!                          a payload may be a difference to the parent's State
//! ```
//!
//! - [`Coding`]: a [`Codec`] and the tensor that it is relative to; an object stores one for each tensor.
//! - [`State`]: the decoded form of a tile, and the parent of the next one.
//! - [`quantize`], [`encode`], [`decode`]: the three steps; each has one arm per codec.
//! - [`Check`]: compares a tile with the bytes that it decodes to; [`Coding::bound`]: the limit of its error.
//!
//! The arithmetic is in [`codec`]. A new codec is a row in [`Codec`], its arithmetic there, and an arm in each
//! step.

mod check;
mod coding;
mod decode;
mod encode;
mod quantize;
mod state;

use std::sync::Arc;

use codec::Rows;
use codec::log::{self, Factors, Grid};
use codec::{Corrupt, Dtype};

pub use check::{Check, Checked};
pub use coding::{Codec, Coding};
pub use decode::{Decoded, Link, decode, run_length};
pub use encode::encode;
pub use quantize::{Around, Companion, Quantized, quantize};
pub use state::State;

/// The bytes of a tile: all states over one keyframe share its bytes.
pub type Bytes = Arc<Vec<u8>>;

/// A tile, and its encoding.
#[derive(Clone, Copy, Debug)]
pub struct TileSpec {
    /// Type of the elements.
    pub dtype: Dtype,
    /// How it is encoded.
    pub coding: Coding,
    /// Bytes.
    pub len: usize,
    /// The position of its elements in the rows of the tensor.
    pub rows: Rows,
}

impl TileSpec {
    fn elements(&self) -> usize {
        self.len / self.dtype.size()
    }

    /// The sizes that the tensor's factors predict for the elements, as bytes of its type.
    fn sizes(&self, factors: Option<&Arc<Factors>>) -> Result<Bytes, Corrupt> {
        let grid = Grid { factors: factors.ok_or(NO_FACTORS)?, first: self.rows.first };
        Ok(Arc::new(log::prediction(self.dtype, grid, self.elements())?))
    }
}

/// Elements that are quantized, reconstructed, compared and hashed together, in the first-level cache.
const BLOCK: usize = 2048;

const NO_BASE: Corrupt = Corrupt("a difference has no base");
const NO_FACTORS: Corrupt = Corrupt("a tensor's factors are missing");
