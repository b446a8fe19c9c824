//! Writes files of `torch.save`: zips with a pickle, and the bytes of each storage.

use std::collections::HashMap;

use anyhow::Result;
use formats::{Checksum, Key};
use indicatif::ProgressBar;

use crate::tools::output::NewFile;

use super::pickle::{Value, tensor};
use super::source::Source;

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
    zip(file, 0, &nest(&items, 0).pickle(), &storages, bar)?;
    Ok(())
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

/// Writes a zip of torch.save at a place of a file; answers where it ends.
pub(super) fn zip(file: &NewFile, start: u64, pickle: &[u8], storages: &[&Source], bar: &ProgressBar) -> Result<u64> {
    let mut zip = Zip { file, start, at: start, directory: Vec::new(), records: 0 };
    zip.small("data.pkl", pickle)?;
    zip.small("byteorder", b"little")?;
    for (number, source) in storages.iter().enumerate() {
        zip.record(&format!("data/{number}"), source.bytes(), |at| source.write(file, at, bar))?;
    }
    zip.small("version", b"3\n")?;
    zip.end()
}

/// A zip in the making. All sizes and places stand in the fields of Zip64, so that none is too large.
struct Zip<'a> {
    file: &'a NewFile,
    start: u64,
    at: u64,
    directory: Vec<u8>,
    records: u64,
}

impl Zip<'_> {
    fn small(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.record(name, bytes.len() as u64, |at| {
            let mut crc = Checksum::new(false);
            crc.update(bytes);
            self.file.write_all_at(bytes, at)?;
            Ok(crc.finalize())
        })
    }

    /// Adds a record; `write` puts so many bytes at a place of the file, and answers their CRC-32.
    fn record(&mut self, name: &str, len: u64, write: impl FnOnce(u64) -> Result<u32>) -> Result<()> {
        let name = format!("archive/{name}");
        let sizes = [len.to_le_bytes(), len.to_le_bytes()].concat();
        let head = 30 + name.len() as u64 + 20 + 4;
        let gap = (self.at + head).next_multiple_of(ALIGNMENT) - self.at - head;
        let payload = self.at + head + gap;
        let crc = write(payload)?;
        // Version, flags, method, time and the first day that a zip can tell, CRC, sizes, length of the name.
        let about = [
            &[45, 0, 0, 0, 0, 0, 0, 0, 0x21, 0][..],
            &crc.to_le_bytes(),
            &[0xff; 8],
            &(name.len() as u16).to_le_bytes(),
        ]
        .concat();
        // torch fills up with a field of its own.
        let fields = [extra(*b"\x01\0", &sizes), extra(*b"FB", &vec![b'Z'; gap as usize])].concat();
        let fields_len = (fields.len() as u16).to_le_bytes();
        let header = [b"PK\x03\x04", &about[..], &fields_len, name.as_bytes(), &fields];
        self.file.write_all_at(&header.concat(), self.at)?;
        // No comment, the first disk, no attributes; the place is in the field, too.
        let fields = extra(*b"\x01\0", &[&sizes[..], &(self.at - self.start).to_le_bytes()].concat());
        let rest = [28, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
        self.directory.extend([b"PK\x01\x02\x2d\0", &about[..], &rest, name.as_bytes(), &fields].concat());
        self.records += 1;
        self.at = payload + len;
        Ok(())
    }

    /// Writes the directory; answers where the zip ends.
    fn end(self) -> Result<u64> {
        let (len, place) = (self.directory.len() as u64, self.at - self.start);
        let mut end = [self.directory, b"PK\x06\x06".to_vec(), 44u64.to_le_bytes().to_vec()].concat();
        end.extend([45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        [self.records, self.records, len, place].into_iter().for_each(|number| end.extend(number.to_le_bytes()));
        end.extend([b"PK\x06\x07\0\0\0\0", &(place + len).to_le_bytes()[..], &[1, 0, 0, 0]].concat());
        // All other numbers stand in the records before.
        end.extend([b"PK\x05\x06\0\0\0\0", &[0xff; 12][..], &[0, 0]].concat());
        self.file.write_all_at(&end, self.at)?;
        Ok(self.at + end.len() as u64)
    }
}

/// An extra field of a record.
fn extra(id: [u8; 2], bytes: &[u8]) -> Vec<u8> {
    [&id, &(bytes.len() as u16).to_le_bytes(), bytes].concat()
}
