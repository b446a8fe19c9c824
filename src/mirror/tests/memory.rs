//! A mirror in memory that counts requests and fails on demand, for crash histories.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::clock::wall_ns;
use crate::mirror::place::{Error, Place, Result};

/// A request as a test sees it: `put`, `get`, `list`, `delete` or `sync`, the name, and the bytes of a put. An error is its answer.
type Fault = Box<dyn FnMut(&str, &str, usize) -> Option<Error> + Send>;

/// The data behind the lock.
#[derive(Default)]
struct Inside {
    /// The bytes of each name, and when it was put.
    names: BTreeMap<String, (Vec<u8>, i64)>,
    /// Those that were deleted, as long as that is not durable.
    deleted: BTreeMap<String, (Vec<u8>, i64)>,
    requests: u64,
    /// Bytes that were got, and that were put.
    got: u64,
    put: u64,
    /// Requests left before all fail.
    left: Option<u64>,
    /// The failing request was carried out nevertheless: only its answer was lost.
    answer_lost: bool,
    fault: Option<Fault>,
}

/// The mirror.
#[derive(Default)]
pub(super) struct Memory(Mutex<Inside>);

impl Memory {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets `count` more requests succeed. Then all fail; with `answer_lost` the first of them is carried out.
    pub(super) fn fail_after(&self, count: Option<u64>, answer_lost: bool) {
        let mut inside = self.lock();
        (inside.left, inside.answer_lost) = (count, answer_lost);
    }

    /// Asks this before each request.
    pub(super) fn fault(&self, fault: impl FnMut(&str, &str, usize) -> Option<Error> + Send + 'static) {
        self.lock().fault = Some(Box::new(fault));
    }

    /// Ends all faults.
    pub(super) fn heal(&self) {
        let mut inside = self.lock();
        (inside.fault, inside.left) = (None, None);
    }

    /// Requests, bytes put and bytes got so far.
    pub(super) fn counts(&self) -> (u64, u64, u64) {
        let inside = self.lock();
        (inside.requests, inside.put, inside.got)
    }

    /// Makes all names below a prefix older.
    pub(super) fn age(&self, prefix: &str, by: Duration) {
        let mut inside = self.lock();
        let older = inside.names.iter_mut().filter(|(name, _)| name.starts_with(prefix));
        older.for_each(|(_, (_, time))| *time -= by.as_nanos() as i64);
    }

    /// Makes all names below a prefix younger, as if the mirror's clock had been ahead.
    pub(super) fn put_ahead(&self, prefix: &str, by: Duration) {
        let mut inside = self.lock();
        let ahead = inside.names.iter_mut().filter(|(name, _)| name.starts_with(prefix));
        ahead.for_each(|(_, (_, time))| *time += by.as_nanos() as i64);
    }

    /// The mirror's machine dies. Names below a prefix come back whose deletion was not durable; other deletions were.
    pub(super) fn crash(&self, prefix: &str) {
        let mut inside = self.lock();
        let deleted = std::mem::take(&mut inside.deleted);
        inside.names.extend(deleted.into_iter().filter(|(name, _)| name.starts_with(prefix)));
    }

    /// All names with their bytes.
    pub(super) fn names(&self) -> BTreeMap<String, Vec<u8>> {
        self.lock().names.iter().map(|(name, (bytes, _))| (name.clone(), bytes.clone())).collect()
    }

    /// Changes a name's bytes without a request.
    pub(super) fn set(&self, name: &str, bytes: Option<Vec<u8>>) {
        match bytes {
            Some(bytes) => drop(self.lock().names.insert(name.to_string(), (bytes, wall_ns()))),
            None => drop(self.lock().names.remove(name)),
        }
    }

    fn request<T>(
        &self,
        (what, name, len): (&str, &str, usize),
        act: impl FnOnce(&mut Inside) -> Result<T>,
    ) -> Result<T> {
        let mut inside = self.lock();
        inside.requests += 1;
        if let Some(error) = inside.fault.as_mut().and_then(|fault| fault(what, name, len)) {
            return Err(error);
        }
        match inside.left {
            Some(0) => {
                if std::mem::take(&mut inside.answer_lost) {
                    let _ = act(&mut inside);
                }
                return Err(Error::Away("the mirror is away".into()));
            }
            Some(left) => inside.left = Some(left - 1),
            None => {}
        }
        act(&mut inside)
    }
}

impl Place for Memory {
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.request(("put", name, bytes.len()), |inside| {
            inside.put += bytes.len() as u64;
            inside.names.insert(name.to_string(), (bytes.to_vec(), wall_ns()));
            Ok(())
        })
    }

    fn read(&self, name: &str, most: u64, each: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let found = self.request(("get", name, 0), |inside| {
            let (bytes, _) = inside.names.get(name).ok_or_else(|| Error::Missing(name.to_string()))?;
            let found = bytes[..bytes.len().min(most as usize)].to_vec();
            inside.got += found.len() as u64;
            Ok(found)
        })?;
        found.chunks(1 << 16).try_for_each(each)
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, i64)>> {
        self.request(("list", prefix, 0), |inside| {
            let below = inside.names.range(prefix.to_string()..).take_while(|(name, _)| name.starts_with(prefix));
            Ok(below.map(|(name, (_, put_ns))| (name.clone(), *put_ns)).collect())
        })
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.request(("delete", name, 0), |inside| {
            let was = inside.names.remove(name);
            inside.deleted.extend(was.map(|was| (name.to_string(), was)));
            Ok(())
        })
    }

    fn sync(&self, prefix: &str) -> Result<()> {
        self.request(("sync", prefix, 0), |inside| {
            inside.deleted.retain(|name, _| !name.starts_with(prefix));
            Ok(())
        })
    }
}
