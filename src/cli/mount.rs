//! `stepfs mount`

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::archive::{Archive, serving};
use crate::fs::{MountOptions, clear_dead_mount, is_served, left_of, serve_with};
use crate::recall::usual_memory;
use crate::store::shared::log_dir;
use crate::store::{DAEMON_LOG, Error, Store, is_store, real};

use super::format::count;
use super::mirror::{self, local_path};
use super::mount_options::Options;
use super::passthrough;
use super::source::{Mount, mounted_on, refuse_new_store};
use super::umount::HELD;
use super::{Exit, FAILED};

/// A daemon's log above this size is truncated at the next mount.
const LOG_BYTES: u64 = 16 << 20;
/// Lines of its log that say why a daemon ended: a panic takes some three.
const LAST_LINES: usize = 5;
/// The daemon's message to the command that started it, once it serves.
const READY: &str = "ready";
/// How long to wait for the daemon of a mount that was just unmounted. It finishes its current step first.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often idle buffers go back to the allocator.
const BUFFER_INTERVAL: Duration = Duration::from_secs(60);

/// Mount a store on a directory; create the store if missing.
///
/// Returns when the mount serves. The daemon runs in the background until `stepfs umount`. With CAP_SYS_ADMIN (root)
/// the kernel reads and writes resident files by itself, at the speed of the disk below.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs mount ~/ckpts.store /ckpts\n  \
stepfs mount ~/ckpts.store /ckpts --mirror s3://bucket/run-7")]
pub(super) struct Args {
    /// Directory of the store, on a local disk with room for the newest checkpoints.
    #[arg(value_parser = local_path())]
    store: PathBuf,
    /// Directory to mount it on; created if missing.
    #[arg(value_parser = local_path())]
    dir: PathBuf,
    /// Stay in the foreground and log to standard error.
    #[arg(long)]
    foreground: bool,
    #[command(flatten)]
    flags: Options,
    /// Options as in /etc/fstab, between commas: ro, noexec, noatime, allow_other, profile=NAME and others. As root,
    /// user=NAME serves as that user, at the speed of the disk.
    #[arg(short, value_name = "OPTIONS", value_parser = Options::checked)]
    options: Vec<String>,
    /// Started by `stepfs mount`.
    #[arg(long, hide = true)]
    child: bool,
    /// Standard input is the socket of a passthrough helper.
    #[arg(long, hide = true)]
    helper: bool,
}

/// A store, its mount point and the options.
pub(super) struct Mounting {
    pub(super) store: PathBuf,
    pub(super) dir: PathBuf,
    pub(super) options: Options,
    /// The socket of a helper for passthrough.
    pub(super) helper: Option<OwnedFd>,
}

pub(super) fn run(args: Args) -> Result<()> {
    let mut options = args.flags;
    options.add(&args.options.join(",")).map_err(anyhow::Error::msg)?;
    let mut helper = args.helper.then(|| io::stdin().as_fd().try_clone_to_owned()).transpose()?;
    if let Some(user) = &options.user {
        helper = passthrough::serve_as(user, !options.no_passthrough)?;
    }
    // Absolute: a shell may stand in the dead mount that goes now.
    let dir = crate::fs::absolute(&args.dir).or_else(|_| std::path::absolute(&args.dir));
    let mounting = Mounting {
        dir: dir.with_context(|| format!("{}", args.dir.display()))?,
        store: std::path::absolute(args.store)?,
        options,
        helper,
    };
    let is_inside = std::env::current_dir().is_ok_and(|at| at.starts_with(&mounting.dir));
    if clear_dead_mount(&mounting.dir)? && is_inside {
        say_error!("stepfs: your shell stands in the former mount; `cd \"$PWD\"` enters the new one");
    }
    if !args.foreground && !args.child && is_mounted(&mounting)? {
        return Ok(());
    }
    if mounting.dir.exists() && !mounting.dir.is_dir() {
        bail!("{} is a file; name a directory to mount the store on", mounting.dir.display());
    }
    let created = Created::before(&mounting.store, &mounting.dir);
    let made = fs::create_dir_all(&mounting.dir);
    let made = made.with_context(|| format!("cannot make the mount point {}", mounting.dir.display()));
    let done = made.and_then(|()| match (args.foreground, args.child) {
        (false, false) => start(&mounting),
        (_, child) => daemon(&mounting, child),
    });
    // The command that started a daemon removes the new directories.
    done.inspect_err(|error| {
        if !error.is::<Exit>() {
            created.remove()
        }
    })
}

/// Whether the store is mounted at this place already; says so. Its store is not opened: a daemon has it.
///
/// # Errors
/// It is mounted elsewhere.
fn is_mounted(mounting: &Mounting) -> Result<bool> {
    let Mounting { store, dir, options, .. } = mounting;
    if !Store::is_served_on(store, dir).unwrap_or(false) {
        return Ok(false);
    }
    let wanted = fs::canonicalize(store)?;
    let Some(mounted) = mounted_on(&wanted, dir) else { return Ok(false) };
    if mounted.point != *dir {
        return Err(Store::in_use(store).into());
    }
    let (shown, at) = (store.display(), dir.display());
    let opened = Store::look(store)?;
    let url = opened.settings().mirror.as_ref().map(|mirror| mirror.url.clone());
    if options.mirror.is_some() && options.mirror != url {
        bail!("{shown} is already mounted at {at}, without this mirror; first `stepfs umount {at}`");
    }
    if options.profile.is_some_and(|profile| profile != opened.settings().default_profile()) {
        let profile = opened.settings().default_profile().name();
        bail!("{shown} is already mounted at {at}, with default_profile = {profile}; first `stepfs umount {at}`");
    }
    let daemon = Mount { root: mounted.point.clone() }.other_version();
    let by = daemon.map_or(String::new(), |daemon| format!(" by {daemon} (this is {})", crate::version()));
    say_error!(
        "stepfs: {shown} is already mounted at {at}{by}, and keeps its options; for others, first `stepfs umount {at}`"
    );
    Ok(true)
}

/// Says that the mount point has files of its own: a run that looks for its last checkpoint would not see them.
fn tell_hidden(dir: &Path) {
    let hidden = fs::read_dir(dir).map_or(0, Iterator::count);
    if hidden > 0 {
        let (dir, names) = (dir.display(), count(hidden, "name"));
        say_error!(
            "stepfs: {dir} has {names} of its own, which the mount hides until `stepfs umount {dir}`; \
             `stepfs import STORE {dir}/*` brings files into an unmounted store"
        );
    }
}

/// Starts the daemon and waits until it serves or reports an error.
///
/// # Errors
/// The daemon does not serve; the message gives the reason.
pub(super) fn start(mounting: &Mounting) -> Result<()> {
    let Mounting { store, dir, options, helper } = mounting;
    // Open and close the store and its mirror first: their errors appear here, and the log gets a directory.
    mirror::connect(&open(mounting)?, dir)?;
    tell_hidden(dir);
    let log = options.log.clone().unwrap_or_else(|| log_dir(store, dir).join(DAEMON_LOG));
    // In a store that another user made, the default log may be a link to any file. A log that the user names may be a
    // link.
    let flags = if options.log.is_none() { libc::O_NOFOLLOW | libc::O_NONBLOCK } else { 0 };
    let fresh = fs::symlink_metadata(&log).is_ok_and(|metadata| metadata.len() > LOG_BYTES);
    let log_file = OpenOptions::new()
        .create(true)
        .write(true)
        .append(!fresh)
        .truncate(fresh)
        .mode(0o600)
        .custom_flags(flags)
        .open(&log)
        .with_context(|| format!("cannot write the log {}", log.display()))?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("mount").arg(fs::canonicalize(store)?).arg(fs::canonicalize(dir)?);
    command.args(["--child", "-o", &options.of_daemon()]);
    passthrough::leave_terminal(&mut command);
    if options.user.is_some() {
        passthrough::leave_environment(&mut command);
    }
    let stdin = match helper {
        Some(socket) => {
            command.arg("--helper");
            Stdio::from(socket.try_clone()?)
        }
        None => Stdio::null(),
    };
    let mut child = command.current_dir("/").stdin(stdin).stdout(Stdio::piped()).stderr(log_file).spawn()?;
    let mut said = String::new();
    if let Some(mut pipe) = child.stdout.take() {
        let mut buf = [0; 512];
        while let Ok(count @ 1..) = pipe.read(&mut buf) {
            said.push_str(&String::from_utf8_lossy(&buf[..count]));
            if said.trim() == READY {
                return Ok(());
            }
        }
    }
    let status = child.wait()?;
    match said.trim() {
        "" => bail!("the daemon ended ({status}); the end of its log:\n{}", end_of(&log)),
        said => bail!("{said}"),
    }
}

/// The last lines of a log. The log itself goes with a store that was made for this mount.
fn end_of(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
}

/// Serves the mount until it is unmounted.
fn daemon(mounting: &Mounting, child: bool) -> Result<()> {
    super::log_to_stderr("info");
    keep_few_buffers();
    if !child {
        tell_hidden(&mounting.dir);
    }
    let ready = || match child {
        true => say!("{READY}"),
        false => notify("READY=1"),
    };
    match serve_store(mounting, ready) {
        Err(error) if child => {
            say!("{}", super::format::causes(&error));
            Err(Exit(FAILED).into())
        }
        result => result,
    }
}

/// Opens the store. Saves the given profile and mirror in the store, for `stepfs ls` and the next mount.
fn open(mounting: &Mounting) -> Result<Store> {
    let (shown, dir) = (mounting.store.display(), mounting.dir.display());
    match (is_store(&mounting.store), is_store(&mounting.dir)) {
        (false, true) => {
            bail!("{dir} is a store, and {shown} is none; the store comes first: stepfs mount {dir} {shown}")
        }
        (true, true) => bail!("{dir} is a store; name another directory to mount {shown} on"),
        _ => refuse_new_store(&mounting.store)?,
    }
    if real(&mounting.store).starts_with(real(&mounting.dir)) {
        bail!("{dir} and the store {shown} lie in one another; mount it somewhere else");
    }
    if mounting.options.shared {
        Store::create_shared(&mounting.store)?;
    }
    let is_shared = is_store(&mounting.store) && Store::look(&mounting.store)?.settings().shared;
    if mounting.options.shared && !is_shared {
        bail!(
            "{shown} is a store of one daemon at a time; --shared makes a new store: name a new directory, and \
             `stepfs export {shown} . DIR` copies the files"
        );
    }
    if is_shared {
        if mounting.options.mirror.is_some() {
            bail!("{shown} is a shared store, which cannot have a mirror yet; leave out --mirror");
        }
        if mounting.options.profile.is_some() {
            bail!("{shown} is a shared store; write default_profile in {shown}/stepfs.toml while no daemon serves it");
        }
        return Ok(Store::join(&mounting.store, &mounting.dir)?);
    }
    let mut store = open_after_the_last(&mounting.store)?;
    if let Some(profile) = mounting.options.profile {
        store.set_default_profile(profile)?;
    }
    if let Some(url) = &mounting.options.mirror {
        mirror::adopt(&mut store, url, &mounting.dir)?;
    }
    Ok(store)
}

/// Opens the store once the daemon of the last mount has ended. A store that is still mounted is an error at once.
fn open_after_the_last(path: &Path) -> Result<Store> {
    let began = Instant::now();
    let mut told = false;
    loop {
        let error = match Store::open(path) {
            Ok(store) => return Ok(store),
            Err(error) => error,
        };
        let Error::Busy { holder, .. } = &error else { return Err(error.into()) };
        // `None`: the process may not be examined, so it may or may not serve a mount.
        let served = holder.parse().ok().and_then(|daemon| is_served(path, daemon));
        if served == Some(true) {
            return Err(error.into());
        }
        // The daemon serves a container, say, for as long as that wants.
        let left = || fs::canonicalize(path).ok().and_then(|path| left_of(&path));
        if let Some(left) = Some(began.elapsed() > HELD).filter(|late| *late).and_then(|_| left()) {
            return Err(left.held().into());
        }
        if began.elapsed() > PATIENCE {
            let waited = format!("waited {} s for process {holder} to end", PATIENCE.as_secs());
            return Err(anyhow::Error::new(error).context(waited));
        }
        if !std::mem::replace(&mut told, true) {
            let (store, most) = (path.display(), PATIENCE.as_secs());
            say_error!("stepfs: waiting for process {holder}, which still works on {store} (at most {most} s)");
        }
    }
}

fn serve_store(mounting: &Mounting, ready: impl FnOnce()) -> Result<()> {
    let Mounting { dir, options, helper, .. } = mounting;
    let store = open(mounting)?;
    let inside = |path: &Path| fs::canonicalize(path).is_ok_and(|path| path.starts_with(store.root()));
    if inside(dir) {
        bail!("{} is inside the store; name a directory outside it", dir.display());
    }
    log::info!("store {} ({})", store.root().display(), store.id());
    let mirror = mirror::connect(&store, dir)?;
    let memory = options.memory.unwrap_or_else(usual_memory);
    let archive = if store.is_shared() { serving(store, memory)? } else { Archive::open_with(store, memory)? };
    let options = MountOptions {
        allow_other: options.allow_other,
        no_passthrough: options.no_passthrough,
        helper: if options.no_passthrough { None } else { passthrough::client(helper.as_ref()) },
        kernel: options.kernel.clone(),
        ..MountOptions::default()
    };
    let connected = Arc::clone(&archive);
    let connect = || {
        let Some((place, settings)) = mirror else { return Ok(()) };
        log::info!("mirror {}", settings.url);
        connected.mirror().connect(place, settings)
    };
    serve_with(archive, dir, &options, connect, || {
        log::info!("mounted on {}", dir.display());
        ready();
    })
    .with_context(|| format!("cannot mount on {}", dir.display()))?;
    log::info!("unmounted {}", dir.display());
    Ok(())
}

/// Frees the daemon's unused buffers, which it keeps for the next tile, when idle. `src/main.rs` sets how long the
/// allocator itself keeps memory. Call it once.
fn keep_few_buffers() {
    let give_back = || {
        loop {
            std::thread::sleep(BUFFER_INTERVAL);
            codec::entropy::scratch::let_go();
        }
    };
    // Without the thread the daemon only uses more memory.
    let _ = std::thread::Builder::new().name("buffers".into()).spawn(give_back);
}

/// Sends a line such as `READY=1` to the service manager (systemd's `Type=notify`), if `NOTIFY_SOCKET` is set.
fn notify(state: &str) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    // A name that begins with @ is an abstract address, not a file.
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&name),
    };
    if let Err(error) = address.and_then(|address| send(&address, state)) {
        log::warn!("cannot tell the service manager {state} ({}): {error}", name.display());
    }
}

fn send(address: &SocketAddr, state: &str) -> io::Result<()> {
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), address).map(drop)
}

/// What a `stepfs mount` creates, so that it goes again if the mount fails: the places that are missing before.
pub(super) struct Created {
    /// The mount point and the directories above it, the deepest first.
    directories: Vec<PathBuf>,
    /// The store, if it is new.
    store: Option<PathBuf>,
}

impl Created {
    /// Call this before anything is created.
    pub(super) fn before(store: &Path, dir: &Path) -> Created {
        let above = dir.ancestors().filter(|above| !above.as_os_str().is_empty());
        Created {
            directories: above.take_while(|above| is_missing(above)).map(Path::to_path_buf).collect(),
            store: is_missing(store).then(|| store.to_path_buf()),
        }
    }

    /// Removes what is still empty. Another program may have come to use it.
    pub(super) fn remove(self) {
        // The daemon or another process may have the store: then it stays.
        if let Some(store) = self.store.filter(|store| store.exists()).and_then(|store| Store::open(&store).ok()) {
            let root = store.root().to_path_buf();
            if let Err(error) = store.remove_if_empty() {
                log::warn!("{}: cannot be removed: {error}", root.display());
            }
        }
        for directory in self.directories {
            if fs::remove_dir(directory).is_err() {
                break;
            }
        }
    }
}

fn is_missing(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}
