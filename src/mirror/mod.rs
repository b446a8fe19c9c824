//! A mirror: a bucket, or a directory on another file system, that has what a store has, seconds later.
//!
//! One store writes to it, and nothing comes back but by `stepfs pull`. What lies there never changes: bytes under the
//! hash of themselves, and manifests that each name one state of the store (docs/MIRROR.md, docs/FORMAT.md).
//!
//! - [`place`]: what stepfs asks of a mirror. `directory` and `bucket` answer it; `tests/memory` does in tests.
//! - [`pieces`]: the bytes that lie there.
//! - [`tree`]: the names with their objects, and the bytes of each directory.
//! - [`manifest`]: the states that are there, and whose mirror it is.
//! - [`source`]: what the archive tells of its files, and a look at a name of the tree.
//! - `waiting`: a name that the mirror has not as the store has it.
//! - `work`: the bytes of one file on their way.
//! - `states`: what is there; puts blobs and manifests, and deletes what nothing needs.
//! - `writer`: looks at names, brings their bytes, and enters them.
//! - [`daemon`]: the thread that does so.
//! - [`reader`]: a state of a mirror, and its objects.
//! - `pull`: makes files of it in a store.
//!
//! No manifest may ever name bytes that are not there. Neither a thread that answers the kernel nor the catalog's lock may
//! wait for a mirror.

#[cfg(feature = "s3")]
mod bucket;
pub mod daemon;
mod directory;
pub mod manifest;
mod pace;
pub mod pieces;
pub mod place;
mod pull;
pub mod reader;
mod settings;
pub mod source;
mod states;
#[cfg(test)]
mod tests;
pub mod tree;
mod url;
mod waiting;
mod work;
mod writer;

pub use daemon::Daemon;
pub use manifest::claim;
pub use place::{Error, Place};
pub use pull::{Missing, Step, Watch, pull};
pub use reader::Reader;
pub use settings::{Progress, Settings};
pub use source::{Ahead, Shape, Source, Told};
pub use url::{directory_of, open};
