//! Buffers reused from tile to tile. For new ones of their size the allocator would return and fetch pages each time,
//! which costs more than the decoding.
//!
//! One shelf serves all threads. With a shelf per thread, each of two dozen threads would keep its largest buffers for
//! ever. A daemon's memory would grow for hours, until the last thread has had its largest tile. A common shelf holds
//! at most the buffers that were in use at one time, and a fixed number per core. Buffers that were unused for a while
//! are freed: the peak comes late and hardly ever again.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// Unused buffers. The last one returned is reused first: it is the most likely to be in a cache.
pub(crate) struct Shelf<T> {
    /// Held only for a push or a pop, below any other lock. It is the standard library's lock even if a test replaces
    /// the scheduler (`sync`): nothing waits under it.
    idle: Mutex<Idle<T>>,
    kept: usize,
    largest: usize,
}

struct Idle<T> {
    buffers: Vec<Vec<T>>,
    /// The first `untouched` of them have not been taken since the last call of `let_go`.
    untouched: usize,
}

impl<T> Default for Idle<T> {
    fn default() -> Idle<T> {
        Idle { buffers: Vec::new(), untouched: 0 }
    }
}

impl<T: Copy + Default> Shelf<T> {
    /// A shelf for a number of buffers per core and at least so many, each of at most `largest` elements. Further or
    /// larger ones go back to the allocator.
    fn new(least: usize, per_core: usize, largest: usize) -> Shelf<T> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Shelf { idle: Mutex::default(), kept: least.max(per_core * cores), largest }
    }

    /// A buffer of this length with arbitrary content: every element must be written before it is read.
    pub(crate) fn take(&self, length: usize) -> Vec<T> {
        let mut buffer = self.take_longer(length);
        buffer.truncate(length);
        buffer
    }

    /// The same, but the buffer may be longer. It clears nothing that was in use before.
    fn take_longer(&self, length: usize) -> Vec<T> {
        let mut idle = self.idle();
        let mut buffer = idle.buffers.pop().unwrap_or_default();
        idle.untouched = idle.untouched.min(idle.buffers.len());
        drop(idle);
        if buffer.len() < length {
            buffer.reserve_exact(length - buffer.len());
            buffer.resize(length, T::default());
        }
        buffer
    }

    /// Takes back a buffer. Dropping one instead only costs time.
    pub(crate) fn give(&self, buffer: Vec<T>) {
        if !(1..=self.largest).contains(&buffer.capacity()) {
            return;
        }
        let mut idle = self.idle();
        if idle.buffers.len() < self.kept {
            idle.buffers.push(buffer);
        }
    }

    /// Frees the buffers that were not taken since the last call.
    pub(crate) fn let_go(&self) {
        let mut idle = self.idle();
        let untouched = idle.untouched;
        let gone: Vec<_> = idle.buffers.drain(..untouched).collect();
        idle.untouched = idle.buffers.len();
        drop(idle);
        drop(gone);
    }

    fn idle(&self) -> MutexGuard<'_, Idle<T>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Byte buffers. A tile uses at most ten at once (eight planes and the buffers that code one of them), each at most of
/// its size.
static BYTES: LazyLock<Shelf<u8>> = LazyLock::new(|| Shelf::new(0, 10, 1 << 20));

/// The bytes and the integers of whole tiles while they are encoded. Those of a tile and of its companion are in use at
/// once. A read decodes 32 tiles ahead, and keeps 64 second moments until it has their first ones.
static TILES: LazyLock<Shelf<u8>> = LazyLock::new(|| Shelf::new(32 + 64, 16, 1 << 20));
static INTEGERS: LazyLock<Shelf<i32>> = LazyLock::new(|| Shelf::new(0, 6, 1 << 18));

/// Tiles with fewer bytes or integers get buffers of their own. An owner of many small ones must not hold large
/// buffers.
const LEAST: usize = 1 << 17;

/// The bytes of a tile, with arbitrary content as in [`Shelf::take`].
pub fn bytes(length: usize) -> Vec<u8> {
    if length < LEAST { vec![0; length] } else { TILES.take(length) }
}

/// The integers of a tile, with arbitrary content as in [`Shelf::take`].
pub fn integers(length: usize) -> Vec<i32> {
    if length < LEAST { vec![0; length] } else { INTEGERS.take(length) }
}

/// The integers of a tile, all of them 0.
pub fn zeros(length: usize) -> Vec<i32> {
    let mut zeros = integers(length);
    zeros.fill(0);
    zeros
}

/// Takes back the bytes of a tile if there is no other owner.
pub fn give_bytes(bytes: Arc<Vec<u8>>) {
    if let Some(bytes) = Arc::into_inner(bytes).filter(|bytes| bytes.capacity() >= LEAST) {
        TILES.give(bytes);
    }
}

/// Takes back the integers of a tile.
pub fn give_integers(integers: Vec<i32>) {
    if integers.capacity() >= LEAST {
        INTEGERS.give(integers);
    }
}

/// Frees the buffers that were not taken since the last call.
pub fn let_go() {
    BYTES.let_go();
    TILES.let_go();
    INTEGERS.let_go();
}

/// A byte buffer that returns to its shelf.
#[derive(Default)]
pub struct Scratch {
    buffer: Vec<u8>,
    /// Bytes in use; the buffer may have more.
    length: usize,
}

impl Scratch {
    /// A buffer of this length, with arbitrary content as in [`Shelf::take`].
    pub fn new(length: usize) -> Scratch {
        Scratch { buffer: BYTES.take_longer(length), length }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        BYTES.give(std::mem::take(&mut self.buffer));
    }
}

impl Deref for Scratch {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[..self.length]
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For any number of threads, the shelf keeps no more than its limit, and nothing too large.
    #[test]
    fn a_shelf_keeps_no_more_than_its_limit() {
        let shelf = Shelf::<u8>::new(0, 2, 100);
        let kept = shelf.kept;
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let taken: Vec<_> = (0..=kept).map(|_| shelf.take(100)).collect();
                    taken.into_iter().for_each(|buffer| shelf.give(buffer));
                });
            }
        });
        shelf.give(vec![0; 101]);
        let idle = shelf.idle();
        assert_eq!(idle.buffers.len(), kept);
        assert!(idle.buffers.iter().all(|buffer| (1..=100).contains(&buffer.capacity())));
    }

    #[test]
    fn what_was_not_taken_for_a_while_goes() {
        let shelf = Shelf::<u8>::new(0, 5, 100);
        let use_at_once = |count: usize| {
            let taken: Vec<_> = (0..count).map(|_| shelf.take(100)).collect();
            taken.into_iter().for_each(|buffer| shelf.give(buffer));
        };
        use_at_once(5);
        shelf.let_go();
        assert_eq!(shelf.idle().buffers.len(), 5, "all were in use since the last time");
        use_at_once(2);
        shelf.let_go();
        assert_eq!(shelf.idle().buffers.len(), 2);
        shelf.let_go();
        assert_eq!(shelf.idle().buffers.len(), 0);
        use_at_once(3);
        assert_eq!(shelf.idle().buffers.len(), 3);
    }
}
