//! Many small reads at once: without a cache, speed depends on the number of requests at the device.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Reads in flight. They wait for the device, not for a processor.
const THREADS: usize = 16;

/// Applies `of` to each item, from several threads at once. The results are in the order of the items.
pub fn in_parallel<T: Sync, R: Send>(items: &[T], of: impl Fn(&T) -> R + Sync) -> Vec<R> {
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
        let others: Vec<_> = (1..THREADS.min(items.len()))
            .filter_map(|_| thread::Builder::new().name("scan".into()).spawn_scoped(scope, work).ok())
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
            assert_eq!(in_parallel(&items, |item| item * 2), items.iter().map(|item| item * 2).collect::<Vec<_>>());
        }
    }
}
