//! Looks out for a program's next call, instead of sleeping until the kernel wakes a thread.
//!
//! A program that reads or writes piece by piece waits for each answer, and its next message comes microseconds later.
//! To wake a thread on another core takes as long as all else together, with the message, a small write and the answer.
//! So after an answer to such a program one thread looks for the next message. On a core that somebody else wants it
//! yields between two looks.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Messages that come so soon after the last answer are worth a look: a wake-up takes 5 to 15 us.
const SOON: Duration = Duration::from_micros(50);
/// One look-out. A program that computes meanwhile is awaited once, and then found not to come soon.
const LOOK: Duration = Duration::from_micros(30);
/// After several messages at once all threads wait in the kernel for so long: each of them is needed.
const CROWDED: Duration = Duration::from_millis(10);
/// While one thread looks out, the others rest so long. A thread that waits in the kernel would be woken for nothing.
const REST: Duration = Duration::from_micros(200);

/// What the threads that answer the kernel know of its next message.
pub(super) struct Attention {
    /// The connection to the kernel. Unset where nothing is mounted (tests).
    connection: OnceLock<OwnedFd>,
    began: Instant,
    /// Nanoseconds from `began` to the last answer, and to the end of the last crowd.
    answered: AtomicU64,
    crowded: AtomicU64,
    /// Nanoseconds from `began` to the end of a thread's look-out. One that gets no processor then counts no longer.
    watched: AtomicU64,
    /// Held by threads while they rest; no other lock is taken under it.
    resting: Mutex<()>,
    called: Condvar,
}

impl Attention {
    pub(super) fn new() -> Self {
        Self {
            connection: OnceLock::new(),
            began: Instant::now(),
            answered: AtomicU64::new(0),
            crowded: AtomicU64::new(0),
            watched: AtomicU64::new(0),
            resting: Mutex::default(),
            called: Condvar::new(),
        }
    }

    /// Looks out for messages of this connection from now on.
    pub(super) fn connect(&self, connection: BorrowedFd<'_>) -> std::io::Result<()> {
        let _ = self.connection.set(connection.try_clone_to_owned()?);
        Ok(())
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// Answers a message that a program waits for, and looks out for the next one if this one came soon.
    pub(super) fn answer(&self, answer: impl FnOnce()) {
        let came_soon = self.now().saturating_sub(self.answered.load(Ordering::Relaxed)) < SOON.as_nanos() as u64;
        answer();
        let Some(connection) = self.connection.get() else { return };
        let answered = self.now();
        self.answered.store(answered, Ordering::Relaxed);
        if !came_soon || answered < self.crowded.load(Ordering::Relaxed) {
            return;
        }
        if has_message(connection) {
            self.crowded.store(answered + CROWDED.as_nanos() as u64, Ordering::Relaxed);
            self.called.notify_all();
        } else if answered < self.watched.load(Ordering::Relaxed) {
            let resting = self.resting.lock().unwrap_or_else(PoisonError::into_inner);
            drop(self.called.wait_timeout(resting, REST));
        } else {
            let end = answered + LOOK.as_nanos() as u64;
            self.watched.store(end, Ordering::Relaxed);
            while !has_message(connection) && self.now() < end {
                std::thread::yield_now();
            }
            self.watched.store(0, Ordering::Relaxed);
        }
    }
}

/// Whether a message waits, or the connection has ended.
fn has_message(connection: &OwnedFd) -> bool {
    let mut of = libc::pollfd { fd: connection.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: it fills in one structure, and does not wait.
    unsafe { libc::poll(&raw mut of, 1, 0) != 0 }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn one_thread_looks_out_for_a_program_whose_messages_come_soon() {
        let attention = Attention::new();
        let (reader, mut writer) = std::io::pipe().unwrap();
        attention.connect(reader.as_fd()).unwrap();
        let answer = |after: Duration| {
            let mut looked = false;
            for _ in 0..1000 {
                std::thread::sleep(after);
                let began = Instant::now();
                attention.answer(|| {});
                looked |= began.elapsed() >= LOOK;
            }
            looked
        };
        assert!(answer(Duration::ZERO), "the next message was not awaited");
        // Another thread looks out: this one rests, and is called if there is more to do.
        attention.watched.store(u64::MAX, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let rests = scope.spawn(|| (0..3).for_each(|_| attention.answer(|| {})));
            writer.write_all(b"message").unwrap();
            while !rests.is_finished() {
                attention.answer(|| {});
            }
        });
        assert!(attention.now() < attention.crowded.load(Ordering::Relaxed) + CROWDED.as_nanos() as u64);
        // Several messages at once: no thread looks out or rests.
        attention.crowded.store(u64::MAX, Ordering::Relaxed);
        let began = Instant::now();
        (0..10_000).for_each(|_| attention.answer(|| {}));
        assert!(began.elapsed() < LOOK * 10_000 / 2);
    }
}
