//! `stepfs gc`

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::archive::{
    Archive, AtRest, Checkpoint, Condition, GcReport, Queue, Status, facts_at_rest, goes_with_directory, policy,
};
use crate::store::retention::Verdict;
use crate::store::{Named, Store};

use super::format::{count, name, size, table};
use super::source::{Local, Mount};
use super::wait::wait_until;
use super::{FAILED, exit_if, say_answer};

/// Message beside the progress bar.
const APPLYING: &str = "applying the policy";
/// How long to wait for merges in a mount after the policy was applied. While programs save, merges never end.
const MERGING: Duration = Duration::from_secs(60);

/// Remove the checkpoints that the policy in stepfs.toml does not keep, and all data that nothing needs any more.
///
/// A mount does this by itself. This command does it now, and waits. While programs save, it waits at most a minute for
/// the merges that follow. The newest complete checkpoint of each series and all pinned files stay, whatever the policy
/// says. Without [[retention]] rules no file is removed.
#[derive(clap::Args)]
#[command(after_help = "Example: stepfs gc /ckpts --dry-run    what the policy would remove")]
pub(super) struct Args {
    /// A store that is not mounted, a mount, or a path in a mount.
    path: PathBuf,
    /// Change nothing; list what would be removed, and why.
    #[arg(long)]
    dry_run: bool,
    /// With --dry-run: also list what stays, and why.
    #[arg(short, long)]
    verbose: bool,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

/// A checkpoint and its verdict.
#[derive(Serialize)]
struct Line {
    #[serde(flatten)]
    path: Named,
    /// `remove` or `keep`.
    verdict: &'static str,
    why: String,
    /// Size that programs see.
    bytes: u64,
    /// The training step or epoch in its name.
    step: Option<u64>,
    /// The glob of the rule that matched it.
    glob: String,
}

#[derive(Serialize)]
struct Report {
    dry_run: bool,
    /// All checkpoints in a dry run, else the removed ones.
    checkpoints: Vec<Line>,
    /// Globs without a match.
    matches_nothing: Vec<String>,
    /// Checkpoints that the policy selected but that could not be removed.
    failed: Vec<String>,
    /// Bytes that the store occupies before and after; both are equal in a dry run.
    stored_before: Option<u64>,
    stored_after: Option<u64>,
    /// Steps the archive still had to do when the wait ended. The space they free is not counted.
    left: u64,
}

pub(super) fn run(args: Args) -> Result<()> {
    super::log_to_stderr("warn");
    let local = Local::of(&args.path)?;
    if local.mount.is_none() && args.dry_run && Store::is_locked(&local.store)? {
        return Err(Store::in_use(&local.store).into());
    }
    let report = match (&local.mount, args.dry_run) {
        (None, false) => at_rest(&local)?,
        (_, true) => planned(&local)?,
        (Some(mount), false) => mounted(&local, mount)?,
    };
    say_answer(args.json, &report, |report| print(report, args.verbose))?;
    exit_if(!report.failed.is_empty(), FAILED)
}

/// Plans the policy without applying it.
fn planned(local: &Local) -> Result<Report> {
    let store = Store::look(&local.store)?;
    let words = || format!("{}", store.tree().display());
    let planned = match &local.mount {
        Some(mount) => policy(&store, &|path| condition(mount, path), &|path| is_best(mount, path)),
        None => {
            let facts = facts_at_rest(&store).with_context(words)?;
            policy(&store, &|path| facts(path).0, &|path| facts(path).1)
        }
    };
    let planned = planned.with_context(words)?;
    let rules = store.settings().retention();
    let mut matched = vec![false; rules.len()];
    let mut checkpoints = Vec::with_capacity(planned.len());
    let goes_with_directory = goes_with_directory(&planned);
    for (Checkpoint { unit, .. }, verdict) in planned {
        // No rule matches it.
        let Some(rule) = rules.get(unit.rule) else { continue };
        matched[unit.rule] = true;
        if goes_with_directory(&unit.path) {
            continue;
        }
        let (verdict, why) = match verdict {
            Verdict::Keep(why) => ("keep", why.into_owned()),
            Verdict::Remove { why, .. } => ("remove", why),
        };
        checkpoints.push(Line {
            path: Named("path", unit.path),
            verdict,
            why,
            bytes: unit.bytes,
            step: unit.step,
            glob: rule.glob.clone(),
        });
    }
    let unmatched = rules.iter().zip(matched).filter(|(_, matched)| !matched);
    Ok(Report {
        dry_run: true,
        checkpoints,
        matches_nothing: unmatched.map(|(rule, _)| rule.glob.clone()).collect(),
        failed: Vec::new(),
        stored_before: None,
        stored_after: None,
        left: 0,
    })
}

/// Asks the daemon for the condition of a file.
fn condition(mount: &Mount, path: &Path) -> Condition {
    let condition = mount.word(path, "condition").ok().and_then(|json| serde_json::from_slice(&json).ok());
    condition.unwrap_or(Condition::BeingWritten)
}

/// Asks the daemon whether a file is named as the best of its run. One that cannot be asked about may be.
fn is_best(mount: &Mount, path: &Path) -> bool {
    !mount.word(path, "best").is_err_and(|error| error.raw_os_error() == Some(libc::ENODATA))
}

/// Lets the daemon apply the policy.
fn mounted(local: &Local, mount: &Mount) -> Result<Report> {
    let asked = || mount.ask::<GcReport>("gc");
    let before: Status = mount.ask("status")?;
    let mut report = planned(local)?;
    let ticket = asked()?.asked + 1;
    mount.tell(Path::new(""), "gc")?;
    let mut done = asked()?;
    let before_that = || {
        done = asked()?;
        Ok((done.done < ticket).then_some(APPLYING))
    };
    let mut then: Option<(Instant, u64)> = None;
    let enough = |now: &Queue| {
        let (since, newest) = *then.get_or_insert_with(|| (Instant::now(), now.newest));
        now.opened > newest && since.elapsed() > MERGING
    };
    report.left = wait_until(|| mount.ask("queue"), before_that, enough)?.queued;
    report.applied(local, done, (&before, &mount.ask("status")?))?;
    Ok(report)
}

/// True if something exists at a path inside the tree. For sharded files: if any shard exists.
fn exists(tree: &Path, path: &Path) -> bool {
    let shown = tree.join(path);
    let name = path.file_name().unwrap_or_default().as_bytes();
    let Some(star) = name.iter().position(|byte| *byte == b'*') else {
        return std::fs::symlink_metadata(shown).is_ok();
    };
    let (head, tail) = (&name[..star], &name[star + 1..]);
    let entries = shown.parent().and_then(|directory| std::fs::read_dir(directory).ok());
    let shard = |name: &[u8]| name.starts_with(head) && name.ends_with(tail);
    entries.into_iter().flatten().flatten().any(|entry| shard(entry.file_name().as_bytes()))
}

/// Applies the policy to an unmounted store.
fn at_rest(local: &Local) -> Result<Report> {
    let store = Store::open(&local.store)?;
    let mut report = planned(local)?;
    let namespace = Arc::new(AtRest::of(&store));
    let archive = Archive::open(store)?;
    let before = archive.status();
    let ticket = archive.ask_gc();
    archive.start(namespace);
    let before_that = || Ok((archive.gc_report().done < ticket).then_some(APPLYING));
    let done = wait_until(|| Ok(archive.queue()), before_that, |_| false);
    archive.stop();
    done?;
    report.applied(local, archive.gc_report(), (&before, &archive.status()))?;
    Ok(report)
}

impl Report {
    /// Keeps those of the planned checkpoints that are gone now. The log gives the reason for each other.
    fn applied(&mut self, local: &Local, done: GcReport, (before, after): (&Status, &Status)) -> Result<()> {
        let tree = Store::look(&local.store)?.tree();
        self.checkpoints.retain(|line| line.verdict == "remove" && !exists(&tree, &line.path));
        (self.dry_run, self.failed) = (false, done.failed);
        (self.stored_before, self.stored_after) = (Some(before.stored_bytes), Some(after.stored_bytes));
        Ok(())
    }
}

fn print(report: &Report, verbose: bool) {
    for glob in &report.matches_nothing {
        say!("glob {:?} matches nothing", name(glob));
    }
    let goes = |line: &Line| line.verdict == "remove";
    let mut rows = Vec::new();
    for line in report.checkpoints.iter().filter(|line| verbose || goes(line)) {
        let word = match (goes(line), report.dry_run) {
            (true, true) => "would go",
            (true, false) => "gone",
            (false, _) => "stays",
        };
        rows.push(vec![word.into(), size(line.bytes), name(&*line.path), name(&line.why)]);
    }
    if !rows.is_empty() {
        say_part!("{}", table(&["", ">size", "checkpoint", "why"], &rows));
    }
    let gone: Vec<&Line> = report.checkpoints.iter().filter(|line| goes(line)).collect();
    let bytes = size(gone.iter().map(|line| line.bytes).sum());
    let checkpoints = count(gone.len(), "checkpoint");
    match (report.stored_before, report.stored_after) {
        (Some(before), Some(after)) => {
            say!("{checkpoints} removed, {bytes} as programs saw them");
            say!("{} freed: the store had {}, has {}", size(before.saturating_sub(after)), size(before), size(after));
        }
        _ if report.checkpoints.is_empty() && report.matches_nothing.is_empty() => {
            say!("stepfs.toml has no [[retention]] rule, so no checkpoint goes; its comments show one");
        }
        _ => {
            say!("{checkpoints} would go, {bytes} as programs see them");
            say!("{} would stay{}", report.checkpoints.len() - gone.len(), if verbose { "" } else { "; -v shows why" });
        }
    }
    if report.left > 0 {
        say!("the archive is still at work ({} steps): the space that this frees is not counted", report.left);
    }
    for why in &report.failed {
        say!("not removed  {}", name(why));
    }
}
