//! `stepfs ls`

use std::collections::HashMap;
use std::path::PathBuf;

use anyhow::{Result, bail};
use serde::Serialize;

use crate::store::Named;

use super::color::{Look, paint};
use super::format::{count, name, percent, size, table, time};
use super::listing::{Checkpoint, Entry, checkpoints, survey};
use super::mirror::{At, Mirror};
use super::say_json;
use super::source::Local;

/// List checkpoints: step, time, size, size in the store, and how faithful each is.
///
/// A directory that is one checkpoint is one line; name the directory to see its files, or use -v for all files.
///
/// "exact": the bytes are as written. "0.6 update": the largest error of a weight; 1 is as far as training moved that
/// weight's tensor, in root mean square, to the next checkpoint. "best" and "pinned" stay as they are. "CUT SHORT": the
/// file ends before its format says, because its writer died. "unfinished": it lacks a file that the one before has.
/// "LOSSY": the name, a profile or the checkpoint's own files ask for more than the file holds.
///
/// With -v, states: staged (being written), sealed (closed, durable, exact as written), archived (its object is durable,
/// but a handle is still open), released (kept as an object and decoded on read).
///
/// With -v, kinds: a keyframe depends on no other object. A delta is the difference to the state before. Every eighth
/// state is a super-step: the difference to the super-step before, so a read applies at most 12 objects (chain).
///
/// With --json, `note` gives the predicted size of a super-step and of a keyframe in its place. `lossy` gives the error
/// of each kind of tensor, and `original` is the SHA-256 of the file as written. `checkpoint` is the line without -v
/// that the file is part of.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs ls /ckpts                   each checkpoint\n  \
stepfs ls -v /ckpts/run-7          each file, its state and its object\n\n\
`stepfs latest` prints the path of the newest whole checkpoint, `stepfs best` that of the best.")]
pub(super) struct Args {
    /// Stores, mounts, paths in mounts, or the URL of a mirror.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Show each file with its state, the size of its weights, its object and its chain.
    #[arg(short, long)]
    verbose: bool,
    /// Of a mirror: as it was then. An age such as 3h or 2d, or @ and seconds since 1970.
    #[arg(long, value_name = "TIME")]
    at: Option<At>,
    /// Print a JSON array, one object per file.
    #[arg(long)]
    json: bool,
}

/// A file, for programs.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    entry: &'a Entry,
    /// Absolute path of the mount, if the path led through one.
    #[serde(flatten)]
    mount: Option<Named>,
    checkpoint: Option<&'a Checkpoint<'a>>,
}

pub(super) fn run(args: Args) -> Result<()> {
    let mut places: Vec<(Local, Vec<Entry>)> = Vec::new();
    for path in &args.paths {
        match Mirror::of(path) {
            Some(mirror) if args.paths.len() == 1 => return mirror.at(args.at).list(args.json),
            Some(_) => bail!("{}: name the URL of a mirror alone", path.display()),
            None if args.at.is_some() => {
                bail!("--at belongs to the URL of a mirror; leave it out for {}", path.display())
            }
            None => {}
        }
        let local = Local::of(path)?;
        let entries = survey(&local)?;
        places.push((local, entries));
    }
    let grouped = places.iter().map(|(local, entries)| checkpoints(local, entries)).collect::<Result<Vec<_>>>()?;
    if args.json {
        let mut lines = Vec::new();
        for ((local, entries), checkpoints) in places.iter().zip(&grouped) {
            let files = checkpoints.iter().flat_map(|of| of.entries.iter().map(move |entry| (&*entry.at, of)));
            let of: HashMap<_, _> = files.collect();
            let mount = local.mount.as_ref().map(|mount| Named("mount", mount.root.clone()));
            let line = |entry| Line { entry, mount: mount.clone(), checkpoint: of.get(&*entry.at).copied() };
            lines.extend(entries.iter().map(line));
        }
        return say_json(&lines);
    }
    let (mut rows, mut looks) = (Vec::new(), vec![Look::Head]);
    let all = || places.iter().flat_map(|(_, entries)| entries);
    if args.verbose {
        rows.extend(all().map(verbose));
        looks.extend(all().map(|entry| entry.fidelity().look()));
    } else {
        rows.extend(grouped.iter().flatten().map(row));
        looks.extend(grouped.iter().flatten().map(|checkpoint| checkpoint.fidelity.look()));
    }
    let (logical, stored) = all().fold((0, 0), |(a, b), entry| (a + entry.logical_bytes, b + entry.stored_bytes));
    let files = count(all().count(), "file");
    let share = percent(stored, logical);
    rows.push(match args.verbose {
        true => vec![files, size(logical), size(stored), share],
        false => vec![String::new(), files, size(logical), size(stored), share],
    });
    looks.push(Look::Head);
    let head: &[&str] = match args.verbose {
        true => &["state", ">size", ">stored", ">", ">weights", "kind", ">chain", ">error", "path"],
        false => &[">step", "time", ">size", ">stored", "faithful", "path"],
    };
    for (line, look) in table(head, &rows).lines().zip(looks) {
        say!("{}", paint(look, line));
    }
    Ok(())
}

fn row(checkpoint: &Checkpoint) -> Vec<String> {
    let slash = if checkpoint.is_directory { "/" } else { "" };
    vec![
        checkpoint.step.map(|step| step.to_string()).unwrap_or_default(),
        time(checkpoint.modified_ns / 1_000_000_000),
        size(checkpoint.logical_bytes()),
        size(checkpoint.stored_bytes()),
        checkpoint.fidelity.words(),
        format!("{}{slash}", name(&*checkpoint.path)),
    ]
}

fn verbose(entry: &Entry) -> Vec<String> {
    let weights = entry.roles.get("weight").map(|weight| percent(weight.stored_bytes, weight.raw_bytes));
    vec![
        format!("{}{}", entry.state, if entry.pinned { ", pinned" } else { "" }),
        size(entry.logical_bytes),
        size(entry.stored_bytes),
        percent(entry.stored_bytes, entry.logical_bytes),
        weights.unwrap_or_default(),
        entry.kind.unwrap_or_default().to_string(),
        if entry.chain_len == 0 { String::new() } else { entry.chain_len.to_string() },
        entry.fidelity().words(),
        name(&*entry.at),
    ]
}
