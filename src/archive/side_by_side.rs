//! A few threads for work that waits for the device.

use std::panic::resume_unwind;
use std::thread::ScopedJoinHandle;

/// Threads: a device takes several fsyncs at hardly more time than one.
const THREADS: usize = 4;

/// Does some work for each item, on a few threads; the answers are in the order of the items.
pub(super) fn side_by_side<I: Sync, T: Send>(items: &[I], work: impl Fn(&I) -> T + Sync) -> Vec<T> {
    // A test's scheduler knows its own threads only.
    if items.len() <= 1 || cfg!(feature = "shuttle") {
        return items.iter().map(work).collect();
    }
    let part = |items: &[I]| items.iter().map(&work).collect::<Vec<T>>();
    std::thread::scope(|scope| {
        let parts = items.chunks(items.len().div_ceil(THREADS));
        let threads: Vec<_> = parts.map(|items| scope.spawn(|| part(items))).collect();
        let join = |thread: ScopedJoinHandle<'_, Vec<T>>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        threads.into_iter().flat_map(join).collect()
    })
}
