//! `stepfs status`

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::archive::{Problem, Restored, Status};
use crate::fs::{Mounted, all_mounts, mount_of};
use crate::store::{DAEMON_LOG, Objects, Restores, STUB_BYTES, in_parallel, is_trash};

use super::listing::survey_all;
use super::mirror::Mirror;
use super::source::Local;
use super::view::{Mount, lines, lists, painted};
use super::{FAILED, exit_if, say_json};

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
    /// Show also the last saves and the newest runs, as `stepfs top` does.
    #[arg(short, long)]
    verbose: bool,
    /// Print a JSON object; without PATH an array of objects.
    #[arg(long)]
    json: bool,
}

/// How long a daemon may take to answer. On a busy machine it looks at 20,000 files within a second.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn run(args: Args) -> Result<()> {
    // Not through the file system: it may not answer.
    let named = |path: &PathBuf| mount_of(&std::path::absolute(path).ok()?);
    if let Some(mirror) = args.path.as_ref().and_then(|path| Mirror::of(path)) {
        return mirror.status(args.json);
    }
    let mounts = match (&args.path, args.path.as_ref().and_then(named)) {
        (None, _) => all(),
        (Some(_), Some(mounted)) if !args.json => vec![Question::ask(mounted).answer()],
        (Some(path), _) => vec![of(&Local::of(path)?)?],
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
            let more = if args.verbose { lists(&mount.status, usize::MAX, usize::MAX) } else { Vec::new() };
            lines(mount, usize::MAX).iter().chain(&more).for_each(|line| say!("{}", painted(line)));
        }),
    }
    let is_bad = mounts.iter().any(|mount| !mount.status.problems.is_empty());
    let is_silent = args.path.is_some() && mounts.iter().any(Mount::is_silent);
    exit_if(args.check && is_bad || is_silent, FAILED)
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
