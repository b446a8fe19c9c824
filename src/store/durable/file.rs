//! Open files whose I/O goes through a [`Device`].

use std::fs::{File, Metadata};
use std::io;

use super::{Attribute, CrashPoint, Io};
use formats::ReadAt;

/// An open file of a store. Reads and writes are complete: short or interrupted calls continue.
#[derive(Debug)]
pub struct DeviceFile {
    file: File,
    io: Io,
}

impl DeviceFile {
    pub(super) fn new(file: File, io: Io) -> DeviceFile {
        DeviceFile { file, io }
    }

    /// The kernel's file: for queries, locks and handing over, not for writes.
    pub fn as_file(&self) -> &File {
        &self.file
    }

    /// The kernel's file.
    pub fn into_file(self) -> File {
        self.file
    }

    /// Its metadata.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// Time of the last change of its name, attributes or bytes.
    pub fn changed(&self) -> io::Result<(i64, i64)> {
        self.io.device().changed(&self.file)
    }

    /// Writes all of `bytes` at `offset`. Not durable before [`DeviceFile::sync`].
    pub fn write_all_at(&self, mut bytes: &[u8], mut offset: u64, at: CrashPoint) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.io.device().write_at(&self.file, bytes, offset, at) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    bytes = &bytes[count..];
                    offset += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads exactly `buf.len()` bytes at `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` at the file's end; device errors.
    pub fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match self.read_full(buf, offset)? == buf.len() {
            true => Ok(()),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Reads at `offset` until `buf` is full or the file ends; returns the number of bytes.
    pub fn read_full(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            match self.io.device().read_at(&self.file, &mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Sets its length.
    pub fn set_len(&self, len: u64, at: CrashPoint) -> io::Result<()> {
        self.io.device().set_len(&self.file, len, at)
    }

    /// Changes an attribute.
    pub fn set(&self, attribute: &Attribute<'_>, at: CrashPoint) -> io::Result<()> {
        self.io.device().set_attribute(&self.file, attribute, at)
    }

    /// Begins to send its bytes to the device.
    pub fn begin_sync(&self) -> io::Result<()> {
        self.io.device().begin_sync(&self.file)
    }

    /// Makes its bytes and attributes durable.
    pub fn sync(&self, at: CrashPoint) -> io::Result<()> {
        self.io.sync_file(&self.file, at)
    }
}

impl ReadAt for DeviceFile {
    fn size(&self) -> u64 {
        self.file.metadata().map_or(0, |metadata| metadata.len())
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        DeviceFile::read_exact_at(self, buf, offset)
    }
}
