//! A file that is to be encoded, with all that was decided about it.

use std::path::Path;

use crate::container::{Description, ReadAt};
use crate::recall::Chain;

use super::plan::Plan;

/// Tiles encoded at once: a tile takes about 3 MB while it is encoded (its bytes, K, A, R and payload), so 16 take 50
/// MB.
pub(crate) const BATCH: usize = 16;

/// A file to encode.
pub(super) struct Job<'a> {
    /// The file, with its tables in order.
    pub(super) source: &'a (dyn ReadAt + Sync),
    pub(super) len: u64,
    pub(super) origin: &'a Path,
    pub(super) profile: &'a str,
    pub(super) description: &'a Description,
    pub(super) base: Option<&'a Chain>,
    pub(super) plans: &'a [Plan],
    /// States since its chain began.
    pub(super) position: u32,
    /// For people, see [`crate::store::object::Index::note`].
    pub(super) note: &'a str,
    /// Asked between batches: the file was opened for writing, or the store is being closed.
    pub(super) cancelled: &'a (dyn Fn() -> bool + Sync),
}
