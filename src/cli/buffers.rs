//! Frees the daemon's unused buffers. The daemon keeps buffers for the next tile; a thread here frees them when idle.
//! `src/main.rs` sets how long the allocator itself keeps memory.

use std::time::Duration;

/// How often idle buffers go back to the allocator.
const INTERVAL: Duration = Duration::from_secs(60);

/// Call it once.
pub(super) fn keep_few() {
    let give_back = || {
        loop {
            std::thread::sleep(INTERVAL);
            crate::entropy::scratch::let_go();
        }
    };
    // Without the thread the daemon only uses more memory.
    let _ = std::thread::Builder::new().name("buffers".into()).spawn(give_back);
}
