//! `stepfs umount`

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::fs::{MountError, Mounted};
use crate::store::{Error, Store, is_store};

use super::mirror::local_path;
use super::source::Local;

/// Unmount, and wait until the daemon has ended.
///
/// Programs that use the mount keep it; the message names them. The next mount archives what is left; to wait for it
/// now, run `stepfs sync` first.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs umount /ckpts\n  \
stepfs umount --force /ckpts      although a container or a program holds it")]
pub(super) struct Args {
    /// Where the store is mounted, or the store.
    #[arg(value_parser = local_path())]
    dir: PathBuf,
    /// Also if programs or other mount namespaces hold it: they get errors from then on, and closed files stay safe.
    #[arg(long)]
    force: bool,
}

/// How long a daemon may take to finish its current step before the command reports it.
const PATIENCE: Duration = Duration::from_secs(60);
/// A wait of this length is explained.
const SILENCE: Duration = Duration::from_secs(2);
/// How long another mount namespace may hold the mount: many end within moments.
pub(super) const HELD: Duration = Duration::from_secs(5);
/// How often to look who holds it: that reads a file of each process.
const LOOKS: Duration = Duration::from_secs(1);

pub(super) fn run(args: Args) -> Result<()> {
    let mounted = Mounted::to_unmount(&args.dir)?;
    // A dead mount cannot name its store, but the kernel knows where it was.
    let store = match is_store(&mounted.store) {
        true => mounted.store.clone(),
        false => Local::of(&mounted.point).map_or_else(|_| mounted.store.clone(), |local| local.store),
    };
    let daemon = Store::server(&store, &mounted.point).filter(|daemon| is_ours(*daemon));
    match (mounted.unmount(args.force), daemon.and_then(|daemon| Pid::from_raw(daemon as i32))) {
        // The end of the daemon ends the connection too. It is made to be killed at any moment, and may have ended by itself.
        (Err(MountError::Abort(_)), Some(daemon)) => match kill_process(daemon, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        },
        (done, _) => done?,
    }
    let (began, mut looked, mut told) = (Instant::now(), Instant::now(), false);
    while is_locked(&store, &mounted.point)? || daemon.is_some_and(is_alive) {
        if !args.force && began.elapsed() > HELD && looked.elapsed() > LOOKS {
            if !mounted.held_by().is_empty() {
                return Err(mounted.held().into());
            }
            looked = Instant::now();
        }
        let who = daemon.map_or_else(|| "the daemon".into(), |daemon| format!("the daemon (process {daemon})"));
        if began.elapsed() > PATIENCE {
            bail!("unmounted, but {who} still works on {}; `stepfs umount {0}` waits again", store.display());
        }
        if began.elapsed() > SILENCE && !std::mem::replace(&mut told, true) {
            say_error!("stepfs: waiting for {who} to finish its step (at most {} s)", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn is_locked(store: &Path, point: &Path) -> Result<bool> {
    match Store::is_served_on(store, point) {
        Err(Error::Missing(_)) => Ok(false),
        locked => Ok(locked?),
    }
}

/// Whether a process is a stepfs. The number in a lock may be of another PID namespace.
fn is_ours(process: u32) -> bool {
    let name = |process: &str| fs::read_to_string(format!("/proc/{process}/comm")).ok();
    name(&process.to_string()).is_some_and(|found| Some(found) == name("self"))
}

/// Whether a process has threads that have not ended: until then it may hold files of the store's file system.
fn is_alive(process: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let state = |thread: fs::DirEntry| {
        let text = fs::read_to_string(thread.path().join("stat")).ok()?;
        text.rsplit_once(") ")?.1.chars().next()
    };
    threads.filter_map(state).any(|state| !matches!(state, 'Z' | 'X'))
}
