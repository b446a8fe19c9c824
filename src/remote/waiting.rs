//! Programs that wait for a remote (`wait = "close"`): for a file to be there, or for other nodes' names to be read.
//!
//! No thread waits for them. Each leaves a function, which the remote's threads call at the end of the wait.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::local::Listing;

/// Ends a wait. A closer's answers the program; if it is dropped, the answer is EIO.
pub type Then = Box<dyn FnOnce() + Send>;

/// A program that waits for the remote gets an error after this time without an answer, or with a file that cannot be
/// pushed because another program goes on writing it.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// A program that waits for what is at and below a path.
struct Closer {
    number: u64,
    path: PathBuf,
    since: Instant,
    then: Then,
}

/// Programs that wait for names. All are answered at the latest when this is dropped.
#[derive(Default)]
pub(super) struct Lookers(Vec<Then>);

impl Drop for Lookers {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|then| then());
    }
}

#[derive(Default)]
struct Inside {
    /// Files or directories that must be on the remote, in the order of arrival.
    closers: Vec<Closer>,
    lookers: Lookers,
    /// Many names are being shown, and these programs wait for that.
    is_showing: bool,
    listers: Lookers,
    /// The tree shows what the remote had after the start, or the remote did not answer.
    is_current: bool,
    openers: Lookers,
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

/// Many names are being shown until this is dropped.
pub(super) struct Showing<'a>(&'a Waiting);

impl Drop for Showing<'_> {
    fn drop(&mut self) {
        let mut inside = self.0.lock();
        inside.is_showing = false;
        let listers = std::mem::take(&mut inside.listers);
        drop(inside);
        drop(listers);
    }
}

impl Closer {
    fn waits_for(&self, files: &[PathBuf]) -> bool {
        files.iter().any(|file| file.starts_with(&self.path))
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

    /// Those that wait for a file in a directory that could not be listed.
    pub(super) fn hidden_by<'a>(&'a self, listing: &'a Listing) -> impl Iterator<Item = &'a PathBuf> {
        self.paths.iter().filter(|waited| listing.hides(waited))
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
        inside.closers.push(Closer { number, path, since: Instant::now(), then });
    }

    /// Waits until the names of other nodes are read.
    pub(super) fn look(&self, then: Then) {
        self.lock().lookers.0.push(then);
    }

    /// Many names are being shown from now on.
    pub(super) fn begin_showing(&self) -> Showing<'_> {
        self.lock().is_showing = true;
        Showing(self)
    }

    pub(super) fn is_showing(&self) -> bool {
        self.lock().is_showing
    }

    /// Waits until the names are shown that are known now, if they are many. Asks nothing of the remote.
    pub(super) fn list(&self, then: Then) {
        let mut inside = self.lock();
        if inside.is_showing {
            return inside.listers.0.push(then);
        }
        drop(inside);
        then();
    }

    /// Waits until the tree shows what the remote had after the start. Before, a name may show an object that its owner has
    /// replaced while this store was not mounted.
    pub(super) fn open(&self, then: Then) {
        let mut inside = self.lock();
        if !inside.is_current {
            return inside.openers.0.push(then);
        }
        drop(inside);
        then();
    }

    /// The tree shows what the remote had after the start, or the remote does not answer.
    pub(super) fn set_current(&self) {
        let mut inside = self.lock();
        inside.is_current = true;
        let openers = std::mem::take(&mut inside.openers);
        drop(inside);
        drop(openers);
    }

    pub(super) fn is_any_closer(&self) -> bool {
        !self.lock().closers.is_empty()
    }

    pub(super) fn is_any_looker(&self) -> bool {
        !self.lock().lookers.0.is_empty()
    }

    pub(super) fn closers(&self) -> Closers {
        let inside = self.lock();
        Closers { paths: inside.closers.iter().map(|closer| closer.path.clone()).collect(), until: inside.next }
    }

    /// Answers those of the closers that wait for none of the files that are left.
    pub(super) fn pushed(&self, closers: &Closers, left: &[PathBuf]) {
        let done = self.take(|closer| closer.number <= closers.until && !closer.waits_for(left));
        done.into_iter().for_each(|closer| (closer.then)());
    }

    /// Answers those of the closers with EIO that have waited for long for one of these files: it cannot be pushed.
    pub(super) fn give_up(&self, closers: &Closers, failed: &[PathBuf]) {
        let is_late = |closer: &Closer| closer.number <= closers.until && closer.since.elapsed() > PATIENCE;
        drop(self.take(|closer| is_late(closer) && closer.waits_for(failed)));
    }

    fn take(&self, which: impl Fn(&Closer) -> bool) -> Vec<Closer> {
        let mut inside = self.lock();
        let (taken, rest) = std::mem::take(&mut inside.closers).into_iter().partition(which);
        inside.closers = rest;
        taken
    }

    /// The lookers that have come; the caller drops them once it has read the names.
    pub(super) fn take_lookers(&self) -> Lookers {
        std::mem::take(&mut self.lock().lookers)
    }

    /// The remote does not answer: closers get EIO.
    pub(super) fn fail_closers(&self) {
        drop(std::mem::take(&mut self.lock().closers));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
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
        // A file that another program writes all the time: its closer gets an error, though late.
        waiting.give_up(&waiting.closers(), &["late".into()]);
        assert!(waiting.is_any_closer());
        waiting.lock().closers[0].since -= PATIENCE + Duration::from_secs(1);
        waiting.give_up(&waiting.closers(), &["other".into()]);
        assert!(waiting.is_any_closer());
        waiting.give_up(&waiting.closers(), &["late".into()]);
        assert!(!waiting.is_any_closer() && count.load(Ordering::Relaxed) == 2);
        waiting.look(then());
        drop(waiting.take_lookers());
        // Nobody knows what a directory has that may not be listed.
        waiting.close("dark/file".into(), then());
        let unlisted = BTreeMap::from([("dark".into(), "Permission denied".into())]);
        let listing = Listing { unlisted, ..Listing::default() };
        let closers = waiting.closers();
        assert_eq!(closers.hidden_by(&listing).collect::<Vec<_>>(), [Path::new("dark/file")]);
        assert_eq!(count.load(Ordering::Relaxed), 3);
        waiting.list(then());
        assert_eq!(count.load(Ordering::Relaxed), 4);
        let showing = waiting.begin_showing();
        waiting.list(then());
        assert_eq!(count.load(Ordering::Relaxed), 4);
        drop(showing);
        assert!(!waiting.is_showing() && count.load(Ordering::Relaxed) == 5);
        waiting.fail_closers();
        assert!(!waiting.is_any_closer());
        waiting.open(then());
        assert_eq!(count.load(Ordering::Relaxed), 5);
        waiting.set_current();
        waiting.open(then());
        assert_eq!(count.load(Ordering::Relaxed), 7);
    }
}
