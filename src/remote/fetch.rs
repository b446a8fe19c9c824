//! Brings objects from a remote into the store, each verified by the hash in its name.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::journal::Encoding;
use super::place::{Error, Place, Result};
use super::reader::lock;
use super::view::View;
use crate::hash::Xxh3Of128;
use crate::store::durable::CrashPoint;
use crate::store::{Elsewhere, Id, Objects};

/// Bytes asked for at once.
const PIECE: u64 = 8 << 20;

/// The objects of a remote, for the store's table of objects.
pub(super) struct Fetcher {
    place: Arc<dyn Place>,
    view: Arc<Mutex<View>>,
    tmp: PathBuf,
    /// Objects on their way: one thread brings each. Held for moments.
    coming: Mutex<HashSet<Id>>,
    arrived: Condvar,
}

impl fmt::Debug for Fetcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fetcher")
    }
}

impl Fetcher {
    pub(super) fn new(place: Arc<dyn Place>, view: Arc<Mutex<View>>, tmp: PathBuf) -> Fetcher {
        Fetcher { place, view, tmp, coming: Mutex::default(), arrived: Condvar::new() }
    }

    /// Waits until no other thread brings the object, then claims it.
    fn claim(&self, id: Id) -> Claim<'_> {
        let mut coming = self.coming.lock().unwrap_or_else(PoisonError::into_inner);
        while !coming.insert(id) {
            coming = self.arrived.wait(coming).unwrap_or_else(PoisonError::into_inner);
        }
        Claim { fetcher: self, id }
    }
}

/// An object that a thread brings.
struct Claim<'a> {
    fetcher: &'a Fetcher,
    id: Id,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.fetcher.coming.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
        self.fetcher.arrived.notify_all();
    }
}

impl Elsewhere for Fetcher {
    fn has(&self, id: Id) -> bool {
        lock(&self.view).owner_of(id).is_some()
    }

    fn bring(&self, objects: &Arc<Objects>, id: Id) -> io::Result<()> {
        let (owner, chain): (String, Vec<Encoding>) = {
            let view = lock(&self.view);
            let owner = view.owner_of(id).ok_or(io::ErrorKind::NotFound)?;
            let chain = view.chain(owner, id).ok_or(io::ErrorKind::NotFound)?;
            (owner.to_string(), chain.into_iter().cloned().collect())
        };
        // Held until the last one names them as its ancestors.
        let mut holds = Vec::new();
        for encoding in &chain {
            let _claim = self.claim(encoding.id);
            let hold = objects.receive(&self.tmp, encoding.id, |file| {
                fetch_whole(self.place.as_ref(), &owner, encoding, &mut |bytes, at| {
                    file.write_all_at(bytes, at, CrashPoint::ObjectWritten)
                })
                .map_err(Error::into_io)
            });
            holds.push(hold?);
        }
        Ok(())
    }
}

/// Passes all bytes of an object to `put`, in order. They are verified only once all are there.
///
/// # Errors
/// [`Error::Wrong`] if they are not what their name says: nothing of them may be used. Those of the remote and of
/// `put`.
pub fn fetch_whole(
    place: &dyn Place,
    owner: &str,
    encoding: &Encoding,
    put: &mut dyn FnMut(&[u8], u64) -> io::Result<()>,
) -> Result<()> {
    let name = encoding.name(owner);
    let mut hash = Xxh3Of128::new();
    let mut at = 0;
    while at < encoding.len {
        let bytes = place.get(&name, at..(at + PIECE).min(encoding.len))?;
        if bytes.is_empty() {
            break;
        }
        hash.update(&bytes);
        put(&bytes, at)?;
        at += bytes.len() as u64;
    }
    match at == encoding.len && hash.digest() == encoding.hash {
        true => Ok(()),
        false => Err(Error::Wrong(format!("{name} is damaged: its bytes are not what its name says"))),
    }
}
