//! The helper: the only code of stepfs that runs with a capability on an ordinary user's behalf.
//!
//! It serves one user, the *caller*, over one socket. A request brings a FUSE connection and a file; the helper checks
//! both, asks the kernel to take the file as a backing file, and closes both. It opens no path that a caller names.
//!
//! The kernel checks nothing but the capability (Linux 6.9 to 7.0): it takes files that are open for reading only, or as
//! a mere reference (O_PATH), and opens them again with any flags and without a permission check. So each check below
//! stops an attack; `docs/THREATS.md` lists what is left. Each has its test in `tests/attacks.rs`.

use std::collections::BTreeSet;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketType, recvmsg};
use rustix::process::{DumpableBehavior, Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

use crate::{CLOSE, DESCRIPTORS, OPEN, REQUEST};

/// `FUSE_DEV_IOC_BACKING_OPEN` (linux/fuse.h): takes a `struct fuse_backing_map`, returns the file's number.
const BACKING_OPEN: u32 = 0x4010_e501;
/// `FUSE_DEV_IOC_BACKING_CLOSE` (linux/fuse.h): takes the number.
const BACKING_CLOSE: u32 = 0x4004_e502;
/// Backing files of one helper. Each pins an open file in the kernel that no limit of the user counts. A training run
/// has some hundred checkpoint files open at a time; of more files the daemon serves the rest.
const MOST_FILES: usize = 4096;
/// Descriptors: socket, two of /proc, a request's three, one of fdinfo, and the standard ones.
const MOST_DESCRIPTORS: u64 = 16;
/// File systems whose files the kernel reads and writes as itself. Network file systems ask a server who reads; stacked
/// ones have backing files of their own.
const FILE_SYSTEMS: [i64; 4] =
    [libc::EXT4_SUPER_MAGIC, libc::XFS_SUPER_MAGIC, libc::BTRFS_SUPER_MAGIC, libc::TMPFS_MAGIC];
/// Flags of a file that the caller cannot write to as it likes.
const PROTECTED: StatxAttributes =
    StatxAttributes::IMMUTABLE.union(StatxAttributes::APPEND).union(StatxAttributes::VERITY);

/// `struct fuse_backing_map` (linux/fuse.h).
#[repr(C)]
struct BackingMap {
    fd: i32,
    flags: u32,
    padding: u64,
}

/// An ordinary user.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// The user's number; not 0.
    pub uid: u32,
    /// The user's first group.
    pub gid: u32,
}

/// Runs the helper with standard input as its socket, until the other end is closed. `caller` is the user that root
/// starts the helper for; without it, the user who started it. The process must have one thread.
///
/// # Errors
/// The helper has no CAP_SYS_ADMIN, serves root, or standard input is not such a socket. No file was registered then.
pub fn run(caller: Option<Caller>) -> io::Result<()> {
    let stdin = rustix::stdio::stdin();
    if rustix::net::sockopt::socket_type(stdin).ok() != Some(SocketType::SEQPACKET) {
        return Err(io::Error::other("the daemon starts this program; it has no use by itself"));
    }
    let uid = confine(caller)?;
    let socket = stdin.try_clone_to_owned()?;
    let mut helper = Helper::new(uid)?;
    forbid_other_calls().map_err(io::Error::other)?;
    crate::send(&socket, &0i32.to_le_bytes(), &[])?;
    loop {
        let answer = match receive(&socket)? {
            Received::End => return Ok(()),
            Received::Malformed => Err(Errno::INVAL),
            Received::Open(connection, file) => helper.open(&connection, &file),
            Received::Close(connection, number) => helper.close(&connection, number),
        };
        let answer = answer.unwrap_or_else(|error| -error.raw_os_error());
        crate::send(&socket, &answer.to_le_bytes(), &[])?;
    }
}

/// Gives up all but CAP_SYS_ADMIN, and becomes the caller; returns the caller's number.
fn confine(caller: Option<Caller>) -> io::Result<u32> {
    use rustix::process::{Gid, Uid, getegid, geteuid, getgid, getuid};
    // Capabilities, users and filters are a thread's. Another thread would keep root's.
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("it has more than one thread"));
    }
    // Not the socket's end of another mount, nor anything else that was left open.
    close_from(3)?;
    let (uid, gid) = (getuid(), getgid());
    if (uid, gid) != (geteuid(), getegid()) {
        // The kernel would write as root: into root's reserved blocks, and past set-user-id bits.
        return Err(io::Error::other("it must not be set-user-id; it needs the file capability cap_sys_admin=ep"));
    }
    let uid = match caller {
        Some(caller) => {
            let (uid, gid) = (Uid::from_raw(caller.uid), Gid::from_raw(caller.gid));
            rustix::thread::set_keep_capabilities(true)?;
            rustix::thread::set_thread_groups(&[])?;
            rustix::thread::set_thread_res_gid(gid, gid, gid)?;
            rustix::thread::set_thread_res_uid(uid, uid, uid)?;
            uid
        }
        None => uid,
    };
    if uid.is_root() {
        return Err(io::Error::other("root needs no helper"));
    }
    let admin = CapabilitySet::SYS_ADMIN;
    let only = CapabilitySets { effective: admin, permitted: admin, inheritable: CapabilitySet::empty() };
    rustix::thread::clear_ambient_capability_set()?;
    rustix::thread::set_capabilities(None, only)
        .map_err(|_| io::Error::new(io::ErrorKind::PermissionDenied, "it has no CAP_SYS_ADMIN"))?;
    rustix::thread::set_no_new_privs(true)?;
    // The caller must not trace it, nor read its descriptors in /proc.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let most = |limit| Rlimit { current: Some(limit), maximum: Some(limit) };
    // The caller may have set a smaller one. Requests then lack descriptors, and are refused.
    let _ = setrlimit(Resource::Nofile, most(MOST_DESCRIPTORS));
    setrlimit(Resource::Core, most(0))?;
    Ok(uid.as_raw())
}

fn close_from(first: u32) -> io::Result<()> {
    // SAFETY: no memory is passed, and nothing in this process owns a descriptor from `first` on.
    match unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// From here on, any other system call kills the process.
fn forbid_other_calls() -> Result<(), seccompiler::Error> {
    // F_GETFD: a debug build looks whether a descriptor is open before it closes it.
    let fcntl = [argument(1, libc::F_GETFL as u64)?, argument(1, libc::F_GETFD as u64)?].concat();
    let ioctls = [argument(1, u64::from(BACKING_OPEN))?, argument(1, u64::from(BACKING_CLOSE))?].concat();
    let any = |calls: &[i64]| calls.iter().map(|call| (*call, vec![])).collect::<Vec<_>>();
    let rules = [
        any(&[libc::SYS_recvmsg, libc::SYS_sendmsg, libc::SYS_close]),
        // Checks. `openat` names numbers in /proc/self/fdinfo only; no caller's bytes reach a path.
        any(&[libc::SYS_fstat, libc::SYS_newfstatat, libc::SYS_statx, libc::SYS_fstatfs]),
        any(&[libc::SYS_openat, libc::SYS_read, libc::SYS_pread64, libc::SYS_ppoll]),
        vec![(libc::SYS_fcntl, fcntl), (libc::SYS_ioctl, ioctls)],
        // The allocator, a message of the end, and the end.
        any(&[libc::SYS_brk, libc::SYS_mmap, libc::SYS_munmap, libc::SYS_mremap, libc::SYS_madvise]),
        any(&[
            libc::SYS_clock_gettime,
            libc::SYS_write,
            libc::SYS_sigaltstack,
            libc::SYS_rt_sigreturn,
            libc::SYS_exit_group,
        ]),
    ]
    .concat();
    let arch = std::env::consts::ARCH.try_into()?;
    let filter =
        SeccompFilter::new(rules.into_iter().collect(), SeccompAction::KillProcess, SeccompAction::Allow, arch)?;
    seccompiler::apply_filter(&BpfProgram::try_from(filter)?)
}

/// A rule: an argument of a call has this value.
fn argument(index: u8, value: u64) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    let condition = SeccompCondition::new(index, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)?;
    Ok(vec![SeccompRule::new(vec![condition])?])
}

enum Received {
    Open(OwnedFd, OwnedFd),
    Close(OwnedFd, u32),
    Malformed,
    End,
}

/// Reads one request. Its descriptors are closed with it.
fn receive(socket: &OwnedFd) -> io::Result<Received> {
    let mut bytes = [0; REQUEST];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS + 1))];
    let mut extra = RecvAncillaryBuffer::new(&mut space);
    let into = &mut [io::IoSliceMut::new(&mut bytes)];
    let got = match rustix::io::retry_on_intr(|| recvmsg(socket, into, &mut extra, RecvFlags::CMSG_CLOEXEC)) {
        Ok(got) => got,
        Err(Errno::CONNRESET) => return Ok(Received::End),
        Err(error) => return Err(error.into()),
    };
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    for message in extra.drain() {
        if let RecvAncillaryMessage::ScmRights(found) = message {
            descriptors.extend(found);
        }
    }
    let number = u32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]);
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Ok(Received::Malformed);
    }
    let second = descriptors.pop();
    Ok(match (got.bytes, bytes[0], descriptors.pop(), second, descriptors.is_empty()) {
        (0, ..) => Received::End,
        (REQUEST, OPEN, Some(connection), Some(file), true) => Received::Open(connection, file),
        (REQUEST, CLOSE, None, Some(connection), true) => Received::Close(connection, number),
        _ => Received::Malformed,
    })
}

/// What one helper has registered.
struct Helper {
    /// The caller.
    uid: u32,
    /// `/proc/self/fdinfo`, and `/proc/self/mountinfo`.
    fdinfo: OwnedFd,
    mountinfo: OwnedFd,
    /// The connection that this helper serves; all requests must bring it.
    connection: Option<Connection>,
    /// The connection's owner was the caller when mounts last changed.
    is_checked: bool,
    /// Numbers that the kernel gave, and that are not given up.
    open: BTreeSet<u32>,
}

/// A FUSE connection's number in `/proc`. Linux before 6.16 does not tell it.
type Connection = Option<u32>;

impl Helper {
    fn new(uid: u32) -> io::Result<Helper> {
        let open = |path, flags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty());
        let fdinfo = open("/proc/self/fdinfo", OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mountinfo = open("/proc/self/mountinfo", OFlags::RDONLY)?;
        for proc in [&fdinfo, &mountinfo] {
            if rustix::fs::fstatfs(proc)?.f_type != libc::PROC_SUPER_MAGIC {
                return Err(io::Error::other("/proc is not the kernel's"));
            }
        }
        Ok(Helper { uid, fdinfo, mountinfo, connection: None, is_checked: false, open: BTreeSet::new() })
    }

    fn open(&mut self, connection: &OwnedFd, file: &OwnedFd) -> Result<i32, Errno> {
        if self.open.len() >= MOST_FILES {
            return Err(Errno::MFILE);
        }
        self.check_connection(connection)?;
        self.check_file(file)?;
        let map = BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
        let number = ioctl(connection.as_fd(), BACKING_OPEN, &raw const map as usize)?;
        self.open.insert(number as u32);
        Ok(number)
    }

    fn close(&mut self, connection: &OwnedFd, number: u32) -> Result<i32, Errno> {
        self.check_connection(connection)?;
        if !self.open.contains(&number) {
            return Err(Errno::ACCESS);
        }
        ioctl(connection.as_fd(), BACKING_CLOSE, &raw const number as usize)?;
        self.open.remove(&number);
        Ok(0)
    }

    /// The descriptor is a connection to the kernel's FUSE, of a mount that belongs to the caller.
    fn check_connection(&mut self, connection: &OwnedFd) -> Result<(), Errno> {
        let found = rustix::fs::fstat(connection)?;
        let is_fuse = FileType::from_raw_mode(found.st_mode) == FileType::CharacterDevice
            && (rustix::fs::major(found.st_rdev), rustix::fs::minor(found.st_rdev)) == FUSE;
        if !is_fuse {
            return Err(Errno::ACCESS);
        }
        let number = self.number_of(connection)?;
        if self.connection.is_some_and(|known| known != number) {
            return Err(Errno::ACCESS);
        }
        // Another user's mount may have got the number of one that has ended.
        self.is_checked &= !self.mounts_have_changed()?;
        // Without a number nobody can say whose mount it is. Who has the descriptor can answer all of its requests
        // anyway, and gives it nothing but files of the caller.
        if !self.is_checked && number.is_some_and(|number| self.owner_of(number).ok().flatten() != Some(self.uid)) {
            return Err(Errno::ACCESS);
        }
        (self.connection, self.is_checked) = (Some(number), true);
        Ok(())
    }

    /// Since the last time that somebody asked.
    fn mounts_have_changed(&self) -> Result<bool, Errno> {
        let mut mounts = libc::pollfd { fd: self.mountinfo.as_raw_fd(), events: libc::POLLPRI, revents: 0 };
        let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: both live during the call, and no signals are passed.
        match unsafe { libc::ppoll(&raw mut mounts, 1, &raw const at_once, std::ptr::null()) } {
            -1 => Err(last_error()),
            changed => Ok(changed > 0),
        }
    }

    /// The connection's number, from the kernel's notes on the descriptor.
    fn number_of(&self, connection: &OwnedFd) -> Result<Connection, Errno> {
        let name = connection.as_raw_fd().to_string();
        let notes = rustix::fs::openat(&self.fdinfo, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let text = read_all(&notes)?;
        let line = text.lines().find_map(|line| line.strip_prefix("fuse_connection:"));
        line.map(|number| number.trim().parse().map_err(|_| Errno::ACCESS)).transpose()
    }

    /// The user who mounted the connection, if it is mounted where this process sees it.
    fn owner_of(&self, connection: u32) -> Result<Option<u32>, Errno> {
        let text = read_all(&self.mountinfo)?;
        Ok(text.lines().find_map(|line| owner_in(line, connection)))
    }

    /// The file is one that the caller may read and write as it likes.
    fn check_file(&self, file: &OwnedFd) -> Result<(), Errno> {
        let flags = rustix::fs::fcntl_getfl(file)?;
        let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
        let mode = u32::from(found.stx_mode);
        let is_allowed = flags & OFlags::RWMODE == OFlags::RDWR
            && !flags.intersects(OFlags::PATH | OFlags::APPEND)
            && FileType::from_raw_mode(mode) == FileType::RegularFile
            && found.stx_uid == self.uid
            && mode & (libc::S_ISUID | libc::S_ISGID) == 0
            && !found.stx_attributes.intersects(PROTECTED)
            && FILE_SYSTEMS.contains(&rustix::fs::fstatfs(file)?.f_type);
        if is_allowed { Ok(()) } else { Err(Errno::ACCESS) }
    }
}

/// Major and minor number of `/dev/fuse`.
const FUSE: (u32, u32) = (10, 229);

/// The owner in a line of mountinfo, if it is about this connection.
fn owner_in(line: &str, connection: u32) -> Option<u32> {
    let (mount, system) = line.split_once(" - ")?;
    let device = mount.split(' ').nth(2)?;
    let mut system = system.split(' ');
    let kind = system.next()?;
    if device != format!("0:{connection}") || !(kind == "fuse" || kind.starts_with("fuse.")) {
        return None;
    }
    system.next_back()?.split(',').find_map(|option| option.strip_prefix("user_id="))?.parse().ok()
}

/// A file of /proc from its beginning.
fn read_all(file: &OwnedFd) -> Result<String, Errno> {
    let mut text = Vec::new();
    let mut part = [0; 4096];
    loop {
        match rustix::io::pread(file, &mut part, text.len() as u64)? {
            0 => return Ok(String::from_utf8_lossy(&text).into_owned()),
            count => text.extend_from_slice(&part[..count]),
        }
    }
}

fn ioctl(connection: BorrowedFd<'_>, request: u32, argument: usize) -> Result<i32, Errno> {
    // SAFETY: `argument` is the address of a structure of the length that `request` encodes; it lives in the caller's
    // frame during the call, and the kernel only reads it.
    let result = unsafe { libc::ioctl(connection.as_raw_fd(), libc::Ioctl::from(request), argument) };
    if result < 0 { Err(last_error()) } else { Ok(result) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mounts_owner_is_the_one_of_its_connection() {
        let line = "40 25 0:52 / /mnt rw,nosuid,nodev - fuse.stepfs /a\\040- rw,user_id=1000,group_id=1000";
        assert_eq!(owner_in(line, 52), Some(1000));
        assert_eq!(owner_in(line, 5), None);
        assert_eq!(owner_in(&line.replace("fuse.stepfs", "fusectl"), 52), None);
        assert_eq!(owner_in(&line.replace("user_id", "uid"), 52), None);
    }
}
