//! States of tiles kept in memory: those of the objects encoded last. The next encoding then reads nothing of its parent
//! from the device.
//!
//! Reads keep no states. A cold read of a whole file was up to a fifth slower with them, and a walk over all files of a
//! lineage a tenth faster. The decoded file in the cache serves later reads of the same file.
//!
//! A state does not depend on its object's encoding, so kept states stay right when objects are re-parented.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use lru::LruCache;
use serde::{Deserialize, Serialize};

use crate::store::Id;
use crate::store::object::Object;
use crate::sync::{Mutex, MutexGuard};
use crate::tile::State;

use super::Chain;

/// Number of chains that are kept open, one per lineage. With at most 12 objects each, they stay far from the usual
/// limit of 1024 open files.
const OPEN_CHAINS: NonZeroUsize = NonZeroUsize::new(16).unwrap();

/// The tiles of an object's state, by tensor and tile.
type Tiles = HashMap<(u32, u32), Arc<State>>;

#[derive(Debug)]
struct Inside {
    /// By object: states are only useful together, so they are dropped together.
    entries: LruCache<Id, Tiles>,
    /// By address: the number of states that hold these bytes.
    shared: HashMap<usize, u32>,
    /// Bytes of all states.
    used: u64,
    /// By leaf: objects that are kept open, with all their ancestors. Their indexes are needed to find a state, and are
    /// also on the device.
    open: LruCache<Id, Vec<Arc<Object>>>,
}

/// Default limit for decoded states: a tenth of [`memory_limit`], and at most 2 GiB.
pub fn usual_memory() -> u64 {
    const MOST: u64 = 2 << 30;
    (memory_limit().unwrap_or(u64::MAX) / 10).min(MOST)
}

/// Bytes of memory that this process may take: the machine's, or less if a control group limits it. `None` if the kernel
/// tells neither.
pub fn memory_limit() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let table = read("/proc/meminfo");
    let kib =
        table.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse().ok());
    let machine = kib.map(|kib: u64| kib.saturating_mul(1024));
    machine.into_iter().chain(group_limit(&read("/proc/self/cgroup"), Path::new("/sys/fs/cgroup"))).min()
}

/// The least limit of a process's control groups and of those above them. `groups`: its `/proc/PID/cgroup`; `root`: where
/// the control groups are mounted.
fn group_limit(groups: &str, root: &Path) -> Option<u64> {
    let limits = groups.lines().flat_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let found = match controllers.split(',').find(|name| ["", "memory"].contains(name)) {
            Some("") => Some(("", "memory.max")),
            Some(v1) => Some((v1, "memory.limit_in_bytes")),
            None => None,
        };
        // A container without a namespace of groups sees names of the host, and its own group at the root.
        let above = |(at, file): (&str, &str)| {
            let groups = Path::new(group.trim_start_matches('/')).ancestors();
            groups.map(|group| root.join(at).join(group).join(file)).collect::<Vec<_>>()
        };
        found.map(above).unwrap_or_default()
    });
    limits.filter_map(|limit| std::fs::read_to_string(limit).ok()?.trim().parse().ok()).min()
}

/// The states kept in memory; the least recently used are dropped first.
#[derive(Debug)]
pub struct Memory {
    limit: u64,
    /// Held to look a state up or to add one, never during a read, decoding or conversion.
    inside: Mutex<Inside>,
    hits: AtomicU64,
    misses: AtomicU64,
    tiles_read: AtomicU64,
}

/// The memory's part of `stepfs status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// Bytes of decoded states.
    pub bytes: u64,
    /// Limit for them.
    pub limit: u64,
    /// Tiles that were decoded from a state in memory.
    pub hits: u64,
    /// Tiles that were decoded from their keyframe on.
    pub misses: u64,
    /// Tiles whose payload was read from the device, of all objects.
    pub tiles_read: u64,
}

impl Memory {
    /// At most `limit` bytes of states; 0 keeps none.
    pub fn new(limit: u64) -> Memory {
        let inside = Inside {
            entries: LruCache::unbounded(),
            shared: HashMap::new(),
            used: 0,
            open: LruCache::new(OPEN_CHAINS),
        };
        Memory {
            limit,
            inside: Mutex::new(inside),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            tiles_read: AtomicU64::new(0),
        }
    }

    /// True if it can hold anything.
    pub(super) fn is_used(&self) -> bool {
        self.limit > 0
    }

    /// Its size, and how much it helped.
    pub fn status(&self) -> MemoryStatus {
        MemoryStatus {
            bytes: self.lock().used,
            limit: self.limit,
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            tiles_read: self.tiles_read.load(Ordering::Relaxed),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a tile, and the payloads that were read for it. `hit`: a state was here.
    pub(super) fn count(&self, hit: bool, read: usize) {
        let counter = if hit { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        self.tiles_read.fetch_add(read as u64, Ordering::Relaxed);
    }

    /// The state of a tile, if memory has it.
    pub(super) fn get(&self, object: &Object, tensor: usize, tile: usize) -> Option<Arc<State>> {
        let mut inside = self.lock();
        inside.entries.get(&object.header().id)?.get(&(tensor as u32, tile as u32)).cloned()
    }

    /// Keeps the objects of a chain open: the next state will be a difference to its leaf.
    pub fn hold(&self, chain: &Chain) {
        self.lock().open.put(chain.leaf().header().id, chain.objects().to_vec());
    }

    /// Drops an object that is gone, or whose states are not needed any more.
    pub fn forget(&self, id: Id) {
        let mut inside = self.lock();
        inside.evict(id);
        inside.close(id);
    }

    /// Closes the files of an object that has another encoding now. Its states stay the same.
    pub fn reencoded(&self, id: Id) {
        self.lock().close(id);
    }

    /// Keeps the state of a tile, if there is room.
    pub(super) fn put(&self, object: &Object, tensor: usize, tile: usize, kept: &Arc<State>) {
        let (id, place) = (object.header().id, (tensor as u32, tile as u32));
        let mut inside = self.lock();
        // An upper bound: its size if no other state had its keyframe.
        let most = kept.own_bytes() as u64 + kept.shared_bytes().map_or(0, |bytes| bytes.len() as u64);
        let known = inside.entries.peek(&id).is_some_and(|tiles| tiles.contains_key(&place));
        if known || !inside.make_room(most, self.limit, id) {
            return;
        }
        inside.used += kept.own_bytes() as u64;
        if let Some(bytes) = kept.shared_bytes() {
            let holders = inside.shared.entry(address(bytes)).or_insert(0);
            *holders += 1;
            let is_first = *holders == 1;
            inside.used += if is_first { bytes.len() as u64 } else { 0 };
        }
        inside.entries.get_or_insert_mut(id, HashMap::new).insert(place, Arc::clone(kept));
    }
}

impl Inside {
    /// Makes room for `bytes` of `id`; `false` if that would exceed the limit.
    fn make_room(&mut self, bytes: u64, limit: u64, id: Id) -> bool {
        while self.used + bytes > limit {
            let Some(victim) = self.entries.iter().rev().map(|(at, _)| *at).find(|at| *at != id) else {
                return false;
            };
            self.evict(victim);
        }
        true
    }

    /// Closes every chain that contains this object: an open file without a name keeps its space on the device.
    fn close(&mut self, id: Id) {
        let with_it = |chain: &[Arc<Object>]| chain.iter().any(|object| object.header().id == id);
        let chains: Vec<Id> = self.open.iter().filter(|(_, chain)| with_it(chain)).map(|(first, _)| *first).collect();
        chains.iter().for_each(|first| drop(self.open.pop(first)));
    }

    fn evict(&mut self, id: Id) {
        let Some(tiles) = self.entries.pop(&id) else {
            return;
        };
        for kept in tiles.values() {
            self.used -= kept.own_bytes() as u64;
            let Some(bytes) = kept.shared_bytes() else { continue };
            if let Some(holders) = self.shared.get_mut(&address(bytes)) {
                *holders -= 1;
                if *holders == 0 {
                    self.used -= bytes.len() as u64;
                    self.shared.remove(&address(bytes));
                }
            }
        }
    }
}

fn address(bytes: &Arc<Vec<u8>>) -> usize {
    Arc::as_ptr(bytes) as usize
}

#[cfg(test)]
mod tests;
