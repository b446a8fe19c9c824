//! Opens and writes that wait for room on the disk of the store.
//!
//! With passthrough the kernel writes by itself, so only an open can wait. It waits while the disk lacks room for the
//! save, and the archive is at work. Once the archive has nothing left to do, no wait frees anything, and the open goes
//! on. So two that wait for each other cannot be: the archive never waits for a program.
//!
//! The kernel locks a directory during CREATE, and all other programs would wait for that lock. So a creation without
//! room makes the file, and answers ESTALE. The kernel then opens the file by OPEN, for which it holds no lock.
//!
//! One thread looks after all that wait, so neither the threads that answer the kernel nor the workers stand still.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use fuser::{Errno, ReplyOpen};

use super::errno::{Fault, Result};
use super::inodes::Table;
use super::node::Access;
use super::tree::{Creator, Tree};
use super::workers::Workers;
use crate::archive;
use crate::store::MIN_RELEASE_BYTES;
use crate::sync::{Condvar, Mutex, MutexGuard, thread};
use crate::terminal::format::size;

/// Longest wait. The ranks of a job give up after ten minutes without an answer of one (torch.distributed): half of that
/// is left for the save itself.
const MOST: Duration = Duration::from_secs(300);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(20);
/// Shortest wait without room. The kernel tells of a close after the call has returned, and only then the state before is
/// history: `stepfs sync` gives it as long. A removed object frees its room once no thread has it open.
const CLOSING: Duration = Duration::from_millis(500);
/// The bit of SIGKILL in a mask of signals. The kernel sends it to each thread of a program that any signal ends.
const KILLED: u64 = 1 << (libc::SIGKILL - 1);

/// What somebody who waits is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Go on if there is room.
    Look,
    /// Go on: nothing more is freed, or the wait was long enough.
    Last,
    /// Give up: the program is being killed.
    Killed,
}

/// Room that a file needs and the disk lacks, bytes.
pub(super) struct Lack {
    pub(super) path: PathBuf,
    pub(super) needs: u64,
}

struct Waiter {
    path: PathBuf,
    thread: u32,
    since: Instant,
    /// Answers whether the wait is over.
    go_on: Box<dyn FnMut(Turn) -> bool + Send>,
}

#[derive(Default)]
struct State {
    waiters: Vec<Waiter>,
    /// Bytes that those need who came since the last look.
    wanted: u64,
    stopping: bool,
}

/// Who writes, and who waits for room.
pub(super) struct Room {
    tree: Arc<Tree>,
    workers: Arc<Workers>,
    /// Nodes that are open for writing, or just about to be. Taken for moments, also under the table's lock.
    writers: Mutex<BTreeSet<u64>>,
    /// Taken for moments; nobody is asked under it.
    state: Mutex<State>,
    work: Condvar,
}

impl Room {
    /// `workers` open a file after its wait.
    pub(super) fn new(tree: Arc<Tree>, workers: Arc<Workers>) -> Arc<Room> {
        Arc::new(Room { tree, workers, writers: Mutex::default(), state: Mutex::default(), work: Condvar::new() })
    }

    fn of_archive(&self) -> &archive::Room {
        &self.tree.archive().room
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn writers(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.writers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A node is open for writing, or is about to be.
    pub(super) fn enters(&self, ino: u64) {
        self.writers().insert(ino);
    }

    /// A node is open no more.
    pub(super) fn leaves(&self, ino: u64) {
        self.writers().remove(&ino);
    }

    /// Answers that an open of a node failed.
    pub(super) fn refuse(&self, ino: u64, fault: Fault, reply: ReplyOpen) {
        if self.tree.table().node(ino).is_ok_and(|node| node.opened.is_none()) {
            self.leaves(ino);
        }
        reply.error(fault.into());
    }

    /// The room that the first open of a node for writing lacks.
    pub(super) fn lack(&self, ino: u64, access: Access) -> Option<Lack> {
        if !access.changes() || self.is_ample() || self.writers().contains(&ino) {
            return None;
        }
        let (path, taken) = taken(&self.tree.table(), ino)?;
        self.lack_of(path, taken)
    }

    /// Whether there is room for another file, however large, beside those that are open for writing.
    fn is_ample(&self) -> bool {
        let writers = self.writers().len();
        self.of_archive().is_ample(writers)
    }

    /// If a new file lacks room: makes it, and answers ESTALE. The kernel then opens it, and waits without the lock of the
    /// directory. A file that must be new, or that its creator could not open again, does not wait.
    pub(super) fn unless_short(
        &self,
        parent: u64,
        name: &OsStr,
        creator: Creator,
        access: Access,
        flags: i32,
    ) -> Result<()> {
        let reopens = flags & libc::O_EXCL == 0 && self.tree.reopens(creator, access.read);
        if !access.write || !reopens || self.is_ample() {
            return Ok(());
        }
        let path = self.tree.table().child(parent, name)?;
        if self.lack_of(path, 0).is_none() {
            return Ok(());
        }
        match self.tree.mknod(parent, name, creator.of_a_file(true), 0) {
            Ok((_, shown, _)) => self.tree.table().forget(shown.ino.0, 1),
            Err(Fault::Os(error)) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(fault) => return Err(fault),
        }
        Err(libc::ESTALE.into())
    }

    /// Calls `open` from a worker once there is room for the file, or none will come.
    pub(super) fn wait_to_open(
        self: &Arc<Self>,
        (ino, access): (u64, Access),
        lack: Lack,
        thread: u32,
        reply: ReplyOpen,
        open: impl FnOnce(ReplyOpen) + Send + 'static,
    ) {
        let (room, mut opening) = (Arc::clone(self), Some((reply, open)));
        self.wait(lack, thread, move |turn| {
            if turn == Turn::Look && room.lack(ino, access).is_some() {
                return false;
            }
            match (opening.take(), turn) {
                (Some((reply, _)), Turn::Killed) => reply.error(Errno::EINTR),
                (Some((reply, open)), Turn::Look | Turn::Last) => {
                    // The next one that waits counts it.
                    room.enters(ino);
                    room.workers.submit(Box::new(move || open(reply)));
                }
                (None, _) => {}
            }
            true
        });
    }

    /// The room that a file lacks which has `taken` bytes of it. The object of the state before may take as much again,
    /// and others that write take the rest of theirs.
    fn lack_of(&self, path: PathBuf, taken_by_it: u64) -> Option<Lack> {
        let archive = self.of_archive();
        let needs = archive.expected(&path).saturating_sub(taken_by_it);
        // No release of another file is worth the wait of a small one.
        if needs < MIN_RELEASE_BYTES {
            return None;
        }
        let writers: Vec<u64> = self.writers().iter().copied().collect();
        let others: Vec<_> = {
            let table = self.tree.table();
            writers.iter().filter_map(|ino| taken(&table, *ino)).filter(|(other, _)| *other != path).collect()
        };
        let others = others.iter().map(|(other, taken)| archive.expected(other).saturating_sub(*taken)).sum::<u64>();
        let wanted = needs.saturating_mul(2).saturating_add(others);
        (archive.free() < wanted).then_some(Lack { path, needs })
    }

    /// Calls `go_on` again and again until it answers that the wait is over. `thread`: the one that waits for the answer.
    pub(super) fn wait(
        &self,
        Lack { path, needs }: Lack,
        thread: u32,
        go_on: impl FnMut(Turn) -> bool + Send + 'static,
    ) {
        let archive = self.of_archive();
        log::info!("{}: waits for room: {} needed, {} is free", path.display(), size(needs), size(archive.free()));
        archive.waits(None);
        let mut state = self.state();
        state.wanted = state.wanted.saturating_add(needs);
        state.waiters.push(Waiter { path, thread, since: Instant::now(), go_on: Box::new(go_on) });
        self.work.notify_one();
    }

    /// Starts the thread that looks after all who wait.
    pub(super) fn start(self: &Arc<Self>) -> io::Result<thread::JoinHandle<()>> {
        let room = Arc::clone(self);
        thread::Builder::new().name("stepfs-room".into()).spawn(move || while room.look() {})
    }

    /// Lets all go on, and ends the thread.
    pub(super) fn stop(&self) {
        self.state().stopping = true;
        self.work.notify_all();
    }

    /// Asks each that waits once. False when it is over.
    fn look(&self) -> bool {
        let (mut waiters, wanted, stopping) = {
            let mut state = self.state();
            while state.waiters.is_empty() && !state.stopping {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            (std::mem::take(&mut state.waiters), std::mem::take(&mut state.wanted), state.stopping)
        };
        let archive = self.of_archive();
        if wanted > 0 {
            archive.make(wanted);
        }
        // Before they look: the room of the last step is there for them.
        let mut is_being_made = archive.is_being_made();
        if !is_being_made {
            // A thread may just be between two steps.
            std::thread::sleep(PAUSE);
            is_being_made = archive.is_being_made();
        }
        waiters.retain_mut(|Waiter { path, thread, since, go_on }| {
            let (path, waited) = (path.display(), since.elapsed());
            let is_over = stopping || waited >= MOST || !is_being_made && waited >= CLOSING;
            // A defect drops the reply, which answers EIO.
            let mut ends = |turn| catch_unwind(AssertUnwindSafe(|| go_on(turn))).unwrap_or(true);
            let killed = is_killed(*thread).then_some(Turn::Killed);
            let turns = [killed.or(Some(Turn::Look)), is_over.then_some(Turn::Last)];
            let Some(turn) = turns.into_iter().flatten().find(|turn| ends(*turn)) else { return true };
            let free = size(archive.free());
            match turn {
                Turn::Killed => log::info!("{path}: its program was killed while it waited for room"),
                Turn::Look => log::info!("{path}: its program waited {waited:.1?} for room, {free} is free"),
                Turn::Last => {
                    log::warn!("{path}: no more room comes after {waited:.1?}, {free} is free: it may be cut short")
                }
            }
            archive.waits(Some(waited));
            false
        });
        if !waiters.is_empty() {
            let mut state = self.state();
            // The first come first.
            waiters.append(&mut state.waiters);
            state.waiters = waiters;
            drop(state);
            std::thread::sleep(PAUSE);
        }
        !stopping
    }
}

/// A name of a node, and the bytes that its file takes on the disk.
fn taken(table: &Table, ino: u64) -> Option<(PathBuf, u64)> {
    let (path, node) = (table.path(ino)?, table.node(ino).ok()?);
    let taken = if node.stub.is_some() { 0 } else { table.place(ino).ok()?.metadata().ok()?.blocks() * 512 };
    Some((path, taken))
}

/// Whether a signal ends the program of a thread. One of another PID namespace is unknown, and never counts.
fn is_killed(thread: u32) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{thread}/status")) else { return false };
    let pending = status.lines().filter_map(|line| line.strip_prefix("SigPnd:").or(line.strip_prefix("ShdPnd:")));
    pending.filter_map(|mask| u64::from_str_radix(mask.trim(), 16).ok()).any(|mask| mask & KILLED != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_lives_is_not_killed() {
        assert!(!is_killed(std::process::id()) && !is_killed(0) && !is_killed(u32::MAX));
    }
}
