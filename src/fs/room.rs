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

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
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
use crate::store::{MIN_RELEASE_BYTES, step_pattern};
use crate::sync::{Condvar, Mutex, MutexGuard, thread};
use crate::terminal::format::size;

/// Longest time from the first to the last wait of a save. The ranks of a job give up after ten minutes without an answer
/// of one (torch.distributed): half of that is left for the save itself.
const MOST: Duration = Duration::from_secs(300);
/// Longest wait for the room that an object may take, once there is room for the file. Most archivings end within it.
const TWICE: Duration = Duration::from_secs(5);
/// Longest wait without a byte more on the disk. It begins anew with each byte more. Archiving 3 GB takes as long at
/// [`SLOWEST`], and a larger file gets more time in proportion.
const STILL: Duration = Duration::from_secs(30);
/// A slow archiving, in bytes per millisecond: 100 MB/s.
const SLOWEST: u64 = 100_000;
/// Pause between two looks. Programs do not notice it beside a save, and a look is cheap.
const PAUSE: Duration = Duration::from_millis(100);
/// Shortest time between two demands for room. Each one lets all failed steps try again.
const DEMANDS: Duration = Duration::from_secs(2);
/// After a write that waited in vain the other writes of its file do not wait for so long: a program may make many.
const IN_VAIN: Duration = Duration::from_secs(10);
/// The kernel tries again at once after ESTALE, and tells its program of a second one.
const AGAIN: Duration = Duration::from_secs(1);
/// Shortest wait without room. The kernel tells of a close after the call has returned, and only then the state before is
/// history: `stepfs sync` gives it as long. A removed object frees its room once no thread has it open.
const CLOSING: Duration = Duration::from_millis(500);
/// The bit of SIGKILL in a mask of signals. The kernel sends it to each thread of a program that any signal ends.
const KILLED: u64 = 1 << (libc::SIGKILL - 1);

/// What somebody who waits is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Go on if there is room for the file, and as much again for the object of the state before.
    Look,
    /// Go on if there is room for the file.
    Once,
    /// Go on: nothing more is freed, or the wait was long enough.
    Last,
    /// Give up: the program is being killed, or the mount ends.
    Killed,
}

/// Room that a file needs and the disk lacks, bytes.
pub(super) struct Lack {
    pub(super) path: PathBuf,
    pub(super) needs: u64,
}

struct Waiter {
    archive: Arc<archive::Room>,
    lack: Lack,
    thread: u32,
    since: Instant,
    /// When the first wait of the same save began.
    save_since: Instant,
    /// Answers whether the wait is over.
    go_on: Box<dyn FnMut(Turn) -> bool + Send>,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.archive.waits(Some(self.since.elapsed()));
    }
}

/// A node that is open for writing, or just about to be.
#[derive(Default)]
struct Writer {
    /// Bytes that its file is expected to get, once somebody asked.
    expected: Option<u64>,
    /// When a write of it waited in vain.
    in_vain: Option<Instant>,
}

#[derive(Default)]
struct State {
    waiters: Vec<Waiter>,
    /// Bytes that those need who came since the last demand, and the time of that one.
    wanted: u64,
    demanded: Option<Instant>,
    /// When the first wait of each save began, by the directory of its run and its step.
    saves: HashMap<(PathBuf, Vec<u64>), Instant>,
    /// Names of files for which CREATE was answered with ESTALE.
    told: HashMap<(u64, OsString), Instant>,
    /// Free room at the last look, bytes, and when it was more than at the look before.
    grew: Option<(u64, Instant)>,
    stopping: bool,
}

/// Who writes, and who waits for room.
pub(super) struct Room {
    tree: Arc<Tree>,
    workers: Arc<Workers>,
    /// Taken for moments, also under the table's lock.
    writers: Mutex<BTreeMap<u64, Writer>>,
    /// Taken for moments; nobody is asked under it.
    state: Mutex<State>,
    work: Condvar,
}

impl Room {
    /// `workers` open a file after its wait.
    pub(super) fn new(tree: Arc<Tree>, workers: Arc<Workers>) -> Arc<Room> {
        Arc::new(Room { tree, workers, writers: Mutex::default(), state: Mutex::default(), work: Condvar::new() })
    }

    fn of_archive(&self) -> &Arc<archive::Room> {
        &self.tree.archive().room
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn writers(&self) -> MutexGuard<'_, BTreeMap<u64, Writer>> {
        self.writers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A node is open for writing. The name of an empty file may not be durable yet: [`Room::unless_short`] makes some.
    pub(super) fn enters(&self, table: &mut Table, ino: u64) {
        self.writers().entry(ino).or_default();
        let is_empty = table.place(ino).and_then(|place| Ok(place.metadata()?.len() == 0)).unwrap_or(false);
        if let Some(node) = table.get_mut(ino).filter(|_| is_empty) {
            node.unsynced_names += 1;
        }
    }

    /// A write of an open node waited in vain.
    pub(super) fn in_vain(&self, ino: u64) {
        self.writers().entry(ino).and_modify(|writer| writer.in_vain = Some(Instant::now()));
    }

    /// Whether a write of a node may wait.
    pub(super) fn may_wait(&self, ino: u64) -> bool {
        let in_vain = self.writers().get(&ino).and_then(|writer| writer.in_vain);
        in_vain.is_none_or(|at| at.elapsed() >= IN_VAIN)
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
        if !access.changes() || self.is_ample() || self.writers().contains_key(&ino) {
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
        let is_told = {
            let told = &mut self.state().told;
            told.retain(|_, at| at.elapsed() < AGAIN);
            told.contains_key(&(parent, name.to_owned()))
        };
        if is_told || self.lack_of(path, 0).is_none() {
            return Ok(());
        }
        match self.tree.mknod(parent, name, creator.of_a_file(true), 0) {
            Ok((_, shown, _)) => self.tree.table().forget(shown.ino.0, 1),
            Err(Fault::Os(error)) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(fault) => return Err(fault),
        }
        self.state().told.insert((parent, name.to_owned()), Instant::now());
        Err(libc::ESTALE.into())
    }

    /// Calls `open` from a worker once there is room for the file, or none will come.
    pub(super) fn wait_to_open(
        self: &Arc<Self>,
        ino: u64,
        lack: Lack,
        thread: u32,
        reply: ReplyOpen,
        open: impl FnOnce(ReplyOpen) + Send + 'static,
    ) {
        let (room, mut opening, needs) = (Arc::clone(self), Some((reply, open)), lack.needs);
        self.wait(lack, thread, move |turn| {
            let times = if turn == Turn::Look { 2 } else { 1 };
            let asks = matches!(turn, Turn::Look | Turn::Once) && !room.writers().contains_key(&ino);
            if asks && !room.fits(needs, times) {
                return false;
            }
            match opening.take() {
                Some((reply, _)) if turn == Turn::Killed => reply.error(Errno::EINTR),
                Some((reply, open)) => {
                    // The next one that waits counts it.
                    room.writers().entry(ino).or_default();
                    room.workers.submit(Box::new(move || open(reply)));
                }
                None => {}
            }
            true
        });
    }

    /// The room that a file lacks which has `taken` bytes of it.
    fn lack_of(&self, path: PathBuf, taken: u64) -> Option<Lack> {
        let needs = self.of_archive().expected(&path).saturating_sub(taken);
        // No release of another file is worth the wait of a small one.
        (needs >= MIN_RELEASE_BYTES && !self.fits(needs, 2)).then_some(Lack { path, needs })
    }

    /// Whether there is room for so many bytes so many times, and for the rest of all files that are open for writing.
    fn fits(&self, needs: u64, times: u64) -> bool {
        let left = self.of_archive().free().checked_sub(needs.saturating_mul(times));
        left.is_some_and(|left| left >= self.others())
    }

    /// Bytes that files which are open for writing are expected to get yet.
    fn others(&self) -> u64 {
        let writers: Vec<_> = self.writers().iter().map(|(ino, writer)| (*ino, writer.expected)).collect();
        let found: Vec<_> = {
            let table = self.tree.table();
            writers.iter().filter_map(|(ino, expected)| Some((*ino, *expected, taken(&table, *ino)?))).collect()
        };
        let rest = found.into_iter().map(|(ino, expected, (path, taken))| {
            let expected = expected.unwrap_or_else(|| {
                let expected = self.of_archive().expected(&path);
                self.writers().entry(ino).and_modify(|writer| writer.expected = Some(expected));
                expected
            });
            expected.saturating_sub(taken)
        });
        rest.sum()
    }

    /// Calls `go_on` again and again until it answers that the wait is over. `thread`: the one that waits for the answer.
    pub(super) fn wait(&self, lack: Lack, thread: u32, go_on: impl FnMut(Turn) -> bool + Send + 'static) {
        let (archive, since, go_on) = (Arc::clone(self.of_archive()), Instant::now(), Box::new(go_on));
        let Lack { path, needs } = &lack;
        log::info!("{}: waits for room: {} needed, {} is free", path.display(), size(*needs), size(archive.free()));
        archive.waits(None);
        let mut state = self.state();
        state.wanted = state.wanted.saturating_add(*needs);
        state.saves.retain(|_, since| since.elapsed() < 2 * MOST);
        let steps = step_pattern::steps(path);
        // Without a step all saves of a file have one name.
        let save_since = match steps.is_empty() {
            true => since,
            false => *state.saves.entry((step_pattern::run(path), steps)).or_insert(since),
        };
        state.waiters.push(Waiter { archive, lack, thread, since, save_since, go_on });
        self.work.notify_one();
    }

    /// Starts the thread that looks after all who wait.
    pub(super) fn start(self: &Arc<Self>) -> io::Result<thread::JoinHandle<()>> {
        let room = Arc::clone(self);
        // A defect drops the replies of those who wait, which answers EIO.
        let look = move || catch_unwind(AssertUnwindSafe(|| room.look())).unwrap_or(true);
        thread::Builder::new().name("stepfs-room".into()).spawn(move || while look() {})
    }

    /// Lets nobody wait any longer, and ends the thread.
    pub(super) fn stop(&self) {
        self.state().stopping = true;
        self.work.notify_all();
    }

    /// Asks each that waits once. False when it is over.
    fn look(&self) -> bool {
        let archive = self.of_archive();
        let (mut waiters, wanted, stopping, grew) = {
            let mut state = self.state();
            while state.waiters.is_empty() && !state.stopping {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let waiters = std::mem::take(&mut state.waiters);
            let (free, now) = (archive.free(), Instant::now());
            let grew = state.grew.filter(|(before, _)| free <= *before).map_or(now, |(_, at)| at);
            state.grew = Some((free, grew));
            let is_due = state.demanded.is_none_or(|at| at.elapsed() >= DEMANDS) && state.wanted > 0;
            let wanted = is_due.then(|| std::mem::take(&mut state.wanted));
            state.demanded = wanted.map(|_| now).or(state.demanded);
            (waiters, wanted, state.stopping, grew)
        };
        if let Some(wanted) = wanted {
            archive.make(wanted);
        }
        // Before they look: the room of the last step is there for them.
        let mut is_being_made = archive.is_being_made();
        if !is_being_made {
            // A thread may just be between two steps.
            std::thread::sleep(PAUSE);
            is_being_made = archive.is_being_made();
        }
        waiters.retain_mut(|Waiter { lack, thread, since, save_since, go_on, .. }| {
            let (path, waited) = (lack.path.display(), since.elapsed());
            let still = STILL + Duration::from_millis(lack.needs / SLOWEST);
            let is_over = save_since.elapsed() >= MOST
                || waited.min(grew.elapsed()) >= still
                || !is_being_made && waited >= CLOSING;
            // A defect drops the reply, which answers EIO.
            let mut ends = |turn| catch_unwind(AssertUnwindSafe(|| go_on(turn))).unwrap_or(true);
            let first = if stopping || is_killed(*thread) { Turn::Killed } else { Turn::Look };
            let once = (is_over || waited >= TWICE).then_some(Turn::Once);
            let turns = [Some(first), once, is_over.then_some(Turn::Last)];
            let Some(turn) = turns.into_iter().flatten().find(|turn| ends(*turn)) else { return true };
            let free = size(archive.free());
            match turn {
                Turn::Killed if stopping => log::info!("{path}: the mount ends while its program waits for room"),
                Turn::Killed => log::info!("{path}: its program was killed while it waited for room"),
                Turn::Look | Turn::Once => {
                    log::info!("{path}: its program waited {waited:.1?} for room, {free} is free")
                }
                Turn::Last => {
                    log::warn!("{path}: no more room comes after {waited:.1?}, {free} is free: it may be cut short")
                }
            }
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
