//! Finds out whether a failed fsync lost data.
//!
//! The kernel reports EIO at fsync for two reasons. Either a page could not be written, and bytes are lost. Or a direct
//! and a buffered write met: the kernel could not drop the buffered page, wrote it later, and notes EIO all the same
//! (`dio_warn_stale_pagecache`). Only the first case is also noted for the file system, where syncfs reports it
//! (`mapping_set_error`, since Linux 5.8). This module asks syncfs. It was tested on ext4, with errors of both kinds.
//! Other file systems are not tested, so their EIO remains an error.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{AtFlags, StatxFlags};

use super::{CrashPoint, DeviceFile};
use crate::clock;
use crate::store::beneath;

/// Bytes read and compared at once.
const PIECE: usize = 1 << 20;
/// If a device needs a larger alignment for direct reads, there is no evidence.
const ALIGNED: usize = 4096;

/// How a file became durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Synced {
    /// fsync succeeded.
    Told,
    /// fsync reported EIO first, because direct and buffered writes met. No page write failed, and every byte was read
    /// back from the device.
    Proven,
}

/// Detects every failed write on a store's file system from its creation on.
#[derive(Debug)]
pub struct Witness {
    /// syncfs on it reports each failure once. `None` on an untested file system.
    directory: Option<File>,
    /// Time of creation in nanoseconds since 1970, by the clock that stamps files.
    since: i64,
    /// True if syncfs reported a failure. The affected file is unknown.
    failed: AtomicBool,
    /// Files whose fsync error went to a program, by device and inode number, with the error. The kernel reports it to
    /// nobody else. The lock is held only briefly.
    told: Mutex<HashMap<(u64, u64), i32>>,
}

fn place(file: &File) -> io::Result<(u64, u64)> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

impl Witness {
    /// A witness for the file system of a directory.
    pub fn new(directory: &Path) -> io::Result<Witness> {
        let directory = File::open(directory)?;
        let tried = rustix::fs::fstatfs(&directory)?.f_type == libc::EXT4_SUPER_MAGIC;
        // After the descriptor was opened: the witness sees all failures of files that are younger than this.
        let since = clock::stamp_ns();
        let directory = tried.then_some(directory);
        Ok(Witness { directory, since, failed: AtomicBool::new(false), told: Mutex::default() })
    }

    fn told(&self) -> MutexGuard<'_, HashMap<(u64, u64), i32>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a program's own fsync of a file failed. The program may ignore that, so the next [`Witness::sync`]
    /// fails too.
    pub fn was_told(&self, file: &File, error: &io::Error) {
        if let Ok(place) = place(file) {
            self.told().insert(place, error.raw_os_error().unwrap_or(libc::EIO));
        }
    }

    /// Makes a file's bytes and attributes durable. Nobody may write to it meanwhile: an error during the call counts.
    pub fn sync(&self, file: &DeviceFile, at: CrashPoint) -> io::Result<Synced> {
        let told = place(file.as_file()).ok().and_then(|place| self.told().remove(&place));
        let noted = noted(file.as_file()).and(told.map_or(Ok(()), |code| Err(io::Error::from_raw_os_error(code))));
        // Always sync: the noted error says nothing about the journal or the device's cache.
        file.sync(at)?;
        let Err(error) = noted else { return Ok(Synced::Told) };
        if error.raw_os_error() != Some(libc::EIO) || !self.is_proven(file.as_file()).unwrap_or(false) {
            return Err(error);
        }
        // The device may have answered from its own cache.
        file.sync(at)?;
        Ok(Synced::Proven)
    }

    /// True if no write of the file failed and the device returns the file's bytes.
    fn is_proven(&self, file: &File) -> io::Result<bool> {
        // Another process may have received errors from before this process opened its descriptor.
        Ok(self.saw_it_made(file)? && self.saw_no_failure() && is_on_the_device(file)?)
    }

    /// True if the file is younger than the witness. Relies on the clock: if it was set back meanwhile, the answer may
    /// be wrong.
    fn saw_it_made(&self, file: &File) -> io::Result<bool> {
        let since = UNIX_EPOCH + Duration::from_nanos(u64::try_from(self.since).unwrap_or(u64::MAX));
        Ok(file.metadata()?.created()? >= since)
    }

    /// Writes out the whole file system, which takes time.
    fn saw_no_failure(&self) -> bool {
        let Some(directory) = &self.directory else { return false };
        if rustix::fs::syncfs(directory).is_err() {
            self.failed.store(true, Ordering::Relaxed);
        }
        !self.failed.load(Ordering::Relaxed)
    }
}

/// The error that the kernel has noted for the file's pages and not reported yet. Neither writes nor flushes anything.
fn noted(file: &File) -> io::Result<()> {
    // SAFETY: no memory is passed; the descriptor is open for as long as `file` is borrowed.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WAIT_BEFORE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// True if direct reads of the file come from the device. Without support they may come from its pages.
fn reads_directly(file: &File) -> io::Result<bool> {
    let asked = StatxFlags::DIOALIGN;
    let answer = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, asked)?;
    let fits = |align: u32| (1..=ALIGNED).contains(&(align as usize));
    Ok(answer.stx_mask & asked.bits() != 0 && fits(answer.stx_dio_mem_align) && fits(answer.stx_dio_offset_align))
}

/// True if the device holds the same bytes of a file that programs read.
fn is_on_the_device(file: &File) -> io::Result<bool> {
    if !reads_directly(file)? {
        return Ok(false);
    }
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(beneath::by_descriptor(file))?;
    have_the_same_bytes(file, &direct)
}

/// `direct` may be open for direct reads.
fn have_the_same_bytes(file: &File, direct: &File) -> io::Result<bool> {
    let (mut pages, mut room) = (vec![0; PIECE], vec![0; PIECE + ALIGNED]);
    let start = room.as_ptr().align_offset(ALIGNED);
    let device = &mut room[start..start + PIECE];
    let mut offset = 0;
    loop {
        let (shown, stored) = (read_full(file, &mut pages, offset)?, read_full(direct, device, offset)?);
        if shown != stored || pages[..shown] != device[..stored] {
            return Ok(false);
        }
        if shown < PIECE {
            return Ok(true);
        }
        offset += PIECE as u64;
    }
}

/// Reads until `buf` is full or the file ends. A short direct read has reached the end; another one would not be
/// aligned.
fn read_full(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() && done.is_multiple_of(ALIGNED) {
        match file.read_at(&mut buf[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_compared_to_the_last() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: &[u8]| {
            std::fs::write(dir.path().join(name), bytes).unwrap();
            File::open(dir.path().join(name)).unwrap()
        };
        for len in [0, 1, ALIGNED, PIECE, PIECE + 4097] {
            let bytes = vec![7; len];
            let (a, b) = (file("a", &bytes), file("b", &bytes));
            assert!(have_the_same_bytes(&a, &b).unwrap(), "{len}");
            a.sync_all().unwrap();
            assert!(is_on_the_device(&a).unwrap(), "{len}: these tests need a temporary directory with direct reads");
            if let Some(last) = len.checked_sub(1) {
                let mut other = bytes.clone();
                other[last] = 8;
                assert!(!have_the_same_bytes(&a, &file("b", &other)).unwrap(), "{len}");
                assert!(!have_the_same_bytes(&a, &file("b", &bytes[..last])).unwrap(), "{len}");
            }
        }
    }

    #[test]
    fn it_speaks_for_what_it_saw_made() {
        let dir = tempfile::tempdir().unwrap();
        let made = |name: &str| {
            std::fs::write(dir.path().join(name), name).unwrap();
            File::open(dir.path().join(name)).unwrap()
        };
        let older = made("older");
        std::thread::sleep(Duration::from_millis(30));
        let witness = Witness::new(dir.path()).unwrap();
        let younger = made("younger");
        assert!(witness.is_proven(&younger).unwrap());
        assert!(!witness.is_proven(&older).unwrap());
        witness.failed.store(true, Ordering::Relaxed);
        assert!(!witness.is_proven(&younger).unwrap());
    }
}
