//! Recall: finds the objects and tiles that a read needs, decodes them, and caches decoded files.
//!
//! A read costs the tiles that it touches and their chain, not the file. However many handles of a file need a unit, it
//! is decoded once, into a file of the cache. Later opens read that file by passthrough, and an open for writing makes it
//! the file in the tree. Every checksum is verified: bytes that differ from the archived ones are an error, never an
//! answer.

mod cache;
mod chain;
mod error;
#[cfg(all(test, feature = "shuttle"))]
mod interleaved;
pub mod layout;
mod memory;
mod order;
mod reader;
mod stream;
pub mod walk;

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
#[cfg(not(feature = "shuttle"))]
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::store::{Id, Objects};
use crate::sync::{Mutex, Pool};

pub use cache::{Cache, Decoded};
pub use chain::{Chain, Step};
pub use error::ReadError;
pub use layout::Layout;
pub use memory::{Memory, MemoryStatus, memory_limit, usual_memory};
pub use order::order;
pub use reader::Reader;
pub use stream::{check_hash, stream};
pub(crate) use stream::{check_hash_on, decode_unit};

/// Reads of released files since the mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reads {
    /// How often programs opened a file that no reader had open.
    pub opened: u64,
    /// Bytes that were decoded for readers, also those read ahead.
    pub decoded_bytes: u64,
    /// Files that programs could not read, because they are damaged.
    pub failed: u64,
}

/// The shared data of all readers of a store.
#[derive(Debug)]
pub struct Recall {
    objects: Arc<Objects>,
    cache: Cache,
    memory: Arc<Memory>,
    /// Decodes ahead of readers, and whole files.
    pool: Pool,
    /// Bytes that readers have decoded, and files that programs have opened.
    decoded: AtomicU64,
    opened: AtomicU64,
    /// Why programs could not read files, by their objects. Taken for moments, last of all locks.
    failures: Mutex<HashMap<Id, String>>,
}

impl Recall {
    /// Readers for `objects` that decode into `cache` on `threads` threads, with `memory` bytes of decoded states.
    pub fn new(objects: Arc<Objects>, cache: Cache, memory: u64, threads: usize) -> std::io::Result<Arc<Recall>> {
        let builder = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|n| format!("recall-{n}"))
            // Read-ahead must never end the daemon. A reader that needs the unit decodes it again and gets the error.
            .panic_handler(|_| log::error!("a task that read ahead panicked"));
        let pool = Pool::new(builder)?;
        let memory = Arc::new(Memory::new(memory));
        let (decoded, opened) = Default::default();
        let recall = Arc::new(Recall { objects, cache, memory, pool, decoded, opened, failures: Mutex::default() });
        #[cfg(not(feature = "shuttle"))]
        leave_room(&recall)?;
        Ok(recall)
    }

    /// Opens an object and its ancestors, to be decoded with states in memory.
    pub fn chain(&self, id: Id) -> Result<Chain, ReadError> {
        let chain = Chain::open(&self.objects, id)?;
        Ok(chain.with_memory(&self.memory))
    }

    /// The states that are kept in memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Opens the file of an object. Blocks on the device.
    pub fn reader(self: &Arc<Self>, id: Id) -> Result<Arc<Reader>, ReadError> {
        self.reader_for(id, 0)
    }

    /// The same for an inode of a mount, which gets what was decoded for it before.
    pub fn reader_for(self: &Arc<Self>, id: Id, owner: u64) -> Result<Arc<Reader>, ReadError> {
        let chain = self.chain(id)?;
        let order = order(&chain)?;
        let reader = Reader::new(Arc::clone(self), owner, chain, order);
        reader.start_skeleton();
        Ok(reader)
    }

    /// Opens the readable part of an object's file; ancestors may be missing.
    pub fn part(self: &Arc<Self>, id: Id) -> Result<Arc<Reader>, ReadError> {
        let chain = Chain::open_part(&self.objects, id)?;
        let order = order(&chain)?;
        Ok(Reader::new(Arc::clone(self), 0, chain, order))
    }

    /// Passes the whole decoded file of an object to `put`, in pieces with their offsets.
    ///
    /// # Errors
    /// [`ReadError`]; an error of `put` is reported as one of the object.
    pub fn copy(&self, id: Id, put: &(dyn Fn(&[u8], u64) -> io::Result<()> + Sync)) -> Result<(), ReadError> {
        let chain = self.chain(id)?;
        copy_on(Some(&self.pool), &chain, put)
    }

    /// A program opened the file of an object.
    pub fn was_opened(&self) {
        self.opened.fetch_add(1, Ordering::Relaxed);
    }

    /// Reads of files so far.
    pub fn reads(&self) -> Reads {
        let failed = self.failures.lock().unwrap_or_else(PoisonError::into_inner).len() as u64;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Reads { opened: of(&self.opened), decoded_bytes: of(&self.decoded), failed }
    }

    /// Notes that a program could not read the file of an object, if its bytes are damaged.
    pub fn read_failed(&self, id: Id, error: &ReadError) {
        if error.is_damage() {
            let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
            failures.entry(id).or_insert_with(|| error.to_string());
        }
    }

    /// Why a program could not read the file of an object, if so.
    pub fn failure(&self, id: Id) -> Option<String> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    /// Drops everything kept about an object that is gone.
    pub fn forget(&self, id: Id) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        self.cache.forget(id);
        self.memory.forget(id);
    }

    /// Drops decoded files until so many bytes are free, as far as that helps.
    pub fn make_room(&self, bytes: u64) {
        self.cache.make_room(bytes);
    }

    /// Bytes of decoded files in the cache.
    pub fn cached_bytes(&self) -> u64 {
        self.cache.bytes()
    }
}

/// How often the cache looks how much room programs have left it.
#[cfg(not(feature = "shuttle"))]
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Lets the cache shrink while programs fill the device: their writes do not pass through here. The thread ends with the
/// last user of `recall`.
#[cfg(not(feature = "shuttle"))]
fn leave_room(recall: &Arc<Recall>) -> io::Result<()> {
    let recall = Arc::downgrade(recall);
    let shrink = move || {
        while let Some(recall) = recall.upgrade() {
            if recall.cache.bytes() > 0 {
                recall.cache.make_room(0);
            }
            drop(recall);
            std::thread::sleep(LOOK_EVERY);
        }
    };
    std::thread::Builder::new().name("cache-room".into()).spawn(shrink).map(drop)
}

/// Passes the whole decoded file of a chain to `put`, in pieces with their offsets, on the caller's pool.
///
/// # Errors
/// [`ReadError`]; an error of `put` is reported as one of the object.
pub fn copy(chain: &Chain, put: &(dyn Fn(&[u8], u64) -> io::Result<()> + Sync)) -> Result<(), ReadError> {
    copy_on(None, chain, put)
}

/// The same on a pool's threads, see [`stream::stream_on`].
fn copy_on(
    pool: Option<&Pool>,
    chain: &Chain,
    put: &(dyn Fn(&[u8], u64) -> io::Result<()> + Sync),
) -> Result<(), ReadError> {
    let (layout, order) = (Layout::of(chain.leaf()), order(chain)?);
    stream::stream_on(pool, chain, &layout, |offset, _, bytes| {
        order.runs(offset..offset + bytes.len() as u64, |range, place| {
            let run = &bytes[(range.start - offset) as usize..(range.end - offset) as usize];
            put(run, place).map_err(|error| ReadError::object(chain.leaf().header().id, error))
        })
    })
}
