//! Replaces a file by a stub, in steps that a crash may interrupt anywhere, and a stub by the recalled file.
//!
//! 1. The stub is in `tmp/`, durable, with the file's attributes. *A crash here: `tmp/` is emptied, nothing happened.*
//! 2. A note in `tmp/`, durable, holds the times of the directory. *A crash here: the file is not a stub of the note's
//!    object, so the note is void.*
//! 3. The stub is renamed over the file: the commit point. *A crash here: recovery carries out the note.*
//! 4. The directory gets its times back, durably, and the note is removed. *A crash after that may bring the note back.
//!    Programs may have changed the directory by then: a note older than such a change is void.*
//!
//! Names may come and go in a directory faster than a note becomes durable. Then the note is removed, durably, and the
//! directory keeps the times that it has at the commit point. *A crash between 3 and 4 leaves it with the time of the
//! rename.*

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FileType, Statx, StatxTimestamp};
use serde::{Deserialize, Serialize};

use super::durable::{self, Attribute, CrashPoint, DeviceFile, Io, Times};
use super::engine::Engine;
use super::fence::{Fence, Taken};
use super::marks::{PLAIN, RECALLED};
use super::object::Id;
use super::stub::Stub;
use super::{Damage, Store, beneath, changed_ns, locks, modified_ns, record};

const NOTE_MAGIC: &[u8; 8] = b"stepfsDT";
const NOTE_PREFIX: &str = "times-";
/// A rename stamps the file and its directory separately, with the clock of the kernel's ticks. The stamps differ by at
/// most one tick of the slowest kernels (100 a second).
const ONE_RENAME_NS: i128 = 10_000_000;
/// Longer than any path the kernel takes.
const MAX_NOTE_BYTES: u64 = 64 * 1024;

/// The times of the directory of a file about to be released; in `tmp/` until they are restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StubNote {
    /// Path of the file inside the tree.
    #[serde(with = "bytes_of_path")]
    pub path: PathBuf,
    /// The object that its stub will name.
    pub object: Id,
    /// Times of its directory.
    pub times: Times,
}

impl StubNote {
    /// The note's bytes.
    pub fn encode(&self) -> Vec<u8> {
        record::encode(NOTE_MAGIC, self)
    }

    /// Parses a note.
    ///
    /// # Errors
    /// [`Damage`] if it is not whole or a byte was changed.
    pub fn decode(bytes: &[u8]) -> Result<StubNote, Damage> {
        record::decode(NOTE_MAGIC, bytes)
    }
}

/// A path need not be UTF-8.
mod bytes_of_path {
    use super::*;
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        path.as_os_str().as_bytes().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        Vec::deserialize(from).map(|bytes| PathBuf::from(OsString::from_vec(bytes)))
    }
}

/// A stub ready to replace a file.
#[derive(Debug)]
pub struct Prepared {
    /// The old file. Its blocks are freed when this handle goes: 1.5 ms for 8 MiB, while a rename takes 10 us. So the
    /// file system's lock, under which a commit happens, must not see it go.
    /// None where it must be closed when the stub takes its place.
    original: Option<File>,
    stub: PathBuf,
    /// Device and inode number of the stub.
    placed: (u64, u64),
    note: PathBuf,
    /// As the note has them. `None` without a note.
    directory_times: Option<Times>,
    file: Fingerprint,
    /// The directory's times are not restored yet: the next mount needs the note.
    keep_note: AtomicBool,
    io: Io,
    /// The file is locked by a second name when the stub takes its place, which changes two of its attributes.
    has_second_name: bool,
    /// Of a shared store. It holds the stub.
    fence: Option<Fence>,
}

/// The outcome of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Committed {
    /// The stub is in place.
    Done,
    /// The file has changed since [`Prepared::new`]; nothing was done.
    FileChanged,
    /// Its directory has other times than the note; nothing was done. [`Prepared::without_note`] permits another try.
    DirectoryChanged,
}

/// Changes whenever content, attributes or number of names of a file do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    dev: u64,
    pub(crate) ino: u64,
    pub(crate) len: u64,
    nlink: u64,
    pub(crate) modified_ns: i64,
    pub(crate) changed_ns: i64,
}

impl Fingerprint {
    pub(crate) fn of(metadata: &Metadata) -> Fingerprint {
        Fingerprint {
            dev: metadata.dev(),
            ino: metadata.ino(),
            len: metadata.len(),
            nlink: metadata.nlink(),
            modified_ns: modified_ns(metadata),
            changed_ns: changed_ns(metadata),
        }
    }

    /// Of a regular file.
    pub(super) fn known(known: &Statx) -> Option<Fingerprint> {
        let ns = |time: StatxTimestamp| time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec.into());
        FileType::from_raw_mode(known.stx_mode.into()).is_file().then(|| Fingerprint {
            dev: rustix::fs::makedev(known.stx_dev_major, known.stx_dev_minor),
            ino: known.stx_ino,
            len: known.stx_size,
            nlink: known.stx_nlink.into(),
            modified_ns: ns(known.stx_mtime),
            changed_ns: ns(known.stx_ctime),
        })
    }
}

impl Prepared {
    /// Steps 1 and 2 for the file at `path` inside the tree. `None` if it no longer matches `source`.
    ///
    /// # Errors
    /// `WouldBlock`: in a shared store somebody has the file open, or changes its attributes; device errors. Nothing is left behind
    /// then.
    pub fn new(store: &Store, path: &Path, source: &Metadata, stub: &Stub) -> io::Result<Option<Prepared>> {
        let name = Id::random()?;
        // Before the look at the file: whoever changes it afterwards takes the fence down.
        let fence = store.is_shared().then(|| store.fence(source.ino())).transpose()?;
        // Whoever had the file before may have taken fences down already.
        if fence.is_some() && locks::is_open(&beneath::open_file(&store.tree(), path)?, false)? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let original = beneath::hold(&store.tree(), path)?;
        if Fingerprint::of(&original.metadata()?) != Fingerprint::of(source) {
            return Ok(None);
        }
        let directory = beneath::metadata(&store.tree(), path.parent().unwrap_or(Path::new("")))?;
        let times = Times::of(&directory);
        let at = fence.as_ref().map_or_else(|| store.tmp(), |fence| fence.dir().to_path_buf());
        let mut prepared = Prepared {
            original: Some(original),
            stub: at.join(format!("stub-{name}")),
            placed: (0, 0),
            note: store.tmp().join(format!("{NOTE_PREFIX}{name}")),
            directory_times: Some(times),
            file: Fingerprint::of(source),
            keep_note: AtomicBool::new(false),
            io: store.io().clone(),
            has_second_name: fence.is_some() && store.engine() == Engine::Nfs,
            fence,
        };
        let file = prepared.io.create(&prepared.stub, CrashPoint::StubWritten)?;
        stub.write(&file)?;
        if let Some(original) = &prepared.original {
            copy_attributes(original, source, &file, CrashPoint::StubWritten)?;
        }
        prepared.original.take_if(|_| prepared.has_second_name);
        file.sync(CrashPoint::StubWritten)?;
        prepared.placed = place(&file.metadata()?);
        let note = StubNote { path: path.to_path_buf(), object: stub.object, times };
        let file = prepared.io.create(&prepared.note, CrashPoint::NoteWritten)?;
        file.write_all_at(&note.encode(), 0, CrashPoint::NoteWritten)?;
        file.sync(CrashPoint::NoteWritten)?;
        prepared.io.sync_dir(&store.tmp(), CrashPoint::NoteWritten)?;
        Ok(Some(prepared))
    }

    /// Removes the note, durably: a note with older times than the directory's must not come back after the commit.
    ///
    /// # Errors
    /// Device errors; the note may still be there then.
    pub fn without_note(&mut self) -> io::Result<()> {
        self.io.remove(&self.note, CrashPoint::NoteRemoved)?;
        self.io.sync_dir(durable::parent(&self.note), CrashPoint::NoteRemoved)?;
        self.directory_times = None;
        Ok(())
    }

    /// Steps 3 and 4 for the file at `absolute`. The caller keeps all others away from it and its directory.
    ///
    /// # Errors
    /// The file is gone, or device errors before the stub is in place.
    pub fn commit(&self, absolute: &Path) -> io::Result<Committed> {
        let directory = durable::parent(absolute);
        let found = Fingerprint::of(&fs::symlink_metadata(absolute)?);
        let expected = match self.has_second_name {
            // Whoever changes attributes takes the fence down.
            true => Fingerprint { nlink: found.nlink, changed_ns: found.changed_ns, ..self.file },
            false => self.file,
        };
        if found != expected {
            return Ok(Committed::FileChanged);
        }
        let present = Times::of(&fs::metadata(directory)?);
        let times = self.directory_times.unwrap_or(present);
        if times.modified != present.modified {
            return Ok(Committed::DirectoryChanged);
        }
        if let Err(error) = self.io.device().rename(&self.stub, absolute, CrashPoint::StubInPlace) {
            // The rename may have happened nevertheless: the stub must not be taken for a program's bytes.
            if !fs::symlink_metadata(absolute).is_ok_and(|found| place(&found) == self.placed) {
                return Err(error);
            }
            log::error!("{}: released, although the device says: {error}", absolute.display());
        }
        let restored = match &self.fence {
            Some(_) => restore_unless_changed(&self.io, absolute, times, CrashPoint::DirectoryTimes),
            None => self.io.set_times(directory, times, CrashPoint::DirectoryTimes),
        };
        // From here on the file is released, whatever happens: an error would say that it is not.
        if let Err(error) = restored {
            log::error!("{}: cannot restore its times now ({error}); the next mount does", directory.display());
            self.keep_note.store(true, Ordering::Relaxed);
        }
        Ok(Committed::Done)
    }

    /// Leaves the note for the next mount, since the directory's restored times could not be made durable.
    pub fn keep_note(&self) {
        self.keep_note.store(true, Ordering::Relaxed);
    }
}

impl Drop for Prepared {
    /// Committed or not, the note is no longer needed if the directory has its times.
    fn drop(&mut self) {
        self.io.discard(&self.stub, CrashPoint::StubWritten);
        if self.directory_times.is_some() && !self.keep_note.load(Ordering::Relaxed) {
            self.io.discard(&self.note, CrashPoint::NoteRemoved);
        }
    }
}

fn place(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Extended attributes that describe a file's bytes and that only the system may set. They must not go to a file with
/// other bytes.
const OF_BYTES: [&str; 3] = ["security.capability", "security.ima", "security.evm"];

/// Copies owner and all other attributes from `from`, which may be an `O_PATH` handle with these metadata, to `to`.
/// Afterwards `to` has no others.
///
/// # Errors
/// Also if this process may not set an attribute: it must not be lost.
pub fn copy_attributes(from: &File, metadata: &Metadata, to: &DeviceFile, at: CrashPoint) -> io::Result<()> {
    copy_owner(metadata, to, at)?;
    copy_extended(from, to, at, &[])?;
    to.set(&Attribute::Mode(metadata.mode()), at)?;
    to.set(&Attribute::Times(Times::of(metadata)), at)
}

/// Like [`copy_attributes`], for a file with new bytes and its own times.
pub fn copy_to_new_bytes(from: &File, metadata: &Metadata, to: &DeviceFile, at: CrashPoint) -> io::Result<()> {
    copy_owner(metadata, to, at)?;
    copy_extended(from, to, at, &OF_BYTES)?;
    to.set(&Attribute::Mode(metadata.mode()), at)
}

/// Copies mode, extended attributes and times from `from`, which has these metadata, to `to`. The owner differs, so the
/// set-user-id and set-group-id bits are not copied.
pub fn copy_but_owner(from: &File, metadata: &Metadata, to: &DeviceFile, at: CrashPoint) -> io::Result<()> {
    copy_extended(from, to, at, &[])?;
    to.set(&Attribute::Mode(metadata.mode() & 0o1777), at)?;
    to.set(&Attribute::Times(Times::of(metadata)), at)
}

fn copy_owner(metadata: &Metadata, to: &DeviceFile, at: CrashPoint) -> io::Result<()> {
    let own = to.metadata()?;
    match (own.uid(), own.gid()) == (metadata.uid(), metadata.gid()) {
        true => Ok(()),
        false => to.set(&Attribute::Owner(metadata.uid(), metadata.gid()), at),
    }
}

fn copy_extended(from: &File, to: &DeviceFile, at: CrashPoint, but: &[&str]) -> io::Result<()> {
    let (from, given) = (beneath::by_descriptor(from), beneath::by_descriptor(to.as_file()));
    // The marks of recalled files and of plain files belong to one file only.
    let carried = |name: &OsString| name != RECALLED && name != PLAIN && !but.iter().any(|left_out| name == left_out);
    let names = |file: &Path| -> io::Result<Vec<OsString>> {
        match xattr::list_deref(file) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(Vec::new()),
            names => Ok(names?.filter(carried).collect()),
        }
    };
    let wanted = names(&from)?;
    for name in &wanted {
        // The system gives this label to every file here, and only the system may set it.
        if let Some(value) = xattr::get_deref(&from, name)?.filter(|value| !has(&given, name, value)) {
            to.set(&Attribute::Extended(name, &value), at)?;
        }
    }
    // The system gives the others to every file here.
    let removable = |name: &&OsString| name.as_bytes().starts_with(b"user.") || *name == OF_BYTES[0];
    let gone = |name: &&OsString| removable(name) && !wanted.contains(name);
    names(&given)?.iter().filter(gone).try_for_each(|name| to.set(&Attribute::Without(name), at))
}

fn has(file: &Path, name: &OsStr, value: &[u8]) -> bool {
    xattr::get_deref(file, name).is_ok_and(|found| found.as_deref() == Some(value))
}

/// Renames the durable file `new` over each of `names`, which are all names of one stub, and restores the times of
/// their directories. `temporary` makes up paths on the same device. Returns the directories. The caller makes them
/// durable with [`sync_replaced`] before anything relies on the stub being gone.
///
/// # Errors
/// Device errors. Some names may be replaced then, and the caller looks which; the others are still the stub, whose
/// object exists as long as one of them does. Without room nothing is replaced.
pub fn replace_stub(
    io: &Io,
    new: &Path,
    names: &[impl AsRef<Path>],
    temporary: &mut dyn FnMut() -> PathBuf,
) -> io::Result<Vec<PathBuf>> {
    let links: Vec<PathBuf> = names.iter().skip(1).map(|_| temporary()).collect();
    // First all that takes room.
    let linked = links.iter().try_for_each(|link| io.device().link(new, link, CrashPoint::RecallInPlace));
    let from = links.iter().map(PathBuf::as_path).chain([new]);
    let replaced = linked.and_then(|()| rename_over(io, from, names.iter().map(AsRef::as_ref)));
    if replaced.is_err() {
        links.iter().for_each(|link| io.discard(link, CrashPoint::RecallInPlace));
    }
    replaced
}

/// Renames each of `from` over a name, and restores the times of the names' directories. Returns the directories.
fn rename_over<'a>(
    io: &Io,
    from: impl Iterator<Item = &'a Path>,
    names: impl Iterator<Item = &'a Path>,
) -> io::Result<Vec<PathBuf>> {
    let mut directories: Vec<PathBuf> = Vec::new();
    for (from, name) in from.zip(names) {
        let directory = durable::parent(name);
        let times = Times::of(&fs::metadata(directory)?);
        io.device().rename(from, name, CrashPoint::RecallInPlace)?;
        // The stub is gone by now: an error would say that it still exists.
        if let Err(error) = io.set_times(directory, times, CrashPoint::RecallTimes) {
            log::warn!("{}: cannot restore its times: {error}", directory.display());
        }
        if !directories.iter().any(|known| known == directory) {
            directories.push(directory.to_path_buf());
        }
    }
    Ok(directories)
}

/// In a shared store: renames the durable file `new`, behind a fence, over the one name of a stub that was taken.
///
/// # Errors
/// `NotFound`: the fence was taken down. Then, and after device errors, the stub is in its place.
pub fn replace_taken(io: &Io, new: &Path, stub: &Taken) -> io::Result<()> {
    let name = stub.path();
    let times = Times::of(&fs::metadata(durable::parent(&name))?);
    io.device().rename(new, &name, CrashPoint::RecallInPlace)?;
    if let Err(error) = restore_unless_changed(io, &name, times, CrashPoint::RecallTimes) {
        log::warn!("{}: cannot restore its directory's times: {error}", name.display());
    }
    Ok(())
}

/// Gives the directory of a name that was just renamed its times back, unless another daemon has changed the directory since:
/// this one may have been suspended for minutes.
fn restore_unless_changed(io: &Io, name: &Path, times: Times, at: CrashPoint) -> io::Result<()> {
    let (directory, moved) = (durable::parent(name), fs::symlink_metadata(name)?);
    match was_last_changed_by((moved.ctime(), moved.ctime_nsec()), directory)? {
        true => io.set_times(directory, times, at),
        false => Ok(()),
    }
}

/// Makes replaced stubs in these directories durable. Afterwards the archive learns of the change and may drop the
/// object: the stub must not come back.
pub fn sync_replaced(io: &Io, directories: &[PathBuf]) -> io::Result<()> {
    directories.iter().try_for_each(|directory| io.sync_dir(directory, CrashPoint::RecallSynced))
}

/// Carries out the notes that a crash left in a directory.
pub(super) fn recover(store: &Store, notes: &Path) -> io::Result<()> {
    for entry in fs::read_dir(notes)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        let named = entry.file_name().as_bytes().starts_with(NOTE_PREFIX.as_bytes());
        // Read only possible notes: a directory or a FIFO of that name must not keep the store from opening.
        if !named || !metadata.is_file() || metadata.len() > MAX_NOTE_BYTES {
            continue;
        }
        // A damaged note was never durable, so the rename after it never happened.
        let Ok(note) = StubNote::decode(&store.io().read(&entry.path(), MAX_NOTE_BYTES)?) else {
            continue;
        };
        let (tree, above) = (store.tree(), note.path.parent().unwrap_or(Path::new("")));
        let file = match store.io().open_beneath(&tree, &note.path, 0) {
            Ok(file) => file,
            // The note must not be removed until the answer is known.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => return Err(error),
            Err(_) => continue,
        };
        let stub = Stub::read_on(&file, store.id()).ok().flatten();
        let directory = beneath::reach(&tree, above)?;
        if stub.is_some_and(|stub| stub.object == note.object) && was_last_changed_by(file.changed()?, &directory)? {
            // Never through a symlink.
            beneath::open_dir(&tree, above)?;
            store.io().set_times(&directory, note.times, CrashPoint::NoteCarriedOut)?;
            store.io().sync_dir(&directory, CrashPoint::NoteCarriedOut)?;
        }
    }
    Ok(())
}

/// True if a directory's time is that of the rename that put the stub in place, at `renamed`. If it is later, a program has
/// changed the directory since, and the time is that program's. A note was already carried out, and only its removal was not
/// durable.
fn was_last_changed_by(renamed: (i64, i64), directory: &Path) -> io::Result<bool> {
    let ns = |(seconds, nanoseconds): (i64, i64)| i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
    // A rename stamps the file that it moves. In a copy of the store that stamp is later, and nobody has changed the
    // directory there either.
    Ok(ns(Times::of(&fs::metadata(directory)?).modified) <= ns(renamed) + ONE_RENAME_NS)
}

#[cfg(test)]
mod tests;
