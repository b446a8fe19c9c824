//! Finds damage in a store, and repairs it where it can. It never makes damage worse:
//!
//! 1. A replacement is written to `tmp/`, made durable, and read back. It must decode to the archived bytes, by
//!    hashes of 64 and 128 bits that lie outside of the damage. *A crash here: `tmp/` is emptied, nothing happened.*
//! 2. The damaged file gets a second name in `damaged/`. *A crash here: the next repair gives it another one.*
//! 3. The replacement is renamed over it. *A crash here leaves either.*
//!
//! A damaged file that cannot be repaired stays in its place, so that a backup can complete it.

mod bit_flip;
mod damaged_object;
mod examine;
mod rebuild;
mod salvage;
mod sources;
mod stubs;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use crate::recall::{Chain, check_hash};
use crate::store::durable::{self, CrashPoint};
use crate::store::object::{Header, Object, path_of};
use crate::store::{Id, Objects, Store, Stub};

pub use examine::{Damaged, Progress};
pub use salvage::{Salvaged, salvage};
pub(super) use stubs::find_lost_stubs;
pub use stubs::lost_stub;

use damaged_object::{DamagedObject, Found, Part, find};
use examine::{Examined, Suspects};
use rebuild::{Lost, Rebuild};
use sources::{Source, Sources};

/// Directory of damaged files that have been replaced.
pub const SET_ASIDE: &str = "damaged";
/// A repaired object may show damage in another one of its chain, which needs another round. A chain has no more
/// objects than this.
const MOST_ROUNDS: usize = crate::store::MAX_CHAIN as usize + 2;

/// Most damaged parts of an object in each of which a wrong byte is searched for, which takes seconds. More damage
/// than this has another cause.
const MOST_MENDED: usize = 8;

/// Looks at seemingly damaged files and objects before the damage is believed. While a store is mounted, files and
/// objects may change between listing and reading. Each look takes new lists, and only real damage stays.
const LOOKS: u32 = 4;

/// The damage that was found, and the repairs.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Regular files in the tree.
    pub files: u64,
    /// Objects.
    pub objects: u64,
    /// Bytes that were decoded.
    pub decoded_bytes: u64,
    /// Files that only a remote has. They were not looked at.
    pub on_remote: u64,
    /// The damage, or the rest of it after a repair.
    pub damaged: Vec<Damaged>,
    /// One line for each repair.
    pub repaired: Vec<String>,
}

/// Reads and decodes everything in a store, and says how a repair would mend each damage. Changes nothing.
pub fn verify(store: &Store, progress: &(dyn Fn(Progress) + Sync)) -> io::Result<Report> {
    let mut round = Round::look(store, None, progress)?;
    let all = (round.found.files, round.found.objects, round.found.decoded_bytes, round.found.on_remote);
    for _ in 1..LOOKS {
        if round.found.damaged.is_empty() {
            break;
        }
        round = Round::look(store, Some(&round.found.suspects), progress)?;
    }
    let plans = round.plans()?;
    let (files, objects, decoded_bytes, on_remote) = all;
    Ok(Report { files, objects, decoded_bytes, on_remote, ..round.report(&plans) })
}

/// Repairs a store as far as possible. The caller holds its lock.
///
/// # Errors
/// The device's errors. Repairs made before the error stay.
pub fn repair(store: &Store, progress: &(dyn Fn(Progress) + Sync)) -> io::Result<Report> {
    let mut repaired = Vec::new();
    for _ in 0..MOST_ROUNDS {
        let mut round = Round::look(store, None, progress)?;
        if round.found.damaged.is_empty() {
            return Ok(Report { repaired, ..round.report(&BTreeMap::new()) });
        }
        let done = round.carry_out()?;
        if done.is_empty() {
            let plans = BTreeMap::new();
            return Ok(Report { repaired, ..round.report(&plans) });
        }
        repaired.extend(done);
    }
    Ok(Report { repaired, ..Round::look(store, None, progress)?.report(&BTreeMap::new()) })
}

/// Gives a file that is about to be replaced a second name in the store's `damaged/`.
fn set_aside(store: &Store, path: &Path) -> io::Result<()> {
    const ASIDE: CrashPoint = CrashPoint::DamagedSetAside;
    let (io, directory) = (store.io(), store.root().join(SET_ASIDE));
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    io.make_dir(&directory, 0o700, ASIDE)?;
    for number in 0.. {
        let to = directory.join(if number == 0 { name.clone() } else { format!("{name}.{number}") });
        let moved = match fs::symlink_metadata(path)?.is_file() {
            true => io.device().link(path, &to, ASIDE),
            // A directory or a link gets no second name: it is moved out of the way.
            false if fs::symlink_metadata(&to).is_ok() => Err(io::ErrorKind::AlreadyExists.into()),
            false => io.device().rename(path, &to, ASIDE),
        };
        match moved {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            result => {
                result?;
                break;
            }
        }
    }
    io.sync_dir(&directory, ASIDE)?;
    io.sync_dir(store.root(), ASIDE)
}

/// The possible repair of a damaged object.
struct Plan {
    fix: Fix,
    /// In words.
    remedy: String,
}

enum Fix {
    /// Header, footer, index or payloads with one wrong bit or byte each are written right; these parts come from
    /// elsewhere.
    Object { object: Box<DamagedObject>, mended: HashMap<Part, Vec<u8>>, sources: Vec<(Part, Arc<Vec<u8>>)> },
    /// Only the header is left, and a file has the bytes.
    Anew(Box<Header>, std::path::PathBuf),
    /// Only the header is left, and another object decodes to the same.
    Twin(Id),
    /// It lies under another object's name.
    Misplaced(std::path::PathBuf),
}

struct Round<'a> {
    store: &'a Store,
    objects: Objects,
    found: Examined,
}

impl<'a> Round<'a> {
    /// Reads and decodes everything, or only the suspects.
    fn look(store: &'a Store, only: Option<&Suspects>, progress: &(dyn Fn(Progress) + Sync)) -> io::Result<Round<'a>> {
        let (objects, unreadable) = examine::unreadable(store)?;
        let mut found = examine::examine(store, &objects, only, progress)?;
        // No file names these. Damage of an object that depends on them is reported already.
        for (id, error) in unreadable {
            if !only.is_none_or(|only| only.objects.contains(&id)) {
                continue;
            }
            let object = Some(id.to_string());
            if !found.damaged.iter().any(|damage| damage.object == object) {
                found.damaged.push(Damaged::new(&[], Some(id), error));
            }
            found.culprits.insert(id);
            found.suspects.objects.insert(id);
        }
        Ok(Round { store, objects, found })
    }

    fn report(self, plans: &BTreeMap<Id, Plan>) -> Report {
        let by_time = stubs::ByTime::of(&self.objects);
        let Examined { files, objects, decoded_bytes, on_remote, mut damaged, stubs, restores, .. } = self.found;
        for damage in &mut damaged {
            let stub = stubs.iter().find(|path| damage.paths == [path.display().to_string()]);
            if let Some(Ok(Some(stub))) = stub.map(|path| by_time.stub(self.store, path)) {
                let words = || format!("only object {} fits its stub, which names that object again", stub.object);
                damage.remedy.get_or_insert_with(words);
            }
            if restores && damage.object.is_none() && damage.paths.is_empty() {
                damage.remedy = Some("a new one is begun; it matters only for later checkpoints".into());
            }
            let id: Option<Id> = damage.object.as_ref().and_then(|id| id.parse().ok());
            if let Some(plan) = damage.of().and_then(|id| plans.get(&id)) {
                damage.remedy = Some(plan.remedy.clone());
            }
            if let Some(plan) = id.and_then(|id| plans.get(&id)) {
                damage.remedy.get_or_insert_with(|| plan.remedy.clone());
            }
        }
        Report { files, objects, decoded_bytes, on_remote, damaged, repaired: Vec::new() }
    }

    /// Finds the possible repairs.
    fn plans(&self) -> io::Result<BTreeMap<Id, Plan>> {
        let mut patients = BTreeMap::new();
        for id in &self.found.culprits {
            patients.insert(*id, find(self.store, *id)?);
        }
        let misplaced = if patients.is_empty() { HashMap::new() } else { misplaced(self.store)? };
        let mut wanted = HashSet::new();
        let mut damaged = BTreeMap::new();
        for (id, found) in &patients {
            if let Found::Object(object) = found {
                let parts = object.damaged()?;
                wanted.extend(rebuild::hashes(&object.index, &parts));
                damaged.insert(*id, parts);
            }
        }
        let sources = Sources::of(self.store, &self.objects, &wanted, &self.found.resident);
        let mut plans = BTreeMap::new();
        for (id, found) in patients {
            let plan = match found {
                Found::Object(object) => self.of_parts(object, &damaged[&id], &sources)?,
                Found::Header(header) => self.of_header(header, &sources),
                Found::Nothing => misplaced.get(&id).map(|path| Plan {
                    remedy: "it lies under another object's name, and gets its own name".into(),
                    fix: Fix::Misplaced(path.clone()),
                }),
            };
            if let Some(plan) = plan {
                plans.insert(id, plan);
            }
        }
        // These objects are whole, but their base is lost. One with heirs stays as it is: a backup of the
        // base saves them all.
        for id in self.found.broken.iter().filter(|id| !self.found.culprits.contains(id)) {
            let header = self.objects.get(*id).filter(|_| self.objects.children(*id) == 0);
            let Some((header, path)) = header.and_then(|(header, _)| {
                let path = sources.whole(&self.found.resident, &header)?;
                Some((header, path))
            }) else {
                continue;
            };
            let remedy = format!("{} has the bytes of the file", path.display());
            plans.insert(*id, Plan { remedy, fix: Fix::Anew(Box::new(header), path) });
        }
        Ok(plans)
    }

    fn of_parts(&self, object: Box<DamagedObject>, damaged: &[Part], sources: &Sources) -> io::Result<Option<Plan>> {
        let (mut mended, mut found, mut words, mut left) = (HashMap::new(), Vec::new(), Vec::new(), 0);
        if object.rewrite {
            words.push("header and index are corrected".to_string());
        }
        let few = damaged.len() <= MOST_MENDED;
        for part in damaged {
            if let Some(payload) = if few { object.mended(*part)? } else { None } {
                mended.insert(*part, payload);
                words.push("a wrong byte is corrected".into());
            } else if let Some((source, bytes)) = sources.find(&object.header, &object.index, *part) {
                found.push((*part, Arc::new(bytes)));
                words.push(match source {
                    Source::Object(id) => format!("lost bytes are in object {id}"),
                    Source::File(path) => format!("lost bytes are in {}", path.display()),
                });
            } else {
                left += 1;
            }
        }
        if words.is_empty() {
            return Ok(None);
        }
        words.dedup();
        if left > 0 {
            words.push(format!("{left} of its parts stay lost"));
        }
        Ok(Some(Plan { remedy: words.join("; "), fix: Fix::Object { object, mended, sources: found } }))
    }

    fn of_header(&self, header: Box<Header>, sources: &Sources) -> Option<Plan> {
        if let Some(path) = sources.whole(&self.found.resident, &header) {
            let remedy = format!("{} has its bytes", path.display());
            return Some(Plan { remedy, fix: Fix::Anew(header, path) });
        }
        let same = |other: &Header| {
            (other.decoded_hash, other.logical_len) == (header.decoded_hash, header.logical_len)
                && other.id != header.id
        };
        let twin = self.objects.all().into_iter().filter(same).find(|other| {
            Chain::open(&self.objects, other.id).and_then(|chain| check_hash(&chain, other.decoded_hash)).is_ok()
        })?;
        let remedy = format!("object {} decodes to the same: its files name that one", twin.id);
        self.found.names.contains_key(&header.id).then_some(Plan { remedy, fix: Fix::Twin(twin.id) })
    }

    /// Makes all possible repairs, and returns a line about each.
    fn carry_out(&mut self) -> io::Result<Vec<String>> {
        let mut done = Vec::new();
        let by_time = stubs::ByTime::of(&self.objects);
        for path in std::mem::take(&mut self.found.stubs) {
            if let Some(stub) = by_time.stub(self.store, &path)? {
                stubs::replace(self.store, &path, &stub)?;
                done.push(format!("{}: its stub names object {} again", path.display(), stub.object));
            }
        }
        if self.found.restores {
            let path = self.store.root().join("restores");
            set_aside(self.store, &path)?;
            self.store.io().remove(&path, CrashPoint::RepairInPlace)?;
            done.push("restores: a new one is begun".into());
        }
        let mut plans: Vec<(Id, Plan)> = self.plans()?.into_iter().collect();
        // Bases come before the objects that depend on them.
        plans.sort_by_key(|(id, plan)| (plan.depth(), *id));
        for (id, plan) in plans {
            match self.fix(id, &plan.fix) {
                Ok(true) => done.push(format!("object {id}: {}", plan.remedy)),
                Ok(false) => {}
                Err(error) if is_hopeless(&error) => log::warn!("object {id}: cannot be saved: {error}"),
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn fix(&self, id: Id, fix: &Fix) -> io::Result<bool> {
        let (io, objects) = (self.store.io(), self.store.objects());
        match fix {
            Fix::Object { object, mended, sources } => {
                let mut changed = false;
                if object.rewrite || !mended.is_empty() {
                    object.write_again(self.store, mended)?;
                    changed = true;
                }
                if sources.is_empty() {
                    return Ok(changed);
                }
                // Read anew: its base may have been repaired a moment ago.
                let (known, _) = examine::unreadable(self.store)?;
                let object = Object::open_on(io, &objects, id)?;
                let chain = Chain::open(&known, id).ok();
                let lost: Lost = sources.iter().cloned().collect();
                let rebuild = Rebuild { store: self.store, objects: &known, object: &object, chain, lost: &lost };
                match rebuild.carry_out() {
                    Err(error) if changed && is_hopeless(&error) => {
                        log::warn!("object {id}: {error}");
                        Ok(true)
                    }
                    result => result.map(|()| true),
                }
            }
            Fix::Anew(header, path) => rebuild::anew(self.store, &self.objects, header, path).map(|()| true),
            Fix::Twin(twin) => {
                for path in self.found.names.get(&id).into_iter().flatten() {
                    let logical_len = fs::symlink_metadata(self.store.tree().join(path))?.len();
                    let stub = Stub { store: self.store.id(), object: *twin, logical_len };
                    stubs::replace(self.store, path, &stub)?;
                }
                Ok(true)
            }
            Fix::Misplaced(path) => {
                let to = path_of(&objects, id);
                // Another one may have got its own name back from there since it was looked at.
                if damaged_object::id_of(io, path) != Some(id) {
                    return Ok(false);
                }
                set_aside(self.store, &to)?;
                if fs::symlink_metadata(&to).is_ok() {
                    // Another object still lies here under this wrong name. `set_aside` gave it a second name in
                    // `damaged/`, from where the repair takes it.
                    io.remove(&to, CrashPoint::RepairInPlace)?;
                }
                io.make_dirs(durable::parent(&to), 0o777, CrashPoint::ShardMade)?;
                io.sync_dir(&objects, CrashPoint::ShardMade)?;
                io.device().link(path, &to, CrashPoint::RepairInPlace)?;
                io.sync_dir(durable::parent(&to), CrashPoint::RepairInPlace)?;
                Ok(true)
            }
        }
    }
}

impl Plan {
    fn depth(&self) -> u32 {
        match &self.fix {
            Fix::Object { object, .. } => object.header.depth,
            Fix::Anew(header, _) => header.depth,
            Fix::Twin(_) => u32::MAX,
            Fix::Misplaced(_) => 0,
        }
    }
}

/// Damage stands in the way, and not the device.
fn is_hopeless(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof | io::ErrorKind::NotFound)
}

/// Whole objects under other names than their own, below `objects/` and in `damaged/`.
fn misplaced(store: &Store) -> io::Result<HashMap<Id, std::path::PathBuf>> {
    let (mut found, objects) = (HashMap::new(), store.objects());
    let mut directories = vec![store.root().join(SET_ASIDE)];
    match fs::read_dir(&objects) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        shards => shards?.try_for_each(|shard| shard.map(|shard| directories.push(shard.path())))?,
    }
    for directory in directories {
        let Ok(entries) = fs::read_dir(&directory) else { continue };
        for entry in entries {
            let path = entry?.path();
            let Some(id) = damaged_object::id_of(store.io(), &path) else { continue };
            if path != path_of(&objects, id) {
                found.entry(id).or_insert(path);
            }
        }
    }
    Ok(found)
}
