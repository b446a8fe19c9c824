//! The thread that keeps a mirror behind a mounted store.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::pace::Pace;
use super::place::{Place, Result};
use super::settings::{Progress, Settings};
use super::source::Source;
use super::waiting::{FIRST_PAUSE, Retry};
use super::writer::Writer;
use crate::encode::yield_to_others;

/// How often to look whether something has changed: a look at one number.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The data that the thread shares.
struct Shared {
    settings: Settings,
    pace: Pace,
    /// Somebody waits: each time is a change, so that the mirror is asked once more.
    asked: AtomicU64,
    /// Held for moments.
    progress: Mutex<Progress>,
}

impl Shared {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The mirror of a mounted store.
pub struct Daemon {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Daemon {
    /// Starts the thread. The mirror need not answer yet.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(source: Arc<dyn Source>, place: Arc<dyn Place>, settings: Settings) -> std::io::Result<Daemon> {
        let progress = Mutex::new(Progress { url: settings.url.clone(), ..Progress::default() });
        let pace = Pace::new(settings.bandwidth);
        let shared = Arc::new(Shared { settings, pace, asked: AtomicU64::new(1), progress });
        let worker = Arc::clone(&shared);
        let thread = thread::Builder::new().name("mirror".into()).spawn(move || {
            // Training comes first.
            yield_to_others();
            // A fault of stepfs must not end the mirror without a word. The work begins anew, as after a start.
            while catch_unwind(AssertUnwindSafe(|| follow(source.as_ref(), &place, &worker))).is_err() {
                worker.progress().failing = Some("a fault of stepfs, please report it: the log has it".into());
                worker.pace.rest(FIRST_PAUSE);
            }
        })?;
        Ok(Daemon { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Ends the thread after the request under way. The next start goes on.
    pub fn stop(&self) {
        self.shared.pace.stop();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            log::error!("the mirror's thread had panicked");
        }
    }

    /// Asks for a round without a pause: somebody waits.
    pub fn hasten(&self) {
        self.shared.asked.fetch_add(1, Ordering::Relaxed);
    }

    /// How far it has come.
    pub fn progress(&self, source: &dyn Source) -> Progress {
        let changes = source.changes() + self.shared.asked.load(Ordering::Relaxed);
        Progress { changes, ..self.shared.progress().clone() }
    }
}

/// What the thread does until it is stopped.
fn follow(source: &dyn Source, place: &Arc<dyn Place>, shared: &Shared) {
    let (mut writer, mut seen, mut asked, mut heard, mut retry) = (None, 0, 0, 0, Retry::default());
    while !shared.pace.is_stopped() {
        let now_asked = shared.asked.load(Ordering::Relaxed);
        let changes = source.changes() + now_asked;
        if std::mem::replace(&mut heard, now_asked) != now_asked {
            // Somebody begins to wait.
            retry.hasten();
        }
        let is_due = seen != changes || writer.as_ref().is_none_or(Writer::is_due);
        if !is_due || !retry.is_due() {
            shared.pace.rest(LOOK_EVERY);
            continue;
        }
        let mut round = || -> Result<()> {
            let writer = match &mut writer {
                Some(writer) => writer,
                None => writer.insert(Writer::open(place, source.store().id(), &shared.settings)?),
            };
            let is_asked = asked != now_asked;
            writer.look(source, changes, is_asked);
            writer.tell(&mut shared.progress());
            writer.round(source, &shared.pace, is_asked)?;
            asked = now_asked;
            Ok(())
        };
        let done = round();
        let mut progress = shared.progress();
        writer.iter().for_each(|writer| writer.tell(&mut progress));
        progress.failing = done.as_ref().err().map(ToString::to_string);
        match done {
            Ok(()) => {
                if std::mem::take(&mut retry).has_failed() {
                    log::info!("mirror: it answers again");
                }
                seen = changes;
                (progress.done, progress.others) = writer.as_ref().map_or((0, 0), Writer::done);
            }
            Err(error) => {
                if !retry.has_failed() && !shared.pace.is_stopped() {
                    log::warn!("mirror: {error}; stepfs tries again, and nothing waits for it");
                }
                retry.postpone(true);
                seen = 0;
            }
        }
    }
}
