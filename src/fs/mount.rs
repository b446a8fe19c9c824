//! Mounting, serving until unmounted, and ending well.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle as SignalHandle, Signals};

use super::adapter::FuseAdapter;
use super::archive_hooks::Served;
use super::error::MountError;
use super::mounts::{self, Detach, absolute, clear_dead_mount};
use super::passthrough::NEEDS;
use super::{Core, sys};
use crate::archive::Archive;
use crate::store::exposed;

/// Threads that answer the kernel. With passthrough they only see opens and metadata; more were slower on two cores.
const THREADS: usize = 2;

/// Default read-ahead: with the kernel's 128 KiB four requests would wait for each tile of 512 KiB in turn; two tiles
/// keep both decoding threads of a small machine busy.
const READ_AHEAD_KIB: u32 = 1024;

/// Stacked file systems. Passthrough to a file on one needs a deeper stack, which keeps the mount from being a layer
/// of another overlayfs. So stepfs asks for it only there.
const STACKED: [i64; 3] = [libc::OVERLAYFS_SUPER_MAGIC, libc::FUSE_SUPER_MAGIC, libc::ECRYPTFS_SUPER_MAGIC];

/// Options that the kernel enforces itself. `nosuid` and `nodev` are always set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelOption {
    /// No program writes through the mount. The archive still works on earlier files.
    ReadOnly,
    /// No program is started from the mount.
    NoExec,
    /// The mount claims to keep no access times. The store's file system decides which it keeps.
    NoAtime,
    /// Each write waits for the device.
    Sync,
    /// Each change of a directory waits for the device.
    DirSync,
}

impl KernelOption {
    /// All, by the words of mount(8).
    pub const ALL: [(&'static str, KernelOption); 5] = [
        ("ro", KernelOption::ReadOnly),
        ("noexec", KernelOption::NoExec),
        ("noatime", KernelOption::NoAtime),
        ("sync", KernelOption::Sync),
        ("dirsync", KernelOption::DirSync),
    ];

    fn of_fuser(self) -> MountOption {
        match self {
            KernelOption::ReadOnly => MountOption::RO,
            KernelOption::NoExec => MountOption::NoExec,
            KernelOption::NoAtime => MountOption::NoAtime,
            KernelOption::Sync => MountOption::Sync,
            KernelOption::DirSync => MountOption::DirSync,
        }
    }
}

/// How to mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// Let other users in, subject to the files' permissions. Without root it takes `user_allow_other` in
    /// `/etc/fuse.conf`.
    pub allow_other: bool,
    /// Serve all reads and writes from the daemon, as happens by itself where the kernel refuses passthrough.
    pub no_passthrough: bool,
    /// Registers files for a daemon without CAP_SYS_ADMIN.
    pub helper: Option<Arc<passthrough::Client>>,
    /// Read-ahead of files that the daemon serves, in KiB; set where permitted (root).
    pub read_ahead_kib: u32,
    /// Unmount on SIGTERM, SIGINT and SIGHUP. Off for tests that mount in their own process.
    pub signals: bool,
    /// Options for the kernel.
    pub kernel: Vec<KernelOption>,
}

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            allow_other: false,
            no_passthrough: false,
            helper: None,
            read_ahead_kib: READ_AHEAD_KIB,
            signals: true,
            kernel: Vec::new(),
        }
    }
}

/// The source in `/proc/mounts`. fusermount3, which mounts for those who may not, takes it out of a list with commas.
fn source(store: &Path, by_fusermount: bool) -> String {
    let path = store.to_string_lossy();
    if by_fusermount { path.replace('\\', "\\\\").replace(',', "\\,") } else { path.into_owned() }
}

fn config(options: &MountOptions, store: &Path) -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(source(store, !sys::is_admin())),
        // fuser hands `Subtype` to fusermount3 only; as a plain option the kernel understands it too.
        MountOption::CUSTOM("subtype=stepfs".into()),
        MountOption::DefaultPermissions,
        MountOption::NoDev,
        MountOption::NoSuid,
    ];
    config.mount_options.extend(options.kernel.iter().map(|option| option.of_fuser()));
    config.acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(THREADS);
    config
}

/// Mounts the archive's store at `mountpoint`, calls `ready`, and serves until it is unmounted; then stops the
/// archive.
///
/// On SIGTERM, SIGINT or SIGHUP it unmounts. If programs still use the mount, the log names them and the mount is
/// detached. No program can enter, those inside go on, and this returns when the last has left. A second signal does
/// not wait for them. Their later calls fail (ENOTCONN); their written bytes stay.
///
/// # Errors
/// When it cannot be mounted, or the kernel's connection breaks.
pub fn serve(
    archive: Arc<Archive>,
    mountpoint: &Path,
    options: &MountOptions,
    ready: impl FnOnce(),
) -> Result<(), MountError> {
    serve_with(archive, mountpoint, options, || Ok(()), ready)
}

/// As [`serve`], with `connect` before any program can use the mount: it starts what programs may wait for.
///
/// # Errors
/// Those of [`serve`] and of `connect`.
pub fn serve_with(
    archive: Arc<Archive>,
    mountpoint: &Path,
    options: &MountOptions,
    connect: impl FnOnce() -> io::Result<()>,
    ready: impl FnOnce(),
) -> Result<(), MountError> {
    clear_dead_mount(mountpoint)?;
    let directory = |error| MountError::Directory(mountpoint.to_path_buf(), error);
    let point = absolute(mountpoint).map_err(directory)?;
    if !point.metadata().map_err(directory)?.is_dir() {
        return Err(directory(io::Error::from_raw_os_error(libc::ENOTDIR)));
    }
    let store = archive.store().root().canonicalize().map_err(MountError::Tree)?;
    if mounts::overlap(&point, &store) {
        return Err(MountError::Overlap { point, store });
    }
    if let Some(mounted) = mounts::find(&point).map_err(MountError::Mount)? {
        return Err(MountError::Mounted(point, mounted.store));
    }
    if let Some(directory) = exposed(&store).map_err(MountError::Tree)? {
        let own = rustix::process::geteuid().as_raw();
        if options.allow_other {
            return Err(MountError::Exposed(directory));
        } else if own == 0 {
            log::warn!("{}: others may change it, and this daemon is root; see docs/THREATS.md", directory.display());
        }
    }
    raise_limits();
    let core = Core::new(Arc::clone(&archive), !options.no_passthrough, options.helper.clone());
    let core = Arc::new(core.map_err(MountError::Tree)?);
    if options.helper.is_none() && !(sys::is_admin() && sys::everywhere()) {
        core.files.passthrough.give_up(NEEDS);
    }
    let stacked = rustix::fs::statfs(archive.store().tree()).is_ok_and(|found| STACKED.contains(&found.f_type));
    let face = FuseAdapter { core: Arc::clone(&core), stack_depth: if stacked { 2 } else { 1 } };
    let session = Session::new(face, &point, &config(options, &store)).map_err(refused)?;
    core.files.passthrough.connect(session.as_fd()).map_err(MountError::Mount)?;
    let notify = core.tree.invalidations.start(session.notifier()).map_err(MountError::Mount)?;
    let mappings = core.files.mappings.start().map_err(MountError::Mount)?;
    let early = core.files.early.start(&archive).map_err(MountError::Mount)?;
    let room = core.files.room.start().map_err(MountError::Mount)?;
    archive.start(Arc::new(Served(Arc::downgrade(&core.files))));
    let session = connect().and_then(|()| session.spawn()).map_err(|error| {
        archive.stop();
        MountError::Mount(error)
    })?;
    let mounted = mounts::find(&point).ok().flatten();
    if let Some(mounted) = &mounted {
        set_read_ahead(mounted.device(), options.read_ahead_kib);
    }
    let signals = if options.signals { Some(watch_signals(point.clone()).map_err(MountError::Mount)?) } else { None };
    ready();

    let served = wait(session);
    if served.is_err() && mounts::find(&point).is_ok_and(|left| left.is_some() && left == mounted) {
        // No mount is better than one that answers ENOTCONN.
        let _ = mounts::take_down(&point, Detach::Lazily);
    }
    if let Some((handle, thread)) = signals {
        handle.close();
        let _ = thread.join();
    }
    core.files.room.stop();
    let _ = room.join();
    // No program waits for the workers' replies any more, but their work (an fsync, a recall) is finished.
    core.files.recalls.workers.stop();
    core.tree.invalidations.stop();
    core.files.mappings.stop();
    core.files.early.stop();
    let _ = (notify.join(), mappings.join(), early.join());
    archive.stop();
    served.map_err(MountError::Connection)
}

/// Raises this process's limits as far as they go: it works for programs that have limits of their own.
fn raise_limits() {
    // One descriptor per open file, and each directory listing. A file may be as long as its program may write it.
    for resource in [Resource::Nofile, Resource::Fsize] {
        let Rlimit { maximum, .. } = getrlimit(resource);
        if let Err(error) = setrlimit(resource, Rlimit { current: maximum, maximum }) {
            log::debug!("cannot raise the limit {resource:?}: {error}");
        }
    }
    // Beyond the limit of a file's length a write is EFBIG, for that file alone. The signal would end the daemon.
    // SAFETY: no handler is installed, so no code runs in one.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Waits until the kernel lets go of the mount.
///
/// `BackgroundSession::join` would not do: fuser 0.18 unmounts any mount that is at the mount point by then. That may
/// be the next mount, or one below ours.
fn wait(session: BackgroundSession) -> io::Result<()> {
    let session = ManuallyDrop::new(session);
    // The rest of `session` is leaked: its path, and a reference to the closed connection.
    // SAFETY: the field is read once, and `session` is neither used nor dropped afterwards.
    let thread = unsafe { std::ptr::read(&session.guard) };
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that serves the kernel panicked")))
}

fn set_read_ahead(device: &str, kib: u32) {
    let path = format!("/sys/class/bdi/{device}/read_ahead_kb");
    if let Err(error) = std::fs::write(&path, kib.to_string()) {
        log::debug!("cannot set {path}: {error}");
    }
}

/// Unmounts when a signal says so.
fn watch_signals(point: PathBuf) -> io::Result<(SignalHandle, JoinHandle<()>)> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let handle = signals.handle();
    let thread = std::thread::Builder::new().name("stepfs-signals".into()).spawn(move || {
        let mounted = mounts::find(&point).ok().flatten();
        let mut detached = false;
        for _ in &mut signals {
            if let Some(mounted) = mounted.as_ref().filter(|_| detached) {
                // Programs do not leave it.
                if let Err(error) = mounted.abort() {
                    log::error!("cannot end the connection to the kernel: {error}");
                }
                continue;
            }
            match mounts::take_down(&point, Detach::IfIdle) {
                Ok(()) => detached = true,
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    let holders = mounted.as_ref().map(mounts::Mounted::users_in_words).unwrap_or_default();
                    log::warn!(
                        "{} is in use by: {holders}. It is detached now and ends when they have left it; \
                         signal again to end at once",
                        point.display()
                    );
                    match mounts::take_down(&point, Detach::Lazily) {
                        Ok(()) => detached = true,
                        Err(error) => log::error!("cannot detach {}: {error}", point.display()),
                    }
                }
                Err(error) => log::error!("cannot unmount {}: {error}", point.display()),
            }
        }
    })?;
    Ok((handle, thread))
}

/// What fusermount3 says ends with a line.
fn one_line(error: io::Error) -> io::Error {
    if error.raw_os_error().is_some() { error } else { io::Error::other(error.to_string().trim().to_string()) }
}

/// Why the kernel, or fusermount3, refused a mount.
fn refused(error: io::Error) -> MountError {
    match std::fs::File::options().read(true).write(true).open("/dev/fuse") {
        Err(error) => MountError::Device(error),
        Ok(_) if error.kind() == io::ErrorKind::NotFound && !sys::is_admin() => MountError::NoFusermount,
        Ok(_) => MountError::Mount(one_line(error)),
    }
}

/// Mounts an empty file system on `point` for a moment, as a mount of a store does.
///
/// # Errors
/// This process cannot mount.
pub fn try_mount(point: &Path) -> io::Result<()> {
    struct Nothing;
    impl fuser::Filesystem for Nothing {}
    Session::new(Nothing, point, &config(&MountOptions::default(), Path::new("stepfs-doctor")))
        .map(drop)
        .map_err(one_line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_reaches_the_kernel_as_it_is() {
        assert_eq!(source(Path::new("/a,b\\c"), false), "/a,b\\c");
        assert_eq!(source(Path::new("/a,b\\c"), true), "/a\\,b\\\\c");
    }
}
