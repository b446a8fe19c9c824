//! Finds the bytes of a file that depend on its tensors, so that a file with altered tensors stays consistent.
//!
//! In a zip of torch.save these are each record's CRC (central directory and data descriptor), and the second half of
//! `.data/serialization_id`: a fold over the CRCs of all records before it. That record's own CRC changes, too. With
//! all of them replaced the file is, byte for byte, the file that torch.save writes of the altered tensors.
//!
//! A CRC is linear: how it changes follows from the bytes that change and from how many lie behind them. So a record may
//! hold a tensor, several, or a whole zip.

use std::io;
use std::ops::Range;

use rayon::prelude::*;

use codec::hash::{Checksum, crc32_behind};

use super::bundle::steady::Steady;
use super::zip::{Record, Zip};
use super::{Description, ReadAt};

/// A tensor whose bytes are not those of the described file any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedTensor {
    /// Index in `Description::tensors`.
    pub index: usize,
    /// Checksum of its bytes in the described file.
    pub crc_before: u32,
    /// Checksum of its bytes now.
    pub crc_after: u32,
}

/// Bytes to put at an offset of the file. Never changes its length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patch {
    /// File offset.
    pub offset: u64,
    /// The new bytes.
    pub bytes: Vec<u8>,
}

/// The checksums of a file's tensors.
#[derive(Clone, Debug)]
pub(super) enum Checksums {
    /// Of the records of its zips.
    Zips(Zips),
    /// Of tensors that keep them.
    Steady(Steady),
}

/// The records of a file's zips.
#[derive(Clone, Debug, Default)]
pub(super) struct Zips {
    /// Of all zips, in file order.
    records: Vec<Record>,
    /// Of each `.data/serialization_id` the records before it in its zip; the next one is its own.
    ids: Vec<Range<usize>>,
    /// Records of the zip in which the zips are, if there is one.
    around: Vec<Record>,
}

impl Checksums {
    /// Of a file that is these zips, in file order. With each, which of its records is its serialization id.
    pub(super) fn of(zips: impl IntoIterator<Item = (Zip, Option<usize>)>) -> Checksums {
        Checksums::Zips(Zips::of(zips))
    }

    /// Of zips that are records of another.
    pub(super) fn within(around: Zip, zips: Vec<(Zip, Option<usize>)>) -> Checksums {
        Checksums::Zips(Zips { around: around.records, ..Zips::of(zips) })
    }
}

impl Zips {
    fn of(zips: impl IntoIterator<Item = (Zip, Option<usize>)>) -> Zips {
        let mut all = Zips::default();
        for (zip, id) in zips {
            let first = all.records.len();
            all.ids.extend(id.map(|id| first..first + id));
            all.records.extend(zip.records);
        }
        all
    }

    /// See [`Description::patches`]. `ends`: where each changed tensor ends, and the difference of its CRCs.
    fn patches(&self, src: &dyn ReadAt, ends: &[(u64, u32)]) -> io::Result<Vec<Patch>> {
        let mut crcs = Crcs::of(&self.records, ends);
        let mut patches = Vec::new();
        for Range { start, end: id } in self.ids.iter().cloned() {
            let before = id_of(self.records[start..id].iter().map(|record| record.crc));
            let after = id_of(crcs.now[start..id].iter().copied());
            let end = self.records[id].payload.end;
            let mut digits = [0; ID_LEN as usize / 2];
            let offset = end - digits.len() as u64;
            src.read_exact_at(&mut digits, offset)?;
            if digits == *before.as_bytes() && after != before {
                crcs.follow(end, crc32fast::hash(&digits) ^ crc32fast::hash(after.as_bytes()));
                patches.push(Patch { offset, bytes: after.into_bytes() });
            }
        }
        patches.extend(crcs.patches());
        if !self.around.is_empty() {
            let mut around = Crcs::of(&self.around, ends);
            for Patch { offset, bytes } in &patches {
                let mut before = vec![0; bytes.len()];
                src.read_exact_at(&mut before, *offset)?;
                around.follow(offset + bytes.len() as u64, crc32fast::hash(&before) ^ crc32fast::hash(bytes));
            }
            patches.extend(around.patches());
        }
        patches.sort_by_key(|p| p.offset);
        Ok(patches)
    }
}

/// The CRCs of a zip's records, while bytes in them change.
struct Crcs<'r> {
    records: &'r [Record],
    now: Vec<u32>,
}

impl Crcs<'_> {
    /// After these changes.
    fn of<'r>(records: &'r [Record], changes: &[(u64, u32)]) -> Crcs<'r> {
        let mut crcs = Crcs { records, now: records.iter().map(|record| record.crc).collect() };
        changes.iter().for_each(|&(end, difference)| crcs.follow(end, difference));
        crcs
    }

    /// Follows a change of bytes that end at `end` of the file, by the difference of their CRCs.
    fn follow(&mut self, end: u64, difference: u32) {
        let at = self.records.partition_point(|record| record.payload.end < end);
        // 0: switched off.
        if let Some(record) = self.records.get(at).filter(|record| record.stored && record.crc != 0) {
            self.now[at] ^= crc32_behind(difference, record.payload.end - end);
        }
    }

    /// Puts each changed CRC in each place that has a copy of it.
    fn patches(&self) -> impl Iterator<Item = Patch> {
        let changed = self.records.iter().zip(&self.now).filter(|(record, crc)| record.crc != **crc);
        changed.flat_map(|(record, crc)| {
            let copies = [Some(record.crc_in_directory), record.crc_in_descriptor, record.crc_in_header];
            copies.into_iter().flatten().map(|offset| Patch { offset, bytes: crc.to_le_bytes().to_vec() })
        })
    }
}

/// Two numbers of 20 decimal digits.
const ID_LEN: u64 = 40;

/// The second number of a serialization id, as torch computes it from the CRCs of the records before it.
fn id_of(crcs: impl Iterator<Item = u32>) -> String {
    let h = crcs.fold(0u64, |h, crc| {
        let mixed = u64::from(crc).wrapping_add(0x9e37_79b9).wrapping_add(h << 6).wrapping_add(h >> 2);
        h ^ mixed
    });
    format!("{h:020}")
}

/// Whether the record can be a serialization id.
pub(super) fn is_serialization_id(record: &Record, name: &[u8]) -> bool {
    name == b".data/serialization_id" && record.stored && record.payload.end - record.payload.start == ID_LEN
}

impl Description {
    /// Whether the file has checksums of its tensors, so that `patches` must be told of changes.
    pub fn has_checksums(&self) -> bool {
        self.checksums.is_some()
    }

    /// A checksum of the file's kind, of no bytes yet.
    pub fn checksum(&self) -> Checksum {
        Checksum::new(matches!(self.checksums, Some(Checksums::Steady(_))))
    }

    /// Whether every checksum is right. Compressed records and those without a CRC (0) do not count. A file with a wrong
    /// one must stay exact. Reads the whole file, 1 MiB at a time, several parts at once.
    ///
    /// # Errors
    /// Those of `src`.
    pub fn is_intact(&self, src: &(dyn ReadAt + Sync)) -> io::Result<bool> {
        let parts: Vec<(Range<u64>, u32)> = match &self.checksums {
            None => Vec::new(),
            Some(Checksums::Zips(Zips { records, around, .. })) => {
                let known = records.iter().chain(around).filter(|record| record.crc != 0 && record.stored);
                known.map(|record| (record.payload.clone(), record.crc)).collect()
            }
            Some(Checksums::Steady(steady)) => steady.parts(&self.tensors).collect(),
        };
        let intact = parts.into_par_iter().map(|(Range { start: mut at, end }, crc)| -> io::Result<bool> {
            let mut buf = vec![0; (end - at).min(1 << 20) as usize];
            let mut found = self.checksum();
            while at < end {
                let take = (end - at).min(buf.len() as u64) as usize;
                src.read_exact_at(&mut buf[..take], at)?;
                found.update(&buf[..take]);
                at += take as u64;
            }
            Ok(found.finalize() == crc)
        });
        intact.try_reduce(|| true, |a, b| Ok(a && b))
    }

    /// The patches that, with the altered payloads, give the file that its own writer would have written. They keep
    /// its length, ascend by offset, and lie outside of all tensors. None for a file without checksums.
    ///
    /// A CRC is right afterwards if it was before. One that is 0 (CRCs can be switched off) is left alone, and so is a
    /// serialization id that does not follow from the declared CRCs. `src` is the described file; only bytes outside of
    /// tensors are read.
    ///
    /// # Errors
    /// `InvalidInput` for an index beyond `tensors`; those of `src`.
    pub fn patches(&self, src: &dyn ReadAt, changed: &[ChangedTensor]) -> io::Result<Vec<Patch>> {
        if changed.iter().any(|c| c.index >= self.tensors.len()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        match &self.checksums {
            None => Ok(Vec::new()),
            Some(Checksums::Steady(steady)) => steady.patches(&self.tensors, src, changed),
            Some(Checksums::Zips(zips)) => {
                let end = |c: &ChangedTensor| (self.tensors[c.index].extent.end, c.crc_before ^ c.crc_after);
                zips.patches(src, &changed.iter().map(end).collect::<Vec<_>>())
            }
        }
    }
}
