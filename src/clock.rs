//! The kernel's clocks, each with its use.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds since 1970, now.
pub(crate) fn wall_ns() -> i64 {
    nanoseconds(read(ClockId::Realtime))
}

/// Nanoseconds since 1970 of the last tick of the kernel's clock, which it stamps files with. No file that changes
/// after this call is older. On a virtual machine that waits for its host, the tick may lie any time back.
pub(crate) fn stamp_ns() -> i64 {
    nanoseconds(read(ClockId::RealtimeCoarse))
}

/// Processor time of the calling thread so far. It measures the cost of work on a core, independent of other load.
pub fn of_thread() -> Duration {
    read(ClockId::ThreadCPUTime)
}

/// Processor time of all threads of this process so far.
pub fn of_process() -> Duration {
    read(ClockId::ProcessCPUTime)
}

/// Runs `work` and adds its processor time to a sum.
pub fn timed<T>(sum: &mut Duration, work: impl FnOnce() -> T) -> T {
    let start = of_thread();
    let result = work();
    *sum += of_thread().saturating_sub(start);
    result
}

/// Before 1970 all times would be equal.
fn read(clock: ClockId) -> Duration {
    clock_gettime(clock).try_into().unwrap_or(Duration::ZERO)
}

fn nanoseconds(since: Duration) -> i64 {
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    /// A new file is never older than the stamp, but often older than the wall clock.
    #[test]
    fn a_file_is_not_older_than_the_stamp_before_it() {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..200 {
            let before = super::stamp_ns();
            let made = std::fs::File::create(dir.path().join(i.to_string())).unwrap().metadata().unwrap();
            let made_ns = made.mtime() * 1_000_000_000 + made.mtime_nsec();
            assert!(before <= made_ns && made_ns <= super::wall_ns(), "{before} {made_ns}");
        }
    }
}
