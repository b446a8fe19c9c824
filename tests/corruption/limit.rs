//! No damage may make stepfs ask for memory without limit: this whole program has a limit.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The limits of all tests together, and of one request. Files here are below 200 KB, and tests with a thread for each
/// processor run side by side. An index may claim a length of up to 1 GiB, but never more than its object.
const MOST: usize = 1 << 30;
const MOST_AT_ONCE: usize = 64 << 20;

struct Limited;

static HELD: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator as it is, or refused with a null pointer, which the
// contract of `GlobalAlloc` allows.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed);
        if layout.size() > MOST_AT_ONCE || held > MOST {
            HELD.fetch_sub(layout.size(), Ordering::Relaxed);
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `at` came from `alloc` above, so from the system's allocator, with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static LIMITED: Limited = Limited;
