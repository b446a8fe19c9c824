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
    mut queue: impl FnMut() -> Result<Status>,
    mut before: impl FnMut() -> Result<Option<&'static str>>,
) -> Result<Status> {
    let mut total = 0;
    let mut bar = None;
    let mut stalled: Option<Instant> = None;
    loop {
        // First: what is over then may have left something to do.
        let first = before()?;
        let now = queue()?;
        if first.is_none() && now.queued == 0 {
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
