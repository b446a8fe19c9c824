//! Notes from the file system that no thread of the archive has read yet.
//!
//! Programs wait while the file system makes a note. So it does not take the catalog's lock, which a thread of the
//! archive may hold that gets no processor for a while. Whoever takes that lock reads all notes first, in their order:
//! nobody sees a catalog that lacks an earlier event. If nobody else does, a thread of its own reads them.

use std::fmt;
use std::sync::PoisonError;
use std::time::Duration;

use crate::sync::{Condvar, Mutex, MutexGuard, wait_timeout};

use super::Archive;
use super::catalog::Catalog;

/// How long a note waits for others at most: waking the archive's threads for each would cost more than most are worth.
const PATIENCE: Duration = Duration::from_millis(20);

/// A change of the catalog.
pub(super) type Note = Box<dyn FnOnce(&Archive, &mut Catalog) + Send>;

#[derive(Default)]
struct Inside {
    notes: Vec<Note>,
    /// The thread that reads notes knows of some.
    announced: bool,
    stopping: bool,
}

/// See the module.
#[derive(Default)]
pub(super) struct Inbox {
    /// Taken for moments, also under the file system's lock or the catalog's. No other lock is taken under it.
    state: Mutex<Inside>,
    arrived: Condvar,
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("notes", &self.state().notes.len()).finish()
    }
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, Inside> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a note.
    pub(super) fn put(&self, note: Note) {
        let mut state = self.state();
        state.notes.push(note);
        if !std::mem::replace(&mut state.announced, true) {
            self.arrived.notify_one();
        }
    }

    /// All notes, the first first. The caller holds the catalog's lock until it has carried them out.
    pub(super) fn take(&self) -> Vec<Note> {
        std::mem::take(&mut self.state().notes)
    }

    /// Waits for notes, and then a little for more. False once the archive stops.
    fn wait(&self) -> bool {
        let mut state = self.state();
        while !state.announced && !state.stopping {
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if !state.stopping {
            state = wait_timeout(&self.arrived, &self.state, state, PATIENCE);
        }
        state.announced = false;
        !state.stopping
    }

    /// Ends [`Archive::read_notes`].
    pub(super) fn stop(&self) {
        self.state().stopping = true;
        self.arrived.notify_all();
    }
}

impl Archive {
    /// Reads notes until the archive stops, if nobody else has.
    pub(super) fn read_notes(&self) {
        while self.inbox.wait() {
            self.notify();
        }
    }
}
