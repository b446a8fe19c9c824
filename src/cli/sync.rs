//! `stepfs sync`

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use super::push;
use super::status::queue_of_mount;
use super::target::Target;
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
        push::wait_for_mount(&mount)?;
    }
    match done.failed.is_empty() {
        true => Ok(ExitCode::SUCCESS),
        false => bail!("not archived, kept as written: {}", done.failed.join("; ")),
    }
}
