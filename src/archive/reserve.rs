//! The reserve: room on the disk of the store that programs leave to the archive while it is at work. What frees room needs
//! some itself: an object is there before its file goes.
//!
//! With less free room than the reserve, no superseded file waits for the sake of quietness, and the trash is emptied. All
//! waits with a promise behind them stay. Programs that write wait meanwhile (`fs/room.rs`).

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::sync::{Mutex, MutexGuard};
use crate::terminal::format::size;

use super::archiving::Encoder;
use super::catalog::Catalog;
use super::retention::Retention;
use super::shared::Shared;

/// How long a daemon that only serves waits for the keeper to free room: it looks every two seconds, and files settle for three.
const KEEPERS_TIME: Duration = Duration::from_secs(20);
/// Pause between two looks at the lengths of all files: 20,000 of them take some milliseconds.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long programs waited for room since the mount. Of a file that is written by many calls, all waits count as one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// Calls that wait now.
    pub waiting: u64,
    /// Files whose writers have waited.
    pub waited: u64,
    /// The longest of these waits, milliseconds.
    pub longest_ms: u64,
    /// All of these waits together, milliseconds.
    pub total_ms: u64,
}

/// Lengths of files, bytes.
#[derive(Default)]
struct Sizes {
    /// Of the largest file.
    file: u64,
    /// Of the largest checkpoint that is still as written.
    checkpoint: u64,
    /// Counts the files that were closed, so that a look which misses one lowers nothing.
    closed: u64,
    looked: Option<Instant>,
}

/// See the module.
pub struct Reserve {
    shared: Arc<Shared>,
    encoder: Arc<Encoder>,
    retention: Arc<Retention>,
    /// Taken for moments, also under the file system's lock. No other lock is taken under it.
    sizes: Mutex<Sizes>,
    /// Taken for moments. No other lock is taken under it.
    waits: Mutex<Waits>,
}

impl Reserve {
    pub(super) fn of(shared: &Arc<Shared>, encoder: &Arc<Encoder>, retention: &Arc<Retention>) -> Arc<Reserve> {
        let (shared, encoder, retention) = (Arc::clone(shared), Arc::clone(encoder), Arc::clone(retention));
        Arc::new(Reserve { shared, encoder, retention, sizes: Mutex::default(), waits: Mutex::default() })
    }

    fn sizes(&self) -> MutexGuard<'_, Sizes> {
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that programs may still write to the file system of the store. One that does not tell has no limit.
    pub fn free(&self) -> u64 {
        let found = rustix::fs::statvfs(self.shared.store.root());
        found.map_or(u64::MAX, |found| found.f_bavail.saturating_mul(found.f_frsize))
    }

    /// The reserve.
    pub fn bytes(&self) -> u64 {
        self.shared.store.settings().reserve.unwrap_or_else(|| self.sizes().checkpoint)
    }

    /// Whether so many files can still become as large as the largest one, beside the reserve. Waits for no device.
    pub fn has_room_for(&self, files: u64) -> bool {
        let largest = self.sizes().file;
        self.free() >= self.bytes().saturating_add(largest.saturating_mul(files))
    }

    /// Whether the last look found less room than the reserve.
    pub fn is_touched(&self) -> bool {
        self.shared.is_low.load(Ordering::Relaxed)
    }

    /// A program left a file of so many bytes. It counts before its close does.
    pub(super) fn saw(&self, len: u64) {
        let mut sizes = self.sizes();
        (sizes.file, sizes.checkpoint) = (sizes.file.max(len), sizes.checkpoint.max(len));
        sizes.closed += 1;
    }

    /// After which time the lengths can be looked at again, if files were closed since.
    pub(super) fn until(&self) -> Option<Duration> {
        let sizes = self.sizes();
        sizes.looked.filter(|_| sizes.closed > 0).map(|at| LOOK_EVERY.saturating_sub(at.elapsed()))
    }

    /// Looks at the disk, and begins or ends the haste.
    pub(super) fn look(&self) {
        self.measure();
        let reserve = self.bytes();
        if self.free() < reserve {
            // Decoded copies of files are the first to go.
            self.shared.recall.make_room(reserve);
        }
        let free = self.free();
        // A file that nobody has looked at yet may be no checkpoint: for its sake writes wait, but nothing goes.
        let is_known = self.sizes().closed == 0 || self.shared.is_low.load(Ordering::Relaxed);
        let is_low = free < reserve && is_known;
        if self.shared.is_low.swap(is_low, Ordering::Relaxed) != is_low {
            let settles =
                if is_low { "nothing waits for the rest of its checkpoint by time" } else { "files settle again" };
            log::info!("the disk of the store has {} left, the reserve is {}: {settles}", size(free), size(reserve));
            let mut catalog = self.shared.catalog();
            // Under the lock: of two looks at once, the catalog must have the later answer.
            catalog.decided().hurry(self.shared.is_low.load(Ordering::Relaxed));
            drop(catalog);
            self.shared.notify();
        }
    }

    /// Measures the files, if the last look was some time ago.
    fn measure(&self) {
        let closed = {
            let mut sizes = self.sizes();
            if sizes.looked.is_some_and(|at| sizes.closed == 0 || at.elapsed() < LOOK_EVERY) {
                return;
            }
            sizes.looked = Some(Instant::now());
            sizes.closed
        };
        let ((file, checkpoint), is_known) = {
            let mut catalog = self.shared.catalog();
            (largest(&catalog), !catalog.steps().has_unsealed())
        };
        let mut sizes = self.sizes();
        // A closed file has no length in the catalog until it is sealed.
        if is_known && sizes.closed == closed {
            (sizes.file, sizes.checkpoint, sizes.closed) = (file, checkpoint, 0);
        } else {
            (sizes.file, sizes.checkpoint) = (sizes.file.max(file), sizes.checkpoint.max(checkpoint));
            // Right after a mount nothing was closed, and no length is known.
            sizes.closed = sizes.closed.max(1);
        }
    }

    /// A program waits for room: all that can be freed is to be freed now. Answers the number of the last change of a file
    /// before, for [`Reserve::is_being_freed`]. Blocks on the device.
    pub fn hasten(&self) -> u64 {
        self.look();
        self.encoder.before_ahead.let_go();
        let closed_by = {
            let mut catalog = self.shared.catalog();
            catalog.retry();
            catalog.progress().0
        };
        if !self.shared.store.settings().retention().is_empty() {
            self.retention.ask();
        }
        self.shared.notify();
        closed_by
    }

    /// Grows with each change that the file system tells of.
    pub fn changes(&self) -> u64 {
        self.shared.notes.load(Ordering::Relaxed)
    }

    /// Whether the archive takes a step that may free room, or can take one now. `closed_by`: see [`Reserve::hasten`], which was
    /// called so long ago. In a shared store the keeper frees room, perhaps on another machine, and tells nobody.
    pub fn is_being_freed(&self, closed_by: u64, ago: Duration) -> bool {
        if self.shared.store.is_serving() {
            return ago < KEEPERS_TIME;
        }
        let has_garbage = self.shared.objects.frozen().is_none() && self.shared.garbage.load(Ordering::Relaxed);
        let mut catalog = self.shared.catalog();
        let mut steps = catalog.steps();
        has_garbage && !steps.has_unsealed()
            || steps.may_free(closed_by)
            || self.retention.is_asked() && !steps.waits_for_failed()
    }

    /// A call begins to wait for room, or ends its wait.
    pub fn waits_more(&self, begins: bool) {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.waiting = if begins { waits.waiting + 1 } else { waits.waiting.saturating_sub(1) };
    }

    /// The writer of a file has waited so long in all.
    pub fn waited(&self, time: Duration) {
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.waited += 1;
        waits.longest_ms = waits.longest_ms.max(ms);
        waits.total_ms = waits.total_ms.saturating_add(ms);
    }

    /// A program was told that the disk has no room for the rest of this file.
    pub fn cut_short(&self, path: &Path) {
        let path = path.to_path_buf();
        self.shared.note(move |catalog| {
            let version = catalog.get(&path).map(|entry| entry.version);
            version.map(|version| catalog.edit(&path, version, |entry| entry.cut = true));
        });
    }

    pub(super) fn waits(&self) -> Waits {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Bytes of the largest file with tensors, and of the largest checkpoint, of those that are still as written.
fn largest(catalog: &Catalog) -> (u64, u64) {
    let mut directories = HashMap::new();
    let (mut largest, mut whole) = (0, 0);
    for (path, entry) in catalog.files().iter() {
        // A sparse file, or a data set, says nothing about the next save.
        if entry.state.sealed().is_none() || entry.has_tensors != Some(true) {
            continue;
        }
        let mut sum = entry.stamp.len;
        largest = largest.max(sum);
        let checkpoint = catalog.files().file(path).and_then(|file| file.checkpoint.clone());
        if let Some(directory) = checkpoint.filter(|of| of.is_directory()) {
            let others: &mut u64 = directories.entry(Arc::as_ptr(&directory)).or_default();
            *others += sum;
            sum = *others;
        }
        whole = whole.max(sum);
    }
    (largest, whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::entry::{Stamp, State};
    use crate::archive::resident::ResidentReason;
    use crate::store::Objects;

    #[test]
    fn files_without_a_state_are_no_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let mut catalog = Catalog::new(Duration::ZERO, Arc::new(Objects::load(dir.path(), |_, _| {}).unwrap()));
        for (path, len) in [("run/step_1.pt", 10), ("run/step_2.pt", 20), ("run/checkpoint-1/a", 7)] {
            let stamp = Stamp { len, ..Stamp::default() };
            catalog.found(Path::new(path), State::Resident(ResidentReason::Small), (stamp, None), None);
        }
        assert_eq!(largest(&catalog), (0, 0));
    }
}
