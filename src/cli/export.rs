//! `stepfs export`

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;

use crate::store::{Objects, Store, beneath, copy_attributes, copy_but_owner, durable};

use super::files::{objects, read};
use super::survey::files;
use super::words::{name, progress};

/// Copy a file or directory out of a store, without a mount.
///
/// Released files come out decoded; mode, owner and times are kept as far as permitted. The store may be mounted.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The store.
    store: PathBuf,
    /// Path inside it; `.` for everything.
    path: PathBuf,
    /// Where to put it; an existing directory takes it by its name.
    dest: PathBuf,
    /// Replace files that are there already.
    #[arg(long)]
    force: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    super::log_to_stderr("warn");
    let store = Store::look(&args.store)?;
    let objects = objects(&store)?;
    let from = if args.path == Path::new(".") { PathBuf::new() } else { args.path.clone() };
    let files = files(&store, &from)?;
    let total =
        files.iter().filter_map(|path| fs::symlink_metadata(store.tree().join(path)).ok()).map(|m| m.len()).sum();
    let dest = match (args.dest.is_dir(), from.file_name()) {
        (true, Some(last)) => args.dest.join(last),
        _ => args.dest.clone(),
    };
    let bar = progress(total, true);
    for path in &files {
        let rest = path.strip_prefix(&from).unwrap_or(path);
        let target = if rest.as_os_str().is_empty() { dest.clone() } else { dest.join(rest) };
        bar.set_message(name(&path.display().to_string()));
        if !args.force && fs::symlink_metadata(&target).is_ok() {
            bail!("{} exists already; name another place, or replace it with --force", target.display());
        }
        export(&store, &objects, path, &target, &bar)?;
    }
    bar.finish_and_clear();
    Ok(ExitCode::SUCCESS)
}

/// Writes beside the target and renames, so that an interrupted export leaves no half file under its name.
fn export(store: &Store, objects: &Objects, path: &Path, target: &Path, bar: &ProgressBar) -> Result<()> {
    let directory = durable::parent(target);
    fs::create_dir_all(directory).with_context(|| format!("{}", directory.display()))?;
    let mut part = target.file_name().unwrap_or_default().to_os_string();
    part.push(".stepfs-export");
    let part = directory.join(part);
    durable::remove(&part)?;
    let write = || -> Result<()> {
        let file = durable::create_new(&part).with_context(|| format!("{}", part.display()))?;
        read(store, objects, path, &mut |offset, bytes| {
            bar.inc(bytes.len() as u64);
            file.write_all_at(bytes, offset)
        })?;
        let source = beneath::hold(&store.tree(), path)?;
        let metadata = source.metadata()?;
        copy_attributes(&source, &metadata, &file)
            .or_else(|_| copy_but_owner(&source, &metadata, &file))
            .with_context(|| format!("{}: mode and times", part.display()))?;
        durable::sync_file(&file)?;
        Ok(fs::rename(&part, target)?)
    };
    write().inspect_err(|_| {
        let _ = durable::remove(&part);
    })
}
