//! The kernel's face of the store: operations, handles, errno. The only place that names `fuser`.
//!
//! Every file of the mount is a file of the store's `tree/`: itself while it is resident, a stub once it is released.
//! Resident files are passed through: the kernel reads and writes the store's file itself and the daemon sees opens
//! and releases only. Released files are read from the decoded file, if there is one, or decoded as they are read.
//!
//! - `mount`, `mounts`: mounting, signals, unmounting, mounts left dead.
//! - this file: the state of a mount. `adapter`: the protocol's operations, each one line.
//! - `name_ops`, `attr`, `xattr`, `dir`: operations without an open file. `inodes`, `node`, `numbers`: the kernel's
//!   nodes.
//! - `open`, `io`, `transition`, `mapped`: handles, their bytes, the way back from a stub to a file, and mappings
//!   that are left after the last close.
//! - `handles`: files that the kernel asks for by number.
//! - `archive_hooks`: how the archive releases a file unnoticed by programs.
//! - `early`: sends large files to the device while programs write them.
//! - `errno`, `reply`, `sys`, `workers`, `notify`: small tools.
//!
//! Never does a thread that answers the kernel wait for a decoder or an fsync. Never is the table's lock held across
//! either. A file's representation never changes while it is open. No invalidation is sent under a lock.

mod adapter;
mod archive_hooks;
mod attr;
mod dir;
mod early;
mod errno;
mod error;
mod inodes;
#[cfg(all(test, feature = "shuttle"))]
mod interleaved;
mod io;
mod mapped;
mod mount;
mod mounts;
mod name_ops;
mod node;
mod notify;
mod numbers;
mod open;
mod place;
mod privileges;
mod reply;
mod sys;
mod transition;
mod workers;
mod xattr;

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};

use crate::archive::Archive;
use crate::store::durable::Io;
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard};
pub use error::MountError;
use inodes::Table;
pub use mapped::has_leases;
pub use mount::{KernelOption, MountOptions, serve, serve_with};
pub use mounts::{clear_dead_mount, is_dead, is_served, kind_of, mount_of, unmount};
use node::Handle;
pub use sys::is_admin;

/// All of the mount's state; shared by the threads that answer the kernel, the workers and the archive.
struct Core {
    archive: Arc<Archive>,
    /// The inode table. `inodes` says who takes it. Locked before `handles` and `directories`, never after.
    table: Mutex<Table>,
    /// Open files by handle number. Taken for moments only.
    handles: Mutex<HashMap<u64, Arc<Handle>>>,
    /// Open directories by handle number. Taken for moments only.
    directories: Mutex<HashMap<u64, Arc<dir::Directory>>>,
    workers: workers::Workers,
    invalidations: Arc<notify::Invalidations>,
    mappings: mapped::Mappings,
    early: early::Early,
    /// The store's file system can tell whether a file is being written.
    leases: bool,
    /// The kernel has to send FLUSH at each close, since the store's file system may have an error to report.
    reports_at_close: bool,
    /// The kernel still takes backing files; once it refused, it is not asked again.
    passthrough: AtomicBool,
    /// The next handle number, also for other unique numbers.
    next: AtomicU64,
    /// The daemon's user. As root the daemon gives new files to their creator.
    user: u32,
}

impl Core {
    /// The store's durable I/O.
    pub(crate) fn io(&self) -> &Io {
        self.archive.store().io()
    }

    fn new(archive: Arc<Archive>, passthrough: bool) -> std::io::Result<Self> {
        let table = Table::new(&archive.store().tree())?;
        let leases = mapped::has_leases(&archive.store().tmp()).unwrap_or(false);
        let reports_at_close = sys::reports_at_close(&archive.store().tree());
        if passthrough && !leases {
            log::warn!("files are served without kernel passthrough: the store's file system has no leases");
        }
        Ok(Self {
            archive,
            table: Mutex::new(table),
            handles: Mutex::default(),
            directories: Mutex::default(),
            workers: workers::Workers::default(),
            invalidations: Arc::default(),
            mappings: mapped::Mappings::default(),
            early: early::Early::default(),
            leases,
            reports_at_close,
            passthrough: AtomicBool::new(passthrough && leases),
            next: AtomicU64::new(1),
            user: rustix::process::geteuid().as_raw(),
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handles(&self) -> MutexGuard<'_, HashMap<u64, Arc<Handle>>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn directories(&self) -> MutexGuard<'_, HashMap<u64, Arc<dir::Directory>>> {
        self.directories.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
