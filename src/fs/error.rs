//! Why a store could not be mounted or unmounted.

use std::io;
use std::path::PathBuf;

/// Why a store could not be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The mount point is not a directory that can be used.
    #[error("cannot use {0} as mount point: {1}")]
    Directory(PathBuf, #[source] io::Error),
    /// The mount point lies in the store, or the store in the mount point.
    #[error("{point} and the store {store} lie in one another; mount it somewhere else")]
    Overlap {
        /// The mount point.
        point: PathBuf,
        /// The store.
        store: PathBuf,
    },
    /// Another store is mounted there already.
    #[error("the store {1} is mounted at {0} already; unmount it first (stepfs umount {0})")]
    Mounted(PathBuf, PathBuf),
    /// There is no stepfs at that directory.
    #[error("no stepfs is mounted at {0}; `stepfs status` lists the mounts")]
    NotMounted(PathBuf),
    /// Programs use the mount.
    #[error(
        "{0} is in use by {1}; end them or make them leave it, and try again; `stepfs umount --force {0}` cuts them off"
    )]
    Busy(PathBuf, String),
    /// It is another user's mount.
    #[error("{0} belongs to user {1}; only that user and root may unmount it")]
    Foreign(PathBuf, u32),
    /// The mount is gone here, but not in another mount namespace.
    #[error("{0} is unmounted here, but held by {1}; end that, or cut it off: `stepfs umount --force {0}`")]
    Held(PathBuf, String),
    /// Other users could replace this store, and would then be let in.
    #[error(
        "another user may change {0}, and so replace the store; give it to the user who mounts (chown, chmod go-w) \
             before you let others in with --allow-other"
    )]
    Exposed(PathBuf),
    /// The connection to the daemon cannot be ended.
    #[error(
        "it is detached, but its connection cannot be ended: {0}; mount fusectl at /sys/fs/fuse/connections, or end the \
             daemon with `kill -9`"
    )]
    Abort(#[source] io::Error),
    /// The store's tree cannot be read.
    #[error("cannot read the store's tree: {0}")]
    Tree(#[source] io::Error),
    /// The system refused.
    #[error("the system refused: {0}; `stepfs doctor` says what is missing")]
    Mount(#[source] io::Error),
    /// The user's way to mount is missing.
    #[error("a mount without CAP_SYS_ADMIN needs fusermount3, which is missing: apt-get install fuse3")]
    NoFusermount,
    /// FUSE is missing, or closed to this user.
    #[error("cannot open /dev/fuse: {0}; `stepfs doctor` says how to mend it")]
    Device(#[source] io::Error),
    /// Serving ended with an error of the FUSE device.
    #[error("the connection to the kernel broke: {0}")]
    Connection(#[source] io::Error),
}
