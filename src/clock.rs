//! The kernel's clocks, each with its use.

use std::sync::{Mutex, PoisonError};
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

/// The parts of a time in seconds since 1970, in this machine's time zone.
pub(crate) fn local(seconds: i64) -> libc::tm {
    // SAFETY: all fields of `tm` are numbers or a pointer, for which zeros are valid.
    let mut tm: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are valid for the call.
    unsafe { libc::localtime_r(&seconds, &mut tm) };
    tm
}

/// A leap of the clock by more than this is no correction. A machine that slept has none: its other clock goes on meanwhile.
const LEAP_NS: i64 = 3600 * SECOND_NS;
/// How long ages do not believe a leap forward. Meanwhile somebody may read of it in the status, and set the clock.
const DOUBT_NS: i64 = 24 * 3600 * SECOND_NS;
const SECOND_NS: i64 = 1_000_000_000;

/// The wall clock and how far it leapt forward. By a wrong clock everything looks old, and must not be removed for that.
#[derive(Clone, Copy, Debug, Default)]
struct Leaps {
    /// The wall clock and the one since the boot at the last look.
    last: Option<(i64, i64)>,
    /// The leaps that are not believed, and until when.
    doubted_ns: i64,
    until_boot_ns: i64,
}

impl Leaps {
    /// The time to count ages by.
    fn look(&mut self, wall_ns: i64, boot_ns: i64) -> i64 {
        if let Some((wall, boot)) = self.last.replace((wall_ns, boot_ns)) {
            let leap = (wall_ns.saturating_sub(wall)).saturating_sub(boot_ns - boot);
            if leap.saturating_abs() > LEAP_NS {
                self.doubted_ns = self.doubted_ns.saturating_add(leap).max(0);
                self.until_boot_ns = boot_ns.saturating_add(DOUBT_NS);
            }
        }
        if boot_ns >= self.until_boot_ns {
            self.doubted_ns = 0;
        }
        wall_ns.saturating_sub(self.doubted_ns)
    }
}

/// Taken for moments, last of all locks.
static LEAPS: Mutex<Leaps> = Mutex::new(Leaps { last: None, doubted_ns: 0, until_boot_ns: 0 });

/// Nanoseconds since 1970 by which to find out what is old enough to be removed. After a leap forward of the wall clock, the
/// time before the leap goes on for a day. The first call of a process begins to watch the clock.
pub(crate) fn age_ns() -> i64 {
    let (wall, boot) = (wall_ns(), nanoseconds(read(ClockId::Boottime)));
    LEAPS.lock().unwrap_or_else(PoisonError::into_inner).look(wall, boot)
}

/// Whether a file with this time comes from a clock that was ahead, by more than machines differ.
pub(crate) fn is_future(modified_ns: i64) -> bool {
    modified_ns > wall_ns().saturating_add(300 * SECOND_NS)
}

/// How far ages lag behind the wall clock.
pub(crate) fn doubted() -> Duration {
    let lag = wall_ns().saturating_sub(age_ns());
    if lag > LEAP_NS { Duration::from_nanos(lag.unsigned_abs()) } else { Duration::ZERO }
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

    /// Only by hours: the clock is corrected all the time.
    #[test]
    fn a_leap_of_the_clock_makes_nothing_old_for_a_day() {
        const HOUR: i64 = super::LEAP_NS;
        const YEAR: i64 = 365 * 24 * HOUR;
        let (mut leaps, now) = (super::Leaps::default(), 50 * YEAR);
        assert_eq!(leaps.look(now, 0), now);
        assert_eq!(leaps.look(now + HOUR, HOUR), now + HOUR);
        assert_eq!(leaps.look(now + 2 * HOUR + HOUR / 2, 2 * HOUR), now + 2 * HOUR + HOUR / 2, "a correction");
        let leapt = leaps;
        assert_eq!(leaps.look(now + YEAR + 3 * HOUR, 3 * HOUR), now + 3 * HOUR + HOUR / 2, "a leap");
        assert_eq!(leaps.look(now + YEAR + 26 * HOUR, 26 * HOUR), now + 26 * HOUR + HOUR / 2);
        let mut set = leaps;
        assert_eq!(leaps.look(now + YEAR + 27 * HOUR, 27 * HOUR), now + YEAR + 27 * HOUR, "nobody set it: it is right");
        assert_eq!(set.look(now + 27 * HOUR, 27 * HOUR), now + 27 * HOUR, "it was set");
        let mut back = leapt;
        assert_eq!(back.look(now - 5 * HOUR, 3 * HOUR), now - 5 * HOUR, "a leap back makes nothing older");
        assert_eq!(back.look(now - 4 * HOUR, 4 * HOUR), now - 4 * HOUR);
    }

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
