//! A correct program: every access is under the lock. If a sanitizer reports it, the sanitizer misses locks
//! (scripts/sanitize.sh).

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

fn main() {
    let counts = Arc::new(Mutex::new(vec![0u64; 10]));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let counts = Arc::clone(&counts);
            thread::spawn(move || {
                for i in 0..2000 {
                    let mut counts = counts.lock().unwrap();
                    counts[i % 10] += 1;
                    if i % 100 == 0 {
                        // The other threads have to wait for the lock.
                        thread::sleep(Duration::from_micros(200));
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(counts.lock().unwrap()[0], 800);
}
