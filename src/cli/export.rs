//! `stepfs export`

use std::collections::HashSet;
use std::fs::{self, File, Metadata};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;

use crate::archive::repair;
use crate::store::durable::CrashPoint;
use crate::store::{export_file, modified_ns, part_of, remove_part, write_beside};
use crate::tools::refuse_in_store;

use super::format::{count, name, progress};
use super::interrupt::Temporary;
use super::mirror::{local_path, tell};
use super::source::{Brought, Tree, joined};
use super::{DAMAGED, exit_if};

/// Copy a file or directory out of a store, without a mount.
///
/// Released files come out decoded. Mode, owner and times are kept as far as permitted. The store may be mounted.
/// Files of a mirror that cannot be brought are named, and all others are exported; the exit code is 3 then.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs export ~/ckpts.store run/step_100.pt /tmp     one file\n  \
stepfs export s3://bucket/run-7 run /data/run        a directory of a mirror, on any machine")]
pub(super) struct Args {
    /// The store, a directory in a mount, or the URL of a mirror.
    store: PathBuf,
    /// Path relative to it; `.` for everything.
    path: PathBuf,
    /// Destination; inside an existing directory the file keeps its name.
    #[arg(value_parser = local_path())]
    dest: PathBuf,
    /// Replace existing files.
    #[arg(long)]
    force: bool,
    /// Write the readable tensors of one damaged file as safetensors, and list the lost ones. Exit code 3 if any is
    /// lost.
    #[arg(long)]
    salvage: bool,
}

pub(super) fn run(args: Args) -> Result<()> {
    super::log_to_stderr("warn");
    refuse_in_store(&args.dest)?;
    let brought = Brought::find(&args.store, &args.path)?;
    let told = tell(&brought.missing);
    let tree = brought.tree()?;
    if args.salvage {
        return salvage(&tree, &brought.path, &args);
    }
    let from = brought.path.clone();
    let files = tree.files(&from)?;
    // As `cp`: a mistyped directory is not made.
    if let Some(parent) = args.dest.parent().filter(|parent| !parent.as_os_str().is_empty() && !parent.is_dir()) {
        bail!("{} does not exist; mkdir -p {0}", parent.display());
    }
    let len = |path: &PathBuf| fs::symlink_metadata(tree.store.tree().join(path)).map_or(0, |found| found.len());
    let total = files.iter().map(len).sum();
    let dest = match (args.dest.is_dir(), from.file_name()) {
        (true, Some(last)) => args.dest.join(last),
        _ => args.dest.clone(),
    };
    let bar = progress(total, true);
    let wanted = files.iter().filter(|path| !brought.missing.names.contains_key(*path));
    let targets: Vec<(PathBuf, &PathBuf)> = wanted.map(|path| (target_of(&dest, &from, path), path)).collect();
    // A file of the store may have the name of an unfinished copy: it stays.
    let named: HashSet<&PathBuf> = targets.iter().map(|(target, _)| target).collect();
    for (target, _) in targets.iter().filter(|(target, _)| !named.contains(&part_of(target))) {
        remove_part(&tree.store, target).with_context(|| format!("{}", target.display()))?;
    }
    let mut there = 0;
    for (target, path) in &targets {
        bar.set_message(name(path));
        match fs::symlink_metadata(target) {
            // An export of the directory that was interrupted left it.
            Ok(found) if !args.force && **path != from && is_export_of(target, &found, &tree, path)? => {
                bar.inc(found.len());
                there += 1;
            }
            Ok(_) if !args.force => {
                bail!("{} exists already; name another place, or replace it with --force", target.display())
            }
            _ => export(&tree, path, target, &bar)?,
        }
    }
    bar.finish_and_clear();
    let before = if there > 0 { format!(", {there} of them before") } else { String::new() };
    say!("{} written to {}{before}", count(targets.len(), "file"), name(dest));
    told
}

/// Writes the readable tensors of a damaged file.
fn salvage(tree: &Tree, path: &Path, args: &Args) -> Result<()> {
    let shown = || args.path.display().to_string();
    let stub = tree.stub(path)?.with_context(|| format!("{} is not released: copy the file itself", shown()))?;
    if !args.force && fs::symlink_metadata(&args.dest).is_ok() {
        bail!("{} exists already; name another place, or replace it with --force", args.dest.display());
    }
    let _part = Temporary::file(part_of(&args.dest))?;
    let salvaged = write_beside(&tree.store, &args.dest, |file| repair::salvage(&tree.store, stub.object, file))
        .with_context(|| format!("{} to {}", shown(), args.dest.display()))?;
    for (tensor, why) in &salvaged.lost {
        say!("lost: {}: {}", name(tensor), name(why));
    }
    say!("{} tensors written, {} lost", salvaged.written.len(), salvaged.lost.len());
    exit_if(!salvaged.lost.is_empty(), DAMAGED)
}

/// Whether a file has the length, the time and the bytes of one in the tree.
fn is_export_of(target: &Path, found: &Metadata, tree: &Tree, path: &Path) -> Result<bool> {
    let of = fs::symlink_metadata(tree.store.tree().join(path))?;
    if !found.is_file() || !of.is_file() || (of.len(), modified_ns(&of)) != (found.len(), modified_ns(found)) {
        return Ok(false);
    }
    let (file, mut there, mut is_same) = (File::open(target)?, Vec::new(), true);
    tree.read(path, &mut |offset, bytes| {
        there.resize(bytes.len(), 0);
        is_same = is_same && file.read_exact_at(&mut there, offset).is_ok() && there == bytes;
        Ok(())
    })?;
    Ok(is_same)
}

/// Where a file at or below `from` in the tree goes.
fn target_of(dest: &Path, from: &Path, path: &Path) -> PathBuf {
    joined(dest, path.strip_prefix(from).unwrap_or(path))
}

fn export(tree: &Tree, path: &Path, target: &Path, bar: &ProgressBar) -> Result<()> {
    let _part = Temporary::file(part_of(target))?;
    export_file(&tree.store, path, target, |file| {
        tree.read(path, &mut |offset, bytes| {
            bar.inc(bytes.len() as u64);
            file.write_all_at(bytes, offset, CrashPoint::ExportWritten)
        })
    })
    .with_context(|| format!("{}", target.display()))
}
