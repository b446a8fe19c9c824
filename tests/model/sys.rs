//! System calls as safe functions: their answer or errno. Nothing is retried, nothing is hidden.

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The answer of a system call: a value, or its errno.
pub(crate) type Sys<T> = Result<T, i32>;

pub(crate) fn last() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(-1)
}

pub(crate) fn c(path: &Path) -> CString {
    text(path.as_os_str())
}

pub(crate) fn text(text: &OsStr) -> CString {
    CString::new(text.as_bytes()).expect("no NUL in the names of these tests")
}

pub(crate) fn done(result: libc::c_int) -> Sys<()> {
    if result < 0 { Err(last()) } else { Ok(()) }
}

pub(crate) fn count(result: libc::ssize_t) -> Sys<u64> {
    u64::try_from(result).map_err(|_| last())
}

/// The fields of stat that are the same on all file systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) nlink: u64,
    pub(crate) size: u64,
    pub(crate) rdev: u64,
    pub(crate) ino: u64,
    /// Modification time in nanoseconds since 1970.
    pub(crate) mtime: i128,
    /// Access time in nanoseconds since 1970.
    pub(crate) atime: i128,
}

fn stat_with(call: impl FnOnce(*mut libc::stat) -> libc::c_int) -> Sys<Stat> {
    let mut found = std::mem::MaybeUninit::<libc::stat>::zeroed();
    done(call(found.as_mut_ptr()))?;
    // SAFETY: zeroed is a valid stat (integers only), and the call filled it.
    let found = unsafe { found.assume_init() };
    let nanoseconds = |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
    Ok(Stat {
        mode: found.st_mode,
        uid: found.st_uid,
        gid: found.st_gid,
        nlink: found.st_nlink,
        size: found.st_size as u64,
        rdev: found.st_rdev,
        ino: found.st_ino,
        mtime: nanoseconds(found.st_mtime, found.st_mtime_nsec),
        atime: nanoseconds(found.st_atime, found.st_atime_nsec),
    })
}

pub(crate) fn lstat(path: &Path) -> Sys<Stat> {
    let path = c(path);
    // SAFETY: the path ends with NUL, and the pointer is to a writable stat.
    stat_with(|found| unsafe { libc::lstat(path.as_ptr(), found) })
}

pub(crate) fn fstat(fd: &OwnedFd) -> Sys<Stat> {
    // SAFETY: the descriptor is open, and the pointer is to a writable stat.
    stat_with(|found| unsafe { libc::fstat(fd.as_raw_fd(), found) })
}

pub(crate) fn open(path: &Path, flags: i32, mode: u32) -> Sys<OwnedFd> {
    let path = c(path);
    // SAFETY: the path ends with NUL.
    let fd = unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC, mode) };
    done(fd)?;
    // SAFETY: just opened, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn close(fd: OwnedFd) -> Sys<()> {
    use std::os::fd::IntoRawFd;
    // SAFETY: the descriptor was owned by us and is not used after.
    done(unsafe { libc::close(fd.into_raw_fd()) })
}

pub(crate) fn write(fd: &OwnedFd, data: &[u8]) -> Sys<u64> {
    // SAFETY: the descriptor is open, the buffer has its length.
    count(unsafe { libc::write(fd.as_raw_fd(), data.as_ptr().cast(), data.len()) })
}

pub(crate) fn pwrite(fd: &OwnedFd, data: &[u8], at: i64) -> Sys<u64> {
    // SAFETY: the descriptor is open, the buffer has its length.
    count(unsafe { libc::pwrite(fd.as_raw_fd(), data.as_ptr().cast(), data.len(), at) })
}

pub(crate) fn read(fd: &OwnedFd, len: usize) -> Sys<Vec<u8>> {
    let mut buffer = vec![0; len];
    // SAFETY: the descriptor is open, the buffer has its length.
    let got = count(unsafe { libc::read(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), len) })?;
    buffer.truncate(got as usize);
    Ok(buffer)
}

pub(crate) fn pread(fd: &OwnedFd, len: usize, at: i64) -> Sys<Vec<u8>> {
    let mut buffer = vec![0; len];
    // SAFETY: the descriptor is open, the buffer has its length.
    let got = count(unsafe { libc::pread(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), len, at) })?;
    buffer.truncate(got as usize);
    Ok(buffer)
}

pub(crate) fn lseek(fd: &OwnedFd, at: i64, whence: i32) -> Sys<u64> {
    // SAFETY: the descriptor is open.
    let found = unsafe { libc::lseek(fd.as_raw_fd(), at, whence) };
    u64::try_from(found).map_err(|_| last())
}

pub(crate) fn truncate(path: &Path, len: i64) -> Sys<()> {
    let path = c(path);
    // SAFETY: the path ends with NUL.
    done(unsafe { libc::truncate(path.as_ptr(), len) })
}

pub(crate) fn ftruncate(fd: &OwnedFd, len: i64) -> Sys<()> {
    // SAFETY: the descriptor is open.
    done(unsafe { libc::ftruncate(fd.as_raw_fd(), len) })
}

pub(crate) fn fallocate(fd: &OwnedFd, mode: i32, at: i64, len: i64) -> Sys<()> {
    // SAFETY: the descriptor is open.
    done(unsafe { libc::fallocate(fd.as_raw_fd(), mode, at, len) })
}

pub(crate) fn fsync(fd: &OwnedFd, data_only: bool) -> Sys<()> {
    // SAFETY: the descriptor is open.
    done(unsafe { if data_only { libc::fdatasync(fd.as_raw_fd()) } else { libc::fsync(fd.as_raw_fd()) } })
}

pub(crate) fn flock(fd: &OwnedFd, how: i32) -> Sys<()> {
    // SAFETY: the descriptor is open.
    done(unsafe { libc::flock(fd.as_raw_fd(), how) })
}

pub(crate) fn copy_file_range(from: &OwnedFd, at: i64, to: &OwnedFd, to_at: i64, len: usize) -> Sys<u64> {
    let (mut at, mut to_at) = (at, to_at);
    // SAFETY: both descriptors are open, both offsets outlive the call.
    count(unsafe { libc::copy_file_range(from.as_raw_fd(), &raw mut at, to.as_raw_fd(), &raw mut to_at, len, 0) })
}

pub(crate) fn rename(from: &Path, to: &Path, flags: u32) -> Sys<()> {
    let (from, to) = (c(from), c(to));
    // SAFETY: both paths end with NUL.
    done(unsafe { libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags) })
}

pub(crate) fn link(from: &Path, to: &Path) -> Sys<()> {
    let (from, to) = (c(from), c(to));
    // SAFETY: both paths end with NUL.
    done(unsafe { libc::link(from.as_ptr(), to.as_ptr()) })
}

pub(crate) fn symlink(target: &Path, path: &Path) -> Sys<()> {
    let (target, path) = (c(target), c(path));
    // SAFETY: both paths end with NUL.
    done(unsafe { libc::symlink(target.as_ptr(), path.as_ptr()) })
}

pub(crate) fn readlink(path: &Path) -> Sys<PathBuf> {
    let path = c(path);
    let mut target = vec![0u8; libc::PATH_MAX as usize];
    // SAFETY: the path ends with NUL, the buffer has its length.
    let len = count(unsafe { libc::readlink(path.as_ptr(), target.as_mut_ptr().cast(), target.len()) })?;
    target.truncate(len as usize);
    Ok(OsString::from_vec(target).into())
}

pub(crate) fn unlink(path: &Path) -> Sys<()> {
    let path = c(path);
    // SAFETY: the path ends with NUL.
    done(unsafe { libc::unlink(path.as_ptr()) })
}

pub(crate) fn mkdir(path: &Path, mode: u32) -> Sys<()> {
    let path = c(path);
    // SAFETY: the path ends with NUL.
    done(unsafe { libc::mkdir(path.as_ptr(), mode) })
}

pub(crate) fn rmdir(path: &Path) -> Sys<()> {
    let path = c(path);
    // SAFETY: the path ends with NUL.
    done(unsafe { libc::rmdir(path.as_ptr()) })
}

pub(crate) fn mknod(path: &Path, mode: u32) -> Sys<()> {
    let path = c(path);
    // SAFETY: the path ends with NUL.
    done(unsafe { libc::mknod(path.as_ptr(), mode, 0) })
}

pub(crate) fn chmod(path: &Path, mode: u32) -> Sys<()> {
    let path = c(path);
    // SAFETY: the path ends with NUL.
    done(unsafe { libc::chmod(path.as_ptr(), mode) })
}

pub(crate) fn lchown(path: &Path, uid: u32, gid: u32) -> Sys<()> {
    let path = c(path);
    // SAFETY: the path ends with NUL.
    done(unsafe { libc::lchown(path.as_ptr(), uid, gid) })
}

/// A time as utimensat wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stamp {
    Omit,
    Now,
    At(i64, u32),
}

impl Stamp {
    pub(crate) fn spec(self) -> libc::timespec {
        let (tv_sec, tv_nsec) = match self {
            Stamp::Omit => (0, libc::UTIME_OMIT),
            Stamp::Now => (0, libc::UTIME_NOW),
            Stamp::At(seconds, nanoseconds) => (seconds, i64::from(nanoseconds)),
        };
        libc::timespec { tv_sec, tv_nsec }
    }
}

pub(crate) fn utimens(path: &Path, atime: Stamp, mtime: Stamp, flags: i32) -> Sys<()> {
    let path = c(path);
    let times = [atime.spec(), mtime.spec()];
    // SAFETY: the path ends with NUL, and there are two times.
    done(unsafe { libc::utimensat(libc::AT_FDCWD, path.as_ptr(), times.as_ptr(), flags) })
}

pub(crate) fn setxattr(path: &Path, name: &str, value: &[u8], flags: i32) -> Sys<()> {
    let (path, name) = (c(path), text(OsStr::new(name)));
    // SAFETY: both strings end with NUL, the value has its length.
    done(unsafe { libc::lsetxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags) })
}

pub(crate) fn getxattr(path: &Path, name: &str) -> Sys<Vec<u8>> {
    let (path, name) = (c(path), text(OsStr::new(name)));
    let mut value = vec![0u8; 65536];
    // SAFETY: both strings end with NUL, the buffer has its length.
    let len = count(unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) })?;
    value.truncate(len as usize);
    Ok(value)
}

pub(crate) fn removexattr(path: &Path, name: &str) -> Sys<()> {
    let (path, name) = (c(path), text(OsStr::new(name)));
    // SAFETY: both strings end with NUL.
    done(unsafe { libc::lremovexattr(path.as_ptr(), name.as_ptr()) })
}

/// Names of extended attributes, sorted.
pub(crate) fn listxattr(path: &Path) -> Sys<Vec<String>> {
    let path = c(path);
    let mut names = vec![0u8; 65536];
    // SAFETY: the path ends with NUL, the buffer has its length.
    let len = count(unsafe { libc::llistxattr(path.as_ptr(), names.as_mut_ptr().cast(), names.len()) })?;
    names.truncate(len as usize);
    let mut names: Vec<String> = names
        .split(|&byte| byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .collect();
    names.sort();
    Ok(names)
}

/// A shared mapping of the beginning of a file.
pub(crate) struct Map {
    at: *mut libc::c_void,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; each is used by one thread at a time.
unsafe impl Send for Map {}

impl Map {
    pub(crate) fn new(fd: &OwnedFd, len: usize, write: bool) -> Sys<Map> {
        let protection = if write { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        // SAFETY: a fresh mapping of an open file; checked below.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED { Err(last()) } else { Ok(Map { at, len }) }
    }

    /// Must lie within the file, or the process is killed.
    pub(crate) fn load(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        let mut bytes = vec![0; len];
        // SAFETY: within the mapping; other processes could write to the source, but these tests have no such writer.
        unsafe { std::ptr::copy_nonoverlapping(self.at.cast::<u8>().add(at), bytes.as_mut_ptr(), len) };
        bytes
    }

    /// Must lie within the file, and the mapping be writable, or the process is killed.
    pub(crate) fn store(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: within the mapping, which no reference points into.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.cast::<u8>().add(at), bytes.len()) };
    }

    pub(crate) fn sync(&self) -> Sys<()> {
        // SAFETY: the mapping lives.
        done(unsafe { libc::msync(self.at, self.len, libc::MS_SYNC) })
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // `munmap` writes back what is dirty while it holds the lock of this process's memory. The daemon is this process:
        // it would wait for that lock to read the request, for ever. `msync` holds no lock meanwhile. A read-only mapping
        // of a file that another handle removed may fail here, and has nothing to write.
        let _ = self.sync();
        // SAFETY: mapped in `new`, not used after.
        assert_eq!(unsafe { libc::munmap(self.at, self.len) }, 0);
    }
}

/// Where O_DIRECT takes bytes from and puts them: at a multiple of its length.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
pub(crate) struct Block([u8; BLOCK]);

/// Bytes of a block.
pub(crate) const BLOCK: usize = 4096;

/// Blocks with these bytes, and zeros behind them.
pub(crate) fn blocks(bytes: &[u8]) -> Vec<Block> {
    let block = |bytes: &[u8]| {
        let mut block = Block([0; BLOCK]);
        block.0[..bytes.len()].copy_from_slice(bytes);
        block
    };
    bytes.chunks(BLOCK).map(block).collect()
}

/// The bytes of blocks.
pub(crate) fn bytes_of(blocks: &[Block]) -> Vec<u8> {
    blocks.iter().flat_map(|block| block.0).collect()
}

/// Reads into blocks, or writes them. Returns the count of bytes.
pub(crate) fn transfer(fd: &OwnedFd, write: bool, blocks: &mut [Block], at: i64) -> Sys<u64> {
    let (start, len) = (blocks.as_mut_ptr().cast(), size_of_val(blocks));
    // SAFETY: the descriptor is open, the blocks have this length.
    count(unsafe {
        if write { libc::pwrite(fd.as_raw_fd(), start, len, at) } else { libc::pread(fd.as_raw_fd(), start, len, at) }
    })
}

/// Linux' asynchronous I/O, one request at a time.
pub(crate) struct Aio(libc::c_ulong);

/// `struct iocb` (linux/aio_abi.h), in its order for little-endian machines.
#[derive(Default)]
#[repr(C)]
struct Request {
    data: u64,
    key: u32,
    flags: u32,
    code: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    len: u64,
    at: i64,
    more: [u64; 2],
}

impl Aio {
    pub(crate) fn new() -> Sys<Aio> {
        let mut context = 0;
        // SAFETY: the pointer is to a writable number.
        done(unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) } as libc::c_int)?;
        Ok(Aio(context))
    }

    /// Reads into blocks, or writes them, and waits for the end. Returns the count of bytes.
    pub(crate) fn transfer(&self, fd: &OwnedFd, write: bool, blocks: &mut [Block], at: i64) -> Sys<u64> {
        let (buffer, len) = (blocks.as_mut_ptr() as u64, size_of_val(blocks) as u64);
        let (code, fd) = (u16::from(write), fd.as_raw_fd() as u32);
        let mut request = Request { code, fd, buffer, len, at, ..Request::default() };
        // Of `struct io_event` the third is the result.
        let (mut requests, mut event) = ([&raw mut request], [0i64; 4]);
        // SAFETY: the descriptor is open. The request and the blocks live until the event says that it is done.
        let got = unsafe {
            done(libc::syscall(libc::SYS_io_submit, self.0, 1, requests.as_mut_ptr()) as libc::c_int)?;
            libc::syscall(libc::SYS_io_getevents, self.0, 1, 1, event.as_mut_ptr(), std::ptr::null_mut::<u8>())
        };
        assert_eq!(got, 1, "the request has ended");
        u64::try_from(event[2]).map_err(|_| -event[2] as i32)
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: no request is under way.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

/// Every file changed so far has at most this modification time.
pub(crate) fn now() -> i128 {
    clock(libc::CLOCK_REALTIME)
}

/// Every file changed from now on has at least this modification time: the kernel's last tick, which on a busy guest is
/// long ago.
pub(crate) fn stamp() -> i128 {
    clock(libc::CLOCK_REALTIME_COARSE)
}

fn clock(clock: libc::clockid_t) -> i128 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a writable timespec.
    assert_eq!(unsafe { libc::clock_gettime(clock, &raw mut time) }, 0);
    i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
}
