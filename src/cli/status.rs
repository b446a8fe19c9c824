//! `stepfs status`

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

use crate::archive::{Restored, Status};
use crate::mirror::Progress;
use crate::store::{Objects, Restores, STUB_BYTES};

use super::format::{name, percent, size};
use super::say_json;
use super::source::{Local, Source};

/// Show the contents of a store, its size, and the work left to do.
#[derive(clap::Args)]
pub(super) struct Args {
    /// A store, a mount, a path in a mount, or the URL of a mirror.
    path: PathBuf,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    let local = match Source::of(&args.path)? {
        Source::Mirror(mirror) => return mirror.status(args.json),
        Source::Local(local) => local,
    };
    let status: Status = match &local.mount {
        Some(mount) => mount.ask("status")?,
        None => at_rest(&local)?,
    };
    match args.json {
        true => say_json(&status)?,
        false => show(&local, &status),
    }
    Ok(ExitCode::SUCCESS)
}

fn show(local: &Local, status: &Status) {
    say!("store      {}", local.store.display());
    match (&local.mount, status.daemon) {
        (Some(mount), Some(pid)) => say!("mounted    {} by process {pid}", mount.root.display()),
        _ => say!("mounted    unknown: no mount was named"),
    }
    say!("files      {}, {} of them released", status.files, status.released);
    let share = percent(status.stored_bytes, status.logical_bytes);
    say!("size       {} stored as {} ({share})", size(status.logical_bytes), size(status.stored_bytes));
    say!("           {} resident, {} in objects", size(status.resident_bytes), size(status.object_bytes));
    if status.unnamed_bytes > 0 {
        say!("           {} of that for removed states, which others are differences to", size(status.unnamed_bytes));
    }
    say!("cache      {}", size(status.cache_bytes));
    let memory = &status.memory;
    if memory.limit > 0 {
        let tries = memory.hits + memory.misses;
        let (bytes, limit) = (size(memory.bytes), size(memory.limit));
        say!("memory     {bytes} of {limit}, {} of {tries} tiles decoded from there", percent(memory.hits, tries));
    }
    say!("queue      {} to do, {} wait for a handle to be closed", status.queued, status.busy);
    if status.settling > 0 {
        say!("           {} wait for the rest of their checkpoint", status.settling);
    }
    if let Some(why) = &status.stalled {
        say!("stalled    {why}; stepfs tries again by itself");
    }
    if let Some(why) = &status.frozen {
        say!("kept       nothing is removed: {why}; `stepfs verify` names it");
    }
    if let Some(mirror) = &status.mirror {
        show_mirror(mirror);
    }
    for lineage in &status.restored {
        let expected = lineage.expected_restores.map_or(String::new(), |count| format!(", {count} expected"));
        let moved =
            if lineage.profile == lineage.asked { String::new() } else { format!(" instead of {}", lineage.asked) };
        let (path, profile) = (name(&lineage.path), &lineage.profile);
        say!("restored   {path} and its lineage: {}{expected}; its next states are {profile}{moved}", lineage.restores);
    }
    for why in &status.failed {
        say!("not archived  {why}");
    }
}

fn show_mirror(mirror: &Progress) {
    let lag = match mirror.lag_seconds {
        Some(lag) => format!("{} files ({}) are not there yet, one for {lag} s", mirror.files, size(mirror.bytes)),
        None if mirror.done == mirror.changes => "it has everything".into(),
        None => "the last changes are on their way".into(),
    };
    say!("mirror     {}, {lag}", mirror.url);
    for why in mirror.failing.iter().chain(&mirror.failed) {
        say!("           {}; stepfs tries again by itself", name(why));
    }
}

fn at_rest(local: &Local) -> Result<Status> {
    let tree = local.tree()?;
    let store = &tree.store;
    let mut status = Status::default();
    let mut named = Vec::new();
    for path in tree.files(&local.path)? {
        let metadata = std::fs::symlink_metadata(store.tree().join(&path))?;
        status.files += 1;
        status.logical_bytes += metadata.len();
        match tree.stub(&path)? {
            Some(stub) => {
                named.push(stub.object);
                status.released += 1;
                status.stored_bytes += STUB_BYTES as u64;
            }
            None => status.resident_bytes += metadata.blocks() * 512,
        }
    }
    let objects = Objects::load(&store.objects(), |id, error| say_error!("stepfs: object {id}: {error}"))?;
    named.into_iter().for_each(|id| objects.name(id));
    status.restored = Restored::all(store, &Restores::load(store).unwrap_or_default());
    (status.object_bytes, status.unnamed_bytes) = (objects.stored(), objects.stored_unnamed());
    status.stored_bytes += status.resident_bytes + status.object_bytes;
    Ok(status)
}
