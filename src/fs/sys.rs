//! The system calls that take more than a line. Paths are absolute; none of these follows a symbolic link in the last
//! component unless the place says so.

use std::fs::File;
use std::io;
use std::os::fd::IntoRawFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// File systems that have nothing to report at close: they write later, and fsync reports what failed.
const SILENT_AT_CLOSE: [i64; 4] =
    [libc::EXT4_SUPER_MAGIC, libc::XFS_SUPER_MAGIC, libc::BTRFS_SUPER_MAGIC, libc::TMPFS_MAGIC];

/// Whether `close` may report an error of a file below this directory, as on network file systems.
pub(super) fn reports_at_close(directory: &Path) -> bool {
    !rustix::fs::statfs(directory).is_ok_and(|found| SILENT_AT_CLOSE.contains(&found.f_type))
}

/// What `close` reports; on network file systems that is where a failed write shows up.
pub(super) fn flush(file: &File) -> io::Result<()> {
    let copy = file.try_clone()?.into_raw_fd();
    // SAFETY: `copy` was made above and has no other owner.
    check(unsafe { libc::close(copy) })
}

/// Opens a file only to refer to it. No permission is needed, and only its metadata can be read.
pub(super) fn open_path(path: &Path) -> io::Result<File> {
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?.into())
}

/// The bit of CAP_SYS_ADMIN (linux/capability.h).
pub const SYS_ADMIN: u32 = 21;

/// Whether this process may mount by itself, and register files for passthrough. In a user namespace it may do the
/// former only.
pub fn is_admin() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).is_some_and(|bits| bits >> SYS_ADMIN & 1 == 1)
}

/// Whether privileges hold for the whole machine, not only for a user namespace.
pub fn everywhere() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().eq(["0", "0", "4294967295"])
}
