//! Waits of the remote's threads after failures.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::place::Error;
use super::shared::{LOOK_EVERY, Shared};
use crate::clock::wall_ns;

/// How long to wait after a failed round, at first and at most. Each wait varies by half, so that many nodes do not
/// come back at once.
pub(super) const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Waits after a failure of a thread, longer each time.
pub(super) struct Pauses {
    thread: usize,
    next: Duration,
}

impl Pauses {
    pub(super) fn of(thread: usize) -> Pauses {
        Pauses { thread, next: FIRST_PAUSE }
    }

    /// Waits, and reports the reason once.
    pub(super) fn after(&mut self, error: &Error, shared: &Shared) {
        if self.next == FIRST_PAUSE {
            log::warn!("remote: {error}; stepfs tries again, and nothing waits for it");
        }
        shared.fails(self.thread, Some(error.to_string()));
        let varied = self.next.mul_f64(0.5 + (wall_ns() % 1000) as f64 / 1000.0);
        let (until, asked) = (Instant::now() + varied, shared.asked.load(Ordering::Relaxed));
        while Instant::now() < until && !shared.is_stopped() && shared.asked.load(Ordering::Relaxed) == asked {
            shared.pace.sleep(LOOK_EVERY);
        }
        self.next = (self.next * 2).min(LONGEST_PAUSE);
    }

    pub(super) fn end(&mut self, shared: &Shared) {
        if std::mem::replace(&mut self.next, FIRST_PAUSE) != FIRST_PAUSE {
            log::info!("remote: it answers again");
        }
        shared.fails(self.thread, None);
    }
}
