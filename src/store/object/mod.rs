//! An object: one archived state of one file (docs/FORMAT.md, "Object").
//!
//! Header, payloads, index, footer. It is written once in `tmp/`, header last, so that a file without header is
//! recognized as unfinished. Then it is renamed into `objects/`. Its bytes never change afterwards. Another encoding,
//! as a difference to another object, may take its name, but the decoded bytes never change.

mod header;
mod id;
mod index;
mod reader;
mod writer;

pub use header::{FOOTER_BYTES, Footer, HEADER_BYTES, Header, SUPER_STEP};
pub use id::Id;
pub use index::{HEAD_BYTES, Index, TAIL_BYTES, TensorEntry, Tile, first_element, gaps, rows_and_width, tiles_of};
pub use reader::{Object, path_of};
pub use writer::ObjectWriter;

#[cfg(test)]
mod tests;
