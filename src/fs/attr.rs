//! Attributes as stat shows them, and as chmod, chown, utimens and truncate change them.

use std::fs::{Metadata, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileHandle, FileType, Generation, INodeNo, ReplyAttr, TimeOrNow};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};

use super::Core;
use super::errno::Result;
use super::inodes::{Table, kind};
use super::privileges::{drop_privileges, has_privileges};
use super::transition::{RecallGoal, Step};

/// How long the kernel may cache a name or attributes. Every change passes through the kernel or is announced to it,
/// with one exception: times and blocks change while a file is written through a mapping. Then the kernel asks each
/// time.
pub(super) const TTL: Duration = Duration::from_secs(1);

/// Unit of `st_blocks`.
const BLOCK: u64 = 512;

fn time(seconds: i64, nanoseconds: i64) -> SystemTime {
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let base = if seconds >= 0 { UNIX_EPOCH.checked_add(whole) } else { UNIX_EPOCH.checked_sub(whole) };
    let part = Duration::from_nanos(nanoseconds.unsigned_abs());
    base.and_then(|base| base.checked_add(part)).unwrap_or(UNIX_EPOCH)
}

/// The time as the kernel sent it, restored from `fuser`'s value.
///
/// Before 1970 `fuser` turns (-seconds, nanoseconds) into 1970 - seconds - nanoseconds: the nanoseconds have the
/// wrong sign.
fn requested(time: TimeOrNow) -> Timespec {
    let (tv_sec, tv_nsec) = match time {
        TimeOrNow::Now => (0, UTIME_NOW),
        TimeOrNow::SpecificTime(time) => match time.duration_since(UNIX_EPOCH) {
            Ok(after) => (i64::try_from(after.as_secs()).unwrap_or(i64::MAX), after.subsec_nanos().into()),
            Err(before) => {
                let before = before.duration();
                (0i64.checked_sub_unsigned(before.as_secs()).unwrap_or(i64::MIN), before.subsec_nanos().into())
            }
        },
    };
    Timespec { tv_sec, tv_nsec }
}

/// Attributes of an inode; `stored_bytes` are those of a released file's object.
pub(super) fn attributes(ino: u64, metadata: &Metadata, stored_bytes: u64) -> FileAttr {
    FileAttr {
        ino: INodeNo(ino),
        size: metadata.len(),
        blocks: metadata.blocks() + stored_bytes.div_ceil(BLOCK),
        atime: time(metadata.atime(), metadata.atime_nsec()),
        mtime: time(metadata.mtime(), metadata.mtime_nsec()),
        ctime: time(metadata.ctime(), metadata.ctime_nsec()),
        crtime: UNIX_EPOCH,
        kind: kind(metadata.file_type()),
        perm: (metadata.mode() & 0o7777) as u16,
        nlink: u32::try_from(metadata.nlink()).unwrap_or(u32::MAX),
        uid: metadata.uid(),
        gid: metadata.gid(),
        rdev: device(metadata.rdev()),
        blksize: u32::try_from(metadata.blksize()).unwrap_or(4096),
        flags: 0,
    }
}

/// A device number as the protocol has it: minor in bits 0-7 and 20-31, major in bits 8-19.
fn device(rdev: u64) -> u32 {
    let (major, minor) = (libc::major(rdev), libc::minor(rdev));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// The inverse of [`device`], for mknod.
pub(super) fn device_number(rdev: u32) -> u64 {
    libc::makedev((rdev & 0xfff00) >> 8, (rdev & 0xff) | ((rdev >> 12) & 0xfff00))
}

/// The content of a SETATTR request.
#[derive(Clone, Copy, Default)]
pub(super) struct Change {
    pub(super) mode: Option<u32>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) size: Option<u64>,
    pub(super) atime: Option<TimeOrNow>,
    pub(super) mtime: Option<TimeOrNow>,
    pub(super) fh: Option<FileHandle>,
}

impl Change {
    fn is_empty(&self) -> bool {
        let Self { mode, uid, gid, size, atime, mtime, fh: _ } = self;
        mode.or(*uid).or(*gid).is_none() && size.is_none() && atime.or(*mtime).is_none()
    }
}

/// Attributes and generation of a node for the kernel, and how long it may cache them.
pub(super) type Attributes = (Duration, FileAttr, Generation);

impl Core {
    /// Attributes of a node whose file's metadata are at hand.
    pub(super) fn shown(&self, table: &Table, ino: u64, metadata: &Metadata) -> Attributes {
        let Ok(node) = table.node(ino) else {
            return (Duration::ZERO, attributes(ino, metadata, 0), Generation(0));
        };
        let stored = node.stub.as_ref().map_or(0, |stub| self.archive.stored_bytes(stub));
        // While somebody may write through a mapping, the kernel has to ask again: with passthrough it does not see
        // that. All other writes it sees, but not which bits they will take away.
        let privileged = node.kind == FileType::RegularFile && has_privileges(metadata.mode());
        let ttl = if node.may_be_mapped() || privileged { Duration::ZERO } else { TTL };
        (ttl, attributes(ino, metadata, stored), node.generation)
    }

    pub(super) fn getattr(&self, ino: u64) -> Result<Attributes> {
        let table = self.table();
        let metadata = table.place(ino)?.metadata()?;
        Ok(self.shown(&table, ino, &metadata))
    }

    /// Answers a SETATTR, at once or from a worker.
    pub(super) fn setattr(self: &Arc<Self>, ino: u64, uid: u32, change: Change, reply: ReplyAttr) {
        let resized = match change.size {
            Some(size) => self.truncate(ino, uid, size, change.fh),
            None => Ok(Step::Done(())),
        };
        let result = match resized {
            Ok(Step::Done(())) => self.change(ino, &change),
            Ok(Step::First(wanted)) => {
                let core = Arc::clone(self);
                self.make(ino, wanted, move |made| match made {
                    Ok(_) => core.setattr(ino, uid, change, reply),
                    Err(fault) => reply.error(fault.into()),
                });
                return;
            }
            Err(fault) => Err(fault),
        };
        match result {
            Ok((ttl, attributes, _)) => reply.attr(&ttl, &attributes),
            Err(fault) => reply.error(fault.into()),
        }
    }

    /// Everything but the size.
    fn change(&self, ino: u64, change: &Change) -> Result<Attributes> {
        let table = self.table();
        if table.node(ino)?.superseded {
            return Err(libc::ESTALE.into());
        }
        let place = table.place(ino)?;
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
            std::fs::set_permissions(&place.path, Permissions::from_mode(mode & 0o7777))?;
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

    /// Sets the length of a resident file.
    fn truncate(&self, ino: u64, uid: u32, size: u64, fh: Option<FileHandle>) -> Result<Step<()>> {
        let mut table = self.table();
        let node = table.node(ino)?;
        if node.kind != FileType::RegularFile {
            return Err(if node.kind == FileType::Directory { libc::EISDIR } else { libc::EINVAL }.into());
        }
        if node.unread && node.opened.is_none() {
            let file = table.place(ino)?.open(true, false)?;
            self.find_out(&mut table, ino, &file)?;
        }
        let node = table.node(ino)?;
        if node.stub.is_some() || node.waiting.is_some() {
            return Ok(Step::First(if size == 0 { RecallGoal::Empty } else { RecallGoal::Bytes }));
        }
        if node.superseded && fh.is_none() {
            return Err(libc::ESTALE.into());
        }
        let paths = table.paths(ino);
        let place = table.place(ino)?;
        let file = fh.and_then(|fh| self.handle(fh).ok()).and_then(|handle| handle.file());
        let file = match file {
            Some(file) => file,
            None => Arc::new(place.open(false, true)?),
        };
        drop_privileges(&place, uid)?;
        for path in &paths {
            self.archive.opened_for_writing(path);
        }
        let node = table.node_mut(ino)?;
        node.version += 1;
        if let Some(opened) = &mut node.opened {
            opened.wrote = true;
            // Open handles keep the file resident, so the lock is not needed while blocks are freed.
            drop(table);
            file.set_len(size)?;
            return Ok(Step::Done(()));
        }
        let done = file.set_len(size);
        // With a mapping left, the file is sealed at the mapping's end.
        for path in paths.iter().filter(|_| !node.mapped) {
            self.archive.written(path, size);
        }
        done?;
        Ok(Step::Done(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_survive() {
        for (major, minor) in [(0, 0), (8, 1), (259, 7), (0xfff, 0xfffff)] {
            let rdev = libc::makedev(major, minor);
            assert_eq!(device_number(device(rdev)), rdev);
        }
    }

    #[test]
    fn times_before_1970_survive_fuser() {
        // As fuser makes it of -3 s + 0.25 s.
        let wrong = UNIX_EPOCH - Duration::new(3, 250_000_000);
        assert_eq!(requested(TimeOrNow::SpecificTime(wrong)), Timespec { tv_sec: -3, tv_nsec: 250_000_000 });
        assert_eq!(time(-3, 250_000_000), UNIX_EPOCH - Duration::new(2, 750_000_000));
        // No panic at the ends.
        let _ = (time(i64::MIN, 0), time(i64::MAX, 999_999_999));
    }
}
