//! `stepfs sync`

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::archive::Queue;

use super::push;
use super::source::Mount;
use super::wait::wait_until;

/// How long to wait for files that are open: a program may have closed them just now. The kernel tells of that after
/// `close` has returned, and a busy machine passes it on late.
const CLOSING: Duration = Duration::from_millis(500);
/// How often to ask whether some are open.
const INTERVAL: Duration = Duration::from_millis(5);

/// Wait until all files that can be are archived and released.
///
/// The newest checkpoint of each lineage and all open files stay as written. Files that programs save meanwhile do not
/// extend the wait. Where files are open, the wait takes half a second at least.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The mount, or a path in it.
    dir: PathBuf,
    /// Wait until the remote has everything that it can have, too.
    #[arg(long)]
    remote: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    sync(&Mount::of(&args.dir)?, args.remote)
}

/// Waits for a mount, and for its remote if `remote` says so.
///
/// # Errors
/// The work cannot go on, or some files stay as they are; the message gives the reason.
pub(super) fn sync(mount: &Mount, remote: bool) -> Result<ExitCode> {
    let asked_at = Instant::now();
    let queue = || mount.ask::<Queue>("queue");
    while asked_at.elapsed() < CLOSING && queue()?.open > 0 {
        std::thread::sleep(INTERVAL);
    }
    mount.tell(Path::new(""), "sync").with_context(|| format!("{}", mount.root.display()))?;
    let asked = queue()?.newest;
    let done = wait_until(queue, || Ok(None), |now| now.has_done(asked))?;
    if remote {
        push::wait_for_mount(mount)?;
    }
    no_failures(&done)
}

/// Success, unless the archive has given up on files.
///
/// # Errors
/// Names these files.
pub(super) fn no_failures(done: &Queue) -> Result<ExitCode> {
    match done.failed.is_empty() {
        true => Ok(ExitCode::SUCCESS),
        false => bail!("not archived, kept as written: {}", done.failed.join("; ")),
    }
}
