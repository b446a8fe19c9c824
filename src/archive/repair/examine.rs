//! Reads and decodes everything in a store, and says exactly where damage is.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::recall::{Chain, ReadError, check_hash};
use crate::store::durable::Io;
use crate::store::object::Header;
use crate::store::{Id, Objects, Restores, Store, Stub, files_below, names_bytes};

use super::Report;
use super::remains::open_plain;
use super::stubs::{self, Seen};

/// An object seems damaged that comes or goes while it is read. What is damaged in two looks is believed to be so.
const LOOKS: u32 = 2;

/// Something that cannot be read.
#[derive(Clone, Debug, Default, Serialize)]
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
    /// The object that its files name, if that or its base is damaged.
    #[serde(skip)]
    pub(super) of: Option<Id>,
}

impl Damaged {
    fn new(files: &[PathBuf], of: Option<Id>, error: String) -> Damaged {
        Damaged {
            paths: files.iter().map(|path| path.display().to_string()).collect(),
            paths_bytes: names_bytes(files.iter().map(PathBuf::as_path)),
            object: of.map(|id| id.to_string()),
            error,
            of,
            ..Damaged::default()
        }
    }

    fn of_file(path: &Path, error: String) -> Damaged {
        Damaged::new(&[path.to_path_buf()], None, error)
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

/// The contents of a store, as far as repairs need them.
#[derive(Default)]
pub(super) struct Found {
    /// Objects that are missing, damaged, or differences to such.
    pub(super) broken: BTreeSet<Id>,
    /// Objects of which not even the header can be read.
    pub(super) unreadable: Vec<Id>,
    /// Damaged stubs, and what each was.
    pub(super) stubs: Vec<(PathBuf, Stub)>,
    /// Files that are not released.
    pub(super) resident: Vec<PathBuf>,
    /// The record of restores is damaged.
    pub(super) restores: bool,
}

/// Reads and decodes everything, also in a store that is mounted.
///
/// # Errors
/// The device's errors.
pub(super) fn examine(store: &Store, progress: &(dyn Fn(Progress) + Sync)) -> io::Result<(Report, Objects, Found)> {
    let mut found = Found::default();
    let objects = Objects::load_on(store.io().clone(), &store.objects(), |id, _| found.unreadable.push(id))?;
    let mut look = Look { store, objects: &objects, report: Report::default(), names: BTreeMap::new(), found };
    let mut headers = objects.all();
    headers.sort_by_key(|header| (header.modified_ns, header.id));
    look.at_files(&headers)?;
    look.at_objects(&headers, progress);
    look.at_bytes();
    if let Err(error) = Restores::load(store) {
        look.found.restores = error.kind() == io::ErrorKind::InvalidData;
        let remedy = || "a new one is begun; it matters only for later checkpoints".to_string();
        let remedy = look.found.restores.then(remedy);
        look.report.damaged.push(Damaged { remedy, ..Damaged::new(&[], None, format!("restores: {error}")) });
    }
    let Look { report, found, .. } = look;
    Ok((report, objects, found))
}

/// A look at a store that is under way.
struct Look<'a> {
    store: &'a Store,
    objects: &'a Objects,
    report: Report,
    /// Files that name an object.
    names: BTreeMap<Id, Vec<PathBuf>>,
    found: Found,
}

impl Look<'_> {
    fn at_files(&mut self, headers: &[Header]) -> io::Result<()> {
        let mut all = files_below(&self.store.tree(), Path::new(""))?;
        all.sort();
        for path in all {
            self.report.files += 1;
            match stubs::look(self.store, headers, &path) {
                Ok(Seen::Released(stub)) => {
                    let header = self.objects.get(stub.object).map(|(header, _)| header);
                    if header.is_some_and(|header| header.logical_len != stub.logical_len) {
                        let damage = Damaged::of_file(&path, "it is not as long as its stub says".into());
                        let object = Some(stub.object.to_string());
                        self.report.damaged.push(Damaged { object, ..damage });
                    }
                    self.names.entry(stub.object).or_default().push(path);
                }
                Ok(Seen::Resident) => self.found.resident.push(path),
                Ok(Seen::Damaged(error, meant)) => {
                    let remedy = |stub: &Stub| format!("it becomes the stub of object {} again", stub.object);
                    let remedy = meant.as_ref().map(remedy);
                    self.report.damaged.push(Damaged { remedy, ..Damaged::of_file(&path, error) });
                    self.found.stubs.extend(meant.map(|stub| (path, stub)));
                }
                Err(error) => self.unreadable_file(&path, &error),
            }
        }
        Ok(())
    }

    fn at_objects(&mut self, headers: &[Header], progress: &(dyn Fn(Progress) + Sync)) {
        progress(Progress::Total(headers.iter().map(|header| header.logical_len).sum()));
        self.report.objects = headers.len() as u64;
        let known: BTreeSet<Id> = headers.iter().map(|header| header.id).collect();
        let others: BTreeSet<Id> = self.names.keys().chain(&self.found.unreadable).copied().collect();
        for id in headers.iter().map(|header| header.id).chain(others.difference(&known).copied()) {
            progress(Progress::Object(id));
            if let Some((paths, error)) = self.failure(id) {
                self.cannot_decode(id, paths, error);
            }
            let len = self.objects.get(id).map_or(0, |(header, _)| header.logical_len);
            progress(Progress::Decoded(len));
            self.report.decoded_bytes += len;
        }
    }

    /// Why an object cannot be decoded, and the files that need it. An object that is gone and that no file names may
    /// have been collected.
    fn failure(&self, id: Id) -> Option<(Vec<PathBuf>, ReadError)> {
        let mut failure = None;
        for _ in 0..LOOKS {
            let decode = |chain: Chain| check_hash(&chain, chain.leaf().header().decoded_hash);
            let error = Chain::open(self.objects, id).and_then(decode).err()?;
            let is_named = |path: &&PathBuf| matches!(stubs::look(self.store, &[], path), Ok(Seen::Released(stub)) if stub.object == id);
            let paths: Vec<PathBuf> = self.names.get(&id).into_iter().flatten().filter(is_named).cloned().collect();
            if paths.is_empty() && is_missing(&error) {
                return None;
            }
            failure = Some((paths, error));
        }
        failure
    }

    fn cannot_decode(&mut self, id: Id, paths: Vec<PathBuf>, error: ReadError) {
        let is_known = !self.found.broken.insert(id);
        self.found.broken.insert(error.object);
        // Objects that depend on it, and their files, are reported already.
        if is_known && paths.is_empty() {
            return;
        }
        let words = if is_missing(&error) { "the object is missing".into() } else { error.source.to_string() };
        let (object, tensor) = (Some(error.object.to_string()), error.tensor);
        self.report.damaged.push(Damaged { object, tensor, ..Damaged::new(&paths, Some(id), words) });
    }

    /// Reads the files that are not released.
    fn at_bytes(&mut self) {
        for path in self.found.resident.clone() {
            if let Err(error) = read_through(self.store.io(), &self.store.tree().join(&path)) {
                self.unreadable_file(&path, &error);
            }
        }
    }

    fn unreadable_file(&mut self, path: &Path, error: &io::Error) {
        let found = fs::symlink_metadata(self.store.tree().join(path));
        // Otherwise it was removed since it was listed.
        if !found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            self.report.damaged.push(Damaged::of_file(path, error.to_string()));
        }
    }
}

fn is_missing(error: &ReadError) -> bool {
    error.source.kind() == io::ErrorKind::NotFound
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
