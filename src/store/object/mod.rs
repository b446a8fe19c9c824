//! An object: one archived state of one file (docs/FORMAT.md, "Object").
//!
//! Header, payloads, index, footer. Written once in `tmp/`, header last, so that a file without a header was never
//! finished; then renamed into `objects/`. Its bytes never change afterwards, and its decoded bytes never ever.

mod header;
mod id;
mod index;
mod reader;
mod writer;

pub use header::{FOOTER_BYTES, Footer, HEADER_BYTES, Header, OBJECT_VERSION};
pub use id::Id;
pub use index::{Coding, Index, TensorEntry, Tile, gaps, tiles_of};
pub use reader::{Object, path_of};
pub use writer::ObjectWriter;

#[cfg(test)]
mod tests;
