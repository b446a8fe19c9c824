//! `stepfs import`

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;

use crate::archive::{Archive, AtRest};
use crate::store::{Store, beneath, import_file, is_store};

use super::format::{name, progress};
use super::mirror::local_path;
use super::source::{Local, Tree, copy, digest, refuse_inside, refuse_new_store};
use super::wait::wait_until;

/// Copy files into a store that is not mounted, and archive them where possible.
///
/// For a mounted store, `cp` into the mount does the same. Import a whole series at once: modification times decide
/// which checkpoint is the newest and stays exact. After an interruption the same command goes on: it compares files that
/// are already there, and copies the others.
#[derive(clap::Args)]
#[command(after_help = "Example: stepfs import ~/ckpts.store run/")]
pub(super) struct Args {
    /// The store; created if missing.
    #[arg(value_parser = local_path())]
    store: PathBuf,
    /// Files and directories.
    #[arg(required = true, value_parser = local_path())]
    files: Vec<PathBuf>,
    /// Directory inside the store to copy them into.
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
}

pub(super) fn run(args: Args) -> Result<()> {
    super::log_to_stderr("warn");
    let to = args.to.unwrap_or_default();
    if to.components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
        bail!("--to {}: name a directory inside the store, without `..`", to.display());
    }
    if let Some(local) = Local::in_some_mount(&args.store)? {
        bail!("{} is in a mount of {}; copy the files there with `cp -a`", args.store.display(), local.store.display());
    }
    refuse_new_store(&args.store)?;
    let tree = Tree::of(Store::open(&args.store)?);
    let mut files = Vec::new();
    for file in &args.files {
        let real = fs::canonicalize(file).with_context(|| format!("{}", file.display()))?;
        refuse_inside(file, &real)?;
        if is_store(&real) {
            bail!("{0} is a store; `stepfs export {0} . DIR` writes its files, and then import DIR", file.display());
        }
        let last = real
            .file_name()
            .with_context(|| format!("{} has no file name; name a file or a directory", file.display()))?;
        list(file, &to.join(last), &mut files)?;
    }
    let total = files.iter().filter_map(|(from, _)| fs::metadata(from).ok()).map(|m| m.len()).sum();
    let bar = progress(total, true);
    let missing = missing(&tree, &files, &bar)?;
    for (from, to) in &missing {
        bar.set_message(name(to));
        import_file(&tree.store, from, to, |count| bar.inc(count))
            .with_context(|| format!("{} to {}", from.display(), to.display()))?;
    }
    bar.finish_and_clear();
    let already = files.len() - missing.len();
    let already = if already > 0 { format!(", {already} already there") } else { String::new() };
    say!("{} copied{already}", missing.len());
    archive(tree.store)?;
    Ok(())
}

/// The files that the store does not have yet, as after an interrupted import.
///
/// # Errors
/// The store has another file by one of the names.
fn missing(tree: &Tree, files: &[(PathBuf, PathBuf)], bar: &ProgressBar) -> Result<Vec<(PathBuf, PathBuf)>> {
    let mut missing = Vec::new();
    for (from, to) in files {
        let found = match beneath::metadata(&tree.store.tree(), to) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                missing.push((from.clone(), to.clone()));
                continue;
            }
            found => found.with_context(|| format!("{}", to.display()))?,
        };
        bar.set_message(name(to));
        let is_same = || Ok(found.is_file() && found.len() == fs::metadata(from)?.len() && holds(tree, to, from, bar)?);
        let is_same: Result<bool> = is_same();
        if !is_same.with_context(|| format!("cannot compare {} with {}", to.display(), from.display()))? {
            bail!(
                "the store already has another {}, and nothing was copied from {}; import into another directory with \
                 `--to DIR`, or remove it in a mount first",
                to.display(),
                from.display()
            );
        }
    }
    Ok(missing)
}

/// Whether the file at `to` in the store has the bytes of `from`, or was archived from them.
fn holds(tree: &Tree, to: &Path, from: &Path, bar: &ProgressBar) -> Result<bool> {
    let wanted = digest(|sink| copy(&File::open(from)?, sink))?;
    let is_same = tree.original(to)? == Some(wanted) || digest(|sink| tree.read(to, sink))? == wanted;
    bar.inc(fs::metadata(from)?.len());
    Ok(is_same)
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
    let done = wait_until(|| Ok(archive.queue()), || Ok(None), |_| false).context("imported, but not all archived");
    archive.stop();
    match done?.failed.as_slice() {
        [] => Ok(()),
        failed => bail!("imported, but kept as they were: {}", failed.join("; ")),
    }
}
