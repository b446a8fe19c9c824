//! `stepfs export`

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;

use crate::archive::repair;
use crate::store::{Objects, Store, copy_attributes, copy_but_owner, durable};

use super::files::{objects, read};
use super::survey::{files, stub};
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
    /// Of one damaged file write the tensors that can still be read, as safetensors, and name those that are lost. Exit code 3 if
    /// there are any.
    #[arg(long)]
    salvage: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    super::log_to_stderr("warn");
    let store = Store::look(&args.store)?;
    if args.salvage {
        return salvage(&store, &args);
    }
    let objects = objects(&store)?;
    let from = if args.path == Path::new(".") { PathBuf::new() } else { args.path.clone() };
    let files = files(&store, &from)?;
    let total =
        files.iter().filter_map(|path| fs::symlink_metadata(store.tree().join(path)).ok()).map(|m| m.len()).sum();
    let dest = match (args.dest.is_dir(), from.file_name()) {
        (true, Some(name)) => args.dest.join(name),
        _ => args.dest.clone(),
    };
    let bar = progress(total, true);
    for path in &files {
        let rest = path.strip_prefix(&from).unwrap_or(path);
        let target = if rest.as_os_str().is_empty() { dest.clone() } else { dest.join(rest) };
        bar.set_message(path.display().to_string());
        if !args.force && fs::symlink_metadata(&target).is_ok() {
            bail!("{} exists already; name another place, or replace it with --force", target.display());
        }
        export(&store, &objects, path, &target, &bar)?;
    }
    bar.finish_and_clear();
    Ok(ExitCode::SUCCESS)
}

/// What can still be read of a damaged file.
fn salvage(store: &Store, args: &Args) -> Result<ExitCode> {
    let shown = || args.path.display().to_string();
    let stub = stub(store, &args.path)?.with_context(|| format!("{} is not released: copy it as it is", shown()))?;
    if !args.force && fs::symlink_metadata(&args.dest).is_ok() {
        bail!("{} exists already; name another place, or replace it with --force", args.dest.display());
    }
    let part = part_of(&args.dest);
    durable::remove(&part)?;
    let write = || -> Result<repair::Salvaged> {
        let file = durable::create_new(&part).with_context(|| format!("{}", part.display()))?;
        let salvaged = repair::salvage(store, stub.object, &file).with_context(shown)?;
        durable::sync_file(&file)?;
        fs::rename(&part, &args.dest)?;
        Ok(salvaged)
    };
    let salvaged = write().inspect_err(|_| {
        let _ = durable::remove(&part);
    })?;
    for (tensor, why) in &salvaged.lost {
        println!("lost: {}: {}", name(tensor), name(why));
    }
    println!("{} tensors written, {} lost", salvaged.written.len(), salvaged.lost.len());
    Ok(if salvaged.lost.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(super::DAMAGED) })
}

/// Where a file is written before it gets its name.
fn part_of(target: &Path) -> PathBuf {
    let mut name = target.file_name().unwrap_or_default().to_os_string();
    name.push(".stepfs-export");
    durable::parent(target).join(name)
}

/// Writes beside the target and renames, so that an interrupted export leaves no half file under its name.
fn export(store: &Store, objects: &Objects, path: &Path, target: &Path, bar: &ProgressBar) -> Result<()> {
    let directory = durable::parent(target);
    fs::create_dir_all(directory).with_context(|| format!("{}", directory.display()))?;
    let part = part_of(target);
    durable::remove(&part)?;
    let write = || -> Result<()> {
        let file = durable::create_new(&part).with_context(|| format!("{}", part.display()))?;
        read(store, objects, path, &mut |offset, bytes| {
            bar.inc(bytes.len() as u64);
            file.write_all_at(bytes, offset)
        })?;
        let source = store.tree().join(path);
        let metadata = fs::symlink_metadata(&source)?;
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
