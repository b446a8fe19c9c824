//! The threads that keep a mounted store and its remote in step. One pushes, one shows other nodes' names.
//!
//! They share the view and what the tree shows, each under a lock that is never held during a request or other I/O.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::fetch::Fetcher;
use super::journal::Shown;
use super::local::{Found, Local, walk};
use super::pauses::{FIRST_PAUSE, Pauses};
use super::place::{Error, Place, Result};
use super::plan::plan;
use super::push::Pusher;
use super::reader::{Reader, lock};
use super::shared::{LOOK_EVERY, Settings, Shared};
use super::tree;
use super::view::Stamp;
use super::waiting::Then;
use super::writer::Writer;
use crate::clock::wall_ns;
use crate::encode::yield_to_others;
use crate::store::{Wait, in_parallel};

/// A program that waits for the remote gets an error after this time without an answer.
const CLOSERS_PATIENCE: Duration = Duration::from_secs(60);
/// How often to look for objects that nothing needs.
const TIDY_EVERY: Duration = Duration::from_secs(60);
/// How often to read the names of other nodes while no program looks: a request for each node costs money. What the
/// tree shows is saved as often, so a name that is removed within this time before a crash may appear again.
const IDLE_REFRESH: Duration = Duration::from_secs(30);
/// How often to list all journals: a node that died may have left a segment that it did not tell of.
const WHOLE_REFRESH: Duration = Duration::from_secs(6 * 3600);

/// What `stepfs status` shows of a remote.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Its URL.
    pub url: String,
    /// This node's name.
    pub node: String,
    /// Files that are not pushed yet, of those that can be.
    pub files: u64,
    /// Bytes of them, as programs see them.
    pub bytes: u64,
    /// Age of the oldest of them, seconds.
    pub oldest_seconds: Option<u64>,
    /// All changes up to this one are pushed.
    pub pushed: u64,
    /// The present change.
    pub changes: u64,
    /// Names on the remote.
    pub names: u64,
    /// Why it does not go on at the moment.
    pub failing: Option<String>,
    /// Nodes of which part cannot be read, each with the reason.
    pub broken: Vec<String>,
}

/// The remote of a mounted store.
pub struct Daemon {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Daemon {
    /// Starts the threads. The remote need not answer yet.
    ///
    /// # Errors
    /// Threads cannot be started.
    pub fn start(local: Arc<dyn Local>, place: Arc<dyn Place>, settings: Settings) -> std::io::Result<Daemon> {
        let shown = tree::load(local.store(), &settings.url);
        let shared = Arc::new(Shared::new(settings, shown));
        let fetcher = Fetcher::new(Arc::clone(&place), Arc::clone(&shared.view), local.store().tmp());
        local.objects().look_elsewhere(Arc::new(fetcher));
        let daemon = Daemon { shared, threads: Mutex::default() };
        daemon.spawn("remote-push", &local, &place, push)?;
        daemon.spawn("remote-show", &local, &place, show)?;
        Ok(daemon)
    }

    fn spawn(
        &self,
        name: &str,
        local: &Arc<dyn Local>,
        place: &Arc<dyn Place>,
        work: fn(&dyn Local, &Arc<dyn Place>, &Shared),
    ) -> std::io::Result<()> {
        let (local, place, shared) = (Arc::clone(local), Arc::clone(place), Arc::clone(&self.shared));
        let thread = thread::Builder::new().name(name.into()).spawn(move || work(local.as_ref(), &place, &shared))?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// Ends the threads after the request under way. The next start goes on.
    pub fn stop(&self) {
        self.shared.pace.stop();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if thread.join().is_err() {
                log::error!("a thread of the remote had panicked");
            }
        }
        self.shared.waiting.fail_closers();
        self.shared.waiting.take_lookers().into_iter().for_each(|then| then());
    }

    /// Whether programs wait for the remote.
    pub fn is_waited_for(&self) -> bool {
        self.shared.settings.wait == Wait::Close && !self.shared.is_stopped()
    }

    /// Calls `then` once the remote has what is at and below a path. Drops it if the remote does not answer for a
    /// minute, or refuses.
    pub fn when_pushed(&self, path: PathBuf, then: Then) {
        self.shared.waiting.close(path, then);
        self.shared.pace.wake();
    }

    /// Calls `then` once the names of other nodes are read, or at once while the remote does not answer.
    pub fn when_read(&self, then: Then) {
        let fails = self.shared.failing.lock().unwrap_or_else(PoisonError::into_inner)[1].is_some();
        if fails || self.shared.is_stopped() {
            return then();
        }
        self.shared.waiting.look(then);
        self.shared.pace.wake();
    }

    /// Asks for a round without a pause: somebody waits.
    pub fn hasten(&self) {
        self.shared.asked.fetch_add(1, Ordering::Relaxed);
    }

    /// How far pushing has come.
    pub fn progress(&self, local: &dyn Local) -> Progress {
        let shared = &self.shared;
        let backlog = shared.backlog.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // Before the view is locked: the archive takes its own locks, and asks the view under them.
        let changes = local.changes();
        let view = lock(&shared.view);
        let age = |modified_ns: i64| (wall_ns() - modified_ns).max(0) as u64 / 1_000_000_000;
        let broken =
            |(name, node): (&String, &super::view::Node)| node.broken.as_ref().map(|why| format!("{name}: {why}"));
        Progress {
            url: shared.settings.url.clone(),
            node: shared.settings.node.clone(),
            files: backlog.files,
            bytes: backlog.bytes,
            oldest_seconds: backlog.oldest_ns.map(age),
            pushed: shared.pushed.load(Ordering::Relaxed),
            changes,
            names: view.files().count() as u64,
            failing: shared.failing.lock().unwrap_or_else(PoisonError::into_inner).iter().flatten().next().cloned(),
            broken: view.nodes().iter().filter_map(broken).collect(),
        }
    }
}

/// What the pushing thread does until it is stopped.
fn push(local: &dyn Local, place: &Arc<dyn Place>, shared: &Shared) {
    // Training comes first.
    yield_to_others();
    let (mut pauses, mut pusher, mut writer) = (Pauses::of(0), Pusher::default(), None);
    let (mut seen, mut tidy_at, mut failing) = (None, Instant::now() + TIDY_EVERY, None);
    while !shared.is_stopped() {
        let changes = local.changes();
        let now = (changes, lock(&shared.view).version());
        let due = seen != Some(now) || shared.waiting.is_any_closer();
        let tidy = tidy_at <= Instant::now();
        if !due && !tidy {
            shared.pace.rest(LOOK_EVERY);
            continue;
        }
        let begun = Instant::now();
        let mut round = || -> Result<bool> {
            // What another process has written is read first, and claimed anew.
            if writer.as_ref().is_some_and(Writer::is_outdated) {
                writer = None;
            }
            let writer = match &mut writer {
                Some(writer) => writer,
                None => {
                    let (node, store) = (&shared.settings.node, local.store().id());
                    let known = shared.shown().values().any(|stamp| stamp.node == *node);
                    writer.insert(Writer::claim(Arc::clone(place), Arc::clone(&shared.view), node, store, known)?)
                }
            };
            let done = pusher.round(local, writer, shared)?;
            if tidy {
                writer.tidy(shared.settings.grace)?;
                tidy_at = Instant::now() + TIDY_EVERY;
            }
            Ok(done)
        };
        match round() {
            Ok(done) => {
                pauses.end(shared);
                failing = None;
                if done {
                    shared.pushed.fetch_max(changes, Ordering::Relaxed);
                }
                // Own segments change the view; nothing new follows from them.
                seen = done.then(|| (changes, lock(&shared.view).version()));
                // A tree of many files takes its time: at most half of it, while programs save all the time.
                if !shared.waiting.is_any_closer() {
                    shared.pace.rest(LOOK_EVERY.max(begun.elapsed().min(FIRST_PAUSE)));
                }
            }
            Err(_) if shared.is_stopped() => {}
            Err(error) => {
                // The answer of a put may be lost. The next round reads the own journal before it writes.
                writer = None;
                let since = *failing.get_or_insert_with(Instant::now);
                if since.elapsed() > CLOSERS_PATIENCE || matches!(error, Error::Denied(_)) {
                    shared.waiting.fail_closers();
                }
                pauses.after(&error, shared);
            }
        }
    }
}

/// Waits until a program looks for a name and the view is older than the settings say, or until it is much older.
fn wait_for_a_look(local: &dyn Local, shared: &Shared) {
    let (begun, age) = (Instant::now(), shared.settings.refresh);
    let mut looked = false;
    while !shared.is_stopped() && begun.elapsed() < IDLE_REFRESH.max(age) {
        looked |= local.was_looked_at();
        if looked && begun.elapsed() >= age || shared.waiting.is_any_looker() {
            return;
        }
        shared.pace.rest(LOOK_EVERY.min(age));
    }
}

/// What the showing thread does until it is stopped.
fn show(local: &dyn Local, place: &Arc<dyn Place>, shared: &Shared) {
    let (mut pauses, mut seen) = (Pauses::of(1), None);
    let mut saved = shared.shown();
    let mut whole_at = Instant::now();
    while !shared.is_stopped() {
        let lookers = shared.waiting.take_lookers();
        let mut round = || -> Result<bool> {
            match whole_at <= Instant::now() {
                true => Reader::refresh(place.as_ref(), &shared.view)?,
                false => Reader::look(place.as_ref(), &shared.view)?,
            }
            if whole_at <= Instant::now() {
                whole_at = Instant::now() + WHOLE_REFRESH;
            }
            let version = lock(&shared.view).version();
            let done = seen == Some(version) || take_all(local, shared)?;
            seen = done.then_some(version);
            Ok(done)
        };
        let result = round();
        lookers.into_iter().for_each(|then| then());
        match result {
            Ok(done) => {
                pauses.end(shared);
                save(local, shared, &mut saved);
                // A file that somebody has open is exchanged once it is closed.
                if done { wait_for_a_look(local, shared) } else { shared.pace.sleep(shared.settings.refresh) }
            }
            Err(_) if shared.is_stopped() => {}
            Err(error) => pauses.after(&error, shared),
        }
    }
    save(local, shared, &mut saved);
}

fn save(local: &dyn Local, shared: &Shared, saved: &mut BTreeMap<PathBuf, Stamp>) {
    let shown = shared.prune();
    if shown == *saved {
        return;
    }
    match tree::save(local.store(), &shared.settings.url, &shared.settings.node, &shown) {
        Ok(()) => *saved = shown,
        Err(error) => log::warn!("remote.shown cannot be written now: {error}"),
    }
}

/// Shows what changed. True if nothing is left to show.
pub(super) fn take_all(local: &dyn Local, shared: &Shared) -> Result<bool> {
    let (node, newest) = (&shared.settings.node, shared.settings.newest);
    let files = walk(local)?;
    // After the tree was listed: a name that a user removes meanwhile is not shown again.
    let shown = shared.shown();
    let due: Vec<(PathBuf, Stamp, Option<Shown>)> = {
        let view = lock(&shared.view);
        let plan = plan(node, &view, &files, &shown, newest);
        let takes = plan.takes.into_iter().filter_map(|(path, stamp)| {
            let now = view.winner(&path).and_then(|(_, now)| now.cloned())?;
            Some((path, stamp, Some(now)))
        });
        let drops = plan.drops.into_iter().filter_map(|path| Some((view.winner(&path)?.0, path)));
        takes.chain(drops.map(|(stamp, path)| (path, stamp, None))).collect()
    };
    // Several at once: each waits for the device.
    let taken = in_parallel(&due, |(path, stamp, now)| match take(local, path, files.get(path), stamp, now.as_ref()) {
        Ok(true) => {
            shared.agree(&BTreeMap::from([(path.clone(), stamp.clone())]));
            true
        }
        Ok(false) => false,
        Err(error) => {
            log::warn!("remote: {} cannot be shown: {error}", path.display());
            false
        }
    });
    Ok(taken.into_iter().all(|done| done))
}

fn take(
    local: &dyn Local,
    path: &Path,
    found: Option<&Found>,
    stamp: &Stamp,
    now: Option<&Shown>,
) -> std::io::Result<bool> {
    match (now, found) {
        (Some(now), _) => tree::show(local, path, found, stamp, now),
        (None, Some(found)) => tree::take_away(local, path, found),
        (None, None) => Ok(true),
    }
}
