//! Tiles of second moments that were decoded for the first moments beside them, or the other way round: each is needed
//! twice, once as itself.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use crate::store::object::Index;
use crate::tile::Coding;

/// Tiles that are kept: tensors up to 32 MiB whole, which is as far apart as a file has a parameter's two moments. Of a
/// larger one as many as go in.
const TILES: usize = 64;

type Kept = (usize, usize, Arc<Vec<u8>>);

/// Decoded tiles that will be asked for once more, of one object.
#[derive(Debug)]
pub(super) struct Beside {
    /// Tensors that another one needs beside it.
    wanted: HashSet<usize>,
    /// Oldest first. Taken for moments.
    tiles: Mutex<VecDeque<Kept>>,
}

impl Beside {
    pub(super) fn of(index: &Index) -> Beside {
        let second = |coding: Coding| match coding {
            Coding::Moment { second, .. } => Some(second as usize),
            _ => None,
        };
        let wanted = index.tensors.iter().filter_map(|entry| second(entry.coding)).collect();
        Beside { wanted, tiles: Mutex::default() }
    }

    /// The tile, if it was decoded once. It is not kept any longer: nobody asks a third time.
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
            // The beginning of a tensor that is read from end to end is what will be asked for first.
            match tiles.back().is_some_and(|kept| kept.0 == tensor) {
                true => tiles.pop_back(),
                false => tiles.pop_front(),
            };
        }
        tiles.push_back((tensor, tile, Arc::clone(bytes)));
    }
}
