//! Calls that wait for room on the disk of the store.
//!
//! The kernel writes to a passed-through file by itself, and answers ENOSPC by itself. So a file that a program opens for
//! writing is served by the daemon, unless there is room for it beside the reserve ([`Room::is_short`]). Calls to the daemon
//! leave the reserve to the archive as long as that is at work, and wait meanwhile. So do calls that met ENOSPC. Once nothing
//! is at work, a call is tried, and answered as it is.
//!
//! No wait holds up what ends it:
//! - No thread waits, neither one that answers the kernel nor a worker. A call that waits is a value in a list. One thread of
//!   its own looks at the list, and workers try the calls.
//! - Nothing is locked while a call waits: not the inode table, not the catalog.
//! - The archive reads and writes the store, never the mount. It takes no lock of this module.
//! - The kernel keeps a file's own lock during a write to it, and of its pages. A release never needs these, since no open
//!   file is released.
//! - The kernel tells of closes only while few delayed writes of mapped pages are unanswered. Those never wait.
//! - A handle has one deadline, for all of its calls.

use std::fs;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::errno::{Fault, Result};
use super::node::Handle;
use super::tree::Tree;
use super::workers::Workers;
use crate::archive::Reserve;
use crate::sync::{AtomicU64, Condvar, Mutex, MutexGuard, thread, wait_timeout};
use crate::terminal::format::size;

/// Pause between two looks. Programs do not notice it beside a save, and a look is cheap.
const PAUSE: Duration = Duration::from_millis(50);
/// For how long nothing must be at work before a call gets ENOSPC: a thread may just be between two steps. As long, other
/// calls rely on such a look.
const GRACE: Duration = Duration::from_millis(100);
/// Shortest time between two demands for room. Each one lets all failed steps try again.
const DEMANDS: Duration = Duration::from_secs(1);
/// Calls that wait at most: each holds the bytes that it writes, 1 MiB by default. Others are answered as they are.
const MOST_CALLS: usize = 256;
/// A file below this part of the reserve, and of fewer bytes than this, does not leave it to the archive: a log goes on.
const PART: u64 = 64;
const LOG: u64 = 64 << 20;
/// Bytes that calls may take between two looks at the disk, and a part of the reserve for the same: the kernel and other programs
/// fill the disk unseen meanwhile.
const CREDIT: u64 = 8 << 20;
const CREDIT_PART: u64 = 8;
/// The bit of SIGKILL in a mask of signals. The kernel sends it to each thread of a program that any signal ends.
const KILLED: u64 = 1 << (libc::SIGKILL - 1);

/// What a call does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// It is tried. Without room it waits on.
    Try,
    /// It is tried, and answered as it is.
    Last,
    /// It is given up: its program is being killed.
    Killed,
}

/// What a call needs, and who makes it.
#[derive(Clone)]
pub(super) struct Need {
    handle: Arc<Handle>,
    /// The thread of the program.
    thread: u32,
    /// Bytes that it adds at most, and the end of the file after it.
    len: u64,
    end: u64,
}

impl Need {
    /// `len` bytes at `offset`.
    pub(super) fn new(handle: &Arc<Handle>, thread: u32, offset: u64, len: u64) -> Need {
        Need { handle: Arc::clone(handle), thread, len, end: offset.saturating_add(len) }
    }
}

/// A call that waits.
struct Call {
    reserve: Arc<Reserve>,
    need: Need,
    /// When it last met ENOSPC.
    refused: Option<Instant>,
    /// Since when all looks found nothing at work.
    calm: Option<Instant>,
    /// Takes the turn, and says whether the call is answered.
    take: Box<dyn FnMut(Turn) -> bool + Send>,
}

impl Drop for Call {
    fn drop(&mut self) {
        self.need.handle.patience().end();
        self.reserve.waits_more(false);
    }
}

#[derive(Default)]
struct State {
    calls: Vec<Call>,
    /// A handle began to wait since the last demand for room.
    is_new: bool,
    /// When a look last found nothing at work, and after how many changes. A close after that may mean work.
    calm: Option<(Instant, u64)>,
    stopping: bool,
}

/// Who waits for room.
pub(super) struct Room {
    tree: Arc<Tree>,
    workers: Arc<Workers>,
    /// A reference more for each handle through which the kernel writes by itself.
    writers: Arc<()>,
    /// Bytes that calls may still take before one of them looks at the disk.
    left: AtomicU64,
    /// Taken for moments, by threads that answer the kernel, workers, and the one of this module. No other lock is taken under it.
    state: Mutex<State>,
    arrived: Condvar,
}

impl Room {
    /// `workers` try the calls.
    pub(super) fn new(tree: Arc<Tree>, workers: Arc<Workers>) -> Arc<Room> {
        let (writers, left, state) = Default::default();
        Arc::new(Room { tree, workers, writers, left, state, arrived: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reserve(&self) -> &Arc<Reserve> {
        &self.tree.archive().reserve
    }

    /// Counts a handle through which the kernel writes, as long as this lives.
    pub(super) fn writer(&self) -> Arc<()> {
        Arc::clone(&self.writers)
    }

    /// Whether the daemon must serve the next file that is opened for writing. The caller has a [`Room::writer`] for it.
    pub(super) fn is_short(&self) -> bool {
        !self.reserve().has_room_for(Arc::strong_count(&self.writers) as u64 - 1)
    }

    /// Makes an attempt, unless the call has to wait: `None`.
    pub(super) fn unless_short<T>(&self, need: &Need, attempt: impl FnOnce() -> Result<T>) -> Option<Result<T>> {
        let may_wait = || !need.handle.patience().is_over() && self.state().calls.len() < MOST_CALLS;
        if !self.leaves_the_reserve(need) && may_wait() {
            return None;
        }
        let done = attempt();
        if done.as_ref().is_err_and(Fault::lacks_room) {
            if may_wait() {
                return None;
            }
            self.refused(need);
        }
        Some(done)
    }

    /// Whether a call may go on now, as far as the reserve goes.
    fn leaves_the_reserve(&self, need: &Need) -> bool {
        // Not a look for each: over a network that is a question to a server.
        if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(need.len)).is_ok() {
            return true;
        }
        let spare = self.spare();
        // Others fill the disk meanwhile.
        let credit = (spare / 2).min((self.reserve().bytes() / CREDIT_PART).max(CREDIT));
        self.left.store(credit.saturating_sub(need.len), Ordering::Relaxed);
        let is_calm = || {
            let calm = self.state().calm;
            calm.is_some_and(|(at, changes)| at.elapsed() < GRACE && changes == self.reserve().changes())
        };
        spare >= need.len || need.end < LOG.min(self.reserve().bytes() / PART) || is_calm()
    }

    /// Free bytes beyond the reserve.
    fn spare(&self) -> u64 {
        self.reserve().free().saturating_sub(self.reserve().bytes())
    }

    /// Lets a call wait. `attempt` may be made more than once, and `answer` gets the result of the last attempt.
    pub(super) fn wait<T>(
        self: &Arc<Self>,
        need: Need,
        mut attempt: impl FnMut() -> Result<T> + Send + 'static,
        answer: impl FnOnce(Result<T>) + Send + 'static,
    ) {
        let (room, own, mut answer) = (Arc::clone(self), need.clone(), Some(answer));
        let take = Box::new(move |turn| {
            let done = if turn == Turn::Killed { Err(libc::EINTR.into()) } else { attempt() };
            if done.as_ref().is_err_and(Fault::lacks_room) {
                if turn == Turn::Try {
                    return false;
                }
                room.refused(&own);
            }
            if let Some(answer) = answer.take() {
                answer(done);
            }
            true
        });
        let is_first = need.handle.patience().begin();
        self.reserve().waits_more(true);
        if is_first {
            log::info!("{}: waits for room, {} is free", self.name(&need.handle), size(self.reserve().free()));
        }
        let reserve = Arc::clone(self.reserve());
        self.put(Call { reserve, need, refused: None, calm: None, take }, is_first);
    }

    fn put(&self, call: Call, is_new: bool) {
        let mut state = self.state();
        if state.stopping {
            // Its reply goes with it, which answers EIO.
            drop(state);
            return;
        }
        state.calls.push(call);
        state.is_new |= is_new;
        self.arrived.notify_one();
    }

    /// A handle's file, for the log.
    fn name(&self, handle: &Handle) -> String {
        let path = self.tree.table().path(handle.node);
        path.as_deref().unwrap_or(Path::new("a removed file")).display().to_string()
    }

    /// A program is told that there is no room for its file. Its other calls do not wait.
    pub(super) fn refused(&self, need: &Need) {
        if !need.handle.patience().refuse() {
            return;
        }
        let (name, free) = (self.name(&need.handle), size(self.reserve().free()));
        log::warn!("{name}: is cut short; the disk of the store has {free} left, and nothing more is freed");
        let paths = self.tree.table().paths(need.handle.node);
        paths.iter().for_each(|path| self.reserve().cut_short(path));
    }

    /// A handle is closed.
    pub(super) fn leaves(&self, handle: &Handle) {
        let waited = handle.patience().waited();
        if !waited.is_zero() {
            self.reserve().waited(waited);
            log::info!("{}: its program waited {waited:.1?} for room", self.name(handle));
        }
    }

    /// Starts the thread that looks after all calls that wait.
    pub(super) fn start(self: &Arc<Self>) -> io::Result<thread::JoinHandle<()>> {
        let room = Arc::clone(self);
        thread::Builder::new().name("stepfs-room".into()).spawn(move || {
            let mut demand = (None, 0);
            // A defect drops the replies of those who wait, which answers EIO.
            while catch_unwind(AssertUnwindSafe(|| room.look(&mut demand))).unwrap_or(true) {}
        })
    }

    /// Lets nobody wait any longer, and ends the thread.
    pub(super) fn stop(&self) {
        let calls = {
            let mut state = self.state();
            state.stopping = true;
            std::mem::take(&mut state.calls)
        };
        drop(calls);
        self.arrived.notify_all();
    }

    /// Waits for calls, and gives those their turn whose turn it is. False when it is over. `demand`: when room was last
    /// demanded, and the answer.
    fn look(self: &Arc<Self>, demand: &mut (Option<Instant>, u64)) -> bool {
        let (is_new, is_due) = {
            let mut state = self.state();
            while state.calls.is_empty() && !state.stopping {
                state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.stopping {
                return false;
            }
            let is_due = demand.0.is_none_or(|at| at.elapsed() >= DEMANDS);
            let is_new = state.is_new;
            state.is_new &= !is_due;
            (is_new, is_due)
        };
        if is_new && is_due {
            *demand = (Some(Instant::now()), self.reserve().hasten());
        }
        let changes = self.reserve().changes();
        // Nobody is refused before the demand for its sake.
        let is_being_freed = is_new && !is_due || {
            let ago = demand.0.map_or(Duration::MAX, |at| at.elapsed());
            self.reserve().is_being_freed(demand.1, ago)
        };
        let (spare, now) = (self.spare(), Instant::now());
        let calls = {
            let mut state = self.state();
            state.calm = (!is_being_freed).then_some((now, changes));
            std::mem::take(&mut state.calls)
        };
        let mut others = Vec::new();
        for mut call in calls {
            call.calm = if is_being_freed { None } else { call.calm.or(Some(now)) };
            match call.turn(spare) {
                None => others.push(call),
                Some(turn) => {
                    let room = Arc::clone(self);
                    self.workers.submit(Box::new(move || {
                        if !(call.take)(turn) {
                            (call.refused, call.calm) = (Some(Instant::now()), None);
                            room.put(call, false);
                        }
                    }));
                }
            }
        }
        let mut state = self.state();
        if state.stopping {
            drop(state);
            return false;
        }
        others.append(&mut state.calls);
        state.calls = others;
        if !state.calls.is_empty() {
            drop(wait_timeout(&self.arrived, &self.state, state, PAUSE));
        }
        true
    }
}

impl Call {
    /// The turn of the call, if it need not wait. `spare`: free bytes beyond the reserve.
    fn turn(&self, spare: u64) -> Option<Turn> {
        let is_over = self.need.handle.patience().is_over();
        let is_calm = |time| self.calm.is_some_and(|since| since.elapsed() >= time);
        match self.refused {
            _ if is_killed(self.need.thread) => Some(Turn::Killed),
            _ if is_over => Some(Turn::Last),
            None => (spare >= self.need.len || is_calm(Duration::ZERO)).then_some(Turn::Try),
            Some(_) if is_calm(GRACE) => Some(Turn::Last),
            // A quota may be used up, of which the file system does not tell.
            Some(at) => (spare >= self.need.len && at.elapsed() >= PAUSE).then_some(Turn::Try),
        }
    }
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
    use crate::archive::Archive;
    use crate::fs::node::Source;
    use crate::store::Store;

    #[test]
    fn the_turn_of_a_call_follows_from_room_work_and_time() {
        let dir = tempfile::tempdir().unwrap();
        let archive = Archive::open(Store::open(&dir.path().join("store")).unwrap()).unwrap();
        let file = Arc::new(fs::File::create(dir.path().join("file")).unwrap());
        let turn = |spare: u64, refused: Option<Duration>, calm: Option<Duration>, is_over: bool| {
            let handle = Arc::new(Handle::new(1, true, &Arc::default(), Source::File(Arc::clone(&file)), None, None));
            handle.patience().begin();
            is_over.then(|| handle.patience().refuse());
            let (reserve, need) = (Arc::clone(&archive.reserve), Need::new(&handle, 0, 0, 10));
            let [refused, calm] = [refused, calm].map(|ago| ago.and_then(|ago| Instant::now().checked_sub(ago)));
            Call { reserve, need, refused, calm, take: Box::new(|_| true) }.turn(spare)
        };
        let (none, now, long) = (None, Some(Duration::ZERO), Some(GRACE));
        for (spare, refused, calm, is_over, expect) in [
            (9, none, none, false, None),
            (10, none, none, false, Some(Turn::Try)),
            (9, none, now, false, Some(Turn::Try)),
            (9, none, none, true, Some(Turn::Last)),
            (9, long, none, false, None),
            (10, long, none, false, Some(Turn::Try)),
            // Not again and again within one pause.
            (10, now, none, false, None),
            (9, long, now, false, None),
            (9, long, long, false, Some(Turn::Last)),
            (9, now, none, true, Some(Turn::Last)),
        ] {
            assert_eq!(turn(spare, refused, calm, is_over), expect, "{spare} {refused:?} {calm:?} {is_over}");
        }
    }

    #[test]
    fn a_thread_that_lives_is_not_killed() {
        assert!(!is_killed(std::process::id()) && !is_killed(0) && !is_killed(u32::MAX));
    }
}
