//! `stepfs umount`

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::fs::unmount;
use crate::store::{Error, Store};

use super::status::of_mount;
use super::target::Target;

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
    let target = Target::of(&args.dir).ok();
    let daemon =
        target.as_ref().and_then(|target| of_mount(target.mount.as_ref()?).ok()).and_then(|status| status.daemon);
    unmount(&args.dir).with_context(|| format!("{}", args.dir.display()))?;
    let (Some(target), Some(daemon)) = (target, daemon) else { return Ok(ExitCode::SUCCESS) };
    let waited = std::time::Instant::now();
    while waited.elapsed() < PATIENCE {
        match Store::is_locked(&target.store) {
            Ok(true) => std::thread::sleep(Duration::from_millis(10)),
            Ok(false) | Err(Error::Missing(_)) => return Ok(ExitCode::SUCCESS),
            Err(error) => return Err(error.into()),
        }
    }
    bail!("unmounted, but the daemon (process {daemon}) still works on {}", target.store.display())
}
