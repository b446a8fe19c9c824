//! How fast requests go: the bandwidth, and pauses while the mirror throttles.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long all requests wait once the mirror throttles: at first, and at most. Each time it does so again, twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The data behind the lock.
struct Inside {
    /// Nothing goes before this time.
    next: Instant,
    /// The pause of the next throttling.
    pause: Duration,
    stops: bool,
}

/// Lets bytes pass at a rate, and ends waits when the daemon stops.
pub(super) struct Pace {
    /// Bytes a second; `None` without limit.
    rate: Option<f64>,
    /// Held for moments.
    inside: Mutex<Inside>,
    stopped: Condvar,
}

impl Pace {
    pub(super) fn new(rate: Option<f64>) -> Pace {
        let inside = Mutex::new(Inside { next: Instant::now(), pause: FIRST_PAUSE, stops: false });
        Pace { rate, inside, stopped: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When the next bytes may go.
    pub(super) fn next(&self) -> Instant {
        self.lock().next.max(Instant::now())
    }

    /// Waits until `bytes` more may go. False if that is after `until`, or once the daemon stops: an unmount does not wait for
    /// a large file.
    pub(super) fn take(&self, bytes: u64, until: Option<Instant>) -> bool {
        let mut inside = self.lock();
        let begin = inside.next.max(Instant::now());
        if until.is_some_and(|until| begin > until) {
            return false;
        }
        if let Some(rate) = self.rate {
            inside.next = begin + Duration::from_secs_f64(bytes as f64 / rate);
        }
        !self.wait(inside, begin.saturating_duration_since(Instant::now()))
    }

    /// Waits for a time. True once the daemon stops.
    fn wait(&self, inside: MutexGuard<'_, Inside>, time: Duration) -> bool {
        let waited = self.stopped.wait_timeout_while(inside, time, |inside| !inside.stops);
        waited.unwrap_or_else(PoisonError::into_inner).0.stops
    }

    /// The mirror has taken something, or throttles: then all wait.
    pub(super) fn answered(&self, busy: bool) {
        let mut inside = self.lock();
        if !busy {
            inside.pause = FIRST_PAUSE;
        } else if inside.next <= Instant::now() {
            // Requests that were under way together are one throttling.
            inside.next = Instant::now() + inside.pause;
            inside.pause = (inside.pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Waits for a time, or until the daemon stops.
    pub(super) fn rest(&self, time: Duration) {
        self.wait(self.lock(), time);
    }

    /// Ends all waits, now and later.
    pub(super) fn stop(&self) {
        self.lock().stops = true;
        self.stopped.notify_all();
    }

    /// True once the daemon stops.
    pub(super) fn is_stopped(&self) -> bool {
        self.lock().stops
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_pass_at_the_rate() {
        let pace = Pace::new(Some(1e6));
        let begun = Instant::now();
        (0..5).for_each(|_| assert!(pace.take(50_000, None)));
        // The first piece goes at once; four are waited for.
        assert!(begun.elapsed() >= Duration::from_millis(190), "{:?}", begun.elapsed());
        assert!(!pace.take(1, Some(Instant::now())));
        pace.stop();
        assert!(!pace.take(1, None) && !pace.take(u64::MAX >> 20, None));
        let unlimited = Pace::new(None);
        assert!(unlimited.take(u64::MAX, None));
        unlimited.stop();
        assert!(!unlimited.take(1, None));
    }

    #[test]
    fn throttling_slows_all() {
        let (pace, begun) = (Pace::new(None), Instant::now());
        (0..16).for_each(|_| pace.answered(true));
        assert!(pace.take(1, None));
        assert!(begun.elapsed() >= FIRST_PAUSE && begun.elapsed() < 8 * FIRST_PAUSE, "{:?}", begun.elapsed());
    }
}
