//! Buffers of values that are used again from tile to tile, as `entropy::scratch` has them for bytes.

use std::sync::LazyLock;

use super::{State, Tile};
use crate::entropy::scratch::Shelf;

/// A tile has at most eight in use at once (as written, before, gradient, state, and what codes it), the largest of a 16-bit type.
pub(super) static VALUES: LazyLock<Shelf<f32>> = LazyLock::new(|| Shelf::new(8, crate::codec::TILE_BYTES / 2));

/// Gives the allocator what nobody has taken since the last call.
pub(crate) fn let_go() {
    VALUES.let_go();
}

/// The values of a state that is not needed any more.
pub(super) fn give_state(state: State) {
    state.values.give_back();
}

/// The values of a tile that is not needed any more; one that is simply dropped costs time, nothing else.
pub fn give_back(tile: Tile) {
    tile.values.give_back();
    tile.previous.into_iter().for_each(give_state);
    if let Some(gradient) = tile.gradient {
        gradient.give_back();
    }
}
