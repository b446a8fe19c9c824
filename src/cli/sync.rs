//! `stepfs sync`

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::place::Place;
use super::status::queue_of_mount;
use super::words::progress;

/// Wait until everything is archived and released that can be.
///
/// The newest checkpoint of each lineage stays as it was written, and so does a file that somebody has open.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The mount, or a path in it.
    dir: PathBuf,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    let mount = Place::mounted(&args.dir)?;
    xattr::set(&mount, "user.stepfs.sync", b"1").with_context(|| format!("{}", mount.display()))?;
    let mut total = 0;
    let mut bar = None;
    let mut stalled = 0;
    loop {
        let status = queue_of_mount(&mount)?;
        if status.queued == 0 {
            return match status.failed.is_empty() {
                true => Ok(ExitCode::SUCCESS),
                false => bail!("not archived, kept as written: {}", status.failed.join("; ")),
            };
        }
        // Room may be made any moment, but nobody should wait for ever for it.
        stalled = if status.stalled.is_some() { stalled + 1 } else { 0 };
        if stalled > 100 {
            bail!("stalled: {}; it goes on by itself once that is mended", status.stalled.unwrap_or_default());
        }
        total = total.max(status.queued);
        let bar = bar.get_or_insert_with(|| progress(total, false));
        bar.set_message("archiving");
        bar.set_length(total);
        bar.set_position(total - status.queued);
        std::thread::sleep(Duration::from_millis(50));
    }
}
