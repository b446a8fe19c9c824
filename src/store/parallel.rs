//! Work for the device from several threads at once.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Small reads in flight. Without a cache, speed depends on the number of requests at the device.
const READS: usize = 16;
/// Calls of fsync in flight: a device takes several in hardly more time than one. A test's scheduler knows its own
/// threads only.
const SYNCS: usize = if cfg!(feature = "shuttle") { 1 } else { 4 };

/// Applies `of`, which reads little, to each item. The results are in the order of the items.
pub fn in_parallel<T: Sync, R: Send>(items: &[T], of: impl Fn(&T) -> R + Sync) -> Vec<R> {
    on_threads(READS, items, of)
}

/// Applies `of`, which waits for fsync, to each item. The results are in the order of the items.
pub fn side_by_side<T: Sync, R: Send>(items: &[T], of: impl Fn(&T) -> R + Sync) -> Vec<R> {
    on_threads(SYNCS, items, of)
}

fn on_threads<T: Sync, R: Send>(threads: usize, items: &[T], of: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { return done };
            done.push((at, of(item)));
        }
    };
    let mut all = thread::scope(|scope| {
        // If no thread can be started, this one does all the work.
        let others: Vec<_> = (1..threads.min(items.len()))
            .filter_map(|_| thread::Builder::new().name("parallel".into()).spawn_scoped(scope, work).ok())
            .collect();
        let mut all = work();
        for other in others {
            all.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        all
    });
    all.sort_unstable_by_key(|(at, _)| *at);
    all.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_once_and_in_order() {
        for count in [0, 1, 15, 16, 1000] {
            let items: Vec<usize> = (0..count).collect();
            let doubled: Vec<usize> = items.iter().map(|item| item * 2).collect();
            assert_eq!(in_parallel(&items, |item| item * 2), doubled);
            assert_eq!(side_by_side(&items, |item| item * 2), doubled);
        }
    }
}
