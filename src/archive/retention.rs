//! The policy at work: when it runs, and how a checkpoint is removed.

use std::cmp::Reverse;
use std::io;
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::store::retention::Verdict;
use crate::store::{beneath, is_pinned, modified_ns};
use crate::sync::{Mutex, MutexGuard};

use super::catalog::Catalog;
use super::checkpoints::{Checkpoint, Condition, Member, goes_with_directory, policy};
use super::namespace::{FileId, Namespace, Outcome, found_at};
use super::shared::Shared;

/// Without news, rules are looked at this often: `keep_for` needs no more.
const INTERVAL: Duration = Duration::from_secs(60);
/// The next run by itself waits so many times the duration of the last one. Scans of a large tree after every file
/// must not take the time of archiving.
const PAUSE_FACTOR: u32 = 10;
/// A file that stayed because it was open or changed is tried again this soon, then after twice as long each time, up
/// to [`INTERVAL`]. No event says when a reader is gone.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// Failures that a report names; the log has all of them.
const MOST_FAILURES: usize = 16;

/// The schedule of the policy, and the result of its last run.
pub(super) struct Retention {
    shared: Arc<Shared>,
    /// Taken for moments only, by the archive's threads and by callers that ask; no other lock under it.
    state: Mutex<Schedule>,
}

#[derive(Debug, Default)]
struct Schedule {
    /// A file was sealed since the last run.
    news: bool,
    /// The last run left something that it should have removed: after how long to try again.
    retry: Option<Duration>,
    /// The catalog's last change when somebody last asked. What was closed by then is to be durable before the run.
    closed_by: u64,
    /// When the last run ended, and how long it took.
    last: Option<(Instant, Duration)>,
    report: GcReport,
}

/// The progress of a requested run, and the result of the last one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcReport {
    /// How often somebody has asked.
    pub asked: u64,
    /// How many of these were answered by a run that began after them.
    pub done: u64,
    /// Checkpoints that the last such run removed.
    pub removed: u64,
    /// Why others that should have gone are still there.
    pub failed: Vec<String>,
}

impl Retention {
    /// Of an archive.
    pub(super) fn of(shared: Arc<Shared>) -> Retention {
        Retention { shared, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, Schedule> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A file was sealed: something may be complete now.
    pub(super) fn news(&self) {
        self.state().news = true;
    }

    /// Asks for the policy to be applied and for unneeded objects to be removed, soon. Returns the number that
    /// [`GcReport::done`] reaches then.
    pub(super) fn ask(&self) -> u64 {
        let newest = {
            let mut catalog = self.shared.catalog();
            catalog.end_waiting();
            catalog.progress().0
        };
        let ticket = {
            let mut state = self.state();
            state.closed_by = newest;
            state.report.asked += 1;
            state.report.asked
        };
        self.shared.notify();
        ticket
    }

    /// The result of the last requested run.
    pub(super) fn report(&self) -> GcReport {
        self.state().report.clone()
    }

    /// Whether somebody waits for a run.
    pub(super) fn is_asked(&self) -> bool {
        let state = self.state();
        state.report.asked > state.report.done
    }

    /// How long the housekeeper may wait for news, with `idle` if there is no policy.
    pub(super) fn until(&self, idle: Duration) -> Duration {
        if self.is_asked() {
            return Duration::ZERO;
        }
        let state = self.state();
        if self.shared.store.settings().retention().is_empty() {
            return idle;
        }
        let wait = |(ended, took): (Instant, Duration)| {
            let calm = state.retry.unwrap_or(INTERVAL);
            let pause = if state.news { calm.min(took * PAUSE_FACTOR) } else { calm };
            (ended + pause).saturating_duration_since(Instant::now())
        };
        state.last.map_or(Duration::ZERO, wait).min(idle)
    }

    /// Applies the policy if it is time to, and every closed file is known to be durable or not. `collect` removes the objects
    /// that nothing needs then.
    pub(super) fn run(&self, collect: impl FnOnce()) {
        let Some(namespace) = self.shared.namespace() else { return };
        let closed_by = self.state().closed_by;
        // A file or link that was not read yet may name a checkpoint as the best of its run.
        let is_unread = |catalog: &mut Catalog| {
            let steps = catalog.steps();
            steps.has_unsealed_since(closed_by) || steps.may_learn()
        };
        if self.until(INTERVAL) > Duration::ZERO || is_unread(&mut self.shared.catalog()) {
            return;
        }
        let asked = {
            let mut state = self.state();
            state.news = false;
            state.report.asked
        };
        let started = Instant::now();
        let (removed, mut failed) = self.apply_policy(namespace.as_ref());
        failed.truncate(MOST_FAILURES);
        if removed > 0 {
            self.shared.room_came();
        }
        // Before the caller hears that it is done.
        collect();
        let mut state = self.state();
        state.retry = match (failed.is_empty(), state.retry) {
            (true, _) => None,
            (false, None) => Some(FIRST_RETRY),
            (false, Some(last)) => Some(INTERVAL.min(last * 2)),
        };
        state.last = Some((Instant::now(), started.elapsed()));
        if asked > state.report.done {
            state.report = GcReport { asked: state.report.asked, done: asked, removed, failed };
        }
    }

    fn condition(&self, path: &Path) -> Condition {
        self.shared.condition(path)
    }

    /// Removes the checkpoints that no rule keeps; answers how many, and why others stay.
    fn apply_policy(&self, namespace: &dyn Namespace) -> (u64, Vec<String>) {
        let (mut removed, mut failed) = (0, Vec::new());
        let is_best = |path: &Path| self.shared.catalog().decided().named_by(path).is_some();
        let planned = match policy(&self.shared.store, &|path| self.condition(path), &is_best) {
            Ok(planned) => planned,
            Err(error) => {
                log::error!("retention: {error}; nothing was removed");
                return (removed, vec![error.to_string()]);
            }
        };
        let goes_with_directory = goes_with_directory(&planned);
        for (checkpoint, verdict) in &planned {
            let path = &checkpoint.unit.path;
            let Verdict::Remove { why, newest } = verdict else { continue };
            if goes_with_directory(path) {
                continue;
            }
            if self.shared.is_stopping() {
                break;
            }
            match self.remove_checkpoint(namespace, checkpoint, &planned[*newest].0) {
                Ok(None) => {
                    log::info!("{}: removed by retention: {why}", path.display());
                    removed += 1;
                }
                Ok(Some(because)) => {
                    log::info!("{}: stays: {because}", path.display());
                    failed.push(format!("{}: {because}", path.display()));
                }
                Err(error) => {
                    log::warn!("{}: cannot be removed: {error}", path.display());
                    failed.push(format!("{}: {error}", path.display()));
                }
            }
        }
        // Nothing is synced here. A crash may bring names back, with all that they stand for, and the next run
        // removes them again: no object goes before `sync_removed_names`.
        (removed, failed)
    }

    /// Removes a checkpoint: files first, the deepest first, then directories. If it changed since it was examined,
    /// it stays, or the rest of it, and the reason is returned. So it does if a file of `newest` is gone or written again,
    /// the newest complete one of its series: a plan takes long in a large tree, and programs go on meanwhile. A crash
    /// in between leaves some of its files; the next run removes them (see `store/retention/plan.rs`).
    fn remove_checkpoint(
        &self,
        namespace: &dyn Namespace,
        checkpoint: &Checkpoint,
        newest: &Checkpoint,
    ) -> io::Result<Option<String>> {
        let tree = self.shared.store.tree();
        let same = |member: &Member| -> io::Result<bool> {
            let found = found_at(&tree, &member.path)?;
            Ok(found
                .is_some_and(|found| FileId::of(&found) == member.file && modified_ns(&found) == member.modified_ns))
        };
        for member in newest.members.iter().filter(|member| member.counts) {
            // A release in between gives it another inode.
            let found = found_at(&tree, &member.path)?;
            let is_there = found.is_some_and(|found| found.is_file() && found.len() >= member.len);
            if !is_there || self.condition(&member.path).tensors().is_none() {
                let path = member.path.display();
                return Ok(Some(format!("{path} of the newest complete one was removed, or is being written")));
            }
        }
        // All files must be as they were examined before one of them goes. From here on a file is void if its version
        // changes: every note of an open, a write or a rename changes it.
        let mut members: Vec<(&Member, Option<u64>)> = Vec::with_capacity(checkpoint.members.len());
        let changed = || Ok(Some("it was changed meanwhile".to_string()));
        for member in &checkpoint.members {
            let version = self.shared.catalog().get(&member.path).map(|entry| entry.version);
            let unknown = [Condition::BeingWritten, Condition::Closed].contains(&self.condition(&member.path));
            if version.is_some() && unknown || !same(member)? {
                return changed();
            }
            members.push((member, version));
        }
        for directory in &checkpoint.directories {
            if !same(directory)? {
                return changed();
            }
        }
        members.sort_by_key(|(member, _)| Reverse(member.path.components().count()));
        for (member, version) in members {
            let mut still = || {
                // Under the file system's lock, as pins are set: see `put_stub`. They were read a moment ago, for the
                // plan.
                let pinned = is_pinned(&tree, &member.path)?;
                let mut catalog = self.shared.catalog();
                // Something unread may name it.
                let best = catalog.steps().may_learn() || catalog.decided().named_by(&member.path).is_some();
                Ok(!pinned && !best && catalog.get(&member.path).map(|entry| entry.version) == version)
            };
            // So that the file's blocks are freed behind the file system's lock, not under it.
            let _held = beneath::hold(&tree, &member.path).ok();
            match namespace.remove(&member.path, member.file, &mut still)? {
                Outcome::Done => {}
                Outcome::Changed if found_at(&tree, &member.path)?.is_none() => {}
                Outcome::Changed | Outcome::Busy => {
                    return Ok(Some(format!(
                        "{} was changed, opened, pinned or named as the best meanwhile",
                        member.path.display()
                    )));
                }
            }
            // A mount has noted the removal already. At rest the entry is still there.
            if version.is_some() && self.shared.catalog().get(&member.path).map(|entry| entry.version) == version {
                self.shared.catalog().removed(&member.path);
            }
        }
        for directory in checkpoint.directories.iter().rev() {
            match namespace.remove_directory(&directory.path, directory.file)? {
                Outcome::Done => {}
                Outcome::Changed if found_at(&tree, &directory.path)?.is_none() => {}
                Outcome::Changed | Outcome::Busy => {
                    return Ok(Some(format!("{} is not empty any more", directory.path.display())));
                }
            }
        }
        Ok(None)
    }
}
