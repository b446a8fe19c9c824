//! Recall: finds the objects and tiles that a read needs, decodes them, and caches decoded files.
//!
//! A read costs the tiles that it touches and their chain, not the file. However many readers need a unit, it is
//! decoded once, into a file of the cache. Later opens read that file by passthrough. Every checksum is verified: bytes
//! that differ from the archived ones are an error, never an answer.

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
use std::sync::{Arc, PoisonError, Weak};
#[cfg(not(feature = "shuttle"))]
use std::time::Duration;

use crate::store::{Id, Objects};
use crate::sync::{Mutex, Pool};

pub use cache::Cache;
pub use chain::{Chain, Step};
pub use error::ReadError;
pub use layout::Layout;
pub use memory::{Memory, MemoryStatus, usual_memory};
pub use order::order;
pub use reader::Reader;
pub use stream::{check_hash, stream};
pub(crate) use stream::{check_hash_on, decode_unit};

/// The shared data of all readers of a store.
#[derive(Debug)]
pub struct Recall {
    objects: Arc<Objects>,
    cache: Cache,
    memory: Arc<Memory>,
    /// Decodes ahead of readers, and whole files.
    pool: Pool,
    /// One reader per object, for all handles. Held to look one up; chains are opened outside it.
    readers: Mutex<HashMap<Id, Weak<Reader>>>,
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
        let recall = Arc::new(Recall { objects, cache, memory, pool, readers: Mutex::new(HashMap::new()) });
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
        let known = |readers: &HashMap<Id, Weak<Reader>>| readers.get(&id).and_then(Weak::upgrade);
        if let Some(reader) = known(&self.readers.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(reader);
        }
        let chain = self.chain(id)?;
        let order = order(&chain)?;
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reader) = known(&readers) {
            return Ok(reader);
        }
        let reader = Reader::new(Arc::clone(self), chain, order);
        readers.retain(|_, reader| reader.strong_count() > 0);
        readers.insert(id, Arc::downgrade(&reader));
        drop(readers);
        reader.start_skeleton();
        Ok(reader)
    }

    /// Opens the readable part of an object's file; ancestors may be missing.
    pub fn part(self: &Arc<Self>, id: Id) -> Result<Arc<Reader>, ReadError> {
        let chain = Chain::open_part(&self.objects, id)?;
        let order = order(&chain)?;
        Ok(Reader::new(Arc::clone(self), chain, order))
    }

    /// Passes the whole decoded file of an object to `put`, in pieces with their offsets.
    ///
    /// # Errors
    /// [`ReadError`]; an error of `put` is reported as one of the object.
    pub fn copy(&self, id: Id, put: &(dyn Fn(&[u8], u64) -> io::Result<()> + Sync)) -> Result<(), ReadError> {
        let chain = self.chain(id)?;
        copy_on(Some(&self.pool), &chain, put)
    }

    /// Drops everything kept about an object that is gone.
    pub fn forget(&self, id: Id) {
        self.cache.forget(id);
        self.memory.forget(id);
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
