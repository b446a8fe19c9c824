//! Where an object, or bytes that it lost, may still be. Its hashes recognize them.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::mirror::tree::Encoding;
use crate::mirror::{self, Reader};
use crate::recall::{Chain, walk};
use crate::store::object::{Header, Index, Object, path_of};
use crate::store::{Id, Objects, Store};
use crate::tile::Bytes;
use codec::TILE_BYTES;
use codec::hash::xxh3_64;
use formats::{InOrder, ReadAt, describe};

use super::super::scan;
use super::remains::{Part, Remains, open_plain, read_header};

/// Objects, files of the tree and a mirror that may hold lost bytes.
pub(super) struct Sources<'a> {
    store: &'a Store,
    objects: &'a Objects,
    /// Parts of objects, by the hash of their decoded bytes.
    parts: HashMap<u64, Vec<(Id, Part)>>,
    /// Files that are not released, by length.
    files: HashMap<u64, Vec<PathBuf>>,
    /// Objects under other names than their own.
    astray: HashMap<Id, Vec<PathBuf>>,
    /// Opened when it is asked for. `None`: there is none, or it does not answer.
    mirror: OnceCell<Option<Reader>>,
}

impl<'a> Sources<'a> {
    /// Files that are not released, and a mirror; the others are to be added.
    pub(super) fn of(store: &'a Store, objects: &'a Objects, resident: &[PathBuf]) -> Sources<'a> {
        let (parts, astray, mirror) = Default::default();
        let mut files: HashMap<u64, Vec<PathBuf>> = HashMap::new();
        for path in resident {
            if let Ok(metadata) = std::fs::symlink_metadata(store.tree().join(path)) {
                files.entry(metadata.len()).or_default().push(path.clone());
            }
        }
        Sources { store, objects, parts, files, astray, mirror }
    }

    /// Adds the object at a path, if it is not the place of its own name.
    pub(super) fn add_stray(&mut self, path: PathBuf) {
        let header = open_plain(self.store.io(), &path).and_then(|file| read_header(&file));
        if let Ok(Header { id, .. }) = header
            && path != path_of(&self.store.objects(), id)
        {
            self.astray.entry(id).or_default().push(path);
        }
    }

    /// Adds all parts of objects that decode to one of these hashes.
    pub(super) fn add_parts(&mut self, wanted: &HashSet<u64>) {
        let others = self.objects.all().into_iter().filter(|_| !wanted.is_empty());
        for object in others.filter_map(|header| self.objects.open(header.id).ok()) {
            for part in Part::all(object.index()) {
                if let Some(tile) = part.of(object.index()).filter(|tile| wanted.contains(&tile.decoded_hash)) {
                    self.parts.entry(tile.decoded_hash).or_default().push((object.header().id, part));
                }
            }
        }
    }

    /// The decoded bytes of a part of an object, and who has them.
    pub(super) fn find(&self, object: &Object, part: Part) -> Option<(String, Bytes)> {
        let (header, hash) = (object.header(), part.of(object.index())?.decoded_hash);
        let others = self.parts.get(&hash).into_iter().flatten().filter(|other| **other != (header.id, part));
        let in_object = |(id, part): &(Id, Part)| Some((format!("object {id}"), self.decoded(*id, *part).ok()?));
        let in_file = |path: &PathBuf| {
            let bytes = self.in_file(path, header.logical_len, object.index(), part).ok()?;
            (xxh3_64(&bytes) == hash).then(|| (path.display().to_string(), bytes))
        };
        let mut others = others.filter_map(in_object);
        others.next().or_else(|| self.files_of(header.logical_len).find_map(in_file))
    }

    /// The file of the tree that has the very bytes of an object, as a path inside the tree.
    pub(super) fn file_with(&self, header: &Header) -> Option<&Path> {
        let hash = |path: &Path| -> io::Result<u128> {
            let file = open_plain(self.store.io(), &self.store.tree().join(path))?;
            scan::hash(&InOrder::new(&file, &describe(&file)?), header.logical_len)
        };
        let same = |path: &&PathBuf| hash(path).is_ok_and(|hash| hash == header.decoded_hash);
        self.files_of(header.logical_len).find(same).map(PathBuf::as_path)
    }

    /// The object in a file with another name, and that file.
    pub(super) fn astray(&self, id: Id) -> Option<(&Path, Arc<Object>)> {
        let paths = self.astray.get(&id)?.iter();
        let mut whole = paths.filter_map(|path| {
            // Another one may have got its own name back from there since it was looked at.
            let remains = Remains::at(self.store.io(), path).ok().filter(|remains| remains.is_whole(id))?;
            Some((path.as_path(), Arc::clone(remains.object()?)))
        });
        whole.next()
    }

    /// An object on the mirror.
    pub(super) fn on_mirror(&self, id: Id) -> Option<&Encoding> {
        self.mirror()?.tree.objects.get(&id)
    }

    /// Brings an object from the mirror into a file without a name.
    pub(super) fn bring(&self, encoding: &Encoding) -> io::Result<Arc<Object>> {
        let mirror = self.mirror().ok_or(io::ErrorKind::NotFound)?;
        // A mirror that fails is no reason to repair nothing.
        let file =
            mirror.fetch_aside(encoding).map_err(|error| io::Error::new(io::ErrorKind::NotFound, error.to_string()))?;
        Ok(Arc::new(Object::of_bytes(Box::new(file), encoding.id)?))
    }

    fn mirror(&self) -> Option<&Reader> {
        let opened = self.mirror.get_or_init(|| {
            let url = &self.store.settings().mirror.as_ref()?.url;
            let open = || Reader::open(&mirror::open(url)?, None, Path::new(""));
            open().inspect_err(|error| log::warn!("{url}: {error}; the store is repaired without it")).ok()
        });
        opened.as_ref()
    }

    fn files_of(&self, len: u64) -> impl Iterator<Item = &PathBuf> {
        self.files.get(&len).into_iter().flatten()
    }

    fn decoded(&self, id: Id, part: Part) -> io::Result<Bytes> {
        let chain = Chain::open(self.objects, id)?;
        Ok(match part {
            Part::Tile(tensor, number) => walk::decode(&chain, tensor, number)?,
            Part::Chunk(chunk) => walk::skeleton(chain.leaf(), chunk)?.into(),
        })
    }

    fn in_file(&self, path: &Path, len: u64, index: &Index, part: Part) -> io::Result<Bytes> {
        let file = open_plain(self.store.io(), &self.store.tree().join(path))?;
        in_source(&InOrder::new(&file, &describe(&file)?), len, index, part)
    }
}

/// The bytes of a file at the place of a part, as if the file were archived as this object.
pub(super) fn in_source(file: &dyn ReadAt, len: u64, index: &Index, part: Part) -> io::Result<Bytes> {
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
            for gap in index.gaps(len) {
                let length = gap.end - gap.start;
                let (from, to) = (first.clamp(passed, passed + length), last.clamp(passed, passed + length));
                take(gap.start + from - passed, gap.start + to - passed)?;
                passed += length;
            }
        }
    }
    Ok(bytes.into())
}
