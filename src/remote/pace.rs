//! Bandwidth: how long to wait before bytes go.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::place::{Error, Result};

/// Lets bytes pass at a rate, and ends waits when the daemon stops.
pub(super) struct Pace {
    /// Bytes a second; `None` without limit.
    rate: Option<u64>,
    /// When the bytes that have passed are paid for; and whether the daemon stops. Held for moments.
    inside: Mutex<(Instant, bool)>,
    stopped: Condvar,
}

impl Pace {
    pub(super) fn new(rate: Option<u64>) -> Pace {
        Pace { rate, inside: Mutex::new((Instant::now(), false)), stopped: Condvar::new() }
    }

    /// Waits until `bytes` more may go.
    ///
    /// # Errors
    /// [`Error::Away`] once the daemon stops: an unmount does not wait for a large file.
    pub(super) fn take(&self, bytes: u64) -> Result<()> {
        let cost = self.rate.filter(|rate| *rate > 0).map(|rate| Duration::from_secs_f64(bytes as f64 / rate as f64));
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = inside.0.max(Instant::now());
        inside.0 = cost.map_or(inside.0, |cost| begin + cost);
        loop {
            if inside.1 {
                return Err(Error::Away("the daemon stops".into()));
            }
            let left = begin.saturating_duration_since(Instant::now());
            if cost.is_none() || left.is_zero() {
                return Ok(());
            }
            inside = self.stopped.wait_timeout(inside, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits for a time, until somebody calls [`Pace::wake`], or until the daemon stops.
    pub(super) fn rest(&self, time: Duration) {
        let inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        if !inside.1 {
            drop(self.stopped.wait_timeout(inside, time).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Ends all rests of this moment.
    pub(super) fn wake(&self) {
        self.stopped.notify_all();
    }

    /// Waits for a time, or until the daemon stops.
    pub(super) fn sleep(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || inside.1 {
                return;
            }
            inside = self.stopped.wait_timeout(inside, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends all waits, now and later.
    pub(super) fn stop(&self) {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        self.stopped.notify_all();
    }

    /// True once the daemon stops.
    pub(super) fn is_stopped(&self) -> bool {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner).1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_pass_at_the_rate() {
        let pace = Pace::new(Some(1_000_000));
        let begun = Instant::now();
        (0..5).for_each(|_| pace.take(50_000).unwrap());
        // The first piece goes at once; four are waited for.
        assert!(begun.elapsed() >= Duration::from_millis(190), "{:?}", begun.elapsed());
        pace.stop();
        assert!(pace.take(1).is_err() && pace.take(u64::MAX >> 20).is_err());
        let unlimited = Pace::new(None);
        unlimited.take(u64::MAX).unwrap();
        unlimited.stop();
        assert!(unlimited.take(1).is_err());
    }
}
