//! Symbols to bits and back; pure.
//!
//! - [`ints`]: `i32` values: a class byte each, then the extra bits of the large ones.
//! - [`bytes`]: byte symbols: picks raw, constant, Huffman, blocks of symbols, or zero runs, whichever is cheapest.
//! - `huffman`: the order-0 prefix code all of these end in: several interleaved bit streams, several symbols a lookup.
//! - `bits`, `varint`: bit and integer fields of headers.
//! - `scratch`: buffers used again from tile to tile.
//! - `level`: one source, compiled for each instruction set, chosen when the program runs.
//!
//! Every decoder takes bytes nobody vouches for: it returns [`Corrupt`] or fills the output, whatever they hold,
//! and its memory is bounded by the length of the output it was given.

mod bits;
mod blocks;
pub mod bytes;
mod huffman;
pub mod ints;
pub(crate) mod level;
pub(crate) mod scratch;
mod sparse;
#[cfg(test)]
mod tests;
pub(crate) mod varint;

/// A payload that no encoder wrote: damaged, truncated, or given the wrong length of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("corrupt payload: {0}")]
pub struct Corrupt(pub &'static str);
