//! Symbols to bits and back; pure.
//!
//! - [`ints`]: `i32` values: a class byte each, then the extra bits of the large ones.
//! - [`symbols`]: byte symbols: picks raw, constant, Huffman, blocks of symbols, or zero runs, whichever is cheapest.
//! - `cost`: estimates from the counts of symbols.
//! - `huffman`: the order-0 prefix code under all of these: several interleaved bit streams, several symbols per
//!   look-up.
//! - `packed`: low bits of values, all of one width.
//! - `bits`, `varint`: bit and integer fields of headers.
//! - `scratch`: buffers reused from tile to tile.
//! - `level`: one source, compiled for each instruction set, chosen at run time.
//!
//! Every decoder takes untrusted bytes: for any input it returns [`Corrupt`] or fills the output. The length of the
//! given output bounds its memory.

mod bits;
mod blocks;
pub(crate) mod cost;
mod huffman;
pub mod ints;
mod outside;
mod packed;
pub mod scratch;
pub mod simd;
mod sparse;
pub mod symbols;
#[cfg(test)]
mod tests;
pub mod varint;

/// A payload that no encoder wrote: damaged, truncated, or decoded with the wrong output length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("corrupt payload: {0}")]
pub struct Corrupt(pub &'static str);

impl Corrupt {
    /// Refuses a payload for which this holds.
    #[inline]
    pub fn when(is: bool, what: &'static str) -> Result<(), Corrupt> {
        if is { Err(Corrupt(what)) } else { Ok(()) }
    }
}

impl From<Corrupt> for std::io::Error {
    fn from(corrupt: Corrupt) -> std::io::Error {
        std::io::Error::new(std::io::ErrorKind::InvalidData, corrupt)
    }
}
