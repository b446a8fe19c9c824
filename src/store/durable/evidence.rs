//! Whether an fsync that failed lost anything.
//!
//! The kernel reports EIO at fsync for two reasons. A page could not be written: then bytes are lost. Or a direct and a
//! buffered write met: the kernel could not drop the buffered page, wrote it later, and notes EIO all the same
//! (`dio_warn_stale_pagecache`). Only the first of them is also noted for the file system, where syncfs reports it
//! (`mapping_set_error`, since Linux 5.8). That is what is asked here. It was tried on ext4, with errors of both kinds. What
//! other file systems note was not tried, so their EIO stays one.

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

/// Read and compared at once.
const PIECE: usize = 1 << 20;
/// Direct reads of some devices want more than this; then there is no evidence.
const ALIGNED: usize = 4096;

/// How a file became durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Synced {
    /// fsync said so.
    Told,
    /// fsync reported EIO first, for direct and buffered writes that met. No page failed to be written, and every byte was
    /// read from the device.
    Proven,
}

/// Sees every write that fails on a store's file system from the moment it is made.
#[derive(Debug)]
pub struct Witness {
    /// Reports once what failed since it was opened; none on a file system that was not tried.
    directory: Option<File>,
    /// Nanoseconds since 1970 at that moment, by the clock that stamps files.
    since: i64,
    /// It has reported something. Whose bytes those were is not known.
    failed: AtomicBool,
    /// Device and inode number of files of which a program was told that its fsync failed, and with what: the kernel tells
    /// nobody else. Taken for moments.
    told: Mutex<HashMap<(u64, u64), i32>>,
}

fn place(file: &File) -> io::Result<(u64, u64)> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

impl Witness {
    /// For the file system of a directory.
    ///
    /// # Errors
    /// What the device reports.
    pub fn new(directory: &Path) -> io::Result<Witness> {
        let directory = File::open(directory)?;
        let tried = rustix::fs::fstatfs(&directory)?.f_type == libc::EXT4_SUPER_MAGIC;
        // After the descriptor was opened: what is younger than this was written before its eyes.
        let since = clock::stamp_ns();
        let directory = tried.then_some(directory);
        Ok(Witness { directory, since, failed: AtomicBool::new(false), told: Mutex::default() })
    }

    fn told(&self) -> MutexGuard<'_, HashMap<(u64, u64), i32>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A program's own fsync of a file failed. What it makes of that is not known, so the next [`Witness::sync`] fails, too.
    pub fn was_told(&self, file: &File, error: &io::Error) {
        if let Ok(place) = place(file) {
            self.told().insert(place, error.raw_os_error().unwrap_or(libc::EIO));
        }
    }

    /// Makes a file's bytes and attributes durable. Nobody may write to it meanwhile: an error then is one.
    ///
    /// # Errors
    /// As of [`super::Io::sync_file`].
    pub fn sync(&self, file: &DeviceFile, at: CrashPoint) -> io::Result<Synced> {
        let told = place(file.as_file()).ok().and_then(|place| self.told().remove(&place));
        let noted = noted(file.as_file()).and(told.map_or(Ok(()), |code| Err(io::Error::from_raw_os_error(code))));
        // Always: what is noted says nothing of the journal, nor of the device's own cache.
        file.sync(at)?;
        let Err(error) = noted else { return Ok(Synced::Told) };
        if error.raw_os_error() != Some(libc::EIO) || !self.is_proven(file.as_file()).unwrap_or(false) {
            return Err(error);
        }
        // What the device answered may have come from its own cache.
        file.sync(at)?;
        Ok(Synced::Proven)
    }

    /// That no write of the file failed, and that the device has what is read of it.
    fn is_proven(&self, file: &File) -> io::Result<bool> {
        // What failed before this process looked may have been reported to another one.
        Ok(self.saw_it_made(file)? && self.saw_no_failure() && is_on_the_device(file)?)
    }

    /// Whether the file is younger than the witness. It goes by the clock: one that was set back meanwhile may be wrong.
    fn saw_it_made(&self, file: &File) -> io::Result<bool> {
        let since = UNIX_EPOCH + Duration::from_nanos(u64::try_from(self.since).unwrap_or(u64::MAX));
        Ok(file.metadata()?.created()? >= since)
    }

    /// Writes out everything on the file system, which takes its time.
    fn saw_no_failure(&self) -> bool {
        let Some(directory) = &self.directory else { return false };
        if rustix::fs::syncfs(directory).is_err() {
            self.failed.store(true, Ordering::Relaxed);
        }
        !self.failed.load(Ordering::Relaxed)
    }
}

/// The error that is noted for the file's pages and was reported to nobody yet. Neither writes nor flushes anything.
fn noted(file: &File) -> io::Result<()> {
    // SAFETY: no memory is passed; the descriptor is open for as long as `file` is borrowed.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WAIT_BEFORE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether direct reads of the file come from the device. Where it has no such reads they may come from its pages.
fn reads_directly(file: &File) -> io::Result<bool> {
    let asked = StatxFlags::DIOALIGN;
    let answer = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, asked)?;
    let fits = |align: u32| (1..=ALIGNED).contains(&(align as usize));
    Ok(answer.stx_mask & asked.bits() != 0 && fits(answer.stx_dio_mem_align) && fits(answer.stx_dio_offset_align))
}

/// Whether all bytes of a file are on the device as programs read them.
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

/// Reads until `buf` is full or the file ends. A direct read that is short has met the end: no other would be aligned.
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
