//! `stepfs import`

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, bail};

use crate::archive::{Archive, AtRest};
use crate::store::{Store, import_file};

use super::format::{name, progress};
use super::wait::wait_for;

/// Copy files into a store that is not mounted, and archive them where possible.
///
/// For a mounted store, `cp` into the mount does the same. Import a whole series at once: modification times decide
/// which checkpoint is the newest and stays exact.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The store; created if missing.
    store: PathBuf,
    /// Files and directories.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Directory inside the store to copy them into.
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    super::log_to_stderr("warn");
    let to = args.to.unwrap_or_default();
    if to.components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
        bail!("--to {}: name a directory inside the store, without `..`", to.display());
    }
    let store = Store::open(&args.store)?;
    let mut files = Vec::new();
    for file in &args.files {
        let real = fs::canonicalize(file).with_context(|| format!("{}", file.display()))?;
        let last = real
            .file_name()
            .with_context(|| format!("{} has no file name; name a file or a directory", file.display()))?;
        list(file, &to.join(last), &mut files)?;
    }
    let total = files.iter().filter_map(|(from, _)| fs::metadata(from).ok()).map(|m| m.len()).sum();
    let bar = progress(total, true);
    for (from, to) in &files {
        bar.set_message(name(&to.display().to_string()));
        import_file(&store, from, to, |count| bar.inc(count))
            .with_context(|| format!("{} to {}", from.display(), to.display()))?;
    }
    bar.finish_and_clear();
    archive(store)?;
    Ok(ExitCode::SUCCESS)
}

fn list(from: &Path, to: &Path, files: &mut Vec<(PathBuf, PathBuf)>) -> Result<()> {
    let metadata = fs::metadata(from).with_context(|| format!("{}", from.display()))?;
    if metadata.is_dir() {
        for entry in fs::read_dir(from).with_context(|| format!("{}", from.display()))? {
            let entry = entry?;
            list(&entry.path(), &to.join(entry.file_name()), files)?;
        }
    } else if metadata.is_file() {
        files.push((from.to_path_buf(), to.to_path_buf()));
    } else {
        bail!("{} is neither a file nor a directory", from.display());
    }
    Ok(())
}

fn archive(store: Store) -> Result<()> {
    let namespace = Arc::new(AtRest::of(&store));
    let archive = Archive::open(store)?;
    archive.start(namespace);
    let done = wait_for(|| Ok(archive.queue()), || Ok(None)).context("imported, but not all archived");
    archive.stop();
    match done?.failed.as_slice() {
        [] => Ok(()),
        failed => bail!("imported, but kept as they were: {}", failed.join("; ")),
    }
}
