//! Brings objects from a remote into the store, each verified by the hash in its name.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::far::{Far, SMALL, Share};
use super::journal::Encoding;
use super::place::{Error, Place, Result};
use super::reader::{Reader, lock};
use super::view::View;
use crate::store::durable::CrashPoint;
use crate::store::object::Object;
use crate::store::{Damage, Elsewhere, Id, MAX_CHAIN, Objects, in_parallel};
use codec::hash::Xxh3Of128;

/// Bytes asked for at once.
const PIECE: u64 = 8 << 20;

/// Is told the number of bytes that came; false ends the request.
pub(super) type Watch = Arc<dyn Fn(u64) -> bool + Send + Sync>;

/// The objects of a remote, for the store's table of objects.
pub(super) struct Fetcher {
    place: Arc<dyn Place>,
    view: Arc<Mutex<View>>,
    tmp: PathBuf,
    watch: Watch,
    /// Taken by a read that comes before the names of the remote, during the requests for them. Others wait for these.
    first: Mutex<()>,
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
        let (watch, first) = (Arc::new(|_| true), Mutex::default());
        Fetcher { place, view, tmp, watch, first, coming: Mutex::default(), arrived: Condvar::new() }
    }

    /// The same, and `watch` is told what came.
    pub(super) fn watched(self, watch: Watch) -> Fetcher {
        Fetcher { watch, ..self }
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

impl Fetcher {
    /// The node that has an object, and the object with its ancestors, the oldest first.
    ///
    /// The tree shows the names of the last mount at once. So a program may read a file before the remote's names are
    /// read.
    fn chain(&self, id: Id) -> io::Result<(String, Vec<Encoding>)> {
        if self.may_have(id) {
            let _first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
            if self.may_have(id) {
                Reader::refresh(self.place.as_ref(), &self.view).map_err(Error::into_io)?;
            }
        }
        let view = lock(&self.view);
        let owner = view.owner_of(id).ok_or(io::ErrorKind::NotFound)?;
        let chain = view.chain(owner, id).ok_or(io::ErrorKind::NotFound)?;
        Ok((owner.to_string(), chain.into_iter().cloned().collect()))
    }
}

impl Elsewhere for Fetcher {
    fn has(&self, id: Id) -> bool {
        lock(&self.view).owner_of(id).is_some()
    }

    fn may_have(&self, id: Id) -> bool {
        let view = lock(&self.view);
        !view.is_read() && view.owner_of(id).is_none()
    }

    fn is_lossy(&self, id: Id) -> bool {
        let view = lock(&self.view);
        let of = view.owner_of(id).and_then(|owner| view.nodes().get(owner));
        of.and_then(|node| node.objects.get(&id)).is_some_and(|encoding| encoding.lossy)
    }

    fn open(&self, objects: &Arc<Objects>, id: Id) -> io::Result<Option<Vec<Arc<Object>>>> {
        let (owner, chain) = self.chain(id)?;
        // The store's own objects, and all ancestors of such a one, are read from the store.
        let away: Vec<&Encoding> = chain.iter().rev().take_while(|of| objects.get(of.id).is_none()).collect();
        let total = away.iter().fold(0, |total: u64, encoding| total.saturating_add(encoding.len));
        if total <= SMALL {
            return Ok(None);
        }
        let share = Arc::new(Share::new(objects, id, total));
        let opened = in_parallel(&away, |encoding| {
            let bytes = Far::new(&self.place, &owner, encoding, &share, &self.tmp)?;
            let object = Object::of_bytes(Box::new(bytes), encoding.id)?;
            match object.header().parent == encoding.parent {
                true => Ok(Arc::new(object)),
                false => Err(Damage("it has another parent than the remote's journal says").into()),
            }
        });
        let mut opened = opened.into_iter().collect::<io::Result<Vec<_>>>()?;
        while let Some(parent) = opened.last().and_then(|object| object.header().parent) {
            match objects.open(parent) {
                Ok(object) if opened.len() <= MAX_CHAIN as usize => opened.push(object),
                // Re-parented meanwhile, or damaged: bringing the chain shows which.
                _ => return Ok(None),
            }
        }
        Ok(Some(opened))
    }

    fn bring(&self, objects: &Arc<Objects>, id: Id) -> io::Result<()> {
        let (owner, chain) = self.chain(id)?;
        // Held until the last one names them as its ancestors.
        let mut holds = Vec::new();
        for encoding in &chain {
            let _claim = self.claim(encoding.id);
            let hold = objects.receive(&self.tmp, encoding.id, |file| {
                fetch_whole(self.place.as_ref(), &owner, encoding, &mut |bytes, at| {
                    file.write_all_at(bytes, at, CrashPoint::ObjectWritten)?;
                    // No program waits for the kind of error: only a command stops a request.
                    if (self.watch)(bytes.len() as u64) { Ok(()) } else { Err(io::ErrorKind::ConnectionAborted.into()) }
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
    let mut hash = Xxh3Of128::default();
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
