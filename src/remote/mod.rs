//! A remote: a bucket, or a directory on a shared file system, that holds what a store has pushed.
//!
//! Many nodes share one remote. Each node owns the names below `nodes/NODE/`, and only it writes or deletes them. So no
//! lock, no leader and no common clock is needed.
//!
//! - [`place`]: what stepfs asks of a remote. [`directory`] and `bucket` answer it; `memory` does in tests.
//! - [`journal`]: the bytes of a journal's segments (docs/FORMAT.md, "Remote").
//! - [`view`]: the union of all nodes' journals.
//! - [`reader`]: brings a view up to date.
//! - [`writer`]: puts objects, then the segment that names them; collects what nothing names.
//! - `waiting`: programs that wait for the remote.
//! - [`whole`]: an object for a file that the archive has not encoded.
//! - [`fetch`]: brings an object and its ancestors into the store.
//! - `counted`: counts the bytes that come.
//! - `far`: an object that is read piece by piece.
//! - `copy`: brings what a remote has into a store, for commands.
//! - `show`: shows in the tree what changed.
//! - [`daemon`]: the threads that keep a mounted store and its remote in step.
//!
//! No name may ever point to an object that is not there. No node may delete another node's names. Neither a thread
//! that answers the kernel nor the catalog's lock may wait for a remote.

#[cfg(feature = "s3")]
mod bucket;
mod copy;
mod counted;
pub mod daemon;
mod directory;
mod far;
mod fetch;
pub mod journal;
mod keep;
mod local;
#[cfg(test)]
mod memory;
mod one;
mod pace;
mod pauses;
pub mod place;
mod plan;
mod push;
mod reader;
mod shared;
mod show;
#[cfg(test)]
mod tests;
mod tree;
mod url;
pub mod view;
mod waiting;
mod whole;
mod writer;

pub use copy::{Missing, Origin, Step, copy};
pub use daemon::{Daemon, Progress};
pub use fetch::fetch_whole;
pub use journal::Content;
pub use local::{Ahead, Local, Shape};
pub use place::{Error, Place};
pub use reader::{Reader, check_name};
pub use shared::Settings;
pub use tree::last_node;
pub use url::{check, directory_of, open};
pub use view::View;
pub use waiting::Then;
pub use writer::Writer;
