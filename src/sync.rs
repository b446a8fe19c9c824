//! Locks, conditions, flags and threads for all shared data: those of `std`, or with the feature `shuttle` those of a
//! test scheduler. That scheduler tries orders of threads that the machine hardly ever takes (`scripts/threads.sh`).
//!
//! The locks of thread pools during encoding and decoding (`recall/beside.rs`, counters) are not from here. That
//! scheduler does not know these threads, and nothing waits under those locks.

#[cfg(not(feature = "shuttle"))]
mod from {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use std::thread;
}

#[cfg(feature = "shuttle")]
mod from {
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
    pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use shuttle::thread;
}

pub(crate) use from::*;

/// Waits until the condition is notified or this time has passed.
#[cfg(not(feature = "shuttle"))]
pub(crate) fn wait_timeout<'a, T>(
    condition: &Condvar,
    _: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    time: std::time::Duration,
) -> MutexGuard<'a, T> {
    condition.wait_timeout(guard, time).unwrap_or_else(std::sync::PoisonError::into_inner).0
}

/// The test scheduler has no clock. Short waits end at once; long ones never end, so that a missed notification shows.
#[cfg(feature = "shuttle")]
pub(crate) fn wait_timeout<'a, T>(
    condition: &Condvar,
    mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    time: std::time::Duration,
) -> MutexGuard<'a, T> {
    const SHORT: std::time::Duration = std::time::Duration::from_secs(10);
    if time > SHORT {
        return condition.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner);
    }
    drop(guard);
    thread::yield_now();
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Threads that decode and encode tiles.
#[derive(Debug)]
pub(crate) struct Pool(rayon::ThreadPool);

impl Pool {
    /// Builds a pool's threads.
    ///
    /// # Errors
    /// Threads cannot be started.
    pub(crate) fn new(builder: rayon::ThreadPoolBuilder) -> std::io::Result<Pool> {
        builder.build().map(Pool).map_err(std::io::Error::other)
    }

    /// Runs `work` with the pool for its parallel parts.
    pub(crate) fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        match cfg!(feature = "shuttle") {
            // On the scheduler's thread: `work` may take locks. Its parallel parts take none.
            true => work(),
            false => self.0.install(work),
        }
    }

    /// Runs `work` on this thread. It must not be one of the pool's, since `work` may wait for the tasks that it spawns
    /// there.
    pub(crate) fn scope<'scope, T>(&self, work: impl FnOnce(&rayon::Scope<'scope>) -> T) -> T {
        self.0.in_place_scope(work)
    }

    /// The same, where tasks begin in their order, and those of others between them.
    pub(crate) fn scope_fifo<'scope, T>(&self, work: impl FnOnce(&rayon::ScopeFifo<'scope>) -> T) -> T {
        self.0.in_place_scope_fifo(work)
    }

    /// Runs `work` on one of the threads, soon.
    pub(crate) fn spawn(&self, work: impl FnOnce() + Send + 'static) {
        #[cfg(feature = "shuttle")]
        thread::spawn(work);
        #[cfg(not(feature = "shuttle"))]
        self.0.spawn(work);
    }
}

/// Runs a test with many orders of its threads: `STEPFS_ORDERS` of them (default 200), half of them random, half with
/// few changes at rare places. A failure prints its order, and `shuttle::replay` runs that order again.
#[cfg(all(test, feature = "shuttle"))]
pub(crate) fn in_many_orders(test: impl Fn() + Send + Sync + 'static) {
    use shuttle::scheduler::{PctScheduler, RandomScheduler};
    // Deeper than a decoder's frames, unlike the usual 32 KiB.
    const STACK: usize = 1 << 20;
    /// Maximum changes of thread for a bug: nearly all known ones need one or two.
    const CHANGES: usize = 3;
    let orders =
        std::env::var("STEPFS_ORDERS").map_or(200, |orders| orders.parse().expect("STEPFS_ORDERS is a number"));
    let test = std::sync::Arc::new(test);
    let mut config = shuttle::Config::new();
    config.stack_size = STACK;
    let again = std::sync::Arc::clone(&test);
    shuttle::Runner::new(RandomScheduler::new(orders / 2), config.clone()).run(move || again());
    shuttle::Runner::new(PctScheduler::new(CHANGES, orders.div_ceil(2)), config).run(move || test());
}
