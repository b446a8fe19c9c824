//! The one place where a failure becomes an errno.

use std::io;

use fuser::Errno;

use crate::archive::ReadError;

/// Why an operation failed, before it is an errno.
#[derive(Debug)]
pub(super) enum Fault {
    /// An error of the store's file system.
    Os(io::Error),
    /// An errno that POSIX asks for, decided here.
    Code(i32),
    /// Another daemon is replacing the file: try again.
    Locked,
    /// A released file could not be decoded; the log names the object and the tensor.
    Unreadable(ReadError),
}

/// Result of an operation of the file system.
pub(super) type Result<T> = std::result::Result<T, Fault>;

impl Fault {
    /// Whether the disk is full, or a quota is used up.
    pub(super) fn lacks_room(&self) -> bool {
        let kinds = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
        matches!(self, Self::Os(error) if kinds.contains(&error.kind()))
    }

    /// Whether there is nothing of that name.
    pub(super) fn is_absence(&self) -> bool {
        match self {
            Self::Os(error) => error.kind() == io::ErrorKind::NotFound,
            Self::Code(code) => *code == libc::ENOENT,
            Self::Unreadable(_) | Self::Locked => false,
        }
    }

    /// Whether a file went, or another one took its place.
    pub(super) fn is_loss(&self) -> bool {
        match self {
            Self::Os(error) => matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESTALE)),
            Self::Code(code) => matches!(*code, libc::ENOENT | libc::ESTALE),
            Self::Unreadable(_) | Self::Locked => false,
        }
    }
}

impl Fault {
    /// As an error of the system.
    pub(super) fn into_error(self) -> io::Error {
        match self {
            Self::Os(error) => error,
            other => io::Error::from_raw_os_error(Errno::from(other).code()),
        }
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            // Another process asks by a lease, for a moment, whether somebody has the file open.
            io::ErrorKind::WouldBlock => Self::Locked,
            _ => Self::Os(error),
        }
    }
}

impl From<rustix::io::Errno> for Fault {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Os(error.into())
    }
}

impl From<ReadError> for Fault {
    fn from(error: ReadError) -> Self {
        log::error!("{error}");
        Self::Unreadable(error)
    }
}

impl From<i32> for Fault {
    fn from(code: i32) -> Self {
        Self::Code(code)
    }
}

impl From<Fault> for Errno {
    fn from(fault: Fault) -> Self {
        match fault {
            // Passed through: the program may handle ENOSPC, EDQUOT or EROFS better than we could.
            Fault::Os(error) => match error.raw_os_error() {
                Some(code) => Errno::from_i32(code),
                None => of_kind(error.kind()),
            },
            Fault::Code(code) => Errno::from_i32(code),
            Fault::Locked => Errno::EBUSY,
            // Never wrong bytes, never a short read: the file's bytes are damaged.
            Fault::Unreadable(error) if error.is_damage() => Errno::EIO,
            // No room to recall it, too many open files: the program can do something about it.
            Fault::Unreadable(error) => Fault::Os(error.source).into(),
        }
    }
}

/// Errors that std makes itself carry no number.
fn of_kind(kind: io::ErrorKind) -> Errno {
    match kind {
        io::ErrorKind::NotFound => Errno::ENOENT,
        io::ErrorKind::PermissionDenied => Errno::EACCES,
        io::ErrorKind::AlreadyExists => Errno::EEXIST,
        // A path with a NUL in it.
        io::ErrorKind::InvalidInput => Errno::EINVAL,
        io::ErrorKind::Unsupported => Errno::EOPNOTSUPP,
        io::ErrorKind::StorageFull => Errno::ENOSPC,
        _ => Errno::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_the_system_pass_through() {
        let full = Fault::Os(io::Error::from_raw_os_error(libc::ENOSPC));
        assert_eq!(Errno::from(full).code(), libc::ENOSPC);
        let no_number = Fault::Os(io::Error::new(io::ErrorKind::InvalidInput, "NUL in a path"));
        assert_eq!(Errno::from(no_number).code(), libc::EINVAL);
        assert_eq!(Errno::from(Fault::Os(io::Error::other("?"))).code(), libc::EIO);
    }
}
