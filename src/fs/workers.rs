//! Threads for work that may block: decoding, fsync, waiting for a disk. A thread that answers the kernel never
//! blocks.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::sync::{Condvar, Mutex, MutexGuard, thread, wait_timeout};

/// Something to do. It carries the reply with it.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// Most threads at a time. They mostly wait for a disk or for the decoder's own pool; with 16, a dozen slow recalls
/// still leave room for the reads of others.
const MOST: usize = 16;
/// A thread without work for so long ends, and frees its buffers.
const REST: Duration = Duration::from_secs(60);

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    threads: usize,
    /// Wakes each waiting thread. The last one goes first. So only as many threads keep buffers and heaps as work at
    /// once, not all that ever worked.
    idle: Vec<Arc<Condvar>>,
    stopping: bool,
}

struct Shared {
    /// Taken for moments only; no job runs under it.
    state: Mutex<State>,
    ended: Condvar,
    rest: Duration,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pool that grows on demand up to [`MOST`] threads. The kernel's outstanding requests bound the queue.
pub(super) struct Workers {
    shared: Arc<Shared>,
}

impl Default for Workers {
    fn default() -> Workers {
        Workers::new(REST)
    }
}

impl Workers {
    /// Threads that end when they were not called for so long.
    fn new(rest: Duration) -> Workers {
        Workers { shared: Arc::new(Shared { state: Mutex::default(), ended: Condvar::default(), rest }) }
    }

    /// Runs `job` on some thread, soon. After [`Workers::stop`] it is dropped: its reply then says EIO.
    pub(super) fn submit(&self, job: Job) {
        let mut state = self.shared.state();
        if state.stopping {
            drop(state);
            return;
        }
        state.queue.push_back(job);
        if let Some(idle) = state.idle.pop() {
            idle.notify_one();
        } else if state.threads < MOST {
            let shared = Arc::clone(&self.shared);
            let spawned = thread::Builder::new().name("stepfs-worker".into()).spawn(move || work(&shared));
            match spawned {
                Ok(_) => state.threads += 1,
                // No thread would ever run it. It is dropped, and its reply says EIO.
                Err(error) if state.threads == 0 => {
                    let job = state.queue.pop_back();
                    drop(state);
                    log::error!("cannot start a worker thread: {error}");
                    drop(job);
                }
                Err(_) => {}
            }
        }
    }

    /// Finishes the queue and ends the threads.
    pub(super) fn stop(&self) {
        let mut state = self.shared.state();
        state.stopping = true;
        state.idle.drain(..).for_each(|idle| idle.notify_one());
        while state.threads > 0 {
            state = self.shared.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn work(shared: &Shared) {
    let wake = Arc::new(Condvar::new());
    let mut state = shared.state();
    loop {
        if let Some(job) = state.queue.pop_front() {
            drop(state);
            // A job that panics drops its reply, which answers EIO; the thread lives on.
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                log::error!("an operation failed in a way it should not have; its caller got EIO");
            }
            state = shared.state();
        } else if state.stopping {
            state.threads -= 1;
            shared.ended.notify_all();
            return;
        } else {
            state.idle.push(Arc::clone(&wake));
            state = wait_timeout(&wake, &shared.state, state, shared.rest);
            let waiting = state.idle.len();
            state.idle.retain(|idle| !Arc::ptr_eq(idle, &wake));
            // It was not called: a called thread is taken from the list.
            if state.idle.len() < waiting && state.queue.is_empty() && !state.stopping {
                state.threads -= 1;
                shared.ended.notify_all();
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Barrier, mpsc};

    use super::*;

    #[test]
    fn every_job_runs_even_after_a_panic() {
        let workers = Workers::default();
        let done = Arc::new(AtomicUsize::new(0));
        for i in 0..1000 {
            let done = Arc::clone(&done);
            workers.submit(Box::new(move || {
                done.fetch_add(1, Ordering::Relaxed);
                assert!(i % 100 != 0, "on purpose");
            }));
        }
        workers.stop();
        assert_eq!(done.load(Ordering::Relaxed), 1000);
    }

    #[test]
    fn threads_that_nobody_calls_end_and_others_take_their_place() {
        let workers = Workers::new(Duration::from_millis(20));
        let all = Arc::new(Barrier::new(MOST));
        for _ in 0..MOST {
            let all = Arc::clone(&all);
            workers.submit(Box::new(move || {
                all.wait();
            }));
        }
        let began = std::time::Instant::now();
        while workers.shared.state().threads > 0 {
            assert!(began.elapsed() < Duration::from_secs(20), "{} are still there", workers.shared.state().threads);
            std::thread::sleep(Duration::from_millis(5));
        }
        let (tell, told) = mpsc::channel();
        for round in 0..200 {
            let tell = tell.clone();
            workers.submit(Box::new(move || tell.send(round).unwrap()));
            // Often just when a thread is about to end.
            std::thread::sleep(Duration::from_micros(150 * (round % 200)));
            assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok(round));
        }
        workers.stop();
    }

    #[test]
    fn jobs_one_after_the_other_are_done_by_one_thread() {
        let workers = Workers::default();
        let (tell, told) = mpsc::channel();
        // As many threads as there may be.
        let all = Arc::new(Barrier::new(MOST));
        for _ in 0..MOST {
            let (all, tell) = (Arc::clone(&all), tell.clone());
            workers.submit(Box::new(move || {
                all.wait();
                tell.send(std::thread::current().id()).unwrap();
            }));
        }
        assert_eq!(told.iter().take(MOST).collect::<HashSet<_>>().len(), MOST);
        let wait_for_idle = || while workers.shared.state().idle.len() < MOST {};
        let mut threads = HashSet::new();
        for _ in 0..50 {
            wait_for_idle();
            let tell = tell.clone();
            workers.submit(Box::new(move || tell.send(std::thread::current().id()).unwrap()));
            threads.insert(told.recv().unwrap());
        }
        workers.stop();
        assert_eq!(threads.len(), 1);
    }
}
