//! The kernel's face of the store: operations, handles, errno. The only place that names `fuser`.
//!
//! Every file of the mount is a file of the store's `tree/`: itself while it is resident, a stub once it is released.
//! Resident files are passed through: the kernel reads and writes the store's file itself and the daemon sees opens
//! and releases only. Released files are read from the decoded file, if there is one, or decoded as they are read.
//!
//! - `mount`, `mounts`: mounting, signals, unmounting, mounts left dead.
//! - this file: the state of a mount. `adapter`: the protocol's operations, each one line.
//! - `tree`, `attr`, `xattr`, `dir`: operations without an open file. `inodes`, `node`, `numbers`: the kernel's nodes.
//! - `open`, `opening`, `io`, `transition`, `mapped`: handles, their bytes, the way back from a stub to a file, and mappings
//!   that are left after the last close.
//! - `archive_hooks`: how the archive releases a file unnoticed by programs.
//! - `shared`: the locks of a shared store, and the way to replace its files.
//! - `early`: sends large files to the device while programs write them.
//! - `room`, `patience`: calls wait while the disk is full and the archive frees room.
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
mod node;
mod notify;
mod numbers;
mod open;
mod opening;
mod passthrough;
mod patience;
mod place;
mod privileges;
mod reply;
mod room;
mod shared;
mod sys;
mod transition;
mod trash;
mod tree;
mod workers;
mod xattr;

use std::sync::Arc;

use crate::archive::Archive;
use ::passthrough::Client;
pub use error::MountError;
pub use mapped::{has_leases, has_leases_of_others};
pub use mount::{KernelOption, MountOptions, serve, serve_with, try_mount};
pub use mounts::{
    Mounted, Unanswered, absolute, all as all_mounts, clear_dead_mount, find as mount_at, is_dead, is_served, kind_of,
    left_of, mount_of, unmount,
};
pub use sys::{SYS_ADMIN, everywhere, is_admin};

/// All of the mount's state; shared by the threads that answer the kernel.
struct Core {
    tree: Arc<tree::Tree>,
    files: Arc<open::OpenFiles>,
    bytes: Arc<io::Bytes>,
    directories: dir::Directories,
    xattrs: Arc<xattr::Xattrs>,
}

impl Core {
    fn new(archive: Arc<Archive>, passthrough: bool, helper: Option<Arc<Client>>) -> std::io::Result<Self> {
        let tree = Arc::new(tree::Tree::new(archive)?);
        let files = Arc::new(open::OpenFiles::new(Arc::clone(&tree), passthrough, helper));
        let workers = Arc::clone(&files.recalls.workers);
        let bytes = io::Bytes::new(Arc::clone(&files), Arc::clone(&workers));
        let directories = dir::Directories::new(Arc::clone(&tree), workers);
        let xattrs = xattr::Xattrs::new(&files);
        Ok(Self { tree, files, bytes, directories, xattrs })
    }

    /// Changes a name; from a worker while another daemon has the file.
    fn change(
        self: &Arc<Self>,
        reply: fuser::ReplyEmpty,
        change: impl Fn(&Core) -> errno::Result<()> + Send + 'static,
    ) {
        let core = Arc::clone(self);
        shared::when_free(&self.files.recalls.workers, move || change(&core), |done| reply::done(reply, done));
    }
}
