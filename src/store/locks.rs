//! Locks on open file descriptions. They end with the last descriptor, hold over NFS, and stay when another descriptor of the
//! file is closed. So they also hold between two threads of a daemon.
//!
//! In a shared store each open file of the tree is locked, far behind its bytes: whoever has it open holds [`OPEN`] shared,
//! whoever may write it holds [`WRITING`] shared too. Whoever replaces it needs both alone. A daemon holds [`CLOSING`] shared
//! while it makes a file durable that programs have closed.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::{Error, beneath, lease};

/// The name of a lock's file.
pub(super) const LOCK: &str = "lock";
/// After a daemon is told to end, or is killed, its lock lasts a moment longer. A child that it was just starting also
/// holds the lock until it executes its program.
const PATIENCE: Duration = Duration::from_secs(1);
/// The holder of a lock that names no process of this machine.
pub(super) const ANOTHER_MACHINE: &str = "another machine";
/// All of a file.
pub(super) const WHOLE: Range<i64> = 0..0;
/// No file is that long.
const BEHIND: i64 = 1 << 62;
const OPEN: Range<i64> = BEHIND..BEHIND + 1;
const WRITING: Range<i64> = BEHIND + 1..BEHIND + 2;
const BOTH: Range<i64> = BEHIND..BEHIND + 2;
const CLOSING: Range<i64> = BEHIND + 2..BEHIND + 3;

/// The kinds of locks, as fcntl(2) has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Shared = libc::F_RDLCK as isize,
    Alone = libc::F_WRLCK as isize,
}

/// A command of fcntl(2) for locks of open file descriptions, and what it left in its argument.
fn call(file: &File, command: libc::c_int, kind: libc::c_int, range: &Range<i64>) -> io::Result<libc::flock> {
    let (l_type, l_whence) = (kind as libc::c_short, libc::SEEK_SET as libc::c_short);
    let mut lock = libc::flock { l_type, l_whence, l_start: range.start, l_len: range.end - range.start, l_pid: 0 };
    // SAFETY: the descriptor is open and `lock` is an initialised flock that outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        0 => Ok(lock),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes a lock without waiting. False: another one is in the way.
pub(super) fn take(file: &File, kind: Kind, range: &Range<i64>) -> io::Result<bool> {
    match call(file, libc::F_OFD_SETLK, kind as libc::c_int, range) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        taken => taken.map(|_| true),
    }
}

/// Whether another description holds a lock there that excludes one of this kind: with `Alone`, any lock.
pub(super) fn is_held(file: &File, kind: Kind, range: &Range<i64>) -> io::Result<bool> {
    let found = call(file, libc::F_OFD_GETLK, kind as libc::c_int, range)?;
    Ok(found.l_type != libc::F_UNLCK as libc::c_short)
}

/// Opens the file of a lock, and makes it if it is missing.
pub(super) fn file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path).and_then(beneath::plain)
}

/// Takes the lock at a path, in the store at `root`, until the result is dropped.
pub(super) fn hold(root: &Path, path: &Path, kind: Kind) -> Result<File, Error> {
    let mut file = file(path).map_err(Error::io(path))?;
    let began = Instant::now();
    while !take(&file, kind, &WHOLE).map_err(Error::io(path))? {
        if began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        let holder = match io::read_to_string(file.take(32)).unwrap_or_default().trim() {
            "" => ANOTHER_MACHINE.to_string(),
            pid => pid.to_string(),
        };
        return Err(Error::Busy { path: root.to_path_buf(), holder });
    }
    if kind == Kind::Alone {
        // Best effort: only names the holder to the next process.
        let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    }
    Ok(file)
}

#[cfg(test)]
pub(super) fn give_up(file: &File) {
    call(file, libc::F_OFD_SETLK, libc::F_UNLCK, &WHOLE).unwrap();
}

/// Locks a file of a shared store that a program opens. False: it is being replaced.
pub fn open(file: &File, writes: bool) -> io::Result<bool> {
    take(file, Kind::Shared, if writes { &BOTH } else { &OPEN })
}

/// Locks a file against all others. False: somebody has it open.
pub(super) fn alone(file: &File) -> io::Result<bool> {
    take(file, Kind::Alone, &BOTH)
}

/// Keeps all others from beginning to write. False: somebody may write it already.
pub fn unwritten(file: &File) -> io::Result<bool> {
    take(file, Kind::Alone, &WRITING)
}

/// Tells that programs have closed a file, which becomes durable now; or that it is `over`, because it did not.
pub fn closing(file: &File, over: bool) -> io::Result<()> {
    let kind = if over { libc::F_UNLCK } else { libc::F_RDLCK };
    call(file, libc::F_OFD_SETLK, kind, &CLOSING).map(drop)
}

/// Whether a lock of a file ends soon: programs have closed the file, which becomes durable, or a daemon has it to replace it.
pub fn is_passing(file: &File) -> io::Result<bool> {
    Ok(is_held(file, Kind::Alone, &CLOSING)? || is_held(file, Kind::Shared, &BOTH)?)
}

/// Whether somebody has a file open; with `writes`, to write it.
pub fn is_open(file: &File, writes: bool) -> io::Result<bool> {
    is_held(file, Kind::Alone, if writes { &WRITING } else { &BOTH })
}

/// Whether a program on this machine has a file open or mapped to write it, also one whose daemon was killed. `file` is open for
/// reading only.
pub fn has_writer(file: &File) -> io::Result<bool> {
    is_free(file, libc::F_RDLCK).map(|free| !free)
}

/// Whether nobody else on this machine has the file open or mapped, not even a program whose daemon was killed: then the kernel
/// grants a write lease. `file` is open for writing.
pub(super) fn has_no_other(file: &File) -> io::Result<bool> {
    is_free(file, libc::F_WRLCK)
}

/// Whether a lease is granted, or nobody can be in its way: file systems without leases have no programs that the kernel serves, and
/// those of NFS are the server's to give.
fn is_free(file: &File, kind: libc::c_int) -> io::Result<bool> {
    match Engine::of(&beneath::by_descriptor(file))? {
        Engine::Nfs => Ok(true),
        Engine::Coherent => match lease::is_granted(file, kind) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EACCES)) => Ok(true),
            granted => granted,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_there_are_no_leases_nobody_is_in_the_way() {
        assert!(!has_writer(&File::open("/dev/null").unwrap()).unwrap());
    }

    #[test]
    fn who_replaces_a_file_is_alone() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let new = || File::options().read(true).write(true).open(&path).unwrap();
        let (reader, writer, keeper) = (new(), new(), new());
        assert!(open(&reader, false).unwrap() && open(&writer, false).unwrap());
        assert!(!is_open(&keeper, true).unwrap() && is_open(&keeper, false).unwrap());
        assert!(unwritten(&keeper).unwrap() && !open(&writer, true).unwrap(), "a newer state is being relied on");
        drop(keeper);
        let keeper = new();
        assert!(open(&writer, true).unwrap());
        assert!(is_open(&keeper, true).unwrap() && !alone(&keeper).unwrap() && !unwritten(&keeper).unwrap());
        drop(writer);
        assert!(!alone(&keeper).unwrap(), "there is a reader");
        drop(reader);
        assert!(alone(&keeper).unwrap() && has_no_other(&keeper).unwrap());
        let late = new();
        assert!(!open(&late, false).unwrap());
        assert!(!has_no_other(&keeper).unwrap(), "a program without a daemon has it");
    }
}
