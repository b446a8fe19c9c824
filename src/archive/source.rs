//! The bytes of any file of the tree, for a reader of containers.

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::recall::Reader;
use crate::store::durable::DeviceFile;
use formats::ReadAt;

use super::Archive;
use super::catalog::State;

/// A file of the tree.
pub(super) enum Source {
    /// Its bytes are in the tree.
    Resident(DeviceFile),
    /// Its bytes come from an object. Only the parts that are read are decoded.
    Released(Arc<Reader>),
}

impl Archive {
    /// Opens the file at `path` in the tree.
    ///
    /// # Errors
    /// `NotFound` if no regular file is there; the device's errors; an object that cannot be decoded.
    pub(super) fn source(&self, path: &Path) -> io::Result<Source> {
        let released = match self.catalog().get(path).map(|entry| &entry.state) {
            Some(State::Released(object)) => Some(*object),
            _ => None,
        };
        Ok(match released {
            // `other`: a damaged object must not pass for a file that says nothing.
            Some(object) => Source::Released(self.recall.reader(object).map_err(io::Error::other)?),
            None => Source::Resident(self.open_file(path)?),
        })
    }
}

impl ReadAt for Source {
    fn size(&self) -> u64 {
        match self {
            Source::Resident(file) => ReadAt::size(file),
            Source::Released(reader) => reader.len(),
        }
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Source::Resident(file) => ReadAt::read_exact_at(file, buf, offset),
            Source::Released(reader) => match reader.read_at(offset, buf)? {
                read if read == buf.len() => Ok(()),
                _ => Err(io::ErrorKind::UnexpectedEof.into()),
            },
        }
    }
}
