//! Tells the kernel to forget cached data of a file.
//!
//! The kernel may wait for a page that a read is filling before it accepts an invalidation, and that read may wait
//! for a lock of ours. So a thread of its own sends invalidations, and holds no lock meanwhile. An invalidation of
//! attributes alone waits for no page. So a thread that answers an open sends it itself, before the answer.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::sync::{Arc, OnceLock, PoisonError};
use std::thread::JoinHandle;

use fuser::{INodeNo, Notifier};

use crate::sync::{Condvar, Mutex, MutexGuard};

/// The cached data that the kernel must forget.
#[derive(PartialEq, Eq)]
enum Stale {
    /// Data and attributes of an inode.
    Inode(u64),
    /// A name in a directory, and the directory's attributes.
    Entry(u64, OsString),
}

#[derive(Default)]
struct State {
    queue: VecDeque<Stale>,
    stopping: bool,
}

/// Queue of files and names whose cached data in the kernel is out of date.
#[derive(Default)]
pub(super) struct Invalidations {
    /// Taken for moments only, also under the inode table's lock; never held while sending.
    state: Mutex<State>,
    work: Condvar,
    notifier: OnceLock<Notifier>,
}

impl Invalidations {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for data and attributes of a file to be dropped, soon.
    pub(super) fn inode(&self, ino: u64) {
        let mut state = self.state();
        let stale = Stale::Inode(ino);
        if !state.stopping && !state.queue.contains(&stale) {
            state.queue.push_back(stale);
            self.work.notify_one();
        }
    }

    /// Asks for a name in a directory to be looked up anew, soon.
    pub(super) fn entry(&self, parent: u64, name: &OsStr) {
        let mut state = self.state();
        if !state.stopping {
            state.queue.push_back(Stale::Entry(parent, name.to_owned()));
            self.work.notify_one();
        }
    }

    /// Has the attributes of a file that is being opened asked for anew, from now on. Not under a lock of ours.
    pub(super) fn attributes(&self, ino: u64) {
        // A negative offset: no page.
        if let Some(Err(error)) = self.notifier.get().map(|notifier| notifier.inval_inode(INodeNo(ino), -1, 0)) {
            log::debug!("the kernel did not take an invalidation of the attributes of inode {ino}: {error}");
        }
    }

    /// Has the kernel drop its pages of these bytes, and returns when they are gone. For a worker without a lock: the
    /// kernel waits for reads that fill such pages, and the threads that answer it have to serve them.
    pub(super) fn pages(&self, ino: u64, offset: u64, len: usize) {
        let range = (i64::try_from(offset).unwrap_or(0), i64::try_from(len).unwrap_or(0));
        let sent = self.notifier.get().map(|notifier| notifier.inval_inode(INodeNo(ino), range.0, range.1));
        if let Some(Err(error)) = sent {
            log::debug!("the kernel did not take an invalidation of pages of inode {ino}: {error}");
        }
    }

    /// Starts to send.
    pub(super) fn start(self: &Arc<Self>, notifier: Notifier) -> std::io::Result<JoinHandle<()>> {
        let _ = self.notifier.set(notifier.clone());
        let queue = Arc::clone(self);
        std::thread::Builder::new().name("stepfs-notify".into()).spawn(move || queue.send(&notifier))
    }

    /// Ends the thread after the current invalidation.
    pub(super) fn stop(&self) {
        self.state().stopping = true;
        self.work.notify_all();
    }

    fn send(&self, notifier: &Notifier) {
        loop {
            let mut state = self.state();
            while state.queue.is_empty() && !state.stopping {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.stopping {
                return;
            }
            let Some(stale) = state.queue.pop_front() else {
                continue;
            };
            drop(state);
            let (ino, sent) = match stale {
                // Offset 0 and length 0: everything.
                Stale::Inode(ino) => (ino, notifier.inval_inode(INodeNo(ino), 0, 0)),
                Stale::Entry(parent, name) => (parent, notifier.inval_entry(INodeNo(parent), &name)),
            };
            // It may not know it any more.
            if let Err(error) = sent {
                log::debug!("the kernel did not take an invalidation of inode {ino}: {error}");
            }
        }
    }
}
