//! States of tiles kept in memory: of super-steps, so that a read does not begin at its keyframe, and of the states
//! encoded last, so that encoding the next one reads nothing of its parent from the device.
//!
//! A state does not depend on how its object is stored, so what is kept stays right when objects are re-parented.

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

/// Chains that are kept open, for as many lineages; with at most 12 objects each, far from the 1024 files that a process
/// may usually open.
const OPEN_CHAINS: NonZeroUsize = NonZeroUsize::new(16).unwrap();

/// A tile of a state: object, tensor in its table, tile in that.
type Key = (Id, u32, u32);

/// Who put a state here. Each may always have half of the memory, and the other half while it is not asked for: a read
/// of a large file must not drive out what the next checkpoint is encoded from.
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
    /// By object: a state is of use as a whole, so it goes as a whole.
    entries: LruCache<Id, Entry>,
    /// By address: how many states hold these bytes, and on whose account they are.
    shared: HashMap<usize, (u32, Use)>,
    /// Bytes of [`Use::Encode`] and [`Use::Read`].
    used: [u64; 2],
    /// Tiles that somebody decodes at the moment.
    claimed: HashSet<Key>,
    /// By their first: objects that are kept open, with all that they are differences to. Their indexes are needed to find
    /// a state, and are on the device, too.
    open: LruCache<Id, Vec<Arc<Object>>>,
}

/// Bytes of decoded states that are kept unless somebody says otherwise: a tenth of what the machine, or the group that
/// this process is confined to, has; at most 2 GiB.
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

/// The states kept in memory, least recently used first to go.
#[derive(Debug)]
pub struct Memory {
    limit: u64,
    /// Taken to look a state up and to add one; nothing is read, decoded or converted under it.
    inside: Mutex<Inside>,
    /// With `inside`: a claim ended.
    ended: Condvar,
    hits: AtomicU64,
    misses: AtomicU64,
    tiles_read: AtomicU64,
}

/// What `stepfs status` shows of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// Bytes of decoded states.
    pub bytes: u64,
    /// Most that they may take.
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

    /// Whether it can hold anything.
    pub(super) fn is_used(&self) -> bool {
        self.limit > 0
    }

    /// How full it is and how much it helped.
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

    /// Tiles read on top of those that were counted.
    pub(super) fn count_read(&self, read: usize) {
        self.tiles_read.fetch_add(read as u64, Ordering::Relaxed);
    }

    /// The state of a tile, if it is here.
    pub(super) fn get(&self, object: &Object, tensor: usize, tile: usize) -> Option<Arc<State>> {
        self.lock().get(key(object, tensor, tile))
    }

    /// The state of a tile, or the right to decode it: whoever else asks for it waits until that was used or given up.
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

    /// Keeps the objects of a chain open: the next state will be a difference to its first.
    pub fn hold(&self, chain: &Chain) {
        self.lock().open.put(chain.leaf().header().id, chain.objects().to_vec());
    }

    /// Lets go of an object that is gone, or whose states will not be asked for.
    pub fn forget(&self, id: Id) {
        let mut inside = self.lock();
        inside.evict(id);
        inside.close(id);
    }

    /// Lets go of the files of an object that has another encoding now. Its states are what they were.
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
        // What it would add if nobody else had its keyframe: an upper bound.
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

    /// Makes room for `bytes` of `id`; `false` if that would take more than its share.
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

    /// Closes every chain that this object is in: an open file without a name keeps its room on the device.
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

/// The right to decode a tile. Dropped unused (an error), it lets the next one try.
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
