//! The daemon's buffers: kept for the next tile, and let go when nobody has taken them for a while. What the allocator itself keeps is
//! said where it is chosen, in `src/main.rs`.

use std::time::Duration;

/// How often buffers that nobody took go back to the allocator.
const INTERVAL: Duration = Duration::from_secs(60);

/// To be called once.
pub(super) fn keep_few() {
    let give_back = || {
        loop {
            std::thread::sleep(INTERVAL);
            crate::entropy::scratch::let_go();
            crate::published::let_go();
        }
    };
    // Without the thread the daemon is larger, nothing else.
    let _ = std::thread::Builder::new().name("buffers".into()).spawn(give_back);
}
