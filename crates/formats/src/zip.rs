//! The records of a zip, and every place that holds a copy of their CRC.
//!
//! Mechanism: end record (found backwards), Zip64 end record, central directory, then each local header and data
//! descriptor. Two statements about the same record must agree, and records must not overlap. Otherwise the zip is
//! refused, because readers that believe different copies would see different bytes. Memory is bounded by the central
//! directory, which is at most [`MAX_DIRECTORY`]. No payload is read.

use std::collections::HashMap;
use std::ops::Range;

use super::ReadAt;
use super::read::{Fail, bad, begins_with, cut_short, refuse_if, u16_at, u32_at, u64_at};

/// Largest central directory looked at, or all of a file's together: 800,000 records of torch.save, which writes
/// about 80 bytes for each. The records held in memory are then below 128 MiB.
pub(super) const MAX_DIRECTORY: u64 = 64 << 20;

/// The largest number of zips in one file. A rank's file of a distributed checkpoint has one for each tensor.
const MAX_ZIPS: usize = 1 << 17;

/// An end record is 22 bytes and a comment of at most 65,535.
const MAX_TAIL: u64 = 22 + 0xffff;

const LOCAL: u32 = 0x0403_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const END: u32 = 0x0605_4b50;
const END64: u32 = 0x0606_4b50;
const LOCATOR64: u32 = 0x0706_4b50;
const DESCRIPTOR: u32 = 0x0807_4b50;
const FLAG_ENCRYPTED: u16 = 1;
const FLAG_DESCRIPTOR: u16 = 1 << 3;
/// Zip64's extra field.
const EXTRA64: u16 = 1;

/// One record.
#[derive(Clone, Debug)]
pub(super) struct Record {
    /// Where its name is in the directory.
    name: Range<u32>,
    /// Offset of the local header.
    header: u64,
    /// Bytes of the file that hold its (possibly compressed) content.
    pub(super) payload: Range<u64>,
    /// Neither compressed nor encrypted: the payload is the content.
    pub(super) stored: bool,
    /// CRC-32 of the content, as declared.
    pub(super) crc: u32,
    /// File offset of the CRC in the central directory.
    pub(super) crc_in_directory: u64,
    /// File offset of the CRC in the data descriptor, if there is one.
    pub(super) crc_in_descriptor: Option<u64>,
    /// File offset of the CRC in the local header, if it is given there.
    pub(super) crc_in_header: Option<u64>,
}

/// A zip's records in file order.
#[derive(Debug)]
pub(super) struct Zip {
    directory: Vec<u8>,
    pub(super) records: Vec<Record>,
}

impl Zip {
    /// The record's whole name.
    pub(super) fn name(&self, record: &Record) -> &[u8] {
        &self.directory[record.name.start as usize..record.name.end as usize]
    }

    /// What is said of a zip that no library wrote that stepfs knows.
    pub(super) fn foreign(&self) -> String {
        let how = match self.records.iter().filter(|record| !record.stored).count() {
            0 => String::new(),
            n => format!(" ({n} of {} members compressed)", self.records.len()),
        };
        format!(
            "a zip that neither torch, numpy nor Keras wrote{how}: kept as it is; save the files in it by themselves to shrink them"
        )
    }

    /// Bytes of the central directory.
    pub(super) fn directory_len(&self) -> u64 {
        self.directory.len() as u64
    }

    /// Whether the first bytes are those of a zip.
    pub(super) fn is_zip(src: &dyn ReadAt, size: u64) -> Result<bool, Fail> {
        Ok(begins_with(src, size, &LOCAL.to_le_bytes())?)
    }

    /// Reads the zips that a file is made of, one right behind the other, in file order. A zip does not say at its
    /// beginning how long it is, but at its end: so the last one is read first.
    pub(super) fn read_chain(src: &dyn ReadAt, size: u64) -> Result<Vec<Zip>, Fail> {
        let mut zips = Vec::new();
        let (mut end, mut directories) = (size, 0);
        while end > 0 {
            refuse_if(zips.len() == MAX_ZIPS, "zip: more than 131,072 zips in one file")?;
            let (zip, start) = Zip::read_before(src, end)?;
            directories += zip.directory.len() as u64;
            refuse_if(directories > MAX_DIRECTORY, "zip: central directories larger than 64 MiB")?;
            zips.push(zip);
            end = start;
        }
        zips.reverse();
        Ok(zips)
    }

    /// Reads the zip that ends at `size`; answers where it begins, too. Its records' places are those in the file.
    pub(super) fn read_before(src: &dyn ReadAt, size: u64) -> Result<(Zip, u64), Fail> {
        let end = End::find(src, size)?;
        refuse_if(end.directory_len > MAX_DIRECTORY, "zip: central directory larger than 64 MiB")?;
        // `End` made sure that it lies in the file.
        let mut directory = vec![0; end.directory_len as usize];
        src.read_exact_at(&mut directory, end.directory_at)?;
        let mut records = central(&directory, &end)?;
        records.sort_by_key(|r| r.header);
        let mut names = HashMap::with_capacity(records.len());
        for r in &records {
            let name = &directory[r.name.start as usize..r.name.end as usize];
            refuse_if(names.insert(name, ()).is_some(), "zip: two records have the same name")?;
        }
        drop(names);
        // Each record ends before the next begins, so the last one's place bounds all reads.
        if records.last().is_some_and(|r| r.header >= end.directory_at) {
            return bad("zip: records overlap, or lie beyond the central directory");
        }
        let mut limits: Vec<u64> = records.iter().skip(1).map(|r| r.header).collect();
        limits.push(end.directory_at);
        for (record, limit) in records.iter_mut().zip(limits) {
            let name = &directory[record.name.start as usize..record.name.end as usize];
            local(src, record, name, limit)?;
        }
        Ok((Zip { directory, records }, end.start))
    }
}

/// The content of the end records.
struct End {
    /// Where the zip begins in the file: all places that it declares count from there.
    start: u64,
    entries: u64,
    /// Place in the file.
    directory_at: u64,
    directory_len: u64,
}

impl End {
    fn find(src: &dyn ReadAt, size: u64) -> Result<End, Fail> {
        // Without a comment, as torch writes them, the end record is the last 22 bytes; else it is looked for.
        for longest in [22, MAX_TAIL] {
            let tail_len = size.min(longest);
            let tail_at = size - tail_len;
            let mut tail = vec![0; tail_len as usize];
            src.read_exact_at(&mut tail, tail_at)?;
            let found = (0..(tail.len() + 1).saturating_sub(22))
                .rev()
                .find(|&p| u32_at(&tail, p) == END && p + 22 + usize::from(u16_at(&tail, p + 20)) == tail.len());
            if let Some(p) = found {
                return End::read(src, &tail[p..p + 22], tail_at + p as u64);
            }
        }
        goes_on_or_is_cut(src, size)
    }

    /// Reads the end record `e`, which is at `end_at`.
    fn read(src: &dyn ReadAt, e: &[u8], end_at: u64) -> Result<End, Fail> {
        let (entries, directory_len) = (u64::from(u16_at(e, 10)), u64::from(u32_at(e, 12)));
        let declared_at = u64::from(u32_at(e, 16));
        let Some((end64_at, declared_end64)) = locate64(src, end_at)? else {
            if [u16_at(e, 4), u16_at(e, 6)] != [0, 0] || u64::from(u16_at(e, 8)) != entries {
                return bad("zip: part of a multi-disk archive");
            }
            return match end_at.checked_sub(directory_len).and_then(|at| Some((at, at.checked_sub(declared_at)?))) {
                Some((directory_at, start)) => Ok(End { start, entries, directory_at, directory_len }),
                None => bad(BEYOND),
            };
        };
        let mut z = [0; 56];
        src.read_exact_at(&mut z, end64_at)?;
        refuse_if(u32_at(&z, 0) != END64, "zip: the Zip64 locator points at something else")?;
        let (entries64, len64, at64) = (u64_at(&z, 32), u64_at(&z, 40), u64_at(&z, 48));
        let differs = |short: u64, max: u64, long: u64| short != max && short != long;
        refuse_if(
            differs(entries, 0xffff, entries64)
                || differs(directory_len, 0xffff_ffff, len64)
                || differs(declared_at, 0xffff_ffff, at64)
                || u64_at(&z, 24) != entries64,
            "zip: the two end records disagree",
        )?;
        let start = end64_at.checked_sub(declared_end64);
        match start.and_then(|start| Some((start, start.checked_add(at64)?))) {
            // Right before the end records, or another reader would look for it elsewhere.
            Some((start, directory_at)) if directory_at.checked_add(len64) == Some(end64_at) => {
                Ok(End { start, entries: entries64, directory_at, directory_len: len64 })
            }
            _ => bad(BEYOND),
        }
    }
}

const BEYOND: &str = "zip: the central directory is not where the end record says";

/// Refuses a zip without an end record where one belongs. Readers that search backwards take one with bytes behind it.
fn goes_on_or_is_cut<T>(src: &dyn ReadAt, size: u64) -> Result<T, Fail> {
    let longest = size.min(MAX_TAIL);
    let mut tail = vec![0; longest as usize];
    src.read_exact_at(&mut tail, size - longest)?;
    let ends = |p: usize| u32_at(&tail, p) == END && p + 22 + usize::from(u16_at(&tail, p + 20)) < tail.len();
    match (0..tail.len().saturating_sub(21)).any(ends) {
        true => bad("zip: the file goes on after its end record"),
        false => cut_short("zip: no end record; the file is cut short"),
    }
}

/// Offset of the Zip64 end record in the file, and in the zip as declared, if a locator stands before the end record.
fn locate64(src: &dyn ReadAt, end_at: u64) -> Result<Option<(u64, u64)>, Fail> {
    let Some(at) = end_at.checked_sub(20) else {
        return Ok(None);
    };
    let mut l = [0; 20];
    src.read_exact_at(&mut l, at)?;
    if u32_at(&l, 0) != LOCATOR64 {
        return Ok(None);
    }
    match at.checked_sub(56) {
        Some(end64_at) => Ok(Some((end64_at, u64_at(&l, 8)))),
        None => bad("zip: Zip64 end record beyond the end of the file"),
    }
}

/// The directory's entries; payload ranges hold only lengths so far.
fn central(dir: &[u8], end: &End) -> Result<Vec<Record>, Fail> {
    // Each entry takes at least 46 bytes, so a count that lies reserves no more than the directory's own size.
    refuse_if(end.entries > dir.len() as u64 / 46, "zip: more records declared than the central directory can hold")?;
    let mut records = Vec::with_capacity(end.entries as usize);
    let mut at = 0;
    while at < dir.len() {
        let entry = &dir[at..];
        refuse_if(entry.len() < 46 || u32_at(entry, 0) != CENTRAL, "zip: the central directory is damaged")?;
        let name_len = usize::from(u16_at(entry, 28));
        let extra_len = usize::from(u16_at(entry, 30));
        let comment_len = usize::from(u16_at(entry, 32));
        let len = 46 + name_len + extra_len + comment_len;
        refuse_if(entry.len() < len, "zip: a central directory entry is cut short")?;
        let extra = &entry[46 + name_len..46 + name_len + extra_len];
        let [mut unpacked, mut packed] = [24, 20].map(|at| u64::from(u32_at(entry, at)));
        let mut header = u64::from(u32_at(entry, 42));
        widen(extra, &mut [&mut unpacked, &mut packed, &mut header])?;
        let header =
            header.checked_add(end.start).ok_or("zip: records overlap, or lie beyond the central directory")?;
        let stored = u16_at(entry, 10) == 0 && u16_at(entry, 8) & FLAG_ENCRYPTED == 0;
        refuse_if(stored && packed != unpacked, "zip: a stored record has two different sizes")?;
        records.push(Record {
            name: (at + 46) as u32..(at + 46 + name_len) as u32,
            header,
            payload: unpacked..packed,
            stored,
            crc: u32_at(entry, 16),
            crc_in_directory: end.directory_at + at as u64 + 16,
            crc_in_descriptor: None,
            crc_in_header: None,
        });
        at += len;
    }
    refuse_if(records.len() as u64 != end.entries, "zip: the number of records is not the number declared")?;
    Ok(records)
}

/// Replaces saturated 32-bit fields by those in the Zip64 extra field, in the order given.
fn widen(mut extra: &[u8], fields: &mut [&mut u64]) -> Result<(), Fail> {
    if fields.iter().all(|f| **f != 0xffff_ffff) {
        return Ok(());
    }
    while extra.len() >= 4 {
        let len = usize::from(u16_at(extra, 2));
        if extra.len() < 4 + len {
            break;
        }
        if u16_at(extra, 0) == EXTRA64 {
            let mut values = extra[4..4 + len].chunks_exact(8);
            for field in fields.iter_mut().filter(|f| ***f == 0xffff_ffff) {
                match values.next() {
                    Some(v) => **field = u64_at(v, 0),
                    None => return bad("zip: a Zip64 extra field is too short"),
                }
            }
            return Ok(());
        }
        extra = &extra[4 + len..];
    }
    bad("zip: a Zip64 extra field is missing")
}

/// Reads a record's local header and data descriptor, which must lie before `limit`, and completes the record.
fn local(src: &dyn ReadAt, record: &mut Record, name: &[u8], limit: u64) -> Result<(), Fail> {
    let (unpacked, packed) = (record.payload.start, record.payload.end);
    let overlap = "zip: records overlap, or lie beyond the central directory";
    let fixed_end = record.header.checked_add(30 + name.len() as u64);
    refuse_if(fixed_end.is_none_or(|e| e > limit), overlap)?;
    let mut head = vec![0; 30 + name.len()];
    src.read_exact_at(&mut head, record.header)?;
    refuse_if(u32_at(&head, 0) != LOCAL, "zip: no local header where the central directory says")?;
    if usize::from(u16_at(&head, 26)) != name.len() || &head[30..] != name {
        return bad("zip: a record has another name in its local header");
    }
    let stored = u16_at(&head, 8) == 0 && u16_at(&head, 6) & FLAG_ENCRYPTED == 0;
    refuse_if(stored != record.stored, "zip: a record has another method in its local header")?;
    let extra_len = u16_at(&head, 28);
    // Cannot overflow: header + 30 + name is at most `limit`, a file offset.
    let start = record.header + head.len() as u64 + u64::from(extra_len);
    let end = start.checked_add(packed).filter(|&e| e <= limit);
    let end = end.ok_or(overlap)?;
    record.payload = start..end;
    let crc = u32_at(&head, 14);
    if u16_at(&head, 6) & FLAG_DESCRIPTOR == 0 {
        let mut extra = vec![0; usize::from(extra_len)];
        src.read_exact_at(&mut extra, start - u64::from(extra_len))?;
        let mut sizes = [22, 18].map(|at| u64::from(u32_at(&head, at)));
        let [u, p] = &mut sizes;
        widen(&extra, &mut [u, p])?;
        if crc != record.crc || sizes != [unpacked, packed] {
            return bad("zip: a record has another size or CRC in its local header");
        }
        record.crc_in_header = Some(record.header + 14);
        return Ok(());
    }
    if crc != 0 {
        refuse_if(crc != record.crc, "zip: a record has another CRC in its local header")?;
        record.crc_in_header = Some(record.header + 14);
    }
    let mut room = [0; 24];
    let room_len = (limit - end).min(24) as usize;
    src.read_exact_at(&mut room[..room_len], end)?;
    match descriptor(&room[..room_len], record.crc, packed, unpacked) {
        Some(at) => record.crc_in_descriptor = Some(end + at),
        None => return bad("zip: a data descriptor does not agree with the central directory"),
    }
    Ok(())
}

/// Offset of the CRC in the data descriptor that `room` starts with. The signature is optional and the sizes have 4
/// or 8 bytes; nothing says which, so the form that agrees with the directory is taken.
fn descriptor(room: &[u8], crc: u32, packed: u64, unpacked: u64) -> Option<u64> {
    [(4, 8), (4, 4), (0, 8), (0, 4)]
        .into_iter()
        .find(|&(sig, width)| {
            let size = |i: usize| {
                let at = sig + 4 + i * width;
                match width {
                    8 => u64_at(room, at),
                    _ => u64::from(u32_at(room, at)),
                }
            };
            room.len() >= sig + 4 + 2 * width
                && (sig == 0 || u32_at(room, 0) == DESCRIPTOR)
                && u32_at(room, sig) == crc
                && size(0) == packed
                && size(1) == unpacked
        })
        .map(|(sig, _)| sig as u64)
}
