//! Processor time: what work costs a core, whatever else the machine does meanwhile.

use std::time::Duration;

/// Of the calling thread, so far.
pub(super) fn of_thread() -> Duration {
    read(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Of all threads of this process together, so far.
pub(super) fn of_process() -> Duration {
    read(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn read(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of ours, and the call writes nothing else.
    let status = unsafe { libc::clock_gettime(clock, &mut time) };
    // Linux has both clocks since 2.6; were there none, speeds would be shown as infinite and nothing else be wrong.
    if status == 0 { Duration::new(time.tv_sec as u64, time.tv_nsec as u32) } else { Duration::ZERO }
}

/// Runs something and adds the thread's time for it to a sum.
pub(super) fn timed<T>(sum: &mut Duration, work: impl FnOnce() -> T) -> T {
    let start = of_thread();
    let result = work();
    *sum += of_thread().saturating_sub(start);
    result
}
