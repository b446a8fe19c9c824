//! `stepfs umount`

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::archive::Status;
use crate::fs::unmount;
use crate::store::{Error, Store};

use super::source::Local;

/// Unmount, and wait until the daemon has ended.
///
/// The next mount archives what is left; to wait for it now, run `stepfs sync` first.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Where the store is mounted.
    dir: PathBuf,
}

/// How long a daemon may take to finish its current step before the command reports it.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn run(args: Args) -> Result<ExitCode> {
    // A dead mount cannot name its store, but can still be unmounted.
    let local = Local::of(&args.dir).ok();
    let status = local.as_ref().and_then(|local| local.mount.as_ref()?.ask::<Status>("status").ok());
    unmount(&args.dir).with_context(|| format!("{}", args.dir.display()))?;
    let (Some(local), Some(daemon)) = (local, status.and_then(|status| status.daemon)) else {
        return Ok(ExitCode::SUCCESS);
    };
    let waited = std::time::Instant::now();
    while waited.elapsed() < PATIENCE {
        match Store::is_locked(&local.store) {
            Ok(true) => std::thread::sleep(Duration::from_millis(10)),
            Ok(false) | Err(Error::Missing(_)) => return Ok(ExitCode::SUCCESS),
            Err(error) => return Err(error.into()),
        }
    }
    bail!("unmounted, but the daemon (process {daemon}) still works on {}", local.store.display())
}
