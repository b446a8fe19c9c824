//! Generations: they tell a file from earlier and later files with its inode number.

use std::path::Path;

use fuser::Generation;

use super::sys;
use crate::hash::xxh3_64;

/// The generation of the root, and of files without handles, which are found by name only.
pub(super) const NONE: Generation = Generation(0);

/// The generation of the file at a path.
pub(super) fn of(path: &Path) -> Generation {
    // A handle holds only 32 bits of it; 0 means none.
    sys::handle(path).map_or(NONE, |handle| Generation((xxh3_64(&handle) & 0xffff_ffff).max(1)))
}
