//! Room on the disk of the store: whether it is low, and whether the archive can still free some.
//!
//! Below the reserve no superseded file waits for the sake of quietness or speed. All waits with a promise behind them
//! stay. An open for writing that may lack room waits while the archive is at work (`fs/room.rs`).

use std::collections::{BinaryHeap, HashMap};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::store::{MIN_RELEASE_BYTES, step_pattern};
use crate::sync::{AtomicU64, Mutex};
use crate::terminal::format::size;

use super::archiving::Encoder;
use super::catalog::Catalog;
use super::retention::Retention;
use super::shared::Shared;

/// Pause between two looks at the lengths of all files: 20,000 of them take some milliseconds.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long programs waited for room since the mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// Opens and writes that wait now.
    pub waiting: u64,
    /// Opens and writes that have waited.
    pub waited: u64,
    /// The longest of these waits, milliseconds.
    pub longest_ms: u64,
    /// All of these waits together, milliseconds.
    pub total_ms: u64,
}

/// See the module.
pub struct Room {
    shared: Arc<Shared>,
    encoder: Arc<Encoder>,
    retention: Arc<Retention>,
    /// Length of the largest file, bytes. An open compares it with the free room, and takes no lock for that.
    largest: AtomicU64,
    /// Bytes of the largest checkpoint that is still as written, and when all files were looked at last.
    looked: Mutex<(u64, Option<Instant>)>,
    /// Taken for moments.
    pub(super) waits: Mutex<Waits>,
}

impl Room {
    pub(super) fn of(shared: &Arc<Shared>, encoder: &Arc<Encoder>, retention: &Arc<Retention>) -> Arc<Room> {
        let (shared, encoder, retention) = (Arc::clone(shared), Arc::clone(encoder), Arc::clone(retention));
        let (largest, looked, waits) = Default::default();
        Arc::new(Room { shared, encoder, retention, largest, looked, waits })
    }

    /// Bytes that programs may still write to the file system of the store. One that does not tell has no limit.
    pub fn free(&self) -> u64 {
        let found = rustix::fs::statvfs(self.shared.store.root());
        found.map_or(u64::MAX, |found| found.f_bavail.saturating_mul(found.f_frsize))
    }

    /// Whether the disk has less room than the reserve.
    pub fn is_low(&self) -> bool {
        self.shared.is_low.load(Ordering::Relaxed)
    }

    /// Whether each of so many open files, one more, and the object of one can still become as large as the largest
    /// known file. Takes no lock.
    pub fn is_ample(&self, writers: usize) -> bool {
        self.free() >= self.largest.load(Ordering::Relaxed).saturating_mul(writers as u64 + 2)
    }

    /// Expected bytes of a file that a program writes at this path: those of the last one with this name but for the
    /// numbers that count training. 0: there is none, or it was small.
    pub fn expected(&self, path: &Path) -> u64 {
        expected(&self.shared.catalog(), path)
    }

    /// A file of this length is durable, or room may have become free. Looks at it, and begins or ends the haste.
    pub(super) fn look(&self, len: u64) {
        self.largest.fetch_max(len, Ordering::Relaxed);
        // Held to the end: of two looks the later one decides.
        let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
        if looked.1.is_none_or(|at| at.elapsed() >= LOOK_EVERY) {
            let (file, whole) = largest(&self.shared.catalog());
            self.largest.store(file.max(len), Ordering::Relaxed);
            *looked = (whole, Some(Instant::now()));
        }
        let (free, settings) = (self.free(), self.shared.store.settings());
        let reserve = settings.reserve.unwrap_or(looked.0);
        let is_low = free < reserve;
        if self.shared.is_low.swap(is_low, Ordering::Relaxed) != is_low {
            let settles =
                if is_low { "nothing waits for the rest of its checkpoint by time" } else { "files settle again" };
            log::info!("the disk of the store has {} left, the reserve is {}: {settles}", size(free), size(reserve));
            self.shared.catalog().decided().hurry(is_low);
            self.shared.notify();
        }
    }

    /// A program waits for so many bytes: all that can be freed is to be freed now. Blocks on the device.
    pub fn make(&self, bytes: u64) {
        self.look(0);
        self.shared.recall.make_room(bytes);
        self.encoder.before_ahead.let_go();
        self.shared.catalog().retry();
        if !self.shared.store.settings().retention().is_empty() {
            self.retention.ask();
        }
        self.shared.notify();
    }

    /// Whether the archive is at work, or can take a step now. Each step may free room.
    pub fn is_being_made(&self) -> bool {
        let asked = self.retention.report().0;
        asked.asked > asked.done
            || !self.shared.catalog().steps().is_calm()
            || self.shared.objects.frozen().is_none() && self.shared.garbage.load(Ordering::Relaxed)
    }

    /// A program begins to wait for room, or has waited so long.
    pub fn waits(&self, waited: Option<Duration>) {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(waited) = waited else {
            waits.waiting += 1;
            return;
        };
        let ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
        let Waits { waiting, waited, longest_ms, total_ms } = *waits;
        *waits = Waits {
            waiting: waiting.saturating_sub(1),
            waited: waited + 1,
            longest_ms: longest_ms.max(ms),
            total_ms: total_ms.saturating_add(ms),
        };
    }
}

/// Bytes of the largest file, and of the largest checkpoint that is still as written.
fn largest(catalog: &Catalog) -> (u64, u64) {
    let mut directories = HashMap::new();
    let (mut largest, mut whole) = (0, 0);
    for (path, entry) in catalog.files().iter() {
        let mut sum = entry.stamp.len;
        largest = largest.max(sum);
        if entry.state.sealed().is_none() {
            continue;
        }
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

fn expected(catalog: &Catalog, path: &Path) -> u64 {
    let path = step_pattern::finished(path);
    let (run, pattern) = (step_pattern::run(&path), step_pattern::pattern(&path));
    // A pattern takes longer than a look at the letters, and without these it is another one.
    let may_be = |other: &Path| letters(other).eq(letters(&path));
    let large = catalog.files().below(&run).filter(|(_, entry)| entry.stamp.len >= MIN_RELEASE_BYTES);
    let large = large.filter(|(other, _)| may_be(other));
    let mut known: BinaryHeap<_> = large.map(|(path, entry)| (entry.sequence, path, entry.stamp.len)).collect();
    let mut newest_first = std::iter::from_fn(|| known.pop());
    newest_first.find(|(_, other, _)| step_pattern::pattern(other) == pattern).map_or(0, |(.., len)| len)
}

/// All bytes of a path but its digits, in lower case.
fn letters(path: &Path) -> impl Iterator<Item = u8> {
    let bytes = path.as_os_str().as_bytes().iter();
    bytes.filter(|byte| !byte.is_ascii_digit()).map(u8::to_ascii_lowercase)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::entry::{Stamp, State};
    use crate::archive::resident::ResidentReason;
    use crate::store::Objects;

    #[test]
    fn a_save_is_expected_to_be_as_long_as_the_last_of_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let mut catalog = Catalog::new(Duration::ZERO, Arc::new(Objects::load(dir.path(), |_, _| {}).unwrap()));
        for (path, mib) in
            [("run/step_1.pt", 10), ("run/step_2.pt", 20), ("run/step_3.pt", 0), ("run/checkpoint-1/a", 7)]
        {
            let stamp = Stamp { len: mib << 20, ..Stamp::default() };
            catalog.found(Path::new(path), State::Resident(ResidentReason::Small), (stamp, None), None);
        }
        let expect =
            [("run/step_4.pt", 20), ("run/.step_4.pt.tmp", 20), ("run/checkpoint-2/a", 7), ("run/checkpoint-2/b", 0)];
        for (path, mib) in expect {
            assert_eq!(expected(&catalog, Path::new(path)), mib << 20, "{path}");
        }
        assert_eq!(largest(&catalog), (20 << 20, 0), "none is a state");
    }
}
