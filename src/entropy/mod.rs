//! Symbols to bits and back; pure.
//!
//! - [`ints`]: `i32` values: a class byte each, then the extra bits of the large ones.
//! - [`bytes`]: byte symbols: picks raw, constant, Huffman, blocks of symbols, zero runs, or a grid, whichever is cheapest.
//! - `cost`: estimates from the counts of symbols.
//! - [`grid`]: symbols in rows and columns, coded by how busy these have been.
//! - `huffman`: the order-0 prefix code all of these end in: several interleaved bit streams, several symbols a lookup.
//! - `packed`: low bits of values, all of one width.
//! - `bits`, `varint`: bit and integer fields of headers.
//! - `range`: single bits with probabilities that follow them.
//! - `scratch`: buffers used again from tile to tile.
//! - `level`: one source, compiled for each instruction set, chosen when the program runs.
//!
//! Every decoder takes bytes nobody vouches for: it returns [`Corrupt`] or fills the output, whatever they hold,
//! and its memory is bounded by the length of the output it was given.

mod bits;
mod blocks;
pub mod bytes;
pub(crate) mod cost;
pub mod grid;
mod huffman;
pub mod ints;
pub(crate) mod level;
mod packed;
mod range;
pub(crate) mod scratch;
mod sparse;
#[cfg(test)]
mod tests;
pub(crate) mod varint;

/// A payload that no encoder wrote: damaged, truncated, or given the wrong length of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("corrupt payload: {0}")]
pub struct Corrupt(pub &'static str);
