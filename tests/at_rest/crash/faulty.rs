//! A device that fails at the n-th call, once or until it is healed.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use stepfs::store::durable::{Attribute, CrashPoint, Device, Disk};

/// The kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The call fails with this errno.
    Errno(i32),
    /// Writes and reads do a part of the request, other calls are interrupted.
    Short,
    /// Calls that make data durable fail with this errno; all others work.
    Sync(i32),
}

#[derive(Debug)]
pub(crate) struct Faulty {
    fault: Fault,
    /// The first failing call.
    at: usize,
    /// It lasts until the device is healed.
    lasts: bool,
    calls: AtomicUsize,
    healed: AtomicBool,
    /// Calls that failed.
    failed: Mutex<Vec<String>>,
}

/// The outcome of a call.
enum Answer {
    Do,
    DoPart,
}

impl Faulty {
    pub(crate) fn new(fault: Fault, at: usize, lasts: bool) -> Faulty {
        let (calls, healed) = (AtomicUsize::new(0), AtomicBool::new(false));
        Faulty { fault, at, lasts, calls, healed, failed: Mutex::default() }
    }

    pub(crate) fn heal(&self) {
        self.healed.store(true, Ordering::SeqCst);
    }

    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    pub(crate) fn failed(&self) -> Vec<String> {
        self.failed.lock().unwrap().clone()
    }

    fn ask(&self, what: &str, at: Option<CrashPoint>) -> io::Result<Answer> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        let (is_sync, is_bytes) = (what.starts_with("sync"), what.ends_with("_at"));
        let hit = call == self.at || self.lasts && call > self.at;
        if !hit || self.healed.load(Ordering::SeqCst) {
            return Ok(Answer::Do);
        }
        let errno = match self.fault {
            Fault::Errno(errno) => errno,
            Fault::Sync(errno) if is_sync => errno,
            Fault::Short if is_bytes => return Ok(Answer::DoPart),
            // A call that is interrupted for ever would never end.
            Fault::Short if call == self.at && (is_sync || what == "open") => libc::EINTR,
            Fault::Sync(_) | Fault::Short => return Ok(Answer::Do),
        };
        self.failed.lock().unwrap().push(at.map_or(what.to_string(), |at| format!("{at:?}/{what}")));
        Err(io::Error::from_raw_os_error(errno))
    }
}

fn part<T>(answer: &Answer, bytes: usize, with: impl FnOnce(usize) -> T) -> T {
    with(match answer {
        Answer::Do => bytes,
        Answer::DoPart => bytes.div_ceil(3),
    })
}

impl Device for Faulty {
    fn create(&self, path: &Path, at: CrashPoint) -> io::Result<File> {
        self.ask("create", Some(at))?;
        Disk.create(path, at)
    }

    fn open(&self, path: &Path, flags: i32) -> io::Result<File> {
        self.ask("open", None)?;
        Disk.open(path, flags)
    }

    fn read_at(&self, file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let answer = self.ask("read_at", None)?;
        part(&answer, buf.len(), |len| Disk.read_at(file, &mut buf[..len], offset))
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64, at: CrashPoint) -> io::Result<usize> {
        let answer = self.ask("write_at", Some(at))?;
        part(&answer, bytes.len(), |len| Disk.write_at(file, &bytes[..len], offset, at))
    }

    fn set_len(&self, file: &File, len: u64, at: CrashPoint) -> io::Result<()> {
        self.ask("set_len", Some(at))?;
        Disk.set_len(file, len, at)
    }

    fn set_attribute(&self, file: &File, attribute: &Attribute<'_>, at: CrashPoint) -> io::Result<()> {
        self.ask("set_attribute", Some(at))?;
        Disk.set_attribute(file, attribute, at)
    }

    fn sync_file(&self, _: &File, at: CrashPoint) -> io::Result<()> {
        self.ask("sync_file", Some(at)).map(|_| ())
    }

    fn sync_dir(&self, _: &Path, at: CrashPoint) -> io::Result<()> {
        self.ask("sync_dir", Some(at)).map(|_| ())
    }

    fn sync_all(&self, _: &Path, at: CrashPoint) -> io::Result<()> {
        self.ask("sync_all", Some(at)).map(|_| ())
    }

    fn rename(&self, from: &Path, to: &Path, at: CrashPoint) -> io::Result<()> {
        self.ask("rename", Some(at))?;
        Disk.rename(from, to, at)
    }

    fn link(&self, from: &Path, to: &Path, at: CrashPoint) -> io::Result<()> {
        self.ask("link", Some(at))?;
        Disk.link(from, to, at)
    }

    fn remove_file(&self, path: &Path, at: CrashPoint) -> io::Result<()> {
        self.ask("remove_file", Some(at))?;
        Disk.remove_file(path, at)
    }

    fn remove_dir(&self, path: &Path, at: CrashPoint) -> io::Result<()> {
        self.ask("remove_dir", Some(at))?;
        Disk.remove_dir(path, at)
    }

    fn make_dir(&self, path: &Path, mode: u32, at: CrashPoint) -> io::Result<()> {
        self.ask("make_dir", Some(at))?;
        Disk.make_dir(path, mode, at)
    }
}
