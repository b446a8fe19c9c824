//! `stepfs status`

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::{Serialize, Serializer};

use crate::archive::{Problem, Restored, Room, Save, Serving, Status};
use crate::clock::wall_ns;
use crate::fs::{Mounted, all_mounts, mount_of};
use crate::mirror::Progress;
use crate::store::{DAEMON_LOG, Objects, Restores, STUB_BYTES, TRASH, in_parallel, is_trash, name_bytes};

use super::color::{Look, paint};
use super::format::{name, percent, rate, size, span, time};
use super::listing::survey_all;
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

/// A store and its mount.
#[derive(Serialize)]
pub(super) struct Mount {
    /// Empty if the path led through none.
    #[serde(serialize_with = "as_text")]
    pub(super) mount: PathBuf,
    /// In hexadecimal, if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    mount_bytes: Option<String>,
    #[serde(serialize_with = "as_text")]
    pub(super) store: PathBuf,
    /// In hexadecimal, if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    store_bytes: Option<String>,
    #[serde(flatten)]
    pub(super) status: Status,
}

/// A name that is not UTF-8 loses its other bytes.
fn as_text<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

/// How long a daemon may take to answer. On a busy machine it looks at 20,000 files within a second.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn run(args: Args) -> Result<ExitCode> {
    // Not through the file system: it may not answer.
    let named = |path: &PathBuf| mount_of(&std::path::absolute(path).ok()?);
    let mounts = match (&args.path, args.path.as_ref().and_then(named)) {
        (None, _) => all(),
        (Some(_), Some(mounted)) if !args.json => vec![Question::ask(mounted).answer()],
        (Some(path), _) => match Source::of(path)? {
            Source::Mirror(mirror) => return mirror.status(args.json),
            Source::Local(local) => vec![of(&local)?],
        },
    };
    match (args.json, &mounts[..], &args.path) {
        (true, [one], Some(_)) => say_json(one)?,
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
    pub(super) fn new(mount: PathBuf, store: PathBuf, status: Status) -> Mount {
        Mount { mount_bytes: name_bytes(&mount), store_bytes: name_bytes(&store), mount, store, status }
    }

    /// A mount without an answer.
    fn silent(of: &Mounted, why: String) -> Mount {
        let status = Status { problems: vec![Problem::new("silent", why, "")], ..Status::default() };
        Mount::new(of.point.clone(), of.store.clone(), status)
    }

    /// True if its daemon does not answer.
    pub(super) fn is_silent(&self) -> bool {
        !self.mount.as_os_str().is_empty() && self.status.daemon.is_none()
    }
}

/// All mounts that this user may ask.
pub(super) fn all() -> Vec<Mount> {
    let ours: Vec<Mounted> = all_mounts().into_iter().filter(Mounted::may_be_asked).collect();
    // Each daemon may be slow to answer.
    in_parallel(&ours, |mounted| Question::ask(mounted.clone()).answer())
}

/// A question to the daemon of a mount, in a process of its own: the kernel keeps a process that waits for a daemon that
/// hangs.
pub(super) struct Question {
    mounted: Mounted,
    pub(super) asked: Instant,
    answer: Receiver<std::io::Result<Output>>,
}

impl Question {
    pub(super) fn ask(mounted: Mounted) -> Question {
        let (sender, answer) = mpsc::channel();
        let point = mounted.point.clone();
        std::thread::spawn(move || {
            // Its own program, also when the file of that was replaced meanwhile.
            let mut program = Command::new("/proc/self/exe");
            let program = program.arg0("stepfs").args(["status", "--json"]).arg(point);
            sender.send(program.stdin(Stdio::null()).output())
        });
        Question { mounted, asked: Instant::now(), answer }
    }

    /// The answer; or that there is none, once the daemon had [`PATIENCE`].
    pub(super) fn answer(&self) -> Mount {
        self.wait(PATIENCE.saturating_sub(self.asked.elapsed())).unwrap_or_else(|| self.unanswered())
    }

    /// Whether the daemon had [`PATIENCE`].
    pub(super) fn has_waited(&self) -> bool {
        self.asked.elapsed() >= PATIENCE
    }

    /// The answer, if it comes within this time. A later call may get it.
    pub(super) fn wait(&self, time: Duration) -> Option<Mount> {
        let (point, store) = (self.mounted.point.clone(), self.mounted.store.clone());
        let answer = match self.answer.recv_timeout(time).ok()? {
            Ok(output) if output.status.success() => {
                serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())
            }
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().trim_start_matches("stepfs: ").into()),
            Err(error) => Err(error.to_string()),
        };
        Some(match answer {
            Ok(status) => Mount::new(point, store, status),
            Err(why) => Mount::silent(&self.mounted, why),
        })
    }

    /// Says that nobody answers.
    pub(super) fn unanswered(&self) -> Mount {
        let (point, seconds) = (self.mounted.point.display(), PATIENCE.as_secs());
        let log = format!(
            "{}/{DAEMON_LOG} may say why, and `stepfs umount --force {point}` ends it",
            self.mounted.store.display()
        );
        let why = format!("the daemon of the mount {point} has not answered for {seconds} s; {log}");
        Mount::silent(&self.mounted, why)
    }
}

fn of(local: &Local) -> Result<Mount> {
    let (mount, status) = match (&local.mount, &local.served) {
        (Some(mount), _) => (mount.root.clone(), mount.ask("status")?),
        (None, Some((mount, _))) => {
            let own: Status = mount.ask("status")?;
            let Status { daemon, version, serving, shared, .. } = own;
            (mount.root.clone(), Status { daemon, version, serving, shared, ..at_rest(local)? })
        }
        (None, None) => (PathBuf::new(), at_rest(local)?),
    };
    Ok(Mount::new(mount, local.store.clone(), status))
}

fn show(Mount { mount, store, status, .. }: &Mount, verbose: bool) {
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
    if let Some(role) = &status.shared {
        say!("shared     {role}");
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
    if status.trash_files > 0 {
        let (files, shown, trash) = (status.trash_files, size(status.trash_bytes), mount.join(TRASH));
        say!("trash      {files} removed files, {shown}; `rm -r {}` frees their room", name(&trash.to_string_lossy()));
    }
    if status.free_bytes > 0 {
        say!("free       {}", free(status));
    }
    if let Some(room) = &status.room {
        say!("room       {}", room_words(room));
    }
    if let Some(save) = status.saves.first() {
        say!("last save  {}, {}", name(&save.path), cost(save));
    }
    let waits = &status.waits;
    if waits.waiting + waits.waited > 0 {
        let seconds = |ms: u64| Duration::from_millis(ms).as_secs_f64();
        let (waited, longest, total) = (waits.waited, seconds(waits.longest_ms), seconds(waits.total_ms));
        let files = if waited == 1 { "file" } else { "files" };
        say!(
            "waits      {} for room now; {waited} {files} did, {longest:.1} s at most, {total:.1} s in all",
            waits.waiting
        );
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
    if verbose && status.reads.opened > 0 {
        say!("reads      {}", reads(status));
    }
    say!("queue      {} to do, {} wait for a handle to be closed", status.queued, status.busy);
    if let Some(seconds) = status.backlog_seconds.filter(|seconds| *seconds > 0) {
        say!("           the oldest has waited for {}", span(Duration::from_secs(seconds)));
    }
    if status.settling > 0 {
        say!("           {} wait for the rest of their checkpoint", status.settling);
    }
    if let Some(mirror) = &status.mirror {
        say!("mirror     {}", mirror_words(mirror));
    }
    for lineage in &status.restored {
        let expected = lineage.expected_restores.map_or(String::new(), |count| format!(", {count} expected"));
        let moved =
            if lineage.profile == lineage.asked { String::new() } else { format!(" instead of {}", lineage.asked) };
        let (path, profile) = (name(&lineage.path), &lineage.profile);
        say!("restored   {path} and its lineage: {}{expected}; its next states are {profile}{moved}", lineage.restores);
    }
}

/// The room on the disk, and how it shrinks.
pub(super) fn free(status: &Status) -> String {
    let pace = status.room.as_ref().and_then(|room| room.bytes_per_day);
    let pace = pace.map_or(String::new(), |bytes| format!(", {} less each day", size(bytes)));
    format!("{} on its disk{pace}", size(status.free_bytes))
}

/// How many checkpoints there is room for, and until when.
pub(super) fn room_words(room: &Room) -> String {
    const YEAR: i64 = 365 * 86_400;
    let full = room.full.map_or(String::new(), |full| match full.saturating_sub(wall_ns() / 1_000_000_000) {
        left if left > YEAR => ", for more than a year at this pace".into(),
        // The hour is no use for a day that is far off.
        left if left > 2 * 86_400 => format!(", full on {} at this pace", time(full).get(..6).unwrap_or_default()),
        _ => format!(", full on {} at this pace", time(full)),
    });
    match room.checkpoints {
        None => "it hardly grows: as many checkpoints go as come".into(),
        Some(0) => "not for another checkpoint".into(),
        Some(1) => format!("about one more checkpoint{full}"),
        Some(count) => {
            // More digits than the pace has.
            let last = 10_u64.pow(count.ilog10().saturating_sub(1));
            format!("about {} more checkpoints{full}", count / last * last)
        }
    }
}

/// The size of a save, how long it took, and how fast that was.
fn cost(save: &Save) -> String {
    let rate = save.bytes_per_second().map_or(String::new(), |bytes| format!(", {}", rate(bytes)));
    format!("{} in {}{rate}", size(save.bytes), span(Duration::from_millis(save.milliseconds)))
}

/// Reads of released files.
pub(super) fn reads(status: &Status) -> String {
    let reads = &status.reads;
    let failed = if reads.failed > 0 { format!(", {} could not be read", reads.failed) } else { String::new() };
    format!("{} of released files, {} decoded{failed}", reads.opened, size(reads.decoded_bytes))
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

pub(super) fn mirror_words(mirror: &Progress) -> String {
    let lag = match mirror.lag_seconds {
        Some(lag) => format!("{} files ({}) are not there yet, one for {lag} s", mirror.files, size(mirror.bytes)),
        None if mirror.done == mirror.changes => "it has everything".into(),
        None => "the last changes are on their way".into(),
    };
    format!("{}, {lag}", mirror.url)
}

fn at_rest(local: &Local) -> Result<Status> {
    let tree = local.tree()?;
    let store = &tree.store;
    let mut status = Status::default();
    let objects = Objects::load(&store.objects(), |id, error| say_error!("stepfs: object {id}: {error}"))?;
    let mut largest = 0;
    for entry in survey_all(local)? {
        status.files += 1;
        status.trash_files += u64::from(is_trash(&entry.at));
        status.trash_bytes += if is_trash(&entry.at) { entry.logical_bytes } else { 0 };
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
