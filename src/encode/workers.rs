//! Threads that encode and decode tiles, of several files at once and each file's in order.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{PoisonError, mpsc};

use crate::sync::{AtomicBool, Mutex, Pool};
use codec::TILE_BYTES;

/// Tiles in flight beside the first one of each file, at least: enough that two cores never wait for the thread that
/// writes.
const LEAST_IN_FLIGHT: usize = 16;
/// And for each core: one that it works on, and one that is next.
const IN_FLIGHT_PER_CORE: usize = 2;

/// Most items in a batch: a file that is given up ends with the batch.
const BATCH: usize = 64;

/// Threads for tiles. A tile takes about 3 MB while it is encoded (its bytes, K, A, R and payload), so
/// [`LEAST_IN_FLIGHT`] take 50 MB, for any number of files at a time.
#[derive(Debug)]
pub(crate) struct Workers {
    pool: Pool,
    /// Tiles that may be begun. Taken for moments by threads that encode a file; no other lock under it.
    free: Mutex<usize>,
}

/// The tiles of a file that are in flight, each with whether it was taken from [`Workers::free`].
struct Taken<'a> {
    workers: &'a Workers,
    tiles: VecDeque<bool>,
}

impl Taken<'_> {
    /// Whether another tile may be begun: the first one always may.
    fn take(&mut self) -> bool {
        let first = self.tiles.is_empty();
        let mut free = self.workers.free.lock().unwrap_or_else(PoisonError::into_inner);
        let take = !first && *free > 0;
        *free -= usize::from(take);
        if first || take {
            self.tiles.push_back(take);
        }
        first || take
    }

    fn give(&mut self, taken: Option<bool>) {
        if taken == Some(true) {
            *self.workers.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        while let Some(taken) = self.tiles.pop_front() {
            self.give(Some(taken));
        }
    }
}

/// Answers even if the work panics, so that no thread waits for ever.
struct Reply<T> {
    at: usize,
    to: mpsc::Sender<(usize, Option<T>)>,
    made: Option<T>,
}

impl<T> Reply<T> {
    /// Answers with the result of `work`.
    fn with(mut self, work: impl FnOnce() -> Option<T>) {
        self.made = work();
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        // The receiver is gone if the file is given up.
        let _ = self.to.send((self.at, self.made.take()));
    }
}

impl Workers {
    /// `threads` of the lowest priority: training comes first.
    pub(crate) fn new(threads: usize) -> io::Result<Workers> {
        let builder = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|n| format!("archive-{n}"))
            .start_handler(|_| super::yield_to_others());
        let free = LEAST_IN_FLIGHT.max(threads * IN_FLIGHT_PER_CORE);
        Ok(Workers { pool: Pool::new(builder)?, free: Mutex::new(free) })
    }

    /// The threads.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Runs `work` on one of the threads; its parallel parts take all of them.
    pub(crate) fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.pool.install(work)
    }

    /// Makes something of each item, several at once. Passes the results in the order of the items to `consume`, on
    /// the calling thread, which must be none of these. There is no barrier: while one item takes long, those after
    /// it are made.
    ///
    /// # Errors
    /// The first error of `consume`. Results in flight are thrown away then.
    pub(crate) fn in_order<I: Send, T: Send, E: From<io::Error>>(
        &self,
        mut items: impl Iterator<Item = I>,
        make: impl Fn(I) -> T + Sync,
        mut consume: impl FnMut(T) -> Result<(), E>,
    ) -> Result<(), E> {
        let given_up = AtomicBool::new(false);
        let (make, given_up) = (&make, &given_up);
        // A test's scheduler knows its own threads only.
        if cfg!(feature = "shuttle") {
            return items.try_for_each(|item| consume(make(item)));
        }
        self.pool.scope(|scope| {
            let (send, made) = mpsc::channel();
            let mut taken = Taken { workers: self, tiles: VecDeque::new() };
            let mut results: VecDeque<Option<T>> = VecDeque::new();
            let (mut begun, mut done, mut all_begun) = (0, 0, false);
            let mut work = || -> Result<(), E> {
                loop {
                    while !all_begun && taken.take() {
                        let Some(item) = items.next() else {
                            let last = taken.tiles.pop_back();
                            taken.give(last);
                            all_begun = true;
                            break;
                        };
                        let reply = Reply { at: begun, to: send.clone(), made: None };
                        results.push_back(None);
                        begun += 1;
                        let wanted = || !given_up.load(Ordering::Relaxed);
                        scope.spawn(move |_| reply.with(|| wanted().then(|| make(item))));
                    }
                    if begun == done {
                        return Ok(());
                    }
                    let panicked = || io::Error::other("a task of the archive panicked");
                    let (at, result) = made.recv().map_err(|_| panicked())?;
                    results[at - done] = Some(result.ok_or_else(panicked)?);
                    while let Some(result) = results.front_mut().and_then(Option::take) {
                        results.pop_front();
                        done += 1;
                        consume(result)?;
                        let first = taken.tiles.pop_front();
                        taken.give(first);
                    }
                }
            };
            work().inspect_err(|_| given_up.store(true, Ordering::Relaxed))
        })
    }

    /// The same for items of so many bytes each. Consecutive items form a batch while their lengths sum to at most
    /// one tile; one thread makes a batch. To wake a thread takes about as long as to decode 20 KiB.
    pub(crate) fn in_order_of_lengths<I: Send, T: Send, E: From<io::Error>>(
        &self,
        items: impl Iterator<Item = (usize, I)>,
        make: impl Fn(I) -> T + Sync,
        mut consume: impl FnMut(T) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut items = items.peekable();
        let batches = std::iter::from_fn(|| {
            let (mut length, first) = items.next()?;
            let mut batch = vec![first];
            while batch.len() < BATCH
                && let Some((more, item)) = items.next_if(|(more, _)| length + more <= TILE_BYTES)
            {
                length += more;
                batch.push(item);
            }
            Some(batch)
        });
        let make_all = |batch: Vec<I>| batch.into_iter().map(&make).collect::<Vec<T>>();
        self.in_order(batches, make_all, |made| made.into_iter().try_for_each(&mut consume))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn results_come_in_order_however_long_each_takes() {
        let workers = Workers::new(3).unwrap();
        std::thread::scope(|scope| {
            for file in 0..6u64 {
                let workers = &workers;
                scope.spawn(move || {
                    let mut seen = Vec::new();
                    let make = |n: u64| {
                        std::thread::sleep(Duration::from_micros((n * 7 + file) % 5 * 200));
                        n
                    };
                    let consumed = workers.in_order(0..100, make, |n| {
                        seen.push(n);
                        io::Result::Ok(())
                    });
                    consumed.unwrap();
                    assert_eq!(seen, (0..100).collect::<Vec<_>>());
                });
            }
        });
        assert_eq!(*workers.free.lock().unwrap(), LEAST_IN_FLIGHT);
    }

    #[test]
    fn no_more_is_in_flight_than_may_be() {
        let workers = Workers::new(2).unwrap();
        let (begun, most) = (std::sync::Mutex::new((0usize, 0usize)), LEAST_IN_FLIGHT + 1);
        let make = |n: usize| {
            begun.lock().unwrap().0 += 1;
            n
        };
        let consumed = workers.in_order(0..1000, make, |_| {
            std::thread::sleep(Duration::from_micros(50));
            let mut counts = begun.lock().unwrap();
            counts.1 += 1;
            assert!(counts.0 - (counts.1 - 1) <= most, "{} begun, {} done", counts.0, counts.1);
            io::Result::Ok(())
        });
        consumed.unwrap();
    }

    #[test]
    fn short_items_are_made_together_and_come_in_order_too() {
        let workers = Workers::new(2).unwrap();
        let lengths = [1, TILE_BYTES / 2, TILE_BYTES / 2, TILE_BYTES, 1, 2, TILE_BYTES - 2, 0];
        let mut seen = Vec::new();
        let numbered = lengths.into_iter().enumerate().map(|(n, length)| (length, n));
        let made = |n| (n, std::thread::current().id());
        let take = |one| {
            seen.push(one);
            io::Result::Ok(())
        };
        workers.in_order_of_lengths(numbered, made, take).unwrap();
        assert!(seen.iter().map(|(n, _)| *n).eq(0..lengths.len()));
        // One thread made both.
        assert!(seen[0].1 == seen[1].1 && seen[4].1 == seen[5].1);
    }

    #[test]
    fn an_error_ends_it_and_a_panic_is_passed_on() {
        let workers = Workers::new(2).unwrap();
        let failed = workers.in_order(
            0..1000,
            |n| n,
            |n| if n == 40 { Err(io::Error::from(io::ErrorKind::InvalidData)) } else { Ok(()) },
        );
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::InvalidData);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            workers.in_order(0..100, |n| assert!(n != 50, "as it should"), |()| io::Result::Ok(()))
        }));
        assert!(panicked.is_err());
        assert_eq!(*workers.free.lock().unwrap(), LEAST_IN_FLIGHT);
        workers.in_order(0..100, |n| n, |_| io::Result::Ok(())).unwrap();
    }
}
