//! What a store's tree has, and what the archive says of it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use super::view::Stamp;
use crate::store::{Hold, Id, Objects, REMOTE, Store, beneath, modified_ns};
use codec::hash::xxh3_64;

/// So often is the list of a tree made good while names move.
const LISTS: usize = 5;

/// The part of a mode that travels: nobody gets programs that run as another machine's user.
pub(super) const PERMISSIONS: u32 = 0o777;

/// The archive's view of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// It may still change, or is not durable yet.
    Unsettled,
    /// Durable, and the newest of its lineage or of an unknown one: its bytes are in the tree.
    Newest,
    /// Durable, and no object will be made of it: its bytes are in the tree.
    Whole,
    /// It cannot be read, or its bytes may not be durable, and nothing changes that by itself: `user.stepfs.why` says why.
    Stuck,
    /// A program waits until the remote has the bytes that are in the tree, durable or not.
    Awaited,
    /// An object holds its bytes.
    Object(Id),
}

/// The newest state of a lineage, encoded before it has a newer one.
#[derive(Debug)]
pub enum Ahead {
    /// As this object.
    Object(Hold),
    /// It is to travel whole: it is to stay exact, or nothing says how coarse it may be.
    Whole,
    /// The state before it must be archived first, or the file has changed: ask again.
    Later,
}

/// The archive, as the remote sees it. All paths are relative to the tree.
pub trait Local: Send + Sync {
    /// The store.
    fn store(&self) -> &Store;

    /// Its objects.
    fn objects(&self) -> &Arc<Objects>;

    /// What the archive knows of a regular file.
    fn shape(&self, path: &Path) -> Shape;

    /// Encodes the newest file of a lineage, which stays as it is.
    ///
    /// # Errors
    /// Device errors.
    fn ahead(&self, path: &Path) -> io::Result<Ahead>;

    /// Takes an object back that [`Local::ahead`] made. No file names it, so the archive looks whether it is needed.
    fn let_go(&self, made: Hold);

    /// Lets files go that were kept for too long; called each minute.
    fn tidy(&self) {}

    /// Grows with every change of a file or its name.
    fn changes(&self) -> u64;

    /// How many moves of names have ended.
    fn moves(&self) -> u64 {
        0
    }

    /// The new names since `moves` moves had ended. `None` if one is under way, or if they are too many.
    fn moved_since(&self, _moves: u64) -> Option<Vec<PathBuf>> {
        Some(Vec::new())
    }

    /// True if a program looked for a name since the last call.
    fn was_looked_at(&self) -> bool;

    /// Runs `make`, which makes a file appear at `path` and answers whether it did, while no program can use the name. An
    /// object holds its bytes, or it is whole.
    ///
    /// # Errors
    /// Those of `make`.
    fn appear(&self, path: &Path, object: Option<Id>, make: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<bool>;

    /// Runs `commit`, which replaces the file at `path` and answers whether it did, while nobody can open it. False if
    /// it is no longer that file, or somebody has it open.
    ///
    /// # Errors
    /// Those of `commit`.
    fn replace(
        &self,
        path: &Path,
        expect: &Metadata,
        object: Option<Id>,
        commit: &mut dyn FnMut(&Path) -> io::Result<bool>,
    ) -> io::Result<bool>;

    /// Removes a name if `still` agrees while nobody can open or change the file. False if it is no longer that file,
    /// or somebody is about to write to it.
    ///
    /// # Errors
    /// Device errors, or those of `still`.
    fn remove(&self, path: &Path, expect: &Metadata, still: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<bool>;

    /// Removes a directory if it is empty, and answers whether it did.
    ///
    /// # Errors
    /// Device errors.
    fn remove_directory(&self, path: &Path) -> io::Result<bool>;
}

/// The mark of a file that shows a name of the remote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// The change that it shows.
    pub(super) stamp: Stamp,
    /// Inode number of the file.
    pub(super) inode: u64,
    /// Modification time of the file.
    pub(super) modified_ns: i64,
    /// Tells the name ([`Mark::name`]): a program may have moved the file to another one.
    pub(super) name: u64,
    /// The permissions and the owner that it got here. A program may have changed them since.
    pub(super) got: (u32, u32, u32),
    /// Its owner on the remote: a daemon without root cannot give it to the file.
    pub(super) owner: (u32, u32),
}

impl Mark {
    /// What tells a name from others.
    pub(super) fn name(path: &Path) -> u64 {
        xxh3_64(path.as_os_str().as_bytes())
    }

    /// The value of the extended attribute.
    pub(super) fn text(&self) -> String {
        let Mark { stamp, inode, modified_ns, name, got, owner } = self;
        let (mode, uid, gid) = got;
        format!("{} {} {inode} {modified_ns} {name} {mode} {uid} {gid} {} {}", stamp.time, stamp.node, owner.0, owner.1)
    }

    pub(super) fn parse(value: &[u8]) -> Option<Mark> {
        let mut words = std::str::from_utf8(value).ok()?.split(' ');
        let time = words.next()?.parse().ok()?;
        let node = words.next()?.to_string();
        let (inode, modified_ns) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let name = words.next()?.parse().ok()?;
        let mut number = || words.next()?.parse::<u32>().ok();
        let got = (number()?, number()?, number()?);
        let owner = (number()?, number()?);
        Some(Mark { stamp: Stamp { time, node }, inode, modified_ns, name, got, owner })
    }
}

/// The permissions and the owner of a file.
pub(super) fn access(metadata: &Metadata) -> (u32, u32, u32) {
    (metadata.mode() & PERMISSIONS, metadata.uid(), metadata.gid())
}

/// A file or symbolic link of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) shape: Shape,
    pub(super) inode: u64,
    pub(super) identity: u64,
    pub(super) len: u64,
    pub(super) mode: u32,
    /// Its owner. What the remote says, if nobody has changed it here.
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) modified_ns: i64,
    /// Target of a symbolic link.
    pub(super) link: Option<Vec<u8>>,
    /// The change of this name that it shows, if nobody has written to it since.
    pub(super) foreign: Option<Stamp>,
    /// It has the bytes of a name of the remote, this or another one, and nobody has written to it since.
    pub(super) came: bool,
    /// It has, but a program has changed its permissions or its owner.
    pub(super) is_access_changed: bool,
}

impl Found {
    /// True if a name still has the file that was found.
    pub(super) fn is(&self, now: &Metadata) -> bool {
        let is_link = now.file_type().is_symlink();
        let same_kind = is_link == self.link.is_some();
        same_kind
            && (now.ino(), modified_ns(now)) == (self.inode, self.modified_ns)
            && (is_link || now.len() == self.len)
    }
}

/// The names of a tree.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Its regular files and symbolic links.
    pub(super) files: BTreeMap<PathBuf, Found>,
    /// Directories that this user may not list, each with the reason. What is in them is unknown.
    pub(super) unlisted: BTreeMap<PathBuf, String>,
}

impl Listing {
    /// True if a directory above `path` could not be listed: the file may be there.
    pub(super) fn hides(&self, path: &Path) -> bool {
        !self.unlisted.is_empty() && path.ancestors().skip(1).any(|above| self.unlisted.contains_key(above))
    }
}

/// Tells a file from all others of its store, under whatever name. A later file may get the inode number of a removed one, and
/// its length and time from an archive, but not its birth time. Of the hash, 40 bits do: they count beside length and time.
pub(super) fn identity(metadata: &Metadata) -> u64 {
    let born = metadata.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    let both = [metadata.ino().to_le_bytes(), (born.as_nanos() as u64).to_le_bytes()];
    xxh3_64(both.as_flattened()) >> 24
}

/// All regular files and symbolic links of the tree. A name that moves meanwhile may be missing.
///
/// # Errors
/// A directory cannot be read, or the tree itself is gone: then nothing was removed from it.
pub(super) fn walk(local: &dyn Local) -> io::Result<Listing> {
    let mut listing = Listing::default();
    walk_below(local, PathBuf::new(), &mut listing)?;
    Ok(listing)
}

/// Lists the tree, and after that what moved meanwhile: it may be in no part of the list. False if something moves all the time.
///
/// # Errors
/// As of [`walk`].
pub(super) fn walk_still(local: &dyn Local) -> io::Result<(Listing, bool)> {
    let mut moves = local.moves();
    let mut listing = walk(local)?;
    for _ in 0..LISTS {
        let now = local.moves();
        match local.moved_since(moves) {
            Some(moved) if moved.is_empty() => return Ok((listing, true)),
            Some(moved) => {
                for path in moved {
                    let is_directory =
                        fs::symlink_metadata(local.store().tree().join(&path)).is_ok_and(|of| of.is_dir());
                    let above = path.parent().unwrap_or(Path::new("")).to_path_buf();
                    walk_below(local, if is_directory { path } else { above }, &mut listing)?;
                }
            }
            None => listing = walk(local)?,
        }
        moves = now;
    }
    Ok((listing, false))
}

/// Adds what is in and below a directory.
fn walk_below(local: &dyn Local, directory: PathBuf, listing: &mut Listing) -> io::Result<()> {
    let (tree, mut rest) = (local.store().tree(), vec![directory]);
    while let Some(directory) = rest.pop() {
        match list(local, &tree, &directory, &mut listing.files) {
            Ok(below) => rest.extend(below),
            Err(error) if directory.as_os_str().is_empty() => return Err(error),
            // It went, or a program put something else in its place.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                listing.unlisted.insert(directory, error.to_string());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Adds the files and links of one directory to `found`. Returns the directories in it.
fn list(
    local: &dyn Local,
    tree: &Path,
    directory: &Path,
    found: &mut BTreeMap<PathBuf, Found>,
) -> io::Result<Vec<PathBuf>> {
    let (opened, mut below) = (beneath::open_dir(tree, directory)?, Vec::new());
    for entry in fs::read_dir(beneath::by_descriptor(&opened))? {
        let entry = entry?;
        let path = directory.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            below.push(path);
            continue;
        }
        let of = match look(local, &entry.path(), &path) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) => continue,
            of => of?,
        };
        found.extend(of.map(|of| (path, of)));
    }
    Ok(below)
}

/// What is at `path`, which `reached` leads to; `None` for other kinds of files.
fn look(local: &dyn Local, reached: &Path, path: &Path) -> io::Result<Option<Found>> {
    let metadata = fs::symlink_metadata(reached)?;
    let is_link = metadata.file_type().is_symlink();
    if !is_link && !metadata.is_file() {
        return Ok(None);
    }
    let link = if is_link { Some(fs::read_link(reached)?.as_os_str().as_bytes().to_vec()) } else { None };
    let of = (metadata.ino(), modified_ns(&metadata));
    let mark = mark(reached).filter(|mark| (mark.inode, mark.modified_ns) == of);
    let owner = (metadata.uid(), metadata.gid());
    let given = mark.as_ref().filter(|mark| owner == (mark.got.1, mark.got.2)).map(|mark| mark.owner);
    let (uid, gid) = given.unwrap_or(owner);
    Ok(Some(Found {
        shape: if is_link { Shape::Whole } else { local.shape(path) },
        inode: metadata.ino(),
        identity: identity(&metadata),
        len: if is_link { 0 } else { metadata.len() },
        mode: if is_link { 0o777 } else { metadata.mode() & 0o7777 },
        uid,
        gid,
        modified_ns: of.1,
        link,
        came: mark.is_some(),
        is_access_changed: mark.as_ref().is_some_and(|mark| mark.got != access(&metadata)),
        foreign: mark.filter(|mark| mark.name == Mark::name(path)).map(|mark| mark.stamp),
    }))
}

/// The mark of a file. A symbolic link cannot have one.
fn mark(reached: &Path) -> Option<Mark> {
    xattr::get(reached, OsStr::new(REMOTE)).ok().flatten().and_then(|value| Mark::parse(&value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written() {
        let mark = Mark {
            stamp: Stamp { time: 7, node: "a-b".into() },
            inode: 5,
            modified_ns: -3,
            name: 9,
            got: (1, 2, 3),
            owner: (4, 5),
        };
        assert_eq!(Mark::parse(mark.text().as_bytes()), Some(mark));
        assert_eq!(Mark::parse(b"7 a 5 -3 9 1 2 3 4"), None);
    }
}
