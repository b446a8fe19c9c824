//! `stepfs status`

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::archive::{Problem, Restored, Serving, Status};
use crate::fs::{Mounted, all_mounts, mount_of};
use crate::mirror::Progress;
use crate::store::{DAEMON_LOG, Objects, Restores, STUB_BYTES, in_parallel};

use super::color::{Look, paint};
use super::format::{name, percent, size};
use super::listing::survey;
use super::say_json;
use super::source::{Local, Source, mounted_at};

/// Show the health of a store, its size, and the work left to do.
///
/// It begins with the problems, each with its next step.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs status                    all mounts\n  \
stepfs status --check /ckpts     for a monitor: exit code 1 if something is wrong")]
pub(super) struct Args {
    /// A store, a mount, a path in a mount, or the URL of a mirror. Without it: all mounts that you may ask.
    path: Option<PathBuf>,
    /// Exit with 1 if something is wrong.
    #[arg(long)]
    check: bool,
    /// Show also the cache and the memory for decoded states.
    #[arg(short, long)]
    verbose: bool,
    /// Print a JSON object; without PATH an array of objects.
    #[arg(long)]
    json: bool,
}

/// A mount in the list of all.
#[derive(Serialize)]
pub(super) struct Mount {
    pub(super) mount: PathBuf,
    pub(super) store: PathBuf,
    #[serde(flatten)]
    pub(super) status: Status,
}

/// How long a daemon may take to answer. On a busy machine it looks at 20,000 files within a second.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn run(args: Args) -> Result<ExitCode> {
    // Not through the file system: it may not answer.
    let named = |path: &PathBuf| mount_of(&std::path::absolute(path).ok()?);
    let mounts = match (&args.path, args.path.as_ref().and_then(named)) {
        (None, _) => all(),
        (Some(_), Some(mounted)) if !args.json => vec![ask(mounted)],
        (Some(path), _) => match Source::of(path)? {
            Source::Mirror(mirror) => return mirror.status(args.json),
            Source::Local(local) => vec![of(&local)?],
        },
    };
    match (args.json, &mounts[..], &args.path) {
        (true, [one], Some(_)) => say_json(&one.status)?,
        (true, ..) => say_json(&mounts)?,
        (false, [], _) if all_mounts().iter().any(Mounted::is_ours) => {
            say_error!("stepfs: only users' own mounts are here, and the kernel keeps root out; ask as their users")
        }
        (false, [], _) => say_error!("stepfs: no store is mounted; `stepfs mount STORE DIR` mounts one"),
        (false, ..) => mounts.iter().enumerate().for_each(|(place, mount)| {
            if place > 0 {
                say!("");
            }
            show(mount, args.verbose);
        }),
    }
    let is_bad = mounts.iter().any(|mount| !mount.status.problems.is_empty());
    let is_silent = args.path.is_some() && mounts.iter().any(Mount::is_silent);
    Ok(ExitCode::from(if args.check && is_bad || is_silent { super::FAILED } else { 0 }))
}

impl Mount {
    /// True if its daemon does not answer.
    fn is_silent(&self) -> bool {
        !self.mount.as_os_str().is_empty() && self.status.daemon.is_none()
    }
}

/// All mounts that this user may ask.
pub(super) fn all() -> Vec<Mount> {
    let ours: Vec<Mounted> = all_mounts().into_iter().filter(Mounted::may_be_asked).collect();
    // Each daemon may be slow to answer.
    in_parallel(&ours, |mounted| ask(mounted.clone()))
}

/// Asks the daemon of a mount, in a process of its own: the kernel keeps a process that waits for a daemon that hangs.
fn ask(mounted: Mounted) -> Mount {
    let answer = || -> Result<Status, String> {
        let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
        command.args(["status", "--json"]).arg(&mounted.point).stdin(Stdio::null());
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || sender.send(command.output()));
        match receiver.recv_timeout(PATIENCE) {
            Ok(Ok(output)) if output.status.success() => {
                serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())
            }
            Ok(Ok(output)) => Err(String::from_utf8_lossy(&output.stderr).trim().trim_start_matches("stepfs: ").into()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => {
                let (point, store, seconds) = (mounted.point.display(), mounted.store.display(), PATIENCE.as_secs());
                let log = format!("{store}/{DAEMON_LOG} may say why, and `stepfs umount --force {point}` ends it");
                Err(format!("the daemon of the mount {point} has not answered for {seconds} s; {log}"))
            }
        }
    };
    let status = answer().unwrap_or_else(|why| {
        let problems = vec![Problem::new("silent", why, "")];
        Status { problems, ..Status::default() }
    });
    Mount { mount: mounted.point, store: mounted.store, status }
}

fn of(local: &Local) -> Result<Mount> {
    let (mount, status) = match &local.mount {
        Some(mount) => (mount.root.clone(), mount.ask("status")?),
        None => (PathBuf::new(), at_rest(local)?),
    };
    Ok(Mount { mount, store: local.store.clone(), status })
}

fn show(Mount { mount, store, status }: &Mount, verbose: bool) {
    match status.problems.len() {
        0 => say!("{}", paint(Look::Good, "nothing is wrong")),
        count => say!("{}", paint(Look::Bad, &format!("{count} problem{}", if count == 1 { "" } else { "s" }))),
    }
    for (place, Problem { says, mend, .. }) in status.problems.iter().enumerate() {
        say!("  {}", name(says));
        // Problems of one kind have the same next step.
        let next = status.problems.get(place + 1);
        if !mend.is_empty() && next.is_none_or(|next| next.mend != *mend) {
            say!("    {}", name(mend));
        }
    }
    say!("store      {}", store.display());
    match status.daemon {
        Some(pid) => {
            say!("mounted    {} by process {pid}", mount.display());
            if status.version != crate::version() {
                let daemon = if status.version.is_empty() { "an older stepfs" } else { &status.version };
                say!("           which is {daemon}; this is {}, and the next mount runs it", crate::version());
            }
        }
        None if mount.as_os_str().is_empty() => match mounted_at(store) {
            Some(Mounted { point, .. }) => say!("mounted    {0}; `stepfs status {0}` says more", point.display()),
            None => say!("mounted    no, as far as this user sees"),
        },
        None => {
            say!("mounted    {}, which does not answer", mount.display());
            return;
        }
    }
    if let Some(serving) = &status.serving {
        say!("served     {}", served(serving));
    }
    say!("files      {}, {} of them released", status.files, status.released);
    let share = percent(status.stored_bytes, status.logical_bytes);
    say!("size       {} stored as {} ({share})", size(status.logical_bytes), size(status.stored_bytes));
    say!("           {} resident, {} in objects", size(status.resident_bytes), size(status.object_bytes));
    if status.unnamed_bytes > 0 {
        say!("           {} of that for removed states, which others are differences to", size(status.unnamed_bytes));
    }
    if status.free_bytes > 0 {
        say!("free       {} on its disk", size(status.free_bytes));
    }
    let waits = &status.waits;
    if waits.waiting + waits.waited > 0 {
        let seconds = |ms: u64| Duration::from_millis(ms).as_secs_f64();
        let (waited, longest, total) = (waits.waited, seconds(waits.longest_ms), seconds(waits.total_ms));
        say!("waits      {} for room now; {waited} did, {longest:.1} s at most, {total:.1} s in all", waits.waiting);
    }
    let memory = &status.memory;
    if verbose {
        say!("cache      {}", size(status.cache_bytes));
    }
    if verbose && memory.limit > 0 {
        let tries = memory.hits + memory.misses;
        let (bytes, limit) = (size(memory.bytes), size(memory.limit));
        say!("memory     {bytes} of {limit}, {} of {tries} tiles decoded from there", percent(memory.hits, tries));
    }
    say!("queue      {} to do, {} wait for a handle to be closed", status.queued, status.busy);
    if status.settling > 0 {
        say!("           {} wait for the rest of their checkpoint", status.settling);
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
}

/// The figures are those of docs/PERFORMANCE.md.
fn served(serving: &Serving) -> String {
    match serving {
        Serving::Kernel => "by the kernel, at the speed of the disk".into(),
        Serving::Helper => "by the kernel, with the helper stepfs-passthrough, at the speed of the disk".into(),
        Serving::Daemon(why) => {
            format!("by the daemon: writes take 2 to 20 times as long as on the disk. {}", name(why))
        }
    }
}

fn show_mirror(mirror: &Progress) {
    let lag = match mirror.lag_seconds {
        Some(lag) => format!("{} files ({}) are not there yet, one for {lag} s", mirror.files, size(mirror.bytes)),
        None if mirror.done == mirror.changes => "it has everything".into(),
        None => "the last changes are on their way".into(),
    };
    say!("mirror     {}, {lag}", mirror.url);
}

fn at_rest(local: &Local) -> Result<Status> {
    let tree = local.tree()?;
    let store = &tree.store;
    let mut status = Status::default();
    let objects = Objects::load(&store.objects(), |id, error| say_error!("stepfs: object {id}: {error}"))?;
    let mut largest = 0;
    for entry in survey(local)? {
        status.files += 1;
        status.logical_bytes += entry.logical_bytes;
        match entry.object.as_ref().and_then(|id| id.parse().ok()) {
            Some(id) => {
                objects.name(id);
                status.released += 1;
                status.stored_bytes += STUB_BYTES as u64;
            }
            None => {
                largest = largest.max(entry.logical_bytes);
                status.resident_bytes += entry.stored_bytes;
            }
        }
        status.problems.extend(entry.damage.map(|why| Problem::damaged(&entry.at, &why)));
        status.problems.extend(entry.cut_short.map(|why| Problem::cut_short(&entry.at, &why)));
    }
    if let Ok(found) = rustix::fs::statvfs(store.root()) {
        status.free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
        status.problems.extend(Problem::full(status.free_bytes, largest));
    }
    status.restored = Restored::all(store, &Restores::load(store).unwrap_or_default());
    (status.object_bytes, status.unnamed_bytes) = (objects.stored(), objects.stored_unnamed());
    status.stored_bytes += status.resident_bytes + status.object_bytes;
    Ok(status)
}
