//! Leases of the kernel: they tell whether a program on this machine has a file open or mapped, also one that no daemon serves.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

/// Whether the kernel grants a lease of this kind (`F_RDLCK`, `F_WRLCK`), which is given back at once. It refuses one to read while
/// any program has the file open or mapped for writing, and one to write while any has it open or mapped at all.
///
/// # Errors
/// Also if the file system has no leases. The file's owner may take one, and so may CAP_LEASE, which containers usually lack. So
/// root takes it as the owner.
pub fn is_granted(file: &File, kind: libc::c_int) -> io::Result<bool> {
    match try_lease(file, kind) {
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => {
            // SAFETY: only this thread's user for access to files changes, and changes back before anything else runs.
            let before = unsafe { libc::setfsuid(file.metadata()?.uid()) };
            let granted = try_lease(file, kind);
            // SAFETY: as above.
            unsafe { libc::setfsuid(before as libc::uid_t) };
            granted
        }
        granted => granted,
    }
}

fn try_lease(file: &File, kind: libc::c_int) -> io::Result<bool> {
    /// Chooses the signal of a lease (fcntl.h); the libc crate has no name for it.
    const F_SETSIG: libc::c_int = 10;
    let fcntl = |command, argument: libc::c_int| {
        // SAFETY: no memory is passed; the descriptor is open for as long as `file` is borrowed.
        match unsafe { libc::fcntl(file.as_raw_fd(), command, argument) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    };
    // Somebody may open it at this moment. SIGIO would end the process; this signal is ignored by default.
    fcntl(F_SETSIG, libc::SIGURG)?;
    match fcntl(libc::F_SETLEASE, kind) {
        Ok(()) => fcntl(libc::F_SETLEASE, libc::F_UNLCK).map(|()| true),
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(false),
        Err(error) => Err(error),
    }
}
