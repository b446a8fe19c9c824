//! Where bytes that an object lost still are: each is known by the 64 bits of hash that the object has of it.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use crate::codec::TILE_BYTES;
use crate::container::{InOrder, ReadAt, describe};
use crate::hash::xxh3_64;
use crate::recall::{Chain, walk};
use crate::store::object::{Header, Index};
use crate::store::{Id, Objects, Store};

use super::damaged_object::{Part, open_plain, parts};

/// Where a part's decoded bytes are.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// Another object.
    Object(Id),
    /// At the same place of a file of the tree that is not released.
    File(PathBuf),
}

/// Objects and files that may hold lost bytes.
pub(super) struct Sources<'a> {
    store: &'a Store,
    objects: &'a Objects,
    /// By hash of the decoded bytes.
    parts: HashMap<u64, Vec<(Id, Part)>>,
    /// Files that are not released, by length.
    resident: HashMap<u64, Vec<PathBuf>>,
}

impl<'a> Sources<'a> {
    /// Looks for everything that decodes to one of these hashes.
    pub(super) fn of(
        store: &'a Store,
        objects: &'a Objects,
        wanted: &HashSet<u64>,
        resident: &[PathBuf],
    ) -> Sources<'a> {
        let mut sources = Sources { store, objects, parts: HashMap::new(), resident: HashMap::new() };
        if wanted.is_empty() {
            return sources;
        }
        for header in objects.all() {
            let Ok(object) = objects.open(header.id) else { continue };
            for part in parts(object.index()).into_iter().filter(|part| !matches!(part, Part::Factors(_))) {
                if let Some(tile) = part.of(object.index()).filter(|tile| wanted.contains(&tile.decoded_hash)) {
                    sources.parts.entry(tile.decoded_hash).or_default().push((header.id, part));
                }
            }
        }
        for path in resident {
            if let Ok(metadata) = std::fs::symlink_metadata(store.tree().join(path)) {
                sources.resident.entry(metadata.len()).or_default().push(path.clone());
            }
        }
        sources
    }

    /// The decoded bytes of a part of an object, and who has them.
    pub(super) fn find(&self, header: &Header, index: &Index, part: Part) -> Option<(Source, Vec<u8>)> {
        let hash = part.of(index)?.decoded_hash;
        if let Part::Factors(_) = part {
            return None;
        }
        for (id, other) in self.parts.get(&hash).into_iter().flatten() {
            if *id == header.id && *other == part {
                continue;
            }
            if let Ok(bytes) = self.decoded(*id, *other) {
                return Some((Source::Object(*id), bytes));
            }
        }
        for path in self.resident.get(&header.logical_len).into_iter().flatten() {
            match self.in_file(path, header, index, part) {
                Ok(bytes) if xxh3_64(&bytes) == hash => return Some((Source::File(path.clone()), bytes)),
                _ => {}
            }
        }
        None
    }

    /// The file of the tree, not released, that has these very bytes.
    pub(super) fn whole(&self, resident: &[PathBuf], header: &Header) -> Option<PathBuf> {
        let same = |path: &&PathBuf| self.is_whole(path, header).unwrap_or(false);
        resident.iter().find(same).cloned()
    }

    fn is_whole(&self, path: &Path, header: &Header) -> io::Result<bool> {
        let file = open_plain(self.store.io(), &self.store.tree().join(path))?;
        if file.metadata()?.len() != header.logical_len {
            return Ok(false);
        }
        let description = describe(&file)?;
        Ok(super::super::scan::hash(&InOrder::new(&file, &description), header.logical_len)? == header.decoded_hash)
    }

    fn decoded(&self, id: Id, part: Part) -> io::Result<Vec<u8>> {
        let chain = Chain::open(self.objects, id)?;
        Ok(match part {
            Part::Tile(tensor, number) => walk::decode(&chain, tensor, number)?.to_vec(),
            Part::Chunk(chunk) => walk::skeleton(chain.leaf(), chunk)?,
            Part::Factors(_) => return Err(io::ErrorKind::InvalidInput.into()),
        })
    }

    fn in_file(&self, path: &Path, header: &Header, index: &Index, part: Part) -> io::Result<Vec<u8>> {
        let file = open_plain(self.store.io(), &self.store.tree().join(path))?;
        let description = describe(&file)?;
        in_source(&InOrder::new(&file, &description), header, index, part)
    }
}

/// The bytes of a file at the place of a part, as if the file were archived as this object.
pub(super) fn in_source(file: &dyn ReadAt, header: &Header, index: &Index, part: Part) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut take = |from: u64, to: u64| -> io::Result<()> {
        let at = bytes.len();
        bytes.resize(at + (to - from) as usize, 0);
        file.read_exact_at(&mut bytes[at..], from)
    };
    match part {
        Part::Tile(tensor, number) => {
            let extent = &index.tensors[tensor].extent;
            let from = extent.start + (number * TILE_BYTES) as u64;
            take(from, extent.end.min(from + TILE_BYTES as u64))?;
        }
        Part::Chunk(chunk) => {
            let (first, last) = ((chunk * TILE_BYTES) as u64, ((chunk + 1) * TILE_BYTES) as u64);
            let mut passed = 0;
            for gap in index.gaps(header.logical_len) {
                let length = gap.end - gap.start;
                let (from, to) = (first.clamp(passed, passed + length), last.clamp(passed, passed + length));
                take(gap.start + from - passed, gap.start + to - passed)?;
                passed += length;
            }
        }
        Part::Factors(_) => return Err(io::ErrorKind::InvalidInput.into()),
    }
    Ok(bytes)
}
