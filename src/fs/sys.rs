//! The system calls that take more than a line. Paths are absolute; none of these follows a symbolic link in the last
//! component unless the place says so.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// Chooses the signal of a lease (fcntl.h); the libc crate has no name for it.
const F_SETSIG: libc::c_int = 10;

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether any program has the file open or mapped for writing; `file` is open for reading only. Takes a read lease,
/// which a writer makes the kernel refuse, and gives it back.
///
/// The file's owner may take one, and so may CAP_LEASE, which containers usually lack. So root takes it as the owner.
pub(super) fn has_writer(file: &File) -> io::Result<bool> {
    match lease(file) {
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => {
            // SAFETY: only this thread's user for access to files changes, and changes back before anything else runs.
            let before = unsafe { libc::setfsuid(file.metadata()?.uid()) };
            let found = lease(file);
            // SAFETY: as above.
            unsafe { libc::setfsuid(before as libc::uid_t) };
            found
        }
        found => found,
    }
}

fn lease(file: &File) -> io::Result<bool> {
    let fcntl = |command, argument: libc::c_int| {
        // SAFETY: no memory is passed; the descriptor is open for as long as `file` is borrowed.
        check(unsafe { libc::fcntl(file.as_raw_fd(), command, argument) })
    };
    // If a program opens the file for writing at this very moment, the signal must be one that is ignored by default.
    // SIGIO would end the process.
    fcntl(F_SETSIG, libc::SIGURG)?;
    match fcntl(libc::F_SETLEASE, libc::F_RDLCK) {
        Ok(()) => fcntl(libc::F_SETLEASE, libc::F_UNLCK).map(|()| false),
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(true),
        Err(error) => Err(error),
    }
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
