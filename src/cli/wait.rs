//! Waiting for the archive, with a bar.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::archive::Status;

use super::words::progress;

/// How often it is asked what is left: the answer costs no look at any file.
const INTERVAL: Duration = Duration::from_millis(20);
/// Room may be made any moment, but nobody should wait for ever for it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Waits until nothing is left to do; answers the queue at the end. `queue` says what is left, and `before`, if something
/// else must be over first, what that is.
///
/// # Errors
/// When it cannot go on: the reason, for the user.
pub(super) fn wait_for(
    queue: impl FnMut() -> Result<Status>,
    before: impl FnMut() -> Result<Option<&'static str>>,
) -> Result<Status> {
    wait_at_most(Duration::MAX, queue, before)
}

/// The same, but no longer than this once what must be over first is: where programs go on saving, there may always be something
/// left to do.
///
/// # Errors
/// As of [`wait_for`].
pub(super) fn wait_at_most(
    patience: Duration,
    mut queue: impl FnMut() -> Result<Status>,
    mut before: impl FnMut() -> Result<Option<&'static str>>,
) -> Result<Status> {
    let mut total = 0;
    let mut alone: Option<Instant> = None;
    let mut bar = None;
    let mut stalled: Option<Instant> = None;
    loop {
        // First: what is over then may have left something to do.
        let first = before()?;
        let now = queue()?;
        if first.is_none() && (now.queued == 0 || alone.get_or_insert_with(Instant::now).elapsed() > patience) {
            return Ok(now);
        }
        match &now.stalled {
            Some(why) if stalled.get_or_insert_with(Instant::now).elapsed() > PATIENCE => {
                bail!("stalled: {why}; it goes on by itself once that is mended");
            }
            Some(_) => {}
            None => stalled = None,
        }
        total = total.max(now.queued);
        let bar = bar.get_or_insert_with(|| progress(total, false));
        bar.set_message(first.unwrap_or("archiving"));
        bar.set_length(total);
        bar.set_position(total - now.queued);
        std::thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_there_is_always_something_left_the_wait_ends_after_what_was_asked_for() {
        let busy = || Ok(Status { queued: 5, ..Status::default() });
        let mut looks = 0;
        let asked_for = || {
            looks += 1;
            Ok((looks < 4).then_some("asked for"))
        };
        let patience = Duration::from_millis(60);
        let began = Instant::now();
        assert_eq!(wait_at_most(patience, busy, asked_for).unwrap().queued, 5);
        assert!(looks > 4 && began.elapsed() > patience);
        assert_eq!(wait_for(|| Ok(Status::default()), || Ok(None)).unwrap().queued, 0);
    }
}
