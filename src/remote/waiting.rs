//! Programs that wait for a remote (`wait = "close"`): for a file to be there, or for other nodes' names to be read.
//!
//! No thread waits for them. Each leaves a function, which the remote's threads call at the end of the wait.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The function that ends a wait. That of a closer answers the program; if it is dropped, the answer is EIO.
pub type Then = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Inside {
    /// Files or directories that must be on the remote, in the order of arrival.
    closers: Vec<(u64, PathBuf, Then)>,
    lookers: Vec<Then>,
    next: u64,
}

/// See the module.
#[derive(Default)]
pub(super) struct Waiting {
    /// Held for moments; nothing is answered under it.
    inside: Mutex<Inside>,
}

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiting").field("closers", &self.lock().closers.len()).finish()
    }
}

/// The closers that had come when a round began.
#[derive(Clone, Debug, Default)]
pub(super) struct Closers {
    paths: Vec<PathBuf>,
    until: u64,
}

impl Closers {
    /// Whether one of them waits for this file.
    pub(super) fn wait_for(&self, path: &Path) -> bool {
        self.paths.iter().any(|waited| path.starts_with(waited))
    }
}

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until what is at and below a path is on the remote.
    pub(super) fn close(&self, path: PathBuf, then: Then) {
        let mut inside = self.lock();
        inside.next += 1;
        let number = inside.next;
        inside.closers.push((number, path, then));
    }

    /// Waits until the names of other nodes are read.
    pub(super) fn look(&self, then: Then) {
        self.lock().lookers.push(then);
    }

    pub(super) fn is_any_closer(&self) -> bool {
        !self.lock().closers.is_empty()
    }

    pub(super) fn is_any_looker(&self) -> bool {
        !self.lock().lookers.is_empty()
    }

    pub(super) fn closers(&self) -> Closers {
        let inside = self.lock();
        Closers { paths: inside.closers.iter().map(|(_, path, _)| path.clone()).collect(), until: inside.next }
    }

    /// Answers those of the closers that wait for none of the files that are left.
    pub(super) fn pushed(&self, closers: &Closers, left: &[PathBuf]) {
        let waits = |path: &Path| left.iter().any(|left| left.starts_with(path));
        let (done, rest) = {
            let mut inside = self.lock();
            let all = std::mem::take(&mut inside.closers);
            all.into_iter().partition(|(number, path, _)| *number <= closers.until && !waits(path))
        };
        self.lock().closers.splice(0..0, rest);
        let done: Vec<(u64, PathBuf, Then)> = done;
        done.into_iter().for_each(|(_, _, then)| then());
    }

    /// The lookers that have come; the caller calls them once it has read the names.
    pub(super) fn take_lookers(&self) -> Vec<Then> {
        std::mem::take(&mut self.lock().lookers)
    }

    /// The remote does not answer: closers get EIO.
    pub(super) fn fail_closers(&self) {
        drop(std::mem::take(&mut self.lock().closers));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_closer_waits_for_its_own_files_and_for_a_round_that_began_after_it() {
        let (waiting, count) = (Waiting::default(), Arc::new(AtomicUsize::new(0)));
        let then = || -> Then {
            let count = Arc::clone(&count);
            Box::new(move || {
                count.fetch_add(1, Ordering::Relaxed);
            })
        };
        waiting.close("run/a".into(), then());
        waiting.close("run".into(), then());
        let closers = waiting.closers();
        waiting.close("late".into(), then());
        assert!(closers.wait_for(Path::new("run/b")) && !closers.wait_for(Path::new("late")));
        waiting.pushed(&closers, &["run/b".into()]);
        assert_eq!(count.load(Ordering::Relaxed), 1);
        waiting.pushed(&closers, &[]);
        assert_eq!(count.load(Ordering::Relaxed), 2);
        waiting.fail_closers();
        assert!(!waiting.is_any_closer() && count.load(Ordering::Relaxed) == 2);
    }
}
