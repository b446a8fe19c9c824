//! Finds the bytes of a file that depend on its tensors, so that a file with altered tensors stays consistent.
//!
//! In a zip of torch.save these are each record's CRC (central directory and data descriptor), and the second half of
//! `.data/serialization_id`: a fold over the CRCs of all records before it. That record's own CRC changes, too. With
//! all of them replaced the file is, byte for byte, the file that torch.save writes of the altered tensors.

use std::io;

use rayon::prelude::*;

use codec::hash::{Checksum, crc32_behind as behind};

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

/// A description's data of the file's zips for patching.
#[derive(Clone, Debug, Default)]
pub(super) struct Crcs {
    /// Of all zips, in file order.
    records: Vec<Record>,
    /// Record of each tensor.
    of_tensor: Vec<u32>,
    zips: Vec<Part>,
    /// The bytes before each tensor in its record, if any.
    heads: Option<Vec<Head>>,
    /// The bytes behind each tensor, if records have several.
    tails: Option<Tails>,
    /// Records of the zip in which the zips are, if there is one.
    around: Vec<Record>,
    /// Of a file that is no zip.
    steady: Option<Steady>,
}

/// CRC-32 of the bytes before a tensor in its record, and the tensor's length.
pub(super) type Head = (u32, u64);

/// Bytes of its record behind each tensor.
#[derive(Clone, Debug)]
pub(super) struct Tails(pub(super) Vec<u64>);

/// One of a file's zips.
#[derive(Clone, Debug)]
struct Part {
    /// Its first record.
    first: usize,
    /// The record `.data/serialization_id`.
    serialization_id: Option<usize>,
}

/// Two numbers of 20 decimal digits.
const ID_LEN: u64 = 40;

impl Crcs {
    pub(super) fn new(zip: Zip, of_tensor: Vec<u32>, serialization_id: Option<usize>) -> Self {
        let mut crcs = Crcs::default();
        crcs.add(zip, of_tensor, serialization_id);
        crcs
    }

    /// Of a file whose checksums stand in another one.
    pub(super) fn of_bundle(steady: Steady) -> Self {
        Crcs { steady: Some(steady), ..Crcs::default() }
    }

    /// Of records that begin before their tensor.
    pub(super) fn with_heads(self, heads: Vec<Head>) -> Self {
        Crcs { heads: Some(heads), ..self }
    }

    /// Of records with several tensors, and other bytes between them.
    pub(super) fn with_tails(self, tails: Tails) -> Self {
        Crcs { tails: Some(tails), ..self }
    }

    /// Of zips that are records of another.
    pub(super) fn inside(self, zip: Zip) -> Self {
        Crcs { around: zip.records, ..self }
    }

    /// Adds the file's next zip, with the record of each of its tensors and that of its id, counted within it.
    pub(super) fn add(&mut self, zip: Zip, of_tensor: Vec<u32>, serialization_id: Option<usize>) {
        let first = self.records.len();
        self.zips.push(Part { first, serialization_id: serialization_id.map(|id| first + id) });
        self.of_tensor.extend(of_tensor.into_iter().map(|record| first as u32 + record));
        self.records.extend(zip.records);
    }

    /// Where the first zip's serialization id's digits are.
    #[cfg(test)]
    pub(super) fn id_payload(&self) -> Option<std::ops::Range<u64>> {
        Some(self.records[self.zips.first()?.serialization_id?].payload.clone())
    }

    /// The digits that torch computes from the CRCs of the records before the id.
    fn fold(records: impl Iterator<Item = u32>) -> String {
        let h = records.fold(0u64, |h, crc| {
            let mixed = u64::from(crc).wrapping_add(0x9e37_79b9).wrapping_add(h << 6).wrapping_add(h >> 2);
            h ^ mixed
        });
        format!("{h:020}")
    }
}

impl Description {
    /// Whether the file has checksums of its tensors, so that `patches` must be told of changes.
    pub fn has_checksums(&self) -> bool {
        self.zip.is_some()
    }

    /// A checksum of the file's kind, of no bytes yet.
    pub fn checksum(&self) -> Checksum {
        Checksum::new(self.zip.as_ref().is_some_and(|zip| zip.steady.is_some()))
    }

    /// Whether every record has its declared CRC-32. Compressed records and those without a CRC (0) do not count. A
    /// file with a wrong CRC must stay exact. Reads the whole file, 1 MiB at a time, several records at once.
    ///
    /// # Errors
    /// Those of `src`.
    pub fn is_intact(&self, src: &(dyn ReadAt + Sync)) -> io::Result<bool> {
        if let Some(steady) = self.zip.as_ref().and_then(|zip| zip.steady.as_ref()) {
            return steady.is_intact(&self.tensors, src);
        }
        let records = self.zip.iter().flat_map(|zip| zip.records.iter().chain(&zip.around));
        let records: Vec<_> = records.filter(|r| r.crc != 0 && r.stored).collect();
        let intact = records.par_iter().map(|record| -> io::Result<bool> {
            let mut buf = vec![0; (record.payload.end - record.payload.start).min(1 << 20) as usize];
            let mut hash = crc32fast::Hasher::new();
            let mut at = record.payload.start;
            while at < record.payload.end {
                let take = (record.payload.end - at).min(buf.len() as u64) as usize;
                src.read_exact_at(&mut buf[..take], at)?;
                hash.update(&buf[..take]);
                at += take as u64;
            }
            Ok(hash.finalize() == record.crc)
        });
        intact.try_reduce(|| true, |a, b| Ok(a && b))
    }

    /// The patches that, with the altered payloads, give the file that its own writer would have written. They keep
    /// its length, ascend by offset, and lie outside of all tensors. None for anything but a zip.
    ///
    /// A record whose declared CRC is not `crc_before` (CRCs can be switched off) is left alone, and so is a
    /// serialization id that does not follow from the declared CRCs. The CRC of a record with several tensors is
    /// right afterwards if it was before. `src` is the described file; only bytes outside of tensors are read.
    ///
    /// # Errors
    /// `InvalidInput` for an index beyond `tensors`; those of `src`.
    pub fn patches(&self, src: &dyn ReadAt, changed: &[ChangedTensor]) -> io::Result<Vec<Patch>> {
        if changed.iter().any(|c| c.index >= self.tensors.len()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let Some(zip) = &self.zip else {
            return Ok(Vec::new());
        };
        if let Some(steady) = &zip.steady {
            return steady.patches(&self.tensors, src, changed);
        }
        let of_records = zip.heads.as_ref().map(|heads| of_records(heads, changed));
        let changed = of_records.as_deref().unwrap_or(changed);
        let mut crcs: Vec<u32> = zip.records.iter().map(|r| r.crc).collect();
        for c in changed {
            // Both lists have one entry per tensor unless the caller edited `tensors`.
            let Some(&record) = zip.of_tensor.get(c.index) else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            if let Some(tails) = &zip.tails {
                let Some(&tail) = tails.0.get(c.index) else {
                    return Err(io::ErrorKind::InvalidInput.into());
                };
                // 0: switched off.
                if zip.records[record as usize].crc != 0 {
                    crcs[record as usize] ^= behind(c.crc_before ^ c.crc_after, tail);
                }
            } else if zip.records[record as usize].crc == c.crc_before {
                crcs[record as usize] = c.crc_after;
            }
        }
        let mut patches = Vec::new();
        for (first, id) in zip.zips.iter().filter_map(|part| Some((part.first, part.serialization_id?))) {
            if crcs[first..id].iter().zip(&zip.records[first..id]).all(|(crc, record)| *crc == record.crc) {
                continue;
            }
            let payload = &zip.records[id].payload;
            let mut digits = [0; ID_LEN as usize];
            src.read_exact_at(&mut digits, payload.start)?;
            let before = Crcs::fold(zip.records[first..id].iter().map(|r| r.crc));
            let after = Crcs::fold(crcs[first..id].iter().copied());
            if digits[20..] == *before.as_bytes() && after != before {
                if zip.records[id].crc == crc32fast::hash(&digits) {
                    digits[20..].copy_from_slice(after.as_bytes());
                    crcs[id] = crc32fast::hash(&digits);
                }
                patches.push(Patch { offset: payload.start + 20, bytes: after.into_bytes() });
            }
        }
        for (record, crc) in zip.records.iter().zip(crcs) {
            if crc == record.crc {
                continue;
            }
            patches.extend(record.patches(crc));
        }
        patches.sort_by_key(|p| p.offset);
        if !zip.around.is_empty() {
            let around = self.around(src, &zip.around, changed, &patches)?;
            patches.extend(around);
            patches.sort_by_key(|p| p.offset);
        }
        Ok(patches)
    }

    /// The patches of records that have whole zips in them: each CRC follows the changed tensors and the patches in its
    /// record.
    fn around(
        &self,
        src: &dyn ReadAt,
        records: &[Record],
        changed: &[ChangedTensor],
        patches: &[Patch],
    ) -> io::Result<Vec<Patch>> {
        let place = |end: u64| records.partition_point(|record| record.payload.end < end);
        let mut crcs: Vec<u32> = records.iter().map(|record| record.crc).collect();
        let mut change = |end: u64, difference: u32| {
            let at = place(end);
            if let (Some(record), Some(crc)) = (records.get(at), crcs.get_mut(at)) {
                *crc ^= behind(difference, record.payload.end - end);
            }
        };
        for c in changed {
            change(self.tensors[c.index].extent.end, c.crc_before ^ c.crc_after);
        }
        for patch in patches {
            let mut before = vec![0; patch.bytes.len()];
            src.read_exact_at(&mut before, patch.offset)?;
            let difference = crc32fast::hash(&before) ^ crc32fast::hash(&patch.bytes);
            change(patch.offset + before.len() as u64, difference);
        }
        // 0: switched off.
        let differs = |(record, crc): &(&Record, u32)| record.crc != 0 && record.stored && record.crc != *crc;
        Ok(records.iter().zip(crcs).filter(differs).flat_map(|(record, crc)| record.patches(crc)).collect())
    }
}

impl Record {
    /// Puts a CRC in each place that has a copy of it.
    fn patches(&self, crc: u32) -> impl Iterator<Item = Patch> {
        let copies = [Some(self.crc_in_directory), self.crc_in_descriptor, self.crc_in_header];
        copies.into_iter().flatten().map(move |offset| Patch { offset, bytes: crc.to_le_bytes().to_vec() })
    }
}

/// Whether the record can be a serialization id.
pub(super) fn is_serialization_id(record: &Record, name: &[u8]) -> bool {
    name == b".data/serialization_id" && record.stored && record.payload.end - record.payload.start == ID_LEN
}

/// From checksums of tensors to those of their records.
fn of_records(heads: &[Head], changed: &[ChangedTensor]) -> Vec<ChangedTensor> {
    let whole = |index: usize, crc: u32| {
        // The description has one entry per tensor unless the caller edited `tensors`.
        let Some(&(head, len)) = heads.get(index) else { return crc };
        behind(head, len) ^ crc
    };
    let of_record = |&ChangedTensor { index, crc_before, crc_after }: &ChangedTensor| ChangedTensor {
        index,
        crc_before: whole(index, crc_before),
        crc_after: whole(index, crc_after),
    };
    changed.iter().map(of_record).collect()
}
