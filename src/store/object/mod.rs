//! An object: one archived state of one file (docs/FORMAT.md, "Object").
//!
//! Header, payloads, index, footer. Written once in `tmp/`, header last, so that a file without a header was never
//! finished; then renamed into `objects/`. Its bytes never change afterwards, but another encoding may take its name, as a
//! difference to another object; its decoded bytes never ever change.

mod header;
mod id;
mod index;
mod reader;
mod writer;

pub(in crate::store) use header::DEVELOPMENT;
pub use header::{FOOTER_BYTES, Footer, HEADER_BYTES, Header, SUPER_STEP};
pub use id::Id;
pub use index::{HEAD_BYTES, Index, TAIL_BYTES, TensorEntry, Tile, first_element, gaps, rows_and_width, tiles_of};
pub use reader::{Object, path_of};
pub use writer::ObjectWriter;

#[cfg(test)]
mod tests;
