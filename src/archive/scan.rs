//! Examines a file: its state after a mount, its tensors and lineage after the last close.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::encode::{fingerprint, runs};
use crate::store::object::path_of;
use crate::store::{
    Id, MIN_RELEASE_BYTES, Objects, STUB_BYTES, Store, Stub, beneath, in_parallel, recalled_from, step_pattern,
};
use codec::hash::{Xxh3Of128, xxh3_64};
use formats::{Description, InOrder, Kind, ReadAt, cut_short, describe};

use super::FileId;
use super::best::{self, Word};
use super::catalog::{Catalog, Says, Sealed, State, modified_ns};
use super::lineage::{lineage, part, signature};
use super::resident::ResidentReason;

/// Opaque bytes that neither byte planes nor zstd's fastest level bring below this share of themselves stay as they are.
const COMPRESSIBLE: f64 = 0.9;
/// Read at once when a whole file is hashed.
const HASH_BYTES: usize = 1 << 20;

/// The files that were found in a tree.
pub(super) struct Found {
    /// Every regular file with its state.
    pub(super) files: Vec<(PathBuf, io::Result<State>)>,
    /// Plain files that were decoded from an object.
    recalled: Vec<(PathBuf, Recalled)>,
    /// The statements of small files and links about the best of a run.
    pub(super) words: Vec<Word>,
}

/// The object that a plain file was decoded from, and the file's length.
struct Recalled {
    from: Id,
    len: u64,
}

/// Looks at everything in the tree.
pub(super) fn scan(store: &Store) -> io::Result<Found> {
    let root = store.tree();
    let (mut files, mut links) = (Vec::new(), Vec::new());
    let mut directories = vec![PathBuf::new()];
    while !directories.is_empty() {
        let mut below = Vec::new();
        for listed in in_parallel(&directories, |directory| list(&root, directory)) {
            let listed = listed?;
            below.extend(listed.directories);
            files.extend(listed.files);
            links.extend(listed.links);
        }
        directories = below;
    }
    let states = in_parallel(&files, |path| state_of(store, path));
    let mut recalled = Vec::new();
    let with_state = |(path, found): (PathBuf, io::Result<(State, Option<Recalled>)>)| {
        let state = found.map(|(state, from)| {
            recalled.extend(from.map(|from| (path.clone(), from)));
            state
        });
        (path, state)
    };
    let files: Vec<_> = files.into_iter().zip(states).map(with_state).collect();
    let mut words = best::of_small(store, &files);
    words.extend(best::of_links(store, &links));
    Ok(Found { files, recalled, words })
}

/// Enters the found files into the catalog.
pub(super) fn enter(found: Found, objects: &Objects, catalog: &mut Catalog) {
    for (path, state) in found.files {
        let state = state.unwrap_or_else(|error| {
            log::error!("{}: {error}; it stays as it is", path.display());
            State::Resident(ResidentReason::Unreadable)
        });
        match state {
            State::Released(id) => objects.name(id),
            // Which object it named is not known; that one must not go.
            State::Resident(ref why) if why.hides_an_object() => objects.freeze(true),
            _ => {}
        }
        catalog.found(path, state);
    }
    // The sealer looks closer, at samples of the bytes. Until then such a file must not call itself exact.
    for (path, Recalled { from, len }) in found.recalled {
        let closed = catalog.get(&path).filter(|entry| matches!(entry.state, State::Closed));
        let version = closed.map(|entry| entry.version);
        let is_as_long = objects.get(from).is_some_and(|(header, _)| header.logical_len == len);
        if let Some(version) = version.filter(|_| is_as_long) {
            catalog.keep(&path, version, Some(from), objects);
        }
    }
    for (path, says, modified_ns) in found.words {
        catalog.says(&path, Some((says, modified_ns)));
    }
}

#[derive(Default)]
struct Listed {
    directories: Vec<PathBuf>,
    files: Vec<PathBuf>,
    links: Vec<PathBuf>,
}

/// Directories, regular files and links in a directory of the tree.
fn list(root: &Path, directory: &Path) -> io::Result<Listed> {
    let mut listed = Listed::default();
    let opened = beneath::open_dir(root, directory)?;
    for entry in fs::read_dir(beneath::by_descriptor(&opened))? {
        let entry = entry?;
        let path = directory.join(entry.file_name());
        let kind = entry.file_type()?;
        if kind.is_dir() {
            listed.directories.push(path);
        } else if kind.is_file() {
            listed.files.push(path);
        } else if kind.is_symlink() {
            listed.links.push(path);
        }
    }
    Ok(listed)
}

fn state_of(store: &Store, path: &Path) -> io::Result<(State, Option<Recalled>)> {
    let tree = store.tree();
    let len = beneath::metadata(&tree, path)?.len();
    if len < MIN_RELEASE_BYTES {
        // Whether it counts is asked of files in checkpoint directories only, and no others are read here.
        let counts = len > 0 && step_pattern::group(path).is_some();
        let reason = match counts {
            true => {
                store.io().open_beneath(&tree, path, 0).and_then(|file| of_small(&file, path)).unwrap_or_else(|error| {
                    log::warn!("{}: {error}; it is taken for a whole file of its checkpoint", path.display());
                    ResidentReason::small(len)
                })
            }
            false => ResidentReason::small(len),
        };
        return Ok((State::Resident(reason), None));
    }
    let file = store.io().open_beneath(&tree, path, 0)?;
    let state = match Stub::read_on(&file, store.id()) {
        Ok(Some(stub)) => State::Released(stub.object),
        // Copied from another store, it is a file. One whose object is here was this store's.
        Ok(None) => match Stub::foreign(&file, store.id())? {
            Some(stub) if path_of(&store.objects(), stub.object).exists() => {
                State::Resident(ResidentReason::OtherStore)
            }
            _ if file.metadata()?.blocks() * 512 <= STUB_BYTES as u64 => State::Resident(ResidentReason::Hole),
            _ => return Ok((State::Closed, recalled_from(&file).map(|from| Recalled { from, len }))),
        },
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            log::error!("{}: {error}; it cannot be read", path.display());
            State::Resident(ResidentReason::DamagedStub)
        }
        Err(error) => return Err(error),
    };
    Ok((state, None))
}

/// The result for a durable file.
pub(super) struct Examined {
    pub(super) state: State,
    /// The same in a few words for the log.
    pub(super) words: String,
    /// The best of its run, if it names one.
    pub(super) says: Option<Says>,
    /// It has no tensors, and no format that is known.
    pub(super) is_opaque: bool,
    /// Whether it has tensors, if that is known.
    pub(super) has_tensors: Option<bool>,
}

/// Examines a durable file.
pub(super) fn examine(
    file: &(dyn ReadAt + Sync),
    metadata: &Metadata,
    path: &Path,
    describe: impl FnOnce() -> io::Result<Description>,
) -> io::Result<Examined> {
    if metadata.len() < MIN_RELEASE_BYTES {
        let says = best::small_said(file, path)?;
        let state = State::Resident(of_small(file, path)?);
        return Ok(Examined { state, words: String::new(), says, is_opaque: true, has_tensors: None });
    }
    let description = describe()?;
    let words = words(&description);
    let says = best::said(file, path, Some(&description))?;
    let is_opaque = description.kind == Kind::Opaque;
    if let Some(why) = cut_short(path, file, &description)? {
        let state = State::Resident(ResidentReason::CutShort(why.into()));
        return Ok(Examined { state, words, says, is_opaque, has_tensors: Some(false) });
    }
    if is_opaque && !compressible(file)? {
        let state = State::Resident(ResidentReason::incompressible(&description));
        return Ok(Examined { state, words, says, is_opaque, has_tensors: Some(false) });
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
        copy: false,
    };
    Ok(Examined { state: State::Sealed(Arc::new(sealed)), words, says, is_opaque, has_tensors })
}

/// The reason of a file below the size of files that are released.
fn of_small(file: &dyn ReadAt, path: &Path) -> io::Result<ResidentReason> {
    let why = cut_short(path, file, &describe(file)?)?;
    Ok(why.map_or(ResidentReason::small(file.size()), |why| ResidentReason::CutShort(why.into())))
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
