//! `stepfs mount`

use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};

use crate::archive::Archive;
use crate::fs::{MountOptions, clear_dead_mount, serve};
use crate::store::{Profile, Store};

use super::words::parse_size;

/// A daemon's log above this size is begun anew at the next mount.
const LOG_BYTES: u64 = 16 << 20;
/// What the daemon says to the command that started it, once it serves.
const READY: &str = "ready";

/// Mount a store on a directory; make the store when there is none.
///
/// Returns when the mount serves; the daemon goes on in the background until `stepfs umount`. With CAP_SYS_ADMIN
/// (root) the kernel reads and writes resident files by itself, at the speed of the disk below.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Directory of the store; on a local disk with room for the newest checkpoints.
    store: PathBuf,
    /// Directory to mount it on; made when missing.
    dir: PathBuf,
    /// Stay in the foreground and log to standard error.
    #[arg(long)]
    foreground: bool,
    /// Let other users in, as far as modes permit.
    #[arg(long)]
    allow_other: bool,
    /// Answer every read and write in the daemon, as without CAP_SYS_ADMIN.
    #[arg(long)]
    no_passthrough: bool,
    /// Makes this the store's default profile (`default_profile` in its stepfs.toml): exact, balanced, compact, or a published
    /// system such as lc-3. Rules there and `stepfs profile` go before it.
    #[arg(long, value_name = "NAME")]
    profile: Option<Profile>,
    /// Memory for decoded states, which make reads and the next checkpoint's encoding quick: bytes, or with K, M, G.
    /// A tenth of the machine's memory, at most 2G, unless given; 0 for none.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,
    /// Log file of the daemon; STORE/daemon.log unless given.
    #[arg(long)]
    log: Option<PathBuf>,
    /// Started by `stepfs mount`.
    #[arg(long, hide = true)]
    child: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    clear_dead_mount(&args.dir).with_context(|| format!("{}", args.dir.display()))?;
    fs::create_dir_all(&args.dir).with_context(|| format!("{}", args.dir.display()))?;
    match args.foreground || args.child {
        true => daemon(&args),
        false => start(&args),
    }
}

/// Starts the daemon and waits until it serves or has said why not.
fn start(args: &Args) -> Result<ExitCode> {
    // Opening and closing the store first gives its errors here, and makes the place for the log.
    drop(open(args)?);
    let log = args.log.clone().unwrap_or_else(|| args.store.join("daemon.log"));
    // In a store that somebody else made it may lead anywhere; what the user names may be a link.
    let flags = if args.log.is_none() { libc::O_NOFOLLOW | libc::O_NONBLOCK } else { 0 };
    let fresh = fs::symlink_metadata(&log).is_ok_and(|metadata| metadata.len() > LOG_BYTES);
    let log_file = OpenOptions::new()
        .create(true)
        .write(true)
        .append(!fresh)
        .truncate(fresh)
        .mode(0o600)
        .custom_flags(flags)
        .open(&log)
        .with_context(|| format!("{}", log.display()))?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("mount").arg(fs::canonicalize(&args.store)?).arg(fs::canonicalize(&args.dir)?).arg("--child");
    if args.allow_other {
        command.arg("--allow-other");
    }
    if let Some(memory) = args.memory {
        command.arg("--memory").arg(memory.to_string());
    }
    if args.no_passthrough {
        command.arg("--no-passthrough");
    }
    let mut child = command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log_file).spawn()?;
    let mut said = String::new();
    if let Some(mut pipe) = child.stdout.take() {
        let mut buf = [0; 512];
        while let Ok(count @ 1..) = pipe.read(&mut buf) {
            said.push_str(&String::from_utf8_lossy(&buf[..count]));
            if said.trim_end() == READY {
                return Ok(ExitCode::SUCCESS);
            }
        }
    }
    let status = child.wait()?;
    match said.trim() {
        "" => bail!("the daemon ended ({status}); its log is {}", log.display()),
        said => bail!("{said}"),
    }
}

/// Serves the mount until it is unmounted.
fn daemon(args: &Args) -> Result<ExitCode> {
    super::log_to_stderr("info");
    super::buffers::keep_few();
    if args.child {
        // A session of its own: closing the terminal or Ctrl-C there must not end the mount.
        // It fails harmlessly where the process leads a group already.
        let _ = rustix::process::setsid();
    }
    match serve_store(args) {
        Err(error) if args.child => {
            println!("{}", super::words::causes(&error));
            Ok(ExitCode::from(super::FAILED))
        }
        result => result.map(|()| ExitCode::SUCCESS),
    }
}

/// Opens the store. The profile that is asked for is written down: `stepfs ls` and the next mount are to know it, too.
fn open(args: &Args) -> Result<Store> {
    let mut store = Store::open(&args.store)?;
    if let Some(profile) = args.profile {
        store.set_default_profile(profile)?;
    }
    Ok(store)
}

fn serve_store(args: &Args) -> Result<()> {
    let store = open(args)?;
    let inside = |path: &Path| fs::canonicalize(path).is_ok_and(|path| path.starts_with(store.root()));
    if inside(&args.dir) {
        bail!("{} lies in the store itself; mount it somewhere else", args.dir.display());
    }
    log::info!("store {} ({})", store.root().display(), store.id());
    let archive = match args.memory {
        Some(memory) => Archive::open_with(store, memory)?,
        None => Archive::open(store)?,
    };
    let options =
        MountOptions { allow_other: args.allow_other, no_passthrough: args.no_passthrough, ..MountOptions::default() };
    serve(archive, &args.dir, &options, || {
        log::info!("mounted on {}", args.dir.display());
        if args.child {
            println!("{READY}");
        }
    })
    .with_context(|| format!("cannot mount on {}", args.dir.display()))?;
    log::info!("unmounted {}", args.dir.display());
    Ok(())
}
