//! A remote in memory that counts requests and fails on demand, for crash histories.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::place::{Error, Listed, Pacer, Place, Result};
use crate::clock::wall_ns;
use formats::ReadAt;

/// The data behind the lock.
#[derive(Default)]
struct Inside {
    names: BTreeMap<String, Vec<u8>>,
    /// When each was put.
    times: BTreeMap<String, i64>,
    requests: u64,
    /// Bytes that were got.
    got: u64,
    /// Panics at the next request.
    panics: bool,
    /// Requests left before all fail.
    left: Option<u64>,
    /// The failing request was carried out nevertheless: only its answer was lost.
    answer_lost: bool,
}

/// The remote.
#[derive(Default)]
pub(super) struct Memory(Mutex<Inside>);

impl Memory {
    fn lock(&self) -> std::sync::MutexGuard<'_, Inside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets `count` more requests succeed. Then all fail; with `answer_lost` the first of them is carried out.
    pub(super) fn fail_after(&self, count: Option<u64>, answer_lost: bool) {
        let mut inside = self.lock();
        (inside.left, inside.answer_lost) = (count, answer_lost);
    }

    /// Requests so far.
    pub(super) fn requests(&self) -> u64 {
        self.lock().requests
    }

    /// Bytes that were got so far.
    pub(super) fn got(&self) -> u64 {
        self.lock().got
    }

    /// Lets the next request panic.
    pub(super) fn panic_once(&self) {
        self.lock().panics = true;
    }

    /// Makes all names older.
    pub(super) fn age(&self, by: Duration) {
        self.lock().times.values_mut().for_each(|time| *time -= by.as_nanos() as i64);
    }

    /// All names with their bytes.
    pub(super) fn names(&self) -> BTreeMap<String, Vec<u8>> {
        self.lock().names.clone()
    }

    /// Changes a name's bytes without a request.
    pub(super) fn set(&self, name: &str, bytes: Option<Vec<u8>>) {
        match bytes {
            Some(bytes) => self.lock().names.insert(name.to_string(), bytes),
            None => self.lock().names.remove(name),
        };
    }

    fn request<T>(&self, act: impl FnOnce(&mut Inside) -> Result<T>) -> Result<T> {
        let mut inside = self.lock();
        inside.requests += 1;
        assert!(!std::mem::take(&mut inside.panics), "a request panics");
        let away = || Error::Away("the remote is away".into());
        match inside.left {
            Some(0) => {
                if std::mem::take(&mut inside.answer_lost) {
                    let _ = act(&mut inside);
                }
                return Err(away());
            }
            Some(left) => inside.left = Some(left - 1),
            None => {}
        }
        act(&mut inside)
    }
}

impl Place for Memory {
    fn put(&self, name: &str, body: &(dyn ReadAt + Sync), len: u64, pace: &Pacer) -> Result<()> {
        let mut bytes = vec![0; len as usize];
        body.read_exact_at(&mut bytes, 0)?;
        pace(len)?;
        self.request(|inside| {
            inside.times.insert(name.to_string(), wall_ns());
            inside.names.insert(name.to_string(), bytes);
            Ok(())
        })
    }

    fn get(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>> {
        self.request(|inside| {
            let bytes = inside.names.get(name).ok_or_else(|| Error::Missing(name.to_string()))?;
            let end = (range.end as usize).min(bytes.len());
            let found = bytes.get(range.start as usize..end).unwrap_or(&[]).to_vec();
            inside.got += found.len() as u64;
            Ok(found)
        })
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>> {
        self.request(|inside| {
            let below = inside.names.range(prefix.to_string()..).take_while(|(name, _)| name.starts_with(prefix));
            let put_ns = |name| inside.times.get(name).copied().unwrap_or_default();
            let listed =
                below.map(|(name, bytes)| Listed { put_ns: put_ns(name), name: name.clone(), len: bytes.len() as u64 });
            Ok(listed.collect())
        })
    }

    fn folders(&self, prefix: &str) -> Result<Vec<String>> {
        self.request(|inside| {
            let from = inside.names.range(prefix.to_string()..).take_while(|(name, _)| name.starts_with(prefix));
            let below = from.filter_map(|(name, _)| name.strip_prefix(prefix)?.split('/').next());
            let mut found: Vec<String> = below.map(str::to_string).collect();
            found.dedup();
            Ok(found)
        })
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.request(|inside| {
            inside.names.remove(name);
            Ok(())
        })
    }
}
