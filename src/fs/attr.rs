//! Attributes as the protocol has them.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileHandle, Generation, INodeNo, TimeOrNow};
use rustix::fs::{Timespec, UTIME_NOW};

use super::inodes::kind;

/// How long the kernel may cache a name or attributes. Every change passes through the kernel or is announced to it,
/// with one exception: times and blocks change while a file is written through a mapping. Then the kernel asks each
/// time.
pub(super) const TTL: Duration = Duration::from_secs(1);
/// How long it may keep attributes in a shared store: until the end of the call whose look-up gave them. It checks permissions by
/// these, and would ask the server again for each directory on the way. The kernel counts in ticks of 1 to 10 ms, so this is one or two.
pub(super) const CALL: Duration = Duration::from_nanos(1);

/// Unit of `st_blocks`.
const BLOCK: u64 = 512;

pub(super) fn time(seconds: i64, nanoseconds: i64) -> SystemTime {
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let base = if seconds >= 0 { UNIX_EPOCH.checked_add(whole) } else { UNIX_EPOCH.checked_sub(whole) };
    let part = Duration::from_nanos(nanoseconds.unsigned_abs());
    base.and_then(|base| base.checked_add(part)).unwrap_or(UNIX_EPOCH)
}

/// The time as the kernel sent it, restored from `fuser`'s value.
///
/// Before 1970 `fuser` turns (-seconds, nanoseconds) into 1970 - seconds - nanoseconds: the nanoseconds have the
/// wrong sign.
pub(super) fn requested(time: TimeOrNow) -> Timespec {
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

/// The ctime of a file.
pub(super) fn changed(metadata: &Metadata) -> (i64, i64) {
    (metadata.ctime(), metadata.ctime_nsec())
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
    pub(super) fn is_empty(&self) -> bool {
        let Self { mode, uid, gid, size, atime, mtime, fh: _ } = self;
        mode.or(*uid).or(*gid).is_none() && size.is_none() && atime.or(*mtime).is_none()
    }
}

/// Attributes and generation of a node for the kernel, and how long it may cache them.
pub(super) type Attributes = (Duration, FileAttr, Generation);

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
