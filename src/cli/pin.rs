//! `stepfs pin` and `stepfs unpin`

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::store::{PIN, files_below};

use super::format::name;
use super::source::{Local, Mount};

/// Operations that only files and directories have.
const CAN: &str = "be pinned";

/// Keep files, or all files below directories, exactly as they are.
///
/// No retention policy removes a pinned file. A resident file stays as written. A released file stays released (`stepfs
/// recall` brings it back). A pinned file still counts as newer state for older files. A pin follows its file on
/// rename; `cp -a` does not copy it. Same as `setfattr -n user.stepfs.pin -v 1 PATH`.
#[derive(clap::Args)]
#[command(after_help = "Example: stepfs pin /ckpts/run-7/step_100.pt")]
pub(super) struct PinArgs {
    /// Files and directories in a mount.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
}

/// Remove pins: the files may be archived, and removed by a retention policy, like any others.
///
/// Same as `setfattr -x user.stepfs.pin PATH`. Name the pinned path itself: a file below a pinned directory has no pin
/// of its own.
#[derive(clap::Args)]
#[command(after_help = "Example: stepfs unpin /ckpts/run-7/step_100.pt")]
pub(super) struct UnpinArgs {
    /// Files and directories in a mount.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
}

pub(super) fn pin(args: PinArgs) -> Result<()> {
    for path in &args.paths {
        let (mount, local) = Local::in_mount(path)?;
        mount.mark(&local.path, PIN, Some(b"1"), CAN).with_context(|| format!("{}", path.display()))?;
        tell_lossy(path, &mount, &local.path);
    }
    Ok(())
}

/// Tells the user which pinned files are lossy already. A pin does not bring the written bytes back.
fn tell_lossy(shown: &Path, mount: &Mount, path: &Path) {
    let files = files_below(&mount.root, path).unwrap_or_default();
    let is_lossy = |file: &PathBuf| mount.word(file, "lossy").is_ok_and(|word| word.starts_with(b"1"));
    let stays = "a pin keeps the bytes as they are, and no retention policy removes them";
    let shown = name(shown);
    match files.iter().filter(|file| is_lossy(file)).count() {
        0 => {}
        _ if files == [path] => say_error!("stepfs: {shown} is lossy already: {stays}"),
        count => say_error!("stepfs: {count} of {} files in {shown} are lossy already: {stays}", files.len()),
    }
}

pub(super) fn unpin(args: UnpinArgs) -> Result<()> {
    for path in &args.paths {
        let (mount, local) = Local::in_mount(path)?;
        if mount.mark(&local.path, PIN, None, CAN).with_context(|| format!("{}", path.display()))? {
            continue;
        }
        match above(&mount, &local.path) {
            Some(directory) => bail!(
                "{} has no pin of its own; unpin {}, which pins all files below it",
                path.display(),
                directory.display()
            ),
            None => bail!("{} is not pinned", path.display()),
        }
    }
    Ok(())
}

fn above(mount: &Mount, path: &Path) -> Option<PathBuf> {
    let directories = path.ancestors().skip(1).map(|above| mount.at(above));
    directories.into_iter().find(|directory| matches!(xattr::get(directory, PIN), Ok(Some(_))))
}
