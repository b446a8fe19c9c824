//! Puts a stub in the place of a file, in steps that a crash may interrupt anywhere.
//!
//! 1. The stub lies in `tmp/`, durable, with the file's attributes. *A crash here: `tmp/` is emptied, nothing happened.*
//! 2. A note in `tmp/`, durable, says what the directory's times are. *A crash here: the note names an object that the
//!    file is not a stub of, so it is void.*
//! 3. The stub is renamed over the file: the commit point. *A crash here: the note is carried out.*
//! 4. The directory gets its times back, durably, and the note goes. *A crash after that may bring the note back, and by
//!    then programs may have changed the directory: a note older than such a change is void.*

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::hash::xxh3_64;

use super::bytes::Fields;
use super::durable::{self, Attribute, CrashPoint, DeviceFile, Io, Times};
use super::marks::{PLAIN, RECALLED};
use super::object::Id;
use super::stub::Stub;
use super::{Damage, Store, beneath};

const NOTE_MAGIC: [u8; 8] = *b"stepfsDT";
const NOTE_PREFIX: &str = "times-";
/// A rename stamps the file and its directory with the clock of the kernel's ticks, each for itself: at most one tick of the
/// slowest kernels (100 a second) apart.
const ONE_RENAME_NS: i128 = 10_000_000;
/// Longer than any path the kernel takes.
const MAX_NOTE_BYTES: u64 = 64 * 1024;

/// What the directory of a file about to be released looks like; lies in `tmp/` until its times are back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StubNote {
    /// Path of the file inside the tree.
    pub path: PathBuf,
    /// The object that its stub will name.
    pub object: Id,
    /// Times of its directory.
    pub times: Times,
}

impl StubNote {
    /// The note's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = NOTE_MAGIC.to_vec();
        out.extend_from_slice(&self.object.0);
        for (seconds, nanoseconds) in [self.times.accessed, self.times.modified] {
            out.extend_from_slice(&seconds.to_le_bytes());
            out.extend_from_slice(&nanoseconds.to_le_bytes());
        }
        let path = self.path.as_os_str().as_bytes();
        out.extend_from_slice(&(path.len() as u32).to_le_bytes());
        out.extend_from_slice(path);
        out.extend_from_slice(&xxh3_64(&out).to_le_bytes());
        out
    }

    /// Reads a note.
    ///
    /// # Errors
    /// [`Damage`] when it was never whole, or a byte of it was changed.
    pub fn decode(bytes: &[u8]) -> Result<StubNote, Damage> {
        let body = bytes.get(..bytes.len().wrapping_sub(8)).ok_or(Damage("a note is cut short"))?;
        if Fields::new(&bytes[body.len()..]).u64()? != xxh3_64(body) {
            return Err(Damage("a note's checksum does not match"));
        }
        let mut fields = Fields::new(body);
        if fields.take(8)? != NOTE_MAGIC {
            return Err(Damage("a note's first bytes are wrong"));
        }
        let object = Id(fields.u128()?.to_le_bytes());
        let mut time = || -> Result<(i64, i64), Damage> { Ok((fields.u64()? as i64, fields.u64()? as i64)) };
        let times = Times { accessed: time()?, modified: time()? };
        let length = fields.count(1)?;
        let path = PathBuf::from(OsStr::from_bytes(fields.take(length)?));
        if fields.remaining() != 0 {
            return Err(Damage("a note is longer than it may be"));
        }
        Ok(StubNote { path, object, times })
    }
}

/// A stub ready to take a file's place.
#[derive(Debug)]
pub struct Prepared {
    stub: PathBuf,
    /// Device and inode number of the stub.
    placed: (u64, u64),
    note: PathBuf,
    directory_times: Times,
    file: Fingerprint,
    /// The directory has not got its times back: the note is for the next mount.
    keep_note: AtomicBool,
    io: Io,
}

/// Changes whenever content, attributes or number of names of a file do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fingerprint {
    dev: u64,
    ino: u64,
    len: u64,
    nlink: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Fingerprint {
    fn of(metadata: &Metadata) -> Fingerprint {
        Fingerprint {
            dev: metadata.dev(),
            ino: metadata.ino(),
            len: metadata.len(),
            nlink: metadata.nlink(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

impl Prepared {
    /// Steps 1 and 2 for the file at `path` inside the tree. `None`: it is not as `source` says any more.
    ///
    /// # Errors
    /// What the device reports; nothing is left then.
    pub fn new(store: &Store, path: &Path, source: &Metadata, stub: &Stub) -> io::Result<Option<Prepared>> {
        let name = Id::random()?;
        let original = beneath::hold(&store.tree(), path)?;
        if Fingerprint::of(&original.metadata()?) != Fingerprint::of(source) {
            return Ok(None);
        }
        let directory = beneath::metadata(&store.tree(), path.parent().unwrap_or(Path::new("")))?;
        let mut prepared = Prepared {
            stub: store.tmp().join(format!("stub-{name}")),
            placed: (0, 0),
            note: store.tmp().join(format!("{NOTE_PREFIX}{name}")),
            directory_times: Times::of(&directory),
            file: Fingerprint::of(source),
            keep_note: AtomicBool::new(false),
            io: store.io().clone(),
        };
        let file = prepared.io.create(&prepared.stub, CrashPoint::StubWritten)?;
        stub.write(&file)?;
        copy_attributes(&original, source, &file, CrashPoint::StubWritten)?;
        file.sync(CrashPoint::StubWritten)?;
        prepared.placed = place(&file.metadata()?);
        let note = StubNote { path: path.to_path_buf(), object: stub.object, times: prepared.directory_times };
        let file = prepared.io.create(&prepared.note, CrashPoint::NoteWritten)?;
        file.write_all_at(&note.encode(), 0, CrashPoint::NoteWritten)?;
        file.sync(CrashPoint::NoteWritten)?;
        prepared.io.sync_dir(&store.tmp(), CrashPoint::NoteWritten)?;
        Ok(Some(prepared))
    }

    /// Steps 3 and 4 for the file at `absolute`; the caller keeps everybody else away from it and its directory.
    /// `false`: the file or its directory was changed since [`Prepared::new`], and nothing was done.
    ///
    /// # Errors
    /// What the device reports.
    pub fn commit(&self, absolute: &Path) -> io::Result<bool> {
        let directory = durable::parent(absolute);
        if Fingerprint::of(&fs::symlink_metadata(absolute)?) != self.file
            || Times::of(&fs::metadata(directory)?).modified != self.directory_times.modified
        {
            return Ok(false);
        }
        if let Err(error) = self.io.device().rename(&self.stub, absolute, CrashPoint::StubInPlace) {
            // Perhaps it did it nevertheless: what is there must not be taken for what a program wrote.
            if !fs::symlink_metadata(absolute).is_ok_and(|found| place(&found) == self.placed) {
                return Err(error);
            }
            log::error!("{}: released, although the device says: {error}", absolute.display());
        }
        // From here on the file is released, whatever happens: an error would say that it is not.
        if let Err(error) = self.io.set_times(directory, self.directory_times, CrashPoint::DirectoryTimes) {
            log::error!("{}: its times cannot be put back now ({error}), but at the next mount", directory.display());
            self.keep_note.store(true, Ordering::Relaxed);
        }
        Ok(true)
    }
}

impl Prepared {
    /// Leaves the note for the next mount: that the directory has its times again could not be made durable.
    pub fn keep_note(&self) {
        self.keep_note.store(true, Ordering::Relaxed);
    }
}

impl Drop for Prepared {
    /// Whether or not it was committed, the note has served, if the directory has its times.
    fn drop(&mut self) {
        self.io.discard(&self.stub, CrashPoint::StubWritten);
        if !self.keep_note.load(Ordering::Relaxed) {
            self.io.discard(&self.note, CrashPoint::NoteRemoved);
        }
    }
}

fn place(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Extended attributes that speak of a file's bytes, and that nobody may set but the system: not of a file whose bytes are others.
const OF_BYTES: [&str; 3] = ["security.capability", "security.ima", "security.evm"];

/// Gives the file `to` owner and all other attributes of the file `from` (which may be held only), whose metadata are given: after
/// this it has no others.
///
/// # Errors
/// What the device reports. An attribute that this process may not set is an error: it must not be lost.
pub fn copy_attributes(from: &File, metadata: &Metadata, to: &DeviceFile, at: CrashPoint) -> io::Result<()> {
    copy_owner(metadata, to, at)?;
    copy_extended(from, to, at, &[])?;
    to.set(&Attribute::Mode(metadata.mode()), at)?;
    to.set(&Attribute::Times(Times::of(metadata)), at)
}

/// The same for a file whose bytes are new, and that has its own times.
///
/// # Errors
/// As of [`copy_attributes`].
pub fn copy_to_new_bytes(from: &File, metadata: &Metadata, to: &DeviceFile, at: CrashPoint) -> io::Result<()> {
    copy_owner(metadata, to, at)?;
    copy_extended(from, to, at, &OF_BYTES)?;
    to.set(&Attribute::Mode(metadata.mode()), at)
}

/// Gives the file `to` mode, extended attributes and times of the file `from`, whose metadata are given. Its owner is
/// another, to whom its set-user-id and set-group-id bits do not belong.
///
/// # Errors
/// As of [`copy_attributes`].
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
    // What it was recalled from, and that it is no stub, is said of one file only.
    let carried = |name: &OsString| name != RECALLED && name != PLAIN && !but.iter().any(|left_out| name == left_out);
    let names = |file: &Path| -> io::Result<Vec<OsString>> {
        match xattr::list_deref(file) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(Vec::new()),
            names => Ok(names?.filter(carried).collect()),
        }
    };
    let wanted = names(&from)?;
    for name in &wanted {
        // A label that the system gives to every file here is there already, and only the system may set it.
        if let Some(value) = xattr::get_deref(&from, name)?.filter(|value| !has(&given, name, value)) {
            to.set(&Attribute::Extended(name, &value), at)?;
        }
    }
    // Others are what the system says of any file here.
    let removable = |name: &&OsString| name.as_bytes().starts_with(b"user.") || *name == OF_BYTES[0];
    let gone = |name: &&OsString| removable(name) && !wanted.contains(name);
    names(&given)?.iter().filter(gone).try_for_each(|name| to.set(&Attribute::Without(name), at))
}

fn has(file: &Path, name: &OsStr, value: &[u8]) -> bool {
    xattr::get_deref(file, name).is_ok_and(|found| found.as_deref() == Some(value))
}

/// Carries out the notes that a crash left in `tmp/`.
pub(super) fn recover(store: &Store) -> io::Result<()> {
    for entry in fs::read_dir(store.tmp())? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        let named = entry.file_name().as_bytes().starts_with(NOTE_PREFIX.as_bytes());
        // Only what can be a note is read: a directory or a pipe of that name must not keep the store from opening.
        if !named || !metadata.is_file() || metadata.len() > MAX_NOTE_BYTES {
            continue;
        }
        // A damaged note was never durable, so the rename it prepares never happened.
        let Ok(note) = StubNote::decode(&store.io().read(&entry.path(), MAX_NOTE_BYTES)?) else {
            continue;
        };
        let (tree, above) = (store.tree(), note.path.parent().unwrap_or(Path::new("")));
        let file = match store.io().open_beneath(&tree, &note.path, 0) {
            Ok(file) => file,
            // Without the answer the note must not go.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => return Err(error),
            Err(_) => continue,
        };
        let stub = Stub::read_on(&file, store.id()).ok().flatten();
        let directory = beneath::reach(&tree, above)?;
        if stub.is_some_and(|stub| stub.object == note.object) && was_last_changed_by(&file, &directory)? {
            // Not where a link leads to.
            beneath::open_dir(&tree, above)?;
            store.io().set_times(&directory, note.times, CrashPoint::NoteCarriedOut)?;
            store.io().sync_dir(&directory, CrashPoint::NoteCarriedOut)?;
        }
    }
    Ok(())
}

/// Whether a directory's time is that of the rename by which the stub took its place. If it is later, somebody has changed
/// the directory since, and its time is theirs: the note was done with, and only that it went was not durable yet.
fn was_last_changed_by(stub: &DeviceFile, directory: &Path) -> io::Result<bool> {
    let ns = |(seconds, nanoseconds): (i64, i64)| i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
    // A rename stamps the file that it moves. In a copy of the store that time is later; nobody has changed it there either.
    Ok(ns(Times::of(&fs::metadata(directory)?).modified) <= ns(stub.changed()?) + ONE_RENAME_NS)
}

#[cfg(test)]
mod tests;
