//! Finds damage in a store, and repairs it where it can. It never makes damage worse:
//!
//! 1. A replacement is written to `tmp/`, made durable, and read back. It must decode to the archived bytes, by
//!    hashes of 64 and 128 bits that lie outside of the damage. *A crash here: `tmp/` is emptied, nothing happened.*
//! 2. The damaged file gets a second name in `damaged/`. *A crash here: the next repair gives it another one.*
//! 3. The replacement is renamed over it. *A crash here leaves either.*
//!
//! A damaged file that cannot be repaired stays in its place, so that a backup can complete it.
//!
//! - `examine`: reads and decodes everything.
//! - `remains`: the readable parts of a damaged object.
//! - `sources`: who else has an object, or the bytes that it lost.
//! - `rebuild`: writes an object from such a source.
//! - `stubs`: damaged stubs.
//! - `salvage`: saves the readable tensors of a file that cannot be repaired.

mod examine;
mod rebuild;
mod remains;
mod salvage;
mod sources;
mod stubs;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::iter::once_with;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use crate::recall::{Chain, check_hash};
use crate::store::durable::CrashPoint;
use crate::store::object::{Header, Object, path_of};
use crate::store::{Damage, Id, Objects, Store};
use formats::{InOrder, describe_at};

pub use examine::{Damaged, Progress};
pub use salvage::{Salvaged, salvage};
pub(super) use stubs::find_lost_stubs;
pub use stubs::lost_stub;

use examine::{Found, examine};
use rebuild::Rebuild;
use remains::{Remains, open_plain};
use sources::Sources;

/// Directory of damaged files that have been replaced.
const SET_ASIDE: &str = "damaged";
/// A repaired object may show damage in another one of its chain, which needs another round. A chain has no more
/// objects than this.
const MOST_ROUNDS: u32 = crate::store::MAX_CHAIN + 2;

/// The damage that was found, and the repairs.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Regular files in the tree.
    pub files: u64,
    /// Objects.
    pub objects: u64,
    /// Bytes that were decoded.
    pub decoded_bytes: u64,
    /// The damage, or the rest of it after a repair.
    pub damaged: Vec<Damaged>,
    /// One line for each repair.
    pub repaired: Vec<String>,
}

/// Reads and decodes everything in a store, and says how a repair would mend each damage. Changes nothing.
///
/// # Errors
/// The device's errors.
pub fn verify(store: &Store, progress: &(dyn Fn(Progress) + Sync)) -> io::Result<Report> {
    let (mut report, objects, found) = examine(store, progress)?;
    Repair::of(store, &objects, &found)?.name_remedies(&mut report.damaged);
    Ok(report)
}

/// Repairs a store as far as possible. The caller holds its lock.
///
/// # Errors
/// The device's errors. Repairs made before the error stay.
pub fn repair(store: &Store, progress: &(dyn Fn(Progress) + Sync)) -> io::Result<Report> {
    let mut repaired = Vec::new();
    let mut rounds = 0..MOST_ROUNDS;
    loop {
        let (mut report, objects, found) = examine(store, progress)?;
        let repair = Repair::of(store, &objects, &found)?;
        let done = rounds.next().map_or(Ok(Vec::new()), |_| repair.carry_out())?;
        if done.is_empty() {
            // What they say was tried.
            report.damaged.iter_mut().for_each(|damage| damage.remedy = None);
            return Ok(Report { repaired, ..report });
        }
        repaired.extend(done);
    }
}

/// The repair of what was found damaged in one look at a store.
struct Repair<'a> {
    store: &'a Store,
    objects: &'a Objects,
    found: &'a Found,
    /// The readable parts of the objects that cannot be decoded.
    remains: BTreeMap<Id, Remains>,
    sources: Sources<'a>,
}

/// Something that can take a damaged object's place.
struct Candidate<'a> {
    /// For the report.
    words: String,
    /// Replaces the object, if the candidate verifies. Otherwise nothing changes.
    replace: Box<dyn FnOnce() -> io::Result<()> + 'a>,
}

impl<'a> Candidate<'a> {
    fn new(words: String, replace: impl FnOnce() -> io::Result<()> + 'a) -> Option<Candidate<'a>> {
        Some(Candidate { words, replace: Box::new(replace) })
    }
}

impl<'a> Repair<'a> {
    fn of(store: &'a Store, objects: &'a Objects, found: &'a Found) -> io::Result<Repair<'a>> {
        let mut sources = Sources::of(store, objects, &found.resident);
        found.unreadable.iter().for_each(|id| sources.add_stray(path_of(&store.objects(), *id)));
        if let Ok(aside) = fs::read_dir(store.root().join(SET_ASIDE)) {
            aside.into_iter().try_for_each(|entry| entry.map(|entry| sources.add_stray(entry.path())))?;
        }
        let mut remains = BTreeMap::new();
        for id in &found.broken {
            remains.insert(*id, Remains::at(store.io(), &path_of(&store.objects(), *id))?.of_object(*id));
        }
        sources.add_parts(&remains.values().flat_map(Remains::lost_hashes).collect());
        Ok(Repair { store, objects, found, remains, sources })
    }

    /// Says of each damaged object how it would be repaired.
    fn name_remedies(&self, damaged: &mut [Damaged]) {
        let words = |id: &Id| Some((*id, self.candidates(*id).next()?.words));
        let remedies: BTreeMap<Id, String> = self.remains.keys().filter_map(words).collect();
        for damage in damaged {
            let culprit = damage.object.as_ref().and_then(|id| id.parse().ok());
            let remedy = [damage.of, culprit].into_iter().flatten().find_map(|id| remedies.get(&id));
            damage.remedy = damage.remedy.take().or(remedy.cloned());
        }
    }

    /// Makes all possible repairs, and returns a line about each.
    fn carry_out(&self) -> io::Result<Vec<String>> {
        let mut done = Vec::new();
        for (path, stub) in &self.found.stubs {
            stubs::replace(self.store, path, stub)?;
            done.push(format!("{}: its stub names object {} again", path.display(), stub.object));
        }
        if self.found.restores {
            let path = self.store.root().join("restores");
            set_aside(self.store, &path)?;
            self.store.io().remove(&path, CrashPoint::RepairInPlace)?;
            done.push("restores: a new one is begun".into());
        }
        // Bases come before the objects that depend on them.
        let mut objects: Vec<(&Id, &Remains)> = self.remains.iter().collect();
        objects.sort_by_key(|(_, remains)| remains.header().map(|header| header.depth));
        for (id, remains) in objects {
            // Its base may have been all that it lacked.
            let lacks_nothing = || remains.is_whole(*id) && self.decodes(*id);
            if !lacks_nothing()
                && let Some(words) = self.replace(*id)?
            {
                done.push(format!("object {id}: {words}"));
            }
        }
        Ok(done)
    }

    /// Puts the first candidate that verifies in a damaged object's place. Returns where it was found.
    fn replace(&self, id: Id) -> io::Result<Option<String>> {
        for Candidate { words, replace } in self.candidates(id) {
            match replace() {
                Ok(()) => return Ok(Some(words)),
                Err(error) if is_damage(&error) => log::warn!("object {id}: not repaired, though {words}: {error}"),
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// What can take the place of an object, the best first: its own bytes, then its own encoding, then its content.
    fn candidates(&self, id: Id) -> impl Iterator<Item = Candidate<'_>> {
        let own = once_with(move || self.astray(id)).chain(once_with(move || self.on_mirror(id)));
        let content = once_with(move || self.twin(id)).chain(once_with(move || self.file(id)));
        own.chain(once_with(move || self.rest(id))).chain(content).flatten()
    }

    /// The object under another one's name.
    fn astray(&self, id: Id) -> Option<Candidate<'_>> {
        let (path, object) = self.sources.astray(id)?;
        Candidate::new(format!("it lies at {} and gets its own name", path.display()), move || {
            self.replace_by(id, &object)
        })
    }

    /// The object on the store's mirror.
    fn on_mirror(&self, id: Id) -> Option<Candidate<'_>> {
        let encoding = self.sources.on_mirror(id)?;
        Candidate::new("the mirror has it".into(), move || {
            let object = self.sources.bring(encoding)?;
            self.replace_by(id, &object)
        })
    }

    /// The readable parts of the object, completed by others.
    fn rest(&self, id: Id) -> Option<Candidate<'_>> {
        let remains = &self.remains[&id];
        let object = remains.object().filter(|_| !remains.is_whole(id))?;
        let mut words = Vec::new();
        if remains.is_longer() {
            words.push("what was appended is taken off".to_string());
        }
        for part in remains.lost() {
            let (source, _) = self.sources.find(object, *part)?;
            words.push(format!("lost bytes are in {source}"));
        }
        words.dedup();
        Candidate::new(words.join("; "), move || {
            let lost = |part| match remains.lost().contains(&part) {
                true => Ok(Some(self.sources.find(object, part).ok_or(io::ErrorKind::NotFound)?.1)),
                false => Ok(None),
            };
            let header = object.header().clone();
            let rebuild = Rebuild { header, index: object.index(), rest: Some(&self.chain_of(object)), lost: &lost };
            rebuild.carry_out(self.store, self.objects)
        })
    }

    /// Another object that decodes to the same.
    fn twin(&self, id: Id) -> Option<Candidate<'_>> {
        let header = self.replaceable(id)?;
        let same = |other: &Header| {
            let decoded = |header: &Header| (header.decoded_hash, header.logical_len);
            decoded(other) == decoded(header) && other.id != id && self.decodes(other.id)
        };
        let twin = self.objects.all().into_iter().find(same)?;
        Candidate::new(format!("object {} decodes to the same", twin.id), move || {
            let twin = self.objects.open(twin.id)?;
            let Header { parent, depth, position, ordered, .. } = *twin.header();
            self.copy(&twin, Header { parent, depth, position, ordered, ..header.clone() })
        })
    }

    /// A file of the tree with the same bytes. The object becomes lossless and depends on no other.
    fn file(&self, id: Id) -> Option<Candidate<'_>> {
        let header = self.replaceable(id)?;
        let path = self.sources.file_with(header)?;
        Candidate::new(format!("{} has its bytes", path.display()), move || {
            let path = self.store.tree().join(path);
            let file = open_plain(self.store.io(), &path)?;
            let description = describe_at(&path, &file, |index| open_plain(self.store.io(), index))?;
            let source = InOrder::new(&file, &description);
            let header = Header { parent: None, depth: 0, position: 0, ..header.clone() };
            let index = rebuild::index_of(&description, header.logical_len);
            let lost = |part| sources::in_source(&source, header.logical_len, &index, part).map(Some);
            let rebuild = Rebuild { header: header.clone(), index: &index, rest: None, lost: &lost };
            rebuild.carry_out(self.store, self.objects)
        })
    }

    /// The header of an object that others need not be differences to any more. One that is whole, but whose base is
    /// lost, stays as it is if it has heirs: a backup of the base saves them all.
    fn replaceable(&self, id: Id) -> Option<&Header> {
        let remains = &self.remains[&id];
        remains.header().filter(|_| !remains.is_whole(id) || self.objects.children(id) == 0)
    }

    /// Puts an object of the same id in the place of a damaged one, if the header there says no other content.
    fn replace_by(&self, id: Id, object: &Arc<Object>) -> io::Result<()> {
        let decoded = |header: &Header| (header.decoded_hash, header.logical_len);
        if self.remains[&id].header().is_some_and(|own| decoded(own) != decoded(object.header())) {
            return Err(Damage("it has another content under the same id").into());
        }
        self.copy(object, object.header().clone())
    }

    /// Writes the payloads of an object under the header of one that decodes to the same.
    fn copy(&self, object: &Arc<Object>, header: Header) -> io::Result<()> {
        let (rest, lost) = (self.chain_of(object), |_| Ok(None));
        let rebuild = Rebuild { header, index: object.index(), rest: Some(&rest), lost: &lost };
        rebuild.carry_out(self.store, self.objects)
    }

    /// An object, and its ancestors if all of them are there.
    fn chain_of(&self, object: &Arc<Object>) -> Chain {
        let above = object.header().parent.and_then(|parent| Chain::open(self.objects, parent).ok());
        let above = above.iter().flat_map(|above| above.objects().iter().cloned());
        Chain::of_opened([Arc::clone(object)].into_iter().chain(above).collect())
    }

    fn decodes(&self, id: Id) -> bool {
        let chain = Chain::open(self.objects, id);
        chain.and_then(|chain| check_hash(&chain, chain.leaf().header().decoded_hash)).is_ok()
    }
}

/// Gives a file that is about to be replaced a second name in the store's `damaged/`.
fn set_aside(store: &Store, path: &Path) -> io::Result<()> {
    const ASIDE: CrashPoint = CrashPoint::DamagedSetAside;
    let (io, directory) = (store.io(), store.root().join(SET_ASIDE));
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let is_file = match fs::symlink_metadata(path) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => return Ok(()),
        found => found?.is_file(),
    };
    io.make_dir(&directory, 0o700, ASIDE)?;
    let names = (0..).map(|number| if number == 0 { name.clone() } else { format!("{name}.{number}") });
    let mut free = names.map(|name| directory.join(name)).filter(|to| fs::symlink_metadata(to).is_err());
    if let Some(to) = free.next() {
        match is_file {
            true => io.device().link(path, &to, ASIDE)?,
            // A directory or a link gets no second name: it is moved out of the way.
            false => io.device().rename(path, &to, ASIDE)?,
        }
    }
    io.sync_dir(&directory, ASIDE)?;
    io.sync_dir(store.root(), ASIDE)
}

/// True if bytes are missing or wrong. A sector that the device cannot read is as good as one that was overwritten.
fn is_damage(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof | io::ErrorKind::NotFound)
        || matches!(error.raw_os_error(), Some(libc::EIO | libc::ENOTDIR | libc::ELOOP))
}
