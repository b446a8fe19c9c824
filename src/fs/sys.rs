//! The few system calls that std has no name for, as safe functions. Paths are absolute; none of these follows a
//! symbolic link in the last component unless it says so.

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Longest value that an extended attribute may have (`XATTR_SIZE_MAX`), and longest list of names.
const XATTR_MAX: usize = 64 * 1024;

/// Longest handle of a file (`MAX_HANDLE_SZ`).
const HANDLE_MAX: usize = 128;

/// Chooses the signal of a lease (fcntl.h); the libc crate has no name for it.
const F_SETSIG: libc::c_int = 10;

fn c(path: &Path) -> io::Result<CString> {
    c_str(path.as_os_str())
}

fn c_str(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn check_len(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// A time for [`utimens`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Time {
    /// Leave it (`UTIME_OMIT`).
    Keep,
    /// The clock of the backing file system (`UTIME_NOW`).
    Now,
    /// Seconds since 1970 and nanoseconds.
    At(i64, u32),
}

impl Time {
    fn spec(self) -> libc::timespec {
        let (tv_sec, tv_nsec) = match self {
            Self::Keep => (0, libc::UTIME_OMIT),
            Self::Now => (0, libc::UTIME_NOW),
            Self::At(seconds, nanoseconds) => (seconds, i64::from(nanoseconds)),
        };
        libc::timespec { tv_sec, tv_nsec }
    }
}

/// Sets access and modification time; `follow` is for `/proc/self/fd` paths.
pub(super) fn utimens(path: &Path, follow: bool, atime: Time, mtime: Time) -> io::Result<()> {
    let path = c(path)?;
    let times = [atime.spec(), mtime.spec()];
    let flags = if follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
    // SAFETY: `path` ends with NUL and `times` is an array of two; both outlive the call.
    check(unsafe { libc::utimensat(libc::AT_FDCWD, path.as_ptr(), times.as_ptr(), flags) })
}

/// Creates a fifo, socket or device.
pub(super) fn mknod(path: &Path, mode: u32, rdev: u64) -> io::Result<()> {
    let path = c(path)?;
    // SAFETY: `path` ends with NUL and outlives the call.
    check(unsafe { libc::mknod(path.as_ptr(), mode, rdev) })
}

/// What the file system calls a file by, for as long as it is there. It gives the same bytes to no other file.
pub(super) fn handle(path: &Path) -> io::Result<Vec<u8>> {
    /// As the kernel has it, with room for all that it may say.
    #[repr(C)]
    struct Handle {
        bytes: libc::c_uint,
        kind: libc::c_int,
        data: [u8; HANDLE_MAX],
    }
    let path = c(path)?;
    let (mut handle, mut mount) = (Handle { bytes: HANDLE_MAX as u32, kind: 0, data: [0; HANDLE_MAX] }, 0);
    let at = (&raw mut handle).cast();
    // SAFETY: `path` ends with NUL; `handle` begins as a file_handle and has room for the bytes that it says it has.
    check(unsafe { libc::name_to_handle_at(libc::AT_FDCWD, path.as_ptr(), at, &raw mut mount, 0) })?;
    let mut name = handle.kind.to_le_bytes().to_vec();
    name.extend_from_slice(&handle.data[..(handle.bytes as usize).min(HANDLE_MAX)]);
    Ok(name)
}

/// Renames with `RENAME_*` flags.
pub(super) fn renameat2(from: &Path, to: &Path, flags: libc::c_uint) -> io::Result<()> {
    let (from, to) = (c(from)?, c(to)?);
    // SAFETY: both paths end with NUL and outlive the call.
    check(unsafe { libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags) })
}

/// Allocates or deallocates a range.
pub(super) fn fallocate(file: &File, mode: i32, offset: i64, length: i64) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as `file` is borrowed.
    check(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, length) })
}

/// Where the next data or hole is.
pub(super) fn lseek(file: &File, offset: i64, whence: i32) -> io::Result<i64> {
    // SAFETY: the descriptor is open for as long as `file` is borrowed.
    let found = unsafe { libc::lseek(file.as_raw_fd(), offset, whence) };
    if found < 0 { Err(io::Error::last_os_error()) } else { Ok(found) }
}

/// Copies within the kernel; may copy less than asked for.
pub(super) fn copy_file_range(from: &File, at: i64, to: &File, to_at: i64, len: usize) -> io::Result<usize> {
    let (mut at, mut to_at) = (at, to_at);
    // SAFETY: both descriptors are open while borrowed, both offsets are locals that outlive the call.
    check_len(unsafe { libc::copy_file_range(from.as_raw_fd(), &raw mut at, to.as_raw_fd(), &raw mut to_at, len, 0) })
}

/// Space and limits of the file system at `path`.
pub(super) fn statvfs(path: &Path) -> io::Result<libc::statvfs> {
    let path = c(path)?;
    let mut answer = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: `path` ends with NUL; `answer` is a writable statvfs.
    check(unsafe { libc::statvfs(path.as_ptr(), answer.as_mut_ptr()) })?;
    // SAFETY: zeroed is a valid statvfs (integers only), and the call filled it.
    Ok(unsafe { answer.assume_init() })
}

/// Magic number of the file system at `path` (`EXT4_SUPER_MAGIC`, ...).
pub(super) fn file_system_magic(path: &Path) -> io::Result<i64> {
    let path = c(path)?;
    let mut answer = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: `path` ends with NUL; `answer` is a writable statfs.
    check(unsafe { libc::statfs(path.as_ptr(), answer.as_mut_ptr()) })?;
    // SAFETY: zeroed is a valid statfs (integers only), and the call filled it.
    Ok(unsafe { answer.assume_init() }.f_type)
}

/// Whether anybody has the file open or mapped for writing; `file` is open for reading only. Takes a read lease, which
/// is refused then, and gives it back.
pub(super) fn has_writer(file: &File) -> io::Result<bool> {
    let fd = file.as_raw_fd();
    // Should somebody open it for writing in this very moment: a signal that is ignored by default, not SIGIO, which
    // ends the process.
    // SAFETY: the descriptor is open for as long as `file` is borrowed.
    check(unsafe { libc::fcntl(fd, F_SETSIG, libc::SIGURG) })?;
    // SAFETY: as above.
    match check(unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_RDLCK) }) {
        // SAFETY: as above.
        Ok(()) => check(unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) }).map(|()| false),
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(true),
        Err(error) => Err(error),
    }
}

/// A second descriptor for the file.
pub(super) fn dup(file: &File) -> io::Result<libc::c_int> {
    // SAFETY: the descriptor is open for as long as `file` is borrowed.
    let copy = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 0) };
    check(copy).map(|()| copy)
}

/// What `close` reports; on network file systems that is where a failed write shows up.
pub(super) fn flush(file: &File) -> io::Result<()> {
    let copy = dup(file)?;
    // SAFETY: `copy` was made above and nobody else has it.
    check(unsafe { libc::close(copy) })
}

/// Opens a file only to refer to it: no permission is needed and nothing but its metadata can be had.
pub(super) fn open_path(path: &Path) -> io::Result<File> {
    let path = c(path)?;
    let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: `path` ends with NUL and outlives the call.
    let fd = unsafe { libc::open(path.as_ptr(), flags) };
    check(fd)?;
    // SAFETY: `fd` was just opened and nobody else has it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Reads an extended attribute.
pub(super) fn getxattr(path: &Path, follow: bool, name: &OsStr) -> io::Result<Vec<u8>> {
    let (path, name) = (c(path)?, c_str(name)?);
    read_growing(|buf, len| {
        // SAFETY: both strings end with NUL; `buf` has room for `len` bytes (or is null with `len` 0).
        unsafe {
            if follow {
                libc::getxattr(path.as_ptr(), name.as_ptr(), buf.cast(), len)
            } else {
                libc::lgetxattr(path.as_ptr(), name.as_ptr(), buf.cast(), len)
            }
        }
    })
}

/// Names of the extended attributes, each ended by NUL.
pub(super) fn listxattr(path: &Path, follow: bool) -> io::Result<Vec<u8>> {
    let path = c(path)?;
    read_growing(|buf, len| {
        // SAFETY: `path` ends with NUL; `buf` has room for `len` bytes (or is null with `len` 0).
        unsafe {
            if follow {
                libc::listxattr(path.as_ptr(), buf.cast(), len)
            } else {
                libc::llistxattr(path.as_ptr(), buf.cast(), len)
            }
        }
    })
}

/// Asks for the size, then for the bytes, until they fit.
fn read_growing(call: impl Fn(*mut u8, usize) -> libc::ssize_t) -> io::Result<Vec<u8>> {
    loop {
        let size = check_len(call(std::ptr::null_mut(), 0))?.min(XATTR_MAX);
        let mut value = vec![0; size];
        if size == 0 {
            return Ok(value);
        }
        match check_len(call(value.as_mut_ptr(), size)) {
            Ok(len) => {
                value.truncate(len);
                return Ok(value);
            }
            // It grew in between.
            Err(error) if error.raw_os_error() == Some(libc::ERANGE) && size < XATTR_MAX => {}
            Err(error) => return Err(error),
        }
    }
}

/// Writes an extended attribute; `flags` are `XATTR_CREATE` and `XATTR_REPLACE`.
pub(super) fn setxattr(path: &Path, follow: bool, name: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
    let (path, name) = (c(path)?, c_str(name)?);
    let (data, len) = (value.as_ptr().cast(), value.len());
    // SAFETY: both strings end with NUL and `data` has `len` bytes; all outlive the call.
    check(unsafe {
        if follow {
            libc::setxattr(path.as_ptr(), name.as_ptr(), data, len, flags)
        } else {
            libc::lsetxattr(path.as_ptr(), name.as_ptr(), data, len, flags)
        }
    })
}

/// Removes an extended attribute.
pub(super) fn removexattr(path: &Path, follow: bool, name: &OsStr) -> io::Result<()> {
    let (path, name) = (c(path)?, c_str(name)?);
    // SAFETY: both strings end with NUL and outlive the call.
    check(unsafe {
        if follow {
            libc::removexattr(path.as_ptr(), name.as_ptr())
        } else {
            libc::lremovexattr(path.as_ptr(), name.as_ptr())
        }
    })
}

/// Detaches what is mounted at `path`; `flags` as in umount2(2).
pub(super) fn umount(path: &CStr, flags: libc::c_int) -> io::Result<()> {
    // SAFETY: `path` ends with NUL and outlives the call.
    check(unsafe { libc::umount2(path.as_ptr(), flags | libc::UMOUNT_NOFOLLOW) })
}

/// The user this process acts as.
pub(super) fn effective_uid() -> u32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::geteuid() }
}

/// Raises the limit of open files as far as it goes without privilege.
pub(super) fn raise_open_files() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a writable rlimit.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: `limit` is a readable rlimit.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })?;
    Ok(limit.rlim_cur)
}
