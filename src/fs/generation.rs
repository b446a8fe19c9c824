//! Generations: what tells a file from others that had, or will have, its number.

use std::path::Path;

use fuser::Generation;

use super::sys;
use crate::hash::xxh3_64;

/// Of the root, and of files whose file system has no handles: those are found by name only.
pub(super) const NONE: Generation = Generation(0);

/// What tells the file at a path from others that had, or will have, its number.
pub(super) fn of(path: &Path) -> Generation {
    // Only 32 bits of it are in a handle; 0 is none.
    sys::handle(path).map_or(NONE, |handle| Generation((xxh3_64(&handle) & 0xffff_ffff).max(1)))
}
