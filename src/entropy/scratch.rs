//! Byte buffers that a thread uses again: a tile's buffers are just large enough that allocating them anew makes the
//! allocator return and fetch pages each time, which costs more than the decoding.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

/// Buffers a thread keeps: more than a tile has in use at once (eight planes and what codes one of them).
const KEPT: usize = 16;

/// Largest buffer that is kept; those of a tile are at most its size.
const LARGEST: usize = 1 << 20;

thread_local! {
    static POOL: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer that goes back to its thread's pool.
#[derive(Default)]
pub(crate) struct Scratch(Vec<u8>);

impl Scratch {
    /// A buffer of this length. What is in it is left over from other use: every byte is to be written before it is read.
    pub(crate) fn new(length: usize) -> Scratch {
        let mut buffer = POOL.try_with(|pool| pool.borrow_mut().pop()).ok().flatten().unwrap_or_default();
        buffer.resize(length, 0);
        Scratch(buffer)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.0);
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
}

impl Deref for Scratch {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}
