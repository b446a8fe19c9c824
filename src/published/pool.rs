//! Buffers of values that are reused from tile to tile, like `entropy::scratch` for bytes.

use std::sync::LazyLock;

use super::{State, Tile};
use crate::entropy::scratch::Shelf;

/// A tile uses at most eight at once (as written, previous, gradient, state, and the coder's), the largest for a 16-bit
/// type.
pub(super) static VALUES: LazyLock<Shelf<f32>> = LazyLock::new(|| Shelf::new(8, crate::codec::TILE_BYTES / 2));

/// Frees the buffers that were not taken since the last call.
pub(crate) fn let_go() {
    VALUES.let_go();
}

/// Returns the buffer of a state for reuse.
pub(super) fn give_state(state: State) {
    state.values.give_back();
}

/// Returns the buffers of a tile for reuse; dropping it instead only costs time.
pub fn give_back(tile: Tile) {
    tile.values.give_back();
    tile.previous.into_iter().for_each(give_state);
    if let Some(gradient) = tile.gradient {
        gradient.give_back();
    }
}
