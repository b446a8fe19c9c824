//! The threads that keep a mounted store and its remote in step. One pushes, one shows other nodes' names.
//!
//! They share the view and what the tree shows, each under a lock that is never held during a request or other I/O.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::counted::Counted;
use super::fetch::Fetcher;
use super::local::Local;
use super::pauses::{FIRST_PAUSE, Pauses};
use super::place::{Error, Place, Result};
use super::push::{Pusher, count};
use super::reader::{Reader, lock};
use super::shared::{LOOK_EVERY, PUSHING, SHOWING, Settings, Shared};
use super::show::take_all;
use super::tree;
use super::view::Stamp;
use super::waiting::{PATIENCE, Then};
use super::writer::Writer;
use crate::clock::wall_ns;
use crate::encode::yield_to_others;
use crate::store::Wait;

/// How often to look for objects that nothing needs.
const TIDY_EVERY: Duration = Duration::from_secs(60);
/// How often to read the names of other nodes while no program looks: a request for each node costs money. What the
/// tree shows is saved as often, so a name that is removed within this time before a crash may appear again.
const IDLE_REFRESH: Duration = Duration::from_secs(30);
/// A directory stays for so long after its last file went: a program that saw it may be about to use it.
const EMPTY_FOR: Duration = Duration::from_secs(10);
/// The longest wait of a mount for the remote's names: of a store that shows none of them yet, and of one that shows some.
const FIRST_NAMES: Duration = Duration::from_secs(60);
const FIRST_ANSWER: Duration = Duration::from_secs(2);
/// How often it looks.
const A_MOMENT: Duration = Duration::from_millis(10);
/// A name that cannot be shown is tried again at least so often.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
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
    /// Of these, files that cannot be pushed; known once all others have been.
    #[serde(default)]
    pub stuck: u64,
    /// Bytes of them, as programs see them.
    pub bytes: u64,
    /// Age of the oldest of them, seconds.
    pub oldest_seconds: Option<u64>,
    /// All changes up to this one are pushed.
    pub pushed: u64,
    /// All changes up to this one are pushed, but for files that cannot be.
    #[serde(default)]
    pub tried: u64,
    /// The present change.
    pub changes: u64,
    /// Names on the remote.
    pub names: u64,
    /// Bytes that came from it since the mount: names and objects.
    #[serde(default)]
    pub came: u64,
    /// Why it does not go on at the moment.
    pub failing: Option<String>,
    /// Nodes of which part cannot be read, each with the reason.
    pub broken: Vec<String>,
}

/// The remote of a mounted store.
pub struct Daemon {
    shared: Arc<Shared>,
    counted: Arc<Counted>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Daemon {
    /// Starts the threads. The remote need not answer yet.
    ///
    /// # Errors
    /// Threads cannot be started.
    pub fn start(local: Arc<dyn Local>, place: Arc<dyn Place>, settings: Settings) -> std::io::Result<Daemon> {
        let counted = Arc::new(Counted::new(place));
        let place: Arc<dyn Place> = Arc::clone(&counted) as _;
        let shown = tree::load(local.store(), &settings.url);
        let shared = Arc::new(Shared::new(settings, shown));
        let fetcher = Fetcher::new(Arc::clone(&place), Arc::clone(&shared.view), local.store().tmp());
        local.objects().look_elsewhere(Arc::new(fetcher));
        let daemon = Daemon { shared, counted, threads: Mutex::default() };
        daemon.spawn(("remote-push", PUSHING), &local, &place, push)?;
        daemon.spawn(("remote-show", SHOWING), &local, &place, show)?;
        Ok(daemon)
    }

    fn spawn(
        &self,
        (name, number): (&'static str, usize),
        local: &Arc<dyn Local>,
        place: &Arc<dyn Place>,
        work: fn(&dyn Local, &Arc<dyn Place>, &Shared),
    ) -> std::io::Result<()> {
        let (local, place, shared) = (Arc::clone(local), Arc::clone(place), Arc::clone(&self.shared));
        let thread = thread::Builder::new().name(name.into()).spawn(move || {
            let mut pauses = Pauses::of(number);
            // A fault of stepfs must not end the pushing without a word. The work begins anew, as after a start.
            while let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(local.as_ref(), &place, &shared))) {
                let error = Error::Away(format!("a fault of stepfs, please report it: {}", words_of(panic.as_ref())));
                log::error!("{name}: {error}");
                shared.waiting.fail_closers();
                shared.waiting.set_current();
                pauses.after(&error, &shared);
            }
        })?;
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
        self.shared.waiting.set_current();
        drop(self.shared.waiting.take_lookers());
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
        let fails = self.shared.failing.lock().unwrap_or_else(PoisonError::into_inner)[SHOWING].is_some();
        if fails || self.shared.is_stopped() {
            return then();
        }
        self.shared.waiting.look(then);
        self.shared.pace.wake();
    }

    /// Calls `then` once the names of other nodes that are known now are shown, at once if they are few.
    pub fn when_shown(&self, then: Then) {
        self.shared.waiting.list(then);
    }

    /// Calls `then` once the tree shows what the remote had after the start, or at once while the remote does not answer.
    pub fn when_current(&self, then: Then) {
        self.shared.waiting.open(then);
    }

    /// Waits until the node's name is claimed, and the tree shows what the remote has. A program that looks into a fresh store
    /// before would find nothing, and begin its run anew. So this waits longer where nothing was shown before. Says why it does
    /// not go on.
    pub fn wait_until_begun(&self) -> Option<String> {
        let most = if self.shared.shown().is_empty() { FIRST_NAMES } else { FIRST_ANSWER };
        let begun = Instant::now();
        while !self.shared.is_stopped() && begun.elapsed() < most {
            let failing = self.shared.failing.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let has_begun = |of: usize| self.shared.begun[of].load(Ordering::Relaxed);
            if let Some(why) =
                [PUSHING, SHOWING].into_iter().find_map(|of| failing[of].clone().filter(|_| !has_begun(of)))
            {
                return Some(why);
            }
            if has_begun(PUSHING) && has_begun(SHOWING) {
                return None;
            }
            thread::sleep(A_MOMENT);
        }
        Some("it has not answered yet; its names appear once it does".into())
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
            stuck: backlog.stuck,
            bytes: backlog.bytes,
            oldest_seconds: backlog.oldest_ns.map(age),
            pushed: shared.pushed.load(Ordering::Relaxed),
            tried: shared.tried.load(Ordering::Relaxed),
            changes,
            names: view.files().count() as u64,
            came: self.counted.came(),
            failing: shared.failing.lock().unwrap_or_else(PoisonError::into_inner).iter().flatten().next().cloned(),
            broken: view.nodes().iter().filter_map(broken).collect(),
        }
    }
}

/// The message of a panic.
fn words_of(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic")
}

/// What the pushing thread does until it is stopped.
fn push(local: &dyn Local, place: &Arc<dyn Place>, shared: &Shared) {
    // Training comes first.
    yield_to_others();
    let (mut pauses, mut pusher, mut writer) = (Pauses::of(PUSHING), Pusher::default(), None);
    let (mut seen, mut tidy_at, mut failing) = (None, Instant::now() + TIDY_EVERY, None);
    while !shared.is_stopped() {
        let changes = local.changes();
        let asked = shared.asked.load(Ordering::Relaxed);
        let version = lock(&shared.view).version();
        let put_before = writer.as_ref().map_or(0, Writer::put_segments);
        // Each name that appears is a change. A walk through all of them again and again would slow them down.
        let is_asked = seen.is_none_or(|(_, _, last)| last != asked);
        let waits = shared.waiting.is_showing() && !is_asked;
        let is_again = pusher.again().is_some_and(|at| at <= Instant::now());
        let due = seen != Some((changes, version, asked)) && !waits || is_again || shared.waiting.is_any_closer();
        let tidy = tidy_at <= Instant::now();
        if !due && !tidy {
            shared.pace.rest(LOOK_EVERY);
            continue;
        }
        if tidy {
            local.tidy();
        }
        let begun = Instant::now();
        let mut round = || -> Result<bool> {
            // What another process has written is read first, and claimed anew.
            if writer.as_ref().map(Writer::is_outdated).transpose()? == Some(true) {
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
            shared.begun[PUSHING].store(true, Ordering::Relaxed);
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
                if done || pusher.again().is_some() {
                    shared.tried.fetch_max(changes, Ordering::Relaxed);
                }
                // Own segments change the view; nothing new follows from them. News that came after the plan count as
                // unseen.
                let put = writer.as_ref().map_or(0, Writer::put_segments).saturating_sub(put_before);
                seen = (done || pusher.again().is_some()).then_some((changes, version + put, asked));
                // A tree of many files takes its time: at most half of it, while programs save all the time.
                if !shared.waiting.is_any_closer() || pusher.has_failed() {
                    shared.pace.rest(LOOK_EVERY.max(begun.elapsed().min(FIRST_PAUSE)));
                }
            }
            Err(_) if shared.is_stopped() => {}
            Err(error) => {
                // The answer of a put may be lost. The next round reads the own journal before it writes.
                writer = None;
                let since = *failing.get_or_insert_with(Instant::now);
                if since.elapsed() > PATIENCE || matches!(error, Error::Denied(_)) {
                    shared.waiting.fail_closers();
                }
                if let Err(error) = count(local, shared) {
                    log::debug!("remote: what is left cannot be counted: {error}");
                }
                pauses.after(&error, shared);
            }
        }
    }
}

/// Waits until a program looks for a name and the view is older than the settings say, or until it is older than
/// `most`.
fn wait_for_a_look(local: &dyn Local, shared: &Shared, most: Duration) {
    let (begun, age) = (Instant::now(), shared.settings.refresh);
    let mut looked = false;
    while !shared.is_stopped() && begun.elapsed() < most {
        looked |= local.was_looked_at();
        let is_unshown = shared.is_unshown.load(Ordering::Relaxed);
        if (looked || is_unshown) && begun.elapsed() >= age || shared.waiting.is_any_looker() {
            return;
        }
        shared.pace.rest(LOOK_EVERY.min(age));
    }
}

/// What the showing thread does until it is stopped.
fn show(local: &dyn Local, place: &Arc<dyn Place>, shared: &Shared) {
    let (mut pauses, mut seen) = (Pauses::of(SHOWING), None);
    // Unknown: a former round of this thread may have ended in a panic.
    let mut saved = None;
    let (mut whole_at, mut told) = (Instant::now(), BTreeMap::new());
    // Names that a program has open, or that cannot be shown for other reasons, are tried again after pauses that grow.
    let (mut again, mut pause) = (Instant::now(), shared.settings.refresh);
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
            let is_news = seen != Some(version);
            let is_due = !told.is_empty() && again <= Instant::now();
            if !shared.is_unshown.swap(false, Ordering::Relaxed) && !is_news && !is_due {
                shared.remove_emptied(local, EMPTY_FOR);
                return Ok(told.is_empty());
            }
            let left = take_all(local, shared).inspect_err(|_| shared.is_unshown.store(true, Ordering::Relaxed))?;
            shared.remove_emptied(local, EMPTY_FOR);
            for (path, why) in left.iter().filter(|(path, why)| told.get(*path) != Some(*why)) {
                log::warn!("remote: {} cannot be shown now: {why}", path.display());
            }
            pause = if is_news { shared.settings.refresh } else { (pause * 2).min(LONGEST_PAUSE) };
            (seen, told, again) = (Some(version), left, Instant::now() + pause);
            shared.begun[SHOWING].store(true, Ordering::Relaxed);
            Ok(told.is_empty())
        };
        let result = round();
        shared.waiting.set_current();
        drop(lookers);
        match result {
            Ok(done) => {
                pauses.end(shared);
                save(local, shared, &mut saved);
                // A file that somebody has open is exchanged once it is closed.
                let age = shared.settings.refresh;
                wait_for_a_look(local, shared, if done { IDLE_REFRESH.max(age) } else { pause });
            }
            Err(_) if shared.is_stopped() => {}
            Err(error) => pauses.after(&error, shared),
        }
    }
    // No program uses the tree any more.
    shared.remove_emptied(local, Duration::ZERO);
    save(local, shared, &mut saved);
}

fn save(local: &dyn Local, shared: &Shared, saved: &mut Option<BTreeMap<PathBuf, Stamp>>) {
    let shown = shared.prune();
    if Some(&shown) == saved.as_ref() {
        return;
    }
    let (url, node) = (&shared.settings.url, &shared.settings.node);
    match shared.sync_shown(local.store()).and_then(|()| tree::save(local.store(), url, node, &shown)) {
        Ok(()) => *saved = Some(shown),
        Err(error) => log::warn!("remote.shown cannot be written now: {error}"),
    }
}
