//! Keeps decoded tiles of second moments. Each is needed twice, in either order: for the first moment beside it, and as
//! itself.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use crate::store::object::Index;
use crate::tile::Codec;

/// Maximum number of kept tiles. Tensors up to 32 MiB fit whole, which is the distance between a parameter's two
/// moments in a file. Of a larger tensor only a part fits.
const TILES: usize = 64;

type Kept = (usize, usize, Arc<Vec<u8>>);

/// Decoded tiles of one object that will be needed once more.
#[derive(Debug)]
pub(super) struct Beside {
    /// Tensors that another tensor needs as companion.
    wanted: HashSet<usize>,
    /// Oldest first. The lock is held only briefly.
    tiles: Mutex<VecDeque<Kept>>,
}

impl Beside {
    pub(super) fn of(index: &Index) -> Beside {
        let second = |codec: Codec| match codec {
            Codec::Moment { second, .. } => Some(second as usize),
            _ => None,
        };
        let wanted = index.tensors.iter().filter_map(|entry| second(entry.coding.codec)).collect();
        Beside { wanted, tiles: Mutex::default() }
    }

    /// Returns the tile if it was decoded before, and drops it: nobody needs it a third time.
    pub(super) fn take(&self, tensor: usize, tile: usize) -> Option<Arc<Vec<u8>>> {
        if !self.wanted.contains(&tensor) {
            return None;
        }
        let mut tiles = self.tiles.lock().unwrap_or_else(PoisonError::into_inner);
        let at = tiles.iter().position(|kept| (kept.0, kept.1) == (tensor, tile))?;
        tiles.remove(at).map(|(.., bytes)| bytes)
    }

    /// Keeps a tile that was decoded for the first time.
    pub(super) fn put(&self, tensor: usize, tile: usize, bytes: &Arc<Vec<u8>>) {
        if !self.wanted.contains(&tensor) {
            return;
        }
        let mut tiles = self.tiles.lock().unwrap_or_else(PoisonError::into_inner);
        if tiles.len() >= TILES {
            // Keep the beginning of a tensor that is read from end to end: it is needed first.
            match tiles.back().is_some_and(|kept| kept.0 == tensor) {
                true => tiles.pop_back(),
                false => tiles.pop_front(),
            };
        }
        tiles.push_back((tensor, tile, Arc::clone(bytes)));
    }
}
