//! Reads and decodes everything in a store, and says exactly where damage is.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::recall::{Chain, ReadError, check_hash};
use crate::store::durable::Io;
use crate::store::object::{Object, path_of};
use crate::store::{Id, MIN_RELEASE_BYTES, Objects, Restores, Store, Stub, files_below, is_of_remote, names_bytes};

use super::damaged_object::{Found, find, open_plain};
use super::stubs;

/// Something that cannot be read.
#[derive(Clone, Debug, Serialize)]
pub struct Damaged {
    /// Files that cannot be read for it; empty when only other objects need it.
    pub paths: Vec<String>,
    /// All of them in hexadecimal, if one is not UTF-8.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub paths_bytes: Vec<String>,
    /// The object that is damaged or missing.
    pub object: Option<String>,
    /// The tensor in it, if it is one.
    pub tensor: Option<String>,
    /// The damage, in words.
    pub error: String,
    /// How `stepfs verify --repair` mends it. `None` if it cannot.
    pub remedy: Option<String>,
    /// The object that its files name, if another one is damaged.
    #[serde(skip)]
    of: Option<Id>,
}

impl Damaged {
    /// Of an object, or nothing in particular.
    pub(super) fn new(paths: &[PathBuf], object: Option<Id>, error: String) -> Damaged {
        Damaged {
            paths: paths.iter().map(|path| path.display().to_string()).collect(),
            paths_bytes: names_bytes(paths.iter().map(PathBuf::as_path)),
            object: object.map(|id| id.to_string()),
            tensor: None,
            error,
            remedy: None,
            of: object,
        }
    }

    /// The object that its files name.
    pub(super) fn of(&self) -> Option<Id> {
        self.of
    }
}

/// How far it has come.
#[derive(Clone, Copy, Debug)]
pub enum Progress {
    /// So many bytes are to be decoded.
    Total(u64),
    /// Now this object.
    Object(Id),
    /// So many bytes were.
    Decoded(u64),
}

/// Objects and paths that seemed damaged, to be looked at again.
#[derive(Default)]
pub(super) struct Suspects {
    pub(super) objects: HashSet<Id>,
    pub(super) paths: HashSet<PathBuf>,
}

/// The contents of a store, and its damage.
#[derive(Default)]
pub(super) struct Examined {
    pub(super) files: u64,
    pub(super) objects: u64,
    pub(super) decoded_bytes: u64,
    /// Files that only a remote has.
    pub(super) on_remote: u64,
    pub(super) damaged: Vec<Damaged>,
    /// Objects that are damaged or missing themselves, not only their bases.
    pub(super) culprits: BTreeSet<Id>,
    /// Objects that cannot be decoded, because they or their bases are damaged.
    pub(super) broken: Vec<Id>,
    /// Damaged stubs.
    pub(super) stubs: Vec<PathBuf>,
    /// Files that name an object.
    pub(super) names: BTreeMap<Id, Vec<PathBuf>>,
    /// Files that are not released.
    pub(super) resident: Vec<PathBuf>,
    /// The record of restores is damaged.
    pub(super) restores: bool,
    /// Objects and paths to look at again.
    pub(super) suspects: Suspects,
}

impl Examined {
    /// A file is damaged.
    fn suspect(&mut self, path: &Path, damage: Damaged) {
        self.damaged.push(damage);
        self.suspects.paths.insert(path.to_path_buf());
    }
}

/// Examines the suspects, or the whole store. While the store is mounted, a suspect may only have changed between
/// listing and reading. The next look clears it.
pub(super) fn examine(
    store: &Store,
    objects: &Objects,
    only: Option<&Suspects>,
    progress: &(dyn Fn(Progress) + Sync),
) -> io::Result<Examined> {
    let mut found = Examined::default();
    let of_path = |path: &PathBuf| only.is_none_or(|only| only.paths.contains(path));
    // A suspected file may name another object by now.
    let suspected = |id: &Id, names: &BTreeMap<Id, Vec<PathBuf>>| {
        only.is_none_or(|only| only.objects.contains(id))
            || names.get(id).is_some_and(|paths| paths.iter().any(of_path))
    };
    let by_time = stubs::ByTime::of(objects);
    let mut all = files_below(&store.tree(), Path::new(""))?;
    all.sort();
    for path in all {
        found.files += 1;
        let gone = || is_gone(&store.tree().join(&path));
        match stub(store, &path) {
            Ok(Some(stub)) => {
                let other = |length: u64| length != stub.logical_len;
                if of_path(&path) && objects.get(stub.object).is_some_and(|(header, _)| other(header.logical_len)) {
                    let damage = of_file(&path, "it is not as long as its stub says".into());
                    found.suspect(&path, Damaged { object: Some(stub.object.to_string()), ..damage });
                }
                found.names.entry(stub.object).or_default().push(path);
            }
            Ok(None) if of_path(&path) && is_of_here(store, &path) => {
                let error = "its object is here, but its stub has another id than `store` in stepfs.toml".to_string();
                let remedy = Some("stepfs.toml gets the id that the stubs have".to_string());
                found.suspect(&path, Damaged { remedy, ..of_file(&path, error) });
                found.stubs.push(path);
            }
            Ok(None) => {
                match Some(&path).filter(|path| of_path(path)).and_then(|path| by_time.lost_stub(store, path)) {
                    Some(id) => {
                        let error = format!(
                            "its stub was overwritten: it reads as zeros, and object {id} has its length and time"
                        );
                        found.suspect(&path, of_file(&path, error));
                        found.stubs.push(path);
                    }
                    None => found.resident.push(path),
                }
            }
            // Removed since it was listed.
            Err(_) if gone() || !of_path(&path) => {}
            Err(error) => {
                if error.kind() == io::ErrorKind::InvalidData {
                    found.stubs.push(path.clone());
                }
                found.suspect(&path, of_file(&path, error.to_string()));
            }
        }
    }
    let mut headers = objects.all();
    headers.sort_by_key(|header| (header.modified_ns, header.id));
    let known: HashSet<Id> = headers.iter().map(|header| header.id).collect();
    headers.retain(|header| suspected(&header.id, &found.names));
    progress(Progress::Total(headers.iter().map(|header| header.logical_len).sum()));
    for header in headers {
        progress(Progress::Object(header.id));
        found.objects += 1;
        let decoded = Chain::open(objects, header.id).and_then(|chain| check_hash(&chain, header.decoded_hash));
        if let Err(error) = decoded.map_err(io::Error::from) {
            // An object may have been collected since it was listed; a file that names it may not.
            let paths = found.names.get(&header.id).cloned().unwrap_or_default();
            if error.kind() != io::ErrorKind::NotFound || !paths.is_empty() {
                found.damaged.push(of_object(paths, header.id, &error));
                found.broken.push(header.id);
                found.suspects.objects.insert(header.id);
                found
                    .culprits
                    .extend(error.get_ref().and_then(|inner| inner.downcast_ref()).map(|e: &ReadError| e.object));
            }
        }
        progress(Progress::Decoded(header.logical_len));
        found.decoded_bytes += header.logical_len;
    }
    // Objects that files name, but that are missing or have unreadable headers.
    let named: Vec<(Id, Vec<PathBuf>)> = found.names.iter().map(|(id, paths)| (*id, paths.clone())).collect();
    for (id, paths) in named.into_iter().filter(|(id, _)| !known.contains(id) && suspected(id, &found.names)) {
        let error = match Object::open_on(store.io(), &store.objects(), id) {
            // It comes from the remote when it is read.
            Err(error) if error.kind() == io::ErrorKind::NotFound && all_of_remote(store, &paths) => {
                found.on_remote += paths.len() as u64;
                continue;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => "the object is missing".to_string(),
            Err(error) => error.to_string(),
            Ok(_) => continue,
        };
        found.damaged.push(Damaged::new(&paths, Some(id), error));
        found.culprits.insert(id);
        found.suspects.objects.insert(id);
    }
    for id in found.broken.clone() {
        // Besides its base, the object itself may be damaged.
        if let Ok(Found::Object(object)) = find(store, id)
            && !object.damaged()?.is_empty()
        {
            found.culprits.insert(id);
        }
    }
    for path in found.resident.clone().iter().filter(|path| of_path(path)) {
        let gone = || is_gone(&store.tree().join(path));
        if let Err(error) = read_through(store.io(), &store.tree().join(path))
            && !gone()
        {
            found.suspect(path, of_file(path, error.to_string()));
        }
    }
    if let Err(error) = Restores::load(store) {
        found.restores = error.kind() == io::ErrorKind::InvalidData;
        let error = format!("restores: {error}");
        found.damaged.push(Damaged::new(&[], None, error));
    }
    Ok(found)
}

fn all_of_remote(store: &Store, paths: &[PathBuf]) -> bool {
    paths.iter().all(|path| is_of_remote(&store.tree(), path).unwrap_or(false))
}

fn of_file(path: &Path, error: String) -> Damaged {
    Damaged::new(&[path.to_path_buf()], None, error)
}

fn of_object(paths: Vec<PathBuf>, id: Id, error: &io::Error) -> Damaged {
    let (object, tensor, error) = match error.get_ref().and_then(|inner| inner.downcast_ref::<ReadError>()) {
        Some(error) => (error.object, error.tensor.clone(), error.source.to_string()),
        None => (id, None, error.to_string()),
    };
    Damaged { object: Some(object.to_string()), tensor, ..Damaged::new(&paths, Some(id), error) }
}

/// Loads all objects, and lists those that cannot be read: no object at all, or one with another id than its name.
pub(super) fn unreadable(store: &Store) -> io::Result<(Objects, BTreeMap<Id, String>)> {
    let mut unreadable = BTreeMap::new();
    let known = Objects::load_on(store.io().clone(), &store.objects(), |id, error| {
        unreadable.insert(id, error.to_string());
    })?;
    Ok((known, unreadable))
}

fn stub(store: &Store, path: &Path) -> io::Result<Option<Stub>> {
    let file = open_plain(store.io(), &store.tree().join(path))?;
    if file.metadata()?.len() < MIN_RELEASE_BYTES {
        return Ok(None);
    }
    Stub::read_on(&file, store.id())
}

/// Whether a file is a stub by another id than this store's, and its object is here.
fn is_of_here(store: &Store, path: &Path) -> bool {
    let stub = open_plain(store.io(), &store.tree().join(path)).and_then(|file| Stub::foreign(&file, store.id()));
    stub.ok().flatten().is_some_and(|stub| path_of(&store.objects(), stub.object).exists())
}

fn read_through(io: &Io, path: &Path) -> io::Result<()> {
    let file = open_plain(io, path)?;
    let mut buf = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        match file.read_full(&mut buf, at)? {
            0 => return Ok(()),
            count => at += count as u64,
        }
    }
}

/// True if nothing has this name. A name whose file the device cannot read is there.
fn is_gone(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}
