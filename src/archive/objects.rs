//! Objects that a file can do with instead of one of its own, or as base of it; and those that nothing needs any more.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;

use xxhash_rust::xxh3::Xxh3;

use crate::recall::{Chain, Layout, stream};
use crate::store::object::{Header, Id};
use crate::store::{MAX_CHAIN, Profile};

use super::catalog::Sealed;
use super::{Archive, ReadError, settle};

impl Archive {
    /// An object that holds the file already: a copy is stored once. Either it decodes to these very bytes (a copy of
    /// a released file), or it was made from them and is as faithful as the profile of this path asks for. It must
    /// still decode: this file may be the last good copy of what it holds.
    pub(super) fn twin(&self, path: &Path, sealed: &Sealed, source: &File) -> io::Result<Option<Id>> {
        let candidates = self.objects.find(|h| h.logical_len == sealed.len && h.signature == sealed.signature);
        if candidates.is_empty() {
            return Ok(None);
        }
        let hash = settle::hash(source, sealed.len)?;
        let exact = self.store.settings().profile(path) == Profile::Exact;
        let holds = |h: &&Header| h.decoded_hash == hash || (h.source_hash == hash && !exact);
        let mut twins: Vec<&Header> = candidates.iter().filter(holds).collect();
        twins.sort_by_key(|header| (header.decoded_hash != hash, header.id));
        Ok(twins.into_iter().find(|header| self.decodes(header)).map(|header| header.id))
    }

    /// Whether an object decodes to what was archived.
    pub(super) fn decodes(&self, header: &Header) -> bool {
        let mut hash = Xxh3::new();
        let decoded = Chain::open(&self.objects, header.id).and_then(|chain| {
            let layout = Layout::of(chain.leaf());
            self.pool.install(|| {
                stream(&chain, &layout, |_, _, bytes| {
                    hash.update(bytes);
                    Ok::<(), ReadError>(())
                })
            })
        });
        if let Err(error) = &decoded {
            log::error!("{error}; a copy of its file is archived anew");
        }
        decoded.is_ok() && hash.digest128() == header.decoded_hash
    }

    /// The archived state to take the difference to: the last one of the lineage before this, else the nearest after
    /// it, else one with the same tensors. The flag says that the lineage goes on: it has
    /// archived states, whether or not one can be the base.
    pub(super) fn base(&self, sealed: &Sealed) -> (Option<Chain>, bool) {
        if sealed.tensors == 0 {
            return (None, false);
        }
        let mut states = self.objects.find(|header| header.lineage == sealed.lineage);
        let goes_on = !states.is_empty();
        if !goes_on {
            states = self.objects.find(|header| header.signature == sealed.signature);
        }
        let distance = |header: &Header| {
            let after = header.modified_ns > sealed.modified_ns;
            (after, header.modified_ns.abs_diff(sealed.modified_ns), header.id)
        };
        let Some(nearest) = states.into_iter().min_by_key(distance) else {
            return (None, false);
        };
        if nearest.depth + 1 >= MAX_CHAIN {
            return (None, goes_on);
        }
        match Chain::open(&self.objects, nearest.id) {
            Ok(chain) => (Some(chain), goes_on),
            Err(error) => {
                log::error!("{error}; the next state of this lineage is archived without it");
                (None, goes_on)
            }
        }
    }

    /// Removes objects that nothing needs. The newest of a lineage that goes on is needed: the next state will be a
    /// difference to it, even when its own file is gone.
    pub(super) fn collect(&self) {
        if !self.garbage.load(Ordering::Relaxed) {
            return;
        }
        let mut newest: HashMap<u64, Option<(i64, Id)>> = HashMap::new();
        {
            let catalog = self.catalog();
            if catalog.has_unsealed() {
                return;
            }
            self.garbage.store(false, Ordering::Relaxed);
            newest.extend(catalog.lineages().map(|lineage| (lineage, None)));
        }
        for header in self.objects.find(|header| newest.contains_key(&header.lineage)) {
            let tip = newest.entry(header.lineage).or_default();
            *tip = (*tip).max(Some((header.modified_ns, header.id)));
        }
        let keep =
            |header: &Header| newest.get(&header.lineage).is_some_and(|tip| tip.is_some_and(|t| t.1 == header.id));
        match self.objects.collect(keep) {
            Ok(removed) => removed.into_iter().for_each(|id| self.recall.forget(id)),
            Err(error) => log::error!("an object that nothing needs cannot be removed: {error}"),
        }
    }
}
