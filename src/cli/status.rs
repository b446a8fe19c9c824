//! `stepfs status`

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::archive::{Queue, Restored, Status};
use crate::remote::Progress;
use crate::store::{Restores, STUB_BYTES, Store};

use super::format::{name, percent, size};
use super::listing::{files, stub};
use super::remote_url;
use super::target::{Target, attribute};

/// Show the contents of a store, its size, and the work left to do.
#[derive(clap::Args)]
pub(super) struct Args {
    /// A store, a mount, a path in a mount, or the URL of a remote.
    path: PathBuf,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    if let Some(url) = remote_url::url_of(&args.path) {
        return remote_url::status(url, args.json);
    }
    let target = Target::of(&args.path)?;
    let status = match &target.mount {
        Some(mount) => of_mount(mount)?,
        None => at_rest(&target)?,
    };
    if args.json {
        say!("{}", serde_json::to_string_pretty(&status)?);
        return Ok(ExitCode::SUCCESS);
    }
    say!("store      {}", target.store.display());
    match (&target.mount, status.daemon) {
        (Some(mount), Some(pid)) => say!("mounted    {} by process {pid}", mount.display()),
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
    if let Some(remote) = &status.remote {
        show_remote(remote);
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
    Ok(ExitCode::SUCCESS)
}

fn show_remote(remote: &Progress) {
    say!("remote     {} as node {}, {} files there", remote.url, remote.node, remote.names);
    if remote.came > 0 {
        say!("           {} read from it since the mount", size(remote.came));
    }
    if remote.files > 0 {
        let age = remote.oldest_seconds.map_or(String::new(), |age| format!(", the oldest {age} s old"));
        say!("           {} files ({}) not pushed yet{age}", remote.files, size(remote.bytes));
    }
    if let Some(why) = &remote.failing {
        say!("           {}; stepfs tries again by itself", name(why));
    }
    for why in &remote.broken {
        say!("           node {}", name(why));
    }
}

/// Asks the daemon for the status.
pub(super) fn of_mount(mount: &std::path::Path) -> Result<Status> {
    let text = attribute(mount, "status").with_context(|| format!("{} does not answer", mount.display()))?;
    Ok(serde_json::from_slice(&text)?)
}

/// Asks the daemon for the queue, which is quick.
pub(super) fn queue_of_mount(mount: &std::path::Path) -> Result<Queue> {
    let text = attribute(mount, "queue").with_context(|| format!("{} does not answer", mount.display()))?;
    Ok(serde_json::from_slice(&text)?)
}

fn at_rest(target: &Target) -> Result<Status> {
    use std::os::unix::fs::MetadataExt;
    let store = Store::look(&target.store)?;
    let mut status = Status::default();
    let mut named = Vec::new();
    for path in files(&store, &target.path)? {
        let metadata = std::fs::symlink_metadata(store.tree().join(&path))?;
        status.files += 1;
        status.logical_bytes += metadata.len();
        match stub(&store, &path)? {
            Some(stub) => {
                named.push(stub.object);
                status.released += 1;
                status.stored_bytes += STUB_BYTES as u64;
            }
            None => status.resident_bytes += metadata.blocks() * 512,
        }
    }
    let objects =
        crate::store::Objects::load(&store.objects(), |id, error| say_error!("stepfs: object {id}: {error}"))?;
    named.into_iter().for_each(|id| objects.name(id));
    status.restored = Restored::all(&store, &Restores::load(&store).unwrap_or_default());
    (status.object_bytes, status.unnamed_bytes) = (objects.stored(), objects.stored_unnamed());
    status.stored_bytes += status.resident_bytes + status.object_bytes;
    Ok(status)
}
