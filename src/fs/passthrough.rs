//! Which files the kernel reads and writes by itself.
//!
//! The kernel takes a file from a daemon with CAP_SYS_ADMIN, or from the helper of a daemon without it (crate
//! `passthrough`). Nothing here is called under a lock of the daemon: a helper's answer takes some 50 microseconds, and
//! two seconds if it hangs.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use fuser::{BackingId, ReplyCreate, ReplyOpen};
use passthrough::Client;

use crate::archive::Serving;

/// Why the daemon serves files, if it is an ordinary user's and has no helper.
pub(super) const NEEDS: &str = "it needs CAP_SYS_ADMIN, or the package stepfs-passthrough";

/// A mount's way to register files.
pub(super) struct Passthrough {
    /// Why no file is registered any more. Unset until the kernel refuses one for a reason that will not change.
    off: OnceLock<String>,
    helper: Option<Arc<Client>>,
    /// The connection to the kernel, for the helper. Set before the first open.
    connection: OnceLock<OwnedFd>,
}

/// A registered file. The kernel reads and writes it until all opens through it are released.
pub(super) struct Backing {
    id: ManuallyDrop<BackingId>,
    /// Who gives it up, if a helper has registered it.
    by: Option<Arc<Passthrough>>,
}

/// A reply that takes a backing file.
pub(super) trait Reply {
    /// Registers a file with CAP_SYS_ADMIN.
    ///
    /// # Errors
    /// The kernel's.
    fn open_backing(&self, file: BorrowedFd<'_>) -> io::Result<BackingId>;
    /// A file that somebody else has registered.
    ///
    /// # Safety
    /// `number` is a backing file of this connection, and nobody else gives it up.
    unsafe fn wrap_backing(&self, number: u32) -> BackingId;
}

impl Passthrough {
    /// `off`: no file is to be registered, for this reason.
    pub(super) fn new(off: Option<&str>, helper: Option<Arc<Client>>) -> Arc<Self> {
        let off = off.map_or_else(OnceLock::new, |why| OnceLock::from(String::from(why)));
        Arc::new(Self { off, helper, connection: OnceLock::new() })
    }

    pub(super) fn is_on(&self) -> bool {
        self.off.get().is_none()
    }

    /// Who reads and writes files now.
    pub(super) fn serving(&self) -> Serving {
        match (self.off.get(), &self.helper) {
            (Some(why), _) => Serving::Daemon(why.clone()),
            (None, Some(_)) => Serving::Helper,
            (None, None) => Serving::Kernel,
        }
    }

    /// Files are served by the daemon from now on. The log says why, once.
    pub(super) fn give_up(&self, why: &str) {
        if self.off.set(why.into()).is_ok() {
            log::warn!("files are served without kernel passthrough, which is slower but just as safe: {why}");
        }
    }

    /// Tells the helper which connection is meant.
    pub(super) fn connect(&self, connection: BorrowedFd<'_>) -> io::Result<()> {
        if self.helper.is_some() {
            let _ = self.connection.set(connection.try_clone_to_owned()?);
        }
        Ok(())
    }

    /// Registers a file; `None` if the daemon has to serve it.
    pub(super) fn register(self: &Arc<Self>, file: &File, reply: &dyn Reply) -> Option<Backing> {
        if !self.is_on() {
            return None;
        }
        let made = match (&self.helper, self.connection.get()) {
            (Some(helper), Some(connection)) => helper.open(connection.as_fd(), file.as_fd()).map(|number| {
                // SAFETY: the helper registered it with this connection. `Backing` asks the helper to give it up.
                let id = unsafe { reply.wrap_backing(number) };
                Backing { id: ManuallyDrop::new(id), by: Some(Arc::clone(self)) }
            }),
            _ => reply.open_backing(file.as_fd()).map(|id| Backing { id: ManuallyDrop::new(id), by: None }),
        };
        made.inspect_err(|error| {
            if let Some(why) = refused_for_good(error) {
                self.give_up(&why);
            }
        })
        .ok()
    }
}

impl Backing {
    pub(super) fn id(&self) -> &BackingId {
        &self.id
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: `id` is not used again, because this runs once.
        let id = unsafe { ManuallyDrop::take(&mut self.id) };
        let Some(by) = &self.by else { return };
        let number = id.into_raw();
        if let (Some(helper), Some(connection)) = (&by.helper, by.connection.get()) {
            // Without a helper the kernel gives it up with the connection.
            let _ = helper.close(connection.as_fd(), number);
        }
    }
}

impl Reply for ReplyOpen {
    fn open_backing(&self, file: BorrowedFd<'_>) -> io::Result<BackingId> {
        ReplyOpen::open_backing(self, file)
    }

    unsafe fn wrap_backing(&self, number: u32) -> BackingId {
        // SAFETY: as the trait says.
        unsafe { ReplyOpen::wrap_backing(self, number) }
    }
}

impl Reply for ReplyCreate {
    fn open_backing(&self, file: BorrowedFd<'_>) -> io::Result<BackingId> {
        ReplyCreate::open_backing(self, file)
    }

    unsafe fn wrap_backing(&self, number: u32) -> BackingId {
        // SAFETY: as the trait says.
        unsafe { ReplyCreate::wrap_backing(self, number) }
    }
}

/// Why no other file will be taken either. `None`: this file is refused, or something is short for the moment.
fn refused_for_good(error: &io::Error) -> Option<String> {
    match error.raw_os_error() {
        // A helper refuses files that are not the user's, or that are open for reading only.
        Some(libc::EACCES) => None,
        Some(libc::ENOMEM | libc::EMFILE | libc::ENFILE | libc::EAGAIN | libc::EINTR) => None,
        Some(libc::EPERM) => Some(NEEDS.into()),
        Some(libc::ELOOP) => Some("the store lies on a stacked file system (such as overlayfs)".into()),
        Some(libc::ENOTTY | libc::ENOSYS | libc::EOPNOTSUPP) => {
            Some("the kernel or the store's file system has none".into())
        }
        _ => Some(error.to_string()),
    }
}
