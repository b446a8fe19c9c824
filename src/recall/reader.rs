//! An open released file: decodes requested bytes once, into a file of the cache, and reads from there.

use std::fs::File;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};

use crate::store::durable::scratch::{self, read_full};
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex};
use formats::Order;

use super::cache::{Decoded, Key};
use super::layout::{Layout, Unit};
use super::stream::{decode_unit, short};
use super::{Chain, ReadError, Recall};

/// Units decoded ahead of a sequential reader. They keep two cores ahead of a copy by the kernel, and cost only 4 MiB
/// if the reader stops.
const AHEAD: usize = 8;

/// The decoded file is the cache's.
const KEPT: usize = 0;
/// It is about to become the file in the tree, or that failed. Nobody knows then whether the device has its bytes.
const SUSPECT: usize = 1;
/// It is the file in the tree, and programs may change it.
const IN_PLACE: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Missing,
    Decoding,
    Present,
}

/// An open released file. It keeps all that it needs alive if names and objects change meanwhile. All handles of a file
/// share one reader, and no other file has it.
#[derive(Debug)]
pub struct Reader {
    recall: Arc<Recall>,
    key: Key,
    chain: Chain,
    layout: Layout,
    /// The order of the rows in its tables; the layout is that of the ordered file.
    order: Order,
    /// Decoded bytes, at their offsets. `None` if the cache has no room; each read decodes then.
    file: Option<Arc<Decoded>>,
    /// What became of the file: [`KEPT`], [`SUSPECT`] or [`IN_PLACE`].
    fate: AtomicUsize,
    /// One per unit. Held to claim or finish a unit, never during decoding.
    progress: Mutex<Vec<Progress>>,
    finished: Condvar,
    missing: AtomicUsize,
    /// The device had no room for the decoded file; each later read decodes.
    no_room: AtomicBool,
    /// End of the last read: a read that begins there is sequential.
    last_end: AtomicU64,
    /// The unit decoded last, if there is no file.
    last_unit: Mutex<Option<(usize, Arc<Vec<u8>>)>>,
    /// For tasks that must not keep the reader alive longer than its handles do.
    me: Weak<Reader>,
}

impl Reader {
    pub(super) fn new(recall: Arc<Recall>, owner: u64, chain: Chain, order: Order) -> Arc<Reader> {
        let layout = Layout::of(chain.leaf());
        let header = chain.leaf().header();
        let key = (header.id, owner);
        let whole = recall.cache.take(&key).filter(|file| file.reaches(header.logical_len));
        let progress = if whole.is_some() { Progress::Present } else { Progress::Missing };
        let missing = if whole.is_some() { 0 } else { layout.units.len() };
        let file = whole.or_else(|| recall.cache.begin(header.logical_len).map(Arc::new));
        Arc::new_cyclic(|me| Reader {
            recall,
            key,
            file,
            fate: AtomicUsize::new(KEPT),
            progress: Mutex::new(vec![progress; layout.units.len()]),
            finished: Condvar::new(),
            missing: AtomicUsize::new(missing),
            no_room: AtomicBool::new(false),
            last_end: AtomicU64::new(0),
            last_unit: Mutex::new(None),
            me: me.clone(),
            chain,
            layout,
            order,
        })
    }

    /// Logical length in bytes.
    pub fn len(&self) -> u64 {
        self.chain.leaf().header().logical_len
    }

    /// True if the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The decoded file, if it is whole: passthrough serves it.
    pub fn whole(&self) -> Option<&Arc<Decoded>> {
        self.decoded().filter(|file| file.reaches(self.len()))
    }

    fn decoded(&self) -> Option<&Arc<Decoded>> {
        self.file.as_ref().filter(|_| self.missing.load(Ordering::Acquire) == 0)
    }

    /// The whole file, to become the one in the tree. False: an earlier attempt has failed and may have lost bytes of it,
    /// so they must be written anew. The kernel may serve readers from it, and takes no other file for them.
    pub fn give(&self) -> Option<(&Decoded, bool)> {
        let decoded = self.decoded()?;
        let is_first = self.fate.swap(SUSPECT, Ordering::Relaxed) == KEPT;
        Some((decoded, is_first && decoded.reaches(self.len())))
    }

    /// The file that was given is the one in the tree. Until then reads decode their bytes, since an attempt that fails may
    /// find that the device has lost some. The cache does not get the file back.
    pub fn is_in_place(&self) {
        self.fate.store(IN_PLACE, Ordering::Relaxed);
    }

    /// The file that holds these bytes at their offset, if all are decoded. Reading them then costs no more than with
    /// any plain file. None also if that was cut short: [`Reader::read_at`] knows by whom.
    pub fn present(&self, offset: u64, len: u64) -> Option<&Arc<Decoded>> {
        let file = self.file.as_ref().filter(|_| self.fate.load(Ordering::Relaxed) != SUSPECT)?;
        let end = self.len().min(offset.saturating_add(len));
        let segments = self.layout.covering(self.order.around(offset..end));
        let progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let present = |segment: &super::layout::Segment| progress[segment.unit] == Progress::Present;
        (self.layout.segments[segments].iter().all(present) && file.reaches(end)).then_some(file)
    }

    /// Reads up to `buf.len()` bytes at `offset`; short only at the end of the file. Decodes missing units, so never
    /// call it on a thread that answers the kernel.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, ReadError> {
        let read = self.read(offset, buf);
        read.inspect_err(|error| self.recall.read_failed(self.chain.leaf().header().id, error))
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<usize, ReadError> {
        let end = self.len().min(offset.saturating_add(buf.len() as u64));
        if offset >= end {
            return Ok(0);
        }
        let buf = &mut buf[..(end - offset) as usize];
        let segments = self.layout.covering(self.order.around(offset..end));
        let is_usable = !self.no_room.load(Ordering::Relaxed) && self.fate.load(Ordering::Relaxed) != SUSPECT;
        let Some(file) = self.file.as_ref().filter(|_| is_usable) else {
            return self.read_uncached(offset, buf);
        };
        let file = file.file();
        // Decode the units of this read in parallel; for a sequential reader also the next ones.
        let ahead = if self.last_end.swap(end, Ordering::Relaxed) == offset { AHEAD } else { 0 };
        self.start(segments.start + 1..segments.end + ahead);
        for segment in &self.layout.segments[segments] {
            if !self.ensure(file, segment.unit)? {
                return self.read_uncached(offset, buf);
            }
        }
        match read_full(file, buf, offset) {
            Ok(len) if len == buf.len() => Ok(len),
            // It is the file in the tree by now, and a program has cut it short.
            Ok(len) if self.fate.load(Ordering::Relaxed) == IN_PLACE => Ok(len),
            // Something is wrong with the cache. That says nothing about the object.
            _ => self.read_uncached(offset, buf),
        }
    }

    /// Returns when a unit's bytes are in the file: decodes them, or waits for another thread. `false` if there is no
    /// room.
    fn ensure(&self, file: &File, unit: usize) -> Result<bool, ReadError> {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match progress[unit] {
                Progress::Present => return Ok(true),
                Progress::Decoding => {
                    progress = self.finished.wait(progress).unwrap_or_else(PoisonError::into_inner);
                }
                Progress::Missing => break,
            }
        }
        progress[unit] = Progress::Decoding;
        drop(progress);
        self.fill(file, unit)
    }

    /// Decodes a unit that this thread has claimed and writes it to its place. `false` if there is no room.
    fn fill(&self, file: &File, unit: usize) -> Result<bool, ReadError> {
        // Whatever happens, including a panic, waiters must find the claim released.
        struct Claim<'a>(&'a Reader, usize, Progress);
        impl Drop for Claim<'_> {
            fn drop(&mut self) {
                let mut progress = self.0.progress.lock().unwrap_or_else(PoisonError::into_inner);
                progress[self.1] = self.2;
                self.0.finished.notify_all();
            }
        }
        let mut claim = Claim(self, unit, Progress::Missing);
        let bytes = self.decode(unit)?;
        for segment in self.segments_of(unit) {
            let len = (segment.range.end - segment.range.start) as usize;
            let run = bytes.get(segment.at..segment.at + len).ok_or_else(|| short(&self.chain))?;
            let written = self.order.runs(segment.range.clone(), |range, place| {
                let from = (range.start - segment.range.start) as usize;
                scratch::write_all_at(file, &run[from..from + (range.end - range.start) as usize], place)
            });
            if written.is_err() {
                self.no_room.store(true, Ordering::Relaxed);
                return Ok(false);
            }
        }
        // Before any thread can see the unit: a reader of the whole file must find it complete.
        self.missing.fetch_sub(1, Ordering::AcqRel);
        claim.2 = Progress::Present;
        Ok(true)
    }

    fn decode(&self, unit: usize) -> Result<Arc<Vec<u8>>, ReadError> {
        let bytes = decode_unit(&self.chain, self.layout.units[unit])?;
        self.recall.decoded.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(bytes)
    }

    fn segments_of(&self, unit: usize) -> impl Iterator<Item = &super::layout::Segment> {
        // A tile is one run, found by its place; a skeleton chunk may lie anywhere.
        let range = match self.layout.units[unit] {
            Unit::Tile { tensor, tile } => {
                let extent = &self.chain.leaf().index().tensors[tensor as usize].extent;
                let start = extent.start + u64::from(tile) * codec::TILE_BYTES as u64;
                self.layout.covering(start..start + 1)
            }
            Unit::Skeleton { .. } => 0..self.layout.segments.len(),
        };
        self.layout.segments[range].iter().filter(move |segment| segment.unit == unit)
    }

    /// Starts decoding the units of these segments on the pool. Errors appear when a reader gets there.
    fn start(&self, segments: Range<usize>) {
        let segments = self.layout.segments.iter().take(segments.end).skip(segments.start);
        self.start_units(segments.map(|segment| segment.unit));
    }

    /// Starts decoding the skeleton, if it is no larger than the read-ahead: a program that opens a checkpoint reads
    /// headers first.
    pub(super) fn start_skeleton(&self) {
        let chunk = |unit: &usize| matches!(self.layout.units[*unit], Unit::Skeleton { .. });
        let chunks: Vec<usize> = (0..self.layout.units.len()).filter(chunk).take(AHEAD + 1).collect();
        if chunks.len() <= AHEAD {
            self.start_units(chunks.into_iter());
        }
    }

    fn start_units(&self, units: impl Iterator<Item = usize>) {
        if self.file.is_none() {
            return;
        }
        let mut claimed = Vec::new();
        {
            let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
            for unit in units {
                if progress[unit] == Progress::Missing {
                    progress[unit] = Progress::Decoding;
                    claimed.push(unit);
                }
            }
        }
        for unit in claimed {
            let Some(me) = self.me.upgrade() else {
                return;
            };
            self.recall.pool.spawn(move || {
                if let Some(file) = &me.file {
                    let _ = me.fill(file.file(), unit);
                }
            });
        }
    }

    /// Reads without a file in the cache. Keeps the last decoded unit, so that a sequential reader decodes each unit
    /// once.
    fn read_uncached(&self, offset: u64, buf: &mut [u8]) -> Result<usize, ReadError> {
        let end = offset + buf.len() as u64;
        for segment in &self.layout.segments[self.layout.covering(self.order.around(offset..end))] {
            let last = self.last_unit.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let bytes = match last {
                Some((unit, bytes)) if unit == segment.unit => bytes,
                _ => {
                    let bytes = self.decode(segment.unit)?;
                    let kept = Some((segment.unit, Arc::clone(&bytes)));
                    *self.last_unit.lock().unwrap_or_else(PoisonError::into_inner) = kept;
                    bytes
                }
            };
            self.order.runs(segment.range.clone(), |range, place| {
                let (from, to) = (offset.max(place), end.min(place + (range.end - range.start)));
                if from >= to {
                    return Ok(());
                }
                let at = segment.at + (range.start - segment.range.start + from - place) as usize;
                let run = bytes.get(at..at + (to - from) as usize).ok_or_else(|| short(&self.chain))?;
                buf[(from - offset) as usize..(to - offset) as usize].copy_from_slice(run);
                Ok(())
            })?;
        }
        Ok(buf.len())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if self.whole().is_some()
            && self.fate.load(Ordering::Relaxed) == KEPT
            && let Some(file) = self.file.take()
        {
            self.recall.cache.keep(self.key, file, self.len());
        }
    }
}
