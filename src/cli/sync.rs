//! `stepfs sync`

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::remote::Progress;

use super::status::queue_of_mount;
use super::target::{Target, attribute};
use super::wait::wait_until;

/// Wait until all files that can be are archived and released.
///
/// The newest checkpoint of each lineage and all open files stay as written. Files that programs save meanwhile do not
/// extend the wait.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The mount, or a path in it.
    dir: PathBuf,
    /// Wait until the remote has everything that it can have, too.
    #[arg(long)]
    remote: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    let mount = Target::mounted(&args.dir)?;
    xattr::set(&mount, "user.stepfs.sync", b"1").with_context(|| format!("{}", mount.display()))?;
    let asked = queue_of_mount(&mount)?.newest;
    let done = wait_until(|| queue_of_mount(&mount), || Ok(None), |now| now.has_done(asked))?;
    if args.remote {
        wait_for_remote(&mount)?;
    }
    match done.failed.is_empty() {
        true => Ok(ExitCode::SUCCESS),
        false => bail!("not archived, kept as written: {}", done.failed.join("; ")),
    }
}

/// How often to ask how far pushing has come.
const INTERVAL: Duration = Duration::from_millis(50);
/// How long to wait while the remote does not answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until all present changes are on the remote.
fn wait_for_remote(mount: &Path) -> Result<()> {
    let ask = || -> Result<Progress> {
        let Ok(text) = attribute(mount, "remote") else {
            bail!("{} is mounted without a remote (`stepfs mount --remote URL`)", mount.display());
        };
        Ok(serde_json::from_slice(&text)?)
    };
    let wanted = ask()?.changes;
    let mut failing: Option<Instant> = None;
    loop {
        let now = ask()?;
        if now.pushed >= wanted {
            return Ok(());
        }
        match now.failing {
            Some(why) if failing.get_or_insert_with(Instant::now).elapsed() > PATIENCE => {
                bail!("{} files are not on the remote yet: {why}; it goes on by itself once that is fixed", now.files);
            }
            Some(_) => {}
            None => failing = None,
        }
        std::thread::sleep(INTERVAL);
    }
}
