//! Tensors to symbols and back; pure functions over one tile at a time.
//!
//! - [`lattice`]: R = fl(K + g*A), the native codec of floating-point tensors. Start here.
//! - [`log`]: v = inverse(P + unit*q), its logarithmic sibling, for second moments.
//! - [`lossless`]: any element type, bit for bit, alone or as a difference to a parent.
//! - [`moment`]: m = g*A*sqrt(v), for first moments, with the second moments beside them.
//! - [`rows`]: the lattice with a step for each row, for embedding tables.
//! - [`fused_decode`]: all of these from payloads to bytes in one pass.
//! - [`cast`]: copies in another type.
//! - [`Dtype`]: element types by safetensors' names.
//! - `exception`: elements kept exactly beside a quantized tile.
//! - [`floor`]: keeps values of one-sign tensors from becoming 0 or changing their sign.
//! - `float`: widening of each floating-point type to f64 and rounding back; defined once, for every machine.
//! - `narrow`: integers of a block in 16 bits, as long as those hold them.
//! - `ordered`: floats as integers in the order of their values, and their differences.
//! - `planes`: elements split into one stream per byte.
//!
//! Symbols become bits in [`crate::entropy`].

pub mod cast;
mod dtype;
pub mod entropy;
mod exception;
pub mod float;
pub mod floor;
pub mod fused_decode;
pub mod hash;
mod integers;
pub mod lattice;
pub mod log;
pub mod lossless;
pub mod moment;
mod narrow;
mod ordered;
#[cfg(test)]
mod plain;
mod planes;
pub mod rows;

pub use dtype::Dtype;
pub use entropy::Corrupt;
pub use integers::Integers;
pub use rows::Rows;

/// This tile does not suit the codec; the tensor must be stored losslessly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not to be quantized: {0}")]
pub struct Unfit(pub &'static str);

impl Unfit {
    /// Leaves a tile alone for which this holds.
    #[inline]
    pub fn when(is: bool, what: &'static str) -> Result<(), Unfit> {
        if is { Err(Unfit(what)) } else { Ok(()) }
    }
}

/// Decoded bytes of one tile; the last tile of a tensor may be shorter. A tile and its accumulators stay in a core's
/// second-level cache (1 MiB and more today) while it is decoded. A tensor has enough tiles for all cores, and a read
/// of one element costs at most one tile. Part of the format.
pub const TILE_BYTES: usize = 512 * 1024;
