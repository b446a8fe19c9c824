//! Recall: which objects and tiles a read needs; tiles to bytes; the cache of decoded files.
//!
//! A read costs the tiles it touches and their chain, not the file. Each unit is decoded once however many ask for it,
//! into a file of the cache that later opens are served from by passthrough. Every checksum is verified: bytes that
//! are not what was archived are an error, never an answer.

mod cache;
mod chain;
mod error;
pub mod layout;
mod reader;
mod stream;
pub mod tile;

use std::collections::HashMap;
use std::fs::File;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::store::{Id, Objects, durable};

pub use cache::Cache;
pub use chain::Chain;
pub use error::ReadError;
pub use layout::Layout;
pub use reader::Reader;
pub use stream::stream;

/// What all readers of a store share.
#[derive(Debug)]
pub struct Recall {
    objects: Arc<Objects>,
    cache: Cache,
    /// Decodes ahead of readers, and whole files.
    pool: rayon::ThreadPool,
    /// One reader per object, however many handles. Taken to look one up; chains are opened outside it.
    readers: Mutex<HashMap<Id, Weak<Reader>>>,
}

impl Recall {
    /// Readers for `objects`, decoding into `cache` on `threads` threads.
    ///
    /// # Errors
    /// When threads cannot be started.
    pub fn new(objects: Arc<Objects>, cache: Cache, threads: usize) -> std::io::Result<Arc<Recall>> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|n| format!("recall-{n}"))
            // Read-ahead must never end the daemon; whoever wants the unit decodes it again and gets the answer.
            .panic_handler(|_| log::error!("a task that read ahead panicked"))
            .build()
            .map_err(std::io::Error::other)?;
        Ok(Arc::new(Recall { objects, cache, pool, readers: Mutex::new(HashMap::new()) }))
    }

    /// Opens the file that an object holds. Blocks on the device.
    ///
    /// # Errors
    /// [`ReadError`] names the object that is missing or damaged.
    pub fn reader(self: &Arc<Self>, id: Id) -> Result<Arc<Reader>, ReadError> {
        let known = |readers: &HashMap<Id, Weak<Reader>>| readers.get(&id).and_then(Weak::upgrade);
        if let Some(reader) = known(&self.readers.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(reader);
        }
        let chain = Chain::open(&self.objects, id)?;
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reader) = known(&readers) {
            return Ok(reader);
        }
        let reader = Reader::new(Arc::clone(self), chain);
        readers.retain(|_, reader| reader.strong_count() > 0);
        readers.insert(id, Arc::downgrade(&reader));
        drop(readers);
        reader.start_skeleton();
        Ok(reader)
    }

    /// Writes the whole decoded file of an object into `to`. Not durable before the file is synced.
    ///
    /// # Errors
    /// [`ReadError`]; one of the device's about `to` is reported as one of the object.
    pub fn copy(&self, id: Id, to: &File) -> Result<(), ReadError> {
        let chain = Chain::open(&self.objects, id)?;
        let layout = Layout::of(chain.leaf());
        self.pool.install(|| {
            stream(&chain, &layout, |offset, _, bytes| {
                durable::write_all_at(to, bytes, offset).map_err(|error| ReadError::object(id, error))
            })
        })
    }

    /// Lets go of what is kept about an object that is gone.
    pub fn forget(&self, id: Id) {
        self.cache.forget(id);
    }

    /// Bytes of decoded files in the cache.
    pub fn cached_bytes(&self) -> u64 {
        self.cache.bytes()
    }
}
