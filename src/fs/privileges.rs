//! Removes set-user-id and set-group-id bits and capabilities when another user writes to a file.

use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use fuser::Request;

use super::place::Place;

/// The thread that asks for a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) thread: u32,
}

impl Caller {
    pub(super) fn of(request: &Request) -> Self {
        Self { uid: request.uid(), gid: request.gid(), thread: request.pid() }
    }

    /// Whether it belongs to a group. If it is gone, or unknown here, only its first group counts.
    fn is_in(self, group: u32) -> bool {
        let status = || std::fs::read_to_string(format!("/proc/{}/status", self.thread)).unwrap_or_default();
        let listed = |line: &str| line.split_whitespace().any(|known| known.parse() == Ok(group));
        self.gid == group || status().lines().filter_map(|line| line.strip_prefix("Groups:")).any(listed)
    }

    /// The mode of a file of `group` after this caller wrote to it, as Linux has it: root keeps all. Without execution
    /// by the group, members keep the group's bit.
    pub(super) fn leaves(self, mode: u32, group: u32) -> u32 {
        let keeps_group = mode & libc::S_IXGRP == 0 && (mode & libc::S_ISGID == 0 || self.is_in(group));
        let taken = libc::S_ISUID | if keeps_group { 0 } else { libc::S_ISGID };
        if self.uid == 0 { mode } else { mode & !taken }
    }

    /// Takes the bits from an open file, which has got them since: the kernel says so with the write.
    pub(super) fn drop_bits(self, file: &File) -> io::Result<()> {
        let metadata = file.metadata()?;
        let mode = metadata.mode() & 0o7777;
        match self.leaves(mode, metadata.gid()) {
            kept if kept != mode => file.set_permissions(Permissions::from_mode(kept)),
            _ => Ok(()),
        }
    }

    /// Takes the bits from a file that the caller opens for writing or truncates, and its capabilities in any case. The
    /// kernel leaves that to us (`FUSE_HANDLE_KILLPRIV_V2`), so that it need not ask for the capabilities before each
    /// write. POSIX wants the bits gone at the first write, a moment later. Returns whether the mode changed, since the
    /// kernel may have cached the old one.
    pub(super) fn drop_privileges(self, place: &Place) -> io::Result<bool> {
        let capabilities = OsStr::new("security.capability");
        // Most files have none. A removal would wait for the file system's journal to find that out.
        if place.has_xattr(capabilities) {
            match place.removexattr(capabilities) {
                // Gone meanwhile, or we could not have set any.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENODATA | libc::EOPNOTSUPP | libc::EPERM)) => {}
                other => other?,
            }
        }
        let metadata = place.metadata()?;
        let mode = metadata.mode() & 0o7777;
        let kept = self.leaves(mode, metadata.gid());
        if kept != mode {
            std::fs::set_permissions(&place.path, Permissions::from_mode(kept))?;
        }
        Ok(kept != mode)
    }
}

/// Whether a mode has bits that a write by another user than root may take away.
pub(super) fn has_privileges(mode: u32) -> bool {
    mode & (libc::S_ISUID | libc::S_ISGID) != 0
}
