//! Elements split into one stream per byte place: bytes of one place resemble each other, not their neighbours.

use super::ordered::{Order, Word};
use crate::entropy::simd::multiversion;

/// Elements transformed together, then split: a few KiB, which stay in the first-level cache in between.
const BLOCK: usize = 512;

multiversion! {
    /// Splits `data` into `planes`: the lowest byte of each element, then the next; each plane has one byte per
    /// element. With a parent of that length it splits the differences to it. Without one, it moves the exponent of
    /// floats to the top byte, and takes integers as they are.
    pub(super) fn split<T: Word>(
        data: &[T::Bytes],
        parent: Option<&[T::Bytes]>,
        order: Order,
        planes: &mut [u8],
    ) {
        let n = data.len();
        let mut block = [T::from_byte(0, 0); BLOCK];
        for start in (0..n).step_by(BLOCK) {
            let data = &data[start..n.min(start + BLOCK)];
            let block = &mut block[..data.len()];
            match (parent, order) {
                (Some(parent), _) => {
                    for ((to, &x), &p) in block.iter_mut().zip(data).zip(&parent[start..]) {
                        *to = T::from_bytes(x).difference(T::from_bytes(p), order);
                    }
                }
                (None, Order::Integer) => {
                    block.iter_mut().zip(data).for_each(|(to, &x)| *to = T::from_bytes(x));
                }
                (None, Order::Float) => {
                    block.iter_mut().zip(data).for_each(|(to, &x)| *to = T::from_bytes(x).exponent_first());
                }
            }
            for i in 0..T::BYTES {
                let plane = &mut planes[i * n + start..][..block.len()];
                plane.iter_mut().zip(block.iter()).for_each(|(byte, x)| *byte = x.byte(i));
            }
        }
    }
}

multiversion! {
    /// Undoes [`split`]: `planes` are `T::BYTES` slices, each of the length of `out`.
    pub(super) fn join<T: Word>(
        planes: &[&[u8]],
        parent: Option<&[T::Bytes]>,
        order: Order,
        out: &mut [T::Bytes],
    ) {
        let mut block = [T::from_byte(0, 0); BLOCK];
        for (number, out) in out.chunks_mut(BLOCK).enumerate() {
            let start = number * BLOCK;
            let block = &mut block[..out.len()];
            block.fill(T::from_byte(0, 0));
            for (i, plane) in planes.iter().enumerate() {
                let plane = &plane[start..][..block.len()];
                block.iter_mut().zip(plane).for_each(|(x, &byte)| *x = x.or(T::from_byte(byte, i)));
            }
            match (parent, order) {
                (Some(parent), _) => {
                    for ((to, x), &p) in out.iter_mut().zip(block.iter()).zip(&parent[start..]) {
                        *to = x.undo(T::from_bytes(p), order).to_bytes();
                    }
                }
                (None, Order::Integer) => {
                    out.iter_mut().zip(block.iter()).for_each(|(to, x)| *to = x.to_bytes());
                }
                (None, Order::Float) => {
                    out.iter_mut().zip(block.iter()).for_each(|(to, x)| *to = x.sign_first().to_bytes());
                }
            }
        }
    }
}
