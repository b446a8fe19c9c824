//! Writes an object in `tmp/`.

use std::io;
use std::path::{Path, PathBuf};

use super::{Footer, HEADER_BYTES, Header, Id, Index, Object, Tile};
use crate::store::beneath;
use crate::store::durable::{CrashPoint, DeviceFile, Io, forget_pages, parent};
use codec::hash::xxh3_64;

/// zstd level for the index: it is small, and read as a whole at every open.
const INDEX_LEVEL: i32 = 3;

/// The crash points of writing an object.
#[derive(Clone, Copy)]
struct Steps {
    written: CrashPoint,
    completed: CrashPoint,
    in_place: CrashPoint,
}

const NEW: Steps = Steps {
    written: CrashPoint::ObjectWritten,
    completed: CrashPoint::ObjectCompleted,
    in_place: CrashPoint::ObjectInPlace,
};
const AGAIN: Steps = Steps {
    written: CrashPoint::MergeWritten,
    completed: CrashPoint::MergeCompleted,
    in_place: CrashPoint::MergeInPlace,
};

const REPAIRED: Steps = Steps {
    written: CrashPoint::RepairWritten,
    completed: CrashPoint::RepairWritten,
    in_place: CrashPoint::RepairInPlace,
};

/// An object under construction. If dropped before [`ObjectWriter::finish`], it leaves nothing.
pub struct ObjectWriter {
    io: Io,
    path: PathBuf,
    file: DeviceFile,
    id: Id,
    steps: Steps,
    end: u64,
    finished: bool,
}

impl ObjectWriter {
    /// Starts an object in the directory `tmp`.
    pub fn create(tmp: &Path) -> io::Result<ObjectWriter> {
        ObjectWriter::create_on(&Io::disk(), tmp)
    }

    /// [`ObjectWriter::create`] on another device than the disk.
    pub fn create_on(io: &Io, tmp: &Path) -> io::Result<ObjectWriter> {
        ObjectWriter::begin(io, tmp, Id::random()?, NEW)
    }

    /// Starts another encoding of an existing object. It decodes to the same bytes, and takes the object's name when
    /// finished.
    pub fn rewrite(io: &Io, tmp: &Path, id: Id) -> io::Result<ObjectWriter> {
        ObjectWriter::begin(io, tmp, id, AGAIN)
    }

    /// [`ObjectWriter::rewrite`] for a damaged object. Removes the file of an earlier attempt from `tmp`.
    pub fn repair_on(io: &Io, tmp: &Path, id: Id) -> io::Result<ObjectWriter> {
        io.remove(&in_tmp(tmp, id), REPAIRED.written)?;
        ObjectWriter::begin(io, tmp, id, REPAIRED)
    }

    fn begin(io: &Io, tmp: &Path, id: Id, steps: Steps) -> io::Result<ObjectWriter> {
        let path = in_tmp(tmp, id);
        let file = io.create(&path, steps.written)?;
        Ok(ObjectWriter { io: io.clone(), path, file, id, steps, end: HEADER_BYTES as u64, finished: false })
    }

    /// The new object's id.
    pub fn id(&self) -> Id {
        self.id
    }

    /// Offset of the next payload.
    pub fn position(&self) -> u64 {
        self.end
    }

    /// Length of the object's file, once closed.
    pub fn file_len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Discards the payloads after position `to`.
    pub fn rewind(&mut self, to: u64) {
        self.end = to.clamp(HEADER_BYTES as u64, self.end);
    }

    /// Appends the payload of one tile. `decoded_hash` is the xxh3-64 of its decoded bytes.
    pub fn put(&mut self, payload: &[u8], decoded_hash: u64) -> io::Result<Tile> {
        let stored = u32::try_from(payload.len()).map_err(io::Error::other)?;
        self.file.write_all_at(payload, self.end, self.steps.written)?;
        let tile = Tile { offset: self.end, stored, payload_hash: xxh3_64(payload) as u32, decoded_hash };
        self.end += u64::from(stored);
        Ok(tile)
    }

    /// Writes index and footer, makes them durable, and reads them back from the device. The header does not exist yet:
    /// a crash here leaves a file that is no object.
    pub fn close(&mut self, index: &Index) -> io::Result<()> {
        let bytes = index.encode();
        let stored = zstd::bulk::compress(&bytes, INDEX_LEVEL)?;
        let footer = Footer {
            index_offset: self.end,
            index_stored: stored.len() as u64,
            index_len: bytes.len() as u64,
            index_hash: xxh3_64(&stored),
            id: self.id,
        };
        // Discarded payloads may reach further.
        self.file.set_len(self.end, self.steps.written)?;
        self.file.write_all_at(&stored, self.end, self.steps.written)?;
        self.file.write_all_at(&footer.encode(), self.end + stored.len() as u64, self.steps.written)?;
        self.file.sync(self.steps.written)?;
        forget_pages(self.file.as_file());
        Ok(())
    }

    /// Opens the closed object as a reader does, with its future header.
    ///
    /// # Errors
    /// `InvalidData` if it is already damaged.
    pub fn reopen(&self, header: Header) -> io::Result<Object> {
        Object::with_header(self.io.open(&self.path)?, header)
    }

    /// Writes the header and makes it durable, then gives the object its name in `objects`: from here on it exists. One
    /// rename replaces an earlier encoding of that name: *a crash here leaves one or the other.*
    pub fn finish(mut self, header: &Header, objects: &Path) -> io::Result<()> {
        self.file.write_all_at(&header.encode(), 0, self.steps.completed)?;
        self.file.sync(self.steps.completed)?;
        let target = super::reader::path_of(objects, self.id);
        let shard = parent(&target);
        // Also sync an existing shard: its creator may have been killed before its name was durable. An existing object
        // proves that its shard is durable.
        if !target.exists() {
            self.io.make_dirs(shard, 0o700, CrashPoint::ShardMade)?;
            self.io.sync_dir(objects, CrashPoint::ShardMade)?;
        }
        // Never through a symlink.
        let name = Path::new(shard.file_name().unwrap_or_default());
        beneath::open(objects, name, libc::O_PATH | libc::O_DIRECTORY)?;
        self.io.publish(&self.path, &target, self.steps.in_place).inspect_err(|_| {
            // It may already have its name, and nobody will use it. If it is another encoding, it is as good as the one
            // before.
            if self.steps.in_place == NEW.in_place {
                self.io.discard(&target, self.steps.in_place);
            }
        })?;
        self.finished = true;
        Ok(())
    }
}

/// Path of an object while it is written.
fn in_tmp(tmp: &Path, id: Id) -> PathBuf {
    tmp.join(format!("object-{id}"))
}

impl Drop for ObjectWriter {
    fn drop(&mut self) {
        if !self.finished {
            self.io.discard(&self.path, self.steps.written);
        }
    }
}
