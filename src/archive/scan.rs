//! Examines a file: its state after a mount, its tensors and lineage after the last close.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::encode::{fingerprint, runs};
use crate::store::object::path_of;
use crate::store::{
    Id, MIN_RELEASE_BYTES, Objects, STUB_BYTES, Store, Stub, beneath, entries, in_parallel, is_trash, modified_ns,
    recalled_from, step_pattern,
};
use codec::hash::{Xxh3Of128, xxh3_64};
use formats::{Description, InOrder, Kind, ReadAt, cut_short, describe, may_name_best};

use super::FileId;
use super::best;
use super::catalog::Catalog;
use super::entry::{Sealed, Siblings, Stamp, State};
use super::lineage::{lineage, part, signature};
use super::resident::ResidentReason;

/// Opaque bytes that neither byte planes nor zstd's fastest level bring below this share of themselves stay as they are.
const COMPRESSIBLE: f64 = 0.9;
/// Read at once when a whole file is hashed.
const HASH_BYTES: usize = 1 << 20;

/// What was found in a tree.
pub(super) struct Found {
    pub(super) files: Vec<FoundFile>,
    /// Links whose names ask for exact bytes, and their targets.
    links: Vec<(PathBuf, PathBuf)>,
}

/// A regular file.
pub(super) struct FoundFile {
    pub(super) path: PathBuf,
    pub(super) state: State,
    stamp: Stamp,
    has_tensors: Option<bool>,
    /// The files that it names as the best of its run.
    names: Option<Vec<String>>,
    /// The object that a plain file was decoded from.
    recalled: Option<Id>,
}

impl FoundFile {
    fn new(path: &Path, state: State, stamp: Stamp) -> FoundFile {
        FoundFile { path: path.to_path_buf(), state, stamp, has_tensors: None, names: None, recalled: None }
    }

    /// One that may need any object, since it cannot be read.
    pub(super) fn unreadable(path: &Path, error: &io::Error) -> FoundFile {
        log::error!("{}: {error}; it stays as it is", path.display());
        FoundFile::new(path, State::Resident(ResidentReason::Unreadable), Stamp::default())
    }
}

/// Looks at everything in the tree.
pub(super) fn scan(store: &Store) -> io::Result<Found> {
    let root = store.tree();
    let (mut files, mut links) = (Vec::new(), Vec::new());
    let mut directories = vec![PathBuf::new()];
    while !directories.is_empty() {
        let mut below = Vec::new();
        for listed in in_parallel(&directories, |directory| entries(&root, directory)) {
            for (path, kind) in listed? {
                if kind.is_dir() {
                    below.push(path);
                } else if kind.is_file() {
                    files.push(path);
                } else if kind.is_symlink() {
                    links.push(path);
                }
            }
        }
        directories = below;
    }
    let files =
        in_parallel(&files, |path| found(store, path).unwrap_or_else(|error| FoundFile::unreadable(path, &error)));
    let targets = in_parallel(&links, |path| best::linked(store, path, None));
    let links = links.into_iter().zip(targets).filter_map(|(path, target)| Some((path, target?))).collect();
    Ok(Found { files, links })
}

/// Enters what was found into the catalog.
pub(super) fn enter(found: Found, objects: &Objects, catalog: &mut Catalog) {
    found.files.into_iter().for_each(|file| enter_one(file, objects, catalog));
    for (link, target) in found.links {
        catalog.link_read(&link, Some(target));
    }
}

/// Enters a file that was found into the catalog.
pub(super) fn enter_one(found: FoundFile, objects: &Objects, catalog: &mut Catalog) {
    let FoundFile { path, state, stamp, has_tensors, names, recalled } = found;
    match state {
        State::Released(id) => objects.name(id),
        // Which object it named is not known; that one must not go.
        State::Resident(ref why) if why.hides_an_object() => objects.freeze(true),
        _ => {}
    }
    let is_closed = matches!(state, State::Closed);
    let version = catalog.found(&path, state, (stamp, has_tensors), names);
    // The sealer looks closer, at samples of the bytes. Until then such a file must not call itself exact.
    let is_as_long = |id: &Id| objects.get(*id).is_some_and(|(header, _)| header.logical_len == stamp.len);
    if let Some(id) = recalled.filter(is_as_long).filter(|_| is_closed) {
        catalog.keep(&path, version, Some(id));
    }
}

/// Looks at a file of the tree.
pub(super) fn found(store: &Store, path: &Path) -> io::Result<FoundFile> {
    let tree = store.tree();
    let metadata = beneath::metadata(&tree, path)?;
    let file = |state| FoundFile::new(path, state, Stamp::of(&metadata));
    let len = metadata.len();
    if len < MIN_RELEASE_BYTES {
        // Others count nowhere, and are not read here.
        let counts =
            may_name_best(path) || step_pattern::group(path).is_some() || !store.settings().retention().is_empty();
        if len == 0 || !counts || is_trash(path) {
            return Ok(file(State::Resident(ResidentReason::small(len))));
        }
        let small = store.io().open_beneath(&tree, path, 0).and_then(|small| examine_small(&small, path));
        return Ok(match small {
            Ok((why, has_tensors, names)) => FoundFile { has_tensors, names, ..file(State::Resident(why)) },
            Err(error) => {
                log::warn!(
                    "{}: {error}; it is taken for a whole file of its checkpoint, and if it names the best of a run, \
                     that one is not known",
                    path.display()
                );
                file(State::Resident(ResidentReason::small(len)))
            }
        });
    }
    let opened = store.io().open_beneath(&tree, path, 0)?;
    Ok(match Stub::read_on(&opened, store.id()) {
        Ok(Some(stub)) => file(State::Released(stub.object)),
        // Copied from another store, it is a file. One whose object is here was this store's.
        Ok(None) => match Stub::foreign(&opened, store.id())? {
            Some(stub) if path_of(&store.objects(), stub.object).exists() => {
                file(State::Resident(ResidentReason::OtherStore))
            }
            _ if opened.metadata()?.blocks() * 512 <= STUB_BYTES as u64 => file(State::Resident(ResidentReason::Hole)),
            _ => FoundFile { recalled: recalled_from(&opened), ..file(State::Closed) },
        },
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            log::error!("{}: {error}; it cannot be read", path.display());
            file(State::Resident(ResidentReason::DamagedStub))
        }
        Err(error) => return Err(error),
    })
}

/// The result for a durable file.
pub(super) struct Examined {
    pub(super) state: State,
    /// The same in a few words for the log.
    pub(super) words: String,
    /// The files that it names as the best of its run.
    pub(super) names: Option<Vec<String>>,
    /// It has no tensors, and no format that is known.
    pub(super) is_opaque: bool,
    /// Whether it has tensors, if that is known.
    pub(super) has_tensors: Option<bool>,
}

/// Examines a durable file. `siblings`: the files that it is no state without.
pub(super) fn examine(
    file: &(dyn ReadAt + Sync),
    metadata: &Metadata,
    path: &Path,
    siblings: Option<Arc<Siblings>>,
    describe: impl FnOnce() -> io::Result<Description>,
) -> io::Result<Examined> {
    if is_trash(path) {
        let state = State::Resident(ResidentReason::Trash);
        return Ok(Examined { state, words: String::new(), names: None, is_opaque: true, has_tensors: None });
    }
    if metadata.len() < MIN_RELEASE_BYTES {
        let (why, has_tensors, names) = examine_small(file, path)?;
        let state = State::Resident(why);
        return Ok(Examined { state, words: String::new(), names, is_opaque: true, has_tensors });
    }
    let description = describe()?;
    let words = words(&description);
    let names = best::named(file, path, &description)?;
    let is_opaque = description.kind == Kind::Opaque;
    let why = match cut_short(path, file, &description)? {
        Some(why) => Some(ResidentReason::CutShort(why.into())),
        // An index that comes may tell its tensors.
        None if is_opaque && siblings.is_none() && !compressible(file)? => {
            Some(ResidentReason::incompressible(&description))
        }
        None => None,
    };
    if let Some(why) = why {
        return Ok(Examined { state: State::Resident(why), words, names, is_opaque, has_tensors: Some(false) });
    }
    let has_tensors = Some(!description.tensors.is_empty());
    let sealed = Sealed {
        file: FileId::of(metadata),
        len: metadata.len(),
        modified_ns: modified_ns(metadata),
        steps: step_pattern::steps(path),
        sample: xxh3_64(&fingerprint::read(&InOrder::new(file, &description))?),
        signature: signature(&description),
        lineage: lineage(path, &description),
        part: part(&description),
        siblings,
        copy: false,
        changed_ns: None,
    };
    Ok(Examined { state: State::Sealed(Arc::new(sealed)), words, names, is_opaque, has_tensors })
}

/// What is found in a file below the size of files that are released: why it stays, whether it has tensors, and which files
/// it names as the best of its run.
fn examine_small(file: &dyn ReadAt, path: &Path) -> io::Result<(ResidentReason, Option<bool>, Option<Vec<String>>)> {
    let description = describe(file)?;
    let has_tensors = Some(!description.tensors.is_empty());
    Ok(match cut_short(path, file, &description)? {
        Some(why) => (ResidentReason::CutShort(why.into()), has_tensors, None),
        None => (ResidentReason::small(file.size()), has_tensors, best::named(file, path, &description)?),
    })
}

fn compressible(file: &dyn ReadAt) -> io::Result<bool> {
    let bytes = fingerprint::read(file)?;
    let packed = zstd::bulk::compress(&bytes, 1)?.len() as f64;
    Ok(packed < COMPRESSIBLE * bytes.len() as f64 || runs::share(file)? < COMPRESSIBLE)
}

/// xxh3-128 of a whole file.
pub(super) fn hash(file: &dyn ReadAt, len: u64) -> io::Result<u128> {
    let mut hash = Xxh3Of128::default();
    let mut buf = vec![0; HASH_BYTES];
    let mut at = 0;
    while at < len {
        let take = (len - at).min(HASH_BYTES as u64) as usize;
        file.read_exact_at(&mut buf[..take], at)?;
        hash.update(&buf[..take]);
        at += take as u64;
    }
    Ok(hash.digest())
}

fn words(description: &Description) -> String {
    match (description.kind, &description.note) {
        (Kind::Opaque, Some(note)) => format!("opaque ({note})"),
        (kind, _) => format!("{} with {} tensors", kind.name(), description.tensors.len()),
    }
}
