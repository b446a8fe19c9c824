//! Buffers of values that a thread uses again, as `entropy::scratch` has them for bytes: allocating a tile's anew makes the
//! allocator return and fetch pages each time, which costs more than LC-Checkpoint does.

use std::cell::RefCell;

use super::{State, Tile};

/// Buffers a thread keeps: more than a tile has in use at once (as written, before, gradient, state).
const KEPT: usize = 8;
/// Largest buffer that is kept, in elements: a tile of a 16-bit type.
const LARGEST: usize = crate::codec::TILE_BYTES / 2;

thread_local! {
    static POOL: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer of this length. What is in it is left over from other use: every value is to be written before it is read.
pub(super) fn take(length: usize) -> Vec<f32> {
    let mut buffer = POOL.try_with(|pool| pool.borrow_mut().pop()).ok().flatten().unwrap_or_default();
    buffer.resize(length, 0.0);
    buffer
}

fn give(buffer: Vec<f32>) {
    if (1..=LARGEST).contains(&buffer.capacity()) {
        // The pool is gone while its thread ends; then so is the buffer.
        let _ = POOL.try_with(|pool| {
            let mut pool = pool.borrow_mut();
            if pool.len() < KEPT {
                pool.push(buffer);
            }
        });
    }
}

/// The values of a state that is not needed any more.
pub(super) fn give_state(state: State) {
    give(state.values);
}

/// The values of a tile that is not needed any more; one that is simply dropped costs time, nothing else.
pub fn give_back(tile: Tile) {
    give(tile.values);
    tile.previous.into_iter().for_each(give_state);
    tile.gradient.into_iter().for_each(give);
}
