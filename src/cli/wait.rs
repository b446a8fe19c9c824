//! Waiting for the archive, with a bar.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::archive::Queue;

use super::format::progress;

/// How often to ask how much is left. The answer examines no file.
const INTERVAL: Duration = Duration::from_millis(20);
/// The pause is so many times as long as the answer took. Beside a million files an answer takes time that the archive needs.
const PAUSE_FACTOR: u32 = 4;
/// How long to wait while the archive is stalled: room may appear at any moment, but the wait must end.
const PATIENCE: Duration = Duration::from_secs(5);

/// The work that a wait has before it.
pub(super) struct Left {
    /// Steps, or bytes.
    pub(super) count: u64,
    /// The words beside the bar.
    pub(super) doing: String,
    /// Why the work cannot go on now, as the message of an error.
    pub(super) stuck: Option<String>,
}

/// Waits with a bar, of bytes or of steps, until `look` finds that nothing is left.
///
/// # Errors
/// The error of `look`; or the work could not go on for longer than `patience`.
pub(super) fn wait(bytes: bool, patience: Duration, mut look: impl FnMut() -> Result<Option<Left>>) -> Result<()> {
    let bar = progress(0, bytes);
    let (mut total, mut stuck) = (0, None::<Instant>);
    loop {
        let asked = Instant::now();
        let Some(left) = look()? else { break };
        match left.stuck {
            Some(why) if stuck.get_or_insert_with(Instant::now).elapsed() > patience => bail!(why),
            Some(_) => {}
            None => stuck = None,
        }
        total = total.max(left.count);
        bar.set_message(left.doing);
        bar.set_length(total);
        bar.set_position(total - left.count);
        std::thread::sleep(INTERVAL.max(asked.elapsed() * PAUSE_FACTOR));
    }
    bar.finish_and_clear();
    Ok(())
}

/// Waits until nothing is left to do, and returns the last queue. `queue` asks how much is left. `before` names any
/// other work that must end first. Then `enough` may end the wait: while programs save, there may always be work left.
///
/// # Errors
/// The work cannot go on; the message gives the reason.
pub(super) fn wait_until(
    mut queue: impl FnMut() -> Result<Queue>,
    mut before: impl FnMut() -> Result<Option<&'static str>>,
    mut enough: impl FnMut(&Queue) -> bool,
) -> Result<Queue> {
    let mut now = Queue::default();
    wait(false, PATIENCE, || {
        // First: the work that ended may have queued more.
        let first = before()?;
        now = queue()?;
        if first.is_none() && (now.queued == 0 || enough(&now)) {
            return Ok(None);
        }
        let stuck =
            now.stalled.as_ref().map(|why| format!("stalled: {why}; it continues by itself once that is fixed"));
        Ok(Some(Left { count: now.queued, doing: first.unwrap_or("archiving").into(), stuck }))
    })?;
    Ok(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_there_is_always_something_left_the_wait_ends_when_it_is_enough() {
        let busy = || Ok(Queue { queued: 5, ..Queue::default() });
        let (mut looks, mut asked) = (0, 0);
        let asked_for = || {
            looks += 1;
            Ok((looks < 4).then_some("asked for"))
        };
        let enough = |_: &Queue| {
            asked += 1;
            asked == 3
        };
        assert_eq!(wait_until(busy, asked_for, enough).unwrap().queued, 5);
        assert_eq!((looks, asked), (6, 3));
        assert_eq!(wait_until(|| Ok(Queue::default()), || Ok(None), |_| false).unwrap().queued, 0);
    }
}
