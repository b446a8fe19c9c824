//! Processor time, and the time of each stage of the archive.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Mutex, PoisonError};

use stepfs::encode::STAGES;

/// Processor time of this thread so far, in seconds.
pub(crate) fn processor_time() -> f64 {
    time_of(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Time of a clock, in seconds; 0 if its thread has ended.
fn time_of(clock: libc::clockid_t) -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of ours, and the call writes nothing else.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Processor time: of this thread and the archive's thread for tiles, then of the whole process. The process also hashes
/// the file as it was written.
fn times() -> [f64; 2] {
    let mut tiles = 0.0;
    for task in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let is_of_tiles = fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("archive-"));
        let id = task.file_name().to_str().and_then(|id| id.parse::<libc::pid_t>().ok());
        if let Some(id) = id.filter(|_| is_of_tiles) {
            // Linux numbers the clocks of threads like this: the inverted id, then "per thread" and "scheduler's".
            tiles += time_of(!id << 3 | 6);
        }
    }
    [processor_time() + tiles, time_of(libc::CLOCK_PROCESS_CPUTIME_ID)]
}

/// The seconds of each stage of a file, and those of the whole process for it.
#[derive(Clone, Default)]
pub(crate) struct Times {
    pub(crate) stages: BTreeMap<String, f64>,
    pub(crate) process: f64,
}

/// Takes the time whenever the archive notes that a stage ended. The thread that writes the object notes it; the one
/// for tiles may be a few tiles ahead.
pub(crate) struct Clock {
    noted: Mutex<Noted>,
}

/// When the last stage ended, and the files so far.
struct Noted {
    last: [f64; 2],
    files: Vec<Times>,
}

pub(crate) static CLOCK: Clock = Clock { noted: Mutex::new(Noted { last: [0.0; 2], files: Vec::new() }) };

impl Clock {
    /// The times of each file so far.
    pub(crate) fn files(&self) -> Vec<Times> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner).files.clone()
    }
}

impl log::Log for Clock {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.target() == STAGES || metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record) {
        if record.target() != STAGES {
            if record.level() <= log::Level::Warn {
                eprintln!("{}", record.args());
            }
            return;
        }
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, stage) = (times(), record.args().to_string());
        if stage == "begin" {
            noted.files.push(Times::default());
        } else {
            let spent = [now[0] - noted.last[0], now[1] - noted.last[1]];
            if let Some(file) = noted.files.last_mut() {
                *file.stages.entry(stage).or_default() += spent[0];
                file.process += spent[1];
            }
        }
        noted.last = times();
    }

    fn flush(&self) {}
}
