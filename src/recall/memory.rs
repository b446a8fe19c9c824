//! States of tiles kept in memory. States of super-steps let a read start after its keyframe. The states encoded last
//! let the next encoding read nothing of its parent from the device.
//!
//! A state does not depend on its object's encoding, so kept states stay right when objects are re-parented.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use lru::LruCache;
use serde::{Deserialize, Serialize};

use crate::store::Id;
use crate::store::object::Object;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::tile::State;

use super::Chain;

/// Number of chains that are kept open, one per lineage. With at most 12 objects each, they stay far from the usual
/// limit of 1024 open files.
const OPEN_CHAINS: NonZeroUsize = NonZeroUsize::new(16).unwrap();

/// A tile of a state: object, tensor in its table, tile in that.
type Key = (Id, u32, u32);

/// Who put a state here. Each may always use half of the memory, and the other half while it is free. A read of a large
/// file must not drop the states that the next checkpoint is encoded from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Encode,
    Read,
}

#[derive(Debug)]
struct Entry {
    kind: Use,
    tiles: HashMap<(u32, u32), Arc<State>>,
}

#[derive(Debug)]
struct Inside {
    /// By object: states are only useful together, so they are dropped together.
    entries: LruCache<Id, Entry>,
    /// By address: the number of states that hold these bytes, and the account that they count on.
    shared: HashMap<usize, (u32, Use)>,
    /// Bytes of [`Use::Encode`] and [`Use::Read`].
    used: [u64; 2],
    /// Tiles that a thread is decoding.
    claimed: HashSet<Key>,
    /// By leaf: objects that are kept open, with all their ancestors. Their indexes are needed to find a state, and are
    /// also on the device.
    open: LruCache<Id, Vec<Arc<Object>>>,
}

/// Default limit for decoded states: a tenth of the memory of the machine, or of the process's group, and at most 2
/// GiB.
pub fn usual_memory() -> u64 {
    const MOST: u64 = 2 << 30;
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let total = read("/proc/meminfo");
    let total =
        total.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse().ok());
    let total = total.map_or(MOST, |kib: u64| kib.saturating_mul(1024));
    let group = read("/sys/fs/cgroup/memory.max").trim().parse().unwrap_or(total);
    (total.min(group) / 10).min(MOST)
}

/// The states kept in memory; the least recently used are dropped first.
#[derive(Debug)]
pub struct Memory {
    limit: u64,
    /// Held to look a state up or to add one, never during a read, decoding or conversion.
    inside: Mutex<Inside>,
    /// With `inside`: a claim ended.
    ended: Condvar,
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
            used: [0; 2],
            claimed: HashSet::new(),
            open: LruCache::new(OPEN_CHAINS),
        };
        Memory {
            limit,
            inside: Mutex::new(inside),
            ended: Condvar::new(),
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
            bytes: self.lock().used.iter().sum(),
            limit: self.limit,
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            tiles_read: self.tiles_read.load(Ordering::Relaxed),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count(&self, hit: bool, read: usize) {
        let counter = if hit { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        self.count_read(read);
    }

    /// Counts further tiles as read.
    pub(super) fn count_read(&self, read: usize) {
        self.tiles_read.fetch_add(read as u64, Ordering::Relaxed);
    }

    /// The state of a tile, if memory has it.
    pub(super) fn get(&self, object: &Object, tensor: usize, tile: usize) -> Option<Arc<State>> {
        self.lock().get(key(object, tensor, tile))
    }

    /// The state of a tile, or the right to decode it. Other threads that ask for it wait until that right is used or
    /// given up.
    pub(super) fn claim(&self, object: &Object, tensor: usize, tile: usize) -> Result<Arc<State>, Claim<'_>> {
        let key = key(object, tensor, tile);
        let mut inside = self.lock();
        loop {
            if let Some(kept) = inside.get(key) {
                return Ok(kept);
            }
            if inside.claimed.insert(key) {
                return Err(Claim { memory: self, key });
            }
            inside = self.ended.wait(inside).unwrap_or_else(PoisonError::into_inner);
        }
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

    fn put(&self, key: Key, kind: Use, kept: State) {
        let kept = Arc::new(kept);
        let mut inside = self.lock();
        let entry = inside.entries.peek(&key.0);
        if entry.is_some_and(|entry| entry.tiles.contains_key(&(key.1, key.2))) {
            return;
        }
        // All tiles of an object are on one account.
        let kind = entry.map_or(kind, |entry| entry.kind);
        // An upper bound: its size if no other state had its keyframe.
        let most = kept.own_bytes() as u64 + kept.shared_bytes().map_or(0, |bytes| bytes.len() as u64);
        if !inside.make_room(most, self.limit, kind, key.0) {
            return;
        }
        inside.used[kind as usize] += kept.own_bytes() as u64;
        if let Some(bytes) = kept.shared_bytes() {
            let (holders, account) = inside.shared.entry(address(bytes)).or_insert((0, kind));
            *holders += 1;
            let (first, account) = (*holders == 1, *account);
            inside.used[account as usize] += if first { bytes.len() as u64 } else { 0 };
        }
        let entry = inside.entries.get_or_insert_mut(key.0, || Entry { kind, tiles: HashMap::new() });
        entry.tiles.insert((key.1, key.2), kept);
    }
}

impl Inside {
    fn get(&mut self, (id, tensor, tile): Key) -> Option<Arc<State>> {
        self.entries.get(&id)?.tiles.get(&(tensor, tile)).cloned()
    }

    /// Makes room for `bytes` of `id`; `false` if that would exceed its share.
    fn make_room(&mut self, bytes: u64, limit: u64, kind: Use, id: Id) -> bool {
        let half = limit / 2;
        while self.used.iter().sum::<u64>() + bytes > limit {
            let other = if kind == Use::Encode { Use::Read } else { Use::Encode };
            let from = if self.used[other as usize] > half { other } else { kind };
            let oldest = self.entries.iter().rev().find(|(at, entry)| entry.kind == from && **at != id);
            let Some(victim) = oldest.map(|(at, _)| *at) else {
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
        let Some(entry) = self.entries.pop(&id) else {
            return;
        };
        for kept in entry.tiles.values() {
            self.used[entry.kind as usize] -= kept.own_bytes() as u64;
            let Some(bytes) = kept.shared_bytes() else { continue };
            if let Some((holders, account)) = self.shared.get_mut(&address(bytes)) {
                *holders -= 1;
                if *holders == 0 {
                    self.used[*account as usize] -= bytes.len() as u64;
                    self.shared.remove(&address(bytes));
                }
            }
        }
    }
}

fn key(object: &Object, tensor: usize, tile: usize) -> Key {
    (object.header().id, tensor as u32, tile as u32)
}

fn address(bytes: &Arc<Vec<u8>>) -> usize {
    Arc::as_ptr(bytes) as usize
}

/// The right to decode a tile. If dropped unused (an error), the next thread tries.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    memory: &'a Memory,
    key: Key,
}

impl Claim<'_> {
    /// Keeps the decoded state.
    pub(super) fn fulfil(self, chain: &Chain, kept: State) {
        let id = self.key.0;
        let kind = if chain.remembers(id) { Use::Encode } else { Use::Read };
        self.memory.put(self.key, kind, kept);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.memory.lock().claimed.remove(&self.key);
        self.memory.ended.notify_all();
    }
}

#[cfg(test)]
mod tests;
