//! The daemon's allocator, which is the system's: kept from holding on to what a burst of work has left.

#[cfg(target_env = "gnu")]
use std::time::Duration;

/// Heaps that it may make for the daemon's threads. By itself glibc makes eight for each core, and what is free in one is of
/// no use to the others: with the load of `scripts/soak.sh` on two cores that came to 45 MB after five minutes, and grew. A
/// thread takes large pieces from its heap, and seldom, so that two do not wait for each other.
#[cfg(target_env = "gnu")]
const HEAPS: libc::c_int = 2;
/// Pieces of this size and more are mapped one by one, and go back to the system one by one. By itself glibc raises the size, up to
/// 32 MiB, with every larger one that is freed. Larger than what each tile and each read need anew: with 128 KiB reading takes
/// half as much processor time again.
#[cfg(target_env = "gnu")]
const MAPPED: libc::c_int = 4 << 20;
/// What may be free at the end of a heap until the next round. Giving it back each time costs a tenth of what archiving takes.
#[cfg(target_env = "gnu")]
const KEPT: libc::c_int = 64 << 20;
/// How often what is free goes back to the system. By itself it stays where anything above it lives, so that a daemon is as large as it
/// ever was.
#[cfg(target_env = "gnu")]
const INTERVAL: Duration = Duration::from_secs(60);

/// To be called before there are threads.
#[cfg(target_env = "gnu")]
pub(super) fn keep_small() {
    // SAFETY: sets numbers in the allocator; it fails harmlessly.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, HEAPS);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
    }
    let give_back = || {
        loop {
            std::thread::sleep(INTERVAL);
            crate::entropy::scratch::let_go();
            crate::codec::published::let_go();
            // SAFETY: no memory that is in use is touched; the allocator locks its heaps itself.
            unsafe {
                libc::malloc_trim(0);
            }
        }
    };
    // Without the thread the daemon is larger, nothing else.
    let _ = std::thread::Builder::new().name("allocator".into()).spawn(give_back);
}

/// Other allocators have ways of their own.
#[cfg(not(target_env = "gnu"))]
pub(super) fn keep_small() {}
