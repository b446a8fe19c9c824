//! `stepfs cat`

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Result, bail};

use super::mirror::tell;
use super::source::Brought;

/// Write a file of a store to standard output, without a mount.
#[derive(clap::Args)]
#[command(after_help = "Example: stepfs cat ~/ckpts.store run/step_100.pt | sha256sum")]
pub(super) struct Args {
    /// The store, a directory in a mount, or the URL of a mirror.
    store: PathBuf,
    /// Path relative to it.
    path: PathBuf,
}

pub(super) fn run(args: Args) -> Result<()> {
    super::log_to_stderr("warn");
    let brought = Brought::find(&args.store, &args.path)?;
    if let Some(why) = brought.missing.names.get(&brought.path) {
        bail!("{}: {why}", args.path.display());
    }
    let tree = brought.tree()?;
    let mut out = std::io::stdout().lock();
    tree.read(&brought.path, &mut |_, bytes| out.write_all(bytes))?;
    out.flush()?;
    // A node that cannot be read may have a newer file of this name.
    tell(&brought.missing)
}
