//! `stepfs completions` and `stepfs man`: shell completions and manual pages.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;
use clap_mangen::Man;

use super::{Cli, mount_helper};

/// Print shell completions for the commands.
#[derive(clap::Args)]
#[command(after_help = "Example: source <(stepfs completions bash)")]
pub(super) struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

/// Write the manual pages into a directory: one per command, and mount.stepfs.8.
///
/// man(1) finds them in /usr/local/share/man/man1 and man8.
#[derive(clap::Args)]
#[command(after_help = "Example: stepfs man pages && man -l pages/stepfs-mount.1")]
pub(super) struct ManArgs {
    /// Directory for the pages; created if missing.
    dir: PathBuf,
}

pub(super) fn completions(args: CompletionsArgs) -> Result<()> {
    // Into memory first: the crate panics on a closed pipe.
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "stepfs", &mut text);
    io::stdout().write_all(&text)?;
    Ok(())
}

pub(super) fn man(args: ManArgs) -> Result<()> {
    let write = || -> io::Result<()> {
        std::fs::create_dir_all(&args.dir)?;
        clap_mangen::generate_to(Cli::command(), &args.dir)?;
        let command = Cli::command();
        // Hidden among the commands, since mount(8) calls it.
        if let Some(helper) = command.find_subcommand(mount_helper::NAME) {
            let mut text = Vec::new();
            Man::new(helper.clone()).section("8").render(&mut text)?;
            std::fs::write(args.dir.join("mount.stepfs.8"), text)?;
        }
        Ok(())
    };
    write().with_context(|| format!("{}", args.dir.display()))?;
    Ok(())
}
