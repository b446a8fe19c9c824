//! The files of one version for another number of parameter servers.
//!
//! ElasticDL's checkpoint design, "Restore Model Parameters from a Checkpoint". Each server takes the variables whose
//! names hash to it. Of each embedding table it takes the rows whose id, modulo the number of servers, is its number.
//! The version and the tables' descriptions are in every file.

use std::collections::HashMap;
use std::io;
use std::ops::Range;

use super::super::ReadAt;
use super::super::protobuf::{put_head, put_number};
use super::super::read::Fail;
use super::message::{self, Model, Slices};
use super::shard_of;
use codec::entropy::varint;

/// Longest message that implementations of Protocol Buffers read.
const MAX_FILE: u64 = i32::MAX as u64;
/// Bytes handed on at once.
const PIECE: usize = 1 << 20;

/// A file of the version that there is.
pub struct Source<'a> {
    /// For people.
    pub name: String,
    /// Its bytes, which must not change meanwhile.
    pub file: &'a dyn ReadAt,
}

/// The content of each file. Memory: some 12 bytes per row, 40 while it is made, and some hundred per variable and
/// file; no values.
pub struct Reshard<'a> {
    sources: &'a [Source<'a>],
    /// The version of the model.
    pub version: u64,
    /// Number of variables that are on one server as a whole.
    pub variables: usize,
    /// Number of embedding tables.
    pub tables: usize,
    /// Number of their rows.
    pub rows: u64,
    files: Vec<Vec<Part>>,
}

/// A part of a file.
enum Part {
    Bytes(Vec<u8>),
    /// Bytes of a source.
    Copy {
        source: usize,
        range: Range<u64>,
    },
    /// Rows of a table of a source, which begins at `from`.
    Rows {
        source: usize,
        from: u64,
        row: u64,
        numbers: Vec<u32>,
    },
}

impl Part {
    fn len(&self) -> u64 {
        match self {
            Part::Bytes(bytes) => bytes.len() as u64,
            Part::Copy { range, .. } => range.end - range.start,
            Part::Rows { row, numbers, .. } => row * numbers.len() as u64,
        }
    }
}

/// The files are not those of one version.
fn refuse<T>(why: String) -> io::Result<T> {
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

/// An error that names the file which cannot be read.
fn failed(source: &Source, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", source.name))
}

impl<'a> Reshard<'a> {
    /// Reads the files, all of one version, and shares their content out among `count` files. `count` is not 0.
    ///
    /// # Errors
    /// They name the files: one that is no model, another version, a duplicate or a contradiction, a negative
    /// id, an unreadable file.
    pub fn new(sources: &'a [Source<'a>], count: u32) -> io::Result<Reshard<'a>> {
        let models: Vec<Model> = sources.iter().map(read).collect::<Result<_, _>>()?;
        let version = models.first().map_or(0, |model| model.version);
        for (model, source) in models.iter().zip(sources) {
            if model.version != version {
                let (first, name) = (&sources[0].name, &source.name);
                let (ours, theirs) = (version, model.version);
                return refuse(format!(
                    "{first} is of version {ours} and {name} of version {theirs}: not one checkpoint"
                ));
            }
        }
        let mut start = Vec::new();
        put_number(1, version, &mut start);
        let mut files: Vec<Vec<Part>> = (0..count).map(|_| vec![Part::Bytes(start.clone())]).collect();
        infos(sources, &models, &mut files)?;
        let variables = variables(sources, &models, &mut files)?;
        let (tables, rows) = tables(sources, &models, &mut files)?;
        let reshard = Reshard { sources, version, variables, tables, rows, files };
        match (0..count).find(|index| reshard.size(*index) > MAX_FILE) {
            Some(_) => {
                refuse(format!("a file for {count} servers would have 2 GiB, more than Protocol Buffers can read"))
            }
            None => Ok(reshard),
        }
    }

    /// Length of a file in bytes.
    pub fn size(&self, index: u32) -> u64 {
        self.files[index as usize].iter().map(Part::len).sum()
    }

    /// Hands the bytes of a file to `sink`, one piece after the other.
    ///
    /// # Errors
    /// Those of a source and of `sink`.
    pub fn write(&self, index: u32, sink: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        for part in &self.files[index as usize] {
            match part {
                Part::Bytes(bytes) => sink(bytes)?,
                Part::Copy { source, range } => self.copy(*source, range.clone(), sink)?,
                Part::Rows { source, from, row, numbers } => {
                    let mut rest = numbers.as_slice();
                    while let [first, ..] = rest {
                        // Rows that stay together are read at once.
                        let together =
                            rest.iter().zip(u64::from(*first)..).take_while(|(at, next)| u64::from(**at) == *next);
                        let count = together.count();
                        let start = from + u64::from(*first) * row;
                        self.copy(*source, start..start + count as u64 * row, sink)?;
                        rest = &rest[count..];
                    }
                }
            }
        }
        Ok(())
    }

    fn copy(&self, source: usize, range: Range<u64>, sink: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let mut buf = vec![0; (range.end - range.start).min(PIECE as u64) as usize];
        let mut at = range.start;
        while at < range.end {
            let take = (range.end - at).min(PIECE as u64) as usize;
            self.sources[source].file.read_exact_at(&mut buf[..take], at)?;
            sink(&buf[..take])?;
            at += take as u64;
        }
        Ok(())
    }
}

fn read(source: &Source) -> io::Result<Model> {
    let size = source.file.size();
    match message::read(source.file, size) {
        // A server that has nothing writes a version and no more, or not even that.
        Ok(model) => Ok(model),
        Err(Fail::Bad(why) | Fail::CutShort(why)) => {
            refuse(format!("{} is no model as ElasticDL writes it: {why}", source.name))
        }
        Err(Fail::Io(error)) => Err(failed(source, error)),
    }
}

/// The tables' descriptions go into every file.
fn infos(sources: &[Source], models: &[Model], files: &mut [Vec<Part>]) -> io::Result<()> {
    let mut known: HashMap<&str, (usize, Vec<u8>)> = HashMap::new();
    for (at, (source, model)) in sources.iter().zip(models).enumerate() {
        for info in &model.infos {
            let mut message = vec![0; (info.message.end - info.message.start) as usize];
            source.file.read_exact_at(&mut message, info.message.start).map_err(|error| failed(source, error))?;
            if let Some((first, same)) = known.get(info.name.as_str()) {
                if *same != message {
                    let first = &sources[*first].name;
                    return refuse(format!(
                        "embedding table {} is not the same in {first} and {}",
                        info.name, source.name
                    ));
                }
                continue;
            }
            let mut head = Vec::new();
            put_head(2, message.len() as u64, &mut head);
            for file in files.iter_mut() {
                file.push(Part::Bytes(head.clone()));
                file.push(Part::Copy { source: at, range: info.message.clone() });
            }
            known.insert(&info.name, (at, message));
        }
    }
    Ok(())
}

/// Variables go where their names say.
fn variables(sources: &[Source], models: &[Model], files: &mut [Vec<Part>]) -> io::Result<usize> {
    let mut known: HashMap<&str, usize> = HashMap::new();
    for (source, model) in models.iter().enumerate() {
        for dense in &model.dense {
            if let Some(first) = known.insert(&dense.name, source) {
                let (first, second) = (&sources[first].name, &sources[source].name);
                return refuse(format!("variable {} is both in {first} and in {second}", dense.name));
            }
            let file = &mut files[shard_of(&dense.name, files.len() as u32) as usize];
            let mut head = Vec::new();
            put_head(3, dense.message.end - dense.message.start, &mut head);
            file.push(Part::Bytes(head));
            file.push(Part::Copy { source, range: dense.message.clone() });
        }
    }
    Ok(known.len())
}

/// Rows go where their ids say. A table of which a server has no row is not in its file. Number of tables and of rows.
fn tables(sources: &[Source], models: &[Model], files: &mut [Vec<Part>]) -> io::Result<(usize, u64)> {
    let mut names: Vec<&str> = Vec::new();
    let mut pieces: HashMap<&str, Vec<(usize, &Slices)>> = HashMap::new();
    for (source, model) in models.iter().enumerate() {
        for table in &model.tables {
            let list = pieces.entry(&table.name).or_default();
            if list.is_empty() {
                names.push(&table.name);
            }
            list.push((source, table));
        }
    }
    let mut rows = 0;
    for name in &names {
        let mut list = pieces.remove(name).unwrap_or_default();
        // A table without rows does not tell their length.
        list.retain(|(_, table)| !table.ids.is_empty());
        rows += table(sources, &list, files)?;
    }
    Ok((names.len(), rows))
}

fn table(sources: &[Source], pieces: &[(usize, &Slices)], files: &mut [Vec<Part>]) -> io::Result<u64> {
    let Some((first, like)) = pieces.first().copied() else { return Ok(0) };
    let name = &like.name;
    let mut ids: Vec<(u64, usize)> = Vec::new();
    for (source, table) in pieces {
        if (table.array.dtype, &table.array.dims[1..]) != (like.array.dtype, &like.array.dims[1..]) {
            let (first, second) = (&sources[first].name, &sources[*source].name);
            return refuse(format!("embedding table {name} has other rows in {first} than in {second}"));
        }
        ids.extend(table.ids.iter().map(|id| (*id, *source)));
    }
    ids.sort_unstable();
    if let Some(twins) = ids.windows(2).find(|w| w[0].0 == w[1].0) {
        let [first, second] = [twins[0].1, twins[1].1].map(|source| &sources[source].name);
        return refuse(format!("row {} of embedding table {name} is both in {first} and in {second}", twins[0].0));
    }
    let count = ids.len() as u64;
    drop(ids);
    let servers = files.len() as u64;
    let mut ids: Vec<Vec<u8>> = vec![Vec::new(); files.len()];
    let mut rows = vec![0u64; files.len()];
    let mut parts: Vec<Vec<Part>> = (0..files.len()).map(|_| Vec::new()).collect();
    for (source, table) in pieces {
        let mut numbers: Vec<Vec<u32>> = vec![Vec::new(); files.len()];
        for (number, id) in (0..).zip(&table.ids) {
            let server = (id % servers) as usize;
            varint::put(*id, &mut ids[server]);
            numbers[server].push(number);
            rows[server] += 1;
        }
        let (from, row) = (table.array.content.start, table.row());
        for (part, numbers) in parts.iter_mut().zip(numbers).filter(|(_, numbers)| !numbers.is_empty()) {
            part.push(Part::Rows { source: *source, from, row, numbers });
        }
    }
    for (server, (file, content)) in files.iter_mut().zip(parts).enumerate() {
        if !content.is_empty() {
            put_table(like, rows[server], &ids[server], content, file);
        }
    }
    Ok(count)
}

/// Appends a table's entry, whose values are `content`.
fn put_table(like: &Slices, rows: u64, ids: &[u8], content: Vec<Part>, file: &mut Vec<Part>) {
    let mut dims = Vec::new();
    for dim in [rows].iter().chain(&like.array.dims[1..]) {
        let mut size = Vec::new();
        put_number(1, *dim, &mut size);
        put_head(2, size.len() as u64, &mut dims);
        dims.extend(size);
    }
    let content_len: u64 = content.iter().map(Part::len).sum();
    let mut array = Vec::new();
    put_number(1, like.array.dtype, &mut array);
    put_head(2, dims.len() as u64, &mut array);
    array.extend(dims);
    put_number(3, like.array.version, &mut array);
    if content_len > 0 {
        put_head(4, content_len, &mut array);
    }
    let mut tail = Vec::new();
    put_head(2, ids.len() as u64, &mut tail);
    tail.extend_from_slice(ids);
    // From the inside to the outside: each head has the length of its content.
    let mut head = Vec::new();
    put_head(1, array.len() as u64 + content_len, &mut head);
    head.extend(array);
    let slices = head.len() as u64 + content_len + tail.len() as u64;
    let mut entry = Vec::new();
    put_head(1, like.name.len() as u64, &mut entry);
    entry.extend_from_slice(like.name.as_bytes());
    put_head(2, slices, &mut entry);
    let mut start = Vec::new();
    put_head(4, entry.len() as u64 + slices, &mut start);
    start.extend(entry);
    start.extend(head);
    file.push(Part::Bytes(start));
    file.extend(content);
    file.push(Part::Bytes(tail));
}

#[cfg(test)]
mod tests;
