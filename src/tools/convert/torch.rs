//! Writes files of `torch.save`: zips with a pickle, and the bytes of each storage.

use std::collections::HashMap;

use anyhow::Result;
use formats::{Checksum, Key};
use indicatif::ProgressBar;

use crate::tools::output::NewFile;

use super::pickle::{Value, tensor};
use super::source::{self, Source};

/// Payloads begin at multiples of it, as those of torch do.
const ALIGNMENT: u64 = 64;

/// Writes a whole file. Tensors with one identity share a storage.
pub(super) fn write(file: &NewFile, sources: &[Source], bar: &ProgressBar) -> Result<()> {
    let (mut storages, mut numbers, mut first) = (Vec::new(), HashMap::new(), HashMap::new());
    let mut items = Vec::new();
    for (at, source) in sources.iter().enumerate() {
        let new = storages.len();
        let number = source.identity().map_or(new, |identity| *numbers.entry(identity).or_insert(new));
        if number == new {
            storages.push(source);
        }
        for len in 1..=source.keys.len() {
            first.entry(&source.keys[..len]).or_insert(at);
        }
        items.push((source, number));
    }
    // What is in one dictionary comes together, in the order in which the keys come first.
    let place = |keys: &[Key]| match keys.last() {
        Some(Key::Index(index)) => *index as usize,
        _ => first[keys],
    };
    items.sort_by_cached_key(|(source, _)| {
        (1..=source.keys.len()).map(|len| place(&source.keys[..len])).collect::<Vec<_>>()
    });
    write_zips(file, vec![Zip::new(0, nest(&items, 0).pickle(), &storages)], bar)
}

/// The dictionary, list or tensor below the first `depth` keys of these tensors.
fn nest(items: &[(&Source, usize)], depth: usize) -> Value {
    if let [(source, number)] = items
        && source.keys.len() == depth
    {
        return tensor(source, *number);
    }
    let key = |item: &(&Source, usize)| item.0.keys[depth].clone();
    let groups = || items.chunk_by(|a, b| key(a) == key(b)).map(|group| (key(&group[0]), nest(group, depth + 1)));
    if items.chunk_by(|a, b| key(a) == key(b)).zip(0..).all(|(group, at)| key(&group[0]) == Key::Index(at)) {
        return Value::List(groups().map(|(_, value)| value).collect());
    }
    let of_key = |key| match key {
        Key::Name(name) => Value::Text(name),
        Key::Number(number) => Value::Int(number),
        Key::Index(index) => Value::Int(index as i64),
    };
    Value::Dict(groups().map(|(key, value)| (of_key(key), value)).collect())
}

/// Writes zips of torch.save into a file, each at its place.
pub(super) fn write_zips(file: &NewFile, zips: Vec<Zip>, bar: &ProgressBar) -> Result<()> {
    let payloads = zips.iter().flat_map(|zip| &zip.records).filter_map(|record| match record.content {
        Content::Values(source) => Some((source, record.payload)),
        Content::Bytes(_) => None,
    });
    let mut crcs = source::write(file, &payloads.collect::<Vec<_>>(), bar)?.into_iter();
    zips.into_iter().try_for_each(|zip| zip.finish(file, &mut crcs))
}

/// A zip in the making. All sizes and places stand in the fields of Zip64, so that none is too large.
pub(super) struct Zip<'a> {
    start: u64,
    /// Where its directory begins.
    at: u64,
    records: Vec<Record<'a>>,
}

struct Record<'a> {
    name: String,
    content: Content<'a>,
    len: u64,
    /// Where its header begins, and its content.
    at: u64,
    payload: u64,
}

enum Content<'a> {
    Bytes(Vec<u8>),
    Values(&'a Source<'a>),
}

impl<'a> Zip<'a> {
    /// A zip that begins at a place of a file.
    pub(super) fn new(start: u64, pickle: Vec<u8>, storages: &[&'a Source]) -> Zip<'a> {
        let mut zip = Zip { start, at: start, records: Vec::new() };
        zip.add("data.pkl".into(), pickle.len() as u64, Content::Bytes(pickle));
        zip.add("byteorder".into(), 6, Content::Bytes(b"little".to_vec()));
        for (number, source) in storages.iter().enumerate() {
            zip.add(format!("data/{number}"), source.bytes(), Content::Values(source));
        }
        zip.add("version".into(), 2, Content::Bytes(b"3\n".to_vec()));
        zip
    }

    fn add(&mut self, name: String, len: u64, content: Content<'a>) {
        let (name, at) = (format!("archive/{name}"), self.at);
        let payload = (at + Record::HEAD + name.len() as u64).next_multiple_of(ALIGNMENT);
        self.at = payload + len;
        self.records.push(Record { name, content, len, at, payload });
    }

    /// Where it ends.
    pub(super) fn end(&self) -> u64 {
        self.at + self.directory(&vec![0; self.records.len()]).len() as u64
    }

    /// Writes all but the tensors, whose CRC-32s come in their order.
    fn finish(self, file: &NewFile, of_tensors: &mut impl Iterator<Item = u32>) -> Result<()> {
        let mut crcs = Vec::new();
        for record in &self.records {
            let crc = match &record.content {
                Content::Values(_) => of_tensors.next().unwrap_or_default(),
                Content::Bytes(bytes) => {
                    let mut crc = Checksum::new(false);
                    crc.update(bytes);
                    file.write_all_at(bytes, record.payload)?;
                    crc.finalize()
                }
            };
            file.write_all_at(&record.header(crc), record.at)?;
            crcs.push(crc);
        }
        file.write_all_at(&self.directory(&crcs), self.at)
    }

    /// The directory of records with these CRC-32s, up to the zip's end.
    fn directory(&self, crcs: &[u32]) -> Vec<u8> {
        let mut out = Vec::new();
        for (record, crc) in self.records.iter().zip(crcs) {
            // No comment, the first disk, no attributes; the place is in the field, too.
            let fields = extra(*b"\x01\0", &[&record.sizes()[..], &(record.at - self.start).to_le_bytes()].concat());
            let rest = [28, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
            out.extend([b"PK\x01\x02\x2d\0", &record.about(*crc)[..], &rest, record.name.as_bytes(), &fields].concat());
        }
        let (len, place, count) = (out.len() as u64, self.at - self.start, self.records.len() as u64);
        out.extend([b"PK\x06\x06", &44u64.to_le_bytes()[..], &[45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]].concat());
        [count, count, len, place].into_iter().for_each(|number| out.extend(number.to_le_bytes()));
        out.extend([b"PK\x06\x07\0\0\0\0", &(place + len).to_le_bytes()[..], &[1, 0, 0, 0]].concat());
        // All other numbers stand in the records before.
        out.extend([b"PK\x05\x06\0\0\0\0", &[0xff; 12][..], &[0, 0]].concat());
        out
    }
}

impl Record<'_> {
    /// Bytes of a header without the name and what fills up: its own, and two fields.
    const HEAD: u64 = 30 + 20 + 4;

    fn sizes(&self) -> Vec<u8> {
        [self.len.to_le_bytes(); 2].concat()
    }

    /// Version, flags, method, time and the first day that a zip can tell, CRC, sizes, length of the name.
    fn about(&self, crc: u32) -> Vec<u8> {
        let name_len = (self.name.len() as u16).to_le_bytes();
        [&[45, 0, 0, 0, 0, 0, 0, 0, 0x21, 0][..], &crc.to_le_bytes(), &[0xff; 8], &name_len].concat()
    }

    fn header(&self, crc: u32) -> Vec<u8> {
        // torch fills up with a field of its own.
        let gap = self.payload - self.at - Record::HEAD - self.name.len() as u64;
        let fields = [extra(*b"\x01\0", &self.sizes()), extra(*b"FB", &vec![b'Z'; gap as usize])].concat();
        let fields_len = (fields.len() as u16).to_le_bytes();
        [b"PK\x03\x04", &self.about(crc)[..], &fields_len, self.name.as_bytes(), &fields].concat()
    }
}

/// An extra field of a record.
fn extra(id: [u8; 2], bytes: &[u8]) -> Vec<u8> {
    [&id, &(bytes.len() as u16).to_le_bytes(), bytes].concat()
}
