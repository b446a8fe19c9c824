//! `stepfs profile`

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::store::{PROFILE, Profile};
use papers::registry::SystemId;

use super::format::name;
use super::source::Local;

/// Show or set how faithfully files are kept once a newer file of their lineage is durable.
///
/// exact: bit for bit. balanced: going on from an old checkpoint costs at most half an iteration, or 1% of the distance to
/// the checkpoint before it if that is more. compact: two iterations or 4%. docs/QUALITY.md has the intervals that were
/// measured. For comparison there are also published systems, listed below.
///
/// A profile on a file, or on a directory for all files below it, overrides the rules of stepfs.toml. The nearest one
/// wins. It applies when a file is archived; released files do not change. It follows its file on rename; `cp -a` does
/// not copy it. Same as `setfattr -n user.stepfs.profile -v NAME PATH`.
#[derive(clap::Args)]
#[command(after_help = systems())]
pub(super) struct Args {
    /// Files and directories in a mount.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// exact, balanced or compact; or a published system.
    #[arg(long, value_name = "NAME", conflicts_with = "unset")]
    set: Option<Profile>,
    /// Remove the profile, so that the rules or a directory above decide again.
    #[arg(long)]
    unset: bool,
}

/// The published systems, one per line.
fn systems() -> String {
    let mut words = "Examples:\n  \
stepfs profile --set exact /ckpts/run-7\n  \
stepfs profile /ckpts/run-7\n\n\
Published systems; models are kept as in their papers, everything else lossless:\n"
        .to_string();
    SystemId::usual().for_each(|system| words += &format!("  {:16}  {}\n", system.to_string(), system.about()));
    words
        + "\nInshrinkerator's other configurations have names such as\n\
             inshrinkerator-12bins-embedding32-prune30-sensitivity-protect0.5, with the parts in this order;\n\
             parts left out have their usual value. `stepfs tune` finds a suitable one."
}

pub(super) fn run(args: Args) -> Result<()> {
    for path in &args.paths {
        let (mount, local) = Local::in_mount(path)?;
        let shown = || name(path);
        let mark = |value| mount.mark(&local.path, PROFILE, value, "have a profile").with_context(shown);
        if let Some(profile) = args.set {
            mark(Some(profile.name().as_bytes()))?;
        } else if args.unset {
            if !mark(None)? {
                bail!(
                    "{}: it has no profile of its own; a directory above it or a rule decides: `stepfs profile {0}`",
                    shown()
                );
            }
        } else {
            let words = match mount.word(&local.path, "profile") {
                Err(error) if error.raw_os_error() == Some(libc::ENODATA) => "by the rules of stepfs.toml".into(),
                value => String::from_utf8_lossy(&value.with_context(shown)?).into_owned(),
            };
            say!("{}  {}", shown(), name(&words));
        }
    }
    Ok(())
}
