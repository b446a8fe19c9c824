//! Tensors to symbols and back; pure functions over one tile at a time.

mod dtype;

pub use dtype::Dtype;

/// Decoded bytes of a tile.
pub const TILE_BYTES: usize = 512 * 1024;
