//! The tree that the mount shows: names and attributes, without open files.
//!
//! Each operation on names runs under the table's lock from its first check to its last change, so there are no races.
//! The archive hears of a change before the lock is released.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use fuser::{FileAttr, FileType, Generation, RenameFlags, Request, TimeOrNow};
use rustix::fs::{AtFlags, CWD, Mode, Timespec, Timestamps, UTIME_OMIT};

use super::attr::{Attributes, CALL, Change, TTL, attributes, changed, device_number, requested, time};
use super::errno::{Fault, Result};
use super::inodes::{Found, Table};
use super::notify::Invalidations;
use super::privileges::{Caller, has_privileges};
use super::shared::{lock_name, lock_node};
use super::sys;
use crate::archive::{Archive, FileId};
use crate::store::beneath;
use crate::store::durable::{CrashPoint, Io};
use crate::store::fence::leads_to;
use crate::sync::{AtomicU64, Mutex, MutexGuard};

/// The creator of something new, and its permissions.
#[derive(Clone, Copy)]
pub(super) struct Creator {
    caller: Caller,
    /// Type and permission bits; the kernel has applied the umask.
    mode: u32,
}

impl Creator {
    pub(super) fn new(request: &Request, mode: u32) -> Self {
        Self { caller: Caller::of(request), mode }
    }

    /// The creator of a file that is open for writing, or not.
    pub(super) fn of_a_file(self, writes: bool) -> Self {
        let mode = match writes {
            true => self.caller.leaves(self.permissions(), self.caller.gid),
            false => self.permissions(),
        };
        Self { mode: mode | libc::S_IFREG, ..self }
    }

    /// The thread that creates it.
    pub(super) fn thread(self) -> u32 {
        self.caller.thread
    }

    fn permissions(self) -> u32 {
        self.mode & 0o7777
    }

    /// The same for a file made by a daemon of this user. A daemon that is not root cannot give it away, so other
    /// users must not be able to make programs that run as the daemon's user.
    fn granted(self, daemon: u32) -> u32 {
        let own = daemon == 0 || self.caller.uid == daemon;
        if own { self.permissions() } else { self.permissions() & !(libc::S_ISUID | libc::S_ISGID) }
    }
}

/// Creates a regular file, open to read and write, and answers its number.
pub(super) fn created(path: &Path, mode: u32) -> io::Result<(File, FileId)> {
    let file = File::options().read(true).write(true).create_new(true).mode(mode).open(path)?;
    let number = FileId::of(&file.metadata()?);
    Ok((file, number))
}

/// The files and directories that the kernel knows.
pub(super) struct Tree {
    archive: Arc<Archive>,
    /// The inode table. `inodes` says who takes it.
    table: Mutex<Table>,
    /// What the kernel has to forget.
    pub(super) invalidations: Arc<Invalidations>,
    /// The next handle number, also for other unique numbers.
    next: AtomicU64,
    /// The daemon's user. As root the daemon gives new files to their creator.
    pub(super) user: u32,
    /// How long the kernel may keep a name, and mostly attributes, too.
    pub(super) ttl: Duration,
}

impl Tree {
    pub(super) fn new(archive: Arc<Archive>) -> io::Result<Self> {
        let is_shared = archive.store().is_shared();
        let table = Mutex::new(Table::new(&archive.store().tree(), is_shared)?);
        let (next, user) = (AtomicU64::new(1), rustix::process::geteuid().as_raw());
        // Nobody tells of the changes that other daemons make.
        let ttl = if is_shared { Duration::ZERO } else { TTL };
        Ok(Self { archive, table, invalidations: Arc::default(), next, user, ttl })
    }

    pub(super) fn archive(&self) -> &Arc<Archive> {
        &self.archive
    }

    /// The store's durable I/O.
    pub(super) fn io(&self) -> &Io {
        self.archive.store().io()
    }

    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number that nothing else has.
    pub(super) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether a user may see and do what concerns the whole store.
    pub(super) fn is_owner(&self, uid: u32) -> bool {
        [0, self.user].contains(&uid)
    }

    /// Attributes of a node whose file's metadata are at hand.
    pub(super) fn shown(&self, table: &Table, ino: u64, metadata: &Metadata) -> Attributes {
        let Ok(node) = table.node(ino) else {
            return (Duration::ZERO, attributes(ino, metadata, 0), Generation(0));
        };
        let stored = node.stub.as_ref().map_or(0, |stub| self.archive.stored_bytes(stub));
        // While somebody may write through a mapping, the kernel has to ask again: with passthrough it does not see
        // that. All other writes it sees, but not which bits they will take away.
        let privileged = node.kind == FileType::RegularFile && has_privileges(metadata.mode());
        let ttl = if table.is_shared() { CALL } else { self.ttl };
        let ttl = if node.may_be_mapped() || privileged { Duration::ZERO } else { ttl };
        let (seconds, nanoseconds) = node.shown_ctime(changed(metadata));
        let shown = FileAttr { ctime: time(seconds, nanoseconds), ..attributes(ino, metadata, stored) };
        (ttl, shown, node.generation)
    }

    pub(super) fn getattr(&self, ino: u64) -> Result<Attributes> {
        let table = self.table();
        let metadata = table.metadata(ino)?;
        Ok(self.shown(&table, ino, &metadata))
    }

    /// Everything but the size.
    pub(super) fn change(&self, ino: u64, change: &Change) -> Result<Attributes> {
        let table = self.table();
        let place = table.place(ino)?;
        let _locked = lock_node(self.archive.store(), &table, ino)?;
        if change.uid.is_some() || change.gid.is_some() || change.is_empty() {
            // Before the mode, because a change of owner may take bits from it. A chown without ids takes such bits
            // too: it comes from a user, or from the kernel before another user's write.
            if place.follow() {
                std::os::unix::fs::chown(&place.path, change.uid, change.gid)?;
            } else {
                std::os::unix::fs::lchown(&place.path, change.uid, change.gid)?;
            }
        }
        if let Some(mode) = change.mode {
            if table.node(ino)?.kind == FileType::Symlink {
                // chmod would follow the link, out of the tree.
                return Err(libc::EOPNOTSUPP.into());
            }
            fs::set_permissions(&place.path, Permissions::from_mode(mode & 0o7777))?;
        }
        if change.atime.is_some() || change.mtime.is_some() {
            const KEEP: Timespec = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
            let time = |wanted: Option<TimeOrNow>| wanted.map_or(KEEP, requested);
            let times = Timestamps { last_access: time(change.atime), last_modification: time(change.mtime) };
            let flags = if place.follow() { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
            rustix::fs::utimensat(CWD, &*place.path, &times, flags)?;
        }
        if change.mtime.is_some() && table.node(ino)?.kind == FileType::RegularFile {
            table.paths(ino).iter().for_each(|path| self.archive.time_set(path));
        }
        table.paths(ino).iter().for_each(|path| self.archive.touched(path));
        let metadata = place.metadata()?;
        Ok(self.shown(&table, ino, &metadata))
    }

    /// Finds out whether a file is released that could not be read when it was looked up. `file`: it, open for reading.
    pub(super) fn find_out(&self, table: &mut Table, ino: u64, file: &File) -> Result<bool> {
        let node = table.node(ino)?;
        if node.unread && node.opened.is_none() {
            let stub = self.archive.stub(&table.path(ino).unwrap_or_default(), file)?;
            let node = table.node_mut(ino)?;
            (node.unread, node.stub) = (false, stub);
            return Ok(node.stub.is_some());
        }
        Ok(false)
    }

    /// Makes a node's file in the store durable.
    pub(super) fn sync_node(&self, ino: u64, at: CrashPoint) -> Result<()> {
        let (held, kind) = {
            let table = self.table();
            (table.place(ino)?.hold()?, table.node(ino)?.kind)
        };
        let own = beneath::by_descriptor(&held);
        let synced = match kind {
            FileType::Directory => self.io().sync_dir(&own, at),
            _ => self.io().open(&own).and_then(|file| file.sync(at)),
        };
        match synced {
            // The daemon's user owns the file but may not read it. A sync of the whole file system covers it.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Ok(self.io().device().sync_all(&self.archive.store().tree(), at)?)
            }
            synced => Ok(synced?),
        }
    }

    pub(super) fn lookup(&self, parent: u64, name: &OsStr) -> Result<Attributes> {
        let mut table = self.table();
        let found = table.look(parent, name)?;
        self.entry(&mut table, parent, name, &found)
    }

    /// Answers with a node and counts that the kernel knows it once more.
    pub(super) fn entry(&self, table: &mut Table, parent: u64, name: &OsStr, found: &Found) -> Result<Attributes> {
        let ino = table.admit(&self.archive, parent, name, found)?;
        table.count(ino);
        Ok(self.shown(table, ino, &found.metadata))
    }

    /// Gives something new to its creator. Only a daemon that is root can, and only it has to.
    /// Mostly nothing is left to do, and each change would wait for the file system's journal.
    fn hand_over(&self, new: &File, parent: &Metadata, creator: Creator, mode: Option<u32>) -> io::Result<()> {
        let (made, own) = (new.metadata()?, beneath::by_descriptor(new));
        // In a setgid directory the group is the directory's.
        let gid = if parent.mode() & libc::S_ISGID != 0 { made.gid() } else { creator.caller.gid };
        let gives = self.user == 0 && (made.uid(), made.gid()) != (creator.caller.uid, gid);
        if gives {
            std::os::unix::fs::chown(&own, Some(creator.caller.uid), Some(gid))?;
        }
        // After the change of owner, which takes bits away; and whatever our own umask is.
        let mode = mode.filter(|mode| gives || made.mode() & 0o7777 != *mode);
        mode.map_or(Ok(()), |mode| fs::set_permissions(&own, Permissions::from_mode(mode)))
    }

    /// Opens a new file or directory at its path, only to refer to it. In a shared store another daemon may have renamed or removed it since.
    /// Another user's file, or a link out of the tree, may have its name by then: nobody gets that. `file`: the number
    /// of a regular file.
    fn open_made(&self, is_shared: bool, path: &Path, kind: u32, file: Option<FileId>) -> Result<File> {
        let is_it = |new: &File| -> io::Result<bool> {
            let found = new.metadata()?;
            let is_empty = || fs::read_dir(beneath::by_descriptor(new)).is_ok_and(|mut below| below.next().is_none());
            Ok(match file {
                Some(file) => FileId::of(&found) == file,
                None => {
                    found.mode() & libc::S_IFMT == kind && found.uid() == self.user && (!found.is_dir() || is_empty())
                }
            })
        };
        match sys::open_path(path) {
            Ok(new) if !is_shared || is_it(&new)? => Ok(new),
            // The kernel looks the name up anew.
            Ok(_) => Err(libc::ESTALE.into()),
            Err(error) if is_shared && error.kind() == io::ErrorKind::NotFound => Err(libc::ESTALE.into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes something with `make`, which gets the path and the permission bits, and answers the number of a regular file. Hands it over
    /// and enters it; what cannot be handed over is removed again.
    pub(super) fn make_entry(
        &self,
        table: &mut Table,
        parent: u64,
        name: &OsStr,
        creator: Creator,
        make: &mut dyn FnMut(&Path, u32) -> io::Result<Option<FileId>>,
    ) -> Result<Attributes> {
        let path = table.at(parent, name)?;
        let directory = table.place(parent)?.metadata()?;
        // Nothing runs with more rights than its creator's before it is his.
        let file = make(&path, creator.permissions() & 0o777)?;
        let kind = creator.mode & libc::S_IFMT;
        let (is_dir, new) = (kind == libc::S_IFDIR, self.open_made(table.is_shared(), &path, kind, file)?);
        let mode = match kind {
            libc::S_IFLNK => None,
            // A directory in a setgid directory is setgid itself.
            libc::S_IFDIR => Some(creator.granted(self.user) | (directory.mode() & libc::S_ISGID)),
            _ => Some(creator.granted(self.user)),
        };
        match self.hand_over(&new, &directory, creator, mode) {
            Ok(()) => {
                let found = table.look(parent, name)?;
                self.entry(table, parent, name, &found)
            }
            Err(error) => {
                let _ = if is_dir { fs::remove_dir(&path) } else { fs::remove_file(&path) };
                Err(error.into())
            }
        }
    }

    pub(super) fn mknod(&self, parent: u64, name: &OsStr, creator: Creator, rdev: u32) -> Result<Attributes> {
        let mut table = self.table();
        let kind = match creator.mode & libc::S_IFMT {
            0 | libc::S_IFREG => libc::S_IFREG,
            kind @ (libc::S_IFIFO | libc::S_IFSOCK | libc::S_IFCHR | libc::S_IFBLK) => kind,
            _ => return Err(libc::EINVAL.into()),
        };
        self.make_entry(&mut table, parent, name, creator, &mut |path, mode| {
            if kind == libc::S_IFREG {
                return created(path, mode).map(|(_, file)| Some(file));
            }
            let (kind, mode) = (rustix::fs::FileType::from_raw_mode(kind), Mode::from_raw_mode(mode));
            rustix::fs::mknodat(CWD, path, kind, mode, device_number(rdev))?;
            Ok(None)
        })
        .inspect(|_| {
            // As if a program had created and closed it.
            let made = table.child(parent, name).unwrap_or_default();
            if kind == libc::S_IFREG {
                self.archive.opened_for_writing(&made);
                self.archive.written(&made, 0);
            }
        })
    }

    pub(super) fn mkdir(&self, parent: u64, name: &OsStr, creator: Creator) -> Result<Attributes> {
        let mut table = self.table();
        let creator = Creator { mode: creator.permissions() | libc::S_IFDIR, ..creator };
        self.make_entry(&mut table, parent, name, creator, &mut |path, mode| {
            fs::DirBuilder::new().mode(mode).create(path).map(|()| None)
        })
        .inspect(|_| self.archive.touched(&table.child(parent, name).unwrap_or_default()))
    }

    pub(super) fn symlink(&self, parent: u64, name: &OsStr, creator: Creator, target: &Path) -> Result<Attributes> {
        let mut table = self.table();
        let creator = Creator { mode: libc::S_IFLNK | 0o777, ..creator };
        let made = self.make_entry(&mut table, parent, name, creator, &mut |path, _| {
            std::os::unix::fs::symlink(target, path).map(|()| None)
        })?;
        self.archive.link_changed(&table.child(parent, name)?);
        Ok(made)
    }

    pub(super) fn readlink(&self, ino: u64) -> Result<PathBuf> {
        let table = self.table();
        let place = table.place(ino)?;
        if place.follow() {
            let target = rustix::fs::readlinkat(&*place.hold()?, "", Vec::new())?;
            return Ok(PathBuf::from(OsString::from_vec(target.into_bytes())));
        }
        Ok(fs::read_link(place.path)?)
    }

    /// `Locked`: in a shared store, a released file has to be recalled first. It has one name, since nobody could replace several
    /// at once.
    pub(super) fn link(&self, ino: u64, parent: u64, name: &OsStr) -> Result<Attributes> {
        let mut table = self.table();
        let to = table.child(parent, name)?;
        let reached = table.at(parent, name)?;
        let (is_shared, from) = (table.is_shared(), table.path(ino).unwrap_or_default());
        let node = table.node(ino)?;
        if is_shared && node.stub.is_some() {
            return Err(Fault::Locked);
        }
        let locked = lock_node(self.archive.store(), &table, ino)?;
        // By its name of now: Ceph takes that of the descriptor, which another daemon may have changed.
        let gone = Fault::Code(if is_shared { libc::ESTALE } else { libc::ENOENT });
        let (above, called) = node.names.first().ok_or(gone)?;
        if let Some(file) = &locked
            && !leads_to(table.engine(), &*table.directory(*above)?, called, file)?
        {
            return Err(libc::ESTALE.into());
        }
        fs::hard_link(table.at(*above, called)?, &reached)?;
        let found = table.look(parent, name)?;
        match found.metadata.is_symlink() {
            true => self.archive.link_changed(&to),
            false => self.archive.linked(&from, &to),
        }
        self.entry(&mut table, parent, name, &found)
    }

    pub(super) fn rmdir(&self, parent: u64, name: &OsStr) -> Result<()> {
        let mut table = self.table();
        let path = table.child(parent, name)?;
        let found = table.look(parent, name)?;
        if !found.metadata.is_dir() {
            return Err(libc::ENOTDIR.into());
        }
        let removed = self.take_away(&mut table, parent, &path, &found);
        match removed {
            // The kernel tells of a last close later than the program.
            Err(Fault::Os(error))
                if table.is_shared()
                    && error.raw_os_error() == Some(libc::ENOTEMPTY)
                    && self.archive.store().engine().has_only_removed(&table.at(parent, name)?) =>
            {
                Err(Fault::Locked)
            }
            removed => removed,
        }
    }

    /// Removes a name in a directory, whose metadata the caller has, and updates the table and the archive.
    pub(super) fn take_away(&self, table: &mut Table, parent: u64, path: &Path, found: &Found) -> Result<()> {
        let (metadata, name) = (&found.metadata, path.file_name().unwrap_or_default());
        // The table may not know the directory of a file that the archive removes.
        let reached = if table.is_shared() { table.at(parent, name)? } else { table.reach(path)? };
        let _locked = lock_name(self.archive.store(), table, (parent, name), found)?;
        let removal = table.before_removal(path, metadata);
        let device = self.io().device();
        match metadata.is_dir() {
            true => device.remove_dir(&reached, CrashPoint::NameRemoved)?,
            false => device.remove_file(&reached, CrashPoint::NameRemoved)?,
        }
        table.removed(parent, name, removal);
        if metadata.is_file() {
            self.archive.removed(path);
        } else if metadata.is_symlink() {
            self.archive.link_changed(path);
        } else {
            self.archive.touched(path);
        }
        Ok(())
    }

    pub(super) fn rename(&self, from: (u64, &OsStr), to: (u64, &OsStr), flags: RenameFlags) -> Result<()> {
        self.rename_in(&mut self.table(), from, to, flags)
    }

    /// The same for a caller that has the table.
    pub(super) fn rename_in(
        &self,
        table: &mut Table,
        from: (u64, &OsStr),
        to: (u64, &OsStr),
        flags: RenameFlags,
    ) -> Result<()> {
        let (source, target) = (table.child(from.0, from.1)?, table.child(to.0, to.1)?);
        let (old, new) = (table.at(from.0, from.1)?, table.at(to.0, to.1)?);
        let moved = table.look(from.0, from.1)?;
        let there = match table.look(to.0, to.1) {
            Ok(found) => Some(found),
            Err(fault) if fault.is_absence() => None,
            Err(fault) => return Err(fault),
        };
        let is_one = |there: &Found| FileId::of(&there.metadata) == FileId::of(&moved.metadata);
        let _moved = lock_name(self.archive.store(), table, from, &moved)?;
        let other = there.as_ref().filter(|there| !is_one(there));
        let _there = other.map(|there| lock_name(self.archive.store(), table, to, there)).transpose()?;
        if flags == RenameFlags::RENAME_EXCHANGE {
            let there = there.ok_or(Fault::Code(libc::ENOENT))?;
            return self.exchange(table, (from, &source, &moved), (to, &target, &there));
        }
        if !(flags - RenameFlags::RENAME_NOREPLACE).is_empty() {
            return Err(libc::EINVAL.into());
        }
        // Checked here rather than by the store's file system, which may not know how.
        if there.is_some() && !flags.is_empty() {
            return Err(libc::EEXIST.into());
        }
        if there.as_ref().is_some_and(is_one) {
            // Two links of one file: POSIX wants nothing to happen.
            return Ok(());
        }
        let ino = table.admit(&self.archive, from.0, from.1, &moved)?;
        let removal = there.as_ref().map(|there| table.before_removal(&target, &there.metadata));
        if table.is_shared() && flags.contains(RenameFlags::RENAME_NOREPLACE) {
            // Another daemon may make that name at this moment.
            rustix::fs::renameat_with(CWD, &*old, CWD, &*new, rustix::fs::RenameFlags::NOREPLACE)?;
        } else {
            self.io().device().rename(&old, &new, CrashPoint::NameRemoved)?;
        }
        if let Some(removal) = removal {
            table.removed(to.0, to.1, removal);
        }
        table.unbind(from.0, from.1);
        table.bind(to.0, to.1, ino);
        table.reap(ino);
        self.archive.renamed(&source, &target);
        Ok(())
    }

    fn exchange(
        &self,
        table: &mut Table,
        a: ((u64, &OsStr), &Path, &Found),
        b: ((u64, &OsStr), &Path, &Found),
    ) -> Result<()> {
        let first = table.admit(&self.archive, a.0.0, a.0.1, a.2)?;
        let second = table.admit(&self.archive, b.0.0, b.0.1, b.2)?;
        let (old, new) = (table.at(a.0.0, a.0.1)?, table.at(b.0.0, b.0.1)?);
        let exchange = rustix::fs::RenameFlags::EXCHANGE;
        rustix::fs::renameat_with(CWD, &*old, CWD, &*new, exchange).map_err(io::Error::from)?;
        table.unbind(a.0.0, a.0.1);
        table.unbind(b.0.0, b.0.1);
        table.bind(a.0.0, a.0.1, second);
        table.bind(b.0.0, b.0.1, first);
        table.reap(first);
        table.reap(second);
        self.archive.exchanged(a.1, b.1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Else a user whose directory it is gets other users' files, and a link leads to files outside.
    #[test]
    fn what_took_the_name_of_something_new_is_handed_over_to_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let (root, outside) = (dir.path().join("store"), dir.path().join("outside"));
        crate::store::Store::create_shared(&root).unwrap();
        let archive = Archive::open(crate::store::Store::open(&root).unwrap()).unwrap();
        let tree = Tree::new(archive).unwrap();
        fs::write(&outside, "x").unwrap();
        fs::set_permissions(&outside, Permissions::from_mode(0o600)).unwrap();
        let caller = Caller { uid: tree.user, gid: 7, thread: 1 };
        for kind in [libc::S_IFREG, libc::S_IFIFO, libc::S_IFDIR] {
            let (mut table, at) = (tree.table(), root.join("tree/new"));
            let made = tree.make_entry(
                &mut table,
                1,
                OsStr::new("new"),
                Creator { caller, mode: kind | 0o666 },
                &mut |path, mode| {
                    let file = (kind == libc::S_IFREG).then(|| created(path, mode).unwrap().1);
                    let _ = fs::rename(path, path.with_file_name("moved"));
                    std::os::unix::fs::symlink(&outside, path).map(|()| file)
                },
            );
            assert!(matches!(made, Err(Fault::Code(libc::ESTALE))), "{kind:o}");
            assert_eq!(outside.metadata().unwrap().mode() & 0o777, 0o600);
            fs::remove_file(&at).unwrap();
            let gone = tree.make_entry(
                &mut table,
                1,
                OsStr::new("new"),
                Creator { caller, mode: kind | 0o666 },
                &mut |_, _| Ok(None),
            );
            assert!(matches!(gone, Err(Fault::Code(libc::ESTALE))), "removed at once");
        }
    }

    #[test]
    fn nobody_makes_programs_that_run_as_the_daemons_user() {
        let caller = |uid| Caller { uid, gid: 7, thread: 1 };
        let granted = |uid, daemon| Creator { caller: caller(uid), mode: libc::S_IFREG | 0o6755 }.granted(daemon);
        assert_eq!(granted(1001, 1000), 0o755);
        assert_eq!(granted(0, 1000), 0o755);
        assert_eq!(granted(1000, 1000), 0o6755);
        // It becomes the creator's own.
        assert_eq!(granted(1001, 0), 0o6755);
    }
}
