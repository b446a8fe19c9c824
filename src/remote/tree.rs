//! Shows a remote's names in the store's tree: small files and links whole, all others as stubs.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use xattr::FileExt as _;

use super::journal::{Content, Kind, Record, Segment, Shown};
use super::local::{Found, Local, Mark, PERMISSIONS, access, identity};
use super::view::Stamp;
use crate::store::durable::{Attribute, CrashPoint, DeviceFile, Times};
use crate::store::{Id, MIN_RELEASE_BYTES, REMOTE, Store, Stub, beneath, found_at, in_parallel, modified_ns};
use codec::hash::xxh3_64;

const WRITTEN: CrashPoint = CrashPoint::ImportWritten;
const IN_PLACE: CrashPoint = CrashPoint::ImportInPlace;

/// A file or link that is written in `tmp/`. When this is dropped, it is gone there.
pub(super) struct Ready<'a> {
    store: &'a Store,
    part: PathBuf,
    object: Option<Id>,
    /// A file, which is not durable yet.
    file: Option<DeviceFile>,
}

impl Drop for Ready<'_> {
    fn drop(&mut self) {
        self.store.io().discard(&self.part, WRITTEN);
    }
}

/// Writes a name that is to be shown.
///
/// # Errors
/// Device errors; `InvalidData` for a record that no stepfs writes.
pub(super) fn make_ready<'a>(store: &'a Store, path: &Path, stamp: &Stamp, shown: &Shown) -> io::Result<Ready<'a>> {
    let object = match &shown.content {
        Content::Object { id, .. } if shown.len >= MIN_RELEASE_BYTES => Some(*id),
        Content::Object { .. } => return Err(io::Error::new(io::ErrorKind::InvalidData, "it is too small for a stub")),
        Content::Inline(_) | Content::Link(_) => None,
    };
    let part = store.tmp().join(format!("shown-{}", Id::random()?));
    let mut ready = Ready { store, part, object, file: None };
    match &shown.content {
        Content::Link(target) => symlink(OsStr::from_bytes(target), &ready.part)?,
        _ => ready.file = Some(write(store, &ready.part, (path, stamp, shown), object)?),
    }
    Ok(ready)
}

/// Shows a name in the place of `found`. The file gets its place in `directory`, which must still be at the path. False
/// if a program has the file open, or has changed or moved something since. The name is durable after [`sync`].
///
/// # Errors
/// Device errors.
pub(super) fn show(
    local: &dyn Local,
    (path, directory): (&Path, &File),
    found: Option<&Found>,
    shown: &Shown,
    ready: &Ready,
) -> io::Result<bool> {
    let (store, object) = (local.store(), ready.object);
    let at = beneath::by_descriptor(directory).join(path.file_name().unwrap_or_default());
    let there = || match fs::symlink_metadata(&at) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        there => there.map(Some),
    };
    let is_there = |now: &Metadata| found.is_some_and(|found| found.is(now));
    let is_link = |metadata: &Metadata| metadata.file_type().is_symlink();
    let before = if found.is_some() { there()? } else { None };
    // A program has put something else there since the decision, or has removed it.
    if found.is_some() && !before.as_ref().is_some_and(is_there) {
        return Ok(false);
    }
    if let Some(file) = &ready.file {
        file.sync(WRITTEN)?;
    }
    let io = store.io();
    match &before {
        Some(before) if is_file(shown) && !is_link(before) => {
            // Only the rename: nobody can open a file meanwhile.
            let mut commit = |reached: &Path| match is_there(&fs::symlink_metadata(reached)?) {
                true => io.device().rename(&ready.part, reached, IN_PLACE).map(|()| true),
                false => Ok(false),
            };
            local.replace(path, before, object, &mut commit)
        }
        Some(before) if !local.remove(path, before, &mut || Ok(there()?.is_some_and(|now| is_there(&now))))? => {
            Ok(false)
        }
        _ => {
            // Never over a file that a program has created meanwhile, nor in a directory that it has moved.
            let mut make = || {
                if !is_at(store, path.parent().unwrap_or(Path::new("")), directory)? {
                    return Ok(false);
                }
                match io.device().link(&ready.part, &at, IN_PLACE) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
                    linked => linked.map(|()| true),
                }
            };
            let made = if is_file(shown) { local.appear(path, object, &mut make)? } else { make()? };
            // Programs never see a second name of it for long.
            io.discard(&ready.part, WRITTEN);
            Ok(made)
        }
    }
}

/// True if a directory is still the one at this path.
fn is_at(store: &Store, path: &Path, directory: &File) -> io::Result<bool> {
    let place = |of: Metadata| (of.dev(), of.ino());
    match beneath::metadata(&store.tree(), path) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(false),
        there => Ok(place(there?) == place(directory.metadata()?)),
    }
}

/// Makes the names in these directories durable.
pub(super) fn sync(store: &Store, directories: &BTreeSet<PathBuf>) -> io::Result<()> {
    let directories: Vec<&PathBuf> = directories.iter().collect();
    let sync = |directory: &Path| store.io().sync_dir(&beneath::reach(&store.tree(), directory)?, IN_PLACE);
    let synced = in_parallel(&directories, |directory| match sync(directory) {
        // A program has removed it since.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(()),
        synced => synced,
    });
    synced.into_iter().collect()
}

fn is_file(shown: &Shown) -> bool {
    !matches!(shown.content, Content::Link(_))
}

/// Writes the file in `tmp/`, and sends it to the device.
fn write(
    store: &Store,
    part: &Path,
    (path, stamp, shown): (&Path, &Stamp, &Shown),
    object: Option<Id>,
) -> io::Result<DeviceFile> {
    let file = store.io().create(part, WRITTEN)?;
    match (&shown.content, object) {
        (Content::Inline(bytes), _) => file.write_all_at(bytes, 0, WRITTEN)?,
        (_, Some(object)) => Stub { store: store.id(), object, logical_len: shown.len }.write(&file)?,
        _ => {}
    }
    if rustix::process::geteuid().is_root() {
        set(&file, &Attribute::Owner(shown.uid, shown.gid))?;
    }
    set(&file, &Attribute::Mode(shown.mode & PERMISSIONS))?;
    let made = file.metadata()?;
    let mark = Mark {
        stamp: stamp.clone(),
        inode: made.ino(),
        modified_ns: shown.modified_ns,
        name: Mark::name(path),
        got: access(&made),
        owner: (shown.uid, shown.gid),
    };
    set(&file, &Attribute::Extended(OsStr::new(REMOTE), mark.text().as_bytes()))?;
    let time = (shown.modified_ns.div_euclid(1_000_000_000), shown.modified_ns.rem_euclid(1_000_000_000));
    set(&file, &Attribute::Times(Times { accessed: time, modified: time }))?;
    file.begin_sync()?;
    Ok(file)
}

fn set(file: &DeviceFile, attribute: &Attribute) -> io::Result<()> {
    file.set(attribute, WRITTEN)
}

/// Takes a name away that another node removed.
///
/// # Errors
/// Device errors.
pub(super) fn take_away(local: &dyn Local, path: &Path, found: &Found) -> io::Result<bool> {
    let Some(metadata) = found_at(&local.store().tree(), path)? else { return Ok(true) };
    local.remove(path, &metadata, &mut || Ok(found_at(&local.store().tree(), path)?.is_some_and(|now| found.is(&now))))
}

/// Opens a directory of the tree. Creates it and its missing parents for the owner of the file that needs them; `grown`
/// gets the directories that are to be synced for them.
///
/// # Errors
/// Device errors; something else has one of the names.
pub(super) fn directory(
    store: &Store,
    path: &Path,
    (uid, gid): (u32, u32),
    grown: &mut BTreeSet<PathBuf>,
) -> io::Result<File> {
    let (tree, flags) = (store.tree(), libc::O_PATH | libc::O_DIRECTORY);
    match beneath::open(&tree, path, flags) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        opened => return opened,
    }
    let above: Vec<&Path> = path.ancestors().filter(|above| !above.as_os_str().is_empty()).collect();
    for directory in above.into_iter().rev() {
        if found_at(&tree, directory)?.is_none() {
            let reached = beneath::reach(&tree, directory)?;
            match store.io().make_dir(&reached, 0o755, WRITTEN) {
                // A program was faster, and it is the program's.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made?,
            }
            if rustix::process::geteuid().is_root() {
                let made = store.io().open_with(&reached, libc::O_DIRECTORY | libc::O_NOFOLLOW)?;
                set(&made, &Attribute::Owner(uid, gid))?;
            }
            grown.insert(directory.parent().unwrap_or(Path::new("")).to_path_buf());
        }
    }
    beneath::open(&tree, path, flags)
}

/// What the tree showed of a remote when the store was last used. A name of it that is missing was removed here. Empty
/// for a new store, and for one that had another remote. A lost tree must not remove what the remote has. So if another
/// directory is in its place, or nothing is in it, only names that are there count.
pub(super) fn load(store: &Store, url: &str) -> BTreeMap<PathBuf, Stamp> {
    let Some(segment) = read(store, url) else {
        if !record(store).exists() {
            return BTreeMap::new();
        }
        log::warn!(
            "{} is damaged or of another remote: names removed while unmounted appear again",
            record(store).display()
        );
        return BTreeMap::new();
    };
    let is_lost = || -> io::Result<bool> {
        Ok(segment.sequence != tree_identity(store)? || fs::read_dir(store.tree())?.next().is_none())
    };
    let is_lost = !segment.records.is_empty() && is_lost().unwrap_or(true);
    if is_lost {
        log::warn!("{} is empty, or new: names of the remote that are not in it appear again", store.tree().display());
    }
    let counts = |path: &Path| !is_lost || matches!(found_at(&store.tree(), path), Ok(Some(_)));
    let stamp = |record| match record {
        Record::Put { time, path, shown: Shown { content: Content::Object { owner, .. }, .. } } => {
            Some((path, Stamp { time, node: owner }))
        }
        _ => None,
    };
    let shown: BTreeMap<_, _> =
        segment.records.into_iter().filter_map(stamp).filter(|(path, _)| counts(path)).collect();
    if is_lost {
        for path in shown.keys() {
            if let Err(error) = renew(store, path) {
                log::warn!("{}: counts as written here: {error}", path.display());
            }
        }
    }
    shown
}

/// Renews the mark of a file in a copy of its store: the copy has another inode number. Without its mark, an old state of
/// another node's file would count as a later change.
fn renew(store: &Store, path: &Path) -> io::Result<()> {
    let file = match beneath::open(&store.tree(), path, libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK) {
        // A link has no mark.
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => return Ok(()),
        file => file?,
    };
    let metadata = file.metadata()?;
    let had = file.get_xattr(REMOTE)?.and_then(|value| Mark::parse(&value));
    match had.filter(|had| had.modified_ns == modified_ns(&metadata) && had.name == Mark::name(path)) {
        Some(had) => file.set_xattr(REMOTE, Mark { inode: metadata.ino(), ..had }.text().as_bytes()),
        None => Ok(()),
    }
}

/// The name that a store has had at a remote. Its host may have another name by now.
pub fn last_node(store: &Store, url: &str) -> Option<String> {
    read(store, url).map(|segment| segment.node)
}

/// What [`save`] wrote for this store and remote.
fn read(store: &Store, url: &str) -> Option<Segment> {
    let bytes = store.io().read(&record(store), super::journal::MAX_SEGMENT_BYTES).ok()?;
    let ours = |segment: &Segment| segment.kind == Kind::Shown && segment.epoch == xxh3_64(url.as_bytes());
    Segment::decode(&bytes).ok().filter(ours).filter(|of| of.store == store.id())
}

/// Saves what the tree shows.
///
/// # Errors
/// Device errors.
pub(super) fn save(store: &Store, url: &str, node: &str, shown: &BTreeMap<PathBuf, Stamp>) -> io::Result<()> {
    let of = |owner: &String| Shown {
        mode: 0,
        uid: 0,
        gid: 0,
        len: 0,
        modified_ns: 0,
        identity: 0,
        content: Content::Object { owner: owner.clone(), id: Id::NONE },
    };
    let records = shown
        .iter()
        .map(|(path, stamp)| Record::Put { time: stamp.time, path: path.clone(), shown: of(&stamp.node) })
        .collect();
    let (kind, store_id, epoch) = (Kind::Shown, store.id(), xxh3_64(url.as_bytes()));
    let sequence = tree_identity(store)?;
    let bytes = Segment { kind, store: store_id, node: node.to_string(), epoch, sequence, records }.encode()?;
    store.io().replace(&store.tmp().join("remote.shown"), &record(store), &bytes, (WRITTEN, IN_PLACE))
}

/// Tells the tree from a copy of it.
fn tree_identity(store: &Store) -> io::Result<u64> {
    Ok(identity(&fs::metadata(store.tree())?))
}

fn record(store: &Store) -> PathBuf {
    store.root().join("remote.shown")
}
