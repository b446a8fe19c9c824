//! A name that the mirror does not have as the store has it, and why.

use std::path::Path;
use std::time::{Duration, Instant};

use super::place::Error;
use super::source::{Found, Seen, Shape};
use super::work::Work;

/// How long something that failed is left alone, at first and at most: each time twice as long.
pub(super) const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// When something that failed is tried again.
#[derive(Default)]
pub(super) struct Retry {
    pub(super) at: Option<Instant>,
    /// The pause after the next failure; none before the first.
    pause: Option<Duration>,
    /// Why it failed.
    pub(super) failed: Option<String>,
}

impl Retry {
    /// Leaves something for a pause, because it failed or because its turn has not come. Says a new reason in the log.
    pub(super) fn postpone(&mut self, what: &str, error: Option<Error>) {
        let pause = self.pause.unwrap_or(FIRST_PAUSE);
        self.at = Some(Instant::now() + pause);
        let Some(why) = error.map(|error| error.to_string()) else { return };
        self.pause = Some((pause * 2).min(LONGEST_PAUSE));
        if self.failed.as_ref() != Some(&why) {
            log::warn!("mirror: {what}{why}; stepfs tries again, and no save waits for it");
        }
        self.failed = Some(why);
    }

    pub(super) fn is_due(&self) -> bool {
        self.at.is_none_or(|at| at <= Instant::now())
    }
}

/// See the module.
pub(super) struct Waiting {
    /// As it was seen last.
    pub(super) seen: Option<Seen>,
    /// The first change of the store that the mirror may lack.
    pub(super) change: u64,
    /// The same, if the name is to be looked at.
    pub(super) look: Option<u64>,
    /// It looked gone while other names changed: one of them may be its new name.
    pub(super) is_doubted: bool,
    pub(super) since: Instant,
    /// What is under way of its bytes.
    pub(super) work: Option<Box<Work>>,
    pub(super) retry: Retry,
}

impl Waiting {
    pub(super) fn new(seen: Option<Seen>, change: u64) -> Waiting {
        let (look, is_doubted, work, retry) = Default::default();
        Waiting { seen, change, look, is_doubted, since: Instant::now(), work, retry }
    }

    /// The file that was seen, if it is one.
    pub(super) fn file(&self) -> Option<&Found> {
        match &self.seen {
            Some(Seen::File(found)) => Some(found),
            _ => None,
        }
    }

    /// Whether the mirror is to have something that it lacks. What may still change is not to be there, and what has gone
    /// waits for others.
    pub(super) fn is_wanted(&self) -> bool {
        self.retry.failed.is_some() || self.file().is_some_and(|found| found.shape != Shape::Unsettled)
    }

    /// The first change that the mirror may lack, if it is to have it.
    pub(super) fn lacks(&self) -> Option<u64> {
        self.look.into_iter().chain(self.is_wanted().then_some(self.change)).min()
    }

    /// Leaves it for later.
    pub(super) fn postpone(&mut self, path: &Path, error: Option<Error>) {
        self.retry.postpone(&format!("{} is not there: ", path.display()), error);
    }
}
