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

/// The mirror of a mounted store, and the thread that keeps it behind.
pub struct Daemon {
    settings: Settings,
    pace: Pace,
    /// Somebody waits: each time is a change, so that the mirror is asked once more.
    asked: AtomicU64,
    /// Held for moments.
    progress: Mutex<Progress>,
    /// Until it is stopped. Held for moments, and until its end.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Daemon {
    /// Starts the thread. The mirror need not answer yet.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(source: Arc<dyn Source>, place: Arc<dyn Place>, settings: Settings) -> std::io::Result<Arc<Daemon>> {
        let progress = Mutex::new(Progress { url: settings.url.clone(), ..Progress::default() });
        let (pace, asked) = (Pace::new(settings.bandwidth), AtomicU64::new(1));
        let daemon = Arc::new(Daemon { settings, pace, asked, progress, thread: Mutex::default() });
        let worker = Arc::clone(&daemon);
        let thread = thread::Builder::new().name("mirror".into()).spawn(move || {
            // Training comes first.
            yield_to_others();
            // A fault of stepfs must not end the mirror without a word. The work begins anew, as after a start.
            while catch_unwind(AssertUnwindSafe(|| worker.follow(source.as_ref(), &place))).is_err() {
                worker.inside().failing = Some("a fault of stepfs, please report it: the log has it".into());
                worker.pace.rest(FIRST_PAUSE);
            }
        })?;
        *daemon.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(daemon)
    }

    /// Ends the thread after the request under way. The next start goes on.
    pub fn stop(&self) {
        self.pace.stop();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            log::error!("the mirror's thread had panicked");
        }
    }

    /// Asks for a round without a pause: somebody waits.
    pub fn hasten(&self) {
        self.asked.fetch_add(1, Ordering::Relaxed);
    }

    /// How far it has come.
    pub fn progress(&self, source: &dyn Source) -> Progress {
        let changes = source.changes() + self.asked.load(Ordering::Relaxed);
        Progress { changes, ..self.inside().clone() }
    }

    fn inside(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the thread does until it is stopped.
    fn follow(&self, source: &dyn Source, place: &Arc<dyn Place>) {
        let (mut writer, mut seen, mut heard, mut retry) = (None, 0, 0, Retry::default());
        while !self.pace.is_stopped() {
            let asked = self.asked.load(Ordering::Relaxed);
            let changes = source.changes() + asked;
            // Somebody begins to wait.
            let is_asked = std::mem::replace(&mut heard, asked) != asked;
            let is_due = seen != changes || writer.as_ref().is_none_or(Writer::is_due);
            if !(is_asked || is_due && retry.is_due()) {
                self.pace.rest(LOOK_EVERY);
                continue;
            }
            let mut round = || -> Result<()> {
                let writer = match &mut writer {
                    Some(writer) => writer,
                    None => writer.insert(Writer::open(place, source.store().id(), &self.settings)?),
                };
                // After a failure somebody may wait still.
                let is_asked = is_asked || retry.failed.is_some();
                writer.look(source, changes, is_asked);
                writer.tell(&mut self.inside());
                writer.round(source, &self.pace, is_asked)
            };
            let done = round();
            let mut progress = self.inside();
            writer.iter().for_each(|writer| writer.tell(&mut progress));
            match done {
                Ok(()) => {
                    if std::mem::take(&mut retry).failed.is_some() {
                        log::info!("mirror: it answers again");
                    }
                    seen = changes;
                    (progress.done, progress.others) = writer.as_ref().map_or((0, 0), Writer::done);
                }
                Err(_) if self.pace.is_stopped() => {}
                Err(error) => {
                    retry.postpone("", Some(error));
                    seen = 0;
                }
            }
            progress.failing.clone_from(&retry.failed);
        }
    }
}
