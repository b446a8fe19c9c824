//! Begins to send a large file to the device while a program still writes it.
//!
//! Otherwise all of the file is dirty when it is closed. The fsync that makes it durable then takes as long as the
//! device needs for the whole file, and competes with the program's next save.
//!
//! But both change the pages of one file, so a program that only copies memory writes a quarter slower meanwhile
//! (measured). Such a program is left alone until much is dirty.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::archive::Archive;
use crate::encode::yield_to_others;
use crate::store::beneath;

/// Pause between two looks at the files.
const PAUSE: Duration = Duration::from_millis(50);
/// New bytes that are worth a call. Smaller files never pay for one.
const STEP: u64 = 8 << 20;
/// Bytes a second of a program that does nothing but write. A program that fetches tensors from elsewhere is slower, and
/// loses nothing to the device.
const FAST: u64 = 320 << 20;
/// Most bytes of a file that wait for a fast program. Most local disks write them within a second or two.
const MOST: u64 = 1 << 30;

/// A file that is open for writing.
struct Growing {
    /// The descriptor of its node, while that is open.
    file: Weak<File>,
    /// Its length when it was last sent.
    sent: u64,
    /// Its length at the last look.
    seen: u64,
    /// The time of the last look.
    looked: Instant,
}

impl Growing {
    fn new(file: Weak<File>, now: Instant) -> Growing {
        Growing { file, sent: 0, seen: 0, looked: now }
    }

    /// A descriptor to send it by, if that is due. Open for reading only, so that it never counts as a writer.
    fn due(&mut self, file: &File, now: Instant) -> io::Result<Option<File>> {
        let length = file.metadata()?.len();
        // It may have been cut short.
        self.sent = self.sent.min(length);
        let (grown, elapsed) = (length.saturating_sub(self.seen), now.saturating_duration_since(self.looked));
        (self.seen, self.looked) = (length, now);
        let is_fast = grown as f64 > FAST as f64 * elapsed.as_secs_f64();
        if length - self.sent < if is_fast { MOST } else { STEP } {
            return Ok(None);
        }
        self.sent = length;
        File::open(beneath::by_descriptor(file)).map(Some)
    }
}

#[derive(Default)]
struct State {
    /// By node.
    files: HashMap<u64, Growing>,
    stopping: bool,
}

/// The files that are open for writing.
#[derive(Default)]
pub(super) struct Early {
    /// Taken for moments only, also under the inode table's lock.
    state: Mutex<State>,
    work: Condvar,
}

impl Early {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A program opened a node for writing.
    pub(super) fn add(&self, ino: u64, file: &Arc<File>) {
        let mut state = self.state();
        let file = Arc::downgrade(file);
        if state.files.get(&ino).is_some_and(|known| known.file.ptr_eq(&file)) {
            return;
        }
        state.files.insert(ino, Growing::new(file, Instant::now()));
        // With more files the thread is awake already.
        if state.files.len() == 1 {
            self.work.notify_one();
        }
    }

    /// Starts to look at files that programs write.
    pub(super) fn start(self: &Arc<Self>, archive: &Arc<Archive>) -> io::Result<JoinHandle<()>> {
        let (early, archive) = (Arc::clone(self), Arc::clone(archive));
        std::thread::Builder::new().name("stepfs-early".into()).spawn(move || {
            yield_to_others();
            while let Some(files) = early.next() {
                for file in files {
                    if let Err(error) = archive.store().io().device().begin_sync(&file) {
                        // The kernel may not report it again, so the fsync after the close has to fail.
                        archive.store().sync_failed(&file, &error);
                    }
                }
            }
        })
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        self.state().stopping = true;
        self.work.notify_all();
    }

    /// Waits for the next look, and returns the files that grew. `None` when it is over.
    fn next(&self) -> Option<Vec<File>> {
        // Closed after the lock is given back: the last close of a file without a name frees its blocks.
        let mut held = Vec::new();
        let mut state = self.state();
        while state.files.is_empty() && !state.stopping {
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let waited = self.work.wait_timeout_while(state, PAUSE, |state| !state.stopping);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.stopping {
            return None;
        }
        let now = Instant::now();
        let mut due = Vec::new();
        state.files.retain(|_, growing| match growing.file.upgrade() {
            Some(file) => {
                due.extend(growing.due(&file, now).unwrap_or_default());
                held.push(file);
                true
            }
            None => false,
        });
        Some(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fast_program_is_left_alone_until_much_is_dirty() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let file = Arc::new(File::options().write(true).open(&path).unwrap());
        let began = Instant::now();
        let mut growing = Growing::new(Arc::downgrade(&file), began);
        let mut is_due_at = |length, seconds| {
            file.set_len(length).unwrap();
            growing.due(&file, began + Duration::from_secs(seconds)).unwrap().is_some()
        };
        assert!(!is_due_at(FAST + 1, 1), "it grew fast");
        assert!(is_due_at(FAST + 1, 2), "it rests");
        assert!(is_due_at(FAST + 1 + STEP, 3), "it grows slowly");
        assert!(!is_due_at(STEP + MOST, 4), "less than what may wait");
        assert!(is_due_at(STEP + MOST + FAST + 1, 5));
    }

    #[test]
    fn a_file_is_due_when_it_grew_and_gone_when_it_is_closed() {
        let early = Early::default();
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let file = Arc::new(File::options().write(true).open(&path).unwrap());
        early.add(7, &file);
        assert!(early.next().unwrap().is_empty(), "nothing was written");
        file.set_len(STEP - 1).unwrap();
        assert!(early.next().unwrap().is_empty(), "too little");
        file.set_len(STEP).unwrap();
        assert_eq!(early.next().unwrap().len(), 1);
        assert!(early.next().unwrap().is_empty(), "it was sent");
        file.set_len(5).unwrap();
        assert!(early.next().unwrap().is_empty(), "it was cut short");
        file.set_len(STEP + 5).unwrap();
        let sent = early.next().unwrap();
        drop(file);
        assert!(crate::store::lease::is_granted(&sent[0], libc::F_RDLCK).unwrap());
        early.next();
        assert!(early.state().files.is_empty());
        early.stop();
        assert!(early.next().is_none());
    }
}
