//! How long the calls of one handle wait for room (`room.rs`).

use std::time::{Duration, Instant};

/// Longest time from the first wait of a handle to the end of its last one. The ranks of a job give up after ten minutes
/// without an answer of one (torch.distributed): half of that is left for the save itself.
const MOST: Duration = Duration::from_secs(300);

/// How long the calls of a handle wait for room.
#[derive(Default)]
pub(super) struct Patience {
    /// After this none of them waits. `None` before the first wait.
    until: Option<Instant>,
    /// Those that wait, and since when there are any.
    waiting: usize,
    since: Option<Instant>,
    /// The time during which there were some.
    waited: Duration,
    /// The program was told that there is no room.
    is_refused: bool,
}

impl Patience {
    /// Whether no call waits any more.
    pub(super) fn is_over(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
    }

    /// A call begins to wait. Answers whether it is the first one.
    pub(super) fn begin(&mut self) -> bool {
        let now = Instant::now();
        self.waiting += 1;
        self.since.get_or_insert(now);
        self.until.replace(self.until.unwrap_or(now + MOST)).is_none()
    }

    /// A call ends its wait.
    pub(super) fn end(&mut self) {
        self.waiting -= 1;
        if self.waiting == 0 {
            self.waited += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        }
    }

    /// The program is told that there is no room, and its other calls do not wait. Answers whether that is new to it.
    pub(super) fn refuse(&mut self) -> bool {
        self.until = Some(Instant::now());
        !std::mem::replace(&mut self.is_refused, true)
    }

    /// The time during which calls waited.
    pub(super) fn waited(&self) -> Duration {
        self.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_has_one_deadline() {
        let mut patience = Patience::default();
        assert!(!patience.is_over() && patience.begin());
        let until = patience.until;
        // A second call beside the first, and a third one later.
        assert!(!patience.begin());
        patience.end();
        assert!(patience.waited.is_zero(), "one still waits");
        patience.end();
        let waited = patience.waited;
        std::thread::sleep(Duration::from_millis(5));
        assert!(!patience.begin() && patience.until == until && until.is_some());
        patience.end();
        assert!(patience.waited > waited && patience.waited < MOST);
        assert!(patience.refuse() && patience.is_over() && !patience.refuse());
    }
}
