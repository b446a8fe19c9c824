//! The hash of a file as it was written, by which other programs know it: SHA-256, made beside the encoding by a
//! thread of its own.
//!
//! A pass before or after the encoding would cost its time. This thread takes the time that the encoder's threads
//! spend waiting for each other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};

use codec::hash::Sha256;
use formats::ReadAt;

use super::error::{StepError, StepResult};

/// Read at once: small enough to stay in a core's cache until it is hashed.
const PIECE: usize = 256 << 10;

/// A hash that is being made.
pub(super) enum Pending<'scope> {
    Made([u8; 32]),
    Thread(ScopedJoinHandle<'scope, StepResult<[u8; 32]>>),
}

impl Pending<'_> {
    /// The hash.
    pub(super) fn wait(self) -> StepResult<[u8; 32]> {
        match self {
            Pending::Made(hash) => Ok(hash),
            Pending::Thread(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        }
    }
}

/// Runs `work` while `written` is hashed.
pub(super) fn beside<T>(
    written: &(dyn ReadAt + Sync),
    len: u64,
    cancelled: &(dyn Fn() -> bool + Sync),
    work: impl FnOnce(Pending<'_>) -> StepResult<T>,
) -> StepResult<T> {
    // A test's scheduler knows its own threads only, and `cancelled` takes its locks.
    if cfg!(feature = "shuttle") {
        return work(Pending::Made(hash_of(written, len, cancelled)?));
    }
    let ended = AtomicBool::new(false);
    let stop = || ended.load(Ordering::Relaxed) || cancelled();
    thread::scope(|scope| {
        let hash = || {
            super::yield_to_others();
            hash_of(written, len, &stop)
        };
        let thread = thread::Builder::new().name("original".into()).spawn_scoped(scope, hash)?;
        let done = work(Pending::Thread(thread));
        // The hash is not needed any more if nothing waited for it.
        ended.store(true, Ordering::Relaxed);
        done
    })
}

/// SHA-256 of the first `len` bytes of a file.
///
/// # Errors
/// [`StepError::Cancelled`].
pub(crate) fn hash_of(
    file: &(dyn ReadAt + Sync),
    len: u64,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> StepResult<[u8; 32]> {
    let mut hash = Sha256::default();
    let mut piece = vec![0; PIECE];
    let mut at = 0;
    while at < len {
        if cancelled() {
            return Err(StepError::Cancelled);
        }
        let piece = &mut piece[..(len - at).min(PIECE as u64) as usize];
        file.read_exact_at(piece, at)?;
        hash.update(piece);
        at += piece.len() as u64;
    }
    Ok(hash.digest())
}

#[cfg(test)]
mod tests {
    use super::*;
    use codec::hash::sha256;

    #[test]
    fn a_file_is_hashed_beside_the_work() {
        let bytes: Vec<u8> = (0..3 * PIECE + 5).map(|at| (at * at / 7) as u8).collect();
        let file: &(dyn ReadAt + Sync) = &bytes.as_slice();
        let len = bytes.len() as u64;
        let made = beside(file, len, &|| false, |pending| pending.wait()).unwrap();
        assert_eq!(made, sha256(&bytes));
        let cancelled = beside(file, len, &|| true, |pending| pending.wait()).unwrap_err();
        assert!(matches!(cancelled, StepError::Cancelled));
        // Work that fails does not wait for it.
        let failed = beside(file, len, &|| false, |_| Err::<(), _>(StepError::Superseded));
        assert!(matches!(failed.unwrap_err(), StepError::Superseded));
    }
}
